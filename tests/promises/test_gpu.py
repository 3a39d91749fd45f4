"""A GPU computes what a CPU does. Nothing of conftest.py is used, so that these run anywhere.

scripts/README.md says how to run them on a bare machine, and on a CPU in place of the GPU.
"""

import copy
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gptmini.config.settings import AttentionConfig, ModelConfig
from gptmini.errors import Stopped
from gptmini.extras.engine.gpu_engine import GpuEngine
from gptmini.generate.run import load_run
from gptmini.generate.sequence import Sequence
from gptmini.machine import pick_compute
from gptmini.model.attention import attend, make_mask
from gptmini.model.compile import compile_blocks
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics
from gptmini.train import loop
from gptmini.train.api import fit
from gptmini.train.cuda_graph import RecordedLoss

DEVICE = os.environ.get("GPTMINI_TEST_DEVICE", "cuda")
# Before the first test uses CUDA: gptmini does so only where it chooses the device itself.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # a driver or compiler may warn of anything
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs CUDA"),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"variant": "gqa", "n_kv_head": 2},
    "mqa": {"variant": "mqa"},
    "window": {"window": 8},
    "window, every second layer full": {"window": 8, "full_every": 2},
    "gqa in a window": {"variant": "gqa", "n_kv_head": 2, "window": 8},
}
STYLES: dict[str, dict[str, Any]] = {
    "gpt-2": {"position": "learned", "activation": "gelu", "bias": True, "tie_embeddings": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": False},
    "bloom": {"position": "alibi", "activation": "gelu", "bias": True},
    "default": {},
}
LINE = "{}. The cat of the king sat on mat {}, and {} is not {}.\n"
TEXT = "".join(LINE.format(n, n % 7, n, n + 1) for n in range(300))


def made(attention: dict[str, Any] | None = None, **settings: Any) -> GPT:
    """A model with the same random weights each time, on the CPU."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "n_layer": 2, "n_head": 4, "d_model": 64, "context_length": 64}
    config = AttentionConfig.model_validate(attention or {})
    return GPT(ModelConfig(attention=config, **{**sizes, **settings}))


def gradients(model: GPT) -> dict[str, Tensor]:
    """The loss on fixed tokens, and its gradients by parameter, on the CPU."""
    drawn = torch.randint(101, (3, 41), generator=torch.Generator().manual_seed(1))
    tokens = drawn.to(model.device)
    value = model(tokens[:, :-1], tokens[:, 1:])
    value.backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": value.detach().cpu()}


def assert_equal_gradients(ours: GPT, reference: GPT) -> None:
    torch.testing.assert_close(gradients(ours), gradients(reference), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_attention_has_the_loss_and_gradients_of_the_cpu(variant, backend):
    model = made({**VARIANTS[variant], "backend": backend})
    reference = made({**VARIANTS[variant], "backend": "eager"})
    assert_equal_gradients(model.to(DEVICE), reference)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_kind_of_model_has_the_loss_and_gradients_of_the_cpu(style, checkpointing):
    model = made(**STYLES[style])
    model.gradient_checkpointing = checkpointing
    assert_equal_gradients(copy.deepcopy(model).to(DEVICE), model)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_eager_and_fused_attention_agree_in_bfloat16(windowed, n_kv_head):
    random = torch.Generator().manual_seed(2)
    heads = [
        torch.randn(2, n, 300, 64, generator=random).to(DEVICE, torch.bfloat16)
        for n in (4, n_kv_head, n_kv_head)
    ]
    positions = torch.arange(300, device=DEVICE)
    mask = make_mask(positions, positions, 32) if windowed else None

    def outcome(dtype: torch.dtype, backend: str) -> list[Tensor]:
        q, k, v = (head.detach().clone().to(dtype).requires_grad_() for head in heads)
        mixed = attend(q, k, v, mask, backend=backend)
        mixed.square().sum().backward()
        return [tensor.float() for tensor in (mixed.detach(), q.grad, k.grad, v.grad)]

    exact = outcome(torch.float32, "eager")
    for name in ("eager", "sdpa"):
        for right, ours in zip(exact, outcome(torch.bfloat16, name), strict=True):
            assert (ours - right).norm() < 0.015 * right.norm()  # bfloat16 rounds by up to 0.004


@pytest.mark.parametrize("style", STYLES)
def test_compiled_blocks_equal_those_that_are_not(style):
    model = made(**STYLES[style]).to(DEVICE)
    compiled = copy.deepcopy(model)
    compile_blocks(compiled)
    assert_equal_gradients(compiled, model)


def followed(model: GPT, compute_loss: Any, steps: int = 6) -> list[Tensor]:
    """The losses of some updates with dropout, and then the weights, on the CPU."""
    losses = []
    for step in range(steps):
        tokens = torch.randint(101, (3, 41), generator=torch.Generator().manual_seed(step))
        tokens = tokens.to(model.device)
        torch.manual_seed(step)
        for _ in range(2):  # micro-batches
            value = compute_loss(tokens[:, :-1], tokens[:, 1:])
            (value / 3).backward()
            losses.append(value.detach().cpu())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return losses + [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA graphs")
@pytest.mark.parametrize(
    ("style", "compiled", "waits"),
    [
        ("gpt-2", True, False),
        ("llama", False, False),
        ("bloom", False, False),
        ("default", True, False),
        ("default", False, True),  # for the device, which no graph can repeat
    ],
)
def test_recorded_passes_have_the_bits_of_plain_ones(style, compiled, waits, capsys):
    compute = pick_compute(DEVICE, "float32", "on")
    results = []
    for is_recorded in (False, True):
        model = made(dropout=0.1, **STYLES[style]).to(DEVICE).train()
        if compiled:
            compile_blocks(model)
        compute_loss = RecordedLoss(model) if is_recorded else model
        if waits:
            whole = model.compute_loss
            model.compute_loss = lambda x, y, whole=whole: (x.sum().item(), whole(x, y))[1]
        with compute.enter_training():
            results.append(followed(model, compute_loss))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert ("CUDA graph" in capsys.readouterr().err) == waits


# -- whole runs ------------------------------------------------------------------------------------


def settings(folder: Path, device: str, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    """A small training in float32, which needs no other settings to be the same everywhere."""
    (folder / "text.txt").write_text(TEXT)
    sizes = {"n_layer": 2, "n_head": 4, "d_model": 64, "context_length": 32, "dropout": 0}
    fixed = {"device": device, "dtype": "float32", "compile": "off", "micro_batch_size": 4}
    intervals = {"eval_every": 4, "save_every": 4, "log_every": 1, "batch_size": 8}
    return {
        "model": {**sizes, **model},
        "tokenizer": {"kind": "byte"},
        "data": {"path": str(folder / "text.txt")},
        "train": {**fixed, **intervals, "steps": 8, **train},
    }


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("float16", 5e-3)])
def test_training_follows_that_of_the_cpu(dtype, tolerance, optimizer, tmp_path):
    losses = []
    for device, its_dtype in (("cpu", "float32"), (DEVICE, dtype)):
        asked = settings(tmp_path, device, {}, optimizer=optimizer, dtype=its_dtype)
        fit(asked, tmp_path / f"{device} in {its_dtype}")
        lines = read_metrics(tmp_path / f"{device} in {its_dtype}" / "metrics.jsonl")
        losses.append([(line["train_loss"], line.get("val_loss", 0.0)) for line in lines])
    assert losses[0][-1][1] < losses[0][3][1]
    found, expected = torch.tensor(losses[1]), torch.tensor(losses[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"variant": "gqa", "n_kv_head": 2},
        {"variant": "mqa", "backend": "eager"},
        {"variant": "gqa", "n_kv_head": 2, "window": 8},
    ],
)
def test_greedy_texts_are_those_of_the_cpu_alone_and_in_a_batch(attention, tmp_path):
    asked = settings(tmp_path, "cpu", {"attention": attention}, steps=60, eval_every=60)
    fit(asked, tmp_path / "run")
    prompts = ["The cat ", "12. The", "", "a text that fills more than the 32 positions of context"]
    drawn: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
    plain = load_run(tmp_path / "run", "cpu", "float32").start(prompts, use_cache=False, **drawn)
    expected = [text.tokens for text in plain.finish()]
    run = load_run(tmp_path / "run", DEVICE, "float32")
    together = [text.tokens for text in run.start(prompts, **drawn).finish()]
    alone = [run.start([prompt], **drawn).finish()[0].tokens for prompt in prompts]
    assert together == alone == expected


def test_recorded_steps_read_new_tokens_and_a_grown_cache():
    model = made(context_length=1024).to(DEVICE).eval()
    engine = GpuEngine(model, 5, "float32")
    drawn = torch.randint(101, (5, 600), generator=torch.Generator().manual_seed(3)).tolist()
    texts = [Sequence(number, drawn[number][:6], 1024) for number in range(5)]
    for n_texts, length in (
        (1, 6),
        (1, 7),
        (2, 8),
        (5, 9),
        (5, 10),
        (3, 11),
        (5, 300),
        (5, 301),
        (5, 302),
    ):
        for number, text in enumerate(texts[:n_texts]):
            text.context = drawn[number][:length]
        for text, logits in zip(texts, engine(texts[:n_texts]), strict=False):
            with torch.no_grad():
                expected = model(torch.tensor([text.context], device=DEVICE))[0, -1:]
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("attention", "deterministic"),
    [
        ({"backend": "eager"}, "off"),
        ({}, "auto"),
        ({"variant": "gqa", "n_kv_head": 2, "window": 8}, "on"),  # another kernel, for its mask
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(
    attention, deterministic, dtype, tmp_path
):
    update = loop.train_step

    def stopping(training: Any) -> dict[str, Any]:
        if training.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(training)

    model = {"dropout": 0.1, "attention": attention}
    asked = settings(tmp_path, DEVICE, model, deterministic=deterministic, dtype=dtype)
    with mock.patch.object(loop, "train_step", stopping), pytest.raises(Stopped):
        fit(asked, tmp_path / "stopped")
    assert RunDirectory(tmp_path / "stopped").list_steps()[0] == 5
    for name in ("stopped", "straight"):
        fit(asked, tmp_path / name)
    ends = [
        RunDirectory(tmp_path / name).load_checkpoint(8, True) for name in ("stopped", "straight")
    ]
    assert ends[0].sha256 == ends[1].sha256
    for name, state in ends[0].optimizer.items():
        assert torch.equal(state, ends[1].optimizer[name]), name
