import re
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from gptmini.cli.options import build_config
from gptmini.config.load import (
    DEFAULT_CONFIG_FILE,
    find_config_file,
    find_full_key,
    list_config_files,
    load_config,
    override,
    parse_attention,
    validate,
)
from gptmini.config.settings import (
    AttentionConfig,
    Config,
    ModelConfig,
    TrainConfig,
    compute_default_d_ff,
)
from gptmini.config.yamlfile import dump
from gptmini.errors import ConfigError
from tests.support import tiny


def errors(data) -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate(data, {})
    return list(error.value.lines)


def test_every_mistake_of_a_file_is_one_line_with_its_place(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model:\n  n_layer: four\n  d_modle: 3\n  attention: {variant: mqa, n_kv_head: 4}\n"
        "train:\n  lr: -1\n  stepz: 4\n  betas: [0.9, 2]\n  dropout: 0.1\nmodle: {}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(path, [("--set train.seed", ("train", "seed"), -1)])
    expected = [
        ":2: model.n_layer: must be a valid integer, not 'four'",
        ":3: model.d_modle: no such setting; did you mean model.d_model?",
        ":4: model.attention.n_kv_head: variant mqa has 1 KV head, not 4",
        ":6: train.lr: must be at least 1e-8, not -1",
        ":7: train.stepz: no such setting; did you mean train.steps?",
        ":8: train.betas.1: must be less than 1, not 2",
        ":9: train.dropout: no such setting; did you mean model.dropout?",
        ":10: modle: no such section; did you mean model?",
    ]
    lines = error.value.lines
    for words in expected:
        assert any(line.startswith(f"{path}{words}") for line in lines), words
    assert any(line == "--set train.seed: must be at least 0, not -1" for line in lines)
    assert len(lines) == len(expected) + 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"model": {"n_head": 3, "d_model": 256}},
            "d_model: 256 is not a multiple of 6 (2 x n_head, as rope rotates pairs); use one",
        ),
        ({"model": {"n_head": 4, "head_dim": 5}}, "head_dim: 5 is odd, but rope rotates pairs"),
        (
            {"model": {"attention": {"variant": "gqa"}}},
            "n_kv_head: variant gqa needs a number of KV heads",
        ),
        ({"model": {"attention": {"variant": "gqa", "n_kv_head": 3}}}, "use one of 1, 2, 4"),
        (
            {"model": {"attention": {"n_kv_head": 2}}},
            "variant mha has 4 KV heads, one per query head, not 2",
        ),
        ({"model": {"attention": {"window": 0}}}, "window: must be at least 1, not 0"),
        ({"model": {"attention": {"full_every": 4}}}, "full_every: has no effect without a window"),
        ({"model": {"n_layer": True}}, "n_layer: must be a valid integer, not true"),
        ({"model": {"dropout": 1}}, "dropout: must be at most 0.99609375, not 1"),
        ({"train": {"betas": [0.9]}}, "betas: must have at least 2 items, not [0.9]"),
        ({"model": {"norm": "batchnorm"}}, "norm: must be layernorm or rmsnorm, not 'batchnorm'"),
        ({"train": {"steps": 5, "warmup_steps": 9}}, "warmup_steps: 9 is more than steps (5)"),
        ({"train": {"min_lr": 1.0}}, "min_lr: 1.0 is more than lr"),
        ({"train": {"batch_size": 8, "micro_batch_size": 3}}, "3 does not divide batch_size 8"),
        ({"train": {"seq_len": 999}}, "seq_len: 999 is more than model.context_length (256)"),
        ({"train": {"lr": float("nan")}}, "lr: must be a finite number"),
        ({"sample": {"temperature": 1e-45}}, "use 0 (greedy)"),
        ({"data": 4}, "data: must be a section of key: value, not 4"),
    ],
)
def test_wrong_settings_name_the_key_and_what_is_right(data, words):
    (line,) = errors(data)
    assert words in line
    assert "; " in line or "must " in line
    assert not {"Input", "None", "True", "found"} & set(line.split())


def test_contradictions_are_reported_together():
    lines = errors(
        {
            "model": {"n_head": 3, "d_model": 256, "attention": {"variant": "gqa", "n_kv_head": 2}},
            "train": {"steps": 5, "warmup_steps": 9, "min_lr": 1.0},
        }
    )
    assert len(lines) == 4  # width, KV heads, warm-up, floor of the rate


def test_each_variant_has_its_number_of_kv_heads():
    kv_heads = {
        variant: ModelConfig.model_validate(
            {"n_head": 8, "attention": {"variant": variant, "n_kv_head": given}}
        ).n_kv_head
        for variant, given in [("mha", None), ("mqa", None), ("gqa", 2)]
    }
    assert kv_heads == {"mha": 8, "mqa": 1, "gqa": 2}


def test_swiglu_has_about_as_many_weights_as_two_matrices():
    for width in (64, 256, 576, 768):
        assert 3 * width * compute_default_d_ff(width, "swiglu") == pytest.approx(
            8 * width**2, rel=0.03
        )


def test_a_written_configuration_reads_back_equal(tmp_path: Path):
    config = tiny(train={"lr": 1e-5}, data={"path": "010"}).with_tokenizer("bpe", 700)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config.model_dump()))
    assert load_config(path, []) == config


def test_vocab_size_must_be_the_tokenizers():
    assert Config().with_tokenizer("byte", 65).model.vocab_size == 65
    with pytest.raises(ConfigError, match=r"50257.*byte has 257"):
        tiny(model={"vocab_size": 50257}).with_tokenizer("byte", 257)


def test_configurations_are_found_by_name_and_path():
    for path in list_config_files():
        assert find_config_file(str(path)) == path
    assert find_config_file("attention/mqa").name == "mqa.yaml"
    with pytest.raises(ConfigError, match="did you mean shakespeare-char"):
        find_config_file("shakespear-char")


def test_a_single_text_will_do_for_a_list():
    sections = {"sample": {"stop": ".", "ban": "x"}, "train": {"log_to": "wandb"}}
    config = validate({**sections, "data": {"path": "a.txt"}}, {})
    assert (config.sample.stop, config.sample.ban) == (["."], ["x"])
    assert (config.train.log_to, config.data.path) == (["wandb"], ["a.txt"])
    assert validate(config.model_dump(), {}) == config


def test_paths_and_tuples_are_taken_from_python():
    data = {"path": [Path("a.txt"), "b.txt"], "validation_path": Path("c.txt")}
    config = validate({"data": data, "train": {"betas": (0.9, 0.95)}}, {})
    assert config.data.path == ["a.txt", "b.txt"]
    assert config.data.validation_path == ["c.txt"]
    assert config.train.betas == [0.9, 0.95]
    dump(config.model_dump(exclude_unset=True))  # plain data


def test_a_number_of_numpy_is_refused_as_one():
    with pytest.raises(ConfigError, match=r"train\.steps: must be a valid integer, not .*int64"):
        validate({"train": {"steps": np.int64(4)}}, {})


def test_a_value_is_not_a_section(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("data: 3\n")
    with pytest.raises(ConfigError, match="data is a value"):
        load_config(path, [("--data", ("data", "path"), "x")])


def test_a_section_with_nothing_under_it_has_its_defaults(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("model:\ntrain:\n")
    config = load_config(path, [("--steps", ("train", "steps"), 7)])
    assert (config.train.steps, config.model) == (7, Config().model)


def test_attention_has_a_short_form(tmp_path: Path):
    file = tmp_path / "a.yaml"
    for short, variant, n_kv_head, window in (
        ("mqa", "mqa", 1, None),
        ("gqa:2", "gqa", 2, None),
        ("window:64", "mha", 4, 64),
    ):
        file.write_text(f"model:\n  attention: {short}\n")
        key = ("model", "attention", "qk_norm")
        in_file = load_config(file, [("--set model.attention.qk_norm", key, False)]).model.attention
        assert (in_file.variant, in_file.window, in_file.qk_norm) == (variant, window, False)
        model = load_config(None, [("--set model.attention", key[:2], short)]).model
        assert (model.attention.variant, model.n_kv_head) == (variant, n_kv_head)
    file.write_text("model:\n  n_layer: 2\n  attention: gqa\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, [])
    assert str(error.value).startswith(f"{file}:3: model.attention: ")


@pytest.mark.parametrize(
    ("short", "chosen"),
    [
        ("mha", ("mha", None, None, None)),
        ("mqa", ("mqa", None, None, None)),
        ("gqa:2", ("gqa", 2, None, None)),
        ("window:16", ("mha", None, 16, None)),
        ("gqa:2+window:16", ("gqa", 2, 16, None)),
        ("window:16+gqa:2", ("gqa", 2, 16, None)),
    ],
)
def test_a_short_form_of_attention_is_the_whole_choice(tmp_path: Path, short: str, chosen: object):
    """So `mha` and `window:16` differ in the window alone, whatever a file says."""
    file = tmp_path / "a.yaml"
    other = "variant: gqa, n_kv_head: 1, window: 8, full_every: 2, qk_norm: false"
    file.write_text(f"model:\n  attention: {{{other}}}\n")
    found = [
        build_config(str(file), attention=short),
        build_config(str(file), assignments=[f"model.attention={short}"]),
        override(load_config(file, []), {"model": {"attention": short}}, "mine"),
    ]
    for attention in (config.model.attention for config in found):
        keys = ("variant", "n_kv_head", "window", "full_every", "qk_norm")
        assert tuple(getattr(attention, key) for key in keys) == (*chosen, False)
    file.write_text(f"model:\n  attention: {short}\n")
    assert load_config(file, []).model == build_config(None, ["a.txt"], short).model


def test_set_may_add_what_the_attention_of_the_command_line_does_not_name():
    def build(attention: str, *more: str) -> AttentionConfig:
        return build_config(None, ["a.txt"], attention, assignments=list(more)).model.attention

    added = build("gqa:2", "model={n_layer: 2}", "model.attention.window=16")
    assert (added.variant, added.n_kv_head, added.window) == ("gqa", 2, 16)
    assert build("window:8", "model.attention.window=16").window == 8


@pytest.mark.parametrize(
    "wrong", ["", "gqa", "mha:2", "+window:4", "mha+", "mha+mqa", "window:4+window:8"]
)
def test_other_short_forms_of_attention_are_refused(wrong: str):
    with pytest.raises(
        ConfigError, match=r"^here: must be mha, mqa or gqa:N, with or without a window"
    ):
        parse_attention(wrong, "here")


def test_a_section_set_as_a_whole_is_named_with_the_key(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("train:\n  lr: 1e-3\n")
    with pytest.raises(ConfigError) as error:
        load_config(path, [("--set train", ("train",), {"lr": -1})])
    assert error.value.lines[0].startswith("--set train: train.lr: must be at least")


def test_options_and_places_are_named_as_the_user_gave_them(tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        load_config(
            None, [("--steps", ("train", "steps"), 0), ("--set train.lr", ("train", "lr"), "abc")]
        )
    assert error.value.lines == (
        "--steps: must be at least 1, not 0",
        "--set train.lr: must be a valid number, not 'abc'",
    )


def test_every_setting_is_described():
    def undescribed(section: type[BaseModel]) -> list[str]:
        fields = section.model_fields.items()
        inner = [f.annotation for _, f in fields if isinstance(f.annotation, type(BaseModel))]
        here = [n for n, f in fields if f.annotation not in inner and not f.description]
        return here + [name for each in inner for name in undescribed(each)]

    assert undescribed(Config) == []


def test_a_setting_is_known_by_its_last_name():
    names = ("lr", "n_kv_head", "foo")
    found = ["train.lr", "model.attention.n_kv_head", None]
    assert [find_full_key(name) for name in names] == found
    assert find_full_key("lr", "sample.") is None


def test_minutes_on_the_command_line_win_over_the_steps_of_a_file(tmp_path: Path):
    path = tmp_path / "c.yaml"
    intervals = "warmup_steps: 9, eval_every: 50, save_every: 50, log_every: 5"
    path.write_text(f"train: {{steps: 600, {intervals}, lr: 1e-3}}\n")
    minutes = ("--minutes", ("train", "minutes"), 5.0)
    assert load_config(path, [minutes]).train.model_fields_set == {"minutes", "lr"}
    both = load_config(path, [("--steps", ("train", "steps"), 70), minutes]).train
    assert (both.steps, both.eval_every, both.warmup_steps) == (70, 100, 1)
    assert (
        load_config(path, [("--set train.minutes", ("train", "minutes"), None)]).train.steps == 600
    )
    path.write_text("train: {steps: 600, minutes: 5}\n")
    assert load_config(path, []).train.steps == 600


def test_the_default_configuration_states_the_model_and_leaves_open_what_is_chosen():
    default = load_config(DEFAULT_CONFIG_FILE, [])
    assert default.model == ModelConfig(n_layer=2, d_model=192)
    assert (default.tokenizer, default.data) == (Config().tokenizer, Config().data)
    assert default.train == Config().train.model_copy(update={"minutes": 2.0})
    planned = load_config(DEFAULT_CONFIG_FILE, [("--minutes", ("train", "minutes"), 5.0)])
    assert not planned.tokenizer.model_fields_set
    assert not {"n_head", "context_length", "dropout"} & planned.model.model_fields_set
    assert not {"steps", "batch_size", "eval_every", "compile"} & planned.train.model_fields_set


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: ModelConfig(n_haed=3), "ModelConfig.n_haed"),
        (lambda: ModelConfig(n_layer="x"), "ModelConfig.n_layer"),
        (lambda: AttentionConfig(window=0), "AttentionConfig.window"),
        (lambda: TrainConfig(steps=0, lr="a"), "TrainConfig.lr"),
        (lambda: Config(train={"steps": 0}), "Config.train.steps"),
    ],
)
def test_settings_that_are_wrong_in_python_raise_our_error_with_their_key(build, key):
    with pytest.raises(ConfigError) as raised:
        build()
    assert key in str(raised.value)
    assert not re.search("should|nputs|dictionary|factory", str(raised.value))  # pydantic's words


def test_the_short_form_of_attention_is_taken_from_python_too():
    attention = validate({"model": {"attention": "gqa:2"}}, {}).model.attention
    assert (attention.variant, attention.n_kv_head) == ("gqa", 2)
