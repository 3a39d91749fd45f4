"""Record a step once as a CUDA graph, and repeat it with other tokens.

A step of a small model is some hundreds of kernels of a few microseconds each, and Python takes
longer to launch a kernel than the GPU to run it. A graph launches them all at once.

Letters: R rows, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gptmini.console import warn

# Computes the logits (R, V) of inputs (3, R, 1), for a number of keys; see engine.py.
Step = Callable[[Tensor, int], Tensor]
# Passes before recording. Libraries choose kernels and take memory in the first ones.
WARM_UP_PASSES = 2


class StepGraphs:
    """Runs a step from a graph for each number of rows and keys; without graphs if one fails."""

    def __init__(self, step: Step) -> None:
        """`step` must not wait for the device; see `TorchEngine._compute_step`."""
        self._step = step
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._has_failed = False

    def __call__(self, inputs: Tensor, n_keys: int) -> Tensor:
        """Compute the logits (R, V) of `inputs` (3, R, 1); the next call overwrites them."""
        shape = (inputs.shape[1], n_keys)
        if shape not in self._graphs and not self._has_failed:
            try:
                self._graphs[shape] = _Graph(self._step, inputs, n_keys)
            except RuntimeError as error:
                self.clear()
                self._has_failed = True
                reason = str(error).splitlines()[0]
                warn(f"CUDA graph: not recorded ({reason}); generating without, which is slower")
        if shape not in self._graphs:
            return self._step(inputs, n_keys)
        return self._graphs[shape](inputs)

    def clear(self) -> None:
        """Forget all graphs, as when the tensors that they read are replaced."""
        self._graphs = {}


class _Graph:
    """One recorded step, with the tensors that it reads and writes."""

    def __init__(self, step: Step, inputs: Tensor, n_keys: int) -> None:
        self._inputs = inputs.clone()  # (3, R, 1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_PASSES):
                step(self._inputs, n_keys)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step(self._inputs, n_keys)  # (R, V)

    def __call__(self, inputs: Tensor) -> Tensor:
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._logits
