"""`gptmini chat`: ask a model that learned to answer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gptmini import console
from gptmini.cli.generate import Settings, load, print_answer, read_line
from gptmini.cli.options import (
    WRITING,
    Device,
    MaxNewTokens,
    RunName,
    SampleAssignments,
    Seed,
    Temperature,
    Threads,
    WeightsType,
    option,
    parse_sampling,
    resolve_run,
)

if TYPE_CHECKING:
    from gptmini.generate.run import Run
    from gptmini.tokenizer.chat_template import Message


def chat(
    run: RunName = None,
    prompt: str | None = option(
        None, "TEXT", "Message to answer; without it, type messages.", **WRITING
    ),
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    assignments: SampleAssignments = None,
    weights: WeightsType = "bfloat16",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Talk with a model that learned to answer.

    Sampling options default to the run's own settings.
    """
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    settings = parse_sampling(sampling, assignments)
    trained = load(resolve_run(run), device, weights, shows_name=run is None)
    lines: Iterable[str] = iter(read_line, None)
    if prompt is not None:
        lines = [prompt]
    else:
        trained.render_chat([{"role": "user", "content": ""}])  # refuses a run without a template
        console.say("Type a message. Ctrl-C stops an answer; exit or Ctrl-D quits.")
    _answer_messages(trained, lines, settings)


def _answer_messages(run: "Run", lines: Iterable[str], settings: Settings) -> None:
    """Answer messages with what was said before, as far as it fits."""
    settings.setdefault("overflow", "stop")  # an answer ends with the context
    max_new_tokens = settings.get("max_new_tokens", run.config.sample.max_new_tokens)
    messages: list[Message] = []
    has_dropped = False
    for turn, line in enumerate(filter(str.strip, lines)):
        messages.append({"role": "user", "content": line})
        kept = drop_oldest_turns(run, messages, max_new_tokens)
        if len(kept) < len(messages) and not has_dropped:
            console.say("The conversation outgrows the context: its oldest turns are forgotten.")
            has_dropped = True
        messages = kept
        answer = print_answer(run, run.encode_chat(messages), turn, settings)
        messages.append({"role": "assistant", "content": answer})


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
