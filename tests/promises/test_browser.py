"""The page of plot in Chromium, with the network off, driven by Playwright."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gptmini.figures import page
from tests.support import CHROMIUM, SMALL

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install -e '.[browser]'"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt install chromium-headless-shell"
)


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
        assert [each for each in requests if each[:5] != "data:"] == [content.resolve().as_uri()]
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def plotted(gptmini, text_file: Path) -> Path:
    for out, attention in (("runs/a", "mha"), ("runs/b", "window:4")):
        words = ["--data", "text.txt", *SMALL, "--attention", attention]
        assert gptmini("train", *words, "--out", out)[0] == 0
    assert gptmini("plot", "runs/a", "runs/b", "--out", "plot.html")[0] == 0
    return text_file.parent


def of_long_words() -> bytes:
    long = "x" * 300
    return page.render_page(long, long, [page.render_samples([(long, long)], long)])


def test_pictures_are_shown_and_nothing_overflows(visit, plotted):
    pages = [plotted / "plot.html", of_long_words()]
    for number, content in enumerate(pages):
        tab = visit(content)
        loaded = tab.eval_on_selector_all("img", "all => all.map(each => each.naturalWidth > 100)")
        assert loaded == [True] * (number < 1)
        for width, scheme in ((360, "light"), (360, "dark"), (1280, "dark"), (2560, "light")):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") == width
