import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptmini.model import kernels
from gptmini.model.kernels import (
    Dropout,
    RMSNorm,
    cross_entropy_,
    linear_cross_entropy,
    square_relu,
)
from tests.storages import StorageCounter


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


def compute_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy by torch, divided by all rows."""
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / len(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_cross_entropy_is_that_of_torch_in_float32(rows: int, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK_ON_CPU", 7 * 50)  # 7 rows at a time
    torch.manual_seed(rows)
    scores, targets = 5 * torch.randn(rows, 50, dtype=dtype), torch.randint(50, (rows,))
    targets[1::3] = -100  # ignored, but counted as rows
    ours, torchs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    losses = cross_entropy_(ours * 1, targets), compute_mean(torchs.float(), targets)
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


def compute_by_definition(
    hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and a quarter of its gradients, in float64."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss = compute_mean(F.linear(*inputs), targets)
    return (loss.detach(), *torch.autograd.grad(loss / 4, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [50, 64, 65])
@pytest.mark.parametrize("rows", [1, 7, 512, 700])
def test_head_and_loss_in_chunks_are_those_of_torch(rows, vocab_size, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK", 300 * 64)  # a tile of 256 rows at a time
    torch.manual_seed(rows)
    hidden = torch.randn(rows, 16, requires_grad=True)
    weight = torch.randn(vocab_size, 16, requires_grad=True)
    targets = torch.randint(vocab_size, (rows,))
    targets[1::3] = -100  # ignored, but counted as rows
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    (loss * 0.25).backward()  # as a micro-batch of four
    tolerance = 1e-5 if dtype == torch.float32 else 0.01  # bfloat16 rounds by up to 0.004
    found = (loss.detach(), hidden.grad, weight.grad)
    for ours, right in zip(found, compute_by_definition(hidden, weight, targets), strict=True):
        assert ours.shape == right.shape
        assert (ours - right).norm() < tolerance * right.norm()


def test_all_products_of_the_head_have_rows_of_whole_blocks(monkeypatch):
    """A GPU's fast kernels read 16 bytes at a time: rows must not begin between two blocks."""
    monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK", 300 * 64)
    hidden = torch.randn(700, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, torch.zeros(700, dtype=torch.long)).backward()
    assert len(products.strides) == 3 * 3 * 3  # chunks, products, and the tensors of each
    assert {stride * 2 % 16 for stride in products.strides} == {0}


class Products(TorchDispatchMode):
    """Notes the distance between two rows, or columns, of the tensors of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function == torch.ops.aten.mm.default:
            self.strides += [max(tensor.stride()) for tensor in (*args, result)]
        return result


def test_the_gradient_of_a_frequent_token_stays_in_the_range_of_float16():
    hidden = torch.full((512, 16), 200.0, requires_grad=True)  # 512 · 200 is beyond 65,504
    weight = torch.zeros(50, 16, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.long)
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, weight, targets)
    (ours,) = torch.autograd.grad(loss, weight)
    right = 4 * compute_by_definition(hidden, weight, targets)[2]
    assert (ours - right).norm() < 0.01 * right.norm()


def test_gradients_of_many_chunks_are_added_in_float32(monkeypatch):
    """In bfloat16, 64 equal summands lose more than each product does."""
    monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK", 1)  # 256 rows at a time
    chunk = torch.randn(256, 16)
    weight = torch.randn(64, 16, requires_grad=True)
    targets = torch.randint(64, (256,))
    gradients = []
    for count in (1, 64):
        hidden = chunk.repeat(count, 1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets.repeat(count))
        (gradient,) = torch.autograd.grad(loss, weight)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_head_and_loss_never_hold_all_logits(monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_PER_CHUNK", 256 * 1024)
    weight = torch.randn(1000, 8, requires_grad=True)
    peaks = []
    for rows in (256, 1024):
        hidden = torch.randn(rows, 8, requires_grad=True)
        targets = torch.randint(1000, (rows,))
        with StorageCounter() as storages, torch.autocast("cpu", torch.bfloat16):
            linear_cross_entropy(hidden, weight, targets).backward()
        peaks.append(storages.peak)
    assert peaks[1] < 1.1 * peaks[0]


def test_without_gradients_only_the_loss_is_computed():
    hidden = torch.randn(5, 8)
    weight = torch.randn(50, 8)
    targets = torch.randint(50, (5,))
    with Products() as products:
        loss = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, weight), targets))
    assert len(products.strides) == 3


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch's own
def test_the_compiled_softmax_is_the_plain_one():
    """Traced as one graph, without generating code."""
    plain = kernels.softmax_
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True, dynamic=False)
    hidden = torch.randn(20, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (20,))
    loss = linear_cross_entropy(hidden, weight, targets, compiled)
    (loss / 4).backward()
    right = compute_by_definition(hidden, weight, targets)
    found = (loss.detach(), hidden.grad, weight.grad)
    torch.testing.assert_close(found, tuple(tensor.float() for tensor in right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_square_of_relu_and_its_gradient_are_those_of_torch(dtype: torch.dtype):
    torch.manual_seed(0)
    values = torch.randn(41, 43, dtype=dtype)
    values[0] = 0
    x = values.requires_grad_()
    other = torch.randn(41, 43, dtype=dtype)
    ours, torchs = square_relu(x), F.relu(x).square()
    assert torch.equal(ours, torchs)
    gradients = [torch.autograd.grad(y, x, other)[0] for y in (ours, torchs)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("p", [1 / 256, 0.1, 0.25, 0.5, 0.9, 255 / 256])
def test_dropout_zeroes_its_share_and_rescales_the_rest(p: float):
    torch.manual_seed(0)
    share = round(256 * p) / 256  # a random byte decides
    x = torch.full((600, 601), 3.0)
    dropped = Dropout(p).train()(x)
    assert dropped.shape == x.shape
    kept = dropped[dropped != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 3 / (1 - share)))
    spread = math.sqrt(share * (1 - share) / x.numel())
    assert 1 - len(kept) / x.numel() == pytest.approx(share, abs=5 * spread)
    # Rows and columns are hit alike, not in a pattern.
    for axis in (0, 1):
        shares = (dropped == 0).double().mean(axis)
        assert shares.std().item() == pytest.approx(math.sqrt(share * (1 - share) / 600), rel=0.2)


@pytest.mark.parametrize("p", [None, 0.0, 1 / 513, 0.5])
def test_dropout_returns_its_input_in_evaluation_or_where_it_drops_nothing(p: float | None):
    x = torch.randn(7, 9)
    assert torch.equal(Dropout(p).eval()(x), x)
    assert torch.equal(Dropout(p).train()(x), x) == (p != 0.5)


def test_dropout_follows_the_seed_and_passes_gradients_of_what_it_keeps():
    dropout, x = Dropout(0.5).train(), torch.ones(41, 43, requires_grad=True)
    torch.manual_seed(1)
    first = dropout(x)
    second = dropout(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(second, first)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient, first)  # 0 where dropped, 2 where kept
