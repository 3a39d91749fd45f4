"""GGUF files of others: llama.cpp's defaults, quantized weights, other architectures, damage."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptmini.config.settings import ModelConfig
from gptmini.errors import CheckpointError, ConfigError, DataError, GptminiError
from gptmini.extras.interop.architectures import Tensors
from gptmini.extras.interop.export import compute_logits, export_run
from gptmini.extras.interop.gguf_reader import read_gguf
from gptmini.extras.interop.import_model import import_model
from gptmini.generate.run import Run
from gptmini.model.layers import scale_frequencies
from gptmini.tokenizer.tokenizers import Tokenizer
from tests.samples import CHAT_TOKENIZER, GQA, LLAMA, NO_NORM, TEMPLATE, adopted_tokenizer, run_of

gguf: Any = pytest.importorskip("gguf", reason="needs the extra gguf")
TYPES = gguf.GGMLQuantizationType
REMOVED = object()


def read_whole(path: Path) -> tuple[ModelConfig, Tensors, Tokenizer]:
    """Read a file with all its weights, which `read_gguf` leaves for later."""
    config, weights, tokenizer = read_gguf(path)
    return config, dict(weights), tokenizer


def rewrite(
    path: Path,
    out: Path,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    quantized: Any = None,
    architecture: str = "llama",
) -> Path:
    """Copy a GGUF file with some fields and tensors changed, and its matrices quantized."""
    reader = gguf.GGUFReader(path)
    old = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    changed = dict(fields or {})
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        key = name.replace(f"{old}.", f"{architecture}.", 1)
        value = changed.pop(key, field.contents())
        if value is REMOVED:
            continue
        kind = gguf.GGUFValueType.INT32 if value == -1 else field.types[0]
        kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else kind
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, inner)
    for name, value in changed.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    others = dict(tensors or {})
    for tensor in reader.tensors:
        data = others.pop(tensor.name, tensor.data)
        if data is REMOVED:
            continue
        if quantized is not None and data.ndim == 2:
            data = gguf.quants.quantize(np.asarray(data, np.float32), quantized)
            writer.add_tensor(tensor.name, data, raw_dtype=quantized)
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(data))
    for name, data in others.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A Llama with an instruct model's tokenizer, and its file."""
    folder = tmp_path_factory.mktemp("llama")
    attention = {**NO_NORM, **GQA}
    run = run_of(folder / "run", adopted_tokenizer(), **LLAMA, d_ff=96, attention=attention)
    return run, export_run(run, folder / "llama.gguf", "gguf", "f32").path


def logits_of(run: Run) -> torch.Tensor:
    tokens = torch.randint(run.tokenizer.vocab_size, (2, 20), generator=torch.manual_seed(3))
    return run.model(tokens)


def test_a_file_without_what_llama_cpp_assumes_is_the_same_model(llama, tmp_path):
    run, path = llama
    missing = [
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.add_bos_token",
    ]
    bare = rewrite(path, tmp_path / "bare.gguf", dict.fromkeys(missing, REMOVED))
    found = import_model(bare, tmp_path / "run")
    torch.testing.assert_close(logits_of(found), logits_of(run), rtol=0, atol=1e-5)
    assert (
        found.tokenizer.encode("don't 123").tolist() == run.tokenizer.encode("don't 123").tolist()
    )
    assert found.tokenizer.end_tokens[0] == 301  # <|im_end|>
    assert found.tokenizer.chat_template == TEMPLATE
    shorter = import_model(bare, tmp_path / "shorter", 16)
    assert shorter.config.model.context_length == 16
    with pytest.raises(ConfigError, match=r"--context-length 41: llama.context_length is 40"):
        import_model(bare, tmp_path / "longer", 41)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "BF16"])
def test_quantized_weights_are_what_the_package_makes_of_them(kind, llama, tmp_path, monkeypatch):
    monkeypatch.setattr("gptmini.extras.interop.gguf_reader.ROWS_AT_A_TIME", 10)
    _, path = llama
    stored_type = TYPES[kind]
    _, weights, _ = read_whole(path)
    _, found, _ = read_whole(rewrite(path, tmp_path / "q.gguf", quantized=stored_type))
    for name, weight in weights.items():
        expected = weight
        if weight.ndim == 2:
            quantized = gguf.quants.quantize(weight.numpy(), stored_type)
            expected = torch.from_numpy(gguf.quants.dequantize(quantized, stored_type))
        if weight.ndim == 1 or name.endswith(("q_proj.weight", "k_proj.weight")):
            continue  # rows are rounded by themselves, but lie in another order in the file
        torch.testing.assert_close(found[name].float(), expected, rtol=0, atol=0)
    kept = torch.bfloat16 if kind == "BF16" else torch.float32
    assert found["embed.weight"].dtype == kept


def test_blocks_of_256_weights_are_read(tmp_path):
    run = run_of(tmp_path / "run", **LLAMA, n_layer=1, d_model=256, attention=NO_NORM)
    path = export_run(run, tmp_path / "wide.gguf", "gguf", "f32").path
    block_size, type_size = gguf.GGML_QUANT_SIZES[TYPES.Q4_K]
    rows = 256
    generator = np.random.default_rng(5)
    raw = generator.integers(0, 256, (rows, 256 // block_size, type_size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for place in (0, 2):  # of the blocks' scales, in float16
        raw[:, :, place : place + 2] = scale
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.name == "blk.0.attn_v.weight":
            writer.add_tensor(tensor.name, raw.reshape(rows, -1), raw_dtype=TYPES.Q4_K)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config, weights, _ = read_whole(tmp_path / "k.gguf")
    values = weights["blocks.0.attn.v_proj.weight"]
    assert values.shape == (256, 256)
    assert -0.631 <= values.min() < values.max() <= 9.46
    assert values.unique().numel() > 100
    tokens = torch.arange(20)[None]
    assert compute_logits(config, weights, tokens).isfinite().all()


def test_qwen2_has_biases_of_q_k_and_v_alone(llama, tmp_path):
    """Qwen2 rotates halves, so that the rows of q and k lie as ours do."""
    _, path = llama
    _, weights, _ = read_whole(path)
    generator = np.random.default_rng(1)
    tensors: dict[str, Any] = {}
    biases = {}
    for layer in range(3):
        for module in "qkv":
            weight = weights[f"blocks.{layer}.attn.{module}_proj.weight"]
            tensors[f"blk.{layer}.attn_{module}.weight"] = weight.numpy()
            bias = generator.normal(size=len(weight)).astype(np.float32)
            tensors[f"blk.{layer}.attn_{module}.bias"] = bias
            biases[f"blocks.{layer}.attn.{module}_proj.bias"] = torch.from_numpy(bias)
    made = rewrite(path, tmp_path / "q.gguf", {}, tensors, architecture="qwen2")
    config, found, _ = read_whole(made)
    assert (config.bias, config.attention.qkv_bias, config.attention.qk_norm) == (
        False,
        True,
        False,
    )
    assert found.keys() == weights.keys() | biases.keys()
    for name, expected in (weights | biases).items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0)


def test_frequencies_scaled_as_llama_3_are_recognized(llama, tmp_path):
    _, path = llama
    head_dim = 8
    frequencies = 500_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    scaling = [32.0, 1.0, 4.0, 8192.0]
    factors = (frequencies / scale_frequencies(frequencies, scaling)).numpy()
    fields = {"llama.rope.freq_base": 500_000.0}
    made = rewrite(path, tmp_path / "3.gguf", fields, {"rope_freqs.weight": factors})
    assert read_whole(made)[0].rope_scaling == scaling
    other = rewrite(path, tmp_path / "o.gguf", fields, {"rope_freqs.weight": factors * 1.5})
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight: another scaling than Llama"):
        read_whole(other)


def test_prompts_begin_with_the_token_that_llama_cpp_puts_there(llama, tmp_path):
    key = "tokenizer.ggml.add_bos_token"
    llama3 = {"tokenizer.ggml.pre": "llama-bpe"}
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, []),
        ({key: True}, [299]),
        ({key: REMOVED}, []),
        ({key: REMOVED} | llama3, [299]),  # llama.cpp's default for Llama 3
        ({key: False} | llama3, []),
    ]
    stored = gguf.GGUFReader(llama[1]).fields
    first: dict[str, Any] = {"tokenizer.ggml.bos_token_id": 0}  # as SmolLM2 has it
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        values = stored[name].contents()
        values[0], values[299] = values[299], values[0]
        first[name] = values
    cases.append((first | {key: True}, [0]))
    for number, (fields, expected) in enumerate(cases):
        tokenizer = read_whole(rewrite(llama[1], tmp_path / f"{number}.gguf", fields))[2]
        assert tokenizer.add_bos([]) == expected


@pytest.mark.parametrize("number", [-1, 302, 1 << 30])
def test_numbers_of_special_tokens_beyond_the_vocabulary_name_none(number, llama, tmp_path):
    """llama.cpp ignores them with a warning; a negative one must not count from the end."""
    keys = [f"tokenizer.ggml.{use}_token_id" for use in ("bos", "eos", "eot", "padding")]
    made = rewrite(llama[1], tmp_path / "n.gguf", dict.fromkeys(keys, number))
    tokenizer = read_whole(made)[2]
    assert tokenizer.template_tokens == {}
    assert (tokenizer.eos_token_id, tokenizer.end_tokens) == (299, [299])
    starts = dict.fromkeys(keys, number) | {"tokenizer.ggml.add_bos_token": True}
    assert read_whole(rewrite(llama[1], tmp_path / "s.gguf", starts))[2].add_bos([]) == []


UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("gemma3", {}, "general.architecture: gemma3 is not supported; use one"),
    "experts": ("llama", {"llama.expert_count": 8}, "llama.expert_count: 8 is not supported"),
    "factor": ("llama", {"llama.rope.scaling.factor": 4.0}, "rope.scaling.factor: 4.0 is not"),
    "half rotated": ("llama", {"llama.rope.dimension_count": 4}, "dimension_count: 4 is not"),
    "0 heads": ("llama", {"llama.attention.head_count": 0}, "damaged, or not a GGUF file"),
    "both directions": ("llama", {"llama.attention.causal": False}, "attention.causal: 0 is not"),
    "words": ("llama", {"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: tekken is not supp"),
    "layers that differ": (
        "llama",
        {"llama.attention.head_count_kv": [2, 2, 4]},
        r"head_count_kv: \[2, 2, 4\] is not supported",
    ),
    "too many heads": ("llama", {"llama.attention.head_count": 5}, "5 heads .* 2 KV heads; choose"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_gptmini_does_not_have_is_named(case, llama, tmp_path):
    architecture, fields, message = UNSUPPORTED[case]
    made = rewrite(llama[1], tmp_path / "x; y.gguf", fields, architecture=architecture)
    with pytest.raises((CheckpointError, DataError), match=message) as error:
        import_model(made, tmp_path / "run")
    (line,) = error.value.lines
    assert line.startswith(f"{made}: ")
    assert [each.name for each in tmp_path.iterdir()] == ["x; y.gguf"]


def test_layers_that_are_missing_are_noticed_before_1000_are_built(llama, tmp_path, monkeypatch):
    made = rewrite(llama[1], tmp_path / "x.gguf", {"llama.block_count": 1000})
    monkeypatch.delattr("gptmini.extras.interop.architectures.create_undrawn")
    with pytest.raises(CheckpointError, match=r"tensor blk\.999\.attn_norm\.weight: missing"):
        read_whole(made)


def test_a_git_lfs_pointer_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"model\.gguf: a Git LFS pointer, not the file"):
        read_whole(path)


def test_tensors_that_are_missing_or_unknown_are_named(llama, tmp_path):
    _, path = llama
    name = "blk.1.ffn_up.weight"
    with pytest.raises(CheckpointError, match=f"tensor {name}: missing"):
        read_whole(rewrite(path, tmp_path / "m.gguf", tensors={name: REMOVED}))
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((4, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"ffn_gate_inp.weight: unknown in a llama"):
        read_whole(rewrite(path, tmp_path / "e.gguf", tensors=extra))
    short = {"blk.0.attn_q.weight": np.ones((31, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"attn_q.weight: \(31, 32\), but its settings"):
        read_whole(rewrite(path, tmp_path / "s.gguf", tensors=short))
    whole_numbers = {"output_norm.weight": np.ones(32, np.int32)}
    with pytest.raises(CheckpointError, match=r"output_norm.weight: I32 is not supported"):
        read_whole(rewrite(path, tmp_path / "i.gguf", tensors=whole_numbers))
    wide = {"llama.attention.key_length": 4_000_000_000}
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    with pytest.raises(CheckpointError, match=r"\.gguf: "):
        read_whole(rewrite(path, tmp_path / "w.gguf", wide, factors))
    nan = {"output_norm.weight": np.full(32, np.nan, np.float32)}
    with pytest.raises(CheckpointError, match=r"output_norm.weight: has values that are not"):
        read_whole(rewrite(path, tmp_path / "n.gguf", tensors=nan))


def test_arrays_do_not_fill_the_memory(tmp_path):
    """An array of 2^40 bytes in a file that ends there."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    kinds = (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
    field = struct.pack("<QcIIQ", 1, b"x", *kinds, 1 << 40)
    path = tmp_path / "array.gguf"
    path.write_bytes(head + field)
    with pytest.raises(CheckpointError, match=r"array\.gguf: damaged, .*array"):
        read_whole(path)


def test_damage_anywhere_costs_one_line(llama, tmp_path):
    data = llama[1].read_bytes()
    draw = random.Random(7)
    bad = tmp_path / "bad.gguf"
    header = len(data) - sum(tensor.n_bytes for tensor in gguf.GGUFReader(llama[1]).tensors)
    for number in range(40):
        spoiled = bytearray(data)
        if number % 4 == 0:
            del spoiled[draw.randrange(header) :]
        else:
            for _ in range(number % 4):
                spoiled[draw.randrange(header)] = draw.randrange(256)
        bad.write_bytes(spoiled)
        try:
            read_whole(bad)
        except GptminiError as error:
            assert len(error.lines) == 1
            assert len(error.lines[0]) < 600
            assert str(bad) in error.lines[0]
    bad.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged, or not a GGUF file"):
        read_whole(bad)
    with pytest.raises(CheckpointError, match="no such file"):
        read_whole(tmp_path / "missing.gguf")


def test_the_context_is_short_unless_asked_for_and_a_window_of_zero_is_none(llama, tmp_path):
    fields = {"llama.context_length": 8192, "llama.attention.sliding_window": 0}
    path = rewrite(llama[1], tmp_path / "long.gguf", fields)
    config, _, _ = read_gguf(path)
    assert (config.context_length, config.attention.window) == (2048, None)
    assert read_gguf(path, 4096)[0].context_length == 4096


def test_each_token_that_ends_a_text_is_found(llama, tmp_path):
    _, path = llama
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    for number, key in enumerate(keys):
        fields = {keys[0]: 299, keys[1]: REMOVED} | {key: 300}
        found = read_whole(rewrite(path, tmp_path / f"{number}.gguf", fields))[2]
        assert 300 in found.end_tokens, key


def test_a_number_of_kv_heads_for_each_layer_is_read_if_they_are_equal(llama, tmp_path):
    fields = {"llama.attention.head_count_kv": [2, 2, 2]}
    assert read_whole(rewrite(llama[1], tmp_path / "list.gguf", fields))[0].n_kv_head == 2


def test_without_a_number_of_kv_heads_there_are_as_many_as_heads(llama, tmp_path):
    run = run_of(tmp_path / "run", CHAT_TOKENIZER, **LLAMA, attention=NO_NORM)
    path = export_run(run, tmp_path / "out.gguf", "gguf", "f32").path
    bare = rewrite(path, tmp_path / "bare.gguf", {"llama.attention.head_count_kv": REMOVED})
    assert read_whole(bare)[0].n_kv_head == 4
