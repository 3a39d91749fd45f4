"""`gptmini evaluate`, `compare`, `plot`, `inspect` and `size`."""

import json
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from gptmini import files
from gptmini.cli.options import (
    NEWEST_RUN_HELP,
    RUNS_FOLDER,
    AsJson,
    Assignments,
    AttentionName,
    Base,
    Cache,
    ConfigName,
    Data,
    Device,
    Errors,
    Minutes,
    RunName,
    Steps,
    Threads,
    WeightsType,
    argument,
    build_config,
    find_newest_run,
    flag,
    option,
    resolve_run,
)
from gptmini.errors import ConfigError
from gptmini.files import DEFAULT_CACHE_DIR

DEFAULT_ATTENTIONS = "mha,gqa:2,mqa"  # compared by default


def evaluate(
    run: RunName = None,
    data: Data = None,
    stride: int | None = option(
        None, "N", "Tokens from one window to the next.", min=1, show_default="one window"
    ),
    batch_size: int = option(16, "N", "Windows per batch.", min=1),
    split: Literal["validation", "test"] = option(
        "validation", "PART", "Part of its own text: validation, or test if data.test is set."
    ),
    weights: WeightsType = "float32",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Measure a trained model on its held-out text, or on all of another text."""
    if data and split == "test":
        raise ConfigError("--split test: is a part of the run's own text; leave out --data")
    path = resolve_run(run)
    from gptmini.config import load as configuration
    from gptmini.console import say
    from gptmini.data import corpus

    if data and "-" not in data:
        own = configuration.load_config(path / "config.yaml", []).data
        corpus.check_paths(data, own)  # a wrong path is named before torch is loaded
    from gptmini.analysis.evaluate import evaluate_run, load_text
    from gptmini.generate.run import load_run

    trained = load_run(path, device, weights, cache)
    window = trained.config.seq_len
    if stride is not None and stride > window:
        raise ConfigError(
            f"--stride {stride}: longer than the window of {window} tokens; use at most {window}"
        )
    texts = load_text(trained, data, cache, split)
    say(f"{path}: step {trained.step}; windows of {window} tokens, stride {stride or window}")
    facts = evaluate_run(trained, texts, batch_size, stride).to_dict()
    print(json.dumps(facts) if as_json else _format_evaluation(facts))


def _format_evaluation(facts: dict[str, Any]) -> str:
    """The figures of an evaluation as text."""

    def error(key: str) -> str:
        return "" if facts[key] is None else f" ± {facts[key]:.4f}"

    return (
        f"loss           {facts['loss']:.4f}{error('loss_error')} nats per token\n"
        f"perplexity     {facts['perplexity']:,.3f}\n"
        f"bits per byte  {facts['bits_per_byte']:.4f}{error('bits_per_byte_error')}\n"
        f"accuracy       {100 * facts['accuracy']:.2f} % (top-1)\n"
        f"text           {facts['tokens']:,} tokens, {facts['bytes']:,} bytes"
    )


def compare(
    names: list[str] | None = argument(
        None, "CONFIG|RUN", "Configurations to train, and directories of finished runs."
    ),
    attention: str | None = option(
        None,
        "KINDS",
        "Variants of one configuration, separated by commas.",
        show_default=DEFAULT_ATTENTIONS,
    ),
    seeds: int | None = option(
        None, "N", "Training runs per variant.", min=1, max=100, show_default="1"
    ),
    data: Data = None,
    errors: Errors = None,
    steps: Steps = None,
    minutes: float | None = option(None, "X", "Minutes per training run, instead of --steps."),
    assignments: Assignments = None,
    out: Path | None = option(
        None,
        "DIR",
        "Directory for runs and results.",
        show_default="runs/compare, or runs/compared if nothing is trained",
    ),
    as_json: AsJson = False,
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Train variants in turn, or take finished runs, and compare quality, memory and speed."""
    finished = [Path(name) for name in names or [] if (Path(name) / "config.yaml").exists()]
    configs: list[str | None] = [name for name in names or [] if Path(name) not in finished]
    if not finished and not configs:
        configs = [None]
    named = {"--steps": steps, "--minutes": minutes}
    other = {"--attention": attention, "--set": assignments, "--errors": errors, "--seeds": seeds}
    for name in configs:
        if name is not None and Path(name).suffix not in (".yaml", ".yml"):
            _check_known(name)
    if not configs:
        for label, value in (named | other).items():
            if value is not None:
                raise ConfigError(f"{label}: these runs are already trained; remove this option")
    variants = {
        kind or name or "default": build_config(name, data, errors, kind, named, assignments)
        for kind, name in _list_variants(configs, attention, only=not finished)
    }
    if "-" in chain(data or [], *(config.data.path for config in variants.values())):
        raise ConfigError("--data -: standard input can be read only once; name a file")
    out = out or RUNS_FOLDER / ("compare" if variants else "compared")
    from gptmini.analysis import compare as comparing
    from gptmini.analysis import variants as figures
    from gptmini.console import say

    measured = comparing.compare(variants, finished, seeds or 1, data, out, cache)
    if as_json:
        print(json.dumps(figures.to_json(measured)))
        return
    print(
        figures.format_table(measured),
        figures.TABLE_LEGEND,
        "",
        *figures.write_verdicts(measured),
        sep="\n",
    )
    say(f"compare: all figures: {out / 'compare.md'}")


def _check_known(name: str) -> None:
    """ConfigError if this is neither a directory of a run nor the name of a configuration."""
    from gptmini.config import load

    try:
        load.find_config_file(name)
    except ConfigError as error:
        problem = str(error).replace("no such configuration", "no such configuration or run", 1)
        raise ConfigError(problem) from None


def _list_variants(
    configs: list[str | None], attention: str | None, only: bool
) -> list[tuple[str | None, str | None]]:
    """(Attention, configuration) of each variant; `only` if nothing else is compared."""
    if len(configs) > 1 and attention:
        raise ConfigError("--attention: needs a single configuration; name one, or remove it")
    if not attention and not (only and len(configs) == 1):
        return [(None, name) for name in configs]
    return [
        (kind, name) for name in configs for kind in (attention or DEFAULT_ATTENTIONS).split(",")
    ]


def plot(
    runs: list[Path] | None = argument(
        None, "RUN", "Run directories.", show_default=NEWEST_RUN_HELP
    ),
    out: Path | None = option(
        None,
        "FILE",
        "A picture (.png, .pdf, .svg) or an interactive page (.html).",
        show_default="RUN/plot.png and RUN/plot.html",
    ),
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Draw the training curves of runs; a page also has samples and heads over time."""
    paths = [resolve_run(run) for run in runs or [find_newest_run()]]
    files = [out] if out else [paths[0] / "plot.png", paths[0] / "plot.html"]
    from gptmini.analysis import report

    print(*report.write_report(paths, files, cache), sep="\n")


def inspect(
    run: RunName = None,
    prompt: str | None = option(None, "TEXT", "Text for the model to read."),
    layer: int | None = option(None, "N", "Only this layer, counted from 0."),
    head: int | None = option(None, "N", "Only this head, counted from 0."),
    mask: str | None = option(
        None,
        "MASK",
        "Show a mask instead of a model: causal, window:N, padding:N (on the left) or cross:T,S "
        "(T queries on S keys of another text).",
    ),
    size: int | None = option(
        None, "N", "Positions of the mask.", min=1, max=256, show_default="12"
    ),
    out: Path | None = option(
        None, "FILE", "Also write an interactive page (.html) or a picture (.png, .pdf, .svg)."
    ),
    generate: int | None = option(
        None, "N", "Continue the prompt by N tokens; needs --out FILE.html.", min=1
    ),
) -> None:
    """Show what the heads of a trained model attend to, or what a mask hides."""
    other = {"RUN": run, "--prompt": prompt, "--layer": layer, "--head": head}
    other["--generate"] = generate
    if mask is None:
        other = {"--size": size}
    for label, value in other.items():
        if value is not None:
            problem = "works only with --mask" if mask is None else "does not work with --mask"
            raise ConfigError(f"{label}: {problem}; remove one of them")
    if mask is None and prompt is None:
        raise ConfigError("--prompt: missing; give a text to read")
    from gptmini.analysis import plots
    from gptmini.console import say

    if out is not None:
        plots.check_suffix(
            out, plots.PICTURE_SUFFIXES if mask else (*plots.PICTURE_SUFFIXES, ".html")
        )
    if generate is not None and (out is None or out.suffix.lower() != ".html"):
        raise ConfigError("--generate: works only with a page; add --out FILE.html")
    if mask is not None:
        from gptmini.analysis import attention_maps

        cells = attention_maps.build_mask(mask, size)
        print(attention_maps.format_mask(cells))
        print("\nx visible, . masked; a row is a query, a column a key")
        if out is not None:
            plots.save_figure(plots.draw_mask(cells.numpy(), mask), out)
    else:
        path = resolve_run(run, "--prompt")
        _inspect_run(path, str(prompt), layer, head, generate, out)
    if out is not None:
        say(f"{out}: written")


def _inspect_run(
    path: Path,
    prompt: str,
    layer: int | None,
    head: int | None,
    generate: int | None,
    out: Path | None,
) -> None:
    """Print what heads attend to; write a page or picture of it."""
    from gptmini.analysis import attention_maps, page_data, plots
    from gptmini.console import say
    from gptmini.generate.run import load_run

    trained = load_run(path, "cpu", "float32")
    text = page_data.continue_prompt(trained, prompt, generate) if generate else None
    tokens = text.prompt_tokens + text.tokens if text else trained.encode(prompt, "--prompt")
    layers = None if layer is None else [layer]
    is_page = out is not None and out.suffix.lower() == ".html"
    if is_page:
        page_data.check_page_size(trained.config.model, len(tokens))
    view = attention_maps.view_attention(trained, tokens, layers, head)
    say(f"{path}: step {trained.step}")
    if out is not None and is_page:  # first, as `| head` may close stdout
        files.atomic_write_bytes(
            out, page_data.build_page(trained, tokens, text, (layer or 0, head or 0))
        )
    print(view.format_text())
    if out is not None and not is_page:
        plots.save_figure(view.draw_figure(), out)


def size(
    config: ConfigName = None,
    data: Data = None,
    base: Base = None,
    errors: Errors = None,
    attention: AttentionName = None,
    steps: Steps = None,
    minutes: Minutes = None,
    accelerator: str | None = option(
        None, "NAME", "Plan for this accelerator: l4, a100, h100 and others."
    ),
    ranks: int = option(1, "N", "Plan for N accelerators that share each batch.", min=1),
    shard: bool = flag("Divide weights and optimizer among the ranks (FSDP)."),
    utilization: float | None = option(
        None,
        "X",
        "Fraction of the accelerator's peak FLOP/s that is reached.",
        min=0.01,
        max=1,
        show_default="0.4; a100 0.55",
    ),
    network: float | None = option(
        None,
        "GBIT",
        "Bandwidth per rank between machines of eight, in Gbit/s.",
        min=0.1,
        show_default="by accelerator, h100 400",
    ),
    assignments: Assignments = None,
    as_json: AsJson = False,
    cache: Cache = DEFAULT_CACHE_DIR,
) -> None:
    """Show what a training run would take: parameters, memory, data, time."""
    if accelerator is not None and minutes is not None:
        raise ConfigError(
            "--minutes: plans for this machine, not an accelerator; remove --accelerator"
        )
    others = {"--utilization": utilization, "--network": network, "--shard": shard or None}
    others["--ranks"] = ranks if ranks > 1 else None
    for label, value in others.items():
        if value is not None and accelerator is None:
            raise ConfigError(f"{label}: needs --accelerator; name one, or remove {label}")
    if shard and ranks == 1:
        raise ConfigError("--shard: one rank has nothing to divide; add --ranks, or remove it")
    named = {"--steps": steps, "--minutes": minutes}
    settings = build_config(config, data, errors, attention, named, assignments, base)
    if base is not None:
        resolve_run(base)  # a wrong name is answered with the nearest
    from gptmini.plan import report as sizing

    hardware = None
    if accelerator is not None:
        from gptmini.plan import cluster as planning

        hardware = planning.find_accelerator(accelerator, utilization, network)
    facts = sizing.estimate_training(settings, cache, hardware, ranks, shard)
    print(json.dumps(facts) if as_json else "\n".join(sizing.format_report(facts)))
