"""Work that may take more than a second shows on a terminal that it goes on."""

import threading
from pathlib import Path

import pytest

from gptmini import console


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """What a terminal would show if everything took long."""
    descriptions: list[str] = []

    def note(description: str, ended: threading.Event) -> None:
        descriptions.append(description)

    monkeypatch.setattr(console, "is_interactive", lambda: True)
    monkeypatch.setattr(console, "_show_seconds", note)
    bar = console.tqdm

    def note_bar(*arguments, desc: str = "", **options):
        descriptions.append(desc)
        return bar(*arguments, **options | {"disable": True})

    note_bar.write = bar.write  # type: ignore[attr-defined]
    monkeypatch.setattr(console, "tqdm", note_bar)
    return descriptions


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["generate", "--max-new-tokens", "1"], {"loading the model", "compiling the engine"}),
        (["plot", "--out", "a.png"], {"drawing"}),
        (["convert", "--attention", "gqa:2"], {"loading the model", "converting"}),
        (["export"], {"loading the model", "writing and reading back"}),
        (
            ["size", "runs/text/config.yaml", "--data", "a.txt"],
            {"hashing the text", "preparing the tokens"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_shows_what_it_does(gptmini, run, shown, words, expected):
    Path("a.txt").write_text("the quick brown fox " * 200)
    code, _, err = gptmini(*words)
    assert code == 0, err
    for description in expected:
        assert any(each.startswith(description) for each in shown), (description, shown)
