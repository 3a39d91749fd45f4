"""One run in the formats of others, proven: what was written is read back and compared.

The comparison is of logits, on held-out text and on random tokens of the whole vocabulary, and of
the tokens of texts that are hard to split. What does not pass never gets its name.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptmini import files
from gptmini.config.settings import ModelConfig
from gptmini.errors import CheckpointError, ConfigError, GptminiError
from gptmini.evidence.evaluate import held_out
from gptmini.generate.run import Run, load
from gptmini.interop import architectures, gguf, huggingface
from gptmini.interop.architectures import Tensors
from gptmini.interop.folding import fold
from gptmini.model.gpt import GPT
from gptmini.text.tokenizer import Tokenizer

# Of the largest logit. Folding and float32's rounding make up to 4e-6 of it, a rotary base of 10001
# instead of 10000 3e-5.
LIMIT = 1e-5
HARD_TEXTS = [
    *("", " ", "  \n \t\r\n\n x ", "\u00a0\u2003\u3000a", "don't I'LL we'Ve 's", "!?.,;:" * 9),
    *("a1b22 1234567 ½²Ⅷ", "<|endoftext|> <s></s>[INST]", "\x00\x1b\x7f\ufeff", "a" * 300),
    *(
        "naïve café ﬁ İı ß Ǆ",
        "שלום עולם مرحبا",
        "你好世界。日本語テキスト",
        "नमस्ते ไทย 한국어",
        "_▁Ġ ##x@@",
    ),
    *(
        "e\u0301 \u1e0b\u0323",
        "👩‍👩‍👧 🇩🇪 👍🏽",
        "if (x != y) {\n\treturn -x;  // ...\n}",
        " " * 70 + "b",
    ),
    *("\n" * 9, "http://a.b/c?d=e&f#g", "\U0010ffff\ue000", "MIXEDcase CamelCase snake_case"),
]
LENGTH = 1024  # positions compared
BUG = "this is a bug; report it"
Read = tuple[ModelConfig, Tensors, Tokenizer]


@dataclass(frozen=True)
class Export:
    """What was written, and how far its logits are from the run's, the largest of which is `scale`.

    `rounding` is the part that is due to narrower weights.
    """

    path: Path
    architecture: str
    difference: float
    rounding: float
    scale: float
    tokens: int


def export_run(
    run: Run | str | Path,
    out: str | Path,
    to: str = "hf",
    weights: str = "f16",
    cache: Path = files.CACHE,
) -> Export:
    """Write a run as a folder for Hugging Face's libraries (`hf`) or a file for llama.cpp (`gguf`).

    `weights` is the type of matrices in GGUF: f32, f16, bf16 or q8_0. ConfigError if no
    architecture fits the run's settings, GptminiError if what was written computes something else.
    """
    run = run if isinstance(run, Run) else load(run, "cpu", "float32", cache)
    if run.weights != "float32":
        raise ConfigError(f"{run.path}: its weights are rounded; load it with weights='float32'")
    if to not in ("hf", "gguf"):
        raise ConfigError(f"--to {to}: unknown format; use hf or gguf")
    out = Path(out)
    config, folded = fold(run.config.model, run.model.state_dict())
    kind = architectures.choose(config)
    if to == "gguf":
        gguf.check(config, run.tokenizer, weights)
    with huggingface.appearing(out) as partial:
        tokens = sample(run, cache)
        expected = logits(run.config.model, run.model.state_dict(), tokens)
        if not expected.isfinite().all():
            raise CheckpointError(f"{run.path}: logits are not finite; its weights are bad")
        if to == "hf":
            huggingface.write(partial, run, kind, config, folded)
            read = huggingface.read(partial, config.context_length)
            difference = prove(out, expected, run.tokenizer, read, tokens)
            rounding = 0.0
        else:
            gguf.write(partial, run, kind, config, folded, weights)
            read = gguf.read(partial)
            narrow = logits(config, gguf.rounded(folded, weights), tokens)
            wide = logits(config, folded, tokens)
            rounding = float((wide - narrow).abs().max())
            difference = prove(out, narrow, run.tokenizer, read, tokens)
            difference += check(out, expected, wide)
    return Export(out, kind, difference, rounding, float(expected.abs().max()), tokens.numel())


def prove(out: Path, expected: Tensor, tokenizer: Tokenizer, read: Read, tokens: Tensor) -> float:
    """The largest difference of logits (B, T, V) from what was read back; GptminiError if large."""
    config, weights, tokenizer_there = read
    special, special_there = tokenizer.special_tokens, tokenizer_there.special_tokens
    if not special.items() <= special_there.items():
        raise GptminiError(f"{out}: not written: special tokens are others there; {BUG}")
    for text in HARD_TEXTS:
        if tokenizer.encode(text).tolist() != tokenizer_there.encode(text).tolist():
            raise GptminiError(
                f"{out}: not written: the text {text!r} has other tokens there; {BUG}"
            )
    return check(out, expected, logits(config, weights, tokens))


def check(out: Path, expected: Tensor, found: Tensor) -> float:
    """The largest difference between logits; GptminiError if it is beyond the limit."""
    difference, scale = float((expected - found).abs().max()), float(expected.abs().max())
    if not difference <= LIMIT * scale:
        raise GptminiError(
            f"{out}: not written: logits differ by {difference:.1e} (the largest is {scale:.1f}); "
            f"{BUG}"
        )
    return difference


@torch.inference_mode()
def logits(config: ModelConfig, weights: Tensors, tokens: Tensor) -> Tensor:
    """The logits (B, T, V) of tokens (B, T)."""
    model = GPT(config).eval()
    model.load_state_dict(weights)
    return model(tokens)


def sample(run: Run, cache: Path) -> Tensor:
    """Tokens (2, T) to compare logits on: held-out text, if it is there, and random ones."""
    length = min(run.config.model.context_length, LENGTH)
    numbers = torch.Generator().manual_seed(0)
    random = torch.randint(run.tokenizer.vocab_size, (2, length), generator=numbers)
    try:
        held = held_out(run, cache)[0]
        text = torch.from_numpy(held.read(0, min(length, len(held))).astype("int64"))
    except GptminiError:  # an imported run has none, and other texts may have changed
        text = torch.tensor(run.encode("".join(HARD_TEXTS) * 20)[:length])
    random[0, : len(text)] = text
    return random
