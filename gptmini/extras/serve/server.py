"""The HTTP server: routes, who may use them, errors in OpenAI's shape, metrics, shutdown.

Requests run in an event loop, texts are generated in the scheduler's thread. Two calls cross: the
loop submits requests, and the thread asks the loop to run their callbacks, which put events into
the queue of their request. A request takes a text off the engine by setting its `finish_reason`.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import httptools  # noqa: F401  uvicorn loads it when it starts; name it here if it is missing
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptmini.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GptminiError,
    MachineError,
    shorten,
)
from gptmini.extras.serve.chat import ChatCompletion
from gptmini.extras.serve.completions import Completion, TooLongError
from gptmini.extras.serve.connection import Connection
from gptmini.extras.serve.limits import Limits
from gptmini.extras.serve.scheduler import Deliveries, Scheduler, TokenEvents
from gptmini.extras.serve.workers import run_in_thread
from gptmini.generate.run import Run

# Connections besides one for each text: those that wait, are refused, or ask for /health.
SPARE_CONNECTIONS = 256
# That wait to be accepted. asyncio accepts so many at a time, before any of them can be refused.
BACKLOG = 128
SPARE_DESCRIPTORS = 64  # files, libraries and the system's own
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "::1"]
# A name or an address, an IPv6 address in brackets, and perhaps a port.
HOST_HEADER = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::\d*)?")
NO_PAGE = "No page is installed here; the API is at /v1.\n"
PIECE_BYTES = 1 << 18  # of the page
# A browser asks its user, and then sends the password with all that the page asks for.
ASK_FOR_PASSWORD = {"WWW-Authenticate": 'Basic realm="gptmini", charset="UTF-8"'}
INTERNAL_ERROR = "internal error; see the server's log"
HISTOGRAM_BUCKETS = [2.0**n for n in range(-10, 10)]  # seconds, from 1 ms to 9 minutes
EVENT_STREAM = "text/event-stream; charset=utf-8"
NO_STORE = {"Cache-Control": "no-store"}
CLIENT_CLOSED_REQUEST = 499  # as nginx counts clients that leave
EventStream = AsyncIterator[tuple[int, TokenEvents]]  # with the index of their text


class Server:
    """The application around one run; clients must send `key` unless it is empty."""

    def __init__(
        self,
        run: Run,
        limits: Limits,
        key: str = "",
        hosts: list[str] | None = None,
        page: bytes | None = None,
    ):
        """`hosts` are the names that clients may use for this machine; None allows any.

        `page` is what browsers get.
        """
        self.limits = limits
        self._page = page
        self._etag = f'"{hashlib.sha256(page).hexdigest()[:32]}"' if page else ""
        self._run = run
        self._key = key.encode()
        name = run.path.resolve().name
        self._name = name.encode(errors="replace").decode()  # a folder's name may be any bytes
        self._scheduler = Scheduler(run, limits.max_rows, limits.max_waiting, self._deliver)
        self._create_metrics()
        guard = self._guard
        complete, chat = (partial(self._answer, kind) for kind in (Completion, ChatCompletion))
        routes = [
            Route("/", self._send_page),
            Route("/health", self._health),
            Route("/metrics", guard(self._metrics)),
            Route("/v1/models", guard(self._models)),
            Route("/v1/models/{name:path}", guard(self._models)),
            Route("/v1/completions", guard(complete), methods=["POST"]),
            Route("/v1/chat/completions", guard(chat), methods=["POST"]),
        ]
        refused = (HTTPException, GptminiError, ClientDisconnect, Exception)
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(_Gate, hosts=hosts, refuse=self._refuse)],
            exception_handlers=dict.fromkeys(refused, self._refuse),
            lifespan=self._lifespan,
        )

    def _create_metrics(self) -> None:
        """Create what /metrics reports, in a registry of this server's own."""
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, buckets=HISTOGRAM_BUCKETS, registry=self._registry)
        self._requests = counter("gptmini_requests", "Answers by status.", ["status"])
        self._prompt_tokens = counter("gptmini_prompt_tokens", "Tokens of prompts.")
        self._generated_tokens = counter("gptmini_generated_tokens", "Tokens generated.")
        self._time_to_first_token = histogram(
            "gptmini_time_to_first_token_seconds", "From request to first token."
        )
        self._time_between_tokens = histogram(
            "gptmini_time_between_tokens_seconds", "Between two tokens of a text."
        )
        texts = Gauge("gptmini_texts", "Texts by state.", ["state"], registry=self._registry)
        texts.labels("waiting").set_function(lambda: len(self._scheduler.waiting))
        texts.labels("running").set_function(lambda: len(self._scheduler.running))

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._free_threads = asyncio.Semaphore(self.limits.max_preparing)
        self._scheduler.start()
        yield
        # In a thread, as it waits for the scheduler's present step.
        await asyncio.to_thread(self._scheduler.stop)

    def _guard(self, handler: Callable[[Request], Awaitable[Response]]) -> Any:
        """Let only requests with the key through, and none from the pages of other sites."""

        async def guarded(request: Request) -> Response:
            if not self._has_key(request.headers):
                raise HTTPException(
                    401, "api key: missing or wrong; send Authorization: Bearer and the key"
                )
            if not _is_same_origin(request.headers):
                raise HTTPException(403, "origin: pages of other sites are refused")
            return await handler(request)

        return guarded

    def _has_key(self, headers: Headers) -> bool:
        """Tell whether a request has the key: as clients send it, or as a browser's password."""
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as latin-1. Bytes are stripped, as latin-1 has spaces that are
        # parts of characters in UTF-8.
        sent_key = sent.encode("latin-1").strip()
        if scheme.lower() == "basic":
            with suppress(ValueError):
                sent_key = base64.b64decode(sent_key).partition(b":")[2]
        elif scheme.lower() != "bearer":
            sent_key = b""
        # Takes the same time wherever the keys differ.
        return not self._key or hmac.compare_digest(sent_key, self._key)

    async def _refuse(self, _: object, error: Exception) -> Response:
        status, content, headers = _describe_failure(error)
        self._requests.labels(status).inc()
        return JSONResponse(content, status, headers)

    async def _send_page(self, request: Request) -> Response:
        if self._page is None:
            return PlainTextResponse(NO_PAGE)
        if not self._has_key(request.headers):
            raise HTTPException(401, "page: needs the API key as the password", ASK_FOR_PASSWORD)
        # The page has a policy of its own, which cannot keep it out of frames.
        headers = {
            "ETag": self._etag,
            "Cache-Control": "no-cache",
            "Content-Security-Policy": "frame-ancestors 'none'",
        }
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        # In pieces, so that no connection holds a copy of it: uvicorn waits for clients that read
        # slowly, and texts go on meanwhile, as Starlette calls the iterator in a thread.
        headers["Content-Length"] = str(len(self._page))
        page = memoryview(self._page)
        starts = range(0, len(page), PIECE_BYTES)
        pieces = (bytes(page[start : start + PIECE_BYTES]) for start in starts)
        return StreamingResponse(pieces, headers=headers, media_type="text/html; charset=utf-8")

    async def _health(self, _: Request) -> Response:
        alive = self._scheduler.is_alive()
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        """List the one model, or describe it."""
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "gptmini"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != self._name:
            raise HTTPException(404, f"model: {shorten(name)!r} is not served; ask /v1/models")
        return JSONResponse(model)

    async def _answer(self, kind: type[Completion], request: Request) -> Response:
        """Answer a request for a completion of a kind, once its texts are under way."""
        if kind is ChatCompletion and self._run.tokenizer.chat_template is None:
            raise HTTPException(404, "a base model has no chat format; use /v1/completions")
        deadline = self._loop.time() + self.limits.request_seconds
        read_seconds = min(self.limits.read_seconds, self.limits.request_seconds)
        late = HTTPException(408, "body: did not arrive in time; send it faster")
        async with _limit_time(self._loop.time() + read_seconds, late):
            body = await self._read_body(request)
        # In a thread, as a long prompt, or an odd template or tokenizer, takes a while.
        problem = "prompt: tokenizing took too long; shorten it, or try again later"
        late = HTTPException(503, problem, {"x-should-retry": "false"})
        async with _limit_time(self._loop.time() + self.limits.prepare_seconds, late):
            prepare = partial(self._prepare, request, body, kind)
            completion = await run_in_thread(self._free_threads, prepare)
        if not self._scheduler.submit(completion.requests):
            raise HTTPException(429, "the queue is full; try again later", {"Retry-After": "1"})
        self._prompt_tokens.inc(completion.prompt_tokens)
        return _CompletionResponse(completion, self._stream_events(completion, deadline))

    async def _read_body(self, request: Request) -> bytes:
        """Read the body, whatever its Content-Type."""
        max_bytes = self.limits.max_body_bytes
        too_long = HTTPException(413, f"body: over {max_bytes:,} bytes; shorten it")
        if int(request.headers.get("content-length", 0)) > max_bytes:
            raise too_long
        body = bytearray()
        async for chunk in request.stream():  # refuse a long body before it is all in memory
            body += chunk
            if len(body) > max_bytes:
                raise too_long
        if not body and "upgrade" in request.headers:  # then httptools drops the body
            raise HTTPException(400, "upgrade: not supported; send HTTP/1.1 without it")
        return bytes(body)

    def _prepare(self, request: Request, body: bytes, kind: type[Completion]) -> Completion:
        """Make texts of a body; runs in a thread, once that is free."""
        left = asyncio.run_coroutine_threadsafe(request.is_disconnected(), self._loop)
        if left.result():  # while it waited
            raise ClientDisconnect
        data = _parse_object(body)
        try:
            return kind(self._run, self._name, self.limits, data)
        except RecursionError:
            raise HTTPException(400, "body: nested too deeply; flatten it") from None

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
        problem = f"not done in {self.limits.request_seconds:g} seconds; lower max_tokens"
        late = HTTPException(504, problem, {"x-should-retry": "false"})
        last_event: dict[int, float] = {}  # for each text, when its last event came
        n_live = len(completion.requests)
        while n_live:
            async with _limit_time(deadline, late):
                index, events = await completion.events.get()
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


class _Gate:
    """Middleware around all routes: refuses unknown hosts, and answers what a shutdown cancels."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: list[str] | None,
        refuse: Callable[[object, Exception], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it names another host."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
        except HTTPException as problem:
            await (await self._refuse(None, problem))(scope, receive, send)
            return
        started: Message = {}

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            # Requests that are not done `drain_seconds` after SIGTERM are cancelled by uvicorn.
            error = HTTPException(503, "the server is stopping; send the request again")
            response = await self._refuse(None, error)
            if not started:
                await response(scope, receive, send)
            elif (b"content-type", EVENT_STREAM.encode()) in started["headers"]:
                event = _format_event(json.loads(bytes(response.body))).encode()
                await send({"type": "http.response.body", "body": event})

    def _check(self, headers: Headers) -> None:
        """Refuse what a proxy may read otherwise, and unknown hosts."""
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise HTTPException(400, "host: sent more than once; send it once")
        if {each.lower() for each in headers.getlist("transfer-encoding")} - {"chunked"}:
            raise HTTPException(501, "transfer-encoding: only chunked is known; leave others out")
        # DNS rebinding: a web site may point a name of its own at the reader's machine, so that its
        # scripts may talk to this server. Requests under unknown names are refused.
        host = hosts[0] if hosts else ""
        if self._hosts is not None and _parse_host(host) not in self._hosts:
            known = " or ".join(self._hosts)
            problem = f"{shorten(host)!r} is not this server; use {known}, or serve with --host"
            raise HTTPException(400, f"host: {problem}")


class _CompletionResponse(StreamingResponse):
    """The response to a request; however it ends, its texts leave the engine.

    A response that is not streamed is one chunk. Starlette cancels both kinds when the client
    disconnects, so that nobody generates for a client that is gone.
    """

    def __init__(self, completion: Completion, stream: EventStream) -> None:
        self._completion = completion
        self._stream = stream
        if completion.stream:
            self._chunks = self._format_events()
            media_type = EVENT_STREAM
        else:
            self._chunks = self._collect_response()
            media_type = "application/json"
        super().__init__(self._chunks, headers=NO_STORE, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; then cancel all texts that have not ended."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.cancel()

    async def stream_response(self, send: Send) -> None:
        """Wait for the first chunk before the status is sent, as an error changes the status."""
        first = await anext(self._chunks)
        if not self._completion.stream:  # it is all
            self.headers["Content-Length"] = str(len(first.encode()))
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

        def build() -> str:
            choices = [self._completion.build_choice(*each) for each in enumerate(collected)]
            return json.dumps(self._completion.build_response(choices))

        yield await asyncio.to_thread(build)  # many log-probabilities take a while

    async def _format_events(self) -> AsyncIterator[str]:
        """Yield server-sent events, one for each token that adds something."""
        async for index, events in self._stream:
            choice = self._completion.build_choice(index, events)
            if any(value for key, value in choice.items() if key != "index"):
                yield _format_event(self._completion.build_response([choice], usage=False))
        if self._completion.include_usage:
            yield _format_event(self._completion.build_response([]))
        yield "data: [DONE]\n\n"


@asynccontextmanager
async def _limit_time(deadline: float, late: HTTPException) -> AsyncIterator[None]:
    """Raise `late` where the block is not done by a time of the loop."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise late from None


def _format_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body.decode())
        if b"\\u" in body:  # an escape can spell half a character
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"body: not valid JSON ({str(error)[:80]})") from None
    if not isinstance(data, dict):
        raise HTTPException(400, "body: must be a JSON object")
    return data


def _parse_host(header: str) -> str | None:
    """Return the name or address in a Host header, without its port."""
    match = HOST_HEADER.fullmatch(header)
    if match is None:
        return None
    return (match["ipv6"] or match["name"] or "").lower()


def _is_same_origin(headers: Headers) -> bool:
    """Tell whether a request comes from our own page, or from no page at all.

    A form on another site can send anything to this server without asking it first. Browsers then
    say where the request comes from, in either of two headers; other clients send neither.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _describe_failure(error: Exception) -> tuple[int, dict[str, Any], Any]:
    """Return the status, the JSON in OpenAI's shape and the headers for a request that failed."""
    headers = None
    if isinstance(error, HTTPException):
        status = error.status_code
        message = error.detail
        headers = error.headers
        if status == 404 and message == "Not Found":  # Starlette's word
            message = "no such address; the API is at /v1, such as /v1/completions"
        elif status == 405:
            message = f"method: not for this address; use {(headers or {}).get('Allow')}"
    elif isinstance(error, ConfigError | DataError):
        status = 400
        # Clients know the settings by the names of OpenAI's fields.
        message = "; ".join(error.lines)
        message = message.replace("sample.", "").replace("max_new_tokens", "max_tokens")
    elif isinstance(error, CheckpointError):  # a chat template that cannot be rendered
        status = 500
        message = "; ".join(error.lines)
        headers = {"x-should-retry": "false"}  # it fails again, perhaps after many seconds
    elif isinstance(error, ClientDisconnect):
        status = CLIENT_CLOSED_REQUEST
        message = "the client left"
    else:
        status = 500
        message = INTERNAL_ERROR
    # Messages repeat what was sent, which may be long, or no valid Unicode.
    message = shorten(message, 500).encode("utf-8", "backslashreplace").decode()
    # Our messages begin with the field at fault and a colon, where there is one.
    name, colon, _ = message.partition(":")
    param = name if colon and " " not in name else None
    # By this code, clients that cut or summarize long prompts know when to.
    code = "context_length_exceeded" if isinstance(error, TooLongError) else None
    kind = "server_error" if status >= 500 else "invalid_request_error"
    content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return status, content, headers


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that clients can connect to; port 0 is any free one.

    Raises MachineError if the address is taken or does not exist.
    """
    if not host:  # to the system, every address of this machine
        raise ConfigError("--host: empty; 127.0.0.1 is this machine, 0.0.0.0 every interface")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        # `create_server` adds the address to its message, which ours names already; so look the
        # message up by number. Errors of name resolution have no positive number and no addition.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error.strerror)
        name = f"[{host}]" if family == socket.AF_INET6 else host
        problem = f"{name}:{port}: {reason.lower()}; choose another --port or --host"
        raise MachineError(problem) from None
    # Every connection inherits this: send each token at once instead of gathering for up to 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def list_host_names(listening: socket.socket) -> list[str] | None:
    """List the names under which only this machine can reach a socket; None if others can, too."""
    address = str(listening.getsockname()[0])
    if not ipaddress.ip_address(address).is_loopback:
        return None
    return list(dict.fromkeys([*LOOPBACK_NAMES, address]))


def create_http_server(server: Server) -> uvicorn.Server:
    """Create the server of connections around an application."""
    limits = server.limits
    max_connections = _allow_connections(limits.max_rows + limits.max_waiting + SPARE_CONNECTIONS)
    config = uvicorn.Config(
        server.app,
        http=partial(Connection, limits, max_connections),  # type: ignore[arg-type]  # only called
        ws="none",
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.read_seconds,
        timeout_graceful_shutdown=limits.drain_seconds,
    )
    return uvicorn.Server(config)


def _allow_connections(n_wanted: int) -> int:
    """Let this process open so many connections, or return how many the system allows."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return n_wanted
    n_others = BACKLOG + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= n_wanted + n_others:
        return n_wanted
    allowed = n_wanted + n_others
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - n_others)


def serve(server: Server, listening: socket.socket) -> None:
    """Answer requests until SIGTERM, SIGHUP or Ctrl-C, then finish those under way."""
    # One line per request, without its content; logging survives a full disk.
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    http_server = create_http_server(server)
    # On SIGTERM and Ctrl-C, uvicorn refuses new connections and drains: requests under way have
    # `drain_seconds` to finish. Then it restores the handlers it found and raises the signal again.
    # These do nothing, so that the process ends in good order with exit code 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # A closed terminal is a stop like the others, unless nohup has the server outlive it.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    http_server.run([listening])
