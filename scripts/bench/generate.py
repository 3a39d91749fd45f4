"""Time generation beside Hugging Face on the same weights: python scripts/bench generate

Needs `pip install -e '.[bench]'`. In each row everything takes turns in one process: tokens per
second, prefill included, the time to the first token, and the bytes of weights that decoding one
row reads a second. Weights are random; the logits of both are compared before anything is timed.
MHA has the shape of GPT-2, GQA and MQA that of Llama. Sampling is top-k 50.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.results import Extent, Table
from gptmini.config.settings import ModelConfig, SampleConfig
from gptmini.extras.engine.native_engine import NativeEngine
from gptmini.generate.engine import Engine, open_engine
from gptmini.generate.precision import PRECISIONS, round_weights
from gptmini.generate.sampler import sample_tokens
from gptmini.generate.sequence import Sequence
from gptmini.model.gpt import GPT

SIZES = {
    "tiny": {"n_layer": 2, "n_head": 6, "d_model": 96, "vocab_size": 65},
    "10M": {"n_layer": 6, "n_head": 6, "d_model": 384, "vocab_size": 65},
    "124M": {"n_layer": 12, "n_head": 12, "d_model": 768, "vocab_size": 50257},
}
WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes of a weight
GPT2 = {"position": "learned", "activation": "gelu", "bias": True}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": False}
# transformers in its types, by what tables call them.
HF = {"transformers float32": torch.float32, "transformers bfloat16": torch.bfloat16}
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {"variant": "mha"},
    "gqa": {"variant": "gqa"},
    "mqa": {"variant": "mqa"},
}


def model_config(size: str, variant: str) -> ModelConfig:
    shape = GPT2 if variant == "mha" else LLAMA
    heads = {"n_kv_head": SIZES[size]["n_head"] // 3} if variant == "gqa" else {}
    attention = {"qk_norm": False, **VARIANTS[variant], **heads}
    config = {"context_length": 1024, **SIZES[size], **shape, "attention": attention}
    return ModelConfig.model_validate(config)


def create_model(size: str, variant: str) -> GPT:
    """With random weights."""
    torch.manual_seed(0)
    return GPT(model_config(size, variant)).eval()


def gpt2_config(ours: ModelConfig) -> Any:
    """The same shape for transformers."""
    return transformers.GPT2Config(
        vocab_size=ours.vocab_size or 0,
        n_layer=ours.n_layer,
        n_head=ours.n_head,
        n_embd=ours.d_model,
        n_positions=1024,
    )


def create_hf_model(model: GPT) -> Any:
    """The same weights in the model of transformers."""
    ours = model.config
    theirs: Any
    if ours.position == "learned":
        theirs = transformers.GPT2LMHeadModel(gpt2_config(ours))
        theirs.load_state_dict(to_gpt2_weights(model), strict=False)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=ours.n_layer,
            num_attention_heads=ours.n_head,
            num_key_value_heads=ours.n_kv_head,
            hidden_size=ours.d_model,
            intermediate_size=ours.d_ff,
            rms_norm_eps=ours.norm_eps,
            max_position_embeddings=1024,
            vocab_size=ours.vocab_size or 0,
            rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
            tie_word_embeddings=ours.tie_embeddings,
        )
        theirs = transformers.LlamaForCausalLM(config)
        theirs.load_state_dict(to_llama_weights(model), strict=False)
    tokens = torch.randint(ours.vocab_size or 1, (2, 40))
    with torch.inference_mode():
        torch.testing.assert_close(
            theirs.eval()(tokens).logits, model(tokens), atol=1e-3, rtol=1e-3
        )
    return theirs


def to_gpt2_weights(model: GPT) -> dict[str, Tensor]:
    """Weights under GPT-2's names, its matrices transposed."""
    weights = {"transformer.wte.weight": model.embed.weight, "lm_head.weight": model.embed.weight}
    assert model.positions is not None
    weights["transformer.wpe.weight"] = model.positions.weight
    state = model.state_dict()
    weights |= {
        f"transformer.ln_f.{part}": state[f"final_norm.{part}"] for part in ("weight", "bias")
    }
    pairs = {"attn_norm": "ln_1", "mlp_norm": "ln_2", "attn.o_proj": "attn.c_proj"}
    pairs |= {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    for layer in range(model.config.n_layer):
        ours = f"blocks.{layer}."
        theirs = f"transformer.h.{layer}."
        for part in ("weight", "bias"):
            for name, other in pairs.items():
                value = state[f"{ours}{name}.{part}"]
                weights[f"{theirs}{other}.{part}"] = value.mT if value.ndim == 2 else value
            qkv = torch.cat([state[f"{ours}attn.{x}_proj.{part}"] for x in "qkv"])
            weights[f"{theirs}attn.c_attn.{part}"] = qkv.mT if qkv.ndim == 2 else qkv
    return weights


def to_llama_weights(model: GPT) -> dict[str, Tensor]:
    """Weights under Llama's names."""
    renamed = {
        "blocks": "model.layers",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn": "self_attn",
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
    return {
        ".".join(renamed.get(part, part) for part in name.split(".")): value
        for name, value in model.state_dict().items()
    }


def time_gptmini(decoder: Engine, model: GPT, prompts: Tensor, n_new: int) -> tuple[float, float]:
    """Seconds in all and to the first token."""
    sample = SampleConfig(temperature=1.0, top_k=50, max_new_tokens=n_new)
    texts = [Sequence(n, prompt, 1024, sample) for n, prompt in enumerate(prompts.tolist())]
    started = time.perf_counter()
    times = [time.perf_counter() for _ in sample_tokens(decoder, texts)]
    return times[-1] - started, times[0] - started


def time_hf(model: Any, prompts: Tensor, n_new: int) -> tuple[float, float]:
    """The same for `generate` of transformers; the first token is timed in a separate call."""
    return generate_hf(model, prompts, n_new), generate_hf(model, prompts, 1)


def generate_hf(model: Any, prompts: Tensor, n_new: int) -> float:
    """Seconds of transformers to continue the prompts."""
    started = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=n_new,
        min_new_tokens=n_new,
        do_sample=True,
        top_k=50,
        pad_token_id=0,
    )
    return time.perf_counter() - started


def list_contestants(
    model: GPT, batch: int
) -> dict[str, Callable[[Tensor, int], tuple[float, float]]]:
    """List what is timed, by name."""
    calls: dict[str, Callable[[Tensor, int], tuple[float, float]]] = {
        name: partial(time_hf, create_hf_model(model).to(dtype)) for name, dtype in HF.items()
    }
    for weights in PRECISIONS:
        engine = open_engine(model, batch, weights)
        if isinstance(engine, NativeEngine):
            calls[weights] = partial(time_gptmini, engine, model)
    return calls


def measure_bandwidth() -> float:
    """Bytes per second that all threads read from memory: the best of ten sums of 500 MB."""
    numbers = torch.ones(125_000_000)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best


@dataclass
class Tables:
    """The tables to which each row adds its runs."""

    speeds: Table
    firsts: Table
    reads: Table

    def time(self, size: str, variant: str, batch: int, length: int, rounds: int) -> None:
        """Time one row."""
        row = f"{size} {variant}, {batch} x {length}"
        model = create_model(size, variant)
        calls = list_contestants(model, batch)
        n_new = 16 if size == "tiny" else 200 if size == "10M" else 64 if batch < 32 else 32
        for turn in range(rounds + 1):  # with new prompts, as gptmini keeps what it has read
            prompts = torch.randint(model.config.vocab_size or 1, (batch, length))
            for name, call in calls.items():
                seconds, first = call(prompts, n_new if turn else 2)
                if not turn:  # the first turn warms up
                    continue
                self.speeds.append(row, name, batch * n_new / seconds)
                self.firsts.append(row, name, first * 1000)
                if batch == 1 and length == 32 and name in PRECISIONS:
                    size_read = count_read_weights(model) * WIDTHS[name]
                    self.reads.append(row, name, size_read / (seconds - first) * (n_new - 1) / 1e9)
            if batch == 1 and length == 32 and turn:
                self.reads.append(row, "sum", measure_bandwidth() / 1e9)


def count_read_weights(model: GPT) -> int:
    """How many weights a step reads: all but the embeddings that it looks up."""
    parameters = sum(p.numel() for p in model.parameters())
    if model.positions is not None:
        parameters -= model.positions.weight.numel()
    if model.head is not None:
        parameters -= model.embed.weight.numel()
    return parameters


def print_memory(size: str, who: str) -> None:
    """Generate one text and print the peak memory of this process in MiB."""
    prompts = torch.randint(65, (1, 32))
    if who in HF:
        shape = gpt2_config(model_config(size, "mha"))
        theirs = transformers.AutoModelForCausalLM.from_config(shape, dtype=HF[who])
        time_hf(theirs, prompts, 32)
    else:
        model = create_model(size, "mha")
        round_weights(model, who)  # as a run stores them when it is loaded
        time_gptmini(open_engine(model, 1, who), model, prompts, 32)
    print(read_peak())


def read_peak() -> float:
    """Peak memory of this process in MiB; that of getrusage would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


def measure_memory(trial: bool) -> Table:
    shown = [*HF, "peer", *PRECISIONS, *(f"peer / {name}" for name in PRECISIONS)]
    table = Table("generate memory", "peak MiB, 1 x 32", shown, peers=tuple(HF))
    for size in ("tiny",) if trial else ("10M", "124M"):
        for who in (*HF, *PRECISIONS):
            command = [sys.executable, "-m", "bench.generate", size, who]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            table.append(size, who, float(said))
    return table


def measure(extent: Extent) -> Iterator[Table]:
    transformers.logging.set_verbosity_error()
    names, peers = [*HF, "peer", *PRECISIONS], tuple(HF)
    # float32 is for who needs its exactness: it is compared with the same.
    factors = ["float32 / transformers float32", "bfloat16 / peer", "int8 / peer"]
    inverse = [" / ".join(reversed(factor.split(" / "))) for factor in factors]
    speeds = [*names, *factors]
    tables = Tables(
        Table("generate", "model, rows x prompt, tokens/s", speeds, peers=peers, best=max),
        Table("generate first token", "ms", [*names, *inverse], peers=peers),
        Table("generate reads", "GB/s", ["sum", *PRECISIONS, *(f"{x} / sum" for x in PRECISIONS)]),
    )
    if extent == "trial":
        tables.time("tiny", "gqa", 2, 8, 1)
        tables.time("tiny", "mha", 1, 32, 1)
    else:
        for size in ("10M", "124M"):
            for variant in VARIANTS if extent == "full" else ("mha",):
                for batch, length in ((1, 32), (1, 512), (8, 32), (32, 32)):
                    tables.time(size, variant, batch, length, 3 if extent == "quick" else 5)
    yield from (tables.speeds, tables.firsts, tables.reads)
    yield measure_memory(extent == "trial")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print_memory(*sys.argv[1:])
