"""`gptmini evaluate`: measure a trained model on held-out text."""

import json
from typing import Any, Literal

from gptmini.cli.options import (
    AsJson,
    Data,
    Device,
    RunName,
    Threads,
    WeightsType,
    option,
    resolve_run,
)
from gptmini.console import say
from gptmini.errors import ConfigError, DataError, MachineError

FEW_WINDOWS = 50  # an interval from fewer is itself uncertain


def evaluate(
    run: RunName = None,
    data: Data = None,
    stride: int | None = option(
        None,
        "N",
        "Tokens between windows; lower it to give tokens more context.",
        min=1,
        show_default="one window",
    ),
    batch_size: int = option(16, "N", "Windows per batch; lower it if memory runs out.", min=1),
    split: Literal["validation", "test"] = option(
        "validation", "PART", "Held-out part of the run's own text; test needs data.test."
    ),
    weights: WeightsType = "float32",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained model on held-out text, or on another text."""
    if data and split == "test":
        raise ConfigError("--split test: a part of the run's own text; leave out --data")
    path = resolve_run(run)
    from gptmini.generate.run import load_run
    from gptmini.machine import pick_device
    from gptmini.train.evaluate_run import (
        evaluate_held_out,
        evaluate_run,
        load_corpus,
        load_text,
        measure_compressors,
        measure_copied,
    )
    from gptmini.train.rules import format_rules

    trained = load_run(path, pick_device(device).type, weights, rounds_model=True)
    window = trained.config.seq_len
    if stride is not None and stride > window:
        raise ConfigError(
            f"--stride {stride}: longer than the window of {window} tokens; use at most {window}"
        )
    own = None if data else load_corpus(trained, split)
    texts = load_text(trained, data) if data else []
    say(f"{path}: step {trained.step}; windows of {window} tokens, stride {stride or window}")
    if own is None:
        result = evaluate_run(trained, texts, batch_size, stride)
    else:
        result = evaluate_held_out(trained, own, split, batch_size, stride)
    facts = result.to_dict() | {"compressors": {}, "copied": None}
    if own is not None:
        facts["compressors"] = measure_compressors(own, split)
        try:
            facts["copied"] = measure_copied(trained, own, split)
        except (DataError, MachineError) as error:  # of a large text, or in a copy that cannot
            say(str(error))
    if as_json:
        print(json.dumps(facts))
        return
    print(_format_evaluation(facts))
    if result.rules:
        print("", *format_rules(result.rules), sep="\n")


def _format_evaluation(facts: dict[str, Any]) -> str:
    """Format the figures of an evaluation as lines of text."""

    def interval(key: str) -> str:
        half_width = facts[f"{key}_half_width"]
        if half_width is None:
            return ""
        return f" ± {half_width:.4f}{' (rough)' if facts['windows'] < FEW_WINDOWS else ''}"

    lines = [
        f"loss           {facts['loss']:.4f}{interval('loss')} nats per token",
        f"perplexity     {facts['perplexity']:,.3f}",
        f"bits per byte  {facts['bits_per_byte']:.4f}{interval('bits_per_byte')}",
        f"accuracy       {100 * facts['accuracy']:.2f} % (top-1)",
        f"text           {facts['tokens']:,} tokens, {facts['bytes']:,} bytes",
    ]
    for name, figure in facts["compressors"].items():
        lines.append(f"for scale      {figure:.2f} bits per byte by {name}, a compressor")
    if facts["copied"] is not None:
        share = f"{100 * facts['copied']:.1f} %"
        lines.append(f"copied         {share} of the held-out text stands in the training text")
    return "\n".join(lines)
