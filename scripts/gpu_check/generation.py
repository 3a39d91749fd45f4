"""The second run: using a model. Decoding and its causes, precision, serving, every command.

Each part yields what it finds, as it finds it.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import gptmini
from gptmini import machine
from gptmini.generate.engine import TorchEngine
from gptmini.generate.run import Run
from gptmini.runs.directory import RunDirectory
from gpu_check.check import Check, Facts, Settings, free_memory, list_kernels

ROOT = Path(__file__).parents[2]
PROMPT = "def read(self):"
ROWS = (1, 8, 32)
KERNELS_SHOWN = 15
CLIENTS = 8


def train_model(check: Check) -> Facts:
    """Train the model that the other parts use."""
    compiled = "off" if check.small else "auto"
    lines = check.fit(check.build_config(compile=compiled), "model")
    yield "seconds of updates", lines[-1]["seconds"]
    yield "validation loss", lines[-1]["val_loss"]


def load_model(check: Check, weights: str = "bfloat16", device: str | None = None) -> Run:
    """Load the trained model, or train it for a single step if that part was left out."""
    path = check.folder / "model"
    if not RunDirectory(path).list_steps():
        check.fit(check.build_config(steps=1), "model")
    return gptmini.load(path, device or check.device, weights, cache=check.cache)


def time_decoding(run: Run, rows: int, n_new: int, **settings: Any) -> Settings:
    """Tokens per second of a batch behind its first token, and the time until that.

    The first use loads kernels, takes memory and records graphs; the second does none of that.
    """
    found: Settings = {}
    for use in ("first use", "steady"):
        generation = run.start([PROMPT] * rows, max_new_tokens=n_new, **settings)
        generation.finish()
        seconds = generation.seconds - generation.time_to_first_token
        found[f"tokens/s, {use}"] = (generation.n_tokens - rows) / seconds
        found[f"seconds to first token, {use}"] = generation.time_to_first_token
    return found | {"tokens": generation.n_tokens, "engine": generation.engine}


def decode(check: Check) -> Facts:
    """Tokens per second at several numbers of rows, in each precision and by each filter."""
    n_new = 8 if check.small else 256
    for weights in ("bfloat16", "float32"):
        run = load_model(check, weights)
        for rows in ROWS:
            yield f"{rows} rows, {weights}", time_decoding(run, rows, n_new, temperature=1.0)
    run = load_model(check)
    filters: dict[str, Settings] = {
        "greedy": {"temperature": 0.0},
        "top-k 50": {"top_k": 50},
        "top-p 0.9": {"top_p": 0.9},
        "min-p 0.05": {"min_p": 0.05},
        "logprobs": {"logprobs": True},
    }
    for name, settings in filters.items():
        yield f"{ROWS[-1]} rows, {name}", time_decoding(run, ROWS[-1], n_new, **settings)
    for n_prompt in (64,) if check.small else (512,):
        long_prompt = run.decode(run.encode(PROMPT * n_prompt)[: n_prompt // 2])
        for n_prompts in (8, 8, 1):
            generation = run.start([long_prompt] * n_prompts, max_new_tokens=2)
            generation.finish()
            found = {"seconds_to_first_token": generation.time_to_first_token}
            yield f"{n_prompts} prompts of {n_prompt // 2} tokens", found
        # A kernel may have to be built for each length.
        tokens = run.encode(PROMPT * 8)
        seconds = []
        for length in range(20, 28):
            generation = run.start([tokens[:length]], max_new_tokens=1)
            generation.finish()
            seconds.append(generation.time_to_first_token)
        yield "seconds to the first token of prompts of 20 to 27 tokens", seconds


def same_texts(check: Check) -> Facts:
    """Whether greedy texts in float32 are those of the CPU, alone and in company."""
    prompts = [PROMPT, "import", "", "class A:\n    def __init__(self, x):\n" * 8]
    settings: Settings = {"temperature": 0.0, "max_new_tokens": 8 if check.small else 64}
    texts = load_model(check, "float32", "cpu").start(prompts, **settings).finish()
    expected = [text.tokens for text in texts]
    run = load_model(check, "float32")
    together = [text.tokens for text in run.start(prompts, **settings).finish()]
    alone = [run.start([prompt], **settings).finish()[0].tokens for prompt in prompts]
    yield "in company as alone", together == alone
    equal = [ours == theirs for ours, theirs in zip(together, expected, strict=True)]
    yield "as on the CPU", equal
    assert together == alone, "a text depends on its company"


def profile_tokens(check: Check) -> Facts:
    """Where the time of a token goes: kernels, gaps between them, copies to the host."""
    run = load_model(check)
    n_tokens = 4 if check.small else 64
    activities = [ProfilerActivity.CPU]
    if check.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for rows in (1, ROWS[-1]):
        stream = iter(run.start([PROMPT] * rows, max_new_tokens=2 * n_tokens))
        for _ in range(rows * 2):
            next(stream)
        with profile(activities=activities) as profiler:
            started = time.perf_counter()
            for _ in range(rows * n_tokens // 2):
                if next(stream, None) is None:
                    break
            check.compute.synchronize()
            seconds = time.perf_counter() - started
        kernels = list_kernels(profiler.key_averages(), check.device)
        total = sum(microseconds for microseconds, _ in kernels)
        n_kernels = sum(event.count for _, event in kernels)
        yield f"{rows} rows, kernels per token", n_kernels / (n_tokens // 2)
        yield f"{rows} rows, busy", total / 1e6 / seconds
        for microseconds, event in kernels[:KERNELS_SHOWN]:
            row = {"calls": event.count, "share": microseconds / total}
            yield f"{rows} rows: {event.key[:80]}", row


def peers(check: Check) -> Facts:
    """The same weights in transformers, greedy, for as many tokens."""
    if find_spec("transformers") is None:
        yield "skipped", "transformers is not installed"
        return
    import transformers  # noqa: PLC0415 - may be missing

    run = load_model(check)
    folder = check.folder / "exported"
    gptmini.export_run(run.path, folder, "hf", "f32", check.cache)
    n_new = 8 if check.small else 128
    dtype = check.compute.dtype
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    theirs.to(check.device).eval()
    tokens = run.encode(PROMPT)
    settings: Settings = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False}
    for rows in ROWS:
        batch = torch.tensor([tokens] * rows, device=check.device)  # (rows, T)
        for _ in range(2):  # the first loads kernels
            started = time.perf_counter()
            theirs.generate(batch, attention_mask=torch.ones_like(batch), **settings)
            check.compute.synchronize()
            seconds = time.perf_counter() - started
        ours = time_decoding(run, rows, n_new, temperature=0.0)["tokens/s, steady"]
        found = {"transformers": rows * n_new / seconds, "gptmini": ours}
        yield f"{rows} rows, tokens/s", found | {"ratio": ours * seconds / (rows * n_new)}


def precision(check: Check) -> Facts:
    """Check that training in bfloat16 follows training in float32, step by step."""
    losses = {}
    short: Settings = {}
    if not check.small:
        short = {"batch_size": 16, "steps": 50, "warmup_steps": 10}
    for dtype in ("float32", "bfloat16"):
        config = check.build_config(dtype=dtype, **short)
        losses[dtype] = [line["train_loss"] for line in check.fit(config, f"in {dtype}")]
        yield dtype, [round(value, 4) for value in losses[dtype]]
    differences = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    yield "largest difference", max(differences)
    assert max(differences) < 0.01 * losses["float32"][0], "bfloat16 does not follow float32"


def analyses(check: Check) -> Facts:
    """Evaluate and score on the GPU and on the CPU: equal results, time, memory."""
    from gptmini.generate.score import score_text  # noqa: PLC0415 - not for the other parts

    text = "import os\n\n\ndef read(path):\n    return open(path).read()\n" * 20
    devices = (check.device,) if check.small else (check.device, "cpu")
    scores = {}
    for device in devices:
        free_memory(check.device)
        run = load_model(check, "float32", device)
        started = time.perf_counter()
        scores[device] = score_text(run, text).bits_per_byte
        found = {"seconds": time.perf_counter() - started, "bits_per_byte": scores[device]}
        yield f"score on {device}", found
    if not check.small:
        started = time.perf_counter()
        evaluation = gptmini.evaluate(load_model(check, "float32"), cache=check.cache)
        seconds = time.perf_counter() - started
        peak = machine.get_peak_memory(check.compute.device)
        found = {"seconds": seconds, "bits_per_byte": evaluation.bits_per_byte}
        yield "evaluate", found | {"peak_memory": peak}
    assert max(scores.values()) - min(scores.values()) < 1e-3, "scores differ"


def serve(check: Check) -> Facts:
    """Tokens per second of a server, for one client and for several."""
    if find_spec("starlette") is None or find_spec("httptools") is None:
        yield "skipped", "starlette or httptools is not installed"
        return
    load_model(check)
    n_new = 8 if check.small else 64
    with start_server(check) as address:
        ask(address, 4)  # the first loads kernels
        for clients in (1, CLIENTS):
            started = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                counts = list(pool.map(lambda _: ask(address, n_new), range(2 * clients)))
            yield f"{clients} clients, tokens/s", sum(counts) / (time.perf_counter() - started)


@contextmanager
def start_server(check: Check) -> Iterator[str]:
    """Start `gptmini serve` on a free port; yield its address once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "gptmini", "serve", str(check.folder / "model")]
    command += ["--port", str(port), "--device", check.device, "--cache", str(check.cache)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health").close()  # noqa: S310
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def ask(address: str, n_new: int) -> int:
    """Ask a server for a completion; return the number of its tokens."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": n_new}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", body, headers)  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return int(json.load(answer)["usage"]["completion_tokens"])


def commands(check: Check) -> Facts:
    """Every command that computes, as a user would run it: its exit code and seconds."""
    load_model(check)
    model = str(check.folder / "model")
    cache = ["--cache", str(check.cache)]
    device = ["--device", check.device]
    text = check.folder / "text.txt"
    text.write_text("".join(f"{n} is not {n + 1}.\n" for n in range(400)))
    small = ["--set", "model={n_layer: 1, n_head: 4, d_model: 64, context_length: 32}"]
    small += ["--set", "train={steps: 4, batch_size: 4, eval_every: 2, save_every: 2}"]
    small += ["--set", "tokenizer.kind=byte"]
    small += ["--set", f"train.device={check.device}"]
    own = ["--data", str(text), *small, *cache]
    lines: dict[str, list[str]] = {
        "train": ["train", *own, "--out", str(check.folder / "by-command")],
        "generate": ["generate", model, "--prompt", PROMPT, *device, *cache],
        "evaluate": ["evaluate", str(check.folder / "by-command"), *device, *cache],
        "score": ["score", model, "--text", "import os", *device],
        "inspect": ["inspect", model, "--prompt", "import os"],
        "size": ["size", *own],
        "compare": ["compare", *own, "--attention", "mha,mqa", "--out", str(check.folder / "mqa")],
    }
    if check.small:  # each command takes seconds to load PyTorch
        lines = {"generate": lines["generate"]}
    failed = []
    for name, words in lines.items():
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "gptmini", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        yield name, {"exit_code": done.returncode, "seconds": seconds, "last_line": " ".join(last)}
        if done.returncode:
            print(done.stdout, done.stderr)
            failed.append(name)
    assert not failed, f"failed: {', '.join(failed)}"


GPU_ENGINE = "gptmini.extras.engine.gpu_engine"
# What each change of decoding brings: the name that is patched, and its value without the change.
CHANGES: dict[str, tuple[str, Any]] = {
    "CUDA graphs": (f"{GPU_ENGINE}.GpuEngine._compute_step", TorchEngine._compute_step),
    "drawing on the GPU": (f"{GPU_ENGINE}.GpuEngine.draw", TorchEngine.draw),
    "bfloat16": (f"{GPU_ENGINE}.multiplies_bfloat16", lambda _: False),
}


def changes(check: Check) -> Facts:
    """Decoding with each change that was made for GPUs left out."""
    n_new = 8 if check.small else 128
    for rows in (1, ROWS[-1]):
        yield f"{rows} rows, all changes", time_decoding(load_model(check), rows, n_new)
        for name, (target, value) in CHANGES.items():
            with mock.patch(target, value):
                found = time_decoding(load_model(check), rows, n_new)
            yield f"{rows} rows, without: {name}", found
