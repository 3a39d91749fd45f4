"""One decision for all ranks: rank 0 makes it and tells the others."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gptmini
from gptmini import files, machine
from gptmini.config.load import iter_settings, validate
from gptmini.config.settings import Config, TokenizerConfig
from gptmini.data.corpus import prepare_corpus
from gptmini.distributed.group import Group
from gptmini.errors import ConfigError
from gptmini.machine import Compute
from gptmini.plan.decide import decide
from gptmini.plan.decision import Decision
from gptmini.runs.directory import RunDirectory


def decide_on_all_ranks(
    requested: Config, run: RunDirectory, cache: Path, started: float, group: Group
) -> Decision:
    """What rank 0 decides, on every rank; the text is prepared once per machine.

    Raises as `decide`, and RankError naming a rank that was asked for something else, or that has
    other code, another torch or another text.
    """
    compute = machine.pick_compute(requested.train.device, requested.train.dtype)
    if group.world_size == 1:
        return replace(decide(requested, run, cache, started, compute), group=group)
    if "-" in requested.data.path:
        raise ConfigError("--data -: only one process can read it; save the text to a file")
    remedy = "start all ranks with the same command, code and files"
    group.check_same(
        _describe_environment(compute) | dict(iter_settings(requested.model_dump())), remedy
    )

    def decide_on_rank_zero() -> Decision | None:
        if group.rank > 0:
            return None
        return decide(requested, run, cache, started, compute, world_size=group.world_size)

    decision = group.on_all_ranks(decide_on_rank_zero)
    facts = group.broadcast_object(None if decision is None else _describe_decision(decision))
    config = validate(facts["config"], {})
    corpus = group.on_local_rank_zero_first(
        lambda: _prepare_with_tokenizer(config, facts["tokenizer"], cache)
    )
    group.check_same({"the text": corpus.content[:12]}, remedy)
    if decision is not None:
        return replace(decision, group=group)
    machine.keep_freed_memory()
    return Decision(config, corpus, compute, started, facts["paced"], group=group)


def _describe_decision(decision: Decision) -> dict[str, Any]:
    """Return as JSON data what the other ranks need to make the same decision."""
    return {
        "config": decision.config.model_dump(),
        "paced": decision.paced,
        "tokenizer": decision.corpus.tokenizer.to_json(),
    }


def _prepare_with_tokenizer(config: Config, tokenizer: str, cache: Path) -> Any:
    """The corpus in the tokens of rank 0's tokenizer, which is not learned again."""
    path = cache / f"{hashlib.sha256(tokenizer.encode()).hexdigest()[:20]}-tokenizer.json"
    if not path.exists():  # else another rank, preparing the text, might remove a half-written one
        cache.mkdir(parents=True, exist_ok=True)
        files.atomic_write_bytes(path, tokenizer.encode())
    kind = TokenizerConfig(kind=str(path))
    return prepare_corpus(config.model_copy(update={"tokenizer": kind}), cache)


def _describe_environment(compute: Compute) -> dict[str, Any]:
    """What must be the same everywhere, besides the settings."""
    sources = sorted(Path(gptmini.__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return {
        "torch": str(torch.__version__),
        "gptmini's code": code[:12],
        "device": compute.device.type,
        "dtype": str(compute.dtype),
        "threads": torch.get_num_threads(),
    }
