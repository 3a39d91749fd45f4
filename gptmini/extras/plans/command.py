"""`gptmini size`: plan a training run without training it."""

import json

from gptmini.cli.options import (
    AsJson,
    Assignments,
    AttentionName,
    Base,
    ConfigName,
    Data,
    Minutes,
    Steps,
    build_config,
    flag,
    option,
    resolve_run,
)
from gptmini.errors import ConfigError


def size(
    config: ConfigName = None,
    data: Data = None,
    base: Base = None,
    attention: AttentionName = None,
    steps: Steps = None,
    minutes: Minutes = None,
    accelerator: str | None = option(
        None, "NAME", "Plan for this accelerator: l4, a100, h100 and others."
    ),
    ranks: int = option(1, "N", "Plan for N accelerators that share each batch.", min=1),
    shard: bool = flag("Divide weights and optimizer among the ranks (FSDP)."),
    utilization: float | None = option(
        None,
        "X",
        "Fraction of peak FLOP/s that you reach.",
        min=0.01,
        max=1,
        show_default="0.4; a100 0.55",
    ),
    network: float | None = option(
        None,
        "GBIT",
        "Bandwidth per rank between 8-GPU nodes, in Gbit/s.",
        min=0.1,
        show_default="by accelerator, h100 400",
    ),
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the parameters, memory, data and time of a training run."""
    if accelerator is not None and minutes is not None:
        raise ConfigError(
            "--minutes: plans for this machine, not an accelerator; remove --accelerator"
        )
    accelerator_options = {
        "--utilization": utilization,
        "--network": network,
        "--shard": shard or None,
        "--ranks": ranks if ranks > 1 else None,
    }
    for label, value in accelerator_options.items():
        if value is not None and accelerator is None:
            raise ConfigError(f"{label}: needs --accelerator; name one, or remove {label}")
    if shard and ranks == 1:
        raise ConfigError("--shard: one rank has nothing to divide; add --ranks, or remove it")
    train_options = {"--steps": steps, "--minutes": minutes}
    settings = build_config(config, data, attention, train_options, assignments, base)
    if base is not None:
        resolve_run(base)  # answers a wrong name with the nearest
    from gptmini.extras.plans.report import estimate_training, format_report

    speed = None
    if accelerator is None:
        facts = estimate_training(settings)
    else:
        from gptmini.extras.plans import plans

        hardware = plans.find_accelerator(accelerator, utilization, network)
        facts = plans.estimate_on_accelerators(settings, hardware, ranks, shard)
        speed = plans.format_speed(facts["time"])
    print(json.dumps(facts) if as_json else "\n".join(format_report(facts, speed)))


COMMANDS = {"size": size}
