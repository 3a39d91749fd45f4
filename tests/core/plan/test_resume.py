"""The same request plans the same run: again, and for more minutes."""

import random
from pathlib import Path
from typing import Any

import pytest

from gptmini.config.load import validate
from gptmini.config.settings import Config
from gptmini.errors import ConfigError
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import RunDirectory
from tests.core.plan.machines import FakeMachine

MACHINE = FakeMachine(step=0.5)
# A text of the first size is read once or twice in ten minutes, and one of the second often.
SIZES = [3_000_000, 300_000]
REQUESTS: list[dict[str, Any]] = [
    {},
    {
        "model": {"dropout": None, "vocab_size": None},
        "tokenizer": {"kind": "auto", "vocab_size": None},
        "data": {"validation": None},
        "train": {
            **dict.fromkeys(("seq_len", "eval_tokens", "embed_lr", "micro_batch_size")),
            **dict.fromkeys(("reduce", "compile", "deterministic"), "auto"),
        },
    },
    {
        "model": {"n_layer": 4, "context_length": 256, "tie_embeddings": True},
        "train": {"lr": 2e-3, "weight_decay": 0.3, "batch_size": 16, "minutes": 10, "steps": 300},
    },
    {"tokenizer": {"kind": "bpe", "vocab_size": 4000}},  # more than there is to learn
    {"train": {"minutes": None}},
]


@pytest.fixture(scope="module", params=SIZES, ids=["few epochs", "many epochs"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcde", k=2)) for _ in range(1000)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words * (request.param // 3000)))
    return path


def ask(text: Path, asked: dict[str, Any], **train: Any) -> Config:
    own = {"data": {"path": str(text)}, "train": {"minutes": 10, "compile": "off"}}
    names = own.keys() | asked.keys()
    sections = {name: own.get(name, {}) | asked.get(name, {}) for name in names}
    return validate({**sections, "train": sections["train"] | train}, {})


def plan(requested: Config, text: Path, run: RunDirectory | None = None) -> Config:
    return make_plan(requested, run, machine=MACHINE).config


def begin(requested: Config, text: Path, folder: Path) -> RunDirectory:
    run = RunDirectory(folder / "run")
    made = make_plan(requested, run, machine=MACHINE)
    run.create(made.config, made.corpus.tokenizer, requested)
    return run


@pytest.mark.parametrize("asked", REQUESTS)
def test_the_same_request_changes_nothing_in_a_run(asked, text, tmp_path):
    run = begin(ask(text, asked), text, tmp_path)
    assert plan(ask(text, asked), text, run) == run.load_config()
    # All that was settled may be stated, too, as `gptmini train RUN/config.yaml` does.
    assert plan(run.load_config(), text, run) == run.load_config()


@pytest.mark.parametrize("asked", REQUESTS)
def test_other_minutes_and_other_steps_change_the_length_of_a_run(asked, text, tmp_path):
    run = begin(ask(text, asked), text, tmp_path)
    before = run.load_config()
    other = {"steps": 500} if before.train.minutes is None else {"minutes": 15}
    after = plan(ask(text, asked, **other), text, run)
    length = {key: getattr(after.train, key) for key in ("minutes", "steps", "warmup_steps")}
    assert before.with_train(**length) == after
    is_stated = "steps" in asked.get("train", {})
    is_long_enough = after.model.context_length == 256  # more would make the model worse
    assert after.train.steps > before.train.steps or is_stated or is_long_enough


def test_a_run_whose_request_nobody_knows_is_not_resumed(text, tmp_path):
    run = begin(ask(text, {}), text, tmp_path)
    run.request_file.unlink()
    with pytest.raises(ConfigError, match=r"cannot be resumed; .* --from .*run$") as refused:
        plan(ask(text, {}), text, run)
    assert len(refused.value.lines) == 1
