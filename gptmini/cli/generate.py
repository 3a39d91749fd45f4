"""`gptmini generate`: continue a prompt with a trained model."""

import json
import os
import select
import stat
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptmini.cli.options import (
    AsJson,
    Cache,
    Device,
    PretrainedName,
    Threads,
    WeightsType,
    flag,
    load_torch,
    option,
    parse_assignments,
    read_text,
    resolve_run,
)
from gptmini.cli.pretrained import open_run
from gptmini.errors import ConfigError, shorten
from gptmini.files import DEFAULT_CACHE_DIR

if TYPE_CHECKING:
    from gptmini.extras.sources.find import Copies
    from gptmini.generate.run import Generation, Run
    from gptmini.tokenizer.chat_template import Message

Settings = dict[str, Any]
SHOWN_COPIES = 10
QUOTED_CHARACTERS = 60  # of each


def generate(
    run: PretrainedName = None,
    prompt: str | None = option(None, "TEXT", "The text to continue."),
    prompt_file: Path | None = option(
        None,
        "FILE",
        "Read the prompt from a file, without its last line break; - is standard input.",
    ),
    prompts: Path | None = option(
        None,
        "FILE",
        'Read prompts from JSON lines, "TEXT" or {"prompt": "TEXT"}; - is standard input. '
        "Needs --out.",
    ),
    out: Path | None = option(
        None, "FILE", "Where --prompts writes JSON lines; resumes if interrupted."
    ),
    interactive: bool = flag("Type prompts one after another.", "--interactive", "-i"),
    samples: int = option(1, "N", "Texts per prompt.", min=1, max=10_000),
    max_new_tokens: int | None = option(None, "N", "Tokens at most; raise it if texts break off."),
    temperature: float | None = option(
        None,
        "X",
        "Randomness: lower it if texts ramble, raise it if they repeat themselves; 0 always takes "
        "the most likely token.",
    ),
    top_k: int | None = option(
        None, "K", "Keep the K most likely tokens; lower it if words make no sense."
    ),
    top_p: float | None = option(
        None,
        "P",
        "Keep the most likely tokens with total probability P, such as 0.9: more where "
        "the model is unsure.",
    ),
    min_p: float | None = option(
        None,
        "P",
        "Keep tokens at least P times as likely as the most likely one, such as 0.05: "
        "for high temperatures.",
    ),
    stop: list[str] | None = option(None, "TEXT", "Stop before this text. Repeat to use several."),
    seed: int | None = option(None, "N", "Random seed; change it for another text."),
    assignments: list[str] | None = option(
        None,
        "sample.KEY=VALUE",
        "Other sampling settings: repetition_penalty, presence_penalty, frequency_penalty, "
        "ban, bias, overflow.",
        "--set",
    ),
    chat: bool = flag(
        "Ask an instruct model: apply its chat template; with -i, hold a conversation.", "--chat"
    ),
    special: bool = flag("Read special tokens in a prompt, such as <|endoftext|>.", "--special"),
    lookup: bool = flag(
        "Speculate from the prompt; same output, sometimes faster, as in code.", "--lookup"
    ),
    draft: Path | None = option(
        None, "RUN", "Speculate with a smaller run; same output, faster if that is far smaller."
    ),
    batch_size: int = option(
        16, "N", "Texts generated in parallel; lower it if memory runs out.", min=1, max=4096
    ),
    weights: WeightsType = "bfloat16",
    device: Device = "auto",
    threads: Threads = None,
    no_cache: bool = flag("Use neither KV cache nor compiled engine: to check them.", "--no-cache"),
    raw: bool = flag("Do not escape control characters on a terminal.", "--raw"),
    show_sources: bool = flag(
        "Mark passages of 20+ characters copied from the training text; name their files.",
        "--sources",
    ),
    as_json: AsJson = False,
    cache: Cache = DEFAULT_CACHE_DIR,
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
    given = {
        "--prompt": prompt,
        "--prompt-file": prompt_file,
        "--prompts": prompts,
        "--interactive": interactive or None,
    }
    named = [name for name, value in given.items() if value is not None]
    _check_prompts(named, chat, as_json, samples)
    if show_sources and prompts is not None:
        raise ConfigError("--sources: cannot be combined with --prompts; leave one out")
    if (prompts is None) != (out is None):
        raise ConfigError("--prompts, --out: one needs the other; give both")
    if str(out) == "-":
        raise ConfigError("--out -: the output must be a file, so that it can resume; name one")
    path = open_run(run, "--prompt", "--prompt-file")
    draft_path = None if draft is None else resolve_run(draft)
    load_torch()
    from gptmini.cli import prompts_file
    from gptmini.console import say
    from gptmini.generate.run import load_run

    trained = load_run(path, device, weights, cache)
    if run is None:
        say(f"{path}, step {trained.step}")
    _point_out_line_breaks(prompt, stop)
    if not named and _has_piped_input():
        say("standard input is not read; to continue it, add --prompt-file -")
    if show_sources:
        trained.find_copies("")  # refuses now
    drafter: Run | str | None = "lookup" if lookup else None
    if draft_path is not None:
        drafter = load_run(draft_path, device, weights, cache)
    how: Settings = {
        "use_cache": not no_cache,
        "special": special or chat,
        "draft": drafter,
        "logprobs": as_json or prompts is not None,
    }
    if prompts is not None and out is not None:
        prompts_file.generate_file(trained, prompts, out, samples, batch_size, settings, **how)
    elif interactive:
        converse = _chat if chat else _continue_lines
        converse(trained, settings | how, raw, show_sources)
    else:
        text = prompt or read_text(prompt_file).removesuffix("\n").removesuffix("\r")
        start: str | list[int] = text
        if chat:
            start = trained.encode_chat([{"role": "user", "content": text}])
            text = ""
        _print_texts(
            trained, start, samples, batch_size, settings | how, raw, as_json, show_sources, text
        )


def _check_prompts(named: list[str], chat: bool, as_json: bool, samples: int) -> None:
    """Check that the options that give prompts, those `named`, go together with the others."""
    if len(named) > 1:
        raise ConfigError(f"{named[0]}: cannot be combined with {named[1]}; leave one out")
    if chat and named in ([], ["--prompts"]):
        raise ConfigError("--chat: needs --prompt, --prompt-file or --interactive; give one")
    if as_json and named and named[0] in ("--interactive", "--prompts"):
        raise ConfigError(f"--json: cannot be combined with {named[0]}; leave one out")
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


def _point_out_line_breaks(prompt: str | None, stop: list[str] | None) -> None:
    """Warn that a backslash and an n typed in a shell are not a line break."""
    from gptmini.console import say

    labeled = [("--prompt", prompt or "")]
    labeled += [("--stop", text) for text in stop or []]
    for label, text in labeled:
        if "\\n" in text:
            say(f"{label}: \\n is taken as two characters; for a line break, type $'\\n' in bash")


def _has_piped_input() -> bool:
    """Tell whether standard input is a pipe or a file that holds something."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        ready = select.select([sys.stdin], [], [], 0)[0]
    except (OSError, ValueError, AttributeError):  # closed, replaced, or on Windows
        return False
    return bool(ready) and (stat.S_ISFIFO(mode) or stat.S_ISREG(mode))


def _print_texts(
    run: "Run",
    prompt: str | list[int],
    samples: int,
    batch_size: int,
    settings: Settings,
    raw: bool,
    as_json: bool,
    show_sources: bool,
    shown: str,
) -> None:
    """Print the texts of one prompt: a single one while it is generated, several in turn.

    What is `shown` stands before each: the prompt, or nothing before an answer. A text that is to
    be marked is printed when it is complete.
    """
    from gptmini.console import mark, say, show_elapsed, shows_colours, stream_to_stdout

    batches = [range(n, min(n + batch_size, samples)) for n in range(0, samples, batch_size)]
    generations = (run.start([prompt] * len(numbers), numbers, **settings) for numbers in batches)
    if as_json:
        _print_json(run, list(generations), show_sources)
        return
    streams = samples == 1 and not (show_sources and shows_colours())
    for generation in generations:
        if streams:
            pieces = chain([shown], (piece for _, piece in generation), ["\n"])
            if not stream_to_stdout(pieces, raw):
                return
        with show_elapsed("generating"):
            texts = generation.finish()
        for text in texts:
            found = run.find_copies(text.text, text.prompt) if show_sources else None
            if not streams:
                before = shown if samples == 1 else f"--- {text.number + 1}\n{shown}"
                stretches = found.stretches if found else []
                marked = mark(f"{text.text}\n", stretches, raw)
                if not stream_to_stdout(chain(mark(before, [], raw), marked), raw=True):
                    return
            if found is not None:
                _say_copies(found, text.text)
        if sys.stderr.isatty():
            say(_describe_speed(generation))


def _say_copies(found: "Copies", text: str) -> None:
    """Say how much of a text is copied, and where the longest copies stand."""
    from gptmini.console import say

    say(f"\n{found.describe()}")
    longest_first = sorted(found.copies, key=lambda copy: -copy.length)
    for copy in longest_first[:SHOWN_COPIES]:
        words = " ".join(text[copy.start : copy.end].split())
        say(f"{copy.length:6,}  {copy.place}: {shorten(words, QUOTED_CHARACTERS)}")
    if len(found.copies) > SHOWN_COPIES:
        say(f"        and {len(found.copies) - SHOWN_COPIES:,} shorter ones")


def _describe_speed(generation: "Generation") -> str:
    speed = generation.n_tokens / max(generation.seconds, 1e-9)
    line = (
        f"{generation.n_tokens:,} tokens at {speed:,.0f} tokens/s, first token after "
        f"{generation.time_to_first_token * 1000:.0f} ms ({generation.engine} engine)"
    )
    if generation.drafted:
        line += f"; {generation.accepted:,} of {generation.drafted:,} drafted tokens accepted"
    return line


def _print_json(run: "Run", generations: "list[Generation]", show_sources: bool) -> None:
    """Print samples and speed as one JSON object."""
    from gptmini.console import stream_to_stdout

    samples: list[dict[str, Any]] = []
    for text in chain.from_iterable(generation.finish() for generation in generations):
        samples.append(text.to_dict())
        if show_sources:
            samples[-1]["sources"] = run.find_copies(text.text, text.prompt).to_dict()
    n_tokens = sum(generation.n_tokens for generation in generations)
    seconds = sum(generation.seconds for generation in generations)
    facts: dict[str, Any] = {
        "samples": samples,
        "tokens_per_second": round(n_tokens / max(seconds, 1e-9), 1),
        "time_to_first_token": round(generations[0].time_to_first_token, 4),
        "engine": generations[0].engine,
    }
    if drafted := sum(generation.drafted for generation in generations):
        facts["drafted"] = drafted
        facts["accepted"] = sum(generation.accepted for generation in generations)
    stream_to_stdout([json.dumps(facts), "\n"])


def _read_line() -> str | None:
    """Read what is typed; None where the user quits."""
    from gptmini.console import say

    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows lacks it
            import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            line = input("> ")
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            say("")
            continue
        return None if line.strip() in ("exit", "quit") else line


def _continue_lines(run: "Run", settings: Settings, raw: bool, show_sources: bool) -> None:
    """Continue prompts as they are typed; Ctrl-C stops the current text, not the program."""
    from gptmini.console import say

    say(
        "Type a prompt; an empty line continues the last text. "
        "Ctrl-C stops a text; exit or Ctrl-D quits."
    )
    text = ""
    turn = 0
    while (line := _read_line()) is not None:
        text = line or text
        # The same prompt gives another text each time, unless a seed asks for one text.
        number = 0 if "seed" in settings else turn
        new = _print_answer(run, text, number, settings, raw, shown=line)
        if show_sources:
            _say_copies(run.find_copies(new, text), new)
        text += new
        turn += 1


def _chat(run: "Run", settings: Settings, raw: bool, show_sources: bool) -> None:
    """Answer messages as they are typed, each with what was said before, as far as it fits."""
    from gptmini.console import say

    run.render_chat([{"role": "user", "content": ""}])  # refuses a run without a template now
    say("Type a message. Ctrl-C stops an answer; exit or Ctrl-D quits.")
    settings.setdefault("overflow", "stop")  # an answer ends with the context
    max_new_tokens = settings.get("max_new_tokens", run.config.sample.max_new_tokens)
    messages: list[dict[str, Any]] = []
    turn = 0
    has_dropped = False
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        kept = drop_oldest_turns(run, messages, max_new_tokens)
        if len(kept) < len(messages) and not has_dropped:
            say("The conversation outgrows the context: the model forgets its oldest turns.")
            has_dropped = True
        messages = kept
        turn += 1
        answer = _print_answer(run, run.encode_chat(messages), turn, settings, raw)
        if show_sources:
            _say_copies(run.find_copies(answer), answer)
        messages.append({"role": "assistant", "content": answer})


def _print_answer(
    run: "Run", prompt: str | list[int], number: int, settings: Settings, raw: bool, shown: str = ""
) -> str:
    """Print a text as it is generated, behind what is `shown`; return it, or its part at Ctrl-C."""
    from gptmini.console import stream_to_stdout

    generation = None
    try:
        generation = run.start([prompt], [number], **settings)
        stream_to_stdout(chain([shown], (piece for _, piece in generation), ["\n"]), raw)
    except KeyboardInterrupt:
        stream_to_stdout(["\n"])
    return generation.samples[0].text if generation else ""


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
