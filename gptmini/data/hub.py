"""Files of the Hugging Face Hub by name, through huggingface_hub and its cache.

`open_snapshot` lists what a repository holds at a revision, and `download` brings files of it into
the cache. What the cache holds is neither downloaded again nor does it need a network.

The environment variables are those of huggingface_hub: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and
HF_ENDPOINT, among others.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gptmini.console import HiddenBar, escape_control_characters
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
NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|\w[\w.-]*(?!/))"
    r"(@(?P<revision>refs/[\w.-]+/[\w.-]+|[\w.-]+))?(/(?P<path>.+))?",
    re.ASCII,
)
COMMIT = re.compile("[0-9a-f]{40}")
SHOWN_NAMES = 10


@dataclass(frozen=True)
class HubName:
    """A repository as it was named; `path` is a file in it, or what stands for some."""

    name: str
    revision: str | None
    path: str | None

    def __str__(self) -> str:
        """Write the name as `parse_name` reads it, behind `hf:`."""
        revision = "" if self.revision is None else f"@{self.revision}"
        path = "" if self.path is None else f"/{self.path}"
        return f"{PREFIX}{self.name}{revision}{path}"


def parse_name(text: str) -> HubName | None:
    """Parse OWNER/NAME[@REVISION][/PATH]; None if it is something else."""
    match = NAME.fullmatch(text)
    return None if match is None else HubName(**match.groupdict())


@dataclass(frozen=True)
class Snapshot:
    """A repository at a commit: the names of its files, sorted, and where the cache has them."""

    kind: Kind
    name: str
    commit: str
    folder: Path
    files: list[str]

    def make_error(self, problem: str) -> GptminiError:
        """Make the error for a repository that cannot be used as a model or dataset."""
        return ERROR_BY_KIND[self.kind](f"{PREFIX}{self.name}: {problem}")


def open_snapshot(kind: Kind, name: str, revision: str | None = None) -> Snapshot:
    """List the files of a repository at a revision, by default the newest; download none.

    Where the Hub cannot be reached, that is the newest in the cache. Raises DataError for a dataset
    and CheckpointError for a model that does not exist or may not be read, MachineError for
    everything that hinders the network or the disk.
    """
    hub = _import_huggingface_hub(name)
    with _report_failure(kind, name, revision):
        downloaded = hub.snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=[], tqdm_class=HiddenBar
        )
    folder = Path(downloaded)
    return Snapshot(kind, name, folder.name, folder, sorted(_list_files(hub, kind, name, folder)))


def _list_files(hub: Any, kind: Kind, name: str, folder: Path) -> list[str]:
    """List the names of the files that the Hub has of a commit."""
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
        return [path.relative_to(folder).as_posix() for path in found]
    return [file.path for file in listed]


def download(snapshot: Snapshot, names: Iterable[str]) -> list[Path]:
    """Bring files of a snapshot into the cache; returns their places. Raises as `open_snapshot`.

    A name that leaves the folder of the snapshot is refused.
    """
    hub = _import_huggingface_hub(snapshot.name)
    with _report_failure(snapshot.kind, snapshot.name, snapshot.commit):
        # One at a time: Ctrl-C would have to wait for the threads of snapshot_download.
        return [
            Path(
                hub.hf_hub_download(
                    snapshot.name, name, repo_type=snapshot.kind, revision=snapshot.commit
                )
            )
            for name in names
        ]


def list_some(names: Iterable[str]) -> str:
    """List names for a message, the first ones if there are many."""
    listed = list(names)
    shown = escape_control_characters(", ".join(listed[:SHOWN_NAMES])) or "none"
    more = len(listed) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _import_huggingface_hub(name: str) -> Any:
    """Import huggingface_hub, which is optional; its warnings are not shown."""
    try:
        import huggingface_hub  # noqa: PLC0415
        import huggingface_hub.errors  # noqa: PLC0415
        import huggingface_hub.utils  # noqa: PLC0415
    except ImportError:
        raise make_missing_package_error(f"{PREFIX}{name}", "huggingface_hub", "hub") from None
    huggingface_hub.utils.logging.set_verbosity_error()
    return huggingface_hub


@contextmanager
def _report_failure(kind: Kind, name: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a full disk, which is an error soon
            yield
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
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    place = f"{PREFIX}{name}"
    error_class: type[GptminiError] = MachineError
    if status in range(400, 429) or isinstance(error, errors.HFValidationError):
        error_class = ERROR_BY_KIND[kind]
    if isinstance(error, errors.GatedRepoError):
        folder = "datasets/" if kind == "dataset" else ""
        problem = (
            f"gated; accept its terms at {constants.ENDPOINT}/{folder}{name}, then set HF_TOKEN to "
            f"a token of that account"
        )
    elif isinstance(
        error,
        errors.HFValidationError | errors.RevisionNotFoundError | errors.RepositoryNotFoundError,
    ):
        wanted = kind if revision is None else f"{kind} of revision {revision}"
        problem = (
            f"no such {wanted} on the Hub, or a private one; check the name, and set HF_TOKEN to a "
            f"token that may read it"
        )
    elif status:
        problem = f"the Hub answers {status}; try again later, or set HF_TOKEN, which allows more"
    elif isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        problem = (
            "not in the cache, or not all of it, and HF_HUB_OFFLINE is set; run once without it"
        )
    elif isinstance(error, OSError) and error.errno is not None:
        place = error.filename or constants.HF_HUB_CACHE
        problem = f"{describe_os_error(error)}; name another folder in HF_HOME"
    else:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = (
            f"no answer from {constants.ENDPOINT} "
            f"({escape_control_characters(shorten(first_line, 120))}); check the network, and run "
            f"the same command again"
        )
    return error_class(f"{place}: {problem}")
