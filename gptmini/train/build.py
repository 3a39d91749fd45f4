"""Builds a run at step 0: model, optimizer and batches."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gptmini import machine
from gptmini.console import show_elapsed
from gptmini.errors import ConfigError
from gptmini.generate.own_model import build_own_model, check_cache
from gptmini.generate.sequence import build_token_bias
from gptmini.model.optim import Optimizer
from gptmini.plan.cuda_graph import create_loss
from gptmini.plan.plan import Plan
from gptmini.plan.timing import compile_blocks
from gptmini.runs.directory import RunDirectory
from gptmini.runs.progress import Progress
from gptmini.train.batches import Batches, CustomBatches, seed_from
from gptmini.train.group import SINGLE_PROCESS, Group
from gptmini.train.state import FIRST_LOSS_SCALE, CustomParts, Training


@show_elapsed("building the model")
def build_training(
    plan: Plan, run: RunDirectory, own: CustomParts | None = None, group: Group = SINGLE_PROCESS
) -> Training:
    """Build the training state of a run at step 0; writes nothing.

    ConfigError for a text of sample.bias or sample.ban that is not one token, and for a module or
    optimizer of one's own in a model that is sharded.
    """
    own = own or CustomParts()
    config = plan.config
    corpus = plan.corpus
    compute = plan.machine.compute
    train = config.train
    if group.is_sharded and (own.model is not None or own.optimizer is not None):
        raise ConfigError("train.shard: not with a model or optimizer of your own; set it to off")

    # Fixed here for all ranks: the same weights everywhere.
    torch.manual_seed(seed_from(train.seed))
    if own.model is None:
        model = group.create_model(config.model, compute)
    else:
        model = build_own_model(own.model, config.model).to(compute.device)
        check_cache(model)
    model.gradient_checkpointing = train.gradient_checkpointing
    if train.compile == "on":
        compile_blocks(model)
    compute_loss: Callable[[Tensor, Tensor], Tensor] = model
    if own.loss is not None:
        compute_loss = partial(own.loss, model)
    # A model of one's own may do something else in each pass.
    elif own.model is None and group.world_size == 1:
        compute_loss = create_loss(model, compute.device)

    rank_rows = train.batch_size // group.world_size
    micro_batch_size = train.micro_batch_size or rank_rows
    n = rank_rows // micro_batch_size  # micro-batches of each rank
    # A block of the step's micro-batches for each rank: a subtree of exact sums.
    micro_batches = list(range(group.rank * n, (group.rank + 1) * n))
    rows = range(group.rank * rank_rows, (group.rank + 1) * rank_rows)
    if own.batches is not None:
        batches: Batches = CustomBatches(own.batches, config.seq_len, train.batch_size, rows)
    else:
        batches = Batches(
            corpus.training,
            config.data.weights,
            config.seq_len,
            train.batch_size,
            train.seed,
            rows=rows,
        )
    if own.optimizer is not None:
        optimizer = Optimizer.wrap(own.optimizer(model), model)
    else:
        orthogonalize = group.choose_orthogonalize(train.reduce)
        optimizer = Optimizer(model, train, compute.dtype, orthogonalize)
    progress = _start_progress(plan)
    progress.own_model = own.model is not None
    if own.optimizer is not None:
        progress.own_optimizer = type(optimizer.optimizers[0]).__name__
    build_token_bias(corpus.tokenizer, config.sample)  # refuses now what a sample would
    return Training(
        plan=plan,
        config=config,
        run=run,
        corpus=corpus,
        compute=compute,
        group=group,
        own=own,
        model=model,
        compute_loss=compute_loss,
        optimizer=optimizer,
        batches=batches,
        micro_batches=micro_batches,
        gradients=group.create_gradients(model, train.reduce, n),
        progress=progress,
        started=plan.machine.started,
    )


def _start_progress(plan: Plan) -> Progress:
    """Return the progress at step 0, with all that the last bit of a result depends on."""
    corpus = plan.corpus
    compute = plan.machine.compute
    return Progress(
        corpus=corpus.content,
        tokenizer=corpus.tokenizer.fingerprint,
        torch=str(torch.__version__),
        threads=compute.threads or torch.get_num_threads(),
        device=machine.describe_device(compute.device),
        dtype=str(compute.dtype).removeprefix("torch."),
        compile=plan.config.train.compile,
        loss_scale=FIRST_LOSS_SCALE if compute.dtype == torch.float16 else 1.0,
        deterministic=compute.deterministic,
    )
