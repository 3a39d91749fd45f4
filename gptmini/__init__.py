"""gptmini: train a small GPT on your text and look inside.

import gptmini
run = gptmini.load("runs/stories")
print(run.generate("Ella ", max_new_tokens=200, temperature=0.8))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gptmini import errors

if TYPE_CHECKING:
    from gptmini.config.settings import Config, ModelConfig
    from gptmini.data.corpus import prepare_corpus
    from gptmini.data.token_file import Corpus
    from gptmini.generate.filters import make_random_number, sample_token
    from gptmini.generate.run import Run
    from gptmini.generate.run import load_run as load
    from gptmini.model.attention import Attention, attend, make_mask
    from gptmini.model.cache import KVCache
    from gptmini.model.gpt import GPT
    from gptmini.model.optim import Optimizer, compute_learning_rate
    from gptmini.tokenizer.tokenizers import Tokenizer
    from gptmini.train.api import fit
    from gptmini.train.batches import Batches, iter_validation_batches
    from gptmini.train.evaluate_run import evaluate_text as evaluate

__version__ = "0.3.0"
_HOMES = {  # where each public name lives; after a colon, what it is called there
    # What most people need.
    "fit": "train.api",
    "load": "generate.run:load_run",
    "evaluate": "train.evaluate_run:evaluate_text",
    "Run": "generate.run",
    "export_run": "extras.interop.export",
    "import_model": "extras.interop.import_model",
    "compare": "extras.compare.compare",
    # The parts, for a loop of your own: scripts/nano.py puts them together.
    "Config": "config.settings",
    "ModelConfig": "config.settings",
    "Tokenizer": "tokenizer.tokenizers",
    "prepare_corpus": "data.corpus",
    "Corpus": "data.token_file",
    "Batches": "train.batches",
    "iter_validation_batches": "train.batches",
    "GPT": "model.gpt",
    "KVCache": "model.cache",
    "Attention": "model.attention",
    "attend": "model.attention",
    "make_mask": "model.attention",
    "Optimizer": "model.optim",
    "compute_learning_rate": "model.optim",
    "make_random_number": "generate.filters",
    "sample_token": "generate.filters",
}
__all__ = [
    "GPT",
    "Attention",
    "Batches",
    "Config",
    "Corpus",
    "KVCache",
    "ModelConfig",
    "Optimizer",
    "Run",
    "Tokenizer",
    "attend",
    "compare",
    "compute_learning_rate",
    "errors",
    "evaluate",
    "export_run",
    "fit",
    "import_model",
    "iter_validation_batches",
    "load",
    "make_mask",
    "make_random_number",
    "prepare_corpus",
    "sample_token",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, since torch takes more than a second to load."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gptmini' has no attribute {name!r}")
    module, _, real_name = _HOMES[name].partition(":")
    return getattr(import_module(f"gptmini.{module}"), real_name or name)


def __dir__() -> list[str]:
    return [*_HOMES, "errors", "__version__"]
