"""`gptmini size --accelerator`."""

import json
from typing import Any

import pytest

from gptmini.extras.plans import accelerators, plans, report
from gptmini.plan.cost import Memory
from tests.support import SMALL

WORDS = ["--data", "text.txt", *SMALL]


def planned(gptmini, *words: str) -> dict:
    code, out, err = gptmini("size", *WORDS, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_short_training_takes_seconds_and_windows_are_named(gptmini, text_file):
    words = ["--attention", "window:4", "--accelerator", "h100", "--steps", "1"]
    code, out, err = gptmini("size", *WORDS, *words)
    assert code == 0, err
    assert "  mqa, window 4 " in out
    assert "seen in 1 step: " in out
    assert "time        about 0:01 on 1 x h100" in out
    assert "too small for this estimate" in out


def test_an_accelerator_is_reckoned_by_its_peak(gptmini, text_file):
    found = planned(gptmini, "--accelerator", "h100", "--utilization", "0.5")
    flops = found["flops_per_token"]["training"] * found["tokens"]["seen"]
    assert found["time"]["minutes"] == pytest.approx(flops / (0.5 * 989e12) / 60)
    assert found["time"]["fits"] is True
    code, _, err = gptmini("size", *WORDS, "--accelerator", "abacus")
    assert (code, "use one of l4" in err) == (2, True)


def test_ranks_share_batches_and_with_shard_the_weights(gptmini, text_file):
    words = ["--accelerator", "H100", "--ranks"]
    alone = planned(gptmini, *words, "1")["memory"]
    replica = planned(gptmini, *words, "4", "--set", "train.micro_batch_size=1")
    assert replica["memory"]["weights"] == alone["weights"]
    assert replica["time"]["collectives"] == {"all_reduce": 4 * replica["parameters"]["all"]}
    time = replica["time"]
    assert time["tokens_per_second"] == pytest.approx(4 * 16 / time["seconds_per_step"])
    assert time["tokens_per_second_per_rank"] == pytest.approx(16 / time["seconds_per_step"])
    code, out, err = gptmini("size", *WORDS, *words, "4", "--shard", "--network", "100")
    assert code == 0, err
    assert "MiB per rank at the peak, micro-batch 1" in out
    assert "on 4 x h100, sharded\n            too small for this estimate" in out
    assert "of 450 GB/s within a machine of 8, 100 Gbit/s per rank between)" in out
    assert " all-gathered, " in out
    assert max(map(len, out.splitlines())) <= 80
    for words, said in (
        (["--ranks", "256"], "--ranks: needs --accelerator"),
        (["--utilization", "0.3"], "--utilization: needs --accelerator"),
        (["--shard", "--accelerator", "h100"], "--shard: one rank"),
        (["--ranks", "3", "--accelerator", "h100"], "not divide among 3 processes; use 3 or 6"),
    ):
        code, _, err = gptmini("size", *WORDS, *words)
        assert (code, said in err) == (2, True), err


def test_a_stated_vocabulary_needs_no_text(gptmini):
    words = ["--data", "nothing.txt", "--accelerator", "h100", *SMALL]
    code, out, err = gptmini("size", *words, "--set", "model.vocab_size=128256")
    assert (code, err) == (0, "")
    assert "\ndata        256 seen in 4 steps\n" in out
    assert gptmini("size", *words)[0] == 3


def test_an_accelerator_that_is_too_small_is_named_with_its_memory(gptmini, text_file):
    words = ["--accelerator", "l4", "--set", "model={d_model: 8192, n_layer: 3}"]
    code, out, err = gptmini("size", *WORDS, *words)
    assert code == 0, err
    assert "the run does not fit in the 24 GB of one l4;\n" in out
    assert out.endswith(f"{report.INDENT}or lower model.d_model or model.n_layer\n")


@pytest.mark.parametrize(("peak", "fits"), [(80e9 - 1, True), (80e9 + 1, False)])
def test_each_figure_has_its_unit(gptmini, text_file, monkeypatch, peak, fits):
    def plan(config: Any, *_: Any) -> plans.RankPlan:
        return plans.RankPlan(
            config=config.with_train(micro_batch_size=1),
            memory=Memory(0, 0, 0, int(peak)),
            memory_otherwise=int(8e9),
            traffic={"all_gather": 3_000_000, "reduce_scatter": 5_000},
            bandwidth=7e9,
            compute_seconds=30.0,
            communication_seconds=60.0,
        )

    monkeypatch.setattr(plans, "plan_rank", plan)
    words = ["--accelerator", "h100", "--ranks", "4", "--shard", "--network", "12.5"]
    facts = planned(gptmini, *words)
    assert (facts["memory_otherwise"], facts["micro_batch_size"]) == (8_000_000_000, 1)
    time = facts["time"]
    assert (time["on"], time["minutes"]) == ("4 x h100, sharded", 4.0)  # 4 steps
    assert time["tokens_per_second"] == pytest.approx(64 / 60)
    assert time["fits"] == fits
    assert accelerators.format_speed(facts["time"]) == [
        "the run fits in the 80 GB of one h100",
        "60 s per step, 1 tokens/s, 0 per rank",
        "compute 30 s, at 40% of 989 TFLOP/s",
        "meanwhile communication 60 s, at 7 GB/s:",
        "3.00 MB all-gathered, 5.00 kB reduce-scattered",
        "(80% of 450 GB/s within a machine of 8, 12.5 Gbit/s per rank between)",
    ]


def test_a_configuration_may_ask_for_shards(gptmini, text_file):
    words = ["--accelerator", "h100", "--set", "train.shard=true", "--ranks"]
    assert planned(gptmini, *words, "2")["time"]["sharded"] is True
    assert planned(gptmini, *words, "1")["time"]["sharded"] is False
    code, _, err = gptmini("size", *WORDS, "--accelerator", "h100", "--minutes", "5")
    assert (code, "--minutes" in err) == (2, True)
