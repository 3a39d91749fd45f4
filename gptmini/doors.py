"""Load parts of extras/ that several others use; MachineError where one is not in this copy."""

from types import ModuleType

from gptmini.errors import explain_missing_part


def load_plots() -> ModuleType:
    """Load what draws pictures."""
    with explain_missing_part("pictures"):
        from gptmini.extras.plots import plots  # noqa: PLC0415 - may be missing
    return plots


def load_replicas() -> ModuleType:
    """Load what shares a batch among processes, and what one needs whose sums are exact."""
    with explain_missing_part("several processes or exact sums"):
        from gptmini.extras.parallel import replicas  # noqa: PLC0415 - may be missing
    return replicas


def load_pages() -> ModuleType:
    """Load what makes a page of a run."""
    with explain_missing_part("pages"):
        from gptmini.extras.page import export  # noqa: PLC0415 - may be missing
    return export
