"""The loss and the rank of every token, for those who evaluate and score.

Letters: B batch, T positions, D width, V vocabulary.
"""

import torch
from torch import Tensor

from gptmini.model.gpt import GPT

LOGIT_ROWS_AT_ONCE = 1024  # all logits of a batch would be the largest tensor of a run


def compute_token_losses(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss in nats and the rank of each target (B, T), given tokens (B, T).

    Losses are float64; rank 1 is the most likely token. Both are on the CPU.
    """
    hidden = model.forward_hidden(tokens.to(model.device)).flatten(0, 1)  # (B·T, D)
    losses = []
    target_ranks = []
    chunks = hidden.split(LOGIT_ROWS_AT_ONCE)  # (rows, D) each
    target_chunks = targets.flatten().split(LOGIT_ROWS_AT_ONCE)  # (rows,) each
    for chunk, chunk_targets in zip(chunks, target_chunks, strict=True):
        logits = model.compute_logits(chunk).float()  # (rows, V)
        target_logits = logits.gather(1, chunk_targets[:, None].to(model.device))  # (rows, 1)
        losses.append((logits.logsumexp(1) - target_logits[:, 0]).cpu().double())
        target_ranks.append((1 + (logits > target_logits).sum(1)).cpu())
    return torch.cat(losses).view_as(targets), torch.cat(target_ranks).view_as(targets)
