"""Writes a page of pictures and samples as one HTML file without any script.

Whatever a sample says is escaped, and the page's Content-Security-Policy allows neither scripts nor
the network nor other files. Loads no torch.
"""

import base64
from html import escape

from gptmini.console import escape_control_characters

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --soft: light-dark(#5c6067, #a7abb3);
        --line: light-dark(#dcd8ce, #343940); }
body { margin: 0 auto; max-width: 75rem; padding: 1.2rem 1rem 3rem; overflow-wrap: anywhere;
       font: 15px/1.5 system-ui, sans-serif; color: light-dark(#1e2023, #e8e6e1);
       background: light-dark(#f6f4ef, #111316); }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .7rem; }
h1, h2 { line-height: 1.25; } .note, footer, summary { color: var(--soft); font-size: .9rem; }
summary { cursor: pointer; }
footer { margin-top: 2rem; }
img { display: block; width: 100%; box-sizing: border-box; padding: .5rem; border-radius: 12px;
      background: #fff; border: 1px solid var(--line); }
pre { white-space: pre-wrap; font-size: .86rem; margin: .4rem 0; padding: .6rem .8rem;
      background: light-dark(#fff, #1a1d21); border-radius: 8px; }
"""


def render_page(title: str, introduction: str, parts: list[str]) -> bytes:
    """Render a page; `introduction` is a sentence or two below its title."""
    page = f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(title)}</title>
<style>{STYLE}</style>
<h1>{_escape(title)}</h1>
<p class="note">{_escape(introduction)}</p>
{"".join(parts)}
<footer>Made by gptmini. Everything is in this file; it loads nothing and sends nothing.</footer>
</html>
"""
    return page.encode(errors="replace")  # the name of a file may be any bytes


def render_picture(svg: bytes, description: str) -> str:
    """Render a picture; `description` is for those who cannot see it."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return f'<img src="{source}" alt="{_escape(description)}">\n'


def render_samples(samples: list[tuple[str, str]], heading: str) -> str:
    """Render samples of a model, each a title and a text; the first is open."""
    shown = []
    for number, (title, text) in enumerate(samples):
        state = "" if number else " open"
        # A line break at the beginning of <pre> is dropped; it is this one.
        shown.append(
            f"<details{state}><summary>{_escape(title)}</summary>"
            f"<pre>\n{_escape(text)}</pre></details>\n"
        )
    return f"<h2>{_escape(heading)}</h2>\n" + "".join(shown)


def _escape(text: str) -> str:
    return escape(escape_control_characters(text))
