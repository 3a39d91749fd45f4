"""Trains from Python: what `gptmini train` does, as one function.

import gptmini
run = gptmini.fit({"data": {"path": "my.txt"}, "train": {"minutes": 5}}, "runs/my")
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptmini.config.load import find_config_file, load_config, validate
from gptmini.config.settings import Config
from gptmini.distributed.group import join_group
from gptmini.files import DEFAULT_CACHE_DIR
from gptmini.generate.run import Run, load_run
from gptmini.plan.broadcast import decide_on_all_ranks
from gptmini.runs.directory import RunDirectory
from gptmini.train import trainer


def fit(
    config: Config | Mapping[str, Any] | str | Path,
    out: str | Path,
    cache: Path = DEFAULT_CACHE_DIR,
) -> Run:
    """Train a run, or resume it, in the directory `out`; returns it with its best weights.

    `config` states what differs from the defaults, in sections as a YAML file does. It may also be
    the path of such a file, or the name of one in configs/. Progress goes to stderr. Raises the
    errors of `gptmini.errors` that the command reports; after a signal that is Stopped, and the
    same call resumes. Under torchrun, all processes train one model.
    """
    started = time.perf_counter()
    if isinstance(config, str | Path):
        requested = load_config(find_config_file(str(config)), [])
    else:
        requested = config if isinstance(config, Config) else validate(dict(config), {})
    directory = RunDirectory(Path(out))
    with join_group() as group:
        decision = decide_on_all_ranks(requested, directory, cache, started, group)
        trainer.train(decision, directory.path)
    return load_run(out, requested.train.device, cache=cache)
