"""From a configuration to a prepared corpus: sources, tokenizer, token files, held-out text.

The cache keeps learned vocabularies and token files under the hash of content and tokenizer, so
nothing is prepared twice.
"""

import glob
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np

from gptmini import files
from gptmini.config.settings import Config, DataConfig
from gptmini.console import show_byte_progress
from gptmini.data import formats, hub_dataset, numbers, sources, token_file
from gptmini.data.sources import Side, Source, SourceSide, SourceSplit
from gptmini.data.token_file import Corpus, Label, TokenFile
from gptmini.errors import ConfigError, DataError, MachineError, describe_os_error
from gptmini.tokenizer.choose import choose_tokenizer
from gptmini.tokenizer.chunks import TextChunk, count_utf8_bytes
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer

MAX_HELD_OUT_BYTES = 1_500_000  # evaluating on more takes time and adds little precision
MAX_LEARNED_FROM_BYTES = 10_000_000  # of text that a vocabulary is learned from
STALE_SECONDS = 86_400
TextSource = Source | SourceSide


def prepare_corpus(
    config: Config,
    cache: Path = files.DEFAULT_CACHE_DIR,
    with_test: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Prepare the tokens of a configuration's text, or take them from the cache.

    The test part is prepared only on request, so nothing can be chosen on it by accident. A
    `tokenizer` that is given is used in place of the one which the configuration names.
    Raises DataError for a text that cannot be used, MachineError for a cache that cannot.
    """
    with open_cache(config.data, cache) as paths:
        return _prepare(config, paths, cache, with_test, tokenizer)


def prepare_text(settings: DataConfig, tokenizer: Tokenizer, cache: Path) -> TokenFile:
    """Encode all of a text with an existing tokenizer; raises as prepare_corpus does."""
    with open_cache(settings, cache) as paths:
        return _prepare_whole(paths, settings, tokenizer, cache)


def learns_vocabulary(config: Config) -> bool:
    """Check whether a vocabulary of open size is to be learned from the text."""
    return (
        config.tokenizer.kind in ("auto", "bpe")
        and config.tokenizer.vocab_size is None
        and find_number_files(config.data.path) is None
    )


def measure_text(settings: DataConfig) -> float:
    """Measure the bytes of a text; standard input may have any number."""
    if "-" in settings.path:
        return math.inf
    return sources.find_source(settings.path, settings).bytes


def check_paths(paths: list[str], settings: DataConfig) -> None:
    """DataError for paths that name no text.

    Of a dataset on the Hub only the form of its name is checked, not what needs a network.
    """
    local = []
    for path in paths:
        if hub_dataset.is_dataset_name(path):
            hub_dataset.parse_dataset_name(path)
        else:
            local.append(path)
    if local and find_number_files(local) is None:
        sources.find_source(local, settings)


def find_number_files(paths: list[str]) -> list[list[Path]] | None:
    """Find the files of token numbers of each path, in order; None if they name texts.

    DataError for both in one list.
    """
    found = []
    for path in paths:
        place = Path(os.path.expanduser(path))  # Path.expanduser can raise
        matches = [place]
        if not place.exists() and set(path) & set("*?["):
            matches = [Path(match) for match in sorted(glob.glob(str(place)))]
        found.append([match for match in matches if numbers.holds_numbers(match)])
    if not any(found):
        return None
    for path, listed in zip(paths, found, strict=True):
        if not listed:
            raise DataError(f"{path}: a text beside token numbers; train on one kind")
    return found


def _get_number_tokenizer(config: Config, path: Path) -> Tokenizer:
    """Get the tokenizer that made token numbers, which must be named."""
    kind = config.tokenizer.kind
    if kind in ("auto", "bpe", "char"):
        raise ConfigError(
            f"{path}: token numbers; name the tokenizer that made them, such as --set "
            f"tokenizer.kind=gpt2"
        )
    return create_tokenizer(kind)


@contextmanager
def open_cache(settings: DataConfig, cache: Path) -> Iterator[list[str]]:
    """Open a cache to prepare a text in; yields the text's paths."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _delete_stale_files(cache)
        with sources.spool_stdin(settings.path, cache) as paths:
            yield paths
    except OSError as error:
        raise MachineError(
            f"{error.filename or cache}: {describe_os_error(error)}; free some space, or choose "
            f"another folder with --cache"
        ) from None


def _delete_stale_files(cache: Path) -> None:
    """Delete temporary files that killed processes left at least a day ago."""
    for path in cache.glob(".tmp-*"):
        if path.stat().st_mtime > time.time() - STALE_SECONDS:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _prepare(
    config: Config, paths: list[str], cache: Path, with_test: bool, tokenizer: Tokenizer | None
) -> Corpus:
    found = find_number_files(paths)
    if found is None:
        corpus = _prepare_sources(config, paths, cache, with_test, tokenizer)
    else:
        corpus = _prepare_numbers(config, found, cache, with_test, tokenizer)
    _check_length(corpus, config)
    _warn_of_small_weights(config.data)
    return corpus


def _name_corpus(settings: DataConfig) -> str:
    """Name a corpus after its paths, which may hold bytes that are not UTF-8."""
    names = ["standard input" if path == "-" else path for path in settings.path]
    return ", ".join(names).encode("utf-8", "backslashreplace").decode()


def _prepare_sources(
    config: Config, paths: list[str], cache: Path, with_test: bool, tokenizer: Tokenizer | None
) -> Corpus:
    """Split texts, learn or create their tokenizer, and encode them."""
    settings = config.data
    text = find_training_text(settings, paths)
    splits = text.splits
    separate = text.separate
    if tokenizer is None:
        whole = [split.source for split in splits]
        chat = _has_conversations(whole if separate is None else [*whole, separate], cache)
        tokenizer = _get_tokenizer(config, text.training, cache, chat)

    sides: list[Side] = ["training"]
    if separate is None:
        sides.append("validation")
    if with_test and settings.test is not None:
        sides.append("test")
    token_files: dict[Side, list[TokenFile]] = {"training": [], "validation": [], "test": []}
    for split in splits:
        for side, file in _get_side_files(split, sides, tokenizer, cache).items():
            token_files[side].append(file)
    if separate is not None:
        token_files["validation"] = [_get_token_file(separate, tokenizer, cache)]
    return Corpus(
        _name_corpus(settings),
        tokenizer,
        token_files["training"],
        token_files["validation"],
        token_files["test"],
        text.content,
    )


@dataclass(frozen=True)
class SplitText:
    """The texts that a configuration names, split but not yet tokens.

    `separate` is the text to hold out, if that is another.
    """

    splits: list[SourceSplit]
    separate: Source | None

    @property
    def training(self) -> list[SourceSide]:
        """What is trained on."""
        return [SourceSide(split, "training") for split in self.splits]

    @cached_property
    def content(self) -> str:
        """SHA-256 (hex) of the texts and their split, as of the corpus that they become."""
        held_out: list[TextSource] = [SourceSide(split, "validation") for split in self.splits]
        if self.separate is not None:
            held_out = [self.separate]
        digests = "".join(text.digest for text in [*self.training, *held_out])
        return hashlib.sha256(digests.encode()).hexdigest()

    def iter_chunks(self) -> Iterator[TextChunk]:
        """Yield what is trained on; DataError if a file has changed since it was found."""
        return chain.from_iterable(side.iter_chunks() for side in self.training)


def find_training_text(settings: DataConfig, paths: list[str]) -> SplitText:
    """Find the texts of a configuration at their paths, and how they are split."""
    separate = None
    if settings.validation_path is not None:
        separate = sources.find_source(settings.validation_path, settings)
    return SplitText(_split_sources(settings, paths), separate)


def _prepare_numbers(
    config: Config,
    found: list[list[Path]],
    cache: Path,
    with_test: bool,
    tokenizer: Tokenizer | None,
) -> Corpus:
    """Open token numbers and split them: the tail validates, what to test on lies before it."""
    settings = config.data
    if settings.split == "documents":
        raise ConfigError(
            "data.split: token numbers do not say where documents begin; leave it out, or name "
            "what to hold out in data.validation_path"
        )
    tokenizer = tokenizer or _get_number_tokenizer(config, found[0][0])
    groups = found if settings.weights else [list(chain.from_iterable(found))]
    training: list[TokenFile] = []
    validation: list[TokenFile] = []
    test: list[TokenFile] = []
    for group in groups:
        whole = _open_numbers(group, tokenizer, cache)
        share = _get_held_out_share(settings, whole.text_bytes)
        stretches = sources.locate_splits(len(whole), share, settings.test or 0.0)
        training.append(whole.cut(*stretches["training"]))
        if settings.validation_path is None:
            validation.append(whole.cut(*stretches["validation"]))
        if with_test and settings.test is not None:
            test.append(whole.cut(*stretches["test"]))
    if settings.validation_path is not None:
        validation = [_prepare_whole(settings.validation_path, settings, tokenizer, cache)]
    digests = "".join(file.path.name for file in training + validation)
    content = hashlib.sha256(digests.encode()).hexdigest()
    return Corpus(_name_corpus(settings), tokenizer, training, validation, test, content)


def _open_numbers(paths: list[Path], tokenizer: Tokenizer, cache: Path) -> TokenFile:
    """Open the token file of files of numbers in the cache; copy them if it is missing."""
    digest = hashlib.sha256()
    for path in paths:
        with files.open_regular(path) as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())  # type: ignore[arg-type]
    target = _name_token_file(digest.hexdigest(), tokenizer, cache)
    with suppress(DataError):
        return TokenFile(target, tokenizer)
    total = sum(path.stat().st_size for path in paths)
    with show_byte_progress("copying the tokens", total) as advance:
        encoded = ({"": part} for part in numbers.read_numbers(paths, tokenizer, advance))
        token_file.write_token_files({"": target}, encoded, tokenizer)
    return TokenFile(target, tokenizer)


def _group_paths(settings: DataConfig, paths: list[str]) -> list[list[str]]:
    """Group the paths that make one text: all of them, or each by itself if they have weights."""
    return [[path] for path in paths] if settings.weights else [paths]


def _get_held_out_share(settings: DataConfig, size: int) -> float:
    """Get the fraction of a text of `size` bytes to validate on; none if another text is."""
    if settings.validation_path is not None:
        return 0.0
    return settings.validation or min(0.1, MAX_HELD_OUT_BYTES / (size + 1))


def _prepare_whole(
    paths: list[str], settings: DataConfig, tokenizer: Tokenizer, cache: Path
) -> TokenFile:
    """Prepare all that the paths name as one text."""
    found = find_number_files(paths)
    if found is not None:
        return _open_numbers(list(chain.from_iterable(found)), tokenizer, cache)
    return _get_token_file(sources.find_source(paths, settings), tokenizer, cache)


def _split_sources(settings: DataConfig, paths: list[str]) -> list[SourceSplit]:
    """Split texts into training, validation and test: one text, or one for each weight."""
    splits = []
    for group in _group_paths(settings, paths):
        source = sources.find_source(group, settings)
        share = _get_held_out_share(settings, source.bytes)
        splits.append(SourceSplit(source, share, settings.test or 0.0))
    return splits


def _check_length(corpus: Corpus, config: Config) -> None:
    """DataError if a side of the split is shorter than one window and the token after it."""
    window = config.seq_len + 1
    sides = {"training": corpus.training, "validation": corpus.validation, "test": corpus.test}
    for side, token_files in sides.items():
        for index, file in enumerate(token_files):
            if len(file) >= window:
                continue
            whole = [file]
            if config.data.validation_path is None:
                whole = [corpus.training[index], corpus.validation[index]]
            text_bytes = sum(part.text_bytes for part in whole)
            enough = 1.1 * text_bytes * window / max(1, len(file))
            enough = float(f"{enough:.1e}")  # two digits
            raise DataError(
                f"{corpus.name}: too short: {len(file):,} of its {sum(map(len, whole)):,} tokens "
                f"are for {side}, but one window needs {window:,}; use about {enough:,.0f} bytes "
                f"of text, or lower model.context_length or train.seq_len"
            )


def _warn_of_small_weights(settings: DataConfig) -> None:
    """Warn of weights that a cycle of the mixture rounds up to a window."""
    weights = settings.weights or []
    for path, weight in zip(settings.path, weights, strict=False):
        share = weight / sum(weights)
        if share * token_file.MIXTURE_CYCLE_WINDOWS < 1:
            formats.warn_once(
                f"data.weights: {path} gets 1 window in {token_file.MIXTURE_CYCLE_WINDOWS:,}, "
                f"more than its share of {share:.2g}; give it more, or leave it out"
            )


def _has_conversations(whole: list[Source], cache: Path) -> bool:
    """Tell whether texts have conversations; the cache remembers it of those that are records."""
    records = [text for text in whole if {file.kind for file in text.files} & {*formats.CHAT_KINDS}]
    if not records:
        return False
    digest = hashlib.sha256("".join(text.digest for text in records).encode()).hexdigest()[:20]
    path = cache / f"{digest}-chat.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there yet, or damaged
        return bool(files.read_json(path)["conversations"])
    found = any(text.has_conversations for text in records)
    files.atomic_write_bytes(path, json.dumps({"conversations": found}).encode())
    return found


def _get_tokenizer(
    config: Config, training: Sequence[TextSource], cache: Path, chat: bool
) -> Tokenizer:
    """Get the tokenizer requested or chosen; one learned from the training text is cached."""
    kind = config.tokenizer.kind
    vocab_size = config.tokenizer.vocab_size
    digest = hashlib.sha256("".join(text.digest for text in training).encode()).hexdigest()[:20]
    if kind in ("auto", "bpe") and vocab_size is None:
        text_bytes = _measure_training(training, cache / f"{digest}-size.json")
        train = config.train
        training_tokens = None
        if train.minutes is not None and "steps" in train.model_fields_set:
            training_tokens = train.steps * train.batch_size * config.seq_len
        kind, vocab_size = choose_tokenizer(kind, text_bytes, config.model.d_model, training_tokens)
    if kind not in ("char", "bpe"):
        return create_tokenizer(kind, chat=chat)
    path = cache / f"{digest}-{kind}-{vocab_size}{'-chat' if chat else ''}.json"
    try:
        return load_tokenizer(path)
    except DataError:  # not there yet, or damaged
        pass
    tokenizer = learn_tokenizer(kind, vocab_size, training, chat)
    files.atomic_write_bytes(path, tokenizer.to_json().encode())
    return tokenizer


def _measure_training(training: Sequence[TextSource], path: Path) -> int:
    """Measure the bytes of the training text; `path` keeps them, so that it is read only once."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there yet, or damaged
        return int(files.read_json(path)["text_bytes"])
    text_bytes = sum(text.text_bytes for text in training)
    files.atomic_write_bytes(path, json.dumps({"text_bytes": text_bytes}).encode())
    return text_bytes


def learn_tokenizer(
    kind: str, vocab_size: int | None, training: Sequence[TextSource], chat: bool = False
) -> Tokenizer:
    """Learn a tokenizer from texts: `char` reads all, `bpe` every n-th chunk of large ones.

    To `chat`, it gets the special tokens and the template of ChatML.
    """
    size = sum(source.bytes for source in training)
    every = 1 if kind == "char" else max(1, size // MAX_LEARNED_FROM_BYTES)
    chunks = chain.from_iterable(source.iter_chunks() for source in training)
    texts = map(_get_learned_text, islice(chunks, 0, None, every))
    with show_byte_progress("learning the vocabulary", size // every) as advance:
        return create_tokenizer(kind, vocab_size, _report_progress(texts, advance), chat)


def _get_learned_text(chunk: TextChunk) -> str:
    """Get what a vocabulary is learned from: of a conversation also the roles, as in ChatML."""
    if chunk.conversation is None:
        return chunk.text
    messages = chunk.conversation.messages
    return "".join(f"{message['role']}\n{message['content']}\n" for message in messages)


def measure_tokenizer(tokenizer: Tokenizer, paths: list[str]) -> dict[str, float]:
    """Measure how a tokenizer compresses texts, and the share of its vocabulary they use."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with sources.spool_stdin(paths, Path(tempfile.gettempdir())) as names:
        source = sources.find_source(names, DataConfig())
        with show_byte_progress("measuring the tokenizer", source.bytes) as advance:
            for chunk in source.iter_chunks():
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


def _report_progress(texts: Iterator[str], advance: Callable[[int], object]) -> Iterator[str]:
    """Yield the same texts; each is counted when the next is requested."""
    for text in texts:
        yield text
        advance(len(text.encode()))


def _get_token_file(source: Source, tokenizer: Tokenizer, cache: Path) -> TokenFile:
    """Open the token file of a whole text in the cache; write it if it is missing or damaged."""

    def iter_chunks(_: object) -> Iterator[tuple[str, TextChunk]]:
        return (("", chunk) for chunk in source.iter_checked_chunks())

    path = _name_token_file(source.digest, tokenizer, cache)
    return _get_token_files({"": path}, iter_chunks, source.bytes, tokenizer)[""]


def _get_side_files(
    split: SourceSplit, sides: list[Side], tokenizer: Tokenizer, cache: Path
) -> dict[Side, TokenFile]:
    """Open the token files of some sides in the cache; write those that are missing or damaged."""
    paths = {
        side: _name_token_file(SourceSide(split, side).digest, tokenizer, cache) for side in sides
    }
    return _get_token_files(paths, split.iter_checked_chunks, split.source.bytes, tokenizer)


def _get_token_files(
    paths: Mapping[Label, Path],
    iter_chunks: Callable[[Collection[Label]], Iterator[tuple[Label, TextChunk]]],
    size: int,
    tokenizer: Tokenizer,
) -> dict[Label, TokenFile]:
    """Open token files; write those that are missing or damaged.

    However many that are, the text, of `size` bytes, is encoded in one pass.
    """
    opened: dict[Label, TokenFile] = {}
    missing: dict[Label, Path] = {}
    for label, path in paths.items():
        try:
            opened[label] = TokenFile(path, tokenizer)
        except DataError:
            missing[label] = path
    if missing:
        with show_byte_progress("preparing the tokens", size) as advance:
            encoded = token_file.encode_chunks(iter_chunks(missing), tokenizer, advance)
            token_file.write_token_files(missing, encoded, tokenizer)
        opened |= {label: TokenFile(path, tokenizer) for label, path in missing.items()}
    return opened


def _name_token_file(digest: str, tokenizer: Tokenizer, cache: Path) -> Path:
    """Name the token file of a text after what decides its tokens."""
    return cache / f"{digest[:20]}-{tokenizer.chat_fingerprint[:20]}.bin"
