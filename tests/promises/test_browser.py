"""The pages in a real browser: Chromium with the network off, driven by Playwright."""

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini.extras.page import arithmetic, page_data
from gptmini.figures import page
from gptmini.generate.attention_maps import compute_attention_weights, summarize_heads
from gptmini.generate.run import Run
from gptmini.model import mechanisms
from gptmini.model.gpt import GPT
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.core.generate.samples import run_of
from tests.support import HOSTILE, SMALL, tiny

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install -e '.[browser]'"
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium")

TEXT = list(b"the cat sat on")
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path: Path) -> Iterator[Any]:
    """Opens a page from its bytes or path; fails at the end if anything went wrong inside."""
    contexts, wrong = [], []

    def visit(content: bytes | Path) -> Any:
        if isinstance(content, bytes):
            (tmp_path / "page.html").write_bytes(content)
            content = tmp_path / "page.html"
        size = {"width": 1280, "height": 900}
        context = browser.new_context(viewport=size, color_scheme="light", offline=True)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: wrong.append("dialog"))
        tab.on("request", lambda request: requests.append(request.url))
        requests: list[str] = []
        tab.goto(content.resolve().as_uri())
        assert requests == [content.resolve().as_uri()]
        return tab

    visit.wrong = wrong
    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


def lit(tab: Any) -> list[tuple[bool, str, bool]]:
    """For each token: whether it is hidden, its title, whether it is the one that looks."""
    script = """tokens => tokens.map(token => [token.classList.contains("hidden"), token.title,
      token.classList.contains("at"), getComputedStyle(token).backgroundColor])"""
    return tab.eval_on_selector_all(".token", script)


def percent(text: str) -> float:
    return float(re.search(r"([\d.]+) %", text)[1]) / 100


@pytest.mark.parametrize("attention", [{}, {"variant": "gqa", "n_kv_head": 2, "window": 4}])
def test_pointing_at_a_token_lights_what_the_tensor_says(visit, attention):
    run = run_of(**attention)
    tab = visit(page_data.build_page(run, TEXT, None, (1, 2)))
    weights = compute_attention_weights(run.model, TEXT)[1, 2]
    for query in (5, 13, 0):
        tab.locator(".token").nth(query).hover()
        shown = lit(tab)
        window = attention.get("window", 99)
        assert [hidden for hidden, *_ in shown] == [
            not query - window < key <= query for key in range(14)
        ]
        assert [at for _, _, at, _ in shown] == [key == query for key in range(14)]
        for key, (hidden, title, _, color) in enumerate(shown):
            if not hidden:
                weight = weights[query, key].item()
                assert percent(title) == pytest.approx(weight, abs=0.006)
                red = int(re.match(r"rgba?\((\d+)", color)[1])
                root = weight**0.5  # of the ramp: 255, 96, 6
                assert root < 0.03 or red == pytest.approx(
                    255 - 318 * root if root < 0.5 else 186 - 180 * root, abs=4
                )
    tab.mouse.move(0, 0)
    assert [at for _, _, at, _ in lit(tab)].index(True) == 13  # the last one is chosen


def test_keys_move_through_tokens_and_heads(visit):
    tab = visit(page_data.build_page(run_of(), list(b"one\ntwo\nsix"), None, (0, 0)))

    def at() -> int:
        focused = tab.evaluate("document.activeElement.dataset.k")
        assert [at for _, _, at, _ in lit(tab)].index(True) == int(focused)
        return int(focused)

    tab.locator(".token[tabindex='0']").focus()
    moves = ["ArrowLeft", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "ArrowLeft", "End"]
    seen = [tab.keyboard.press(key) or at() for key in [*moves, "ArrowRight", "ArrowUp"]]
    assert seen == [9, 8, 4, 8, 0, 0, 10, 10, 6]
    tab.locator(".tile[tabindex='0']").focus()
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        tab.keyboard.press(key)
    assert "layer 1, head 1" in tab.locator(".map h3").inner_text()


def test_the_expectations_are_those_of_python(visit):
    run = run_of()
    expected = page_data.compute_logit_lens(run.model, TEXT)
    tab = visit(page_data.build_page(run, TEXT, None, (0, 0)))
    tab.locator(".token").nth(5).click()
    for stage in (2, 0, 1):
        tab.locator(".stages button").nth(stage).click()
        shown = tab.locator(".expect .bars > span:nth-child(3n)").all_inner_texts()
        chances = expected.probabilities[stage, 5].tolist()
        assert [percent(text) for text in shown[:10]] == pytest.approx(chances, abs=0.006)
        rank, came = (
            expected.target_ranks[stage, 5].item(),
            expected.target_probabilities[stage, 5].item(),
        )
        outcome = tab.locator(".expect > p").first.inner_text()
        assert f"rank {rank} of 257, " in outcome
        assert percent(outcome) == pytest.approx(came, abs=0.006)
        if stage == 2:
            bits = float(re.search(r"([\d.]+) bits", outcome)[1])
            assert bits == pytest.approx(-torch.tensor(came).log2().item(), abs=0.051)


def real(text: str) -> float:
    """The first number in a text, as the page writes it."""
    text = text.replace(MINUS, "-")
    return float("-inf") if text.startswith("-∞") else float(re.search(r"-?[\d.]+", text)[0])


def numbers_of(figure: Any) -> torch.Tensor:
    texts = figure.locator(".numbers > span").all_text_contents()
    return torch.tensor([real(text) for text in texts])


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ({}, {}),
        ({"position": "alibi", "bias": True}, {"variant": "gqa", "n_kv_head": 2, "window": 4}),
    ],
    ids=["rope", "alibi"],
)
def test_the_arithmetic_is_that_of_python(visit, model, attention):
    run = run_of(model=model, **attention)
    tab = visit(page_data.build_page(run, TEXT, None, (0, 0)))
    card = tab.locator(".arithmetic")
    card.get_by_label("Layer").select_option("layer 1")
    card.get_by_label("Head").select_option("head 2")
    card.get_by_label("Token", exact=True).select_option(index=9)
    card.get_by_label("Token before").click()
    assert "layer 1, head 2, for token 8" in card.locator("h3").inner_text()
    assert [at for _, _, at, _ in lit(tab)].index(True) == 8  # one choice for the whole page

    (layer,) = arithmetic.record_layers(run.model, TEXT, [1])
    G, K = layer.k.shape[0], layer.k.shape[2]
    q, keys, values = layer.q[2, 8], layer.k[2 * G // 4], layer.v[2 * G // 4]
    raw = keys @ q
    scaled = raw / K**0.5
    mask = mechanisms.window_mask(14, attention.get("window", 14))[8]
    weights = compute_attention_weights(run.model, TEXT)[1, 2, 8]
    rows = card.locator(".scores tbody tr")
    found = torch.tensor(
        [[real(cell) for cell in row.locator(".signed").all_inner_texts()] for row in rows.all()]
    )
    steps = [raw, scaled]
    biased = scaled
    if model:
        bias = mechanisms.alibi_bias(4, 14)[2, 8]
        steps.append(bias)
        biased = scaled + bias
    expected = torch.stack([*steps, biased.masked_fill(~mask, -torch.inf), weights], dim=1)
    torch.testing.assert_close(found, expected, atol=6e-4, rtol=0)
    bars = (
        rows.nth(7)
        .locator(".bar > i")
        .evaluate_all("bars => bars.map(bar => [bar.style.left, bar.style.width].map(parseFloat))")
    )
    largest = torch.stack(steps).abs().max()
    share = 50 * (raw[7] / largest).item()
    assert bars[0] == pytest.approx([50 + min(share, 0), abs(share)], abs=1e-3)
    assert bars[-1][1] == pytest.approx(100 * weights[7].item(), abs=1e-3)

    output = layer.output_weight[:, 2 * K : 3 * K] @ (weights @ values)
    stream = layer.stream[8]
    vectors = [q, keys[8], values[8], weights @ values, output]
    vectors += [layer.added[8], stream, stream + layer.added[8]]
    for figure, vector in zip(card.locator(".vectors figure").all(), vectors, strict=True):
        torch.testing.assert_close(numbers_of(figure), vector, atol=6e-4, rtol=0)
    lengths = card.locator(".bars").last.locator("span:nth-child(3n)").all_inner_texts()
    assert real(lengths[2]) == pytest.approx(output.norm().item(), abs=6e-4)
    check = card.locator(".note").last.inner_text()
    off_by, off_map = re.search(r"at most (\S+), .* at most ([\d.]+)\.$", check).groups()
    assert float(off_by) < 1e-5
    assert float(off_map) <= 0.004
    assert card.locator(".planes figure").count() == (2 if not model else 0)


def test_heads_that_add_nothing_have_no_bars(visit):
    run = run_of()
    with torch.no_grad():
        run.model.blocks[0].attn.o_proj.weight.zero_()
    tab = visit(page_data.build_page(run, TEXT, None, (0, 0)))
    bars = tab.locator(".arithmetic .bars").last.locator("i")
    assert bars.evaluate_all("bars => bars.map(bar => bar.style.width)") == ["0%"] * 4


def test_rope_turns_the_chosen_pair_of_the_chosen_key(visit):
    run = run_of()
    tab = visit(page_data.build_page(run, TEXT, None, (1, 3)))
    card = tab.locator(".arithmetic")
    card.get_by_label("Pair").press("ArrowRight")
    card.get_by_label("Key").press("Home")
    for _ in range(6):
        card.get_by_label("Key").press("ArrowRight")
    attention = run.model.blocks[1].attn
    found = {}
    hook = attention.register_forward_pre_hook(lambda _, inputs: found.update(x=inputs[0]))
    run.model(torch.tensor([TEXT]))
    hook.remove()
    unturned = [each[0, 3].detach() for each in attention.project_qkv(found["x"], None)[:2]]
    pairs = [unturned[0][13, [1, 5]].tolist(), unturned[1][6, [1, 5]].tolist()]
    notes = card.locator(".planes .note").all()
    for note, pair, position in zip(notes, pairs, (13, 6), strict=True):
        text = note.inner_text()
        assert f"turned by {position} · 0.1 rad = {position / 10:g} rad = " in text
        angle = position / 10
        turned = [
            pair[0] * math.cos(angle) - pair[1] * math.sin(angle),
            pair[0] * math.sin(angle) + pair[1] * math.cos(angle),
        ]
        points = re.search(r"from \((\S+), (\S+)\), hollow, to \((\S+), (\S+)\)", text).groups()
        assert [real(x) for x in points] == pytest.approx([*pair, *turned], abs=6e-4)
    share = tab.locator(".planes + p").inner_text()
    assert f"(13 {MINUS} 6) · 0.1 rad = 0.7 rad" in share
    assert card.locator(".planes svg path.turned").count() == 2


def test_neighbors_and_the_cache_follow_the_token(visit):
    run = run_of(model={"n_layer": 3}, variant="gqa", n_kv_head=2, window=4, full_every=3)
    part = page_data.build_reading([run], TEXT, "", with_arithmetic=True)
    part["arithmetic"]["layers"][1] = None
    tab = visit(page.render_page("", "", [part]))
    slider = tab.get_by_label("Tokens read")
    slider.press("Home")
    for _ in range(5):
        slider.press("ArrowRight")
    table = run.model.embed.weight.detach()
    _, cosines = arithmetic.find_neighbors(table, [TEXT[5]], 8)
    texts = tab.locator(".near .bars > span").all_inner_texts()
    assert [float(text) for text in texts[2::3]] == pytest.approx(cosines[0].tolist(), abs=0.006)
    assert tab.locator(".near h3").inner_text() == "The nearest embeddings to a"
    kept = tab.locator(".memory small").all_inner_texts()
    every_byte = [int(re.search(r"([\d,]+) bytes", text)[1].replace(",", "")) for text in kept]
    assert kept[0].startswith("layer 0: 4 keys and as many values in each of 2 KV heads, tokens 2")
    assert every_byte == [4 * 2 * 2 * 8 * 4, 4 * 2 * 2 * 8 * 4, 6 * 2 * 2 * 8 * 4]
    own = tab.locator(".memory .came").last.inner_text()
    assert f"{sum(every_byte):,} bytes" in own
    widths = "cells => cells.map(cell => cell.style.flexGrow + cell.className)"
    strips = [strip.locator("span").evaluate_all(widths) for strip in tab.locator(".strip").all()]
    assert strips == [["2hatched", "4kept", "8"]] * 2 + [["6kept", "8"]]
    card = tab.locator(".arithmetic")
    card.get_by_label("Layer").select_option("layer 1")  # one that the page had no room for
    assert "This page has no numbers of layer 1." in card.inner_text()
    assert not tab.locator(".scores").is_visible()


def test_several_heads_are_averaged(visit):
    run = run_of()
    tab = visit(page_data.build_page(run, TEXT, None, (0, 1)))
    tab.get_by_role("button", name="average several").click()
    tab.locator(".tile").nth(6).click()
    weights = compute_attention_weights(run.model, TEXT)
    mean = (weights[0, 1, 13] + weights[1, 2, 13]) / 2
    shown = [percent(title) for _, title, *_ in lit(tab)]
    assert shown == pytest.approx(mean.tolist(), abs=0.006)
    tab.get_by_role("button", name="mean of its heads").nth(1).click()
    shown = [percent(title) for _, title, *_ in lit(tab)]
    assert shown == pytest.approx(weights[1, :, 13].mean(dim=0).tolist(), abs=0.006)


def test_heads_that_share_a_kv_head_stand_in_one_frame(visit):
    run = run_of(variant="gqa", n_kv_head=2)
    tab = visit(page_data.build_page(run, TEXT, None, (0, 0)))
    frames = tab.locator(".group")
    assert frames.count() == 4  # two in each layer
    assert frames.nth(1).locator(".tile b").all_inner_texts() == ["head 2", "head 3"]
    labels = [tile.get_attribute("aria-label") for tile in tab.locator(".tile").all()]
    for label, means in zip(
        labels, summarize_heads(compute_attention_weights(run.model, TEXT)), strict=True
    ):
        assert label.startswith(
            f"layer {means.layer}, head {means.head}, KV head {means.head // 2}"
        )
        assert label.endswith(f"entropy {means.entropy:.2f}")
        assert percent(label) == pytest.approx(means.previous, abs=0.0051)


def test_tables_say_the_same(visit):
    run = run_of(window=3)
    tab = visit(page_data.build_page(run, TEXT, None, (1, 3)))
    tab.locator("summary", has_text="tables").click()
    rows = tab.locator("details tr").all_inner_texts()
    weights = compute_attention_weights(run.model, TEXT)[1, 3, 13]
    cells = [row.split("\t") for row in rows[1:15]]
    assert [cell[3] for cell in cells[:11]] == ["hidden"] * 11
    assert [float(cell[3]) for cell in cells[11:]] == pytest.approx(weights[11:], abs=0.005)
    assert len(rows) == 1 + 14 + 1 + 8


def test_draws_show_what_the_filters_removed(visit):
    run = run_of({"top_k": 3})
    text = page_data.continue_prompt(run, "abc", 9)
    tab = visit(page_data.build_page(run, text.prompt_tokens + text.tokens, text, (0, 0)))
    note = tab.locator(".expect .note", has_text="Drawn with")
    assert "top_k 3. The filters kept 3 tokens and removed" in note.inner_text()
    assert tab.locator(".expect .bars > .gone").count() >= 2 * 7
    assert tab.locator(".expect .bars i.after").count() == 3
    tab.locator(".token").nth(0).hover()
    assert note.count() == 0


def test_hostile_texts_are_shown_and_run_nothing(visit):
    part = page_data.build_reading([run_of()], TEXT, HOSTILE, with_arithmetic=True)
    part["arithmetic"]["notes"] = dict.fromkeys(part["arithmetic"]["notes"], HOSTILE)
    part["spellings"] = [[HOSTILE, HOSTILE] for _ in part["spellings"]]
    part["in_text"][3:6] = [[HOSTILE, HOSTILE]] * 3
    part["sampling"] = HOSTILE
    lines = [page.build_series(HOSTILE, [(0, 1), (1, 2)])]
    parts = [
        page.build_table([HOSTILE], [[HOSTILE]], HOSTILE, HOSTILE),
        page.build_charts([page.build_chart(HOSTILE, HOSTILE, HOSTILE, lines)], HOSTILE),
        {"type": "samples", "heading": HOSTILE, "items": [[HOSTILE, HOSTILE]]},
        part,
    ]
    plain = visit(page.render_page("", "", [])).evaluate("document.scripts.length")
    tab = visit(page.render_page(HOSTILE, HOSTILE, parts))
    assert tab.evaluate("document.scripts.length") == plain
    assert tab.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
    for selector in (
        "h1",
        "#lead",
        "td",
        "pre",
        "svg + *, .card h3",
        ".token",
        ".label",
        ".scores th .label",
    ):
        assert "<img src=x onerror=alert(1)>" in tab.locator(selector).first.text_content()
    assert tab.evaluate("document.querySelector('pre').textContent") == HOSTILE
    # The policy also stops what somebody would write into the page later.
    assert tab.evaluate("(() => { try { document.body.innerHTML = 'x' } catch { return 1 } })()")
    assert "requires 'TrustedHTML'" in visit.wrong.pop()


@pytest.fixture
def plotted(gptmini, text_file: Path) -> Path:
    for out, attention in (("runs/a", "mha"), ("runs/b", "window:4")):
        words = ["--data", "text.txt", *SMALL, "--attention", attention]
        assert gptmini("train", *words, "--out", out)[0] == 0
    assert gptmini("plot", "runs/a", "runs/b", "--out", "plot.html")[0] == 0
    assert gptmini("compare", "runs/a", "runs/b", "--out", "c")[0] == 0
    return text_file.parent


def test_a_plot_shows_the_heads_at_every_checkpoint(visit, plotted):
    tab = visit(plotted / "plot.html")
    steps = tab.locator("button", has_text=re.compile("^step "))
    assert steps.all_inner_texts() == ["step 2", "step 4"] * 2
    figures = tab.locator(".tile").first
    newest = figures.inner_text()
    steps.first.click()
    assert figures.inner_text() != newest
    steps.nth(1).click()
    assert figures.inner_text() == newest
    assert tab.locator(".charts svg").count() == 4
    assert "runs/a, validation" in tab.locator(".charts svg").first.get_attribute("aria-label")


def of_long_words() -> bytes:
    long = "x" * 300
    part = page_data.build_reading([run_of()], TEXT, long, with_arithmetic=True)
    part["spellings"] = [[long, "␣" * 300] for _ in part["spellings"]]
    lines = [page.build_series(long, [(0, 1), (1, 2)])]
    samples = {"type": "samples", "heading": long, "items": [[long, long]]}
    parts = [page.build_table([long], [[long]], long, long), samples, part]
    parts += [page.build_charts([page.build_chart(long, "x", long, lines)], long)]
    return page.render_page(long, long, parts)


def test_nothing_overflows(visit, plotted):
    run = run_of(variant="gqa", n_kv_head=2)
    pages = [
        page_data.build_page(run, [*b"A long line. \n"], None, (0, 0)),
        plotted / "plot.html",
        plotted / "c" / "compare.html",
        of_long_words(),
    ]
    # Texts that are wider than what they are in.
    script = """nodes => nodes.filter(node => node.scrollWidth > node.clientWidth + 1)
      .map(node => node.className)"""
    for content in pages:
        tab = visit(content)
        for width, scheme in ((360, "light"), (360, "dark"), (1280, "dark"), (2560, "light")):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            inner = ".card, .tile, .token, .measure, .row"
            assert tab.eval_on_selector_all(inner, script) == []


def test_the_marks_of_an_axis_differ_and_a_logarithmic_one_is_named(visit):
    bits = [(512.0, 2.11342), (1024.0, 2.11371), (4096.0, 2.11398)]
    series = [page.build_series("a", bits, "dots")]
    charts = [
        page.build_chart("Near", "KiB", "bits", series, "x"),
        page.build_chart("Steep", "KiB", "nats", [page.build_series("a", [(1, 2), (2, 900)])], "y"),
    ]
    tab = visit(page.render_page("a", "", [page.build_charts(charts, "Curves")]))
    near = tab.locator(".charts svg").first.locator("text").all_text_contents()
    *marks, x_label = near
    assert len(marks) > 6
    assert len(set(marks)) == len(marks)
    assert x_label == "KiB, log scale"
    headings = tab.locator(".charts h3").all_inner_texts()
    assert headings == ["Near (bits)", "Steep (nats, log scale)"]


def test_a_large_map_has_labels_where_there_is_room(visit):
    config = tiny(model={"context_length": 64}).with_tokenizer("byte", 257)
    torch.manual_seed(0)
    model = GPT(config.model).eval()
    run = Run(Path("run"), config, ByteTokenizer(), model, {"step": 7, "corpus": ""})
    text = bytes(33 + number for number in range(61))
    tab = visit(page_data.build_page(run, list(text), None, (0, 0)))
    canvas = tab.locator(".map canvas").bounding_box()
    for side, start, length in (("across", "x", "width"), ("down", "y", "height")):
        spans = tab.locator(f".{side} > span")
        labels = [label.strip() for label in spans.all_inner_texts()]
        assert labels == [f"{4 * n} {chr(byte)}" for n, byte in enumerate(text[::4])]
        place = spans.nth(10).bounding_box()[start] - canvas[start]
        assert place == pytest.approx(40 / 61 * canvas[length], abs=3)
    rows = tab.locator(".scores tbody tr")
    assert rows.count() == 12  # the last token has none after it
    toggle = tab.get_by_role("button", name="show all 61 keys")
    toggle.click()
    assert rows.count() == 61
    toggle.click()
    tab.locator(".token").nth(40).click()
    assert rows.count() == 13
    assert rows.last.locator(".signed").nth(2).inner_text() == f"{MINUS}∞"
