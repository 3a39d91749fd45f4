"""Every quoted figure is that of scripts/results.json, and the machinery that writes both works."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

RESULTS = ROOT / "scripts" / "results.json"
FACTS: dict[str, Any] = {
    "machine": {
        "processor": "abacus",
        "cores": 2,
        "threads": 2,
        "memory GiB": 8,
        "system": "Linux",
    },
    "commit": "abc1234",
    "date": "2026-01-01",
    "versions": {"Python": "3.11"},
    "minutes": {},
    "benches": {
        "speed": {
            "extent": "quick",
            "tables": {
                "speed": {
                    "unit": "tokens/s",
                    "shown": ["ours", "theirs", "ours / theirs", "ours - theirs"],
                    "digits": 3,
                    "rows": {
                        "1 x 32": {"ours": [3000.0, 1250.0, 1200.0], "theirs": [1000.0] * 3},
                        "32 x 32": {"ours": [0.54321]},
                    },
                }
            },
        }
    },
}
ONE_FAILS = """
import json, sys
from pathlib import Path
name, extent, out = sys.argv[1], sys.argv[2], Path(sys.argv[3].removeprefix("--json="))
with Path("{log}").open("a") as log:
    log.write(name + extent + "\\n")
if name == "memory":
    sys.exit("no such peer")
table = {{"unit": "s", "shown": ["a"], "digits": 3, "rows": {{"row": {{"a": [1.0]}}}}}}
out.write_text(json.dumps({{name: table}}))
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def test_every_quoted_figure_and_table_is_that_of_the_results():
    from bench.quote import list_pages, rewrite
    from bench.results import Results

    results = Results.read()
    for page in list_pages():
        text = page.read_text("utf-8")
        new, unknown = rewrite(text, results)
        assert unknown == [], page
        assert new == text, f"{page}: run python scripts/bench quote"


@pytest.mark.parametrize(
    ("written", "rewritten"),
    [
        ("about 9.9 x<!-- speed: 1 x 32: ours / theirs -->", "about 1.2 x"),
        ("| 7<!-- speed: 1 x 32: ours -->, in 9 s", "| 1,250, in 9 s"),
        ("9,999.00 a second<!-- speed: 1 x 32: ours -->", "1,250.00 a second"),
        ("9999 a second<!-- speed: 1 x 32: ours -->", "1250 a second"),
        ("bfloat16 in 5 to 7, int8<!-- speed: 32 x 32: ours -->", "bfloat16 in 5 to 1, int8"),
        ("0.1<!-- speed: 32 x 32: ours -->", "0.5"),
        ("80 %<!-- speed: 32 x 32: ours * 100 -->", "54 %"),
        ("1<!-- speed: 1 x 32: ours / 60 -->", "21"),
        ("+1<!-- speed: 1 x 32: ours - theirs -->", "+250"),
        (
            "1 (2<!-- speed: 1 x 32: lowest ours / theirs --> to "
            "3.0<!-- speed: 1 x 32: highest ours / theirs -->)",
            "1 (1 to 3.0)",
        ),
        ("# loss 1.99<!-- speed: 32 x 32: ours --> on two cores", "# loss 0.54 on two cores"),
    ],
)
def test_a_figure_keeps_its_decimals_and_separators(written: str, rewritten: str):
    from bench.quote import COMMENT, rewrite
    from bench.results import Results

    new, unknown = rewrite(written, Results(FACTS))
    assert unknown == []
    assert COMMENT.sub("", new) == rewritten
    assert COMMENT.findall(new) == COMMENT.findall(written)
    assert rewrite(new, Results(FACTS)) == (new, [])


def test_a_table_is_drawn_with_medians_of_values_and_of_ratios():
    from bench.quote import rewrite
    from bench.results import Results

    new, unknown = rewrite("before\n<!-- table speed -->\nold\n<!-- end -->\nafter", Results(FACTS))
    assert unknown == []
    assert new.splitlines() == [
        "before",
        "<!-- table speed -->",
        "| tokens/s | ours | theirs | ours / theirs | ours - theirs |",
        "| --- | --- | --- | --- | --- |",
        "| 1 x 32 | 1,250 | 1,000 | 1.25 x (1.20 to 3.00) | +250.000 (+200.000 to +2000.000) |",
        "| 32 x 32 | 0.543 |  |  |  |",
        "<!-- end -->",
        "after",
    ]


def test_a_page_can_say_where_its_figures_are_from():
    from bench.results import Results

    about = " ".join(Results(FACTS).draw("about").split())
    for fact in ("abc1234", "2026-01-01", "2 cores (abacus, 8 GiB", "Python 3.11"):
        assert fact in about


def test_quote_names_every_unknown_key_with_its_file_and_line(tmp_path, capsys):
    from bench import quote

    results = tmp_path / "results.json"
    results.write_text(json.dumps(FACTS))
    page = tmp_path / "page.md"
    page.write_text(
        "1 x<!-- speed: 1 x 32: ours -->\n"
        "1 x<!-- speed: 1 x 64: ours --> 2<!-- speed: 1 x 32: others -->\n"
        "none<!-- speed: 1 x 32: ours -->\n"
        "<!-- a comment: of another kind -->\n"
        "<!-- table sped -->\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit) as ended:
        quote.main(["--results", str(results), str(page)])
    assert ended.value.code == 1
    named = capsys.readouterr().err.splitlines()
    keys = ["speed: 1 x 32: others", "speed: 1 x 64: ours", "speed: 1 x 32: ours", "table sped"]
    assert len(named) == 4
    for line, n, key in zip(named, (2, 2, 3, 5), keys, strict=True):
        assert line.startswith(f"{page}:{n}: {key}: ")
    assert page.read_text().startswith("1,250 x<!-- speed")  # what is known is written
    page.write_text("1 x<!-- speed: 1 x 32: ours -->\n")
    with pytest.raises(SystemExit) as ended:
        quote.main(["--results", str(results), str(page)])
    assert ended.value.code == 0


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the benches: one of them fails. Returns the log of what has run."""
    from bench import all as bench_all

    log = tmp_path / "log.txt"
    log.touch()
    script = tmp_path / "bench.py"
    script.write_text(ONE_FAILS.format(log=log))
    monkeypatch.setattr(bench_all, "COMMAND", (sys.executable, str(script)))
    return log


def test_a_bench_that_fails_is_named_and_the_others_go_on(tmp_path, measured, capsys):
    from bench import all as bench_all
    from bench.results import Results

    out = tmp_path / "results.json"
    results = bench_all.open_results(out, "abc1234", True)
    assert bench_all.measure_all(out, results, ["first", "memory", "serve"], "quick") == ["memory"]
    assert "memory: failed" in capsys.readouterr().out
    assert Results.read(out).find("serve: row: a") == 1.0
    assert Results.read(out).facts["commit"] == "abc1234"


def test_what_a_kill_left_is_not_measured_again(tmp_path, measured, monkeypatch):
    from bench import all as bench_all

    out = tmp_path / "results.json"
    run_bench = bench_all.run_bench

    def kill_at_serve(name: str, extent: Any) -> Any:
        if name == "serve":
            raise KeyboardInterrupt
        return run_bench(name, extent)

    names = ["first", "attention", "serve"]
    monkeypatch.setattr(bench_all, "run_bench", kill_at_serve)
    with pytest.raises(KeyboardInterrupt):
        results = bench_all.open_results(out, "abc1234", True)
        bench_all.measure_all(out, results, names, "quick")
    monkeypatch.setattr(bench_all, "run_bench", run_bench)
    results = bench_all.open_results(out, "abc1234", False)
    assert results["benches"].keys() == {"first", "attention"}
    assert bench_all.measure_all(out, results, names, "quick") == []
    ran = [f"{name}--extent=quick" for name in names]
    assert measured.read_text().splitlines() == ran
    # A full measurement takes the place of a quick one; the code that is measured, of all.
    bench_all.measure_all(out, results, ["first"], "full")
    bench_all.measure_all(out, results, ["first"], "quick")
    assert measured.read_text().splitlines() == [*ran, "first--extent=full"]
    changed = bench_all.open_results(out, "def5678", True)
    assert changed["benches"] == {}
    assert changed["minutes"].keys() >= {"first quick", "first full"}
