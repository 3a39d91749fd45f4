"""The failures a user can meet: a line per problem, an exit code per kind.

A line reads `where: what is wrong; what to do`. Anything else that is raised is our own bug.
"""


class GptminiError(Exception):
    """Base of every expected failure; `lines` holds one problem each."""

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class ConfigError(GptminiError):
    """Wrong usage or configuration."""

    exit_code = 2


class DataError(GptminiError):
    """A corpus, a tokenizer or a token file that cannot be used."""

    exit_code = 3


class CheckpointError(GptminiError):
    """A run directory or a checkpoint that cannot be used."""

    exit_code = 4


class MachineError(GptminiError):
    """A limit of the machine: disk, permission, memory, device."""

    exit_code = 5


class DivergedError(GptminiError):
    """Training left the finite numbers."""

    exit_code = 6


class Stopped(GptminiError):  # noqa: N818 - it is no error
    """A signal ended the work after everything was saved; the exit code is 128 + signal."""

    def __init__(self, signal_number: int, line: str) -> None:
        super().__init__(line)
        self.exit_code = 128 + signal_number
