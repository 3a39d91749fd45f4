"""Load parts of extras/ that several others use; MachineError where one is not in this copy."""

from types import ModuleType

from gptmini.errors import explain_missing_part


def load_plots() -> ModuleType:
    """Load what draws pictures."""
    try:
        from gptmini.extras.plots import plots  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        raise explain_missing_part("pictures", error) from None
    return plots


def load_replicas() -> ModuleType:
    """Load what shares a batch among processes, and what one needs whose sums are exact."""
    try:
        from gptmini.extras.parallel import replicas  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        raise explain_missing_part("several processes or exact sums", error) from None
    return replicas


def load_pages() -> ModuleType:
    """Load what makes a page of a run."""
    try:
        from gptmini.extras.page import export  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        raise explain_missing_part("pages", error) from None
    return export
