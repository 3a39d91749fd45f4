"""Record a step once as a CUDA graph, and repeat it with other tokens.

A step of a small model is some hundreds of kernels of a few microseconds each, and Python takes
longer to launch a kernel than the GPU to run it. A graph launches them all at once.

Letters: B rows, V vocabulary.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptmini.console import warn

# Computes the logits (B, V) of inputs (3, B, 1), for a number of keys; see engine.py. It must not
# wait for the device.
Step = Callable[[Tensor, int], Tensor]
# Passes before recording. Libraries choose kernels and take memory in the first ones.
WARM_UP_PASSES = 2
# PyTorch can record one graph at a time in a process.
_recording = threading.Lock()


class StepGraphs:
    """Runs a step from a graph for each number of rows and keys; those that fail run without."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._failed: set[tuple[int, int]] = set()

    def __call__(self, step: Step, inputs: Tensor, n_keys: int) -> Tensor:
        """Compute the logits (B, V) of `inputs` (3, B, 1); the next call overwrites them."""
        shape = (inputs.shape[1], n_keys)
        if shape not in self._graphs and shape not in self._failed:
            self._record(shape, step, inputs)
        if shape in self._failed:
            return step(inputs, n_keys)
        return self._graphs[shape](inputs)

    def _record(self, shape: tuple[int, int], step: Step, inputs: Tensor) -> None:
        """Record a graph; if that fails, warn the first time."""
        # Graphs run one after the other, so they may share the memory of what lies between.
        pool = next((graph.pool for graph in self._graphs.values()), None)
        try:
            self._graphs[shape] = _Graph(step, inputs, shape[1], pool)
        except RuntimeError as error:
            if not self._failed:
                reason = str(error).splitlines()[0]
                warn(f"CUDA graph: not recorded ({reason}); generating without, which is slower")
            self._failed.add(shape)

    def clear(self) -> None:
        """Forget all graphs, as when the tensors that they read are replaced."""
        self._graphs = {}


class _Graph:
    """One recorded step, with the tensors that it reads and writes."""

    def __init__(self, step: Step, inputs: Tensor, n_keys: int, pool: Any) -> None:
        """`pool` is the memory of another graph, to be shared with it, or None."""
        self._inputs = inputs.clone()  # (3, B, 1)
        with _recording:
            stream = _create_stream()
            usual_stream = torch.cuda.current_stream()
            try:
                stream.wait_stream(usual_stream)
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UP_PASSES):
                        step(self._inputs, n_keys)
                usual_stream.wait_stream(stream)
                self._graph = torch.cuda.CUDAGraph()
                # Other threads may use the GPU meanwhile.
                with torch.cuda.graph(
                    self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    self._logits = step(self._inputs, n_keys)  # (B, V)
            finally:
                torch.cuda.set_stream(usual_stream)  # a recording that fails stays on its own
        self.pool = self._graph.pool()

    def __call__(self, inputs: Tensor) -> Tensor:
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._logits


@functools.cache
def _create_stream() -> torch.cuda.Stream:
    """Create the stream of all recordings: cuBLAS keeps memory for each stream it has seen."""
    return torch.cuda.Stream()
