"""Datasets of the Hugging Face Hub by name: which Parquet files they are.

    hf:OWNER/NAME[@REVISION][:CONFIGURATION][:SPLIT][:COLUMN]

What is left out is the dataset's only or default configuration, its training split, and the column
`data.text_key`. A dataset in another format is read from refs/convert/parquet, the branch in which
the Hub keeps a conversion. Nothing is downloaded here but the list of files and README.md, which
says what belongs to which split.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from gptmini import hub
from gptmini.errors import DataError, shorten
from gptmini.hub import HubFile, Repository

DATASET = re.compile(
    rf"{hub.PREFIX}(?P<name>{hub.OWNER_AND_NAME}|[\w.-]+)(@(?P<revision>{hub.REVISION}))?"
    r"(?P<parts>(:[^:]*){0,3})",
    re.ASCII,
)
CONVERTED_REVISION = "refs/convert/parquet"
CONVERTED_FILE = re.compile(r"([^/]+)/(?:partial-)?([^/]+)/\d+\.parquet")
SHARD_NAME = re.compile(r"([\w.]+)-\d{5}-of-\d{5}")  # train-00000-of-00002.parquet
# Words in the path of a file that say its split, as the package datasets reads them.
WORDS_BY_SPLIT = {
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
    "train": ("train", "training"),
}
DEFAULT_CONFIGURATION = "default"
DEFAULT_SPLIT = "train"

Configurations = dict[str, dict[str, list[str]]]  # the files of each split of each


@dataclass(frozen=True)
class DatasetName:
    """A dataset as it was named: `parts` are configuration, split and column, or some of them."""

    name: str
    revision: str | None
    parts: str  # ":sample-10BT:train", or ""


@dataclass(frozen=True)
class DatasetFiles:
    """The Parquet files of a split, in order; `column` holds the text, if one was named."""

    files: list[HubFile]
    column: str


def is_dataset_name(path: str) -> bool:
    """Check whether a path of a text is the name of a dataset on the Hub."""
    return path.startswith(hub.PREFIX)


def parse_dataset_name(path: str) -> DatasetName:
    """Parse the name of a dataset on the Hub; DataError if it is wrong."""
    match = DATASET.fullmatch(path)
    if match is None:
        raise DataError(
            f"{shorten(path)}: not a dataset; write hf:OWNER/NAME, and after it what you need of "
            f"@REVISION:CONFIGURATION:SPLIT:COLUMN"
        )
    return DatasetName(match["name"], match["revision"], match["parts"])


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
        if (known.name, known.parts) == (dataset.name, dataset.parts):
            return other
    commit = _open_dataset(dataset)[0].commit
    return f"{hub.PREFIX}{dataset.name}@{commit}{dataset.parts}"


def find_dataset_files(path: str) -> DatasetFiles:
    """Find the Parquet files that the name of a dataset stands for, without downloading them.

    Raises DataError for what does not exist, may not be read or is not unique, MachineError for
    trouble with the network.
    """
    dataset = parse_dataset_name(path)
    repository, configurations = _open_dataset(dataset)
    parts = dataset.parts.split(":")[1:]
    configuration = _take(parts, configurations)
    if configuration is None:
        configuration = _choose(
            repository, "configurations", list(configurations), DEFAULT_CONFIGURATION
        )
    splits = configurations[configuration]
    split = _take(parts, splits)
    if split is None:
        split = _choose(repository, "splits", list(splits), DEFAULT_SPLIT)
    if len(parts) > 1:
        raise repository.make_error(
            f"has no {parts[0]!r}; its configurations are {hub.list_some(configurations)}, the "
            f"splits of {configuration} {hub.list_some(splits)}"
        )
    column = parts[0] if parts else ""
    return DatasetFiles([repository.files[name] for name in splits[split]], column)


def _take(parts: list[str], known: dict[str, Any]) -> str | None:
    """Take the next part of a name if it is known; one that is empty is left open."""
    if not parts:
        return None
    if parts[0] in known:
        return parts.pop(0)
    if not parts[0]:
        parts.pop(0)
    return None


def _choose(repository: Repository, noun: str, names: list[str], default: str) -> str:
    """Choose the default or the only one; DataError if there are several."""
    if default in names:
        return default
    if len(names) == 1:
        return names[0]
    raise repository.make_error(
        f"has several {noun}; choose one, as in {hub.PREFIX}{repository.name}:{names[0]} (it has "
        f"{hub.list_some(names)})"
    )


# -- which files belong to which split -------------------------------------------------------------


def _open_dataset(dataset: DatasetName) -> tuple[Repository, Configurations]:
    """Open a dataset, or the Hub's conversion of it if it has no Parquet files."""
    repository = hub.open_repository("dataset", dataset.name, dataset.revision)
    configurations = _find_configurations(repository)
    if configurations:
        return repository, configurations
    problem = "has no Parquet files"
    if dataset.revision is None:
        problem += ", and the Hub has not converted it"
        try:
            repository = hub.open_repository("dataset", dataset.name, CONVERTED_REVISION)
            configurations = _find_configurations(repository)
        except DataError:
            pass
    if not configurations:
        raise repository.make_error(f"{problem}; download its files, and name them with --data")
    return repository, configurations


def _find_configurations(repository: Repository) -> Configurations:
    """Find the Parquet files of each split of each configuration.

    README.md says them. If it does not, the names of the files do.
    """
    parquet = sorted(name for name in repository.files if name.endswith(".parquet"))
    described = hub.read_description(repository).get("configs")
    if parquet and isinstance(described, list) and described:
        return _read_described_configurations(repository, described, parquet)
    configurations: Configurations = {}
    converted = {name: CONVERTED_FILE.fullmatch(name) for name in parquet}
    for name, match in converted.items():
        configuration, split = DEFAULT_CONFIGURATION, _guess_split(name)
        if match and all(converted.values()):
            configuration, split = match[1], match[2]
        configurations.setdefault(configuration, {}).setdefault(split, []).append(name)
    return configurations


def _guess_split(name: str) -> str:
    """Guess the split of a file by its name, then by those of its folders."""
    path = name.removesuffix(".parquet")
    shard = SHARD_NAME.fullmatch(path.rpartition("/")[2])
    if shard:
        return shard[1]
    words = re.split("[^a-z]+", path.lower())
    for word in reversed(words):
        for split, spellings in WORDS_BY_SPLIT.items():
            if word in spellings:
                return split
    return DEFAULT_SPLIT


def _read_described_configurations(
    repository: Repository, described: list[Any], parquet: list[str]
) -> Configurations:
    """Read the section `configs` of README.md, as far as it names Parquet files."""
    configurations: Configurations = {}
    default = None
    for settings in described:
        try:
            name = str(settings.get("config_name", DEFAULT_CONFIGURATION))
            splits = _match_splits(settings, parquet)
        except (AttributeError, TypeError, KeyError):
            raise repository.make_error(
                "README.md: section configs is damaged; download its files, and name them with "
                "--data"
            ) from None
        if splits:
            configurations[name] = splits
        if settings.get("default") is True:
            default = name
    if default in configurations:
        # The one that is left out of a name, whatever it is called.
        configurations.setdefault(DEFAULT_CONFIGURATION, configurations[default])
    return configurations


def _match_splits(settings: dict[str, Any], parquet: list[str]) -> dict[str, list[str]]:
    """Find the files of each split of a configuration."""
    folder = str(settings.get("data_dir") or "").strip("./")
    inside = [name for name in parquet if not folder or name.startswith(f"{folder}/")]
    splits: dict[str, list[str]] = {}
    if settings.get("data_files") is None:
        for name in inside:
            splits.setdefault(_guess_split(name), []).append(name)
        return splits
    for split, patterns in _iter_patterns(settings["data_files"]):
        for pattern in patterns:
            whole = f"{folder}/{pattern}" if folder else pattern.removeprefix("./")
            matching = [name for name in inside if _matches(name, whole)]
            if matching:  # patterns may overlap
                splits[split] = list(dict.fromkeys(splits.get(split, []) + matching))
    return splits


def _iter_patterns(data_files: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield splits and their patterns, from the ways in which README.md may spell them.

    These are a pattern, a list of them, {split: patterns}, and [{split: ..., path: patterns}].
    """
    if isinstance(data_files, dict):
        for split, patterns in data_files.items():
            yield str(split), _as_list(patterns)
    elif isinstance(data_files, list) and all(isinstance(each, dict) for each in data_files):
        for each in data_files:
            yield str(each["split"]), _as_list(each["path"])
    else:
        yield DEFAULT_SPLIT, _as_list(data_files)


def _as_list(patterns: Any) -> list[str]:
    listed = patterns if isinstance(patterns, list) else [patterns]
    if not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError
    return listed


def _matches(name: str, pattern: str) -> bool:
    """Match a path with a pattern: only `**` stands for folders, or for none."""
    if "**" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.replace("**/", ""))
    return fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
