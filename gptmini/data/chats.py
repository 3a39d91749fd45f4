"""Conversations to train on: checked as they are read, then made tokens by a chat template.

The loss counts the assistant's turns and the token that ends each; the bit `IGNORED` marks all
other tokens of a conversation.
"""

from typing import Any

import numpy as np

from gptmini.errors import UNSUPPORTED, CheckpointError, ConfigError, DataError, shorten
from gptmini.tokenizer.chat_template import ROLES, ChatTemplate, Message
from gptmini.tokenizer.chunks import Place
from gptmini.tokenizer.tokenizers import Tokenizer, Tokens

Parts = list[tuple[str, bool]]  # stretches of a text, and whether each is an answer
IGNORED = np.uint32(1 << 31)  # a bit above all tokens
MESSAGE_LISTS = ("messages", "conversations")  # fields of a record
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # other roles have our names
CONVERT_TO_TEXT = "convert the conversations to text"
# Fields of a record that would change its prompt, in the formats of OpenAI and Hugging Face.
PROMPT_FIELDS = ("tools", "functions", "documents", "chat_template_kwargs")


# -- reading ---------------------------------------------------------------------------------------


def find_messages(place: Place, record: dict[str, Any], key: str) -> list[Message] | None:
    """Find the messages of a record, under `key` or `messages`; None if it has none.

    Those of ShareGPT, which have from and value, get role and content.
    Raises DataError, which begins with `place`, for messages that cannot be trained on.
    """
    if isinstance(record.get(key), str):
        return None
    for name in (key, *MESSAGE_LISTS):
        messages = record.get(name)
        if not isinstance(messages, list):
            continue
        has_objects = bool(messages) and isinstance(messages[0], dict)
        if not has_objects and name != "messages":
            continue
        for field in PROMPT_FIELDS:
            if record.get(field):
                raise DataError(f"{place}: {field}: {UNSUPPORTED}")
        return _read_messages(f"{place}: {name}", messages)
    return None


def _read_messages(where: str, messages: list[Any]) -> list[Message]:
    """Read messages; DataError if there are none, or none that answers another."""
    if not messages:
        raise DataError(f"{where}: empty; remove the line")
    read = [_read_message(f"{where}[{n}]", message) for n, message in enumerate(messages)]
    roles = [message["role"] for message in read]
    if "assistant" not in roles:
        raise DataError(f"{where}: no assistant message; add its answer")
    if roles[0] == "assistant":
        raise DataError(f"{where}[0]: starts with the assistant; add a user message")
    return read


def _read_message(where: str, message: Any) -> Message:
    """Read the role and the text of a message; DataError if it has others, or more."""
    if not isinstance(message, dict):
        raise DataError(f"{where}: not an object with role and content; fix the line")
    fields = {name: value for name, value in message.items() if value is not None}
    is_sharegpt = "from" in fields and "role" not in fields
    role_name, content_name = ("from", "value") if is_sharegpt else ("role", "content")
    role = fields.pop(role_name, None)
    content = fields.pop(content_name, None)
    if fields:
        raise DataError(f"{where}.{shorten(next(iter(fields)))}: {UNSUPPORTED}")
    if is_sharegpt and isinstance(role, str):
        role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        problem = "missing" if role is None else f"{role!r:.40}"
        raise DataError(
            f"{where}.{role_name}: {problem}; use {', '.join(ROLES[:-1])} or {ROLES[-1]}"
        )
    if not isinstance(content, str):
        problem = "missing" if content is None else f"{content!r:.40}, not text"
        raise DataError(f"{where}.{content_name}: {problem}; fix or remove the line")
    if not content.strip() and role in ("user", "assistant"):
        raise DataError(f"{where}.{content_name}: empty; fix or remove the line")
    return {"role": role, "content": content}


# -- encoding --------------------------------------------------------------------------------------


class ChatEncoder:
    """Encodes conversations by the chat template of a tokenizer; threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        if tokenizer.chat_template is not None:
            self._template = ChatTemplate(
                tokenizer.chat_template,
                tokenizer.template_tokens,
                "tokenizer.json",
                CONVERT_TO_TEXT,
            )

    def encode(self, messages: list[Message], place: Place) -> Tokens:
        """Encode a conversation (N,), an end-of-text token before it.

        Prompts and answers are encoded apart, since a prompt's tokens come first when generating.
        An answer counts up to the token that ends it. Special tokens are read wherever their names
        stand, as in transformers. Where the template writes a message otherwise once others follow,
        as Qwen3's leaves out earlier thoughts, each answer becomes a document of its own, behind
        what its prompt would be. Raises DataError for what the template refuses, or writes so that
        answers cannot be found.
        """
        if self._template is None:
            raise DataError(
                f"{place}: a conversation, but the tokenizer has no chat template; train a new "
                f"model, begin --from an instruct model, or {CONVERT_TO_TEXT} (docs/data.md)"
            )
        documents = self._split_turns(messages, place, self._template)
        return np.concatenate([self._encode_parts(parts, place) for parts in documents])

    def _encode_parts(self, parts: Parts, place: Place) -> Tokens:
        """Encode a document (N,), an end-of-text token before it."""
        tokens: list[Tokens] = []
        for text, is_answer in parts:
            part = self._tokenizer.encode_special(text, continues=bool(tokens))
            n_learned = self._find_end(part, place) if is_answer else 0
            tokens += [part[:n_learned], part[n_learned:] | IGNORED]
        separator = np.array([self._tokenizer.eos_token_id], np.uint32) | IGNORED
        encoded = np.concatenate(tokens)
        if encoded[0] == separator[0]:  # the template writes it itself
            return encoded
        return np.concatenate([separator, encoded])

    def _split_turns(
        self, messages: list[Message], place: Place, template: ChatTemplate
    ) -> list[Parts]:
        """Split the text of a conversation into answers (True) and what comes between them.

        An answer is what the template adds to the prompt for it. Returns such parts of each
        document: one with all answers, or where that cannot be, one for each answer.
        """
        beginnings = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                beginnings += [(messages[:number], True), (messages[: number + 1], False)]
        try:
            texts = [template.render(*beginning) for beginning in beginnings]
            whole = template.render(messages, False)
        except (ConfigError, CheckpointError) as error:
            raise DataError(f"{place}: {error.lines[0]}") from None
        parts: Parts = []
        each_answer: list[Parts] = []
        done = ""
        rewrites = False
        for prompt, answered in zip(texts[::2], texts[1::2], strict=True):
            if not answered.startswith(prompt):
                raise DataError(
                    f"{place}: the chat template renders prompt and answer inconsistently; "
                    f"{CONVERT_TO_TEXT}"
                )
            answer = answered[len(prompt) :]
            rewrites |= not prompt.startswith(done) or not whole.startswith(answered)
            parts += [(prompt[len(done) :], False), (answer, True)]
            each_answer.append([(prompt, False), (answer, True)])
            done = answered
        return each_answer if rewrites else [[*parts, (whole[len(done) :], False)]]

    def _find_end(self, tokens: Tokens, place: Place) -> int:
        """Find how many tokens of an answer come up to its last end token, included."""
        (ends,) = np.isin(tokens, self._tokenizer.end_tokens).nonzero()
        if not len(ends):
            raise DataError(
                f"{place}: the chat template ends no answer with an end token; {CONVERT_TO_TEXT}"
            )
        return int(ends[-1]) + 1
