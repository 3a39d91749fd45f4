"""GGUF files: proven by reading them back, and read by llama.cpp itself where it is installed."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini.config.settings import Config
from gptmini.errors import ConfigError, GptminiError, MachineError
from gptmini.extras.interop import gguf, gguf_reader
from gptmini.extras.interop.adopt import adopt_tokenizer
from gptmini.extras.interop.export import HARD_TEXTS, export_run
from gptmini.generate.run import Run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.load import create_tokenizer
from gptmini.tokenizer.tokenizers import Tokenizer
from tests.foreign import MAKERS
from tests.samples import (
    CASES,
    CHAT_TOKENIZER,
    GQA,
    LLAMA,
    NO_NORM,
    TEMPLATE,
    TEXT,
    TOKENIZER,
    adopted_tokenizer,
    run_of,
    thinking_tokenizer,
)

installed = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("gguf"), reason="needs the extra gguf"
)
WINDOWS = [name for name, (_, model) in CASES.items() if "window" in model.get("attention", {})]
REFUSED = [
    *WINDOWS,
    "layernorm, swiglu, scaled",
    "llama",
    "starcoder2, relu2",
    "gpt2, no positions",
]


def with_tokenizer(run: Run, kind: str) -> Run:
    """The same shape with another vocabulary."""
    made: dict[str, Tokenizer] = {"bpe": TOKENIZER, "digits": CHAT_TOKENIZER}
    made["partial"] = adopted_tokenizer(missing=b"\x04\xf1\xff")
    made["chat"] = create_tokenizer("char", None, ["é東👍"], chat=True)
    made["chat of bytes"] = create_tokenizer("byte", chat=True)
    tokenizer = made.get(kind) or create_tokenizer(kind, None, ["é東👍" + TEXT])
    model = run.config.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
    torch.manual_seed(1)
    net = GPT(model).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return Run(run.path, Config(model=model), tokenizer, net)


@installed
@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_every_architecture_is_proven(case, tmp_path):
    run = run_of(tmp_path / "run", **CASES[case][1])
    made = export_run(run, tmp_path / "out.gguf", "gguf", "f32")
    assert (made.rounding, made.architecture) == (0, CASES[case][0])
    assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"


@installed
def test_every_type_of_weights_is_proven_and_stated(tmp_path):
    run = run_of(tmp_path / "my 0.2", attention=GQA)
    sizes, roundings = [], []
    for weights, kind in (
        ("f32", "ALL_F32"),
        ("bf16", "MOSTLY_BF16"),
        ("f16", "MOSTLY_F16"),
        ("q8_0", "MOSTLY_Q8_0"),
    ):
        made = export_run(run, tmp_path / weights, "gguf", weights)
        sizes.append(made.path.stat().st_size)
        roundings.append(made.rounding)
        fields = gguf.import_gguf().GGUFReader(made.path).fields
        assert fields["general.name"].contents() == "my 0.2"
        assert fields["general.file_type"].contents() == gguf.import_gguf().LlamaFileType[kind]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]
    assert 0 == roundings[0] < roundings[2] < roundings[1]
    assert roundings[2] < roundings[3]


@installed
@pytest.mark.parametrize("kind", ["byte", "char", "chat", "chat of bytes", "partial"])
def test_every_tokenizer_is_proven(kind, tmp_path):
    run = with_tokenizer(run_of(tmp_path / "run", attention=GQA), kind)
    assert export_run(run, tmp_path / "out", "gguf", "f32").rounding == 0


@installed
def test_special_tokens_and_chat_template_are_written(tmp_path):
    tokenizer = adopted_tokenizer()
    tokenizer.end_tokens.append(300)
    run = run_of(tmp_path / "run", tokenizer)
    export_run(run, tmp_path / "out.gguf", "gguf")
    fields = gguf.import_gguf().GGUFReader(tmp_path / "out.gguf").fields
    found = {name.partition(".")[2]: field.contents() for name, field in fields.items()}
    assert found["ggml.eos_token_id"] == 301
    assert found["ggml.eot_token_id"] == found["ggml.bos_token_id"] == 299
    assert found["chat_template"] == TEMPLATE
    # Texts begin with the end-of-text token only where the user asks for it, as in gptmini.
    assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (False, False)
    back = gguf_reader.read_gguf(tmp_path / "out.gguf")[2]
    for name in ("special_tokens", "end_tokens", "chat_template", "template_tokens"):
        assert getattr(back, name) == getattr(run.tokenizer, name)
    assert back.end_tokens == [301, 299, 300]


@installed
def test_vectors_and_positions_stay_in_float32(tmp_path):
    """llama.cpp adds them to activations, which are float32."""
    for case in ("default", "gpt2"):
        run = run_of(tmp_path / f"{case} run", **CASES[case][1])
        export_run(run, tmp_path / case, "gguf", "f16")
        for tensor in gguf.import_gguf().GGUFReader(tmp_path / case).tensors:
            is_narrow = len(tensor.shape) == 2 and tensor.name != "position_embd.weight"
            assert tensor.tensor_type.name == ("F16" if is_narrow else "F32"), tensor.name


@installed
def test_rows_that_fill_no_blocks_of_q8_0_are_in_float16():
    types = gguf.import_gguf().GGMLQuantizationType
    for d_ff, d_model, chosen in ((48, 64, types.Q8_0), (64, 48, types.F16)):
        rows = torch.zeros(d_ff, d_model)
        assert gguf.choose_type("blk.0.ffn_up.weight", rows, "q8_0") == chosen


@installed
def test_a_stated_head_size_is_written_wherever_llama_cpp_reads_it(tmp_path):
    """Where one of these keys is missing, llama.cpp takes d_model / n_head, which is 8 here."""
    export_run(run_of(tmp_path / "run", head_dim=16), tmp_path / "out", "gguf")
    fields = gguf.import_gguf().GGUFReader(tmp_path / "out").fields
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert fields[f"qwen3.{key}"].contents() == 16, key


@installed
@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_have_is_refused(case, tmp_path):
    run = run_of(tmp_path / "run", **CASES[case][1])
    if case in ("llama", "gpt2, no positions"):  # their scaling, and relu2
        assert run.config.model.rope_scaling or run.config.model.activation == "relu2"
    with pytest.raises(
        ConfigError, match=r"^model\.(attention|rope_scaling|activation).*llama.cpp"
    ):
        export_run(run, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


@installed
def test_tokenizers_and_types_that_llama_cpp_does_not_have_are_refused(tmp_path):
    run = run_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="--weights q4_0: unknown type; use f32, f16, bf16, q8_0"):
        export_run(run, tmp_path / "out", "gguf", "q4_0")
    with_space = create_tokenizer("char", None, ["\u2581"])
    model = run.config.model.model_copy(update={"vocab_size": with_space.vocab_size})
    other = Run(run.path, Config(model=model), with_space, GPT(model).eval())
    with pytest.raises(ConfigError, match=r"has U\+2581, llama.cpp's space"):
        export_run(other, tmp_path / "out", "gguf")


def test_without_the_package_it_is_named(tmp_path, monkeypatch):
    run = run_of(tmp_path / "run")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(
        MachineError, match=r"gguf is not installed; run pip install 'gptmini\[gguf\]'"
    ):
        export_run(run, tmp_path / "out", "gguf")


FAULTS: dict[str, dict[str, Any]] = {
    "eps": {"norm_eps": 1e-3},
    "theta": {"rope_theta": 10_001.0},
    "fewer layers": {"n_layer": 2},
}


@installed
@pytest.mark.parametrize("fault", [*FAULTS, "rows of q and k as they were", "layers exchanged"])
def test_the_proof_catches_a_planted_fault(fault, tmp_path, monkeypatch):
    run = run_of(tmp_path / "run", **LLAMA, attention=NO_NORM)
    write = gguf.write_gguf

    def faulty(path: Path, run: Run, kind: str, config: Any, weights: Any, to: str) -> None:
        weights = dict(weights)
        if fault == "layers exchanged":
            a, b = (f"blocks.{n}.mlp.down_proj.weight" for n in (0, 1))
            weights[a], weights[b] = weights[b], weights[a]
        if fault.startswith("rows"):
            for name in weights:
                if name.endswith("q_proj.weight"):  # undone by the interleaving
                    weights[name] = gguf.separate_halves(weights[name], 4)
        config = config.model_copy(update=FAULTS.get(fault, {}))
        write(path, run, kind, config, weights, to)

    monkeypatch.setattr(gguf, "write_gguf", faulty)
    with pytest.raises(GptminiError, match=r"not written: logits differ by|unknown in a llama"):
        export_run(run, tmp_path / "out", "gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# -- llama.cpp -------------------------------------------------------------------------------------


class Server:
    """llama.cpp's server on a file, with a cache in float32."""

    def __init__(self, path: Path) -> None:
        llama = pytest.importorskip("xllamacpp", reason="needs xllamacpp")
        params = llama.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = 64, 1, 0
        params.warmup, params.verbosity = False, -1
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = 1
        self._server = llama.Server(params)

    def __call__(self, path: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        address = self._server.listening_address + path
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        return json.loads(urllib.request.urlopen(request, timeout=600).read())


@installed
def test_llama_cpp_shows_the_added_tokens_that_are_not_special(tmp_path):
    run = run_of(tmp_path / "run", thinking_tokenizer(), **LLAMA, attention=NO_NORM)
    path = export_run(run, tmp_path / "out.gguf", "gguf", "f32").path
    back = gguf_reader.read_gguf(path)[2]
    for text in ("<think>It was</think>", "<|im_end|>"):
        assert back.encode(text).tolist() == run.encode(text)
    types = gguf.import_gguf().GGUFReader(path).fields["tokenizer.ggml.token_type"].contents()
    assert types[299:] == [3, 3, 3, 4, 4]
    server = Server(path)
    for token, shown in ((300, ""), (302, "<think>"), (303, "</think>")):
        settings = {"n_predict": 1, "logit_bias": [[token, 1000]], "temperature": 0}
        assert server("/completion", prompt="It was", **settings)["content"] == shown


LLAMA_CPP = {
    "qwen3": ("default", "f32", "bpe", 3e-5),
    "qwen3, narrow": ("gqa", "f16", "byte", 2e-2),
    "llama": ("llama of ours", "f32", "char", 3e-5),
    "llama, chat": ("llama of ours", "f32", "digits", 3e-5),
    "llama, without some bytes": ("llama of ours", "f32", "partial", 3e-5),
    "gpt2": ("gpt2, mqa, untied", "f32", "bpe", 2e-2),  # its GELU is a table in float16
}


@installed
@pytest.mark.parametrize("name", ["Llama 2", "Gemma", "SmolLM2", "GPT-2"])
def test_llama_cpp_reads_texts_as_the_library_does(name, tmp_path):
    library = MAKERS[name]()
    tokenizer = adopt_tokenizer(
        library.to_str(), Path("tokenizer.json"), library.get_vocab_size(), ["</s>"], "<s>"
    )
    run = run_of(tmp_path / "run", tokenizer, **LLAMA, attention=NO_NORM)
    path = export_run(run, tmp_path / "out.gguf", "gguf", "f32").path
    back = gguf_reader.read_gguf(path)[2]
    types = gguf.import_gguf().GGUFReader(path).fields["tokenizer.ggml.token_type"].contents()
    added = library.get_added_tokens_decoder()
    expected_types = {number: 3 if token.special else 4 for number, token in added.items()}
    if library.model.unk_token is not None:
        expected_types[0] = 2
    assert {number: types[number] for number in added} == expected_types
    server = Server(path)
    for text in [*HARD_TEXTS[1:], TEXT[:2000], "x<think>It</think>"]:
        expected = run.tokenizer.encode(text).tolist()
        assert back.encode(text).tolist() == expected, repr(text)
        found = server("/tokenize", content=text, add_special=False, parse_special=False)
        if name in ("SmolLM2", "GPT-2") or "<s>" not in text:  # it merges into that token
            assert found["tokens"] == expected, repr(text)
    found = server("/tokenize", content="It was", add_special=True)
    assert found["tokens"] == run.encode("It was") == back.add_bos(back.encode("It was").tolist())


@installed
@pytest.mark.parametrize("name", ["Mistral", "prefix", "Unigram"])
def test_tokenizers_of_others_that_llama_cpp_reads_otherwise_are_refused(name, tmp_path):
    library = MAKERS[name]()
    tokenizer = adopt_tokenizer(
        library.to_str(), Path("tokenizer.json"), library.get_vocab_size(), [1], 1
    )
    run = run_of(tmp_path / "run", tokenizer, **LLAMA, attention=NO_NORM)
    with pytest.raises(ConfigError, match=r"tokenizer\.kind: imported"):
        export_run(run, tmp_path / "out.gguf", "gguf")
    assert not (tmp_path / "out.gguf").exists()


@installed
@pytest.mark.parametrize("case", LLAMA_CPP)
def test_llama_cpp_computes_the_same(case, tmp_path):
    name, weights, kind, limit = LLAMA_CPP[case]
    run = with_tokenizer(run_of(tmp_path / "run", **CASES[name][1]), kind)
    server = Server(export_run(run, tmp_path / "out.gguf", "gguf", weights).path)
    for text in [*HARD_TEXTS[1:], TEXT[:2000]]:
        if kind == "char" and "\u2581" in text:
            continue  # its space
        found = server("/tokenize", content=text, add_special=False, parse_special=False)
        assert found["tokens"] == run.tokenizer.encode(text).tolist(), repr(text)
    tokens = run.tokenizer.encode("It was the best of")[:20].tolist()
    size = run.tokenizer.vocab_size
    for _ in range(6):
        expected = run.model(torch.tensor([tokens]))[0, -1].log_softmax(-1)
        answer = server("/completion", prompt=tokens, n_predict=1, temperature=-1, n_probs=size)
        for shown in answer.get("completion_probabilities", []):  # none for half a character
            listed = shown["top_logprobs"]
            assert len(listed) == size
            found = torch.zeros(size)
            found[[each["id"] for each in listed]] = torch.tensor([e["logprob"] for e in listed])
            torch.testing.assert_close(found, expected, rtol=0, atol=limit)
            if weights == "f32":
                assert listed[0]["id"] == int(expected.argmax())
        tokens.append(int(expected.argmax()))
