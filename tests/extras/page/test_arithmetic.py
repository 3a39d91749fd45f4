"""The numbers with which a page shows the arithmetic of attention, against other computations."""

import base64

import numpy as np
import pytest
import torch
from torch import Tensor

from gptmini.errors import ConfigError
from gptmini.extras.page import arithmetic, page_data
from gptmini.figures import page
from gptmini.generate.attention_maps import compute_attention_weights
from gptmini.generate.run import Run
from gptmini.model import mechanisms
from gptmini.model.cache import KVCache
from gptmini.model.layers import scale_frequencies
from gptmini.tokenizer.spelling import spell_token
from tests.core.generate.samples import TOKENS, run_of
from tests.support import POSITIONS, tiny

T = len(TOKENS)
H, K = 4, 8
RUNS = {
    "rope": run_of(),
    "gpt2": run_of(model={"position": "learned", "bias": True}, qk_norm=False),
    "llama": run_of(
        model={"norm": "rmsnorm", "activation": "swiglu", "head_dim": 8, "d_model": 48},
        **{"variant": "gqa", "n_kv_head": 2, "qk_norm": False, "qkv_bias": True},
    ),
    "alibi": run_of(model={"position": "alibi", "bias": True}, variant="gqa", n_kv_head=2),
    "windows": run_of(
        model={"position": "none"}, variant="mqa", window=3, full_every=2, qk_norm=True
    ),
}


def decode(encoded: dict[str, str], config) -> dict[str, Tensor]:
    """The arrays of a layer, in their shapes."""
    G, R = config.n_kv_head, config.d_model
    shapes = {
        **{"q": (H, T, K), "k": (G, T, K), "v": (G, T, K)},
        **{"output_weight": (R, H * K), "output_bias": (R,)},
        **{"stream": (T, R), "added": (T, R)},
    }
    assert encoded.keys() == shapes.keys()
    return {
        name: torch.tensor(np.frombuffer(base64.b64decode(text), "<f4")).reshape(shapes[name])
        for name, text in encoded.items()
    }


def record_inputs(run: Run) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What enters attn, and the residual stream before and after it, in each layer."""
    inputs = []
    hooks = []
    for block in run.model.blocks:
        found = {}
        for name in ("attn_norm", "attn", "mlp_norm"):
            hooks.append(
                getattr(block, name).register_forward_pre_hook(
                    lambda _, arguments, name=name, found=found: found.update(
                        {name: arguments[0][0]}
                    )
                )
            )
        inputs.append(found)
    with torch.no_grad():
        run.model(torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    return [(found["attn"], found["attn_norm"], found["mlp_norm"]) for found in inputs]


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_of_a_page_compute_what_the_model_computes(name: str):
    run = RUNS[name]
    config = run.model.config
    part = page_data.build_reading([run], TOKENS, "", with_arithmetic=True)
    weights = compute_attention_weights(run.model, TOKENS)
    slopes = part["arithmetic"]["slopes"]
    bias = None
    if name == "alibi":
        assert slopes == [2**-2, 2**-4, 2**-6, 2**-8]
        bias = mechanisms.alibi_bias(H, T)
    else:
        assert slopes is None
    for layer, (x, before, after) in enumerate(record_inputs(run)):
        numbers = decode(part["arithmetic"]["layers"][layer], config)
        attention = run.model.blocks[layer].attn
        mask = mechanisms.window_mask(T, part["windows"][layer] or T)
        keys = numbers["k"].repeat_interleave(H // config.n_kv_head, dim=0)
        torch.testing.assert_close(
            mechanisms.attention_weights(numbers["q"], keys, mask, bias), weights[layer]
        )
        mixed = mechanisms.grouped_query_attention(
            numbers["q"], numbers["k"], numbers["v"], mask, bias
        )  # (H, T, K)
        heads = numbers["output_weight"].view(-1, H, K)  # (R, H, K)
        output = torch.einsum("rhk,htk->tr", heads, mixed) + numbers["output_bias"]
        torch.testing.assert_close(output, numbers["added"])
        torch.testing.assert_close(numbers["stream"], before)
        torch.testing.assert_close(numbers["stream"] + numbers["added"], after)
        with torch.no_grad():  # q, k and v by hand
            for kind in "qkv":
                projection = getattr(attention, f"{kind}_proj")
                made = mechanisms.project(x, projection.weight.T, projection.bias)
                made = mechanisms.split_heads(made, len(numbers[kind]))
                if kind != "v" and config.attention.qk_norm:
                    made = getattr(attention, f"{kind}_norm")(made)
                if kind != "v" and config.position == "rope":
                    made = mechanisms.rotate_by_position(made, config.rope_theta)
                torch.testing.assert_close(numbers[kind], made, atol=1e-5, rtol=1e-5)


def test_every_position_of_the_settings_is_tried_here():
    assert {run.model.config.position for run in RUNS.values()} == set(POSITIONS)


def test_the_angles_of_a_page_are_those_of_the_model():
    run = run_of(model={"rope_scaling": [4.0, 1.0, 4.0, 16.0], "rope_theta": 100.0})
    expected = scale_frequencies(100.0 ** -(torch.arange(0, K, 2) / K), [4.0, 1.0, 4.0, 16.0])
    torch.testing.assert_close(arithmetic.get_frequencies(run.model), expected)
    assert arithmetic.get_frequencies(RUNS["gpt2"].model) is None


def test_neighbors_have_the_smallest_angles():
    part = page_data.build_reading([RUNS["rope"]], [65, 66, 65], "", with_arithmetic=True)
    table = RUNS["rope"].model.embed.weight.detach()
    neighbors = part["arithmetic"]["neighbors"]
    assert [part["spellings"][token] for token, _, _ in neighbors] == [["A"], ["B"]]
    for token, (_, found, cosines) in zip((65, 66), neighbors, strict=True):
        others = [n for n in range(257) if n != token]
        angles = {n: torch.cosine_similarity(table[token], table[n], dim=0).item() for n in others}
        nearest = sorted(others, key=lambda n: -angles[n])[:8]
        labels = [run_label(RUNS["rope"], n) for n in nearest]
        assert [part["spellings"][n] for n in found] == labels
        assert cosines == pytest.approx([angles[n] for n in nearest], abs=1e-4)


def run_label(run: Run, token: int) -> list[str]:
    return spell_token(run.tokenizer, token)


@pytest.mark.parametrize("name", ["rope", "windows"])
def test_the_cache_keeps_what_the_page_says(name: str):
    model = RUNS[name].model
    part = page_data.build_reading([RUNS[name]], TOKENS, "")
    cache = KVCache(model.config, 1, model.device, torch.float32)
    assert [layer.size for layer in cache.layers] == part["cache_lengths"]


def test_a_wide_residual_stream_is_cut():
    run = run_of(model={"d_model": 288, "n_head": 4})
    (numbers,) = arithmetic.record_layers(run.model, TOKENS, [1])
    whole = record_inputs(run)[1]
    assert numbers.output_weight.shape == (256, 288)
    torch.testing.assert_close(numbers.stream, whole[1][:, :256])
    torch.testing.assert_close(numbers.stream + numbers.added, whole[2][:, :256])
    note = arithmetic.build_notes(run.config.model, False)["output"]
    assert note.endswith("Of its numbers this page has the first 256.")


def test_a_page_that_would_be_too_large_has_the_arithmetic_of_one_layer(monkeypatch):
    run = RUNS["windows"]
    whole = page_data.build_page(run, TOKENS, None, (1, 0))
    assert len(whole) < page_data.estimate_page_bytes(run.config.model, T, 2)
    monkeypatch.setattr(page, "MAX_PAGE_BYTES", page_data.estimate_page_bytes(run.config.model, T))
    part = page_data.build_reading([run], TOKENS, "", start=(1, 0), with_arithmetic=True)
    first, second = part["arithmetic"]["layers"]
    assert first is None
    assert second is not None
    assert "--layer N chooses" in part["arithmetic"]["notes"]["partial"]
    with pytest.raises(ConfigError, match="at most 8 tokens"):
        page_data.check_page_size(run.config.model, T + 1)


def test_six_layers_and_two_hundred_tokens_fit_with_all_their_arithmetic():
    sizes = {"n_layer": 6, "n_head": 6, "d_model": 384, "context_length": 512}
    config = tiny(model=sizes).with_tokenizer("gpt2", 50257).model
    assert page_data.estimate_page_bytes(config, 200, 6) < 20_000_000
    assert page_data.choose_layers(config, 200, 3) == [0, 1, 2, 3, 4, 5]
    assert page_data.choose_layers(config, 512, 3) == [3]
