from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmini.config.yamlfile import dump, parse, parse_assignment, read_file
from gptmini.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e-3", 1e-3),
        ("3E4", 3e4),
        ("1.5", 1.5),
        ("-.5", -0.5),
        ("12", 12),
        ("-12", -12),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # YAML 1.1 would read these as a boolean, an octal number, a time and a date
        ("no", "no"),
        ("off", "off"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'3'", "3"),
        ("[1, 2.0, a]", [1, 2.0, "a"]),
        ("{1: a, no: b, <<: c}", {"1": "a", "no": "b", "<<": "c"}),
    ],
)
def test_scalars_mean_what_they_look_like(text, value):
    found = parse(text, "x")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", ["x:3", "duplicate key a", "line 1"]),
        ("a: &k 1\nb: *k", ["x:1", "anchors"]),
        ("a: !!python/object:os.system 1", ["x:1", "tag"]),
        ("a: [1, 2", ["x:", "fix the YAML"]),
        ("a: 1\n---\nb: 2", ["x:2", "another document"]),
        ("? [1, 2]\n: 3", ["plain name"]),
        ("a: [{b: 1, b: 2}]", ["x:1", "duplicate key b"]),
        ("&k a: 1", ["x:1", "anchors"]),
        ("[" * 500 + "]" * 500, ["nested too deeply"]),
        ("a: " + "1" * 200, ["digits"]),
        ("a: \x00", ["printable"]),
    ],
)
def test_a_refusal_names_the_place_and_the_remedy(text, words):
    with pytest.raises(ConfigError) as error:
        parse(text, "x")
    (line,) = error.value.lines
    assert all(word in line for word in words)
    assert ";" in line


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no settings"),
        (b"[1]", "no settings"),
        (b"\xff\xfea\x00", "UTF-8"),
        (b"a: " + b"x" * (4 << 20), "4 MiB"),
    ],
)
def test_files_that_are_not_configurations(tmp_path: Path, content, word):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=word):
        read_file(path)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_file(path)


def test_lines_of_keys(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("# a comment\na:\n  b: 1\n  c: {d: 2}\n")
    data, lines = read_file(path)
    assert data == {"a": {"b": 1, "c": {"d": 2}}}
    assert lines == {("a",): 2, ("a", "b"): 3, ("a", "c"): 4, ("a", "c", "d"): 4}


def test_assignments():
    assert parse_assignment("a.b=3e-4") == (("a", "b"), 3e-4)
    assert parse_assignment("a=[1, 2]") == (("a",), [1, 2])
    assert parse_assignment("a . b = 1") == (("a", "b"), 1)
    for wrong in ("a", "a..b=1", "=1", " . =1"):
        with pytest.raises(ConfigError, match="not an assignment"):
            parse_assignment(wrong)


plain = st.text(st.characters(exclude_categories=["Cs"]))
leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | plain
    | st.floats(allow_nan=False, allow_infinity=False)
)
keys = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@given(st.dictionaries(keys, leaf | st.lists(leaf, max_size=3) | st.dictionaries(keys, leaf)))
def test_what_is_written_is_read_back(data):
    assert parse(dump(data), "x") == data


def test_a_line_break_is_written_as_one_line():
    assert dump({"start": "\n"}) == 'start: "\\n"\n'


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029", "\ufeff", "\r", "\t", "\0"])
def test_marks_of_yaml_are_read_back(mark):
    data = {"start": f"a{mark}b", "stop": [mark, f"{mark} a", f"a {mark}"]}
    assert parse(dump(data), "x") == data


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        parse(text, "x")
    except ConfigError as error:
        assert len(error.lines) == 1
