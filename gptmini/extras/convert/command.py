"""`gptmini convert`: start a run from a trained model with fewer KV heads or a window."""

from pathlib import Path

from gptmini.cli.options import AttentionName, RunName, option, resolve_run
from gptmini.console import format_count, quote, say, show_elapsed
from gptmini.errors import ConfigError


def convert(
    run: RunName = None,
    attention: AttentionName = None,
    steps: int | None = option(
        None,
        "N",
        "Steps to train after the conversion.",
        min=1,
        show_default="a tenth of the original",
    ),
    out: Path | None = option(None, "DIR", "New run directory.", show_default="RUN-ATTENTION"),
) -> None:
    """Change a trained model's attention to GQA, MQA or a window."""
    if attention is None:
        raise ConfigError("--attention: missing; write for example --attention gqa:2")
    path = resolve_run(run)
    path = path.resolve() if path.name == "" else path  # "." has no name
    out = out or path.with_name(f"{path.name}-{attention.replace(':', '')}")
    from gptmini.config.load import parse_attention
    from gptmini.extras.convert import convert
    from gptmini.generate.run import load_run

    changes = parse_attention(attention, "--attention")
    trained = load_run(path, weights="float32")
    with show_elapsed("converting"):
        config = convert.convert_run(trained, changes, steps, out)
    old = trained.config.model
    new = config.model
    pairs = {
        "KV heads": (old.n_kv_head, new.n_kv_head),
        "window": (old.attention.window or "none", new.attention.window or "none"),
    }
    change = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in pairs.items() if was != now)
    name = quote(out)
    command = f"gptmini train {quote(out / 'config.yaml')} --out {name}"
    if not trained.corpus:  # an imported model has no text of its own
        command = f"gptmini train --from {name} --data TEXT --steps {config.train.steps}"
    say(
        f"{out}: {change or 'no change'}, from step {trained.step} of {path}; train it for "
        f"{format_count(config.train.steps, 'step')} with:"
    )
    say(f"  {command}")


COMMANDS = {"convert": convert}
