"""Make a run's configuration, in the one place that does: `decide` and its stages.

Each stage takes the configuration and returns it with more settled, from what was requested, what
the run chose before, the text and the machine. After `decide` only the number of steps may change,
and only under `train.minutes`.
"""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmini import machine
from gptmini.config.load import fill_open_settings
from gptmini.config.settings import Config, TokenizerConfig
from gptmini.console import say_header, warn
from gptmini.data.corpus import learns_vocabulary, measure_text, pin_datasets, prepare_corpus
from gptmini.data.token_file import Corpus
from gptmini.distributed.gradients import MAX_EXACT_WORLD_SIZE
from gptmini.errors import ConfigError
from gptmini.machine import Compute
from gptmini.plan import minutes
from gptmini.plan.cost import count_parameters
from gptmini.plan.decision import Decision
from gptmini.plan.finetune import (
    FINETUNING_SETTINGS,
    inherit_model,
    record_base,
    say_base,
    start_from_base,
)
from gptmini.plan.overfitting import (
    TextSize,
    compute_useful_steps,
    count_epochs,
    measure_corpus,
    reads_often,
)
from gptmini.plan.recipe import choose_dropout, choose_recipe
from gptmini.plan.timing import CompileTrial, StepTime, choose_micro_batch_size, try_compile
from gptmini.runs.directory import RunDirectory

# Document tokens read in training from which a model knows what follows them. Nats for the first 20
# bytes of a held-out paragraph (2 layers, width 64, 180 kB in 1 to 100 documents, 9 epochs):
# tokens read          0     9    18    36    82   264   901
# after that token  29.9  29.2  28.2  26.5  26.7  25.4  24.8
# after a newline   25.4  26.0  25.3  25.0  25.1  25.7  24.9
MIN_DOCUMENT_TOKENS_READ = 100

# Of text in a vocabulary of 512 to 2,048 that was learned from it: 2.1 to 3 in English, German and
# Python.
BYTES_PER_TOKEN = 2.7
# How far off the guess may be, as a factor: a compressed text is much longer than its file.
MAX_GUESS_ERROR = 1.3

# Sizes that were chosen before the text was prepared are chosen again if less of the time is left.
MIN_TIME_SHARE_LEFT = 0.8


@dataclass(frozen=True)
class TimeBudget:
    """The minutes that a run may take from `started` on, and where they are spent."""

    minutes: float
    started: float
    compute: Compute
    world_size: int

    def get_seconds_left(self) -> float:
        return 60 * self.minutes - (time.perf_counter() - self.started)


def decide(
    requested: Config,
    run: RunDirectory | None,
    cache: Path,
    started: float | None = None,
    *,
    dry_run: bool = False,
    world_size: int = 1,
) -> Decision:
    """Complete a configuration: tokenizer, sizes, steps, recipe, micro-batch, compilation.

    `run` is where it is to be trained; a run that exists keeps what it chose. `dry_run`: plan only;
    skip checks and timings that need this machine, and leave the base's weights unread. Each of
    `world_size` processes computes its share of every batch.

    Raises ConfigError for settings that contradict the text or the base, DataError for a text that
    cannot be used, CheckpointError for a base that cannot, MachineError for a model that does not
    fit.
    """
    started = time.perf_counter() if started is None else started
    machine.keep_freed_memory()

    config, existing = resume_or_start(requested, run)
    config = pin_datasets(config, existing)
    train = config.train
    compute = machine.pick_compute(train.device, train.dtype, train.deterministic)
    if existing is None and not dry_run:
        config = check_base_weights(config, compute)

    # The minutes decide sizes and steps of a new run; one that is resumed keeps its own.
    budget = None
    if config.train.minutes is not None and existing is None:
        budget = TimeBudget(config.train.minutes, started, compute, world_size)
    config, corpus = prepare_text(config, requested, run, cache, budget)
    step_time = None
    if budget is not None:
        config, step_time = choose_sizes(config, requested, corpus, budget)
        config = choose_steps(config, corpus, budget, step_time)
    elif existing is not None and _is_paced(requested):
        config = limit_added_steps(config, existing, corpus)

    is_reduce_open = config.train.reduce == "auto"
    config = split_batch(config, world_size, requested.train.micro_batch_size is not None)
    text = measure_corpus(config, corpus)
    if existing is None:
        config = choose_recipe(config, text)
    config = choose_dropout(config, text)
    config = choose_sample_start(config, corpus)
    if not dry_run:
        config = shard_if_needed(config, compute, world_size, is_reduce_open)
    config = fit_micro_batch(config, compute, world_size)

    trial = CompileTrial(config.train.compile == "on")  # not tried: nothing was timed
    if not dry_run and not _is_compile_settled(config, existing, world_size):
        config, trial = choose_compile(config, compute, world_size, step_time)
    machine.release_freed_memory(compute.device)
    return Decision(
        config=config,
        corpus=corpus,
        compute=compute,
        started=started,
        paced=_is_paced(requested),
        seconds_per_step=trial.seconds_per_step,
        compile_outcome=trial.outcome,
    )


def _is_paced(requested: Config) -> bool:
    """Return whether the number of steps follows the minutes, since none was requested."""
    return requested.train.minutes is not None and "steps" not in requested.train.model_fields_set


# -- where the run comes from ----------------------------------------------------------------------


def resume_or_start(requested: Config, run: RunDirectory | None) -> tuple[Config, Config | None]:
    """Fill in what an existing run chose, or what the base of a new one has.

    Also returns the configuration of the existing run; None for a new one.
    """
    if run is not None and run.exists:
        existing = run.load_config()
        check_base(requested, existing, run)
        return reuse_choices(requested, existing), existing
    if requested.base.run is not None:
        return start_from_base(requested, RunDirectory(Path(requested.base.run))), None
    return requested, None


def check_base(requested: Config, existing: Config, run: RunDirectory) -> None:
    """Refuse to resume a run from another base than its own, or to write to the base itself.

    Raises ConfigError.
    """
    now = requested.base.run
    before = existing.base.run
    if now == before:
        return
    problem = f"base.run: {before or 'not set'} in {run.path}, now {now or 'not set'}"
    if now is not None and Path(now).resolve() == run.path.resolve():
        problem = f"{run.path}: is the base itself, which is never written to"
    raise ConfigError(f"{problem}; choose another --out")


def reuse_choices(requested: Config, earlier: Config, same_run: bool = True) -> Config:
    """Fill the settings that a configuration leaves open with what an earlier run chose.

    The same run, when it is resumed, keeps everything, except that other minutes change its steps.
    Other runs, to be compared with the first, share how it computes, its rates if they have its
    optimizer and, under `train.minutes`, its sizes.
    """
    is_finetuning = requested.base.run is not None
    by_minutes = requested.train.minutes is not None and earlier.train.minutes is not None
    if same_run and is_finetuning:
        requested = inherit_model(requested, earlier)

    model_keys = ["dropout"]
    train_keys = ["compile", "deterministic"]
    if requested.train.optimizer == earlier.train.optimizer:
        model_keys += ["tie_embeddings"]
        train_keys += ["lr", "embed_lr", "weight_decay"]
    if by_minutes:
        model_keys += ["n_layer", "d_model", "head_dim", "d_ff"]
        train_keys += ["batch_size", "eval_tokens"]
        if is_finetuning:
            train_keys += ["seq_len"]
    if same_run:
        train_keys += ["micro_batch_size"]
        if not (requested.train.shard or earlier.train.shard):
            train_keys += ["reduce"]
    if same_run and by_minutes:
        model_keys += ["n_head"]
        train_keys += ["steps", "warmup_steps", "eval_every", "save_every", "log_every"]
    if same_run and is_finetuning:
        train_keys += FINETUNING_SETTINGS

    is_kind_open = requested.tokenizer.kind in ("auto", earlier.tokenizer.kind)
    if (same_run or by_minutes) and is_kind_open and requested.tokenizer.vocab_size is None:
        requested = requested.model_copy(update={"tokenizer": earlier.tokenizer})

    chosen = earlier.model_dump()
    if requested.train.minutes is not None and earlier.train.minutes is not None:
        steps = round(earlier.train.steps * requested.train.minutes / earlier.train.minutes)
        chosen["train"]["steps"] = max(1, earlier.train.warmup_steps, steps)
    defaults = {
        "model": _pick(chosen["model"], model_keys),
        "train": _pick(chosen["train"], train_keys),
    }
    if same_run and is_finetuning:
        defaults["base"] = _pick(chosen["base"], ["step", "sha256"])
    return fill_open_settings(requested, defaults)


def _pick(section: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    return {key: section[key] for key in keys}


def check_base_weights(config: Config, compute: Compute) -> Config:
    """Read the weights that a new run begins from, and record which they are.

    Raises MachineError for weights that do not fit, before they are read.
    """
    if config.base.run is None:
        return config
    machine.check_memory(count_parameters(config.model), compute.device)
    return record_base(config, RunDirectory(Path(config.base.run)))


# -- the text --------------------------------------------------------------------------------------


def prepare_text(
    config: Config,
    requested: Config,
    run: RunDirectory | None,
    cache: Path,
    budget: TimeBudget | None,
) -> tuple[Config, Corpus]:
    """Prepare the text in tokens and settle the tokenizer; also returns the corpus.

    A vocabulary that is learned for a budget of minutes suits the sizes and steps they allow, so
    these are chosen first.
    """
    requested_kind = requested.tokenizer.kind
    if config.base.run is not None:
        requested_kind = ""  # the base's, so none was chosen for this text
        corpus = _prepare_for_finetuning(config, requested, run, cache, budget)
    elif budget is not None and learns_vocabulary(config):
        config, corpus = _choose_sizes_and_prepare(config, cache, budget)
    else:
        corpus = prepare_corpus(config, cache)
    config = config.with_tokenizer(corpus.tokenizer.kind, corpus.tokenizer.vocab_size)
    say_header(corpus.format_summary(requested_kind))
    if config.base.run is not None:
        say_base(config, corpus)
    return config, corpus


def _prepare_for_finetuning(
    config: Config,
    requested: Config,
    run: RunDirectory | None,
    cache: Path,
    budget: TimeBudget | None,
) -> Corpus:
    """Prepare the text in the tokens of the base.

    A run that is resumed has a tokenizer of its own: its base may have been deleted.
    """
    owner = RunDirectory(Path(config.base.run or ""))
    if run is not None and run.exists:
        owner = run
    tokenizer = TokenizerConfig(kind=str(owner.tokenizer_file))
    config = config.model_copy(update={"tokenizer": tokenizer})
    if budget is not None and requested.train.seq_len is None:
        # The budget may choose rows as short as this, so a text need not be longer.
        config = config.with_train(seq_len=min(minutes.MIN_ROW_LENGTH, config.seq_len))
    return prepare_corpus(config, cache)


def _choose_sizes_and_prepare(
    config: Config, cache: Path, budget: TimeBudget
) -> tuple[Config, Corpus]:
    """Choose sizes, and prepare the text in a vocabulary that suits them and the steps.

    How often they read the text is guessed from its bytes. The sizes stay open if the text took so
    long that the time left may not suffice for them, or if the guess was wrong.
    """
    before = budget.get_seconds_left()
    tokens = max(1.0, measure_text(config.data) / BYTES_PER_TOKEN)
    guess = TextSize(total=tokens, per_epoch=tokens)
    sized, steps = minutes.choose_sizes(config, before, budget.compute, budget.world_size, guess)
    with_steps = sized.with_train(steps=steps)
    corpus = prepare_corpus(with_steps, cache)
    took_long = budget.get_seconds_left() < MIN_TIME_SHARE_LEFT * before
    text = measure_corpus(with_steps, corpus)
    is_off = not 1 / MAX_GUESS_ERROR < guess.total / text.total < MAX_GUESS_ERROR
    read_often = reads_often(with_steps, text)
    was_wrong = read_often != reads_often(with_steps, guess) or (read_often and is_off)
    return config if took_long or was_wrong else sized, corpus


# -- sizes and steps for a number of minutes -------------------------------------------------------


def choose_sizes(
    config: Config, requested: Config, corpus: Corpus, budget: TimeBudget
) -> tuple[Config, StepTime | None]:
    """Choose the sizes that are still open; for fine-tuning only the batch.

    Also returns the time of a step, where choosing the batch found it.
    """
    seconds = budget.get_seconds_left()
    minutes.say_time_left(budget.minutes, seconds)
    if config.base.run is not None:
        longest_row = min(len(file) for file in corpus.training + corpus.validation) - 1
        return minutes.choose_batch(
            config, requested, seconds, budget.compute, budget.world_size, longest_row
        )
    if not minutes.states_all_sizes(config):
        text = measure_corpus(config, corpus)
        config, _ = minutes.choose_sizes(config, seconds, budget.compute, budget.world_size, text)
    return config, None


def choose_steps(
    config: Config, corpus: Corpus, budget: TimeBudget, step_time: StepTime | None
) -> Config:
    """Choose the steps that the minutes left allow, and how often to evaluate, save and log."""
    return minutes.choose_steps(
        config,
        budget.get_seconds_left(),
        budget.compute,
        budget.world_size,
        corpus.held_out,
        step_time,
        compute_useful_steps(config, measure_corpus(config, corpus)),
    )


def limit_added_steps(config: Config, existing: Config, corpus: Corpus) -> Config:
    """Let a run that is resumed with more minutes go on, but not until its model gets worse."""
    useful = compute_useful_steps(config, measure_corpus(config, corpus))
    most = max(existing.train.steps, useful)
    return config.with_train(steps=int(min(config.train.steps, most)))


# -- settings that follow from the text and the steps ----------------------------------------------


def split_batch(config: Config, world_size: int, is_micro_batch_stated: bool) -> Config:
    """Check that processes can share every batch equally, and choose how they add gradients.

    They add them exactly where that costs little and every process has the whole model. A
    micro-batch that does not divide a process's rows is chosen again unless it was stated. Raises
    ConfigError for what does not divide, and for exact sums of shards.
    """
    train = config.train
    rows, rest = divmod(train.batch_size, world_size)
    if rest:
        nearest = [count * world_size for count in (rows, rows + 1) if count > 0]
        raise ConfigError(
            f"train.batch_size: {train.batch_size} rows do not divide among {world_size} "
            f"processes; use {' or '.join(map(str, nearest))}"
        )
    size = train.micro_batch_size
    if size is not None and rows % size:
        problem = f"{size} does not divide the {rows} rows of each of {world_size} processes"
        if is_micro_batch_stated:
            raise ConfigError(f"train.micro_batch_size: {problem}; use a divisor of {rows}")
        warn(f"train.micro_batch_size: {problem}; choosing another")
        config = config.with_train(micro_batch_size=None)
    is_power_of_two = world_size & (world_size - 1) == 0
    if train.reduce == "exact" and not is_power_of_two:
        raise ConfigError(
            f"train.reduce: exact needs 1, 2, 4 or 8 processes, not {world_size}; use fast"
        )
    is_sharded = train.shard and world_size > 1
    if train.reduce == "exact" and is_sharded:
        raise ConfigError("train.reduce: exact needs whole models, not train.shard; use fast")
    if train.reduce == "auto":
        few = is_power_of_two and 1 < world_size <= MAX_EXACT_WORLD_SIZE
        is_exact = few and not is_sharded
        config = config.with_train(reduce="exact" if is_exact else "fast")
    return config


def choose_sample_start(config: Config, corpus: Corpus) -> Config:
    """Choose what stands before a text without a prompt: the end-of-text token, if it was learned.

    A model of a single document has hardly ever read that token, and continues it with garbage. It
    knows what begins after a line break; a text without those has a character that is common.
    """
    if "start" in config.sample.model_fields_set:
        return config
    start = None  # the end-of-text token
    epochs = count_epochs(config, measure_corpus(config, corpus))
    document_tokens_read = epochs * corpus.inner_document_count
    if document_tokens_read < MIN_DOCUMENT_TOKENS_READ:
        text = corpus.read_excerpt()
        start = "\n" if "\n" in text else Counter(text).most_common(1)[0][0]
    return fill_open_settings(config, {"sample": {"start": start}})


# -- the machine -----------------------------------------------------------------------------------


def shard_if_needed(
    config: Config, compute: Compute, world_size: int, is_reduce_open: bool
) -> Config:
    """Shard a model that does not fit whole; raises MachineError if it does not fit at all.

    ConfigError if gradients are to be added exactly, for which every process needs it whole.
    """
    count = count_parameters(config.model)
    device = compute.device
    whole = machine.estimate_training_bytes(count, device, world_size, sharded=False)
    if world_size > 1 and whole > machine.get_total_memory(device):
        if config.train.reduce == "exact" and not is_reduce_open:
            raise ConfigError(
                "train.reduce: exact needs whole models, which do not fit; use fast, and "
                "train.shard: true"
            )
        config = config.with_train(shard=True, reduce="fast")
    if world_size > 1 and config.train.shard and config.train.compile == "auto":
        config = config.with_train(compile="off")
    machine.check_memory(count, device, world_size, config.train.shard)
    return config


def fit_micro_batch(config: Config, compute: Compute, world_size: int) -> Config:
    """Choose as many rows per forward pass as fit."""
    if config.train.micro_batch_size is not None:
        return config
    size = choose_micro_batch_size(config, compute, world_size)
    return config.with_train(micro_batch_size=size)


def _is_compile_settled(config: Config, existing: Config | None, world_size: int) -> bool:
    """Return whether compiling needs no trial.

    A run that is resumed had its trial when it began. A sharded model gets none, since the trial
    times the whole model, which may not fit.
    """
    was_tried = existing is not None and config.train.compile == existing.train.compile
    is_sharded = world_size > 1 and config.train.shard
    return was_tried or is_sharded


def choose_compile(
    config: Config, compute: Compute, world_size: int, step_time: StepTime | None
) -> tuple[Config, CompileTrial]:
    """Compile if that pays on the rows of one process; also returns what trying it brought.

    `step_time` is that of the whole batch without compiling, if it is known.
    """
    share = config.with_train(batch_size=config.train.batch_size // world_size)
    if step_time is not None:
        step_time = StepTime(step_time.passes / world_size, step_time.update)
    trial = try_compile(share, compute, step_time)
    return config.with_train(compile="on" if trial.compiled else "off"), trial
