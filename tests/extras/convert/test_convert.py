"""Pooling KV heads: exact where nothing is pooled, right where heads agree, and trainable."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptmini.config.load import validate
from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError
from gptmini.extras.convert import convert
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from tests.support import tiny, train

TOKENS = torch.arange(24).view(2, 12)


def model_of(n_kv_head: int, **settings) -> GPT:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 30,
        "n_layer": 2,
        "n_head": 8,
        "d_model": 32,
        "context_length": 12,
        "attention": {"variant": "gqa", "n_kv_head": n_kv_head},
    }
    config = ModelConfig.model_validate(sizes | settings)
    return GPT(config).eval()


def pooled(model: GPT, n_kv_head: int) -> GPT:
    made = model_of(n_kv_head, bias=model.config.bias)
    made.load_state_dict(convert.pool_kv_heads(model.state_dict(), made.config))
    return made


@pytest.mark.parametrize("heads", [8, 4, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_pooling_to_the_same_number_of_heads_changes_nothing(heads, bias):
    model = model_of(heads, bias=bias)
    made = pooled(model, heads)
    assert torch.equal(made(TOKENS), model(TOKENS))


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_equal_heads_pool_without_loss(heads):
    model = model_of(8, bias=True)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "k_proj" in name or "v_proj" in name:
                few = torch.randn(heads, 1, 4, *tensor.shape[1:])
                tensor.copy_(few.expand(-1, 8 // heads, *few.shape[2:]).reshape(tensor.shape))
    torch.testing.assert_close(pooled(model, heads)(TOKENS), model(TOKENS))


def test_a_pooled_head_is_the_mean_of_those_it_replaces():
    model = model_of(4)
    before = model.blocks[1].attn.v_proj.weight
    after = pooled(model, 2).blocks[1].attn.v_proj.weight
    rows: list[Tensor] = [(before[0:4] + before[4:8]) / 2, (before[8:12] + before[12:16]) / 2]
    torch.testing.assert_close(after, torch.cat(rows))
    assert torch.equal(pooled(model, 2).embed.weight, model.embed.weight)


@pytest.fixture
def trained(text_file: Path, tmp_path: Path) -> Run:
    config = tiny(data={"path": str(text_file)}, train={"steps": 20, "eval_every": 10})
    train(config, tmp_path / "run")
    return load_run(tmp_path / "run", "cpu", "float32")


def test_a_converted_run_generates_and_can_be_trained_further(trained, tmp_path):
    out = tmp_path / "pooled"
    mqa = {"variant": "mqa", "n_kv_head": None}
    config = convert.convert_run(trained, mqa, None, out)
    assert config.train.steps == 2
    assert config.model.n_kv_head == 1
    start = load_run(out, "cpu", "float32")
    assert start.step == 0
    assert start.generate("the", max_new_tokens=3)
    for name, tensor in start.model.state_dict().items():
        if "k_proj" not in name and "v_proj" not in name:
            assert torch.equal(tensor, trained.model.state_dict()[name])
    train(RunDirectory(out).load_config(), out)
    after = RunDirectory(out).load_newest()
    assert after.step == 2
    assert not torch.equal(after.model["embed.weight"], start.model.embed.weight)


def test_conversions_that_cannot_work_are_refused(trained, tmp_path):
    wrong = {"variant": "gqa", "n_kv_head": 3}
    with pytest.raises(ConfigError, match="3"):
        convert.convert_run(trained, wrong, None, tmp_path / "a")
    half = {"variant": "gqa", "n_kv_head": 2}
    convert.convert_run(trained, half, None, tmp_path / "half")
    fewer = load_run(tmp_path / "half", "cpu", "float32")
    with pytest.raises(
        ConfigError, match=r"2 KV heads of .* cannot be averaged into 4; .* one of 1, 2"
    ):
        convert.convert_run(fewer, {"variant": "mha", "n_kv_head": None}, None, tmp_path / "b")
    with pytest.raises(ConfigError, match="already exists"):
        convert.convert_run(trained, half, None, tmp_path / "half")


def test_a_tuned_run_is_converted_with_its_own_tokenizer(text_file, tmp_path):
    learned = {"kind": "bpe", "vocab_size": 300}
    train(tiny(data={"path": str(text_file)}, tokenizer=learned), tmp_path / "base")
    (tmp_path / "other.txt").write_text("12 apples, 13 pears and the fox\n" * 60)
    tuned = {"base": {"run": str(tmp_path / "base")}, "data": {"path": str(tmp_path / "other.txt")}}
    few = {"steps": 2, "eval_every": 2, "batch_size": 4}
    train(validate({**tuned, "train": few}, {}), tmp_path / "tuned")
    run = load_run(tmp_path / "tuned", "cpu", "float32")
    shutil.rmtree(tmp_path / "base")
    out = tmp_path / "pooled"
    config = convert.convert_run(run, {"variant": "mqa", "n_kv_head": None}, 2, out)
    assert config.base.run is None
    assert RunDirectory(out).load_tokenizer().fingerprint == run.tokenizer.fingerprint
    train(RunDirectory(out).load_config(), out)
    assert RunDirectory(out).list_steps()[0] == 2
