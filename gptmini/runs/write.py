"""Writes a run of weights that are there already, such as imported ones."""

from dataclasses import asdict
from itertools import islice

from gptmini.config.settings import Config
from gptmini.console import iter_with_progress
from gptmini.model.gpt import create_undrawn
from gptmini.runs.directory import RunDirectory
from gptmini.runs.progress import Progress
from gptmini.runs.tensors import NamedTensors, Tensors
from gptmini.tokenizer.tokenizers import Tokenizer

# Weights of more bytes are written in several files, one at a time.
PART_BYTES = 50_000_000


def write_run(
    run: RunDirectory,
    config: Config,
    weights: NamedTensors,
    tokenizer: Tokenizer,
    source: str = "",
    corpus: str = "",
    saw_held_out: bool = False,
) -> None:
    """Write a run, at step 0, with weights that were trained elsewhere; `source` says where.

    `corpus` is the digest of the text that `config` goes on to train it on, if there is one;
    `saw_held_out` is that of Progress. The weights may be read while they are written: of a large
    model, no more is in memory than a file of PART_BYTES holds. A kill may leave half of a run, so
    callers write to a directory that gets its name at the end.
    """
    progress = Progress(corpus, tokenizer.fingerprint, source=source, saw_held_out=saw_held_out)
    run.create(config, tokenizer, config if corpus else None)
    parts = _split_into_parts(create_undrawn(config.model).state_dict())
    run.check_space(sum(sum(sizes.values()) for sizes in parts))
    remaining = iter(iter_with_progress(weights, "converting", sum(map(len, parts))))
    loaded = (dict(islice(remaining, len(names))) for names in parts)
    run.save_in_parts(asdict(progress), loaded, len(parts), {})


def _split_into_parts(tensors: Tensors) -> list[dict[str, int]]:
    """Split tensors into files, in order; each file is the bytes of its tensors by name."""
    parts: list[dict[str, int]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(parts[-1].values()) + tensor.nbytes > PART_BYTES:
            parts.append({})
        parts[-1][name] = tensor.nbytes
    return parts
