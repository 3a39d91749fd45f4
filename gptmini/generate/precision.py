"""Round weights to the precision that they are stored and multiplied in."""

import torch
from torch import Tensor, nn

from gptmini.model.gpt import GPT

PRECISIONS = ("float32", "bfloat16", "int8")


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights (N, K) to int8 with one scale per row (N,); each row's largest is 127."""
    integers = weights.new_empty(weights.shape, dtype=torch.int8)  # (N, K)
    scales = weights.new_empty(len(weights), dtype=torch.float32)  # (N,)
    # In slices, as the float copies of a whole vocabulary would set the peak of memory.
    for part, result, scale in zip(
        weights.split(1024), integers.split(1024), scales.split(1024), strict=True
    ):
        rows = part.float()  # (rows, K)
        scale.copy_(rows.abs().amax(dim=1).clamp(min=1e-30) / 127)  # (rows,)
        result.copy_((rows / scale[:, None]).round())
    return integers, scales


def round_matrix(weights: Tensor, precision: str) -> Tensor:
    """Round a matrix (N, K) to a precision, or for int8 to the float32 that it stands for."""
    if precision == "int8":
        integers, scales = quantize(weights)
        return integers.float().mul_(scales[:, None])
    return weights.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)


def round_weights(model: GPT, precision: str) -> None:
    """Round every matrix to a precision, one after the other.

    They are stored in it, as the compiled engine needs no others; `widen_weights` makes the model
    one that torch computes. All other weights become float32. So does the table of embeddings with
    int8, after rounding: the compiled engine takes its inputs from it.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weights = parameter.detach()
            if name != "weight" or not (isinstance(module, nn.Linear) or module is model.embed):
                rounded = weights.float()
            elif precision == "int8" and module is not model.embed:
                rounded, module.scales = quantize(weights)  # (N, K) and (N,), for `dequantize`
            else:
                rounded = round_matrix(weights, precision)
            is_trainable = rounded.is_floating_point()
            setattr(module, name, nn.Parameter(rounded, requires_grad=is_trainable))


def dequantize(module: nn.Module, weights: Tensor) -> Tensor:
    """Return weights of a module as they are, or those in int8 as the float32 they stand for."""
    if weights.dtype != torch.int8:
        return weights
    scales = module.scales  # (N,)
    assert isinstance(scales, Tensor)
    return weights.float().mul_(scales[:, None])  # `*` would hold another float copy


def widen_weights(model: GPT) -> None:
    """Store every weight of a model as float32, in place and without rounding."""
    with torch.inference_mode(False):  # which may be on, and would make weights without gradients
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype != torch.float32:
                    wide = dequantize(module, parameter.detach()).float()
                    setattr(module, name, nn.Parameter(wide))
