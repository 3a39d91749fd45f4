"""Starts the servers of gptmini and of llama.cpp that benchmarks ask."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx

# A folder with llama-batched-bench and llama-server, built for this machine; else the wheel serves.
LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
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
    if LLAMA_CPP:
        words = ["-m", gguf, "--port", port, "-np", rows, "-c", 1024 * rows, "-t", threads]
        return [f"{LLAMA_CPP}/llama-server", *map(str, words), "-fa", "on", "--log-disable"]
    if find_spec("xllamacpp") is None:
        sys.exit("llama.cpp is not installed: pip install xllamacpp")
    return [sys.executable, "-c", LLAMA, *map(str, (gguf, port, rows, threads))]


def read_llama_version() -> str:
    """Read the version that llama.cpp gives itself, of the one that is built for this machine."""
    command = [f"{LLAMA_CPP}/llama-batched-bench", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"version: (.*)", done.stdout + done.stderr)
    assert found is not None
    return f"{found[1]} (built natively)"


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
