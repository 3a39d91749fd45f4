"""The HTTP server: routes, limits, errors in OpenAI's shape, metrics, an orderly end."""

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

LOOPBACK_NAMES = ["127.0.0.1", "localhost"]  # names of this machine
PAGE_FILE = Path(__file__).with_name("page.html")
INTERNAL_ERROR = "internal error; see the server's log"
EventStream = AsyncIterator[tuple[int, TokenEvents]]  # with the index of their text


@dataclass(frozen=True)
class Limits:
    """How much the server takes on."""

    max_rows: int = 32  # texts drawn together
    max_waiting: int = 256  # texts in the queue
    max_body_bytes: int = 1 << 20  # bytes
    request_seconds: float = 600  # per request
    drain_seconds: int = 30  # seconds that running requests have when the server is stopped


class Server:
    """The application around one run; `key`, if not empty, is what clients must send."""

    def __init__(self, run: Run, limits: Limits, key: str = "", hosts: list[str] | None = None):
        """`hosts` are the names that clients may use for this machine; None: any."""
        self._run, self._limits, self._key = run, limits, key.encode()
        self._name = run.path.resolve().name
        self._scheduler = Scheduler(run, limits.max_rows, limits.max_waiting, self._deliver)
        self._create_metrics()
        guard, post = self._require_key, ["POST"]
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", guard(self._metrics)),
            Route("/v1/models", guard(self._models)),
            Route("/v1/completions", guard(self._complete), methods=post),
            Route("/v1/chat/completions", guard(self._chat), methods=post),
        ]
        # A site must not reach a server on the reader's machine under a name of its own.
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
        failures = (HTTPException, GptminiError, ClientDisconnect, Exception)
        refused: Any = dict.fromkeys(failures, self._refuse)
        self.app = Starlette(False, routes, middleware, refused, self._lifespan)

    def _create_metrics(self) -> None:
        """What /metrics tells."""
        self._registry = to = CollectorRegistry()
        powers, seconds = [2.0**n for n in range(-10, 10)], "gptmini_%s_seconds"
        self._requests = Counter("gptmini_requests", "Answers by status.", ["status"], registry=to)
        self._prompt_tokens = Counter("gptmini_prompt_tokens", "Tokens of prompts.", registry=to)
        self._generated_tokens = Counter(
            "gptmini_generated_tokens", "Tokens generated.", registry=to
        )
        self._time_to_first_token, self._time_between_tokens = (
            Histogram(seconds % name, text, buckets=powers, registry=to)
            for name, text in (
                ("time_to_first_token", "From request to first token."),
                ("time_between_tokens", "Between two tokens of a text."),
            )
        )
        texts = Gauge("gptmini_texts", "Texts by state.", ["state"], registry=to)
        texts.labels("waiting").set_function(lambda: len(self._scheduler.waiting))
        texts.labels("running").set_function(lambda: len(self._scheduler.running))

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._scheduler.start()
        yield
        await run_in_threadpool(self._scheduler.stop)

    def _require_key(self, handler: Callable[[Request], Awaitable[Response]]) -> Any:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if self._key and not hmac.compare_digest(given.encode("latin-1"), self._key):
                raise HTTPException(401, "api key: missing or wrong; send the server's")
            return await handler(request)

        return guarded

    async def _refuse(self, _: Request, error: Exception) -> Response:
        status, content, headers = _describe_failure(error)
        self._requests.labels(status).inc()
        return JSONResponse(content, status, headers)

    async def _page(self, _: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        policy += "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        page = PAGE_FILE.read_text("utf-8").replace("NONCE", nonce)
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

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
        most = self._limits.max_waiting
        made = await run_in_threadpool(Completion, self._run, self._name, most, data)
        if not self._scheduler.submit(made.requests):
            raise HTTPException(429, "the queue is full; try again later", {"Retry-After": "1"})
        self._prompt_tokens.inc(made.prompt_tokens)
        return _CompletionResponse(made, self._stream_events(made, deadline), deadline)

    async def _read_body(self, request: Request) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a form on another site cannot send
            raise HTTPException(415, "content-type: must be application/json")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.max_body_bytes:
                raise HTTPException(
                    413, f"body: over {self._limits.max_body_bytes:,} bytes; shorten it"
                )
        try:
            data = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"body: not valid JSON ({str(error)[:80]})") from None
        if not isinstance(data, dict):
            raise HTTPException(400, "body: must be a JSON object")
        return data

    def _deliver(self, news: Deliveries) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: [tell(each) for tell, each in news])

    async def _stream_events(self, completion: Completion, deadline: float) -> EventStream:
        """The pieces of all texts as they come, until all texts have ended."""
        began, last = self._loop.time(), dict[int, float]()
        live = len(completion.requests)
        while live:
            try:
                async with asyncio.timeout_at(deadline):
                    index, pieces = await completion.events.get()
            except TimeoutError:
                problem = f"not done in {self._limits.request_seconds:g} seconds; lower max_tokens"
                raise HTTPException(504, problem, {"x-should-retry": "false"}) from None
            if isinstance(pieces, Exception):
                raise (
                    pieces
                    if isinstance(pieces, GptminiError)
                    else HTTPException(500, INTERNAL_ERROR)
                )
            now = self._loop.time()
            times = self._time_between_tokens if index in last else self._time_to_first_token
            times.observe(now - last.get(index, began))
            last[index] = now
            self._generated_tokens.inc()
            live -= pieces[-1].finish_reason is not None
            yield index, pieces
        self._requests.labels(200).inc()


class _CompletionResponse(StreamingResponse):
    """The response to a request; however it ends, its texts leave the engine."""

    def __init__(self, completion: Completion, stream: EventStream, deadline: float) -> None:
        self._completion, self._stream, self._deadline = completion, stream, deadline
        self._chunks = self._format_events() if completion.stream else self._collect_response()
        kind = "text/event-stream" if completion.stream else "application/json"
        super().__init__(self._chunks, headers={"Cache-Control": "no-store"}, media_type=kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):  # of a client that does not read
                async with asyncio.timeout_at(self._deadline + 1):
                    await super().__call__(scope, receive, send)
        finally:
            for job in self._completion.requests:
                job.text.finish_reason = job.text.finish_reason or "gone"

    async def stream_response(self, send: Send) -> None:
        """Starlette cancels this when the client goes away."""
        first = await anext(self._chunks)  # before the status, which an error changes
        self.body_iterator = self._chunks_from(first)
        await super().stream_response(send)

    async def _chunks_from(self, first: str) -> AsyncIterator[str]:
        yield first
        try:
            async for chunk in self._chunks:
                yield chunk
        except Exception as error:
            yield _format_event(_describe_failure(error)[1])

    async def _collect_response(self) -> AsyncIterator[str]:
        texts: list[TokenEvents] = [[] for _ in self._completion.requests]
        async for index, pieces in self._stream:
            texts[index] += pieces
        choices = [
            self._completion.build_choice(index, pieces) for index, pieces in enumerate(texts)
        ]
        yield json.dumps(self._completion.build_response(choices))

    async def _format_events(self) -> AsyncIterator[str]:
        """Server-sent events, one for each token that shows."""
        async for index, pieces in self._stream:
            choice = self._completion.build_choice(index, pieces)
            if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                yield _format_event(self._completion.build_response([choice], usage=False))
        if self._completion.include_usage:
            yield _format_event(self._completion.build_response([]))
        yield "data: [DONE]\n\n"


def _format_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _describe_failure(error: Exception) -> tuple[int, dict[str, Any], Any]:
    """Status, JSON in OpenAI's shape, and headers of a request that failed."""
    headers = None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, ConfigError | DataError):
        status, message = 413 if isinstance(error, TooLongError) else 400, "; ".join(error.lines)
        message = message.replace("sample.", "").replace("max_new_tokens", "max_tokens")
    elif isinstance(error, ClientDisconnect):
        status, message = 499, "the client left"
    else:
        status, message = 500, INTERNAL_ERROR
    kind = "server_error" if status >= 500 else "invalid_request_error"
    name = message.partition(":")[0]
    facts = {"type": kind, "param": name if ":" in message and " " not in name else None}
    return status, {"error": {"message": message, "code": None} | facts}, headers


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to; port 0 is any free one. MachineError if taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        # Not its own text, which repeats the address; a host that is no name has no such number.
        reason = os.strerror(error.errno or 0) if (error.errno or 0) > 0 else str(error.strerror)
        problem = f"{host}:{port}: {reason.lower()}; choose another --port or --host"
        raise MachineError(problem) from None
    # Every connection inherits this: tokens are sent at once, not gathered for up to 40 ms.
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
    for name in ("SIGTERM", "SIGINT"):  # uvicorn raises them once more when it is done
        signal.signal(getattr(signal, name), lambda *_: None)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    uvicorn.Server(settings).run([listening])
