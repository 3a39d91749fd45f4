"""Evaluates a trained run on its held-out text or on another text."""

import lzma
import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from gptmini.console import iter_with_progress, warn
from gptmini.data.corpus import has_same_text, prepare_corpus, prepare_text
from gptmini.data.formats import STORIES
from gptmini.data.hub import list_some
from gptmini.data.token_file import Corpus, TokenFile
from gptmini.errors import CheckpointError, DataError
from gptmini.generate.run import Run, load_run
from gptmini.machine import Compute, keep_freed_memory, pick_device
from gptmini.runs.directory import RunDirectory
from gptmini.runs.progress import describe_changed_text
from gptmini.tokenizer.tokenizers import Tokenizer
from gptmini.train.batches import iter_validation_batches
from gptmini.train.evaluate import Evaluation, evaluate
from gptmini.train.kept_losses import Split, read_losses, write_losses
from gptmini.train.rules import measure_rules

MAX_COMPRESSED_BYTES = 5_000_000  # of the text to train on; xz takes a second for each million
MAX_COMPRESSED_TOKENS = MAX_COMPRESSED_BYTES  # a token has a byte at least
PPMD_ORDERS = (6, 32)  # bytes of context: best for prose, and for texts that repeat themselves
PPMD_MEMORY = 1 << 28


def evaluate_text(
    run: Run | str | Path,
    data: str | Path | list[str] | None = None,
    split: Split = "validation",
    stride: int | None = None,
) -> Evaluation:
    """Evaluate a run on its held-out text, or on all of the text in `data`; `gptmini.evaluate`.

        gptmini.evaluate("runs/my", "other.txt").bits_per_byte

    A path is loaded in float32; a loaded run is evaluated as it is. `split` is the held-out part,
    "validation" or "test". Windows are as long as in training, and `stride` tokens apart, by
    default side by side. Losses of its own text are kept in its directory, for `compare`, unless
    they are there. Raises DataError for a text that cannot be read or has changed since training.
    """
    if not isinstance(run, Run):
        run = load_run(run, pick_device("auto").type, "float32")
    if data is None:
        return evaluate_held_out(run, load_corpus(run, split), split, stride=stride)
    paths = [str(data)] if isinstance(data, str | Path) else data
    return evaluate_run(run, load_text(run, paths), stride=stride)


def load_text(run: Run, data: list[str]) -> list[TokenFile]:
    """Return all of the text in `data` as a run's tokens; warn if the run was trained on it."""
    settings = run.config.data.model_copy(update={"path": data})
    tokens = prepare_text(settings, run.tokenizer)
    if has_same_text(run.config.data, run.corpus, data):
        known = f"{list_some(data)}: {run.path} was trained on it"
        warn(f"{known}, so this looks better than it is; give a text that it has not read")
    return [tokens]


def load_corpus(run: Run, split: Split = "validation") -> Corpus:
    """Return the text of a run; DataError if it has changed since training, or lacks the part."""
    if "-" in run.config.data.path:
        raise DataError(
            f"{run.path}: was trained on standard input, which is gone; give a text with --data"
        )
    if not run.corpus:
        raise DataError(f"{run.path}: no training text on record; give a text with --data")
    if split == "test" and run.config.data.test is None:
        raise DataError(f"{run.path}: has no test part; train a new run with --set data.test=0.05")
    # The run's own tokenizer cuts the text, however the run came by it.
    corpus = prepare_corpus(run.config, split == "test", run.tokenizer)
    if corpus.content != run.corpus:
        remedy = "restore it, or give a text that it has not read with --data"
        raise DataError(describe_changed_text(run.config.data.path, run.path, remedy))
    return corpus


def get_held_out(corpus: Corpus, split: Split) -> list[TokenFile]:
    """Return the files of a held-out part."""
    return corpus.test if split == "test" else corpus.validation


def measure_compressors(corpus: Corpus, split: Split = "validation") -> dict[str, float]:
    """Measure the bits per byte of compressors on a held-out part, after the training part.

    They are a scale for a model's own figure: they show how much of the part repeats what was
    trained on. xz is there always, PPMd where pyppmd is installed; neither where it would take
    long.
    """
    if sum(map(len, corpus.training)) > MAX_COMPRESSED_TOKENS:
        return {}
    training = read_bytes(corpus.training, corpus.tokenizer)
    held_out = read_bytes(get_held_out(corpus, split), corpus.tokenizer)
    if len(training) > MAX_COMPRESSED_BYTES or not held_out:
        return {}
    ppmd = [partial(_measure_ppmd, order=order) for order in PPMD_ORDERS]
    figures = {}
    for name, measures in (("xz", [_measure_xz]), ("PPMd", ppmd)):
        with suppress(ImportError):
            added = min(measure(training + held_out) - measure(training) for measure in measures)
            figures[name] = 8 * added / len(held_out)
    return figures


def measure_copied(run: Run, corpus: Corpus, split: Split = "validation") -> float | None:
    """Measure what share of a held-out part stands in the training text, word for word.

    It is what to compare with when a model copies. None where it would take long.
    """
    if sum(map(len, corpus.training)) > MAX_COMPRESSED_TOKENS:
        return None
    held_out = read_bytes(get_held_out(corpus, split), corpus.tokenizer)
    return run.find_copies(held_out.decode(errors="replace")).share


def _measure_xz(text: bytes) -> int:
    return len(lzma.compress(text, preset=9))


def _measure_ppmd(text: bytes, order: int) -> int:
    encoder = import_module("pyppmd").Ppmd7Encoder(order, PPMD_MEMORY)
    return len(encoder.encode(text)) + len(encoder.flush())


def read_bytes(files: list[TokenFile], tokenizer: Tokenizer) -> bytes:
    """Read the text of token files, without their special tokens."""
    is_text = tokenizer.compute_byte_lengths() > 0
    tokens = np.concatenate([file.read(0, len(file)) for file in files])
    return b"".join(tokenizer.decode_token(int(token)) for token in tokens[is_text[tokens]])


def evaluate_run(
    run: Run, texts: list[TokenFile], batch_size: int = 16, stride: int | None = None
) -> Evaluation:
    """Evaluate in float32, on windows as long as in training, `stride` tokens apart."""
    keep_freed_memory()
    seq_len = run.config.seq_len
    batches = iter_validation_batches(texts, seq_len, batch_size, stride)
    n_windows = sum(math.ceil(len(text) / (stride or seq_len)) for text in texts)
    shown_batches = iter_with_progress(batches, "evaluating", math.ceil(n_windows / batch_size))
    in_float32 = Compute(run.model.device, torch.float32)
    byte_lengths = run.tokenizer.compute_byte_lengths()
    evaluation = evaluate(run.model, shown_batches, byte_lengths, in_float32)
    if not math.isfinite(evaluation.loss):
        raise CheckpointError(f"{run.path}: the logits are not finite; train it again")
    return evaluation


def evaluate_held_out(
    run: Run, corpus: Corpus, split: Split, batch_size: int = 16, stride: int | None = None
) -> Evaluation:
    """Evaluate on a held-out part of the run's own text, and keep the losses of the best step.

    They are kept if windows lie side by side and all of them are of the weights as trained.
    """
    if run.state.get("saw_held_out"):
        known = f"{run.path}: its base may have been trained on some of this text"
        warn(f"{known}, so this looks better than it is; give a text that neither has read")
    texts = get_held_out(corpus, split)
    evaluation = evaluate_run(run, texts, batch_size, stride)
    if STORIES in run.config.data.path:
        evaluation = replace(evaluation, rules=tuple(measure_rules(run.model, run.tokenizer)))
    if stride in (None, run.config.seq_len):
        kept = read_losses(run.path, split)
        is_kept = kept is not None and kept.whole and kept.step == run.step
        with suppress(OSError, CheckpointError):  # it is not saved, or may only be read
            if not is_kept and _has_best_weights(run):
                write_losses(run.path, split, run.step, texts, run.model, evaluation)
    return evaluation


def _has_best_weights(run: Run) -> bool:
    """Return whether a run has the weights of its best checkpoint, neither rounded nor changed."""
    best = RunDirectory(run.path).load_best()
    weights = run.tensors
    return best.step == run.step and all(
        torch.equal(tensor, weights[name].cpu()) for name, tensor in best.model.items()
    )
