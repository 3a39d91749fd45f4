"""Time normal clients of `gptmini serve` beside hostile ones: python scripts/bench/hostile.py RUN

Each row gives the normal clients' requests, how many of them failed, p50 and p99 of the time to the
first token and between tokens in ms, what the p99 are to those without a hostile client, the
server's memory at the end, and how it answered the hostile client. Every client has an address of
its own on this machine (Linux takes all of 127.0.0.0/8). A hostile client is a process of its own;
on a machine with few cores its own work slows the others down too. --minutes runs all kinds mixed,
from two hostile clients.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from serve import find_free_port, start_server

from gptmini.serve.limits import Limits
from gptmini.tokenizer.load import load_tokenizer

MAX_TOKENS = Limits().max_tokens
Answers = Counter[str]


@dataclass
class Times:
    """What the normal clients have seen, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    n_failed: int = 0


def create_client(url: str, address: str) -> httpx.AsyncClient:
    """Create a client with an address of its own; it uses no TLS, whose setup takes a while."""
    transport = httpx.AsyncHTTPTransport(local_address=address, verify=False)
    return httpx.AsyncClient(transport=transport, base_url=url, timeout=600)


async def be_normal(client: httpx.AsyncClient, body: dict[str, Any], times: Times) -> None:
    """Send one request and read its stream."""
    started = time.perf_counter()
    stamps: list[float] = []
    is_done = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith('data: {"id"'):
                    stamps.append(time.perf_counter())
                is_done = is_done or line == "data: [DONE]"
    except httpx.HTTPError:
        pass
    if not stamps or not is_done:
        times.n_failed += 1
        return
    times.first.append(stamps[0] - started)
    times.between += [after - before for before, after in itertools.pairwise(stamps)]


async def run_normal_clients(url: str, n_clients: int, seconds: float, n_vocab: int) -> Times:
    """Let clients send short prompts one after another for some time."""
    times = Times()
    clients = [create_client(url, f"127.0.1.{number + 1}") for number in range(n_clients)]
    end = time.perf_counter() + seconds

    async def run_one(number: int) -> None:
        dice = random.Random(number)  # noqa: S311
        async with clients[number] as client:
            while time.perf_counter() < end:
                prompt = [dice.randrange(n_vocab) for _ in range(32)]
                body = {"prompt": prompt, "max_tokens": 32, "stream": True, "logprobs": 0}
                await be_normal(client, body, times)

    await asyncio.gather(*(run_one(number) for number in range(n_clients)))
    return times


class Attacker:
    """One hostile client; each method without an underscore is a kind of attack, without an end."""

    def __init__(self, url: str, address: str) -> None:
        self._address = (address, 0)
        self._url = urlsplit(url)
        self._client = create_client(url, address)
        self.answers: Answers = Counter()

    async def _post(self, body: dict[str, Any] | bytes) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            answer = await self._client.post("/v1/completions", content=content)
            self.answers[str(answer.status_code)] += 1
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1
            await asyncio.sleep(0.01)

    async def _repeat(self, body: dict[str, Any] | bytes, n_at_a_time: int) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def repeat() -> None:
            while True:
                await self._post(content)

        await asyncio.gather(*(repeat() for _ in range(n_at_a_time)))

    async def _hold(self, data: bytes, n_connections: int) -> None:
        """Keep connections that have sent `data` and read nothing; replace those that end."""
        host = str(self._url.hostname)
        port = int(self._url.port or 0)

        async def hold() -> None:
            while True:
                try:
                    reader, writer = await asyncio.open_connection(
                        host, port, limit=1, local_addr=self._address
                    )
                    writer.write(data)
                    while not reader.at_eof():  # reads one byte, and then hardly any
                        await reader.read(1)
                        await asyncio.sleep(1)
                    self.answers["closed"] += 1
                except OSError as error:
                    self.answers[type(error).__name__] += 1
                await asyncio.sleep(5)

        await asyncio.gather(*(hold() for _ in range(n_connections)))

    def _spell_request(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    async def huge_stop(self) -> None:
        """Send a stop text of a megabyte."""
        await self._repeat({"prompt": "a", "max_tokens": 64, "stop": "a" * 1_000_000}, 4)

    async def many_stops(self) -> None:
        """Send more stop texts than allowed, and as many as allowed, which match all along."""
        body = {"prompt": "a", "max_tokens": 512, "bias": {"a": 100}}
        stops = ["a" * 999 + chr(98 + number) for number in range(900)]
        await asyncio.gather(
            self._repeat(body | {"stop": stops}, 2), self._repeat(body | {"stop": stops[:16]}, 8)
        )

    async def many_bans(self) -> None:
        """Send more bans than allowed, and as many as allowed."""
        texts = [chr(97 + n % 26) for n in range(200_000)]
        await asyncio.gather(
            self._repeat({"prompt": "a", "ban": texts}, 4),
            self._repeat({"prompt": "a", "ban": texts[:20] * 50}, 8),
        )

    async def unread_streams(self) -> None:
        """Ask for long streams with log-probabilities, and do not read them."""
        body = {"prompt": "a", "max_tokens": MAX_TOKENS, "stream": True, "logprobs": 20}
        await self._hold(self._spell_request(body), 32)

    async def idle_connections(self) -> None:
        """Open connections and send nothing."""
        await self._hold(b"", 900)

    async def half_headers(self) -> None:
        """Send half a request."""
        await self._hold(b"POST /v1/completions HTTP/1.1\r\nHost: ", 900)

    async def maximal_tokens(self) -> None:
        """Ask for as many and as long texts as allowed."""
        await self._repeat({"prompt": "a", "max_tokens": MAX_TOKENS, "n": 16}, 4)

    async def long_prompts(self) -> None:
        """Send prompts that are too long or nearly so."""
        words = " ".join(map(str, range(100_000)))
        await asyncio.gather(
            *(self._repeat({"prompt": words[: 400 << n], "max_tokens": 1}, 4) for n in range(5))
        )

    async def huge_bodies(self) -> None:
        """Send bodies of the allowed size, and twice that."""
        small = b'{"user": [' + b"1," * 500_000 + b"1]}"
        await asyncio.gather(
            self._repeat(small, 4), self._repeat(b'{"user": "' + b"x" * 2_000_000 + b'"}', 4)
        )


KINDS = [name for name in vars(Attacker) if not name.startswith("_")]


async def attack(kinds: list[str], url: str, address: str, seconds: float) -> Answers:
    """Attack in each of some ways in turn, a minute at most, for some time."""
    attacker = Attacker(url, address)
    end = time.perf_counter() + seconds
    for kind in itertools.cycle(kinds):
        left = end - time.perf_counter()
        if left <= 0:
            break
        method: Callable[[], Coroutine[Any, Any, None]] = getattr(attacker, kind)
        turn = min(left, 60, seconds / len(kinds))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(turn, 1)):
                await method()
    return attacker.answers


def read_memory(process_id: int) -> float:
    """Read the MiB that a process holds."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if "VmRSS" in line)


def measure(
    url: str, n_clients: int, seconds: float, n_vocab: int, attacks: list[list[str]]
) -> tuple[Times, Answers]:
    """Run the normal clients beside a hostile process for each of `attacks`."""
    processes = []
    for number, kinds in enumerate(attacks):
        words = [",".join(kinds), url, f"127.0.2.{number + 1}", str(seconds + 1)]
        command = [sys.executable, __file__, "--attack", *words]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
    times = asyncio.run(run_normal_clients(url, n_clients, seconds, n_vocab))
    answers: Answers = Counter()
    for process in processes:
        output, _ = process.communicate(timeout=seconds + 120)
        answers += Counter(json.loads(output))
    return times, answers


def find_percentiles(values: list[float]) -> tuple[float, float]:
    """Find p50 and p99 in ms."""
    if len(values) < 2:
        return float("nan"), float("nan")
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return 1000 * cuts[49], 1000 * cuts[98]


def format_row(name: str, times: Times, alone: Times, memory: float, answers: Answers) -> str:
    cells = [name.replace("_", " "), str(len(times.first)), str(times.n_failed)]
    for found, before in ((times.first, alone.first), (times.between, alone.between)):
        p50, p99 = find_percentiles(found)
        cells.append(f"{p50:.0f} / {p99:.0f} ({p99 / find_percentiles(before)[1]:.1f} x)")
    cells.append(f"{memory:,.0f}")
    cells.append(", ".join(f"{n:,} {name}" for name, n in answers.most_common(4)))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:2] == ["--attack"]:
        kinds, url, address, seconds = sys.argv[2:]
        print("ready", flush=True)
        answers = asyncio.run(attack(kinds.split(","), url, address, float(seconds)))
        print(json.dumps(answers))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20, help="for each kind")
    parser.add_argument("--minutes", type=float, help="all kinds mixed, two hostile clients")
    options = parser.parse_args()
    n_vocab = load_tokenizer(Path(options.run) / "tokenizer.json").eos_token_id
    kinds = options.kinds.split(",")
    rounds = [(kind, [[kind]], options.seconds) for kind in kinds]
    if options.minutes:
        backwards = kinds[::-1]
        rounds = [("two, all kinds", [kinds, backwards], 60 * options.minutes)]
    port = find_free_port()
    command = [sys.executable, "-m", "gptmini", "serve", options.run, "--port", str(port)]
    print("| hostile client | requests | failed | first token | between | MiB | its answers |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with start_server(command, port) as (url, process_id):
        measure(url, options.clients, 0.5, n_vocab, [])  # warms up
        alone, none = measure(url, options.clients, options.seconds, n_vocab, [])
        print(format_row("none", alone, alone, read_memory(process_id), none), flush=True)
        for name, attacks, seconds in rounds:
            times, answers = measure(url, options.clients, seconds, n_vocab, attacks)
            memory = read_memory(process_id)
            print(format_row(name, times, alone, memory, answers), flush=True)


if __name__ == "__main__":
    main()
