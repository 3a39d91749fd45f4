"""Load parts of extras/ that several others use; a command says which folder a copy lacks."""

from types import ModuleType


def load_plots() -> ModuleType:
    """Load what draws pictures."""
    from gptmini.extras.plots import plots  # noqa: PLC0415 - may be missing

    return plots


def load_pages() -> ModuleType:
    """Load what makes a page of a run."""
    from gptmini.extras.page import export  # noqa: PLC0415 - may be missing

    return export
