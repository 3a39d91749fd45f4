"""HTTP/1.1 connections whose every state has an end: what a client may hold without paying for it.

uvicorn reads and writes them and leaves limits to a proxy. Here the head of a request has a size;
each wait for a head has a time, and so has each request, read or not; and of the requests that a
client sends without waiting for answers only a few are taken in.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gptmini.extras.serve.limits import Limits

READ_BYTES = 4096  # parsed at a time; then other connections have their turn
SPARE_SECONDS = 5  # for the answer to a request whose time is over
HEAD_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain\r\n"
    b"Connection: close\r\n\r\nThe target and headers of the request are too long; shorten them.\n"
)


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """The connection of a client."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._buffer = bytearray(READ_BYTES)
        self._n_head_bytes = 0  # read since the last head or body
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport, self, self._limits.max_pipelined)
        self._end_in(self._limits.read_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

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
