import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError
from gptmini.model import attention, gpt
from gptmini.model.cache import KVCache, StaticCache
from gptmini.model.gpt import GPT, Block
from tests.support import ACTIVATIONS, NORMS, POSITIONS


def make(**given) -> GPT:
    base = {"vocab_size": 11, "n_layer": 2, "n_head": 4, "d_model": 32, "context_length": 12}
    return GPT(ModelConfig.model_validate(base | given))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# With one position each, in turn.
COMBINATIONS = [
    (*combination, POSITIONS[place % len(POSITIONS)])
    for place, combination in enumerate(
        itertools.product(["mha", "gqa", "mqa"], NORMS, ACTIVATIONS)
    )
]


@pytest.mark.parametrize(("variant", "norm", "activation", "position"), COMBINATIONS)
def test_every_combination_learns_is_causal_and_caches(variant, norm, activation, position):
    torch.manual_seed(0)
    heads = {"variant": variant, "n_kv_head": 2 if variant == "gqa" else None}
    tied = activation == "gelu"
    model = make(
        attention=heads,
        position=position,
        norm=norm,
        activation=activation,
        tie_embeddings=tied,
        bias=tied,
        dropout=0.1 if norm == "rmsnorm" else 0.0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(11, (4, 13))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    losses = []
    for _ in range(3):
        with torch.no_grad():
            losses.append(model.eval()(inputs, targets).item())
        optimizer.zero_grad()
        model.train()(inputs, targets).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]

    model.eval()
    with torch.no_grad():
        whole = model(inputs)
        changed = inputs.clone()
        changed[:, 6:] = 0
        torch.testing.assert_close(model(changed)[:, :6], whole[:, :6])  # the past sees no future
        cache = KVCache(model.config, 4, torch.device("cpu"), torch.float32)
        steps = [5, 1, 1, 3, 2]  # prefill, tokens one by one, chunks
        pieces = [model(piece, cache=cache) for piece in inputs.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-4)


# Slopes of ALiBi for each number of heads, by the authors' code.
SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}


def by_hand(weights: dict[str, Tensor], config: ModelConfig, tokens: list[int]) -> Tensor:
    """Logits (T, V) of one row in float64, one position and one head at a time."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    K, group = config.head_dim, config.n_head // config.n_kv_head

    def linear(name: str, x: Tensor) -> Tensor:
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)

    def normed(name: str, x: Tensor, kind: str = config.norm) -> Tensor:
        x = x - x.mean() if kind == "layernorm" else x
        x = x / (x.square().mean() + config.norm_eps).sqrt()
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

    def head(name: str, norm: str, x: Tensor, number: int, place: int | None) -> Tensor:
        part = linear(name, x)[number * K : number * K + K]
        if norm and config.attention.qk_norm:
            part = normed(norm, part, "rmsnorm")
        if place is None or config.position != "rope":
            return part
        angles = place * config.rope_theta ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
        turned = torch.complex(part[: K // 2], part[K // 2 :]) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag])

    def activated(name: str, x: Tensor) -> Tensor:
        up = linear(f"{name}.up_proj", x)
        if config.activation == "relu2":
            return up.clamp(min=0) ** 2
        if config.activation == "swiglu":
            gate = linear(f"{name}.gate_proj", x)
            return up * gate / (1 + torch.exp(-gate))
        return up / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))

    stream = [w["embed.weight"][token] for token in tokens]
    if config.position == "learned":
        stream = [x + w["positions.weight"][t] for t, x in enumerate(stream)]
    for n in range(config.n_layer):
        at, window = f"blocks.{n}", config.get_window(n) or len(tokens)
        xs, stream = [normed(f"{at}.attn_norm", x) for x in stream], list(stream)
        for t in range(len(tokens)):
            sees, mixed = range(max(0, t + 1 - window), t + 1), []
            for h in range(config.n_head):
                q = head(f"{at}.attn.q_proj", f"{at}.attn.q_norm", xs[t], h, t)
                keys = [
                    head(f"{at}.attn.k_proj", f"{at}.attn.k_norm", xs[s], h // group, s)
                    for s in sees
                ]
                slope = SLOPES[config.n_head][h] if config.position == "alibi" else 0
                exps = [
                    math.exp(q @ k / math.sqrt(K) - slope * (t - s))
                    for k, s in zip(keys, sees, strict=True)
                ]
                values = [head(f"{at}.attn.v_proj", "", xs[s], h // group, None) for s in sees]
                mixed.append(sum(e / sum(exps) * v for e, v in zip(exps, values, strict=True)))
            stream[t] = stream[t] + linear(f"{at}.attn.o_proj", torch.cat(mixed))
        for t, x in enumerate(stream):
            hidden = activated(f"{at}.mlp", normed(f"{at}.mlp_norm", x))
            stream[t] = x + linear(f"{at}.mlp.down_proj", hidden)
    out = w.get("head.weight", w["embed.weight"])
    return torch.stack([out @ normed("final_norm", x) for x in stream])


@settings(max_examples=60)
@given(
    n_layer=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 2),
    half_head=st.integers(1, 3),
    d_model=st.integers(2, 9),
    d_ff=st.integers(1, 9),
    position=st.sampled_from(POSITIONS),
    norm=st.sampled_from(NORMS),
    activation=st.sampled_from(ACTIVATIONS),
    flags=st.tuples(*[st.booleans()] * 4),
    window=st.sampled_from([None, 1, 2, 4]),
    norm_eps=st.sampled_from([1e-5, 0.3]),
    rope_theta=st.sampled_from([3.0, 10_000.0]),
    length=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_the_model_is_its_formulas(
    n_layer, kv_heads, group, half_head, length, window, flags, seed, **shape
):
    bias, qkv_bias, qk_norm, tied = flags
    attention = {"variant": "gqa", "n_kv_head": kv_heads, "qk_norm": qk_norm, "window": window}
    attention |= {"qkv_bias": qkv_bias, "full_every": 2 if window else None}
    model = make(
        **shape,
        n_layer=n_layer,
        n_head=kv_heads * group,
        head_dim=2 * half_head,
        attention=attention,
        bias=bias,
        tie_embeddings=tied,
        dropout=0.5,
    ).eval()
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():  # norms, too: no weight is 1, no bias 0
        spread = 1 if "norm" in name or parameter.ndim == 1 else parameter.shape[1] ** -0.5
        nn.init.normal_(parameter, std=spread)
    tokens = torch.randint(11, (2, length))
    with torch.no_grad():
        found = model(tokens)
        for row in range(2):
            expected = by_hand(model.state_dict(), model.config, tokens[row].tolist())
            torch.testing.assert_close(found[row].double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["dropout", "weights"])
def test_dropout_acts_in_training_only(kind):
    """Of embeddings and residual branches, and of attention weights."""
    plain = make(dropout=0.0)
    dropping = {"dropout": 0.5} if kind == "dropout" else {"attention": {"weight_dropout": 0.5}}
    model = make(**dropping)
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(11, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens), plain(tokens))
        assert torch.equal(model(tokens), model(tokens))
        assert not torch.equal(model.train()(tokens), model(tokens))


def test_dropout_acts_on_the_embeddings_and_on_both_branches():
    block_dropout = {"dropout": 0.5, "n_layer": 1}
    model = make(**block_dropout).train()
    seen: list[tuple[int, ...]] = []
    for module in (model.dropout, model.blocks[0].dropout):
        module.register_forward_hook(lambda *call: seen.append(tuple(call[2].shape)))
    model(torch.randint(11, (2, 7)))
    assert seen == [(2, 7, 32)] * 3


ROW_COMBINATIONS = [
    (variant, position)
    for left_out, variant in enumerate(["mha", "gqa", "mqa"])
    for place, position in enumerate(POSITIONS)
    if place != left_out
]
WINDOWS = [{}, {"window": 3}, {"window": 3, "full_every": 2}, {"window": 1}, {"window": 99}]


@pytest.mark.parametrize("attention", WINDOWS, ids=str)
@pytest.mark.parametrize(("variant", "position"), ROW_COMBINATIONS)
def test_rows_of_different_lengths_get_the_values_they_get_alone(variant, position, attention):
    """Three rows of a cache of five grow by pieces of their own, in any order."""
    torch.manual_seed(0)
    heads = {"variant": variant, "n_kv_head": 2 if variant == "gqa" else None}
    model = make(attention=heads | attention, position=position, n_layer=3).eval()
    texts = {4: torch.randint(11, (12,)), 0: torch.randint(11, (5,)), 3: torch.randint(11, (9,))}
    cache = StaticCache(model.config, 5, torch.device("cpu"), torch.float32, max_pass_tokens=4)
    found: dict[int, list[Tensor]] = {row: [] for row in texts}
    ends = dict.fromkeys(texts, 0)
    pieces = [{4: 4, 3: 2}, {4: 3, 0: 1}, {0: 3, 4: 1, 3: 4}, {4: 4}, {3: 3, 0: 1}]
    with torch.no_grad():
        for lengths in pieces:
            T = max(lengths.values())
            tokens = torch.full((len(lengths), T), 7)
            positions = torch.zeros(len(lengths), T, dtype=torch.long)
            is_token = torch.zeros(len(lengths), T, dtype=torch.bool)
            for place, (row, length) in enumerate(lengths.items()):
                start = ends[row]
                ends[row] += length
                tokens[place, :length] = texts[row][start : ends[row]]
                positions[place] = torch.arange(start, start + T).clamp(max=ends[row] - 1)
                is_token[place, :length] = True
            rows = torch.tensor([*lengths])
            selected = cache.select(rows, positions, is_token, max(ends.values()))
            logits = model(tokens, cache=selected)
            for place, (row, length) in enumerate(lengths.items()):
                found[row].append(logits[place, :length])
        assert ends == {row: len(text) for row, text in texts.items()}
        for row, text in texts.items():
            expected = model(text[None])[0]
            torch.testing.assert_close(torch.cat(found[row]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", WINDOWS, ids=str)
def test_a_cache_of_equal_rows_goes_on_in_pieces_of_any_length(attention):
    torch.manual_seed(0)
    model = make(attention=attention, n_layer=3).eval()
    tokens = torch.randint(11, (2, 12))
    cache = KVCache(model.config, 2, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split([4, 1, 1, 3, 1, 2], dim=1)]
        expected = model(tokens)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-4)


def test_more_positions_than_the_context_are_refused():
    model = make()
    cache = KVCache(model.config, 1, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        model(torch.zeros(1, 12, dtype=torch.long), cache=cache)  # as many as there are
        for given in (cache, None):
            with pytest.raises(ValueError, match="13 positions in a context of 12"):
                model(torch.zeros(1, 1 if given else 13, dtype=torch.long), cache=given)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_gives_the_same_gradients(dropout):
    torch.manual_seed(0)
    model = make(dropout=dropout).train()
    tokens = torch.randint(11, (4, 12))
    both = []
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        model(tokens, tokens).backward()
        both.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_published_shapes_have_their_published_sizes():
    gpt2 = {
        "vocab_size": 50257,
        "n_layer": 12,
        "n_head": 12,
        "d_model": 768,
        "context_length": 1024,
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "attention": {"qk_norm": False},
    }
    smollm2 = {
        "vocab_size": 49152,
        "n_layer": 30,
        "n_head": 9,
        "d_model": 576,
        "d_ff": 1536,
        "context_length": 2048,
        "activation": "swiglu",
        "attention": {"variant": "gqa", "n_kv_head": 3, "qk_norm": False},
        "norm": "rmsnorm",
        "position": "rope",
    }
    with torch.device("meta"):
        sizes = [parameters(GPT(ModelConfig.model_validate(c))) for c in (gpt2, smollm2)]
    assert sizes == [124_439_808, 134_515_008]  # GPT-2 small; SmolLM2-135M


def test_the_loss_of_a_new_model_is_that_of_guessing():
    model = make(vocab_size=50)
    tokens, targets = torch.randint(50, (2, 8, 12))
    assert model(tokens, targets).item() == pytest.approx(math.log(50), abs=0.1)


def test_the_loss_is_the_mean_negative_log_probability_of_the_targets():
    model, tokens, targets = make(), torch.randint(11, (3, 12)), torch.randint(11, (3, 12))
    chosen = model(tokens).softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(model(tokens, targets), -chosen.log().mean())


STYLES: dict[str, dict[str, Any]] = {
    "gpt-2": {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "llama": {"activation": "swiglu", "tie_embeddings": False, "attention": {"variant": "mqa"}},
    "default": {"attention": {"variant": "gqa", "n_kv_head": 2}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("change", ["head and loss", "q, k and v"])
def test_what_an_accelerator_joins_has_the_same_gradients(change, style, dtype, monkeypatch):
    """Run here, on a CPU, which by itself takes the plain path."""
    torch.manual_seed(0)
    model = make(**STYLES[style]).train()
    for parameter in model.parameters():
        if parameter.ndim == 2:  # at the initial weights some gradients are nothing but rounding
            nn.init.normal_(parameter, std=0.1)
    tokens, targets = torch.randint(11, (2, 4, 12))

    def compute_gradients() -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(found) == len(list(model.parameters()))
        return found | {"loss": loss.detach()}

    plain = compute_gradients()
    calls = []
    for module, name in JOINED[change]:
        joined = getattr(module, name)
        if name.startswith("joins"):
            monkeypatch.setattr(module, name, lambda _: True)
        else:
            monkeypatch.setattr(module, name, lambda *a, do=joined: calls.append(1) or do(*a))
    together = compute_gradients()
    assert calls
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    # A bias of k moves all scores of a query alike: its gradient is nothing but rounding.
    compared = {name: right for name, right in plain.items() if "k_proj.bias" not in name}
    for name, right in compared.items():
        assert (together[name] - right).norm() <= tolerance * right.norm(), name


JOINED = {
    "head and loss": [(gpt, "fuses_head_and_loss"), (gpt, "linear_cross_entropy")],
    "q, k and v": [(attention, "fuses_qkv"), (attention, "fused_linear")],
}


def test_weights_are_drawn_by_role():
    torch.manual_seed(0)
    model = make(
        d_model=128,
        vocab_size=500,
        n_layer=8,
        position="learned",
        tie_embeddings=False,
        bias=True,
        norm="layernorm",
        activation="swiglu",
    )
    stds: dict[float, list[float]] = {0.02: [], 0.02 / 4: []}  # √(2 · 8 layers) = 4
    for module in model.modules():
        if isinstance(module, Block):
            stds[0.02 / 4] += [module.attn.o_proj.weight.std().item()]
            stds[0.02 / 4] += [module.mlp.down_proj.weight.std().item()]
            for linear in (
                module.attn.q_proj,
                module.attn.k_proj,
                module.attn.v_proj,
                module.mlp.gate_proj,
                module.mlp.up_proj,
            ):
                stds[0.02].append(linear.weight.std().item())
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            assert not module.bias.any()
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
    assert model.positions is not None
    assert model.head is not None
    stds[0.02].append(model.positions.weight.std().item())
    stds[0.3] = [model.embed.weight.std().item()]
    stds[0.001] = [model.head.weight.std().item()]
    tied = make(vocab_size=500, d_model=128, position="learned")
    stds[0.02].append(tied.embed.weight.std().item())
    for expected, found in stds.items():
        assert found == pytest.approx([expected] * len(found), rel=0.05)


def test_a_missing_vocabulary_is_an_error():
    with pytest.raises(ConfigError, match="vocab_size"):
        GPT(ModelConfig())
