"""Time generation beside llama.cpp on the same weights: python scripts/bench llama

Needs `pip install -e '.[bench,gguf]'`. Where the variable LLAMA_CPP names a folder, its
llama-batched-bench takes part, which does not sample; else the server of the wheel xllamacpp, which
is built for AVX2. In each row everything takes turns, on as many threads: tokens per second,
prefill and sampling (top-k 50) included; of a prompt of 512, the tokens of the prompt. --run RUN
takes a run in the shape of Llama, such as an imported SmolLM2, in place of random weights.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import torch
import transformers
from torch import Tensor

from bench.generate import HF, LLAMA, SIZES, create_hf_model, generate_hf, time_gptmini
from bench.results import Extent, Table
from bench.servers import LLAMA_CPP, build_llama_command, find_free_port, start_server
from gptmini.config.settings import Config, ModelConfig
from gptmini.extras.interop import gguf
from gptmini.extras.interop.folding import fold
from gptmini.generate.engine import open_engine
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.tokenizers import CharTokenizer

# What is compared: how gptmini stores weights, and llama.cpp.
TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}
ROWS = ((1, 32, 64), (1, 512, 1), (8, 32, 32), (32, 32, 16))  # rows, prompt tokens, new tokens
Call = Callable[[Tensor, int], float]  # seconds to continue prompts by a number of tokens


def create_model(size: str) -> GPT:
    """In the shape of Llama, with random weights."""
    torch.manual_seed(0)
    shape = {**SIZES[size], **LLAMA, "attention": {"variant": "mha", "qk_norm": False}}
    vocab_size = max(SIZES[size]["vocab_size"], 400)  # 257 are bytes and the end-of-text token
    shape |= {"vocab_size": vocab_size, "context_length": 1024}
    return GPT(ModelConfig.model_validate(shape)).eval()


def create_run(model: GPT, path: Path) -> Run:
    """Make a model a run, with a tokenizer of as many characters."""
    characters = map(chr, range(0x10000, 0x10000 + (model.config.vocab_size or 0) - 257))
    return Run(path, Config(model=model.config), CharTokenizer("".join(characters)), model)


def write_gguf(path: Path, run: Run, kind: str) -> None:
    """Write a run in the shape of Llama for llama.cpp."""
    config, weights = fold(run.model.config, run.model.state_dict())
    gguf.write_gguf(path, run, "llama", config, weights, kind)


def open_llama(stack: ExitStack, path: Path, n_rows: int) -> Call:
    """Return what continues prompts by llama.cpp."""
    if LLAMA_CPP:
        return partial(run_batched_bench, path)
    port = find_free_port()
    command = build_llama_command(path, port, n_rows, torch.get_num_threads())
    url, _ = stack.enter_context(start_server(command, port))
    return partial(ask, url)


def run_batched_bench(path: Path, prompts: Tensor, n_new: int) -> float:
    """Seconds of llama.cpp itself; the first of the new tokens is that of the prompt's logits."""
    n_rows, length = prompts.shape
    threads = torch.get_num_threads()
    words = ["-m", path, "-npl", n_rows, "-npp", length, "-ntg", max(1, n_new - 1)]
    words += ["-c", 1024 * n_rows, "-t", threads, "-fa", "on", "--output-format", "jsonl"]
    command = [f"{LLAMA_CPP}/llama-batched-bench", *map(str, words)]
    lines: list[str] = []
    for _ in range(20):  # it often ends before its thread for messages has written them
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if lines:
            break
    found = json.loads(lines[0])
    return found["t_pp"] + (found["t_tg"] if n_new > 1 else 0.0)


def ask(url: str, prompts: Tensor, n_new: int) -> float:
    """Seconds of llama.cpp's server to continue the prompts."""
    body = {"prompt": prompts.tolist(), "n_predict": n_new, "ignore_eos": True}
    body |= {"samplers": ["top_k", "temperature"], "top_k": 50, "temperature": 1.0}
    started = time.perf_counter()
    answer = httpx.post(f"{url}/completion", json=body | {"cache_prompt": False}, timeout=600)
    seconds = time.perf_counter() - started
    texts = answer.json() if len(prompts) > 1 else [answer.json()]
    assert [text["tokens_predicted"] for text in texts] == [n_new] * len(prompts), answer.text
    return seconds


def time_row(
    table: Table, model: GPT, files: dict[str, Path], place: tuple[int, int, int], rounds: int
) -> None:
    """Time one row of the table."""
    batch, length, n_new = place
    tokens = batch * (length if n_new == 1 else n_new)
    calls: dict[str, Call] = {
        name: partial(generate_hf, create_hf_model(model).to(dtype)) for name, dtype in HF.items()
    }
    with ExitStack() as servers:
        for weights, kind in TYPES.items():
            engine = open_engine(model, batch, weights)
            calls[weights] = lambda prompts, n, e=engine: time_gptmini(e, model, prompts, n)[0]  # type: ignore[misc]
            calls[kind] = open_llama(servers, files[kind], batch)
        for turn in range(rounds + 1):  # with new prompts, as gptmini keeps what it has read
            prompts = torch.randint(257, model.config.vocab_size or 0, (batch, length))
            for name, call in calls.items():
                seconds = call(prompts, n_new if turn else 1)
                if turn:  # the first turn warms up
                    table.append(f"{batch} x {length}, {n_new} new", name, tokens / seconds)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", help="a run in the shape of Llama")


def measure(extent: Extent, run: str | None = None) -> Iterator[Table]:
    transformers.logging.set_verbosity_error()
    trial = extent == "trial"
    columns = [*HF, "peer", *(name for pair in TYPES.items() for name in pair)]
    factors = [*(" / ".join(pair) for pair in TYPES.items()), "bfloat16 / peer"]
    table = Table(
        "llama", "rows x prompt, tokens/s", [*columns, *factors], peers=tuple(HF), best=max
    )
    model = load_run(run, "cpu").model if run else create_model("tiny" if trial else "124M")
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder, f"{kind}.gguf") for kind in TYPES.values()}
        for kind, path in files.items():
            write_gguf(path, create_run(model, Path("random")), kind)
        for place in ROWS[:2] if trial else ROWS:
            time_row(table, model, files, place, 3 if trial else 5)
    yield table
