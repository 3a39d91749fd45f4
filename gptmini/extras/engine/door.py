"""Choose the engine for a model: what `gptmini.generate.engine.open_engine` asks for."""

import ctypes

from gptmini.console import show_elapsed
from gptmini.extras.engine.build import build_library
from gptmini.extras.engine.check import matches_torch, warn_of_mismatch
from gptmini.extras.engine.gpu_engine import GpuEngine
from gptmini.extras.engine.native_engine import NativeEngine
from gptmini.generate.engine import Engine
from gptmini.generate.own_model import find_own_module
from gptmini.model.gpt import GPT


def open_engine(model: GPT, n_slots: int, weights: str) -> Engine | None:
    """Open a faster engine than PyTorch's; None if there is none for this model."""
    if own := find_own_module(model):
        warn_of_mismatch(model, own)
        return None
    if model.device.type != "cpu":
        return GpuEngine(model, n_slots, weights)
    library = load_library(model, weights)
    return None if library is None else NativeEngine(library, model, weights, n_slots)


def load_library(model: GPT, weights: str) -> ctypes.CDLL | None:
    """Return the compiled step if this machine can build one and it computes this model."""
    with show_elapsed("compiling the engine, once for this machine"):
        library = build_library()
    if library is None or not matches_torch(library, model, weights):
        return None
    return library
