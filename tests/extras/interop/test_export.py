"""Exports against transformers: logits, greedy tokens, ids; and the faults that proofs catch."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gptmini import files
from gptmini.config.settings import Config, ModelConfig
from gptmini.errors import ConfigError, GptminiError
from gptmini.extras.interop import architectures, huggingface
from gptmini.extras.interop import export as exporting
from gptmini.extras.interop.adopt import adopt_tokenizer
from gptmini.extras.interop.export import (
    HARD_TEXTS,
    check_logits,
    check_tokens,
    choose_tokens,
    compute_logits,
    export_run,
)
from gptmini.extras.interop.folding import fold
from gptmini.extras.interop.import_model import import_model
from gptmini.generate.filters import adjust_logits, filter_probabilities
from gptmini.generate.run import Run
from gptmini.generate.sequence import build_token_bias
from gptmini.model.gpt import GPT
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from tests.samples import (
    CASES,
    CHAT_TOKENIZER,
    GQA,
    LLAMA,
    NO_NORM,
    TEMPLATE_TOKENS,
    TEXT,
    TOKENIZER,
    run_of,
    thinking_tokenizer,
)
from tests.support import POSITIONS


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_computes_the_same(case, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    architecture, model = CASES[case]
    run = run_of(tmp_path / "run", **model)
    made = export_run(run, tmp_path / "out")
    assert made.architecture == architecture
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == architectures.ARCHITECTURES[architecture].hf_class
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = run.model(tokens)
    scale = float(expected.detach().abs().max())
    assert scale > 1
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=3e-5 * scale)
    prompt = tokens[:1, :10]
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    greedy = theirs.generate(prompt, **settings, suppress_tokens=None)
    ours = prompt
    for _ in range(20):  # min_new_tokens forbids the end-of-text token there
        best = run.model(ours)[:, -1].index_fill(1, torch.tensor([299]), -torch.inf).argmax(1)
        ours = torch.cat([ours, best[:, None]], dim=1)
    assert torch.equal(greedy, ours)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_their_tokenizer_gives_the_same_ids(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    for number, (_, model) in enumerate([CASES["default"], CASES["llama"], CASES["gpt2"]]):
        run = run_of(tmp_path / f"run{number}", **model)
        export_run(run, tmp_path / f"out{number}")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"out{number}")
        assert theirs.bos_token_id == theirs.eos_token_id == 299
        for text in (TEXT, *HARD_TEXTS):
            ids = run.tokenizer.encode(text).tolist()
            assert theirs(text)["input_ids"] == ids, repr(text)
            assert theirs.decode(ids) == text


SAMPLINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "all tokens": {"top_k": None, "temperature": 1.0},
    "everything": {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "bias": {"a": -2.5, "e": 1.5},
        "ban": [" ", "o"],
    },
    "bans": {"ban": [" ", "o"]},
    "biases": {"bias": {"a": -2.5, "e": 1.5}},
    "greedy": {"temperature": 0, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("case", SAMPLINGS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_samples_from_the_same_probabilities(case, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    run = run_of(tmp_path / "run", sample=SAMPLINGS[case])
    export_run(run, tmp_path / "out")
    read = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    read.validate(strict=True)
    sample = run.config.sample
    assert read.do_sample == (sample.temperature > 0)
    assert read.max_new_tokens == sample.max_new_tokens
    assert (read.bos_token_id, read.eos_token_id, read.pad_token_id) == (299, 299, 299)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompt = run.encode("It was the bag of")
    settings = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    made = theirs.generate(torch.tensor([prompt]), **settings)
    logits = run.model(torch.tensor([prompt]))[0, -1].detach()
    text = run.create_text(0, prompt, sample, build_token_bias(run.tokenizer, sample))
    (scores,) = adjust_logits(logits[None], [text])
    if sample.temperature == 0:
        assert made.sequences[0, -1] == scores.argmax()
        torch.testing.assert_close(made.scores[0][0], scores, rtol=0, atol=1e-4)
        return
    tokens, weights = filter_probabilities(scores, sample)
    expected = torch.zeros(300, dtype=torch.float64)
    chosen = torch.arange(300) if tokens is None else torch.from_numpy(tokens)
    expected[chosen] = torch.from_numpy(weights / weights.sum())
    found = made.scores[0][0].double().softmax(-1)
    assert (found > 0).sum() == (expected > 0).sum() > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_sampling_that_transformers_does_not_have_is_said(tmp_path, capfd):
    sample = {"presence_penalty": 0.5, "stop": ["\n"]}
    export_run(run_of(tmp_path / "run", sample=sample), tmp_path / "out")
    said = capfd.readouterr().err
    assert "sample.presence_penalty: left out of generation_config.json" in said
    assert "sample.stop: left out" in said
    assert "frequency_penalty" not in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_texts_of_several_lengths_are_padded_and_continued_as_alone(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    run = run_of(tmp_path / "run", sample={"temperature": 0, "max_new_tokens": 8})
    export_run(run, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompts = ["It", "It was the best of times", "a b"]
    made = theirs.generate(**tokenizer(prompts, padding=True, return_tensors="pt"))
    ours = run.start(prompts).finish()
    for text, row in zip(ours, made, strict=True):
        assert tokenizer.decode(row[-8:]) == tokenizer.decode(text.tokens)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_chat_template_and_ends_go_out_and_come_back(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    run = run_of(tmp_path / "run", CHAT_TOKENIZER)
    export_run(run, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token, theirs.bos_token) == ("<|im_end|>", "<|endoftext|>")
    read = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert read.eos_token_id == [301, 299]
    messages = [{"role": "user", "content": "What is 12?"}]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nWhat is 12?<|im_end|>\n<|im_start|>assistant\n"
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    (text,) = run.start([prompt], special=True).samples
    assert text.prompt_tokens == ids["input_ids"]
    assert text.prompt_tokens.count(300) == 2
    assert text.prompt_tokens.count(301) == 1
    (plain,) = run.start([prompt]).samples
    assert max(plain.prompt_tokens) < 299
    back = import_model(tmp_path / "out", tmp_path / "back")
    for name in ("special_tokens", "end_tokens", "chat_template"):
        assert getattr(back.tokenizer, name) == getattr(run.tokenizer, name)
    assert back.tokenizer.template_tokens == TEMPLATE_TOKENS
    export_run(back, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        once, twice = (tmp_path / folder / name for folder in ("out", "again"))
        assert once.read_bytes() == twice.read_bytes(), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_added_tokens_that_are_not_special_stay_in_decoded_texts(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    run = run_of(tmp_path / "run", thinking_tokenizer())
    export_run(run, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|im_start|>assistant\n<think>\nIt was</think>\n\nyes<|im_end|>"
    tokens = run.tokenizer.encode_special(text).tolist()
    assert theirs(text)["input_ids"] == tokens
    answer = theirs.decode(tokens, skip_special_tokens=True)
    assert answer == "assistant\n<think>\nIt was</think>\n\nyes"
    back = import_model(tmp_path / "out", tmp_path / "back")
    assert back.tokenizer.to_json() == run.tokenizer.to_json()
    assert back.tokenizer.encode("<think>").tolist() == [302]


# -- back ------------------------------------------------------------------------------------------


ONE_OF_EACH = ["default", "window in some layers", "llama", "mistral", "starcoder2", "gpt2"]


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_an_export_comes_back_as_a_run_that_computes_the_same(case, tmp_path):
    run = run_of(tmp_path / "run", **CASES[case][1])
    export_run(run, tmp_path / "out")
    back = import_model(tmp_path / "out", tmp_path / "back")
    tokens = torch.arange(40)[None]
    expected = run.model(tokens)
    limit = 1e-5 * float(expected.detach().abs().max())
    torch.testing.assert_close(back.model(tokens), expected, rtol=0, atol=limit)
    # Nothing is left to fold, so from here on every export is the same, bit for bit.
    export_run(back, tmp_path / "again")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        once, twice = (tmp_path / folder / name for folder in ("out", "again"))
        assert once.read_bytes() == twice.read_bytes(), name


def test_where_nothing_is_folded_every_bit_and_setting_comes_back(tmp_path):
    for name in ("swiglu, untied", "llama", "starcoder2", "gpt2"):
        run = run_of(tmp_path / f"{name} run", **CASES[name][1])
        export_run(run, tmp_path / name)
        back = import_model(tmp_path / name, tmp_path / f"{name} back")
        for key, tensor in run.model.state_dict().items():
            assert torch.equal(back.model.state_dict()[key], tensor), key
        ours, theirs = ({**each.config.model.model_dump()} for each in (run, back))
        ours["attention"]["qkv_bias"] = theirs["attention"]["qkv_bias"]
        theirs["attention"]["n_kv_head"] = ours["attention"]["n_kv_head"]
        theirs["attention"]["variant"] = ours["attention"]["variant"]
        assert ours == theirs


# -- the proof -------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the configuration and the tensors of an export."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")


def uncentered(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight"] += 0.02  # a mean over the outputs


def tied_head(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def interleaved(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    heads = tensors[name].unflatten(0, (4, 2, -1))  # as llama.cpp has them
    tensors[name] = heads.transpose(1, 2).flatten(0, 2)


FAULTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "eps": lambda config, _: config.update(rms_norm_eps=1e-4),
    "theta": lambda config, _: config["rope_parameters"].update(rope_theta=10001.0),
    "window": lambda config, _: config.update(sliding_window=6),
    "full attention in no layer": lambda config, _: config.update(
        layer_types=["sliding_attention"] * 3
    ),
    "an o_proj that is not centered": uncentered,
    "a head tied to centered embeddings": tied_head,
    "rows of q interleaved": interleaved,
    "layers exchanged": lambda _, tensors: tensors.update(
        {
            f"model.layers.{a}.mlp.gate_proj.weight": tensors[
                f"model.layers.{b}.mlp.gate_proj.weight"
            ]
            for a, b in ((0, 1), (1, 0))
        }
    ),
    "one wrong row of the embeddings": lambda _, tensors: tensors["lm_head.weight"][7].mul_(1.001),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_catches_a_planted_fault(fault, tmp_path, monkeypatch):
    run = run_of(tmp_path / "run", attention={**GQA, "window": 7, "full_every": 3})
    write = huggingface.write_folder

    def faulty(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        changed(folder, FAULTS[fault])

    monkeypatch.setattr(huggingface, "write_folder", faulty)
    with pytest.raises(
        GptminiError, match=r"out: not written: logits differ by .*report it"
    ) as end:
        export_run(run, tmp_path / "out")
    assert end.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_proof_catches_another_tokenizer(tmp_path):
    run = run_of(tmp_path / "run")
    ranks = bpe.learn_bpe([TEXT[::-1]], 299)
    other = create_bpe_tokenizer("bpe", bpe.WORD_PATTERN, ranks, {"<|endoftext|>": 299})
    check_tokens(Path("out"), run.tokenizer, run.tokenizer)
    with pytest.raises(GptminiError, match="has other tokens there"):
        check_tokens(Path("out"), run.tokenizer, other)


def test_logits_that_are_no_numbers_never_pass():
    good = torch.ones(1, 2, 3)
    bad = torch.tensor([[[1.0, 1.0, torch.nan]] * 2])
    assert check_logits(Path("out"), good, good) == 0
    for expected, found in ((good, bad), (bad, good), (bad, bad)):
        with pytest.raises(GptminiError, match="out: not written: logits differ by nan"):
            check_logits(Path("out"), expected, found)


def test_logits_are_compared_on_a_text_and_on_random_tokens(tmp_path):
    run = run_of(tmp_path / "run")
    tokens = choose_tokens(run)
    assert tokens.tolist() == choose_tokens(run).tolist()
    assert tokens[0].tolist() == run.encode("".join(HARD_TEXTS))[:40]  # it has no text of its own
    assert len(set(tokens[1].tolist()) - set(tokens[0].tolist())) > 20
    assert 250 < tokens[1].max() < 300


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_of_a_large_vocabulary_the_logits_of_some_positions_are_compared(to, tmp_path, monkeypatch):
    run = run_of(tmp_path / "run")
    assert export_run(run, tmp_path / "all", to).tokens == 2 * 40
    every_third = 2 * 40 * run.tokenizer.vocab_size // 3
    monkeypatch.setattr(exporting, "MAX_COMPARED_LOGITS", every_third)
    assert export_run(run, tmp_path / "some", to).tokens == 2 * 14


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_run_may_have_a_name_of_any_bytes_and_its_export_survives_a_power_cut(
    to, tmp_path, monkeypatch
):
    if to == "gguf":
        pytest.importorskip("gguf", reason="needs the extra gguf")
    synced: dict[int, int] = {}
    fsync, rename = os.fsync, files.rename

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def check(source: Path, target: Path) -> None:
        for path in (source, *source.rglob("*")):
            assert synced.get(path.stat().st_ino) == path.stat().st_size, path
        rename(source, target)

    run = run_of(tmp_path / "caf\udce9")
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(files, "rename", check)
    made = export_run(run, tmp_path / "out", to, "f32").path
    named = made / "README.md" if to == "hf" else made
    assert b"caf?" in named.read_bytes()


def test_weights_that_are_not_finite_are_not_exported(tmp_path):
    run = run_of(tmp_path / "run")
    run.model.blocks[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(GptminiError, match="logits are not finite"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@st.composite
def configurations(draw: st.DrawFn) -> ModelConfig:
    """Any model; sizes are small."""
    n_head = draw(st.sampled_from([1, 2, 4]))
    n_kv_head = draw(st.sampled_from([n for n in (1, 2, 4) if n_head % n == 0]))
    window = draw(st.sampled_from([None, None, 3, 99]))
    attention = {
        "variant": "gqa",
        "n_kv_head": n_kv_head,
        "window": window,
        "full_every": draw(st.sampled_from([None, 1, 2])) if window else None,
        "qkv_bias": draw(st.sampled_from([None, None, False, True])),
        "qk_norm": draw(st.booleans()),
    }
    position = draw(st.sampled_from(["rope", *POSITIONS]))
    model = {
        "vocab_size": 300,
        "context_length": draw(st.integers(1, 20)),
        "attention": attention,
        "n_layer": draw(st.integers(1, 3)),
        "n_head": n_head,
        "position": position,
        "d_model": n_head * draw(st.sampled_from([16, 24])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "activation": draw(st.sampled_from(["gelu", "swiglu", "relu2"])),
        "rope_theta": draw(st.sampled_from([100.0, 10_000.0])),
        "rope_scaling": draw(st.sampled_from([None, [4.0, 1.0, 2.0, 8.0]])),
        "bias": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        model["head_dim"] = 4
    return ModelConfig.model_validate(model)


@settings(max_examples=30)
@given(configurations())
def test_any_model_ends_in_a_proven_export_or_in_a_refusal_that_names_a_setting(
    tmp_path_factory, config
):
    folder = tmp_path_factory.mktemp("any")
    torch.manual_seed(0)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    run = Run(folder, Config(model=config), TOKENIZER, model)
    try:
        made = export_run(run, folder / "out")
    except ConfigError as refusal:
        assert all(line.startswith("model.") for line in refusal.lines)
        assert not list(folder.iterdir())
        return
    assert made.difference <= 1e-5 * made.scale
    read, stored = huggingface.read_model(folder / "out", config.context_length)
    weights = dict(stored)
    tokens = torch.randint(300, (1, config.context_length))
    torch.testing.assert_close(
        compute_logits(read, weights, tokens), model(tokens), rtol=1e-4, atol=1e-4
    )


def test_what_cannot_be_exported_is_said_before_anything_is_written(tmp_path):
    run = run_of(tmp_path / "run", activation="gelu")
    with pytest.raises(ConfigError, match=r"model.attention.qk_norm: True, but must be False in"):
        export_run(run, tmp_path / "out")
    for qk_norm in (True, False):
        with_alibi = run_of(
            tmp_path / f"alibi-{qk_norm}", position="alibi", attention={"qk_norm": qk_norm}
        )
        for to in ("hf", "gguf"):
            with pytest.raises(ConfigError) as refusal:
                export_run(with_alibi, tmp_path / "out", to)
            (line,) = refusal.value.lines
            assert line.startswith("model.position: alibi, but must be rope in ")
    with pytest.raises(ConfigError, match="--to onnx: unknown format"):
        export_run(run, tmp_path / "out", "onnx")
    (tmp_path / "out").write_text("mine")
    fine = run_of(tmp_path / "fine")
    with pytest.raises(ConfigError, match="already exists"):
        export_run(fine, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(("window", "folded"), [(39, 39), (40, None), (41, None)])
def test_a_window_as_long_as_the_context_is_none(window, folded, tmp_path):
    run = run_of(tmp_path / "run", attention={"window": window, "full_every": 2})
    attention = fold(run.config.model, run.model.state_dict())[0].attention
    assert attention.window == folded
    assert attention.full_every == (2 if folded else None)


def test_the_card_gives_each_figure_its_unit(tmp_path):
    run = run_of(tmp_path / "my 0.2")
    run.state |= {"corpus": "abc", "step": 6789, "tokens": 12_345}
    run.state |= {"best": {"val_loss": 1.5, "val_bpb": 2.25}}
    card = huggingface._build_model_card(run, "llama")
    assert "\n# my 0.2\n" in card
    assert "after 6,789 steps and 12,345 tokens" in card
    assert "1.5000 nats per token, 2.2500 bits per byte" in card
    assert "SHA-256 abc" in card


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_sound_tokenizer_that_gguf_lacks_is_no_bug(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hub")
    pytest.importorskip("gguf")
    library = tokenizers.ByteLevelBPETokenizer(lowercase=True)
    library.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"])
    tokenizer = adopt_tokenizer(library.to_str(), Path("tokenizer.json"), None, ["</s>"])
    run = run_of(tmp_path / "run", tokenizer, **LLAMA, attention=NO_NORM)
    with pytest.raises(ConfigError, match=r"out: not written: .*; choose another format or model"):
        export_run(run, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()
