"""Every configuration loads, says what to expect and makes a step; generated files are current."""

import json

import pytest
import torch

from gptmini.config.load import CONFIGS_DIR, list_config_files, load_config
from gptmini.config.settings import Config
from gptmini.model.gpt import GPT
from gptmini.model.optim import Optimizer

NAMES = [str(path.relative_to(CONFIGS_DIR).with_suffix("")) for path in list_config_files()]


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_loads_is_short_and_opens_with_what_to_expect(name):
    path = CONFIGS_DIR / f"{name}.yaml"
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
    assert lines[1].startswith("# yaml-language-server: $schema=")
    assert (path.parent / lines[1].split("=")[1]).resolve() == CONFIGS_DIR / "schema.json"
    load_config(path, [])


@pytest.mark.parametrize("name", ["default", "gpt2-124m", "llama-135m"])  # others differ in sizes
def test_a_configuration_makes_a_step(name):
    small = [("", ("model", "n_layer"), 1)]
    config = load_config(CONFIGS_DIR / f"{name}.yaml", small).with_tokenizer("byte", 257)
    model = GPT(config.model)
    optimizer = Optimizer(model, config.train)
    tokens = torch.randint(257, (1, 17))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step(1e-3)
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_attention_configurations_differ_in_one_line():
    texts = {
        name: (CONFIGS_DIR / "attention" / f"{name}.yaml").read_text().splitlines()[1:]
        for name in ("mha", "gqa", "mqa")
    }
    for name in ("gqa", "mqa"):
        pairs = zip(texts["mha"], texts[name], strict=True)
        assert sum(ours != theirs for ours, theirs in pairs) == 1


def test_the_schema_is_that_of_the_settings():
    schema = json.loads((CONFIGS_DIR / "schema.json").read_text())
    assert schema == Config.model_json_schema(), "run scripts/write_schema.py"


def test_the_readme_lists_every_configuration():
    readme = (CONFIGS_DIR / "README.md").read_text()
    assert [name for name in NAMES if f"| `{name}` |" not in readme] == []
