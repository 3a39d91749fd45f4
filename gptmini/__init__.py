"""gptmini: turn any text into a GPT that you understand.

import gptmini
run = gptmini.load("runs/python-docs")
print(run.generate("The ", max_new_tokens=200, temperature=0.8))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptmini.analysis.evaluate import evaluate_text as evaluate
    from gptmini.config.settings import Config, ModelConfig
    from gptmini.generate.run import Run
    from gptmini.generate.run import load_run as load
    from gptmini.interop.export import export_run
    from gptmini.interop.import_model import import_model
    from gptmini.model.gpt import GPT
    from gptmini.train.api import fit

__version__ = "0.2.0"
__all__ = [
    "GPT",
    "Config",
    "ModelConfig",
    "Run",
    "evaluate",
    "export_run",
    "fit",
    "import_model",
    "load",
]

_HOMES = {  # where each public name lives; after a colon, what it is called there
    "GPT": "model.gpt",
    "Config": "config.settings",
    "ModelConfig": "config.settings",
    "Run": "generate.run",
    "evaluate": "analysis.evaluate:evaluate_text",
    "fit": "train.api",
    "export_run": "interop.export",
    "import_model": "interop.import_model",
    "load": "generate.run:load_run",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, since torch takes more than a second to load."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gptmini' has no attribute {name!r}")
    module, _, real_name = _HOMES[name].partition(":")
    return getattr(import_module(f"gptmini.{module}"), real_name or name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
