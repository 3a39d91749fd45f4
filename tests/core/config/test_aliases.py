"""What users of other projects write, and what they are told."""

from pathlib import Path

import pytest

from gptmini.config.aliases import ALIASES
from gptmini.config.load import list_keys, load_config
from gptmini.config.yamlfile import parse_assignment
from gptmini.errors import ConfigError


def test_an_alias_is_a_key_or_a_remedy_in_words():
    keys = list_keys()
    for name, meant in ALIASES.items():
        assert meant in keys or meant.split()[0] in (
            "add",
            "leave",
            "name",
            "run",
            "set",
            "start",
            "use",
        ), name
        assert name not in keys


def test_a_foreign_name_is_answered_with_ours():
    path, value = parse_assignment("train.beta1=0.9")
    with pytest.raises(ConfigError) as error:
        load_config(None, [("--set train.beta1", path, value)])
    assert error.value.lines == (
        "--set train.beta1: no such setting; set train.betas, a list of both",
    )


def test_a_foreign_file_is_answered_line_by_line(tmp_path: Path):
    file = tmp_path / "nano.yaml"
    file.write_text("max_iters: 100\nblock_size: 64\nwandb_log: true\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, [])
    assert error.value.lines == (
        f"{file}:1: max_iters: no such setting; did you mean train.steps?",
        f"{file}:2: block_size: no such setting; did you mean model.context_length?",
        f"{file}:3: wandb_log: no such setting; set train.log_to: wandb",
    )
