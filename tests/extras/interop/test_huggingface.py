"""Imports of what transformers writes: the same logits and texts; what does not fit is refused."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gptmini.config.load import iter_settings
from gptmini.errors import CheckpointError, ConfigError, DataError, GptminiError
from gptmini.extras.convert import convert
from gptmini.extras.interop import architectures
from gptmini.extras.interop.export import export_run
from gptmini.extras.interop.import_model import import_model
from gptmini.extras.interop.tokenizer_json import to_tokenizer_json
from gptmini.generate.run import Run, load_run
from gptmini.generate.score import score_text
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from gptmini.train.evaluate_run import evaluate_run, load_corpus, load_text
from tests.samples import TEMPLATE, run_of, thinking_tokenizer, write_tokenizer_json
from tests.support import prose, run_command

TEXT = prose()
SIZE: dict[str, Any] = {
    "vocab_size": 310,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 299,
    "eos_token_id": 299,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "Llama": ("Llama", {"rms_norm_eps": 1e-4, "attention_bias": True, "mlp_bias": True}),
    "Llama with biases of attention": ("Llama", {"attention_bias": True}),
    "Llama 3.1": ("Llama", {"rope_parameters": SCALING}),
    "SmolLM2": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2 with windows": ("Qwen2", {**WINDOW, "max_window_layers": 0}),
    "Qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 4}),
    "Qwen3 with windows": (
        "Qwen3",
        {**WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "Llama with biases in the MLP alone": ("Llama", {"mlp_bias": True}),
    "Mistral": ("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "Phi-3": ("Phi3", {"pad_token_id": 0, "num_key_value_heads": 4}),
    "Phi-3 with windows": ("Phi3", {"pad_token_id": 0, "sliding_window": 9, "rms_norm_eps": 1e-3}),
    "StarCoder2": ("Starcoder2", {"sliding_window": 9}),
    "StarCoder2 without biases": ("Starcoder2", {"use_bias": False}),
}


def written(name: str, folder: Path, **more: Any) -> Any:
    """A model of transformers with weights far from where they began, saved with a tokenizer."""
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    kind, options = MODELS[name]
    size = {"vocab_size": 310} if kind == "GPT2" else SIZE
    config = getattr(transformers, f"{kind}Config")(**size | options | more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
        model.get_output_embeddings().weight[299] = 0  # greedy texts do not end
    model.save_pretrained(folder)
    ranks = bpe.learn_bpe([TEXT], 299)
    tokenizer = create_bpe_tokenizer("bpe", bpe.WORD_PATTERN, ranks, {"<|endoftext|>": 299})
    (folder / "tokenizer.json").write_text(json.dumps(to_tokenizer_json(tokenizer)))
    return model


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", MODELS)
def test_an_import_gives_the_same_logits_and_the_same_greedy_text(name, tmp_path):
    theirs = written(name, tmp_path / "there")
    run = import_model(tmp_path / "there", tmp_path / "run")
    tokens = torch.randint(310, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
    scale = float(expected.abs().max())
    assert scale > 1
    torch.testing.assert_close(run.model(tokens), expected, rtol=0, atol=3e-5 * scale)
    prompt = "It was the"
    ids = torch.tensor([run.encode(prompt)])
    greedy = theirs.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    started = run.start([prompt], temperature=0, max_new_tokens=20)
    made = started.finish()[0].tokens
    assert len(made) == 20
    assert made == greedy[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "right"
    written("Llama 3.1", folder)
    return folder


@pytest.fixture
def imported(right: Path, tmp_path: Path) -> Run:
    return import_model(right, tmp_path / "run")


def test_an_imported_run_is_measured_inspected_converted_and_exported(imported, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    assert score_text(imported, "It was").n_bytes == 6
    spans = load_text(imported, [str(tmp_path / "text.txt")])
    assert evaluate_run(imported, spans).loss > 1
    with pytest.raises(DataError, match="no training text on record; give a text with --data"):
        load_corpus(imported)
    convert.convert_run(imported, {"variant": "mqa", "n_kv_head": None}, None, tmp_path / "mqa")
    converted = load_run(tmp_path / "mqa", "cpu", "float32")
    assert converted.config.model.n_kv_head == 1
    assert converted.config.train.lr == imported.config.train.lr  # `train --from` halves it
    assert converted.config.model.rope_scaling == [8.0, 1.0, 4.0, 32.0]
    assert export_run(converted, tmp_path / "out").architecture == "llama"


def test_the_command_that_convert_prints_makes_the_steps_it_names(
    imported, tmp_path, monkeypatch, capfd
):
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    words = "gptmini convert run --attention mqa --steps 3 --out other"
    assert run_command(words.split(), monkeypatch) == 0
    said, printed = capfd.readouterr().err.splitlines()[-2:]
    assert said.endswith("train it for 3 steps with:")
    printed = printed.replace("TEXT", "text.txt") + " --set train.batch_size=1 --out tuned"
    assert run_command(printed.split(), monkeypatch) == 0
    assert RunDirectory(tmp_path / "tuned").list_steps()[0] == 3


def test_every_command_works_on_an_imported_run(imported, tmp_path, monkeypatch, capfd):
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    for words in (
        "generate run --prompt It --max-new-tokens 3 --temperature 0",
        "score run --text It",
        "evaluate run --data text.txt",
        "inspect run --prompt It",
        "tokenizer info run",
        "convert run --attention mqa --out other",
        "export run",
        "train --from run --data text.txt --steps 2 --set train.batch_size=2 --out tuned",
    ):
        assert run_command(["gptmini", *words.split()], monkeypatch) == 0, capfd.readouterr().err


SAYS_END = 301  # <|im_end|>


def instruct(folder: Path, missing: bytes = b"") -> Any:
    """A GPT-2 with a chat template that ends every text at once."""
    model = written("GPT-2", folder)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1)
        model.transformer.wte.weight.zero_()
        model.transformer.wte.weight[SAYS_END] = 1
    model.config.bos_token_id = model.config.eos_token_id = 299
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(write_tokenizer_json(missing)))
    return model


PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
NAMED_IN = {
    "generation_config.json": {"eos_token_id": [SAYS_END, 299]},
    "config.json": {"eos_token_id": SAYS_END},
    "tokenizer_config.json": {"eos_token": "<|im_end|>"},
    "tokenizer_config.json, in the older form": {"eos_token": {"content": "<|im_end|>"}},
}


@pytest.mark.parametrize("name", NAMED_IN)
def test_every_file_that_names_an_end_is_read(name, tmp_path):
    there = tmp_path / "there"
    model = instruct(there)
    file = there / name.partition(",")[0]
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | NAMED_IN[name]))
    run = import_model(there, tmp_path / "run")
    assert run.tokenizer.end_tokens == [SAYS_END, 299]
    settings = {"temperature": 0, "max_new_tokens": 9}
    (text,) = run.start([PROMPT], special=True, **settings).finish()
    assert (text.tokens, text.text, text.finish_reason) == ([SAYS_END], "", "document")
    ends = run.tokenizer.end_tokens
    ids = torch.tensor([text.prompt_tokens])
    made = model.generate(ids, do_sample=False, max_new_tokens=9, eos_token_id=ends, pad_token_id=0)
    assert made[0, ids.shape[1] :].tolist() == text.tokens


def test_a_chat_template_is_read_from_its_file_or_from_the_configuration(tmp_path, capfd):
    there = tmp_path / "there"
    instruct(there)
    config = there / "tokenizer_config.json"
    tools = [{"name": "tool_use", "template": "B"}]
    several = [{"name": "default", "template": "A"}, *tools]
    cases = [(None, None), ("A", "A"), (several, "A"), ({"default": "A"}, "A"), (tools, None)]
    for number, (template, kept) in enumerate(cases):
        config.write_text(json.dumps({"chat_template": template}))
        run = import_model(there, tmp_path / f"run{number}")
        assert run.tokenizer.chat_template == kept
    assert capfd.readouterr().err.count("chat_template: has several, none called default") == 1
    for damaged in ([1], [{"name": "default"}], {"default": 3}, 3):
        config.write_text(json.dumps({"chat_template": damaged}))
        with pytest.raises(DataError, match=r"tokenizer(_config)?\.json"):
            import_model(there, tmp_path / "damaged")
    config.write_text(json.dumps({"chat_template": "A"}))
    with pytest.raises(DataError, match=r"tokenizer_config.json: chat_template: must be a text"):
        config.write_text(json.dumps({"chat_template": 5}))
        import_model(there, tmp_path / "damaged")
    config.write_text(json.dumps({"chat_template": "A"}))
    (there / "chat_template.jinja").write_text(TEMPLATE)
    run = import_model(there, tmp_path / "run")
    assert run.tokenizer.chat_template == TEMPLATE


USES = [f"{use}_token" for use in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image")]
EVERY_USE = "".join(
    f"{use}={{{{ {use} }}}}{{{{ {use} is defined }}}} "
    for use in (*USES, "audio", "add_bos_token", "extra_special_tokens")
)
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TEMPLATE_SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "texts": {"bos_token": MARKS[1], "eos_token": MARKS[2], "unk_token": MARKS[0]},
    "objects": {
        "pad_token": {"__type": "AddedToken", "content": MARKS[4], "lstrip": False},
        "sep_token": None,
    },
    "own names": {"image_token": MARKS[1], "eos_token": MARKS[2], "add_bos_token": False},
    "by use": {"extra_special_tokens": {"audio": MARKS[2], "image_token": MARKS[1]}},
    "a list": {"extra_special_tokens": MARKS[3:], "mask_token": MARKS[1]},
    "an older folder": {"cls_token": MARKS[1]},
    "several templates": {
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": f"default {EVERY_USE}"},
        ]
    },
}


@pytest.mark.parametrize("case", TEMPLATE_SETTINGS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_template_sees_the_special_tokens_that_transformers_shows_it(case, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    there = tmp_path / "there"
    export_run(run_of(tmp_path / "thinking", thinking_tokenizer()), there)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": EVERY_USE}
    config |= TEMPLATE_SETTINGS[case]
    (there / "tokenizer_config.json").write_text(json.dumps(config))
    if case == "an older folder":
        older = {"pad_token": {"content": MARKS[3]}, "unk_token": MARKS[2]}
        (there / "special_tokens_map.json").write_text(json.dumps(older))
    messages = [{"role": "user", "content": "Hi"}]
    theirs = transformers.AutoTokenizer.from_pretrained(there)
    expected = theirs.apply_chat_template(messages, tokenize=False)
    run = import_model(there, tmp_path / "run")
    assert run.render_chat(messages) == expected
    if case == "none":
        return
    # Exports state a token for padding, bos and eos.
    export_run(run, tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    back = import_model(tmp_path / "out", tmp_path / "back")
    assert back.render_chat(messages) == exported.apply_chat_template(messages, tokenize=False)
    assert run.tokenizer.template_tokens.items() <= back.tokenizer.template_tokens.items()


def test_a_tokenizer_without_some_bytes_works_from_import_to_export(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    instruct(Path("there"), missing=b"\x04\xf1\xff")
    Path("there/chat_template.jinja").write_text(TEMPLATE)
    Path("there/generation_config.json").write_text(json.dumps({"eos_token_id": SAYS_END}))
    Path("text.txt").write_text(TEXT.replace("a", "a\x04", 99))
    tune = "train --from run --data text.txt --steps 2 --set train.batch_size=2 --out tuned"
    for words in (
        "import there --out run",
        "generate run --prompt a\x04b --max-new-tokens 3",
        "evaluate run --data text.txt",
        tune,
        "generate tuned --prompt a\x04b --max-new-tokens 3",
        "tokenizer info tuned",
        "export tuned",
        "export tuned --to gguf",
        "import tuned-hf --out back",
    ):
        if "gguf" in words and not importlib.util.find_spec("gguf"):
            continue
        code = run_command(["gptmini", *words.split(" ")], monkeypatch)
        captured = capfd.readouterr()
        assert code == 0, captured.err
        if words.startswith("import"):
            assert "its texts end with <|im_end|> or <|endoftext|>" in captured.err
            assert "it answers questions with:\n  gptmini chat " in captured.err
        if words.startswith("tokenizer"):
            assert "special tokens   <|endoftext|>, <|im_start|>, <|im_end|>\n" in captured.out
            assert "texts end with   <|endoftext|> or <|im_end|>\n" in captured.out
    saved = Path("run/tokenizer.json").read_bytes()
    assert Path("tuned/tokenizer.json").read_bytes() == saved
    file = Path("there/tokenizer.json").read_bytes()
    assert Path("tuned-hf/tokenizer.json").read_bytes() == file
    assert load_run("back").tokenizer.fingerprint == load_run("run").tokenizer.fingerprint
    lines = Path("tuned/metrics.jsonl").read_text().splitlines()
    samples = [line["sample"] for line in map(json.loads, lines) if "sample" in line]
    assert samples
    assert all("<|" not in sample for sample in samples)  # the token that ends it is no part of it
    there = load_run("tuned").encode("a\x04 b")
    assert there == load_run("tuned").encode("a b")


def test_narrow_weights_and_models_saved_without_a_head_are_read(tmp_path):
    for name, dtype in (("GPT-2", torch.bfloat16), ("SmolLM2", torch.float16)):
        there = tmp_path / name
        model = written(name, there)
        tensors = {
            key.partition(".")[2]: tensor.to(dtype)  # the body alone has no prefix
            for key, tensor in load_file(there / "model.safetensors").items()
        }
        tensors["h.0.attn.bias" if name == "GPT-2" else "rotary_emb.inv_freq"] = torch.ones(2)
        if name != "GPT-2":
            tensors["layers.0.self_attn.rotary_emb.inv_freq"] = tensors.pop("rotary_emb.inv_freq")
        save_file(tensors, there / "model.safetensors", {"format": "pt"})
        run = import_model(there, tmp_path / f"{name} run")
        tokens = torch.arange(60)[None]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
            expected = model(tokens).logits
        torch.testing.assert_close(run.model(tokens), expected, rtol=1e-4, atol=1e-4)


def test_the_prefixes_that_torch_gives_to_names_are_left_out(right, tmp_path):
    shutil.copytree(right, tmp_path / "there")
    stored = load_file(right / "model.safetensors")
    renamed = {f"module._orig_mod.{name}": tensor for name, tensor in stored.items()}
    save_file(renamed, tmp_path / "there" / "model.safetensors", {"format": "pt"})
    runs = [
        import_model(folder, tmp_path / f"run{number}")
        for number, folder in enumerate((right, tmp_path / "there"))
    ]
    tokens = torch.arange(60)[None]
    assert torch.equal(runs[1].model(tokens), runs[0].model(tokens))


@pytest.mark.parametrize("name", ["GPT-2", "SmolLM2"])
def test_a_tied_checkpoint_with_a_head_of_its_own_is_imported_untied(name, tmp_path, capfd):
    there = tmp_path / "there"
    theirs = written(name, there)
    stored = load_file(there / "model.safetensors")
    embed = theirs.get_input_embeddings().weight.detach()
    for run_name, head in (("tied", embed.clone()), ("untied", torch.randn_like(embed))):
        save_file(stored | {"lm_head.weight": head}, there / "model.safetensors", {"format": "pt"})
        capfd.readouterr()
        run = import_model(there, tmp_path / run_name)
        warned = "stores a head of its own, which is used" in capfd.readouterr().err
        assert warned is (run_name == "untied")
        assert run.config.model.tie_embeddings is (run_name == "tied")
        tokens = torch.arange(60)[None]
        with torch.no_grad():
            expected = theirs.base_model(tokens).last_hidden_state @ head.mT
        torch.testing.assert_close(run.model(tokens), expected, rtol=1e-4, atol=1e-4)


def test_the_context_is_cut_to_what_is_asked(tmp_path):
    for name in ("GPT-2", "Qwen2"):
        model = written(name, tmp_path / name)
        run = import_model(tmp_path / name, tmp_path / f"{name} run", 16)
        assert run.config.model.context_length == 16
        assert run.config.seq_len == 16  # what it is fine-tuned on fits the context
        tokens = torch.arange(16)[None]
        with torch.no_grad():
            expected = model(tokens).logits
        torch.testing.assert_close(run.model(tokens), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ConfigError, match=r"--context-length 65: .* is 64; use at most that"):
            import_model(tmp_path / name, tmp_path / "longer", 65)


def test_an_import_has_2048_positions_unless_more_are_asked_for(tmp_path):
    written("SmolLM2", tmp_path / "there", max_position_embeddings=4096)
    run = import_model(tmp_path / "there", tmp_path / "run")
    assert run.config.model.context_length == 2048
    assert (run.config.train.batch_size, run.config.seq_len) == (4, 256)
    run = import_model(tmp_path / "there", tmp_path / "long", 4096)
    assert run.config.model.context_length == 4096


# -- bad input -------------------------------------------------------------------------------------


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in data.items() if value != "DELETE"}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return changed


def index(**places: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = json.dumps({"weight_map": places.get("a", places)})
        (folder / "model.safetensors.index.json").write_text(text)
        (folder / "model.safetensors").unlink()

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def of_nanogpt(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "ckpt.pt")
    (folder / "config.json").unlink()


def tokenizer_with(**parts: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / "tokenizer.json").read_text())
        data["model"] |= parts.pop("model", {})
        (folder / "tokenizer.json").write_text(json.dumps(data | parts))

    return change


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


NAME = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "config of another form": (
        lambda f: (f / "config.json").write_text("[1]"),
        "not a json object",
    ),
    "unknown architecture": (config(model_type="gemma3"), "model_type: gemma3 is not supported"),
    "a long name": (config(model_type="x" * 1_000_000), "model_type: xxx"),
    "another scaling": (
        config(rope_scaling={"type": "yarn", "factor": 2}),
        "rope_scaling: 'yarn' is not supported; choose another model",
    ),
    "an unknown key": (config(attn_logit_softcapping=50), "attn_logit_softcapping: 50 may change"),
    "layers of two kinds": (
        config(model_type="mistral", layer_types=["full_attention", "sliding_attention"] * 2),
        "layer_types: ['full_attention', 'sliding_attention', ",
    ),
    "a size missing": (config(hidden_size="DELETE"), "hidden_size: missing; restore"),
    "a size of another type": (
        config(num_hidden_layers="4"),
        "num_hidden_layers: model.n_layer: must be a valid integer, not '4'; choose",
    ),
    "scaling by nothing": (
        config(rope_parameters=SCALING | {"factor": None}),
        "rope_scaling.factor: missing; restore",
    ),
    "a size with a semicolon": (
        config(intermediate_size="4; 8"),
        "intermediate_size: model.d_ff: must be a valid integer, not '4; choose",
    ),
    "heads that do not divide": (config(num_key_value_heads=3), "attention.n_kv_head"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "an empty tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: "),
    "tokens without a decoder": (tokenizer_with(decoder=None), "it has no decoder"),
    "a panic while a tokenizer is read": (
        tokenizer_with(model={"continuing_subword_prefix": "x; y"}),
        "tokenizer.json: damaged (range end index",
    ),
    "a panic while a tokenizer is tried": (
        tokenizer_with(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "tokenizer.json: damaged (chunk size must be non-zero)",
    ),
    "a LoRA adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "adapter_config.json: a LoRA adapter, which changes another model; save both as one with",
    ),
    "a tensor of two names": (
        tensors(lambda t: t.update({f"module.{NAME}": t[NAME] + 1})),
        "stored twice",
    ),
    "a pickle": (pickled, "pytorch_model.bin: a pickle, which could run code; write it"),
    "a checkpoint of nanoGPT": (of_nanogpt, "ckpt.pt: a pickle, which could run code; "),
    "a pointer": (
        lambda f: (f / "model.safetensors").write_text(POINTER),
        "model.safetensors: a Git LFS pointer, not the file itself; fetch that with: git lfs pull",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "half the weights": (cut("model.safetensors", 50_000), "model.safetensors: "),
    "a shard missing": (index(a={NAME: "model-00001.safetensors"}), "model-00001.safetensors: no"),
    "a path that leaves": (index(a={NAME: "../x.safetensors"}), "'../x.safetensors' is not a"),
    "an index of numbers": (index(a={NAME: 7, "b": "x"}), "weight_map: 7 is not a"),
    "an index without a map": (index(a=None), "weight_map: None is not a"),
    "a tensor missing": (tensors(lambda t: t.pop(NAME)), f"tensor {NAME}: missing"),
    "another shape": (tensors(lambda t: t.update({NAME: t[NAME][:5].clone()})), "(5, 32), but"),
    "another type": (tensors(lambda t: t.update({NAME: t[NAME].int()})), f"{NAME}: int32; use"),
    "not finite": (tensors(lambda t: t[NAME][3].fill_(torch.nan)), f"{NAME}: has values that are"),
    "a tensor too many": (
        tensors(lambda t: t.update({"model.layers.0.router.weight": torch.ones(2)})),
        "tensor model.layers.0.router.weight: unknown in a llama",
    ),
    "a small vocabulary": (config(vocab_size=200), "token 298 is beyond the model's vocabulary"),
    "a large vocabulary": (config(vocab_size=400), f"{EMBEDDING}: (310, 32), but its settings"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(case, right, tmp_path):
    spoil, named = WRONG[case]
    bad = tmp_path / "b; ad"
    shutil.copytree(right, bad)
    spoil(bad)
    with pytest.raises(GptminiError) as error:
        import_model(bad, tmp_path / "runs" / "new")
    (line,) = error.value.lines
    assert named in line
    assert len(line) < len(str(bad)) + 300
    assert line.startswith(str(bad))
    assert "; " in line
    assert error.value.exit_code in (3, 4)
    assert not list((tmp_path / "runs").iterdir())


def test_layers_that_are_missing_are_noticed_before_1000_are_built(right, tmp_path, monkeypatch):
    shutil.copytree(right, tmp_path / "bad")
    config(num_hidden_layers=1000)(tmp_path / "bad")
    monkeypatch.delattr("gptmini.extras.interop.architectures.create_undrawn")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.999\..*: missing"):
        import_model(tmp_path / "bad", tmp_path / "run")


JUNK = st.sampled_from(
    [None, True, -1, 0, 1, 3, 1.5, 1e99, "x; y", "", [], [1], {}, {"a": 1}, 2**70]
)


@settings(max_examples=30)
@given(st.data())
def test_any_junk_in_the_files_ends_in_a_run_or_in_a_refusal(right, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("junk") / "bad"
    shutil.copytree(right, folder)
    path = folder / data.draw(st.sampled_from(["config.json", "tokenizer.json"]))
    content = place = json.loads(path.read_text())
    while isinstance(place, dict) and place:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(JUNK)
            break
        place = place[key]
    path.write_text(json.dumps(content))
    try:
        import_model(folder, folder.parent / "run")
    except GptminiError as refusal:
        assert str(refusal).startswith(str(folder))
        assert [each.name for each in folder.parent.iterdir()] == ["bad"]


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("mistral", {}, {"attention.window": 4096}),
        ("mistral", {"sliding_window": None}, {"attention.window": None}),
        ("llama", {"sliding_window": 9}, {"attention.window": None}),
        ("starcoder2", {}, {"attention.window": None, "norm_eps": 1e-5, "tie_embeddings": True}),
        ("qwen2", {"sliding_window": 9}, {"attention.window": None}),
        ("qwen2", WINDOW | {"sliding_window": None}, {"attention.window": None}),
        ("qwen2", WINDOW | {"num_hidden_layers": 28}, {"attention.window": None}),
        ("qwen3", WINDOW | {"max_window_layers": 0}, {"attention.window": 9, "head_dim": 128}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, {"attention.window": 4096}),
        ("phi3", {}, {"attention.window": None, "norm_eps": 1e-5, "rope_theta": 1e4}),
        ("llama", {}, {"norm_eps": 1e-6, "rope_theta": 1e4, "tie_embeddings": False}),
    ],
)
def test_keys_that_are_missing_have_the_defaults_of_transformers(model_type, keys, expected):
    """Those of MistralConfig(), Qwen2Config() and so on, as their documentation states them."""
    content = {"model_type": model_type, **SIZE, "max_position_embeddings": 8192, **keys}
    found = architectures.from_hf_config(content, Path("config.json"), 8192)
    settings = dict(iter_settings(found.model_dump()))
    assert {key: settings[key] for key in expected} == expected


def test_the_29th_layer_of_qwen_has_the_window_by_default():
    """And none before it, as the test above shows; we have no such pattern."""
    content = {"model_type": "qwen2", **SIZE, **WINDOW, "num_hidden_layers": 29}
    with pytest.raises(CheckpointError, match="max_window_layers: 28 is not supported"):
        architectures.from_hf_config(content, Path("config.json"), None)


ALTERNATING = ["sliding_attention", "full_attention"] * 50_000


@pytest.mark.parametrize(
    "keys",
    [
        {"num_hidden_layers": 10**18, "max_window_layers": 0},  # a list of them takes all memory
        {"num_hidden_layers": 10**18, "max_window_layers": 10**17},
        {"num_hidden_layers": 10**18, "layer_types": ["sliding_attention"] * 4},
        {"num_hidden_layers": 10**5, "layer_types": ALTERNATING},  # seconds, where all were tried
        {"num_hidden_layers": 10**5, "layer_types": [*ALTERNATING[:-1], "sliding_attention"]},
    ],
    ids=range(5),
)
def test_too_many_layers_are_refused_before_they_are_listed(keys):
    content = {"model_type": "qwen2", **SIZE, **WINDOW, **keys}
    with pytest.raises(CheckpointError, match=r"config.json: (num_hidden_l|max_window_l|layer_t)"):
        architectures.from_hf_config(content, Path("config.json"), None)


def test_gpt2_variants_that_we_do_not_have_are_refused(tmp_path):
    written("GPT-2", tmp_path / "there")
    for key, value in (("activation_function", "gelu"), ("scale_attn_weights", False)):
        config(**{key: value})(tmp_path / "there")
        with pytest.raises(CheckpointError, match=f"{key}: .* is not supported"):
            import_model(tmp_path / "there", tmp_path / "run")
        config(**{key: "DELETE"})(tmp_path / "there")
    import_model(tmp_path / "there", tmp_path / "run")


def test_an_existing_target_is_left_alone(right, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="run: already exists; choose another name"):
        import_model(right, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_an_interrupted_import_leaves_nothing_and_can_be_repeated(right, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "save_in_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_model(right, tmp_path / "run")
    assert not list(tmp_path.iterdir())
    (tmp_path / ".partial-run").mkdir()  # as a killed process leaves it
    monkeypatch.undo()
    import_model(right, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


OPTIONAL_KEYS = (
    "attention_bias",
    "layer_norm_epsilon",
    "layer_types",
    "max_window_layers",
    "mlp_bias",
    "n_inner",
    "norm_epsilon",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
    "use_bias",
    "use_sliding_window",
)


@pytest.mark.parametrize("model_type", architectures.ARCHITECTURES)
def test_null_in_config_json_is_as_good_as_a_missing_key(model_type):
    gpt2 = {"vocab_size": 310, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    size = gpt2 if model_type == "gpt2" else SIZE | {"head_dim": 8, "rope_theta": 5e5}
    content = {"model_type": model_type, **size}

    def read(content: dict[str, Any]) -> object:
        try:
            return architectures.from_hf_config(content, Path("config.json"), None)
        except CheckpointError as error:
            return str(error)

    for key in {*content, *OPTIONAL_KEYS} - {"head_dim"}:  # without it, that of Qwen3 is 128
        missing = {name: value for name, value in content.items() if name != key}
        assert read(content | {key: None}) == read(missing), key


def test_sampling_settings_come_back_from_an_export(tmp_path):
    for number, sample in enumerate(
        [
            {"temperature": 0.6, "top_k": None, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 7},
            {"temperature": 0.0, "repetition_penalty": 1.25},
        ]
    ):
        run = run_of(tmp_path / f"run{number}", sample=sample)
        export_run(run, tmp_path / f"there{number}")
        found = import_model(tmp_path / f"there{number}", tmp_path / f"back{number}").config.sample
        assert {key: getattr(found, key) for key in sample} == sample
    wrong = tmp_path / "there0" / "generation_config.json"
    wrong.write_text('{"temperature": -1}')
    with pytest.raises(
        CheckpointError, match=r"generation_config.json: sample.temperature: must be"
    ):
        import_model(tmp_path / "there0", tmp_path / "wrong")


def test_tensors_that_transformers_ignores_are_left_out(right, imported, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(right, there)
    tensors = load_file(there / "model.safetensors")
    for name in ("rotary_emb.original_inv_freq", "rotary_emb.cos_cached", "rotary_emb.inv_freq"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(4)
    tensors["v_head.summary.weight"] = torch.ones(1, 4)
    save_file(tensors, there / "model.safetensors", {"format": "pt"})
    content = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(content | {"hidden_act": "swish"}))
    again = import_model(there, tmp_path / "again").tensors
    assert again.keys() == imported.tensors.keys()
    assert all(torch.equal(again[name], each) for name, each in imported.tensors.items())


def test_a_text_that_is_a_link_to_elsewhere_is_refused(right, tmp_path):
    private = tmp_path / "private"
    private.write_text("{{ messages }}")
    there = tmp_path / "there"
    shutil.copytree(right, there)
    template = there / "chat_template.jinja"
    template.symlink_to(private)
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: a link that leaves its folde"):
        import_model(there, tmp_path / "run")
    template.unlink()
    template.symlink_to("config.json")
    assert import_model(there, tmp_path / "inside").tokenizer.chat_template
    # As in the Hub's cache.
    snapshot = tmp_path / "hub" / "snapshots" / "1"
    shutil.copytree(right, snapshot)
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir()
    (snapshot / "config.json").rename(blobs / "2")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    assert import_model(snapshot, tmp_path / "cached").step == 0
