"""The scripts run, on small inputs, and the benchmarks print the tables of scripts/RESULTS.md."""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import tiny, train

SCRIPTS = Path(__file__).parents[2] / "scripts"
Output = Callable[..., str]


@pytest.fixture
def output(start_ranks: Callable[..., tuple[list[int], str]], tmp_path: Path) -> Output:
    """Runs a script in a process that has PyTorch already; returns what it prints."""

    def run(name: str, *words: str) -> str:
        printed = tmp_path / "printed.txt"
        script = str(SCRIPTS / name)
        (code,), said = start_ranks(1, *words, script=script, printed=printed)
        assert code == 0, said
        return printed.read_text()

    return run


def test_nano_trains_a_gpt_and_samples_from_it(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    import nano

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(400)))
    words = [str(text), "--steps", "4", "--prompt", "7 is"]
    prepare = partial(nano.prepare_corpus, cache=tmp_path / "cache")
    monkeypatch.setattr(nano, "prepare_corpus", prepare)

    def run(seed: int) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["nano.py", *words, "--seed", str(seed)])
        nano.main()
        printed = capsys.readouterr().out
        return re.sub(r", \d+ s$", "", printed, flags=re.MULTILINE).splitlines()

    first = run(seed=1)
    _, parameters, loss, bits, *sample = first
    assert int(parameters.split()[0].replace(",", "")) > 500_000
    loss_text = loss.removeprefix("step 4 of 4: loss ")
    assert 0 < float(loss_text) < 6  # guessing among the 263 tokens costs ln 263 = 5.57
    assert 0 < float(bits.removesuffix(" bits per byte of held-out text")) < 8
    assert "\n".join(sample).startswith("7 is")
    assert len("\n".join(sample)) > 50
    assert run(seed=1) == first
    assert run(seed=2) != first


def test_the_run_that_nano_saves_is_one_for_every_command(tmp_path, monkeypatch, gptmini):
    monkeypatch.syspath_prepend(SCRIPTS)
    import nano

    source = (SCRIPTS / "nano.py").read_text()
    assert not re.search(r"(from|import) gptmini\.", source)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(400)))
    prepare = partial(nano.prepare_corpus, cache=tmp_path / "cache")
    monkeypatch.setattr(nano, "prepare_corpus", prepare)
    words = ["nano.py", str(text), "--steps", "2", "--out", str(tmp_path / "nano")]
    monkeypatch.setattr(sys, "argv", words)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        nano.main()
    printed = out.getvalue()
    bits = float(re.search(r"([\d.]+) bits per byte", printed)[1])
    code, out, err = gptmini("evaluate", str(tmp_path / "nano"), "--json")
    assert code == 0, err
    assert json.loads(out)["bits_per_byte"] == pytest.approx(bits, abs=1e-3)
    assert gptmini("generate", str(tmp_path / "nano"), "--prompt", "7 is")[0] == 0
    assert gptmini("export", str(tmp_path / "nano"), "--out", str(tmp_path / "exported"))[0] == 0
    with pytest.raises(SystemExit):  # it is not trained anew over the old one
        nano.main()
    further = ["--from", str(tmp_path / "nano"), "--data", str(text), "--steps", "1"]
    assert gptmini("train", *further, "--no-sample")[0] == 0


def test_every_benchmark_is_behind_the_door_and_on_the_page(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from bench.__main__ import BENCHMARKS

    not_benchmarks = {"__init__", "__main__", "all", "nanochat", "quote", "results", "servers"}
    files = {path.stem for path in (SCRIPTS / "bench").glob("*.py")}
    assert files - not_benchmarks == set(BENCHMARKS)
    page = (SCRIPTS / "README.md").read_text()
    assert all(f"| `{name}" in page for name in BENCHMARKS)


def test_the_door_of_the_benchmarks_lists_them_for_an_unknown_name():
    command = [sys.executable, str(SCRIPTS / "bench"), "speed"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "speed" in refused.stderr
    assert "attention" in refused.stderr


def read_tables(printed: str) -> list[dict[str, dict[str, str]]]:
    """The cells of the tables that a benchmark prints, by row and column."""
    tables = []
    for drawn in printed.strip().split("\n\n"):
        (_, *columns), _, *rows = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in drawn.splitlines()
        )
        tables.append({name: dict(zip(columns, cells, strict=True)) for name, *cells in rows})
    return tables


def to_float(cell: str) -> float:
    return float(cell.split(maxsplit=1)[0].replace(",", ""))


def test_bench_attention_measures_each_variant(output: Output):
    training, decoding, cache = read_tables(output("bench", "attention", "--trial"))
    assert training.keys() == decoding.keys() == cache.keys() == {"128"}
    assert cache["128"].keys() == {"mha", "gqa:3", "mqa", "window 128"}
    assert cache["128"]["mqa"] == f"{2 * 128 * 64 * 4:,}"
    for table in (training, decoding):
        ratio = table["128"]["mha / mqa"]
        assert to_float(ratio) > 0


def test_gradient_checkpointing_saves_memory(output: Output):
    (table,) = read_tables(output("bench", "memory", "--trial", "--rows", "4"))
    # About half; either peak may be a quarter higher, as the allocator keeps what was freed.
    assert to_float(table["peak MiB"]["on"]) < 0.8 * to_float(table["peak MiB"]["off"])


def test_torture_loses_no_run(output: Output):
    words = output("torture.py", "2").split()
    assert words[:2] == ["2", "runs,"]
    assert int(words[2]) > 0
    assert words[6:] == ["2", "equal", "ends,", "0", "lost"]


def test_bench_train_times_the_baseline_and_gptmini(output: Output, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(2000)))
    words = ["--text", str(text), "--parts", "small,share", "--trial"]
    speed, steps, share, ends = read_tables(output("bench", "train", *words))
    assert to_float(speed["seconds to 1.8982"]["plain PyTorch"]) > 0
    for loss in ("loss", "plain PyTorch's loss"):
        assert 1 < to_float(ends["shakespeare-char-small"][loss]) < 7
    assert to_float(steps["default"]["eager"]) > 0
    assert 0 < to_float(share["default"]["eager / product"]) < 2
    assert to_float(ends["shakespeare-char-small"]["minutes"]) > 0


def test_bench_generate_times_hugging_face_and_gptmini(output: Output):
    speeds, firsts, reads, memory = read_tables(output("bench", "generate", "--trial"))
    assert speeds.keys() == firsts.keys() == {"tiny gqa, 2 x 8", "tiny mha, 1 x 32"}
    assert reads.keys() == {"tiny mha, 1 x 32"}
    assert all(to_float(memory["tiny"][name]) > 0 for name in ("HF float32", "float32"))
    for row in (*speeds.values(), *firsts.values()):
        assert {"HF float32", "float32"} <= row.keys()
        assert all(to_float(cell) > 0 for cell in row.values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the clock of another process")
def test_bench_llama_times_llama_cpp(output: Output):
    pytest.importorskip("xllamacpp")
    (table,) = read_tables(output("bench", "llama", "--trial", "--cpu"))
    assert table.keys() == {"1 x 32, 64 new", "1 x 512, 1 new"}
    for row in table.values():
        for ours, theirs in (("float32", "f32"), ("bfloat16", "bf16"), ("int8", "q8_0")):
            middle, _, lowest, _, highest = re.findall(r"[\d.]+|x|to", row[f"{ours} / {theirs}"])
            assert 0 < float(lowest) <= float(middle) <= float(highest)


def test_bench_processes_times_each_way_of_adding_gradients(start_ranks, monkeypatch, capsys):
    """Its ranks are forks; `test_torchrun_starts_a_run_again_after_a_rank_died` has torchrun."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from bench import processes

    def start(command: list[str], **_: object) -> None:
        options, words = command[: command.index("-m", 2)], command[command.index("-m", 2) :]
        assert options[:-1] == [sys.executable, *processes.LAUNCH]
        assert words[:2] == ["-m", "gptmini"]
        size = int(options[-1].removeprefix("--nproc-per-node="))
        codes, said = start_ranks(size, *words[2:])
        assert codes == [0] * size, said

    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(run=start, PIPE=subprocess.PIPE))
    monkeypatch.setitem(processes.SIZES, "tiny", (1, 32, 1))
    (table,) = processes.measure("trial", "tiny", ranks="2", rows=4)
    assert table.rows.keys() == {"tiny, exact", "tiny, fast"}
    for row in table.rows.values():
        assert row.keys() == {"1 process", "2 processes"}
        assert all(seconds > 0 for (seconds,) in row.values())


def test_bench_serve_times_the_server(output: Output, tmp_path: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 200)
    data = {"path": str(tmp_path / "text.txt")}
    train(tiny(data=data, train={"steps": 1}), tmp_path / "run", tmp_path / "cache")
    words = [str(tmp_path / "run"), "--clients", "2", "--prompts", "5", "--new", "4", "--trial"]
    speeds, firsts, gaps = read_tables(output("bench", "serve", *words))
    assert to_float(speeds["2 x 5"]["gptmini"]) > 0
    assert firsts.keys() == gaps.keys() == {"2 x 5, p50", "2 x 5, p95", "2 x 5, p99"}


def test_bench_learning_compares_recipes_on_the_same_tokens(output: Output, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}, and {n % 7} is.\n" for n in range(2000)))
    words = ["--texts", f"numbers={text}:char", "--sizes", "2x32", "--seeds", "1,2", "--trial"]
    words += ["--regimes", "once", "--steps", "9", "--recipe", "fast:train.lr=6e-3", "--jobs", "1"]
    learned, seconds = read_tables(output("bench", "learning", *words))
    row = learned["numbers, once, 2x32"]
    assert all(0 < to_float(row[recipe]) < 8 for recipe in ("gptmini", "nanochat", "fast"))
    assert " to " in row["gptmini - nanochat"]
    assert " to " in seconds["numbers, once, 2x32"]["gptmini / fast"]


def test_bench_scale_measures_compressors_on_the_same_text(output: Output, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(3000)))
    (table,) = read_tables(output("bench", "scale", "--text", str(text), "--trial"))
    row = table["Tiny Shakespeare"]
    assert 0 < to_float(row["xz"]) < to_float(row["gptmini"]) < 10


def test_bench_first_runs_the_commands_of_the_readme(output: Output):
    page = (SCRIPTS.parent / "README.md").read_text()
    assert 'gptmini generate --prompt "The class statement" --max-new-tokens 60' in page
    seconds, ends = read_tables(output("bench", "first", "--trial"))
    assert all(to_float(row["seconds"]) > 0 for row in seconds.values())
    whole = to_float(seconds["gptmini generate"]["seconds"])
    assert to_float(seconds["its first word"]["seconds"]) < 5 * whole
    assert 0 < to_float(ends["gptmini train"]["bits per byte"]) < 10


def test_the_update_of_nanochat_is_nearly_orthogonal(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from bench import nanochat

    random = torch.Generator().manual_seed(0)
    for shape in ((2, 24, 64), (2, 64, 24)):
        matrices = nanochat.polar_express(torch.randn(shape, generator=random))
        values = torch.linalg.svdvals(matrices)
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=0.2)


def check_gpu(output: Output, run: str, folder: Path) -> dict[str, Any]:
    """Run the check of a GPU on a CPU; return what each part found."""
    out = folder / "check.json"
    output("gpu_check", run, "--small", "--device", "cpu", "--out", str(out))
    parts = json.loads(out.read_text())
    assert [name for name, part in parts.items() if not part["ok"]] == []
    page = (folder / "check.md").read_text()
    assert all(f"## {name}\n" in page for name in parts)
    return {name: part["found"] for name, part in parts.items()}


def test_gpu_check_runs_every_part_of_training_on_a_cpu(output: Output, tmp_path: Path):
    found = check_gpu(output, "training", tmp_path)
    outcomes = found["tests"]["outcomes"]
    assert outcomes.pop("PASSED") >= 4
    assert outcomes == {"FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    assert found["tests"]["failed"] == []
    for part in ("changes", "steps"):
        assert all(step["tokens_per_second"] > 0 for step in found[part].values())
    losses = found["train"]["losses, compile off"]
    assert losses[-1] < losses[0]
    assert all(case == {"repeated": True, "resumed": True} for case in found["bits"].values())
    assert found["profile"]["aten::mm"]["calls"] >= 54  # three for each of 18 matrices
    assert 0 < found["profile"]["busy"] <= 1


def test_gpu_check_runs_every_part_of_generation_on_a_cpu(output: Output, tmp_path: Path):
    found = check_gpu(output, "generation", tmp_path)
    assert found["texts"] == {"in company as alone": True, "as on the CPU": [True] * 4}
    assert found["decode"]["32 rows, bfloat16"]["tokens"] == 32 * 8
    assert found["precision"]["largest difference"] < 0.01
    assert found["serve"]["8 clients, tokens/s"] > 0
    assert all(command["exit_code"] == 0 for command in found["commands"].values())


def test_the_page_of_gpu_check_has_a_table_for_rows_of_the_same_columns(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from gpu_check.page import write_page

    found = {
        "memory": 85_000_000_000,
        "a | b": True,
        "flash": {"ms": 0.123456, "mfu": None},
        "eager": {"ms": 2.0, "mfu": 0.25},
        "other": {"error": "out of memory"},
    }
    failed = {"ok": False, "seconds": 1.5, "found": {}, "ended": "after 3 s", "output": ["why"]}
    page = write_page({"step": {"ok": True, "seconds": 2.5, "found": found}, "bits": failed})
    assert page.splitlines() == [
        "# gptmini on a GPU",
        "",
        "## step",
        "",
        "In 2.5 s.",
        "",
        "| | |",
        "|---|---|",
        "| memory | 85,000,000,000 |",
        "| a \\| b | yes |",
        "",
        "| | ms | mfu |",
        "|---|---|---|",
        "| flash | 0.1235 | - |",
        "| eager | 2 | 0.25 |",
        "",
        "| | error |",
        "|---|---|",
        "| other | out of memory |",
        "",
        "## bits",
        "",
        "**Failed**: ended after 3 s.",
        "",
        "```text",
        "why",
        "```",
    ]


def test_gpu_check_goes_on_after_a_part_that_fails_or_hangs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from gpu_check import __main__ as gpu_check

    def hangs(_: object) -> Iterator[tuple[str, int]]:
        yield "before", 1
        signal.pause()

    def fails(_: object) -> Iterator[tuple[str, int]]:
        yield "before", 2
        raise ZeroDivisionError("no such kernel")

    def works(_: object) -> Iterator[tuple[str, int]]:
        yield "before", 3

    parts = {"hangs": (hangs, 3), "fails": (fails, 60), "works": (works, 60)}
    monkeypatch.setattr(gpu_check, "RUNS", {"training": parts})
    monkeypatch.setattr(
        sys, "argv", ["gpu_check", "training", "--out", str(tmp_path / "check.json")]
    )
    with pytest.raises(SystemExit):
        gpu_check.main()
    found = json.loads((tmp_path / "check.json").read_text())
    assert [part["ok"] for part in found.values()] == [False, False, True]
    assert [part["found"]["before"] for part in found.values()] == [1, 2, 3]
    assert found["hangs"]["ended"] == "after 3 s"
    assert found["fails"]["ended"] == "with exit code 1"
