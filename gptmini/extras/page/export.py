"""Writes a run as one HTML file: weights, tokenizer, settings, model.js and what page.js shows.

Nothing that comes from a run can become markup or script: it is JSON in ASCII without `<`, `>` and
`&`, or base64; page.js only ever sets texts; and the page's Content-Security-Policy allows no
script but its own, no other file, and no network but the server that gave it.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmini import files
from gptmini.errors import ConfigError, DataError, GptminiError
from gptmini.extras.page.simplify import simplify_tokenizer
from gptmini.generate.precision import quantize
from gptmini.generate.run import Run
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.byte_level import KNOWN_PATTERNS
from gptmini.tokenizer.foreign import ForeignTokenizer
from gptmini.tokenizer.tokenizers import Tokenizer
from gptmini.train.evaluate_run import load_corpus

FOLDER = Path(__file__).parent
PAGE_SCRIPTS = (  # in this order
    "words.js",
    "draw.js",
    "views.js",
    "sections.js",
    "learn.js",
    "ask.js",
    "page.js",
)
MAX_PAGE_BYTES = 30_000_000  # browsers open pages of this size without a pause
OPENING_LENGTH = 100  # characters
OPENING_TOKENS = 1000  # to find them in
PRECISIONS = ("bfloat16", "int8")  # of matrices, the better first; everything else is float32


class ExportedPage(NamedTuple):
    """What `export_page` wrote."""

    size: int  # bytes
    precision: str
    held_out: str  # on which it opens


def export_page(
    run: Run, out: Path, precision: str | None = None, prompt: str = ""
) -> ExportedPage:
    """Write a run as a page, which opens on a prompt or on held-out text.

    `precision` is chosen by size if not given. Raises ConfigError for a model that is too large,
    DataError for a tokenizer that the page cannot run.
    """
    files.check_replaceable(out, b"gptmini")
    precision = precision or choose_precision(run)
    held_out = "" if prompt else find_opening(run)
    page = build_page(run, precision, prompt, held_out)
    files.atomic_write_bytes(out, page)
    return ExportedPage(len(page), precision, held_out)


def build_served_page(run: Run, max_tokens: int) -> bytes:
    """Build the page of a run whose server draws at most `max_tokens` of a text.

    A model that a page cannot hold or run stays with the server, which the page then asks.
    """
    # Weights in int8 are multiples of a scale, and bfloat16 would round them once more.
    precision = "int8" if run.weights == "int8" else choose_precision(run)
    server = {"chat": run.tokenizer.chat_template is not None, "max_tokens": max_tokens}
    try:
        return build_page(run, precision, held_out=find_opening(run), server=server)
    except (ConfigError, DataError):
        data = build_data(run, precision, {"kind": run.tokenizer.kind})
        return render_page(data | {"server": server}, "")


def choose_precision(run: Run) -> str:
    """Choose bfloat16, or int8 where a page in bfloat16 would be too large."""
    fits = estimate_size(run, PRECISIONS[0]) <= MAX_PAGE_BYTES
    return PRECISIONS[0] if fits else PRECISIONS[1]


def estimate_size(run: Run, precision: str) -> int:
    """Estimate the bytes of a page."""
    weights = count_bytes(list_tensors(run.tensors, precision))
    return weights * 4 // 3 + len(run.tokenizer.to_json())


def build_page(
    run: Run,
    precision: str = "bfloat16",
    prompt: str = "",
    held_out: str = "",
    server: dict[str, Any] | None = None,
) -> bytes:
    """Build the page of a run; it opens on a prompt, or on held-out text.

    `server` is what page.js has to know of the server that gives the page, if one does.
    """
    tokenizer = describe_tokenizer(run.tokenizer)
    if estimate_size(run, precision) > MAX_PAGE_BYTES:
        raise ConfigError(
            f"{run.path}: in {precision} its page would be larger than {MAX_PAGE_BYTES:,} bytes; "
            f"use gptmini serve"
        )
    data = build_data(run, precision, tokenizer)
    data |= {"prompt": prompt, "held_out": held_out, "server": server}
    weights = b"".join(encode_tensors(run.tensors, precision))
    return render_page(data, base64.b64encode(weights).decode())


def find_opening(run: Run) -> str:
    """Find about OPENING_LENGTH characters of held-out text; "" where that is not there."""
    try:
        held_out = load_corpus(run).validation[0]
    except GptminiError:  # an imported run has none, and a text may have changed since
        return ""
    tokens = held_out.read(0, min(OPENING_TOKENS, len(held_out)))
    text = run.tokenizer.decode(tokens.tolist()).strip()
    # Behind an empty line something begins; the held-out text itself may begin in a word.
    paragraphs = [each.strip() for each in text.split("\n\n")[1:]]
    found = next((each for each in paragraphs if len(each) >= OPENING_LENGTH), text)
    opening = found[:OPENING_LENGTH]
    return opening.rsplit(maxsplit=1)[0] if len(found) > OPENING_LENGTH else opening


def build_data(run: Run, precision: str, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Build what page.js has to know of a run, as JSON."""
    return {
        "name": run.path.name or run.path.resolve().name,  # "." has no name
        "step": run.step,
        "prompt": "",
        "held_out": "",
        "config": run.config.model.model_dump(mode="json"),
        "sample": run.config.sample.model_dump(mode="json"),
        "tokenizer": tokenizer,
        "precision": precision,
        "tensors": list_tensors(run.tensors, precision),
    }


def render_page(data: dict[str, Any], weights: str) -> bytes:
    """Fill the template with JSON data and with weights in base64."""
    parts = {
        "STYLE": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "MODEL": (FOLDER / "model.js").read_text(encoding="utf-8"),
        "PAGE": "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in PAGE_SCRIPTS),
        "DATA": escape_json(data),
        "WEIGHTS": weights,
    }
    # A nonce that nobody can know before the page is written, and the same for the same page.
    digest = hashlib.sha256("\0".join(parts.values()).encode()).digest()
    parts["NONCE"] = nonce = base64.b64encode(digest[:18]).decode()
    network = "'none'" if data["server"] is None else "'self'"
    parts["POLICY"] = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        f"connect-src {network}; base-uri 'none'; form-action 'none'; "
        f"require-trusted-types-for 'script'"
    )
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    # In one pass, so that no part is searched for the names of others.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], template).encode()


def escape_json(data: Any) -> str:
    """Write JSON data in ASCII that cannot end the element which it stands in."""
    text = json.dumps(data, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe a tokenizer for model.js, as JSON; DataError for one that it cannot run."""
    if isinstance(tokenizer, ForeignTokenizer):
        return simplify_tokenizer(tokenizer)
    if isinstance(tokenizer, BpeTokenizer) and tokenizer.encoding._pat_str not in KNOWN_PATTERNS:
        raise DataError(
            f"tokenizer {tokenizer.kind}: a page cannot split words as it does; use gptmini serve"
        )
    return json.loads(tokenizer.to_json())


# -- weights ---------------------------------------------------------------------------------------


def is_matrix(name: str) -> bool:
    """Check whether a tensor is rounded, as `precision.round_weights` does."""
    return name.endswith(("proj.weight", "embed.weight", "head.weight"))


def list_tensors(tensors: Mapping[str, Tensor], precision: str) -> list[dict[str, Any]]:
    """List name, shape and type of what `encode_tensors` yields."""
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "type": precision if is_matrix(name) else "float32",
        }
        for name, tensor in tensors.items()
    ]


def count_bytes(listed: list[dict[str, Any]]) -> int:
    """Count the bytes of listed tensors as `encode_tensors` yields them."""
    sizes = {"float32": 4, "bfloat16": 2, "int8": 1}
    numbers = sum(math.prod(each["shape"]) * sizes[each["type"]] for each in listed)
    scales = sum(4 * each["shape"][0] for each in listed if each["type"] == "int8")
    return numbers + scales


def encode_tensors(tensors: Mapping[str, Tensor], precision: str) -> Iterator[memoryview]:
    """Yield the bytes of the tensors, one after the other; those of int8 after their scales."""
    for name, tensor in tensors.items():
        if not is_matrix(name):
            yield to_little_endian(tensor.float())
        elif precision == "int8":
            integers, scales = quantize(tensor)
            yield to_little_endian(scales)
            yield to_little_endian(integers)
        else:
            # Their bits, since NumPy has no such numbers.
            yield to_little_endian(tensor.to(torch.bfloat16).view(torch.int16))


def to_little_endian(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row; not a copy, if they are in memory like this."""
    array = tensor.cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).data.cast("B")
