"""Record the passes of a micro-batch once as a CUDA graph, and repeat them on other tokens.

The forward and backward pass of a compiled GPT-2 are 850 kernels, which a GPU runs in less time
than Python takes to launch them (scripts/LOG.md: What does an H100 say?). A graph launches them all
at once.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from gptmini import machine
from gptmini.console import warn
from gptmini.model.gpt import GPT

# Passes before recording: they compile, choose kernels and take memory.
WARM_UP_PASSES = 2


class RecordedLoss:
    """Computes the loss as the model does, after the first passes from a recording.

    A recording repeats the same kernels on the same memory: it notices no change of the model but
    of its weights, and those only where they are.
    """

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._n_passes = 0
        self._recording: _Recording | None = None
        self._failed = False

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss of targets (B, T), which can be differentiated once."""
        if self._recording is None and not self._failed and self._n_passes >= WARM_UP_PASSES:
            self._record(tokens, targets)
        if self._recording is None or tokens.shape != self._recording.tokens.shape:
            self._n_passes += 1
            return self._model(tokens, targets)
        recording = self._recording
        return _Recorded.apply(recording, tokens, targets, *recording.parameters)

    def _record(self, tokens: Tensor, targets: Tensor) -> None:
        """Record the passes, unless the memory that the recording keeps may be needed."""
        device = tokens.device
        self._failed = machine.get_peak_memory(device) > machine.get_total_memory(device) / 2
        if self._failed:
            return
        try:
            self._recording = _Recording(self._model, tokens, targets)
        except RuntimeError as error:
            self._failed = True
            _free_generator(device)
            reason = str(error).splitlines()[0]
            warn(f"CUDA graph: not recorded ({reason}); training without, which is slower")


def _free_generator(device: torch.device) -> None:
    """Let random numbers be drawn again: torch's generator still belongs to a failed recording."""
    if device.type == "cuda":
        fresh = torch.Generator(device).manual_seed(torch.initial_seed())
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(fresh.graphsafe_get_state())


class _Recording:
    """The two recorded passes, with the tensors that they read and write."""

    def __init__(self, model: GPT, tokens: Tensor, targets: Tensor) -> None:
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.parameters = list(named.values())
        # In the same memory, but new to autograd, which synchronizes the others with their stream.
        twins: dict[str, Tensor] = {
            name: nn.Parameter(each.detach()) for name, each in named.items()
        }
        self.tokens = tokens.clone()  # (B, T)
        self.targets = targets.clone()  # (B, T)
        self._factor = torch.ones((), device=tokens.device)  # the gradient of the loss itself
        self._forward = torch.cuda.CUDAGraph()
        self._backward = torch.cuda.CUDAGraph()
        # Another thread may copy the next batch meanwhile.
        options: Any = {"capture_error_mode": "thread_local"}
        usual_stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._forward, **options):
                loss = functional_call(model, twins, (self.tokens, self.targets))
            with torch.cuda.graph(self._backward, pool=self._forward.pool(), **options):
                self._gradients = torch.autograd.grad(loss, [*twins.values()], self._factor)
        finally:
            torch.cuda.set_stream(usual_stream)  # a recording that fails stays on its own
            torch.clear_autocast_cache()  # of weights that were cast in the recording's memory
        self._loss = loss.detach()

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)
        self._forward.replay()
        return self._loss.clone()

    def compute_gradients(self, factor: Tensor) -> tuple[Tensor, ...]:
        """Compute `factor` () times the gradients of the loss that was computed last."""
        self._factor.copy_(factor)
        self._backward.replay()
        return torch._foreach_mul(self._gradients, 1)  # copies: the next pass overwrites them


class _Recorded(torch.autograd.Function):
    """Makes a recording part of what autograd differentiates."""

    @staticmethod
    def forward(
        ctx: Any, recording: _Recording, tokens: Tensor, targets: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.recording = recording
        return recording.compute_loss(tokens, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.recording.compute_gradients(factor)
