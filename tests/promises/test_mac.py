"""Commands on a Mac's GPU that is not here; see mac_like.py."""

import json

import pytest

from tests.promises.commands import TRAIN, run_in

# Operations with kernels of their own in PyTorch 2.13's package for macOS (its symbols that begin
# with wrapper_MPS), and those that are made of others. A new one must have a kernel there: Macs
# should not need PYTORCH_ENABLE_MPS_FALLBACK.
METAL = """
_fused_adamw_.default _local_scalar_dense.default _log_softmax.default
_softmax_backward_data.default add.Tensor add_.Tensor addmm.default all.default any.default
baddbmm.default bernoulli_.float bitwise_and_.Tensor bitwise_not.default bmm.default cat.default
clamp.default
div.Tensor div_.Tensor embedding_dense_backward.default empty.memory_format eq.Scalar eq.Tensor
equal.default
exp_.default expm1.default gather.default ge.Scalar ge.Tensor gelu.default gelu_backward.default
gt.Scalar gt.Tensor index.Tensor lerp.Scalar lerp_.Scalar linalg_vector_norm.default linear.default
lt.Scalar maximum.default mean.dim mm.default mul.Tensor mul_.Tensor native_layer_norm.default
native_layer_norm_backward.default ne.Scalar neg.default permute.default pow.Tensor_Scalar
reciprocal.default rsqrt.default scatter_.src scatter_add_.default silu.default
silu_backward.default sub.Tensor sub_.Tensor sum.dim_IntList tril.default view.default
where.self
"""
COMPOSITE = """
__and__.Tensor __iand__.Tensor __or__.Tensor _foreach_add_.List _foreach_add_.Scalar
_foreach_lerp_.Scalar _foreach_mul_.Scalar _safe_softmax.default _to_copy.default
_unsafe_view.default abs.default add_.Scalar alias.default arange.default arange.start
chunk.default clone.default copy_.default detach.default div.Scalar div_.Scalar
embedding.default empty_like.default expand.default flatten.using_ints full_like.default
index_put_.default is_nonzero.default layer_norm.default logsumexp.default masked_fill.Scalar
masked_fill_.Scalar
mul.Scalar new_empty.default
new_zeros.default ones.default ones_like.default remainder.Scalar repeat_interleave.self_int
reshape.default where.ScalarOther
rms_norm.default scalar_tensor.default scaled_dot_product_attention.default select.int
slice.Tensor split.Tensor split_with_sizes.default squeeze.dim stack.default sum.default
t.default to.dtype to.dtype_layout transpose.int type_as.default unbind.int unflatten.int view.dtype
unsqueeze.default zeros.default zeros_like.default
"""

ON_MPS = ["--device", "mps"]
ROTARY = ["--set", "model.dropout=0.1", "--set", "model.activation=swiglu"]
ROTARY += ["--set", "model.attention={window: 5, variant: gqa, n_kv_head: 2}"]
LEARNED = ["--set", "model.position=learned", "--set", "model.norm=layernorm"]
LEARNED += ["--set", "model.bias=true", "--set", "model.activation=gelu"]
COMMANDS = [
    [*TRAIN, "--out", "run", *ON_MPS, *ROTARY],
    [*TRAIN, "--out", "run", *ON_MPS, *ROTARY, "--steps", "8"],  # resumes
    [*TRAIN, "--out", "gpt2", *ON_MPS, *LEARNED],
    [*TRAIN, "--from", "gpt2", "--out", "tuned", *ON_MPS],
    ["generate", "run", "--prompt", "It was", *ON_MPS],
    ["generate", "run", "--prompts", "prompts.jsonl", "--out", "texts.jsonl", *ON_MPS],
    ["score", "run", "--text", "It was", "--json", *ON_MPS],
    ["inspect", "run", "--prompt", "It was"],
    ["compare", "run", "gpt2", "--out", "compared"],
    ["evaluate", "run", "--json", *ON_MPS],
    ["evaluate", "run", "--json", "--device", "cpu"],
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], list[str], str]:
    """Exit codes, the lines of stdout, and stderr."""
    folder = tmp_path_factory.mktemp("mac")
    codes, out, said = run_in("tests.promises.mac_like", folder, COMMANDS)
    return codes, out.splitlines(), said


def test_every_computing_command_runs_on_a_macs_gpu(done):
    codes, _, said = done
    assert codes == [0] * len(COMMANDS), said
    assert "mps" in said
    assert "Warning" not in said


def test_a_macs_gpu_computes_what_the_cpu_does(done):
    _, (*_, on_mps, on_cpu, _), _ = done
    assert json.loads(on_mps)["loss"] == pytest.approx(json.loads(on_cpu)["loss"], abs=1e-5)


def test_every_operation_has_a_kernel_for_macs(done):
    _, (*_, used), _ = done
    assert set(json.loads(used)) <= {*METAL.split(), *COMPOSITE.split()}
