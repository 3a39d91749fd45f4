"""The state of a training: made at step 0, restored from a checkpoint, saved as one.

Everything random is a function of (seed, step, micro-batch), so nothing random is saved.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptmini.config.load import iter_differences
from gptmini.config.settings import Config
from gptmini.console import warn
from gptmini.data.token_file import Corpus
from gptmini.distributed.gradients import Gradients, make_orthogonalize
from gptmini.distributed.group import Group
from gptmini.distributed.sharding import Shards, create_gradients, micro_batches_of
from gptmini.errors import CheckpointError, ConfigError, DataError, DivergedError
from gptmini.generate.texts import build_token_bias
from gptmini.machine import Compute
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.plan.timing import compile_blocks
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.tensors import UNSHARDED, ShardSpec, Tensors, check_shapes
from gptmini.tokenizer.tokenizers import Tokenizer
from gptmini.train.batches import Batches, seed_from

if TYPE_CHECKING:  # plan.decide imports the text formats, which training must not depend on
    from gptmini.plan.decide import Decision

# Settings that may change when a run is resumed; any other change would make it another run.
CHANGEABLE_SETTINGS = {
    *("data.path", "data.validation_path"),  # the content is compared instead
    *("train.steps", "train.warmup_steps", "train.patience", "train.on_divergence"),
    *("train.eval_every", "train.save_every", "train.keep", "train.log_every", "train.log_to"),
    *("train.device", "train.compile", "train.micro_batch_size", "train.gradient_checkpointing"),
    "train.shard",
}
# What the last bit of a result depends on, besides the configuration.
BITS_DEPEND_ON = ("torch", "threads", "device", "dtype", "compile")


@dataclass
class Progress:
    """How far a training has come, and on what: the content of state.json.

    `seconds` is the time of the updates, `elapsed` that of the commands; `lr_scale` is halved at
    each rewind; `best` is the best evaluation; `corpus` and `tokenizer` are SHA-256 digests.
    """

    corpus: str
    tokenizer: str
    torch: str
    threads: int
    device: str
    dtype: str
    compile: str
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    lr_scale: float = 1.0
    best: dict[str, Any] | None = None

    def to_metrics(self) -> dict[str, Any]:
        """When this is, for a line of metrics."""
        return {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 3)}


@dataclass
class Training:
    """Everything that the loop works on."""

    config: Config
    run: RunDirectory
    corpus: Corpus
    model: GPT
    optimizer: Optimizer
    batches: Batches  # of this rank's rows
    gradients: Gradients
    micro_batches: list[int]  # of this rank, by their number in the step
    shards: Shards | None  # if each rank has but a part of every tensor
    group: Group
    compute: Compute
    progress: Progress
    bias: Tensor | None  # (V,), of the samples
    paced: bool  # the number of steps follows train.minutes
    started: float  # when the run would have begun, had it never stopped
    recent_losses: deque[float] = field(
        default_factory=lambda: deque(maxlen=50)
    )  # losses, for spikes
    saved_step: int | None = None  # the step of the newest checkpoint
    last_logged: tuple[int, float] = (0, 0.0)  # step and seconds of the last metrics
    evaluating: float = 0.0  # seconds that the last evaluation took
    saving: float = 0.0  # seconds that the last checkpoint took
    first_update: tuple[int, float] | None = (
        None  # step and seconds after this command's first update
    )

    @property
    def step(self) -> int:
        """Updates made."""
        return self.progress.step

    @property
    def elapsed(self) -> float:
        """Seconds the run has taken in all commands, with everything around the updates."""
        return time.perf_counter() - self.started

    @property
    def shard_spec(self) -> ShardSpec:
        """What this rank reads of a checkpoint."""
        return self.shards.spec if self.shards else UNSHARDED

    def without_compile(self) -> AbstractContextManager[object]:
        """A context without compiled kernels, which new shapes and modes would recompile."""
        context = ExitStack()
        if self.config.train.compile == "on":
            context.enter_context(torch.compiler.set_stance("force_eager"))
        if self.shards is not None and self.config.train.reduce == "fast":
            context.enter_context(self.compute.autocast())  # matrices are gathered in its type
        return context


def build_training(decision: "Decision", run: RunDirectory) -> Training:
    """Model, optimizer and batches at step 0; writes nothing.

    ConfigError for a text of sample.bias or sample.ban that is not one token.
    """
    config, corpus, compute = decision.config, decision.corpus, decision.compute
    train, group = config.train, decision.group
    size = train.micro_batch_size or train.batch_size // group.world_size
    n = train.batch_size // group.world_size // size  # micro-batches of each rank
    shards = Shards(group, compute.device) if train.shard and group.world_size > 1 else None
    torch.manual_seed(seed_from(train.seed))
    if shards:
        model = shards.create_model(config.model, train.reduce, compute.dtype)
    else:
        model = GPT(config.model).to(compute.device)
    model.gradient_checkpointing = train.gradient_checkpointing
    if train.compile == "on":
        compile_blocks(model)
    micro_batches = micro_batches_of(n, group, shards is not None)
    return Training(
        config=config,
        run=run,
        corpus=corpus,
        model=model,
        optimizer=shards.create_optimizer(model, train, compute.dtype)
        if shards
        else Optimizer(model, train, compute.dtype, make_orthogonalize(group, train.reduce)),
        batches=Batches(
            *(corpus.training, config.data.weights, config.seq_len, train.batch_size, train.seed),
            rows=[row for m in micro_batches for row in range(m * size, (m + 1) * size)],
        ),
        gradients=create_gradients(train.reduce, model, group, n, shards is not None),
        micro_batches=micro_batches,
        shards=shards,
        group=group,
        compute=compute,
        progress=Progress(
            corpus=corpus.content,
            tokenizer=corpus.tokenizer.fingerprint,
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            device=compute.device.type,
            dtype=str(compute.dtype).removeprefix("torch."),
            compile=train.compile,
        ),
        bias=build_token_bias(corpus.tokenizer, config.sample),
        paced=decision.paced,
        started=decision.started,
    )


def create_or_resume(training: Training) -> None:
    """Make the run directory, or resume the same run from its newest checkpoint."""
    config, run, group = training.config, training.run, training.group
    tokenizer = training.corpus.tokenizer
    if not group.on_rank_zero(lambda: run.exists):
        if config.base.run is not None:
            _load_base_weights(training, RunDirectory(Path(config.base.run)))
            group.on_rank_zero(lambda: run.checkpoints.mkdir(parents=True, exist_ok=True))
            save_checkpoint(
                training
            )  # before `create`: resuming needs no base, and never begins untrained
        group.on_rank_zero(lambda: run.create(config, tokenizer))
        return
    group.on_rank_zero(lambda: run.checkpoints.mkdir(exist_ok=True))
    existing = run.load_config()
    check_same_settings(config, existing, run)
    if run.load_tokenizer().fingerprint != tokenizer.fingerprint:
        raise _text_changed_error(config, run)
    if (checkpoint := load_newest_checkpoint(training)) is not None:
        restore_checkpoint(training, checkpoint)
        _compare_micro_batches(existing, config, run)
        # a kill may have left more
        group.on_rank_zero(lambda: run.prune(training.progress.best, config.train.keep))
        training.started -= training.progress.elapsed
    elif config.base.run is not None:
        raise CheckpointError(
            f"{run.checkpoints}: no checkpoint to resume from; delete {run.path} to begin again "
            f"from {config.base.run}"
        )
    if training.step < config.train.steps:
        group.on_rank_zero(lambda: run.write_config(config))


def _compare_micro_batches(existing: Config, config: Config, run: RunDirectory) -> None:
    """Warn if rows are computed in other groups than before.

    Each group draws its own dropout, and the gradients of the groups are added.
    """
    before, now = existing.train.micro_batch_size, config.train.micro_batch_size
    if before != now:
        warn(
            f"{run.path}: micro_batch_size was {before}, is {now}; results will no longer be "
            f"bit-identical"
        )


def load_newest_checkpoint(training: Training) -> Checkpoint | None:
    """The newest intact checkpoint, as rank 0 finds it; the other ranks read the same."""
    run, checkpoints = training.run, list[Checkpoint | None]()
    if training.shards is not None:
        return run.load_newest(lambda step: _load_own_shard(training, step))

    def find() -> tuple[int, str] | None:
        checkpoints.append(checkpoint := run.load_newest())
        return None if checkpoint is None else (checkpoint.step, checkpoint.sha256)

    chosen = training.group.on_rank_zero(find)
    if not checkpoints and chosen is not None:
        checkpoints.append(checkpoint := run.load_checkpoint(chosen[0], with_optimizer=True))
        if checkpoint.sha256 != chosen[1]:
            raise CheckpointError(
                f"{run.checkpoints}: step {chosen[0]} is not the checkpoint that rank 0 reads; "
                f"give all ranks the same directory"
            )
    return checkpoints[0] if checkpoints else None


def _load_own_shard(training: Training, step: int) -> Checkpoint:
    """This rank's rows of a checkpoint; CheckpointError on all ranks if one cannot read its own."""
    checkpoint, damage, spec = list[Checkpoint](), list[str](), training.shard_spec
    try:
        checkpoint.append(training.run.load_checkpoint(step, with_optimizer=True, spec=spec))
    except CheckpointError as error:
        damage.extend(error.lines)
    damages = [line for lines in training.group.all_gather_object(damage) for line in lines]
    if damages:
        raise CheckpointError(*damages)
    return checkpoint[0]


def _load_base_weights(training: Training, base: RunDirectory) -> None:
    """Load the weights that the configuration names; CheckpointError if they are gone."""
    checkpoint, model = base.load_best(training.shard_spec), training.model
    if checkpoint.sha256 != training.config.base.sha256:
        raise CheckpointError(
            f"{base.path}: changed while this run was prepared; run the same command again"
        )
    model.load_state_dict(check_shapes(checkpoint.model, model.state_dict(), base.checkpoints))


def save_checkpoint(training: Training) -> None:
    """Write a checkpoint of this step, unless there is one."""
    if training.saved_step == training.step:
        return
    run, group, shards = training.run, training.group, training.shards
    keep, weights = training.config.train.keep, training.model.state_dict()
    own = shards.to_row_slices(weights) if shards else {}
    parts = [piece.rows for piece in own.values()] if shards else weights.values()
    finite = all(bool(part.isfinite().all()) for part in parts)
    if not all(group.all_gather_object(finite)):
        raise DivergedError(describe_divergence(training, "weights that are not finite"))
    training.progress.elapsed = training.elapsed
    state, optimizer = asdict(training.progress), training.optimizer.state_dict()
    if shards is None:
        group.check_weights(weights)
        group.on_rank_zero(lambda: run.save(Checkpoint(state, weights, optimizer), keep))
    else:  # each rank its rows, then rank 0 the manifest
        pieces = {"model": own, "optimizer": shards.to_row_slices(optimizer)}
        group.on_rank_zero(run.begin_save)
        written = group.on_all_ranks(
            lambda: run.save_shard(training.step, group.rank + 1, group.world_size, pieces)
        )
        manifest = {name: each for shard in written for name, each in shard.items()}
        group.on_rank_zero(lambda: run.save(Checkpoint(state, {}, {}), keep, manifest))
    training.saved_step = training.step


def restore_checkpoint(training: Training, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights, optimizer state and progress."""
    run, model, now = training.run, training.model, training.progress
    names = {entry.name for entry in fields(Progress)}
    if missing := names - checkpoint.state.keys():
        raise CheckpointError(f"{run.checkpoints}: step {checkpoint.step} lacks {min(missing)}")
    then = Progress(**{name: checkpoint.state[name] for name in names})
    if then.corpus != now.corpus:
        raise _text_changed_error(training.config, run)
    model.load_state_dict(check_shapes(checkpoint.model, model.state_dict(), run.checkpoints))
    if checkpoint.step == 0:
        training.optimizer.reset()
    else:
        check_shapes(
            checkpoint.optimizer, training.optimizer.expected_state_dict(), run.checkpoints
        )
        training.optimizer.load_state_dict(checkpoint.optimizer)
    training.group.on_rank_zero(lambda: run.set_aside_after(checkpoint.step))
    changes = []
    for name in BITS_DEPEND_ON:
        if getattr(then, name) != getattr(now, name):
            changes.append(f"{name} was {getattr(then, name)}, is {getattr(now, name)}")
            setattr(then, name, getattr(now, name))
    if changes:
        warn(f"{run.path}: {'; '.join(changes)}; results will no longer be bit-identical")
    training.progress, training.saved_step = then, then.step
    training.last_logged = (then.step, then.seconds)
    training.recent_losses.clear()
    training.first_update = None
    training.group.on_rank_zero(lambda: run.write_best(then.best))


def check_same_settings(
    requested: Config, existing: Config, run: RunDirectory, undecided: tuple[Any, ...] = ()
) -> None:
    """ConfigError listing the settings in which a run differs from the one asked for.

    Settings that still have one of the values `undecided` are not compared.
    """
    lines = [
        f"{key}: {_format_value(theirs)} in {run.path}, now {_format_value(ours)}"
        for key, ours, theirs in iter_differences(requested, existing)
        if key not in CHANGEABLE_SETTINGS
        and not key.startswith("sample.")
        and ours not in undecided
        if key != "train.minutes" or None in (ours, theirs)  # other minutes make it longer
    ]
    if lines:
        raise ConfigError(
            *lines, f"{run.path}: holds a run with other settings; choose another --out"
        )


def _format_value(value: Any) -> str:
    return "not set" if value is None else str(value)


def describe_divergence(training: Training, problem: str) -> str:
    """The message for a run whose numbers are no longer finite."""
    return (
        f"{training.run.path}: {problem} after step {training.step}, in {describe_windows(training)}; nothing "
        f"of it was saved; lower train.lr and choose another --out, or set "
        f"train.on_divergence=rewind"
    )


def describe_windows(training: Training, step: int | None = None) -> str:
    """Where the windows of a step begin, so that a user can find the text."""
    starts = training.batches.locate_windows(training.step if step is None else step)
    shown = ", ".join(str(start) for _, start in starts[:4]) + ", ..." * (len(starts) > 4)
    return f"the windows at tokens {shown}"


def _text_changed_error(config: Config, run: RunDirectory) -> DataError:
    return DataError(
        f"{', '.join(config.data.path)}: not the text that {run.path} began with; restore it, or "
        f"choose another --out"
    )


def write_run(
    directory: RunDirectory, config: Config, weights: Tensors, tokenizer: Tokenizer
) -> None:
    """Write a run at step 0 that was trained on no text of ours."""
    progress = Progress("", tokenizer.fingerprint, torch.__version__, 1, "cpu", "float32", "off")
    directory.create(config, tokenizer)
    directory.check_space(sum(tensor.nbytes for tensor in weights.values()))
    directory.save(Checkpoint(asdict(progress), weights, {}))
