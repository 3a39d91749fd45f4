"""What the page shows, in Chromium: the numbers of model.js, and what a reader does to them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini.extras.interop.adopt import adopt_tokenizer
from gptmini.extras.interop.tokenizer_json import (
    build_added_token,
    build_post_processor,
    to_tokenizer_json,
)
from gptmini.extras.page import export
from gptmini.extras.page.export import build_page
from gptmini.tokenizer.tokenizers import END_OF_TEXT, ByteTokenizer, CharTokenizer
from tests.extras.page.samples import SHAPES, random_run, rounded
from tests.support import HOSTILE

FOLDER = Path(export.__file__).parent
PROMPT = "the cat sat on the mat"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"

# A model of its own in the page, so that the page's caches are not asked about themselves.
FRESH = """
globalThis.fresh = (text, at, off = null) => {
  const reader = new Reader(opened.gpt);
  const tokens = opened.tokenizer.encode(text);
  reader.read(tokens, off);
  return reader.record[at ?? tokens.length - 1];
}
globalThis.chances = (logits, temperature) =>
  Array.from(softmax(logits.map((logit) => logit / temperature)));
0;
"""


def opened(visit: Any, run: Any, prompt: str = PROMPT) -> Any:
    tab = visit(build_page(run, prompt=prompt))
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.evaluate(FRESH)
    tab.evaluate("choose({ place: Math.max(0, now.T - 2) })")  # where one sees what came
    # However busy the machine, no text is slow to read, which would make typing wait.
    tab.evaluate("performance.now = () => 0; updateTime = 0; 0")
    return tab


def percent(text: str) -> float:
    return float(re.search(r"([\d.]+) %", text)[1]) / 100


def bars(tab: Any) -> dict[int, float]:
    """The probabilities that the first screen shows, by token; below 0.01 % as 0.01 %."""
    rows = tab.locator(".expected:not(.empty)").all()
    return {
        int(row.get_attribute("data-token")): percent(row.locator(".number").inner_text())
        for row in rows
    }


def check_bars(tab: Any, expected: list[float]) -> None:
    shown = bars(tab)
    assert len(shown) >= 10
    assert max(expected) == pytest.approx(max(shown.values()), abs=0.006)
    for token, chance in shown.items():
        assert chance == pytest.approx(expected[token], abs=0.006)


def select(tab: Any, place: int) -> None:
    tab.locator("#top .chip").nth(place).click()


def test_it_opens_on_the_last_token_of_a_prompt(visit):
    tab = visit(build_page(random_run(), prompt=PROMPT))
    assert tab.evaluate("now.at") == len(PROMPT) - 1
    assert "The text ends here" in tab.locator(".outcome").inner_text()


def test_what_came_is_said_with_its_chance_and_rank(visit):
    tab = opened(visit, random_run())
    chosen = tab.locator(".chip[aria-pressed=true]").first
    assert chosen.get_attribute("data-focus") == f"chip-{len(PROMPT) - 2}"
    chance = tab.evaluate("([text, at]) => chances(fresh(text, at).logits, 0.8)", [PROMPT, 20])
    assert percent(tab.locator(".outcome").inner_text()) == pytest.approx(
        chance[ord("t")], abs=0.006
    )
    rank = 1 + sum(other > chance[ord("t")] for other in chance)
    assert tab.locator(".outcome").inner_text().endswith(f"{rank}.")


def test_the_path_ends_at_what_the_bars_say(visit):
    tab = opened(visit, random_run(sample={"temperature": 0.5, "bias": {"e": 3}}))
    tab.locator("[data-station=head]").click()
    first = max(bars(tab).values())
    for place in ("[data-station=head]", "#station .number >> nth=0"):
        assert percent(tab.locator(place).inner_text().split("→")[-1]) == pytest.approx(first)
    tab.locator("#settings summary").click()
    tab.get_by_label("temperature").press("End")
    moved = percent(tab.locator("[data-station=head]").inner_text())
    assert moved == pytest.approx(max(bars(tab).values())) != first


def test_an_exported_page_opens_on_a_text_of_its_own(visit):
    tab = opened(visit, random_run(), "")
    assert tab.locator("#top .chip").count() > 10
    assert tab.locator("#text").input_value() != ""


def test_typing_changes_the_bars(visit):
    tab = opened(visit, random_run())
    before = bars(tab)
    tab.locator("#text").press_sequentially(" so")
    typed = tab.locator("#text").input_value()
    assert tab.locator("#top .chip").count() == len(typed)
    assert bars(tab) != before
    check_bars(tab, tab.evaluate("text => chances(fresh(text).logits, 0.8)", typed))
    tab.locator("#text").fill("")
    assert "<|endoftext|>" in tab.locator("#top .chips").inner_text()


def test_sliders_redraw_the_bars_and_name_what_removed_a_token(visit):
    tab = opened(visit, random_run(sample={"top_k": None, "temperature": 1.0}))
    tab.locator("#settings summary").click()
    select(tab, 9)
    text = PROMPT[:10]
    tab.get_by_label("temperature").press("End")
    chances = tab.evaluate("text => chances(fresh(text).logits, 2)", text)
    check_bars(tab, chances)
    assert tab.locator(".gone").count() == 0
    tab.get_by_label("top-k").press("Home")
    tab.get_by_label("top-k").press("ArrowRight")
    assert tab.locator(".expected.gone").count() >= 8
    assert tab.locator(".expected:not(.gone):not(.empty)").count() == 2
    assert set(tab.locator(".gone small").all_inner_texts()) == {"top-k"}
    tab.get_by_label("min-p").press("End")  # nothing but the likeliest
    assert tab.locator(".expected:not(.gone):not(.empty)").count() == 1
    tab.get_by_label("temperature").press("Home")
    assert set(tab.locator(".gone small").all_inner_texts()) == {"temperature"}


def test_it_generates_what_generate_does_and_takes_it_back(visit):
    run = random_run(sample={"max_new_tokens": 6})
    tab = opened(visit, run, "The cat")
    (text,) = rounded(run, "bfloat16").start(["The cat"], use_cache=False).finish()
    drawn = "Array.from(continuation.tokens)"
    for count in range(1, 4):
        tab.get_by_role("button", name="One token").click()
        assert tab.evaluate(drawn) == text.tokens[:count]
    assert tab.locator("#top .chip.drawn").count() == 3
    tab.get_by_role("button", name="Take back").click()
    assert tab.evaluate(drawn) == text.tokens[:2]
    for _ in range(2):
        tab.get_by_role("button", name="Take back").click()
    assert tab.locator("#text").input_value() == "The cat"
    assert tab.get_by_role("button", name="Take back").is_disabled()
    tab.get_by_role("button", name="Generate").click()
    tab.wait_for_function("() => continuation.tokens.length === 6 && timer === null")
    assert tab.evaluate(drawn) == text.tokens
    press = """() => {
      places.generate.click(); // goes on from there
      const runs = timer !== null;
      places.generate.click();
      return [runs, timer];
    }"""
    assert tab.evaluate(press) == [True, None]


def test_a_text_is_what_was_opened_until_something_is_typed(visit):
    prompt = "\r\na\rb"
    tab = opened(visit, random_run(), prompt)
    assert tab.evaluate("Array.from(continuation.promptTokens)") == list(prompt.encode())
    tab.get_by_role("button", name="One token").click()
    tab.get_by_role("button", name="Take back").click()
    assert tab.evaluate("getText()") == prompt
    tab.locator("#text").press("End")
    tab.locator("#text").press("c")
    check_read(tab, tab.locator("#text").input_value())


def check_read(tab: Any, text: str) -> None:
    """All that is shown is of this text, none of which is drawn."""
    assert tab.evaluate("[getText(), continuation.tokens.length]") == [text, 0]
    read = "tokenizer.encode(getText()).join() === continuation.context.join()"
    assert tab.evaluate(f"{read} && now.tokens.join() === continuation.context.join()")
    assert tab.locator("#top .chip").count() == len(text.encode())


def test_what_an_input_method_composes_is_read(visit):
    tab = opened(visit, random_run(), "ab")
    tab.locator("#text").press("Control+End")
    client = tab.context.new_cdp_session(tab)
    for text in ("n", "ni", "ni h"):
        composed = {"text": text, "selectionStart": len(text), "selectionEnd": len(text)}
        client.send("Input.imeSetComposition", composed)
        check_read(tab, f"ab{text}")
    client.send("Input.insertText", {"text": "你好"})
    check_read(tab, "ab你好")


def test_typing_while_it_generates_pauses_it(visit):
    tab = opened(visit, random_run(sample={"max_new_tokens": 40}), "ab")
    tab.get_by_role("button", name="Generate").click()
    tab.wait_for_function("() => continuation.tokens.length >= 3")
    tab.locator("#text").press("Home")
    tab.locator("#text").press("x")
    assert tab.evaluate("timer") is None
    text = tab.locator("#text").input_value()
    assert tab.evaluate("textBox.selectionStart") == text.index("x") + 1
    assert tab.evaluate("getText()") == text
    assert tab.evaluate("continuation.tokens.length") == 0
    assert tab.evaluate("now.tokens.join() === continuation.context.join()")


def test_the_draw_is_that_of_the_token_that_came(visit):
    run = random_run(sample={"temperature": 1.5, "top_k": None})
    tab = opened(visit, run, "The cat")
    for _ in range(4):
        tab.get_by_role("button", name="One token").click()
    open_station(tab, "draw")
    for count in range(4):
        select(tab, len("The cat") - 1 + count)
        random = tab.evaluate("(count) => drawUniform(state.sample.seed, 0, count)", count)
        token = tab.evaluate("(count) => spellText(continuation.tokens[count])", count)
        said = tab.locator("#station p").last.inner_text()
        assert f"{random:.4f}: {token}." in said
        assert said.endswith(f"({count}).")


def open_station(tab: Any, station: str) -> None:
    """Opens a station; of a layer that is not large, its line comes first."""
    _, _, layer = station.partition(":")
    if layer and not tab.locator(f"[data-station='mlp:{layer}']").count():
        tab.locator(f"[data-station='attn:{layer}']").click()
    tab.locator(f"[data-station='{station}']").click()


def open_step(tab: Any, step: str) -> None:
    tab.locator(f"#station summary[data-focus='step-{step}']").click()
    tab.locator("#station > details[open] > div").wait_for()  # it is filled a moment later


def real(text: str) -> float:
    text = text.replace(MINUS, "-")
    return float("-inf") if text == "-∞" else float(text)


@pytest.mark.parametrize("shape", ["bloom", "gqa", "window"])
def test_the_table_of_scores_is_that_of_the_model(visit, shape):
    tab = opened(visit, random_run(shape))
    select(tab, 13)
    open_station(tab, "attn:1")
    tab.locator("#station .tile").nth(2).click()
    open_step(tab, "table")
    tab.locator(".scores").wait_for()
    rows = tab.locator(".scores tbody tr").all()
    found = {int(row.locator("small").first.inner_text()): row for row in rows}
    head = """([text, at]) => {
      const { scores, weights } = fresh(text, at).layers[1];
      const S = at + 1;
      return [scores, weights].map((all) => Array.from(all.subarray(2 * S, 3 * S), String));
    }"""
    scores, weights = (
        [float(x.replace("Infinity", "inf")) for x in row]
        for row in tab.evaluate(head, [PROMPT, 13])
    )
    assert sorted(found) == [k for k, score in enumerate(scores) if score > float("-inf")]
    order = [float(row.locator("td").first.inner_text()) for row in rows]
    assert order == sorted(order, reverse=True)
    for key, row in found.items():
        cells = row.locator("td").all_inner_texts()
        assert real(cells[0]) == pytest.approx(weights[key], abs=6e-5)
        assert real(cells[-1]) == pytest.approx(scores[key], abs=6e-4)
        bias = real(cells[3]) if shape == "bloom" else 0
        assert real(cells[2]) + bias == pytest.approx(scores[key], abs=2e-3)
    # The key that the steps show is not the query itself, and the strongest of the others.
    key = int(tab.locator(".scores tr.at small").first.inner_text())
    assert weights[key] == max(weights[:13])
    product = found[key].locator("td").nth(1).inner_text()
    open_step(tab, "score")
    assert tab.locator("#station details[open] > div b").first.inner_text() == product


def test_the_steps_open_on_the_strongest_other_key(visit):
    tab = opened(visit, random_run())
    found = """range(now.T).slice(1).flatMap((place) => {
      choose({ place, key: null });
      return range(4).map((head) => {
        const weights = weightsOf(place, 1, head);
        const strongest = findLargest(weights.slice(0, place));
        return [findKey(1, head) === strongest, weights[place] > weights[strongest]];
      });
    })"""
    found = tab.evaluate(found)
    assert all(is_strongest for is_strongest, _ in found)
    assert any(looks_at_itself for _, looks_at_itself in found)


def test_pointing_at_the_map_says_the_weight_and_moves_nothing(visit):
    tab = opened(visit, random_run())
    open_station(tab, "attn:1")
    frame = tab.locator(".frame")
    frame.scroll_into_view_if_needed()
    before = frame.bounding_box()
    assert tab.locator(".names").bounding_box()["height"] == pytest.approx(before["height"])
    assert before["width"] == pytest.approx(before["height"])
    side = before["width"] / len(PROMPT)
    for query, key in ((3, 1), (12, 12), (21, 4)):
        tab.mouse.move(before["x"] + (key + 0.5) * side, before["y"] + (query + 0.5) * side)
        assert frame.bounding_box() == before
        weight = tab.evaluate(
            """([text, q, k]) => fresh(text, q).layers[1].weights[k]""", [PROMPT, query, key]
        )
        assert percent(tab.locator(".readout").inner_text()) == pytest.approx(weight, abs=0.006)
    tab.mouse.click(before["x"] + 2.5 * side, before["y"] + 8.5 * side)
    assert tab.evaluate("[now.at, state.key]") == [8, 2]
    assert frame.bounding_box() == before
    tab.mouse.move(0, 0)
    weight = tab.evaluate("([text]) => fresh(text, 8).layers[1].weights[2]", [PROMPT])
    assert percent(tab.locator(".readout").inner_text()) == pytest.approx(weight, abs=0.006)


SWITCHES = [
    ("head", "[data-focus='cell-heads-1,2']", {"heads": [[1, 2]]}),
    ("mlp", "[data-focus='cell-mlps-0']", {"mlps": [0]}),
    ("layer", "[data-focus='cell-layers-1']", {"layers": [1]}),
]


def test_switching_off_changes_the_expectation_as_the_model_says(visit):
    tab = opened(visit, random_run())
    tab.locator("#cause > summary").click()
    whole = tab.evaluate("text => chances(fresh(text, 20).logits, 0.8)", PROMPT)
    check_bars(tab, whole)
    for _, button, off in SWITCHES:
        tab.locator(button).click()
        without = "([text, off]) => chances(fresh(text, 20, off).logits, 0.8)"
        check_bars(tab, tab.evaluate(without, [PROMPT, off]))
        row = tab.locator(".expected").first
        before = float(re.match(r"<?([\d.]+)", row.locator(".number").inner_text())[1])
        token = int(row.get_attribute("data-token"))
        assert before / 100 == pytest.approx(whole[token], abs=0.006)
        tab.get_by_role("button", name="all on").click()
        check_bars(tab, whole)
    open_station(tab, "attn:1")
    open_step(tab, "table")
    tab.locator("[data-focus=cut]").click()
    key = tab.evaluate("findKey(1, 0)")
    off = {"attentions": [[1, 0, 20, key]]}
    without = "([text, off]) => chances(fresh(text, 20, off).logits, 0.8)"
    check_bars(tab, tab.evaluate(without, [PROMPT, off]))
    assert tab.locator(".off button").count() == 2
    tab.locator(".off button").first.click()
    check_bars(tab, whole)


def test_a_second_text_lends_what_is_off(visit):
    tab = opened(visit, random_run())
    tab.locator("#cause > summary").click()
    other = PROMPT.replace("cat", "dog")
    tab.locator("#other").press_sequentially(other)
    lent = "([text, off]) => chances(fresh(text, 20, off).logits, 0.8)"
    whole = tab.evaluate(lent, [PROMPT, None])
    check_bars(tab, whole)  # nothing is off yet
    tab.locator("[data-focus='cell-mlps-1']").click()
    off = {"mlps": [1], "from": list(other.encode())}
    check_bars(tab, tab.evaluate(lent, [PROMPT, off]))
    assert tab.locator("div.off").inner_text().startswith("From the second text:")
    change = re.findall(r"([\d.]+) %", tab.locator(".off .change").inner_text())
    after = tab.evaluate(lent, [PROMPT, off])[ord("t")]
    assert [float(each) / 100 for each in change] == pytest.approx(
        [whole[ord("t")], after], abs=0.006
    )
    tab.get_by_role("button", name="中文").click()
    assert tab.locator("#other").input_value() == other
    tab.locator("#other").fill("")
    check_bars(tab, tab.evaluate(lent, [PROMPT, {"mlps": [1]}]))


@pytest.mark.parametrize("shape", ["default", "gpt2", "llama"])
def test_the_rank_of_what_came_is_said_of_each_layer(visit, shape):
    run = random_run(shape)
    tab = opened(visit, run)
    model = rounded(run, "bfloat16").model
    streams: list[torch.Tensor] = []
    for part in (*model.blocks, model.final_norm):
        part.register_forward_pre_hook(lambda module, given: streams.append(given[0]))
    with torch.no_grad():
        model(torch.tensor([list(PROMPT.encode())]))
        logits = model.final_norm(torch.stack(streams)[:, 0, 20].clone()) @ model.head_weight.T
    ranks = 1 + (logits > logits[:, ord("t"), None]).sum(dim=1)  # (L + 1,)
    said = " → ".join(map(str, ranks.tolist()))
    assert tab.locator(".ranks").inner_text().endswith(f": {said}.")


def test_attributions_are_those_of_the_model(visit):
    tab = opened(visit, random_run("gpt2"))
    tab.locator("#cause > summary").click()
    parts = tab.evaluate("text => attribute(opened.gpt, fresh(text, 20), 116)", PROMPT)
    cells = tab.locator("[data-focus^='cell-heads'] b").all_inner_texts()
    heads = [share for row in parts["heads"] for share in row]
    assert [real(cell) for cell in cells] == pytest.approx(heads, abs=0.006)
    sums = re.findall(rf"{MINUS}?\d+\.\d+", tab.locator("#cause .note").last.inner_text())
    *terms, logit, mean = map(real, sums)
    assert len(terms) == 5
    logits = tab.evaluate("text => Array.from(fresh(text, 20).logits)", PROMPT)
    assert [logit, mean] == pytest.approx([logits[116], sum(logits) / len(logits)], abs=0.006)
    assert sum(terms) == pytest.approx(logit - mean, abs=0.03)


def test_induction_is_a_column_where_the_text_repeats_itself(visit):
    tab = opened(visit, random_run())
    tab.locator("#kinds > summary").click()
    tab.locator("#text").fill("abc")
    columns = tab.locator(".kinds thead th")
    assert columns.all_inner_texts() == ["heads", "previous", "first", "itself"]
    tab.locator("#text").fill(PROMPT)
    assert columns.count() == 4  # words come twice in it, but it does not repeat itself
    tab.locator("#text").fill(f"{PROMPT}\n{PROMPT}")
    scores = tab.evaluate("now.heads().flat().map(({ induction }) => induction)")
    shown = [percent(each) for each in tab.locator(".kinds td:nth-child(5)").all_inner_texts()]
    assert shown == pytest.approx(scores, abs=0.006)
    best = scores.index(max(scores))
    tab.locator(f"[data-focus=kinds-{best // 4}-{best % 4}]").click()
    assert tab.evaluate("state.station") == f"attn:{best // 4}"
    tile = tab.locator("#station .tile[aria-pressed=true]")
    assert tile.get_attribute("data-focus") == f"tile-{best // 4}-{best % 4}"


# Lists what is wider than its place, and what is no number; `openAll` does so at each step.
FIND_FAULTS = """
globalThis.findFaults = () => {
  const parts = ".card, .chip, .tile, .cell, .bars > *, .row, figure, .note";
  const isOver = (node) => node.scrollWidth > node.clientWidth + 1;
  const over = Array.from(document.querySelectorAll(parts)).filter(isOver);
  const isWide = document.documentElement.scrollWidth > innerWidth;
  const words = document.body.innerText.match(/NaN|undefined|Infinity|null/g) ?? [];
  return [...over.map((node) => node.className), ...(isWide ? ["wide"] : []), ...words];
};
globalThis.openAll = () => listStations().flatMap((station) => {
  openStation(station, false);
  const summaries = document.querySelectorAll("#station > details > summary");
  const steps = Array.from(summaries, ({ dataset }) => dataset.focus.replace("step-", ""));
  return steps.flatMap((opened) => {
    choose({ opened });
    const nOpen = document.querySelectorAll("#station > details[open]").length;
    return [...(nOpen === 1 ? [] : ["shut"]), ...findFaults()].map((fault) => [opened, fault]);
  });
});
0;
"""


@pytest.mark.parametrize("shape", ["gqa", "gpt2", "bloom"])
def test_every_station_opens_and_nothing_overflows(visit, shape):
    tab = opened(visit, random_run(shape, sample={"top_p": 0.9, "min_p": 0.01}))
    for section in ("#kinds", "#cause", "#settings"):
        tab.locator(f"{section} > summary").click()
    tab.evaluate(FIND_FAULTS)
    assert tab.evaluate("findFaults()") == []
    assert tab.evaluate("openAll()") == []
    tab.locator("#text").fill("x" * 300 + " \u4e2d\u6587\t\r\x07\U0001f468")
    assert tab.evaluate("findFaults()") == []


def test_hostile_texts_run_nothing(visit):
    run = random_run("gpt2", CharTokenizer("<\u202e\u2028\u00e9"), name=HOSTILE.replace("/", "_"))
    tab = opened(visit, run, HOSTILE)
    for section in ("#kinds", "#cause"):
        tab.locator(f"{section} > summary").click()
    for station in ("tokens", "attn:1", "mlp:0", "draw"):
        open_station(tab, station)
    assert tab.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
    assert tab.evaluate("document.scripts.length") == 4
    assert "<img src=x onerror=alert(1)>" in tab.locator("h1").inner_text()
    tab.locator("#text").fill("<script>alert(2)</script><svg onload=alert(3)>")
    assert tab.locator("#top .chip", has_text="<").count() >= 3


def test_a_hostile_name_of_a_special_token_runs_nothing(visit):
    name = HOSTILE.removesuffix("\ud800")  # which no text can hold
    content = to_tokenizer_json(ByteTokenizer())
    del content["model"]["vocab"][END_OF_TEXT]
    content["added_tokens"] = [build_added_token(256, name)]
    content["post_processor"] = build_post_processor(name, 256)
    tokenizer = adopt_tokenizer(json.dumps(content), Path(), 257)
    tab = opened(visit, random_run("gpt2", tokenizer), "abc")
    assert "<img" in tab.locator("#top .chip").first.inner_text()
    for section in ("#kinds", "#cause"):
        tab.locator(f"{section} > summary").click()
    for station in tab.evaluate("listStations()"):
        open_station(tab, station)
        assert tab.evaluate("document.querySelectorAll('img, iframe, object').length") == 0


def test_it_speaks_chinese(visit, browser):
    tab = opened(visit, random_run())
    assert tab.get_by_role("button", name="Generate").count() == 1
    for section in ("#kinds", "#cause"):
        tab.locator(f"{section} > summary").click()
    tab.get_by_role("button", name="中文").click()
    assert tab.locator("#kinds[open], #cause[open]").count() == 2
    assert tab.get_by_role("button", name="生成").count() == 1
    assert tab.evaluate("document.documentElement.lang") == "zh-Hans"
    assert tab.locator("#text").input_value() == PROMPT
    english = re.findall(r"[A-Za-z]{4,}", tab.locator("#top").inner_text())
    assert set(english) <= {"temperature"}
    context = browser.new_context(offline=True, locale="zh-CN")
    other = context.new_page()
    other.goto(tab.url)
    assert other.get_by_role("button", name="生成").count() == 1
    context.close()


def test_keys_move_through_tokens_stations_and_the_map(visit):
    tab = opened(visit, random_run())
    focused = "document.activeElement.dataset.focus"
    tab.locator("[data-focus=chip-20]").focus()
    for key, place in (("ArrowLeft", 19), ("Home", 0), ("ArrowLeft", 0), ("End", 21)):
        tab.keyboard.press(key)
        assert tab.evaluate(focused) == f"chip-{place}"
        assert tab.evaluate("now.at") == place
    tab.locator("[data-station=tokens]").focus()
    for _ in range(4):
        tab.keyboard.press("ArrowDown")
    assert tab.evaluate(focused) == "station-attn:1"
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate("state.station") == "attn:0"
    tab.locator(".frame").focus()
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(focused) == "map"
    assert tab.evaluate("now.at") == 20
    spoken = tab.locator(".spoken").inner_text()
    assert spoken == tab.locator(".readout").inner_text()
    assert spoken.startswith("20 a looks at ")
    tab.locator("[data-focus=head-switch]").press("Enter")
    assert tab.evaluate("state.off.heads") == [[0, 0]]
    assert tab.evaluate(focused) == "head-switch"


def test_the_path_of_twelve_layers_fits_a_screen(visit, monkeypatch):
    monkeypatch.setitem(SHAPES, "deep", {"n_layer": 12})
    tab = opened(visit, random_run("deep"))
    tab.set_viewport_size({"width": 1280, "height": 800})
    open_station(tab, "mlp:5")
    tab.locator("#path").evaluate("card => card.scrollIntoView()")
    for station in ("tokens", "draw"):
        box = tab.locator(f"[data-station='{station}']").bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 800
    assert tab.locator("#path button").count() == 4 + 11 + 2
    tab.evaluate("scrollTo(0, 0)")  # the text is on it, too
    draw = tab.locator("[data-station='draw']").bounding_box()
    assert tab.locator("#text").bounding_box()["y"] > 0
    assert draw["y"] + draw["height"] <= 800


def test_each_group_is_one_tab_stop(visit):
    tab = opened(visit, random_run())
    for section in ("#kinds", "#cause"):
        tab.locator(f"{section} > summary").click()
    open_station(tab, "attn:1")
    open_step(tab, "table")
    groups = ("#top .chips", "#station .chips", ".tiles", "#path", ".kinds", ".scores", "#cause")
    for group in groups:
        buttons = tab.locator(group).locator("button")
        stops = tab.locator(group).locator("button[tabindex='0']")
        assert (buttons.count() > 1, stops.count()) == (True, 1), group
    tab.locator(".tiles button").first.focus()
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("[state.head, document.activeElement.dataset.focus]") == [1, "tile-1-1"]


def test_the_lines_of_python_are_there():
    views = read("views.js")
    sources = {
        path.name: path.read_text()
        for room in ("model", "generate", "tokenizer")
        for path in (FOLDER.parents[1] / room).glob("*.py")
    }
    quotes = re.findall(
        r"(\w+\.py)[`\"],\s*(\"(?:[^\"\\]|\\.)*\"|'[^']*'|MLP_CODE\[)", views, re.DOTALL
    )
    assert len(quotes) >= 6
    for name, quote in quotes:
        if quote != "MLP_CODE[":
            assert quote[1:-1] in sources[name]
    codes = re.search(r"MLP_CODE = \{(.*?)\};", views, re.DOTALL)[1]
    for quote in re.findall(r"[\"'](hidden .*)[\"'],", codes):
        assert quote in sources["layers.py"]


def test_all_is_said_in_both_languages():
    entries = re.findall(
        r'\[\s*"((?:[^"\\]|\\.)*)",\s*"((?:[^"\\]|\\.)*)",?\s*\]', read("words.js")
    )
    assert len(entries) > 100
    for english, chinese in entries:
        names = [sorted(re.findall(r"\{\w+\}", words)) for words in (english, chinese)]
        assert names[0] == names[1], english


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_a_text_that_is_slow_to_read_waits_for_a_pause_in_typing(visit):
    tab = opened(visit, random_run())
    tab.evaluate("updateTime = 1000; 0")
    tab.locator("#text").fill("another text")
    before, tokens = tab.evaluate(
        "() => [now.tokens, tokenizer.encode('another text')].map((each) => Array.from(each))"
    )
    assert before != tokens
    tab.wait_for_function(
        "tokens => JSON.stringify(Array.from(now.tokens)) === tokens",
        arg=str(tokens).replace(" ", ""),
    )
    tab.evaluate("updateTime = 1000; 0")
    tab.locator("#text").fill("a third")
    tab.get_by_role("button", name="One token").click()  # before the pause
    assert tab.locator("#text").input_value().startswith("a third")


def test_only_what_is_raised_is_called_raised(visit):
    tab = opened(visit, random_run())
    found = """signs => signs.map((sign) => {
      readThroughHead = (vector) => now.entry.logits.map(() => sign * vector[0]);
      return showPushes([2]).map((row) => row.querySelectorAll(".label").length);
    })"""
    assert tab.evaluate(found, [1, -1]) == [[5, 0], [0, 5]]


def test_numbers_and_names_are_written_at_their_edges(visit):
    tab = opened(visit, random_run())
    say = "(step) => sayText('sizeTrained', { weights: 11, step })"
    assert tab.evaluate(say, "1") == "11 weights after 1 step"
    assert tab.evaluate(say, "11") == "11 weights after 11 steps"
    shares = [0, 0.00009, 0.0001, 0.00099, 0.001, 0.0994, 0.0995, 0.5, 1]
    assert tab.evaluate("shares => shares.map(formatPercent)", shares) == [
        *("0 %", "<0.01 %", "0.01 %", "0.10 %", "0.1 %", "9.9 %", "10 %", "50 %", "100 %")
    ]
    assert tab.evaluate("[0, -0.5, 999.25, -1234.5].map((x) => formatReal(x, 1))") == [
        *("0.0", f"{MINUS}0.5", "999.3", f"{MINUS}1235")
    ]
    assert tab.evaluate("formatReal(-Infinity)") == f"{MINUS}\N{INFINITY}"
    assert tab.evaluate("[999, 1000].map(formatCount)") == ["999", "1,000"]
    assert tab.evaluate("['abc', 'abcd', '😀😀😀😀'].map((x) => shorten(x, 3))") == [
        *("abc", "ab…", "😀😀…")
    ]
    assert tab.evaluate("findTop([1, 3, 3, 2], 3)") == [1, 2, 3]
    assert tab.evaluate("findLargest([1, 3, 3])") == 1
    assert tab.evaluate("findScale([0, -5, -Infinity], [2])") == 5
    assert tab.evaluate("findScale([])") == 1
    spelled = {
        32: "␣",
        10: "↵",
        13: "␍",
        9: "⇥",
        97: "a",
        128: "\u203980\u203a",
        0: "\u20390\u203a",
        256: "<|end",
    }
    for token, text in spelled.items():
        assert tab.evaluate("spellText", token).startswith(text)


def test_each_slider_moves_its_setting_and_both_ends_are_there(visit):
    sample = {"temperature": 0.83, "top_k": 6, "top_p": 0.42, "min_p": 0.07}
    tab = opened(visit, random_run(sample=sample))
    tab.locator("#settings summary").click()
    ends: dict[str, list[float | None]] = {
        "temperature": [0, 2],
        "top_k": [1, None],
        "top_p": [0.05, None],
        "min_p": [None, 1],
    }
    for name, (first, last) in ends.items():
        slider = tab.locator(f"#slider-{name}")
        output = slider.locator("xpath=following-sibling::output")
        assert output.inner_text() == str(sample[name])  # though it is between two of the list
        for key, value in (("Home", first), ("End", last)):
            slider.press(key)
            assert tab.evaluate("name => state.sample[name]", name) == value
            assert output.inner_text() == ("off" if value is None else f"{value:g}")


def test_a_window_ends_where_that_of_the_model_does(visit):
    tab = opened(visit, random_run("window"))  # of 5, and none in every second layer
    assert tab.evaluate("[8, 9, 10].map((key) => canSee(0, 9, key))") == [True, True, False]
    assert tab.evaluate("[4, 5].map((key) => canSee(0, 9, key))") == [False, True]
    assert tab.evaluate("canSee(1, 9, 0)") is True


def test_the_bar_names_what_is_off_and_what_that_did(visit):
    tab = opened(visit, random_run())
    whole = tab.evaluate("text => chances(fresh(text, 20).logits, 0.8)", PROMPT)[ord("t")]
    for (part, item), name in (
        (("heads", [1, 2]), f"layer 1, head 2 {TIMES}"),
        (("mlps", 0), f"layer 0 MLP {TIMES}"),
        (("layers", 1), f"layer 1 {TIMES}"),
        (("attentions", [1, 0, 20, 3]), f"layer 1, head 0: 20 → 3 {TIMES}"),
        (("attentions", [None, None, 20, 3]), f"all heads: 20 → 3 {TIMES}"),
    ):
        tab.evaluate("([part, item]) => toggleOff(part, item)", [part, item])
        assert tab.locator(".off button").first.inner_text() == name
        changed = "([text, off]) => chances(fresh(text, 20, off).logits, 0.8)"
        after = tab.evaluate(changed, [PROMPT, {part: [item]}])[ord("t")]
        said = re.findall(r"([\d.]+) %", tab.locator(".off .change").inner_text())
        shown = [float(each) / 100 for each in said]
        assert shown == pytest.approx([whole, after], abs=0.006), name
        tab.evaluate("([part, item]) => toggleOff(part, item)", [part, item])


def test_stations_say_the_sizes_of_the_model(visit):
    tab = opened(visit, random_run("gqa"))
    open_station(tab, "attn:0")
    open_step(tab, "qkv")
    H, G, K = tab.evaluate("(({ H, G, K }) => [H, G, K])(now.gpt.blocks[0].attn)")
    said = tab.locator("#station").inner_text()
    assert f"2 {TIMES} {G} KV heads {TIMES} {K} = {2 * G * K} numbers" in said
    assert f"Each of {H} heads" in said


def test_a_neuron_pushes_what_its_column_raises_as_it_fires(visit):
    tab = opened(visit, random_run("llama"))  # whose neurons also fire below 0
    open_station(tab, "mlp:0")
    expected = """() => Array.from(document.querySelectorAll(".neurons tbody tr"), (row) => {
      const n = Number(row.querySelector("button").textContent);
      const { inner } = now.entry.layers[0];
      const down = now.gpt.blocks[0].mlp.downProj.weight;
      const column = range(now.config.d_model).map((d) => down[d * inner.length + n] * inner[n]);
      return [inner[n], spellText(findLargest(readThroughHead(Float32Array.from(column))))];
    })"""
    rows = tab.evaluate(expected)
    assert min(firing for firing, _ in rows) < 0
    shown = tab.locator(".neurons tbody tr td:last-child").all_inner_texts()
    assert shown == [token for _, token in rows]


LEARNT = """([text, steps]) => {
  const { gpt, tokenizer } = opened;
  const reader = new Reader(gpt);
  const optimizer = new AdamW();
  const embeds = [gpt.embed.slice()];
  let walk;
  for (let step = 0; step < steps; step++) {
    reader.forget();
    reader.read(tokenizer.encode(text));
    const pauses = gpt.backward(reader.record);
    do walk = pauses.next(); while (!walk.done);
    optimizer.update(gpt.weights, walk.value);
    embeds.push(gpt.embed.slice());
  }
  globalThis.learnt = { embeds, gradients: walk.value };
}"""
SAME_WEIGHTS = """() => Object.entries(opened.gpt.weights).every(([name, values]) =>
  values.every((value, i) => Object.is(value, gpt.weights[name][i])))"""
NOTHING_RUNS = "() => learning?.run === null"


def test_it_learns_the_text_and_all_follows(visit):
    tab = opened(visit, random_run("gpt2"))
    step, undo = (tab.get_by_role("button", name=name) for name in ("One step", "Undo learning"))
    before = bars(tab)
    assert undo.is_disabled()
    assert tab.locator("#lastStep").is_hidden()
    tab.evaluate("gpt.meanHead")  # which is kept
    for _ in range(3):
        step.click()
        tab.wait_for_function(NOTHING_RUNS)
    tab.evaluate(LEARNT, [PROMPT, 3])
    assert tab.evaluate(SAME_WEIGHTS)
    assert tab.evaluate("gpt.meanHead.join() === opened.gpt.meanHead.join()")
    check_bars(tab, tab.evaluate("text => chances(fresh(text, 20).logits, 0.8)", PROMPT))
    said = tab.locator("#top p", has_text="Loss after 3 steps")
    losses = [float(x) for each in said.locator("b").all_inner_texts() for x in each.split(" → ")]
    assert losses[1] < losses[0] - 0.3
    assert losses == losses[:2] * 2  # the page opened with this text
    text = list(PROMPT.encode())
    chances = tab.evaluate(
        "text => Array.from(text, (_, at) => chances(fresh(text, at).logits, 1))", PROMPT
    )
    assert losses[1] == pytest.approx(cross_entropy(chances, text), abs=0.006)
    shades = "chips => chips.map((chip) => chip.style.backgroundColor)"
    colors = tab.locator("#top .chip").evaluate_all(shades)
    expected = "shares => shares.map((share) => `rgb(${colorOf(share).join(', ')})`)"
    shares = [1 - chances[t][token] for t, token in enumerate(text[1:])]
    assert colors == ["", *tab.evaluate(expected, shares)]
    undo.click()
    assert tab.evaluate("learning") is None
    assert not tab.evaluate(SAME_WEIGHTS)
    tab.evaluate("globalThis.opened = openPage(document)")
    assert tab.evaluate(SAME_WEIGHTS)
    assert bars(tab) == before
    assert not any(tab.locator("#top .chip").evaluate_all(shades))
    assert tab.locator(".curves").count() == 0
    assert tab.locator("#lastStep").is_hidden()


def cross_entropy(chances: list[list[float]], text: list[int]) -> float:
    rows = torch.tensor(chances)[:-1]
    return -rows.log().gather(1, torch.tensor(text)[1:, None]).mean().item()


def test_a_step_is_shown_in_numbers(visit):
    tab = opened(visit, random_run())
    for _ in range(2):
        tab.get_by_role("button", name="One step").click()
        tab.wait_for_function(NOTHING_RUNS)
    tab.locator("#lastStep > summary").click()
    tab.locator("#number").fill("7")
    tab.locator("#number").press("Enter")
    tab.evaluate(LEARNT, [PROMPT, 2])
    at = 32 * tab.evaluate("now.target") + 7
    before, after, gradient = tab.evaluate(
        """(at) => [learnt.embeds[1][at], learnt.embeds[2][at],
          learnt.gradients["embed.weight"][at]]""",
        at,
    )
    shown = tab.locator("#lastStep dd").all_inner_texts()
    assert [real(each) for each in shown[:2]] == pytest.approx([before, gradient], abs=1e-6)
    mean, root = map(real, shown[2:4])
    assert f"{real(shown[5].split(' = ')[1]):.6f}" == f"{after:.6f}"
    assert before * (1 - 3e-4 * 0.01) - 3e-4 * mean / root == pytest.approx(after, abs=2e-6)
    parts = tab.locator("#lastStep .bars > div").all()
    assert len(parts) == 5  # an embedding and 2 layers; the head is tied
    found = """Object.entries(learnt.gradients).map(([name, all]) => [name, measureLength(all)])"""
    lengths = dict(tab.evaluate(found))
    mlp = [n for name, n in lengths.items() if name.startswith("blocks.1.mlp")]
    assert real(parts[4].locator(".number").inner_text()) == pytest.approx(
        sum(n * n for n in mlp) ** 0.5, abs=6e-4
    )
    total = sum(real(each.locator(".number").inner_text()) ** 2 for each in parts)
    final = lengths["final_norm.weight"]
    assert total + final**2 == pytest.approx(sum(n * n for n in lengths.values()), rel=1e-3)
    tab.evaluate(FIND_FAULTS)
    assert tab.evaluate("findFaults()") == []


def test_learning_can_be_watched_stopped_and_gone_on_with(visit):
    page = build_page(random_run(), prompt=PROMPT)
    tab = visit(page.replace(b"STEPS = 100;", b"STEPS = 1e9;"))
    tab.evaluate("globalThis.time = 0; performance.now = () => (time += 50); 0")  # pauses often
    tab.get_by_role("button", name="Learn", exact=True).click()
    tab.wait_for_function("() => learning?.optimizer.step >= 2")
    tab.evaluate("choose({ place: 3 })")  # amid a step
    open_station(tab, "attn:1")
    tab.get_by_role("button", name="Pause").click()
    tab.wait_for_function(NOTHING_RUNS)
    steps = tab.evaluate("learning.optimizer.step")
    tab.locator("#text").fill("another text")
    tab.wait_for_function("() => now.T === 12")
    assert tab.evaluate("learning.optimizer.step") <= steps + 1
    assert tab.locator("#top .chip[style]").count() == 11
    tab.get_by_role("button", name="Learn", exact=True).click()
    tab.wait_for_function("steps => learning.optimizer.step > steps + 2", arg=steps)
    tab.locator("#text").press("x")  # stops it
    assert tab.evaluate("learning.run") is None
    tab.get_by_role("button", name="Learn", exact=True).click()
    tab.get_by_role("button", name="Generate").click()  # as well
    assert tab.evaluate("pause(), learning.run") is None
    tab.locator("#text").fill("")
    assert tab.get_by_role("button", name="Learn", exact=True).is_disabled()
    stopped = """() => {
      const before = gpt.embed.join();
      for (const _ of takeStep(learning, {}));
      return before === gpt.embed.join();
    }"""
    tab.locator("#text").fill("ab")
    assert tab.evaluate(stopped)  # a step that was stopped moves nothing
    tab.get_by_role("button", name="Undo learning").click()
    assert tab.evaluate(SAME_WEIGHTS)


def test_a_model_that_is_too_large_to_teach_says_so(visit):
    page = build_page(random_run(), prompt=PROMPT).replace(
        b"LEARNED = 6_000_000", b"LEARNED = 1000"
    )
    tab = visit(page)
    assert tab.get_by_role("button", name="Learn", exact=True).count() == 0
    assert "up to 1,000 weights" in tab.locator("#top").inner_text()
