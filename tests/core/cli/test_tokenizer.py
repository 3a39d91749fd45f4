"""`gptmini tokenizer`: learn, encode, decode, describe."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gptmini.tokenizer.load import load_tokenizer
from tests.support import SMALL


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_tokenizer_is_trained_used_and_inspected(gptmini, text_file: Path, monkeypatch):
    words = ["tokenizer", "train", str(text_file), "--vocab-size", "300", "--out", "t"]
    code, out, err = gptmini(*words)
    assert (code, out) == (0, "")
    assert "t.json: 300 tokens" in err
    code, _, err = gptmini(*words, "--set", "tokenizer.kind=char")
    assert (code, "tokenizer.kind: applies to settings of data alone" in err) == (2, True)
    learned = load_tokenizer(Path("t.json"))
    code, out, _ = gptmini("tokenizer", "encode", "t.json", "the lazy dog")
    assert (code, out.split()) == (0, [str(t) for t in learned.encode("the lazy dog")])
    text = "the döner\r\n \x1b東\n".encode()
    typed(monkeypatch, text)
    _, tokens, _ = gptmini("tokenizer", "encode", "t.json")
    typed(monkeypatch, tokens.encode())
    piped = subprocess.run(
        [sys.executable, "-m", "gptmini", "tokenizer", "decode", "t.json"],
        input=tokens.encode(),
        capture_output=True,
        check=True,
    )
    assert piped.stdout == text
    code, out, _ = gptmini("tokenizer", "info", "t.json", "--data", str(text_file), "--json")
    facts = json.loads(out)
    size, count = text_file.stat().st_size, len(learned.encode(text_file.read_text()))
    assert (facts["kind"], facts["vocab_size"]) == ("bpe", 300)
    assert (facts["bytes"], facts["tokens"]) == (size, count)
    assert facts["bytes_per_token"] == pytest.approx(size / count, abs=1e-3)
    assert 0 < facts["coverage"] < 0.5  # most bytes never occur
    assert " jumps" in facts["longest_tokens"]
    lines = gptmini("tokenizer", "info", "t.json", "--data", str(text_file))[1].splitlines()
    assert lines[1] == "vocabulary       300 tokens"
    assert lines[2].startswith("longest tokens   ␣")
    assert lines[3:5] == ["special tokens   <|endoftext|>", "texts end with   <|endoftext|>"]
    assert lines[5] == f"text             {size:,} bytes, {count:,} tokens"
    assert lines[7] == (
        f"vocabulary used  {facts['coverage']:.1%} of its tokens occur in this text"
    )
    assert "longest" not in gptmini("tokenizer", "info", "byte")[1]
    train = ["train", "--data", str(text_file), "--set", "tokenizer.kind=t.json", *SMALL]
    assert gptmini(*train)[0] == 0
    assert gptmini("tokenizer", "encode", "runs/text", "dog") == gptmini(
        "tokenizer", "encode", "t.json", "dog"
    )


def test_a_terminal_shows_the_pieces_beside_the_numbers(gptmini, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    out = gptmini("tokenizer", "encode", "byte", "a é<|endoftext|>", "--special")[1]
    assert out.splitlines() == [
        *("token  text", "   97  a", "   32  ␣", "  195  é1/2", "  169  é2/2", "  256  <doc>")
    ]


def test_a_closed_pipe_ends_it_quietly(text_file: Path):
    command = [sys.executable, "-m", "gptmini", "tokenizer", "encode", "byte"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        process.stdin.write(text_file.read_bytes() * 100)
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_special_tokens_are_read_on_request(gptmini):
    text = "a<|endoftext|>b"
    for options, expected in (([], [*text.encode()]), (["--special"], [97, 256, 98])):
        code, out, _ = gptmini("tokenizer", "encode", "byte", text, *options)
        assert (code, out.split()) == (0, [str(token) for token in expected])


def test_only_a_file_of_its_own_kind_is_replaced(gptmini, text_file: Path):
    Path("other.json").write_text('{"model": {"vocab": {"format": 1}}}')
    for out, expected in [("own", 0), ("own", 0), ("other", 2)]:
        code, _, err = gptmini("tokenizer", "train", "text.txt", "--out", out, "--vocab-size=260")
        assert (code, "did not write" in err) == (expected, expected == 2)
    assert load_tokenizer(Path("own.json")).vocab_size == 260
    assert Path("other.json").read_text().startswith('{"model"')
