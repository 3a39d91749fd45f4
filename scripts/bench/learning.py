"""Compare what training recipes learn from the same tokens.

python scripts/bench learning run RESULTS.jsonl [--texts code,NAME=PATH:TOKENIZER,...]
    [--recipes gptmini,nanochat,...] [--recipe NAME:KEY=VALUE:...] [--regimes fresh,once,many]
    [--sizes 3x128,4x256] [--seeds 1337,1338,1339] [--steps 400] [--jobs 2]
python scripts/bench learning table RESULTS.jsonl [--beside gptmini]

Every recipe reads the same windows in the same order, with the same tokenizer, batch, number of
steps, layers and width. It is measured by bits per byte of the end of the text (a tenth, at most
300,000 characters), which nothing is chosen on. A regime is how often the text is read: a quarter,
once, twelve times; the text is cut to the length that this takes. Each result is a line of
RESULTS.jsonl; those that are there already are not repeated. `table` gives the mean over seeds, and
the difference to one recipe with its interval over pairs of equal seeds.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import gptmini
from bench import nanochat
from gptmini import files
from gptmini.config.load import validate
from gptmini.config.settings import Config, DataConfig
from gptmini.config.yamlfile import parse_assignment
from gptmini.data.corpus import prepare_corpus, prepare_text
from gptmini.data.sources import find_source
from gptmini.extras.compare.statistics import conclude, estimate_difference
from gptmini.machine import pick_compute
from gptmini.model.kernels import cross_entropy_
from gptmini.runs.log import read_metrics
from gptmini.tokenizer.load import create_tokenizer, load_tokenizer
from gptmini.train.batches import Batches, iter_validation_batches, seed_from
from gptmini.train.evaluate import evaluate

Settings = dict[str, Any]
MAX_TEXT_LENGTH = 14_000_000  # characters
MAX_TEST_LENGTH = 300_000
VALIDATION = 0.02  # of what may be trained on: gptmini needs some
BATCH_SIZE = 8
SEQ_LEN = 256
NOTABLE = 0.01  # a difference in bits per byte that the number of seeds should show
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
# Recipes of settings; those named nanochat have a model and a loop of their own.
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
    source = find_source([path], DataConfig(path=[path]))
    text = ""
    for chunk in source.iter_checked_chunks():
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


def measure(trial: Trial, recipe: Settings, text: PreparedText, folder: Path) -> Settings:
    """Train a recipe; return its bits per byte on the test part and the seconds of its updates."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = build_config(trial, recipe, text, folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if trial.recipe.startswith("nanochat"):
            found = train_nanochat(config, trial, text, folder / "cache")
        else:
            found = train_gptmini(config, text, Path(scratch) / "run", folder / "cache")
    return asdict(trial) | found


def train_gptmini(config: Config, text: PreparedText, out: Path, cache: Path) -> Settings:
    """Train by `gptmini.fit`, and evaluate the last weights."""
    gptmini.fit(config, out, cache)
    last = list(read_metrics(out / "metrics.jsonl"))[-1]
    run = gptmini.load(out, "cpu", "float32", cache, step=config.train.steps)
    evaluation = gptmini.evaluate(run, str(text.test), cache=cache)
    return {
        "bits_per_byte": evaluation.bits_per_byte,
        "seconds": last["seconds"],
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
    }


def train_nanochat(config: Config, trial: Trial, text: PreparedText, cache: Path) -> Settings:
    """Train nanochat's model by its own optimizer on the same windows, and evaluate it."""
    corpus = prepare_corpus(config, cache)
    vocab_size = corpus.tokenizer.vocab_size
    settings = config.train
    torch.manual_seed(seed_from(settings.seed))
    model = nanochat.Nanochat(
        vocab_size,
        config.model.n_layer,
        config.model.n_head,
        config.model.d_model,
        SEQ_LEN,
        plain=trial.recipe == "nanochat-plain",
    )
    optimizer = nanochat.NanochatOptimizer(model, settings.steps)
    batches = Batches(corpus.training, None, SEQ_LEN, BATCH_SIZE, settings.seed)
    started = time.perf_counter()
    for step in range(settings.steps):
        tokens, targets = batches.get_batch(step)  # (B, T) each
        logits = model.compute_logits(model.forward_hidden(tokens))  # (B, T, V)
        cross_entropy_(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step(step)
    seconds = time.perf_counter() - started
    test = prepare_text(DataConfig(path=[str(text.test)]), corpus.tokenizer, cache)
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


def run_trials(options: argparse.Namespace) -> None:
    """Train whatever is not among the results yet, several at a time."""
    recipes = parse_recipes(options)
    texts = dict(parse_texts(options.texts))
    done = {tuple(result[key] for key in KEYS) for result in read_results(options.results)}
    trials = [
        Trial(text, regime, size, recipe, int(seed), options.steps)
        for seed in options.seeds.split(",")
        for size in options.sizes.split(",")
        for regime in options.regimes.split(",")
        for text in texts
        for recipe in recipes
    ]
    trials = [trial for trial in trials if tuple(asdict(trial).values()) not in done]
    options.folder.mkdir(parents=True, exist_ok=True)
    prepared = {
        name: prepare(name, path, tokenizer, options.folder)
        for name, (path, tokenizer) in texts.items()
    }
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = [
            pool.submit(measure, trial, recipes[trial.recipe], prepared[trial.text], options.folder)
            for trial in trials
        ]
        for future in as_completed(waiting):
            result = future.result()
            with options.results.open("a", encoding="utf-8") as out:
                out.write(json.dumps(result) + "\n")
            print(" ".join(str(result[key]) for key in (*KEYS, "bits_per_byte")), flush=True)


KEYS = ("text", "regime", "size", "recipe", "seed", "steps")


def parse_recipes(options: argparse.Namespace) -> dict[str, Settings]:
    """Collect the named recipes and those given as NAME:KEY=VALUE:..."""
    recipes = {name: RECIPES.get(name, {}) for name in options.recipes.split(",") if name}
    for written in options.recipe:
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


def read_results(path: Path) -> list[Settings]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def print_table(options: argparse.Namespace) -> None:
    """Print a row for each text, regime and size, and a column for each recipe."""
    results = read_results(options.results)
    recipes = list(dict.fromkeys(result["recipe"] for result in results))
    others = [recipe for recipe in recipes if recipe != options.beside]
    cells: dict[tuple[str, str, str, int], dict[str, dict[int, Settings]]] = {}
    for result in results:
        place = (result["text"], result["regime"], result["size"], result["steps"])
        by_recipe = cells.setdefault(place, {})
        by_recipe.setdefault(result["recipe"], {})[result["seed"]] = result
    print(f"| text, regime, size, steps | {options.beside} | {' | '.join(others)} |")
    print("|---" * (len(recipes) + 1) + "|")
    for place, by_recipe in cells.items():
        ours = get_figures(by_recipe.get(options.beside, {}), "bits_per_byte")
        row = [", ".join(map(str, place)), f"{fmean(ours.values()):.4f}" if ours else "-"]
        for recipe in others:
            theirs = get_figures(by_recipe.get(recipe, {}), "bits_per_byte")
            row.append(describe_difference(theirs, ours))
        print(f"| {' | '.join(row)} |")
    print_seconds(cells, recipes, options.beside)


def describe_difference(theirs: dict[int, float], ours: dict[int, float]) -> str:
    """Describe the mean of a recipe and its difference to ours, with its interval if known."""
    if not theirs or not ours:
        return "-"
    mean = fmean(theirs.values())
    (difference,) = conclude([estimate_difference(theirs, ours)], NOTABLE)
    text = f"{mean:.4f} ({difference.difference:+.4f}"
    if difference.half_width is not None:
        text += f" ± {difference.half_width:.4f}"
    return text + ")"


def print_seconds(
    cells: dict[tuple[str, str, str, int], dict[str, dict[int, Settings]]],
    recipes: list[str],
    beside: str,
) -> None:
    """Print the time of a step of each recipe as a multiple of ours, by size."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for (_, _, size, _), by_recipe in cells.items():
        ours = get_figures(by_recipe.get(beside, {}), "seconds")
        for recipe in recipes:
            theirs = get_figures(by_recipe.get(recipe, {}), "seconds")
            for seed in ours.keys() & theirs.keys():
                ratios.setdefault((size, recipe), []).append(theirs[seed] / ours[seed])
    print(f"\nSeconds of updates, as a multiple of those of {beside} (mean):\n")
    for (size, recipe), values in ratios.items():
        print(f"- {size}, {recipe}: {fmean(values):.2f}")


def get_figures(results: dict[int, Settings], key: str) -> dict[int, float]:
    """Get a figure of each seed."""
    return {seed: result[key] for seed, result in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train what is not among the results yet")
    run.add_argument("results", type=Path)
    run.add_argument("--texts", default=",".join(TEXTS))
    run.add_argument("--recipes", default="gptmini,nanochat,nanochat-plain,nanogpt")
    run.add_argument("--recipe", action="append", default=[], help="NAME:KEY=VALUE:...")
    run.add_argument("--regimes", default=",".join(EPOCHS))
    run.add_argument("--sizes", default="3x128,4x256")
    run.add_argument("--seeds", default="1337,1338,1339")
    run.add_argument("--steps", type=int, default=400, help="at most")
    run.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    run.add_argument("--folder", type=Path, default=Path("runs/learning"), help="for texts, tokens")
    run.set_defaults(action=run_trials)
    table = commands.add_parser("table", help="compare the results")
    table.add_argument("results", type=Path)
    table.add_argument("--beside", default="gptmini", help="the recipe to compare with")
    table.set_defaults(action=print_table)
    options = parser.parse_args()
    options.action(options)
