"""Files of the Hugging Face Hub by name, through huggingface_hub and its cache.

`open_repository` lists what a repository holds at a revision, and `download` brings files of it
into the cache. What the cache holds is neither downloaded again nor does it need a network. A
connection that breaks is taken up where it broke, and large files are checked by SHA-256.

The environment variables are those of huggingface_hub: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and
HF_ENDPOINT, among others.
"""

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gptmini.console import make_bar_class, show_byte_progress
from gptmini.errors import (
    CheckpointError,
    DataError,
    GptminiError,
    MachineError,
    describe_os_error,
    make_missing_package_error,
    shorten,
)

PREFIX = "hf:"
Kind = Literal["model", "dataset"]
ERROR_BY_KIND: dict[Kind, type[GptminiError]] = {"model": CheckpointError, "dataset": DataError}
# What `open_repository` downloads: the file that a repository of this kind is described in.
DESCRIPTION_BY_KIND: dict[Kind, str] = {"model": "config.json", "dataset": "README.md"}
OWNER_AND_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
REVISION = r"refs/[\w.-]+/[\w.-]+|[\w.-]+"
COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
BLOCK_BYTES = 1 << 20
SHOWN_NAMES = 10


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at a commit; `path` is its place in the cache, there or not."""

    kind: Kind
    repository: str
    commit: str
    name: str
    bytes: int
    git_id: str  # names its content
    path: Path


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, and its files by name."""

    kind: Kind
    name: str
    commit: str
    folder: Path
    files: dict[str, HubFile]

    def make_error(self, problem: str) -> GptminiError:
        """Make the error for a repository that cannot be used as a model or dataset."""
        return ERROR_BY_KIND[self.kind](f"{PREFIX}{self.name}: {problem}")


def open_repository(kind: Kind, name: str, revision: str | None = None) -> Repository:
    """List the files of a repository at a revision, by default the newest.

    Where the Hub cannot be reached, that is the newest in the cache. Raises DataError for a dataset
    and CheckpointError for a model that does not exist or may not be read, MachineError for
    everything that hinders the network or the disk.
    """
    hub = _import_huggingface_hub(name)
    with _report_failure(kind, name, revision):
        downloaded = hub.snapshot_download(
            name,
            repo_type=kind,
            revision=revision,
            allow_patterns=[DESCRIPTION_BY_KIND[kind]],
            tqdm_class=make_bar_class(lambda _: None),
        )
    folder = Path(downloaded)
    commit = folder.name
    files = {
        name_in_repository: HubFile(
            kind, name, commit, name_in_repository, size, git_id, folder / name_in_repository
        )
        for name_in_repository, size, git_id in _list_files(hub, kind, name, folder)
        if ".." not in name_in_repository.split("/")  # outside of the folder
    }
    return Repository(kind, name, commit, folder, files)


def _list_files(hub: Any, kind: Kind, name: str, folder: Path) -> list[tuple[str, int, str]]:
    """List name, size and Git's id of the files that the Hub has of a commit."""
    try:
        listed = hub.get_cached_repo_tree(name, repo_type=kind, revision=folder.name)
    except hub.errors.CachedRepoTreeNotFoundError:
        if kind == "dataset":  # some of its files would be another text
            raise MachineError(
                f"{PREFIX}{name}: the cache does not say which files it has; run once with a "
                f"network, and without HF_HUB_OFFLINE"
            ) from None
        # Other programs cache files without the list. Of a model, reading it will miss any.
        found = [path for path in folder.rglob("*") if path.is_file()]
        return [(path.relative_to(folder).as_posix(), path.stat().st_size, "") for path in found]
    return [(file.path, file.size, file.blob_id) for file in listed]


def download(wanted: Sequence[HubFile]) -> None:
    """Bring files into the cache, and check them there, once in a process.

    Raises as `open_repository`; a damaged file is deleted.
    """
    missing = [file for file in wanted if not file.path.exists()]
    if missing:
        _check_free_space(missing)
        size = sum(file.bytes for file in missing)
        with show_byte_progress(f"downloading {missing[0].repository}", size) as advance:
            bar_class = make_bar_class(advance)
            for file in missing:
                _download_file(file, bar_class)
    for file in wanted:
        status = file.path.stat()
        _check_content(file, status.st_size, status.st_mtime_ns)


def _download_file(file: HubFile, bar_class: type) -> None:
    hub = _import_huggingface_hub(file.repository)
    with _report_failure(file.kind, file.repository, file.commit):
        hub.hf_hub_download(
            file.repository,
            file.name,
            repo_type=file.kind,
            revision=file.commit,
            tqdm_class=bar_class,
        )


def _check_free_space(missing: Sequence[HubFile]) -> None:
    needed = sum(file.bytes for file in missing)
    folder = next(each for each in missing[0].path.parents if each.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"{PREFIX}{missing[0].repository}: needs {needed:,} bytes in {folder}, and {free:,} "
            f"are free; make room, or name another folder in HF_HOME"
        )


@cache
def _check_content(file: HubFile, size: int, modified_ns: int) -> None:
    """Raise for a file without the SHA-256 that the Hub states, and delete it.

    The Hub states that of large files, and the cache names the content after it. Where the system
    has no symbolic links, the cache has no such names, and nothing is checked.
    """
    if not file.path.is_symlink():
        return
    expected = Path(os.readlink(file.path)).name
    if not SHA256.fullmatch(expected):
        return
    hashed = hashlib.sha256()
    with (
        show_byte_progress(f"checking {file.name}", size) as advance,
        open(file.path, "rb") as opened,
    ):
        while block := opened.read(BLOCK_BYTES):
            hashed.update(block)
            advance(len(block))
    if hashed.hexdigest() == expected:
        return
    content = file.path.resolve()
    for each in (content, file.path.parent / os.readlink(file.path), file.path):
        each.unlink(missing_ok=True)
    raise ERROR_BY_KIND[file.kind](
        f"{PREFIX}{file.repository}: {file.name}: damaged on its way, and deleted: its SHA-256 is "
        f"not the one that the Hub states; run the same command again"
    )


def read_description(repository: Repository) -> dict[str, Any]:
    """Read the settings at the beginning of a dataset's README.md; {} if there are none."""
    path = repository.folder / DESCRIPTION_BY_KIND["dataset"]
    if not path.exists():
        return {}
    hub = _import_huggingface_hub(repository.name)
    try:
        return hub.metadata_load(path) or {}
    except Exception as error:  # of YAML, of UTF-8 and of the package
        reason = " ".join(str(error).split())
        raise repository.make_error(
            f"README.md: not understood ({shorten(reason, 120)}); download its files, and name "
            f"them with --data"
        ) from None


def list_some(names: Iterable[str]) -> str:
    """List names for a message, the first ones if there are many."""
    listed = list(names)
    shown = ", ".join(listed[:SHOWN_NAMES]) or "none"
    more = len(listed) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _import_huggingface_hub(name: str) -> Any:
    """Import huggingface_hub, which is optional; it shows no messages or bars of its own."""
    try:
        import huggingface_hub  # noqa: PLC0415
        import huggingface_hub.errors  # noqa: PLC0415
        import huggingface_hub.utils  # noqa: PLC0415
    except ImportError:
        raise make_missing_package_error(f"{PREFIX}{name}", "huggingface_hub", "hub") from None
    huggingface_hub.utils.logging.set_verbosity_error()
    return huggingface_hub


# -- failures --------------------------------------------------------------------------------------


@contextmanager
def _report_failure(kind: Kind, name: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a full disk, which is an error soon
            yield
    except GptminiError:
        raise
    except Exception as error:  # hf_xet has types of its own
        raise _explain_failure(error, kind, name, revision) from None


def _explain_failure(
    error: BaseException, kind: Kind, name: str, revision: str | None
) -> GptminiError:
    """Make our error of one of huggingface_hub."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    # The cache lacks the file; the cause says why it was not downloaded.
    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    place = f"{PREFIX}{name}"
    if isinstance(error, errors.HfHubHTTPError | errors.HFValidationError):
        problem = _explain_refusal(error, kind, name, revision)
        if problem is not None:
            return ERROR_BY_KIND[kind](f"{place}: {problem}")
    if isinstance(error, errors.HfHubHTTPError):
        problem = f"the Hub answers {error.response.status_code}; try again later"
        if error.response.status_code == 429:
            problem = (
                "too many requests (429); wait a few minutes, or set HF_TOKEN, which allows more"
            )
    elif isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        problem = (
            "not in the cache, or not all of it, and HF_HUB_OFFLINE is set; run once without it"
        )
    elif isinstance(error, OSError) and error.errno is not None:
        place = error.filename or constants.HF_HUB_CACHE
        problem = f"{describe_os_error(error)}; make room, or name another folder in HF_HOME"
    else:
        reason = shorten(str(error).strip().partition("\n")[0] or type(error).__name__, 120)
        problem = (
            f"{constants.ENDPOINT} was not reached, or left ({reason}); check the network, and run "
            f"the same command again"
        )
    return MachineError(f"{place}: {problem}")


def _explain_refusal(error: Exception, kind: Kind, name: str, revision: str | None) -> str | None:
    """Say what is wrong with a repository, as the Hub answers; None for another failure."""
    from huggingface_hub import constants, errors, get_token  # noqa: PLC0415

    if isinstance(error, errors.HFValidationError):
        return f"not a name on the Hub; write {PREFIX}OWNER/NAME"
    if isinstance(error, errors.GatedRepoError):
        folder = "datasets/" if kind == "dataset" else ""
        return (
            f"gated; accept its terms at {constants.ENDPOINT}/{folder}{name}, then set HF_TOKEN to "
            f"a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision}; leave it out for the newest"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    problems = {
        401: "the Hub refuses this HF_TOKEN; make another, or unset it",
        403: "this HF_TOKEN may not read it; give it the permission",
        404: "lacks a file that it lists; try again, or name another revision",
    }
    is_unknown = isinstance(error, errors.RepositoryNotFoundError)
    if is_unknown or (status == 401 and get_token() is None):
        return (
            f"no such {kind} on the Hub, or a private one; check the name, or set HF_TOKEN to a "
            f"token that may read it"
        )
    return problems.get(status)
