"""The page as a server gives it: the same, and page.js may ask the server for what it lacks.

The weights travel inside the page where `export` would write one. Those of a larger model are sent
when a reader asks for them, and until then the server continues texts. Where clients need a key,
the page that everybody gets holds a name, and those who have the key get the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from gptmini.errors import DataError
from gptmini.extras.page.export import (
    MAX_PAGE_BYTES,
    build_data,
    build_page,
    choose_precision,
    count_bytes,
    describe_tokenizer,
    encode_tensors,
    escape_json,
    estimate_size,
    read_checkpoints,
    render_page,
)
from gptmini.generate.run import Run

# They take 1.3 GB of a tab, which is about all that a phone lets it have, and a second or two for
# each token (scripts/LOG.md: How large a model can a browser look into?).
MAX_BROWSER_WEIGHTS = 250_000_000


class ServedPage(NamedTuple):
    """What browsers get of a run."""

    content: bytes  # the page, for everybody
    data: bytes  # JSON, for those with the key: what `content` lacks if there is one
    size: int  # bytes of the weights
    weights: Callable[[], Iterator[memoryview]] | None  # yields them; None: not for browsers


def build_served_page(run: Run, needs_key: bool, max_tokens: int) -> ServedPage:
    """Build the page of a run whose server draws at most `max_tokens` of a text."""
    # Weights in int8 are multiples of a scale, and bfloat16 would round them once more.
    in_full = "int8" if run.weights == "int8" else "bfloat16"
    precision = "int8" if run.weights == "int8" else choose_precision(run)
    tokenizer = None
    with suppress(DataError):  # model.js cannot run it
        tokenizer = describe_tokenizer(run.tokenizer)
    is_small = tokenizer is not None and estimate_size(run, precision) <= MAX_PAGE_BYTES
    server: dict[str, Any] = {
        "chat": run.tokenizer.chat_template is not None,
        "max_tokens": max_tokens,
        "is_small": is_small,
        "size": None,  # bytes of the weights, if they can be fetched
    }
    if is_small and not needs_key:
        content = build_page(run, precision, read_checkpoints(run), server=server)
        return ServedPage(content, b"", 0, None)
    tensors = run.tensors
    data = build_data(run, precision if is_small else in_full, tokenizer) | {"server": server}
    size = count_bytes(data["tensors"])
    weights = None
    if (
        tokenizer is not None
        and sum(tensor.numel() for tensor in tensors.values()) <= MAX_BROWSER_WEIGHTS
    ):
        server["size"] = size
        weights = partial(encode_tensors, tensors, data["precision"])
    else:
        data["tokenizer"] = None  # which only the weights need
    shown = data
    if needs_key:
        shown = {"name": data["name"], "server": {"is_locked": True}}
    return ServedPage(render_page(shown, {}), escape_json(data).encode(), size, weights)
