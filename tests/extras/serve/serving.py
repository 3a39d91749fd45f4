"""A server in this process, and the texts that it should give."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gptmini.extras.serve.limits import Limits
from gptmini.extras.serve.server import Server, create_http_server, list_host_names, listen
from gptmini.generate.run import Run


@contextmanager
def serving(
    run: Run, key: str = "", host: str = "127.0.0.1", page: bytes | None = None, **limits
) -> Iterator[str]:
    """The address of a server in this process."""
    listening = listen(host, 0)
    limits = {"max_tokens": 100_000, "drain_seconds": 5} | limits
    app = Server(run, Limits(**limits), key, list_host_names(listening), page)
    http_server = create_http_server(app)
    thread = threading.Thread(target=http_server.run, args=[[listening]], name="http server")
    thread.start()
    try:
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{listening.getsockname()[1]}"
    finally:
        http_server.should_exit = True
        thread.join(600)
        assert not thread.is_alive()


def alone(run: Run, prompt: str, number: int = 0, **settings) -> str:
    (text,) = run.start([prompt], [number], **settings).finish()
    return text.text
