"""Every command of gptmini in small, to run in one process where the machine is not what it seems.

A module such as windows_like.py changes its own process, then calls `run_all` here; a test starts
such a module with `run_in`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

from tests.support import ROOT, SMALL, prose

TRAIN = ["train", "--data", "text.txt", "--set", "tokenizer.kind=byte", *SMALL]
COMMANDS = [
    [*TRAIN, "--out", "run"],
    [*TRAIN, "--out", "run", "--steps", "8"],  # resumes, and deletes old checkpoints
    ["train", "attention/mqa", *TRAIN[1:], "--out", "mqa"],
    ["generate", "run", "--prompt", "Übéra ✓"],
    ["generate", "run", "--prompts", "prompts.jsonl", "--out", "texts.jsonl"],
    ["evaluate", "run"],
    ["score", "run", "--file", "text.txt", "--json"],
    ["inspect", "run", "--prompt", "It was", "--out", "heads.html"],
    ["serve", "run", "--port", "0"],
    ["convert", "run", "--attention", "gqa:2", "--out", "converted"],
    [*TRAIN, "--from", "run", "--out", "tuned"],
    ["compare", "run", "mqa", "--out", "compared"],
    ["compare", "--attention", "mqa", *TRAIN[1:], "--out", "variants"],
    ["export", "run", "--out", "exported"],
    ["import", "exported", "--out", "imported"],
    ["data", "prepare", "--data", "text.txt", "--out", "my.tokens", "--set", "tokenizer.kind=byte"],
    ["tokenizer", "train", "text.txt", "--vocab-size", "300", "--out", "t.json"],
    ["tokenizer", "encode", "t.json", "It was"],
    ["tokenizer", "decode", "t.json", "73", "116"],
    ["tokenizer", "info", "t.json", "--data", "text.txt"],
    ["size", *SMALL, "--set", "tokenizer.kind=byte"],
    ["plot", "run"],
    ["runs", "."],
    ["settings", "train.lr"],
]


def run_in(
    module: str, folder: Path, commands: list[list[str]], **environment: str
) -> tuple[list[int], str, str]:
    """Run commands in a process of a module; return exit codes, stdout and stderr."""
    (folder / "text.txt").write_text(prose(600))
    (folder / "prompts.jsonl").write_text('"It"\n"was"\n')
    variables = {"PYTHONPATH": str(ROOT), "GPTMINI_CACHE": str(folder / "cache")} | environment
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), json.dumps(commands)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        check=False,
    )
    said = done.stderr.decode("utf-8")
    assert done.returncode == 0, said
    return json.loads(said.splitlines()[-1]), done.stdout.decode("utf-8"), said


def run_all(folder: str, commands: str) -> None:
    """Run a JSON list of commands; print that of their exit codes as the last line of stderr."""
    import torch

    from gptmini.cli import app

    os.chdir(folder)
    torch.set_num_threads(1)
    codes = []
    for words in json.loads(commands):
        sys.argv = ["gptmini", *words]
        if words[0] == "serve":
            use_server_once()
        try:
            app.main()
        except SystemExit as end:
            codes.append(end.code or 0)
    print(json.dumps(codes), file=sys.stderr)


def use_server_once() -> None:
    """Ask the server that starts next for a completion, then stop it."""
    from gptmini.extras.serve import server

    serve = server.serve

    def complete(port: int) -> None:
        body = json.dumps({"prompt": "It", "max_tokens": 2}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
                print(response.read().decode())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def serve_once(application: Any, listening: socket.socket) -> None:
        # Connections wait in the socket's queue until the server accepts them.
        threading.Thread(target=complete, args=[listening.getsockname()[1]], daemon=True).start()
        serve(application, listening)

    server.serve = serve_once
