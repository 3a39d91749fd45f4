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
    assert to_first["verdict"] == "worse"


def test_verdicts_distinguish_a_difference_from_the_spread():
    first = variant("a", 2.0, 2.1, 2.2)
    (row,) = differences(first, variant("b", 2.01, 2.1, 2.22))
    assert row == ["b", "+0.0100", "0.0248", "0.225", "3 pairs", "unresolved"]
    (row,) = differences(first, variant("b", 3.0, 3.12, 3.2))
    assert row[-1] == "worse"
    (row,) = differences(first, variant("b", 1.0, 1.12, 1.2))
    assert row[-1] == "better"
    (row,) = differences(variant("a", 2.0), variant("b", 3.0))
    assert row == ["b", "+1.0000", "", "", "1+1", "one run: spread unknown"]
    text = variants.format_comparison([variant("a", 2.0), variant("b", 3.0)])
    few = "with fewer than 3 seeds a verdict may be luck, and unresolved is not equal"
    assert text.endswith(f"\n\n{few}")
    assert few not in variants.format_comparison([first, first])


def test_hardly_any_training_gets_a_warning():
    one, two = variant("a", 2.0), variant("b", 2.0)
    for steps, is_few in (12, True), (500, False), (0, False):  # imported models make no steps
        for each in (one, two):
            each.runs[0] = replace(each.runs[0], step=steps)
        text = variants.format_comparison([one, two])
        assert ("warning: all were best by step 12; longer training may order" in text) == is_few


def test_each_further_comparison_asks_for_more():
    """Alone, b is worse; beside another, these runs do not show it."""
    first, b = variant("a", 2.0, 2.1, 2.2), variant("b", 2.5, 2.7, 2.6)
    c = variant("c", 2.01, 2.1, 2.22)
    (alone,) = differences(first, b)
    beside, _ = differences(first, b, c)
    assert beside[1] == alone[1]
    assert float(beside[2]) > float(alone[2])
    assert "corrected for 2 comparisons" in variants.format_comparison([first, b, c])
    assert "corrected" not in variants.format_comparison([first, b])


def test_windows_of_other_lengths_get_a_warning():
    one, two = variant("a", 2.0), variant("b", 2.0)
    assert "warning" not in variants.format_comparison([one, two])
    two.runs[0] = replace(two.runs[0], seq_len=32)
    assert "warning: windows of 32, 64 tokens" in variants.format_comparison([one, two])


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
    text = variants.format_comparison([one])
    assert "best checkpoint, on the validation part\n" in text
    assert "±" not in text
    one.runs[0] = replace(one.runs[0], split="test", whole=False)
    assert "checkpoint, on some of the test part\n" in variants.format_comparison([one])
    one = variant("a", 2.0, 2.1)
    assert "±: standard deviation over seeds" in variants.format_comparison([one])


def test_the_tables_fit_80_columns():
    many = [variant(name, 1.7001, 1.7002, 1.7003) for name in ("mha", "gqa:2", "window:64")]
    for each in many:
        each.parameters = 124_439_808
    lines = variants.format_comparison(many).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split()[1:] == "124,439,808 1.7002 ± 0.0001 32,768 10,000 ± 0".split()


def test_figures_that_are_missing_leave_their_cells_empty():
    bare = variant("a", 2.0)
    bare.runs[0] = replace(bare.runs[0], tokens_per_second=None)
    assert variants.build_rows([bare])[1] == ["a", "1,000", "2.0000", "32,768", ""]
