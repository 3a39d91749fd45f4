"""Make a tokenizer from its name or a text, or load a saved one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptmini import files
from gptmini.errors import DataError, describe_os_error
from gptmini.tokenizer.bpe import WORD_PATTERN, learn_bpe
from gptmini.tokenizer.bpe_tokenizer import (
    BpeTokenizer,
    add_chat,
    create_bpe_tokenizer,
    load_published_encoding,
)
from gptmini.tokenizer.tokenizers import (
    CHAT_TEMPLATE,
    CHAT_TOKENS,
    END_OF_TEXT,
    TOKENIZER_FORMAT_VERSION,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)

USUAL_ENDS = ("</s>", "<eos>")  # what ends a text where <|endoftext|> is missing


def create_tokenizer(
    kind: str, vocab_size: int | None = None, texts: Iterable[str] = (), chat: bool = False
) -> Tokenizer:
    """Create a tokenizer of a kind; only `char` and `bpe` read `texts`.

    To `chat`, it gets the special tokens and the template of ChatML; a file keeps what it has.
    Raises DataError for an unknown kind, and for files that are missing and cannot be downloaded.
    """
    template = CHAT_TEMPLATE if chat else None
    if kind == "byte":
        return ByteTokenizer(template)
    if kind == "char":
        characters = set[str]()
        for text in texts:
            characters.update(text)
        return CharTokenizer("".join(characters), template)
    if kind == "bpe":
        n_special = 1 + len(CHAT_TOKENS) if chat else 1  # they are the last tokens
        ranks = learn_bpe(texts, (vocab_size or 0) - n_special)
        plain = create_bpe_tokenizer("bpe", WORD_PATTERN, ranks, {END_OF_TEXT: len(ranks)})
    elif kind.endswith(".json"):
        return load_tokenizer(Path(kind))
    else:
        plain = load_published_encoding(kind)
    return add_chat(plain) if chat else plain


def find_tokenizer(name: str) -> Tokenizer:
    """Find the tokenizer of a run, in a file, or of a kind that learns nothing."""
    path = Path(name)
    if path.is_dir() or (path.parent.name and path.suffix != ".json"):  # as of runs/NAME
        return load_tokenizer(path / "tokenizer.json")
    if name in ("auto", "char", "bpe"):
        raise DataError(
            f"{name}: learned from a text; give a run, or a file made by gptmini tokenizer train"
        )
    return create_tokenizer(name)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a saved tokenizer, ours or a tokenizer.json of Hugging Face.

    DataError if the file is missing, damaged or something else.
    """
    try:
        data = files.read_json(path)
        if "format" not in data and "model" in data:
            return _adopt_file(path)
        return from_dict(data)
    except OSError as error:
        raise DataError(
            f"{path}: {describe_os_error(error)}; give a run or a tokenizer file"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a complete tokenizer ({error}); restore it, or make one with gptmini "
            f"tokenizer train"
        ) from None


def _adopt_file(path: Path) -> Tokenizer:
    """Make a tokenizer of a tokenizer.json of Hugging Face."""
    from gptmini.extras.interop.adopt import adopt_tokenizer  # noqa: PLC0415 - may be missing

    return adopt_tokenizer(files.read_regular(path).decode(), path, end_tokens=USUAL_ENDS)


def from_dict(data: dict[str, Any]) -> Tokenizer:
    """Make the tokenizer whose `to_json` is `data`.

    ValueError, KeyError, TypeError or AttributeError if it is something else.
    """
    if data["format"] != TOKENIZER_FORMAT_VERSION:
        raise ValueError(f"format {data['format']}, not {TOKENIZER_FORMAT_VERSION}")
    template = data.get("chat_template")
    if not isinstance(template, str | None):
        raise ValueError("chat_template is not a text")
    if data["kind"] == "byte":
        return ByteTokenizer(template)
    if data["kind"] == "char":
        return CharTokenizer(data["characters"], template)
    if not isinstance(data["kind"], str):
        raise ValueError("kind is not a string")
    if "file" in data:
        from gptmini.tokenizer.foreign import ForeignTokenizer  # noqa: PLC0415 - few need it

        return ForeignTokenizer.from_dict(data)
    return BpeTokenizer.from_dict(data)
