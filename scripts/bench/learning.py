"""Compare what training recipes learn from the same tokens: python scripts/bench learning

Every recipe reads the same windows in the same order, with the same tokenizer, batch, number of
steps, layers and width. It is measured by bits per byte of the end of the text (a tenth, at most
300,000 characters), which nothing is chosen on. A regime is how often the text is read: a quarter,
once, twelve times; the text is cut to the length that this takes. Each of the other recipes is
compared with the first, over pairs of equal seeds.

PPMd, a compressor of texts, is measured in two ways. PPMd-reading-on learns from the end of the
text while it is measured. A model does not, so its fair peer is PPMd, which comes to each window as
it was after the training text.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyppmd
import torch

import gptmini
from bench import nanochat
from bench.results import Extent, Table
from gptmini import files
from gptmini.config.load import validate
from gptmini.config.settings import Config, DataConfig
from gptmini.config.yamlfile import parse_assignment
from gptmini.data.corpus import prepare_corpus, prepare_text
from gptmini.data.text import find_text
from gptmini.machine import pick_compute
from gptmini.model.kernels import cross_entropy_
from gptmini.runs.log import read_metrics
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from gptmini.train.batches import Batches, iter_validation_batches
from gptmini.train.evaluate import evaluate
from gptmini.train.evaluate_run import PPMD_MEMORY, PPMD_ORDERS
from gptmini.train.seeds import seed_from

Settings = dict[str, Any]
MAX_TEXT_LENGTH = 14_000_000  # characters
MAX_TEST_LENGTH = 300_000
VALIDATION = 0.02  # of what may be trained on: gptmini needs some
BATCH_SIZE = 8
SEQ_LEN = 256
EPOCHS = {"fresh": 0.25, "once": 1.0, "many": 12.0}
TEXTS = {  # path and tokenizer; others are given as NAME=PATH:TOKENIZER
    "docs": ("builtin:python-docs", "bpe"),
    "code": ("builtin:python-code", "bpe"),
    "numpy": (f"{Path(np.__file__).parent}/**/*.py", "bpe"),
}
NANOGPT: Settings = {
    "model": {
        "attention": {"qk_norm": False},
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "bias": False,
        "tie_embeddings": True,
        "dropout": 0.0,
    },
    "train": {
        "optimizer": "adamw",
        "lr": 1e-3,
        "min_lr": 1e-4,
        "schedule": "cosine",
        "cooldown": 1.0,
        "betas": [0.9, 0.99],
        "weight_decay": 0.1,
    },
}
# Recipes of settings; those named nanochat and PPMd have a model of their own.
RECIPES: dict[str, Settings] = {"gptmini": {}, "nanogpt": NANOGPT}


@dataclass(frozen=True)
class Trial:
    """One training: a recipe on a text in a regime, at a size, from a seed."""

    text: str
    regime: str
    size: str
    recipe: str
    seed: int
    steps: int


@dataclass(frozen=True)
class PreparedText:
    """A text in files: what may be trained on, what is measured on, and a tokenizer for both."""

    training: Path
    test: Path
    tokenizer: Path
    bytes_per_token: float


def prepare(name: str, path: str, tokenizer: str, folder: Path) -> PreparedText:
    """Write the training and the test part of a text and its tokenizer into a folder."""
    training = folder / f"{name}.txt"
    test = folder / f"{name}-test.txt"
    saved = folder / f"{name}-tokenizer.json"
    source = find_text([path], DataConfig(path=[path]))
    text = ""
    for chunk in source.iter_chunks():
        text += chunk.text
        if len(text) > MAX_TEXT_LENGTH:
            break
    held_out = min(len(text) // 10, MAX_TEST_LENGTH)
    training.write_text(text[:-held_out], "utf-8")
    test.write_text(text[-held_out:], "utf-8")
    if not saved.exists():
        size = 1024 if tokenizer == "bpe" else None
        learned = create_tokenizer(tokenizer, size, [text[:-held_out]])
        files.atomic_write_bytes(saved, learned.to_json().encode())
    sample = text[:1_000_000]
    n_tokens = len(load_tokenizer(saved).encode(sample))
    return PreparedText(training, test, saved, len(sample.encode()) / n_tokens)


def cut_text(text: PreparedText, trial: Trial, folder: Path) -> tuple[Path, int]:
    """Cut the training part to what the regime takes; return its file and the number of steps."""
    data = text.training.read_bytes()
    epochs = EPOCHS[trial.regime]
    step_bytes = BATCH_SIZE * SEQ_LEN * text.bytes_per_token
    steps = min(trial.steps, int(epochs * len(data) / step_bytes))
    kept = data[: math.ceil(steps * step_bytes / epochs / (1 - VALIDATION))]
    path = folder / f"{trial.text}-{trial.regime}-{trial.steps}.txt"
    if not path.exists():  # another trial may be reading it
        files.atomic_write_bytes(path, kept.decode("utf-8", "ignore").encode())
    return path, steps


def build_config(trial: Trial, recipe: Settings, text: PreparedText, folder: Path) -> Config:
    """The configuration of a trial: what all recipes share, and the settings of its own."""
    path, steps = cut_text(text, trial, folder)
    n_layer, d_model = map(int, trial.size.split("x"))
    shared: dict[str, Settings] = {
        "data": {"path": [str(path)], "validation": VALIDATION},
        "tokenizer": {"kind": str(text.tokenizer)},
        "model": {
            "n_layer": n_layer,
            "n_head": d_model // 32,
            "d_model": d_model,
            "context_length": SEQ_LEN,
        },
        "train": {
            "steps": steps,
            "batch_size": BATCH_SIZE,
            "seed": trial.seed,
            "eval_every": steps,
            "save_every": steps,
            "compile": "off",
            "device": "cpu",
        },
    }
    if "warmup_steps" not in recipe.get("train", {}) and trial.recipe == "nanogpt":
        shared["train"]["warmup_steps"] = min(100, steps // 10)
    for section, settings in recipe.items():
        shared.setdefault(section, {}).update(settings)
    return validate(shared, {})


def train(trial: Trial, config: Config, text: PreparedText, folder: Path) -> Settings:
    """Train a recipe; return its bits per byte on the test part and the seconds of its updates."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ["GPTMINI_CACHE"] = str(folder / "cache")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if trial.recipe == "nanochat":
            found = train_nanochat(config, text)
        elif trial.recipe.startswith("PPMd"):
            found = train_ppmd(config, trial, text)
        else:
            found = train_gptmini(config, text, Path(scratch) / "run")
    return found


def train_gptmini(config: Config, text: PreparedText, out: Path) -> Settings:
    """Train by `gptmini.fit`, and evaluate the last weights."""
    gptmini.fit(config, out)
    last = list(read_metrics(out / "metrics.jsonl"))[-1]
    run = gptmini.load(out, "cpu", "float32", step=config.train.steps)
    evaluation = gptmini.evaluate(run, str(text.test))
    return {
        "bits_per_byte": evaluation.bits_per_byte,
        "seconds": last["seconds"],
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
    }


def train_nanochat(config: Config, text: PreparedText) -> Settings:
    """Train nanochat's model by its own optimizer on the same windows, and evaluate it."""
    corpus = prepare_corpus(config)
    vocab_size = corpus.tokenizer.vocab_size
    settings = config.train
    torch.manual_seed(seed_from(settings.seed))
    model = nanochat.Nanochat(
        vocab_size, config.model.n_layer, config.model.n_head, config.model.d_model, SEQ_LEN
    )
    optimizer = nanochat.NanochatOptimizer(model, settings.steps)
    batches = Batches(corpus.training, None, SEQ_LEN, BATCH_SIZE, settings.seed)
    compute = pick_compute("cpu", "auto")
    started = time.perf_counter()
    for step in range(settings.steps):
        tokens, targets = batches.get_batch(step)  # (B, T) each
        with compute.autocast():
            logits = model.compute_logits(model.forward_hidden(tokens))  # (B, T, V)
        cross_entropy_(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step(step)
    seconds = time.perf_counter() - started
    test = prepare_text(DataConfig(path=[str(text.test)]), corpus.tokenizer)
    evaluation = evaluate(
        model,  # type: ignore[arg-type] # it has what `evaluate` calls
        iter_validation_batches([test], SEQ_LEN, BATCH_SIZE),
        corpus.tokenizer.compute_byte_lengths(),
        pick_compute("cpu", "float32"),
    )
    return {
        "bits_per_byte": evaluation.bits_per_byte,
        "seconds": seconds,
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }


def train_ppmd(config: Config, trial: Trial, text: PreparedText) -> Settings:
    """Have PPMd read as much of the text as a recipe reads, and then the test part."""
    (path,) = config.data.path
    training = Path(path).read_bytes()
    training = training[: int(len(training) * min(1.0, EPOCHS[trial.regime]))]
    test = text.test.read_bytes()
    reads_on = trial.recipe == "PPMd-reading-on"
    window = len(test) if reads_on else round(SEQ_LEN * text.bytes_per_token)
    bits, seconds = measure_ppmd(training, test, window)
    return {"bits_per_byte": bits, "seconds": seconds}


def measure_ppmd(training: bytes, test: bytes, window: int) -> tuple[float, float]:
    """Measure the bits per byte of PPMd, which reads each window after the training text alone.

    Return the seconds in which it read the training text, too.
    """
    windows = [test[start : start + window] for start in range(0, len(test), window)]
    found = []
    for order in PPMD_ORDERS:
        encoder = pyppmd.Ppmd7Encoder(order, PPMD_MEMORY)
        started = time.perf_counter()
        encoder.encode(training)
        seconds = time.perf_counter() - started
        end, *ends = (count_bytes(encoder, text) for text in (b"", *windows))
        found.append((8 * (sum(ends) - len(ends) * end) / len(test), seconds))
    return min(found)


def count_bytes(encoder: pyppmd.Ppmd7Encoder, text: bytes) -> int:
    """Count the bytes to the end of a text, in a copy of this process: the encoder stays."""
    reading, writing = os.pipe()
    copy = os.fork()
    if not copy:
        os.write(writing, str(len(encoder.encode(text)) + len(encoder.flush())).encode())
        os._exit(0)
    os.waitpid(copy, 0)
    os.close(writing)
    answer = os.read(reading, 20)
    os.close(reading)
    return int(answer)


def parse_recipes(names: str, more: list[str]) -> dict[str, Settings]:
    """Collect the named recipes and those given as NAME:KEY=VALUE:..."""
    recipes = {name: RECIPES.get(name, {}) for name in names.split(",") if name}
    for written in more:
        name, *pairs = written.split(":")
        settings: Settings = {}
        for pair in pairs:
            (section, *keys), value = parse_assignment(pair)
            target = settings.setdefault(str(section), {})
            for key in keys[:-1]:
                target = target.setdefault(key, {})
            target[keys[-1]] = value
        recipes[name] = settings
    return recipes


def parse_texts(names: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name, path and tokenizer of each text."""
    for written in names.split(","):
        if "=" not in written:
            yield written, TEXTS[written]
            continue
        name, _, rest = written.partition("=")
        path, _, tokenizer = rest.rpartition(":")
        yield name, (path, tokenizer)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", metavar="NAME=PATH:TOKENIZER,...", help=", ".join(TEXTS))
    parser.add_argument("--recipes", help="gptmini, nanochat, nanogpt, PPMd, PPMd-reading-on")
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME:KEY=VALUE:...")
    parser.add_argument("--regimes", help=", ".join(EPOCHS))
    parser.add_argument("--sizes", help="layers x width, such as 3x128,4x256")
    parser.add_argument("--seeds")
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")


# What is compared, unless options say otherwise.
QUICK: Settings = {
    "texts": "numpy",
    "recipes": "gptmini,nanochat,PPMd,PPMd-reading-on",
    "regimes": "fresh,once",
    "sizes": "3x128",
    "seeds": "1337,1338",
    "steps": 400,
}
OTHERS: dict[Extent, Settings] = {
    "trial": {"sizes": "2x32", "steps": 4, "seeds": "1337", "regimes": "fresh"},
    "quick": {},
    "full": {"texts": "docs,code,numpy", "regimes": "fresh,once,many", "seeds": "1337,1338,1339"},
}


def measure(
    extent: Extent, recipe: Sequence[str] = (), jobs: int = 2, **given: Any
) -> Iterator[Table]:
    chosen = QUICK | OTHERS[extent] | {key: value for key, value in given.items() if value}
    recipes = parse_recipes(chosen["recipes"], list(recipe))
    texts = dict(parse_texts(chosen["texts"]))
    trials = [
        Trial(text, regime, size, name, int(seed), chosen["steps"])
        for seed in chosen["seeds"].split(",")
        for size in chosen["sizes"].split(",")
        for regime in chosen["regimes"].split(",")
        for text in texts
        for name in recipes
    ]
    base, *others = recipes
    shown = [*recipes, *(f"{other} / {base}" for other in others)]
    learned = Table("learning", "text, read, layers x width; bits per byte", shown, 4)
    seconds = Table("learning seconds", "seconds of updates", shown)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepared = {
            name: prepare(name, path, tokenizer, folder)
            for name, (path, tokenizer) in texts.items()
        }
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            waiting = []
            for trial in trials:
                text = prepared[trial.text]
                config = build_config(trial, recipes[trial.recipe], text, folder)
                waiting.append(pool.submit(train, trial, config, text, folder))
            for trial, future in zip(trials, waiting, strict=True):  # so that seeds are in order
                found = future.result()
                row = f"{trial.text}, {trial.regime}, {trial.size}"
                learned.append(row, trial.recipe, found["bits_per_byte"])
                seconds.append(row, trial.recipe, found["seconds"])
    yield from (learned, seconds)
