"""Writes a run of weights that are there already, such as imported ones."""

from dataclasses import asdict
from itertools import islice

from gptmini.config.settings import Config
from gptmini.console import iter_with_progress
from gptmini.model.gpt import create_meta_tensors
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.progress import Progress
from gptmini.runs.tensors import Manifest, NamedTensors, RowSlice, Tensors
from gptmini.tokenizer.tokenizers import Tokenizer

# Weights of more bytes are written in several files, as by several processes, one at a time.
PART_BYTES = 50_000_000


def write_run(
    run: RunDirectory, config: Config, weights: NamedTensors, tokenizer: Tokenizer, source: str = ""
) -> None:
    """Write a run, at step 0, with weights that were trained elsewhere; `source` says where.

    The weights may be read while they are written: of a large model, no more is in memory than a
    file of PART_BYTES holds. A kill may leave half of a run, so callers write to a directory that
    gets its name at the end.
    """
    progress = Progress("", tokenizer.fingerprint, source=source)
    run.create(config, tokenizer)
    parts = _split_into_parts(create_meta_tensors(config.model))
    run.check_space(sum(sum(sizes.values()) for sizes in parts))
    remaining = iter(iter_with_progress(weights, "converting", sum(map(len, parts))))
    if len(parts) == 1:
        run.save(Checkpoint(asdict(progress), dict(remaining), {}))
        return
    run.begin_save()
    manifest: Manifest = {}
    for number, names in enumerate(parts, 1):
        part = dict(islice(remaining, len(names)))
        slices = {name: RowSlice(tensor, 0, tuple(tensor.shape)) for name, tensor in part.items()}
        by_kind = {"model": slices, "optimizer": {}}
        manifest |= run.save_shard(0, number, len(parts), by_kind)
    run.finish_save(asdict(progress), manifest)


def _split_into_parts(metas: Tensors) -> list[dict[str, int]]:
    """Split tensors into files, in order; each file is the bytes of its tensors by name."""
    parts: list[dict[str, int]] = [{}]
    for name, meta in metas.items():
        if parts[-1] and sum(parts[-1].values()) + meta.nbytes > PART_BYTES:
            parts.append({})
        parts[-1][name] = meta.nbytes
    return parts
