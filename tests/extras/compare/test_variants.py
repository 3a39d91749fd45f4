"""How measured variants are reported."""

from dataclasses import replace

import pytest

from gptmini.extras.compare import variants
from tests.extras.compare.samples import variant


def differences(*compared) -> list[list[str]]:
    """The rows of differences, without their headings."""
    return variants.build_difference_rows(list(compared))[1:]


def test_variants_are_compared_with_the_first():
    pair = [variant("a", 2.0, 2.1, 2.2), variant("b", 2.5, 2.7, 2.6)]
    found = variants.to_json(pair)
    first, second = found["variants"]
    assert first["bits_per_byte"] == pytest.approx(2.1)
    assert first["bits_per_byte_spread"] == pytest.approx(0.1)
    assert first["to_first"] is None
    to_first = second["to_first"]
    assert to_first["difference"] == pytest.approx(0.5)
    assert to_first["counts"] == (3,)  # pairs that differ by 0.5, 0.6 and 0.4
    assert to_first["half_width"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert to_first["confidence"] == 0.95
    assert to_first["p"] == to_first["p_corrected"] == pytest.approx(0.0131, abs=1e-4)
    assert (to_first["verdict"], found["notable_difference"]) == ("worse", 0.01)


def test_verdicts_distinguish_a_difference_from_the_spread():
    first = variant("a", 2.0, 2.1, 2.2)
    (row,) = differences(first, variant("b", 2.01, 2.1, 2.22))
    assert row == ["b", "+0.0100", "0.0248", "0.225", "3 pairs", "10", "unresolved"]
    (row,) = differences(first, variant("b", 3.0, 3.12, 3.2))
    assert row[-1] == "worse"
    (row,) = differences(first, variant("b", 1.0, 1.12, 1.2))
    assert row[-1] == "better"
    (row,) = differences(variant("a", 2.0), variant("b", 3.0))
    assert row == ["b", "+1.0000", "", "", "1+1", "", "one run: spread unknown"]
    text = variants.format_comparison([variant("a", 2.0), variant("b", 3.0)])
    assert text.endswith("\n\none run says nothing of the spread over seeds; give several\n")


def test_each_further_comparison_asks_for_more():
    """Alone, b is worse; beside two others, these runs do not show it."""
    first, b = variant("a", 2.0, 2.1, 2.2), variant("b", 2.5, 2.7, 2.6)
    others = [variant("c", 2.01, 2.1, 2.22), variant("d", 2.0, 2.2, 2.1)]
    (alone,) = differences(first, b)
    assert alone[-1] == "worse"
    beside, *_ = differences(first, b, *others)
    assert beside[1] == alone[1]
    assert float(beside[2]) > float(alone[2])
    assert float(beside[3]) == pytest.approx(3 * float(alone[3]), abs=2e-3)
    for count in (2, 3):
        text = variants.format_comparison([first, b, *others][: count + 1])
        assert f"corrected for {count} comparisons" in text
    assert "corrected" not in variants.format_comparison([first, b])


def test_runs_of_other_seeds_are_compared_by_their_means():
    first, second = variant("a", 2.0, 2.1, 2.2), variant("b", 2.5, 2.7, 2.6)
    second.runs = [replace(run, seed=run.seed + 10) for run in second.runs]
    (row,) = differences(first, second)
    assert row[4] == "3+3"
    assert float(row[2]) == pytest.approx(2.776 * 0.1 * (2 / 3) ** 0.5, abs=1e-4)


def test_runs_measured_on_different_texts_get_a_warning():
    one, two = variant("a", 2.0), variant("b", 2.0)
    assert "warning" not in variants.format_comparison([one, two])
    two.runs[0] = replace(two.runs[0], text="another")
    assert "warning: measured on different texts" in variants.format_comparison([one, two])


def test_curves_run_over_tokens_where_all_saw_the_same_number_else_over_minutes():
    one, two = variant("a", 2.0), variant("b", 2.0)
    _, curves = variants.build_histories([one, two])
    assert curves["a"] == curves["b"] == [[(1e-6, 9.0), (2e-6, 2.0)]]
    two.runs[0].history.append((3, 120.0, 1.0))
    label, curves = variants.build_histories([one, two])
    assert "minutes" in label
    assert curves["b"] == [[(1 / 60, 9.0), (2 / 60, 2.0), (2.0, 1.0)]]


def test_the_table_says_what_was_measured():
    one = variant("a", 2.0)
    assert "bits/byte: on the validation part\n" in variants.format_comparison([one])
    one.runs[0] = replace(one.runs[0], split="test", stride=32)
    text = variants.format_comparison([one])
    assert "bits/byte: on the test part, in windows that overlap by half\n" in text
    one.runs[0] = replace(one.runs[0], split=None, stride=64)
    assert "bits/byte: on the text given\n" in variants.format_comparison([one])


def test_the_short_table_fits_80_columns_and_the_full_one_has_every_figure():
    many = [variant(name, 1.7001, 1.7002, 1.7003) for name in ("mha", "gqa:2", "window:64")]
    for each in many:
        each.parameters = 124_439_808
    lines = variants.format_table(many).splitlines()
    assert max(map(len, variants.format_comparison(many).splitlines())) <= 80
    cells = "124,439,808 1.7002 ± 0.0001 32,768 700 ± 15 10,000 ± 0"
    assert lines[2].split()[1:] == cells.split()
    full = variants.format_table(many, full=True).splitlines()
    assert len({len(line) for line in full}) == 1
    cells = [cell.strip() for cell in full[2].strip("|").split("|")]
    assert cells[7:] == ["512", "900, 800", "256 ± 0"]


def test_figures_that_are_missing_leave_their_cells_empty():
    bare = variant("a", 2.0)
    bare.runs[0] = replace(bare.runs[0], tokens_per_second=None, peak_memory=None)
    bare.decode_tokens_per_second = {}
    assert variants.format_table([bare]).splitlines()[1].split() == [
        "a",
        "1,000",
        "2.0000",
        "32,768",
    ]
    assert variants.format_table([bare], full=True).splitlines()[2].endswith(" |")
