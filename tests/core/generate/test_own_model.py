"""A model of one's own: what it must be, what its cache may break, and where it is refused."""

import json
import re
import signal
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gptmini as package
from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError, Stopped
from gptmini.generate.engine import TorchEngine, open_engine
from gptmini.generate.own_model import check_own_model, find_own_module, measure_start
from gptmini.model.attention import Attention
from gptmini.model.cache import LayerCache, NoCache
from gptmini.model.gpt import GPT
from gptmini.runs.directory import Checkpoint, RunDirectory
from tests.support import SMALL, TINY


class Gated(Attention):
    """Each head is scaled by a gate that reads the token."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.gate = nn.Linear(config.d_model, config.n_head)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None, cache: LayerCache
    ) -> Tensor:
        q, k, v = self.project_qkv(x, cos_sin)
        gates = self.gate(x).sigmoid().mT  # (B, H, T)
        mixed = self.mix(q, k, v, cache) * gates[..., None]  # (B, H, T, K)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Forgetful(Gated):
    """Sees what it is given, and no earlier key."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        return super().mix(q, k, v, NoCache(q.device))


class Larger(Gated):
    """Would keep keys that do not fit into the cache."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        return super().mix(*(torch.cat([each, each], dim=-1) for each in (q, k, v)), cache)[
            ..., : self.head_dim
        ]


def exchange(config: ModelConfig, attention: type[Gated]) -> GPT:
    model = GPT(config)
    for layer, block in enumerate(model.blocks):
        block.attn = attention(config, layer)
    return model


def build(config: ModelConfig) -> GPT:
    return exchange(config, Gated)


@pytest.fixture
def config(text_file: Path, gptmini) -> dict:
    """In an empty folder, where commands run, too."""
    return TINY | {"data": {"path": str(text_file)}}


def test_stopped_and_resumed_it_has_the_same_bits(config, default_signals):
    whole = package.fit(config, "whole", model=build)

    def stop(step: int, metrics: dict) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped):
        package.fit(config, "stopped", model=build, on_step=stop)
    stopped = package.fit(config, "stopped", model=build)
    assert whole.tensors.keys() == stopped.tensors.keys()
    assert all(torch.equal(stopped.tensors[name], each) for name, each in whole.tensors.items())


def test_loaded_again_it_evaluates_and_generates_alone_as_in_a_batch(config, capfd):
    exactly = config | {"train": config["train"] | {"dtype": "float32"}}
    trained = package.fit(exactly, "own", model=build)
    size = sum(parameter.numel() for parameter in trained.model.parameters())
    assert f"{size / 1e3:.1f} k parameters, a model of your own" in capfd.readouterr().err
    run = package.load("own", weights="float32", model=build)
    assert package.evaluate(run).loss == package.evaluate(trained).loss
    best = RunDirectory(Path("own")).load_best(with_model=False).state["best"]
    assert package.evaluate(run).loss == pytest.approx(best["val_loss"], rel=1e-5)
    prompts = ["the", "a mat. the cat", "lazy"]
    together = run.generate(prompts, max_new_tokens=9, temperature=0)
    alone = [run.generate(prompt, max_new_tokens=9, temperature=0) for prompt in prompts]
    assert together == alone
    (uncached,) = run.start(["the"], use_cache=False, max_new_tokens=9, temperature=0).finish()
    assert uncached.text == alone[0]
    generation = run.start(["the"])
    generation.finish()
    assert generation.engine == "torch"
    assert "computes something else" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("attention", "problem"),
    [
        (Forgetful, "cached and uncached logits differ by"),
        (Larger, "a trial with a KV cache failed: layer 0, x (2, 8, 32): RuntimeError: shape mis"),
    ],
)
def test_one_that_breaks_the_cache_is_told_so_and_generates_without(
    attention, problem, config, capfd
):
    def build_wrongly(config: ModelConfig) -> GPT:
        return exchange(config, attention)

    run = package.fit(config, "own", model=build_wrongly)
    err = capfd.readouterr().err
    first, _, later = err.partition("step 1/6")
    for part in (first, later):  # before it trains, and where it is loaded
        assert part.count("generating without a KV cache, which is slower") == 1
    assert problem in first
    assert not run.model.uses_cache
    text = run.generate("the", max_new_tokens=5, temperature=0)
    tokens = run.encode("the")
    for _ in range(5):
        tokens.append(int(run.model(torch.tensor([tokens]))[0, -1].argmax()))
    assert text == run.decode(tokens[-5:])


class Ahead(Attention):
    """Sees one token ahead."""

    def mask(self, queries: Tensor, keys: Tensor, shared: object) -> Tensor:
        return package.make_mask(queries + 1, keys)


class InPairs(Attention):
    """Sees to the end of its pair of tokens, and begins by adding nothing."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        nn.init.zeros_(self.o_proj.weight)

    def mask(self, queries: Tensor, keys: Tensor, shared: object) -> Tensor:
        return package.make_mask(queries | 1, keys)


class Noisy(Attention):
    """Draws in each pass, as dropout does that is never off."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        mixed = super().mix(q, k, v, cache)
        return mixed + torch.randn_like(mixed)


class Whole(Attention):
    """Takes nothing but whole texts."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        assert (q.shape[2], q.requires_grad) == (16, True)
        return super().mix(q, k, v, cache)


@pytest.mark.parametrize("attention", [Ahead, InPairs])
@pytest.mark.parametrize("n_layer", [1, 2])
def test_one_that_sees_later_tokens_is_refused(attention, n_layer, config, capfd):
    config = config | {"model": {**config["model"], "n_layer": n_layer}}
    with pytest.raises(ConfigError, match="model: position 0 depends on later tokens, "):
        package.fit(config, "own", model=lambda config: exchange(config, attention))
    assert not Path("own").exists()
    assert "warning" not in capfd.readouterr().err


class LeaksInTraining(Attention):
    def mask(self, queries: Tensor, keys: Tensor, shared: object) -> Tensor:
        return package.make_mask(queries + self.training, keys)


def test_one_that_sees_later_tokens_in_training_alone_is_refused():
    config = ModelConfig(vocab_size=9, n_layer=1, n_head=4, d_model=32, dropout=0.2)
    gated = exchange(config, Gated)
    state = torch.get_rng_state()
    check_own_model(gated)  # its dropout is no leak
    assert torch.equal(state, torch.get_rng_state())  # of whoever loads a run
    with pytest.raises(ConfigError, match="model: in training, position 0 depends on later tok"):
        check_own_model(exchange(config, LeaksInTraining))


class LateLeak(Attention):
    def mask(self, queries: Tensor, keys: Tensor, shared: Tensor) -> Tensor:
        ahead = (keys[..., None, :] == queries[..., None] + 1) & (queries[..., None] >= 20)
        return package.make_mask(queries, keys) | ahead[..., None, :, :]


def test_one_that_sees_later_tokens_late_is_refused():
    config = ModelConfig(vocab_size=9, n_layer=1, n_head=4, d_model=32, context_length=64)
    with pytest.raises(ConfigError, match="model: position 20 depends on later tokens, "):
        check_own_model(exchange(config, LateLeak))


def test_one_of_which_it_cannot_be_told_is_not_refused(config):
    torch.manual_seed(0)
    check_own_model(exchange(ModelConfig(vocab_size=9, n_layer=2, n_head=4, d_model=32), Noisy))
    sizes = ModelConfig(vocab_size=9, **config["model"])
    check_own_model(exchange(sizes, Whole))
    assert measure_start(lambda config: exchange(config, Whole), sizes) == []


class Sink(Attention):
    """Adds a vector to what each head has mixed, and nothing to the residual stream at first."""

    start = 0.0

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        nn.init.zeros_(self.o_proj.weight)
        self.sink = nn.Parameter(torch.full((self.head_dim,), self.start))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        return super().mix(q, k, v, cache) + self.sink


class OtherStart(Sink):
    start = 0.1


class OtherMask(Sink):
    def mask(self, queries: Tensor, keys: Tensor, shared: object) -> Tensor:
        return package.make_mask(queries, keys, 9)


CHANGED = "own: the model computes something else than when this run began; restore its code, or"


@pytest.mark.parametrize("other", [OtherStart, OtherMask])
def test_a_run_goes_on_with_the_code_that_it_began_with(other, config, capfd):
    longer = config | {"train": {**config["train"], "steps": 8}}
    package.fit(config, "own", model=lambda config: exchange(config, Sink))
    package.load("own", model=lambda config: exchange(config, Sink))
    assert "warning" not in capfd.readouterr().err
    for asked in (config, longer):  # finished, and not
        with pytest.raises(ConfigError, match=CHANGED):
            package.fit(asked, "own", model=lambda config: exchange(config, other))
    run = package.load("own", model=lambda config: exchange(config, other))
    assert capfd.readouterr().err.count(f"warning: {CHANGED}") == 1
    run.save("by-hand")  # whose code nobody has measured
    package.load("by-hand", model=lambda config: exchange(config, other))
    assert "warning" not in capfd.readouterr().err
    package.fit(longer, "own", model=lambda config: exchange(config, Sink))


def test_a_run_that_kept_no_logits_goes_on_with_any_code(config, monkeypatch):
    write = RunDirectory.save

    def save_as_before(run: RunDirectory, checkpoint: Checkpoint, keep: int = 2) -> None:
        checkpoint.state.pop("own_logits")
        write(run, checkpoint, keep)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save", save_as_before)
        package.fit(config, "own", model=lambda config: exchange(config, Sink))
    longer = config | {"train": {**config["train"], "steps": 8}}
    assert package.fit(longer, "own", model=lambda config: exchange(config, OtherMask)).step > 0


def test_a_builder_makes_new_weights_in_each_call(config):
    sizes = ModelConfig(vocab_size=257, **config["model"])
    model = build(sizes)
    gate = nn.Linear(32, 4)

    def share_gate(config: ModelConfig) -> GPT:
        model = build(config)
        for block in model.blocks:
            block.attn.gate = gate
        return model

    for wrong in (lambda config: model, share_gate):
        with pytest.raises(ConfigError, match="model: returned the same weights twice"):
            package.fit(config, "own", model=wrong)
    assert not Path("own").exists()
    gate.requires_grad_(False)  # what is not trained may be shared
    assert measure_start(share_gate, sizes)
    generator = torch.Generator().manual_seed(0)  # it goes on from call to call

    def draw(config: ModelConfig) -> GPT:
        model = build(config)
        nn.init.normal_(model.embed.weight, generator=generator)
        return model

    package.fit(config, "own", model=draw)
    package.fit(config, "own", model=draw)


def test_the_lines_that_refuse_it_are_python_that_works(gptmini, config, text_file):
    package.fit(config, "own", model=build)
    names = {"gptmini": package, "build": build, "config": config}
    for words in (["generate", "own"], ["evaluate", "own"], ["score", "own", "--text", "a"]):
        code, _, err = gptmini(*words)
        assert code == 2
        (lines,) = re.findall(
            "own: has a model of its own; in Python: (.*), then (.*) or (.*)\n", err
        )
        load, use, evaluate = lines
        exec(load, names)
        assert eval(use, names)
        assert eval(evaluate, names).loss > 0
    for words, steps in (
        (["train", "own/config.yaml", "--out", "own", "--steps", "9"], 9),
        (["train", "--data", str(text_file), "--from", "own", "--out", "next", *SMALL[2:]], 6),
    ):
        code, _, err = gptmini(*words)
        assert code == 2
        (line,) = re.findall("own: has a model of its own; in Python: (.*)\n", err)
        assert eval(line, names).step == steps
    based = RunDirectory(Path("next"))
    assert based.load_config().base.run == "own"
    assert isinstance(package.load("next", model=build).model.blocks[0].attn, Gated)


def test_its_parameters_are_not_counted_as_those_of_gptminis_model(gptmini, config):
    package.fit(config, "runs/own", model=build)
    (listed,) = json.loads(gptmini("runs", "--json")[1])["runs"]
    assert (listed["parameters"], listed["step"], listed["problem"]) == (None, 6, "")


def test_what_is_begun_with_a_model_goes_on_with_it(config):
    package.fit(config, "own", model=build)
    package.fit(config, "plain")
    longer = config | {"train": {**config["train"], "steps": 8}}
    with pytest.raises(ConfigError, match="own: has a model of its own"):
        package.fit(longer, "own")
    with pytest.raises(ConfigError, match="plain: was begun with gptmini's model"):
        package.fit(longer, "plain", model=GPT)


@pytest.mark.parametrize(
    "wrong", [GPT(tiny_model := ModelConfig(vocab_size=9)), lambda config: None]
)
def test_a_builder_returns_a_model(wrong, config):
    with pytest.raises(ConfigError, match="model: must be a function that takes a ModelConfig"):
        package.fit(config, "own", model=wrong)
    assert not Path("own").exists()


def test_one_that_was_put_together_by_hand_is_saved_as_what_it_is(config):
    run = package.fit(config, "plain")
    for layer, block in enumerate(run.model.blocks):
        block.attn = Gated(run.config.model, layer)
    run.save("own")
    with pytest.raises(ConfigError, match="own: has a model of its own"):
        package.load("own")
    assert package.load("own", model=build).generate("the")


def test_its_modules_are_known_by_their_classes():
    config = ModelConfig(vocab_size=9, n_layer=2, n_head=4, d_model=32)
    for norm in ("layernorm", "rmsnorm"):
        assert find_own_module(GPT(config.model_copy(update={"norm": norm}))) is None
    model = build(config).eval()
    assert find_own_module(model) == "blocks.0.attn is a Gated"
    assert type(open_engine(model, 1)) is TorchEngine
    model = GPT(config)
    for block in model.blocks:  # of torch's modules, with weights of the same names
        parts = {"up_proj": block.mlp.up_proj, "bend": nn.Tanh(), "down_proj": block.mlp.down_proj}
        block.mlp = nn.Sequential(OrderedDict(parts))
    assert find_own_module(model) == "blocks.0.mlp is a Sequential"
