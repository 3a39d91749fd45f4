"""Builds the data of a page on a model that reads a text.

For each token: what every head attends to and how it is computed, what the model expects next,
what the KV cache holds, and from which tokens the sampler drew.

Letters: L layers, H query heads, K head size, T positions, V vocabulary, S = L + 1 stages (the
embedding, then each layer), N tokens listed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmini import console
from gptmini.config.settings import ModelConfig, SampleConfig
from gptmini.errors import CheckpointError, ConfigError
from gptmini.extras.page import arithmetic
from gptmini.figures import page
from gptmini.generate.attention_maps import compute_attention_weights, summarize_heads
from gptmini.generate.filters import LogitsProcessor, filter_probabilities
from gptmini.generate.run import Run
from gptmini.generate.texts import Text
from gptmini.model.gpt import GPT
from gptmini.plan import cost
from gptmini.tokenizer.spelling import (
    is_part_of_character,
    list_unfinished,
    spell_next,
    spell_token,
    spell_tokens,
)
from gptmini.tokenizer.tokenizers import Tokenizer

LISTED_TOKENS = 10  # N: the likeliest next tokens
PAGE_OVERHEAD_BYTES = 80_000  # of a page on no tokens
BYTES_PER_TOKEN = 600  # besides weights and expectations


class LogitLens(NamedTuple):
    """The tokens that a model expects next, read off after each stage (the "logit lens").

    `tokens` and `probabilities` (S, T, N) are the likeliest next tokens. `target_ranks` (from 1)
    and `target_probabilities` (S, T) are those of the token that came next, 0 at the last position.
    `logits` (T, V) are the model's own.
    """

    tokens: Tensor
    probabilities: Tensor
    target_ranks: Tensor
    target_probabilities: Tensor
    logits: Tensor


@torch.no_grad()
def compute_logit_lens(model: GPT, tokens: list[int]) -> LogitLens:
    """Apply the final norm and the head to the residual stream after each stage."""
    stream: list[Tensor] = []  # S tensors (1, T, D)

    def record_input(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        stream.append(arguments[0])

    def record_output(_: torch.nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        stream.append(output)

    hooks = [model.blocks[0].register_forward_pre_hook(record_input)]
    for block in model.blocks:
        hooks.append(block.register_forward_hook(record_output))
    try:
        model.eval().forward_hidden(torch.tensor([tokens], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()

    targets = torch.tensor([*tokens[1:], 0])[:, None]  # (T, 1); the last one has none
    stages = []
    for x in stream:
        logits = model.compute_logits(model.final_norm(x))[0].float().cpu()  # (T, V)
        probabilities = logits.softmax(dim=-1)  # (T, V)
        best = probabilities.topk(min(LISTED_TOKENS, probabilities.shape[1]))  # (T, N)
        target_ranks = 1 + (logits > logits.gather(1, targets)).sum(dim=1)  # (T,)
        target_probabilities = probabilities.gather(1, targets)[:, 0]  # (T,)
        target_ranks[-1] = 0
        target_probabilities[-1] = 0
        stages.append(
            LogitLens(best.indices, best.values, target_ranks, target_probabilities, logits)
        )
    return LogitLens(
        tokens=torch.stack([stage.tokens for stage in stages]),
        probabilities=torch.stack([stage.probabilities for stage in stages]),
        target_ranks=torch.stack([stage.target_ranks for stage in stages]),
        target_probabilities=torch.stack([stage.target_probabilities for stage in stages]),
        logits=stages[-1].logits,
    )


def continue_prompt(run: Run, prompt: str, count: int) -> Text:
    """Continue a prompt by up to `count` tokens, all of which fit the context with it."""
    context_length = run.config.model.context_length
    generation = run.start([prompt], max_new_tokens=count)
    (text,) = generation.samples
    n_prompt = len(text.prompt_tokens)
    if n_prompt + count > context_length:
        raise ConfigError(
            f"--generate {count}: {n_prompt + count} tokens with the prompt do not fit the context "
            f"of {context_length}; generate at most {max(0, context_length - n_prompt)}"
        )
    check_page_size(run.config.model, n_prompt + count)
    generation.finish()
    return text


def build_page(run: Run, tokens: list[int], text: Text | None, start: tuple[int, int]) -> bytes:
    """Build the page of a model that reads these tokens; see `build_reading`."""
    check_page_size(run.config.model, len(tokens))
    reading = build_reading([run], tokens, "", text, start, with_arithmetic=True)
    return page.render_page(str(run.path), _describe_reading(run, tokens, text), [reading])


def _describe_reading(run: Run, tokens: list[int], text: Text | None) -> str:
    """Describe the model and the text in two sentences."""
    model = run.config.model
    attention = model.attention.variant.upper()
    if model.attention.window:
        attention += f", window {model.attention.window}"
    sentences = (
        f"Step {run.step:,}; {cost.count_parameters(model):,} parameters: {model.n_layer} layers, "
        f"width {model.d_model}, {console.format_count(model.n_head, 'head')} / "
        f"{console.format_count(model.n_kv_head, 'KV head')} "
        f"({attention}), context {model.context_length}; "
        f"{run.tokenizer.kind} tokenizer, vocabulary {run.tokenizer.vocab_size:,}. "
        f"It reads {console.format_count(len(tokens), 'token')}"
    )
    if text is None:
        return f"{sentences}."
    return f"{sentences}, the last {len(text.tokens)} of which it generated itself."


def build_reading(
    runs: Iterable[Run],
    tokens: list[int],
    heading: str,
    text: Text | None = None,
    start: tuple[int, int] = (0, 0),
    with_arithmetic: bool = False,
) -> page.PageItem:
    """Build the part of a page on a model that reads these tokens.

    `runs` are one or several checkpoints of it. They may come one by one, as several may not fit
    in memory. `text` is the text that was generated as these tokens, if it was; `start` is the
    layer and head to show first. `with_arithmetic` shows how the weights of the last checkpoint are
    computed.
    """
    spellings = _Spellings()
    readings = []
    for run in runs:
        token_numbers = [spellings.index_of(run.tokenizer, token) for token in tokens]
        readings.append(_read_at_checkpoint(run, tokens, spellings, text))
    shown_arithmetic = None
    if with_arithmetic:
        shown_arithmetic = build_arithmetic(run, tokens, spellings, start[0])
    config = run.config.model
    notes = build_notes(config)
    if spellings.any_bytes:
        notes["text"] += " Tokens in hexadecimal are only some bytes of a character."
    in_text = spell_parts(run.tokenizer, tokens)
    if any(in_text):
        notes["text"] += " A character and 1/2 is the first of two tokens that spell the character."
    return {
        "type": "reading",
        "heading": heading,
        "n_head": config.n_head,
        "n_kv_head": config.n_kv_head,
        "windows": [config.get_window(layer) for layer in range(config.n_layer)],
        "start": start,
        "tokens": token_numbers,
        "in_text": in_text,
        "drawn": len(text.tokens) if text else 0,
        "sampling": _describe_filters(run.config.sample) if text else "",
        "vocab_size": config.vocab_size,
        "memory": compute_cache_sizes(config, len(tokens)),
        "cache_lengths": [config.get_cache_length(layer) for layer in range(config.n_layer)],
        "head_dim": config.head_dim,
        "notes": notes,
        "readings": readings,
        "arithmetic": shown_arithmetic,
        "spellings": spellings.texts,
    }


def build_notes(config: ModelConfig) -> dict[str, Any]:
    """Write the sentences that explain each card of the page, and what each layer sees."""
    H = config.n_head
    G = config.n_kv_head
    if G == H:
        attention = (
            f"Multi-head attention (MHA): each of the {H} heads has keys and values of its own."
        )
    else:
        name = "Multi-query attention (MQA)" if G == 1 else "Grouped-query attention (GQA)"
        attention = (
            f"{name}: {H} query heads share {console.format_count(G, 'KV head')}. Heads in one "
            f"frame read the same keys and values, each with queries of its own."
        )
    memory = (
        "Keys and values of the tokens so far in float32, for this model and with other numbers of "
        "KV heads."
    )
    window = config.attention.window
    if window:
        memory += f" Layers with a window keep only the last {window} tokens."
    kept = (
        "Each token adds a key and a value to every KV head (a row) of every layer. They stay as "
        "long as a later token may look at them. Filled: kept. Empty: not read yet."
    )
    if window:
        kept += f" Hatched: overwritten, as it has left the window of {window}."
    return {
        "text": "Point at a token, tap it, or use the arrow keys: the tokens it attends to light "
        "up. It can only look back; whatever it cannot see is hatched. The orange bar shows a "
        "token's surprise: how unexpected it was, one bit for each halving of its probability.",
        "heads": f"{attention} Bars under a map: the mean weight on the previous token, the first "
        "one and the token itself. Entropy says how widely a head spreads its weights, in nats. "
        "Choose a head to see it in the text and in the large map.",
        "layers": [_describe_reach(config.get_window(layer)) for layer in range(config.n_layer)],
        "map": "A row is a token that attends (query), a column a token it attends to (key). "
        "Hatched cells are hidden. Point at a cell to read it.",
        "stages": "What the output head would predict after each layer (the logit lens); the last "
        "one decides. Choose one to see its list.",
        "memory": memory,
        "kept": kept,
        "weights": "Weights show where a head reads from, not why the model answers as it does: "
        "quite different weights can give the same answer (Jain and Wallace 2019). Here they are "
        "rounded to 8 bits: off by at most 0.4 percentage points, small ones by less.",
    }


def _describe_reach(window: int | None) -> str:
    """Say which tokens the queries of a layer see."""
    if window is None:
        return "sees all tokens before"
    before = "only itself" if window == 1 else f"itself and the {window - 1} before"
    return f"window of {window}: sees {before}"


class _Spellings:
    """The spellings of the tokens that a page shows, each once."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []
        self.any_bytes = False  # whether some are bytes in hex
        self._numbers: dict[tuple[int | bytes, ...], int] = {}

    def index_of(self, tokenizer: Tokenizer, token: int, unfinished: Sequence[bytes] = ()) -> int:
        """Return the number of a token that stands alone, or after a character's first bytes."""
        key: tuple[int | bytes, ...] = (token, *unfinished)
        if key not in self._numbers:
            self._numbers[key] = len(self.texts)
            self.texts.append(spell_next(tokenizer, unfinished, token))
            self.any_bytes = self.any_bytes or is_part_of_character(tokenizer, token)
        return self._numbers[key]


def _read_at_checkpoint(
    run: Run, tokens: list[int], spellings: _Spellings, text: Text | None
) -> page.PageItem:
    """Let one checkpoint read the tokens."""
    T = len(tokens)
    weights = compute_attention_weights(run.model, tokens)  # (L, H, T, T)
    lens = compute_logit_lens(run.model, tokens)
    if not math.isfinite(float(lens.logits.sum() + weights.sum())):
        raise CheckpointError(f"{run.path}: the model's logits are not finite; its weights are bad")
    is_past = torch.ones(T, T, dtype=torch.bool).tril()
    past_weights = weights[:, :, is_past].numpy()  # (L, H, T(T+1)/2)
    unfinished = list_unfinished([run.tokenizer.decode_token(token) for token in tokens])
    numbers = [
        spellings.index_of(run.tokenizer, token, unfinished[position])
        for stage_tokens in lens.tokens.tolist()
        for position, listed_tokens in enumerate(stage_tokens)
        for token in listed_tokens
    ]
    next_numbers = [
        spellings.index_of(run.tokenizer, token, pieces)
        for token, pieces in zip(tokens[1:], unfinished, strict=False)
    ]
    measures = []
    for summary in summarize_heads(weights):
        means = [summary.previous, summary.first, summary.itself, summary.entropy]
        measures.append([round(mean, 4) for mean in means])
    return {
        "step": run.step,
        "measures": measures,
        "weights": page.encode_base64(page.quantize_to_bytes(past_weights)),
        "listed": lens.tokens.shape[2],
        "tokens": page.encode_base64(torch.tensor(numbers, dtype=torch.int32).numpy()),
        "next": next_numbers,
        "probabilities": page.encode_base64(lens.probabilities.numpy()),
        "ranks": page.encode_base64(lens.target_ranks.int().numpy()),
        "came": page.encode_base64(lens.target_probabilities.numpy()),
        "draws": replay_draws(run, text, lens) if text else None,
    }


def spell_parts(tokenizer: Tokenizer, tokens: list[int]) -> list[list[str] | None]:
    """Spell the tokens of a text that are part of a character, 中1/3; None for the others."""
    in_text = spell_tokens(tokenizer, tokens)
    return [
        None if spelling == spell_token(tokenizer, token) else spelling
        for token, spelling in zip(tokens, in_text, strict=True)
    ]


def compute_cache_sizes(config: ModelConfig, T: int) -> list[dict[str, Any]]:
    """Compute the bytes of the KV cache after 1 to T tokens, in float32, for MHA, GQA and MQA.

    The number of KV heads of GQA is the model's or, if the model is of another kind, the largest
    that shares at all.
    """
    H = config.n_head
    G = config.n_kv_head
    kv_heads_of = {"MHA": H}
    divisors = [count for count in range(2, H) if H % count == 0]
    if divisors:
        kv_heads_of["GQA"] = G if G in divisors else max(divisors)
    if H > 1:
        kv_heads_of["MQA"] = 1
    rows = []
    for name, n_kv_head in kv_heads_of.items():
        update = {"variant": "gqa", "n_kv_head": n_kv_head}
        attention = config.attention.model_copy(update=update)
        changed = config.model_copy(update={"attention": attention})
        rows.append(
            {
                "name": name,
                "kv_heads": n_kv_head,
                "own": n_kv_head == G,
                "bytes": [cost.count_cache_bytes(changed, length) for length in range(1, T + 1)],
            }
        )
    return rows


def replay_draws(run: Run, text: Text, lens: LogitLens) -> dict[str, Any]:
    """Compute again, from the logits, which tokens the sampler could draw at each step of a text.

    `kept` counts the tokens that the filters left, `removed` is the model's probability of the
    others. `drawn` has the probabilities after the filters of the N likeliest tokens and, last, of
    the one that was drawn.
    """
    sample = run.config.sample
    process_logits = LogitsProcessor(sample, run.build_bias(sample))
    kept = []
    removed = []
    drawn = []
    for step, token in enumerate(text.tokens):
        position = len(text.prompt_tokens) - 1 + step
        logits = lens.logits[position]  # (V,)
        scores = process_logits(logits, text.prompt_tokens, text.tokens[:step])
        if text.allowed_first is not None and step == 0:
            scores = scores.masked_fill(~text.allowed_first, -torch.inf)
        probabilities = _filter_scores(scores, sample)  # (V,)
        kept.append(int((probabilities > 0).sum()))
        removed.append(float(logits.softmax(dim=0)[probabilities == 0].sum()))
        listed_tokens = lens.tokens[-1, position].tolist()
        drawn.append(probabilities[[*listed_tokens, token]].float())  # (N + 1,)
    return {
        "kept": kept,
        "removed": removed,
        "drawn": page.encode_base64(torch.stack(drawn).numpy()),
    }


def _filter_scores(scores: Tensor, sample: SampleConfig) -> Tensor:
    """Return the probability (V,) with which the sampler draws each token, given scores (V,)."""
    probabilities = torch.zeros(len(scores), dtype=torch.float64)
    if sample.temperature == 0:
        probabilities[scores.argmax()] = 1
        return probabilities
    tokens, weights = filter_probabilities(scores, sample)
    chosen = slice(None) if tokens is None else tokens
    probabilities[chosen] = torch.from_numpy(weights / weights.sum())
    return probabilities


def _describe_filters(sample: SampleConfig) -> str:
    """List the sampling settings that shape a draw, without those that do nothing."""
    neutral_values = {
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }
    values = {name: getattr(sample, name) for name in neutral_values}
    shaping = [name for name, neutral in neutral_values.items() if values[name] != neutral]
    return ", ".join(f"{name} {values[name]:g}" for name in shaping)


def build_arithmetic(
    run: Run, tokens: list[int], spellings: _Spellings, start_layer: int
) -> page.PageItem:
    """Build what a page needs to compute attention itself, and the neighbors of each token."""
    model = run.model
    config = model.config
    layers = choose_layers(config, len(tokens), start_layer)
    encoded: list[page.PageItem | None] = [None] * config.n_layer
    for layer, numbers in zip(layers, arithmetic.record_layers(model, tokens, layers), strict=True):
        encoded[layer] = arithmetic.encode_layer(numbers)
    distinct = sorted(set(tokens))
    neighbors, cosines = arithmetic.find_neighbors(
        model.embed.weight, distinct, arithmetic.LISTED_NEIGHBORS
    )  # (N, count) each
    if not math.isfinite(float(cosines.sum())):  # the row of a token that the text does not have
        raise CheckpointError(f"{run.path}: an embedding is not finite; the weights are bad")
    frequencies = arithmetic.get_frequencies(model)
    slopes = arithmetic.get_slopes(model)
    return {
        "layers": encoded,
        "d_model": config.d_model,
        "position": config.position,
        "frequencies": None if frequencies is None else frequencies.tolist(),
        "slopes": None if slopes is None else slopes.tolist(),
        "neighbors": [
            [
                spellings.index_of(run.tokenizer, token),
                [spellings.index_of(run.tokenizer, neighbor) for neighbor in row.tolist()],
                [round(cosine, 4) for cosine in row_cosines.tolist()],
            ]
            for token, row, row_cosines in zip(distinct, neighbors, cosines, strict=True)
        ],
        "notes": arithmetic.build_notes(config, len(layers) < config.n_layer),
    }


def choose_layers(config: ModelConfig, T: int, start_layer: int) -> list[int]:
    """Choose the layers whose arithmetic a page on T tokens has: all or, if too large, one."""
    if estimate_page_bytes(config, T, config.n_layer) <= page.MAX_PAGE_BYTES:
        return list(range(config.n_layer))
    return [start_layer]


def estimate_page_bytes(config: ModelConfig, T: int, n_layers: int = 1) -> int:
    """Estimate the size of the page on T tokens, with the arithmetic of `n_layers`.

    It has weights, expectations and the arithmetic in base64, and texts.
    """
    L = config.n_layer
    S = L + 1
    weights = L * config.n_head * T * (T + 1) // 2
    expectations = S * T * (LISTED_TOKENS + 1) * 8
    numbers = 4 * n_layers * arithmetic.count_layer_numbers(config, T)
    n_spelled = S * T * LISTED_TOKENS // 4 + T * arithmetic.LISTED_NEIGHBORS
    in_base64 = 4 * (weights + expectations + numbers) // 3
    return PAGE_OVERHEAD_BYTES + BYTES_PER_TOKEN * T + in_base64 + 40 * n_spelled


def check_page_size(config: ModelConfig, T: int) -> None:
    """Raise ConfigError if the page is too large for a browser; name the longest text that fits."""
    if config.context_length < T or estimate_page_bytes(config, T) <= page.MAX_PAGE_BYTES:
        return  # `compute_attention_weights` refuses a text that exceeds the context
    fitting = [n for n in range(1, T) if estimate_page_bytes(config, n) <= page.MAX_PAGE_BYTES]
    longest = max(fitting, default=0)
    raise ConfigError(
        f"--prompt: a page of {T} tokens and {config.n_layer * config.n_head} heads would be "
        f"larger than {page.MAX_PAGE_BYTES // 10**6} MB; give at most {longest} tokens"
    )
