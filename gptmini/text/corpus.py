"""From a configuration to a prepared corpus: sources, tokenizer, token files, held-out text.

The cache keeps learned vocabularies and token files under the hash of content and tokenizer, so
nothing is prepared twice.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from gptmini import files
from gptmini.config.settings import Config, DataConfig
from gptmini.console import progress
from gptmini.errors import DataError, MachineError, os_reason
from gptmini.text import sources, tokens
from gptmini.text import tokenizer as tokenizers
from gptmini.text.sources import Source
from gptmini.text.tokenizer import Piece, Tokenizer
from gptmini.text.tokens import Corpus, Span, TokenFile

HELD_OUT = 1_500_000  # bytes; evaluating on more takes time and adds little precision
LEARNED_FROM = 10_000_000  # bytes of text that a vocabulary is learned from


def prepare_corpus(config: Config, cache: Path) -> Corpus:
    """The tokens of a configuration's text, from the cache if they are there.

    Raises DataError for a text that cannot be used, MachineError for a cache that cannot.
    """
    with _cached(config.data, cache) as paths:
        return _prepare(config, paths, cache)


def prepare_text(settings: DataConfig, tokenizer: Tokenizer, cache: Path) -> Span:
    """All of a text in tokens of an existing tokenizer; raises as prepare_corpus."""
    with _cached(settings, cache) as paths:
        source = sources.find(paths, settings)
        return _tokens(source, source.digest(), tokenizer, cache)


@contextmanager
def _cached(settings: DataConfig, cache: Path) -> Iterator[list[str]]:
    """The paths of a text, and a cache to prepare it in."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with sources.stdin_as_file(settings.path, cache) as paths:
            yield paths
    except OSError as error:
        raise MachineError(
            f"{error.filename or cache}: {os_reason(error)}; free some space, or choose another "
            f"folder with --cache"
        ) from None


def _sweep(cache: Path) -> None:
    """Delete temporary files that killed processes left at least a day ago."""
    for left in cache.glob(".tmp-*"):
        if left.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _prepare(config: Config, paths: list[str], cache: Path) -> Corpus:
    settings = config.data
    groups = [[path] for path in paths] if settings.weights else [paths]
    training = [sources.find(group, settings) for group in groups]
    held_out_shares = [
        settings.validation or min(0.1, HELD_OUT / (source.bytes + 1)) for source in training
    ]
    held_out: list[Source] = []
    if settings.validation_path is not None:
        held_out = [sources.find(settings.validation_path, settings)]
    elif settings.split == "documents":
        pairs = list(zip(training, held_out_shares, strict=True))
        held_out = [source.only("validation", share) for source, share in pairs]
        training = [source.only("training", share) for source, share in pairs]
    digests = [source.digest() for source in training + held_out]
    tokenizer = _tokenizer(config, training, digests, cache)
    spans = [
        _tokens(source, digest, tokenizer, cache)
        for source, digest in zip(training + held_out, digests, strict=True)
    ]
    if held_out:
        training_spans, validation_spans = spans[: len(training)], spans[len(training) :]
    else:
        training_spans, validation_spans = _cut_tails(spans, held_out_shares)
    content = hashlib.sha256("".join(digests).encode()).hexdigest()
    name = ", ".join("standard input" if path == "-" else path for path in settings.path)
    name = name.encode("utf-8", "backslashreplace").decode()
    corpus = Corpus(name, tokenizer, training_spans, validation_spans, content)
    _check_length(corpus, config.seq_len)
    return corpus


def _cut_tails(spans: list[Span], tail_shares: list[float]) -> tuple[list[Span], list[Span]]:
    """Split each span into what comes before its tail, and the tail."""
    pairs = list(zip(spans, tail_shares, strict=True))
    cuts = [(span, len(span) - max(round(len(span) * share), 1)) for span, share in pairs]
    return (
        [Span(span.tokens, 0, cut) for span, cut in cuts],
        [Span(span.tokens, cut, span.last) for span, cut in cuts],
    )


def _check_length(corpus: Corpus, seq_len: int) -> None:
    """DataError if a span is shorter than one window and the token after it."""
    for side, spans in (("training", corpus.training), ("validation", corpus.validation)):
        shortest = min(spans, key=len)
        if len(shortest) < seq_len + 1:
            enough = 1.1 * shortest.tokens.text_bytes * (seq_len + 1) / max(1, len(shortest))
            raise DataError(
                f"{corpus.name}: too short: {len(shortest):,} of its {len(shortest.tokens):,} "
                f"tokens are for {side}, but one window needs {seq_len + 1:,}; use about "
                f"{float(f'{enough:.1e}'):,.0f} bytes of text, or lower model.context_length or "
                f"train.seq_len"
            )


def _tokenizer(
    config: Config, training: list[Source], digests: list[str], cache: Path
) -> Tokenizer:
    """The tokenizer asked for or chosen; one learned from the text is kept in the cache."""
    kind, vocab_size = config.tokenizer.kind, config.tokenizer.vocab_size
    size = sum(source.bytes for source in training)
    if kind in ("auto", "bpe") and vocab_size is None:
        kind, vocab_size = tokenizers.choose(kind, size, config.model.d_model)
    if kind not in ("char", "bpe"):
        return tokenizers.create(kind)
    digest = hashlib.sha256("".join(digests[: len(training)]).encode()).hexdigest()
    path = cache / f"{digest[:20]}-{kind}-{vocab_size}.json"
    try:
        return tokenizers.read(path)
    except DataError:  # not there yet, or damaged
        pass
    tokenizer = learn(kind, vocab_size, training)
    files.replace(path, tokenizer.to_json().encode())
    return tokenizer


def learn(kind: str, vocab_size: int | None, training: list[Source]) -> Tokenizer:
    """A tokenizer learned from texts: `char` reads all, `bpe` every n-th piece of large ones."""
    size = sum(source.bytes for source in training)
    every = 1 if kind == "char" else max(1, size // LEARNED_FROM)
    with progress("learning the vocabulary", size // every) as advance:
        pieces = (piece for source in training for piece in source.pieces())
        texts = _reported((piece.text for piece in islice(pieces, 0, None, every)), advance)
        return tokenizers.create(kind, vocab_size, texts)


def measure(tokenizer: Tokenizer, paths: list[str]) -> dict[str, float]:
    """How a tokenizer compresses texts, and the share of its vocabulary that they use."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with sources.stdin_as_file(paths, Path(tempfile.gettempdir())) as names:
        for piece in sources.find(names, DataConfig()).pieces():
            counts += np.bincount(tokenizer.encode(piece.text), minlength=tokenizer.vocab_size)
    size, total = int(counts @ tokenizer.byte_lengths()), int(counts.sum())
    return {
        "bytes": size,
        "tokens": total,
        "bytes_per_token": round(size / max(1, total), 3),
        "coverage": round(float((counts > 0).mean()), 3),
    }


def _reported(texts: Iterator[str], advance: Callable[[int], object]) -> Iterator[str]:
    """The same texts; each is counted when the next is asked for."""
    for text in texts:
        yield text
        advance(len(text.encode()))


def _tokens(source: Source, digest: str, tokenizer: Tokenizer, cache: Path) -> Span:
    path = cache / f"{digest[:20]}-{tokenizer.fingerprint[:20]}.tokens"
    try:
        file = TokenFile(path, tokenizer)
    except (FileNotFoundError, DataError):  # not there yet, or damaged
        with progress("preparing the tokens", source.bytes) as advance:
            tokens.write(path, _not_blank(source), digest, tokenizer, advance)
        file = TokenFile(path, tokenizer)
    return Span(file, 0, len(file))


def _not_blank(source: Source) -> Iterator[Piece]:
    """The pieces of a source; DataError at their end if they were all white space."""
    blank = True
    for piece in source.pieces():
        blank = blank and not piece.text.strip()
        yield piece
    if blank and source.part != "all":
        raise DataError(
            f"{source.name}: its split leaves no document for {source.part}; use a text with more "
            f"documents, or hold out the tail with --set data.split=tail"
        )
    if blank:
        raise DataError(f"{source.name}: contains no text; choose a file that has some")
