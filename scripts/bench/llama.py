"""Time generation beside llama.cpp on the same weights: python scripts/bench llama

Needs `pip install -e '.[bench,gguf]' xllamacpp`, a wheel built for AVX2. llama.cpp runs as a server
in a process of its own, with as many threads. In each row everything takes turns: tokens per
second, prefill and sampling (top-k 50) included; of a prompt of 512, the tokens of the prompt.
--run RUN takes a run in the shape of Llama, such as an imported SmolLM2, in place of random
weights. --cpu counts seconds of the processor, all threads together, in place of those that pass:
for a machine that has other work.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import torch
import transformers
from torch import Tensor

from bench.generate import LLAMA, SIZES, create_hf_model, generate_hf, time_gptmini
from bench.results import Extent, Table
from bench.servers import build_llama_command, find_free_port, start_server
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
OWN_CLOCK = time.CLOCK_PROCESS_CPUTIME_ID


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


@contextmanager
def start_llama_server(model: GPT, kind: str, n_rows: int) -> Iterator[tuple[str, int]]:
    """Serve the weights of a model by llama.cpp; yield the address and process of the server."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        port = find_free_port()
        write_gguf(path, create_run(model, Path("random")), kind)
        command = build_llama_command(path, port, n_rows, torch.get_num_threads())
        with start_server(command, port) as found:
            yield found


def ask(url: str, prompts: Tensor, n_new: int) -> None:
    """Have llama.cpp continue the prompts."""
    body = {"prompt": prompts.tolist(), "n_predict": n_new, "ignore_eos": True}
    body |= {"samplers": ["top_k", "temperature"], "top_k": 50, "temperature": 1.0}
    answer = httpx.post(f"{url}/completion", json=body | {"cache_prompt": False}, timeout=600)
    texts = answer.json() if len(prompts) > 1 else [answer.json()]
    assert [text["tokens_predicted"] for text in texts] == [n_new] * len(prompts), answer.text


def time_row(table: Table, model: GPT, place: tuple[int, int, int], rounds: int, cpu: bool) -> None:
    """Time one row of the table."""
    batch, length, n_new = place
    tokens = batch * (length if n_new == 1 else n_new)
    narrow = create_hf_model(model).to(torch.bfloat16)
    # What continues the prompts, and the clock of the process that does it.
    calls: dict[str, tuple[Callable[[Tensor, int], object], int]] = {}
    calls["HF bfloat16"] = (lambda prompts, n: generate_hf(narrow, prompts, n), OWN_CLOCK)
    with ExitStack() as servers:
        for weights, kind in TYPES.items():
            engine = open_engine(model, batch, weights)
            url, process = servers.enter_context(start_llama_server(model, kind, batch))
            calls[weights] = (partial(time_gptmini, engine, model), OWN_CLOCK)
            other = ~process << 3 | 2  # how Linux numbers the clock of another process
            calls[kind] = (lambda prompts, n, url=url: ask(url, prompts, n), other)  # type: ignore[misc]
        for turn in range(rounds + 1):  # with new prompts, as gptmini keeps what it has read
            prompts = torch.randint(257, model.config.vocab_size or 0, (batch, length))
            for name, (call, own) in calls.items():
                clock = own if cpu else time.CLOCK_MONOTONIC
                started = time.clock_gettime(clock)
                call(prompts, n_new if turn else 1)
                if turn:  # the first turn warms up
                    passed = time.clock_gettime(clock) - started
                    table.append(f"{batch} x {length}, {n_new} new", name, tokens / passed)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="count seconds of the processor")
    parser.add_argument("--run", help="a run in the shape of Llama")


def measure(extent: Extent, run: str | None = None, cpu: bool = False) -> Iterator[Table]:
    transformers.logging.set_verbosity_error()
    if not sys.platform.startswith("linux"):
        sys.exit("bench llama: needs Linux, for the clock of another process")
    trial = extent == "trial"
    columns = [name for pair in TYPES.items() for name in pair]
    factors = [*(" / ".join(pair) for pair in TYPES.items()), "bfloat16 / HF bfloat16"]
    table = Table("llama", "rows x prompt, tokens/s", ["HF bfloat16", *columns, *factors])
    model = load_run(run, "cpu").model if run else create_model("tiny" if trial else "124M")
    for place in ROWS[:2] if trial else ROWS:
        time_row(table, model, place, 3 if trial else 5, cpu)
    yield table
