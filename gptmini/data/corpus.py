"""From a configuration to a prepared corpus: texts, their splits, tokenizer, token files.

The cache keeps learned vocabularies and token files under the hash of content and tokenizer, so
nothing is prepared twice.
"""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np

from gptmini import files
from gptmini.config.settings import Config, DataConfig
from gptmini.console import format_count, show_byte_progress
from gptmini.data import hub_dataset, token_file
from gptmini.data.text import Split, Text, find_text, spool_stdin
from gptmini.data.token_file import Corpus, TokenFile
from gptmini.errors import DataError, GptminiError, MachineError, describe_os_error
from gptmini.tokenizer.choose import choose_tokenizer
from gptmini.tokenizer.chunks import TextChunk, count_utf8_bytes
from gptmini.tokenizer.load import create_tokenizer, from_dict
from gptmini.tokenizer.tokenizers import Tokenizer

MAX_HELD_OUT_BYTES = 1_500_000  # evaluating on more takes time and adds little precision
MAX_LEARNED_FROM_BYTES = 10_000_000  # of text that a vocabulary is learned from
ENOUGH = 1.15  # times what a text needs as it is cut, since splits end between words
SHORT_ROW = 256  # tokens
STALE_SECONDS = 86_400


@dataclass(frozen=True)
class TrainingText:
    """The texts that a configuration names, not yet tokens; one for each weight.

    `held_out` is the text to validate on, if that is another.
    """

    texts: list[Text]
    held_out: Text | None

    @property
    def bytes(self) -> int:
        """Size on disk of all that is not held out as another text."""
        return sum(text.bytes for text in self.texts)

    @property
    def has_conversations(self) -> bool:
        """Whether some of the documents, held out or not, are conversations."""
        texts = self.texts if self.held_out is None else [*self.texts, self.held_out]
        return any(text.has_conversations for text in texts)

    @cached_property
    def content(self) -> str:
        """SHA-256 (hex) of the texts and their splits, as of the corpus that they become."""
        digests = [text.hash_split("training") for text in self.texts]
        if self.held_out is None:
            digests += [text.hash_split("validation") for text in self.texts]
        else:
            digests.append(self.held_out.digest)
        return _join_digests(digests)

    def iter_chunks(self) -> Iterator[TextChunk]:
        """Yield what is trained on; DataError if a file has changed since it was found."""
        return chain.from_iterable(text.iter_training() for text in self.texts)


def prepare_corpus(
    config: Config, with_test: bool = False, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Prepare the tokens of a configuration's text, or take them from the cache.

    The test part is prepared only on request, so nothing can be chosen on it by accident. A
    `tokenizer` that is given is used in place of the one which the configuration names.
    Raises DataError for a text that cannot be used, MachineError for a cache that cannot.
    """
    with open_text(config.data) as text:
        return encode_text(text, config, with_test, tokenizer)


def prepare_text(settings: DataConfig, tokenizer: Tokenizer) -> TokenFile:
    """Encode all of a text with an existing tokenizer; raises as prepare_corpus does."""
    with _open_cache(settings) as paths:
        return _encode_whole(find_text(paths, settings), tokenizer)


def has_same_text(settings: DataConfig, content: str, paths: list[str]) -> bool:
    """Return whether `paths` share a file with a run's text, or are that text by other names.

    `settings` are the run's, and `content` the SHA-256 of its text; empty if it has none.
    """
    if not content or "-" in paths:  # which can be read once
        return False
    if set(settings.path) & set(paths):
        return True
    local = [path for path in settings.path if not hub_dataset.is_dataset_name(path)]
    with suppress(GptminiError):  # its own files may be gone
        own, given = (
            {os.path.realpath(file.path) for file in find_text(names, settings).files}
            for names in (local, paths)
        )
        if own & given:
            return True
    with suppress(GptminiError), open_text(settings.model_copy(update={"path": paths})) as text:
        return text.content == content
    return False


@contextmanager
def open_text(settings: DataConfig) -> Iterator[TrainingText]:
    """Find the files of a text, to read it and to prepare it in the cache; raises as above."""
    with _open_cache(settings) as paths:
        texts = []
        for group in [[path] for path in paths] if settings.weights else [paths]:
            text = find_text(group, settings)
            share = settings.validation or min(0.1, MAX_HELD_OUT_BYTES / (text.bytes + 1))
            share = 0.0 if settings.validation_path is not None else share
            texts.append(replace(text, validation=share, test=settings.test or 0.0))
        other = settings.validation_path
        yield TrainingText(texts, None if other is None else find_text(other, settings))


def encode_text(
    text: TrainingText, config: Config, with_test: bool = False, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Prepare the tokens of an open text; raises as prepare_corpus does."""
    settings = config.data
    if tokenizer is None:
        tokenizer = _get_tokenizer(config, text)

    wanted: list[Split] = ["training"]
    if text.held_out is None:
        wanted.append("validation")
    if with_test and settings.test is not None:
        wanted.append("test")
    found: dict[Split, list[TokenFile]] = {"training": [], "validation": [], "test": []}
    for each in text.texts:
        for split, file in _get_token_files(each, wanted, tokenizer).items():
            found[split].append(file)
    if text.held_out is not None:
        found["validation"] = [_encode_whole(text.held_out, tokenizer)]
    names = ["standard input" if path == "-" else path for path in settings.path]
    name = ", ".join(names).encode("utf-8", "backslashreplace").decode()  # paths may hold any bytes
    corpus = Corpus(
        name, tokenizer, found["training"], found["validation"], found["test"], text.content
    )
    _check_length(corpus, config, text)
    return corpus


@contextmanager
def _open_cache(settings: DataConfig) -> Iterator[list[str]]:
    """Open the cache to prepare a text in; yields the text's paths."""
    cache = files.get_cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for path in cache.glob(".tmp-*"):  # of processes that were killed
            with suppress(FileNotFoundError):  # of one that has ended since
                if path.stat().st_mtime < time.time() - STALE_SECONDS:
                    path.unlink()
        with spool_stdin(settings.path, cache) as paths:
            yield paths
    except OSError as error:
        raise MachineError(
            f"{error.filename or cache}: {describe_os_error(error)}; choose another folder with "
            f"GPTMINI_CACHE"
        ) from None


def _check_length(corpus: Corpus, config: Config, text: TrainingText) -> None:
    """DataError if a split is shorter than one window and the token after it.

    It names how long a text all splits of which are long enough would be.
    """
    window = config.seq_len + 1
    held_out = text.texts if text.held_out is None else [text.held_out]
    pairs = [
        *zip(corpus.training, text.texts, strict=True),
        *zip(corpus.validation, held_out, strict=True),
        *zip(corpus.test, text.texts, strict=False),  # prepared only on request
    ]
    for file, source in pairs:
        if len(file) >= window:
            continue
        amount = format_count(source.bytes, "byte")
        if source.has_conversations:
            count = sum(chunk.messages is not None for chunk in source.iter_chunks())
            amount = f"{format_count(count, 'conversation')}, {amount}"
        shares = [1 - source.validation - source.test, source.validation, source.test]
        bytes_per_token = max(1, file.text_bytes / max(1, len(file)))
        needed = ENOUGH * window * bytes_per_token / min(filter(None, shares))
        unit = 10 ** int(math.log10(needed))
        remedy = f"training needs about {math.ceil(needed / unit) * unit:,}"
        if config.seq_len > SHORT_ROW:
            remedy += f", or fewer with --set train.seq_len={SHORT_ROW}"
        raise DataError(f"{source.name}: too short: {amount}; {remedy}")


def _join_digests(digests: list[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _get_tokenizer(config: Config, text: TrainingText) -> Tokenizer:
    """Get the tokenizer requested or chosen; one learned from the training text is cached."""
    kind = config.tokenizer.kind
    vocab_size = config.tokenizer.vocab_size
    chat = text.has_conversations
    if kind in ("auto", "bpe") and vocab_size is None:
        text_bytes = sum(each.spans["training"][1] for each in text.texts)
        train = config.train
        training_tokens = None
        if train.minutes is not None and "steps" in train.model_fields_set:
            training_tokens = train.steps * train.batch_size * config.seq_len
        kind, vocab_size = choose_tokenizer(kind, text_bytes, config.model.d_model, training_tokens)
    if kind not in ("char", "bpe"):
        return create_tokenizer(kind, chat=chat)
    digest = _join_digests([each.hash_split("training") for each in text.texts])[:20]
    name = f"{digest}-{kind}-{vocab_size}{'-chat' if chat else ''}.tokenizer"
    path = files.get_cache_folder() / name
    with suppress(OSError, ValueError):  # not there yet, or damaged
        return from_dict(json.loads(files.read_checked(path)))
    tokenizer = learn_tokenizer(kind, vocab_size, text.texts, chat)
    files.write_checked(path, tokenizer.to_json().encode())
    return tokenizer


def learn_tokenizer(kind: str, vocab_size: int | None, texts: list[Text], chat: bool) -> Tokenizer:
    """Learn a tokenizer from the training part of texts.

    `char` reads all of it, `bpe` every n-th chunk of large ones.

    To `chat`, it gets the special tokens and the template of ChatML.
    """
    size = sum(text.bytes for text in texts)
    every = 1 if kind == "char" else max(1, size // MAX_LEARNED_FROM_BYTES)
    chunks = chain.from_iterable(text.iter_training() for text in texts)
    with show_byte_progress("learning the vocabulary", size // every) as advance:
        learned = _iter_learned_texts(islice(chunks, 0, None, every), advance)
        return create_tokenizer(kind, vocab_size, learned, chat)


def _iter_learned_texts(
    chunks: Iterable[TextChunk], advance: Callable[[int], object]
) -> Iterator[str]:
    """Yield what a vocabulary is learned from: of conversations also the roles, as in ChatML."""
    for text, _, messages, _ in chunks:
        if messages is None:
            yield text
        else:
            for message in messages:
                yield f"{message['role']}\n{message['content']}\n"
        advance(count_utf8_bytes(text))


def measure_tokenizer(tokenizer: Tokenizer, paths: list[str]) -> dict[str, float]:
    """Measure how a tokenizer compresses texts, and the share of its vocabulary they use."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with spool_stdin(paths, Path(tempfile.gettempdir())) as names:
        text = find_text(names, DataConfig())
        with show_byte_progress("measuring the tokenizer", text.bytes) as advance:
            for chunk in text.iter_chunks():
                counts += np.bincount(tokenizer.encode(chunk.text), minlength=tokenizer.vocab_size)
                advance(count_utf8_bytes(chunk.text))
    text_bytes = int(counts @ tokenizer.compute_byte_lengths())
    total = int(counts.sum())
    return {
        "bytes": text_bytes,
        "tokens": total,
        "bytes_per_token": round(text_bytes / max(1, total), 3),
        "coverage": round(float((counts > 0).mean()), 3),
    }


def _encode_whole(text: Text, tokenizer: Tokenizer) -> TokenFile:
    """Open the token file of a whole text."""
    return _get_token_files(text, ["training"], tokenizer)["training"]


def _get_token_files(
    text: Text, splits: list[Split], tokenizer: Tokenizer
) -> dict[Split, TokenFile]:
    """Open the token files of some splits in the cache; write those missing or damaged.

    However many that are, the text is encoded in one pass.
    """
    opened: dict[Split, TokenFile] = {}
    missing: dict[Split, Path] = {}
    for split in splits:
        digests = (text.hash_split(split)[:20], tokenizer.chat_fingerprint[:20])
        path = files.get_cache_folder() / f"{'-'.join(digests)}.bin"
        try:
            opened[split] = TokenFile(path, tokenizer)
        except DataError:
            missing[split] = path
    if missing:
        with show_byte_progress("preparing the tokens", text.bytes) as advance:
            chunks = text.iter_splits(missing)
            encoded = token_file.encode_chunks(chunks, tokenizer, advance)
            token_file.write_token_files(missing, encoded, tokenizer)
        opened |= {split: TokenFile(path, tokenizer) for split, path in missing.items()}
    return opened
