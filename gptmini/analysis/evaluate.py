"""The loss of a trained run on its held-out text or on another, and token by token."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gptmini.config.settings import TokenizerConfig
from gptmini.data.corpus import prepare_corpus, prepare_text
from gptmini.data.token_file import TokenFile
from gptmini.errors import CheckpointError, DataError
from gptmini.generate.run import Run
from gptmini.generate.texts import encode_start
from gptmini.machine import Compute
from gptmini.train.batches import iter_validation_batches
from gptmini.train.evaluate import Evaluation, compute_token_losses, evaluate

Split = Literal["validation", "test"]


def load_text(
    run: Run, data: list[str] | None, cache: Path, split: Split = "validation"
) -> list[TokenFile]:
    """A held-out part of a run's text, or all of the text in `data`, as the run's tokens."""
    if not data:
        return load_held_out(run, cache, split)
    settings = run.config.data.model_copy(update={"path": data})
    return [prepare_text(settings, run.tokenizer, cache)]


def load_held_out(run: Run, cache: Path, split: Split = "validation") -> list[TokenFile]:
    """A held-out part of a run's text; DataError if the text has changed since the training."""
    if "-" in run.config.data.path:
        raise DataError(
            f"{run.path}: was trained on standard input, which is gone; give a text with --data"
        )
    if not run.corpus:
        raise DataError(f"{run.path}: was imported, with no text; give one with --data")
    if split == "test" and run.config.data.test is None:
        raise DataError(f"{run.path}: has no test part; train a new run with --set data.test=0.05")
    file = str(run.path / "tokenizer.json")
    same = run.config.model_copy(update={"tokenizer": TokenizerConfig(kind=file)})
    corpus = prepare_corpus(same, cache, with_test=split == "test")
    if corpus.content != run.corpus:
        raise DataError(
            f"{corpus.name}: not the text that {run.path} was trained on; restore it, or give "
            f"another with --data"
        )
    return corpus.test if split == "test" else corpus.validation


def evaluate_run(
    run: Run, texts: list[TokenFile], batch_size: int = 16, stride: int | None = None
) -> Evaluation:
    """Evaluate in float32, on windows as long as in training, `stride` tokens apart."""
    windows = iter_validation_batches(texts, run.config.seq_len, batch_size, stride)
    in_float32 = Compute(run.model.device, torch.float32)
    return evaluate(run.model, windows, run.tokenizer.compute_byte_lengths(), in_float32)


@dataclass(frozen=True)
class Score:
    """The tokens of a text, with the log-probability (nats) and the rank (1 is top) of each."""

    texts: list[str]
    tokens: list[int]
    logprobs: list[float]
    token_ranks: list[int]
    n_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -sum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8: comparable across tokenizers."""
        return -sum(self.logprobs) / math.log(2) / self.n_bytes


@torch.inference_mode()
def score_text(run: Run, text: str) -> Score:
    """Score each token of a text, as what an empty prompt is continued with.

    A text longer than the context is read in windows of one context, half a context apart: every
    token has at least half a context before it, or all there is. DataError if the text is empty,
    CheckpointError if the weights are not finite.
    """
    tokens = run.encode(text, "text")
    if not tokens:
        raise DataError("text: empty; give at least one character")
    before = encode_start(run.tokenizer, run.config.sample)[-1:]
    document = torch.tensor([*before, *tokens])
    limit = run.config.model.context_length
    logprobs: list[float] = []
    ranks: list[int] = []
    while (done := len(logprobs)) < len(tokens):
        start = max(0, done - limit // 2) if done else 0
        window = document[start : start + limit + 1][None]
        window_losses, window_ranks = compute_token_losses(run.model, window[:, :-1], window[:, 1:])
        logprobs += (-window_losses[0, done - start :]).tolist()  # the rest was scored before
        ranks += window_ranks[0, done - start :].tolist()
    if not math.isfinite(sum(logprobs)):
        raise CheckpointError(f"{run.path}: the model's logits are not finite; its weights are bad")
    texts = [run.tokenizer.decode([token]) for token in tokens]
    return Score(texts, tokens, logprobs, ranks, len(text.encode()))
