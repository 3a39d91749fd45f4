import copy
import os
import random
import shutil
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmini import files
from gptmini.config.settings import ModelConfig
from gptmini.generate import build, native, precision
from gptmini.model.attention import KVCache
from gptmini.model.gpt import GPT

LENGTH = 24
SPARE = 8

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


@st.composite
def models(draw: st.DrawFn) -> GPT:
    one_of = lambda *choices: draw(st.sampled_from(choices))
    variant, window = one_of("mha", "gqa", "mqa"), one_of(None, 1, 3, 7)
    n_head = one_of(2, 4, 6)
    config = ModelConfig.model_validate(
        {
            "vocab_size": one_of(5, 37, 130),
            "n_layer": 3,
            "n_head": n_head,
            "d_model": 8 * n_head,
            "head_dim": one_of(8, 10, 32),
            "d_ff": one_of(8, 40, 100),
            "context_length": LENGTH,
            "attention": {
                "variant": variant,
                "n_kv_head": 2 if variant == "gqa" else None,
                "window": window,
                "full_every": one_of(None, 2) if window else None,
                "qk_norm": one_of(True, False),
                "qkv_bias": one_of(None, True, False),
            },
            "position": one_of("learned", "rope", "none"),
            "norm": one_of("layernorm", "rmsnorm"),
            "activation": one_of("gelu", "swiglu", "relu2"),
            "bias": one_of(True, False),
            "tie_embeddings": one_of(True, False),
        }
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    model = GPT(config).eval()
    with torch.no_grad():  # norms and biases that differ from their initial values
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def step_of(model: GPT, weights: str = "float32", n_rows: int = 1) -> native.NativeStep:
    library = build.build(files.CACHE)
    assert library is not None
    cache = KVCache(model.config, n_rows, torch.device("cpu"), torch.float32, SPARE)
    return native.NativeStep(library, model, weights, cache)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(model=models(), weights=st.sampled_from(list(precision.PRECISIONS)), seed=st.integers(0, 99))
def test_the_step_computes_the_model_and_the_same_bits_in_any_batch(model, weights, seed):
    pieces = random.Random(seed)
    precision.round_weights(model, weights)
    step = step_of(model, weights, n_rows=4)
    tokens = torch.randint(model.config.vocab_size, (LENGTH,)).tolist()
    alone = torch.cat([step([t], [0], [p]).clone() for p, t in enumerate(tokens)])
    with torch.no_grad():
        torch.testing.assert_close(alone, model(torch.tensor([tokens]))[0], atol=1e-4, rtol=1e-4)

    done = {1: 0, 2: 0, 3: 0}  # rows, each fed the same tokens in pieces of its own
    while any(end < LENGTH for end in done.values()):
        places = []
        for row, start in done.items():
            end = min(LENGTH, start + pieces.randint(0, SPARE))
            places += [(row, place) for place in range(start, end)]
            done[row] = end
        if places:
            rows, positions = map(list, zip(*places, strict=True))
            found = step([tokens[p] for p in positions], rows, positions)
            assert torch.equal(found, alone[positions])


@needs_compiler
def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=50, n_layer=2)).eval()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        step = step_of(model)
        found.append([step([n], [0], [n]).clone() for n in range(20)])
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


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
    changed = {name for name, now in model.state_dict().items() if not now.equal(before[name])}
    assert changed == {name for name, now in before.items() if now.ndim == 2} - {"positions.weight"}
    precision.round_weights(model, "float32")


def test_without_a_compiler_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build(tmp_path / "one") is None
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert build.build(tmp_path / "two") is None


@needs_compiler
def test_the_library_is_compiled_once_and_refused_if_others_could_write_it(tmp_path: Path):
    assert build.build(tmp_path) is not None
    (library,) = (tmp_path / "native").iterdir()
    made = library.stat().st_mtime_ns
    build.build.cache_clear()
    assert build.build(tmp_path) is not None
    assert library.stat().st_mtime_ns == made
    library.chmod(stat.S_IMODE(library.stat().st_mode) | 0o002)  # anybody could write it
    build.build.cache_clear()
    assert build.build(tmp_path) is None


@needs_compiler
def test_a_cache_that_cannot_be_written_means_no_library(tmp_path: Path):
    (tmp_path / "native").write_text("a file where the folder should be")
    assert build.build(tmp_path) is None
    assert os.listdir(tmp_path) == ["native"]
