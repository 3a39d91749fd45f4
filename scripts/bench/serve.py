"""Time `gptmini serve` under clients, beside llama.cpp's server: python scripts/bench serve

Without a RUN it is a Llama of GPT-2's size with random weights, which is written for both servers
first (pip install -e '.[bench,gguf,serve]' xllamacpp). Prompts are random tokens, and every text
has the same length. In each round the servers take turns: tokens per second of all clients
together, and p50, p95 and p99 of the time to the first token and between tokens, in ms. With a RUN,
llama.cpp takes part if --gguf names the same weights as `gptmini export --to gguf` writes them.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import httpx

from bench.llama import create_model, create_run, write_gguf
from bench.results import Extent, Table
from bench.servers import build_llama_command, find_free_port, start_server
from gptmini.tokenizer.load import load_tokenizer

END_OF_DOCUMENT = [0]  # the token that ends a document
PERCENTILES = (50, 95, 99)
Times = tuple[float, list[float]]  # seconds to the first token, and between tokens


async def ask(client: httpx.AsyncClient, prompt: list[int], n_new: int, seed: int) -> Times:
    body = {"prompt": prompt, "max_tokens": n_new, "stream": True, "seed": seed, "logprobs": 0}
    body |= {"temperature": 0.8, "top_k": 50, "logit_bias": {str(END_OF_DOCUMENT[0]): -100}}
    started = time.perf_counter()
    stamps: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                stamps.append(time.perf_counter())
    return stamps[0] - started, [b - a for a, b in pairwise(stamps)]


async def load(url: str, prompts: list[list[int]], n_clients: int, n_new: int) -> list[Times]:
    """Send all prompts, from `n_clients` clients at a time."""
    found: list[Times] = []
    waiting = iter(enumerate(prompts))
    # A server may close an idle connection at the moment when a client uses it again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one() -> None:
            for seed, prompt in waiting:
                found.append(await ask(client, prompt, n_new, seed))

        await asyncio.gather(*(one() for _ in range(n_clients)))
    return found


def add_percentiles(table: Table, place: str, server: str, seconds: list[float]) -> None:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    for n in PERCENTILES:
        table.append(f"{place}, p{n}", server, 1000 * cuts[n - 1])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--weights", default="bfloat16")
    parser.add_argument("--clients", help="default: 8; 8,32 with --full")
    parser.add_argument("--prompts", help="default: 32,512")
    parser.add_argument("--new", type=int, default=64, help="tokens per text")


def measure(
    extent: Extent,
    run: Path | None = None,
    gguf: Path | None = None,
    weights: str = "bfloat16",
    clients: str | None = None,
    prompts: str | None = None,
    new: int = 64,
) -> Iterator[Table]:
    trial = extent == "trial"
    rounds = 1 if trial else 3
    clients = clients or {"trial": "2", "quick": "8", "full": "8,32"}[extent]
    lengths = prompts or ("5" if trial else "32,512")
    speeds = Table(
        "serve", "clients x prompt, tokens/s", ["gptmini", "llama.cpp", "gptmini / llama.cpp"]
    )
    delays = ["gptmini", "llama.cpp", "llama.cpp / gptmini"]
    firsts = Table("serve first token", "ms", delays)
    gaps = Table("serve between tokens", "ms", delays)
    with ExitStack() as stack:
        if run is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            run, gguf = folder / "run", folder / "model.gguf"
            random_run = create_run(create_model("tiny" if trial else "124M"), run)
            random_run.save()
            write_gguf(gguf, random_run, "bf16")
        # Random tokens from those before the one that ends a document, which is forbidden.
        vocabulary = load_tokenizer(run / "tokenizer.json").eos_token_id
        END_OF_DOCUMENT[0] = vocabulary
        for _ in range(rounds):
            for n_clients in map(int, clients.split(",")):
                for length in map(int, lengths.split(",")):
                    dice = random.Random(length)  # noqa: S311
                    texts = [
                        [dice.randrange(vocabulary) for _ in range(length)]
                        for _ in range(2 * n_clients)
                    ]
                    place = f"{n_clients} x {length}"
                    port = find_free_port()
                    ours = [sys.executable, "-m", "gptmini", "serve", str(run)]
                    ours += ["--port", str(port), "--weights", weights]
                    commands = {"gptmini": (ours, port)}
                    if gguf:
                        port = find_free_port()
                        theirs = build_llama_command(gguf, port, min(32, n_clients))
                        commands["llama.cpp"] = (theirs, port)
                    for name, (command, port) in commands.items():
                        with start_server(command, port) as (url, _):
                            asyncio.run(load(url, texts[:1], 1, 4))  # warms up
                            started = time.perf_counter()
                            times = asyncio.run(load(url, texts, n_clients, new))
                            seconds = time.perf_counter() - started
                        n_tokens = sum(1 + len(between) for _, between in times)
                        speeds.append(place, name, n_tokens / seconds)
                        add_percentiles(firsts, place, name, [first for first, _ in times])
                        between = [gap for _, found in times for gap in found]
                        add_percentiles(gaps, place, name, between)
    yield from (speeds, firsts, gaps)
