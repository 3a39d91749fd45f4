"""Thousands of requests to the command itself, good ones and bad ones, on this machine only."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from gptmini.generate.run import Run, load_run
from tests.support import tiny, train

CLIENTS = 16
LOG = Path("/dev/full")  # a disk without room
BODIES = {  # what the server must answer to a body that is no request
    "malformed": (b'{"prompt": "the', 400),
    "bytes": (b'{"prompt": "\xff\xfe"}', 400),
    "huge": (b'{"prompt": "' + b"x" * (2 << 20) + b'"}', 413),
    "wrong": (b'{"prompt": "x", "n": -1}', 400),
}
KINDS = ["whole"] * 6 + ["stream"] * 4 + ["slow", "leaves", "leaves", "half", *BODIES]
Request = tuple[str, dict]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("load")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    config = tiny(
        model={"context_length": 400, "n_layer": 2},
        data={"path": str(folder / "text.txt")},
        train={"steps": 3, "seq_len": 16},
    )
    train(config, folder / "small")
    return load_run(folder / "small")


def requests(count: int, dice: random.Random) -> list[Request]:
    def draw(length: int) -> str:
        return "".join(dice.choice("the quick fox") for _ in range(length))

    made = []
    beginning = draw(150)  # of many prompts, longer than a chunk
    for seed in range(count):
        length = dice.choice((0, 3, 20, 60)) if dice.random() < 0.9 else 300
        prompt = draw(length) if length == 300 or seed % 3 else beginning + draw(length)
        body = {"prompt": prompt, "max_tokens": dice.randint(1, 40), "seed": seed}
        made.append((dice.choice(KINDS), body))
    return made


async def post(port: int, body: bytes, end: int | None = None):
    """A connection over which a request, or the beginning of one, was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body[:end])
    return reader, writer


def text_of(answer: bytes) -> str:
    """The text in a response, whole or streamed; it must be complete."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer[:300]
    if b"text/event-stream" not in head:
        assert b"content-length" in head or rest.endswith(b"0\r\n\r\n"), rest[-100:]
        return json.loads(rest[rest.index(b"{") : rest.rindex(b"}") + 1])["choices"][0]["text"]
    lines = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"data: [DONE]", rest[-300:]
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])


async def ask(port: int, kind: str, body: dict, dice: random.Random) -> str | None:
    """The text of a good request."""
    content = json.dumps(body | {"stream": kind in ("stream", "slow", "leaves")}).encode()
    content, status = BODIES.get(kind, (content, 200))
    end = dice.randrange(len(content)) if kind == "half" else None
    reader, writer = await post(port, content, end)
    try:
        if kind == "half":
            return None
        if kind == "leaves":
            await reader.read(dice.randrange(1, 2000))
            return None
        answer = b""
        while part := await reader.read(100 if kind == "slow" else 1 << 16):
            answer += part
            await asyncio.sleep(0.001 if kind == "slow" else 0)
        if kind in BODIES:
            assert answer.split()[1] == str(status).encode(), answer[:300]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            return None
        return text_of(answer)
    except ConnectionError:
        assert kind == "huge"  # refused before it was sent
        return None
    finally:
        writer.transport.abort()


async def storm(port: int, made: list[Request], dice: random.Random) -> list[str | None]:
    """What all requests gave, some of them at a time."""
    texts: list[str | None] = [None] * len(made)
    todo = iter(range(len(made)))

    async def client() -> None:
        for number in todo:
            async with asyncio.timeout(600):
                texts[number] = await ask(port, *made[number], dice)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    return texts


async def stopped(process: subprocess.Popen, port: int) -> list[str]:
    """The texts of requests that were running when SIGTERM came."""
    body = {"prompt": "the ", "max_tokens": 300, "seed": 1, "stream": True}
    answers = [await post(port, json.dumps(body).encode()) for _ in range(CLIENTS)]
    begun = [await reader.readuntil(b"data: ") for reader, _ in answers]
    process.send_signal(signal.SIGTERM)
    rest = [await reader.read() for reader, _ in answers]
    for _, writer in answers:
        writer.close()
    return [text_of(a + b) for a, b in zip(begun, rest, strict=True)]


def memory(process: subprocess.Popen) -> int:
    """MiB that a process holds."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.skipif(not LOG.exists(), reason="needs Linux")
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_storm_of_requests(run: Run, count: int, default_signals):
    dice = random.Random(count)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "gptmini", "serve", str(run.path), "--port", str(port)]
    with LOG.open("w") as log:
        process = subprocess.Popen([*words, "--max-rows", "8"], stderr=log)
    http = httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=600)
    try:
        with http:
            assert http.get(f"http://127.0.0.1:{port}/health").status_code == 200
            made, held, texts = requests(count, dice), [], []
            for quarter in range(4):
                part = made[quarter * count // 4 : (quarter + 1) * count // 4]
                texts += asyncio.run(storm(port, part, dice))
                held.append(memory(process))
            lines = http.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        assert 'gptmini_texts{state="running"} 0.0' in lines
        assert 'gptmini_texts{state="waiting"} 0.0' in lines
        assert not [line for line in lines if line.startswith("gptmini_requests") and '"5' in line]
        assert held[-1] - held[0] < 30, held
        kinds = Counter(kind for kind, _ in made)
        good = [n for n, (kind, _) in enumerate(made) if kind in ("whole", "stream", "slow")]
        assert None not in [texts[n] for n in good]
        for number in dice.sample(good, 100):
            body = made[number][1]
            alone = run.generate(
                body["prompt"], max_new_tokens=body["max_tokens"], seed=body["seed"]
            )
            assert texts[number] == alone
        running = asyncio.run(stopped(process, port))
        assert running == [run.generate("the ", max_new_tokens=300, seed=1)] * CLIENTS
        # Python ends with 120 if it buffered lines of the log that it cannot write.
        assert process.wait(60) in (0, 120)
        print(f"{count:,} requests {dict(kinds)}; MiB after each quarter: {held}")
    finally:
        process.kill()
        process.wait()
