"""Reads and writes folders in Hugging Face's format: config.json, safetensors, tokenizer.json.

Reading runs no code from the folder: pickles are refused, and no name in an index may leave it.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from gptmini import files
from gptmini.config.load import validate
from gptmini.config.settings import ModelConfig, SampleConfig
from gptmini.console import warn
from gptmini.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    describe_lookup_error,
    describe_os_error,
    shorten,
)
from gptmini.extras.interop import architectures
from gptmini.extras.interop.adopt import adopt_tokenizer
from gptmini.extras.interop.tokenizer_json import to_tokenizer_json
from gptmini.generate.run import Run
from gptmini.generate.sequence import build_token_bias
from gptmini.runs.tensors import NamedTensors, Tensors, write_tensors
from gptmini.tokenizer.foreign import ForeignTokenizer
from gptmini.tokenizer.tokenizers import Tokenizer

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The uses of special tokens that have keys of their own in tokenizer_config.json.
STANDARD_USES = {f"{use}_token" for use in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
# The same in generation_config.json and in the section `sample`.
SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
LFS_POINTER = b"version https://git-lfs"
StoredTensors = dict[str, Callable[[], Tensor]]
HEAD_NAME = "lm_head.weight"  # in every architecture
# Tensors that transformers ignores: masks of GPT-2, tables of the rotary positions, and the head
# that TRL trains to value texts.
IGNORED_TENSORS = re.compile(
    r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.((original_)?inv_freq|(cos|sin)_cached)|v_head\..*"
)


# -- reading ---------------------------------------------------------------------------------------


def read_model(folder: Path, context_length: int | None = None) -> tuple[ModelConfig, NamedTensors]:
    """Return the settings of a folder's model and its weights by our names.

    The weights are read when they are asked for, one after the other.
    """
    hf_config, config = read_settings(folder, context_length)
    model_type = hf_config["model_type"]
    stored = _find_tensors(folder)
    if config.tie_embeddings and _has_own_head(stored, model_type):
        warn(f"{folder}: tie_word_embeddings: true, but it stores a head of its own, which is used")
        config = config.model_copy(update={"tie_embeddings": False})
    output_biases = [tensor for name, tensor in stored.items() if name.endswith("o_proj.bias")]
    if not config.bias and any(tensor().any() for tensor in output_biases):
        # With us, biases are everywhere or nowhere. Those of the MLP become 0.
        config = config.model_copy(update={"bias": True})
    without_bias = _list_layers_without_bias(hf_config)

    def list_names(name: str) -> list[str]:
        their_name = architectures.hf_name(model_type, name)
        return [their_name, their_name.partition(".")[2]]  # as of models saved without a head

    def may_lack(name: str) -> bool:
        return name.endswith(".bias") and name.split(".")[-2] in without_bias

    def is_ignored(name: str) -> bool:  # a head that is used nowhere equals the embeddings
        is_bias = name.endswith("o_proj.bias")
        return name == HEAD_NAME or is_bias or bool(IGNORED_TENSORS.fullmatch(name))

    def convert(name: str, their_name: str) -> Tensor:
        return architectures.from_hf(model_type, config, name, stored[their_name]())

    names = architectures.match_tensors(
        config, stored, list_names, may_lack, is_ignored, model_type, folder
    )
    return config, architectures.convert_tensors(config, names, convert, folder)


def read_settings(
    folder: Path, context_length: int | None = None
) -> tuple[dict[str, Any], ModelConfig]:
    """Return a folder's config.json and the settings in it; CheckpointError if one is not ours."""
    _refuse_links(folder)
    adapter_file = folder / "adapter_config.json"
    if adapter_file.exists():
        raise CheckpointError(
            f"{adapter_file}: a LoRA adapter, which changes another model; save both as one with "
            f"PEFT's merge_and_unload() and save_pretrained(...)"
        )
    config_file = folder / "config.json"
    if not config_file.exists():
        _refuse_pickles(folder)
    hf_config = _read_json(
        config_file, "give a folder in Hugging Face's format, or OWNER/NAME on the Hub"
    )
    return hf_config, architectures.from_hf_config(hf_config, config_file, context_length)


def _refuse_links(folder: Path) -> None:
    """Raise CheckpointError for a text file that is a link to elsewhere: the run would copy it.

    In the Hub's cache, files are links to its folder blobs.
    """
    inside = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    for file in folder.glob("*.j*"):  # .json and .jinja
        if not any(file.resolve().is_relative_to(parent) for parent in inside):
            raise CheckpointError(f"{file}: a link that leaves its folder; copy the file there")


def check_tokenizer_file(folder: Path) -> Path:
    """Return the tokenizer's file; DataError if it is missing."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise DataError(
            f"{file}: missing; write it with transformers' "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return file


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer, with the tokens that end a text and the chat template."""
    file = check_tokenizer_file(folder)
    check_no_lfs_pointer(file)
    hf_config = _read_optional_json(folder / "config.json")
    template_tokens = _read_template_tokens(folder)
    try:
        return adopt_tokenizer(
            files.read_regular(file).decode(),
            file,
            vocab_size,
            _read_end_tokens(folder, hf_config),
            template_tokens.get("bos_token", hf_config.get("bos_token_id")),
            _read_chat_template(folder),
            template_tokens,
        )
    except OSError as error:
        raise CheckpointError(f"{file}: {describe_os_error(error)}; restore it") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: {describe_lookup_error(error)}; restore the file") from None


def _read_end_tokens(folder: Path, hf_config: dict[str, Any]) -> list[Any]:
    """Return the tokens that end a text, by number or name.

    Instruct models end their answers with another token than documents, and the files of one
    folder may disagree on which it is. So collect all that they name, the tokenizer's first.
    """
    end = _read_optional_json(folder / "tokenizer_config.json").get("eos_token")
    found = [end.get("content") if isinstance(end, dict) else end]
    generation_config = _read_optional_json(folder / "generation_config.json")
    for settings in (generation_config, hf_config):
        numbers = settings.get("eos_token_id")
        found += numbers if isinstance(numbers, list) else [numbers]
    return found


def read_sampling(folder: Path) -> SampleConfig:
    """Return the section `sample` that generation_config.json states."""
    path = folder / "generation_config.json"
    stated = _read_optional_json(path)
    settings = {key: stated[key] for key in SAMPLING_KEYS if stated.get(key) is not None}
    for key, everything in (("top_k", 0), ("top_p", 1)):
        if settings.get(key) == everything:
            settings[key] = None
    if stated.get("do_sample") is False:
        settings["temperature"] = 0.0
    try:
        return validate({"sample": settings}, {("sample",): str(path)}).sample
    except ConfigError as error:
        raise CheckpointError(*error.lines) from None


def _read_template_tokens(folder: Path) -> dict[str, str]:
    """Return the names of special tokens that a chat template may use, such as bos_token.

    As in transformers, those are all whose key ends with _token, and those in extra_special_tokens.
    """
    settings = _read_optional_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # an older folder has them in a file of their own
        settings |= _read_optional_json(folder / "special_tokens_map.json")
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):  # by use; a list has names only
        named |= extra
    tokens = {}
    for use, value in named.items():
        name = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str):
            tokens[use] = name
    return tokens


def _read_chat_template(folder: Path) -> str | None:
    """Return the chat template, from its own file or from tokenizer_config.json.

    Of several, it is the one called default, which transformers takes where there are no tools.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            with files.open_regular(file) as opened:
                return opened.read().decode()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: {describe_os_error(error)}; restore it") from None
    template = _read_optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    if isinstance(template, dict):
        if "default" not in template:
            config_file = folder / "tokenizer_config.json"
            warn(f"{config_file}: chat_template: has several, none called default; none is kept")
        template = template.get("default")
    if not isinstance(template, str | None):
        raise DataError(f"{folder / 'tokenizer_config.json'}: chat_template: must be a text")
    return template


def _read_optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path, "restore it") if path.exists() else {}


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    check_no_lfs_pointer(path)
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {describe_os_error(error)}; {remedy}") from None


def check_no_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError for a pointer, which is what Git leaves of a large file without LFS."""
    with suppress(OSError), files.open_regular(path) as file:  # the reader will report an OSError
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{path}: a Git LFS pointer, not the file itself; fetch that with: git lfs pull"
            )


def _read_tensor(file: Path, name: str) -> Tensor:
    """Read a tensor of a safetensors file as it is stored."""
    # Opened for each: what a closed file had mapped leaves the memory.
    try:
        with safetensors.safe_open(file, "pt") as opened:
            return opened.get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
        raise _make_damage_error(file, error) from None


def _find_tensors(folder: Path) -> StoredTensors:
    """Return the tensors of all weight files by name."""
    stored: StoredTensors = {}
    for file in (folder / name for name in list_weight_files(folder)):
        check_no_lfs_pointer(file)
        try:
            files.open_regular(file).close()  # refuses pipes and devices
            with safetensors.safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no dict
                    # The names of a model that torch had compiled or spread over processes.
                    plain_name = name.replace("_orig_mod.", "").removeprefix("module.")
                    if plain_name in stored:
                        raise CheckpointError(
                            f"{file}: tensor {shorten(name)}: it is stored twice; restore the "
                            f"original files"
                        )
                    stored[plain_name] = partial(_read_tensor, file, name)
        except (OSError, safetensors.SafetensorError) as error:
            raise _make_damage_error(file, error) from None
    return stored


def _has_own_head(stored: StoredTensors, model_type: str) -> bool:
    """Check whether there is a head with other weights than the embeddings."""
    embed_name = architectures.hf_name(model_type, "embed.weight")
    embed = stored.get(embed_name, stored.get(embed_name.partition(".")[2]))
    head = stored.get(HEAD_NAME)
    if embed is None or head is None:
        return False
    return not torch.equal(embed().float(), head().float())


def _make_damage_error(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: {describe_os_error(error)}; download it again")


def list_weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files: the only one, else those in the index."""
    index_file = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists():  # transformers, too, then leaves an index alone
        return [WEIGHTS_FILE]
    if not index_file.exists():
        _refuse_pickles(folder)
        return [WEIGHTS_FILE]
    weight_map = _read_json(index_file, "restore it").get("weight_map")
    names: list[Any] = [weight_map]
    if isinstance(weight_map, dict):
        names = list(weight_map.values())
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise CheckpointError(
                f"{index_file}: weight_map: {shorten(repr(name))} is not a .safetensors file "
                f"of this folder; restore the index"
            )
    return sorted(set(names))


def _refuse_pickles(path: Path) -> None:
    """Raise CheckpointError for a file that is a pickle, or a folder that has some."""
    candidates = path.iterdir() if path.is_dir() else [path]
    pickles = [file for file in candidates if file.suffix in PICKLE_SUFFIXES and file.is_file()]
    if not pickles:
        return
    raise CheckpointError(
        f"{min(pickles)}: a pickle, which could run code; write it with transformers' "
        f"save_pretrained, as docs/coming-from.md shows"
    )


def _list_layers_without_bias(hf_config: dict[str, Any]) -> set[str]:
    """Return the linear layers that may lack a bias there and have one, of 0, with us."""
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    mlp = {"gate_proj", "up_proj", "down_proj"}
    if hf_config["model_type"] in ("gpt2", "starcoder2"):
        return set() if hf_config.get("use_bias", True) else attention | mlp
    if hf_config.get("mlp_bias"):
        return set() if hf_config.get("attention_bias") else attention
    return {"o_proj"} | mlp


# -- writing ---------------------------------------------------------------------------------------


def write_folder(
    folder: Path, run: Run, model_type: str, config: ModelConfig, weights: Tensors
) -> None:
    """Write a folded model and the tokenizer of its run."""
    folder.mkdir()
    tokenizer = run.tokenizer
    hf_config = architectures.to_hf_config(config, model_type)
    hf_config["bos_token_id"] = tokenizer.eos_token_id
    hf_config["eos_token_id"] = tokenizer.end_tokens[0]
    contents = {
        "config.json": hf_config,
        "generation_config.json": _build_generation_config(run),
        "tokenizer_config.json": _build_tokenizer_config(tokenizer, config.context_length),
    }
    if isinstance(tokenizer, ForeignTokenizer):
        files.write_and_sync(folder / "tokenizer.json", [tokenizer.file.encode()])
    else:
        contents["tokenizer.json"] = to_tokenizer_json(tokenizer)
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        files.write_and_sync(folder / name, [text.encode()])
    card = _build_model_card(run, model_type).encode(errors="replace")  # its name may be any bytes
    files.write_and_sync(folder / "README.md", [card])
    hf_weights = architectures.to_hf(model_type, config, weights)
    write_tensors(folder / WEIGHTS_FILE, hf_weights, {"format": "pt"})
    files.sync_directory(folder)


def _build_generation_config(run: Run) -> dict[str, Any]:
    """Return the run's sampling settings and the tokens that end a text.

    Every setting is stated, as transformers has defaults of its own, such as a top_k of 50.
    """
    tokenizer = run.tokenizer
    sample = run.config.sample
    end_tokens = tokenizer.end_tokens
    generation: dict[str, Any] = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": end_tokens if len(end_tokens) > 1 else end_tokens[0],
        "pad_token_id": tokenizer.eos_token_id,
        "max_new_tokens": sample.max_new_tokens,
        "do_sample": sample.temperature > 0,
        "repetition_penalty": sample.repetition_penalty,
    }
    if sample.temperature > 0:
        generation["temperature"] = sample.temperature
        generation["top_k"] = sample.top_k or 0  # 0: all
        generation["top_p"] = sample.top_p or 1.0
        if sample.min_p is not None:
            generation["min_p"] = sample.min_p
    bias = build_token_bias(run.tokenizer, sample)
    if bias is not None:
        is_banned = bias.isneginf()
        is_biased = (bias != 0) & ~is_banned
        banned = is_banned.nonzero().flatten().tolist()
        biased = is_biased.nonzero().flatten().tolist()
        if banned:
            generation["suppress_tokens"] = banned
        if biased:  # transformers refuses to generate by an empty list
            generation["sequence_bias"] = [[[token], float(bias[token])] for token in biased]
    for key in ("presence_penalty", "frequency_penalty", "stop"):
        if getattr(sample, key):
            warn(f"sample.{key}: left out of generation_config.json, which has no such setting")
    return generation


def _build_tokenizer_config(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    """Return the special tokens by their use, and the chat template of an imported model.

    Without a chat template, text that looks like a special token stays text, as in gptmini. A
    template writes special tokens as text, so with one they are recognized.
    """
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    eos_token = names[tokenizer.eos_token_id]
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eos_token,
        "eos_token": names[tokenizer.end_tokens[0]],
        "pad_token": eos_token,
        "padding_side": "left",  # so that a model continues the last token of a text
        "add_bos_token": tokenizer.adds_bos,
        "split_special_tokens": tokenizer.chat_template is None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    if tokenizer.chat_template is not None:
        tokenizer_config["chat_template"] = tokenizer.chat_template
        extra = {}
        for use, name in tokenizer.template_tokens.items():
            if use in STANDARD_USES:
                tokenizer_config[use] = name
            else:
                extra[use] = name
        if extra:
            tokenizer_config["extra_special_tokens"] = extra
    return tokenizer_config


def _build_model_card(run: Run, model_type: str) -> str:
    """Return a short model card."""
    best = run.state.get("best") or {}
    n_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    facts = [
        f"{n_parameters:,} parameters, as a {model_type}",
        f"context of {run.config.model.context_length:,} tokens, "
        f"vocabulary of {run.tokenizer.vocab_size:,} ({run.tokenizer.kind})",
    ]
    if run.step:
        facts.append(f"after {run.step:,} steps and {run.state['tokens']:,} tokens")
    if run.corpus:
        facts.append(f"trained on the text with SHA-256 {run.corpus}")
    if "val_loss" in best:
        facts.append(
            f"on held-out text {best['val_loss']:.4f} nats per token, {best['val_bpb']:.4f} bits "
            f"per byte"
        )
    lines = "".join(f"- {fact}\n" for fact in facts)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
        f"# {run.path.name}\n\nTrained with gptmini.\n\n{lines}"
    )
