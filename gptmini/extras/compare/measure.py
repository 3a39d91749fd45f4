"""Measures trained runs for a comparison: losses on a text, decoding speed, memory."""

import statistics
import time
from pathlib import Path

import torch

from gptmini.console import say
from gptmini.data.token_file import TokenFile
from gptmini.extras.compare.variants import RunMeasurement, Variant
from gptmini.generate.engine import Engine, open_engine
from gptmini.generate.run import Run, load_run
from gptmini.generate.sequence import Sequence
from gptmini.machine import pick_device
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics, select_numbers
from gptmini.train.evaluate_run import Split, evaluate_run, load_text

DECODE_STEPS_PER_TEXT = 32
MIN_TIMING_SECONDS = 0.05  # a shorter timing measures the scheduler of the machine
TIMING_ROUNDS = 5


def measure_variants(
    paths: dict[str, list[Path]], data: list[str] | None, cache: Path, split: Split = "validation"
) -> list[Variant]:
    """Measure the runs of each variant on a held-out part, or on all of the text in `data`.

    If runs have windows of different lengths, the windows of all overlap by half, so that each
    target has at least half a window before it, or everything there is. Decoding is timed with the
    variants taking turns.
    """
    configs = [RunDirectory(path).load_config() for folders in paths.values() for path in folders]
    overlap = len({config.seq_len for config in configs}) > 1
    variants = []
    engines = []
    for name, folders in paths.items():
        runs = []
        for path in folders:
            run = load_run(path, pick_device("auto").type, "float32", cache)
            text = load_text(run, data, cache, split)
            runs.append(_measure_run(run, text, None if data else split, overlap))
        # The runs of a variant differ only by seed: the last one stands for all.
        model_config = run.config.model
        engines.append(open_engine(run.model, 1, "bfloat16", cache))
        variants.append(
            Variant(
                name=name,
                runs=runs,
                parameters=cost.count_parameters(model_config),
                context_length=model_config.context_length,
                cache_bytes_per_token=cost.count_cache_bytes(model_config, 1),
                cache_bytes=cost.count_cache_bytes(model_config, model_config.context_length),
            )
        )
    _time_decoding(variants, engines)
    return variants


def _measure_run(
    run: Run, text: list[TokenFile], split: Split | None, overlap: bool
) -> RunMeasurement:
    """Measure one run on a text, in windows that lie side by side or overlap by half."""
    seq_len = run.config.seq_len
    stride = -(-seq_len // 2) if overlap else seq_len
    say(f"compare: evaluating {run.path}")
    evaluation = evaluate_run(run, text, stride=stride)
    lines = list(read_metrics(RunDirectory(run.path).metrics_file))
    speeds = [speed for (speed,) in select_numbers(lines, "tokens_per_second")]
    speeds = speeds[1:]  # the first includes the start of the run
    seconds = [second for (second,) in select_numbers(lines, "seconds")]
    peaks = [peak for (peak,) in select_numbers(lines, "peak_memory")]
    return RunMeasurement(
        path=str(run.path),
        text=",".join(sorted({_identify_text(file) for file in text})),
        split=split,
        seq_len=seq_len,
        stride=stride,
        seed=run.config.train.seed,
        step=run.step,
        loss=evaluation.loss,
        loss_half_width=evaluation.loss_half_width,
        bits_per_byte=evaluation.bits_per_byte,
        bits_per_byte_half_width=evaluation.bits_per_byte_half_width,
        accuracy=evaluation.accuracy,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds[-1] if seconds else 0.0,
        peak_memory=max(peaks, default=0) or None,
        history=select_numbers(lines, "tokens", "seconds", "val_bpb"),
    )


def _identify_text(file: TokenFile) -> str:
    """Return a name for the text of a token file, whatever its tokenizer.

    The file is named after its text, then its tokenizer.
    """
    return file.path.stem.split("-")[0]


def _time_decoding(variants: list[Variant], engines: list[Engine]) -> None:
    """Time decoding at a quarter, half and all of the context, the variants taking turns."""
    for _ in range(TIMING_ROUNDS):
        for variant, engine in zip(variants, engines, strict=True):
            speeds = variant.decode_tokens_per_second
            for context in _choose_contexts(variant.context_length):
                speeds.setdefault(context, []).append(_measure_decode_speed(engine, context))


def _choose_contexts(full: int) -> list[int]:
    """Return a quarter, half and all of a context, in order; a context of 1 has no step to time."""
    if full == 1:
        return []
    return sorted({max(2, full // 4), max(2, full // 2), full})


@torch.inference_mode()
def _measure_decode_speed(engine: Engine, context: int) -> float:
    """Measure tokens per second of single steps, the last of which sees `context` positions.

    Short contexts are decoded several times, so that a hiccup of the machine does not decide.
    """
    steps = min(DECODE_STEPS_PER_TEXT, context - 1)
    n_texts = 0
    seconds = 0.0
    while n_texts == 0 or seconds < MIN_TIMING_SECONDS:
        text = Sequence(n_texts, [0] * (context - steps), context)
        engine([text])  # reads the prompt; not timed
        started = time.perf_counter()
        for _ in range(steps):
            text.context.append(0)
            engine([text])
        seconds += time.perf_counter() - started
        n_texts += 1
    return n_texts * steps / seconds
