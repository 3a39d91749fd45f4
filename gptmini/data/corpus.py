"""From a configuration to a prepared corpus: sources, tokenizer, token files, held-out text.

The cache keeps learned vocabularies and token files under the hash of content and tokenizer, so
nothing is prepared twice.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from gptmini import files
from gptmini.config.settings import Config, DataConfig
from gptmini.console import show_byte_progress
from gptmini.data import shards, sources, token_file
from gptmini.data.sources import Source, SourceSplit
from gptmini.data.token_file import Corpus, TokenFile
from gptmini.errors import ConfigError, DataError, MachineError, describe_os_error
from gptmini.tokenizer.choose import choose_tokenizer
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer

MAX_HELD_OUT_BYTES = 1_500_000  # bytes; evaluating on more takes time and adds little precision
MAX_LEARNED_FROM_BYTES = 10_000_000  # bytes of text that a vocabulary is learned from
TextSource = Source | SourceSplit


def prepare_corpus(config: Config, cache: Path, with_test: bool = False) -> Corpus:
    """The tokens of a configuration's text, from the cache if they are there.

    The test part is prepared only on request, so nothing can be chosen on it by accident.
    Raises DataError for a text that cannot be used, MachineError for a cache that cannot.
    """
    with _open_cache(config.data, cache) as paths:
        return _prepare(config, paths, cache, with_test)


def prepare_text(settings: DataConfig, tokenizer: Tokenizer, cache: Path) -> TokenFile:
    """All of a text in tokens of an existing tokenizer; raises as prepare_corpus."""
    with _open_cache(settings, cache) as paths:
        return _prepare_whole(paths, settings, tokenizer, cache)


def learns_vocabulary(config: Config) -> bool:
    """Whether a vocabulary is to be learned from the text and its size is not stated."""
    kind, vocab_size = config.tokenizer.kind, config.tokenizer.vocab_size
    return (
        kind in ("auto", "bpe")
        and vocab_size is None
        and shards.find_token_files(config.data.path) is None
    )


def check_paths(paths: list[str], settings: DataConfig) -> None:
    """DataError for paths that name no text and no token files."""
    if shards.find_token_files(paths) is None:
        sources.find_source(paths, settings)


@contextmanager
def _open_cache(settings: DataConfig, cache: Path) -> Iterator[list[str]]:
    """The paths of a text, and a cache to prepare it in."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _delete_stale_files(cache)
        with sources.stdin_as_file(settings.path, cache) as paths:
            yield paths
    except OSError as error:
        raise MachineError(
            f"{error.filename or cache}: {describe_os_error(error)}; free some space, or choose another "
            f"folder with --cache"
        ) from None


def _delete_stale_files(cache: Path) -> None:
    """Delete temporary files that killed processes left at least a day ago."""
    for left in cache.glob(".tmp-*"):
        if left.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _prepare(config: Config, paths: list[str], cache: Path, with_test: bool) -> Corpus:
    names = ("standard input" if path == "-" else path for path in config.data.path)
    name = ", ".join(names).encode("utf-8", "backslashreplace").decode()
    if shards.find_token_files(paths) is None:
        training, validation, test = _split_sources(config.data, paths)
        tokenizer = _get_tokenizer(config, training, cache)
        sides = (
            [_get_token_file(text, tokenizer, cache) for text in training],
            [_get_token_file(text, tokenizer, cache) for text in validation],
            [_get_token_file(text, tokenizer, cache) for text in test if with_test],
        )
        digests = "".join(text.digest for text in training + validation)
    else:
        tokenizer = shards.load_tokenizer_beside(shards.find_token_files(paths) or [], config)
        sides = _split_tokens(config.data, paths, tokenizer, cache, with_test)
        digests = "".join(file.path.name for side in sides[:2] for file in side)
    content = hashlib.sha256(digests.encode()).hexdigest()
    corpus = Corpus(name, tokenizer, *sides, content)
    _check_length(corpus, config)
    return corpus


def _split_tokens(
    settings: DataConfig, paths: list[str], tokenizer: Tokenizer, cache: Path, with_test: bool
) -> tuple[list[TokenFile], list[TokenFile], list[TokenFile]]:
    """As `_split`, of token files that were prepared ahead."""
    if settings.split == "documents":
        raise ConfigError(
            "data.split: documents are not told apart in token files; leave it out, or name what "
            "to hold out in data.validation_path"
        )
    training: list[TokenFile] = []
    validation: list[TokenFile] = []
    test: list[TokenFile] = []
    held_out = settings.validation_path
    for group in _group_paths(settings, paths):
        whole = shards.open_token_files(shards.find_token_files(group) or [], tokenizer)
        share = 0.0 if held_out else _get_held_out_share(settings, whole.text_bytes)
        ours, tail, tested = whole.split(share, settings.test or 0.0)
        training.append(ours)
        validation += [tail] * (held_out is None)
        test += [tested] * (with_test and settings.test is not None)
    if held_out is not None:
        validation = [_prepare_whole(held_out, settings, tokenizer, cache)]
    return training, validation, test


def _group_paths(settings: DataConfig, paths: list[str]) -> list[list[str]]:
    """The paths that make one text: all together, or each by itself if they have weights."""
    return [[path] for path in paths] if settings.weights else [paths]


def _get_held_out_share(settings: DataConfig, size: int) -> float:
    return settings.validation or min(0.1, MAX_HELD_OUT_BYTES / (size + 1))


def _prepare_whole(
    paths: list[str], settings: DataConfig, tokenizer: Tokenizer, cache: Path
) -> TokenFile:
    """All that the paths name, in tokens."""
    if (prepared := shards.find_token_files(paths)) is not None:
        return shards.open_token_files(prepared, tokenizer)
    return _get_token_file(sources.find_source(paths, settings), tokenizer, cache)


def _split_sources(
    settings: DataConfig, paths: list[str]
) -> tuple[list[TextSource], list[TextSource], list[TextSource]]:
    """What to train on, to validate on and to test on: one text each, or one for each weight."""
    given = [sources.find_source(group, settings) for group in _group_paths(settings, paths)]
    test = settings.test or 0.0
    if settings.validation_path is None:
        shares = [_get_held_out_share(settings, each.bytes) for each in given]
        pairs = list(zip(given, shares, strict=True))
        validation: list[TextSource] = [
            SourceSplit(each, "validation", share, test) for each, share in pairs
        ]
    else:
        pairs = [(each, 0.0) for each in given]
        validation = [sources.find_source(settings.validation_path, settings)]
    return (
        [SourceSplit(each, "training", share, test) for each, share in pairs],
        validation,
        [SourceSplit(each, "test", share, test) for each, share in pairs if test],
    )


def _check_length(corpus: Corpus, config: Config) -> None:
    """DataError if a side of the split is shorter than one window and the token after it."""
    need = config.seq_len + 1
    for side in ("training", "validation", "test"):
        for index, file in enumerate(getattr(corpus, side)):
            if len(file) >= need:
                continue
            whole = [file]
            if config.data.validation_path is None:
                whole = [corpus.training[index], corpus.validation[index]]
            size = sum(part.text_bytes for part in whole)
            enough = float(f"{1.1 * size * need / max(1, len(file)):.1e}")
            raise DataError(
                f"{corpus.name}: too short: {len(file):,} of its {sum(map(len, whole)):,} tokens "
                f"are for {side}, but one window needs {need:,}; use about {enough:,.0f} bytes of "
                f"text, or lower model.context_length or train.seq_len"
            )


def _get_tokenizer(config: Config, training: list[TextSource], cache: Path) -> Tokenizer:
    """The tokenizer asked for or chosen; the cache keeps one learned from the training text."""
    kind, vocab_size = config.tokenizer.kind, config.tokenizer.vocab_size
    size = sum(text.bytes for text in training)
    if kind in ("auto", "bpe") and vocab_size is None:
        train = config.train
        planned = train.minutes is not None and "steps" in train.model_fields_set
        tokens = train.steps * train.batch_size * config.seq_len if planned else None
        kind, vocab_size = choose_tokenizer(kind, size, config.model.d_model, tokens)
    if kind not in ("char", "bpe"):
        return create_tokenizer(kind)
    digest = hashlib.sha256("".join(text.digest for text in training).encode()).hexdigest()
    path = cache / f"{digest[:20]}-{kind}-{vocab_size}.json"
    try:
        return load_tokenizer(path)
    except DataError:  # not there yet, or damaged
        pass
    tokenizer = learn_tokenizer(kind, vocab_size, training)
    files.atomic_write_bytes(path, tokenizer.to_json().encode())
    return tokenizer


def learn_tokenizer(kind: str, vocab_size: int | None, training: Sequence[TextSource]) -> Tokenizer:
    """A tokenizer learned from texts: `char` reads all, `bpe` every n-th piece of large ones."""
    size = sum(source.bytes for source in training)
    every = 1 if kind == "char" else max(1, size // MAX_LEARNED_FROM_BYTES)
    with show_byte_progress("learning the vocabulary", size // every) as advance:
        pieces = (piece for source in training for piece in source.iter_chunks())
        texts = _report_progress((piece.text for piece in islice(pieces, 0, None, every)), advance)
        return create_tokenizer(kind, vocab_size, texts)


def measure_tokenizer(tokenizer: Tokenizer, paths: list[str]) -> dict[str, float]:
    """How a tokenizer compresses texts, and the share of its vocabulary that they use."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with sources.stdin_as_file(paths, Path(tempfile.gettempdir())) as names:
        for piece in sources.find_source(names, DataConfig()).iter_chunks():
            counts += np.bincount(tokenizer.encode(piece.text), minlength=tokenizer.vocab_size)
    size, total = int(counts @ tokenizer.compute_byte_lengths()), int(counts.sum())
    return {
        "bytes": size,
        "tokens": total,
        "bytes_per_token": round(size / max(1, total), 3),
        "coverage": round(float((counts > 0).mean()), 3),
    }


def _report_progress(texts: Iterator[str], advance: Callable[[int], object]) -> Iterator[str]:
    """The same texts; each is counted when the next is asked for."""
    for text in texts:
        yield text
        advance(len(text.encode()))


def _get_token_file(text: TextSource, tokenizer: Tokenizer, cache: Path) -> TokenFile:
    path = cache / f"{text.digest[:20]}-{tokenizer.fingerprint[:20]}.tokens"
    try:
        return TokenFile(path, tokenizer)
    except (FileNotFoundError, DataError):  # not there yet, or damaged
        with show_byte_progress("preparing the tokens", text.bytes) as advance:
            token_file.write_token_file(
                path, text.iter_checked_chunks(), text.digest, tokenizer, advance
            )
        return TokenFile(path, tokenizer)
