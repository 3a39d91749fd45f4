"""Sizes and steps for a given number of minutes, and pacing to keep to them."""

import math
from typing import Any

from gptmini.config.load import completed
from gptmini.config.settings import Config, ModelConfig, TrainConfig
from gptmini.console import amount, say, warn
from gptmini.machine import Compute
from gptmini.model.optim import cooldown_steps
from gptmini.plan.cost import parameter_count
from gptmini.plan.fit import COMPILE_GAIN, COMPILE_PAYS, has_compiler, time_step

FINISH = 3  # seconds kept for the last checkpoint and the sample
HEAD = 64  # width of a head, about

# The ladder of models: layers, width, rows per batch.
RUNGS = (
    *((4, 128, 16), (4, 192, 16), (4, 256, 16), (6, 256, 16)),
    *((6, 384, 16), (8, 512, 32), (12, 768, 64)),
)
# How many tokens a model must see to beat the rung below. On Tiny Shakespeare by character, 0.8
# took 4 x 256 to a loss of 1.465 and 1.0 took 6 x 256 to 1.449, but 0.3 took 6 x 384 only to 1.505.
# Those three runs also differ in dropout (0, 0.1, 0.2), so this is a hint, not a law.
TOKENS_PER_PARAMETER = 1.0


def plan(config: Config, seconds: float, compute: Compute, ranks: int = 1) -> Config:
    """The sizes and the number of steps of the best model for the time left, on `ranks` processes.

    Whatever the configuration states is kept. Models are timed from small to large, up to the
    largest that would still see enough tokens.
    """
    stated = "steps" in config.train.model_fields_set
    chosen: Config | None = None
    given = amount(config.train.minutes or seconds / 60, "minute")
    say(f"  timing models for the {given} given ...")
    for layers, width, rows in RUNGS:
        sizes = {"n_layer": layers, **_width_and_heads(config.model, width)}
        candidate = completed(config, {"model": sizes, "train": {"batch_size": rows}})
        same = chosen and chosen.train.batch_size == candidate.train.batch_size
        if chosen and same and chosen.model == candidate.model:  # its sizes are stated
            continue
        timed = time_step(candidate, compute)
        passes = timed.passes / ranks
        if config.train.compile != "off" and seconds > 2 * COMPILE_PAYS and has_compiler():
            passes /= COMPILE_GAIN
        per_step = passes + timed.update
        steps = config.train.steps if stated else max(1, int((seconds - FINISH) / per_step))
        tokens = steps * candidate.train.batch_size * candidate.seq_len
        fits = (
            tokens >= TOKENS_PER_PARAMETER * parameter_count(candidate.model)
            and steps * per_step <= seconds
        )
        if chosen is None and not stated and seconds - FINISH < per_step:
            warn("train.minutes: too short for this machine; making a single step")
        if chosen is None or fits:
            tenth, hundredth = max(1, steps // 10), max(1, steps // 100)
            intervals = {"eval_every": tenth, "save_every": tenth, "log_every": hundredth}
            chosen = completed(candidate, {"train": {"steps": steps, **intervals}})
        if not fits:
            break
    assert chosen is not None
    return chosen


def _width_and_heads(model: ModelConfig, width: int) -> dict[str, Any]:
    """The nearest width to this one, or the stated one, and heads that fit it and the KV heads.

    Heads are about HEAD wide, or as stated.
    """
    pairs = 2 if model.position == "rope" else 1  # rope rotates pairs of a head's numbers
    unit = model.attention.n_kv_head or 1
    if "d_model" in model.model_fields_set:
        width = model.d_model
    stated = "head_dim" in model.model_fields_set
    head = model.head_dim if stated else HEAD
    fitting = [heads for heads in range(unit, width + 1, unit) if width % (pairs * heads) == 0]
    heads = min(
        fitting,
        key=lambda heads: abs(math.log(width / heads / head)),
        default=unit * max(1, round(width / head / unit)),
    )
    if "n_head" in model.model_fields_set:
        heads = model.n_head
    if stated:
        return {"n_head": heads, "d_model": heads * head}
    multiple = pairs * heads
    return {"n_head": heads, "d_model": max(1, round(width / multiple)) * multiple}


def paced_steps(train: TrainConfig, step: int, elapsed: float, per_step: float) -> int:
    """The number of steps that ends with the minutes, at the seconds per step measured so far.

    Never so low that the cool-down would have begun already; once it has, the number is fixed.
    """
    if train.minutes is None or cooldown_steps(train) >= train.steps - step:
        return train.steps
    steps = step + int((60 * train.minutes - FINISH - elapsed) / per_step)
    return max(steps, min(train.steps, math.ceil((step + 2) / (1 - train.cooldown))))
