"""A Chromium for the tests of the page, from a file and from a server."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import CHROMIUM


@pytest.fixture(scope="module")  # no longer: its event loop would be in the way of others
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install -e '.[browser]'"
    )
    if CHROMIUM is None:
        pytest.skip("no chromium: apt install chromium-headless-shell")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()
