"""What the parts share: the options, configurations of the model, the peak of the GPU."""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from gptmini import files, fit, machine
from gptmini.config import yamlfile
from gptmini.config.load import find_config_file, validate
from gptmini.config.settings import Config
from gptmini.extras.cluster.cluster import ACCELERATORS
from gptmini.machine import Compute, pick_compute
from gptmini.plan.cost import count_training_flops
from gptmini.runs.log import read_metrics
from gptmini.tokenizer import bpe
from gptmini.tokenizer.bpe_tokenizer import create_bpe_tokenizer
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer

SMALL_MODEL = {"n_layer": 2, "n_head": 4, "d_model": 64, "context_length": 64}
GPT2_VOCABULARY = 50_257

Facts = Iterator[tuple[str, Any]]  # what a part finds, each with its name
Settings = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """The options of the command, and a folder that all parts share."""

    device: str
    small: bool
    folder: Path
    nanogpt: Path | None = None

    @property
    def compute(self) -> Compute:
        return pick_compute(self.device, "auto")

    @property
    def cache(self) -> Path:
        # What a small model is decoded by may be compiled already.
        return files.DEFAULT_CACHE_DIR if self.small else self.folder / "cache"

    def build_config(self, model: Settings | None = None, **train: Any) -> Config:
        """configs/gpt2-124m.yaml, or a small model of its kind, with some settings changed."""
        stated, _ = yamlfile.read_file(find_config_file("gpt2-124m"))
        tokenizer = self.write_tokenizer()
        sizes: Settings = {"vocab_size": load_tokenizer(tokenizer).vocab_size}
        text: Settings = {"validation": 0.02}
        steps: Settings = {"device": self.device, "compile": "off", "steps": 100}
        if self.small:
            sizes |= SMALL_MODEL
            text = {"validation": 0.1, "path": str(Path(__file__).parents[2] / "README.md")}
            steps |= {"batch_size": 8, "micro_batch_size": 4, "steps": 6}
        steps |= train
        # Log every step; evaluate and save only at the end.
        steps |= {"log_every": 1, "eval_every": steps["steps"], "save_every": steps["steps"]}
        changes: dict[str, Settings] = {
            "model": sizes | (model or {}),
            "tokenizer": {"kind": str(tokenizer)},
            "data": text,
            "train": steps | {"patience": None},
            "sample": {"max_new_tokens": 8},
        }
        return validate({name: stated.get(name, {}) | changes[name] for name in changes}, {})

    def fit(self, config: Config, name: str) -> list[Settings]:
        """Train a run of this name; return its metrics."""
        fit(config, self.folder / name, self.cache)
        return list(read_metrics(self.folder / name / "metrics.jsonl"))

    def write_tokenizer(self) -> Path:
        """Write a tokenizer and return its path: gpt2 if its files are here, else pairs of bytes.

        The pairs make a vocabulary of the same size.
        """
        path = self.folder / "tokenizer.json"
        if path.exists():
            return path
        known = os.environ.get("TIKTOKEN_CACHE_DIR")
        if known and any(Path(known).glob("*")) and not self.small:
            tokenizer = create_tokenizer("gpt2")
        else:
            size = 1000 if self.small else GPT2_VOCABULARY
            singles = [bytes([number]) for number in range(256)]
            pairs = sorted(itertools.product(range(256), repeat=2), key=max)  # ASCII first
            spellings = singles + [bytes(pair) for pair in pairs[: size - 257]]
            ranks = {spelling: rank for rank, spelling in enumerate(spellings)}
            special = {"<|endoftext|>": len(ranks)}
            tokenizer = create_bpe_tokenizer("pairs", bpe.WORD_PATTERN, ranks, special)
        files.atomic_write_bytes(path, tokenizer.to_json().encode())
        return path


def find_peak_flops() -> float | None:
    """Dense bfloat16 operations a second of this GPU by its maker, if we know it."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower().replace(" ", "")
    known = [accelerator for accelerator in ACCELERATORS if accelerator.name in name]
    if not known:
        return None
    longest = max(known, key=lambda accelerator: len(accelerator.name))  # l40s, not l4
    return 1e12 * longest.teraflops


def compute_speed(config: Config, seconds_per_step: float) -> dict[str, Any]:
    """Tokens per second, and the model's operations as a share of the GPU's peak (MFU)."""
    tokens_per_second = config.train.batch_size * config.seq_len / seconds_per_step
    peak = find_peak_flops()
    mfu = None
    if peak is not None:
        mfu = count_training_flops(config.model, config.seq_len) * tokens_per_second / peak
    return {
        "seconds_per_step": seconds_per_step,
        "tokens_per_second": tokens_per_second,
        "mfu": mfu,
    }


def time_repeats(compute: Compute, work: Callable[[], Any], repeats: int) -> float:
    """Return the mean seconds of a piece of work, once it has run before."""
    work()
    compute.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    compute.synchronize()
    return (time.perf_counter() - started) / repeats


def describe_error(error: Exception) -> Mapping[str, str]:
    """Record a failure of a driver, a compiler or memory in the place of figures."""
    return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def free_memory(device: str) -> None:
    """Forget what was compiled, and give the GPU's memory back, before the next measurement."""
    torch.compiler.reset()
    machine.release_freed_memory(torch.device(device))


def list_kernels(events: Iterable[Any], device: str) -> list[tuple[float, Any]]:
    """List what a profile took time in, the longest first, with its microseconds.

    On a GPU those are its kernels; the operations that launched them have the same times again. On
    a CPU they are the operations.
    """
    if device == "cuda":
        on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
        kernels = [
            (event.self_device_time_total, event)
            for event in on_gpu
            if not event.is_user_annotation
        ]
    else:
        kernels = [(event.self_cpu_time_total, event) for event in events]
    kernels = [kernel for kernel in kernels if kernel[0] > 0]
    return sorted(kernels, key=lambda kernel: -kernel[0])
