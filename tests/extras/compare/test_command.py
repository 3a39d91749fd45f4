"""`gptmini compare` as it is typed."""

import json
import os
from pathlib import Path
from typing import Any

from gptmini.config.settings import Config
from gptmini.errors import GptminiError
from gptmini.extras.compare import compare


def test_compare_takes_a_text_as_train_does(gptmini, monkeypatch):
    Path("d.jsonl").write_text('{"text": "a"}\n')
    compared: list[dict[str, Config]] = []

    def record(variants: dict[str, Config], *_: object) -> list[object]:
        compared.append(variants)
        raise GptminiError("recorded")

    monkeypatch.setattr(compare, "compare", record)
    gptmini("compare", "d.jsonl", "--attention", "mha,mqa", "--steps", "2")
    ((mha, mqa),) = [variants.values() for variants in compared]
    assert mha.data.path == mqa.data.path == ["d.jsonl"]
    assert (mha.model.attention.variant, mqa.model.attention.variant) == ("mha", "mqa")


def test_lines_of_the_log_that_lack_figures_are_left_out(gptmini, run):
    with Path(run, "metrics.jsonl").open("a") as file:
        for line in (
            {"step": 4},
            {"step": 4, "tokens": "many", "seconds": None, "val_loss": [1], "val_bpb": 1e999},
            {"step": 4, "tokens": 10**400, "lr": 1, "sample": 5, "peak_memory": "x"},
        ):
            file.write(json.dumps(line) + "\n")
    code, _, err = gptmini("compare", run, "--json")
    assert code == 0, err


OTHER = (Path("o"), Path("c"))


def test_each_option_reaches_the_comparison(gptmini, monkeypatch, run):
    Path("d.txt").write_text("a")
    compared: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> list[object]:
        compared.append(arguments)
        raise GptminiError("noted")

    monkeypatch.setattr(compare, "compare", note)
    cache = Path(os.environ["GPTMINI_CACHE"])
    new, both = Path("runs/compare"), [Path(run), Path(run)]
    train = ["--data", "d.txt"]
    default = ["mha", "gqa:2", "mqa"]
    apart = Path("runs/compared")
    cases: list[tuple[Any, ...]] = [
        (train, default, [], 1, ["d.txt"], new, cache, "validation"),
        ([*train, "--attention", "mqa"], ["mqa"], [], 1, ["d.txt"], new, cache, "validation"),
        ([*train, "--seeds", "100"], default, [], 100, ["d.txt"], new, cache, "validation"),
        ([run, run], [], both, 1, None, apart, cache, "validation"),
        ([run, "--data", "d.txt"], [], both[:1], 1, ["d.txt"], apart, cache, "validation"),
        ([run, "--out", "o", "--cache", "c"], [], both[:1], 1, None, *OTHER, "validation"),
        ([run, "--split", "test"], [], both[:1], 1, None, apart, cache, "test"),
        ([run, "d.txt"], ["d.txt"], both[:1], 1, None, new, cache, "validation"),
    ]
    for words, names, finished, *rest in cases:
        compared.clear()
        _, _, err = gptmini("compare", *words)
        assert len(compared) == 1, err
        ((variants, *found),) = compared
        assert (list(variants), *found) == (names, finished, *rest), words
    settings = ["--errors", "replace", "--steps", "7", "--set", "train.lr=0.5"]
    gptmini("compare", *train, *settings, "--set", "data.test=0.1", "--split", "test")
    for config in compared[-1][0].values():
        assert (config.data.errors, config.train.steps, config.train.lr) == ("replace", 7, 0.5)
        assert compared[-1][-1] == "test"
    gptmini("compare", *train, "--minutes", "2.5", "--attention", "mha")
    assert compared[-1][0]["mha"].train.minutes == 2.5
