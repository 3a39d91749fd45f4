"""The doors to parts in extras/ that several others use; each says in a line what is missing."""

from types import ModuleType

from gptmini.errors import explain_missing_guest


def load_plots() -> ModuleType:
    """Load what draws pictures; MachineError where it is not in this copy."""
    try:
        from gptmini.extras.plots import plots  # noqa: PLC0415 - a door
    except ModuleNotFoundError as error:
        raise explain_missing_guest("pictures", error) from None
    return plots


def load_pages() -> ModuleType:
    """Load what makes a page of a run; MachineError where it is not in this copy."""
    try:
        from gptmini.extras.page import export  # noqa: PLC0415 - a door
    except ModuleNotFoundError as error:
        raise explain_missing_guest("pages", error) from None
    return export
