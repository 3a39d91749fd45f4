"""The scripts run, on small inputs; benchmarks are run by who needs their figures."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT, needs_posix

SCRIPTS = ROOT / "scripts"


def test_nano_trains_a_gpt_and_samples_from_it(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    import nano

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(400)))
    words = [str(text), "--steps", "4", "--prompt", "7 is"]

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
    assert gptmini("train", *further)[0] == 0


@needs_posix
def test_torture_loses_no_run():
    command = [sys.executable, str(SCRIPTS / "torture.py"), "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    words = done.stdout.split()
    assert words[:2] == ["2", "runs,"]
    assert int(words[2]) > 0
    assert words[6:] == ["2", "equal", "ends,", "0", "lost"]


def test_the_page_of_commands_is_that_of_their_help(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import write_commands

    described = write_commands.describe_commands()
    assert write_commands.PAGE.read_text() == described, "run scripts/write_commands.py"


def test_the_tables_of_the_pages_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from bench.results import PAGES, Results

    results = Results.read()
    for page in PAGES:
        text = page.read_text()
        assert "<!-- table " in text
        assert results.rewrite(text) == text, page


def test_a_table_compares_with_the_best_peer_of_each_row(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from bench.results import Table

    table = Table("speed", "s", ["peer", "ours", "peer / ours"], peers=("eager", "compiled"))
    seconds = {
        "small": {"eager": [2.0, 3.0, 2.0], "compiled": [1.0, 9.0, 4.0], "ours": [1.0, 2.0, 1.0]},
        "large": {"compiled": [8.0], "ours": [16.0]},
    }
    for row, columns in seconds.items():
        for column, runs in columns.items():
            for value in runs:
                table.append(row, column, value)
    assert table.draw()[2:] == [
        "| small | eager | 1.00 | 2.00 x (1.50 to 2.00) |",
        "| large | compiled | 16.0 | 0.50 x |",
    ]
