"""Run commands of gptmini with a PyTorch that was built without torch.distributed.

    python -m tests.promises.single_process FOLDER COMMANDS

COMMANDS are JSON, and so is the last line of stderr: their exit codes.
"""

import json
import os
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

from gptmini.cli import app


def run_all(folder: str, commands: str) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    codes = []
    for words in json.loads(commands):
        sys.argv = ["gptmini", *words]
        try:
            app.main()
        except SystemExit as end:
            codes.append(end.code or 0)
    print(json.dumps(codes), file=sys.stderr)


if __name__ == "__main__":
    assert not torch.distributed.is_available()
    run_all(*sys.argv[1:])
