"""Datasets of the Hugging Face Hub by name: which of their files are the text.

    hf:OWNER/NAME[@REVISION][/FOLDER or /GLOB]

A GLOB takes the files it matches, where `*` stands for folders, too. Without one, the files of the
whole dataset or of FOLDER are taken that are in its best format, lie in one folder and are not
held out by their name: guessing more would mix languages, or train on the test set.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from gptmini.data import hub
from gptmini.data.formats import find_format, import_pyarrow
from gptmini.data.hub import HubName, Snapshot
from gptmini.errors import DataError, shorten

FORMATS = ("parquet", "jsonl", "csv", "text")  # a dataset may have the same text in several
# What the path of a file says of its split, as the package datasets reads it: the last word counts.
SPLIT_WORD = re.compile(
    "(?<![a-z])(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])"
)


def is_dataset_name(path: str) -> bool:
    """Check whether a path of a text is the name of a dataset on the Hub."""
    return path.startswith(hub.PREFIX)


def parse_dataset_name(path: str) -> HubName:
    """Parse the name of a dataset on the Hub, perhaps with a pattern; DataError if it is wrong."""
    dataset = hub.parse_name(path.removeprefix(hub.PREFIX))
    if dataset is None:
        raise DataError(
            f"{shorten(path)}: not a dataset; write hf:OWNER/NAME, hf:OWNER/NAME/GLOB or "
            f"hf:OWNER/NAME@REVISION/GLOB"
        )
    return dataset


def pin_revision(path: str, pinned: Sequence[str]) -> str:
    """Return the name of a dataset with the commit it stands for; other paths as they are.

    That is the commit in `pinned`, the paths of a run that is resumed, if it names this dataset.
    """
    if not is_dataset_name(path):
        return path
    dataset = parse_dataset_name(path)
    if dataset.revision is not None and hub.COMMIT.fullmatch(dataset.revision):
        return path
    for other in filter(is_dataset_name, pinned):
        known = parse_dataset_name(other)
        if (known.name, known.path) == (dataset.name, dataset.path):
            return other
    snapshot = hub.open_snapshot("dataset", dataset.name, dataset.revision)
    return str(replace(dataset, revision=snapshot.commit))


def fetch_dataset(path: str) -> list[Path]:
    """Download what the cache lacks of the files that a dataset's name stands for, in their order.

    Raises DataError for what does not exist, may not be read or is not unique, MachineError for
    trouble with the network or the disk.
    """
    dataset = parse_dataset_name(path)
    snapshot = hub.open_snapshot("dataset", dataset.name, dataset.revision)
    names = _choose_files(snapshot, dataset.path)
    if any(find_format(name)[0] == "parquet" for name in names):
        import_pyarrow(path)  # before a long download
    return hub.download(snapshot, names)


def _choose_files(snapshot: Snapshot, pattern: str | None) -> list[str]:
    """Choose the files to read, sorted; DataError if there are none, or too many to guess."""
    within = snapshot.files
    if pattern is not None:
        matching = [name for name in within if fnmatchcase(name, pattern)]
        if any(map(_is_readable, matching)):
            return list(filter(_is_readable, matching))
        folder = f"{pattern.rstrip('/')}/"
        within = [name for name in within if name.startswith(folder)] or matching
        if not within:
            raise snapshot.make_error(
                f"no file matches {pattern}; choose of {hub.list_some(snapshot.files)}"
            )
    for kind in FORMATS:
        names = [name for name in within if _is_readable(name) and find_format(name)[0] == kind]
        if names:
            break
    else:
        raise snapshot.make_error(
            f"no .parquet, .jsonl, .csv or .txt (it has {hub.list_some(within)}); the Hub may have "
            f"converted it: {hub.PREFIX}{snapshot.name}@refs/convert/parquet"
        )
    names = [name for name in names if not _is_held_out(name)] or names
    folders = sorted({str(PurePosixPath(name).parent) for name in names})
    if len(folders) > 1:
        example = next(folder for folder in folders if folder != ".")
        raise snapshot.make_error(
            f"has texts in several folders; choose, as in {hub.PREFIX}{snapshot.name}/{example} "
            f"(it has {hub.list_some(folders)})"
        )
    return names


def _is_readable(name: str) -> bool:
    kind, _, suffix = find_format(name)
    return kind != "text" or suffix == ".txt"  # not of README.md, pictures or code


def _is_held_out(name: str) -> bool:
    words = SPLIT_WORD.findall(name.lower())
    return bool(words) and not words[-1].startswith("train")
