"""The idle and the slow lose their connections, others do not; errors have OpenAI's shape."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn

from gptmini.serve import connections
from gptmini.serve.connections import BoundedProtocol

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
MIB = 1 << 20


async def app(scope, receive, send) -> None:
    """Answer at once; for /wait read a body before, for /long send 64 MiB."""
    if scope["type"] != "http":
        return
    while scope["path"] == "/wait" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(64 if scope["path"] == "/long" else 0):
        await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
    await send({"type": "http.response.body", "body": b"done"})


@contextmanager
def serving(n_connections: int = 100, seconds: int = 60) -> Iterator[uvicorn.Server]:
    """A server whose `port` is set."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        http=BoundedProtocol,
        log_config=None,
        limit_concurrency=n_connections,
        timeout_keep_alive=seconds,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    server.port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, args=[[listening]])
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def connect(server: uvicorn.Server, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    connection.sendall(data)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def read_response(connection: socket.socket) -> bytes:
    """The response to GET, behind which the connection may go on."""
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        part = connection.recv(1 << 16)
        assert part
        found += part
    return found


def get(connection: socket.socket) -> None:
    connection.sendall(GET)
    assert read_response(connection).startswith(b"HTTP/1.1 200 ")


def read_error(connection: socket.socket) -> tuple[int, dict]:
    """The status and the error of a response, behind which the connection ends."""
    head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("first", [b"", GET], ids=["new", "kept alive"])
def test_a_connection_without_a_request_is_closed(first: bytes):
    with serving(seconds=1) as server, connect(server, first) as idle:
        assert read_to_end(idle).endswith(b"4\r\ndone\r\n0\r\n\r\n" if first else b"")


@pytest.mark.parametrize("first", [b"", GET], ids=["new", "kept alive"])
def test_headers_that_do_not_arrive_are_given_up(first: bytes):
    with serving(seconds=1) as server, connect(server, first) as half:
        if first:
            read_response(half)
        # More bytes do not prolong it, as they would uvicorn's own time.
        stopped = threading.Event()

        def drip() -> None:
            with ExitStack() as until_closed:
                until_closed.callback(stopped.set)
                half.sendall(GET[:5])
                for byte in b"x" * 1000:
                    if stopped.wait(0.05):
                        return
                    half.sendall(bytes([byte]))

        dripping = threading.Thread(target=drip)
        dripping.start()
        status, error = read_error(half)
        stopped.set()
        dripping.join()
        assert status == 408
        assert error["message"].startswith("headers: did not arrive in time")


@pytest.mark.parametrize("rest", [b"5", b"no size\r\n"], ids=["unfinished", "wrong"])
def test_a_body_behind_its_response_may_be_no_body(rest: bytes, caplog: pytest.LogCaptureFixture):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(seconds=1) as server, connect(server, head) as early:
        assert read_response(early).startswith(b"HTTP/1.1 200 ")
        early.sendall(rest)
        assert read_to_end(early) == b""
    assert not [each for each in caplog.records if each.exc_info]


def test_a_request_under_way_has_more_time():
    body = b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na"
    with serving(seconds=1) as server, connect(server, body) as slow:
        slow.settimeout(2)
        with pytest.raises(TimeoutError):
            slow.recv(1)
        slow.settimeout(30)
        slow.sendall(b"b")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_new_connection_takes_the_place_of_the_longest_idle_one():
    with serving(n_connections=3) as server, ExitStack() as all_connections:
        made = []
        for _ in range(5):
            made.append(all_connections.enter_context(connect(server)))
            get(made[-1])
        assert len(server.server_state.connections) == 3
        for old in made[:2]:
            assert read_to_end(old) == b""
        for new in made[2:]:
            get(new)


def test_when_every_connection_is_busy_a_new_one_is_refused(monkeypatch):
    monkeypatch.setattr(BoundedProtocol, "is_waiting", False)
    with serving(n_connections=1) as server, connect(server, GET) as busy:
        assert busy.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        with connect(server) as refused:
            status, error = read_error(refused)
        assert (status, error["type"]) == (503, "server_error")
        assert error["message"] == "the server has too many connections; try again later"


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\3\1\n"])
def test_what_is_no_request_is_refused_in_openai_s_shape(data: bytes):
    with serving() as server, connect(server, data) as wrong:
        status, error = read_error(wrong)
    assert status == 400
    assert error["message"] == "invalid http request received; send HTTP/1.1"


def test_headers_have_a_limit():
    with serving() as server, connect(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000) as long:
        assert read_error(long)[0] == 400


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    with serving() as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        while not server.server_state.tasks:
            asyncio.run(asyncio.sleep(0.01))
        while server.server_state.connections:
            asyncio.run(asyncio.sleep(0.01))
        assert len(read_to_end(deaf)) < 64 * MIB


def test_a_client_that_reads_slowly_is_not(monkeypatch):
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(connections, "WRITE_BYTES", 1)
    with serving() as server, connect(server, b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n") as slow:
        n_read = 0
        while n_read < 64 * MIB:
            part = slow.recv(8 * MIB)
            assert part
            n_read += len(part)
