"""Trains variants in turn, or takes finished runs, and compares them; `gptmini.compare`.

    OUT/NAME/seed-1337/          the directory of one training run
    OUT/NAME/rate-2x/seed-1337/  of one at twice the planned learning rates
    OUT/compare.json             all figures
    OUT/compare.md, .png         tables and a picture of them

All is trained in this process, where a model may be of any code.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptmini import files
from gptmini.config import yamlfile
from gptmini.config.load import SET_BY_MINUTES, override, read_config
from gptmini.config.settings import Config
from gptmini.console import format_count, say, warn
from gptmini.doors import load_plots
from gptmini.errors import ConfigError, DivergedError, MachineError
from gptmini.extras.compare.measure import find_losses, measure_variants, read_comparable_losses
from gptmini.extras.compare.plots import draw_comparison
from gptmini.extras.compare.share import share_choices
from gptmini.extras.compare.statistics import Difference, import_scipy
from gptmini.extras.compare.tune import Tried, choose_next_rate, find_best_rate, multiply_rates
from gptmini.extras.compare.variants import Variant, compare_with_first, format_comparison, to_json
from gptmini.generate.own_model import BuildModel, check_same_start, measure_start
from gptmini.generate.run import load_run
from gptmini.runs.directory import RunDirectory
from gptmini.train.api import fit
from gptmini.train.evaluate_run import evaluate_text
from gptmini.train.kept_losses import Split

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Variants that were measured in the same way; printed, it is the tables."""

    variants: list[Variant]

    def __str__(self) -> str:
        return format_comparison(self.variants)

    @property
    def differences(self) -> list[Difference]:
        """How each variant but the first differs from the first, in bits per byte."""
        return compare_with_first(self.variants)

    def draw(self) -> Any:
        """Draw the variants with matplotlib; MachineError if it is not installed."""
        return draw_comparison(self.variants)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON data."""
        return to_json(self.variants)


@dataclass(frozen=True)
class TrainingRun:
    """One training run: a variant with a seed, its directory, and a builder of its own model."""

    variant: str
    config: Config
    out: Path
    model: BuildModel | None = None


def compare(
    variants: Mapping[str, Settings | BuildModel | tuple[BuildModel, Settings]],
    config: Config | Mapping[str, Any] | str | Path,
    seeds: int = 1,
    out: str | Path = "runs/compare",
    *,
    split: Split | None = None,
    tune: bool = False,
) -> Comparison:
    """Train variants of a configuration, each once per seed, and compare them with the first.

        found = gptmini.compare({"mha": {}, "gqa": {"model": {"attention": "gqa:2"}}}, config, 3)
        print(found)

    A variant is the settings that it changes, in sections as a YAML file has them, or a builder of
    its model, as `model` of `gptmini.fit`, or both: `(build, settings)`. `config` is what `fit`
    takes. With `tune`, the first seed of each variant tries half, once and twice the learning
    rates, further while the best is at an end, and all seeds train at the variant's best. Losses
    are those of the held-out part that `split` names: by default "validation", with `tune` "test"
    where `data.test` is set. `out` gets the runs, tables and the picture; the same call resumes,
    and trains nothing twice. Raises what `fit` does, ConfigError if `out` has another comparison or
    a builder has changed, and MachineError without scipy.
    """
    base = read_config(config)
    configs: dict[str, Config] = {}
    models: dict[str, BuildModel] = {}
    for name, variant in variants.items():
        match variant:
            case Mapping():
                settings = variant
            case (build, Mapping() as settings) if callable(build):
                models[name] = build
            case _ if callable(variant):
                settings = {}
                models[name] = variant
            case _:
                raise ConfigError(f"{name}: must be settings, a builder, or (builder, settings)")
        configs[name] = override(base, settings, name)
    found = compare_variants(configs, seeds, Path(out), split, models, tune)
    write_results(found, Path(out))
    return found


def compare_variants(
    configs: Mapping[str, Config],
    seeds: int,
    out: Path,
    split: Split | None = None,
    models: Mapping[str, BuildModel] | None = None,
    tune: bool = False,
) -> Comparison:
    """Train variants by name and compare them; `models` has the builders of other models."""
    has_test = all(config.data.test is not None for config in configs.values())
    if split is None:
        split = "test" if tune and has_test else "validation"
    if split == "test" and not has_test:
        raise ConfigError("--split test: needs a test part; add --set data.test=0.1")
    if seeds > 1:
        import_scipy()  # if it is missing, say so before hours of training
    planned = plan_runs(configs, seeds, out, models or {})
    tried = tune_rates(planned) if tune else {}
    if tune:
        planned = [_set_rate(run, planned, find_best_rate(tried[run.variant])) for run in planned]
    variants = measure_variants(train_all(planned, split), split)
    for variant in variants:
        variant.by_rate = sorted(tried.get(variant.name, {}).items())
    return Comparison(variants)


def compare_finished(paths: list[Path], split: Split | None = None) -> Comparison:
    """Compare finished runs, grouped by variant."""
    split = split or "validation"
    return Comparison(measure_variants(group_runs(paths), split))


def plan_runs(
    configs: Mapping[str, Config], seeds: int, out: Path, models: Mapping[str, BuildModel]
) -> list[TrainingRun]:
    """Plan the training runs in rounds, one seed of every variant per round.

    Taking turns spreads other load on the machine over all variants. All see the same number of
    tokens, or train for `train.minutes`, and none stops early.
    """
    if not configs or seeds < 1:
        raise ConfigError("compare: needs one variant and one seed at least")
    folders = {name: re.sub(r"[^\w.-]", "", name.replace("/", "-")) for name in configs}
    for name, folder in folders.items():
        if folder.strip(".") == "" or list(folders.values()).count(folder) > 1:
            raise ConfigError(f"{name!r}: gives no folder of its own; choose another name")
    first = next(iter(configs.values()))
    n_tokens = _count_tokens(first)
    planned = []
    for number in range(seeds):
        for name, base in configs.items():
            config = base
            settings: dict[str, Any] = {"seed": base.train.seed + number, "patience": None}
            if base.train.minutes is not None:
                # The plan may choose other sizes, but must keep n_head, which n_kv_head divides.
                config = base.fill_open({"model": {"n_head": base.model.n_head}})
            elif _count_tokens(config) != n_tokens:
                tokens_per_step = config.train.batch_size * config.seq_len
                settings["steps"] = max(1, round(n_tokens / tokens_per_step))
            path = out / folders[name] / f"seed-{settings['seed']}"
            planned.append(TrainingRun(name, config.with_train(**settings), path, models.get(name)))
    return planned


def _count_tokens(config: Config) -> int:
    return config.train.steps * config.train.batch_size * config.seq_len


def _dump_settings(config: Config) -> bytes:
    """Return the settings that a configuration states, as YAML; `train` decides the rest."""
    return yamlfile.dump(config.model_dump(exclude_unset=True)).encode()


def tune_rates(planned: list[TrainingRun]) -> dict[str, Tried]:
    """Train the first seed of every variant at several multiples of its planned rates, in turn.

    Where training diverges, the loss is infinite.
    """
    names = list(dict.fromkeys(run.variant for run in planned))
    say(
        f"compare: tuning the learning rates of {', '.join(names)}, with one seed each; "
        f"Ctrl-C stops, the same command resumes"
    )
    tried: dict[str, Tried] = {name: {} for name in names}
    measured: list[Path] = []
    while todo := [
        (run, rate)
        for run in planned[: len(names)]
        if (rate := choose_next_rate(tried[run.variant])) is not None
    ]:
        for base, rate in todo:
            run = _set_rate(base, planned, rate)
            title = f"compare: {run.variant}, {rate:g} x its planned rates"
            try:
                _train(run, run.config, "validation", title)
            except DivergedError as error:
                warn(f"{run.variant}, {rate:g} x its planned rates: {error}")
                tried[run.variant][rate] = math.inf
                continue
            measured.append(run.out)
            losses = read_comparable_losses([measured[0], run.out], "validation")[run.out]
            tried[run.variant][rate] = losses.evaluation.bits_per_byte
    return tried


def _set_rate(run: TrainingRun, planned: list[TrainingRun], rate: float) -> TrainingRun:
    """Return the run at a multiple of the rates that its variant's first run has planned."""
    config = run.config
    if run is not planned[0] or rate != 1:
        config = share_choices(config, RunDirectory(planned[0].out))
    if rate == 1:
        return replace(run, config=config)
    first = next(each for each in planned if each.variant == run.variant)
    config = multiply_rates(config, RunDirectory(first.out).load_config(), rate)
    return replace(run, config=config, out=run.out.parent / f"rate-{rate:g}x" / run.out.name)


def train_all(planned: list[TrainingRun], split: Split) -> dict[str, list[Path]]:
    """Train or resume every run to its end; return the run directories of each variant.

    Whatever the first run chooses for itself applies to all. Raises DataError once a run turns out
    to have another held-out text.
    """
    first = planned[0]
    names = list(dict.fromkeys(run.variant for run in planned))
    n_seeds = len({run.config.train.seed for run in planned})
    minutes = first.config.train.minutes
    length = format_count(minutes or first.config.train.steps, "minute" if minutes else "step")
    length += " per run" if minutes else " per run or as many tokens"
    say(
        f"compare: training {', '.join(names)} in turn, {format_count(n_seeds, 'seed')} each, "
        f"{length}; Ctrl-C stops, the same command resumes"
    )
    paths: dict[str, list[Path]] = {}
    for number, run in enumerate(planned, 1):
        config = run.config
        if run is not first:
            config = share_choices(config, RunDirectory(first.out))
        seed = config.train.seed
        title = f"compare: run {number} of {len(planned)}: {run.variant}, seed {seed}"
        _train(run, config, split, title)
        read_comparable_losses([first.out, run.out], split)  # or it is refused now
        paths.setdefault(run.variant, []).append(run.out)
    return paths


def _train(run: TrainingRun, config: Config, split: Split, title: str) -> None:
    """Train one run to its end, unless it is there already, and measure its losses if need be."""
    directory = RunDirectory(run.out)
    if directory.exists:
        _check_same_run(directory, config, run.model)
    is_finished = (
        directory.exists
        and max(directory.list_steps(), default=-1) >= directory.load_config().train.steps
    )
    say(f"{title}: already finished" if is_finished else title)
    if not is_finished:
        torch.compiler.reset()  # torch limits how many models a process compiles
        fit(config, run.out, model=run.model)
    if find_losses(directory, split) is None:
        trained = load_run(run.out, config.train.device, "float32", model=run.model)
        evaluate_text(trained, split=split)


def _check_same_run(run: RunDirectory, config: Config, model: BuildModel | None) -> None:
    """ConfigError for a run that was begun by other settings, or with another model."""
    is_same = _dump_settings(run.load_request()) == _dump_settings(config)
    if run.list_steps():
        state = run.load_best(with_model=False).state
        is_same = is_same and bool(state.get("own_model")) == (model is not None)
        if is_same and model is not None:
            now = measure_start(model, run.load_config().model)
            check_same_start(run.path, state.get("own_logits", []), now)
    if not is_same:
        raise ConfigError(
            f"{run.path}: belongs to a different comparison; choose another --out, or delete "
            f"{_get_variant_folder(run.path)} to train only that variant again"
        )


def group_runs(paths: list[Path]) -> dict[str, list[Path]]:
    """Group finished runs by variant: runs whose configurations differ only by seed.

    What model of its own a run has, its files do not say: those of one folder are one variant. A
    run that is named twice counts once.
    """
    groups: dict[tuple[Any, ...], list[Path]] = {}
    seen = set()
    for path in {path.absolute(): path for path in paths}.values():
        run = RunDirectory(path)
        config = run.load_config()
        state = run.load_best(with_model=False).state
        comparable = config.with_train(seed=0, micro_batch_size=None, compile="auto")
        if config.train.minutes is not None:  # these are outcomes then, not settings
            same = Config().train.model_dump(include=SET_BY_MINUTES)
            comparable = comparable.with_train(**same)
        own_folder = _get_variant_folder(path) if state.get("own_model") else None
        key: tuple[Any, ...] = (_dump_settings(comparable), state["step"] == 0, own_folder)
        if (key, config.train.seed) in seen:  # the same seed twice: something else must differ
            key = (path,)
        seen.add((key, config.train.seed))
        groups.setdefault(key, []).append(path)
    names = [_get_variant_folder(runs[0].absolute()).name for runs in groups.values()]
    named = {
        name if names.count(name) == 1 else str(runs[0]): runs
        for name, runs in zip(names, groups.values(), strict=True)
    }
    # Pictures and files show no name that is not UTF-8.
    return {name.encode("utf-8", "backslashreplace").decode(): runs for name, runs in named.items()}


def _get_variant_folder(path: Path) -> Path:
    """Return the directory of a run or, if it is one seed of several, that of its variant."""
    folder = path.parent if re.fullmatch(r"seed-\d+", path.name) else path
    return folder.parent if re.fullmatch(r"rate-[\d.]+x", folder.name) else folder


def write_results(comparison: Comparison, out: Path) -> None:
    """Write the figures as JSON and Markdown, with a picture if matplotlib is installed."""
    out.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(comparison.to_dict(), indent=1).encode()
    files.atomic_write_bytes(out / "compare.json", figures)
    tables = format_comparison(comparison.variants, as_markdown=True)
    try:
        load_plots().save_figure(comparison.draw(), out / "compare.png")
        tables += "\n\n![The figures of the tables](compare.png)"
    except MachineError as error:
        warn(f"{out / 'compare.png'}: not drawn; {error}")
    files.atomic_write_bytes(out / "compare.md", f"{tables}\n".encode())
