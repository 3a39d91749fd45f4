"""Makes a run of a pretrained model: a folder in Hugging Face's format, a GGUF file, or a name."""

import re
from pathlib import Path
from typing import Any

from gptmini import files
from gptmini.config.settings import Config, ModelConfig, SampleConfig, TokenizerConfig, TrainConfig
from gptmini.console import show_elapsed
from gptmini.data.hub import HubName
from gptmini.extras.interop.gguf_reader import read_gguf
from gptmini.extras.interop.hub_model import fetch_model, parse_model_name
from gptmini.extras.interop.huggingface import read_model, read_sampling, read_tokenizer
from gptmini.generate.run import Run, load_run
from gptmini.runs.directory import RunDirectory
from gptmini.runs.tensors import NamedTensors
from gptmini.runs.write import write_run
from gptmini.tokenizer.tokenizers import Tokenizer

# Fine-tuning halves this learning rate, so its peak is 2e-4 (scripts/LOG.md: Fine-tune a published
# model, or train a new one?).
FINETUNE_SETTINGS: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 4e-4,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "batch_size": 4,
}
# A whole context of 2048 in each of 16 rows would take minutes per step on a CPU.
FINETUNE_ROW_LENGTH = 256


def import_model(source: str | Path, out: str | Path, context_length: int | None = None) -> Run:
    """Import a folder in Hugging Face's format, or a GGUF file, as a run at step 0.

    `source` may also name a model of the Hugging Face Hub, as OWNER/NAME. The run appears at `out`
    whole or not at all. Its context is the model's, at most 2048; `context_length` overrides that.
    Raises CheckpointError or DataError, which name the file and key, for whatever gptmini cannot
    represent.
    """
    out = Path(out)
    write_imported_run(parse_model_name(str(source)) or Path(source), out, context_length)
    return load_run(out, weights="float32")


def choose_run_name(source: HubName | Path) -> str:
    """Choose how a run of the model is called."""
    path = source.resolve() if isinstance(source, Path) else Path(source.path or source.name)
    return re.sub(r"(?i)\.gguf$", "", path.name)


def write_imported_run(
    source: HubName | Path, out: Path, context_length: int | None
) -> tuple[ModelConfig, Tokenizer]:
    """Write the run of `import_model` without loading it; return its model's settings."""
    with files.atomic_output(out) as partial:
        if isinstance(source, HubName):
            source, path = fetch_model(source)
        else:
            path = source
            source = source.resolve()  # the run may be moved, and remembers where it came from
        with show_elapsed("reading and converting"):
            config, weights, tokenizer = _read_model(path, context_length)
            seq_len = min(FINETUNE_ROW_LENGTH, config.context_length)
            settings = Config(
                model=config,
                tokenizer=TokenizerConfig(kind=tokenizer.kind),
                sample=read_sampling(path) if path.is_dir() else SampleConfig(),
                train=TrainConfig(**FINETUNE_SETTINGS, seq_len=seq_len),
            )
            write_run(RunDirectory(partial), settings, weights, tokenizer, str(source))
    return config, tokenizer


def _read_model(
    source: Path, context_length: int | None
) -> tuple[ModelConfig, NamedTensors, Tokenizer]:
    if source.suffix.lower() == ".gguf":
        return read_gguf(source, context_length)
    config, weights = read_model(source, context_length)
    assert config.vocab_size is not None
    return config, weights, read_tokenizer(source, config.vocab_size)
