"""Expected failures: one line per problem, one exit code per class.

A line reads `where: what is wrong; what to do`. Any other exception is a bug in gptmini.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

UNSUPPORTED = "not supported; leave it out"  # said of tools, and of fields unknown to us


class GptminiError(Exception):
    """Base class; `lines` holds one problem each."""

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class ConfigError(GptminiError):
    """Wrong usage or configuration."""

    exit_code = 2


class DataError(GptminiError):
    """A text, tokenizer or token file that cannot be used."""

    exit_code = 3


class CheckpointError(GptminiError):
    """A run directory or checkpoint that cannot be used."""

    exit_code = 4


class MachineError(GptminiError):
    """A limit of the machine: disk, permissions, memory, device, packages."""

    exit_code = 5


class DivergedError(GptminiError):
    """The loss or a gradient is no longer finite."""

    exit_code = 6


class RankError(GptminiError):
    """One of several processes that train together has failed, or differs from the others."""

    exit_code = 7


class Stopped(BaseException):
    """A signal ended the work, and everything was saved; the exit code is 128 + signal.

    Not an Exception, so that no library takes it for a failure of its own and goes on.
    """

    def __init__(self, signal_number: int, line: str) -> None:
        super().__init__(line)
        self.lines: tuple[str, ...] = (line,)
        self.exit_code = 128 + signal_number


def make_missing_package_error(feature: str, package: str, extra: str) -> MachineError:
    """Make the error for an optional package that `feature` needs and that is not installed."""
    return MachineError(
        f"{feature}: {package} is not installed; run pip install 'gptmini[{extra}]'"
    )


def is_missing_part(error: ModuleNotFoundError) -> bool:
    """Return whether a part of gptmini is missing, rather than a package that it needs."""
    return f"{error.name}".startswith("gptmini.extras")


@contextmanager
def explain_missing_part(feature: str) -> Iterator[None]:
    """Raise MachineError for a part that is missing, and that `feature` needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_missing_part(error):
            raise
        folder = f"{error.name}".replace(".", "/")
        raise MachineError(f"{feature}: {folder} is not in this copy; restore it") from None


def shorten(value: object, length: int = 60) -> str:
    """Shorten a value for a message; from a file or a user, it may be of any length."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def describe_os_error(error: Exception) -> str:
    """Describe a failed call in the system's own words: "no such file or directory"."""
    reason = getattr(error, "strerror", None) or str(error)
    if re.fullmatch(r"\d+ requested and \d+ written", reason):  # as numpy says it
        reason = "no space left on device"
    return reason.lower()


def describe_lookup_error(error: Exception) -> str:
    """Describe damaged data by the KeyError, TypeError or the like that reading it raised."""
    if isinstance(error, KeyError) and isinstance(error.args[0], str):
        return f"{shorten(repr(error.args[0]))} is missing"
    return f"damaged ({shorten(error, 120)})"


def describe_invalid_utf8(where: object, position: str, remedy: str = "convert it to UTF-8") -> str:
    """Describe bytes that are not UTF-8; `position` reads "at byte 11"."""
    return f"{where}: not UTF-8 {position}; {remedy}"
