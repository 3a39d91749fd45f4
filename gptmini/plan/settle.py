"""Make the plan of a run: read `make_plan` from top to bottom.

What is requested is reconciled with the run that is resumed or with the base, then the text is
opened, and then five steps settle what is still open, each from what was settled before it.
Afterwards only the number of steps may change, and only under `train.minutes`.
"""

import time
from dataclasses import dataclass, replace

import torch

from gptmini.config.load import revalidate
from gptmini.config.settings import Config
from gptmini.console import say, warn
from gptmini.data.corpus import TrainingText, encode_text, open_text
from gptmini.data.token_file import Corpus
from gptmini.doors import load_replicas
from gptmini.errors import DataError
from gptmini.machine import (
    can_choose_threads,
    keep_freed_memory,
    pick_compute,
    release_freed_memory,
)
from gptmini.plan import minutes
from gptmini.plan.cost import count_parameters
from gptmini.plan.recipe import (
    TextSize,
    choose_dropout,
    choose_recipe,
    choose_sample_start,
    compute_useful_steps,
    measure_corpus,
)
from gptmini.plan.reconcile import Request, reconcile
from gptmini.plan.timing import Machine, choose_micro_batch_size, is_worth_compiling
from gptmini.runs.directory import RunDirectory
from gptmini.runs.progress import describe_edited_text

# Of text in a vocabulary of 512 to 2,048 that was learned from it: 2.1 to 3 in English, German and
# Python.
BYTES_PER_TOKEN = 2.7

# Fine-tuning warms up for a quarter of few steps: AdamW moves every weight by the whole rate from
# the first step on (scripts/LOG.md: Do a few steps from a base need a warm-up?).
MAX_WARMUP_FROM_BASE = 10


@dataclass(frozen=True)
class Plan:
    """All that a run needs before its first step: a complete configuration, a text, a machine.

    text_size: how long the text is, in rows of this configuration.
    """

    request: Request
    config: Config
    corpus: Corpus
    text_size: TextSize
    machine: Machine


def make_plan(
    requested: Config,
    run: RunDirectory | None,
    started: float | None = None,
    *,
    machine: Machine | None = None,
    world_size: int = 1,
    dry_run: bool = False,
) -> Plan:
    """Complete a configuration: tokenizer, sizes, steps, recipe, micro-batch, compilation.

    `run` is where it is to be trained; a run that exists keeps what it chose. `machine` is this
    one unless another is given, with a share of every batch for each of `world_size` processes.
    `dry_run`: plan only; skip checks and timings that need the machine, and leave the checkpoints
    of the base unread.

    Raises ConfigError for settings that contradict the text, the run or the base, DataError for a
    text that cannot be used, CheckpointError for a base that cannot, MachineError for a model that
    does not fit.
    """
    started = time.perf_counter() if started is None else started
    request = reconcile(requested, run, dry_run=dry_run)
    if machine is None:
        train = request.config.train
        compute = pick_compute(train.device, train.dtype, train.deterministic)
        if request.threads is not None and world_size == 1 and can_choose_threads(compute):
            compute = replace(compute, threads=min(request.threads, torch.get_num_threads()))
        machine = Machine(compute, world_size, started)
    keep_freed_memory()
    with open_text(request.config.data) as text:
        request, machine, steps = choose_sizes_by_bytes(request, machine, text)
        corpus = prepare_tokens(request, text, steps)
    return settle(request, corpus, machine, dry_run)


# -- the text --------------------------------------------------------------------------------------


def choose_sizes_by_bytes(
    request: Request, machine: Machine, text: TrainingText
) -> tuple[Request, Machine, int | None]:
    """Choose sizes for which a vocabulary is to be learned, if minutes choose them.

    How often they read the text is guessed from its bytes. Also returns the machine, measured, and
    about how many steps they make.
    """
    config = request.config
    kind = config.tokenizer.kind
    is_size_open = kind in ("auto", "bpe") and config.tokenizer.vocab_size is None
    if request.minutes is None or config.base.run is not None or not is_size_open:
        return request, machine, None
    seconds = machine.get_seconds_left(request.minutes)
    tokens = max(1.0, text.bytes / BYTES_PER_TOKEN)
    guess = TextSize(total=tokens, per_epoch=tokens)
    config, machine, steps = minutes.choose_sizes(config, seconds, machine, guess)
    return replace(request, config=config), machine, steps


def prepare_tokens(request: Request, text: TrainingText, steps: int | None) -> Corpus:
    """Prepare the text in tokens: those of the run, of the base, or of a tokenizer for the sizes.

    `steps` are those that training will make, where they are known. DataError for a text that
    cannot be used, or that is not the one which the run began with.
    """
    config = request.config if steps is None else request.config.with_train(steps=steps)
    own = request.tokenizer
    # A run holds what it took from a base or a file, which may be gone.
    is_taken = config.base.run is not None or config.tokenizer.kind.endswith(".json")
    tokenizer = own if is_taken else None
    corpus = encode_text(text, _shorten_open_rows(request, config), tokenizer=tokenizer)
    if own is not None and own.fingerprint != corpus.tokenizer.fingerprint:
        assert request.run is not None  # the text is prepared in the very tokenizer of a base
        raise DataError(describe_edited_text(config.data.path, request.run))
    return corpus


def _shorten_open_rows(request: Request, config: Config) -> Config:
    """Cut rows to the shortest that the minutes may choose, if they choose how long rows are."""
    if request.minutes is None or request.stated.train.seq_len is not None:
        return config
    is_new_model = request.config.base.run is None
    if is_new_model and "context_length" in request.stated.model.model_fields_set:
        return config
    return minutes.shorten_rows(config)


def say_text(request: Request, corpus: Corpus) -> None:
    """Show the text in tokens, and the base."""
    say(corpus.format_summary())
    if not len(corpus.tokenizer.encode(" ")):
        warn(
            f"{corpus.name}: its tokenizer drops spaces and line breaks; generated texts lack them"
        )
    base = request.config.base
    if base.run is None:
        return
    step = "" if base.step is None else f", step {base.step:,}"
    say(f"  base      {base.run}{step}: its weights and tokenizer")
    if corpus.tokenizer.chat_template is not None and not corpus.has_ignored:
        warn(
            f"{corpus.name}: without conversations the chat model {base.run} may forget to "
            f"answer; add some, or use a base that is no chat model"
        )


# -- the five steps --------------------------------------------------------------------------------


def settle(request: Request, corpus: Corpus, machine: Machine, dry_run: bool) -> Plan:
    """Settle what is open, from the text and the machine; raises as `make_plan` does."""
    config = request.config.with_tokenizer(corpus.tokenizer.kind, corpus.tokenizer.vocab_size)
    say_text(request, corpus)
    config, machine = settle_sizes(request, config, corpus, machine)
    plan = Plan(request, config, corpus, measure_corpus(config, corpus), machine)
    plan = settle_steps(plan)
    plan = settle_recipe(plan)
    plan = settle_micro_batch(plan, dry_run)
    plan = replace(plan, config=revalidate(plan.config))  # before a model may be compiled
    if not dry_run:
        plan = settle_compile(plan)
    release_freed_memory(machine.compute.device)  # of the model that was timed
    return plan


def settle_sizes(
    request: Request, config: Config, corpus: Corpus, machine: Machine
) -> tuple[Config, Machine]:
    """Choose the sizes that are still open if minutes are given; for fine-tuning only the batch.

    Also returns the machine, measured.
    """
    if request.minutes is None:
        return config, machine
    stated = request.stated.train
    text = measure_corpus(_shorten_open_rows(request, config), corpus)
    if config.base.run is not None:
        machine.check_memory(count_parameters(config.model))
        machine = machine.measure(config)
        seconds = machine.get_seconds_left(request.minutes)
        longest_row = int(text.shortest) - 1
        return minutes.choose_batch(config, stated, seconds, machine, longest_row), machine
    if minutes.states_all_sizes(config):
        machine = machine.measure(config)
    else:
        seconds = machine.get_seconds_left(request.minutes)
        config, machine, _ = minutes.choose_sizes(config, seconds, machine, text)
    if config.seq_len >= text.shortest:
        config = minutes.shorten_context(config, stated)
    return config, machine


def settle_steps(plan: Plan) -> Plan:
    """Choose the steps that the minutes left allow, and how often to evaluate, save and log.

    A run that is resumed with more minutes goes on, but not until its model gets worse.
    """
    request = plan.request
    config = plan.config
    if request.minutes is not None:
        seconds = plan.machine.get_seconds_left(request.minutes)
        config = minutes.choose_steps(
            config, seconds, plan.machine, plan.corpus.held_out, plan.text_size
        )
    elif request.existing is not None and request.steps_follow_minutes:
        most = max(request.existing.train.steps, compute_useful_steps(config, plan.text_size))
        config = config.with_train(steps=int(min(config.train.steps, most)))
    if config.base.run is not None and "warmup_steps" not in request.stated.train.model_fields_set:
        few = min(MAX_WARMUP_FROM_BASE, max(2, config.train.steps // 4))
        warmup_steps = max(few, config.train.warmup_steps)
        if request.existing is not None:  # which keeps its choice
            warmup_steps = request.existing.train.warmup_steps
        config = config.with_train(warmup_steps=min(config.train.steps, warmup_steps))
    return replace(plan, config=config)


def settle_recipe(plan: Plan) -> Plan:
    """Choose what follows from how often the steps read the text."""
    config = plan.config
    if plan.request.existing is None:
        config = choose_recipe(config, plan.text_size)
    config = choose_dropout(config, plan.text_size)
    config = choose_sample_start(config, plan.corpus, plan.text_size)
    return replace(plan, config=config)


def settle_micro_batch(plan: Plan, dry_run: bool) -> Plan:
    """Choose as many rows per forward pass as fit, and how several processes share a batch."""
    machine = plan.machine
    if machine.world_size > 1 or plan.config.train.reduce == "exact":
        share = load_replicas().share_batch
        config = share(plan.config, plan.request.stated.train, machine, dry_run)
        return replace(plan, config=config)
    config = plan.config.with_train(reduce="fast")
    if not dry_run:
        machine.check_memory(count_parameters(config.model))
    if config.train.micro_batch_size is None:
        config = config.with_train(micro_batch_size=choose_micro_batch_size(config, machine, [1]))
    return replace(plan, config=config)


def settle_compile(plan: Plan) -> Plan:
    """Measure a step of a new run, unless choosing its sizes did; compile if that is worth it.

    A run that is resumed keeps what it chose. A sharded model is not measured: it may not fit whole
    on one device.
    """
    train = plan.config.train
    is_sharded = train.shard and plan.machine.world_size > 1
    if is_sharded or (plan.request.existing is not None and train.compile != "auto"):
        return plan
    machine = plan.machine.measure(plan.config)
    seconds = train.steps * machine.estimate_seconds_per_step(plan.config)
    compiles = is_worth_compiling(plan.config, seconds, machine)
    config = plan.config.with_train(compile="on" if compiles else "off")
    return replace(plan, config=config, machine=machine)
