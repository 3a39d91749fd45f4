"""The one place where a run's configuration is made: from what was asked, what the run already
chose, the text and the machine.

After `decide` only the number of steps may change, and only under `train.minutes`.
"""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmini import machine
from gptmini.config.load import completed
from gptmini.config.settings import Config, TokenizerConfig
from gptmini.console import say_fact, warn
from gptmini.distributed.gradients import EXACT_UP_TO
from gptmini.distributed.ranks import ALONE, Ranks
from gptmini.errors import ConfigError
from gptmini.machine import Compute
from gptmini.plan.base import CHOSEN, begun_from, identified, introduce, shaped
from gptmini.plan.cost import parameter_count
from gptmini.plan.fit import StepTime, choose_compile, micro_batch_size
from gptmini.plan.minutes import (
    SHORT,
    choose_batch,
    choose_sizes,
    choose_steps,
    has_sizes,
    report_left,
)
from gptmini.runs.directory import RunDirectory
from gptmini.text.corpus import learns_vocabulary, prepare_corpus
from gptmini.text.tokens import Corpus

# From this many epochs on. Bits per byte of builtin:python-docs (vocabulary 1,024, width 128) after
# 4.9 epochs: 1.700 without dropout and 1.755 with 0.1; after 9.3 epochs: 1.694 and 1.637. Of Tiny
# Shakespeare by character (width 192) after 4.5 epochs: 2.383 and 2.449. One run each.
DROPOUT = ((12, 0.2), (6, 0.1), (0, 0.0))

# Document tokens read in training from which a model knows what follows them. Nats for the first 20
# bytes of a held-out paragraph (2 layers, width 64, 180 kB in 1 to 100 documents, 9 epochs):
# tokens read          0     9    18    36    82   264   901
# after that token  29.9  29.2  28.2  26.5  26.7  25.4  24.8
# after a newline   25.4  26.0  25.3  25.0  25.1  25.7  24.9
BEGINNINGS = 100


@dataclass(frozen=True)
class Decision:
    """What a training needs before its first step.

    `paced` says that the number of steps follows `train.minutes`, `seconds_per_step` what a step
    was measured to take, `compiling` the outcome of trying torch.compile. `started` is the
    time.perf_counter() from which the minutes count.
    """

    config: Config
    corpus: Corpus
    compute: Compute
    started: float
    paced: bool
    seconds_per_step: float | None = None
    compiling: str = ""
    ranks: Ranks = ALONE


def decide(
    asked: Config,
    run: RunDirectory | None,
    cache: Path,
    started: float | None = None,
    compute: Compute | None = None,
    here: bool = True,
    ranks: int = 1,
) -> Decision:
    """Complete a configuration: tokenizer, sizes, steps, dropout, micro-batch, compilation.

    `run` is where it is to be trained; a run that is there keeps what it chose. Without `here` the
    run is not trained on this machine now: nothing is checked against its memory, the weights of
    its base are not read, and whether to compile stays open. Each of `ranks` processes computes its
    share of every batch.

    Raises ConfigError for settings that contradict the text or the base, DataError for a text that
    cannot be used, CheckpointError for a base that cannot, MachineError for a model that does not
    fit.
    """
    started = time.perf_counter() if started is None else started
    compute = compute or machine.pick_compute(asked.train.device, asked.train.dtype)
    machine.keep_freed_memory()
    existing = run.config() if run is not None and run.exists else None
    if run is not None and existing is not None:
        check_base(asked, existing, run)
    config = asked if existing is None else with_choices(asked, existing)
    timed: StepTime | None = None
    planned = config.train.minutes is not None and existing is None
    if asked.base.run is not None:
        config, corpus = _fine_tuning(config, run, cache, compute if here else None)
    elif planned and learns_vocabulary(config):
        config, corpus = _sized_first(config, cache, started, compute, ranks)
    else:
        corpus = prepare_corpus(config, cache)
    config = config.with_tokenizer(corpus.tokenizer.kind, corpus.tokenizer.vocab_size)
    say_fact(corpus.summary("" if asked.base.run else asked.tokenizer.kind))
    if asked.base.run is not None:
        introduce(config, corpus)
    paced = config.train.minutes is not None and "steps" not in asked.train.model_fields_set
    if planned:
        config, timed = _planned(config, asked, corpus, started, compute, ranks)
    train = config.train
    config = in_shares(config, ranks, asked.train.micro_batch_size)
    if config.model.dropout is None:
        weights = config.data.weights
        epochs = corpus.epochs(config.seq_len, train.batch_size, train.steps, weights)
        dropout = next(share for least, share in DROPOUT if epochs >= least)
        config = completed(config, {"model": {"dropout": dropout}})
    if "start" not in asked.sample.model_fields_set:
        config = completed(config, {"sample": {"start": _start(config, corpus)}})
    if here:
        config = _sharded_if_needed(config, compute, ranks)
    if config.train.micro_batch_size is None:
        config = config.with_train(micro_batch_size=micro_batch_size(config, compute, ranks))
    settled = existing is not None and config.train.compile == existing.train.compile
    sharded = ranks > 1 and config.train.shard  # the whole model is not timed: it may not fit
    if settled or sharded or not here:  # a run that is resumed measured it when it began
        return Decision(config, corpus, compute, started, paced)
    share = config.with_train(batch_size=train.batch_size // ranks)  # of one process
    if timed is not None:
        timed = StepTime(timed.passes / ranks, timed.update)
    compiled, timed, outcome = choose_compile(share, compute, timed)
    config = config.with_train(compile="on" if compiled else "off")
    per_step = None if timed is None else timed.passes + timed.update
    return Decision(config, corpus, compute, started, paced, per_step, outcome)


def _sized_first(
    config: Config, cache: Path, started: float, compute: Compute, ranks: int
) -> tuple[Config, Corpus]:
    """Sizes, and the text in a vocabulary that suits them and the steps; sizes may stay open."""
    before = _left(config, started)
    sized, steps = choose_sizes(config, before, compute, ranks)
    corpus = prepare_corpus(sized.with_train(steps=steps), cache)
    slow = _left(config, started) < 0.8 * before  # what is left may not suffice for these sizes
    return config if slow else sized, corpus


def _planned(
    config: Config, asked: Config, corpus: Corpus, started: float, compute: Compute, ranks: int
) -> tuple[Config, StepTime | None]:
    """The sizes that are still open, or for fine-tuning the batch and its time; and the steps."""
    left = _left(config, started)
    report_left(config.train.minutes or 0, left)
    timed = None
    if config.base.run is not None:
        longest = min(len(file) for file in corpus.training + corpus.validation) - 1
        config, timed = choose_batch(config, asked, left, compute, ranks, longest)
    elif not has_sizes(config):
        config, _ = choose_sizes(config, left, compute, ranks)
    left = _left(config, started)
    return choose_steps(config, left, compute, ranks, corpus.held_out, timed), timed


def _left(config: Config, started: float) -> float:
    """Seconds of the minutes that are left."""
    return 60 * (config.train.minutes or 0) - (time.perf_counter() - started)


def in_shares(config: Config, ranks: int, micro_batch: int | None) -> Config:
    """The training in equal shares for several processes; `micro_batch` is what was asked for.

    Gradients are added exactly where that costs little; ConfigError for what does not divide.
    """
    train = config.train
    rows, rest = divmod(train.batch_size, ranks)
    if rest:
        raise ConfigError(
            f"train.batch_size: {train.batch_size} rows do not divide among {ranks} processes; use "
            + " or ".join(str(n * ranks) for n in (rows, rows + 1) if n)
        )
    size = train.micro_batch_size
    if size is not None and rows % size:
        problem = f"{size} does not divide the {rows} rows of each of {ranks} processes"
        if micro_batch is not None:
            raise ConfigError(f"train.micro_batch_size: {problem}; use a divisor of {rows}")
        warn(f"train.micro_batch_size: {problem}; choosing another")
        config = config.with_train(micro_batch_size=None)
    power = ranks & (ranks - 1) == 0
    if train.reduce == "exact" and not power:
        raise ConfigError(
            f"train.reduce: exact needs 1, 2, 4 or 8 processes, not {ranks}; use fast"
        )
    if train.reduce == "auto":
        exact = power and 1 < ranks <= EXACT_UP_TO
        config = config.with_train(reduce="exact" if exact else "fast")
    return config


def _sharded_if_needed(config: Config, compute: Compute, ranks: int) -> Config:
    """Shard a model that does not fit whole; MachineError if it does not fit at all."""
    count, device = parameter_count(config.model), compute.device
    whole = machine.training_bytes(count, device, ranks, sharded=False)
    if ranks > 1 and whole > machine.total_memory(device):
        config = config.with_train(shard=True)
    if ranks > 1 and config.train.shard and config.train.compile == "auto":
        config = config.with_train(compile="off")
    machine.check_memory(count, device, ranks, config.train.shard)
    return config


def _start(config: Config, corpus: Corpus) -> str | None:
    """What stands before a text without a prompt: the document token, if the model will know it.

    A model of a single document has hardly ever read that token, and continues it with garbage. It
    knows what begins after a line break; a text without those has a character that is common.
    """
    train = config.train
    epochs = corpus.epochs(config.seq_len, train.batch_size, train.steps, config.data.weights)
    if epochs * corpus.beginnings >= BEGINNINGS:
        return None
    text = corpus.excerpt()
    return "\n" if "\n" in text else Counter(text).most_common(1)[0][0]


def check_base(asked: Config, existing: Config, run: RunDirectory) -> None:
    """ConfigError if a run is resumed from another base than its own, or is the base itself."""
    now, before = asked.base.run, existing.base.run
    if now == before:
        return
    problem = f"base.run: {before or 'not set'} in {run.path}, now {now or 'not set'}"
    if now is not None and Path(now).resolve() == run.path.resolve():
        problem = f"{run.path}: is the base itself, which is never written to"
    raise ConfigError(f"{problem}; choose another --out")


def _fine_tuning(
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
        config = begun_from(config, base)
        if compute is not None:
            machine.check_memory(parameter_count(config.model), compute.device)
            config = identified(config, base)
    tokenizer = TokenizerConfig(kind=str(owner.tokenizer_file))
    prepared = config.model_copy(update={"tokenizer": tokenizer})
    if owner is base and config.train.minutes is not None and stated_length is None:
        prepared = prepared.with_train(seq_len=min(SHORT, config.seq_len))  # else to be planned
    return config, prepare_corpus(prepared, cache)


def with_choices(asked: Config, first: Config, same_run: bool = True) -> Config:
    """What a configuration leaves open, as an earlier run chose it.

    The same run when it is resumed keeps everything, but other minutes change its steps; other
    runs, to be compared with the first, share how it computes and, under `train.minutes`, its
    sizes.
    """
    tuned = same_run and asked.base.run is not None
    if tuned:
        asked = shaped(asked, first)
    planned = asked.train.minutes is not None and first.train.minutes is not None
    keys = {"model": ["dropout"], "train": ["compile"]}
    if planned:
        keys["model"] += ["n_layer", "d_model", "head_dim", "d_ff"]
        keys["train"] += ["batch_size", "eval_tokens"]
        if asked.base.run is not None:
            keys["train"] += ["seq_len"]
    if same_run:
        keys["train"] += ["micro_batch_size", "reduce"]
    if same_run and planned:
        keys["model"] += ["n_head"]
        keys["train"] += ["steps", "warmup_steps", "eval_every", "save_every", "log_every"]
    open_ = asked.tokenizer.kind in ("auto", first.tokenizer.kind)
    if (same_run or planned) and open_ and asked.tokenizer.vocab_size is None:
        asked = asked.model_copy(update={"tokenizer": first.tokenizer})
    if tuned:
        keys["train"] += CHOSEN
        keys["base"] = ["step", "sha256"]
    chosen = first.model_dump()
    if asked.train.minutes is not None and first.train.minutes is not None:
        steps = round(first.train.steps * asked.train.minutes / first.train.minutes)
        chosen["train"]["steps"] = max(1, first.train.warmup_steps, steps)
    wanted: dict[str, dict[str, Any]] = {
        section: {key: chosen[section][key] for key in names} for section, names in keys.items()
    }
    return completed(asked, wanted)
