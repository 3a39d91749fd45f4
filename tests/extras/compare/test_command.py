"""`gptmini compare` as it is typed."""

from pathlib import Path
from typing import Any

from gptmini.extras.compare import compare


def test_each_option_reaches_the_comparison(gptmini, monkeypatch, run):
    Path("d.txt").write_text("a")
    compared: list[tuple[Any, ...]] = []
    written: list[Path] = []

    tuned: list[bool] = []

    def note(*arguments: Any, tune: bool = False) -> str:
        compared.append(arguments)
        tuned.append(tune)
        return "noted"

    monkeypatch.setattr(compare, "compare_variants", note)
    monkeypatch.setattr(compare, "compare_finished", note)
    monkeypatch.setattr(compare, "write_results", lambda _, out: written.append(out))
    new, both = Path("runs/compare"), [Path(run), Path(run)]
    train = ["--data", "d.txt"]
    default = ["mha", "gqa:2", "mqa"]
    apart = Path("runs/compared")
    cases: list[tuple[Any, ...]] = [
        (train, default, 1, new, None),
        (["d.txt"], default, 1, new, None),
        ([*train, "--attention", "mqa"], ["mqa"], 1, new, None),
        ([*train, "--seeds", "100"], default, 100, new, None),
        ([*train, "--out", "o"], default, 1, Path("o"), None),
        ([run, run], both, None),
        ([run, "--out", "o", "--split", "test"], both[:1], "test"),
    ]
    for words, names, *rest in cases:
        compared.clear()
        _, _, err = gptmini("compare", *words)
        assert len(compared) == 1, err
        ((variants, *found),) = compared
        assert (list(variants), *found) == (names, *rest), words
    assert written == [new, new, new, new, Path("o"), apart, Path("o")]
    settings = ["--set", "data.errors=replace", "--steps", "7", "--set", "train.lr=0.5"]
    gptmini("compare", *train, *settings, "--set", "data.test=0.1", "--split", "test")
    for config in compared[-1][0].values():
        assert (config.data.errors, config.train.steps, config.train.lr) == ("replace", 7, 0.5)
        assert compared[-1][-1] == "test"
    gptmini("compare", *train, "--minutes", "2.5", "--attention", "mha")
    assert compared[-1][0]["mha"].train.minutes == 2.5
    file = Path("mine.yaml")
    file.write_text("model: {attention: {variant: gqa, n_kv_head: 2, window: 8}}\n")
    gptmini("compare", str(file), "--attention", "mha,window:16,gqa:2+window:4")
    models = [config.model for config in compared[-1][0].values()]
    made = [(model.n_kv_head, model.attention.window) for model in models]
    assert made == [(4, None), (4, 16), (2, 4)]  # as their names say
    assert not any(tuned)
    gptmini("compare", *train, "--tune")
    assert tuned[-1]
