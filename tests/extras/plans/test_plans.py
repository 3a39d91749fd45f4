"""Plans for many accelerators, against real shards and arithmetic."""

from dataclasses import astuple

import pytest
import torch

from gptmini.errors import ConfigError
from gptmini.extras.plans import plans
from gptmini.model.gpt import GPT
from gptmini.plan import cost
from gptmini.plan.cost import Memory
from tests.support import tiny

SHAPE = {"n_layer": 3, "n_head": 4, "d_model": 64, "context_length": 64, "dropout": 0}
H100 = plans.find_accelerator("h100", None, None)


def config_of(batch_size: int = 8, vocab_size: int = 256, **settings):
    """A small training; `settings` are those of the model, `train` those of the section."""
    train = {"batch_size": batch_size, "micro_batch_size": 2, **settings.pop("train", {})}
    return tiny(model={**SHAPE, "vocab_size": vocab_size, **settings}, train=train)


@pytest.mark.parametrize("again", [False, True])
def test_collectives_carry_the_weights_twice_and_the_gradients_once(again):
    train = {"gradient_checkpointing": again, "micro_batch_size": 1}
    attention = {"qk_norm": False}
    config = config_of(6, bias=True, position="learned", attention=attention, train=train)
    plan = plans.plan_rank(config, H100, 2, shard=True)
    with torch.device("meta"):
        named = dict(GPT(config.model).named_parameters())
    inside = [p for n, p in named.items() if n.startswith("blocks.") and "norm" not in n]
    matrices = sum(map(torch.numel, inside))
    others = sum(map(torch.numel, named.values())) - matrices
    passes = 3
    assert plan.traffic == {
        "all_gather": passes * 2 * (2 * matrices + 4 * others),
        "reduce_scatter": passes * 4 * (matrices + others),
    }


def test_replicas_reduce_their_gradients_once_a_step():
    config = config_of(16)
    plan = plans.plan_rank(config, H100, 2)
    assert plan.traffic == {"all_reduce": 4 * cost.count_parameters(config.model)}
    carried = 2 * plan.traffic["all_reduce"]  # each sum is sent to one rank, and back
    assert plan.communication_seconds == pytest.approx(carried / 2 / (0.8 * 450e9))
    alone = plans.plan_rank(config_of(8), H100)
    assert (alone.traffic, alone.communication_seconds) == ({}, 0)
    assert plan.memory == alone.memory  # each replica is a whole training of its rows


def test_shards_divide_weights_and_state_and_gather_two_blocks():
    config = config_of(16, n_layer=4, train={"optimizer": "adamw"})
    whole = plans.compute_memory(config, 1)
    shared = plans.compute_memory(config, 4)
    assert astuple(shared)[:3] == tuple(-(-size // 4) for size in astuple(whole)[:3])
    kept = 2 * 64 * cost.count_bytes_kept_per_token(config, plans.COMPUTE)
    matrices, others = plans.count_gathered(config)
    assert shared.activations == kept + 2 * 6 * matrices // 4 + 8 * others
    wide = config_of(8, d_model=512, train={"micro_batch_size": 1})  # most is Muon's temporaries
    by_adamw = wide.with_train(optimizer="adamw")
    by_muon = plans.compute_memory(wide, 1).activations
    assert by_muon > 1.5 * plans.compute_memory(by_adamw, 1).activations
    shared_by_muon = plans.compute_memory(wide, 64).activations
    assert shared_by_muon == plans.compute_memory(by_adamw, 64).activations


@pytest.fixture
def measured(monkeypatch):
    """Ranks of 1 GB and 500 MB per row, 100 less with checkpointing; each row gathers 1 GB."""

    def compute_memory(config, _):
        rows = config.train.micro_batch_size
        activations = rows * (500 - 100 * config.train.gradient_checkpointing)
        return Memory(*(size * 10**6 for size in (250, 250, 500, activations)))

    def compute_traffic(config, *_):
        return {"all_gather": 10**9 * config.train.batch_size}

    monkeypatch.setattr(plans, "compute_memory", compute_memory)
    monkeypatch.setattr(plans, "compute_traffic", compute_traffic)


def test_a_step_takes_the_longer_of_compute_and_communication(measured):
    config = config_of(64, train={"micro_batch_size": 1})
    flops = 64 * 64 * cost.count_training_flops(config.model, 64)
    for n, bandwidth in ((8, 450e9), (16, 8 * 50e9), (64, 8 * 50e9)):
        plan = plans.plan_rank(config, H100, n)
        assert plan.compute_seconds == pytest.approx(flops / n / (0.4 * 989e12))
        assert plan.communication_seconds == pytest.approx(
            64e9 / n * (n - 1) / n / (0.8 * bandwidth)
        )
        assert plan.seconds == plan.communication_seconds > plan.compute_seconds
    slow = plans.find_accelerator("H100", 1e-9, 8)
    plan = plans.plan_rank(config, slow, 16)
    assert plan.communication_seconds == pytest.approx(4e9 * 15 / 16 / (0.8 * 8e9))
    assert plan.seconds == plan.compute_seconds == pytest.approx(flops / 16 / (1e-9 * 989e12))


def test_rows_of_a_pass_are_chosen_to_fit(measured):
    for gigabytes, rows in ((1.2, 1), (1.6, 1), (2.5, 3), (3.4, 4), (80, 24)):
        on = H100._replace(gigabytes=gigabytes)
        config = config_of(48, train={"reduce": "fast"})
        plan = plans.plan_rank(config, on, 2, shard=True, choose_micro_batch=True)
        assert plan.config.train.micro_batch_size == rows
        assert (plan.memory.peak <= gigabytes * 1e9) == (gigabytes > 1.5)
    exact = plans.plan_rank(config_of(48), H100, 2, choose_micro_batch=True)
    assert exact.config.train.micro_batch_size == 6  # as on 8 ranks
    given = plans.plan_rank(config_of(48, train={"micro_batch_size": None}), H100, 8)
    assert given.config.train.micro_batch_size == 6  # all that a rank has


def test_batches_that_ranks_cannot_share_are_refused():
    for n, near in ((3, "use 6 or 9"), (16, "use 16$")):
        with pytest.raises(ConfigError, match=f"8 rows do not divide among {n} processes; {near}"):
            plans.plan_rank(config_of(8), H100, n)
    with pytest.raises(ConfigError, match="micro_batch_size: 2 does not divide the 1 rows"):
        plans.plan_rank(config_of(8), H100, 8)
