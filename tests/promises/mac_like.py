"""Run commands of gptmini as on a Mac's GPU, as far as another machine can pretend.

    python -m tests.promises.mac_like FOLDER COMMANDS

See commands.py for both. Tensors on `mps` have their numbers in main memory, and each operation on
them goes through `run_on_mps`. It fails where a Mac does: on 64-bit floats, on random whole numbers
of 64 bits, and on tensors of which some are elsewhere. The last line of stdout lists them all.
"""

import json
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

MPS = torch.device("mps:0")
STAND_IN = "gpu"  # a device that this PyTorch does not refuse at once
# They take a tensor from another device: copies, and indices, which Metal gets as constants.
ACROSS_DEVICES = ("copy_", "_to_copy", "index.Tensor", "index_put", "_index_put_impl_")
used: set[str] = set()


class MacTensor(torch.Tensor):
    """A tensor that says it is on `mps`; `numbers` holds it on the CPU."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "MacTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device="meta",  # to PyTorch's C++, which has no threads for a Mac's GPU here
        )

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return run_on_mps(function, args, kwargs or {})


def run_on_mps(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation whose inputs or outputs may be on `mps`."""
    name = str(function).removeprefix("aten.")
    inputs, _ = tree_flatten((args, kwargs))
    on_mps = [each for each in inputs if isinstance(each, MacTensor)]
    target = kwargs.get("device")
    is_on_mps = target.type in (STAND_IN, "meta") if target is not None else bool(on_mps)
    if not on_mps and not is_on_mps:
        return function(*args, **kwargs)
    for each in inputs:
        is_elsewhere = isinstance(each, torch.Tensor) and not isinstance(each, MacTensor)
        if on_mps and is_elsewhere and each.ndim and not name.startswith(ACROSS_DEVICES):
            raise RuntimeError(f"{name}: expected all tensors to be on mps, found one on cpu")
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    wrappers = {id(each.numbers): each for each in on_mps}
    plain_args, plain_kwargs = tree_map(_get_numbers, (args, kwargs))
    result = function(*plain_args, **plain_kwargs)
    if name == "copy_.default" and not isinstance(args[0], MacTensor):
        return args[0]
    if not is_on_mps:  # a copy to the host
        return result
    used.add(name)

    def wrap(output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        is_wide_random = "rand" in name and output.dtype == torch.int64
        if output.dtype == torch.float64 or is_wide_random:
            raise TypeError(f"{name}: the MPS framework doesn't support {output.dtype}")
        known = wrappers.get(id(output))  # changed in place
        return MacTensor(output) if known is None else known

    return tree_map(wrap, result)


def _get_numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, MacTensor) else value


class Mac(TorchDispatchMode):
    """Sees what is created on `mps`; other operations come through MacTensor, too."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return run_on_mps(function, args, kwargs or {})


class RenameDevice(TorchFunctionMode):
    """Puts the stand-in for `mps` wherever a call names the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        def rename(value: Any) -> Any:
            names_mps = isinstance(value, torch.device) and value.type == "mps"
            return torch.device(STAND_IN) if names_mps else value

        args, kwargs = tree_map(rename, (args, kwargs or {}))
        device = kwargs.pop("device", None) if function is torch.tensor else None
        result = function(*args, **kwargs)
        return result if device is None else result.to(device)  # no mode sees torch.tensor copy


def pretend() -> None:
    """Make PyTorch say that this machine has a Mac's GPU."""
    _setup_privateuseone_for_python_backend(STAND_IN)
    torch.accelerator.current_accelerator = lambda check_available=False: MPS  # type: ignore
    torch.accelerator.synchronize = lambda: None  # type: ignore[assignment]
    torch.mps.recommended_max_memory = lambda: 16 << 30
    torch.mps.driver_allocated_memory = lambda: 1 << 30
    torch.mps.empty_cache = lambda: None


if __name__ == "__main__":
    pretend()
    from tests.promises.commands import run_all

    with RenameDevice(), Mac():
        run_all(*sys.argv[1:])
    print(json.dumps(sorted(used)))
