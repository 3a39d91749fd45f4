"""Where a text comes from, as the page says it: what it finds, what it shows, what it holds."""

import base64
import random
import re
from pathlib import Path
from typing import Any

import pytest

from gptmini.extras.page import export
from gptmini.extras.page.export import build_page
from gptmini.extras.sources.find import search
from gptmini.extras.sources.index import TextIndex, build_index
from gptmini.extras.sources.training_text import open_index
from gptmini.generate.run import load_run
from gptmini.tokenizer.chunks import Place
from tests.extras.page.samples import random_run

SEA = "The sea was calm and the sky was grey that day."
HILL = "Nobody had climbed the hill for a hundred years."
NAME = "<img src=x onerror=alert(1)>\u202e.txt"
ALPHABETS = [
    "a",
    "ab",
    "ab \n",
    "-=* \n",
    "\u4e2d\u6587\u4e2c\u6e2d",  # these share bytes
    "\U0001f600\U0001f601\U0001f468\u200d\ufe0fb",
    "\xe9\xe8e\u0301\n\r",
    "\n \t\u3000\ufeff\x85\x1cx",
    "abcdefghijklmnop qrstuvwxyz",
]


def index_of(*documents: str) -> TextIndex:
    """An index of documents in files of their own, but each third is a record of the first."""
    places = [
        Place("0.txt", 7 * n, is_record=True) if n % 3 == 2 else Place(f"{n}.txt", n % 2)
        for n in range(len(documents))
    ]
    texts = zip(documents, places, strict=True)
    return build_index((text.encode(), True, place) for text, place in texts)


def random_case(draw: random.Random, letters: str) -> tuple[list[str], str]:
    """Documents and a text that copies some of them, with letters changed here and there."""
    documents = ["".join(draw.choices(letters, k=draw.randrange(200))) for _ in range(4)]
    documents.append(draw.choice(documents)[3:] * 3)
    parts = []
    for _ in range(draw.randrange(6)):
        document = draw.choice(documents)
        begin = draw.randrange(len(document) + 1)
        parts.append(document[begin : begin + draw.randrange(90)])
        parts.append("".join(draw.choices(letters, k=draw.randrange(3))))
    return documents, "".join(parts)


def pieces_of(index: TextIndex) -> list[Any]:
    text = base64.b64encode(index.get_text()).decode()
    return [text, {"files": index.names, "pieces": index.pieces.tolist()}]


def opened(visit: Any, index: TextIndex, prompt: str) -> Any:
    tab = visit(build_page(random_run(), prompt=prompt, index=index))
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.locator("#sources summary").click()
    tab.wait_for_function("() => origin.found !== null")
    return tab


def wait_for_text(tab: Any) -> None:
    tab.wait_for_function("() => origin.text === textBox.value")


def test_it_finds_what_python_finds(visit):
    tab = visit(build_page(random_run()))
    draw = random.Random(0)
    n_copies = 0
    for number in range(160):
        documents, text = random_case(draw, ALPHABETS[number % len(ALPHABETS)])
        index = index_of(*documents)
        arguments = [*pieces_of(index), text]
        found = tab.evaluate("([t, o, text]) => new TrainingText(atob(t), o).find(text)", arguments)
        expected = search(index, text).to_dict()
        assert found["copies"] == expected["copies"], (documents, text)
        assert found["longest"] == expected["longest"]
        assert found["share"] == pytest.approx(expected["share"], abs=1e-4)
        n_copies += len(expected["copies"])
    assert n_copies > 150


def test_a_text_of_one_character_takes_no_longer_than_another(visit):
    tab = visit(build_page(random_run()))
    index = index_of("a" * 300_000)
    find = "([t, o, text]) => new TrainingText(atob(t), o).find(text)"
    found = tab.evaluate(find, [*pieces_of(index), "a" * 10_000])
    assert found["copies"] == search(index, "a" * 10_000).to_dict()["copies"]


def test_a_copy_is_marked_and_a_tap_says_where_it_stands(visit):
    text = f"well, {SEA}? {HILL[:-9]}"
    tab = opened(visit, index_of("", f"one\ntwo\n{SEA}\n", "", f"first\n{HILL}\n"), text)
    marks, said = tab.locator("#sources mark"), tab.locator("#sources [role=status]")
    assert marks.all_inner_texts() == [SEA, HILL[:-9]]
    assert tab.locator(".copied").inner_text() == text
    share = f"{100 * (len(SEA) + len(HILL) - 9) / len(text):.0f} %"
    assert share in said.first.inner_text()
    for each in said.all():  # the longest is chosen
        assert "47" in each.inner_text()
        assert each.locator(".label").inner_text() == "1.txt:3"
    marks.nth(1).click()
    assert said.nth(1).locator(".label").inner_text() == "3.txt:2"
    assert "39" in said.nth(1).inner_text()
    assert tab.locator("mark[aria-pressed=true] .chosen").inner_text() == HILL[:-9]
    assert said.first.locator(".label").inner_text() == "1.txt:3"


def test_copies_are_chosen_by_keys(visit):
    tab = opened(visit, index_of("", SEA, "", HILL), f"{HILL} {SEA}")
    chosen = "Array.from(document.querySelectorAll('mark'), (mark) => mark.ariaPressed === 'true')"
    assert tab.evaluate(chosen) == [True, False]
    tab.locator("#sources summary").focus()
    tab.keyboard.press("Tab")  # the scrolled box, or the copy in it
    if tab.evaluate("document.activeElement.tagName") != "MARK":
        tab.keyboard.press("Tab")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(chosen) == [False, True]
    assert tab.evaluate("document.activeElement.ariaPressed") == "true"
    tab.keyboard.press("ArrowRight")  # there is no other
    assert tab.evaluate(chosen) == [False, True]
    tab.keyboard.press("Home")
    assert tab.evaluate(chosen) == [True, False]


def test_copies_that_overlap_can_both_be_tapped(visit):
    first, second = SEA[:30], SEA[10:]
    tab = opened(visit, index_of("", first, "", second), f"!{SEA}!")
    marks = tab.locator("#sources mark")
    assert marks.all_inner_texts() == [SEA[:10], second]
    marks.nth(0).click()
    assert "".join(tab.locator("mark .chosen").all_inner_texts()) == first
    marks.nth(1).click()
    assert "".join(tab.locator("mark .chosen").all_inner_texts()) == second
    assert tab.locator(".copied").inner_text() == f"!{SEA}!"


def test_characters_of_two_units_move_no_mark(visit):
    text = "\U0001f600" * 3 + SEA + "\U0001f600"
    tab = opened(visit, index_of(SEA), text)
    assert tab.locator("#sources mark").all_inner_texts() == [SEA]


def test_it_follows_the_text_while_it_is_open(visit):
    tab = opened(visit, index_of(SEA), "nothing of the kind")
    assert tab.locator("#sources mark").count() == 0
    assert "20" in tab.locator("#sources [role=status]").inner_text()
    tab.locator("#text").fill(SEA)
    wait_for_text(tab)
    assert tab.locator("#sources mark").count() == 1
    tab.locator("#sources summary").click()
    tab.locator("#text").fill("another")
    assert tab.evaluate("origin.asked") == SEA  # nobody wants to know
    tab.locator("#sources summary").click()
    wait_for_text(tab)
    assert tab.locator("#sources mark").count() == 0
    tab.get_by_role("button", name="\u4e2d\u6587").click()
    assert tab.locator("#sources").get_attribute("open") is not None
    assert re.search("[\u4e00-\u9fff]", tab.locator("#sources [role=status]").inner_text())


def test_of_a_very_long_text_the_end_is_looked_up(visit):
    tab = opened(visit, index_of(SEA), "")
    tab.locator("#text").fill(f"{SEA}{'x' * 10_000}{SEA}")
    tab.wait_for_function("() => origin.text.length === 10_000")
    assert tab.locator("#sources mark").count() == 1
    assert "10,000" in tab.locator("#sources .note").inner_text()


def test_names_of_files_become_text_only(visit):
    index = build_index([(SEA.encode(), True, Place(NAME, 1))])
    page = build_page(random_run(), prompt=SEA, index=index)
    assert b"<img" not in page
    tab = opened(visit, index, SEA)
    assert tab.evaluate("document.images.length") == 0
    assert tab.locator("#sources .label").first.inner_text() == f"{NAME}:1"


def test_a_page_holds_the_training_text_only_if_it_is_asked_to(gptmini, run):
    pages = {}
    for words in ([], ["--sources"]):
        code, _, err = gptmini("export", run, "--to", "html", "--out", "page.html", *words)
        assert code == 0, err
        pages[bool(words)] = Path("page.html").read_bytes()
    text = open_index(load_run(run, "cpu", "float32")).get_text()
    blobs = re.findall(rb'<script type="text/plain" id="[\w-]+">([^<]*)', pages[False])
    held = pages[False] + b"".join(map(base64.b64decode, blobs))
    assert blobs
    assert not any(text[at : at + 20] in held for at in range(0, len(text) - 20, 7))
    assert b"text.txt" not in held
    grown = len(pages[True]) - len(pages[False])
    assert base64.b64encode(text) in pages[True]
    assert grown == pytest.approx(len(text) * 4 / 3, abs=1000)


def test_a_page_refuses_what_it_cannot_hold_or_find(gptmini, run):
    assert gptmini("export", run, "--to", "gguf", "--sources")[0] == 2
    with pytest.MonkeyPatch.context() as small:
        small.setattr(export, "MAX_SOURCES_BYTES", 1000)
        code, _, err = gptmini("export", run, "--to", "html", "--sources")
        assert code == 2
        assert run in err
        assert "--sources" in err
    assert not Path(f"{run}.html").exists()
    config = Path(run, "config.yaml")
    config.write_text(re.sub(r"[^\s'\"]*text\.txt", "gone.txt", config.read_text()))
    code, _, err = gptmini("export", run, "--to", "html", "--sources")
    assert code == 3
    assert "gone.txt" in err
    assert not Path(f"{run}.html").exists()
