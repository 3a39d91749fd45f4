"""torch.compile for the blocks of a model, and for its loss on an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gptmini.model.kernels import softmax_

if TYPE_CHECKING:
    from gptmini.model.gpt import GPT


def compile_blocks(model: GPT) -> None:
    """Compile the blocks; one kernel serves them all, so depth adds no time to compile.

    On an accelerator the loss is compiled as well. The embedding is not: its backward pass would
    add in an order that changes from run to run. A CPU needs a C++ compiler.
    """
    options = _choose_compiler_options(model.device)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, options=options)
    model.softmax = torch.compile(model.softmax, dynamic=False, options=options)


def undo_compiling(model: GPT) -> None:
    """Make the blocks and the loss again what `compile_blocks` found."""
    for block in model.blocks:
        del block.forward
    model.softmax = softmax_


def _choose_compiler_options(device: torch.device) -> dict[str, Any] | None:
    """Keep g++ from removing stores that are needed, as versions 11 and 12 do with AVX512.

    Gradients of keys, in bfloat16 with RoPE and heads of 64, were NaN (scripts/LOG.md: Which kernel
    left NaN in compiled gradients, and why?). torch has no option for flags of the compiler; this
    one is appended to that of another.
    """
    from torch._inductor.cpp_builder import is_gcc  # noqa: PLC0415 - slow

    if device.type != "cpu" or not is_gcc():
        return None
    return {"cpp.enable_floating_point_contract_flag": "off -fno-dse"}
