"""Builds a run at step 0: model, optimizer and batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptmini import machine
from gptmini.console import show_elapsed, warn
from gptmini.errors import ConfigError, MachineError
from gptmini.generate.own_model import build_own_model, check_own_model, measure_start
from gptmini.generate.sequence import build_token_bias
from gptmini.model.compile import compile_blocks
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer
from gptmini.runs.directory import RunDirectory
from gptmini.runs.progress import Progress
from gptmini.train.batches import Batches, CustomBatches
from gptmini.train.cuda_graph import RecordedLoss
from gptmini.train.group import SINGLE_PROCESS, Group
from gptmini.train.seeds import seed_from
from gptmini.train.state import FIRST_LOSS_SCALE, CustomParts, Training

if TYPE_CHECKING:
    from gptmini.plan.settle import Plan


@show_elapsed("building the model")
def build_training(
    plan: Plan, run: RunDirectory, own: CustomParts | None = None, group: Group = SINGLE_PROCESS
) -> Training:
    """Build the training state of a run at step 0; writes nothing.

    ConfigError for a text of sample.bias or sample.ban that is not one token, and for a module or
    optimizer of your own in a model that is sharded.
    """
    own = own or CustomParts()
    config = plan.config
    corpus = plan.corpus
    compute = plan.machine.compute
    train = config.train
    if group.is_sharded and (own.model is not None or own.optimizer is not None):
        raise ConfigError("train.shard: not with a model or optimizer of your own; set it to false")

    torch.manual_seed(seed_from(train.seed))  # the same weights on all ranks
    model = _build_model(plan, own, group)
    optimizer = _build_optimizer(model, plan, own, group)
    rank_rows = train.batch_size // group.world_size
    rows = range(group.rank * rank_rows, (group.rank + 1) * rank_rows)
    n = rank_rows // (train.micro_batch_size or rank_rows)  # micro-batches of each rank
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
        compute_loss=choose_loss(model, compute.device, own, group),
        optimizer=optimizer,
        batches=_open_batches(model, plan, own, rows),
        # A block of the step's micro-batches for each rank: a subtree of exact sums.
        micro_batches=list(range(group.rank * n, (group.rank + 1) * n)),
        gradients=group.create_gradients(model, train.reduce, n),
        progress=_start_progress(plan, own, optimizer),
        started=plan.machine.started,
    )


def _build_model(plan: Plan, own: CustomParts, group: Group) -> GPT:
    config = plan.config
    compute = plan.machine.compute
    if own.model is None:
        model = group.create_model(config.model, compute)
    else:
        model = build_own_model(own.model, config.model).to(compute.device)
        check_own_model(model)
    model.gradient_checkpointing = config.train.gradient_checkpointing
    if config.train.compile == "on":
        if compute.device.type == "cpu" and not machine.has_compiler():
            raise MachineError("train.compile: no C++ compiler found; use auto or off")
        compile_blocks(model)
    return model


def choose_loss(
    model: GPT, device: torch.device, own: CustomParts, group: Group
) -> Callable[[Tensor, Tensor], Tensor]:
    """Choose what computes the mean loss () of targets (B, T): on CUDA, a recording of the model.

    A model of your own may do something else in each pass, and gradient checkpointing restores
    random states, which no recording can.
    """
    if own.loss is not None:
        return partial(own.loss, model)
    is_same_each_time = own.model is None and not model.gradient_checkpointing
    is_recorded = device.type == "cuda" and group.world_size == 1 and is_same_each_time
    return RecordedLoss(model) if is_recorded else model


def _build_optimizer(model: GPT, plan: Plan, own: CustomParts, group: Group) -> Optimizer:
    """Build the optimizer; freeze the weights that one of your own leaves out."""
    if own.optimizer is None:
        train = plan.config.train
        orthogonalize = group.choose_orthogonalize(train.reduce)
        return Optimizer(model, train, plan.machine.compute.dtype, orthogonalize)
    try:
        optimizer = own.optimizer(model)
        inspect.signature(optimizer.step).bind()  # without a closure, which LBFGS needs
    except (AttributeError, TypeError, ValueError) as error:
        problem = "must be a function that makes an optimizer of torch for a model"
        raise ConfigError(f"optimizer: {problem} ({error})") from error
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not held <= set(model.parameters()):
        raise ConfigError("optimizer: holds weights of another model; take those of this one")
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and p not in held]
    for name in left_out:  # its gradients would add up, and be clipped with the others
        model.get_parameter(name).requires_grad_(False)
    if left_out:
        warn(f"optimizer: does not train {len(left_out)} weights, such as {left_out[0]}")
    return Optimizer.wrap(optimizer, model)


def _open_batches(model: GPT, plan: Plan, own: CustomParts, rows: range) -> Batches:
    """Open the batches, of which this rank reads some rows."""
    config = plan.config
    train = config.train
    if own.batches is not None:
        V = model.embed.num_embeddings
        return CustomBatches(own.batches, V, config.seq_len, train.batch_size, rows)
    texts = plan.corpus.training
    weights = config.data.weights
    return Batches(texts, weights, config.seq_len, train.batch_size, train.seed, rows=rows)


def _start_progress(plan: Plan, own: CustomParts, optimizer: Optimizer) -> Progress:
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
        own_model=own.model is not None,
        own_logits=measure_start(own.model, plan.config.model) if own.model else [],
        own_optimizer=optimizer.given,
        own_parts=own.list_unsaved(),
    )
