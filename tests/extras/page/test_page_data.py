"""The data and the file of a page: what a model reads, expects and keeps."""

import base64
import hashlib
import re

import numpy as np
import pytest
import torch

from gptmini.errors import CheckpointError, ConfigError
from gptmini.extras.page import page_data
from gptmini.figures import page
from gptmini.generate.attention_maps import compute_attention_weights, summarize_heads
from gptmini.generate.filters import make_random_number, sample_token
from gptmini.model.cache import KVCache
from gptmini.model.losses import compute_token_losses
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.spelling import spell_token
from gptmini.tokenizer.tokenizers import CharTokenizer
from tests.core.generate.samples import TOKENS, model_of, run_of
from tests.support import HOSTILE, data_of, tiny


def unpacked(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


@pytest.mark.parametrize("attention", [{}, {"variant": "mqa", "window": 3}], ids=str)
def test_the_lens_agrees_with_a_model_that_ends_after_each_layer(attention):
    model = model_of(**attention)
    expected = page_data.compute_logit_lens(model, TOKENS)
    with torch.no_grad():
        assert torch.equal(expected.logits, model(torch.tensor([TOKENS]))[0])
        blocks = model.blocks
        for stage in range(3):
            model.blocks = blocks[:stage]
            logits = model(torch.tensor([TOKENS]))[0]
            chances = logits.double().softmax(dim=-1)
            best = chances.sort(descending=True, dim=-1)
            assert torch.equal(expected.tokens[stage], best.indices[:, :10])
            torch.testing.assert_close(expected.probabilities[stage].double(), best.values[:, :10])
            inputs, targets = torch.tensor([TOKENS[:-1]]), torch.tensor([TOKENS[1:]])
            losses, ranks = compute_token_losses(model, inputs, targets)
            assert expected.target_ranks[stage].tolist() == [*ranks[0].tolist(), 0]
            torch.testing.assert_close(
                expected.target_probabilities[stage, :-1].double().log(),
                -losses[0],
                atol=1e-5,
                rtol=1e-5,
            )
    assert not any(block._forward_hooks for block in blocks)
    assert not blocks[0]._forward_pre_hooks


def test_the_page_has_the_weights_of_the_model_in_eight_bits():
    run = run_of(variant="gqa", n_kv_head=2)
    part = page_data.build_reading([run], TOKENS, "")
    weights = compute_attention_weights(run.model, TOKENS)
    (read,) = part["readings"]
    roots = unpacked(read["weights"], "u1").reshape(2, 4, 36) / 255
    lower = weights[:, :, torch.ones(8, 8).tril().bool()].numpy()
    assert np.abs(roots**2 - lower).max() < 0.004
    assert read["measures"] == [
        [round(x, 4) for x in head[2:]] for head in summarize_heads(weights)
    ]
    expected = page_data.compute_logit_lens(run.model, TOKENS)
    listed = unpacked(read["tokens"], "<i4").reshape(3, 8, 10)
    texts = [[part["spellings"][n] for n in row] for row in listed[2]]
    assert texts == [
        [spell_token(run.tokenizer, token) for token in row] for row in expected.tokens[2]
    ]
    np.testing.assert_array_equal(
        unpacked(read["probabilities"], "<f4"), expected.probabilities.flatten()
    )
    np.testing.assert_array_equal(unpacked(read["ranks"], "<i4"), expected.target_ranks.flatten())
    np.testing.assert_array_equal(
        unpacked(read["came"], "<f4"), expected.target_probabilities.flatten()
    )
    assert [part["spellings"][n] for n in part["tokens"]] == [
        spell_token(run.tokenizer, token) for token in TOKENS
    ]


def test_the_square_root_scale_keeps_small_weights_apart():
    weights = np.array([0, 1e-5, 0.001, 0.01, 0.5, 1])
    assert page.quantize_to_bytes(weights).tolist() == [0, 1, 8, 26, 180, 255]


@pytest.mark.parametrize(
    ("attention", "rows"),
    [
        ({}, [("MHA", 4, True), ("GQA", 2, False), ("MQA", 1, False)]),
        ({"variant": "mqa", "window": 5}, [("MHA", 4, False), ("GQA", 2, False), ("MQA", 1, True)]),
        (
            {"variant": "gqa", "n_kv_head": 2},
            [("MHA", 4, False), ("GQA", 2, True), ("MQA", 1, False)],
        ),
    ],
    ids=str,
)
def test_memory_is_that_of_a_full_cache(attention, rows):
    config = run_of(**attention).config.model
    kinds = page_data.compute_cache_sizes(config, 16)
    assert [(kind["name"], kind["kv_heads"], kind["own"]) for kind in kinds] == rows
    own = next(kind["bytes"] for kind in kinds if kind["own"])
    cache = KVCache(config, 1, torch.device("cpu"), torch.float32)
    assert own[15] == cache.bytes
    assert own[0] * (attention.get("window") or 16) == own[15]
    assert kinds[0]["bytes"][3] == 4 * kinds[2]["bytes"][3]


def test_the_notes_say_what_shares_and_what_a_window_hides():
    notes = page_data.build_notes(
        run_of(variant="gqa", n_kv_head=2, window=5, full_every=2).config.model
    )
    assert notes["heads"].startswith(
        "Grouped-query attention (GQA): 4 query heads share 2 KV heads."
    )
    assert notes["layers"] == [
        "window of 5: sees itself and the 4 before",
        "sees all tokens before",
    ]
    assert notes["memory"].endswith("Layers with a window keep only the last 5 tokens.")
    notes = page_data.build_notes(run_of(variant="mqa", window=1).config.model)
    assert notes["heads"].startswith("Multi-query attention (MQA): 4 query heads share 1 KV head.")
    assert notes["layers"] == ["window of 1: sees only itself"] * 2
    assert "window" not in page_data.build_notes(run_of().config.model)["memory"]


def test_a_page_explains_bytes_in_hex_if_it_has_any():
    sentence = "Tokens in hexadecimal are only some bytes of a character"
    part = page_data.build_reading([run_of()], list("中".encode()), "")
    assert sentence in part["notes"]["text"]
    assert ["", "e4"] in part["spellings"]
    assert part["in_text"] == [["中", f"{n}/3"] for n in (1, 2, 3)]
    assert part["notes"]["text"].endswith("first of two tokens that spell the character.")
    (read,) = part["readings"]
    assert [part["spellings"][n] for n in read["next"]] == [["", "b8"], ["中", "3/3"]]
    whole = run_of(tokenizer=CharTokenizer(""))
    whole.tokenizer.decode_token = lambda token: b"a"  # type: ignore[method-assign]
    part = page_data.build_reading([whole], TOKENS, "")
    assert sentence not in part["notes"]["text"]


def test_draws_are_those_of_the_sampler():
    sample = {"top_k": 20, "top_p": 0.8, "temperature": 1.5, "repetition_penalty": 1.3}
    run = run_of(sample)
    text = page_data.continue_prompt(run, "abc", 9)
    tokens = text.prompt_tokens + text.tokens
    part = page_data.build_reading([run], tokens, "", text)
    drawn = part["readings"][0]["draws"]
    after = unpacked(drawn["drawn"], "<f4").reshape(9, 11)
    expected = page_data.compute_logit_lens(run.model, tokens)
    assert (part["drawn"], len(drawn["kept"])) == (9, 9)
    assert part["sampling"] == "temperature 1.5, top_k 20, top_p 0.8, repetition_penalty 1.3"
    for place, token in enumerate(text.tokens):
        at = 2 + place
        scores = expected.logits[at].clone()
        for seen in set(tokens[: at + 1]):
            scores[seen] = scores[seen] / 1.3 if scores[seen] > 0 else scores[seen] * 1.3
        assert sample_token(scores, run.config.sample, make_random_number(1337, 0, place)) == token
        best = (scores / 1.5).double().topk(20)
        chances = best.values.softmax(dim=0)
        kept = chances.cumsum(dim=0) - chances < 0.8
        assert drawn["kept"][place] == kept.sum()
        chances = chances[kept] / chances[kept].sum()
        left = dict(zip(best.indices[kept].tolist(), chances.tolist(), strict=True))
        listed = [*expected.tokens[-1, at].tolist(), token]
        assert after[place] == pytest.approx([left.get(n, 0) for n in listed], abs=1e-5)
        removed = 1 - expected.logits[at].double().softmax(dim=0)[list(left)].sum()
        assert drawn["removed"][place] == pytest.approx(removed.item(), abs=1e-5)


def test_a_prompt_that_ends_with_a_space_leaves_only_tokens_that_begin_with_one(tiny_encoding):
    run = run_of({"top_k": None}, tokenizer=BpeTokenizer(tiny_encoding))
    text = page_data.continue_prompt(run, "the ", 2)
    assert text.prompt_tokens == [257]
    part = page_data.build_reading([run], text.prompt_tokens + text.tokens, "", text)
    assert part["readings"][0]["draws"]["kept"] == [2, 260]  # " " and " the", then any


def test_greedy_draws_keep_one_token():
    run = run_of({"temperature": 0})
    text = page_data.continue_prompt(run, "abc", 3)
    drawn = page_data.build_reading([run], text.prompt_tokens + text.tokens, "", text)["readings"][
        0
    ]["draws"]
    assert drawn["kept"] == [1, 1, 1]
    assert unpacked(drawn["drawn"], "<f4").reshape(3, 11)[:, [0, 10]].tolist() == [[1, 1]] * 3


def test_what_does_not_fit_is_refused_with_the_largest_that_does(monkeypatch):
    run = run_of()
    with pytest.raises(ConfigError, match=r"--generate 15: 18 tokens .* generate at most 13$"):
        page_data.continue_prompt(run, "abc", 15)
    assert len(page_data.continue_prompt(run, "abc", 13).tokens) == 13
    for T in (1, 8, 16):
        content = page_data.build_page(run, [65] * T, None, (0, 0))
        assert len(content) < page_data.estimate_page_bytes(run.config.model, T)
    monkeypatch.setattr(page, "MAX_PAGE_BYTES", page_data.estimate_page_bytes(run.config.model, 11))
    page_data.check_page_size(run.config.model, 11)
    with pytest.raises(ConfigError, match=r"a page of 12 tokens .* at most 11 tokens$"):
        page_data.build_page(run, [65] * 12, None, (0, 0))


def test_a_page_of_many_heads_and_tokens_stays_small():
    config = tiny(model={"n_layer": 6, "n_head": 6, "d_model": 384, "context_length": 512})
    model = config.with_tokenizer("gpt2", 50257).model
    assert page_data.estimate_page_bytes(model, 128, 0) < 2_000_000
    assert page_data.estimate_page_bytes(model, 512) < 30_000_000


def test_weights_that_are_not_finite_are_refused():
    run = run_of()
    with torch.no_grad():
        run.model.embed.weight[65, 0] = torch.nan
    with pytest.raises(CheckpointError, match="not finite"):
        page_data.build_reading([run], [65, 66], "")
    run = run_of(model={"tie_embeddings": False})
    with torch.no_grad():
        run.model.embed.weight[200, 0] = torch.nan  # of a token that the text does not have
    page_data.build_reading([run], [65, 66], "")
    with pytest.raises(CheckpointError, match="an embedding is not finite"):
        page_data.build_page(run, [65, 66], None, (0, 0))


def test_tokens_are_spelled_in_text_and_symbols():
    tokenizer = CharTokenizer("é中\u202e\u200b")
    spelled = {
        text: [spell_token(tokenizer, n) for n in tokenizer.encode(text)] for text in "a \n中\u202e"
    }
    assert spelled["a"] == [["a"]]
    assert spelled[" "] == [["", "␣"]]
    assert spelled["\n"] == [["", "\\n"]]
    assert spelled["中"] == [["中"]]
    assert spelled["\u202e"] == [["", "\\u202e"]]  # would turn the text around
    assert spell_token(tokenizer, tokenizer.eos_token_id) == ["", "<doc>"]
    emoji = tokenizer.encode("😀a").tolist()
    assert [spell_token(tokenizer, n) for n in emoji] == [
        *(["", x] for x in ("f0", "9f", "98", "80")),
        ["a"],
    ]
    parts = [["😀", f"{n}/4"] for n in (1, 2, 3, 4)]
    assert page_data.spell_parts(tokenizer, emoji) == [*parts, None]
    assert page_data.spell_parts(tokenizer, [0xF0, 65, 0xE4, 0xBD]) == [None] * 4


def test_nothing_in_the_data_can_leave_its_place():
    part = page.build_table([HOSTILE, '"DATA"'], [["POLICY"]])
    content = page.render_page(HOSTILE, "POLICY", [part])
    assert data_of(content) == {"title": HOSTILE, "lead": "POLICY", "parts": [part]}
    text = content.decode()
    inert = text[text.index('id="data">') + 10 : text.index("</script>")]
    assert inert.isascii()
    assert not set(inert) & {*"<>&", *map(chr, range(32))}
    assert text.replace(inert, "") == page.render_page("", "", []).decode().replace(
        '{"title": "", "lead": "", "parts": []}', ""
    )


def test_the_policy_allows_the_script_of_the_page_and_nothing_else():
    text = page.render_page("", "", []).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.keys() == {
        "default-src",
        "script-src",
        "style-src",
        "base-uri",
        "form-action",
        "require-trusted-types-for",
    }
    assert {rules[name] for name in ("default-src", "base-uri", "form-action")} == {"'none'"}
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_template_sets_only_text():
    template = page.TEMPLATE_FILE.read_text(encoding="utf-8")
    lines = (template + page.ARITHMETIC_FILE.read_text(encoding="utf-8")).splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for wrong in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "style="):
        assert wrong not in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
