"""Measures trained runs: losses on a text, decoding speed, memory."""

import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gptmini.console import say
from gptmini.evidence.evaluate import evaluate_run, text_of
from gptmini.evidence.variants import Measured, Variant, numbers
from gptmini.generate.engine import Engine
from gptmini.generate.native import open_engine
from gptmini.generate.run import Run, load
from gptmini.generate.texts import Text
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import metrics
from gptmini.text.tokens import TokenFile

EVALUATED = ("loss", "loss_error", "bits_per_byte", "bits_per_byte_error", "accuracy")
STEPS = 32  # decoding steps per text
SECONDS = 0.05  # that a timing takes at least: shorter ones measure the scheduler
ROUNDS = 5


def measure(
    paths: dict[str, list[Path]], data: list[str] | None, cache: Path, earlier: Path
) -> list[Variant]:
    """Measure the runs of each variant on their held-out text, or on all of the text in `data`.

    Losses are taken from `earlier`, a compare.json, if they are there for the same weights and
    text. Decoding is always timed anew, the variants taking turns.
    """
    known = _known(earlier)
    variants, engines = [], []
    for name, folders in paths.items():
        runs = []
        for path in folders:
            run = load(path, cache=cache, weights="float32")
            runs.append(_measured(run, text_of(run, data, cache), known))
        model = run.config.model
        engines.append(open_engine(run.model, "bfloat16", 1, cache))
        variants.append(
            Variant(
                name,
                runs,
                cost.parameter_count(model),
                model.context_length,
                cost.cache_bytes(model, 1),
                cost.cache_bytes(model, model.context_length),
            )
        )
    _time_decoding(variants, engines)
    return variants


def _known(file: Path) -> dict[str, dict[str, Any]]:
    """Earlier evaluations, by the hash of model and text; empty if the file is unusable."""
    try:
        variants = json.loads(file.read_bytes())["variants"]
        runs = [run for variant in variants for run in variant["runs"]]
        return {run["made_of"]: {key: run[key] for key in EVALUATED} for run in runs}
    except (OSError, ValueError, KeyError, TypeError):  # missing, or of another version
        return {}


def _measured(run: Run, text: list[TokenFile], known: dict[str, dict[str, Any]]) -> Measured:
    """The figures of one run on a text."""
    cut = ",".join(file.path.stem for file in text)
    made_of = hashlib.sha256(f"{run.fingerprint} {run.config.model} {cut}".encode()).hexdigest()
    if (evaluation := known.get(made_of)) is None:
        say(f"compare: evaluating {run.path}")
        evaluation = evaluate_run(run, text).facts()
    lines = list(metrics(RunDirectory(run.path).metrics))
    speeds = [speed for (speed,) in numbers(lines, "tokens_per_second")[1:]]
    seconds = [second for (second,) in numbers(lines, "seconds")]
    peaks = [peak for (peak,) in numbers(lines, "peak_memory")]
    contents = sorted({_content(file) for file in text})
    return Measured(
        path=str(run.path),
        made_of=made_of,
        text=",".join(contents),
        seed=run.config.train.seed,
        step=run.step,
        **{key: evaluation[key] for key in EVALUATED},
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds[-1] if seconds else 0.0,
        peak_memory=max(peaks, default=0) or None,
        history=numbers(lines, "tokens", "seconds", "val_bpb"),
    )


def _content(file: TokenFile) -> str:
    """A name for the text of a token file.

    A file of the cache is named after its text, then its tokenizer, which may differ. The name of
    prepared tokens ends in the span held out of them.
    """
    name = file.path.stem
    return name if file.prepared else name.split("-")[0]


def _time_decoding(variants: list[Variant], engines: list[Engine]) -> None:
    """Time decoding at a quarter, half and all of the context: medians over rounds.

    A context of 1 has no step to time.
    """
    rounds: list[dict[int, list[float]]] = [{} for _ in variants]
    for _ in range(ROUNDS):
        for variant, engine, speeds in zip(variants, engines, rounds, strict=True):
            full = variant.context_length
            for context in sorted({max(2, full // part) for part in (4, 2, 1) if full > 1}):
                speeds.setdefault(context, []).append(_decode_speed(engine, context))
    for variant, speeds in zip(variants, rounds, strict=True):
        variant.decode_tokens_per_second = {
            context: statistics.median(values) for context, values in speeds.items()
        }


@torch.inference_mode()
def _decode_speed(engine: Engine, context: int) -> float:
    """Tokens per second of single steps, the last of which sees `context` positions.

    Short contexts are decoded several times, so that a hiccup of the machine does not decide.
    """
    steps = min(STEPS, context - 1)
    texts, seconds = 0, 0.0
    while texts == 0 or seconds < SECONDS:
        text = Text(texts, [0] * (context - steps), context)
        engine([text])  # reads the prompt; not timed
        started = time.perf_counter()
        for _ in range(steps):
            text.context.append(0)
            engine([text])
        seconds += time.perf_counter() - started
        texts += 1
    return texts * steps / seconds
