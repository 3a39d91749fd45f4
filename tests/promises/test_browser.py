"""The pages of plot and compare in Chromium, with the network off, driven by Playwright."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gptmini.figures import page
from tests.support import CHROMIUM, HOSTILE, SMALL

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install -e '.[browser]'"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt install chromium-headless-shell"
)

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


def test_hostile_texts_are_shown_and_run_nothing(visit):
    lines = [page.build_series(HOSTILE, [(0, 1), (1, 2)])]
    parts = [
        page.build_table([HOSTILE], [[HOSTILE]], HOSTILE, HOSTILE),
        page.build_charts([page.build_chart(HOSTILE, HOSTILE, HOSTILE, lines)], HOSTILE),
        {"type": "samples", "heading": HOSTILE, "items": [[HOSTILE, HOSTILE]]},
    ]
    plain = visit(page.render_page("", "", [])).evaluate("document.scripts.length")
    tab = visit(page.render_page(HOSTILE, HOSTILE, parts))
    assert tab.evaluate("document.scripts.length") == plain
    assert tab.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
    for selector in ("h1", "#lead", "td", "pre", "svg + *, .card h3"):
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


def test_a_plot_shows_curves_of_each_run(visit, plotted):
    tab = visit(plotted / "plot.html")
    assert tab.locator(".charts svg").count() == 5
    assert "runs/a, validation" in tab.locator(".charts svg").first.get_attribute("aria-label")


def of_long_words() -> bytes:
    long = "x" * 300
    lines = [page.build_series(long, [(0, 1), (1, 2)])]
    samples = {"type": "samples", "heading": long, "items": [[long, long]]}
    parts = [page.build_table([long], [[long]], long, long), samples]
    parts += [page.build_charts([page.build_chart(long, "x", long, lines)], long)]
    return page.render_page(long, long, parts)


def test_nothing_overflows(visit, plotted):
    pages = [plotted / "plot.html", plotted / "c" / "compare.html", of_long_words()]
    # Texts that are wider than what they are in.
    script = """nodes => nodes.filter(node => node.scrollWidth > node.clientWidth + 1)
      .map(node => node.className)"""
    for content in pages:
        tab = visit(content)
        for width, scheme in ((360, "light"), (360, "dark"), (1280, "dark"), (2560, "light")):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            inner = ".card"
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
