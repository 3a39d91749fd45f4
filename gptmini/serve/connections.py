"""Limit connections in number and time, and report their errors in OpenAI's shape.

uvicorn closes only connections that are idle after a response. Here it also closes those whose
request does not arrive and those whose client does not read, and it limits their number. When all
are taken, a new connection takes the place of the one that has been idle longest, as in nginx. So a
client that only holds connections shuts nobody out.
"""

import asyncio
import json
import socket
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# A client that reads less than this in this time, while a response waits for it, is cut off.
WRITE_SECONDS = 30
WRITE_BYTES = 1 << 15
MAX_CONNECTIONS = 512
with suppress(ImportError):  # Windows
    import resource

    max_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_descriptors != resource.RLIM_INFINITY:
        # The rest is for files, and for connections that were accepted and are about to be refused.
        MAX_CONNECTIONS = min(MAX_CONNECTIONS, max_descriptors // 2)
# asyncio accepts at most this many in a row; then it sends texts and closes what was refused.
MAX_ACCEPTS = 16
# Connections that the system queues until they are accepted; any more try again after a second.
MAX_QUEUED = 2048


def build_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Build the JSON of a failure in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


class BoundedServer(uvicorn.Server):
    """uvicorn's server with a queue of connections that is longer than it accepts at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio takes `backlog` for both numbers, so set the queue afterwards."""
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(MAX_QUEUED)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with limits for connections.

    Two of uvicorn's settings are the limits. `limit_concurrency` is the number of connections;
    uvicorn itself would answer requests above it, in plain text. `timeout_keep_alive` also limits
    the time until the headers of a request are complete, and counts from the connection on.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._max_connections = self.limit_concurrency
        self.limit_concurrency = None
        self.waiting_since = 0.0  # when the client's turn last began
        self._wait_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it is the client's turn: to send a request, or the rest of its body."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, in place of an idle one if there are too many."""
        super().connection_made(transport)
        # `pause_writing` is then called whenever something is left to write.
        transport.set_write_buffer_limits(high=0)
        self._wait_for_request()
        # Many may come at once, so connections that were just closed may still be in the set.
        open_ones = [
            each
            for each in self.connections
            if isinstance(each, BoundedProtocol) and not each.transport.is_closing()
        ]
        if self._max_connections is None or len(open_ones) <= self._max_connections:
            return
        waiting = [each for each in open_ones if each.is_waiting and each is not self]
        if waiting:
            longest_waiting = min(waiting, key=lambda each: each.waiting_since)
            longest_waiting.transport.abort()
        else:
            self.refuse(503, "the server has too many connections; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its timers."""
        super().connection_lost(exc)
        for timer in (self._wait_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait_for_request()
        super().on_response_complete()

    def _wait_for_request(self) -> None:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        self.waiting_since = self.loop.time()
        self._wait_timer = self.loop.call_later(self.timeout_keep_alive, self._stop_waiting)

    def _stop_waiting(self) -> None:
        """Close the connection unless a request came; the application limits the time of bodies."""
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            return
        has_begun = bool(self.conn.trailing_data[0])
        if has_begun:
            self.refuse(408, "headers: did not arrive in time; send them faster")
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._watch_writing()

    def _watch_writing(self) -> None:
        n_left = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self._check_writing, n_left)

    def _check_writing(self, n_left_before: int) -> None:
        """Cut off a client that has read next to nothing."""
        if self.transport.get_write_buffer_size() > n_left_before - WRITE_BYTES:
            self.transport.abort()
        else:
            self._watch_writing()

    def resume_writing(self) -> None:
        """Go on: the client has read everything."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self.refuse(400, msg.rstrip(".").lower() + "; send HTTP/1.1")

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error and close the connection, without the application."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # the request was answered before its body had arrived
            return
        content = json.dumps(build_error(status, message)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"connection", b"close"),
        ]
        reason = HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=content), h11.EndOfMessage()):
            if output := self.conn.send(event):
                self.transport.write(output)
        self.transport.close()
