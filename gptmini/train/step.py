"""One update: the loss and gradients of a batch, clipped, and a step of the optimizer.

Letters: B rows of a batch, T positions, W processes.
"""

import math
from typing import Any

import torch

from gptmini.errors import DivergedError
from gptmini.model.gpt import compute_loss
from gptmini.model.optim import get_learning_rate
from gptmini.train.batches import seed_from
from gptmini.train.messages import describe_divergence
from gptmini.train.state import Training


def train_step(training: Training) -> dict[str, Any]:
    """Make one optimizer update on the windows of the step, and return its metrics.

    The batch is computed in micro-batches, whose gradients add up to those of the whole.
    """
    settings = training.config.train
    model = training.model
    step = training.step
    model.train()
    tokens, targets = training.batches.get_batch(step)  # (B / W, T) each
    size = settings.micro_batch_size or len(tokens)
    losses: list[torch.Tensor] = []  # of this rank's micro-batches
    parts = zip(training.micro_batches, tokens.split(size), targets.split(size), strict=True)
    for micro, x, y in parts:
        torch.manual_seed(seed_from(settings.seed, step, micro))  # for dropout
        with training.compute.autocast():
            mean_loss = compute_loss(model, training.compute.copy(x), training.compute.copy(y))
            # Weighted by its rows, so that the gradients add up to those of the whole batch.
            loss = mean_loss * len(x) / settings.batch_size
        loss.backward()
        training.gradients.after_backward()
        losses.append(loss.detach())
    training.gradients.finish()
    clipped_norm = training.gradients.clip(settings.grad_clip)
    if training.compute.device.type != "cpu" and step + 1 < settings.steps:
        training.batches.prepare(step + 1)  # while the device still computes this one
    # In a single process, the only wait for the device in a step.
    *own_losses, norm = torch.stack([*losses, clipped_norm]).cpu().tolist()
    # One place for each micro-batch of the step, 0 for those of other ranks: so all ranks add the
    # same numbers in the same order.
    all_losses = [0.0] * (settings.batch_size // size)
    for micro, value in zip(training.micro_batches, own_losses, strict=True):
        all_losses[micro] = value
    total_loss = training.group.all_reduce_sum(all_losses)
    # Clipping by a norm that is NaN makes every gradient NaN: none of them may reach the weights.
    if not math.isfinite(total_loss + norm):
        problem = f"loss {total_loss:.4g}, gradient norm {norm}"
        raise DivergedError(describe_divergence(training, problem))
    lr = get_learning_rate(settings, step) * training.progress.lr_scale
    training.optimizer.step(lr)
    return {"train_loss": total_loss, "lr": lr, "grad_norm": norm}
