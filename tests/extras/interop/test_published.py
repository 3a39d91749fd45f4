"""Imports of models as their authors publish them: read exactly, or refused by name."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini.data.corpus import prepare_text
from gptmini.data.token_file import IGNORED
from gptmini.errors import CheckpointError
from gptmini.extras.interop import architectures
from gptmini.extras.interop.export import export_run
from gptmini.extras.interop.import_model import import_model
from gptmini.generate.run import Run
from gptmini.generate.score import score_text
from gptmini.plan.cost import count_parameters
from tests.extras.interop.published import (
    LLAMA_32_1B,
    MODELS,
    N_TOKENS,
    N_WORDS,
    PHI3_MINI_4K,
    QWEN3_06B,
    REMOVED,
    TINY_SCALING,
    JsonObject,
    Published,
    odd_texts,
)
from tests.foreign import MAKERS
from tests.support import prose

transformers: Any = pytest.importorskip("transformers", reason="needs the extra bench")
tokenizers: Any = pytest.importorskip("tokenizers", reason="needs the extra bench")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", MODELS)
def test_the_published_settings_make_a_model_of_the_published_size(name):
    model = MODELS[name]
    config = architectures.from_hf_config(model.config, Path("config.json"), None)
    assert count_parameters(config) == model.n_parameters


def compute_expected(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of transformers, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(tokens).logits


def import_exactly(model: Published, tmp_path: Path, **changes: Any) -> Run:
    """Import a tiny model, which must give the logits that transformers gives."""
    there = tmp_path / "there"
    model.write(there, **changes)
    run = import_model(there, tmp_path / "run")
    tokens = torch.randint(N_TOKENS, (2, 64), generator=torch.Generator().manual_seed(1))
    expected = compute_expected(there, tokens)
    scale = float(expected.abs().max())
    assert scale > 1
    torch.testing.assert_close(run.model(tokens), expected, rtol=0, atol=1e-5 * scale)
    return run


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_the_logits_and_tokens_of_transformers(name, tmp_path, capfd):
    model = MODELS[name]
    run = import_exactly(model, tmp_path)
    stored = next((tmp_path / "run").rglob("model*.safetensors"))
    assert (torch.float32 if name == "GPT-2" else torch.bfloat16) in dtypes(stored)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "there" / "tokenizer.json"))
    assert "tokenizer.json" not in capfd.readouterr().err  # no warning
    added = [*model.tokenizer.special, *model.tokenizer.unspecial]
    for text in odd_texts():
        if not any(name in text for name in model.tokenizer.special):  # they are text with us
            assert run.encode(text) == theirs.encode(text).ids, text
    prompt = "".join(f"{name}A{index}\n" for index, name in enumerate(added))
    text = run.create_text(0, prompt, run.config.sample, special=True)
    assert text.prompt_tokens == theirs.encode(prompt, add_special_tokens=False).ids


def test_prompts_begin_with_the_token_that_transformers_puts_there(tmp_path, gptmini):
    """As Llama 3's tokenizer does, and with the logits that follow from it."""
    run = import_exactly(MODELS["Llama-3.2-1B"], tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    bos = theirs.bos_token_id
    for prompt in ("It was", "Mondegano 12", "\n"):
        expected = theirs(prompt).input_ids
        assert expected[0] == bos
        for special in (False, True):
            (text,) = run.start([prompt], special=special).samples
            assert text.prompt_tokens == expected
        logits = compute_expected(tmp_path / "there", torch.tensor([expected]))
        torch.testing.assert_close(run.model(torch.tensor([expected])), logits, rtol=0, atol=1e-4)
        # A score has the same context.
        scored = score_text(run, prompt)
        assert scored.tokens == expected[1:]
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(expected[1:])[:, None])
        torch.testing.assert_close(torch.tensor(scored.logprobs), logprobs[:, 0], rtol=0, atol=1e-4)
    # The token comes once: a chat template writes it, and so may a user.
    messages = [{"role": "user", "content": "What is 12?"}]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    (text,) = run.start([run.render_chat(messages)], special=True).samples
    assert text.prompt_tokens == chat["input_ids"]
    assert text.prompt_tokens.count(bos) == 1
    (text,) = run.start(["<|begin_of_text|>It was"], special=True).samples
    assert text.prompt_tokens == theirs("It was").input_ids
    # The commands say so.
    assert gptmini("tokenizer", "info", str(tmp_path / "run"))[1].splitlines()[-2] == (
        "texts begin with <|begin_of_text|>"
    )
    code, _, err = gptmini("import", str(tmp_path / "there"), "--out", str(tmp_path / "again"))
    assert code == 0
    assert "its texts begin with <|begin_of_text|> and end with <|end_of_text|> or" in err
    # Nothing else changes: tokens that are given, an empty prompt, a start of one's own.
    sample = run.config.sample
    assert run.create_text(0, [1, 2], sample).prompt_tokens == [1, 2]
    assert run.create_text(0, "", sample).prompt_tokens == [bos]
    with_start = sample.model_copy(update={"start": "\n"})
    assert run.create_text(0, "", with_start).prompt_tokens == theirs("\n").input_ids
    assert run.create_text(0, " ", with_start).prompt_tokens == theirs("\n").input_ids
    assert run.tokenizer.encode("It was").tolist() == theirs("It was").input_ids[1:]
    assert run.decode(run.encode("It was")) == "It was"


def test_an_export_keeps_the_token_that_prompts_begin_with(tmp_path):
    run = import_exactly(MODELS["Llama-3.2-1B"], tmp_path, rope_scaling=None)
    export_run(run, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    before = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    assert theirs("It was").input_ids == before("It was").input_ids == run.encode("It was")
    assert theirs("a", "b").input_ids == before("a", "b").input_ids
    back = import_model(tmp_path / "out", tmp_path / "back")
    back.tokenizer.template_tokens.pop("pad_token")  # which exports add
    assert back.tokenizer.to_json() == run.tokenizer.to_json()
    if find_spec("gguf") is None:
        return
    export_run(run, tmp_path / "out.gguf", "gguf")
    back = import_model(tmp_path / "out.gguf", tmp_path / "from-gguf")
    assert back.encode("It was") == run.encode("It was")


def test_fine_tuning_begins_each_document_with_that_token(tmp_path):
    """As a tokenizer of transformers does with each text of a dataset."""
    ends = [N_WORDS + 1, N_WORDS + 3]  # as instruct models name them
    run = import_exactly(MODELS["Llama-3.2-1B"], tmp_path, eos_token_id=ends)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    documents = [f"{prose(200)} {number}" for number in range(3)]
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, document in enumerate(documents):
        (folder / f"{number}.txt").write_text(document)
    settings = run.config.data.model_copy(update={"path": [str(folder)]})
    tokens = prepare_text(settings, run.tokenizer)
    expected = [token for document in documents for token in theirs(document).input_ids]
    assert tokens.read(0, len(tokens)).tolist() == expected
    # So does a conversation, whose template writes it.
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    settings = run.config.data.model_copy(update={"path": [str(tmp_path / "chat.jsonl")]})
    tokens = prepare_text(settings, run.tokenizer)
    chat = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert [token & ~IGNORED for token in tokens.read(0, len(tokens)).tolist()] == chat


def dtypes(file: Path) -> set[torch.dtype]:
    from safetensors.torch import load_file

    return {tensor.dtype for tensor in load_file(file).values()}


IN_SHARDS = replace(MODELS["Qwen3-0.6B"], n_shards=3)
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
EXACT: dict[str, tuple[Published, JsonObject]] = {
    "float16": (MODELS["SmolLM2-135M"], {"torch_dtype": "float16"}),
    "untied": (MODELS["SmolLM2-135M"], {"tie_word_embeddings": False}),
    "the keys of transformers 5": (
        MODELS["Llama-3.2-1B"],
        {
            "rope_scaling": REMOVED,
            "rope_theta": REMOVED,
            "torch_dtype": REMOVED,
            "dtype": "bfloat16",
            "rope_parameters": TINY_SCALING | {"rope_theta": 500000.0},
        },
    ),
    "no scaling": (MODELS["Llama-3.2-1B"], {"rope_scaling": {"rope_type": "default"}}),
    "dynamic scaling": (
        MODELS["Llama-3.2-1B"],
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    ),
    "head_dim unequal": (MODELS["Mistral-7B-v0.1"], {"head_dim": 20}),
    "windows from layer 2 of 2": (MODELS["Qwen2.5-0.5B"], WINDOW),
    "windows in every layer": (MODELS["Qwen2.5-0.5B"], WINDOW | {"max_window_layers": 0}),
    "layer_types, mixed": (
        MODELS["Qwen3-0.6B"],
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "shards": (IN_SHARDS, {}),
}


@pytest.mark.parametrize("case", EXACT)
def test_variants_of_published_settings_are_read_exactly(case, tmp_path):
    model, changes = EXACT[case]
    import_exactly(model, tmp_path, **changes)


def test_linear_scaling_survives_an_export(tmp_path):
    linear = {"type": "linear", "factor": 4.0}
    run = import_exactly(MODELS["Llama-3.2-1B"], tmp_path, rope_scaling=linear)
    export_run(run, tmp_path / "out")
    tokens = torch.arange(60)[None]
    expected = compute_expected(tmp_path / "out", tokens)
    torch.testing.assert_close(run.model(tokens), expected, rtol=0, atol=1e-4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
REFUSED: dict[str, tuple[JsonObject, JsonObject, str]] = {
    "YaRN": (QWEN3_06B, {"rope_scaling": YARN}, "rope_scaling: 'yarn' is not supported"),
    "LongRoPE": (LLAMA_32_1B, {"rope_scaling": LONGROPE}, "rope_scaling: 'longrope' is not"),
    "multimodal": (QWEN3_06B, {"rope_scaling": {"type": "mrope"}}, "rope_scaling: 'mrope' is not"),
    "Phi-3.5": (PHI3_MINI_4K, {"rope_scaling": LONGROPE}, "rope_scaling: 'longrope' is not"),
    "Phi-4-mini": (PHI3_MINI_4K, {"partial_rotary_factor": 0.75}, "partial_rotary_factor: 0.75"),
    "code of its own": (PHI3_MINI_4K, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map: .* is not"),
    "in transformers 5": (QWEN3_06B, {"rope_parameters": YARN}, "rope_scaling: 'yarn' is not"),
    "part of a head": (LLAMA_32_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    "chunks": (
        QWEN3_06B,
        WINDOW | {"layer_types": ["chunked_attention"] * 28},
        "layer_types: .'chunked_attention'.* is not supported",
    ),
    "8 bits": (LLAMA_32_1B, {"quantization_config": {"bits": 8}}, "quantization_config: .* is not"),
    "experts": (LLAMA_32_1B, {"model_type": "mixtral"}, "model_type: mixtral is not supported"),
    "another activation": (LLAMA_32_1B, {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_gptmini_does_not_have_are_named(case):
    published, changes, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        architectures.from_hf_config(published | changes, Path("config.json"), None)


@pytest.mark.parametrize("kind", ["Llama 2", "Mistral"])
def test_tokenizers_of_sentencepiece_are_read_and_given_back(kind, tmp_path):
    there = tmp_path / "there"
    MODELS["Mistral-7B-v0.1"].write(there, vocab_size=1000)
    file = json.dumps(json.loads(MAKERS[kind]().to_str()), indent=1)
    (there / "tokenizer.json").write_text(file)
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (there / "tokenizer_config.json").write_text(json.dumps(config))
    run = import_model(there, tmp_path / "run")
    assert run.tokenizer.end_tokens == [2, 1]
    theirs = transformers.AutoTokenizer.from_pretrained(there, split_special_tokens=True)
    for text in odd_texts():
        tokens = run.encode(text)
        assert tokens == theirs(text).input_ids, text
        assert run.decode(tokens) == theirs.decode(tokens[1:])
    tokens = torch.tensor([run.encode("It was the best of times")])
    expected = compute_expected(there, tokens)
    torch.testing.assert_close(run.model(tokens), expected, rtol=0, atol=1e-4)
    (text,) = run.start([""], temperature=0, max_new_tokens=12).finish()
    assert text.text[:4] == theirs.decode(text.tokens)[:4]  # without a space before it
    export_run(run, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == file
