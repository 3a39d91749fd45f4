"""Choose sizes and steps for a given number of minutes, and adjust the steps during the run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gptmini.config.settings import Config, ModelConfig, TrainConfig
from gptmini.console import format_count, warn
from gptmini.model.optim import get_cooldown_steps
from gptmini.plan.cost import count_parameters, count_parameters_by_part, count_step_flops
from gptmini.plan.recipe import TextSize, compute_useful_steps, count_epochs, reads_often

if TYPE_CHECKING:
    from gptmini.plan.estimates import CandidateModel
    from gptmini.plan.timing import Machine

StepAndSeconds = tuple[int, float]  # a step, and the seconds that had elapsed then

# Evaluations, but for the one at the end, take at most this share of the time.
EVALUATION_SHARE = 0.05
MAX_EVALUATIONS = 10
# Checkpoints; of a base, which may be large, an evaluation writes one, too.
TARGET_SAVES = 4
# All of the held-out text is read, so that losses of one text compare, if that takes no more of the
# time than this; else so many tokens for each that is trained (scripts/LOG.md: How far is the loss
# of a part from that of all held-out text?).
MAX_WHOLE_EVALUATION_SHARE = 0.1
EVALUATED_SHARE = 0.02
# Tokens at each evaluation; fewer say nothing.
MIN_EVAL_TOKENS = 1024
# Tokens trained in the time of one that is evaluated: 0.38 and 0.43 (4 x 192 and 2 x 128).
TRAINED_PER_EVALUATED = 0.4
# Tokens trained in the time of the sample that follows an evaluation.
TRAINED_PER_SAMPLE = 3000
MAX_SAMPLE_SHARE = 0.01  # of the time, for each sample
TARGET_HEAD_DIM = 64
# Until the text is read.
ASSUMED_VOCAB_SIZE = 1024

# Rows that the minutes choose are never shorter, so no text need be longer.
MIN_ROW_LENGTH = 256
# Fine-tuning aims at this many updates. Where the base's own batch leaves time for fewer, rows
# become shorter, which also spares memory; then fewer. It ends where the optimizer's update takes
# longer than the passes: smaller batches would hardly be faster.
TARGET_UPDATES = 60
# Fewer updates teach next to nothing.
MIN_UPDATES = 20


def states_all_sizes(config: Config) -> bool:
    """Return whether the configuration states all that `choose_sizes` chooses."""
    states_model = {"n_layer", "n_head", "d_model"} <= config.model.model_fields_set
    return states_model and "batch_size" in config.train.model_fields_set


def choose_sizes(
    config: Config, seconds: float, machine: Machine, text: TextSize
) -> tuple[Config, Machine, int]:
    """Choose the sizes of the best model for the seconds left.

    Whatever the configuration states is kept. A step of the model that fits by prediction is
    measured, and then the choice is made again. Also returns the measured machine, and about how
    many steps it makes.
    """
    predicted, _ = _choose_largest(config, seconds, machine, text)
    measured = machine.measure(_assume_vocabulary(predicted))
    chosen, steps = _choose_largest(config, seconds, measured, text)
    return chosen, measured, steps


def _choose_largest(
    config: Config, seconds: float, machine: Machine, text: TextSize
) -> tuple[Config, int]:
    """Choose the largest model, by whether training would read the text often, and its steps."""
    estimates = machine.estimates
    chosen, steps = _choose_largest_of(estimates.few_epochs, config, seconds, machine, text)
    if reads_often(chosen.with_train(steps=steps), text):
        return _choose_largest_of(estimates.many_epochs, config, seconds, machine, text)
    return chosen, steps


def _choose_largest_of(
    models: tuple[CandidateModel, ...],
    config: Config,
    seconds: float,
    machine: Machine,
    text: TextSize,
) -> tuple[Config, int]:
    """Try models from small to large, up to the first that would see too few tokens.

    Returns the one before, and its steps. A model whose layers and width are stated takes the batch
    of the nearest in size.
    """
    stated = config.model.model_fields_set  # heads and their size make a width
    if "n_layer" in stated and ("d_model" in stated or {"n_head", "head_dim"} <= stated):
        models = (_find_nearest(models, config.model),)
    chosen = config
    steps = 0  # none yet
    unit = machine.world_size * (config.train.micro_batch_size or 1)  # a batch is a multiple of it
    updating = (1 - EVALUATION_SHARE) * seconds
    for model in models:
        sizes = {"n_layer": model.n_layer, **_choose_width_and_heads(config.model, model.width)}
        if config.train.seq_len is None:  # else no position beyond a row is trained
            sizes["context_length"] = model.context_length
        candidate = config.fill_open({"model": sizes})
        rows = math.ceil(model.batch_tokens / candidate.seq_len / unit) * unit
        candidate = candidate.fill_open({"train": {"batch_size": rows}})
        # Several processes shard a model whose weights and optimizer do not fit whole.
        count = count_parameters(_assume_vocabulary(candidate).model)
        if steps and machine.get_free_memory(count, sharded=True) < 0:
            break
        per_step = machine.estimate_seconds_per_step(_assume_vocabulary(candidate))
        useful = compute_useful_steps(candidate, text)
        possible = _get_stated_steps(config) or max(1, int(min(updating / per_step, useful)))
        tokens = possible * candidate.train.batch_size * candidate.seq_len
        parts = count_parameters_by_part(candidate.model)
        enough = model.min_tokens_per_weight * (parts["attention"] + parts["mlp"])
        fits = tokens >= enough and possible * per_step <= updating
        if fits or not steps:
            chosen = candidate
            steps = possible
        if not fits:
            break
    return chosen, steps


def _find_nearest(models: tuple[CandidateModel, ...], stated: ModelConfig) -> CandidateModel:
    """Find the model that is nearest in size to one that is stated, for its batch."""

    def compute_distance(model: CandidateModel) -> float:
        width = _choose_width_and_heads(stated, model.width)["d_model"]
        return abs(math.log(model.n_layer * model.width**2 / (stated.n_layer * width**2)))

    return min(models, key=compute_distance)


def shorten_rows(config: Config) -> Config:
    """Cut the tokens of a step into the shortest rows that the minutes may choose."""
    length = min(MIN_ROW_LENGTH, config.seq_len)
    rows = config.train.batch_size * config.seq_len // length
    return config.with_train(seq_len=length, batch_size=rows)


def shorten_context(config: Config, stated: TrainConfig) -> Config:
    """Cut the rows of a text that is too short for longer ones, and as many tokens to a step."""
    rows = config.train.batch_size * config.seq_len // MIN_ROW_LENGTH
    if "batch_size" not in stated.model_fields_set:
        config = config.with_train(batch_size=rows)
    model = config.model.model_copy(update={"context_length": MIN_ROW_LENGTH})
    return config.model_copy(update={"model": model})


def choose_batch(
    config: Config, stated: TrainConfig, seconds: float, machine: Machine, longest_row: int
) -> Config:
    """Choose rows and their length for fine-tuning a model in the seconds left.

    What was `stated` is kept. No row that it leaves open is longer than `longest_row`.
    """
    unit = machine.world_size * (config.train.micro_batch_size or 1)  # a batch is a multiple of it
    is_batch_size_open = "batch_size" not in stated.model_fields_set
    is_seq_len_open = "seq_len" not in stated.model_fields_set
    if is_seq_len_open:
        config = config.with_train(seq_len=min(config.seq_len, longest_row))
    while True:
        length = config.seq_len
        rows = config.train.batch_size
        makes_enough_updates = TARGET_UPDATES * machine.estimate_seconds_per_step(config) <= seconds
        passes, update = count_step_flops(config)
        if makes_enough_updates or passes / machine.world_size <= update:
            return config
        if is_seq_len_open and length >= 2 * MIN_ROW_LENGTH:
            config = config.with_train(seq_len=length // 2)
        elif is_batch_size_open and rows > unit:
            fewer = max(1, rows // 2 // unit) * unit
            config = config.with_train(batch_size=fewer)
        else:
            return config


def choose_steps(
    config: Config, seconds: float, machine: Machine, held_out: int, text: TextSize
) -> Config:
    """Choose the steps that the seconds left allow, and how often to evaluate, save and log.

    Unless steps are stated, chooses no more than help with this text. An evaluation reads the
    `held_out` tokens, or a part of them if all take too long.
    """
    train = config.train
    per_step = machine.estimate_seconds_per_step(config)
    possible = seconds / per_step  # steps, an evaluation counted as those that take as long
    config = _limit_eval_tokens(config, possible, held_out)
    sample = TRAINED_PER_SAMPLE / (train.batch_size * config.seq_len)
    sample = min(sample, MAX_SAMPLE_SHARE * possible)
    evaluation = sample + count_evaluation_in_steps(config, held_out)
    most = MAX_EVALUATIONS if config.base.run is None else TARGET_SAVES
    evaluations = min(most, max(1, int(EVALUATION_SHARE * possible / evaluation)))
    if "eval_every" in train.model_fields_set:
        left = (possible - evaluation) / (1 + evaluation / train.eval_every)
    else:
        left = possible - evaluations * evaluation
    useful_steps = compute_useful_steps(config, text)
    stated_steps = _get_stated_steps(config)
    steps = stated_steps or max(1, int(min(left, useful_steps)))
    epochs = count_epochs(config.with_train(steps=steps), text)
    if steps < MIN_UPDATES and not stated_steps and epochs < 1:  # a short text is read once anyway
        warn(
            f"train.minutes: too short for this machine: about {format_count(steps, 'step')}, "
            f"{epochs:.1%} of the text; use more minutes or a smaller model"
        )
    # Where there is time for the last evaluation alone, it stays the only one on a faster machine.
    interval = steps / evaluations if evaluations > 1 else 4 * steps
    # The best evaluation is saved. So that nothing is saved twice, a save is due there anyway.
    saves_per_evaluation = max(1, int(TARGET_SAVES * interval / steps))
    save_every = math.ceil(interval / saves_per_evaluation)
    chosen = {
        "steps": steps,
        "eval_every": save_every * saves_per_evaluation,
        "save_every": save_every,  # the most that a kill may cost
        "log_every": max(1, steps // 100),
    }
    return config.fill_open({"train": chosen})


def _limit_eval_tokens(config: Config, possible_steps: float, held_out: int) -> Config:
    """Set `eval_tokens` if reading all held-out text takes too large a share of the time.

    A part is a power of two, so that runs of about one speed read the same.
    """
    tokens = possible_steps * config.train.batch_size * config.seq_len
    if TRAINED_PER_EVALUATED * held_out <= MAX_WHOLE_EVALUATION_SHARE * tokens:
        return config
    power_of_two = 1 << int(EVALUATED_SHARE * tokens).bit_length() >> 1
    eval_tokens = max(MIN_EVAL_TOKENS, config.seq_len, power_of_two)
    if eval_tokens >= held_out:
        return config
    return config.fill_open({"train": {"eval_tokens": eval_tokens}})


def count_evaluation_in_steps(config: Config, held_out: int) -> float:
    """Count how many steps take as long as an evaluation."""
    read = min(held_out, config.train.eval_tokens or held_out)
    return TRAINED_PER_EVALUATED * read / (config.train.batch_size * config.seq_len)


def _get_stated_steps(config: Config) -> int | None:
    return config.train.steps if "steps" in config.train.model_fields_set else None


def _assume_vocabulary(config: Config) -> Config:
    """Fill in the size of the vocabulary before the text is read."""
    vocab_size = config.model.vocab_size or ASSUMED_VOCAB_SIZE
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    return config.model_copy(update={"model": model})


def _choose_width_and_heads(model: ModelConfig, width: int) -> dict[str, Any]:
    """Choose the width nearest to this one, and heads that fit it and the KV heads.

    What the model states is kept. Heads are about TARGET_HEAD_DIM wide, or as stated.
    """
    pair = 2 if model.position == "rope" else 1  # rope rotates pairs of a head's numbers
    unit = model.attention.n_kv_head or 1
    if "d_model" in model.model_fields_set:
        width = model.d_model
    states_head_dim = "head_dim" in model.model_fields_set
    head_dim = model.head_dim if states_head_dim else TARGET_HEAD_DIM

    def compute_distance(n_head: int) -> float:
        return abs(math.log(width / n_head / head_dim))

    fitting = [n_head for n_head in range(unit, width + 1, unit) if width % (pair * n_head) == 0]
    if "n_head" in model.model_fields_set:
        n_head = model.n_head
    elif fitting:
        n_head = min(fitting, key=compute_distance)
    else:
        n_head = unit * max(1, round(width / head_dim / unit))
    if states_head_dim:
        return {"n_head": n_head, "d_model": n_head * head_dim}
    multiple = pair * n_head
    return {"n_head": n_head, "d_model": max(1, round(width / multiple)) * multiple}


def compute_steps_for_minutes(
    config: Config, since: StepAndSeconds, now: StepAndSeconds, held_out: int
) -> int:
    """Compute the number of steps that ends with the minutes, at the speed from `since` to `now`.

    All that took time counts, also evaluations of the `held_out` tokens, samples and checkpoints.
    The number is never so low that the cool-down would have begun already, or that the warm-up were
    longer; once the cool-down has begun, the number is fixed.
    """
    train = config.train
    step, elapsed = now
    first_step, first_elapsed = since
    # The first step of the cool-down has the full rate, too.
    has_cooled = train.cooldown == 1 or get_cooldown_steps(train) > train.steps - step + 1
    if train.minutes is None or has_cooled:
        return train.steps
    evaluation = count_evaluation_in_steps(config, held_out)
    evaluations = 0  # from the first step on, the seconds are those of updates alone
    if first_step:
        evaluations = step // train.eval_every - first_step // train.eval_every
    made = step - first_step + evaluations * evaluation
    seconds = (1 - MAX_SAMPLE_SHARE) * 60 * train.minutes - elapsed  # and the last sample
    possible = seconds / (elapsed - first_elapsed) * made
    left = (possible - evaluation) / (1 + evaluation / train.eval_every)
    fewest_without_cooldown = math.ceil((step + 2) / (1 - train.cooldown))
    fewest = max(train.warmup_steps, min(train.steps, fewest_without_cooldown))
    return max(step + int(left), fewest)
