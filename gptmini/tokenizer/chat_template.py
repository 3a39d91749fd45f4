"""The chat templates of instruct models: programs in Jinja that make one text of messages."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptmini.errors import CheckpointError, ConfigError, shorten

RENDERER = Path(__file__).with_name("template_renderer.py")
MAX_SECONDS = 10  # for an answer; the first one starts a process
Message = dict[str, Any]


class ChatTemplate:
    """A chat template in Jinja; threads may share it.

    It is rendered in another process, where a hostile one can only waste some seconds (see
    `template_renderer`).
    """

    def __init__(
        self,
        source: str,
        tokens: dict[str, str],
        where: str | Path,
        remedy: str = "write the prompt yourself, with --special",
    ) -> None:
        """`tokens` are the names of special tokens by their use, such as bos_token.

        `where` is what messages of errors name, `remedy` what they advise.
        """
        self._source = source
        self._tokens = tokens
        self._where = where
        self._remedy = remedy
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stop: Callable[[], object] = lambda: None  # ends the process

    def render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt for the answer to messages {"role": ..., "content": ...}.

        Raises ConfigError for messages that the template refuses, CheckpointError for a template
        that cannot be rendered.
        """
        (text,) = self.render_all([(messages, add_generation_prompt)])
        return text

    def render_all(self, conversations: Sequence[tuple[list[Message], bool]]) -> list[str]:
        """Render several lists of messages at once, each with its `add_generation_prompt`."""
        constants = {**self._tokens, "tools": None, "documents": None}
        variables = [
            {**constants, "messages": messages, "add_generation_prompt": add_generation_prompt}
            for messages, add_generation_prompt in conversations
        ]
        request = json.dumps({"template": self._source, "variables": variables})
        with self._lock:
            line = self._exchange(request)
        if not line:
            raise CheckpointError(
                f"{self._where}: its chat template uses too much time or memory; {self._remedy}"
            )
        answer = json.loads(line)
        if "texts" in answer:
            return list(map(str, answer["texts"]))
        kind, _, problem = answer["error"].partition(": ")
        if kind == "TemplateError":  # what the template itself says of the conversation
            raise ConfigError(f"messages: {shorten(problem, 200)}")
        raise CheckpointError(
            f"{self._where}: its chat template fails ({shorten(answer['error'], 200)}); "
            f"{self._remedy}"
        )

    def _exchange(self, request: str) -> str:
        """Send a line to the renderer and return its answer; nothing if it fails or takes long."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        deadline = threading.Timer(MAX_SECONDS, process.kill)  # which ends the line below
        deadline.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # it has ended
            pass
        finally:
            deadline.cancel()
            is_whole = answer.endswith("\n")
            if not is_whole:  # also after Ctrl-C, lest the next request gets this one's answer
                self._stop()
        return answer if is_whole else ""

    def _start(self) -> subprocess.Popen[str]:
        """Start a renderer, which ends when this object does."""
        # -P: the folder of the script has modules with names that others may import.
        command = [sys.executable, "-P", "-X", "utf8", str(RENDERER)]
        process = subprocess.Popen(  # noqa: S603 - our own script
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            # Ctrl-C stops an answer, not the renderer of the next one.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._stop()  # one that ended by itself
        self._process = process
        self._stop = weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    """End a renderer that nobody uses any more."""
    process.kill()
    process.communicate()
