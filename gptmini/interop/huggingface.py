"""Folders as Hugging Face has them: config.json, safetensors, tokenizer.json; read and written.

Nothing in them can run code: a pickle is refused, and no name in an index may leave the folder.
"""

import json
import re
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gptmini import files
from gptmini.config.settings import Config, ModelConfig, TokenizerConfig, TrainConfig
from gptmini.console import warn
from gptmini.errors import CheckpointError, DataError, describe_os_error
from gptmini.generate.run import Run, load_run
from gptmini.interop import architectures
from gptmini.interop.architectures import Tensors
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer import tokenizer_json
from gptmini.tokenizer.tokenizers import Tokenizer
from gptmini.train.create import write_run

MAX_SHARD_BYTES = 5_000_000_000  # bytes
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# What fine-tuning starts from, at half the rate: pretrained models are trained by AdamW.
FINETUNE_SETTINGS: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.1}
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensors that hold no weights: masks of GPT-2 and frequencies of the rotary positions.
BUFFER_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


# -- reading ---------------------------------------------------------------------------------------


def import_model(
    folder: str | Path,
    out: str | Path,
    context_length: int | None = None,
    cache: Path = files.DEFAULT_CACHE_DIR,
) -> Run:
    """Make a run of a folder in Hugging Face's format, at step 0; it appears whole or not at all.

    `context_length` may shorten the context, which is at most 2048 without it. Raises
    CheckpointError or DataError, naming the file and key, for what gptmini cannot represent.
    """
    folder, out = Path(folder), Path(out)
    with files.atomic_output(out) as partial:
        model, weights, tokenizer = read_folder(folder, context_length)
        if tokenizer.missing_bytes:
            warn(
                f"{folder / 'tokenizer.json'}: {len(tokenizer.missing_bytes)} bytes have no token, "
                f"such as {tokenizer.missing_bytes[0]:#04x}; texts lose them, as in transformers"
            )
        tokens = TokenizerConfig(kind=tokenizer.kind)
        settings = Config(model=model, tokenizer=tokens, train=TrainConfig(**FINETUNE_SETTINGS))
        write_run(RunDirectory(partial), settings, weights, tokenizer)
    return load_run(out, weights="float32", cache=cache)


def read_folder(
    folder: Path, context_length: int | None = None
) -> tuple[ModelConfig, Tensors, Tokenizer]:
    """The settings, the weights by our names, and the tokenizer of a folder."""
    config_file, tokenizer_file = folder / "config.json", folder / "tokenizer.json"
    hf_config = _read_json(config_file, "give a folder in Hugging Face's format")
    config = architectures.from_hf_config(hf_config, config_file, context_length)
    if not tokenizer_file.exists():
        raise DataError(
            f"{tokenizer_file}: missing; write it with transformers' "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    data = _read_json(tokenizer_file, "restore it")
    vocab_size = config.vocab_size or 0
    beginning, template = hf_config.get("bos_token_id"), _chat_template(folder)
    try:
        ends = _ends(folder, hf_config)
        tokenizer = tokenizer_json.from_tokenizer_json(
            data, tokenizer_file, vocab_size, ends, beginning, template
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{tokenizer_file}: damaged ({error!r}); restore the file") from None
    config, weights = _convert_weights(_read_tensors(folder), hf_config, config, folder)
    return config, weights, tokenizer


def _ends(folder: Path, config: dict[str, Any]) -> list[Any]:
    """The tokens that end a text, by number or name.

    An instruct model ends its answers otherwise than documents end, and the files of one folder
    may disagree on that. So all that they name are taken, first the tokenizer's.
    """
    end = _optional_json(folder / "tokenizer_config.json").get("eos_token")
    found = [end["content"] if isinstance(end, dict) else end]
    for settings in (_optional_json(folder / "generation_config.json"), config):
        numbers = settings.get("eos_token_id")
        found += numbers if isinstance(numbers, list) else [numbers]
    return found


def _chat_template(folder: Path) -> str | None:
    """The chat template, from a file of its own or from tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            with files.open_regular(file) as opened:
                return opened.read().decode()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: {describe_os_error(error)}; restore it") from None
    template = _optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, str | None):
        return template
    warn(f"{folder / 'tokenizer_config.json'}: chat_template: has several; none is kept")
    return None


def _optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path, "restore it") if path.exists() else {}


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {describe_os_error(error)}; {remedy}") from None


def _read_tensors(folder: Path) -> Tensors:
    """The tensors of all files, as they are stored."""
    names: list[Any] = [WEIGHTS_FILE]
    if (folder / INDEX_FILE).exists():
        found = _read_json(folder / INDEX_FILE, "restore it").get("weight_map")
        names = list(found.values()) if isinstance(found, dict) else [found]
        for name in names:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise CheckpointError(
                    f"{folder / INDEX_FILE}: weight_map: {name!r} is not a .safetensors file of this "
                    f"folder; restore the index"
                )
    elif not (folder / WEIGHTS_FILE).exists() and (folder / "pytorch_model.bin").exists():
        raise CheckpointError(
            f"{folder / 'pytorch_model.bin'}: a pickle, which could run code; convert it with "
            f"transformers' AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    tensors: Tensors = {}
    for name in sorted(set(names)):
        try:
            files.open_regular(folder / name).close()
            tensors |= safetensors.torch.load_file(folder / name)
        except (OSError, safetensors.SafetensorError) as error:
            reason = describe_os_error(error)
            raise CheckpointError(f"{folder / name}: {reason}; download it again") from None
    return tensors


def _convert_weights(
    tensors: Tensors, hf_config: dict[str, Any], config: ModelConfig, folder: Path
) -> tuple[ModelConfig, Tensors]:
    """The weights by our names, in float32; settings that the tensors decide are corrected."""
    kind = hf_config["model_type"]
    outputs = [name for name in tensors if name.endswith("o_proj.bias")]
    if not config.bias and any(tensors[name].any() for name in outputs):
        config = config.model_copy(update={"bias": True})  # those of the MLP are 0
    absent = {"o_proj", "gate_proj", "up_proj", "down_proj"}
    if hf_config.get("mlp_bias") or kind in ("gpt2", "starcoder2"):
        absent = (
            set() if hf_config.get("use_bias", True) else absent | {"q_proj", "k_proj", "v_proj"}
        )
    weights: Tensors = {}
    used = {*outputs, "lm_head.weight"}
    for name, like in architectures.create_meta_tensors(config).items():
        their_name = architectures.hf_name(kind, name)
        bare = their_name.partition(".")[2]  # as in models that were saved without a head
        if their_name not in tensors and bare in tensors:
            their_name = bare
        if their_name in tensors:
            tensor = architectures.from_hf(kind, name, tensors[their_name])
            tensor = tensor[: len(like)] if name == "positions.weight" else tensor
            used.add(their_name)
        elif name.endswith(".bias") and name.split(".")[-2] in absent:
            tensor = torch.zeros(like.shape)
        else:
            raise CheckpointError(f"{folder}: tensor {their_name}: missing; download it again")
        weights[name] = _check_tensor(tensor, like, f"{folder}: tensor {their_name}")
    for name in tensors.keys() - used:
        if not name.endswith(BUFFER_SUFFIXES):
            raise CheckpointError(
                f"{folder}: tensor {name}: a {kind} has none; this is another architecture, which "
                f"gptmini does not have"
            )
    return config, weights


def _check_tensor(tensor: Tensor, like: Tensor, where: str) -> Tensor:
    if tensor.dtype not in FLOAT_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{where}: {kind}; use float32, float16 or bfloat16")
    if tensor.shape != like.shape:
        sizes = f"{tuple(tensor.shape)}, but config.json makes it {tuple(like.shape)}"
        raise CheckpointError(f"{where}: {sizes}; restore the original files")
    if not tensor.isfinite().all():
        raise CheckpointError(f"{where}: has values that are not finite; download it again")
    return tensor.float().contiguous().clone()


# -- writing ---------------------------------------------------------------------------------------


def write_folder(folder: Path, run: Run, kind: str, config: ModelConfig, weights: Tensors) -> None:
    """Write a folded model with its tokenizer; `kind` is its architecture."""
    folder.mkdir()
    tokenizer = run.tokenizer
    ends = {"bos_token_id": tokenizer.document_token, "eos_token_id": tokenizer.end_tokens[0]}
    contents = {
        "config.json": architectures.to_hf_config(config, kind) | ends,
        "generation_config.json": _generation_config(run),
        "tokenizer.json": tokenizer_json.to_tokenizer_json(tokenizer),
        "tokenizer_config.json": _tokenizer_config(tokenizer, config.context_length),
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        files.write_and_sync(folder / name, text.encode())
    files.write_and_sync(folder / "README.md", _build_model_card(run, kind).encode())
    shards: list[Tensors] = [{}]
    for name, tensor in architectures.to_hf(kind, config, weights).items():
        if (
            shards[-1]
            and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > MAX_SHARD_BYTES
        ):
            shards.append({})
        shards[-1][name] = tensor
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        many = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = many if len(shards) > 1 else WEIGHTS_FILE
        files.write_and_sync(folder / name, safetensors.torch.save(shard, {"format": "pt"}))
        places |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = {"total_size": sum(t.nbytes for shard in shards for t in shard.values())}
        index = {"metadata": total, "weight_map": places}
        files.write_and_sync(folder / INDEX_FILE, json.dumps(index, indent=2).encode())
    files.sync_directory(folder)


def _generation_config(run: Run) -> dict[str, Any]:
    """The run's sampling, and the tokens that end a text.

    transformers takes what is left out from defaults of its own, such as a top_k of 50.
    """
    tokenizer, sample = run.tokenizer, run.config.sample
    ends = tokenizer.end_tokens
    theirs: dict[str, Any] = {
        "bos_token_id": tokenizer.document_token,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": tokenizer.document_token,
        "max_new_tokens": sample.max_new_tokens,
        "do_sample": sample.temperature > 0,
        "repetition_penalty": sample.repetition_penalty,
    }
    if sample.temperature > 0:
        theirs["temperature"] = sample.temperature
        theirs["top_k"] = sample.top_k or 0  # 0: all
        theirs["top_p"] = sample.top_p or 1.0
        if sample.min_p is not None:
            theirs["min_p"] = sample.min_p
    bias = run.build_bias(sample)
    if bias is not None:
        banned = bias.isneginf()
        biased = (bias != 0) & ~banned
        theirs["suppress_tokens"] = banned.nonzero().flatten().tolist()
        theirs["sequence_bias"] = [
            [[token], float(bias[token])] for token in biased.nonzero().flatten().tolist()
        ]
    for key in ("presence_penalty", "frequency_penalty", "stop"):
        if getattr(sample, key):
            warn(f"sample.{key}: left out of generation_config.json, which has no such setting")
    return theirs


def _tokenizer_config(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    """The special tokens by their use, and the chat template of an imported model.

    Without a chat template, text that looks like a special token stays text, as in gptmini. A
    template writes special tokens as text, so with one it does not.
    """
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    document = names[tokenizer.document_token]
    theirs: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": document,
        "eos_token": names[tokenizer.end_tokens[0]],
        "pad_token": document,
        "padding_side": "left",  # so that a model continues the last token of a text
        "add_bos_token": False,
        "split_special_tokens": tokenizer.chat_template is None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    if tokenizer.chat_template is not None:
        theirs["chat_template"] = tokenizer.chat_template
    return theirs


def _build_model_card(run: Run, kind: str) -> str:
    """A short model card."""
    best = run.state.get("best") or {}
    facts = [
        f"{sum(p.numel() for p in run.model.parameters()):,} parameters, as a {kind}",
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
