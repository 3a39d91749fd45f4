"""From a configuration to a prepared corpus: sources, tokenizer, token files, what is held out.

Nothing is made twice: the cache keeps vocabularies that were learnt and token files, named by the
hashes of the content and of the tokenizer.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path

from gptmini import files
from gptmini.config.settings import Config, DataConfig
from gptmini.errors import DataError, MachineError
from gptmini.text import sources, tokens
from gptmini.text import tokenizer as tokenizers
from gptmini.text.sources import Source
from gptmini.text.tokenizer import Tokenizer
from gptmini.text.tokens import Corpus, Span, TokenFile

HELD_OUT = 1_500_000  # bytes of a large text; evaluating more takes longer than it tells
LEARNT_FROM = 10_000_000  # bytes of text that a vocabulary is learnt from

# Shows the progress of so many bytes; gives a function that takes how many more are done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


def prepare_corpus(
    config: Config, cache: Path, progress: Progress = lambda what, total: nullcontext(lambda n: n)
) -> Corpus:
    """The token files of a configuration's text, from the cache where they are there.

    Raises DataError for a text that cannot be used, MachineError for a cache that cannot.
    """
    with _cached(config.data, cache) as paths:
        return _prepare(config, paths, cache, progress)


def prepare_text(
    settings: DataConfig, tokenizer: Tokenizer, cache: Path, progress: Progress
) -> Span:
    """The whole of a text as tokens of a tokenizer that there is; raises as prepare_corpus."""
    with _cached(settings, cache) as paths:
        source = sources.find(paths, settings)
        tokens = _token_file(source, source.digest(), tokenizer, cache, progress)
    return Span(tokens, 0, len(tokens))


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
            f"{error.filename or cache}: {(error.strerror or str(error)).lower()}; "
            f"make room, or name another folder with --cache"
        ) from None


def _sweep(cache: Path) -> None:
    """Remove what processes that were killed have left, a day ago or more."""
    for left in cache.glob(".tmp-*"):
        if left.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _prepare(config: Config, paths: list[str], cache: Path, progress: Progress) -> Corpus:
    settings = config.data
    groups = [[path] for path in paths] if settings.weights else [paths]
    training = [sources.find(group, settings) for group in groups]
    shares = [settings.validation or min(0.1, HELD_OUT / (one.bytes + 1)) for one in training]
    held_out: list[Source] = []
    if settings.validation_path is not None:
        held_out = [sources.find(settings.validation_path, settings)]
    elif settings.split == "documents":
        both = list(zip(training, shares, strict=True))
        held_out = [source.only("validation", share) for source, share in both]
        training = [source.only("training", share) for source, share in both]
    digests = [source.digest() for source in training + held_out]
    tokenizer = _tokenizer(config, training, digests, cache, progress)
    ready = [
        _token_file(source, digest, tokenizer, cache, progress)
        for source, digest in zip(training + held_out, digests, strict=True)
    ]
    whole = [Span(tokens, 0, len(tokens)) for tokens in ready]
    ours, theirs = whole[: len(training)], whole[len(training) :]
    if not held_out:
        ours, theirs = _without_tails(whole, shares)
    content = hashlib.sha256("".join(digests).encode()).hexdigest()
    corpus = Corpus(", ".join(settings.path), tokenizer, ours, theirs, content)
    _check_length(corpus, config.seq_len)
    return corpus


def _without_tails(whole: list[Span], shares: list[float]) -> tuple[list[Span], list[Span]]:
    both = list(zip(whole, shares, strict=True))
    cuts = [(one, len(one) - max(round(len(one) * share), 1)) for one, share in both]
    return (
        [Span(one.tokens, 0, cut) for one, cut in cuts],
        [Span(one.tokens, cut, one.last) for one, cut in cuts],
    )


def _check_length(corpus: Corpus, seq_len: int) -> None:
    """DataError if a span does not hold one window and the token after it."""
    sides = [("training", one) for one in corpus.training]
    for name, span in [*sides, *(("validation", one) for one in corpus.validation)]:
        if len(span) < seq_len + 1:
            raise DataError(
                f"{corpus.name}: has {len(span)} of {len(span.tokens)} tokens for {name}, "
                f"and one window needs {seq_len + 1}; take more text, or lower "
                f"model.context_length or train.seq_len"
            )


def _tokenizer(
    config: Config, training: list[Source], digests: list[str], cache: Path, progress: Progress
) -> Tokenizer:
    """The tokenizer asked for or chosen; what was learnt from a text is kept in the cache."""
    kind, vocab_size = config.tokenizer.kind, config.tokenizer.vocab_size
    size = sum(source.bytes for source in training)
    if kind in ("auto", "bpe") and vocab_size is None:
        kind, vocab_size = tokenizers.choose(kind, size, config.model.d_model)
    if kind not in ("char", "bpe"):
        return tokenizers.create(kind, None, ())
    digest = hashlib.sha256("".join(digests[: len(training)]).encode()).hexdigest()
    path = cache / f"{digest[:20]}-{kind}-{vocab_size}.json"
    try:
        return tokenizers.read(path)
    except DataError:  # not there yet, or damaged
        pass
    tokenizer = learn(kind, vocab_size, training, progress)
    files.replace(path, tokenizer.to_json().encode())
    return tokenizer


def learn(
    kind: str, vocab_size: int | None, training: list[Source], progress: Progress
) -> Tokenizer:
    """A tokenizer of the texts; bpe takes every so-many-th piece of a large one, char them all."""
    size = sum(source.bytes for source in training)
    every = 1 if kind == "char" else max(1, size // LEARNT_FROM)
    with progress("learning the vocabulary", size // every) as advance:
        pieces = (piece for source in training for piece in source.pieces())
        texts = _told((piece.text for piece in islice(pieces, 0, None, every)), advance)
        return tokenizers.create(kind, vocab_size, texts)


def _told(texts: Iterator[str], advance: Callable[[int], object]) -> Iterator[str]:
    """The same texts, each counted when the next is asked for."""
    for text in texts:
        yield text
        advance(len(text.encode()))


def _token_file(
    source: Source, digest: str, tokenizer: Tokenizer, cache: Path, progress: Progress
) -> TokenFile:
    path = cache / f"{digest[:20]}-{tokenizer.fingerprint[:20]}.tokens"
    if path.exists():
        try:
            return TokenFile(path, tokenizer)
        except DataError:
            pass  # a damaged cache file is made again
    with progress("preparing the tokens", source.bytes) as advance:
        tokens.write(path, source, digest, tokenizer, advance)
    return TokenFile(path, tokenizer)
