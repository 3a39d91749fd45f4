"""Make tokenizers of the files of other models: which tokens they have, begin and end a text with.

Loading one that a run has saved is the core's: tokenizer/foreign.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptmini.console import warn
from gptmini.errors import DataError, shorten
from gptmini.tokenizer.foreign import ForeignTokenizer, find_special_tokens, load_library
from gptmini.tokenizer.tokenizers import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


def adopt_tokenizer(
    file: str,
    path: Path,
    vocab_size: int | None = None,
    end_tokens: Sequence[int | str | None] = (),
    bos_token: int | str | None = None,
    chat_template: str | None = None,
    template_tokens: dict[str, str] | None = None,
) -> ForeignTokenizer:
    """Make the tokenizer of a model with `vocab_size` tokens of the content of a tokenizer.json.

    A new model, None, has those of the file. `end_tokens`, numbers or names, end a text; whatever
    is not special is ignored. The end-of-text token is the one that the file puts before texts; or
    else `<|endoftext|>`, `bos_token`, or the first of `end_tokens`. Raises ValueError for a damaged
    file, DataError, which names `path`, for one that is another model's.
    """
    library = load_library(file)
    if vocab_size is None:
        vocab_size = 1 + max(library.get_vocab().values())
    special_tokens = find_special_tokens(library, vocab_size)
    names: dict[int | str | None, str] = {}
    for name, number in special_tokens.items():
        names[number] = name
        names[name] = name
    added = library.get_added_tokens_decoder()
    last = max((n for n in library.get_vocab().values() if n not in added), default=-1)
    if last >= vocab_size:
        raise DataError(
            f"{path}: token {last} is beyond the model's vocabulary of {vocab_size}; restore the "
            f"tokenizer of this model"
        )
    first = _find_added_bos(library, path)
    end_names = [names[end] for end in end_tokens if end in names]
    if first in names and END_OF_TEXT in names:
        end_names.append(END_OF_TEXT)
    candidates = [names[each] for each in (first, END_OF_TEXT, bos_token) if each in names]
    candidates += end_names
    if not candidates:
        raise DataError(f"{path}: no token ends a document; add {END_OF_TEXT} to added_tokens")
    return ForeignTokenizer(
        file,
        library,
        vocab_size,
        candidates[0],
        end_names,
        first in names,
        chat_template,
        template_tokens,
    )


def _find_added_bos(library: "Library", path: Path) -> int | None:
    """Return the token that the post-processor puts before texts; warn of all others."""
    text = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a").ids
    n_before = next((n for n in range(len(whole)) if whole[n : n + len(text)] == text), 0)
    others = whole[1:n_before] + whole[n_before + len(text) :]
    if others:
        names = " ".join(str(library.id_to_token(number)) for number in others)
        warn(
            f"{path}: post_processor: {shorten(names)} is not put around texts; write it there, "
            f"with --special"
        )
    return whole[0] if n_before else None
