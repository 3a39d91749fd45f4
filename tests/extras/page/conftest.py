"""Opens pages in Chromium, with the network off."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[[bytes], Any]]:
    """Opens a page; `opened` is then what model.js found in it. Fails if anything is `wrong`."""
    wrong: list[str] = []
    context = browser.new_context(offline=True)
    context.set_default_timeout(600_000)  # a busy machine is not a failure

    def visit(content: bytes) -> Any:
        file = tmp_path / "page.html"
        file.write_bytes(content)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: wrong.append("dialog"))
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(file.as_uri())
        tab.evaluate("() => { globalThis.opened = openPage(document) }")
        assert requests == [file.as_uri()]
        return tab

    visit.wrong = wrong
    yield visit
    context.close()
    assert wrong == []
