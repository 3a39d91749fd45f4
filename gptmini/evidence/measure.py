"""What trained runs are worth and cost, measured alike, and whether differences mean anything."""

import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gptmini.console import say
from gptmini.evidence.evaluate import evaluate_run, held_out, whole_text
from gptmini.generate.engine import Engine
from gptmini.generate.native import open_engine
from gptmini.generate.run import Run, load
from gptmini.generate.texts import Text
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import metrics
from gptmini.text.tokens import Span

EVALUATED = ("loss", "loss_error", "bits_per_byte", "bits_per_byte_error", "accuracy")
STEPS = 32  # of decoding that are timed at a time
ROUNDS = 7
# Half-widths of a 95 % interval in standard errors, for 1 to 10 degrees of freedom (Student 1908).
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Measured:
    """A trained run. Losses are those of its best checkpoint, in float32; memory is in bytes.

    `text` names what they were measured on, `made_of` that and the model; `history` has what was
    logged at each evaluation: tokens, seconds and bits per byte.
    """

    path: str
    made_of: str
    text: str
    seed: int
    step: int
    loss: float
    loss_error: float | None
    bits_per_byte: float
    bits_per_byte_error: float | None
    accuracy: float
    tokens_per_second: float | None
    seconds: float
    peak_memory: int | None
    history: list[tuple[int, float, float]]


@dataclass
class Variant:
    """Runs that differ by their seed alone, and what they have in common."""

    name: str
    runs: list[Measured]
    parameters: int
    context_length: int
    cache_bytes_per_token: int
    cache_bytes: int  # at full context
    decode_tokens_per_second: dict[int, float] = field(default_factory=dict)  # by context

    def figures(self, key: str) -> list[float]:
        """A figure of every run that has it."""
        return [value for run in self.runs if (value := getattr(run, key)) is not None]


def measure(
    paths: dict[str, list[Path]], data: list[str] | None, cache: Path, known: Path
) -> list[Variant]:
    """Measure the runs of each variant on their held-out text, or on all of another.

    What the file `known` says of the same weights and text is not measured again, but for the
    speed of decoding, for which the variants take turns.
    """
    before = _known(known)
    variants, decoders = [], []
    for name, where in paths.items():
        runs = []
        for path in where:
            run = load(path, cache=cache, weights="float32")
            text = whole_text(run, data, cache) if data else held_out(run, cache)
            settings = run.config.data
            share = "" if data else f" {settings.validation} {settings.split}"
            runs.append(_measured(run, text, share, before))
        model = run.config.model
        decoders.append(open_engine(run.model, "bfloat16", 1, cache))
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
    _time_decoding(variants, decoders)
    return variants


def _known(file: Path) -> dict[str, dict[str, Any]]:
    """What was evaluated before, by what it was of."""
    try:
        runs = [
            one for variant in json.loads(file.read_bytes())["variants"] for one in variant["runs"]
        ]
        return {one["made_of"]: {key: one[key] for key in EVALUATED} for one in runs}
    except (OSError, ValueError, KeyError, TypeError):  # not there, or of another version
        return {}


def _measured(run: Run, text: list[Span], share: str, known: dict[str, dict[str, Any]]) -> Measured:
    """The figures of a run, what is known of it or measured on the text, a share of a file."""
    cut = ",".join(f"{one.tokens.path.stem}[{one.first}:{one.last}]" for one in text)
    made_of = hashlib.sha256(f"{run.fingerprint} {run.config.model} {cut}".encode()).hexdigest()
    if (found := known.get(made_of)) is None:
        say(f"compare: measuring {run.path}")
        found = evaluate_run(run, text).facts()
    lines = list(metrics(RunDirectory(run.path).metrics))
    speeds = [line["tokens_per_second"] for line in lines[1:] if "tokens_per_second" in line]
    contents = sorted({one.tokens.path.name.split("-")[0] for one in text})
    return Measured(
        path=str(run.path),
        made_of=made_of,
        text=",".join(contents) + share,
        seed=run.config.train.seed,
        step=run.step,
        **{key: found[key] for key in EVALUATED},
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=lines[-1]["seconds"] if lines else 0.0,
        peak_memory=max((line.get("peak_memory", 0) for line in lines), default=0) or None,
        history=[
            (line["tokens"], line["seconds"], line["val_bpb"])
            for line in lines
            if "val_bpb" in line
        ],
    )


def _time_decoding(variants: list[Variant], decoders: list[Engine]) -> None:
    """Time single steps at a quarter, half and all of the context: medians of turns."""
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for variant, decoder in zip(variants, decoders, strict=True):
            whole = variant.context_length
            for context in sorted(
                {max(2, whole // part) for part in (4, 2, 1)} if whole > 1 else ()
            ):
                speed = _decode_speed(decoder, context)
                speeds.setdefault((variant.name, context), []).append(speed)
    for variant in variants:
        variant.decode_tokens_per_second = {
            context: statistics.median(found)
            for (name, context), found in speeds.items()
            if name == variant.name
        }


@torch.inference_mode()
def _decode_speed(decoder: Engine, context: int) -> float:
    """Tokens per second of single steps, the last of which sees so many positions."""
    steps = min(STEPS, context - 1)
    text = Text(0, [0] * (context - steps), context)
    decoder([text])
    started = time.perf_counter()
    for _ in range(steps):
        text.context.append(0)
        decoder([text])
    return steps / (time.perf_counter() - started)


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over runs; None for one."""
    return statistics.stdev(values) if len(values) > 1 else None


class Difference(NamedTuple):
    """The difference of two means, and the half-width of its 95 % interval, if that is known."""

    gap: float
    half: float | None

    @property
    def within_spread(self) -> bool | None:
        """Whether the interval contains 0."""
        return None if self.half is None else abs(self.gap) <= self.half


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The difference of two means; its interval is Student's with one variance for both (1908).

    It is not known where there is one value each.
    """
    gap = statistics.mean(ours) - statistics.mean(theirs)
    freedom = len(ours) + len(theirs) - 2
    if freedom == 0:
        return Difference(gap, None)
    squares = sum(statistics.pvariance(values) * len(values) for values in (ours, theirs))
    error = (squares / freedom * (1 / len(ours) + 1 / len(theirs))) ** 0.5
    return Difference(gap, STUDENT[min(freedom, len(STUDENT)) - 1] * error)


def as_json(variants: list[Variant]) -> dict[str, Any]:
    """All of it as JSON data, with each variant held against the first."""
    first = variants[0].figures("bits_per_byte")
    found = []
    for variant in variants:
        ours = variant.figures("bits_per_byte")
        to_first = difference(ours, first)
        found.append(
            asdict(variant)
            | {
                "bits_per_byte": statistics.mean(ours),
                "bits_per_byte_spread": spread(ours),
                "to_first": to_first.gap,
                "to_first_95": to_first.half,
                "within_spread": to_first.within_spread,
            }
        )
    return {"variants": found}
