"""The commands that measure: `gptmini evaluate`, `compare`, `size`, `plot`; and `convert`."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gptmini.cli.options import (
    RUNS,
    AsJson,
    Assignments,
    AttentionName,
    Cache,
    ConfigName,
    Data,
    Device,
    Errors,
    RunName,
    Steps,
    Weights,
    attention_settings,
    configured,
    newest_run,
)
from gptmini.errors import CheckpointError, ConfigError, MachineError
from gptmini.files import CACHE


def evaluate(
    run: RunName = None,
    data: Data = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Positions between windows, by default a window."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time.")] = 16,
    weights: Weights = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = CACHE,
) -> None:
    """Measure a trained model on its held-out text, or on all of another."""
    path = run or newest_run()
    from gptmini.console import say
    from gptmini.evidence import evaluate as evaluation
    from gptmini.generate.run import load

    trained = load(path, device, weights, cache)
    window = trained.config.seq_len
    if stride is not None and stride > window:
        raise ConfigError(f"--stride {stride}: is over the window of {window} tokens; lower it")
    if data:
        spans = evaluation.whole_text(trained, data, cache)
    else:
        spans = evaluation.held_out(trained, cache)
    say(f"{path}: step {trained.step}, windows of {window} tokens, {stride or window} apart")
    found = evaluation.evaluate_run(trained, spans, batch_size, stride)
    facts = found.facts()
    print(json.dumps(facts) if as_json else _lines(facts))


def _lines(facts: dict[str, Any]) -> str:
    """An evaluation for people."""

    def error(key: str) -> str:
        return "" if facts[key] is None else f" ± {facts[key]:.4f}"

    return (
        f"loss           {facts['loss']:.4f}{error('loss_error')} nats per token\n"
        f"perplexity     {facts['perplexity']:,.3f}\n"
        f"bits per byte  {facts['bits_per_byte']:.4f}{error('bits_per_byte_error')}\n"
        f"accuracy       {100 * facts['accuracy']:.2f} % of the tokens were the likeliest\n"
        f"text           {facts['tokens']:,} tokens, {facts['bytes']:,} bytes"
    )


def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG | RUN]...", help="Configurations, and finished runs."),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="Of one configuration; by default mha,gqa:2,mqa.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Trainings of each, by default 1.")
    ] = None,
    data: Data = None,
    errors: Errors = None,
    steps: Steps = None,
    minutes: Annotated[float | None, typer.Option(help="Of each training, instead.")] = None,
    assignments: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where all is written; by default runs/compare, or runs/compared."),
    ] = None,
    as_json: AsJson = False,
    cache: Cache = CACHE,
) -> None:
    """Train variants in turns, or take finished runs, and show what each is worth and costs."""
    runs = [Path(name) for name in names or [] if (Path(name) / "config.yaml").exists()]
    configs: list[str | None] = [name for name in names or [] if Path(name) not in runs]
    configs = configs or [None] * (not runs)
    named: dict[str, Any] = {"--steps": steps, "--minutes": minutes}
    if not configs:
        named |= {"--attention": attention, "--set": assignments, "--errors": errors}
        for option, value in {**named, "--seeds": seeds}.items():
            if value is not None:
                raise ConfigError(f"{option}: these runs are trained already; leave it out")
    if len(configs) > 1 and attention:
        raise ConfigError("--attention: of several configurations; name one, or leave it out")
    alone = len(configs) == 1 and not runs
    wanted = (attention or "mha,gqa:2,mqa").split(",") if attention or alone else [None]
    variants = {
        kind or name or "default": configured(name, data, errors, kind, named, assignments)
        for name in configs
        for kind in wanted
    }
    if "-" in [path for config in variants.values() for path in config.data.path] + (data or []):
        raise ConfigError("--data -: standard input is read once only; name a file")
    out = out or RUNS / ("compare" if variants else "compared")
    from gptmini.console import say
    from gptmini.evidence import compare as comparing
    from gptmini.evidence.measure import as_json as whole
    from gptmini.evidence.measure import measure

    trained = comparing.train(comparing.jobs(variants, seeds or 1, out), cache) if variants else {}
    there = comparing.grouped(runs).items()
    paths = {str(where[0]) if name in trained else name: where for name, where in there} | trained
    found = measure(paths, data if not variants else None, cache, out / "compare.json")
    comparing.write(found, out)
    try:
        from gptmini.evidence import plots

        plots.save(plots.comparison(found), out / "compare.png")
    except MachineError as error:
        say(f"compare: no {out / 'compare.png'}: {error}")
    if as_json:
        print(json.dumps(whole(found)))
        return
    print(comparing.table(found), *comparing.verdicts(found), sep="\n")
    say(f"compare: all of it is in {out}")


def convert(
    run: RunName = None,
    attention: AttentionName = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of training it further; by default a tenth.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The new run directory.")] = None,
    cache: Cache = CACHE,
) -> None:
    """Pool the KV heads of a trained model into fewer, as the start of another run."""
    if attention is None:
        raise ConfigError("--attention: missing; name what to make of it, as gqa:2")
    path = run or newest_run()
    path = path.resolve() if path.name == "" else path
    out = out or path.with_name(f"{path.name}-{attention.replace(':', '')}")
    from gptmini.generate.run import load
    from gptmini.interop import pooling as converting

    trained = load(path, weights="float32", cache=cache)
    made = converting.convert(trained, attention_settings(attention), steps, out, cache)
    print(
        f"gptmini: {out}: {trained.config.model.n_kv_head} KV heads of step {trained.step} pooled "
        f"into {made.model.n_kv_head}; train it for {made.train.steps} steps with\n"
        f"  gptmini train {shlex.quote(str(out / 'config.yaml'))} --out {shlex.quote(str(out))}",
        file=sys.stderr,
    )


def plot(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories; by default the newest in runs/.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A picture, or a page: .html; by default both, in the first run."),
    ] = None,
    cache: Cache = CACHE,
) -> None:
    """Draw what runs logged; a page has their samples over time and their attention too."""
    paths = runs or [newest_run()]
    files = [out] if out else [paths[0] / "plot.png", paths[0] / "plot.html"]
    from gptmini.evidence import plots, report
    from gptmini.files import replace
    from gptmini.generate.run import load
    from gptmini.runs.directory import RunDirectory
    from gptmini.runs.log import metrics

    lines = {str(path): list(metrics(RunDirectory(path).metrics)) for path in paths}
    for name, found in lines.items():
        RunDirectory(Path(name)).config()  # raises where no run is
        if not any("val_loss" in line for line in found):
            raise CheckpointError(f"{name}: has logged no evaluation yet; go on with gptmini train")
    for file in files:
        if file.suffix == ".html":
            loaded = {name: (load(name, "cpu", "float32", cache), lines[name]) for name in lines}
            replace(file, report.page(loaded).encode())
        else:
            plots.save(plots.training(lines), file)
        print(file)


def size(
    config: ConfigName = None,
    data: Data = None,
    errors: Errors = None,
    attention: AttentionName = None,
    steps: Steps = None,
    minutes: Annotated[float | None, typer.Option(help="As for train.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Minutes on it, not here: l4, a100, h100 and so on.")
    ] = None,
    utilisation: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of its peak that is reached.")
    ] = 0.4,
    devices: Annotated[int, typer.Option(min=1, help="As many of them, without loss.")] = 1,
    assignments: Assignments = None,
    as_json: AsJson = False,
    cache: Cache = CACHE,
) -> None:
    """Show what a training would take, before it: parameters, memory, data, minutes."""
    if accelerator is not None and minutes is not None:
        raise ConfigError("--minutes: are planned by this machine's speed; leave out --accelerator")
    named = {"--steps": steps, "--minutes": minutes}
    settings = configured(config, data, errors, attention, named, assignments)
    from gptmini.plan import size as sizing

    facts = sizing.size(settings, cache, accelerator, utilisation, devices)
    print(json.dumps(facts) if as_json else "\n".join(sizing.lines(facts)))
