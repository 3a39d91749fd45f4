"""The benchmarks run, on small inputs, and print the tables of scripts/RESULTS.md."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiny, train

SCRIPTS = Path(__file__).parents[1] / "scripts"


def output(name: str, *words: str) -> str:
    command = [sys.executable, str(SCRIPTS / name), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_nano_trains_a_gpt_and_samples_from_it(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    import nano

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(400)))
    words = [str(text), "--steps", "4", "--prompt", "7 is", "--cache", str(tmp_path / "cache")]

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


def test_bench_attention_prints_caches_by_the_formula():
    rows = [
        line.strip("| ").split(" | ")
        for line in output("bench/attention.py", "--quick").splitlines()
    ]
    sizes = {row[1]: (row[6], row[7]) for row in rows if len(row) == 8 and row[0] == "128"}
    assert sizes.keys() == {"mha", "gqa:3", "mqa", "window 128"}
    assert all(size == formula for size, formula in sizes.values())


def test_bench_text_times_every_format_and_tokenizer():
    rows = [
        line.strip("| ").split(" | ") for line in output("bench/text.py", "--quick").splitlines()
    ]
    bytes_per_token = {
        row[0]: float(row[1]) for row in rows if len(row) == 4 and row[3].endswith(" x")
    }
    assert {"a folder", "Parquet", "JSON lines, zstd", "byte", "bpe-4096"} <= bytes_per_token.keys()
    assert bytes_per_token["bpe-4096"] > bytes_per_token["bpe-1024"] > 2 > bytes_per_token["byte"]


def test_gradient_checkpointing_saves_memory():
    table = output("bench/memory.py", "--rows", "8").splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in table]
    peaks = {row[0]: float(row[1]) for row in rows}
    # About half; either peak may be a quarter higher, as the allocator keeps what was freed.
    assert peaks["on"] < 0.8 * peaks["off"]


def test_bench_plans_compares_tokens_with_the_published_ones():
    (row,) = [
        line.strip("| ").split(" | ")
        for line in output("bench/plans.py", "--quick").splitlines()[2:]
    ]
    tokens, published = (float(row[n].replace(",", "")) for n in (6, 7))
    assert (row[2], published, row[8]) == ("8 x h100", 1000, f"{tokens / 1000:.2f} x")


def test_torture_loses_no_run():
    words = output("torture.py", "4").split()
    assert words[:2] == ["4", "runs,"]
    assert int(words[2]) > 0
    assert words[6:] == ["4", "equal", "ends,", "0", "lost"]


def test_bench_train_times_the_baseline_and_gptmini(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(2000)))
    printed = output("bench/train.py", str(text), "--parts", "small,share", "--quick")
    beside_pytorch, share = [
        [[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()]
        for table in printed.strip().split("\n\n")
    ]
    assert beside_pytorch[0] == ["", "plain PyTorch", "gptmini", "ratio"]
    assert float(beside_pytorch[2][1]) > 0
    assert 1 < float(beside_pytorch[3][2]) < 7
    assert share[0] == ["", "eager", "compiled"]
    assert {len(row) for row in share} == {3}
    assert 0 < float(share[2][1].split()[-1].rstrip("%")) < 200  # of what a large product reaches


def test_bench_minutes_trains_every_arm_once(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(2000)))
    words = ["--shakespeare", str(text), "--texts", "shakespeare-char", "--minutes", "0.02"]
    results = tmp_path / "results.json"
    arms = ["--arms", "plan,default,2x64", "--out", str(results)]
    first = output("bench/minutes.py", *words, *arms)
    found = json.loads(results.read_text())
    default, by_hand, plan = (
        f"shakespeare-char/0.02/{arm}/0" for arm in ("default", "2x64", "plan")
    )
    assert found.keys() == {plan, default, by_hand}
    assert found[default]["sizes"] == "4 x 192, char 257, 16 rows"
    assert found[by_hand]["sizes"] == "2 x 64, char 257, 16 rows"
    assert all(0 < each["bits"] < 9 and each["seconds"] > 0 for each in found.values())
    (row,) = first.splitlines()[2:]
    ours = found[plan]["bits"]
    assert row.startswith(f"| shakespeare-char | 0.02 | 1 | {ours:.4f} | ")
    theirs = found[by_hand]["bits"]
    assert f"| {theirs:.4f} ({100 * (ours / theirs - 1):+.1f} %) |" in row
    again = output("bench/minutes.py", *words, *arms)
    assert (again, json.loads(results.read_text())) == (first, found)  # nothing is trained again


def test_bench_minutes_states_what_the_default_configuration_has(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "bench")
    import minutes

    texts = minutes.find_texts(Path("t.txt"), None, Path())
    stated = set(minutes.list_default_settings(texts["shakespeare-char"]))
    sizes = {"model.n_layer=4", "model.n_head=4", "model.d_model=192", "train.batch_size=16"}
    assert stated == sizes
    assert "tokenizer.vocab_size=512" in minutes.list_default_settings(texts["python-docs"])


def test_bench_generate_times_hugging_face_and_gptmini():
    rows = output("bench/generate.py", "--quick").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[5:]]
    names = [cell.strip() for cell in rows[3].strip("|").split("|")]
    assert [cell[0] for cell in cells] == ["tiny gqa, 2 x 8", "tiny mha, 1 x 8"]
    for row in cells:
        assert len(row) >= 4
        assert all(float(cell.split()[0].replace(",", "")) > 0 for cell in row[1:])
    assert names[1:4] == ["HF", "HF bf16", "gptmini in torch"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the clock of another process")
def test_bench_llama_times_llama_cpp():
    pytest.importorskip("xllamacpp")
    rows = output("bench/llama.py", "--quick", "--cpu").splitlines()[4:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["1 x 32, 64 new", "1 x 512, 1 new"]
    for _, theirs, *pairs in cells:
        assert float(theirs.replace(",", "")) > 0
        assert len(pairs) == 3
        for pair in pairs:
            ours, _, llama, ratio, _ = pair.replace(",", "").replace("(", "").split()
            assert float(ratio) == pytest.approx(float(ours) / float(llama), rel=0.05, abs=0.06)


def test_bench_finetune_times_the_same_step_of_both(tmp_path: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 200)
    data = {"path": str(tmp_path / "text.txt")}
    train(tiny(data=data, train={"steps": 1}), tmp_path / "run", tmp_path / "cache")
    words = [str(tmp_path / "run"), "--rows", "2", "--length", "16", "--repeats", "1"]
    first, *table = output("bench/finetune.py", *words).splitlines()
    assert first.startswith("2 x 16 tokens")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[3:]]
    who = ("gptmini adamw", "gptmini muon", "transformers")
    expected = [f"{each}, {dtype}" for dtype in ("float32", "bfloat16") for each in who]
    assert [row[0] for row in rows] == expected
    assert [row[2] for row in rows if row[0].startswith("trans")] == ["1.00 x", "1.00 x"]
    assert all(float(row[1]) >= 0 and float(row[2].split()[0]) > 0 for row in rows)


def test_bench_serve_times_the_server(tmp_path: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 200)
    data = {"path": str(tmp_path / "text.txt")}
    train(tiny(data=data, train={"steps": 1}), tmp_path / "run", tmp_path / "cache")
    words = ["--clients", "2", "--prompts", "5", "--texts", "1", "--new", "4"]
    (row,) = output("bench/serve.py", str(tmp_path / "run"), *words).splitlines()[2:]
    clients, name, speed, first, between = (cell.strip() for cell in row.strip("|").split("|"))
    assert (clients, name) == ("2 x 5", "gptmini")
    assert float(speed.replace(",", "")) > 0
    assert first.count("/") == between.count("/") == 2


def test_bench_tasks_makes_tasks_from_a_text_and_compares_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS / "bench")
    import tasks

    words = [f"word{n}" for n in range(5000)]
    assert tasks.write_tasks(" ".join(words), tmp_path, 9) == list(tasks.TASKS)
    documents = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in tasks.TASKS
    }
    for question in documents["continuation"]:
        passage = f"{question['context']} {question['choices'][question['answer']]}".split()
        first = words.index(passage[0])
        assert passage == words[first : first + 48]
    assert [len(each["text"].split()) for each in documents["passages"]] == [250] * 4 + [2500]
    for repetition in documents["repetition"]:
        passage, beginning = repetition["prompt"].split("\n")
        assert passage == f"{beginning} {repetition['end']}"
    for name in tasks.TASKS:
        task = json.loads((tmp_path / f"{name}.yaml").read_text())
        assert task["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / f"{name}.jsonl")

    metrics = {("continuation", "acc"): 0.5}
    answers = {
        ("continuation", 0): [["-1.5", "False"], ["-2.0", "True"]],
        ("passages", 0): ["-100.0"],
        ("repetition", 0): ["word"],
    }
    other = {
        ("continuation", 0): [["-1.25", "False"], ["-2.0", "False"]],
        ("passages", 0): ["-100.5"],
        ("repetition", 0): ["word"],
    }
    tasks.print_table(
        {"a": tasks.Found(metrics, answers, 1.4), "b": tasks.Found(metrics, other, 2)}
    )
    assert capsys.readouterr().out.splitlines() == [
        "|  | a | b |",
        "|---|---|---|",
        "| continuation: acc | 0.5 | 0.5 |",
        "| difference of a choice, nats |  | 2.5e-01 |",
        "| difference of a passage, nats |  | 5.0e-01 |",
        "| greedy alike |  | 1 of 2 |",
        "| same text |  | 1 of 1 |",
        "| seconds | 1 | 2 |",
    ]


@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="no lm_eval here")
def test_lm_eval_finds_the_same_served_and_exported(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    model = {"context_length": 400}
    train(
        tiny(model=model, data={"path": str(text)}, train={"steps": 30, "seq_len": 16}),
        tmp_path / "run",
        tmp_path / "cache",
    )
    words = [str(tmp_path / "run"), str(text), "--n", "3", "--models", "hf,float32"]
    rows = [line.strip("| ").split(" | ") for line in output("bench/tasks.py", *words).splitlines()]
    found = {row[0]: row[1:] for row in rows}
    for name in ("continuation: acc", "repetition: exact_match", "passages: bits_per_byte"):
        theirs, ours = map(float, found[name])
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert float(found["difference of a choice, nats"][-1]) < 1e-3
    assert float(found["difference of a passage, nats"][-1]) < 0.1
    assert found["greedy alike"][-1] == "12 of 12"
    assert found["same text"][-1] == "3 of 3"


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
def test_bench_hostile_serves_normal_clients_beside_hostile_ones(tmp_path: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 200)
    config = tiny(
        model={"context_length": 64},
        data={"path": str(tmp_path / "text.txt")},
        train={"steps": 1, "seq_len": 16},
    )
    train(config, tmp_path / "run", tmp_path / "cache")
    words = ["--clients", "2", "--kinds", "huge_stop,many_stops", "--minutes", "0.03"]
    rows = output("bench/hostile.py", str(tmp_path / "run"), "--seconds", "1", *words).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
    assert [row[0] for row in cells] == ["none", "two, all kinds"]
    for name, n_requests, n_failed, first, between, memory, answers in cells:
        assert int(n_requests) >= 2, name
        assert n_failed == "0", name
        assert first.endswith("x)")
        assert between.endswith("x)")
        assert 0 < float(memory.replace(",", "")) < 2000
        assert name == "none" or "400" in answers


def test_bench_size_compares_plans_with_trainings():
    row = output("bench/size.py", "--quick").splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "quick"
    assert 0.5 < float(cells[2].replace(",", "")) / float(cells[3].replace(",", "")) < 2
    assert float(cells[5]) > 0


def test_bench_learning_compares_recipes_on_the_same_tokens(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}, and {n % 7} is.\n" for n in range(9000)))
    results = tmp_path / "results.jsonl"
    words = ["--texts", f"numbers={text}:char", "--sizes", "2x32", "--seeds", "1,2"]
    words += ["--regimes", "once", "--steps", "9", "--folder", str(tmp_path / "texts")]
    words += ["--recipes", "gptmini,nanochat"]
    words += ["--recipe", "fast:train.lr=6e-3"]
    output("bench/learning.py", "run", str(results), *words)
    lines = results.read_text().splitlines()
    assert len(lines) == 6
    assert all(0 < json.loads(line)["bits_per_byte"] < 8 for line in lines)
    output("bench/learning.py", "run", str(results), *words)  # nothing is left to do
    assert results.read_text().splitlines() == lines
    heading, _, row, *_ = output("bench/learning.py", "table", str(results)).splitlines()
    recipes = ["gptmini", "nanochat", "fast"]
    assert sorted(heading.strip("| ").split(" | ")[1:]) == sorted(recipes)
    assert row.startswith("| numbers, once, 2x32, 9 | ")
    assert row.count("±") == 2


def test_the_update_of_nanochat_is_nearly_orthogonal(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "bench")
    import nanochat

    random = torch.Generator().manual_seed(0)
    for shape in ((2, 24, 64), (2, 64, 24)):
        matrices = nanochat.polar_express(torch.randn(shape, generator=random))
        values = torch.linalg.svdvals(matrices)
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=0.2)


def check_gpu(run: str, folder: Path) -> dict[str, Any]:
    """Run the check of a GPU on a CPU; return what each part found."""
    out = folder / "check.json"
    output("gpu_check", run, "--small", "--device", "cpu", "--out", str(out))
    parts = json.loads(out.read_text())
    assert [name for name, part in parts.items() if not part["ok"]] == []
    page = (folder / "check.md").read_text()
    assert all(f"## {name}\n" in page for name in parts)
    return {name: part["found"] for name, part in parts.items()}


def test_gpu_check_runs_every_part_of_training_on_a_cpu(tmp_path: Path):
    found = check_gpu("training", tmp_path)
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


def test_gpu_check_runs_every_part_of_generation_on_a_cpu(tmp_path: Path):
    found = check_gpu("generation", tmp_path)
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
