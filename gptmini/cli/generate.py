"""`gptmini generate`: continue a prompt with a trained model."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmini import console
from gptmini.cli.options import (
    WRITING,
    AsJson,
    Device,
    MaxNewTokens,
    RunName,
    SampleAssignments,
    Seed,
    Temperature,
    Threads,
    WeightsType,
    flag,
    load_torch,
    option,
    parse_sampling,
    read_text,
    resolve_run,
)
from gptmini.errors import ConfigError

if TYPE_CHECKING:
    from gptmini.generate.run import Generation, Run

Settings = dict[str, Any]  # of `Run.start`


def generate(
    run: RunName = None,
    prompt: str | None = option(None, "TEXT", "Text to continue.", **WRITING),
    prompt_file: Path | None = option(
        None, "FILE", "File to continue, without its last line break; - is stdin.", **WRITING
    ),
    interactive: bool = flag("Type prompts one after another.", "--interactive", "-i", **WRITING),
    samples: int = option(1, "N", "Number of texts.", min=1, max=10_000, **WRITING),
    max_new_tokens: MaxNewTokens = None,
    stop: list[str] | None = option(
        None, "TEXT", r"Stop before this text; \n is a line break; repeatable.", **WRITING
    ),
    temperature: Temperature = None,
    seed: Seed = None,
    assignments: SampleAssignments = None,
    as_json: AsJson = False,
    lookup: bool = flag("Guess from repetitions and check: same text, often faster.", "--lookup"),
    draft: Path | None = option(
        None, "RUN", "Guess with a far smaller run and check: same text, faster."
    ),
    batch_size: int = option(
        16, "N", "Texts generated at once; lower it if memory runs out.", min=1, max=4096
    ),
    weights: WeightsType = "bfloat16",
    device: Device = "auto",
    threads: Threads = None,
    special: bool = flag("Read special tokens in a prompt, such as <|endoftext|>.", "--special"),
    no_cache: bool = flag("Use neither KV cache nor compiled engine, for debugging.", "--no-cache"),
) -> None:
    """Continue a prompt with a trained model.

    The text is printed as it is generated. Sampling options default to the run's own settings.
    """
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        # Shells keep the escape; LaTeX has commands that begin like it.
        "stop": stop and [re.sub(r"\\n(?![a-zA-Z])", "\n", text) for text in stop],
        "seed": seed,
    }
    settings = parse_sampling(sampling, assignments)
    _check_prompts(prompt, prompt_file, interactive, as_json, samples)
    path = resolve_run(run)
    draft_path = None if draft is None else resolve_run(draft)
    trained = load(path, device, weights, shows_name=run is None)
    drafter = load(draft_path, device, weights) if draft_path else None
    settings |= {
        "use_cache": not no_cache,
        "special": special,
        "draft": drafter or ("lookup" if lookup else None),
        "logprobs": as_json,
    }
    if interactive:
        _continue_lines(trained, settings)
        return
    text = prompt or read_text(prompt_file).removesuffix("\n").removesuffix("\r")
    starts = range(0, samples, batch_size)
    parts = (range(first, min(first + batch_size, samples)) for first in starts)
    batches = (trained.start([text] * len(part), part, **settings) for part in parts)
    if as_json:
        _print_json(list(batches))
    else:
        shown = text or settings.get("start", trained.config.sample.start) or ""
        _print_texts(shown, samples, batches)


def _check_prompts(
    prompt: str | None, prompt_file: Path | None, interactive: bool, as_json: bool, samples: int
) -> None:
    """Check that the options that give prompts go together with each other and the others."""
    given = {"--prompt": prompt, "--prompt-file": prompt_file, "--interactive": interactive or None}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{named[0]}: cannot be combined with {named[1]}; leave one out")
    for name, is_used in (("--json", as_json), ("--samples", samples > 1)):
        if interactive and is_used:
            raise ConfigError(f"{name}: cannot be combined with --interactive; leave one out")


def load(path: Path, device: str, weights: str, shows_name: bool = False) -> "Run":
    """Load a run to generate with; say which, if it was not named."""
    load_torch()
    from gptmini.generate.run import load_run

    run = load_run(path, device, weights, rounds_model=True)
    if shows_name:
        console.say(f"{path}, step {run.step}")
    return run


def _print_texts(prompt: str, samples: int, batches: "Iterator[Generation]") -> None:
    """Print a prompt with its texts: a single one while it is generated, several in turn."""
    for generation in batches:
        if samples == 1:
            pieces = chain([prompt], (piece for _, piece in generation), ["\n"])
            if not console.stream_to_stdout(pieces):
                return
        with console.show_elapsed("generating"):
            texts = generation.finish()
        if samples > 1:
            whole = (f"--- {text.number + 1}\n{prompt}{text.text}\n" for text in texts)
            if not console.stream_to_stdout(whole):
                return
        if all(text.finish_reason == "length" for text in texts) and sys.stderr.isatty():
            console.say(f"stopped at --max-new-tokens {len(texts[0].tokens)}")


def _print_json(generations: "list[Generation]") -> None:
    """Print texts and speed as one JSON object."""
    texts = chain.from_iterable(generation.finish() for generation in generations)
    listed = [text.to_dict() for text in texts]
    n_tokens = sum(generation.n_tokens for generation in generations)
    seconds = sum(generation.seconds for generation in generations)
    facts: dict[str, Any] = {
        "samples": listed,
        "tokens_per_second": round(n_tokens / max(seconds, 1e-9), 1),
        "time_to_first_token": round(generations[0].time_to_first_token, 4),
        "engine": generations[0].engine,
    }
    if drafted := sum(generation.drafted for generation in generations):
        facts["drafted"] = drafted
        facts["accepted"] = sum(generation.accepted for generation in generations)
    console.stream_to_stdout([json.dumps(facts), "\n"])


def _continue_lines(run: "Run", settings: Settings) -> None:
    """Continue prompts as they are typed; Ctrl-C stops the current text, not the program."""
    console.say(
        "Type a prompt; an empty line continues the last text. "
        "Ctrl-C stops a text; exit or Ctrl-D quits."
    )
    text = ""
    for turn, line in enumerate(iter(read_line, None)):
        text = line or text
        # The same prompt gives another text each time, unless a seed asks for one text.
        number = 0 if "seed" in settings else turn
        text += print_answer(run, text, number, settings, shown=line)


def print_answer(
    run: "Run", prompt: str | list[int], number: int, settings: Settings, shown: str = ""
) -> str:
    """Print a text as it comes, behind what is `shown`; return it, or a part at Ctrl-C."""
    generation = None
    try:
        generation = run.start([prompt], [number], **settings)
        pieces = (piece for _, piece in generation)
        console.stream_to_stdout(chain([shown], pieces, ["\n"]))
    except KeyboardInterrupt:
        console.stream_to_stdout(["\n"])
    return generation.samples[0].text if generation else ""


def read_line() -> str | None:
    """Read what is typed; None where the user quits."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows lacks it
            import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            line = input("> ")
        except EOFError:
            console.say("")
            return None
        except KeyboardInterrupt:
            console.say("")
            continue
        return None if line.strip() in ("exit", "quit") else line
