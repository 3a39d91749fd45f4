"""Makes a row-sharded model match an unsharded one bit for bit.

A rank holds some rows of every tensor; `slice_rows(n)` says which of n rows. Two things must not
notice that: the random numbers of the initial weights, and the rounding of AdamW's kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SliceRows = Callable[[int], slice]
KERNEL_LINE_NUMBERS = 16  # that torch's fused AdamW takes at once on a CPU
MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
INIT_FUNCTIONS = ("normal_", "uniform_", "fill_", "zero_")


class ShardedInit(TorchDispatchMode):
    """Initializes parameters on the meta device: draws each in full and keeps this rank's rows.

    One tensor is whole at a time, and the random generator passes through the same states as where
    all are. Parameters on the meta device have no memory, so the rows wait in `initial_rows`.
    """

    def __init__(self, slice_rows: SliceRows) -> None:
        super().__init__()
        self.slice_rows = slice_rows
        self.initial_rows: dict[int, Tensor] = {}  # by the id of the parameter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = func.__name__.split(".")[0]
        if name in INIT_FUNCTIONS:
            parameter, *rest = args
            whole = torch.empty(parameter.shape, device="cpu")
            func(whole, *rest, **options)
            rows = self.slice_rows(len(whole))
            self.initial_rows[id(parameter)] = whole[rows].clone()
        if name == "add_":
            parameter, change = args
            rows = self.slice_rows(len(parameter))
            self.initial_rows[id(parameter)] += change.expand(parameter.shape)[rows]
        return func(*args, **options)


class AlignedAdamW:
    """Makes AdamW round some rows of a tensor as it rounds the whole tensor, on a CPU.

    torch's kernel takes numbers in lines of 16, and rounds those of a last, shorter line in another
    way. Rows that begin or end within a line are therefore computed once more after the step, from
    a copy in which zeros stand where the neighboring rows of the whole tensor would.
    """

    def __init__(self, adamw: torch.optim.Optimizer, slice_rows: SliceRows) -> None:
        self.slice_rows = slice_rows
        # The parameters to correct: their group, the zeros on both sides, and the padded copies of
        # the parameter and its moments before the step.
        self.cut_rows: list[tuple[Any, Any, tuple[int, int], list[Tensor]]] = []
        adamw.register_step_pre_hook(self._keep)
        adamw.register_step_post_hook(self._correct)

    def _keep(self, adamw: Any, *_: Any) -> None:
        """Copy the rows that begin or end within a line, before the step."""
        self.cut_rows = []
        for group in adamw.param_groups:
            for parameter in group["params"]:
                padding = self._get_padding(parameter)
                if padding is None:
                    continue
                state = adamw.state[parameter]
                moments = [state.get(key, torch.zeros_like(parameter)) for key in MOMENT_KEYS]
                copies = []
                for tensor in (parameter, *moments):
                    local = tensor.detach().to_local().flatten()
                    copies.append(F.pad(local, padding))
                self.cut_rows.append((group, parameter, padding, copies))

    def _get_padding(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return the numbers that fill the first and the last line; None if no line is cut."""
        count = parameter.numel()
        columns = count // len(parameter)
        rows = self.slice_rows(len(parameter))
        first = rows.start * columns
        last = rows.stop * columns
        begins_within = first % KERNEL_LINE_NUMBERS != 0
        # The end of the whole tensor may lie within a line: there, one process is cut as well.
        ends_within = last % KERNEL_LINE_NUMBERS != 0 and last < count
        if first == last or not (begins_within or ends_within):
            return None
        before = first % KERNEL_LINE_NUMBERS
        after = min(-last % KERNEL_LINE_NUMBERS, count - last)
        return before, after

    def _correct(self, adamw: Any, *_: Any) -> None:
        """Repeat the step on the padded copies, and take over their rows."""
        for group, parameter, padding, copies in self.cut_rows:
            weights, exp_avg, exp_avg_sq = copies
            state = adamw.state[parameter]
            gradient = F.pad(parameter.grad.to_local().flatten(), padding)
            torch._fused_adamw_(
                [weights],
                [gradient],
                [exp_avg],
                [exp_avg_sq],
                [],  # without amsgrad
                [state["step"]],  # which the step has incremented
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
            moments = [state[key] for key in MOMENT_KEYS]
            for tensor, corrected in zip((parameter, *moments), copies, strict=True):
                local = tensor.detach().to_local()
                rows = corrected[padding[0] :][: local.numel()]
                local.copy_(rows.view_as(local))
        self.cut_rows = []
