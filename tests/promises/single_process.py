"""Run commands of gptmini with a PyTorch that was built without torch.distributed.

    python -m tests.promises.single_process FOLDER COMMANDS

See commands.py for both.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

MISSING = ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init")


class WithoutDistributed(MetaPathFinder):
    """Takes from PyTorch's compiled part what a build without USE_DISTRIBUTED does not have."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torch.distributed":
            for missing in MISSING:
                delattr(sys.modules["torch._C"], missing)


sys.meta_path.insert(0, WithoutDistributed())

import torch

from tests.promises.commands import run_all

if __name__ == "__main__":
    assert not torch.distributed.is_available()
    run_all(*sys.argv[1:])
