"""Comparisons: each variant is trained once, resumed after a stop, and reported."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

import gptmini as package
from gptmini.errors import ConfigError, DataError
from gptmini.extras.compare import compare
from gptmini.extras.compare.plots import draw_comparison
from gptmini.extras.compare.variants import compare_with_first
from gptmini.extras.plots import plots
from gptmini.runs.directory import RunDirectory
from tests.extras.compare.samples import variant
from tests.support import SMALL, tiny


def test_seeds_take_turns_and_all_variants_see_the_same_number_of_tokens(tmp_path):
    base = tiny(train={"steps": 12, "batch_size": 4})
    wide = tiny(train={"steps": 99, "batch_size": 8})
    jobs = compare.plan_runs({"a": base, "b": wide}, 2, tmp_path, {})
    found = [(job.variant, job.config.train.seed) for job in jobs]
    assert found == [("a", 1337), ("b", 1337), ("a", 1338), ("b", 1338)]
    assert {job.config.train.steps * job.config.train.batch_size for job in jobs} == {48}
    assert all(job.config.train.patience is None for job in jobs)
    assert len({job.out for job in jobs}) == 4
    for names in (["gqa:2", "gqa2"], [":"], [".."]):
        with pytest.raises(ConfigError, match="gives no folder of its own"):
            compare.plan_runs(dict.fromkeys(names, base), 1, tmp_path, {})
    for names, seeds in (([], 1), (["mha"], 0)):
        with pytest.raises(ConfigError, match="needs one variant and one seed"):
            compare.plan_runs(dict.fromkeys(names, base), seeds, tmp_path, {})


WORDS = ["compare", "--data", "text.txt", *SMALL, "--attention", "mha,window:4", "--seeds", "2"]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison takes no time for its picture."""
    monkeypatch.setattr(plots, "save_figure", lambda *_: None)


def weights(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("model.safetensors"))}


def test_comparing_twice_resumes_rather_than_retrains(gptmini, text_file, tmp_path, monkeypatch):
    code, out, err = gptmini(*WORDS)
    assert code == 0, err
    assert err.startswith(
        "compare: training mha, window:4 in turn, 2 seeds each, 4 steps per run "
        "or as many tokens; Ctrl-C stops"
    )
    folder = tmp_path / "runs" / "compare"
    runs = [folder / name / f"seed-{seed}" for name in ("mha", "window4") for seed in (1337, 1338)]
    assert [RunDirectory(run).list_steps()[0] for run in runs] == [4] * 4
    assert RunDirectory(runs[2]).load_config().model.attention.window == 4
    before, made = weights(folder), [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs]
    first = json.loads((folder / "compare.json").read_text())
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(plots, "save_figure", lambda *_: None)
    code, again, err = gptmini(*WORDS, "--json")
    assert code == 0
    assert err.count("already finished") == 4
    assert weights(folder) == before
    assert [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs] == made
    second = json.loads(again)
    assert [v["runs"] for v in second["variants"]] == [v["runs"] for v in first["variants"]]
    assert "\nvs mha " in out
    to_first = second["variants"][1]["to_first"]
    assert to_first["counts"] == [2]  # pairs of equal seeds
    assert to_first["verdict"] in out
    text = (folder / "compare.md").read_text()
    assert out.splitlines()[0].split()[:2] == ["variant", "params"]
    assert max(map(len, out.splitlines())) <= 80
    assert {len(line) for line in text.splitlines()[:4]} == {len(text.splitlines()[0])}
    # A lost checkpoint is trained again, to the same bits, and nothing else changes.
    victim = runs[1]
    for path in (victim / "checkpoints").glob("step-*4"):
        path.rename(tmp_path / path.name)
    assert gptmini(*WORDS)[0] == 0
    assert weights(folder) == before
    # A different comparison is kept out of this directory.
    code, _, err = gptmini(*WORDS, "--steps", "5")
    assert code == 2
    assert "belongs to a different comparison" in err
    # Finished runs are grouped by what differs.
    twins = runs[:2]
    (folder / "copy").symlink_to(twins[0])
    latin = folder / os.fsdecode(b"caf\xe9")
    shutil.copytree(runs[2], latin)
    assert compare.group_runs([*twins, twins[0], runs[2], folder / "copy", latin]) == {
        "mha": twins,
        "window4": [runs[2]],
        "copy": [folder / "copy"],  # the same seed again is another variant
        r"caf\udce9": [latin],
    }
    monkeypatch.chdir(twins[0].parent)
    assert list(compare.group_runs([Path(twins[0].name)])) == ["mha"]
    # What a machine chose is no difference.
    run = RunDirectory(twins[1])
    run.write_config(run.load_config().with_train(micro_batch_size=2, compile="on"))
    assert compare.group_runs(twins) == {"mha": twins}


@pytest.mark.usefixtures("undrawn")
def test_variants_are_measured_on_the_test_part_on_request(gptmini, text_file, tmp_path):
    words = ["compare", "--data", "text.txt", *SMALL, "--attention", "mha"]
    words += ["--set", "data.test=0.2"]
    code, out, err = gptmini(*words, "--split", "test")
    assert code == 0, err
    assert "best checkpoint, on the test part\n" in out
    tested = json.loads((tmp_path / "runs/compare/compare.json").read_text())
    code, out, err = gptmini(*words, "--json")
    assert (code, err.count("already finished")) == (0, 1), err
    (validated,) = json.loads(out)["variants"][0]["runs"]
    (run,) = tested["variants"][0]["runs"]
    assert (run["split"], validated["split"]) == ("test", "validation")
    code, out, err = gptmini("compare", run["path"], "--split", "test", "--out", "again", "--json")
    assert code == 0, err
    assert json.loads(out)["variants"][0]["runs"] == [run]
    _, out, _ = gptmini("evaluate", run["path"], "--split", "test", "--json")
    assert run["bits_per_byte"] == pytest.approx(json.loads(out)["bits_per_byte"], rel=1e-3)
    assert run["bits_per_byte"] != validated["bits_per_byte"]


@pytest.mark.usefixtures("undrawn")
def test_equal_minutes_fix_what_the_first_training_chose(gptmini, text_file, tmp_path):
    small = ["--set", "model.context_length=16", "--set", "train.eval_every=1000"]
    words = ["compare", "--data", "text.txt", *small, "--minutes", "0.03"]
    code, _, err = gptmini(*words, "--attention", "mha,gqa:2")
    assert code == 0, err
    folder = tmp_path / "runs" / "compare"
    configs = [RunDirectory(folder / name / "seed-1337").load_config() for name in ("mha", "gqa2")]
    shapes = {
        (config.model.n_layer, config.model.n_head, config.model.d_model, config.train.batch_size)
        for config in configs
    }
    assert len(shapes) == 1
    assert configs[0].tokenizer == configs[1].tokenizer
    assert configs[1].model.n_kv_head == 2
    first = folder / "mha" / "seed-1337"
    assert list(compare.group_runs([first])) == ["mha"]
    # What another seed's minutes came to is no difference.
    second = folder / "mha" / "seed-1338"
    shutil.copytree(first, second)
    intervals = {"eval_every": 7, "save_every": 7, "log_every": 7}
    changed = configs[0].with_train(seed=1338, steps=77, warmup_steps=7, **intervals)
    RunDirectory(second).write_config(changed)
    assert compare.group_runs([first, second]) == {"mha": [first, second]}


def test_a_failed_training_ends_the_comparison_with_its_message_and_exit_code(gptmini, text_file):
    words = [*WORDS, "--set", "train.lr=1e9", "--set", "train.optimizer=adamw"]
    code, _, err = gptmini(*words)
    assert code == 6
    assert "seed-1337: " in err.splitlines()[-1]
    assert "after step" in err


@pytest.mark.usefixtures("default_signals", "text_file")
def test_a_signal_saves_the_training_and_says_how_to_resume(tmp_path):
    long = [*WORDS, "--set", "train.steps=3000", "--set", "train.compile=off"]
    command = [sys.executable, "-m", "gptmini", *long]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        for line in process.stderr:
            if line.split()[1:2] == ["1/3000"]:
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGINT
    assert "saved; run the same command to resume" in said
    saved = RunDirectory(tmp_path / "runs/compare/mha/seed-1337").list_steps()
    assert 1 <= saved[0] < 3000


def test_the_picture_copes_with_runs_without_history(tmp_path):
    pytest.importorskip("matplotlib")
    one, two = variant("a", 2.0, 2.1), variant("b", 2.5)
    two.runs[0].history.clear()  # converted, and not trained since
    plots.save_figure(draw_comparison([one, two]), tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_the_picture_shows_the_figures_of_the_table():
    pytest.importorskip("matplotlib")
    one, two = variant("a", 2.0, 2.5), variant("_b", 4.0, 4.0)
    two.cache_bytes = 2048
    history = [(step * 1_000_000, step * 60.0, 9.0 - step) for step in range(8)]
    for run in (*one.runs, *two.runs):
        run.history[:] = history
    figure = draw_comparison([one, two])
    left, right, below = figure.axes
    dots = [each.get_offsets().tolist() for each in left.collections]
    assert dots == [[[32, 2], [32, 2.5]], [[32, 2.25]], [[2, 4]] * 2, [[2, 4]]]
    curve = [[step, 9 - step] for step in range(8)]
    assert [line.get_xydata().tolist() for line in right.lines] == [curve] * 4
    assert [line.get_color() for line in right.lines] == ["C0", "C0", "C1", "C1"]
    assert right.get_ylim()[1] == pytest.approx(7.5)  # a tenth above the first that is not steep
    (legend,) = figure.legends
    assert [text.get_text().strip() for text in legend.get_texts()] == ["a", "_b"]
    assert left.get_xlabel() == "KV cache at full context (KiB)"
    assert right.get_xlabel() == "tokens seen (millions)"
    assert left.get_ylabel() == "bits per byte"
    (found,) = compare_with_first([one, two])
    (interval,) = below.collections[0].get_segments()
    low, high = found.difference - found.half_width, found.difference + found.half_width
    assert interval[:, 0].tolist() == pytest.approx([low, high])
    assert [text.get_text() for text in below.get_yticklabels()] == ["_b"]


def test_a_picture_that_fails_costs_no_table(gptmini, run, monkeypatch):
    monkeypatch.setattr(plots, "save_figure", lambda *_: 1 / 0)
    code, out, _ = gptmini("compare", run)
    assert code == 1
    assert "bits/byte" in out


def test_without_matplotlib_a_comparison_keeps_its_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    compare.write_results(compare.Comparison([variant("a", 2.0)]), tmp_path)
    assert "not drawn; pictures: matplotlib is not installed; run pip" in capsys.readouterr().err
    page = (tmp_path / "compare.md").read_text()
    assert "| a " in page
    assert "compare.png" not in page


def test_usage_is_checked(gptmini, text_file, tmp_path):
    (tmp_path / "done" / "checkpoints").mkdir(parents=True)
    (tmp_path / "done" / "config.yaml").touch()
    code, _, err = gptmini("compare", "--data", "-")
    assert (code, "read only once" in err) == (2, True)
    code, _, err = gptmini("compare", "attention/mha", "attention/mqa", "--attention", "mha")
    assert (code, "needs a single configuration" in err) == (2, True)
    code, _, err = gptmini("compare", "done", "--steps", "9")
    assert (code, "--steps: these runs are already trained" in err) == (2, True)
    code, _, err = gptmini("compare", "done", "--tune")
    assert (code, "--tune: these runs are already trained" in err) == (2, True)
    code, _, err = gptmini("compare", "--data", "text.txt", "--split", "test")
    assert (code, "--split test: needs a test part" in err) == (2, True)
    code, _, err = gptmini("compare", "done", "text.txt")
    assert (code, "text.txt: not a run; name only runs, as done, or none" in err) == (2, True)
    code, _, err = gptmini("compare", "no-such-thing")
    assert (code, "no-such-thing: no such configuration or text;" in err) == (2, True)


def test_without_scipy_nothing_is_trained(gptmini, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    code, _, err = gptmini(*WORDS, "--seeds", "2", "--out", "compared")
    assert code == 5
    assert "scipy is not installed" in err
    assert "[compare]" in err
    assert not (tmp_path / "compared").exists()


class Gated(nn.Module):
    """Attention with a gate on its output, which no configuration describes."""

    def __init__(self, attention: nn.Module, sign: int) -> None:
        super().__init__()
        self.attention = attention
        self.sign = sign
        self.gate = nn.Linear(32, 32)

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        return (self.sign * self.gate(x)).sigmoid() * self.attention(x, *rest)


def build_gated(config: package.ModelConfig, sign: int = 1) -> package.GPT:
    model = package.GPT(config)
    for block in model.blocks:
        block.attn = Gated(block.attn, sign)
    return model


def from_python(text_file: Path, variants: dict, out: str, seeds: int = 2, **sections):
    config = tiny(data={"path": str(text_file)}, **sections)
    return package.compare(variants, config, seeds, text_file.parent / out)


@pytest.mark.usefixtures("undrawn")
def test_settings_and_builders_are_compared_from_python(text_file, tmp_path, gptmini, capfd):
    variants = {"mha": {}, "gqa": {"model": {"attention": "gqa:2"}}, "gated": build_gated}
    found = from_python(text_file, variants, "c", 1)
    mha, gqa, gated = found.variants
    assert gated.parameters == mha.parameters + 2 * (32 * 32 + 32)
    assert gqa.parameters < mha.parameters
    assert str(found) + "\n" == gptmini("compare", *map(str, seeds_of(found)), "--out", "d")[1]
    assert [each.counts for each in found.differences] == [(1, 1), (1, 1)]
    assert "![The figures of the tables](compare.png)" in (tmp_path / "c/compare.md").read_text()
    assert len(found.draw().axes) == 3
    capfd.readouterr()
    again = from_python(text_file, variants, "c", 1)
    assert capfd.readouterr().err.count("already finished") == 3
    assert again.to_dict() == found.to_dict()
    with pytest.raises(ConfigError, match="gated/seed-1337: belongs to a different comparison"):
        from_python(text_file, variants | {"gated": {}}, "c", 1)
    changed = {"gated": lambda config: build_gated(config, -1)}
    with pytest.raises(ConfigError, match="gated/seed-1337: the model computes something else th"):
        from_python(text_file, variants | changed, "c", 1)
    (tmp_path / "c/gated/seed-1337/losses-validation.json").unlink()
    code, _, err = gptmini("compare", *map(str, seeds_of(found)), "--out", "d")
    assert (code, "with gptmini.evaluate(gptmini.load(" in err) == (4, True)
    assert from_python(text_file, variants, "c", 1).variants[2].runs


def seeds_of(found: compare.Comparison) -> list[str]:
    return [run.path for variant in found.variants for run in variant.runs]


@pytest.mark.usefixtures("undrawn")
def test_variants_that_differ_only_by_name_differ_by_nothing(text_file):
    found = from_python(text_file, {"a": {}, "b": package.GPT}, "c")
    (each,) = found.differences
    assert (each.difference, each.p, each.verdict) == (0, 1, "unresolved")


@pytest.mark.usefixtures("undrawn")
def test_variants_may_have_another_optimizer_or_base(text_file, tmp_path):
    found = from_python(text_file, {"muon": {}, "adamw": {"train": {"optimizer": "adamw"}}}, "c", 1)
    base = found.variants[0].runs[0].path
    variants = {"anew": {}, "tuned": {"base": {"run": base}}}
    found = from_python(text_file, variants, "d", 1)
    anew, tuned = (variant.runs[0] for variant in found.variants)
    assert tuned.history[0][0] == 0
    assert tuned.bits_per_byte < anew.bits_per_byte


def test_a_variant_of_another_text_is_refused_after_its_first_run(text_file, tmp_path):
    (tmp_path / "other.txt").write_text(text_file.read_text().upper())
    variants = {"a": {}, "b": {"data": {"path": str(tmp_path / "other.txt")}}, "c": {}}
    with pytest.raises(
        DataError, match=r"b.seed-1337: its held-out text is not that of .*a.seed-1337"
    ):
        from_python(text_file, variants, "c")
    assert not (tmp_path / "c/c").exists()
    for wrong in (5, ({}, build_gated), (build_gated,)):
        with pytest.raises(ConfigError, match=r"a: must be settings, a builder, or \(builder, se"):
            from_python(text_file, {"a": wrong}, "c")
    with pytest.raises(ConfigError, match=r"wide: model\.d_modle: no such setting; did you mean"):
        from_python(text_file, {"wide": {"model": {"d_modle": 64}}}, "c")
