"""Count what training, evaluation and generation ask of an accelerator, without having one.

Tensors on the device `gpu` have shapes and types but no numbers, and every operation on them is
counted. Prints a JSON object: kernels, how often the host waited for them, and operations whose
results vary.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gptmini.config.settings import ModelConfig, SampleConfig
from gptmini.extras.engine.device_draw import draw_on_device
from gptmini.extras.engine.packing import copy_as
from gptmini.generate.engine import TorchEngine
from gptmini.generate.sequence import Sequence
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.kernels import linear_cross_entropy
from gptmini.model.losses import compute_token_losses
from gptmini.model.optim import Muon, Optimizer
from gptmini.train.gradients import Gradients
from gptmini.train.group import Group
from gptmini.train.state import CustomParts, Training
from gptmini.train.step import train_step
from tests.support import tiny

VOCABULARY = 257
GPT2: dict[str, Any] = {"position": "learned", "norm": "layernorm", "activation": "gelu"}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "d_ff": 1536}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        **GPT2,
        "bias": True,
        "n_layer": 12,
        "n_head": 12,
        "d_model": 768,
        "vocab_size": 50257,
        "attention": {"qk_norm": False},
    },
    "llama-135m": {
        **LLAMA,
        "n_layer": 30,
        "n_head": 9,
        "d_model": 576,
        "vocab_size": 49152,
        "attention": {"variant": "gqa", "n_kv_head": 3, "qk_norm": False},
    },
}
# Operations of which torch has no deterministic kernel for CUDA, from the documentation of
# torch.use_deterministic_algorithms; `train.deterministic` makes them errors.
VARYING = (
    "cumsum",
    "nll_loss",
    "put_",
    "histc",
    "bincount",
    "median",
    "scatter_reduce",
    "kthvalue",
)
# Views and memory that is only reserved: no kernel runs.
FREE = (
    "view", "_unsafe_view", "detach", "t.", "transpose", "permute", "expand", "alias", "split",
    "unbind", "unsqueeze", "select", "slice", "empty", "new_empty",
)  # fmt: skip


class CountingDevice(TorchDispatchMode):
    """Runs operations on fake tensors, and counts those on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.varying: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and function.namespace == "aten":
            with self:  # then operations come here before they are taken apart
                parts = function.decompose(*args, **(kwargs or {}))
                if parts is not NotImplemented:
                    return parts
        name = str(function).removeprefix("aten.")
        inputs = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        reads_device = any(each.device.type == "gpu" for each in inputs)
        if name.startswith("_local_scalar_dense"):
            self.waits[name] += reads_device
            return 1.0
        result = function(*args, **(kwargs or {}))
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        on_device = [each for each in outputs if each.device.type == "gpu"]
        if reads_device and outputs and not on_device:  # a copy to the host
            self.waits[name] += 1
        returns_nothing = reads_device and name.startswith(("_foreach_", "_fused_"))
        if (on_device or returns_nothing) and not name.startswith(FREE):
            self.kernels[name] += 1
        if on_device and name.startswith(VARYING):
            self.varying.add(name)
        return result


class FakeCompute(Compute):
    """Computes in float32, as torch knows no autocast for the device."""

    def autocast(self) -> Any:
        return nullcontext()


class ZeroBatches:
    """Batches of zeros."""

    def __init__(self) -> None:
        self.prepared: list[int] = []

    def read_ahead(self, step: int) -> None:
        self.prepared.append(step)

    def get_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(4, 16, dtype=torch.long)
        return tokens, tokens


class Stage:
    """As much of a training run as a step needs."""

    compute_rate = Training.compute_rate

    def __init__(self, model: GPT, config: Any, device: torch.device) -> None:
        self.config = config
        self.model = model
        self.compute_loss = model
        self.step = 0
        self.batches = ZeroBatches()
        self.corpus = SimpleNamespace(has_ignored=False)
        self.micro_batches = [0, 1]
        self.compute = FakeCompute(device, torch.float32)
        self.gradients = Gradients(model.parameters())
        self.group = Group()
        self.own = CustomParts()
        self.optimizer = Optimizer(model, config.train)
        self.progress = type("Progress", (), {"loss_scale": 1.0})()


def count_token(name: str, n_texts: int) -> dict[str, Any]:
    """Count what one more token of each text takes, in four layers: the step, and then the draw."""
    settings = MODELS[name] | {"n_layer": 4, "context_length": 1024}
    config = ModelConfig.model_validate(settings)
    with torch.device("gpu"):
        model = copy_as(GPT(config).eval(), torch.bfloat16)
    engine = TorchEngine(model, n_texts)
    sample = SampleConfig(top_k=50, top_p=0.9)
    texts = [Sequence(number, [1] * (5 + number), 1024, sample) for number in range(n_texts)]
    engine(texts)
    for text in texts:
        text.context.append(1)
    with CountingDevice() as step:
        logits = engine(texts)
    with CountingDevice() as draw:
        rows = torch.stack([each[-1] for each in logits])
        draw_on_device(rows, texts)
    return {
        "kernels": step.kernels.total(),
        "draw_kernels": draw.kernels.total(),
        "waits": dict(step.waits + draw.waits),
    }


@contextmanager
def fuse() -> Iterator[None]:
    """Take attention and RMSNorm as the one kernel each that they are on a GPU.

    On a device that it does not know, torch takes them apart.
    """

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return count("sdpa", torch.empty(*q.shape[:-1], v.shape[-1], device="gpu", dtype=q.dtype))

    def rms_norm(x: Tensor, *_: Any) -> Tensor:
        return count("rms_norm", torch.empty_like(x))

    def count(name: str, result: Tensor) -> Tensor:
        if isinstance(active := _get_current_dispatch_mode(), CountingDevice):
            active.kernels[name] += 1
        return result

    with (
        mock.patch.object(functional, "scaled_dot_product_attention", sdpa),
        mock.patch.object(functional, "rms_norm", rms_norm),
    ):
        yield


def count_kernels_of_the_loss(device: torch.device) -> int:
    """Count what 16 x 1,024 tokens take from the last hidden state to the loss and back to it."""
    hidden = torch.zeros(16 * 1024, 64, device=device, requires_grad=True)
    weight = torch.zeros(50_257, 64, device=device, requires_grad=True)
    targets = torch.zeros(16 * 1024, dtype=torch.long, device=device)
    with CountingDevice() as counts:
        linear_cross_entropy(hidden, weight, targets).backward()
    return counts.kernels.total()


def count_kernels_of_an_update(device: torch.device, layers: int) -> int:
    """Count what Muon takes for the matrices of so many layers."""
    matrices = [torch.zeros(shape, device=device) for shape in [(8, 8), (32, 8), (8, 32)] * layers]
    muon = Muon(matrices, 0.1, torch.bfloat16)
    for _ in range(2):  # the second has the momenta of the first
        for matrix in matrices:
            matrix.grad = torch.zeros_like(matrix)
        with CountingDevice() as counts:
            muon.step()
    return counts.kernels.total()


def main() -> None:
    _setup_privateuseone_for_python_backend("gpu")
    attention = {"variant": "gqa", "n_kv_head": 2, "window": 5}
    config = tiny(
        model={"dropout": 0.1, "attention": attention}, train={"micro_batch_size": 2}
    ).with_tokenizer("byte", VOCABULARY)
    found: dict[str, Any] = {}
    device = torch.device("gpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        with device:
            model = GPT(config.model)
        stage = Stage(model, config, device)
        for name in ("train_step", "evaluate"):
            with CountingDevice() as counts:
                if name == "train_step":
                    train_step(stage)  # type: ignore[arg-type]
                else:
                    tokens = torch.zeros(4, 16, dtype=torch.long)
                    compute_token_losses(model.eval(), tokens, tokens)
            found[name] = {
                "kernels": counts.kernels.total(),
                "waits": dict(counts.waits),
                "varying": sorted(counts.varying),
            }
        with fuse():
            for name in MODELS:
                for n_texts in (1, 32):
                    found[f"{name}, {n_texts}"] = count_token(name, n_texts)

        found["prepared"] = stage.batches.prepared
        found["loss"] = count_kernels_of_the_loss(device)
        found["update"] = {layers: count_kernels_of_an_update(device, layers) for layers in (2, 6)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
