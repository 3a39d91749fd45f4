"""What a training says of itself: its header, and why it ends, stops or worries."""

import statistics
from typing import TYPE_CHECKING

from gptmini.console import amount, duration, say_fact, warn
from gptmini.plan import cost
from gptmini.train.state import Training, windows

if TYPE_CHECKING:  # plan.decide imports the text formats, which training must not depend on
    from gptmini.plan.decide import Decision

MANY_EPOCHS = 20  # after which a small model learns little more about unseen text


def introduce(training: Training, decision: "Decision") -> None:
    """Show the model, the machine and the length of the run."""
    model, train, progress = training.config.model, training.config.train, training.progress
    count, seq_len = cost.parameter_count(model), training.config.seq_len
    size = f"{count / 1e6:,.1f} M" if count >= 999_950 else f"{count / 1e3:.1f} k"
    cache = cost.cache_bytes(model, model.context_length)
    window = f", window {model.attention.window}" if model.attention.window else ""
    say_fact(
        f"  model     {size} parameters: {amount(model.n_layer, 'layer')}, "
        f"width {model.d_model}, {amount(model.n_head, 'head')} / "
        f"{amount(model.n_kv_head, 'KV head')} ({model.attention.variant.upper()}{window}), "
        f"context {model.context_length}, dropout {model.dropout:g}; "
        f"KV cache {cache / 2**20:,.1f} MiB"
    )
    line = (
        f"  machine   {progress.device}, {amount(progress.threads, 'thread')}, {progress.dtype}; "
        f"{train.optimizer}; micro-batch {train.micro_batch_size}"
    )
    if training.shards is not None:
        line += f"; sharded over {training.ranks.size} processes"
    outcome = ["compile on" if train.compile == "on" else "", decision.compiling]
    say_fact("; ".join(filter(None, [line, ": ".join(filter(None, outcome))])))
    epochs = training.corpus.epochs(
        seq_len, train.batch_size, train.steps, training.config.data.weights
    )
    line = (
        f"  run       {training.run.path}: {amount(train.steps, 'step')} x "
        f"{train.batch_size * seq_len:,} tokens = {epochs:.1f} epochs"
    )
    if training.step:
        line += f"; resuming after step {training.step:,}"
    if decision.seconds_per_step is not None and training.step < train.steps:
        left = (train.steps - training.step) * decision.seconds_per_step
        line += f"; about {duration(left)} left" if left >= 1 else "; about a second left"
    say_fact(line)
    held_out = training.corpus.held_out
    if train.eval_tokens is not None and train.eval_tokens < held_out:
        say_fact(
            f"  evaluates on {train.eval_tokens:,} of the {held_out:,} tokens held out, always "
            f"the same"
        )
    if epochs > MANY_EPOCHS:
        warn(
            f"training reads the text {epochs:.0f} times and learns little after {MANY_EPOCHS}; "
            f"use more text or fewer steps"
        )


def already(training: Training) -> str:
    """What to say of a run that has nothing left to do."""
    steps = training.config.train.steps
    if training.step > steps and not training.paced:
        return f"already has {training.step:,} steps, more than --steps {steps:,}"
    return f"already finished at step {training.step:,}"


def how_to_continue(training: Training) -> str:
    settings, best = training.config.train, training.progress.best
    if training.step >= settings.steps or best is None:
        return f"pass a larger {'--minutes' if training.paced else '--steps'} to train longer"
    return (
        f"the validation loss was best at step {best['step']}, {settings.patience} evaluations "
        f"ago; pass --set train.patience=null to train on"
    )


def report_spike(training: Training, train_loss: float) -> None:
    """Warn when a loss is far above those of the last steps, naming its windows."""
    recent = training.recent
    if len(recent) >= 20:
        usual = statistics.mean(recent)
        if train_loss > usual + 6 * statistics.pstdev(recent) + 0.1:
            where = windows(training, training.step - 1)
            warn(f"step {training.step}: loss {train_loss:.4g} after {usual:.4g}, in {where}")
    recent.append(train_loss)
