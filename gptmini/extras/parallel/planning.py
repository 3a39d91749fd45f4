"""Make one plan for all ranks: rank 0 makes it and broadcasts the result.

The tokenizer travels along: a machine without the cache of rank 0 would have to learn it again.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gptmini import files, machine
from gptmini.config.load import iter_settings
from gptmini.config.settings import Config
from gptmini.data.corpus import prepare_corpus
from gptmini.errors import ConfigError
from gptmini.extras.parallel.ranks import Ranks
from gptmini.machine import Compute
from gptmini.plan.settle import Plan, make_plan
from gptmini.plan.timing import Machine
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer.tokenizers import Tokenizer

SAME_START_REMEDY = "start all ranks with the same command, code and files"


def plan_on_all_ranks(requested: Config, run: RunDirectory, started: float, group: Ranks) -> Plan:
    """Make a plan on rank 0, and return the same on every rank.

    One rank of each machine prepares the text before the others read it. Raises as `make_plan`, and
    RankError naming a rank that was started with other settings or that has other code, another
    torch or another text.
    """
    compute = machine.pick_compute(requested.train.device, requested.train.dtype)
    if "-" in requested.data.path:
        raise ConfigError("--data -: only one process can read it; save the text to a file")
    group.on_all_ranks(lambda: group.select_accelerator(compute.device))
    settings = dict(iter_settings(requested.model_dump()))
    group.check_same(_describe_environment(compute) | settings, SAME_START_REMEDY)

    def plan_alone() -> tuple[Plan, Tokenizer]:
        plan = make_plan(requested, run, started, world_size=group.world_size)
        own: Any = None  # of each rank
        return replace(plan, corpus=own, machine=own), plan.corpus.tokenizer

    plan, tokenizer = group.on_rank_zero(plan_alone)
    corpus = group.on_local_rank_zero_first(
        lambda: prepare_corpus(plan.config, tokenizer=tokenizer)
    )
    group.check_same({"the text": corpus.content[:12]}, SAME_START_REMEDY)
    machine.keep_freed_memory()
    train = plan.config.train
    compute = group.on_all_ranks(
        lambda: machine.pick_compute(train.device, train.dtype, train.deterministic)
    )
    group.check_same({"deterministic": compute.deterministic}, SAME_START_REMEDY)
    return replace(plan, corpus=corpus, machine=Machine(compute, group.world_size, started))


def _describe_environment(compute: Compute) -> dict[str, Any]:
    """Describe what must be the same on all ranks, besides the settings."""
    sources = sorted(Path(files.__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return {
        "torch": str(torch.__version__),
        "gptmini's code": code[:12],
        "device": compute.device.type,
        "dtype": str(compute.dtype),
        "threads": torch.get_num_threads(),
    }
