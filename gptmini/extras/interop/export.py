"""Writes a run in the format of other programs and proves it: reads it back and compares.

Logits are compared on held-out text and on random tokens of the whole vocabulary, and the tokens of
texts that are hard to split, where the package tokenizers is installed. An export that fails never
appears under its name. The tests load exports with transformers and llama.cpp, and generate.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from gptmini import files
from gptmini.config.settings import ModelConfig
from gptmini.errors import CheckpointError, ConfigError, GptminiError
from gptmini.extras.interop import architectures, gguf, gguf_reader, huggingface
from gptmini.extras.interop.folding import fold
from gptmini.generate.own_model import find_own_module
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import create_undrawn
from gptmini.runs.tensors import Tensors
from gptmini.tokenizer.foreign import SPACE, ForeignTokenizer
from gptmini.tokenizer.tokenizers import CharTokenizer, Tokenizer
from gptmini.train.evaluate_run import load_corpus

# Largest difference of logits, as a share of the largest logit. Folding and float32's rounding make
# up to 4e-6, a rotary base of 10001 instead of 10000 makes 3e-5.
MAX_RELATIVE_DIFFERENCE = 1e-5
COMPARED_POSITIONS = 1024
# Of a large vocabulary the logits of all positions would take more memory than the model.
MAX_COMPARED_LOGITS = 1 << 24
HARD_TEXTS = [
    "",
    " ",
    "  \n \t\r\n\n x ",
    "\u00a0\u2003\u3000a",
    "don't I'LL we'Ve 's",
    "!?.,;:" * 9,
    "a1b22 1234567 ½²Ⅷ",
    "<|endoftext|> <s></s>[INST]",
    "\x00\x1b\x7f\ufeff",
    "a" * 300,
    "naïve café ﬁ İı ß Ǆ",
    "שלום עולם مرحبا",
    "你好世界。日本語テキスト",
    "नमस्ते ไทย 한국어",
    "_▁Ġ ##x@@",
    "e\u0301 \u1e0b\u0323",
    "👩‍👩‍👧 🇩🇪 👍🏽",
    "if (x != y) {\n\treturn -x;  // ...\n}",
    " " * 70 + "b",
    "\n" * 9,
    "http://a.b/c?d=e&f#g",
    "\U0010ffff\ue000",
    "MIXEDcase CamelCase snake_case",
]
REPORT_BUG = "this is a bug; report it"


@dataclass(frozen=True)
class Export:
    """A finished export and its proof.

    `difference` is how far its logits are from the run's, the largest of which is `scale`;
    `rounding` is how far they move by rounding weights to a narrower type. `chats` says whether it
    has a chat template.
    """

    path: Path
    architecture: str
    difference: float
    rounding: float
    scale: float
    tokens: int
    chats: bool


def export_run(
    run: Run | str | Path, out: str | Path, to: str = "hf", weights: str = "f16"
) -> Export:
    """Write a run as a folder for Hugging Face's libraries (`hf`) or a file for llama.cpp (`gguf`).

    `weights` is the type of matrices in GGUF: f32, f16, bf16 or q8_0. Raises ConfigError if no
    architecture fits the run's settings, GptminiError if the result computes something else.
    """
    run = run if isinstance(run, Run) else load_run(run, "cpu", "float32")
    if own := find_own_module(run.model):
        raise ConfigError(f"{run.path}: {own}, which no other program computes; use it in Python")
    if to not in ("hf", "gguf"):
        raise ConfigError(f"--to {to}: unknown format; use hf or gguf")
    out = Path(out)
    config, folded = fold(run.config.model, run.model.state_dict())
    model_type = architectures.choose_model_type(config)
    if to == "gguf":
        gguf.check_supported(config, run.tokenizer, weights)
    with files.atomic_output(out) as partial:
        tokens = choose_tokens(run)  # (2, T)
        every = max(1, tokens.numel() * run.tokenizer.vocab_size // MAX_COMPARED_LOGITS)

        def compute(config: ModelConfig, weights: Tensors) -> Tensor:
            return compute_logits(config, weights, tokens, every)  # (2, T / every, V)

        expected = compute(run.config.model, run.model.state_dict())
        if not expected.isfinite().all():
            raise CheckpointError(f"{run.path}: the logits are not finite; train it again")
        if to == "hf":
            huggingface.write_folder(partial, run, model_type, config, folded)
            read_config, read_weights = huggingface.read_model(partial, config.context_length)
            read_back = compute(read_config, dict(read_weights))
            difference = check_logits(out, expected, read_back)
            if find_spec("tokenizers"):
                read_tokenizer = huggingface.read_tokenizer(partial, run.tokenizer.vocab_size)
                check_tokens(out, run.tokenizer, read_tokenizer)
            rounding = 0.0
        else:
            gguf.write_gguf(partial, run, model_type, config, folded, weights)
            read_config, read_weights, read_tokenizer = gguf_reader.read_gguf(
                partial, config.context_length
            )
            check_tokens(out, run.tokenizer, read_tokenizer)
            read_back = compute(read_config, dict(read_weights))
            # Rounding is no fault, so it is kept out of the comparison: the file must be equal to
            # the rounded weights, and the folded weights to the run.
            wide = compute(config, folded)
            narrow = compute(config, gguf.round_to_type(folded, weights))
            rounding = float((wide - narrow).abs().max())
            difference = check_logits(out, narrow, read_back)
            difference += check_logits(out, expected, wide)
    scale = float(expected.abs().max())
    chats = run.tokenizer.chat_template is not None
    compared = expected[..., 0].numel()
    return Export(out, model_type, difference, rounding, scale, compared, chats)


def check_tokens(out: Path, tokenizer: Tokenizer, read_back: Tokenizer) -> None:
    """Raise GptminiError if the tokenizer that was read back differs; `out` is in the message."""
    if not tokenizer.special_tokens.items() <= read_back.special_tokens.items():
        raise GptminiError(f"{out}: not written: special tokens differ there; {REPORT_BUG}")
    if tokenizer.add_bos([]) != read_back.add_bos([]):
        raise GptminiError(f"{out}: not written: prompts begin differently there; {REPORT_BUG}")
    for text in HARD_TEXTS:
        if SPACE in text and isinstance(tokenizer, CharTokenizer):
            continue  # llama.cpp takes it for a space
        if tokenizer.encode(text).tolist() != read_back.encode(text).tolist():
            problem = f"{out}: not written: the text {text!r} has other tokens there"
            if isinstance(tokenizer, ForeignTokenizer):  # the format may not have what it is
                raise ConfigError(f"{problem}; choose another format or model")
            raise GptminiError(f"{problem}; {REPORT_BUG}")


def check_logits(out: Path, expected: Tensor, found: Tensor) -> float:
    """Return the largest difference between logits; GptminiError if it is too large."""
    difference = float((expected - found).abs().max())
    scale = float(expected.abs().max())
    if not difference <= MAX_RELATIVE_DIFFERENCE * scale:  # also if one of them is not a number
        raise GptminiError(
            f"{out}: not written: logits differ by {difference:.1e} (the largest is {scale:.1f}); "
            f"{REPORT_BUG}"
        )
    return difference


@torch.inference_mode()
def compute_logits(config: ModelConfig, weights: Tensors, tokens: Tensor, every: int = 1) -> Tensor:
    """Return the logits (B, T / every, V) after each `every`-th position of tokens (B, T)."""
    model = create_undrawn(config).eval()
    model.load_state_dict({name: each.float() for name, each in weights.items()}, assign=True)
    hidden = model.forward_hidden(tokens)[:, ::every]  # (B, T / every, D)
    return model.compute_logits(hidden)


def choose_tokens(run: Run) -> Tensor:
    """Choose tokens (2, T) to compare logits on: a text and random tokens.

    The text is held-out text if it is there. It fills the first row as far as it goes.
    """
    length = min(run.config.model.context_length, COMPARED_POSITIONS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.tokenizer.vocab_size, (2, length), generator=generator)
    try:
        held_out = load_corpus(run).validation[0]
        numbers = held_out.read(0, min(length, len(held_out)))
        text = torch.from_numpy(numbers.astype("int64"))
    except GptminiError:  # an imported run has none, and a text may have changed since
        text = torch.tensor(run.encode("".join(HARD_TEXTS) * 20)[:length])
    tokens[0, : len(text)] = text
    return tokens
