"""One update: the loss and gradients of a batch, clipped, and a step of the optimizer.

Letters: B rows of a batch, T positions, W processes.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gptmini.console import say, show_elapsed
from gptmini.errors import ConfigError, DivergedError, GptminiError
from gptmini.model.compile import undo_compiling
from gptmini.train.seeds import seed_from
from gptmini.train.state import Training

# In float16, steps after which the loss scale is doubled; the next overflow halves it again.
LOSS_SCALE_INTERVAL = 1000
MAX_LOSS_SCALE = 2.0**24


def train_step(training: Training) -> dict[str, Any]:
    """Make one optimizer update on the windows of the step, and return its metrics.

    DivergedError if the loss or the gradients are not finite; the weights stay as they were.
    """
    progress = training.progress
    step = training.step
    training.model.train()
    tokens, targets = training.batches.get_batch(step)  # (B / W, T) each
    if training.config.train.compile == "on" and not training.has_compiled:
        total_loss, norm = _try_compiled(training, tokens, targets)
    else:
        total_loss, norm = _compute_gradients(training, tokens, targets)
    # Gradients beyond the range of float16 say nothing of the loss: the step is made again at half
    # the scale, so that none is lost. All ranks see the same norm and do the same.
    while math.isfinite(total_loss) and not math.isfinite(norm) and progress.loss_scale > 1:
        progress.loss_scale /= 2
        say(
            f"step {step + 1}: gradients overflow float16; again with the loss scaled by "
            f"{progress.loss_scale:,.0f}"
        )
        training.model.zero_grad()
        total_loss, norm = _compute_gradients(training, tokens, targets)
    # Clipping by a norm that is NaN makes every gradient NaN: none of them may reach the weights.
    if not math.isfinite(total_loss + norm):
        raise DivergedError(f"loss {total_loss:.4g}, gradient norm {norm}")
    if step == 0 and norm == 0 and total_loss != 0 and training.own.loss is not None:
        problem = "does not depend on the weights of the model"
        raise ConfigError(f"loss: {problem}; compute it with the model that it is given")
    lr = training.compute_rate()
    training.optimizer.step(lr)
    if step == 0 and training.own.optimizer is not None:
        training.optimizer.state_dict()  # what no checkpoint can hold is refused now
    metrics = {"train_loss": total_loss, "lr": lr, "grad_norm": norm}
    if training.compute.dtype == torch.float16:
        metrics["loss_scale"] = progress.loss_scale
        # By the number of the step alone, so that a run that is resumed does the same.
        if (step + 1) % LOSS_SCALE_INTERVAL == 0:
            progress.loss_scale = min(2 * progress.loss_scale, MAX_LOSS_SCALE)
    return metrics


@show_elapsed("compiling the model")
def _try_compiled(training: Training, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """Compute gradients by compiled code for the first time; without it from now on if that fails.

    Takes and returns what `_compute_gradients` does. Of several processes, one that fails ends all:
    the others may wait for its gradients.
    """
    training.has_compiled = True
    try:
        loss, norm = _compute_gradients(training, tokens, targets)
        # In float16 a norm that overflows says nothing of the code.
        if math.isfinite(loss) and (math.isfinite(norm) or training.progress.loss_scale > 1):
            return loss, norm
        problem = "it computes gradients that are not finite"
    except GptminiError:
        raise
    except Exception as error:  # of the compiler, of its kernels, or of whatever calls them
        if training.group.world_size > 1:
            error.add_note("train.compile: off trains without compiled code")
            raise
        problem = f"it failed ({(str(error).strip() or repr(error)).splitlines()[0]})"
    say(f"  compile   off: {problem}")
    undo_compiling(training.model)
    training.config = training.config.with_train(compile="off")
    training.progress.compile = "off"
    training.group.on_rank_zero(training.run.write_config, training.config)
    training.model.zero_grad()
    return _compute_gradients(training, tokens, targets)


def _count_filled_rows(training: Training, targets: Tensor) -> float:
    """Count the rows that the targets of a batch fill; `targets` (B / W, T) are this rank's.

    The loss of a batch is the mean over all of its targets that count, however they are spread over
    micro-batches and ranks. Where some are ignored, they fill less than its rows.
    """
    if not training.corpus.has_ignored and training.own.batches is None:
        return training.config.train.batch_size
    n_counted = training.group.all_reduce((targets >= 0).sum())
    return max(1, int(n_counted)) / targets.shape[1]


def _compute_gradients(training: Training, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """Leave the clipped gradients of a batch (B / W, T); return its loss and their norm before.

    The batch is computed in micro-batches, whose gradients add up to those of the whole.
    """
    settings = training.config.train
    step = training.step
    loss_scale = training.progress.loss_scale
    size = settings.micro_batch_size or len(tokens)
    n_rows = _count_filled_rows(training, targets)
    losses: list[Tensor] = []  # of this rank's micro-batches
    parts = zip(training.micro_batches, tokens.split(size), targets.split(size), strict=True)
    for micro, x, y in parts:
        torch.manual_seed(seed_from(settings.seed, step, micro))  # for dropout
        with training.compute.autocast():
            inputs = training.compute.copy(x)
            mean_loss = training.compute_loss(inputs, training.compute.copy(y))
            if not isinstance(mean_loss, Tensor) or mean_loss.shape or not mean_loss.requires_grad:
                raise ConfigError("loss: must return a tensor of shape () that has a gradient")
            # Weighted by its rows, so that the gradients add up to those of the whole batch.
            loss = mean_loss * len(x) / n_rows
        scaled_loss = loss if loss_scale == 1 else loss * loss_scale
        scaled_loss.backward()
        training.gradients.after_backward()  # on one process autograd has added them already
        losses.append(loss.detach())
    training.gradients.finish()  # the sum over all processes, if there are several
    training.gradients.unscale(loss_scale)
    clipped_norm = training.gradients.clip(settings.grad_clip)
    if training.compute.device.type != "cpu" and step + 1 < settings.steps:
        training.batches.read_ahead(step + 1)  # while the device still computes this one
    # In a single process, the only wait for the device in a step.
    *own_losses, norm = torch.stack([*losses, clipped_norm]).cpu().tolist()
    # In float64 a sum of some float32 numbers has no rounding, so their order does not matter.
    loss_of_rank = torch.tensor(sum(own_losses), dtype=torch.float64)
    return training.group.all_reduce(loss_of_rank).item(), norm
