"""Runs that are compared: what the first chose for itself, the others take."""

import pytest

from gptmini.config.load import SET_BY_MINUTES
from gptmini.extras.compare.share import share_choices
from gptmini.plan.recipe import HIGH_RISK
from tests.core.plan import test_resume
from tests.core.plan.test_resume import REQUESTS, ask, begin, plan

text = test_resume.text


@pytest.mark.parametrize("asked", REQUESTS)
def test_variants_that_are_alike_are_planned_alike(asked, text, tmp_path):
    first = begin(ask(text, asked), text, tmp_path)
    twin = share_choices(ask(text, asked, seed=2), first)
    assert plan(twin, text) == first.load_config().with_train(seed=2)


def test_a_variant_keeps_what_it_states_and_how_long_it_trains(text, tmp_path):
    run = begin(ask(text, {}), text, tmp_path)
    chosen = run.load_config()
    other = share_choices(ask(text, {"model": {"activation": "swiglu", "n_layer": 3}}), run)
    assert other.model.n_layer == 3
    assert other.model.d_model == chosen.model.d_model
    assert other.model.context_length == chosen.model.context_length
    assert other.train.batch_size == chosen.train.batch_size
    assert other.model.d_ff != chosen.model.d_ff  # swiglu has three matrices
    assert SET_BY_MINUTES & other.train.model_fields_set <= {"eval_tokens"}
    adamw = share_choices(ask(text, {}, optimizer="adamw"), run)
    assert (adamw.train.lr, adamw.model.tie_embeddings) == (2e-3, True)
    by_steps = ask(text, {}, minutes=None)
    assert share_choices(by_steps, run) == by_steps


def test_muon_has_the_same_rates_after_adamw_as_alone(text, tmp_path):
    alone = plan(ask(text, {}), text).train
    assert alone.muon_lr == HIGH_RISK["train"]["muon_lr"]
    run = begin(ask(text, {}, optimizer="adamw"), text, tmp_path)
    after = plan(share_choices(ask(text, {}), run), text).train
    keys = ("lr", "embed_lr", "muon_lr", "weight_decay")
    assert [getattr(after, key) for key in keys] == [getattr(alone, key) for key in keys]
