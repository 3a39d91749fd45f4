"""Norm, activation, dropout and loss in less time and memory than torch's.

Each computes what its name says, so a reader of the model may skip this file.

Letters: N rows, D width, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LOGITS_PER_CHUNK_ON_CPU = 2**22  # in float32; more would leave the caches
LOGITS_PER_CHUNK = 2**29  # elsewhere: 1 GiB in bfloat16, and products that fill a large GPU
ROW_MULTIPLE = 256  # to which chunks are rounded up: no tile of a product is partly empty
SUM_SCALE = 256  # a power of two, which rounds nothing in float32 and bfloat16
VOCABULARY_MULTIPLE = 64  # to which `linear_cross_entropy` pads; 1 for no padding


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019) with a backward pass made for a CPU.

    There torch has no kernel for that pass, it differentiates each operation of the forward pass.
    For 16 x 256 x 4 heads of size 48, forward and backward take 6.5 ms instead of 12.4 (one
    thread). Other devices and compiled code have kernels of their own.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """LayerNorm's backward kernel at mean 0, without what depends on the mean.

        With y = scale · x, dx is scale · (g w - y · mean(y g w)). The kernel subtracts
        scale · mean(g w) as well, for a mean that RMSNorm does not take.
        """
        x, weight, scale = ctx.saved_tensors
        gradient = gradient.contiguous()
        no_mean = torch.zeros_like(scale)
        wanted = [True, True, False]  # of x, weight and bias
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, x.shape[-1:], no_mean, scale, weight, None, wanted
        )
        mean = (gradient @ weight)[..., None] / x.shape[-1]  # of g w: (..., 1)
        return dx.addcmul_(scale, mean), dweight, None


def square_relu(x: Tensor) -> Tensor:
    """Compute relu(x)², with a backward pass made for a CPU.

    There torch makes four passes over memory of what one can do. Compiled code has its own.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.relu(x).square()
    return _SquareReLU.apply(x)


class _SquareReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rectified = F.relu(x)
        ctx.save_for_backward(rectified)
        return rectified.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rectified,) = ctx.saved_tensors
        return torch.addcmul(gradient.new_zeros(()), gradient, rectified, value=2)


class Dropout(nn.Module):
    """Zeroes each element with probability p, rounded to a multiple of 1/256; scales up the rest.

    On a CPU a random byte per element decides. This is four times as fast as torch's dropout, which
    draws a full-width number per element on one core (16 x 256 x 192 elements: 1.2 ms, not 5.5).
    Elsewhere torch's own is one kernel, and Inductor of torch 2.10 and 2.11 cannot compile a draw
    of whole 64-bit integers.
    """

    def __init__(self, p: float | None) -> None:
        super().__init__()
        self.drop_threshold = round(256 * (p or 0))  # of the 256 values of a byte, those that drop

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_threshold == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.drop_threshold / 256)
        n_words = (x.numel() + 7) // 8  # eight random bytes come as one integer of 64 bits
        words = torch.randint(-(2**63), 2**63 - 1, (n_words,), device=x.device)
        random_bytes = words.view(torch.uint8)[: x.numel()].view(x.shape)
        # Compared in float32: of a comparison of bytes, Inductor makes slow code.
        kept = random_bytes.float().ge_(self.drop_threshold).to(x.dtype)  # 0 or 1
        return (x * kept).mul_(256 / (256 - self.drop_threshold))  # faster than masked_fill


def cross_entropy_(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean of -log softmax(logits (N, V)) at the targets (N,), in float32.

    Overwrites `logits` with their gradient, so no second tensor of that size exists; torch's own
    function, on bfloat16, takes four times the memory. Do not read `logits` afterwards. Targets
    below 0 add nothing to the loss, which is divided by N all the same.
    """
    return _CrossEntropy.apply(logits, targets)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        N, V = logits.shape
        rows = max(1, LOGITS_PER_CHUNK_ON_CPU // V)
        # In float16 most numbers divided by N would be 0: there the backward pass divides by it.
        divisor = 1 if logits.dtype == torch.float16 else N
        total = logits.new_zeros((), dtype=torch.float32)
        for chunk, labels in zip(logits.split(rows), targets[:, None].split(rows), strict=True):
            logprobs = chunk.float().log_softmax(-1)  # (rows, V)
            is_ignored = labels < 0  # (rows, 1)
            safe_labels = labels.clamp(min=0)  # (rows, 1)
            total -= logprobs.gather(1, safe_labels).masked_fill(is_ignored, 0).sum()
            # The gradient of a row's loss is its softmax, minus 1 at the target.
            gradient = logprobs.exp_()  # (rows, V)
            gradient.scatter_add_(1, safe_labels, torch.full_like(gradient[:, :1], -1))
            divisors = torch.where(is_ignored, math.inf, float(divisor))  # (rows, 1)
            chunk.copy_(gradient.div_(divisors))
        ctx.save_for_backward(logits)
        ctx.left_to_divide = N / divisor
        return total / N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        if ctx.left_to_divide != 1:
            gradient = gradient / ctx.left_to_divide
        return logits.mul_(gradient), None


def softmax_(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite logits (N, V) with their softmax; returns its logarithm at the labels (N, 1)."""
    logprobs = logits.float().log_softmax(-1)  # (N, V)
    label_logprobs = logprobs.gather(1, labels)  # (N, 1)
    logits.copy_(logprobs.exp_())
    return label_logprobs


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softmax: Callable[[Tensor, Tensor], Tensor] = softmax_,
) -> Tensor:
    """Compute the mean cross-entropy of the logits hidden (N, D) @ weight (V, D)ᵀ, in float32.

    Targets below 0 add nothing to the loss, which is divided by N all the same.

    For accelerators: head and loss in one, on chunks of rows, so that all logits never exist at
    once. Each chunk gives its share of the gradients as soon as it has its loss, while its logits
    are there; in bfloat16, the shares of the weight's gradient are added in float32. A compiled
    `softmax` moves 6 bytes for each bfloat16 logit: it reads them twice and writes
    them once. The plain one, whose steps are in float32, moves 28.

    The rows of the weight, and so those of the logits, are padded to a multiple of 64. A GPU reads
    16 bytes at a time, and a row of 50,257 numbers begins anywhere: all three products, logits and
    both gradients, would fall back to slow kernels.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, softmax)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softmax: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        N = len(hidden)
        V = len(weight)
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        padded = _pad_rows(weight, dtype)  # (padded V, D)
        total = hidden.new_zeros((), dtype=torch.float32)
        dhidden = torch.empty_like(hidden)  # (N, D)
        dweight = torch.zeros_like(padded, dtype=weight.dtype)  # (padded V, D)
        # So many rows make a chunk; all chunks but the last are equal.
        rows = -(-N // -(-N * len(padded) // LOGITS_PER_CHUNK))
        rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        is_ignored = targets[:, None] < 0  # (N, 1)
        # A sum over so many rows could leave the range of float16. Ignored rows add nothing.
        scales = torch.full_like(targets[:, None], SUM_SCALE, dtype=dtype)  # (N, 1)
        scales.masked_fill_(is_ignored, math.inf)
        of_all_rows = (hidden, dhidden, targets[:, None].clamp(min=0), is_ignored, scales)
        for chunk, dchunk, chunk_labels, chunk_is_ignored, chunk_scales in zip(
            *(tensor.split(rows) for tensor in of_all_rows), strict=True
        ):
            x = chunk.to(dtype)  # (rows, D)
            logits = x @ padded.T  # (rows, padded V)
            logits[:, V:] = -torch.inf  # no share in the softmax, so no gradient
            label_logprobs = softmax(logits, chunk_labels)  # (rows, 1)
            total -= label_logprobs.masked_fill(chunk_is_ignored, 0).sum()
            if any(ctx.needs_input_grad):
                # The gradient of a row's loss is its softmax, minus 1 at the label.
                logits.scatter_(1, chunk_labels, label_logprobs.expm1().to(dtype))
                dchunk.copy_(logits @ padded)
                dweight.add_(logits.T @ (x / chunk_scales), alpha=SUM_SCALE)
            del logits  # before the next chunk has its own
        dhidden.masked_fill_(is_ignored, 0)
        ctx.save_for_backward(dhidden, dweight[:V])
        return total / N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dhidden, dweight = ctx.saved_tensors
        scale = gradient / len(dhidden)
        return dhidden.mul_(scale), dweight.mul_(scale), None, None


def _pad_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a weight (V, D) to a type, with rows of zeros up to a multiple (padded V, D)."""
    V, D = weight.shape
    padding = -V % VOCABULARY_MULTIPLE
    if padding == 0:
        return weight.to(dtype)
    padded = weight.new_empty(V + padding, D, dtype=dtype)
    padded[:V] = weight
    padded[V:] = 0
    return padded
