"""Writes a run in the format of other programs and proves it: reads it back and compares.

Logits are compared on held-out text and on random tokens of the whole vocabulary, and the tokens of
texts that are hard to split, where the package tokenizers is installed. Where the other program is
installed, it loads the export and generates with it, since reading back shows only that gptmini
agrees with itself. An export that fails never appears under its name.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmini import files
from gptmini.config.settings import ModelConfig
from gptmini.errors import CheckpointError, ConfigError, GptminiError, shorten
from gptmini.extras.interop import architectures, gguf, gguf_reader, huggingface
from gptmini.extras.interop.architectures import Tensors
from gptmini.extras.interop.folding import fold
from gptmini.generate.own_model import find_own_module
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import create_undrawn
from gptmini.tokenizer.foreign import SPACE
from gptmini.tokenizer.tokenizers import CharTokenizer, Tokenizer
from gptmini.train.evaluate_run import load_corpus

# Largest difference of logits, as a share of the largest logit. Folding and float32's rounding make
# up to 4e-6, a rotary base of 10001 instead of 10000 makes 3e-5.
MAX_RELATIVE_DIFFERENCE = 1e-5
# The same where another program computes: its sums have another order, and llama.cpp's products
# fewer bits.
MAX_DIFFERENCE_OF_TRANSFORMERS = 1e-3
MAX_DIFFERENCE_OF_LLAMA_CPP = 0.05
COMPARED_POSITIONS = 1024
# Of a large vocabulary the logits of all positions would take more memory than the model.
MAX_COMPARED_LOGITS = 1 << 24
GENERATED_TOKENS = 4  # by another program
MAX_PROMPT = 32  # tokens before them
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
    has a chat template. `generated_by` is the program that generated with it, if that is installed.
    """

    path: Path
    architecture: str
    difference: float
    rounding: float
    scale: float
    tokens: int
    chats: bool
    generated_by: str | None


def export_run(
    run: Run | str | Path, out: str | Path, to: str = "hf", weights: str = "f16"
) -> Export:
    """Write a run as a folder for Hugging Face's libraries (`hf`) or a file for llama.cpp (`gguf`).

    `weights` is the type of matrices in GGUF: f32, f16, bf16 or q8_0. Raises ConfigError if no
    architecture fits the run's settings, GptminiError if the result computes something else.
    """
    run = run if isinstance(run, Run) else load_run(run, "cpu", "float32")
    if run.weights != "float32":
        raise ConfigError(f"{run.path}: its weights are rounded; load it with weights='float32'")
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
            generated_by = generate_by_transformers(
                out, partial, run.tokenizer, expected, tokens, every
            )
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
            rounded = gguf.round_to_type(folded, weights)
            narrow = compute(config, rounded)
            rounding = float((wide - narrow).abs().max())
            difference = check_logits(out, narrow, read_back)
            difference += check_logits(out, expected, wide)
            generated_by = generate_by_llama_cpp(out, partial, config, rounded, tokens)
    scale = float(expected.abs().max())
    chats = run.tokenizer.chat_template is not None
    compared = expected[..., 0].numel()
    return Export(out, model_type, difference, rounding, scale, compared, chats, generated_by)


def check_tokens(out: Path, tokenizer: Tokenizer, read_back: Tokenizer) -> None:
    """Raise GptminiError if the tokenizer that was read back differs; `out` is in the message."""
    if not tokenizer.special_tokens.items() <= read_back.special_tokens.items():
        raise GptminiError(f"{out}: not written: special tokens are others there; {REPORT_BUG}")
    if tokenizer.add_bos([]) != read_back.add_bos([]):
        raise GptminiError(f"{out}: not written: prompts begin otherwise there; {REPORT_BUG}")
    for text in HARD_TEXTS:
        if SPACE in text and isinstance(tokenizer, CharTokenizer):
            continue  # llama.cpp takes it for a space
        if tokenizer.encode(text).tolist() != read_back.encode(text).tolist():
            raise GptminiError(
                f"{out}: not written: the text {text!r} has other tokens there; {REPORT_BUG}"
            )


def check_logits(
    out: Path, expected: Tensor, found: Tensor, max_difference: float | None = None
) -> float:
    """Return the largest difference between logits; GptminiError if it is beyond the limit.

    The limit is a share of the largest logit, MAX_RELATIVE_DIFFERENCE if not stated.
    """
    if max_difference is None:
        max_difference = MAX_RELATIVE_DIFFERENCE
    difference = float((expected - found).abs().max())
    scale = float(expected.abs().max())
    if not difference <= max_difference * scale:  # also if one of them is not a number
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


# -- the other program -----------------------------------------------------------------------------


def generate_by_transformers(
    out: Path, folder: Path, tokenizer: Tokenizer, expected: Tensor, tokens: Tensor, every: int
) -> str | None:
    """Load an export with transformers, compare, and generate as its files say.

    Returns the program's name and version, None if it is not installed. Raises GptminiError for
    logits other than `expected` (B, T / every, V), after each `every`-th position of `tokens`
    (B, T), for other tokens or texts, and for whatever it raises itself.
    """
    try:
        import transformers  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    program = f"transformers {transformers.__version__}"
    with _explain_failure(out, program), _silence(transformers):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
        reader: Any = transformers.AutoTokenizer.from_pretrained(folder)
        with torch.inference_mode():
            compared = torch.arange(0, tokens.shape[1], every)
            found = model(tokens, logits_to_keep=compared).logits
        n_new = min(GENERATED_TOKENS, tokens.shape[1])
        model.generate(tokens[:1, :1], max_new_tokens=n_new)
        read = {text: reader(text)["input_ids"] for text in HARD_TEXTS}
    check_logits(out, expected, found, MAX_DIFFERENCE_OF_TRANSFORMERS)
    # With a chat template, transformers reads special tokens in a text.
    encode = tokenizer.encode if tokenizer.chat_template is None else tokenizer.encode_special
    for text in HARD_TEXTS:
        plain = tokenizer.encode(text)
        same_tokens = read[text] == tokenizer.add_bos(encode(text).tolist())
        if not same_tokens or reader.decode(plain) != tokenizer.decode(plain):
            raise GptminiError(
                f"{out}: not written: {program} reads {text!r} otherwise; {REPORT_BUG}"
            )
    return program


def generate_by_llama_cpp(
    out: Path, file: Path, config: ModelConfig, weights: Tensors, tokens: Tensor
) -> str | None:
    """Load a file with llama.cpp and let it continue a text greedily.

    Returns the program's name, None if it is not installed. Raises GptminiError where it chooses
    tokens that are not among the likeliest by `weights`, and for whatever it raises itself.
    """
    try:
        import xllamacpp  # noqa: PLC0415 - llama.cpp for Python
    except ImportError:
        return None
    name = "llama.cpp"
    n_new = min(GENERATED_TOKENS, config.context_length - 1)
    prompt = tokens[0, : min(MAX_PROMPT, config.context_length - n_new)].tolist()
    with _explain_failure(out, name):
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = config.context_length
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.warmup = False
        params.verbosity = -1  # no log
        request = {"prompt": prompt, "max_tokens": n_new, "temperature": 0}
        request |= {"verbose": True, "return_tokens": True}
        answer = xllamacpp.Server(params).handle_completions(request)
        chosen = answer["__verbose"]["tokens"]  # at least one, the end of the text maybe
        if n_new and not chosen:
            raise ValueError("no tokens")
    logits = compute_logits(config, weights, torch.tensor([prompt + chosen]))[0]  # (T, V)
    for row, token in zip(logits[len(prompt) - 1 :], chosen, strict=False):
        if not row.max() - row[token] <= MAX_DIFFERENCE_OF_LLAMA_CPP * row.abs().max():
            raise GptminiError(f"{out}: not written: {name} chooses other tokens; {REPORT_BUG}")
    return name


@contextmanager
def _explain_failure(out: Path, program: str) -> Iterator[None]:
    """Turn whatever another program raises into a GptminiError."""
    try:
        yield
    except Exception as error:
        problem = shorten(f"{type(error).__name__}: {error}", 200)
        raise GptminiError(
            f"{out}: not written: {program} fails with it ({problem}); update that, or report this"
        ) from None


@contextmanager
def _silence(transformers: Any) -> Iterator[None]:
    """Keep the warnings and progress bars of transformers from the terminal for a while."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    has_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
