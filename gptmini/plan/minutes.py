"""Sizes and steps for a given number of minutes, and pacing to keep to them."""

import math
from typing import Any

from gptmini.config.load import completed
from gptmini.config.settings import Config, ModelConfig
from gptmini.console import amount, duration, say, say_fact, warn
from gptmini.machine import Compute
from gptmini.model.optim import cooldown_steps
from gptmini.plan.cost import parameter_count, parameters, training_flops
from gptmini.plan.fit import (
    AFTER_EVALUATION,
    COMPILE_GAIN,
    COMPILE_PAYS,
    StepTime,
    evaluation_seconds,
    has_compiler,
    time_step,
)

Pace = tuple[int, float]  # a step, and the seconds of all updates so far

FINISH = 2  # seconds kept for the sample from the best checkpoint
EVALUATING = 0.05  # of the time at most for evaluations, but for the one at the end
EVALUATIONS = 10
READING_AT_MOST = 2  # times what `evaluation_seconds` expects: ranking a large vocabulary's logits
READ_AT_LEAST = 1024  # tokens at each evaluation; fewer say nothing
SAVED_PER_SECOND = 200_000_000  # bytes of a checkpoint, synced to the disk
SAVES = 4  # at least, where they take no more of the time than evaluations may
TIMING = 0.05  # of the time at most, if a step is short; else a pass and an update
HEAD = 64  # width of a head, about
VOCABULARY = 1024  # assumed until the text is read

# A fine-tuning should make so many updates. Where the base's own batch leaves time for fewer, rows
# become shorter, down to SHORT, which also spares memory; then fewer. It ends where the optimizer's
# update takes longer than the passes: smaller batches would hardly be faster.
UPDATES = 60
SHORT = 256
PROBE = 64  # tokens timed to find out how large a batch may be

# The ladder of models: layers, width, rows per batch.
RUNGS = (
    *((2, 128, 8), (3, 128, 8), (4, 128, 8), (4, 192, 16), (4, 256, 16), (6, 256, 16)),
    *((6, 384, 16), (8, 512, 32), (12, 768, 64)),
)
# How many tokens a model must see for each weight of its blocks to beat the rung below. Bits per
# byte on Tiny Shakespeare by character after equal seconds of updates on one core, in brackets the
# tokens per weight; one run each, seeds differ by 0.01 or so:
#
#       rows   2 x 128      3 x 128      4 x 128      4 x 192      4 x 256
#   20 s   8   2.616 (2.6)  2.626 (1.2)  2.651 (0.7)
#   50 s   8                2.496 (3.0)  2.479 (1.7)  2.564 (0.4)  2.618 (0.1)
#         16                             2.506 (1.8)  2.578 (0.4)
#  180 s   8                                          2.439 (1.5)
#         16                                          2.411 (1.6)  2.447 (0.5)
#  255 s  16                                          2.383 (2.3)  2.386 (0.8, decay 0.1)
#
# A decay of 0.1 in place of 0.3 changed 2.479 to 2.499 and 2.411 to 2.409.
TOKENS_PER_WEIGHT = 0.9


def has_sizes(config: Config) -> bool:
    """Whether all is stated that `choose_sizes` chooses."""
    sizes, train = {"n_layer", "n_head", "d_model"}, config.train
    return sizes <= config.model.model_fields_set and "batch_size" in train.model_fields_set


def choose_sizes(
    config: Config, seconds: float, compute: Compute, ranks: int = 1
) -> tuple[Config, int]:
    """The sizes of the best model for the seconds left, on `ranks` processes, and about its steps.

    Whatever the configuration states is kept. Models are timed from small to large, up to the
    largest that would still see enough tokens.
    """
    given = amount(config.train.minutes or seconds / 60, "minute")
    say(f"  timing models for the {given} given ...")
    chosen, steps = config, 0  # none yet
    unit = ranks * (config.train.micro_batch_size or 1)  # of which a batch is a multiple
    for layers, width, rows in RUNGS:
        wanted = {"n_layer": layers, **_width_and_heads(config.model, width)}
        batch = {"batch_size": math.ceil(rows / unit) * unit}
        candidate = completed(config, {"model": wanted, "train": batch})
        if steps and candidate == chosen:  # the sizes in which the two rungs differ are stated
            continue
        per_step = _seconds_per_step(candidate, seconds, compute, ranks)
        possible = _stated_steps(config) or max(1, int(seconds / per_step))
        tokens = possible * candidate.train.batch_size * candidate.seq_len
        parts = parameters(candidate.model)
        enough = TOKENS_PER_WEIGHT * (parts["attention"] + parts["mlp"])
        fits = tokens >= enough and possible * per_step <= seconds
        if fits or not steps:
            chosen, steps = candidate, possible
        if not fits:
            break
    return chosen, steps


def choose_batch(
    config: Config, asked: Config, seconds: float, compute: Compute, ranks: int, longest: int
) -> tuple[Config, StepTime]:
    """Rows and their length for fine-tuning a model in the seconds left, and the time of a step.

    What `asked` states is kept. No row that it leaves open is longer than `longest`.
    """
    given = amount(config.train.minutes or seconds / 60, "minute")
    say(f"  timing the base for the {given} given ...")
    probe = config.with_train(
        batch_size=1, micro_batch_size=1, seq_len=min(PROBE, longest, config.seq_len)
    )
    timed = time_step(probe, compute, limit=TIMING * seconds)
    per_token = timed.passes / probe.seq_len
    is_open = {"batch_size", "seq_len"} - asked.train.model_fields_set
    unit = ranks * (config.train.micro_batch_size or 1)  # of which a batch is a multiple
    if "seq_len" in is_open:
        config = config.with_train(seq_len=min(config.seq_len, longest))
    while True:
        length, rows = config.seq_len, config.train.batch_size
        growth = training_flops(config.model, length) / training_flops(config.model, probe.seq_len)
        step = StepTime(per_token * growth * length * rows, timed.update)
        per_step = _in_all(step, config, seconds, ranks)
        if UPDATES * per_step <= seconds or step.passes / ranks <= step.update:
            return config, step
        if "seq_len" in is_open and length >= 2 * SHORT:
            config = config.with_train(seq_len=length // 2)
        elif "batch_size" in is_open and rows > unit:
            fewer = max(1, rows // 2 // unit) * unit
            config = config.with_train(batch_size=fewer)
        else:
            return config, step


def choose_steps(
    config: Config,
    seconds: float,
    compute: Compute,
    ranks: int,
    held_out: int,
    timed: StepTime | None = None,
) -> Config:
    """The number of steps for the seconds left, and how often to evaluate on `held_out` tokens.

    If these take too long, on a part of them. A step is timed unless its time is known.
    """
    if timed is None:
        per_step = _seconds_per_step(config, seconds, compute, ranks)
    else:
        per_step = _in_all(timed, config, seconds, ranks)
    config = _reading_a_part(config, seconds, per_step, held_out)
    evaluation = evaluation_seconds(config, per_step, held_out)
    evaluations = min(EVALUATIONS, max(1, int(EVALUATING * seconds / evaluation)))
    if "eval_every" in config.train.model_fields_set:
        per_step += evaluation / config.train.eval_every
        evaluations = 1  # the last one
    left = seconds - FINISH - evaluations * evaluation
    if left < per_step and not _stated_steps(config):
        warn("train.minutes: too short for this machine; making a single step")
    steps = _stated_steps(config) or max(1, int(left / per_step))
    # A quarter fewer evaluations: the machine may turn out to be that much faster.
    interval = math.ceil(1.25 * steps / evaluations)
    saving = 12 * parameter_count(config.model) / SAVED_PER_SECOND  # two moments beside the weights
    saves = min(SAVES, max(1, int(EVALUATING * seconds / saving)))
    intervals = {
        "eval_every": interval,
        "save_every": min(interval, max(1, steps // saves)),  # what a kill may cost
        "log_every": max(1, steps // 100),
    }
    return completed(config, {"train": {"steps": steps, **intervals}})


def _reading_a_part(config: Config, seconds: float, per_step: float, held_out: int) -> Config:
    """The configuration with `eval_tokens`, if reading all would take more than may be evaluated.

    A fine-tuning also evaluates its base.
    """
    evaluations = 1 if config.base.run is None else 2
    reading = evaluation_seconds(config, per_step, held_out) - AFTER_EVALUATION
    needed = READING_AT_MOST * evaluations * reading
    if needed <= EVALUATING * seconds:
        return config
    part = max(READ_AT_LEAST, config.seq_len, int(EVALUATING * seconds / needed * held_out))
    if part >= held_out:
        return config
    return completed(config, {"train": {"eval_tokens": part}})


def _stated_steps(config: Config) -> int | None:
    return config.train.steps if "steps" in config.train.model_fields_set else None


def _seconds_per_step(config: Config, seconds: float, compute: Compute, ranks: int) -> float:
    """Measured, but for the gain of compiling where the seconds left are worth that."""
    vocab_size = config.model.vocab_size or VOCABULARY
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    sized = config.model_copy(update={"model": model})
    timed = time_step(sized, compute, limit=TIMING * seconds)
    return _in_all(timed, config, seconds, ranks)


def _in_all(timed: StepTime, config: Config, seconds: float, ranks: int) -> float:
    """The seconds of a step on all ranks, with the gain of compiling."""
    compiled = config.train.compile != "off" and seconds > 2 * COMPILE_PAYS and has_compiler()
    return timed.passes / ranks / (COMPILE_GAIN if compiled else 1) + timed.update


def report_left(minutes: float, left: float) -> None:
    """Say how much of the minutes was spent before planning."""
    spent = duration(60 * minutes - left)
    rest = f"{duration(left)} left" if left > 0 else "none left"
    say_fact(f"  time      {spent} of {amount(minutes, 'minute')} spent on preparing, {rest}")


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


def paced_steps(
    config: Config,
    since: Pace,
    now: Pace,
    elapsed: float,
    held_out: int,
    evaluating: float = 0.0,
    saving: float = 0.0,
) -> int:
    """The number of steps that ends with the minutes, evaluations on `held_out` tokens included.

    At the speed between two points of the run, each its step and the seconds of all updates so far.
    `evaluating` and `saving` are what the last evaluation and the last checkpoint took.
    Never so low that the cool-down would have begun already; once it has, the number is fixed.
    """
    train, step = config.train, now[0]
    cooling = train.cooldown == 1 or cooldown_steps(train) >= train.steps - step
    if train.minutes is None or cooling:
        return train.steps
    per_step = (now[1] - since[1]) / (step - since[0])
    evaluation = max(evaluating, evaluation_seconds(config, per_step, held_out))
    left = 60 * train.minutes - FINISH - elapsed - evaluation - saving  # the last ones
    around = evaluation / train.eval_every + saving / train.save_every
    steps = step + int(left / (per_step + around))
    return max(steps, min(train.steps, math.ceil((step + 2) / (1 - train.cooldown))))
