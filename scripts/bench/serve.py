"""Time `gptmini serve` under concurrent clients: python scripts/bench serve RUN

Prompts are random tokens, and every text has the same length. Each row gives tokens per second of
all clients together, then p50, p95 and p99 of the time to the first token and between tokens, in
ms. With --gguf FILE, the same weights as `gptmini export --to gguf` writes them, llama.cpp's server
takes its turn (pip install xllamacpp). --processes adds one `gptmini generate` per request.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

from gptmini.tokenizer.load import load_tokenizer

LLAMA = """
import sys, threading, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
p.n_ctx, p.n_parallel, p.n_predict = 1024 * rows, rows, -1
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[4])
p.hostnames, p.verbosity = ["127.0.0.1"], 0
server = x.Server(p)
print(server.listening_address, flush=True)
threading.Event().wait()
"""
END_OF_DOCUMENT = [0]  # the token that ends a document
Times = tuple[float, list[float]]  # seconds to the first token, and between tokens


@contextmanager
def start_server(command: list[str], port: int) -> Iterator[tuple[str, int]]:
    """The address and process of a server that answers; it ends with the block."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, f"{command[:4]} ended"
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def build_llama_command(gguf: str | Path, port: int, rows: int, threads: int = -1) -> list[str]:
    """Build the command of llama.cpp's server; -1 is all threads."""
    return [sys.executable, "-c", LLAMA, *map(str, (gguf, port, rows, threads))]


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


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
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one() -> None:
            for seed, prompt in waiting:
                found.append(await ask(client, prompt, n_new, seed))

        await asyncio.gather(*(one() for _ in range(n_clients)))
    return found


def format_percentiles(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return " / ".join(f"{1000 * cuts[n]:,.0f}" for n in (49, 94, 98))


def time_processes(run: str, n_clients: int, n_texts: int, n_new: int) -> float:
    """Time one `gptmini generate` per text, `n_clients` at a time, in seconds."""
    words = [sys.executable, "-m", "gptmini", "generate", run, "--max-new-tokens", str(n_new)]
    started = time.perf_counter()
    running: list[subprocess.Popen[bytes]] = []
    for seed in range(n_texts):
        if len(running) == n_clients:
            running.pop(0).wait()
        command = [*words, "--prompt", "a", "--seed", str(seed)]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    for process in running:
        process.wait()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--gguf")
    parser.add_argument("--weights", default="bfloat16")
    parser.add_argument("--clients", default="1,8,32,128")
    parser.add_argument("--prompts", default="32,512")
    parser.add_argument("--new", type=int, default=64, help="tokens per text")
    parser.add_argument("--texts", type=int, default=3, help="texts per client")
    parser.add_argument("--processes", action="store_true")
    options = parser.parse_args()
    # Random tokens from those before the one that ends a document, which is forbidden.
    vocabulary = load_tokenizer(Path(options.run) / "tokenizer.json").eos_token_id
    END_OF_DOCUMENT[0] = vocabulary
    print("| clients x prompt | server | tokens/s | first token | between tokens |")
    print("|---|---|---|---|---|", flush=True)
    for n_clients in map(int, options.clients.split(",")):
        for length in map(int, options.prompts.split(",")):
            dice = random.Random(length)  # noqa: S311
            n_texts = options.texts * n_clients
            prompts = [[dice.randrange(vocabulary) for _ in range(length)] for _ in range(n_texts)]
            port = find_free_port()
            command = [sys.executable, "-m", "gptmini", "serve", options.run, "--port", str(port)]
            commands = {"gptmini": ([*command, "--weights", options.weights], port)}
            if options.gguf:
                port = find_free_port()
                command = build_llama_command(options.gguf, port, min(32, n_clients))
                commands["llama.cpp"] = (command, port)
            for name, (command, port) in commands.items():
                with start_server(command, port) as (url, _):
                    asyncio.run(load(url, prompts[:1], 1, 4))  # warms up
                    started = time.perf_counter()
                    times = asyncio.run(load(url, prompts, n_clients, options.new))
                    seconds = time.perf_counter() - started
                n_tokens = sum(1 + len(between) for _, between in times)
                firsts = format_percentiles([first for first, _ in times])
                between = format_percentiles([gap for _, gaps in times for gap in gaps])
                cells = [f"{n_clients} x {length}", name, f"{n_tokens / seconds:,.0f}"]
                print(f"| {' | '.join([*cells, firsts, between])} |", flush=True)
        if options.processes:
            seconds = time_processes(options.run, n_clients, n_texts, options.new)
            speed = n_texts * options.new / seconds
            print(f"| {n_clients} x 1 | a process each | {speed:,.0f} | | |", flush=True)
