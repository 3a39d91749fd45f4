"""Writes runs at step 0.

A run exists once its configuration is written. Weights that are not drawn from the seed must be
saved before that: a run without a checkpoint begins from random weights.
"""

from dataclasses import asdict

import torch

from gptmini.config.settings import Config
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.tensors import Tensors
from gptmini.tokenizer.tokenizers import Tokenizer
from gptmini.train.checkpoint import save_checkpoint
from gptmini.train.state import Progress, Training


def create_run(training: Training) -> None:
    """Write a new run whose weights follow from its seed, without a checkpoint."""
    run = training.run
    tokenizer = training.corpus.tokenizer
    training.group.on_rank_zero(lambda: run.create(training.config, tokenizer))


def create_run_with_weights(training: Training) -> None:
    """Write a new run that begins from other weights: a checkpoint, then the run."""
    run = training.run
    training.group.on_rank_zero(lambda: run.checkpoints.mkdir(parents=True, exist_ok=True))
    save_checkpoint(training)
    create_run(training)


def write_run(run: RunDirectory, config: Config, weights: Tensors, tokenizer: Tokenizer) -> None:
    """Write a run with weights that were trained elsewhere, and on no text of ours.

    A kill may leave half of it, so callers write to a directory that gets its name at the end.
    """
    progress = Progress(
        corpus="",
        tokenizer=tokenizer.fingerprint,
        torch=str(torch.__version__),
        threads=1,
        device="cpu",
        dtype="float32",
        compile="off",
    )
    run.create(config, tokenizer)
    run.check_space(sum(tensor.nbytes for tensor in weights.values()))
    run.save(Checkpoint(asdict(progress), weights, {}))
