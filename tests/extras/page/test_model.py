"""model.js against PyTorch and generate/, in Chromium: logits, texts, what is switched off."""

import itertools

import pytest
import torch

from gptmini.cli.attention_maps import compute_attention_weights, summarize_heads
from gptmini.extras.page.export import build_page
from gptmini.generate.filters import filter_probabilities
from gptmini.generate.run import Run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.load import create_tokenizer
from tests.extras.page.samples import CONTEXT, SHAPES, random_run, random_texts, rounded
from tests.support import prose


def check_logits(tab, run: Run, precision: str, texts: list[list[int]]) -> None:
    shown = tab.evaluate(
        "texts => texts.map(tokens => Array.from(opened.gpt.forward(tokens)))", texts
    )
    model = rounded(run, precision).model
    for tokens, logits in zip(texts, shown, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([tokens]))[0]
        assert expected.std() > 0.5
        actual = torch.tensor(logits).view_as(expected)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_pytorch(visit, shape):
    run = random_run(shape)
    check_logits(visit(build_page(run)), run, "bfloat16", random_texts(10))


@pytest.mark.parametrize("shape", ["default", "gpt2"])
def test_logits_in_int8_are_those_of_pytorch(visit, shape):
    run = random_run(shape)
    check_logits(visit(build_page(run, "int8")), run, "int8", random_texts(3))


def test_a_text_is_read_piece_by_piece_and_can_step_back(visit):
    for shape in ("window", "bloom"):
        run = random_run(shape)
        tab = visit(build_page(run))
        tokens = random_texts(8)[-1][:20]
        whole, pieces, again = tab.evaluate(
            """tokens => {
              const { gpt } = opened;
              const record = [];
              const whole = Array.from(gpt.forward(tokens));
              const pieces = [tokens.slice(0, 1), tokens.slice(1, 8), tokens.slice(8)].flatMap(
                (piece) => Array.from(gpt.forward(piece, record)));
              record.length = 5;
              gpt.forward(tokens.slice(5), record);
              return [whole, pieces, Array.from(record.at(-1).logits)];
            }""",
            tokens,
        )
        assert pieces == pytest.approx(whole, abs=1e-5)
        assert again == pytest.approx(whole[-257:], abs=1e-5)


def test_a_text_longer_than_the_context_is_refused(visit):
    tab = visit(build_page(random_run()))
    thrown = tab.evaluate(
        "n => { try { opened.gpt.forward(Array(n).fill(1)) } catch (error) { return error.name } }",
        CONTEXT + 1,
    )
    assert thrown == "RangeError"


# -- texts -----------------------------------------------------------------------------------------

CONTINUE = """([prompts, changes]) => prompts.map((prompt, number) => {
  const sample = { ...opened.data.sample, ...changes };
  const reader = new Reader(opened.gpt);
  const text = new Continuation(reader, opened.tokenizer, sample, prompt, { number });
  const shown = [text.text];
  while (text.next() !== null) shown.push(text.text);
  return { tokens: text.tokens, text: text.text, finish_reason: text.finishReason, shown };
})"""
PROMPTS = ["", "The cat", "and then ", "\u4e2d\u6587", "x" * (CONTEXT + 9)]


def check_texts(tab, run, changes) -> None:
    shown = tab.evaluate(CONTINUE, [PROMPTS, changes])
    texts = rounded(run, "bfloat16").start(PROMPTS, use_cache=False, **changes).finish()
    for text, mine in zip(texts, shown, strict=True):
        assert mine["tokens"] == text.tokens
        assert mine["text"] == text.text
        assert mine["finish_reason"] == text.finish_reason
        for earlier, later in zip(mine["shown"], mine["shown"][1:], strict=False):
            assert later.startswith(earlier)


def test_the_same_seed_draws_the_text_of_python(visit):
    run = random_run("llama")
    tab = visit(build_page(run))
    for changes in (
        {"seed": 1},
        {"seed": 2, "top_k": None, "temperature": 1.3},
        {"top_p": 0.7, "top_k": None},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.1, "seed": 2**40},
        {"min_p": 0.2, "top_k": None},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"bias": {"e": 5, "b": -100}, "ban": ["a", " "], "temperature": 2},
        {"stop": ["an", "\n", "ee"], "bias": {"a": 6, "n": 6, "e": 6}},
        {"overflow": "stop"},
        {"start": "Once", "temperature": 0},
    ):
        check_texts(tab, run, {"max_new_tokens": 30, **changes})


def test_texts_of_a_learned_encoding_end_where_python_ends_them(visit):
    tokenizer = create_tokenizer("bpe", 300, [prose()])
    run = random_run("default", tokenizer)
    end = tokenizer.eos_token_id
    with torch.no_grad():
        run.model.embed.weight[end] *= 2  # so that texts end
    changes = {"max_new_tokens": 150, "temperature": 1.0, "top_k": None}
    check_texts(visit(build_page(run)), run, changes)


def test_a_text_can_step_back_and_go_on_as_before(visit):
    tab = visit(build_page(random_run("window")))
    first, again = tab.evaluate(
        """() => {
          const sample = { ...opened.data.sample, max_new_tokens: 70 };
          const text = new Continuation(new Reader(opened.gpt), opened.tokenizer, sample, "abc");
          while (text.next() !== null);
          const first = [...text.tokens];
          for (let n = 0; n < 30; n++) text.back();
          while (text.next() !== null);
          return [first, text.tokens];
        }"""
    )
    assert first == again
    assert len(first) == 70


def test_each_filter_says_what_it_removed(visit):
    run = random_run()
    tab = visit(build_page(run))
    logits = torch.randn(257, generator=torch.Generator().manual_seed(3)) * 2
    logits[7] = -torch.inf
    settings = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.1}
    rows = tab.evaluate(
        """([logits, changes]) => explainFilters(
          Float32Array.from(logits), { ...opened.data.sample, ...changes })""",
        [logits.tolist(), settings],
    )
    assert [row["token"] for row in rows] == logits.argsort(descending=True).tolist()
    probabilities = (logits / 0.7).softmax(0)
    for row in rows:
        assert row["probability"] == pytest.approx(probabilities[row["token"]].item(), abs=1e-6)
    removed = {row["token"]: row["removedBy"] for row in rows}
    assert removed[7] == "ban"
    kept = {"none": set(range(257)) - {7}}
    names = ["top_k", "top_p", "min_p"]
    for n, name in enumerate(names):
        sample = run.build_sample_config(
            {each: settings[each] if each in names[: n + 1] else None for each in names}
            | {"temperature": 0.7}
        )
        tokens, weights = filter_probabilities(logits, sample)
        kept[name] = {int(t) for t, w in zip(tokens, weights, strict=True) if w > 0}
        before = kept["none"] if n == 0 else kept[names[n - 1]]
        assert {t for t, why in removed.items() if why == name} == before - kept[name]
        assert before - kept[name]
    assert sum(row["chance"] for row in rows) == pytest.approx(1)
    assert {row["token"] for row in rows if row["chance"]} == kept["min_p"]


# -- looking inside, and switching off -------------------------------------------------------------


def read(tab, tokens, off=None) -> torch.Tensor:
    """The logits (T, V) of a reader that had read something else before."""
    logits = tab.evaluate(
        """([tokens, off]) => {
          globalThis.reader ??= new Reader(opened.gpt);
          reader.read([...tokens.slice(0, 3), 9, 9]);
          reader.read(tokens, off);
          return reader.record.map((entry) => Array.from(entry.logits));
        }""",
        [tokens, off],
    )
    return torch.tensor(logits)


@torch.no_grad()
def logits_of(model, tokens) -> torch.Tensor:
    return model(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("shape", ["gqa", "gpt2", "bloom"])
def test_what_is_switched_off_is_off_in_pytorch(visit, shape):
    run = random_run(shape)
    tab = visit(build_page(run))
    tokens = random_texts(30)[-1]
    assert len(tokens) > 10
    plain = read(tab, tokens)

    def check(off, arrange) -> None:
        model = rounded(run, "bfloat16").model
        arrange(model)
        expected = logits_of(model, tokens)
        torch.testing.assert_close(read(tab, tokens, off), expected, atol=1e-4, rtol=0)
        assert (expected - plain).abs().max() > 0.01

    def drop_head(layer, head):
        def hook(module, arguments):
            (mixed,) = arguments
            mixed = mixed.clone()
            size = run.config.model.head_dim
            mixed[..., head * size : (head + 1) * size] = 0
            return (mixed,)

        return lambda model: model.blocks[layer].attn.o_proj.register_forward_pre_hook(hook)

    def drop(*names):
        def arrange(model):
            for name in names:
                part = model.get_submodule(name)
                part.register_forward_hook(lambda module, inputs, output: output * 0)

        return arrange

    def hide(layer, head, query, key):
        def arrange(model):
            attn = model.blocks[layer].attn

            def mask(queries, keys, made):
                heads = run.config.model.n_head
                bias = attn._make_bias(queries, keys)
                bias = bias.expand(heads, *bias.shape[-2:]).clone()
                bias[slice(None) if head is None else head, query, key] = -torch.inf
                return bias

            attn.mask = mask

        return arrange

    check({"heads": [[1, 2]]}, drop_head(1, 2))
    check({"mlps": [0]}, drop("blocks.0.mlp"))
    check({"layers": [1]}, drop("blocks.1.attn", "blocks.1.mlp"))
    weights = compute_attention_weights(rounded(run, "bfloat16").model, tokens)
    for head in (0, 1):
        key = int(weights[0, head, 8].argmax())
        check({"attentions": [[0, head, 8, key]]}, hide(0, head, 8, key))
    check({"attentions": [[1, None, 8, 7]]}, hide(1, None, 8, 7))
    # A query that sees no key gets nothing.
    check({"attentions": [[0, 3, 0, 0]]}, hide(0, 3, 0, 0))
    torch.testing.assert_close(read(tab, tokens), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", ["gqa", "gpt2", "bloom"])
def test_what_comes_from_a_second_text_does_in_pytorch(visit, shape):
    run = random_run(shape)
    tab = visit(build_page(run))
    tokens = random_texts(30)[-1]
    T = len(tokens)
    K = run.config.model.head_dim
    plain = read(tab, tokens)

    def check(off, parts, other) -> None:
        """Parts are (submodule, channels); they give there what they get from the other text."""
        model = rounded(run, "bfloat16").model
        n = min(T, len(other))
        handles, taken = [], {}

        def swap(name, channels):
            # What a head passes to o_proj, which is where heads are apart; or all that a part adds.
            part = model.get_submodule(name)

            def take(rows):
                taken[name, str(channels)] = rows[..., channels].clone()

            def put(rows):
                rows = rows.clone()
                rows[:, :n, channels] = taken[name, str(channels)][:, :n]
                return rows

            if name.endswith("o_proj"):
                handles.append(part.register_forward_pre_hook(lambda m, given: take(*given)))
                return lambda: part.register_forward_pre_hook(lambda m, given: (put(*given),))
            handles.append(part.register_forward_hook(lambda m, given, rows: take(rows)))
            return lambda: part.register_forward_hook(lambda m, given, rows: put(rows))

        begin = [swap(*part) for part in parts]
        logits_of(model, other)
        for handle in handles:
            handle.remove()
        for each in begin:
            each()
        expected = logits_of(model, tokens)
        shown = read(tab, tokens, {**off, "from": other})
        torch.testing.assert_close(shown, expected, atol=1e-4, rtol=0)
        assert (expected[:n] - plain[:n]).abs().max() > 0.01

    head = ("blocks.1.attn.o_proj", slice(2 * K, 3 * K))
    mlp = ("blocks.0.mlp", slice(None))
    layer = [("blocks.1.attn", slice(None)), ("blocks.1.mlp", slice(None))]
    longer = random_texts(60)[-1] + tokens
    for other in (longer[:T], longer[: T // 2], longer[: T + 1]):
        check({"heads": [[1, 2]]}, [head], other)
        check({"mlps": [0], "heads": [[1, 2]]}, [mlp, head], other)
        check({"layers": [1]}, layer, other)
    parts = tab.evaluate("attribute(opened.gpt, reader.record.at(-1), 3)")
    shares = [parts["embedding"], parts["position"], parts["normBias"], *parts["attnBiases"]]
    total = sum(shares) + sum(parts["mlps"]) + sum(map(sum, parts["heads"]))
    logits = torch.tensor(tab.evaluate("Array.from(reader.record.at(-1).logits)"))
    assert total == pytest.approx((logits[3] - logits.mean()).item(), abs=1e-4)
    torch.testing.assert_close(read(tab, tokens), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_the_record_is_what_pytorch_computes(visit, shape):
    run = random_run(shape)
    tab = visit(build_page(run))
    tokens = random_texts(30)[-1]
    T = len(tokens)
    read(tab, tokens)
    model = rounded(run, "bfloat16").model
    config = run.config.model
    seen: dict[str, torch.Tensor] = {}

    def watch(name, part) -> None:
        part.register_forward_hook(
            lambda module, inputs, output: seen.update({f"{name}<": inputs[0], name: output})
        )

    for name in ("attn_norm", "attn", "attn.o_proj", "mlp_norm", "mlp", "mlp.down_proj"):
        watch(name, model.blocks[1].get_submodule(name))
    watch("final_norm", model.final_norm)
    logits_of(model, tokens)
    cos_sin = model.rotary(torch.arange(T)) if model.rotary is not None else None
    with torch.no_grad():
        q, k, v = model.blocks[1].attn.project_qkv(seen["attn<"], cos_sin)

    def check(name, expected) -> None:
        shown = tab.evaluate(
            """name => reader.record.map((entry) =>
              Array.from(name in entry ? entry[name] : entry.layers[1][name]))""",
            name,
        )
        expected = expected.reshape(T, -1)
        torch.testing.assert_close(torch.tensor(shown), expected, atol=1e-4, rtol=1e-4)

    in_layer = {
        "q": q.transpose(1, 2),
        "k": k.transpose(1, 2),
        "v": v.transpose(1, 2),
        "mixed": seen["attn.o_proj<"],
        "attn": seen["attn"],
        "middle": seen["mlp_norm<"],
        "inner": seen["mlp.down_proj<"],
        "mlp": seen["mlp"],
        "hidden": seen["final_norm"],
        "embedding": model.embed.weight[torch.tensor(tokens)],
    }
    for name, expected in in_layer.items():
        check(name, expected.detach())
    weights = compute_attention_weights(model, tokens)  # (L, H, T, T)
    shown = tab.evaluate(
        "reader.record.map((entry) => entry.layers.map((layer) => Array.from(layer.weights)))"
    )
    for t, layers in enumerate(shown):
        for layer, row in enumerate(layers):
            expected = weights[layer, :, t, : t + 1].flatten()
            assert row == pytest.approx(expected.tolist(), abs=1e-5)
    heads = tab.evaluate("summarizeHeads(opened.gpt, reader.record)")
    for layer, summaries in enumerate(summarize_heads(weights).tolist()):
        for head, expected in enumerate(summaries):
            values = [heads[layer][head][name] for name in ("previous", "first", "itself")]
            assert values == pytest.approx(expected[:3], abs=1e-5)
    stream = tab.evaluate("Array.from(reader.record.at(-1).x)")
    assert stream == pytest.approx(seen["final_norm<"][0, -1].tolist(), abs=1e-4)
    added = tab.evaluate(
        """() => { const { attn } = opened.gpt.blocks[1];
          const { mixed } = reader.record.at(-1).layers[1];
          return Array.from(attn.addedByHead(mixed, 2)); }"""
    )
    K = config.head_dim
    slice_of_head = slice(2 * K, 3 * K)
    part = seen["attn.o_proj<"][0, -1, slice_of_head]
    expected = model.blocks[1].attn.o_proj.weight[:, slice_of_head] @ part
    assert added == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_attributions_sum_to_the_logit_less_the_mean_of_all(visit, shape):
    run = random_run(shape)
    tab = visit(build_page(run))
    tokens = random_texts(30)[-1]
    for off, token in itertools.product([None, {"heads": [[0, 1]], "layers": [1]}], [3, 256]):
        logits = read(tab, tokens, off)
        parts = tab.evaluate("token => attribute(opened.gpt, reader.record.at(-1), token)", token)
        sizes = [parts["embedding"], parts["position"], parts["normBias"]]
        for layer in range(run.config.model.n_layer):
            sizes += [parts["attnBiases"][layer], parts["mlps"][layer], *parts["heads"][layer]]
        expected = logits[-1, token] - logits[-1].mean()
        assert sum(sizes) == pytest.approx(expected.item(), abs=1e-4)
        assert sum(map(abs, sizes)) > 0.1
        if off is not None:
            assert parts["heads"][0][1] == 0


def test_an_attribution_is_the_slope_of_the_logit_along_what_was_added(visit):
    run = random_run("gpt2")
    tab = visit(build_page(run))
    tokens = random_texts(30)[-1]
    read(tab, tokens)
    model = rounded(run, "bfloat16").model
    added = {}
    model.blocks[1].mlp.register_forward_hook(lambda m, i, output: added.update(mlp=output[0, -1]))
    model.final_norm.register_forward_pre_hook(lambda m, i: added.update(x=i[0][0, -1]))
    logits_of(model, tokens)
    x = added["x"]
    scale = (x.var(correction=0) + run.config.model.norm_eps).rsqrt()
    part = (added["mlp"] - added["mlp"].mean()) * scale * model.final_norm.weight
    head = model.head_weight
    expected = (part @ (head[5] - head.mean(dim=0))).item()
    parts = tab.evaluate("attribute(opened.gpt, reader.record.at(-1), 5)")
    assert parts["mlps"][1] == pytest.approx(expected, abs=1e-4)


INDUCTION = """tokens => {
  const reader = new Reader(opened.gpt);
  reader.read(tokens);
  return summarizeHeads(opened.gpt, reader.record)
    .map((row) => row.map(({ induction }) => induction)); }"""


def test_a_new_model_has_its_wired_induction_head(visit):
    run = random_run({"n_layer": 3, "d_model": 64})
    torch.manual_seed(0)
    model = GPT(run.config.model).eval()
    tab = visit(build_page(Run(run.path, run.config, run.tokenizer, model, run.state)))
    tokens = torch.randperm(run.tokenizer.vocab_size)[: CONTEXT // 2].tolist()
    scores = tab.evaluate(INDUCTION, 2 * tokens)
    *_, (second, *_), (first, *head) = sorted(
        (score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)
    )
    assert head == [1, 0]
    assert first > 1.5 * second


def test_induction_is_the_weight_on_what_followed_the_token_before(visit):
    run = random_run({"attention": {"window": 6}})
    tab = visit(build_page(run))
    tokens = [7, 7, 9, 8, 7, 5, 9, 7, 8, 8]
    followers = {4: [1, 2], 6: [3], 7: [1, 2, 5], 8: [4], 9: [4]}  # not the token itself
    model = rounded(run, "bfloat16").model
    weights = compute_attention_weights(model, tokens)  # (L, H, T, T)
    expected = torch.stack([weights[:, :, t, keys].sum(-1) for t, keys in followers.items()])
    found = tab.evaluate(INDUCTION, tokens)
    assert torch.tensor(found) == pytest.approx(expected.mean(dim=0), abs=1e-4)
