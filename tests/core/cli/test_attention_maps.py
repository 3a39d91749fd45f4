"""The attention of a model, computed and shown as text."""

import pytest
import torch

from gptmini.cli import attention_maps
from gptmini.errors import ConfigError
from tests.core.generate.samples import TOKENS, model_of, run_of


@pytest.mark.parametrize(
    "attention",
    [
        {"variant": "mha"},
        {"variant": "gqa", "n_kv_head": 2, "qk_norm": True},
        {"variant": "mqa", "window": 3, "position": "alibi"},
    ],
    ids=str,
)
def test_the_weights_shown_are_those_the_model_uses(attention):
    """Each layer's output, recomputed from the weights shown, is that of the fast path."""
    model = model_of(**attention)
    seen = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda m, args, out: seen.append((m, args, out)))
    weights = attention_maps.compute_attention_weights(model, TOKENS)
    assert weights.shape == (2, 4, 8, 8)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 8))
    for layer, (module, arguments, out) in enumerate(seen):
        with torch.no_grad():
            _, _, v = module.project_qkv(*arguments[:2])
            heads = [weights[layer, h] @ v[0, h // (4 // v.shape[1])] for h in range(4)]
            again = module.o_proj(torch.cat(heads, dim=-1))
        torch.testing.assert_close(again, out[0], atol=1e-5, rtol=1e-4)


def test_looking_leaves_the_model_as_it_was():
    model = model_of(variant="mha")
    before = model(torch.tensor([TOKENS]))
    attention_maps.compute_attention_weights(model, TOKENS)
    assert torch.equal(model(torch.tensor([TOKENS])), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_summaries_of_simple_heads_are_exact():
    T = 5
    previous = torch.eye(T).roll(-1, dims=1)
    previous[:] = 0
    previous[0, 0] = 1
    previous[range(1, T), range(T - 1)] = 1
    first = torch.zeros(T, T)
    first[:, 0] = 1
    even = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    heads = torch.stack([torch.eye(T), previous, first, even])[None]
    (summaries,) = attention_maps.summarize_heads(heads).tolist()
    rows = [[round(number, 4) for number in summary] for summary in summaries]
    assert rows[0] == [0, 0, 1, 0]
    assert rows[1] == [1, 0.25, 0, 0]  # the previous token of the second is the first
    assert rows[2] == [0.25, 1, 0, 0]
    mean = sum(1 / n for n in range(2, T + 1)) / 4
    entropy = sum(torch.tensor(float(n)).log().item() for n in range(2, T + 1)) / 4
    assert rows[3] == pytest.approx([mean, mean, mean, entropy], abs=1e-4)


def test_prompts_must_fit_the_context():
    for tokens in ([], [1] * 17):
        with pytest.raises(ConfigError, match="give between 1 and 16"):
            attention_maps.compute_attention_weights(model_of(variant="mha"), tokens)


def test_masks_by_name():
    def rows(name: str) -> list[str]:
        return ["".join(".x"[int(c)] for c in row) for row in attention_maps.build_mask(name, 3)]

    assert rows("causal") == ["x..", "xx.", "xxx"]
    assert rows("window:2") == ["x..", "xx.", ".xx"]
    for wrong in ("window:0", "window", "window:1,2", "x", "causal:3"):
        with pytest.raises(ConfigError, match="use causal, or window:N"):
            attention_maps.build_mask(wrong, 3)


def test_parts_of_characters_are_named_and_explained():
    run = run_of()
    text = attention_maps.view_attention(run, [*"a中".encode(), 0xE4]).format_text()
    assert "5 tokens: a 中1/3 中2/3 中3/3 e4" in text
    assert text.endswith(
        "中1/3: the first of 3 tokens that spell the character 中\n"
        "in hex: bytes that are no whole character"
    )
    plain = attention_maps.view_attention(run, list(b"abc")).format_text()
    assert plain.endswith("for the weights of one head: --layer N --head N")


def test_one_head_is_shown_as_text():
    def lines(weights: torch.Tensor, labels: list[str], head: int | None = 0) -> list[str]:
        view = attention_maps.AttentionView(weights[None, None], labels, 1, [0], head)
        return view.format_text().splitlines()

    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    assert [line.split() for line in lines(weights, ["The", "␣cat"])[-3:]] == [
        ["query", "The", "␣cat"],
        ["The", "1.000"],
        ["␣cat", "0.250", "0.750"],
    ]
    assert lines(weights, ["The", "␣cat"], None)[-2] == "2 tokens: The ␣cat"
    T = 13
    last_but_one = torch.eye(T).roll(-1, 1).tril()
    last_but_one[0, 0] = 1
    assert lines(last_but_one, list("abcdefghijklm"))[-1].split() == ["12", "m", "11", "l", "1.000"]
    (one,) = lines(torch.ones(1, 1), ["The"], None)
    assert one == "1 token: The; it sees only itself, so there is nothing to compare"
