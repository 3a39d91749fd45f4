"""Every command in the README runs, on small models, and its claims about the code hold."""

import gzip
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import new_cache

from gptmini.cli import app
from gptmini.config.load import CONFIGS, named_configs
from gptmini.text import fetch

README = (Path(__file__).parents[1] / "README.md").read_text()
SMALL = [
    "model.n_layer=2",
    "model.d_model=32",
    "model.context_length=32",
    "train.steps=2",
    "train.batch_size=4",
    "train.lr=1e-3",
    "sample.max_new_tokens=8",
]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [line for line in words if line[:1] == ["gptmini"]]


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTMINI_CACHE", str(new_cache(tmp_path)))
    text = "".join(
        f"{n}. It was the best of times, it was the worst of times. ROMEO:\n" for n in range(99)
    )
    for name in ("my.txt", "notes/a.txt", "src/a.py", "src/a.md", "data/tinyshakespeare.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with gzip.open(tmp_path / "stories.jsonl.gz", "wt") as file:
        file.write(json.dumps({"story": text}))
    (tmp_path / "prompts.jsonl").write_text('"It"')
    monkeypatch.setattr("builtins.input", lambda _: sys.exit())  # who types nothing
    monkeypatch.setattr(fetch, "fetch", lambda name, folder: folder / f"{name}.txt")
    found = commands()
    names = {"train", "generate", "score", "inspect", "tokenizer", "data"}
    names |= {"evaluate", "compare", "size", "plot", "convert"}
    assert {line[1] for line in found} == names
    for line in found:
        small = [word for setting in SMALL for word in ("--set", setting)]
        extra = {"train": small, "generate": ["--max-new-tokens", "3"]}
        extra |= {"size": small, "compare": small if "shakespeare-char" in line else []}
        pairs = zip(["", *line], [*line, ""], strict=True)
        words = ["1" if before == "--seeds" else word for before, word in pairs][:-1]
        if not any(word.endswith("config.yaml") for word in line):  # it is small already
            words += extra.get(line[1], [])
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            app.main()
        assert not end.value.code, f"{shlex.join(line)}\n{capfd.readouterr().err}"


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTMINI_CACHE", str(new_cache(tmp_path)))
    small = [word for setting in SMALL for word in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", ["gptmini", "train", *small])
    with pytest.raises(SystemExit):
        app.main()
    capfd.readouterr()
    exec(example, {})
    assert capfd.readouterr().out.strip()


def test_every_configuration_is_in_the_table():
    for path in named_configs():
        assert f"`{path.relative_to(CONFIGS).with_suffix('')}`" in README
