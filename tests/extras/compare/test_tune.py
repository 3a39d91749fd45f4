"""Learning rates that each variant chooses for itself."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import gptmini as package
from gptmini.errors import Stopped
from gptmini.extras.compare import compare, variants
from gptmini.extras.compare.tune import choose_next_rate, find_best_rate
from gptmini.extras.plots import plots
from gptmini.runs.directory import RunDirectory
from tests.extras.compare.samples import variant
from tests.support import SMALL, tiny


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1, [1, 0.5, 2]),
        (2, [1, 0.5, 2, 4]),
        (4, [1, 0.5, 2, 4, 8]),
        (100, [1, 0.5, 2, 4, 8]),
        (0.5, [1, 0.5, 2, 0.25]),
        (0.01, [1, 0.5, 2, 0.25, 0.125]),
    ],
)
def test_trying_goes_on_while_the_best_is_at_an_end(best, tried):
    found: dict[float, float] = {}
    while (rate := choose_next_rate(found)) is not None:
        found[rate] = abs(math.log(rate / best))
    assert list(found) == tried
    assert find_best_rate(found) == min(tried, key=lambda rate: abs(rate - best))


def test_where_all_diverge_lower_rates_are_tried():
    found: dict[float, float] = {}
    while (rate := choose_next_rate(found)) is not None:
        found[rate] = math.inf
    assert min(found) == find_best_rate(found) == 0.125


# The multiple of the planned rates at which each variant of the next test is best.
BEST = {"twice": 2, "planned": 1}
VARIANTS = {"twice": {}, "planned": (package.GPT, {"model": {"attention": "gqa:2"}})}


def compute_bowl(paths: list[Path], split: str) -> dict[Path, SimpleNamespace]:
    """Losses by the names of folders: fewest at the rate in BEST."""
    losses = {}
    for path in paths:
        *_, name, rate, _ = path.parts if "rate-" in str(path) else (*path.parts[:-1], "x1", "")
        bits = 2 + abs(math.log2(float(rate.strip("rate-x")) / BEST[name]))
        losses[path] = SimpleNamespace(evaluation=SimpleNamespace(bits_per_byte=bits))
    return losses


def test_each_variant_trains_at_its_best_rates(text_file, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(plots, "save_figure", lambda *_: None)
    monkeypatch.setattr(compare, "read_comparable_losses", compute_bowl)
    config = tiny(
        data={"path": str(text_file), "test": 0.2},
        train={"steps": 2, "eval_every": 2, "min_lr": 1e-4},
    ).model_dump(exclude_unset=True)
    del config["train"]["lr"], config["model"]["tie_embeddings"]  # these are planned
    package.compare(VARIANTS, config, out=tmp_path / "c")
    fit, count = compare.fit, 0

    def fit_a_few(*arguments, **own):
        nonlocal count
        count += 1
        if count == 4:
            raise Stopped(2, "stopped")
        return fit(*arguments, **own)

    monkeypatch.setattr(compare, "fit", fit_a_few)
    with pytest.raises(Stopped):
        package.compare(VARIANTS, config, 2, tmp_path / "c", tune=True)
    capfd.readouterr()
    found = package.compare(VARIANTS, config, 2, tmp_path / "c", tune=True)
    assert capfd.readouterr().err.count("already finished") == 5 + 2
    folders = [each.runs[1].path.removeprefix(str(tmp_path)) for each in found.variants]
    names = ["twice/rate-2x", "planned"]
    assert folders == [f"/c/{name}/seed-1338" for name in names]
    for each, rate in zip(found.variants, BEST.values(), strict=True):
        assert [run.split for run in each.runs] == ["test", "test"]
        first, second = (RunDirectory(Path(run.path)).load_config() for run in each.runs)
        assert second == first.with_train(seed=1338)
        planned = RunDirectory(tmp_path / "c" / each.name / "seed-1337").load_config()
        keys = ("lr", "embed_lr", "muon_lr", "min_lr")
        for key in keys:
            expected = getattr(planned.train, key)
            assert getattr(second.train, key) == (expected and pytest.approx(rate * expected))
        same = {key: getattr(planned.train, key) for key in keys}
        assert first.with_train(**same) == planned
        assert len(each.by_rate) == {2: 4, 1: 3}[rate]
    assert "\ntwice    4.0000  3.0000  2.0000  3.0000    2x  -1.0000\n" in str(found)
    assert "chosen on this very part" not in str(found)
    again = package.compare(VARIANTS, config, 2, tmp_path / "c", tune=True)
    assert again.to_dict() == found.to_dict()
    runs = [Path(run.path) for each in found.variants for run in each.runs]
    assert list(compare.group_runs(runs)) == ["twice", "planned"]


def test_a_part_that_chose_the_rates_is_told():
    found = variant("a", 2.0)
    found.by_rate = [(0.5, 2.5), (1.0, 2.25), (2.0, 2.0), (4.0, math.inf)]
    text = variants.format_comparison([found])
    assert "\na      2.5000  2.2500  2.0000  inf    2x  -0.2500\n" in text
    assert "warning: the rates were chosen on this very part" in text
    assert max(map(len, text.splitlines())) <= 80
    assert variants.to_json([found])["variants"][0]["by_rate"][2:] == [(2, 2), (4, None)]
    found.runs[0] = replace(found.runs[0], split="test")
    assert "warning" not in variants.format_comparison([found])


def test_a_variant_that_diverges_at_all_rates_ends_the_comparison(gptmini, text_file):
    words = ["compare", "--tune", "--data", "text.txt", *SMALL, "--attention", "mha"]
    code, _, err = gptmini(*words, "--set", "train={lr: 1e8, optimizer: adamw, steps: 4}")
    assert code == 6
    assert err.count("x its planned rates: ") == 5
    assert "rate-0.125x" in err.splitlines()[-1]
