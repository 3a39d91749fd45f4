"""Plans for many accelerators, against real shards on two processes and against arithmetic."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import astuple

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from gptmini.errors import ConfigError
from gptmini.model.gpt import GPT, loss
from gptmini.plan import cost, ranks
from gptmini.plan.memory import Memory

SHAPE = {"n_layer": 5, "n_head": 4, "d_model": 64, "context_length": 64, "dropout": 0}
H100 = ranks.accelerator("h100", None, None)


def config_of(batch_size: int = 8, vocab_size: int = 256, **settings):
    """A small training; `settings` are those of the model, `train` those of the section."""
    train = {"batch_size": batch_size, "micro_batch_size": 2, **settings.pop("train", {})}
    config = tiny(model={**SHAPE, "vocab_size": vocab_size, **settings}, train=train)
    assert config.model.vocab_size == vocab_size
    return config


# One of two processes: FSDP2 by its documentation, with a real step of AdamW.
WORKER = """
import json, sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from gptmini.config.settings import Config
from gptmini.model.gpt import GPT, loss
from gptmini.plan.ranks import RankCounter

folder, rank, text = sys.argv[1:]
config = Config.model_validate_json(text)
distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2
)
mesh = init_device_mesh("cpu", (2,))
model = GPT(config.model).train()
model.gradient_checkpointing = config.train.gradient_checkpointing
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
held = RankCounter(model)
held.restart()
with held:
    for _ in range(2):
        tokens = torch.zeros(2, config.seq_len, dtype=torch.long)
        loss(model, tokens, tokens).backward()
optimizer = torch.optim.AdamW(model.parameters())
optimizer.step()
state = [tensor for each in optimizer.state.values() for tensor in each.values()]
local = lambda tensors: sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)
weights = [*model.parameters()]
print(json.dumps({
    "weights": local(weights),
    "gradients": local(p.grad for p in weights),
    "optimizer": local(state),
    "peak": held.peak,
}))
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_rank_holds_what_real_shards_do(tmp_path, checkpointing):
    config = config_of(
        4,
        position="none",
        attention={"backend": "sdpa"},
        train={"optimizer": "adamw", "gradient_checkpointing": checkpointing},
    )
    words = [sys.executable, "-c", WORKER, str(tmp_path)]
    processes = [
        subprocess.Popen([*words, rank, config.model_dump_json()], stdout=subprocess.PIPE)
        for rank in "01"
    ]
    with ranks.one_rank(config, 2, shard=True) as measure:
        memory, _ = measure(config)
    for process in processes:
        real = json.loads(process.communicate(timeout=120)[0])
        assert memory.weights == real["weights"]
        assert memory.gradients == real["gradients"]
        assert memory.optimizer == real["optimizer"]
        assert memory.peak - memory.optimizer == pytest.approx(real["peak"], rel=0.02)


def padded(config, n: int) -> dict[str, int]:
    """Numbers in blocks and beside them, where n ranks hold equal numbers of rows."""
    with torch.device("meta"):
        model = GPT(config.model)
    counts = {"blocks": 0, "beside": 0}
    for name, p in model.named_parameters():
        part = "blocks" if name.startswith("blocks.") else "beside"
        counts[part] += -(-len(p) // n) * n * p[0].numel()
    return counts


@pytest.mark.parametrize(("n", "vocab_size", "again"), [(2, 256, False), (128, 257, True)])
def test_collectives_carry_the_weights_twice_and_the_gradients_once(n, vocab_size, again):
    """What is beside the blocks stays whole from the forward to the backward pass."""
    train = {"gradient_checkpointing": again}
    config = config_of(6, vocab_size, bias=True, position="learned", train=train)
    with ranks.one_rank(config, n, shard=True) as measure:
        _, traffic = measure(config)
    passes, counts = 3, padded(config, n)
    assert traffic == {
        "all_gather": passes * 2 * (2 * counts["blocks"] + counts["beside"]),
        "reduce_scatter": passes * 4 * (counts["blocks"] + counts["beside"]),
    }


def test_replicas_reduce_their_gradients_once_a_step():
    config = config_of(16)
    plan = ranks.plan(config, H100, 2)
    model = GPT(config.model)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    loss(model, tokens, tokens).backward()
    assert plan.traffic == {"all_reduce": sum(p.grad.nbytes for p in model.parameters())}
    alone = ranks.plan(config_of(8), H100)
    assert (alone.traffic, alone.communication) == ({}, 0)
    assert plan.memory == alone.memory  # each replica is a whole training of its rows


@pytest.mark.parametrize(
    "settings",
    [{"attention": {"window": 8, "full_every": 3}}, {"d_model": 256, "context_length": 8}],
    ids=["windows", "peak at the end"],
)
def test_a_few_blocks_stand_for_many(monkeypatch, settings):
    config = config_of(n_layer=10, **settings)
    measured = []
    for few in (ranks.FEW, 10):
        monkeypatch.setattr(ranks, "FEW", few)
        with ranks.one_rank(config, 2, shard=True) as measure:
            measured.append(measure(config))
    assert measured[0] == measured[1]


def test_operations_of_a_rank_are_those_of_the_formula():
    """The eager kernel multiplies all T x T scores, of which the formula counts those seen."""
    config = config_of(attention={"backend": "eager", "qk_norm": False})
    T, model = config.seq_len, config.model
    distributed.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        with FakeTensorMode():
            sharded = ranks.shards(config, mesh)
            with FlopCounterMode(display=False) as counted:
                tokens = torch.zeros(2, T, dtype=torch.long)
                loss(sharded, tokens, tokens).backward()
    finally:
        distributed.destroy_process_group()
    unseen = 3 * 4 * model.n_head * model.head_dim * model.n_layer * (T - (T + 1) / 2)
    assert counted.get_total_flops() == 2 * T * (cost.training_flops(model, T) + unseen)


@pytest.fixture
def measured(monkeypatch):
    """Ranks of 1 GB and 500 MB per row, 100 less with checkpointing; each row gathers 1 GB."""

    def measure(training):
        rows = training.train.micro_batch_size
        activations = rows * (500 - 100 * training.train.gradient_checkpointing)
        memory = Memory(250, 250, 500, activations, 0)
        scaled = Memory(*(size * 10**6 for size in astuple(memory)))
        return scaled, {"all_gather": 10**9 * training.train.batch_size}

    monkeypatch.setattr(ranks, "one_rank", lambda *_: nullcontext(measure))


def test_a_step_takes_the_longer_of_compute_and_communication(measured):
    config = config_of(64)
    flops = 64 * 64 * cost.training_flops(config.model, 64)
    for n, bandwidth in ((8, 450e9), (16, 8 * 50e9), (64, 8 * 50e9)):
        plan = ranks.plan(config, H100, n)
        assert plan.compute == pytest.approx(flops / n / (0.4 * 989e12))
        assert plan.communication == pytest.approx(64e9 / n * (n - 1) / n / (0.8 * bandwidth))
        assert plan.seconds == plan.communication > plan.compute
        assert plan.memory_otherwise == plan.memory.peak - min(2, 64 // n) * 100e6
    slow = ranks.accelerator("H100", 1e-9, 8)
    plan = ranks.plan(config, slow, 16)
    assert plan.communication == pytest.approx(4e9 * 15 / 16 / (0.8 * 8e9))
    assert plan.seconds == plan.compute == pytest.approx(flops / 16 / (1e-9 * 989e12))


def test_rows_of_a_pass_are_chosen_to_fit(measured):
    for gigabytes, rows in ((1.2, 1), (1.6, 1), (2.5, 3), (3.4, 4), (80, 24)):
        on = H100._replace(gigabytes=gigabytes)
        plan = ranks.plan(config_of(48), on, 2, shard=True, choose=True)
        assert plan.config.train.micro_batch_size == rows
        assert (plan.memory.peak <= gigabytes * 1e9) == (gigabytes > 1.5)
    given = ranks.plan(config_of(48, train={"micro_batch_size": 24}), H100, 8)
    assert given.config.train.micro_batch_size == 6  # all that a rank has


def test_batches_that_ranks_cannot_share_are_refused():
    for n, near in ((3, "use 6 or 9"), (16, "use 16$")):
        with pytest.raises(ConfigError, match=f"8 is not a multiple of {n} ranks; {near}"):
            ranks.plan(config_of(8), H100, n)


def test_nothing_is_left_behind(monkeypatch):
    own = F.rms_norm
    monkeypatch.setattr(ranks, "Optimizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ranks.plan(config_of(norm="rmsnorm"), H100, 2, shard=True)
    assert F.rms_norm is own
    assert not distributed.is_initialized()


def test_norms_keep_what_fused_kernels_do():
    """RMSNorm, which a CPU computes in parts, needs no more memory than LayerNorm."""
    plans = [ranks.plan(config_of(norm=norm), H100) for norm in ("rmsnorm", "layernorm")]
    assert plans[0].memory == plans[1].memory
    assert plans[0].memory_otherwise == plans[1].memory_otherwise
