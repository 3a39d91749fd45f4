"""Says before the first step what is trained: the model, the recipe, the machine, how long."""

from gptmini.config.settings import Config
from gptmini.console import format_bytes, format_count, format_duration, say, warn
from gptmini.model.optim import get_cooldown_steps
from gptmini.plan import cost
from gptmini.plan.recipe import TextSize, compute_useful_steps, count_epochs, is_text_small
from gptmini.train.state import Training

MAX_USEFUL_EPOCHS = 20  # after which a small model learns little more about unseen text
MIN_SHOWN_BYTES = 10**9  # of memory, unless a run begins from another


def say_header_lines(training: Training, verbose: bool = False) -> None:
    """Show the model, the time and the folder; if `verbose`, the recipe and the machine too."""
    say(_describe_model(training))
    if verbose:
        say(_describe_recipe(training))
        say(_describe_machine(training))
    say(_describe_time(training))
    say(f"  folder    {training.run.path}; Ctrl-C stops, the same command resumes")
    read = training.config.train.eval_tokens
    part = f"{read:,} tokens of " if read and read < training.corpus.held_out else ""
    say("  loss      error in guessing the next token; lr: learning rate; tok/s: tokens a second")
    data = training.config.data
    is_end = data.split == "tail" and data.validation_path is None
    held_out = "the end of the text, held out" if is_end else "the held-out text"
    say(f"  val       the loss on {part}{held_out}: this run never trains on it")
    if training.progress.saw_held_out:
        base = training.config.base.run or training.run.path
        warn(
            f"{base}: may have been trained on some of what is held out now, so val looks better "
            f"than it is; data.validation_path can hold out another text"
        )
    memory = cost.estimate_memory(training.config, training.compute)
    is_worth_saying = training.config.base.run is not None or memory.peak >= MIN_SHOWN_BYTES
    if is_worth_saying and not training.group.is_sharded:
        say(f"  memory    about {format_bytes(memory.peak)} at the peak")
    if "steps" in training.plan.request.stated.train.model_fields_set:  # else the best is kept
        _warn_of_many_epochs(training.config, training.plan.text_size)


def _warn_of_many_epochs(config: Config, text: TextSize) -> None:
    epochs = count_epochs(config, text)
    useful_epochs = epochs * compute_useful_steps(config, text) / config.train.steps
    if epochs > 1.05 * useful_epochs:
        harm = f"a model of this size gets worse after {useful_epochs:.0f}"
    elif epochs > MAX_USEFUL_EPOCHS:
        harm = f"little is learned after {MAX_USEFUL_EPOCHS}"
    else:
        return
    warn(f"training reads the text {epochs:.0f} times; {harm}, so use more text or fewer steps")


def _describe_model(training: Training) -> str:
    model = training.config.model
    count = cost.count_parameters(model)
    kind = ""
    if training.own.model is not None:
        count = sum(parameter.numel() for parameter in training.model.parameters())
        kind = ", a model of your own"
    size = f"{count / 1e6:,.1f} M" if count >= 999_950 else f"{count / 1e3:.1f} k"
    heads = format_count(model.n_head, "head")
    if model.n_kv_head < model.n_head:
        kv_heads = format_count(model.n_kv_head, "KV head")
        heads += f" / {kv_heads} ({model.attention.variant.upper()})"
    window = f", window {model.attention.window}" if model.attention.window else ""
    return (
        f"  model     {size} parameters{kind}: {format_count(model.n_layer, 'layer')}, "
        f"width {model.d_model}, {heads}{window}, context {model.context_length}"
    )


def _describe_recipe(training: Training) -> str:
    model = training.config.model
    train = training.config.train
    size = "small text: " if is_text_small(training.config, training.plan.text_size) else ""
    parts = []
    if training.own.optimizer is not None:
        parts.append(type(training.optimizer.optimizers[0]).__name__)
    else:
        if train.optimizer == "muon":
            parts.append(f"Muon lr {train.muon_lr:g}")
        parts.append(f"AdamW lr {train.lr:g}")
        if train.embed_lr is not None:
            parts.append(f"embeddings lr {train.embed_lr:g}")
        parts.append(f"weight decay {train.weight_decay:g}")
    parts.append("tied head" if model.tie_embeddings else "untied head")
    parts.append(f"dropout {model.dropout:g}")
    parts.append(f"{train.batch_size * training.config.seq_len:,} tokens a step")
    return f"  recipe    {size}{', '.join(parts)}"


def _describe_machine(training: Training) -> str:
    train = training.config.train
    progress = training.progress
    parts = [
        f"  machine   {progress.device}, {format_count(progress.threads, 'thread')}, "
        f"{progress.dtype}",
        f"micro-batch {train.micro_batch_size}",
    ]
    if training.group.is_sharded:
        parts.append(f"sharded over {training.group.world_size} processes")
    if train.compile == "on":
        parts.append("compile on")
    return "; ".join(parts)


def _describe_time(training: Training) -> str:
    train = training.config.train
    machine = training.plan.machine
    length = format_count(train.steps, "step")
    is_text_short = has_too_short_text(training)
    if train.minutes is not None and training.steps_follow_minutes and not is_text_short:
        left = format_duration(max(1, 60 * train.minutes - training.progress.elapsed))
        minutes = format_count(train.minutes, "minute")
        length = f"about {left} more" if training.step else f"about {minutes}"
    elif machine.slowness is not None:
        seconds = (train.steps - training.step) * machine.estimate_seconds_per_step(training.config)
        length = f"about {format_duration(max(1, seconds))}: {length}"
    line = f"  time      {length}"
    if training.own.batches is None:
        epochs = count_epochs(training.config, training.plan.text_size)
        line += f", reading the text {epochs:.1f} times"
    if is_text_short and training.own.batches is None:
        line += "; more often would make the model worse"
    if training.step:
        line += f"; resuming after step {training.step:,}"
    existing = training.plan.request.existing
    if existing is not None and existing.train.steps < train.steps:
        has_cooled = training.own.schedule is None and (
            get_cooldown_steps(existing.train) > existing.train.steps - training.step + 1
        )
        line += "; the learning rate rises again, and so may val at first" if has_cooled else ""
    return line


def has_too_short_text(training: Training) -> bool:
    """Return whether the minutes would allow more steps than help with so short a text."""
    useful = compute_useful_steps(training.config, training.plan.text_size)
    return training.steps_follow_minutes and training.config.train.steps + 1 > useful
