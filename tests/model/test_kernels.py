import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gptmini.model import kernels
from gptmini.model.kernels import RMSNorm, cross_entropy_
from gptmini.plan.memory import StorageCounter


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 33), st.integers(0, 99))
def test_rmsnorm_and_its_gradients_are_those_of_torch(rows, width, seed):
    torch.manual_seed(seed)
    norm, dtype = RMSNorm(width, eps=0.1), torch.float64  # an eps that counts
    norm.weight.data = torch.randn(width, dtype=dtype)
    x = torch.randn(*rows, width, dtype=dtype, requires_grad=True)
    other = torch.randn(*rows, width, dtype=dtype)  # a gradient that differs everywhere
    results = []
    for y in (norm(x), F.rms_norm(x, (width,), norm.weight, 0.1)):
        results.append((y, *torch.autograd.grad((y * other).sum(), (x, norm.weight))))
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_rmsnorm_takes_heads_that_are_not_contiguous():
    norm = RMSNorm(8, eps=1e-5)
    heads = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    gradients = [
        torch.autograd.grad((y * torch.arange(8.0)).sum(), (heads, norm.weight))
        for y in (norm(heads), F.rms_norm(heads, (8,), norm.weight, norm.eps))
    ]
    for ours, torchs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_cross_entropy_is_that_of_torch_in_float32(rows: int, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK_ON_CPU", 7 * 50)  # 7 rows at a time
    torch.manual_seed(rows)
    scores, targets = 5 * torch.randn(rows, 50, dtype=dtype), torch.randint(50, (rows,))
    ours, torchs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    losses = cross_entropy_(ours * 1, targets), F.cross_entropy(torchs.float(), targets)
    torch.testing.assert_close(*losses)
    assert losses[0].dtype == torch.float32
    for loss in losses:
        (loss * 0.25).backward()  # as a micro-batch of four
    assert ours.grad is not None
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_cross_entropy_keeps_small_gradients_in_float16():
    """Each is divided by 40,000 rows, and multiplied by the scale of the loss."""
    torch.manual_seed(0)
    scores, targets = torch.randn(40_000, 9).half(), torch.randint(9, (40_000,))
    ours, torchs = scores.clone().requires_grad_(), scores.float().requires_grad_()
    for logits, loss in ((ours, cross_entropy_), (torchs, F.cross_entropy)):
        (loss(logits * 1, targets) * 2**16).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.float(), torchs.grad, rtol=2e-3, atol=0)


def test_cross_entropy_holds_no_second_tensor_of_the_size_of_the_logits(monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK_ON_CPU", 1000)
    targets = torch.randint(1000, (512,))
    with StorageCounter() as storages:
        logits = torch.randn(512, 1000, dtype=torch.bfloat16).requires_grad_()
        copy = logits * 1
        cross_entropy_(copy, targets).backward()
    assert storages.peak < 3.1 * copy.nbytes  # logits, copy, their gradient of `* 1`
