"""The HTTP server: routes, limits, errors in OpenAI's shape, metrics, shutdown.

Requests run in an event loop, texts are generated in the scheduler's thread. Two calls cross: the
loop submits requests, and the thread asks the loop to run their callbacks, which put events into
the queue of their request. A request takes a text off the engine by setting its `finish_reason`.
"""

import asyncio
import hmac
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gptmini.errors import ConfigError, DataError, GptminiError, MachineError
from gptmini.generate.run import Run
from gptmini.serve.completions import Completion, TooLongError
from gptmini.serve.scheduler import Deliveries, Scheduler, TokenEvents

LOOPBACK_NAMES = ["127.0.0.1", "localhost"]
PAGE_FILE = Path(__file__).with_name("page.html")
INTERNAL_ERROR = "internal error; see the server's log"
HISTOGRAM_BUCKETS = [2.0**n for n in range(-10, 10)]  # seconds, from 1 ms to 9 minutes
CLIENT_CLOSED_REQUEST = 499  # as nginx counts clients that leave
EventStream = AsyncIterator[tuple[int, TokenEvents]]  # with the index of their text


@dataclass(frozen=True)
class Limits:
    """How much the server takes on."""

    max_rows: int = 32  # texts generated together
    max_waiting: int = 256  # texts in the queue
    max_body_bytes: int = 1 << 20
    request_seconds: float = 600  # from the request's first line to the response's last
    drain_seconds: int = 30  # for requests under way when the server is stopped


class Server:
    """The application around one run; clients must send `key` unless it is empty."""

    def __init__(self, run: Run, limits: Limits, key: str = "", hosts: list[str] | None = None):
        """`hosts` are the names that clients may use for this machine; None allows any."""
        self._run = run
        self._limits = limits
        self._key = key.encode()
        self._name = run.path.resolve().name
        self._scheduler = Scheduler(run, limits.max_rows, limits.max_waiting, self._deliver)
        self._create_metrics()
        guard = self._require_key
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", guard(self._metrics)),
            Route("/v1/models", guard(self._models)),
            Route("/v1/completions", guard(self._complete), methods=["POST"]),
            Route("/v1/chat/completions", guard(self._chat), methods=["POST"]),
        ]
        # DNS rebinding: a web site may point a name of its own at the reader's machine, so that its
        # scripts may talk to this server. Requests under unknown names are refused.
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
        exception_handlers: Any = {
            HTTPException: self._refuse,
            GptminiError: self._refuse,
            ClientDisconnect: self._refuse,
            Exception: self._refuse,
        }
        self.app = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers=exception_handlers,
            lifespan=self._lifespan,
        )

    def _create_metrics(self) -> None:
        """Create what /metrics reports, in a registry of this server's own."""
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter(
            "gptmini_requests", "Answers by status.", ["status"], registry=registry
        )
        self._prompt_tokens = Counter(
            "gptmini_prompt_tokens", "Tokens of prompts.", registry=registry
        )
        self._generated_tokens = Counter(
            "gptmini_generated_tokens", "Tokens generated.", registry=registry
        )
        self._time_to_first_token = Histogram(
            "gptmini_time_to_first_token_seconds",
            "From request to first token.",
            buckets=HISTOGRAM_BUCKETS,
            registry=registry,
        )
        self._time_between_tokens = Histogram(
            "gptmini_time_between_tokens_seconds",
            "Between two tokens of a text.",
            buckets=HISTOGRAM_BUCKETS,
            registry=registry,
        )
        texts = Gauge("gptmini_texts", "Texts by state.", ["state"], registry=registry)
        texts.labels("waiting").set_function(lambda: len(self._scheduler.waiting))
        texts.labels("running").set_function(lambda: len(self._scheduler.running))

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._scheduler.start()
        yield
        # In a thread, as it waits for the scheduler's present step.
        await run_in_threadpool(self._scheduler.stop)

    def _require_key(self, handler: Callable[[Request], Awaitable[Response]]) -> Any:
        async def guarded(request: Request) -> Response:
            sent = request.headers.get("authorization", "").removeprefix("Bearer ")
            # Takes the same time wherever the keys differ. Starlette decodes headers as latin-1.
            if self._key and not hmac.compare_digest(sent.encode("latin-1"), self._key):
                raise HTTPException(401, "api key: missing or wrong; send the server's")
            return await handler(request)

        return guarded

    async def _refuse(self, _: Request, error: Exception) -> Response:
        status, content, headers = _describe_failure(error)
        self._requests.labels(status).inc()
        return JSONResponse(content, status, headers)

    async def _page(self, _: Request) -> Response:
        # The browser applies only the script and the style that carry this random number, so markup
        # in a generated text could run nothing.
        nonce = secrets.token_urlsafe(16)
        policy = [
            "default-src 'none'",
            f"script-src 'nonce-{nonce}'",
            f"style-src 'nonce-{nonce}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
        page = PAGE_FILE.read_text("utf-8").replace("NONCE", nonce)
        return HTMLResponse(page, headers={"Content-Security-Policy": "; ".join(policy)})

    async def _health(self, _: Request) -> Response:
        alive = self._scheduler.is_alive()
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    async def _models(self, _: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "gptmini"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, _: Request) -> Response:
        raise HTTPException(404, "a base model has no chat format; use /v1/completions")

    async def _complete(self, request: Request) -> Response:
        deadline = self._loop.time() + self._limits.request_seconds
        try:
            async with asyncio.timeout_at(deadline):
                data = await self._read_body(request)
        except TimeoutError:
            raise HTTPException(408, "body: did not arrive in time; send it faster") from None
        if (model := data.get("model")) not in (None, self._name):
            raise HTTPException(404, f"model: no {str(model)[:60]!r} here, only {self._name}")
        # In a thread, as splitting a long prompt into tokens takes a while.
        completion = await run_in_threadpool(
            Completion, self._run, self._name, self._limits.max_waiting, data
        )
        if not self._scheduler.submit(completion.requests):
            raise HTTPException(429, "the queue is full; try again later", {"Retry-After": "1"})
        self._prompt_tokens.inc(completion.prompt_tokens)
        stream = self._stream_events(completion, deadline)
        return _CompletionResponse(completion, stream, deadline)

    async def _read_body(self, request: Request) -> dict[str, Any]:
        content_type = request.headers.get("content-type", "")
        media_type = content_type.partition(";")[0].strip().lower()
        # A form on another site can send other types without asking this server first, not JSON.
        if media_type != "application/json":
            raise HTTPException(415, "content-type: must be application/json")
        max_bytes = self._limits.max_body_bytes
        body = bytearray()
        async for chunk in request.stream():  # refuse a long body before it is all in memory
            body += chunk
            if len(body) > max_bytes:
                raise HTTPException(413, f"body: over {max_bytes:,} bytes; shorten it")
        try:
            data = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"body: not valid JSON ({str(error)[:80]})") from None
        if not isinstance(data, dict):
            raise HTTPException(400, "body: must be a JSON object")
        return data

    def _deliver(self, deliveries: Deliveries) -> None:
        """Run the callbacks of a step in the event loop; the scheduler's thread calls this."""

        def run_callbacks() -> None:
            for callback, events in deliveries:
                callback(events)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(run_callbacks)

    async def _stream_events(self, completion: Completion, deadline: float) -> EventStream:
        """Yield the events of all texts as they come, until all texts have ended."""
        started = self._loop.time()
        last_event: dict[int, float] = {}  # for each text, when its last event came
        n_live = len(completion.requests)
        while n_live:
            try:
                async with asyncio.timeout_at(deadline):
                    index, events = await completion.events.get()
            except TimeoutError:
                problem = f"not done in {self._limits.request_seconds:g} seconds; lower max_tokens"
                raise HTTPException(504, problem, {"x-should-retry": "false"}) from None
            if isinstance(events, GptminiError):
                raise events
            if isinstance(events, Exception):  # the scheduler has logged it
                raise HTTPException(500, INTERNAL_ERROR)
            now = self._loop.time()
            if index in last_event:
                self._time_between_tokens.observe(now - last_event[index])
            else:
                self._time_to_first_token.observe(now - started)
            last_event[index] = now
            self._generated_tokens.inc()
            if events[-1].finish_reason is not None:
                n_live -= 1
            yield index, events
        self._requests.labels(200).inc()


class _CompletionResponse(StreamingResponse):
    """The response to a request; however it ends, its texts leave the engine.

    A response that is not streamed is one chunk. Starlette cancels both kinds when the client
    disconnects, so that nobody generates for a client that is gone.
    """

    def __init__(self, completion: Completion, stream: EventStream, deadline: float) -> None:
        self._completion = completion
        self._stream = stream
        self._deadline = deadline
        if completion.stream:
            self._chunks = self._format_events()
            media_type = "text/event-stream"
        else:
            self._chunks = self._collect_response()
            media_type = "application/json"
        headers = {"Cache-Control": "no-store"}
        super().__init__(self._chunks, headers=headers, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; then take texts that have not ended off the engine."""
        try:
            # Sending blocks while a client does not read. The second more is for the error that
            # `_stream_events` raises at the deadline.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._deadline + 1):
                    await super().__call__(scope, receive, send)
        finally:
            for request in self._completion.requests:
                if request.text.finish_reason is None:
                    request.text.finish_reason = "gone"

    async def stream_response(self, send: Send) -> None:
        """Wait for the first chunk before the status is sent, as an error changes the status."""
        first = await anext(self._chunks)
        self.body_iterator = self._chunks_from(first)
        await super().stream_response(send)

    async def _chunks_from(self, first: str) -> AsyncIterator[str]:
        yield first
        try:
            async for chunk in self._chunks:
                yield chunk
        except Exception as error:  # the status is sent already, so the error is an event
            _, content, _ = _describe_failure(error)
            yield _format_event(content)

    async def _collect_response(self) -> AsyncIterator[str]:
        """Yield the whole response as one chunk of JSON."""
        collected: list[TokenEvents] = [[] for _ in self._completion.requests]
        async for index, events in self._stream:
            collected[index] += events
        build_choice = self._completion.build_choice
        choices = [build_choice(index, events) for index, events in enumerate(collected)]
        yield json.dumps(self._completion.build_response(choices))

    async def _format_events(self) -> AsyncIterator[str]:
        """Yield server-sent events, one for each token that adds something."""
        async for index, events in self._stream:
            choice = self._completion.build_choice(index, events)
            if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                yield _format_event(self._completion.build_response([choice], usage=False))
        if self._completion.include_usage:
            yield _format_event(self._completion.build_response([]))
        yield "data: [DONE]\n\n"


def _format_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _describe_failure(error: Exception) -> tuple[int, dict[str, Any], Any]:
    """Return the status, the JSON in OpenAI's shape and the headers for a request that failed."""
    headers = None
    if isinstance(error, HTTPException):
        status = error.status_code
        message = error.detail
        headers = error.headers
    elif isinstance(error, ConfigError | DataError):
        status = 413 if isinstance(error, TooLongError) else 400
        # Clients know the settings by the names of OpenAI's fields.
        message = "; ".join(error.lines)
        message = message.replace("sample.", "").replace("max_new_tokens", "max_tokens")
    elif isinstance(error, ClientDisconnect):
        status = CLIENT_CLOSED_REQUEST
        message = "the client left"
    else:
        status = 500
        message = INTERNAL_ERROR
    # Our messages begin with the field at fault and a colon, where there is one.
    name, colon, _ = message.partition(":")
    content = {
        "message": message,
        "code": None,
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": name if colon and " " not in name else None,
    }
    return status, {"error": content}, headers


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that clients can connect to; port 0 is any free one.

    Raises MachineError if the address is taken or does not exist.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        # `create_server` adds the address to its message, which ours names already; so look the
        # message up by number. Errors of name resolution have no positive number and no addition.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error.strerror)
        problem = f"{host}:{port}: {reason.lower()}; choose another --port or --host"
        raise MachineError(problem) from None
    # Every connection inherits this: send each token at once instead of gathering for up to 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def serve(server: Server, listening: socket.socket, drain_seconds: int) -> None:
    """Answer requests until SIGTERM, SIGHUP or Ctrl-C, then finish those under way."""
    # One line per request, without its content; logging survives a full disk.
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    settings = uvicorn.Config(
        server.app, log_config=None, timeout_graceful_shutdown=drain_seconds, server_header=False
    )
    # On SIGTERM and Ctrl-C, uvicorn refuses new connections and drains: requests under way have
    # `drain_seconds` to finish. Then it restores the handlers it found and raises the signal again.
    # These do nothing, so that the process ends in good order with exit code 0.
    signal.signal(signal.SIGTERM, _ignore_signal)
    signal.signal(signal.SIGINT, _ignore_signal)
    # A closed terminal is a stop like the others, unless nohup has the server outlive it.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise_sigterm)
    uvicorn.Server(settings).run([listening])


def _ignore_signal(*_: object) -> None:
    pass


def _raise_sigterm(*_: object) -> None:
    signal.raise_signal(signal.SIGTERM)
