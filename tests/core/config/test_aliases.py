"""What users of other projects write, and what they are told."""

from pathlib import Path

import pytest

from gptmini.config.aliases import ALIASES
from gptmini.config.load import find_remedy, list_keys, load_config
from gptmini.config.yamlfile import parse_assignment
from gptmini.errors import ConfigError

# What a command line of each project is likely to say.
NANOGPT = """
out_dir eval_interval log_interval eval_iters eval_only init_from wandb_log dataset
gradient_accumulation_steps batch_size block_size n_layer n_head n_embd dropout bias learning_rate
max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr device
dtype compile start num_samples max_new_tokens temperature top_k seed
"""
LITGPT = """
global_batch_size micro_batch_size epochs max_tokens max_steps max_seq_length tie_embeddings min_lr
max_new_tokens max_iters out_dir precision checkpoint_dir resume seed
"""
TRANSFORMERS = """
per_device_train_batch_size learning_rate num_train_epochs model_name_or_path lora_r bf16 max_steps
report_to output_dir
"""


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


@pytest.mark.parametrize("names", [NANOGPT, LITGPT, TRANSFORMERS])
def test_every_name_of_other_projects_has_an_answer(names):
    assert [name for name in names.split() if not find_remedy(name)] == []


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        (
            "train.gradient_accumulation_steps=4",
            "--set train.gradient_accumulation_steps: no such setting; set train.micro_batch_size, "
            "the rows of a pass; gradients add up over batch_size",
        ),
        ("max_iters=100", "--set max_iters: no such setting; did you mean train.steps?"),
        ("train.beta1=0.9", "--set train.beta1: no such setting; set train.betas, a list of both"),
        ("sample.max_tokens=9", "--set sample.max_tokens: no such setting; set sample.max_new_"),
        ("model_name_or_path=x", "--set model_name_or_path: no such setting; use --from"),
    ],
)
def test_a_foreign_name_is_answered_with_ours(assignment, line):
    path, value = parse_assignment(assignment)
    with pytest.raises(ConfigError) as error:
        load_config(None, [(f"--set {'.'.join(path)}", path, value)])
    assert str(error.value).startswith(line)


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
