"""HTTP/1.1 connections with limits and timeouts: what a client may hold without paying for it.

uvicorn reads and writes them and leaves limits to a proxy: with its own, a connection that sends
nothing, or a byte now and then, or reads no answer, stays for ever. Here connections have a number
and the head of a request has a size; each wait has a time, for a head and for a client to read, and
so has each request; and of the requests that a client sends without waiting for answers only a few
are taken in.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gptmini.extras.serve.limits import Limits

READ_BYTES = 4096  # parsed at a time; then other connections have their turn
SPARE_SECONDS = 5  # for the answer to a request whose time is over


def _build_refusal(status: str, message: str) -> bytes:
    """Build an answer in plain text, with its length, so that clients do not wait for the end.

    The end is an error to them if they sent what the server did not read.
    """
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(message)}\r\n\r\n{message}".encode()


HEAD_TOO_LONG = _build_refusal(
    "431 Request Header Fields Too Large",
    "The target and headers of the request are too long; shorten them.\n",
)
TOO_MANY = _build_refusal(
    "503 Service Unavailable", "The server has too many connections; try again later.\n"
)


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """The connection of a client."""

    def __init__(self, limits: Limits, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._max_connections = max_connections
        self._buffer = bytearray(READ_BYTES)
        self._n_head_bytes = 0  # read since the last head or body
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None  # until the client reads on

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport, self, self._limits.max_pipelined)
        self._end_in(self._limits.read_seconds)
        if len(self.connections) > self._max_connections:
            transport.write(TOO_MANY)
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read, but not for ever: its texts go on and fill the memory."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._n_head_bytes += nbytes
        self.data_received(bytes(self._buffer[:nbytes]))
        if self._n_head_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
            self.transport.write(HEAD_TOO_LONG)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._n_head_bytes = 0
        super().on_headers_complete()
        self._end_in(self._limits.request_seconds + SPARE_SECONDS)

    def on_body(self, body: bytes) -> None:
        self._n_head_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # the last one that was read
            self._end_in(self._limits.read_seconds)
        else:
            self._end_in(self._limits.request_seconds + SPARE_SECONDS)

    def _end_in(self, seconds: float) -> None:
        """End the connection in some seconds, whatever it sends, unless another state begins."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        """Close the connection, which waits until the client has read all, but not for ever."""
        self.transport.close()
        self._deadline = self.loop.call_later(self._limits.read_seconds, self.transport.abort)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: uvicorn would name packages that change nothing here."""


class Flow(FlowControl):
    """Reads on only while few requests wait for their turn."""

    def __init__(
        self, transport: asyncio.Transport, connection: Connection, max_pipelined: int
    ) -> None:
        super().__init__(transport)
        self._connection = connection
        self._max_pipelined = max_pipelined

    def resume_reading(self) -> None:
        if len(self._connection.pipeline) <= self._max_pipelined:
            super().resume_reading()
