"""A page in one HTML file: page.html with data in it, which its script shows. Loads no torch.

Nothing in the data can become markup or script: it is JSON in ASCII without `<`, `>` and `&`, the
script only ever sets texts, and the policy of the page allows no script but its own, no network
and no other file.
"""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE_FILE = Path(__file__).with_name("page.html")
MAX_PAGE_BYTES = 30_000_000  # bytes of a page that a browser still opens at once

Array = np.ndarray[Any, np.dtype[Any]]
PageItem = dict[str, Any]  # JSON data; `type` names the function of page.html that shows it
Series = dict[str, Any]


def render_page(title: str, introduction: str, parts: list[PageItem]) -> bytes:
    """The page; `introduction` is a sentence or two below its title."""
    page = TEMPLATE_FILE.read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            _allow_source("script", page),
            _allow_source("style", page),
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        ]
    )
    text = json.dumps({"title": title, "lead": introduction, "parts": parts}, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # The data goes in last: nothing in it is taken for a place to fill.
    return page.replace("POLICY", policy, 1).replace('"DATA"', text, 1).encode()


def _allow_source(tag: str, page: str) -> str:
    """What the policy allows for a tag: the one in the template, by its hash."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'"


def encode_base64(array: Array) -> str:
    """The numbers of an array, in order, as base64 of their little-endian bytes."""
    little = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(np.ascontiguousarray(little).tobytes()).decode()


def quantize_to_bytes(weights: Array) -> Array:
    """Weights in [0, 1] as bytes on a square-root scale: w becomes round(255 √w).

    They are off by at most 0.004, small ones by much less, and only those below 4e-6 become 0.
    """
    return np.rint(255 * np.sqrt(weights)).astype(np.uint8)


def build_table(
    head: list[str], rows: list[list[Any]], heading: str = "", note: str = ""
) -> PageItem:
    """Rows of texts; a cell (value, half width or None) is drawn as an interval beside 0."""
    return {"type": "table", "heading": heading, "note": note, "head": head, "rows": rows}


def build_series(
    name: str, points: list[tuple[float, float]], kind: str = "line", color: int = 0
) -> Series:
    """Points of a chart: kind `line`, `thin` (a thin line), `dashed` or `dots`."""
    return {"name": name, "points": points, "kind": kind, "color": color}


def build_chart(
    title: str, x: str, y: str, lines: list[Series], log: str = "", zero: bool = False
) -> PageItem:
    """Lines against labeled axes. `log` is the name of the logarithmic one, which ends above 0;
    with `zero` the y axis begins at 0.
    """
    for line in lines:
        low = {"x": 0, "y": 1}.get(log)
        line["points"] = [point for point in line["points"] if low is None or point[low] > 0]
    return {"title": title, "x": x, "y": y, "series": lines, "log": log, "zero": [0] * zero}


def build_charts(items: list[PageItem], heading: str) -> PageItem:
    """Charts side by side; series of one name share a color and an entry of the legend."""
    return {"type": "charts", "heading": heading, "items": items}
