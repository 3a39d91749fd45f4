"""What a trained run is worth on a text: its held-out split, or all of another."""

from pathlib import Path

import torch

from gptmini.config.settings import TokenizerConfig
from gptmini.errors import DataError
from gptmini.generate.run import Run
from gptmini.machine import Compute
from gptmini.text.corpus import prepare_corpus, prepare_text
from gptmini.text.tokens import Span
from gptmini.train.batches import validation_batches
from gptmini.train.evaluate import Evaluation, evaluate


def held_out(run: Run, cache: Path) -> list[Span]:
    """The validation split of a run; DataError if its text is not what the run began with."""
    if "-" in run.config.data.path:
        raise DataError(
            f"{run.path}: was trained on standard input; name its text, or another, with --data"
        )
    file = str(run.path / "tokenizer.json")
    same = run.config.model_copy(update={"tokenizer": TokenizerConfig(kind=file)})
    corpus = prepare_corpus(same, cache)
    if corpus.content != run.corpus:
        raise DataError(
            f"{corpus.name}: not the text that {run.path} was trained on; restore it, or name "
            f"another with --data"
        )
    return corpus.validation


def whole_text(run: Run, paths: list[str], cache: Path) -> list[Span]:
    """All of a text, read as the run's own text is, in the run's tokens."""
    settings = run.config.data.model_copy(update={"path": paths})
    return [prepare_text(settings, run.tokenizer, cache)]


def evaluate_run(
    run: Run, spans: list[Span], batch_size: int = 16, stride: int | None = None
) -> Evaluation:
    """Evaluate a run, in float32, on windows as long as in its training, `stride` apart."""
    windows = validation_batches(spans, run.config.seq_len, batch_size, stride)
    in_float32 = Compute(run.model.device, torch.float32)
    return evaluate(run.model, windows, run.tokenizer.byte_lengths(), in_float32)
