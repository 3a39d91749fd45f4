"""Keep a conversation within the context of its model, by dropping the oldest turns."""

from gptmini.generate.run import Run
from gptmini.tokenizer.chat_template import Message


def drop_oldest_turns(run: Run, messages: list[Message], max_new_tokens: int) -> list[Message]:
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
