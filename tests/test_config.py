from pathlib import Path

import pytest
from conftest import tiny

from gptmini.config.load import (
    differences,
    find,
    load,
    named_configs,
    validate,
)
from gptmini.config.settings import Config, ModelConfig, default_d_ff
from gptmini.config.yamlfile import dump
from gptmini.errors import ConfigError


def errors(data) -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate(data, {})
    return list(error.value.lines)


def test_every_mistake_of_a_file_is_one_line_with_its_place(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model:\n  n_layer: four\n  n_embd: 3\n  attention: {variant: mqa, n_kv_head: 4}\n"
        "train:\n  lr: -1\n  stepz: 4\n  betas: [0.9, 2]\n  dropout: 0.1\nmodle: {}\n"
    )
    with pytest.raises(ConfigError) as error:
        load(path, [("--set train.seed", ("train", "seed"), -1)])
    expected = [
        ":2: model.n_layer: expected a valid integer, found 'four'",
        ":3: model.n_embd: no such setting; did you mean model.d_model?",
        ":4: model.attention.n_kv_head: variant mqa has 1, not 4",
        ":6: train.lr: expected greater than 0, found -1",
        ":7: train.stepz: no such setting; did you mean steps?",
        ":8: train.betas.1: expected less than 1, found 2",
        ":9: train.dropout: no such setting; did you mean model.dropout?",
        ":10: modle: no such setting; did you mean model?",
    ]
    lines = error.value.lines
    for words in expected:
        assert any(line.startswith(f"{path}{words}") for line in lines), words
    assert any(line.startswith("--set train.seed: expected greater") for line in lines)
    assert len(lines) == len(expected) + 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"model": {"n_head": 3, "d_model": 256}},
            "d_model: 256 is not a multiple of 6 (n_head, and rope rotates pairs); take 252 or 258",
        ),
        ({"model": {"n_head": 4, "head_dim": 5}}, "head_dim: rope rotates pairs, 5 is odd"),
        ({"model": {"attention": {"variant": "gqa"}}}, "n_kv_head: variant gqa needs it"),
        ({"model": {"attention": {"variant": "gqa", "n_kv_head": 3}}}, "take one of 1, 2, 4"),
        ({"model": {"attention": {"n_kv_head": 2}}}, "variant mha has n_head = 4, not 2"),
        ({"model": {"attention": {"window": 0}}}, "window: expected greater than or equal to 1"),
        ({"model": {"attention": {"full_every": 4}}}, "full_every: without a window"),
        ({"model": {"n_layer": True}}, "n_layer: expected a valid integer"),
        ({"model": {"n_layer": 2.5}}, "n_layer: expected a valid integer, found 2.5"),
        ({"model": {"dropout": 1}}, "dropout: expected less than 1"),
        ({"model": {"norm": "batchnorm"}}, "norm: expected layernorm or rmsnorm"),
        ({"train": {"steps": 10**30}}, "steps: expected less than or equal to"),
        ({"train": {"steps": 5, "warmup_steps": 9}}, "warmup_steps: 9 is over steps 5"),
        ({"train": {"min_lr": 1.0}}, "min_lr: 1.0 is over lr"),
        ({"train": {"batch_size": 8, "micro_batch_size": 3}}, "3 does not divide batch_size 8"),
        ({"train": {"seq_len": 999}}, "seq_len: 999 is over model.context_length 256"),
        ({"train": {"lr": float("nan")}}, "lr: expected a finite number"),
        ({"sample": {"temperature": 1e-45}}, "take 0 for greedy"),
        ({"sample": {"top_p": 1.5}}, "top_p: expected less than or equal to 1"),
        ({"data": 4}, "data: expected settings of the form key: value"),
    ],
)
def test_wrong_settings_name_key_and_mend(data, words):
    (line,) = errors(data)
    assert words in line
    assert ";" in line


def test_contradictions_come_together():
    lines = errors(
        {
            "model": {"n_head": 3, "d_model": 256, "attention": {"variant": "gqa", "n_kv_head": 2}},
            "train": {"steps": 5, "warmup_steps": 9, "min_lr": 1.0},
        }
    )
    assert len(lines) == 4  # width, KV heads, warm-up, floor of the rate


def test_kv_heads_of_the_variants():
    kv_heads = {
        variant: ModelConfig.model_validate(
            {"n_head": 8, "attention": {"variant": variant, "n_kv_head": given}}
        ).n_kv_head
        for variant, given in [("mha", None), ("mqa", None), ("gqa", 2)]
    }
    assert kv_heads == {"mha": 8, "mqa": 1, "gqa": 2}


def test_swiglu_has_about_the_weights_of_two_matrices():
    for width in (64, 256, 576, 768):
        assert 3 * width * default_d_ff(width, "swiglu") == pytest.approx(8 * width**2, rel=0.03)


def test_a_written_configuration_is_the_same_when_read(tmp_path: Path):
    config = tiny(train={"lr": 1e-5}, data={"path": "010"}).with_tokenizer("bpe", 700)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config.model_dump()))
    assert load(path, []) == config


def test_vocab_size_must_be_the_tokenizers():
    assert Config().with_tokenizer("byte", 65).model.vocab_size == 65
    with pytest.raises(ConfigError, match=r"50257.*byte has 257"):
        tiny(model={"vocab_size": 50257}).with_tokenizer("byte", 257)


def test_differences():
    assert list(differences(tiny(), tiny(train={"lr": 1.0}))) == [("train.lr", 2e-3, 1.0)]


def test_configurations_by_name_and_path():
    for path in named_configs():
        assert find(str(path)) == path
    assert find("attention/mqa").name == "mqa.yaml"
    with pytest.raises(ConfigError, match="did you mean shakespeare-char"):
        find("shakespear-char")


def test_a_value_is_no_section(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("data: 3\n")
    with pytest.raises(ConfigError, match="data is a value"):
        load(path, [("--data", ("data", "path"), "x")])


def test_contradictions_stand_beside_malformed_settings():
    lines = errors({"train": {"lr": -1, "steps": 5, "warmup_steps": 9}})
    assert [line.split(":")[0] for line in lines] == ["train.lr", "train.warmup_steps"]
    lines = errors({"train": {"seq_len": 999, "lr": -1}})
    assert [line.split(":")[0] for line in lines] == ["train.lr", "train.seq_len"]
    # with the number of heads unknown nothing is said about the width
    (line,) = errors({"model": {"n_head": "six", "d_model": 90}})
    assert line.startswith("model.n_head")


def test_the_place_of_a_section_given_whole(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("train:\n  lr: 1e-3\n")
    with pytest.raises(ConfigError) as error:
        load(path, [("--set train", ("train",), {"lr": -1})])
    assert error.value.lines[0].startswith("--set train: train.lr: expected greater than 0")
