"""Learn from a trained run's probabilities besides the text: distillation (Hinton et al. 2015).

They say what else could have stood in a place, so a model that learns a short text from both
memorizes it less (scripts/LOG.md, 2026-11-27).

Letters: B batch, T positions, V vocabulary.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmini.config.settings import Config
from gptmini.errors import CheckpointError, ConfigError
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.runs.progress import describe_own_model
from gptmini.tokenizer.tokenizers import Tokenizer

TEACHER_SHARE = 0.5  # of what is learned; the rest is the text


class TeacherLoss:
    """Computes a model's cross-entropy with what the text has next and what a teacher expects."""

    def __init__(self, model: GPT, teacher: GPT) -> None:
        self._model = model
        self._teacher = teacher

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean over targets (B, T), to which those below 0 add nothing."""
        labels = targets.reshape(-1, 1)  # (B·T, 1)
        with torch.no_grad():
            expected = self._teacher(tokens).flatten(0, 1).float().softmax(-1)  # (B·T, V)
            expected *= TEACHER_SHARE
            text_share = torch.full_like(expected[:, :1], 1 - TEACHER_SHARE)
            expected.scatter_add_(1, labels.clamp(min=0), text_share)
            expected.masked_fill_(labels < 0, 0)
        logits = self._model(tokens).flatten(0, 1)  # (B·T, V)
        return F.cross_entropy(logits.float(), expected)


def load_teacher(config: Config, tokenizer: Tokenizer, device: torch.device) -> GPT | None:
    """Load the teacher that a configuration names, if it names one.

    ConfigError for one with another tokenizer or a shorter context, CheckpointError for one that is
    gone or has other weights than when the run began.
    """
    if config.teacher.run is None:
        return None
    run = RunDirectory(Path(config.teacher.run))
    theirs = run.load_config()
    if run.load_tokenizer().fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"teacher.run: {run.path} has another tokenizer; set tokenizer.kind to "
            f"{run.path / 'tokenizer.json'}"
        )
    if theirs.model.context_length < config.seq_len:
        raise ConfigError(
            f"teacher.run: {run.path} has a context of {theirs.model.context_length}; set "
            f"train.seq_len to that or less"
        )
    checkpoint = run.load_best()
    if checkpoint.sha256 != config.teacher.sha256:
        raise CheckpointError(
            f"{run.path}: its best checkpoint is damaged or not the one that this run began with; "
            f"restore it"
        )
    if checkpoint.state.get("own_model"):
        raise ConfigError(describe_own_model(run.path))
    teacher = GPT(theirs.model, draw=False)
    teacher.load_state_dict(checkpoint.model)
    return teacher.to(device).eval().requires_grad_(False)
