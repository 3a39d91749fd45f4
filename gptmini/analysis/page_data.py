"""A model reading a text, as data for a page: attention, expectations, memory, drawn tokens.

Letters: L layers, H query heads, T positions, V vocabulary, S = L + 1 stages (the embedding, then
each layer), N tokens listed.
"""

import codecs
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmini import console
from gptmini.analysis import page
from gptmini.analysis.attention_maps import compute_attention_weights, spell_token, summarize_heads
from gptmini.config.settings import ModelConfig, SampleConfig
from gptmini.errors import CheckpointError, ConfigError
from gptmini.generate.filters import LogitsProcessor, filter_probabilities
from gptmini.generate.run import Run
from gptmini.generate.texts import Text
from gptmini.model.gpt import GPT
from gptmini.plan import cost
from gptmini.tokenizer.tokenizers import Tokenizer

LISTED_TOKENS = 10  # N: the likeliest next tokens
PAGE_OVERHEAD_BYTES = 50_000  # bytes of a page on no tokens
BYTES_PER_TOKEN = 200  # bytes for each token of the text besides weights and expectations


class LogitLens(NamedTuple):
    """What a model expects after each token, judged after each stage (the "logit lens").

    `tokens` and `probabilities` (S, T, N) are the likeliest next tokens, `ranks` (from 1) and
    `came` (S, T) the rank and probability of the one that came; both are 0 at the last position.
    `logits` (T, V) are the model's own.
    """

    tokens: Tensor
    probabilities: Tensor
    token_ranks: Tensor
    target_probabilities: Tensor
    logits: Tensor


@torch.no_grad()
def compute_logit_lens(model: GPT, tokens: list[int]) -> LogitLens:
    """The final norm and the head applied to the residual stream after each stage."""
    stream: list[Tensor] = []  # S tensors (1, T, D)
    hooks = [model.blocks[0].register_forward_pre_hook(lambda _, args: stream.append(args[0]))]
    hooks += [
        block.register_forward_hook(lambda _, args, x: stream.append(x)) for block in model.blocks
    ]
    try:
        model.eval().forward_hidden(torch.tensor([tokens], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    following = torch.tensor([*tokens[1:], 0])[:, None]  # (T, 1)
    stages = []
    for x in stream:
        logits = model.compute_logits(model.final_norm(x))[0].float().cpu()  # (T, V)
        chances = logits.softmax(dim=-1)  # (T, V)
        best = chances.topk(min(LISTED_TOKENS, chances.shape[1]))  # (T, N)
        ranks = 1 + (logits > logits.gather(1, following)).sum(dim=1)  # (T,)
        came = chances.gather(1, following)[:, 0]  # (T,)
        ranks[-1], came[-1] = 0, 0
        stages.append((best.indices, best.values, ranks, came))
    listed, chances, ranks, came = (torch.stack(each) for each in zip(*stages, strict=True))
    return LogitLens(listed, chances, ranks, came, logits)


def continue_prompt(run: Run, prompt: str, count: int) -> Text:
    """A prompt with up to `count` tokens drawn after it, all of which fit the context."""
    limit = run.config.model.context_length
    generation = run.start([prompt], max_new_tokens=count)
    (text,) = generation.samples
    if (total := len(text.prompt_tokens) + count) > limit:
        raise ConfigError(
            f"--generate {count}: {total} tokens with the prompt do not fit the context of "
            f"{limit}; generate at most {max(0, count - total + limit)}"
        )
    check_page_size(run.config.model, total)
    generation.finish()
    return text


def build_page(run: Run, tokens: list[int], text: Text | None, start: tuple[int, int]) -> bytes:
    """The page of a model reading these tokens; see `part`."""
    model, attention = run.config.model, run.config.model.attention
    window = f", window {attention.window}" if attention.window else ""
    lead = (
        f"Step {run.step:,}; {cost.count_parameters(model):,} parameters: {model.n_layer} layers, "
        f"width {model.d_model}, {console.format_count(model.n_head, 'head')} / "
        f"{console.format_count(model.n_kv_head, 'KV head')} "
        f"({attention.variant.upper()}{window}), context {model.context_length}; "
        f"{run.tokenizer.kind} tokenizer, vocabulary {run.tokenizer.vocab_size:,}. "
        f"It reads {console.format_count(len(tokens), 'token')}"
        + (f", the last {len(text.tokens)} of which it drew itself." if text else ".")
    )
    check_page_size(model, len(tokens))
    return page.render_page(str(run.path), lead, [build_reading([run], tokens, "", text, start)])


def build_reading(
    runs: Iterable[Run],
    tokens: list[int],
    heading: str,
    text: Text | None = None,
    start: tuple[int, int] = (0, 0),
) -> page.PageItem:
    """The data of a page on a model reading these tokens, at each of several checkpoints (`runs`).

    They may come one by one, as several may not fit in memory. `text` is what the tokens were
    drawn as, `start` the layer and head to show first.
    """
    spelled = _Spellings()
    readings = []
    for run in runs:
        numbers = [spelled.index_of(run.tokenizer, token) for token in tokens]
        readings.append(_read_at_checkpoint(run, tokens, spelled, text))
    config = run.config.model
    return {
        "type": "reading",
        "heading": heading,
        "n_head": config.n_head,
        "n_kv_head": config.n_kv_head,
        "windows": [config.get_window(layer) for layer in range(config.n_layer)],
        "start": start,
        "tokens": numbers,
        "whole": complete_characters(run.tokenizer, tokens),
        "drawn": len(text.tokens) if text else 0,
        "sampling": _describe_filters(run.config.sample) if text else "",
        "vocab_size": config.vocab_size,
        "memory": compute_cache_sizes(config, len(tokens)),
        "notes": build_notes(config),
        "readings": readings,
        "spellings": spelled.texts,
    }


def build_notes(config: ModelConfig) -> dict[str, Any]:
    """The sentences that explain each card, and for each layer what it sees."""
    H, G = config.n_head, config.n_kv_head
    if G == H:
        kind = f"Multi-head attention (MHA): each of the {H} heads has keys and values of its own."
    else:
        name = "Multi-query attention (MQA)" if G == 1 else "Grouped-query attention (GQA)"
        kind = (
            f"{name}: {H} query heads share {console.format_count(G, 'KV head')}. Heads in one frame "
            f"read the same keys and values, each with queries of its own."
        )
    window = config.attention.window
    layers = [_describe_reach(config.get_window(layer)) for layer in range(config.n_layer)]
    kept = f" Layers with a window keep only the last {window} tokens." if window else ""
    return {
        "text": "Point at a token, tap it, or use the arrow keys: the tokens that it looks at "
        "light up. It can look only back; what it cannot see is hatched. The orange bar is a "
        "token's surprise: how unexpected it was, one bit for each halving of its probability.",
        "heads": f"{kind} Bars under a map: the mean weight on the previous token, the first one "
        "and the token itself. Entropy says how widely a head spreads its weights, in nats. "
        "Choose a head to see it in the text and in the large map.",
        "layers": layers,
        "map": "A row is a token that looks (query), a column a token it looks at (key). Hatched "
        "is hidden. Point at a cell to read it.",
        "stages": "What the output head would say after each layer (the logit lens); the last one "
        "decides. Choose one to see its list.",
        "memory": "Keys and values of the tokens so far in float32, for this model and with other "
        f"numbers of KV heads.{kept}",
        "weights": "Weights show where a head reads from, not why the model answers as it does: "
        "quite different weights can give the same answer (Jain and Wallace 2019). Here they are "
        "rounded to 8 bits: off by at most 0.4 percentage points, small ones by less.",
    }


def _describe_reach(window: int | None) -> str:
    """What the queries of a layer see."""
    if window is None:
        return "sees all tokens before"
    before = "only itself" if window == 1 else f"itself and the {window - 1} before"
    return f"window of {window}: sees {before}"


class _Spellings:
    """The spellings of the tokens that a page shows, each once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.texts: list[list[str]] = []

    def index_of(self, tokenizer: Tokenizer, token: int) -> int:
        if token not in self._numbers:
            self._numbers[token] = len(self.texts)
            self.texts.append(spell_token(tokenizer, token))
        return self._numbers[token]


def _read_at_checkpoint(
    run: Run, tokens: list[int], spelled: _Spellings, text: Text | None
) -> page.PageItem:
    """One checkpoint reading the tokens."""
    T = len(tokens)
    weights = compute_attention_weights(run.model, tokens)  # (L, H, T, T)
    expected = compute_logit_lens(run.model, tokens)
    if not math.isfinite(float(expected.logits.sum() + weights.sum())):
        raise CheckpointError(f"{run.path}: the model's logits are not finite; its weights are bad")
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    listed = expected.tokens.flatten().tolist()
    numbers = [spelled.index_of(run.tokenizer, token) for token in listed]
    return {
        "step": run.step,
        "measures": [[round(mean, 4) for mean in head[2:]] for head in summarize_heads(weights)],
        "weights": page.encode_base64(
            page.quantize_to_bytes(weights[:, :, seen].numpy())
        ),  # (L, H, T(T+1)/2)
        "listed": expected.tokens.shape[2],
        "tokens": page.encode_base64(torch.tensor(numbers, dtype=torch.int32).numpy()),
        "probabilities": page.encode_base64(expected.probabilities.numpy()),
        "ranks": page.encode_base64(expected.token_ranks.int().numpy()),
        "came": page.encode_base64(expected.target_probabilities.numpy()),
        "draws": replay_draws(run, text, expected) if text else None,
    }


def complete_characters(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """For each token, the character that it completes, if earlier tokens have its first bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    whole = []
    for token in tokens:
        begun = bool(decoder.getstate()[0])
        text = decoder.decode(tokenizer.decode_token(token))
        whole.append(text[:1] if begun and text[:1].isprintable() and text[:1] != "\ufffd" else "")
    return whole


def compute_cache_sizes(config: ModelConfig, T: int) -> list[dict[str, Any]]:
    """Bytes of the KV cache after 1 to T tokens, in float32: multi-head, grouped and multi-query.

    The number of KV heads of the grouped one is the model's or, if it is of another kind, the
    largest that shares at all.
    """
    H = config.n_head
    divisors = [count for count in range(2, H) if H % count == 0]
    own = config.n_kv_head
    grouped = own if own in divisors else max(divisors, default=None)
    kinds = {"MHA": H, "GQA": grouped, "MQA": 1 if H > 1 else None}
    rows = []
    for name, heads in kinds.items():
        if heads is not None:
            update = {"variant": "gqa", "n_kv_head": heads}
            changed = {"attention": config.attention.model_copy(update=update)}
            kind = config.model_copy(update=changed)
            held = [cost.count_cache_bytes(kind, count) for count in range(1, T + 1)]
            rows.append({"name": name, "kv_heads": heads, "own": heads == own, "bytes": held})
    return rows


def replay_draws(run: Run, text: Text, expected: LogitLens) -> dict[str, Any]:
    """What the sampler could draw at each step of a text, computed again from the logits.

    `kept` counts the tokens that the filters left, `removed` is the model's probability of the
    others; `drawn` has the probabilities after the filters of the N likeliest tokens and, last, of
    the one that was drawn.
    """
    sample = run.config.sample
    adjust = LogitsProcessor(sample, run.build_bias(sample))
    kept, removed, drawn = [], [], []
    for place, token in enumerate(text.tokens):
        at = len(text.prompt_tokens) - 1 + place
        logits = expected.logits[at]  # (V,)
        scores = adjust(logits, text.prompt_tokens, text.tokens[:place])
        if text.allowed_first is not None and place == 0:
            scores = scores.masked_fill(~text.allowed_first, -torch.inf)
        after = torch.zeros(len(logits), dtype=torch.float64)  # (V,)
        if sample.temperature == 0:
            after[scores.argmax()] = 1
        else:
            tokens, weights = filter_probabilities(scores, sample)
            chosen = slice(None) if tokens is None else tokens
            after[chosen] = torch.from_numpy(weights / weights.sum())
        kept.append(int((after > 0).sum()))
        removed.append(float(logits.softmax(dim=0)[after == 0].sum()))
        drawn.append(after[[*expected.tokens[-1, at].tolist(), token]].float())
    return {
        "kept": kept,
        "removed": removed,
        "drawn": page.encode_base64(torch.stack(drawn).numpy()),
    }


def _describe_filters(sample: SampleConfig) -> str:
    """The sampling settings that shape a draw."""
    names = ("temperature", "top_k", "top_p", "min_p")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    given = [name for name in names if getattr(sample, name) is not None]
    given += [name for name in penalties if getattr(sample, name) != (name == "repetition_penalty")]
    return ", ".join(f"{name} {getattr(sample, name):g}" for name in given)


def estimate_page_bytes(config: ModelConfig, T: int) -> int:
    """About how large the page on T tokens becomes: weights and expectations in base64, texts."""
    weights = config.n_layer * config.n_head * T * (T + 1) // 2
    expected = (config.n_layer + 1) * T * (LISTED_TOKENS + 1) * 8
    spellings = 40 * min(config.vocab_size or 0, (config.n_layer + 1) * T * LISTED_TOKENS // 4)
    return PAGE_OVERHEAD_BYTES + BYTES_PER_TOKEN * T + 4 * (weights + expected) // 3 + spellings


def check_page_size(config: ModelConfig, T: int) -> None:
    """ConfigError if the page would be too large for a browser, with the longest text that fits."""
    if config.context_length < T or estimate_page_bytes(config, T) <= page.MAX_PAGE_BYTES:
        return  # what exceeds the context is refused by `attention_weights`
    longest = max(n for n in range(T) if estimate_page_bytes(config, n) <= page.MAX_PAGE_BYTES)
    raise ConfigError(
        f"--prompt: a page of {T} tokens and {config.n_layer * config.n_head} heads would be "
        f"larger than {page.MAX_PAGE_BYTES // 10**6} MB; give at most {longest} tokens"
    )
