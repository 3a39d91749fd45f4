"""Measures trained runs by their own files: losses, logs, settings; and by the stories' rules."""

import statistics
from pathlib import Path

from gptmini.config.settings import Config
from gptmini.console import quote
from gptmini.data.formats import STORIES
from gptmini.errors import CheckpointError, DataError
from gptmini.extras.compare.variants import RunMeasurement, Variant
from gptmini.generate.run import load_run
from gptmini.plan import cost
from gptmini.runs.directory import RunDirectory
from gptmini.runs.log import read_metrics, select_numbers
from gptmini.train.kept_losses import Split, WindowLosses, read_losses
from gptmini.train.rules import measure_rules


def measure_variants(paths: dict[str, list[Path]], split: Split = "validation") -> list[Variant]:
    """Measure the runs of each variant on a held-out part.

    Raises CheckpointError for a run that has no losses of it, DataError for runs of other texts.
    """
    losses = read_comparable_losses([path for folders in paths.values() for path in folders], split)
    variants = []
    for name, folders in paths.items():
        # The runs of a variant differ only by seed: the last one stands for all.
        last = folders[-1]
        model = RunDirectory(last).load_config().model
        variants.append(
            Variant(
                name=name,
                runs=[_measure_run(RunDirectory(path), losses[path], split) for path in folders],
                parameters=losses[last].parameters,
                cache_bytes=cost.count_cache_bytes(model, model.context_length),
            )
        )
    return variants


def find_losses(run: RunDirectory, split: Split) -> WindowLosses | None:
    """Find the losses of a run's best checkpoint; None if they are missing or of another one."""
    losses = read_losses(run.path, split)
    is_best = losses is not None and losses.step == run.load_best(with_model=False).step
    return losses if is_best else None


def _describe_measuring(path: Path, split: Split) -> str:
    if RunDirectory(path).load_best(with_model=False).state.get("own_model"):
        loaded = f'gptmini.load("{path}", weights="float32", model=build)'
        return f'gptmini.evaluate({loaded}, split="{split}")'
    return f"gptmini evaluate {quote(path)} --split {split}"


def read_comparable_losses(paths: list[Path], split: Split) -> dict[Path, WindowLosses]:
    """Read the losses of runs; DataError for one of another text than the first, or of more of it.

    CheckpointError, with the remedy, for a run that has none.
    """
    found: dict[Path, WindowLosses] = {}
    for path in paths:
        losses = find_losses(RunDirectory(path), split)
        if losses is None:
            raise CheckpointError(
                f"{path}: its best checkpoint has no losses of the {split} part; measure them with "
                f"{_describe_measuring(path, split)}"
            )
        found[path] = losses
        first = found[paths[0]]
        if losses.text != first.text:
            raise DataError(
                f"{path}: its held-out text is not that of {paths[0]}; compare runs of one text, "
                f"or of one data.validation_path"
            )
        is_same_part = losses.evaluation.bytes.sum() == first.evaluation.bytes.sum()
        if (losses.whole, first.whole) != (True, True) and not is_same_part:
            part = paths[0] if losses.whole else path
            raise DataError(
                f"{part}: measured on a part of its held-out text (train.eval_tokens); measure all "
                f"with {_describe_measuring(part, split)}"
            )
    return found


def _measure_run(run: RunDirectory, losses: WindowLosses, split: Split) -> RunMeasurement:
    """Measure one run by its losses and its log."""
    config = run.load_config()
    evaluation = losses.evaluation
    lines = list(read_metrics(run.metrics_file))
    speeds = [speed for (speed,) in select_numbers(lines, "tokens_per_second")]
    speeds = speeds[1:]  # the first includes the start of the run
    seconds = [second for (second,) in select_numbers(lines, "seconds")]
    return RunMeasurement(
        path=str(run.path),
        split=split,
        whole=losses.whole,
        seq_len=config.seq_len,
        seed=config.train.seed,
        step=losses.step,
        loss=evaluation.loss,
        loss_half_width=evaluation.loss_half_width,
        bits_per_byte=evaluation.bits_per_byte,
        bits_per_byte_half_width=evaluation.bits_per_byte_half_width,
        accuracy=evaluation.accuracy,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds[-1] if seconds else 0.0,
        history=select_numbers(lines, "tokens", "seconds", "val_bpb"),
        rules=_measure_rules(run, config),
    )


def _measure_rules(run: RunDirectory, config: Config) -> dict[str, float]:
    """Measure how often a run on the built-in stories gets right what their rules determine."""
    is_own = run.load_best(with_model=False).state.get("own_model")
    if STORIES not in config.data.path or is_own:
        return {}
    loaded = load_run(run.path, weights="float32")
    return {each.rule: each.right for each in measure_rules(loaded.model, loaded.tokenizer)}
