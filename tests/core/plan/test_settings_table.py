"""What becomes of each setting in a new run, in one that is resumed, and in one from a base.

The table is settings_table.txt, a line a setting. It is a plan about users: whoever changes a
line changes what a command does to somebody's run.

| column         | the setting                                                        |
|----------------|--------------------------------------------------------------------|
| new            | is given another value than the default                            |
| resume stated  | is given another value when a run is resumed                       |
| resume open    | is left out when a run that has a value of its own is resumed      |
| other steps    | is asked for again when a run is resumed for more steps            |
| other minutes  | the same with another `train.minutes`                              |
| from stated    | is given another value for a new run from a base                   |
| from open      | is left out for a new run from a base that has a value of its own  |
| compared       | is given another value than the first of several runs to compare   |

taken: the value that was stated holds. refused: in a line that names it. kept: the value of the run
or the base holds. anew: another value holds, the default or one that is chosen.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gptmini.config.load import iter_settings, validate
from gptmini.config.settings import Config
from gptmini.errors import GptminiError
from gptmini.model.gpt import GPT
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.progress import Progress
from tests.support import TINY

TABLE = Path(__file__).with_name("settings_table.txt")
COLUMNS = [
    "new",
    "resume stated",
    "resume open",
    "other steps",
    "other minutes",
    "from stated",
    "from open",
    "compared",
]
# Another value for each setting, that goes with the small configuration.
OTHER_VALUES: dict[str, Any] = {
    "model.n_layer": 3,
    "model.n_head": 2,
    "model.d_model": 48,
    "model.head_dim": 16,
    "model.context_length": 20,
    "model.attention.variant": "mqa",
    "model.attention.window": 7,
    "model.attention.qkv_bias": True,
    "model.attention.qk_norm": False,
    "model.attention.weight_dropout": 0.1,
    "model.attention.backend": "eager",
    "model.position": "learned",
    "model.rope_theta": 500.0,
    "model.norm": "rmsnorm",
    "model.norm_eps": 1e-6,
    "model.activation": "gelu",
    "model.d_ff": 64,
    "model.bias": True,
    "model.tie_embeddings": False,
    "model.dropout": 0.25,
    "model.induction_head": False,
    "tokenizer.kind": "char",
    "data.errors": "replace",
    "data.validation": 0.2,
    "data.split": "documents",
    "data.test": 0.1,
    "data.separator": "\n\n",
    "data.text_key": "body",
    "train.steps": 9,
    "train.batch_size": 2,
    "train.micro_batch_size": 1,
    "train.seq_len": 8,
    "train.optimizer": "adamw",
    "train.muon_lr": 0.01,
    "train.lr": 1e-3,
    "train.embed_lr": 5e-3,
    "train.min_lr": 1e-4,
    "train.warmup_steps": 2,
    "train.schedule": "cosine",
    "train.cooldown": 0.5,
    "train.weight_decay": 0.05,
    "train.betas": [0.9, 0.95],
    "train.grad_clip": 0.5,
    "train.reduce": "exact",
    "train.gradient_checkpointing": True,
    "train.deterministic": "on",
    "train.compile": "off",
    "train.patience": 3,
    "train.eval_every": 2,
    "train.eval_tokens": 100,
    "train.save_every": 2,
    "train.keep": 3,
    "train.log_every": 2,
    "train.seed": 7,
    "train.dtype": "float32",
    "sample.max_new_tokens": 5,
    "sample.temperature": 0.5,
    "sample.top_k": 9,
    "sample.seed": 3,
}


def put(sections: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of the sections with a setting, by its dotted key, changed, or without it."""
    first, _, rest = key.partition(".")
    copy = dict(sections)
    if rest:
        copy[first] = put(copy.get(first) or {}, rest, value)
    elif value is None:
        copy.pop(first, None)
    else:
        copy[first] = value
    return copy


class Machine:
    """Makes runs on a small text and says what becomes of a setting."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "texts"
        self.text.mkdir()
        for document in range(20):  # so that some can be held out whole
            lines = [f"{document}.{n} is a number of its own.\n" for n in range(15)]
            (self.text / f"{document}.txt").write_text("".join(lines))
        self.plain = {**TINY, "data": {"path": str(self.text)}}
        self.runs: dict[str, RunDirectory] = {}  # by what was asked for

    def plan(self, requested: Config, run: RunDirectory | None) -> Config:
        return make_plan(requested, run, dry_run=True).config

    def write_run(self, sections: dict[str, Any]) -> RunDirectory:
        """A run at step 0, with weights, as a base must have them; planning leaves it as it is."""
        asked = json.dumps(sections, sort_keys=True)
        if asked in self.runs:
            return self.runs[asked]
        run = RunDirectory(self.folder / f"run-{len(self.runs)}")
        plan = make_plan(validate(sections, {}), None, dry_run=True)
        run.create(plan.config, plan.corpus.tokenizer, plan.request.stated)
        progress = Progress(plan.corpus.content, plan.corpus.tokenizer.fingerprint)
        weights = GPT(plan.config.model).state_dict()
        run.save(Checkpoint(vars(progress), weights, {}))
        self.runs[asked] = run
        return run


def describe(machine: Machine, key: str, column: str) -> str:
    """What becomes of a setting in the situation of a column."""
    other = OTHER_VALUES[key]
    has_it = put(machine.plain, key, other)
    longer = put(put(machine.plain, "train.steps", 12), key, other)
    by_minutes = put(put(has_it, "train.minutes", 1.0), "train.steps", None)
    data = {"data": machine.plain["data"]}
    # What a run began with, what is asked for now, and what it means if the other value holds.
    situations = {
        "new": (machine.plain, has_it, "taken"),
        "resume stated": (machine.plain, has_it, "taken"),
        "resume open": (has_it, put(machine.plain, key, None), "kept"),
        "other steps": (has_it, longer, "kept"),
        "other minutes": (by_minutes, put(by_minutes, "train.minutes", 2.0), "kept"),
        "from stated": (machine.plain, put(data, key, other), "taken"),
        "from open": (has_it, data, "kept"),
        "compared": (machine.plain, has_it, "taken"),
    }
    before, now, found = situations[column]
    try:
        run = machine.write_run(before)
        if column.startswith("from"):
            now = put(now, "base.run", str(run.path))
        requested = validate(now, {})
        if column == "compared":
            from gptmini.extras.compare.share import share_choices

            requested = share_choices(requested, run)
        config = machine.plan(requested, run if column.startswith(("resume", "other")) else None)
    except GptminiError as error:
        named = any(part in str(error) for part in (key, key.rpartition(".")[2]))
        assert named, f"{key}, {column}: {error}"
        return "refused"
    value = dict(iter_settings(config.model_dump()))[key]
    return found if value == other else "anew"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("settings"))


def read_table() -> dict[str, list[str]]:
    lines = (line.split() for line in TABLE.read_text().splitlines()[1:])
    return {key: outcomes for key, *outcomes in lines}


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_each_setting_does_in_each_situation_what_the_table_says(key, machine):
    if key == "train.reduce":
        pytest.importorskip("gptmini.extras.parallel")  # which has what is not the default
    columns = COLUMNS if find_spec("gptmini.extras") else COLUMNS[:-1]  # without `compare`
    found = [describe(machine, key, column) for column in columns]
    assert found == read_table()[key][: len(columns)]


def test_the_table_has_every_setting_but_those_that_the_text_above_names():
    # Places of texts, lists that need others beside them, and what names the base.
    left_out = {
        "model.vocab_size",
        "model.rope_scaling",
        "model.attention.n_kv_head",
        "model.attention.full_every",
        "tokenizer.vocab_size",
        "data.path",
        "data.weights",
        "data.validation_path",
        "train.minutes",
        "train.shard",
        "train.log_to",
        "train.device",
    }
    keys = {key for key, _ in iter_settings(Config().model_dump())}
    keys = {key for key in keys if not key.startswith(("base.", "sample."))}
    tested = {key for key in OTHER_VALUES if not key.startswith("sample.")}
    assert keys - left_out == tested
    assert read_table().keys() == OTHER_VALUES.keys()
