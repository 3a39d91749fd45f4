"""Training from Python."""

import json
import threading
from pathlib import Path

import pytest
import torch

import gptmini
from gptmini.config import yamlfile
from gptmini.config.settings import ModelConfig
from gptmini.errors import ConfigError
from gptmini.generate.run import Run
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.train.seeds import seed_from
from tests.support import SMALL, TINY, tiny


def asked(text_file: Path) -> dict:
    return {**TINY, "data": {"path": str(text_file)}}


def test_it_returns_the_trained_run_and_resumes_it(text_file: Path, tmp_path: Path):
    run = gptmini.fit(asked(text_file), tmp_path / "run")
    assert isinstance(run, gptmini.Run)
    best = RunDirectory(tmp_path / "run").load_best()
    assert run.step == best.step > 0
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, best.model[name], rtol=1e-2, atol=1e-2)  # bfloat16
    assert run.generate("the", max_new_tokens=3)
    before = RunDirectory(tmp_path / "run").list_steps()
    gptmini.fit(asked(text_file), str(tmp_path / "run"))  # finished already
    assert RunDirectory(tmp_path / "run").list_steps() == before
    longer = {**TINY["train"], "steps": 8}
    gptmini.fit({**asked(text_file), "train": longer}, tmp_path / "run")
    assert RunDirectory(tmp_path / "run").list_steps()[0] == 8


def test_it_trains_as_the_command_does(gptmini, text_file: Path, tmp_path: Path):
    assert gptmini("train", "--data", "text.txt", *SMALL)[0] == 0
    import gptmini as package

    command = RunDirectory(tmp_path / "runs" / "text")
    package.fit(command.load_config(), tmp_path / "again")
    again = RunDirectory(tmp_path / "again")
    assert again.load_config() == command.load_config()
    ours = again.load_newest()
    theirs = command.load_newest()
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in theirs.model)


def test_a_configuration_may_be_a_file(text_file: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(yamlfile.dump(asked(text_file)))
    for name in ("my.yaml", Path("my.yaml")):
        gptmini.fit(name, "run")
    expected = gptmini.fit(asked(text_file), "expected")
    assert RunDirectory(Path("run")).load_config() == expected.config
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        gptmini.fit("none.yaml", "other")


def test_a_run_is_evaluated_as_the_command_does(text_file: Path, tmp_path: Path, gptmini):
    import gptmini as package

    assert gptmini("train", "--data", "text.txt", *SMALL)[0] == 0
    Path("other.txt").write_text("the quick brown fox " * 30)
    for words, data in (([], None), (["--data", "other.txt"], "other.txt")):
        printed = json.loads(gptmini("evaluate", *words, "--json")[1])
        del printed["compressors"], printed["copied"]  # which are none of the model
        run = package.load("runs/text", weights="float32")
        for each in ("runs/text", run):
            assert package.evaluate(each, data).to_dict() == printed


def test_a_mistake_is_named_by_its_key(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"train\.setps: no such setting; did you mean train.steps"
    ):
        gptmini.fit({"train": {"setps": 3}}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_thread_may_train(text_file: Path, tmp_path: Path):
    """Only the main thread can handle signals."""
    config = tiny(data={"path": str(text_file)})
    runs: list[gptmini.Run] = []
    thread = threading.Thread(target=lambda: runs.append(gptmini.fit(config, tmp_path / "run")))
    thread.start()
    thread.join()
    assert [run.path for run in runs] == [tmp_path / "run"]


class Doubled(GPT):
    """A model of one's own, whose logits are twice as large."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().compute_logits(hidden)


def momentum(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def test_own_parts_are_trained_with_and_resumed_to_the_same_bits(text_file: Path, tmp_path: Path):
    """Against a loop of torch that knows nothing of gptmini's loop."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (8, 4, 17), generator=chance)  # (steps, B, T + 1)
    rates = [0.1, 0.05, 0.2, 0.1, 0.1, 0.05, 0.1, 0.1]
    seen = {}
    settings = asked(text_file) | {
        "tokenizer": {"kind": "byte"},
        "train": {**TINY["train"], "steps": 8, "dtype": "float32", "compile": "off"},
    }

    def fit(name: str, steps: int) -> Run:
        return gptmini.fit(
            settings | {"train": settings["train"] | {"steps": steps}},
            tmp_path / name,
            model=Doubled,
            loss=lambda model, tokens, targets: model(tokens, targets) / 2,
            optimizer=momentum,
            schedule=rates.__getitem__,
            batches=lambda step: (rows[step, :, :-1], rows[step, :, 1:]),
            on_step=lambda step, metrics: seen.update({step: metrics["train_loss"]}),
        )

    assert isinstance(fit("whole", 8).model, Doubled)
    assert [*seen] == [1, 2, 3, 4, 5, 6, 7, 8]
    fit("stopped", 5)
    fit("stopped", 8)
    whole = RunDirectory(tmp_path / "whole").load_newest()
    stopped = RunDirectory(tmp_path / "stopped").load_newest()
    assert all(torch.equal(whole.model[name], stopped.model[name]) for name in whole.model)
    assert any(name.endswith("/momentum_buffer") for name in whole.optimizer)

    config = RunDirectory(tmp_path / "whole").load_config()
    torch.manual_seed(seed_from(config.train.seed))
    model = Doubled(config.model).train()
    optimizer = momentum(model)
    for step, rate in enumerate(rates):
        loss = torch.nn.functional.cross_entropy(
            model(rows[step, :, :-1]).flatten(0, 1), rows[step, :, 1:].flatten()
        )
        loss = loss / 2
        assert seen[step + 1] == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(whole.model[name], tensor, atol=1e-4, rtol=1e-3)


def test_a_run_that_was_trained_further_in_python_is_saved_as_it_is(text_file, tmp_path):
    run = gptmini.fit(asked(text_file), tmp_path / "run")
    with torch.no_grad():
        run.model.embed.weight.mul_(1.5)
    run.save(tmp_path / "further")
    again = gptmini.load(tmp_path / "further", weights="float32")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    assert (again.step, again.corpus) == (run.step, run.corpus)
    assert run.state["best"] is not None
    assert again.state["best"] is None  # that evaluation was of other weights
    with pytest.raises(ConfigError, match="further: already exists"):
        run.save(tmp_path / "further")


def test_an_optimizer_that_begins_with_a_state_is_resumed(text_file, tmp_path):

    def fit(name: str, steps: int) -> dict[str, torch.Tensor]:
        settings = asked(text_file) | {"train": {**TINY["train"], "steps": steps, "cooldown": 1.0}}
        gptmini.fit(
            settings,
            tmp_path / name,
            optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-3),
            schedule=lambda step: 1e-3,
        )
        return RunDirectory(tmp_path / name).load_newest().model

    whole = fit("whole", 6)
    fit("stopped", 3)
    stopped = fit("stopped", 6)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    with pytest.raises(ConfigError, match="first group"):
        gptmini.fit(
            asked(text_file),
            tmp_path / "none",
            optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.0),
        )


# Every type of numbers that a safetensors file holds and this torch has.
TYPES = [
    dtype
    for name in "bool uint8 int8 int16 uint16 float16 bfloat16 int32 uint32 float32 complex64 "
    "int64 uint64 float64 float8_e4m3fn float8_e5m2".split()
    if (dtype := getattr(torch, name, None)) is not None
]
REAL_TYPES = [dtype for dtype in TYPES if not dtype.is_complex]


def name_buffer(dtype: torch.dtype) -> str:
    return f"of_{str(dtype).removeprefix('torch.')}"


class Keeping(GPT):
    """A model whose buffers have numbers of every type, among them an additive mask."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for dtype in TYPES:
            self.register_buffer(name_buffer(dtype), torch.ones(3).to(dtype))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


class Counting(torch.optim.SGD):
    """An optimizer whose state has numbers of every type."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            for dtype in REAL_TYPES:
                self.state[parameter].setdefault(str(dtype), torch.ones(2).to(dtype))


def test_state_of_any_type_in_parts_of_ones_own_is_saved_and_resumed(text_file, tmp_path):
    def fit(steps: int) -> Run:
        return gptmini.fit(
            asked(text_file) | {"train": {**TINY["train"], "steps": steps}},
            tmp_path / "run",
            model=Keeping,
            optimizer=lambda model: Counting(model.parameters(), lr=0.1),
        )

    fit(3)
    run = fit(5)
    assert run.step == 5
    assert run.model.mask[0].tolist() == [0, -torch.inf, -torch.inf]
    saved = RunDirectory(tmp_path / "run").load_newest()
    for dtype in TYPES:
        assert saved.model[name_buffer(dtype)].dtype == dtype
    for dtype in REAL_TYPES:
        assert saved.optimizer[f"embed.weight/{dtype}"].dtype == dtype


class Slowing(torch.optim.Optimizer):
    """An optimizer that keeps plain numbers: for each parameter, and in its group."""

    def __init__(self, model: GPT, kept: object = None) -> None:
        super().__init__(model.parameters(), {"lr": 0.1, "weight": 0.0, "betas": [0.9, 0.99]})
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["weight"] += 0.1
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state.update(n=0, scale=1.0, early=True, nothing=None, kept=self.kept)
            state["n"] += 1
            state["scale"] *= 0.9
            state["early"] = state["n"] < 4
            assert type(state["n"]) is int
            rate = group["lr"] * state["scale"] / (state["n"] * group["weight"])
            parameter.sub_(parameter.grad, alpha=rate if state["early"] else -rate)


def test_plain_numbers_of_an_optimizer_are_saved_and_resumed(text_file, tmp_path):
    def fit(name: str, steps: int, kept: object = None) -> dict[str, torch.Tensor]:
        gptmini.fit(
            asked(text_file) | {"train": {**TINY["train"], "steps": steps}},
            tmp_path / name,
            optimizer=lambda model: Slowing(model, kept),
            schedule=lambda step: 0.1,
        )
        return RunDirectory(tmp_path / name).load_newest().model

    whole = fit("whole", 6)
    fit("stopped", 3)
    stopped = fit("stopped", 6)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    with pytest.raises(ConfigError, match=r"cannot hold its .*/kept \(list\); keep tensors"):
        fit("list", 3, kept=[1])
    assert not RunDirectory(tmp_path / "list").list_steps()  # after one step, not after three


def test_a_run_is_resumed_with_the_optimizer_that_it_was_trained_with(text_file, tmp_path):
    own = {"momentum": momentum, "plain": None}
    for name, optimizer in own.items():
        gptmini.fit(asked(text_file), tmp_path / name, optimizer=optimizer)
    longer = asked(text_file) | {"train": {**TINY["train"], "steps": 9}}
    for name, other in (("momentum", None), ("plain", momentum), ("momentum", Slowing)):
        with pytest.raises(ConfigError, match=rf"{name}: was trained with .*; pass the same parts"):
            gptmini.fit(longer, tmp_path / name, optimizer=other)
    assert gptmini.fit(longer, tmp_path / "momentum", optimizer=momentum).state["step"] == 9


def test_the_rates_of_ones_own_optimizer_are_the_peaks(text_file, tmp_path):
    def build(model: GPT) -> torch.optim.Optimizer:
        blocks = set(model.blocks.parameters())
        others = [parameter for parameter in model.parameters() if parameter not in blocks]
        groups = [{"params": [*blocks], "lr": 0.3}, {"params": others, "lr": torch.tensor(0.125)}]
        built.append(torch.optim.SGD(groups))
        return built[-1]

    def record(step: int, metrics: dict) -> None:
        rates[step] = (metrics["lr"], *(group["lr"] for group in built[-1].param_groups))

    built: list[torch.optim.Optimizer] = []
    rates: dict[int, tuple] = {}
    train = {"steps": 4, "warmup_steps": 2, "cooldown": 0.5, "lr": 0.01, "min_lr": 0.001}
    config = asked(text_file) | {"train": {**TINY["train"], **train}}
    gptmini.fit(config, tmp_path / "run", optimizer=build, on_step=record)
    shares = {1: 0.5, 2: 1.0, 3: 1.0, 4: 0.55}  # the floor is a tenth
    assert rates == {
        step: pytest.approx((0.3 * share, 0.3 * share, 0.125 * share))
        for step, share in shares.items()
    }
    gptmini.fit(config, tmp_path / "own", optimizer=build, schedule=lambda _: 0.6, on_step=record)
    assert rates[4] == pytest.approx((0.6, 0.6, 0.25))


def test_a_run_is_resumed_with_the_parts_that_no_checkpoint_holds(text_file, tmp_path):
    def average(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model(tokens, targets)

    parts = {"loss": average, "schedule": lambda step: 0.01}
    gptmini.fit(asked(text_file), tmp_path / "run", **parts)
    longer = asked(text_file) | {"train": {**TINY["train"], "steps": 9}}
    for fewer in ({}, {"loss": average}):
        said = (
            "was trained with gptmini's optimizer, loss, schedule, not gptmini's optimizer.*; pass"
        )
        with pytest.raises(ConfigError, match=said):
            gptmini.fit(longer, tmp_path / "run", **fewer)
    assert gptmini.fit(longer, tmp_path / "run", **parts).state["step"] == 9


def test_another_setting_of_the_optimizer_is_noticed_on_resuming(text_file, tmp_path, capfd):
    def fit(steps: int, **settings: float) -> None:
        gptmini.fit(
            asked(text_file) | {"train": {**TINY["train"], "steps": steps}},
            tmp_path / "run",
            optimizer=lambda model: torch.optim.SGD(model.parameters(), **settings),
        )

    fit(3, lr=0.1)
    fit(5, lr=0.1)
    assert "bit-identical" not in capfd.readouterr().err
    fit(7, lr=0.1, momentum=0.5)
    changed = "own_optimizer was SGD (lr 0.1), is SGD (lr 0.1, momentum 0.5); results will no"
    assert changed in capfd.readouterr().err


def test_an_optimizer_holds_the_weights_of_the_model(text_file, tmp_path, capfd):
    other = GPT(ModelConfig(vocab_size=257, **TINY["model"]))
    with pytest.raises(ConfigError, match="optimizer: holds weights of another model"):
        gptmini.fit(asked(text_file), tmp_path / "run", optimizer=lambda model: momentum(other))
    assert not (tmp_path / "run").exists()
    norms = {}

    def freeze(config: ModelConfig) -> GPT:
        model = GPT(config)
        for parameter in {*model.parameters()} - {*model.blocks.parameters()}:
            parameter.requires_grad_(False)
        return model

    for name, model in (("left out", None), ("frozen", freeze)):
        gptmini.fit(
            asked(text_file) | {"train": {**TINY["train"], "steps": 3}},
            tmp_path / name,
            model=model,
            optimizer=lambda model: momentum(model.blocks),
            on_step=lambda step, metrics, name=name: norms.update({(name, step): metrics}),
        )
    # What it leaves out has no gradients, as if it were frozen: they would add up.
    for step in (1, 2, 3):
        assert norms["left out", step] == pytest.approx(norms["frozen", step])
    left_out = "warning: optimizer: does not train 2 weights, such as embed.weight"
    assert capfd.readouterr().err.count(left_out) == 1


TOKENS = torch.zeros(4, 16, dtype=torch.int64)
STALE = GPT(ModelConfig(n_layer=1, n_head=1, d_model=8, context_length=16, vocab_size=257))
WRONG_PARTS = {
    "class": ({"optimizer": torch.optim.AdamW}, "must be a function .* not iterable"),
    "instance": ({"optimizer": momentum(torch.nn.Linear(1, 1))}, "must be a function"),
    "no optimizer": ({"optimizer": lambda model: None}, "must be a function that makes"),
    "closure": ({"optimizer": lambda model: torch.optim.LBFGS(model.parameters())}, "'closure'"),
    "no weights": ({"optimizer": lambda model: torch.optim.SGD([])}, "empty parameter list"),
    "no rate": ({"schedule": lambda step: None}, "must return a number from 0, not None"),
    "nan": ({"schedule": lambda step: float("nan")}, "must return a number from 0, not nan"),
    "below 0": ({"schedule": lambda step: -0.1}, "must return a number from 0, not -0.1"),
    "tensor": ({"schedule": lambda step: torch.tensor(0.1)}, "a number from 0, not tensor"),
    "no batch": ({"batches": lambda step: None}, "step 0 gives .*NoneType"),
    "one": ({"batches": lambda step: TOKENS}, r"step 0 gives \[\(torch.int64, 4, 16\)\]; must"),
    "shape": ({"batches": lambda step: (TOKENS, TOKENS[:2])}, r"\(torch.int64, 2, 16\)\]; must"),
    "float": ({"batches": lambda step: (TOKENS.float(), TOKENS)}, r"gives \[\(torch.float32, 4"),
    "int32": ({"batches": lambda step: (TOKENS, TOKENS.int())}, r"\(torch.int32, 4, 16\)\]; must"),
    "array": ({"batches": lambda step: (TOKENS, TOKENS.numpy())}, "numpy.ndarray.*; must be"),
    "below": ({"batches": lambda step: (TOKENS - 1, TOKENS)}, "has tokens beyond 0 to "),
    "beyond": ({"batches": lambda step: (TOKENS, TOKENS + 5000)}, "has tokens beyond 0 to "),
    "no loss": ({"loss": lambda model, tokens, targets: None}, "must return a tensor of shape"),
    "number": ({"loss": lambda *given: given[0](*given[1:]).item()}, "must return a tensor"),
    "detached": ({"loss": lambda *given: given[0](*given[1:]).detach()}, "has a gradient"),
    "stale": ({"loss": lambda *given: STALE(*given[1:])}, "does not depend on the weights"),
    "word": ({"schedule": "cosine"}, "must be a function of 1 argument, not str"),
    "loader": ({"batches": [TOKENS]}, "must be a function of 1 argument, not list"),
    "two": ({"loss": lambda model, tokens: model(tokens)}, "a function of 3 arguments .too many"),
    "losses": ({"loss": lambda model, tokens, _: model(tokens)}, "must return a tensor of sh"),
}


@pytest.mark.parametrize("wrong", WRONG_PARTS)
def test_a_wrong_part_is_named_with_what_it_must_be(wrong, text_file, tmp_path):
    parts, problem = WRONG_PARTS[wrong]
    (name,) = parts
    with pytest.raises(ConfigError, match=rf"^{name}: .*{problem}") as error:
        gptmini.fit(asked(text_file), tmp_path / "run", **parts)
    assert len(error.value.lines) == 1
    assert "\n" not in error.value.lines[0]


class Partial(GPT):
    """A model with a part that is frozen, and one that is not used."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.blocks[0].mlp.requires_grad_(False)
        self.blocks[0].unused = torch.nn.Linear(4, 4)


def test_what_gets_no_gradients_is_left_as_it_is(text_file, tmp_path):
    run = gptmini.fit(
        asked(text_file) | {"train": {**TINY["train"], "steps": 2}}, tmp_path / "run", model=Partial
    )
    torch.manual_seed(seed_from(run.config.train.seed))
    first = Partial(run.config.model).state_dict()
    last = run.model.state_dict()
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert {name for name in first if "blocks.0.mlp." in name} < same
    assert "blocks.1.mlp.down_proj.weight" not in same


def test_targets_below_0_do_not_count_in_batches_of_ones_own(text_file, tmp_path):
    losses = {}
    tokens = torch.arange(64).view(4, 16)
    targets = {"all": tokens + 1, "half": (tokens + 1).masked_fill(tokens % 2 == 0, -1)}
    expected = {}
    for name, counted in targets.items():
        run = gptmini.fit(
            asked(text_file) | {"train": {**TINY["train"], "steps": 1, "dtype": "float32"}},
            tmp_path / name,
            batches=lambda step, counted=counted: (tokens, counted),
            on_step=lambda step, metrics, name=name: losses.update({name: metrics["train_loss"]}),
        )
        torch.manual_seed(seed_from(run.config.train.seed))
        logits = GPT(run.config.model)(tokens)
        shown = counted.flatten().masked_fill(counted.flatten() < 0, -100)
        expected[name] = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shown).item()
    assert losses == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="targets"):
        gptmini.fit(asked(text_file), tmp_path / "wrong", batches=lambda step: (tokens, tokens[:2]))
