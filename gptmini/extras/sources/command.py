"""`gptmini copies`: show what of a text stands in the training text of a run, and where."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gptmini import console
from gptmini.cli.options import AsJson, RunName, option, read_text, resolve_run
from gptmini.errors import ConfigError, shorten

if TYPE_CHECKING:
    from gptmini.extras.sources.find import Copies

SHOWN_COPIES = 10
QUOTED_CHARACTERS = 60  # of each
MARK = "\x1b[4;35m"  # underlined and magenta, which can be read on black and on white


def copies(
    run: RunName = None,
    text: str | None = option(None, "TEXT", "Text to look up."),
    file: Path | None = option(None, "FILE", "File with the text; - is stdin."),
    prompt: str = option("", "TEXT", "Prompt that the text begins with; not counted."),
    as_json: AsJson = False,
) -> None:
    """Show what a text copies from the training text, and where."""
    path = resolve_run(run)
    if (text is None) == (file is None):
        raise ConfigError("--text, --file: give exactly one of them")
    from gptmini.extras.sources.find import Copies
    from gptmini.extras.sources.training_text import read_training_text
    from gptmini.runs.directory import RunDirectory

    text = (read_text(file) if text is None else text).removeprefix(prompt)
    directory = RunDirectory(path)
    content = directory.load_best(with_model=False).state.get("corpus", "")
    source = read_training_text(path, directory.load_config().data, content)
    found = Copies(source, text, prompt)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    if console.shows_colours(sys.stdout):
        print("".join(_mark(found)), end="\n\n")
    print(found.describe())
    longest_first = sorted(found.copies, key=lambda copy: -copy.length)
    for copy in longest_first[:SHOWN_COPIES]:
        words = " ".join(text[copy.start : copy.end].split())
        line = f"{copy.length:6,}  {copy.place}: {shorten(words, QUOTED_CHARACTERS)}"
        print(console.escape_line(line))
    if len(found.copies) > SHOWN_COPIES:
        print(f"        and {len(found.copies) - SHOWN_COPIES:,} shorter ones")


def _mark(found: "Copies") -> Iterator[str]:
    """Yield the text with what is copied in colour."""
    at = 0
    for copy in found.copies:
        yield console.escape_control_characters(found.text[at : copy.start])
        copied = console.escape_control_characters(found.text[copy.start : copy.end])
        yield f"{MARK}{copied}{console.UNMARK}"
        at = copy.end
    yield console.escape_control_characters(found.text[at:])


COMMANDS = {"copies": copies}
