"""`gptmini compare`: train variants, or take finished runs, and compare them."""

import json
from itertools import chain
from pathlib import Path
from typing import Literal

from gptmini.cli.options import (
    RUNS_FOLDER,
    AsJson,
    Assignments,
    Data,
    Steps,
    Threads,
    argument,
    build_config,
    flag,
    option,
)
from gptmini.errors import ConfigError

DEFAULT_ATTENTIONS = "mha,gqa:2,mqa"


def compare(
    names: list[str] | None = argument(
        None, "CONFIG|RUN", "Configurations or texts to train on, or finished runs."
    ),
    attention: str | None = option(
        None,
        "KINDS",
        "Attentions to compare, separated by commas.",
        show_default=DEFAULT_ATTENTIONS,
    ),
    seeds: int | None = option(
        None, "N", "Runs per variant; one may be mere luck.", min=1, max=100, show_default="1"
    ),
    tune: bool = flag("Let the first seed of each variant choose its learning rates.", "--tune"),
    data: Data = None,
    split: Literal["validation", "test"] | None = option(
        None,
        "PART",
        "Part of the text to compare on; test needs data.test.",
        show_default="validation; with --tune test if there is one",
    ),
    steps: Steps = None,
    minutes: float | None = option(None, "X", "Minutes per training run, instead of --steps."),
    threads: Threads = None,
    assignments: Assignments = None,
    out: Path | None = option(
        None,
        "DIR",
        "Directory for runs and results.",
        show_default="runs/compare, or runs/compared if nothing is trained",
    ),
    as_json: AsJson = False,
) -> None:
    """Train variants in turn, or compare finished ones."""
    finished = [Path(name) for name in names or [] if (Path(name) / "config.yaml").exists()]
    configs: list[str | None] = [name for name in names or [] if Path(name) not in finished]
    if not finished and not configs:
        configs = [None]
    if finished and configs:
        raise ConfigError(f"{configs[0]}: not a run; name only runs, as {finished[0]}, or none")
    train_options = {"--steps": steps, "--minutes": minutes}
    if finished:
        only_for_training = train_options | {
            "--attention": attention,
            "--set": assignments,
            "--seeds": seeds,
            "--tune": tune or None,
            "--data": data,
        }
        for label, value in only_for_training.items():
            if value is not None:
                raise ConfigError(f"{label}: these runs are already trained; remove this option")
    variants = {}
    for kind, name in _list_variants(configs, attention):
        config = build_config(name, data, kind, train_options, assignments)
        variants[kind or name or "default"] = config
    if "-" in chain(*(config.data.path for config in variants.values())):
        raise ConfigError("--data -: standard input can be read only once; name a file")
    out = out or RUNS_FOLDER / ("compared" if finished else "compare")
    from gptmini.console import say
    from gptmini.extras.compare import compare as comparing

    if finished:
        found = comparing.compare_finished(finished, split)
    else:
        found = comparing.compare_variants(variants, seeds or 1, out, split, tune=tune)
    print(json.dumps(found.to_dict()) if as_json else found)
    comparing.write_results(found, out)  # after the table, which a picture that fails must not cost
    if not as_json:
        say(f"compare: all figures: {out / 'compare.md'}")


def _list_variants(
    configs: list[str | None], attention: str | None
) -> list[tuple[str | None, str | None]]:
    """List the (attention, configuration) of each variant.

    A single configuration is compared with itself, in each of DEFAULT_ATTENTIONS.
    """
    if len(configs) > 1 and attention:
        raise ConfigError("--attention: needs a single configuration; name one, or remove it")
    if len(configs) != 1:
        return [(None, name) for name in configs]
    return [(kind, configs[0]) for kind in (attention or DEFAULT_ATTENTIONS).split(",")]


COMMANDS = {"compare": compare}
