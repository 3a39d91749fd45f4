import copy
import os
import platform
import random
import shutil
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmini.config.settings import ModelConfig
from gptmini.extras.engine import build, check
from gptmini.generate import precision
from gptmini.model.cache import StaticCache
from gptmini.model.gpt import GPT
from tests.extras.engine.samples import LENGTH, models, run, step_of
from tests.support import needs_posix

WITHOUT_AMX = ("-march=native", "-mno-amx-bf16")
# This processor, and what it would do with fewer instructions; each takes seconds to compile.
TARGETS: list[Any] = [build.NATIVE_TARGET]
if platform.machine() == "x86_64":
    less = [
        WITHOUT_AMX,
        (*WITHOUT_AMX, "-mno-avx512bf16", "-mno-avx512vnni"),
        ("-march=native", "-mno-avx512f", "-mtune=znver3"),  # which needs build.py's --param
    ]
    TARGETS += [("-march=x86-64",), *(pytest.param(each, marks=pytest.mark.slow) for each in less)]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


def compute_rounded(library: CDLL, model: GPT, weights: str, tokens: list[int]) -> torch.Tensor:
    """The logits (T, V) of torch, with all rounded that the compiled step rounds."""
    model = copy.deepcopy(model)
    if weights != "float32":
        check._round_inputs(library, model, weights)
    memory = StaticCache(model.config, 1, model.device, torch.float32, max_pass_tokens=LENGTH)
    positions = torch.arange(LENGTH)[None]
    cache = memory.select(slice(0, 1), positions, positions >= 0, LENGTH)
    return model.compute_logits(model.forward_hidden(torch.tensor([tokens]), cache)[0])


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=" ".join)
@settings(max_examples=15, deadline=None)
@given(model=models(), weights=st.sampled_from(list(precision.PRECISIONS)), seed=st.integers(0, 99))
def test_the_step_computes_the_model_with_the_same_bits_whatever_shares_the_call(
    target, model, weights, seed
):
    dice = random.Random(seed)
    precision.round_weights(model, weights)
    step = step_of(model, weights, 4, target)
    tokens = torch.randint(model.config.vocab_size, (LENGTH,)).tolist()
    alone = torch.cat([run(step, [t], 0, p) for p, t in enumerate(tokens)])
    precision.widen_weights(model)
    assert torch.equal(run(step_of(model, weights, 1, target), tokens), alone)
    with torch.no_grad():
        library = build.build_library(target)
        expected = compute_rounded(library, model, weights, tokens)
    # Sums in another order may round an input or a key the other way, rarely and by 1/256.
    off = float((alone - expected).norm() / expected.norm())
    assert off < {"float32": 1e-5, "bfloat16": 5e-3, "int8": 2e-3}[weights]

    done = {1: 0, 2: 0, 3: 0}  # rows, each fed the same tokens in pieces of its own
    while any(end < LENGTH for end in done.values()):
        places = []
        for row, start in done.items():
            end = min(LENGTH, start + dice.choice([0, 1, 3, 9, LENGTH]))
            places += [(row, place) for place in range(start, end)]
            done[row] = end
        if places:
            rows, positions = map(list, zip(*places, strict=True))
            wanted = [n for n in range(len(places)) if dice.random() < 0.7]
            found = step([tokens[p] for p in positions], rows, positions, wanted)
            assert torch.equal(found, alone[[positions[n] for n in wanted]])


@needs_compiler
@pytest.mark.parametrize("weights", precision.PRECISIONS)
def test_any_number_of_threads_gives_the_same_bits(weights):
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=50, n_layer=2)).eval()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        step = step_of(model, weights)
        whole = run(step, [*range(40)])
        found.append(torch.cat([whole, *(run(step, [n], 0, n) for n in range(20))]))
    torch.set_num_threads(1)
    for other in found[1:]:
        assert torch.equal(found[0], other)
    assert torch.equal(whole[:20], found[0][40:])


@needs_compiler
@pytest.mark.parametrize("weights", precision.PRECISIONS)
@pytest.mark.parametrize("width", [40, 64])  # with padding, and without
def test_damaged_weights_and_values_are_noticed(width, weights):
    """As a NaN in the logits: no rounding may hide one, and none stays for the next text."""
    torch.manual_seed(0)
    for value in (torch.nan, torch.inf):
        config = ModelConfig(vocab_size=50, n_layer=2, d_model=width, tie_embeddings=False)
        model = GPT(config).eval()
        with torch.no_grad():
            model.embed.weight[3, 5] = value
        step = step_of(model, weights)
        before = run(step, [1, 4, 1])
        assert not torch.isfinite(run(step, [3, 2], start=3).sum(1)).any()
        assert torch.isfinite(before).all()
        assert torch.equal(run(step, [1, 4, 1]), before)


@needs_compiler
def test_int8_sums_of_extreme_inputs_stay_within_32_bits():
    """Equal signs everywhere and one input far above the others, in thousands of columns."""
    model = GPT(ModelConfig(vocab_size=50, n_layer=1, d_ff=8192, activation="relu2", bias=True))
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight.zero_()
        down = model.blocks[0].mlp.down_proj.weight  # rows that differ: the norm drops the mean
        down.copy_(torch.randn(len(down), 1).expand_as(down) / 100)
        for largest in (1.0, 30.0):
            model.blocks[0].mlp.up_proj.bias.fill_(1.0)[7] = largest
            precision.round_weights(model, "int8")
            precision.widen_weights(model)
            expected = model(torch.tensor([[1]]))[0]
            found = run(step_of(model, "int8"), [1])
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@given(st.integers(0, 1000))
def test_int8_weights_are_at_most_half_a_step_off(seed):
    weights = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed))
    weights[0] = 0
    whole, scales = precision.quantize(weights)
    assert whole.abs().max() == 127
    off = (whole * scales[:, None] - weights).abs()
    assert (off <= scales[:, None] * 0.501).all()


def test_rounding_leaves_norms_and_positions_unchanged():
    model = GPT(ModelConfig(vocab_size=50, n_layer=1, position="learned"))
    before = copy.deepcopy(model.state_dict())
    precision.round_weights(model, "bfloat16")
    matrices = {name for name, now in model.state_dict().items() if now.dtype == torch.bfloat16}
    precision.widen_weights(model)
    changed = {name for name, now in model.state_dict().items() if not now.equal(before[name])}
    assert changed == {name for name, now in before.items() if now.ndim == 2} - {"positions.weight"}
    assert matrices == changed
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@needs_posix
def test_without_a_compiler_there_is_no_library_and_a_failing_one_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    build.build_library.cache_clear()
    assert build.build_library() is None
    assert capsys.readouterr().err == ""
    broken = tmp_path / "g++"
    for command, reason in [
        ("echo notes; echo 'x.cpp:1: fatal error: no <cmath>' >&2; exit 1", "x.cpp:1: fatal error"),
        ("exit 3", "(exit 3)"),
    ]:
        broken.write_text(f"#!/bin/sh\n{command}\n")
        broken.chmod(0o755)
        build.build_library.cache_clear()
        assert build.build_library() is None
        assert build.build_library() is None
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("warning: g++: cannot compile the decoder (")
        assert reason in line


@needs_posix
def test_a_compiler_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_SECONDS", 0.1)
    build.build_library.cache_clear()
    assert build.build_library() is None
    assert capsys.readouterr().err == (
        "warning: g++: has not compiled the decoder within 0.1 seconds; using PyTorch, "
        "which is slower\n"
    )


@needs_posix
@needs_compiler
def test_a_damaged_library_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "quick.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCE_FILES", [source])
    cache = tmp_path / "cache"
    monkeypatch.setenv("GPTMINI_CACHE", str(cache))
    build.build_library.cache_clear()
    assert build.build_library() is not None
    (library,) = (cache / "native").iterdir()
    whole = library.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"x"):
        library.unlink()  # what is in memory keeps its bytes
        library.write_bytes(damaged)
        library.chmod(0o700)
        build.build_library.cache_clear()
        compiled = build.build_library()
        assert compiled is not None
        assert compiled.answer() == 42
        (library,) = (cache / "native").iterdir()
    build.build_library.cache_clear()


@needs_posix
@needs_compiler
def test_the_library_is_compiled_once_a_processor_and_refused_if_others_could_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "quick.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCE_FILES", [source])
    monkeypatch.setenv("GPTMINI_CACHE", str(tmp_path / "new"))
    build.build_library.cache_clear()
    assert build.build_library() is not None
    (library,) = (tmp_path / "new" / "native").iterdir()
    made = library.stat().st_mtime_ns
    build.build_library.cache_clear()
    assert build.build_library() is not None
    assert library.stat().st_mtime_ns == made
    with monkeypatch.context() as elsewhere:  # a machine with the same home directory
        elsewhere.setattr(build, "_read_processor", lambda: "another")
        build.build_library.cache_clear()
        assert build.build_library() is not None
    assert len(list(library.parent.iterdir())) == 2
    for others in (0o020, 0o002):  # the group, or anybody, could write it
        library.chmod(0o700 | others)
        build.build_library.cache_clear()
        assert build.build_library() is None
    library.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: -1)  # another user's
    build.build_library.cache_clear()
    assert build.build_library() is None
    build.build_library.cache_clear()


@needs_compiler
def test_a_cache_that_cannot_be_written_means_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "native").write_text("a file where the folder should be")
    monkeypatch.setenv("GPTMINI_CACHE", str(tmp_path))
    build.build_library.cache_clear()
    assert build.build_library() is None
    assert not list(tmp_path.glob("native?*"))
    build.build_library.cache_clear()
