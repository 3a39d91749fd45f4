"""OpenAI's chat format: a completion of the prompt that a chat template makes of messages."""

import secrets
from typing import Any

from gptmini.errors import UNSUPPORTED, ConfigError, shorten
from gptmini.extras.serve.completions import MAX_LOGPROBS, SAMPLE_SETTINGS, Completion, TooLongError
from gptmini.extras.serve.limits import Limits
from gptmini.extras.serve.scheduler import Request, TokenEvents
from gptmini.generate.run import Run

# Fields that mean the same in both formats.
SHARED_FIELDS = {"model", "n", "stream", "stream_options", "logit_bias", "user", *SAMPLE_SETTINGS}
OWN_FIELDS = {
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "response_format",
}
ROLES = ("system", "developer", "user", "assistant")  # as in training


class ChatCompletion(Completion):
    """A request with messages that was checked, and its answer as it grows."""

    def __init__(self, run: Run, name: str, limits: Limits, data: dict[str, Any]) -> None:
        """Check `data`, the JSON of the request; ConfigError or DataError names a wrong field."""
        fields = {key: value for key, value in data.items() if value is not None}
        messages = _check_messages(fields.get("messages"))
        self._n_top_logprobs = _check_logprobs(fields)
        for key in fields.keys() - SHARED_FIELDS - OWN_FIELDS:
            raise ConfigError(f"{shorten(key)}: {UNSUPPORTED}")
        if fields.get("response_format", {"type": "text"}) != {"type": "text"}:
            raise ConfigError("response_format: only text is supported; leave it out")
        # With null, which turns top_k and its kin off.
        completion_fields = {key: data[key] for key in data.keys() & SHARED_FIELDS}
        if completion_fields.get("overflow") is None:
            completion_fields["overflow"] = "stop"  # an answer ends by itself or with the context
        max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
        if max_tokens is None:
            max_tokens = self._choose_max_tokens(limits, fields.get("n", 1))
        completion_fields["max_tokens"] = max_tokens
        if fields.get("logprobs"):
            completion_fields["logprobs"] = self._n_top_logprobs
        completion_fields["prompt"] = run.encode_chat(messages)
        try:
            super().__init__(run, name, limits, completion_fields)
        except TooLongError as error:  # the client sent messages, not a prompt
            raise TooLongError(f"messages{error.lines[0].removeprefix('prompt')}") from None
        self._has_role_sent = [False] * len(self.requests)
        self._common_fields["id"] = f"chatcmpl-{secrets.token_hex(12)}"
        self._common_fields["object"] = "chat.completion"
        if self.stream:
            self._common_fields["object"] = "chat.completion.chunk"

    def _choose_max_tokens(self, limits: Limits, n: Any) -> int:
        """Choose the most tokens for each of n answers that the limits of a request allow."""
        n_answers = n if type(n) is int and n > 0 else 1  # else it is refused later
        n_fitting = limits.max_values // (n_answers * (1 + self._n_top_logprobs))
        return max(1, min(limits.max_tokens, n_fitting))

    def build_choice(self, index: int, events: TokenEvents) -> dict[str, Any]:
        """Build what these events add to an answer: all of its message, or a part."""
        choice = super().build_choice(index, events)
        content = choice.pop("text")
        if not self.stream:
            return choice | {"message": {"role": "assistant", "content": content}}
        part: dict[str, Any] = {}
        if not self._has_role_sent[index]:
            self._has_role_sent[index] = True
            part["role"] = "assistant"
        if content or "role" in part:
            part["content"] = content
        return choice | {"delta": part}

    def _build_logprobs(self, request: Request, events: TokenEvents) -> dict[str, Any] | None:
        if request.n_logprobs is None:
            return None
        content = []
        for event in events:
            top = [self._describe_token(*each) for each in event.top_logprobs]
            described = self._describe_token(event.token, event.logprob)
            content.append(described | {"top_logprobs": top})
        return {"content": content}

    def _describe_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        name = self._spell_token(token)
        data = name.encode() if token in self._special else self._tokenizer.decode_token(token)
        return {"token": name, "logprob": logprob, "bytes": list(data)}


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages with their contents as text; ConfigError for others than text."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError("messages: must be a list of messages, and not empty")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ConfigError(f"{where}: must be an object with role and content")
        if message.get("role") not in ROLES:
            raise ConfigError(f"{where}.role: must be one of {', '.join(ROLES)}")
        for field, value in message.items():
            # Clients send back whole answers of other servers, with fields that are empty.
            if field not in ("role", "content", "name") and value not in (None, "", [], {}):
                raise ConfigError(f"{where}.{shorten(field)}: {UNSUPPORTED}")
        checked.append({"role": message["role"], "content": _join_content(message, where)})
    return checked


def _join_content(message: dict[str, Any], where: str) -> str:
    """Return the content of a message, given as text or in parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        fields = part if isinstance(part, dict) else {}
        stated = {key for key, value in fields.items() if value is not None}
        text = fields.get("text")
        if stated != {"type", "text"} or fields["type"] != "text" or not isinstance(text, str):
            raise ConfigError(
                f"{where}.content: must be text, or a list of parts of type text and nothing else"
            )
        texts.append(text)
    return "".join(texts)


def _check_logprobs(fields: dict[str, Any]) -> int:
    """Return how many alternatives to list for each token."""
    wanted = fields.get("logprobs", False)
    n_top = fields.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise ConfigError("logprobs: must be true or false")
    if type(n_top) is not int or not 0 <= n_top <= MAX_LOGPROBS:
        raise ConfigError(f"top_logprobs: must be 0 to {MAX_LOGPROBS}")
    if n_top and not wanted:
        raise ConfigError("top_logprobs: has no effect without logprobs; set that to true")
    return n_top
