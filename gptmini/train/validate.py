"""The evaluations that a training makes of itself, on its held-out text."""

import math
from typing import Any

from gptmini.console import iter_with_progress
from gptmini.errors import DivergedError
from gptmini.train.batches import iter_validation_batches
from gptmini.train.evaluate import evaluate
from gptmini.train.kept_losses import write_losses
from gptmini.train.state import Training


def evaluate_validation(training: Training) -> dict[str, Any]:
    """Evaluate on the validation split, or a fixed part of it, and remember the best step.

    DivergedError for a loss that is not finite.
    """
    settings = training.config.train
    corpus = training.corpus
    progress = training.progress
    seq_len = training.config.seq_len
    rows = settings.micro_batch_size or 1
    n_tokens = min(corpus.held_out, settings.eval_tokens or corpus.held_out)
    batches = iter_validation_batches(corpus.validation, seq_len, rows, limit=settings.eval_tokens)
    shown_batches = iter_with_progress(
        batches, "evaluating", math.ceil(n_tokens / (rows * seq_len))
    )
    with training.enter_inference():
        result = evaluate(
            training.model,
            shown_batches,
            corpus.tokenizer.compute_byte_lengths(),
            training.compute,
            training.group,
        )
    if not math.isfinite(result.loss):
        raise DivergedError(f"validation loss {result.loss}")
    metrics = {"val_loss": result.loss, "val_bpb": result.bits_per_byte}
    if progress.best is None or result.loss < progress.best["val_loss"]:
        progress.best = progress.to_metrics() | metrics
        training.group.on_rank_zero(
            write_losses,
            training.run.path,
            "validation",
            progress.step,
            corpus.validation,
            training.model,
            result,
            whole=n_tokens == corpus.held_out,
        )
    return metrics
