"""A model of which a process holds some rows of every tensor, to the bits of a whole one.

`rows(n)` is everywhere the slice of n rows that the process holds.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SliceRows = Callable[[int], slice]
KERNEL_LINE_NUMBERS = 16  # numbers
MOMENT_KEYS = ("exp_avg", "exp_avg_sq")


class ShardedInit(TorchDispatchMode):
    """Draws what is drawn into parameters without memory, in full and in order, and keeps its rows.

    One tensor is whole at a time, and the random generator passes through the same states as where
    all are.
    """

    def __init__(self, slice_rows: SliceRows) -> None:
        super().__init__()
        self.slice_rows, self.initial_rows = (
            slice_rows,
            dict[int, Tensor](),
        )  # by the id of the parameter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__.split(".")[0] in ("normal_", "uniform_", "fill_", "zero_"):
            whole = torch.empty(args[0].shape, device="cpu")
            func(whole, *args[1:], **(kwargs or {}))
            self.initial_rows[id(args[0])] = whole[self.slice_rows(len(whole))].clone()
        return func(*args, **(kwargs or {}))


class AlignedAdamW:
    """Makes AdamW round some rows of a tensor as it rounds the tensor, on a CPU.

    torch's kernel takes numbers in lines of 16, and rounds those of a last, shorter line in another
    way. Rows that begin or end within a line are computed once more, among zeros.
    """

    def __init__(self, adamw: torch.optim.Optimizer, slice_rows: SliceRows) -> None:
        self.slice_rows = slice_rows
        self.cut_rows: list[tuple[Any, Any, tuple[int, int], list[Tensor]]] = []
        adamw.register_step_pre_hook(self._keep)
        adamw.register_step_post_hook(self._correct)

    def _keep(self, adamw: Any, *_: Any) -> None:
        self.cut_rows = []
        for group in adamw.param_groups:
            for each in group["params"]:
                count, columns = each.numel(), each.numel() // len(each)
                rows, state = self.slice_rows(len(each)), adamw.state[each]
                first, last = rows.start * columns, rows.stop * columns
                if first < last and (
                    first % KERNEL_LINE_NUMBERS or (last % KERNEL_LINE_NUMBERS and last < count)
                ):
                    means = [state.get(key, torch.zeros_like(each)) for key in MOMENT_KEYS]
                    old = [tensor.detach().to_local().flatten() for tensor in (each, *means)]
                    padding = (
                        first % KERNEL_LINE_NUMBERS,
                        min(-last % KERNEL_LINE_NUMBERS, count - last),
                    )
                    self.cut_rows.append(
                        (group, each, padding, [F.pad(own, padding) for own in old])
                    )

    def _correct(self, adamw: Any, *_: Any) -> None:
        for group, each, padding, (new, *means) in self.cut_rows:
            state, betas = adamw.state[each], group["betas"]
            gradient = F.pad(each.grad.to_local().flatten(), padding)
            lists: Any = [new], [gradient], [means[0]], [means[1]], [], [state["step"]]
            names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
            options = {name: group[name] for name in names}
            torch._fused_adamw_(*lists, beta1=betas[0], beta2=betas[1], **options)
            for tensor, right in zip(
                (each, *map(state.get, MOMENT_KEYS)), (new, *means), strict=True
            ):
                own = tensor.detach().to_local()
                own.copy_(right[padding[0] :][: own.numel()].view_as(own))
        self.cut_rows = []
