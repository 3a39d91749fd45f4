"""The one place where a run's configuration is made: from what was asked, what the run already
chose, the text and the machine.

After `decide` only the number of steps may change, and only under `train.minutes`.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from gptmini import machine
from gptmini.config.load import fill_open_settings
from gptmini.config.settings import Config, TokenizerConfig
from gptmini.console import say_header, warn
from gptmini.data.corpus import learns_vocabulary, prepare_corpus
from gptmini.data.token_file import Corpus
from gptmini.distributed.gradients import MAX_EXACT_WORLD_SIZE
from gptmini.errors import ConfigError
from gptmini.machine import Compute
from gptmini.plan.cost import count_parameters
from gptmini.plan.decision import Decision
from gptmini.plan.finetune import (
    FINETUNING_SETTINGS,
    inherit_model,
    record_base,
    say_base,
    start_from_base,
)
from gptmini.plan.minutes import (
    SHORT,
    choose_batch,
    choose_sizes,
    choose_steps,
    report_left,
    states_all_sizes,
)
from gptmini.plan.timing import StepTime, choose_compile, choose_micro_batch_size
from gptmini.runs.directory import RunDirectory

# From this many epochs on. Bits per byte of builtin:python-docs (vocabulary 1,024, width 128) after
# 4.9 epochs: 1.700 without dropout and 1.755 with 0.1; after 9.3 epochs: 1.694 and 1.637. Of Tiny
# Shakespeare by character (width 192) after 4.5 epochs: 2.383 and 2.449. One run each.
DROPOUT_BY_EPOCHS = ((12, 0.2), (6, 0.1), (0, 0.0))

# Document tokens read in training from which a model knows what follows them. Nats for the first 20
# bytes of a held-out paragraph (2 layers, width 64, 180 kB in 1 to 100 documents, 9 epochs):
# tokens read          0     9    18    36    82   264   901
# after that token  29.9  29.2  28.2  26.5  26.7  25.4  24.8
# after a newline   25.4  26.0  25.3  25.0  25.1  25.7  24.9
MIN_DOCUMENT_TOKENS_READ = 100


def decide(
    requested: Config,
    run: RunDirectory | None,
    cache: Path,
    started: float | None = None,
    compute: Compute | None = None,
    here: bool = True,
    world_size: int = 1,
) -> Decision:
    """Complete a configuration: tokenizer, sizes, steps, dropout, micro-batch, compilation.

    `run` is where it is to be trained; a run that is there keeps what it chose. Without `here` the
    run is not trained on this machine now: nothing is checked against its memory, the weights of
    its base are not read, and whether to compile stays open. Each of `world_size` processes computes its
    share of every batch.

    Raises ConfigError for settings that contradict the text or the base, DataError for a text that
    cannot be used, CheckpointError for a base that cannot, MachineError for a model that does not
    fit.
    """
    started = time.perf_counter() if started is None else started
    compute = compute or machine.pick_compute(requested.train.device, requested.train.dtype)
    machine.keep_freed_memory()
    existing = run.load_config() if run is not None and run.exists else None
    if run is not None and existing is not None:
        check_base(requested, existing, run)
    config = requested if existing is None else reuse_choices(requested, existing)
    timed: StepTime | None = None
    planned = config.train.minutes is not None and existing is None
    if requested.base.run is not None:
        config, corpus = _prepare_finetuning(config, run, cache, compute if here else None)
    elif planned and learns_vocabulary(config):
        config, corpus = _choose_sizes_first(config, cache, started, compute, world_size)
    else:
        corpus = prepare_corpus(config, cache)
    config = config.with_tokenizer(corpus.tokenizer.kind, corpus.tokenizer.vocab_size)
    say_header(corpus.format_summary("" if requested.base.run else requested.tokenizer.kind))
    if requested.base.run is not None:
        say_base(config, corpus)
    paced = config.train.minutes is not None and "steps" not in requested.train.model_fields_set
    if planned:
        config, timed = _planned(config, requested, corpus, started, compute, world_size)
    train = config.train
    config = split_batch(config, world_size, requested.train.micro_batch_size)
    if config.model.dropout is None:
        weights = config.data.weights
        epochs = corpus.count_epochs(config.seq_len, train.batch_size, train.steps, weights)
        dropout = next(share for least, share in DROPOUT_BY_EPOCHS if epochs >= least)
        config = fill_open_settings(config, {"model": {"dropout": dropout}})
    if "start" not in requested.sample.model_fields_set:
        config = fill_open_settings(config, {"sample": {"start": _choose_start(config, corpus)}})
    if here:
        config = _shard_if_needed(config, compute, world_size)
    if config.train.micro_batch_size is None:
        config = config.with_train(
            micro_batch_size=choose_micro_batch_size(config, compute, world_size)
        )
    settled = existing is not None and config.train.compile == existing.train.compile
    sharded = world_size > 1 and config.train.shard  # the whole model is not timed: it may not fit
    if settled or sharded or not here:  # a run that is resumed measured it when it began
        return Decision(config, corpus, compute, started, paced)
    share = config.with_train(batch_size=train.batch_size // world_size)  # of one process
    if timed is not None:
        timed = StepTime(timed.passes / world_size, timed.update)
    compiled, timed, outcome = choose_compile(share, compute, timed)
    config = config.with_train(compile="on" if compiled else "off")
    per_step = None if timed is None else timed.passes + timed.update
    return Decision(config, corpus, compute, started, paced, per_step, outcome)


def _choose_sizes_first(
    config: Config, cache: Path, started: float, compute: Compute, world_size: int
) -> tuple[Config, Corpus]:
    """Sizes, and the text in a vocabulary that suits them and the steps; sizes may stay open."""
    before = _get_seconds_left(config, started)
    sized, steps = choose_sizes(config, before, compute, world_size)
    corpus = prepare_corpus(sized.with_train(steps=steps), cache)
    slow = (
        _get_seconds_left(config, started) < 0.8 * before
    )  # what is left may not suffice for these sizes
    return config if slow else sized, corpus


def _planned(
    config: Config, asked: Config, corpus: Corpus, started: float, compute: Compute, ranks: int
) -> tuple[Config, StepTime | None]:
    """The sizes that are still open, or for fine-tuning the batch and its time; and the steps."""
    left = _get_seconds_left(config, started)
    report_left(config.train.minutes or 0, left)
    timed = None
    if config.base.run is not None:
        longest = min(len(file) for file in corpus.training + corpus.validation) - 1
        config, timed = choose_batch(config, asked, left, compute, ranks, longest)
    elif not states_all_sizes(config):
        config, _ = choose_sizes(config, left, compute, ranks)
    left = _get_seconds_left(config, started)
    return choose_steps(config, left, compute, ranks, corpus.held_out, timed), timed


def _get_seconds_left(config: Config, started: float) -> float:
    """Seconds of the minutes that are left."""
    return 60 * (config.train.minutes or 0) - (time.perf_counter() - started)


def split_batch(config: Config, world_size: int, micro_batch: int | None) -> Config:
    """The training in equal shares for several processes; `micro_batch` is what was asked for.

    Gradients are added exactly where that costs little; ConfigError for what does not divide.
    """
    train = config.train
    rows, rest = divmod(train.batch_size, world_size)
    if rest:
        raise ConfigError(
            f"train.batch_size: {train.batch_size} rows do not divide among {world_size} processes; use "
            + " or ".join(str(n * world_size) for n in (rows, rows + 1) if n)
        )
    size = train.micro_batch_size
    if size is not None and rows % size:
        problem = f"{size} does not divide the {rows} rows of each of {world_size} processes"
        if micro_batch is not None:
            raise ConfigError(f"train.micro_batch_size: {problem}; use a divisor of {rows}")
        warn(f"train.micro_batch_size: {problem}; choosing another")
        config = config.with_train(micro_batch_size=None)
    power = world_size & (world_size - 1) == 0
    if train.reduce == "exact" and not power:
        raise ConfigError(
            f"train.reduce: exact needs 1, 2, 4 or 8 processes, not {world_size}; use fast"
        )
    if train.reduce == "auto":
        exact = power and 1 < world_size <= MAX_EXACT_WORLD_SIZE
        config = config.with_train(reduce="exact" if exact else "fast")
    return config


def _shard_if_needed(config: Config, compute: Compute, world_size: int) -> Config:
    """Shard a model that does not fit whole; MachineError if it does not fit at all."""
    count, device = count_parameters(config.model), compute.device
    whole = machine.estimate_training_bytes(count, device, world_size, sharded=False)
    if world_size > 1 and whole > machine.get_total_memory(device):
        config = config.with_train(shard=True)
    if world_size > 1 and config.train.shard and config.train.compile == "auto":
        config = config.with_train(compile="off")
    machine.check_memory(count, device, world_size, config.train.shard)
    return config


def _choose_start(config: Config, corpus: Corpus) -> str | None:
    """What stands before a text without a prompt: the document token, if the model will know it.

    A model of a single document has hardly ever read that token, and continues it with garbage. It
    knows what begins after a line break; a text without those has a character that is common.
    """
    train = config.train
    epochs = corpus.count_epochs(config.seq_len, train.batch_size, train.steps, config.data.weights)
    if epochs * corpus.inner_document_count >= MIN_DOCUMENT_TOKENS_READ:
        return None
    text = corpus.read_excerpt()
    return "\n" if "\n" in text else Counter(text).most_common(1)[0][0]


def check_base(requested: Config, existing: Config, run: RunDirectory) -> None:
    """ConfigError if a run is resumed from another base than its own, or is the base itself."""
    now, before = requested.base.run, existing.base.run
    if now == before:
        return
    problem = f"base.run: {before or 'not set'} in {run.path}, now {now or 'not set'}"
    if now is not None and Path(now).resolve() == run.path.resolve():
        problem = f"{run.path}: is the base itself, which is never written to"
    raise ConfigError(f"{problem}; choose another --out")


def _prepare_finetuning(
    config: Config, run: RunDirectory | None, cache: Path, compute: Compute | None
) -> tuple[Config, Corpus]:
    """The configuration of a run that begins from another, and its text in the base's tokens.

    A run that is resumed has all it needs: its base may have been deleted. Without `compute`
    nothing is trained here, and the weights are not read.
    """
    base = RunDirectory(Path(config.base.run or ""))
    owner = run if run is not None and run.exists else base
    stated_length = config.train.seq_len
    if owner is base:
        config = start_from_base(config, base)
        if compute is not None:
            machine.check_memory(count_parameters(config.model), compute.device)
            config = record_base(config, base)
    tokenizer = TokenizerConfig(kind=str(owner.tokenizer_file))
    prepared = config.model_copy(update={"tokenizer": tokenizer})
    if owner is base and config.train.minutes is not None and stated_length is None:
        prepared = prepared.with_train(seq_len=min(SHORT, config.seq_len))  # else to be planned
    return config, prepare_corpus(prepared, cache)


def reuse_choices(requested: Config, earlier: Config, same_run: bool = True) -> Config:
    """What a configuration leaves open, as an earlier run chose it.

    The same run when it is resumed keeps everything, but other minutes change its steps; other
    runs, to be compared with the first, share how it computes and, under `train.minutes`, its
    sizes.
    """
    tuned = same_run and requested.base.run is not None
    if tuned:
        requested = inherit_model(requested, earlier)
    planned = requested.train.minutes is not None and earlier.train.minutes is not None
    keys = {"model": ["dropout"], "train": ["compile"]}
    if planned:
        keys["model"] += ["n_layer", "d_model", "head_dim", "d_ff"]
        keys["train"] += ["batch_size", "eval_tokens"]
        if requested.base.run is not None:
            keys["train"] += ["seq_len"]
    if same_run:
        keys["train"] += ["micro_batch_size", "reduce"]
    if same_run and planned:
        keys["model"] += ["n_head"]
        keys["train"] += ["steps", "warmup_steps", "eval_every", "save_every", "log_every"]
    open_ = requested.tokenizer.kind in ("auto", earlier.tokenizer.kind)
    if (same_run or planned) and open_ and requested.tokenizer.vocab_size is None:
        requested = requested.model_copy(update={"tokenizer": earlier.tokenizer})
    if tuned:
        keys["train"] += FINETUNING_SETTINGS
        keys["base"] = ["step", "sha256"]
    chosen = earlier.model_dump()
    if requested.train.minutes is not None and earlier.train.minutes is not None:
        steps = round(earlier.train.steps * requested.train.minutes / earlier.train.minutes)
        chosen["train"]["steps"] = max(1, earlier.train.warmup_steps, steps)
    wanted: dict[str, dict[str, Any]] = {
        section: {key: chosen[section][key] for key in names} for section, names in keys.items()
    }
    return fill_open_settings(requested, wanted)
