"""`gptmini score`: show how well a model predicts a text, token by token."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gptmini.cli.options import AsJson, Device, RunName, WeightsType, option, read_text, resolve_run
from gptmini.console import say, show_elapsed, stream_to_stdout
from gptmini.errors import ConfigError

if TYPE_CHECKING:
    from gptmini.generate.score import Score


def score(
    run: RunName = None,
    text: str | None = option(None, "TEXT", "Text to score."),
    file: Path | None = option(None, "FILE", "File with the text; - is stdin."),
    weights: WeightsType = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show how well a trained model predicts a text, token by token."""
    path = resolve_run(run)
    if (text is None) == (file is None):
        raise ConfigError("--text, --file: give exactly one of them")
    from gptmini.generate import score as scoring
    from gptmini.generate.run import load_run
    from gptmini.machine import pick_device

    trained = load_run(path, pick_device(device).type, weights, rounds_model=True)
    if run is None:
        say(f"{path}, step {trained.step}")
    text = read_text(file) if text is None else text
    with show_elapsed("scoring"):
        scored = scoring.score_text(trained, text)
    if as_json:
        rows = zip(scored.texts, scored.tokens, scored.logprobs, scored.token_ranks, strict=True)
        facts = {
            "tokens": len(scored.tokens),
            "bytes": scored.n_bytes,
            "loss": scored.loss,
            "perplexity": scored.perplexity,
            "bits_per_byte": scored.bits_per_byte,
            "scores": [{"text": t, "token": n, "logprob": p, "rank": r} for t, n, p, r in rows],
        }
        stream_to_stdout([json.dumps(facts), "\n"])
        return
    stream_to_stdout(_format_table(scored))
    print(
        f"{len(scored.tokens):,} tokens, {scored.n_bytes:,} bytes: loss {scored.loss:.4f} nats per "
        f"token, perplexity {scored.perplexity:,.2f}, {scored.bits_per_byte:.4f} bits per byte"
    )


def _format_table(scored: "Score") -> Iterator[str]:
    """List the tokens with their scores; then explain the marks in their labels."""
    from gptmini.tokenizer.spelling import explain_labels, label_pieces

    yield "logprob   rank  token\n"
    labels = label_pieces(scored.spellings)
    for logprob, rank, label in zip(scored.logprobs, scored.token_ranks, labels, strict=True):
        yield f"{logprob:7.3f} {rank:6}  {label}\n"
    for line in explain_labels(scored.spellings):
        yield f"{line}\n"
