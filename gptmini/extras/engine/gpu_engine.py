"""Run PyTorch's engine faster on a GPU: narrow weights, recorded steps, tokens drawn there."""

import torch
from torch import Tensor

from gptmini.extras.engine.device_draw import draw_on_device
from gptmini.extras.engine.fingerprint import Fingerprint
from gptmini.extras.engine.graphs import StepGraphs
from gptmini.extras.engine.packing import copy_as
from gptmini.generate.engine import TorchEngine
from gptmini.generate.precision import widen_weights
from gptmini.generate.sequence import Sequence
from gptmini.machine import multiplies_bfloat16
from gptmini.model.gpt import GPT


class GpuEngine(TorchEngine):
    """Runs texts of any lengths together on a GPU.

    Of weights in bfloat16 it keeps copies of all, where the GPU multiplies them: a step of few
    texts takes the time of reading them, and these are half the bytes. `model` itself is in
    float32, for those who score texts.
    """

    def __init__(
        self, model: GPT, n_slots: int, weights: str, shares: "GpuEngine | None" = None
    ) -> None:
        """`shares` is another engine of the same model, whose copies this one reads, too."""
        computed = model
        if shares is not None:
            computed = shares._model
        elif weights == "bfloat16" and multiplies_bfloat16(model.device):
            computed = copy_as(model, torch.bfloat16)
        else:
            widen_weights(model)
        super().__init__(computed, n_slots)
        self._source = model
        self._weights = weights
        self._fingerprint: Fingerprint = shares._fingerprint if shares else Fingerprint(model)
        # Whether steps are recorded, and tokens drawn on the device. The GPUs of Apple and some of
        # Intel's have no 64-bit floats, which the weights of tokens need.
        self._on_device = model.device.type == "cuda"
        self._graphs = StepGraphs()

    def draw(self, logits: list[Tensor], texts: list[Sequence]) -> dict[Sequence, int]:
        # Told to be deterministic, PyTorch refuses to sum weights up on a GPU.
        if not self._on_device or torch.are_deterministic_algorithms_enabled():
            return super().draw(logits, texts)
        return draw_on_device(torch.stack(logits), texts)

    def is_current(self, model: GPT) -> bool:
        return self._fingerprint.matches(model)

    def open_another(self, n_slots: int) -> "GpuEngine":
        return GpuEngine(self._source, n_slots, self._weights, shares=self)

    def _compute_step(self, inputs: Tensor, n_keys: int) -> Tensor:
        if not self._on_device:
            return super()._compute_step(inputs, n_keys)
        return self._graphs(super()._compute_step, inputs, n_keys)

    def _grow(self, n_rows: int) -> None:
        self._graphs.clear()  # they hold the addresses of the old cache
        super()._grow(n_rows)
