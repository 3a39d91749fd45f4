"""Writes a page of tables, charts and samples as one HTML file: page.html and its data.

Nothing in the data can become markup or script: it is JSON in ASCII without `<`, `>` and `&`; the
script only ever sets texts; and the page's Content-Security-Policy allows no script but its own, no
network and no other file. Loads no torch.
"""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

TEMPLATE_FILE = Path(__file__).with_name("page.html")

PageItem = dict[str, Any]  # JSON data; `type` names the function of page.html that shows it
Series = dict[str, Any]


def render_page(title: str, introduction: str, parts: list[PageItem]) -> bytes:
    """Render a page; `introduction` is a sentence or two below its title."""
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
    data = {"title": title, "lead": introduction, "parts": parts}
    text = json.dumps(data, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # The data goes in last, so that the word POLICY in it is not taken for the placeholder.
    return page.replace("POLICY", policy, 1).replace('"DATA"', text, 1).encode()


def _allow_source(tag: str, page: str) -> str:
    """Return the rule that allows the one tag in the template, by its hash, and no other."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'"


def build_table(
    head: list[str], rows: list[list[Any]], heading: str = "", note: str = ""
) -> PageItem:
    """Build a table of texts; a cell (value, half width or None) is drawn as an interval by 0."""
    return {"type": "table", "heading": heading, "note": note, "head": head, "rows": rows}


def build_series(
    name: str, points: list[tuple[float, float]], kind: str = "line", color: int = 0
) -> Series:
    """Build a series of a chart; `kind` is `line`, `thin` (a thin line) or `dots`."""
    return {"name": name, "points": points, "kind": kind, "color": color}


def build_chart(
    title: str, x: str, y: str, series: list[Series], log: str = "", zero: bool = False
) -> PageItem:
    """Build a chart with the labels `x` and `y` of its axes.

    `log` names the logarithmic axis, "x" or "y", which leaves out points at or below 0. With `zero`
    the y axis begins at 0.
    """
    if log:
        place = "xy".index(log)
        for each in series:
            each["points"] = [point for point in each["points"] if point[place] > 0]
    return {
        "title": title,
        "x": x,
        "y": y,
        "series": series,
        "log": log,
        "zero": [0] if zero else [],  # values that the y axis must include
    }


def build_charts(items: list[PageItem], heading: str) -> PageItem:
    """Place charts side by side; series of one name share a color and an entry of the legend."""
    return {"type": "charts", "heading": heading, "items": items}
