"""RMSNorm and cross-entropy, in less time and memory than torch's own.

Letters: N rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LOGITS_PER_CHUNK_ON_CPU = 2**22  # in float32; more would leave the caches
LOGITS_PER_CHUNK = 2**27  # elsewhere: 512 MiB, and few kernels to launch


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


def cross_entropy_(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean of -log softmax(logits (N, V)) at the targets (N,), in float32.

    Overwrites `logits` with their gradient, so no second tensor of that size exists; torch's own
    function, on bfloat16, takes four times the memory. Do not read `logits` afterwards.
    """
    return _CrossEntropy.apply(logits, targets)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        N, V = logits.shape
        size = LOGITS_PER_CHUNK_ON_CPU if logits.device.type == "cpu" else LOGITS_PER_CHUNK
        rows = max(1, size // V)
        # In float16 most numbers divided by N would be 0: there the backward pass divides by it.
        divisor = 1 if logits.dtype == torch.float16 else N
        total = logits.new_zeros((), dtype=torch.float32)
        for chunk, labels in zip(logits.split(rows), targets[:, None].split(rows), strict=True):
            logprobs = chunk.float().log_softmax(-1)  # (rows, V)
            total -= logprobs.gather(1, labels).sum()
            # The gradient of a row's loss is its softmax, minus 1 at the target.
            gradient = logprobs.exp_()  # (rows, V)
            gradient.scatter_add_(1, labels, torch.full_like(gradient[:, :1], -1))
            chunk.copy_(gradient.div_(divisor))
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
