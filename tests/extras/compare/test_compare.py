"""Comparisons: each variant is trained once, resumed after a stop, and reported."""

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from gptmini.errors import ConfigError, GptminiError
from gptmini.extras.compare import compare, measure
from gptmini.extras.compare.plots import draw_comparison
from gptmini.extras.compare.variants import compare_with_first
from gptmini.figures.plots import save_figure
from gptmini.machine import ReceivedSignals
from gptmini.runs.directory import RunDirectory
from tests.extras.compare.samples import variant
from tests.support import SMALL, tiny


def test_seeds_take_turns_and_all_variants_see_the_same_number_of_tokens(tmp_path):
    base = tiny(train={"steps": 12, "batch_size": 4})
    wide = tiny(train={"steps": 99, "batch_size": 8})
    jobs = compare.plan_runs({"a": base, "b": wide}, 2, tmp_path)
    assert [(job.variant, job.config.train.seed) for job in jobs] == [
        ("a", 1337),
        ("b", 1337),
        ("a", 1338),
        ("b", 1338),
    ]
    assert {job.config.train.steps * job.config.train.batch_size for job in jobs} == {48}
    assert all(job.config.train.patience is None for job in jobs)
    assert len({job.out for job in jobs}) == 4


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch, forked_trainings):
    monkeypatch.setattr(measure, "MIN_TIMING_SECONDS", 0.0)


WORDS = ["compare", "--data", "text.txt", *SMALL, "--attention", "mha,window:4", "--seeds", "2"]


@pytest.fixture
def compared(gptmini, text_file):
    """The command line, and the result of a first comparison."""
    return gptmini, gptmini(*WORDS)


def weights(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("model.safetensors"))}


def test_comparing_twice_resumes_rather_than_retrains(compared, tmp_path):
    gptmini, (code, out, err) = compared
    assert code == 0, err
    assert err.startswith(
        "compare: training mha, window:4 in turn, 2 seeds each, 4 steps per run; Ctrl-C stops"
    )
    folder = tmp_path / "runs" / "compare"
    runs = [folder / name / f"seed-{seed}" for name in ("mha", "window4") for seed in (1337, 1338)]
    assert [RunDirectory(run).list_steps()[0] for run in runs] == [4] * 4
    assert RunDirectory(runs[2]).load_config().model.attention.window == 4
    before, made = weights(folder), [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs]
    first = json.loads((folder / "compare.json").read_text())
    code, again, err = gptmini(*WORDS, "--json")
    assert code == 0
    assert err.count("already finished") == 4
    assert weights(folder) == before
    assert [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs] == made
    second = json.loads(again)
    assert [v["runs"] for v in second["variants"]] == [v["runs"] for v in first["variants"]]
    assert "\nvs mha " in out
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    to_first = second["variants"][1]["to_first"]
    assert to_first["counts"] == [2]  # pairs of equal seeds
    assert to_first["verdict"] in out
    page = (folder / "compare.html").read_text()
    assert "<th>vs mha</th>" in page
    assert f"<td>{to_first['verdict']}</td>" in page
    assert page.count("<img ") == 1
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


def test_finished_runs_are_compared_and_grouped_by_what_differs(compared, tmp_path):
    gptmini, _ = compared
    folder = tmp_path / "runs" / "compare"
    twins = [folder / "mha" / "seed-1337", folder / "mha" / "seed-1338"]
    (folder / "copy").symlink_to(twins[0])
    assert compare.group_runs([*twins, folder / "window4" / "seed-1337", folder / "copy"]) == {
        "mha": twins,
        "window4": [folder / "window4" / "seed-1337"],
        "copy": [folder / "copy"],  # the same seed again is another variant
    }
    runs = [f"runs/compare/{name}/seed-{n}" for name in ("mha", "window4") for n in (1337, 1338)]
    code, out, _ = gptmini("compare", *runs, "--out", "again", "--json")
    assert code == 0
    counts = {each["name"]: len(each["runs"]) for each in json.loads(out)["variants"]}
    assert counts == {"mha": 2, "window4": 2}
    (tmp_path / "other.txt").write_text("Another text. " * 20)
    code, other, _ = gptmini("compare", *runs, "--data", "other.txt", "--out", "again", "--json")
    assert code == 0
    assert (
        json.loads(other)["variants"][0]["bits_per_byte"]
        != json.loads(out)["variants"][0]["bits_per_byte"]
    )


def test_what_a_machine_chose_is_no_difference_between_variants(tmp_path):
    runs = [tmp_path / "seed-1", tmp_path / "seed-2"]
    chosen = [{"compile": "on", "micro_batch_size": 4}, {"compile": "off", "micro_batch_size": 2}]
    for seed, (path, settings) in enumerate(zip(runs, chosen, strict=True)):
        path.mkdir()
        RunDirectory(path).write_config(tiny(train={"seed": seed, **settings}))
    assert list(compare.group_runs(runs).values()) == [runs]


def test_variants_are_measured_on_the_test_part_on_request(gptmini, text_file, tmp_path):
    words = ["compare", "--data", "text.txt", *SMALL, "--attention", "mha"]
    words += ["--set", "data.test=0.2"]
    code, out, err = gptmini(*words, "--split", "test")
    assert code == 0, err
    assert "bits/byte: on the test part\n" in out
    tested = json.loads((tmp_path / "runs/compare/compare.json").read_text())
    code, out, err = gptmini(*words, "--json")
    assert (code, err.count("already finished")) == (0, 1), err
    chosen_on = json.loads(out)
    for split, found in {"test": tested, "validation": chosen_on}.items():
        run = found["variants"][0]["runs"][0]
        assert run["split"] == split
        _, out, _ = gptmini("evaluate", run["path"], "--split", split, "--json")
        assert run["bits_per_byte"] == json.loads(out)["bits_per_byte"]
    finished = [each["runs"][0]["path"] for each in tested["variants"]]
    code, out, err = gptmini("compare", *finished, "--split", "test", "--out", "again", "--json")
    assert code == 0, err
    assert [each["runs"][0] for each in json.loads(out)["variants"]] == [
        each["runs"][0] for each in tested["variants"]
    ]


def test_equal_minutes_fix_what_the_first_training_chose(gptmini, text_file, tmp_path):
    small = ["--set", "model.context_length=16", "--set", "train.eval_every=1000"]
    words = ["compare", "--data", "text.txt", *small, "--minutes", "0.1"]
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
    assert list(compare.group_runs([folder / "mha" / "seed-1337"])) == ["mha"]


def test_a_mistake_before_the_first_step_can_be_corrected(text_file, tmp_path, monkeypatch):
    """The configuration of a training that never began does not block a corrected one."""
    said = []
    monkeypatch.setattr(compare, "_wait", lambda process: process.wait() and 3)
    monkeypatch.setattr(compare, "say", said.append)
    wrong, right = tiny(data={"path": "no.txt"}), tiny(data={"path": str(text_file)})
    with pytest.raises(GptminiError, match="see the error above"):
        compare._train(tmp_path / "seed-1", wrong, tmp_path / "cache", "wrong")
    compare._train(tmp_path / "seed-1", right, tmp_path / "cache", "right")
    compare._train(tmp_path / "seed-1", right, tmp_path / "cache", "again")
    assert said == ["wrong", "right", "again: already finished"]
    with pytest.raises(ConfigError, match="belongs to a different comparison"):
        compare._train(tmp_path / "seed-1", wrong, tmp_path / "cache", "wrong")


def test_a_failed_training_ends_the_comparison_with_its_message_and_exit_code(gptmini, text_file):
    words = [*WORDS, "--set", "train.lr=1e9", "--set", "train.optimizer=adamw"]
    code, _, err = gptmini(*words)
    assert code == 6
    assert "after step" in err
    assert "training stopped early" in err


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_training_and_says_how_to_resume(gptmini, text_file, tmp_path, number):
    long = [*WORDS, "--set", "train.steps=3000", "--set", "train.save_every=3000"]
    command = [sys.executable, "-m", "gptmini", *long]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        for line in process.stderr:
            if line.split()[1:2] == ["20/3000"]:
                break
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == 128 + number
    assert "saved" in said
    assert "training stopped early; run the same command again to resume" in said
    saved = RunDirectory(tmp_path / "runs/compare/mha/seed-1337").list_steps()
    assert 20 <= saved[0] < 3000


def test_the_picture_copes_with_runs_without_history(tmp_path):
    pytest.importorskip("matplotlib")
    one, two = variant("a", 2.0, 2.1), variant("b", 2.5)
    two.runs[0].history.clear()  # converted, and not trained since
    save_figure(draw_comparison([one, two]), tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_the_picture_shows_the_figures_of_the_table():
    pytest.importorskip("matplotlib")
    one, two = variant("a", 2.0, 2.5), variant("b", 4.0, 4.0)
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
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert left.get_xlabel() == "KV cache at full context (KiB)"
    assert right.get_xlabel() == "tokens seen (millions)"
    assert left.get_ylabel() == "bits per byte"
    (found,) = compare_with_first([one, two])
    (interval,) = below.collections[0].get_segments()
    low, high = found.difference - found.half_width, found.difference + found.half_width
    assert interval[:, 0].tolist() == pytest.approx([low, high])
    assert [text.get_text() for text in below.get_yticklabels()] == ["b"]


def test_without_matplotlib_a_comparison_keeps_its_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    compare.write_results([variant("a", 2.0)], tmp_path)
    assert "not drawn; pictures: matplotlib is not installed; run pip" in capsys.readouterr().err
    page = (tmp_path / "compare.html").read_text()
    assert "<td>a</td>" in page
    assert "<img" not in page


def test_a_finished_run_with_the_name_of_a_variant_is_measured_beside_it(tmp_path, monkeypatch):
    old, other, new = Path("old/mha"), Path("old/b"), Path("new/mha")
    monkeypatch.setattr(compare, "group_runs", lambda _: {"mha": [old], "b": [other]})
    monkeypatch.setattr(compare, "train_all", lambda *_: {"mha": [new]})
    monkeypatch.setattr(compare, "write_results", lambda *_: None)
    monkeypatch.setattr(compare, "measure_variants", lambda *arguments: list(arguments))
    cache = tmp_path / "cache"
    found = compare.compare({"mha": tiny()}, [], 1, ["text"], tmp_path, cache, "test")
    measured = {str(old): [old], "b": [other], "mha": [new]}
    assert found == [measured, None, cache, "test"]
    found = compare.compare({}, [old], 1, ["text"], tmp_path, cache)
    assert found == [{"mha": [old], "b": [other]}, ["text"], cache, "validation"]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1 on Windows")
def test_a_request_to_save_is_passed_on_once(monkeypatch):
    class Training:
        returncode = 0

        def __init__(self) -> None:
            self.answers = [None, None, None, 0]
            self.sent: list[int] = []

        def poll(self) -> int | None:
            return self.answers.pop(0)

        def send_signal(self, number: int) -> None:
            self.sent.append(number)

    received = nullcontext(ReceivedSignals(save=True))
    monkeypatch.setattr(compare.machine, "catch_signals", lambda: received)
    training = Training()
    assert compare._wait(training) == 0
    assert training.sent == [signal.SIGUSR1]


def test_each_configuration_needs_a_test_part(gptmini, text_file):
    for name, share in (("a", 0.2), ("b", None)):
        settings = {"data": {"path": ["text.txt"], "test": share}}
        Path(f"{name}.yaml").write_text(json.dumps(settings))
    code, _, err = gptmini("compare", "a.yaml", "b.yaml", "--split", "test")
    assert (code, "no test part" in err) == (2, True)


def test_usage_is_checked(gptmini, text_file, tmp_path):
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "config.yaml").touch()
    code, _, err = gptmini("compare", "--data", "-")
    assert (code, "read only once" in err) == (2, True)
    code, _, err = gptmini("compare", "attention/mha", "attention/mqa", "--attention", "mha")
    assert (code, "needs a single configuration" in err) == (2, True)
    for option in ("--steps", "--seeds", "--minutes"):
        code, _, err = gptmini("compare", "done", option, "9")
        assert (code, f"{option}: these runs are already trained" in err) == (2, True)
    code, _, err = gptmini("compare", "done", "--data", "-")
    assert (code, "read only once" in err) == (2, True)
    code, _, err = gptmini("compare", "--data", "text.txt", "--split", "test")
    assert (code, "no test part; add --set data.test=0.1" in err) == (2, True)
    code, _, err = gptmini("compare", "done", "--data", "text.txt", "--split", "test")
    assert (code, "leave out --data" in err) == (2, True)
    code, _, err = gptmini("compare", "--attention", "mha,window")
    assert (code, "'window'" in err) == (2, True)
    code, _, err = gptmini("compare", "no-such-thing")
    assert (code, "no-such-thing: no such configuration or run;" in err) == (2, True)


def test_without_scipy_nothing_is_trained(gptmini, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    code, _, err = gptmini(*WORDS, "--seeds", "2", "--out", "compared")
    assert code == 5
    assert "scipy is not installed" in err
    assert "[compare]" in err
    assert not (tmp_path / "compared").exists()
