"""`gptmini generate`: continue a prompt with a trained model."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmini import console
from gptmini.cli.options import (
    AsJson,
    Device,
    RunName,
    Threads,
    WeightsType,
    flag,
    load_torch,
    option,
    parse_assignments,
    read_text,
    resolve_run,
)
from gptmini.errors import ConfigError

if TYPE_CHECKING:
    from gptmini.generate.run import Generation, Run
    from gptmini.tokenizer.chat_template import Message

Settings = dict[str, Any]


def generate(
    run: RunName = None,
    prompt: str | None = option(None, "TEXT", "Text to continue."),
    prompt_file: Path | None = option(
        None, "FILE", "File with the prompt, without its last line break; - is stdin."
    ),
    interactive: bool = flag("Type prompts one after another.", "--interactive", "-i"),
    samples: int = option(1, "N", "Texts per prompt.", min=1, max=10_000),
    max_new_tokens: int | None = option(None, "N", "Tokens at most; raise it if texts break off."),
    temperature: float | None = option(
        None, "X", "Lower it if texts ramble, raise it if they repeat; 0: greedy."
    ),
    top_k: int | None = option(
        None, "K", "Keep the K likeliest tokens; lower K if words make no sense."
    ),
    top_p: float | None = option(
        None, "P", "Keep the likeliest tokens up to total probability P, such as 0.9."
    ),
    min_p: float | None = option(
        None, "P", "Try 0.05 at high temperature: drops tokens below P times the likeliest."
    ),
    stop: list[str] | None = option(None, "TEXT", "Stop before this text; repeatable."),
    seed: int | None = option(None, "N", "Random seed; change it for another text."),
    assignments: list[str] | None = option(
        None, "sample.KEY=VALUE", "Other sampling settings; see gptmini settings sample.", "--set"
    ),
    chat: bool = flag("Ask an instruct model; with -i, hold a conversation.", "--chat"),
    special: bool = flag("Read special tokens in a prompt, such as <|endoftext|>.", "--special"),
    lookup: bool = flag("Guess from repetitions and check: same text, often faster.", "--lookup"),
    draft: Path | None = option(
        None, "RUN", "Guess with a far smaller run and check: same text, faster."
    ),
    batch_size: int = option(
        16, "N", "Texts generated in parallel; lower it if memory runs out.", min=1, max=4096
    ),
    weights: WeightsType = "bfloat16",
    device: Device = "auto",
    threads: Threads = None,
    no_cache: bool = flag("Use neither KV cache nor compiled engine, for debugging.", "--no-cache"),
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with a trained model.

    The text is printed as it is generated. Sampling options default to the run's own settings.
    """
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "stop": stop,
        "seed": seed,
    }
    settings = _parse_sampling(sampling, assignments)
    given = {"--prompt": prompt, "--prompt-file": prompt_file, "--interactive": interactive or None}
    named = [name for name, value in given.items() if value is not None]
    _check_prompts(named, chat, as_json, samples)
    path = resolve_run(run)
    draft_path = None if draft is None else resolve_run(draft)
    load_torch()
    from gptmini.generate.run import load_run

    trained = load_run(path, device, weights)
    if run is None:
        console.say(f"{path}, step {trained.step}")
    drafter: Run | str | None = "lookup" if lookup else None
    if draft_path is not None:
        drafter = load_run(draft_path, device, weights)
    how: Settings = {
        "use_cache": not no_cache,
        "special": special or chat,
        "draft": drafter,
        "logprobs": as_json,
    }
    writer = _Writer(trained, settings | how)
    if interactive:
        (writer.chat if chat else writer.continue_lines)()
        return
    text = prompt or read_text(prompt_file).removesuffix("\n").removesuffix("\r")
    start: str | list[int] = text
    if chat:
        start = trained.encode_chat([{"role": "user", "content": text}])
        text = ""
    if as_json:
        writer.print_json(start, samples, batch_size)
    else:
        writer.print_texts(start, text, samples, batch_size)


def _check_prompts(named: list[str], chat: bool, as_json: bool, samples: int) -> None:
    """Check that the options that give prompts, those `named`, go together with the others."""
    if len(named) > 1:
        raise ConfigError(f"{named[0]}: cannot be combined with {named[1]}; leave one out")
    if chat and not named:
        raise ConfigError("--chat: needs --prompt, --prompt-file or --interactive; give one")
    if as_json and "--interactive" in named:
        raise ConfigError("--json: cannot be combined with --interactive; leave one out")
    if samples > 1 and "--interactive" in named:
        raise ConfigError("--samples: cannot be combined with --interactive; leave one out")


def _parse_sampling(options: Settings, assignments: list[str] | None) -> Settings:
    """Check the sampling settings of --set and of the options, which override it.

    This comes before torch is loaded, so that a mistake is answered at once.
    """
    from gptmini.config import load

    overrides = parse_assignments(assignments)
    for label, path, _ in overrides:
        if path[0] != "sample":
            raise ConfigError(f"{label}: only sampling settings apply here; write sample.KEY=VALUE")
    for key, value in options.items():
        if value is not None:
            overrides.append((f"--{key.replace('_', '-')}", ("sample", key), value))
    return load.load_config(None, overrides).sample.model_dump(exclude_unset=True)


@dataclass(frozen=True)
class _Writer:
    """Prints what a run writes with the `settings` of `Run.start`."""

    run: "Run"
    settings: Settings

    def print_texts(
        self, prompt: str | list[int], shown: str, samples: int, batch_size: int
    ) -> None:
        """Print the texts of one prompt: a single one while it is generated, several in turn.

        What is `shown` stands before each: the prompt, or nothing before an answer.
        """
        for generation in self._start_batches(prompt, samples, batch_size):
            if samples == 1:
                pieces = chain([shown], (piece for _, piece in generation), ["\n"])
                if not console.stream_to_stdout(pieces):
                    return
            with console.show_elapsed("generating"):
                texts = generation.finish()
            if samples > 1:
                whole = (f"--- {text.number + 1}\n{shown}{text.text}\n" for text in texts)
                if not console.stream_to_stdout(whole):
                    return
            if sys.stderr.isatty():
                console.say(_describe_speed(generation))

    def print_json(self, prompt: str | list[int], samples: int, batch_size: int) -> None:
        """Print texts and speed as one JSON object."""
        generations = list(self._start_batches(prompt, samples, batch_size))
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

    def _start_batches(
        self, prompt: str | list[int], samples: int, batch_size: int
    ) -> "Iterator[Generation]":
        for first in range(0, samples, batch_size):
            numbers = range(first, min(first + batch_size, samples))
            yield self.run.start([prompt] * len(numbers), numbers, **self.settings)

    def continue_lines(self) -> None:
        """Continue prompts as they are typed; Ctrl-C stops the current text, not the program."""
        console.say(
            "Type a prompt; an empty line continues the last text. "
            "Ctrl-C stops a text; exit or Ctrl-D quits."
        )
        text = ""
        turn = 0
        while (line := _read_line()) is not None:
            text = line or text
            # The same prompt gives another text each time, unless a seed asks for one text.
            number = 0 if "seed" in self.settings else turn
            text += self._print_answer(text, number, shown=line)
            turn += 1

    def chat(self) -> None:
        """Answer messages as they are typed, with what was said before, as far as it fits."""
        run = self.run
        run.render_chat([{"role": "user", "content": ""}])  # refuses a run without a template now
        console.say("Type a message. Ctrl-C stops an answer; exit or Ctrl-D quits.")
        self.settings.setdefault("overflow", "stop")  # an answer ends with the context
        max_new_tokens = self.settings.get("max_new_tokens", run.config.sample.max_new_tokens)
        messages: list[dict[str, Any]] = []
        turn = 0
        has_dropped = False
        while (line := _read_line()) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            kept = drop_oldest_turns(run, messages, max_new_tokens)
            if len(kept) < len(messages) and not has_dropped:
                console.say(
                    "The conversation outgrows the context: the model forgets its oldest turns."
                )
                has_dropped = True
            messages = kept
            turn += 1
            answer = self._print_answer(run.encode_chat(messages), turn)
            messages.append({"role": "assistant", "content": answer})

    def _print_answer(self, prompt: str | list[int], number: int, shown: str = "") -> str:
        """Print a text as it comes, behind what is `shown`; return it, or a part at Ctrl-C."""
        generation = None
        try:
            generation = self.run.start([prompt], [number], **self.settings)
            pieces = (piece for _, piece in generation)
            console.stream_to_stdout(chain([shown], pieces, ["\n"]))
        except KeyboardInterrupt:
            console.stream_to_stdout(["\n"])
        return generation.samples[0].text if generation else ""


def _describe_speed(generation: "Generation") -> str:
    speed = generation.n_tokens / max(generation.seconds, 1e-9)
    line = (
        f"{generation.n_tokens:,} tokens at {speed:,.0f} tokens/s, first token after "
        f"{generation.time_to_first_token * 1000:.0f} ms ({generation.engine} engine)"
    )
    if generation.drafted:
        line += f"; {generation.accepted:,} of {generation.drafted:,} drafted tokens accepted"
    return line


def _read_line() -> str | None:
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


def drop_oldest_turns(
    run: "Run", messages: "list[Message]", max_new_tokens: int
) -> "list[Message]":
    """Return the messages without the oldest turns, so that an answer to the last one fits.

    A turn is a message of the user and what follows it; it is dropped whole. What comes before the
    first turn, such as a system message, stays, and so does the last turn. An answer gets
    `max_new_tokens`, or half of the context if that is less.
    """
    context_length = run.context_length
    room = min(max_new_tokens, context_length // 2)
    starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
    for start in starts:
        kept = messages[: starts[0]] + messages[start:]
        n_prompt = len(run.encode_chat(kept))
        if n_prompt + room <= context_length:
            break
    return kept
