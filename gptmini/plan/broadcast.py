"""Make one decision for all ranks: rank 0 decides and broadcasts the result.

The tokenizer travels along: a machine without the cache of rank 0 would have to learn it again.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gptmini import files, machine
from gptmini.config.load import iter_settings, validate
from gptmini.config.settings import Config, TokenizerConfig
from gptmini.data.corpus import prepare_corpus
from gptmini.data.token_file import Corpus
from gptmini.distributed.group import Group
from gptmini.errors import ConfigError
from gptmini.machine import Compute
from gptmini.plan.decide import decide
from gptmini.plan.decision import Decision
from gptmini.runs.directory import RunDirectory

SAME_START_REMEDY = "start all ranks with the same command, code and files"


def decide_on_all_ranks(
    requested: Config, run: RunDirectory, cache: Path, started: float, group: Group
) -> Decision:
    """Decide on rank 0, and return the same decision on every rank.

    One rank of each machine prepares the text before the others read it. Raises as `decide`, and
    RankError naming a rank that was started with other settings or that has other code, another
    torch or another text.
    """
    compute = machine.pick_compute(requested.train.device, requested.train.dtype)
    if group.world_size == 1:
        return replace(decide(requested, run, cache, started), group=group)
    if "-" in requested.data.path:
        raise ConfigError("--data -: only one process can read it; save the text to a file")
    group.on_all_ranks(lambda: group.select_accelerator(compute.device))
    settings = dict(iter_settings(requested.model_dump()))
    group.check_same(_describe_environment(compute) | settings, SAME_START_REMEDY)

    def decide_as_json() -> dict[str, Any]:
        decision = decide(requested, run, cache, started, world_size=group.world_size)
        return {
            "config": decision.config.model_dump(),
            "tokenizer": decision.corpus.tokenizer.to_json(),
            "paced": decision.paced,
            "seconds_per_step": decision.seconds_per_step,
            "compile_outcome": decision.compile_outcome,
        }

    decided = group.on_rank_zero(decide_as_json)
    config = validate(decided["config"], {})
    corpus = group.on_local_rank_zero_first(
        lambda: _prepare_with_tokenizer(config, decided["tokenizer"], cache)
    )
    group.check_same({"the text": corpus.content[:12]}, SAME_START_REMEDY)
    machine.keep_freed_memory()
    train = config.train
    compute = group.on_all_ranks(
        lambda: machine.pick_compute(train.device, train.dtype, train.deterministic)
    )
    group.check_same({"deterministic": compute.deterministic}, SAME_START_REMEDY)
    return Decision(
        config=config,
        corpus=corpus,
        compute=compute,
        started=started,
        paced=decided["paced"],
        seconds_per_step=decided["seconds_per_step"],
        compile_outcome=decided["compile_outcome"],
        group=group,
    )


def _prepare_with_tokenizer(config: Config, tokenizer: str, cache: Path) -> Corpus:
    """Prepare the text in the tokens of rank 0's tokenizer, which is not learned again."""
    digest = hashlib.sha256(tokenizer.encode()).hexdigest()
    path = cache / f"{digest[:20]}-tokenizer.json"
    if not path.exists():  # else another rank, preparing the text, might remove a half-written one
        cache.mkdir(parents=True, exist_ok=True)
        files.atomic_write_bytes(path, tokenizer.encode())
    with_tokenizer = config.model_copy(update={"tokenizer": TokenizerConfig(kind=str(path))})
    return prepare_corpus(with_tokenizer, cache)


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
