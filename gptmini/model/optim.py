"""The learning rate as a function of the step, Muon, and an optimizer for each kind of parameter.

Letters: N matrices, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gptmini.config.settings import TrainConfig
from gptmini.errors import ConfigError

if TYPE_CHECKING:
    from gptmini.model.gpt import GPT

Orthogonalize = Callable[[Tensor], Tensor]  # (N, R, C) -> (N, R, C)
NUMBER = ":number"  # ends the name of a plain number among the tensors of a state


def compute_learning_rate(config: TrainConfig, step: int) -> float:
    """Warm up linearly, stay at lr, then decay to min_lr: a warmup-stable-decay schedule.

    The decay is linear or a cosine, over the last `cooldown` of the steps. Until it begins, the
    rate does not depend on `steps`, so `train.minutes` may still change them.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    cooldown = get_cooldown_steps(config)
    remaining = config.steps - step
    if remaining > cooldown:
        return config.lr
    fraction = remaining / cooldown
    if config.schedule == "cosine":
        fraction = 0.5 - 0.5 * math.cos(math.pi * fraction)
    return config.min_lr + (config.lr - config.min_lr) * fraction


def get_cooldown_steps(config: TrainConfig) -> int:
    """Count the steps of the cool-down, which ends the run."""
    return min(round(config.cooldown * config.steps), config.steps - config.warmup_steps)


# Columns near zero are those of neurons that hardly take part: most of theirs is noise.
MAX_COLUMN_SCALE = 100.0


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of matrices (N, R, C), R <= C, near 1, and columns to one length.

    Orthogonal rows are equally long, but the more numerous columns are not. In an MLP those are the
    inner neurons, some of which would learn much faster than others. NorMuon (Li et al. 2025) evens
    them out by a running mean of their squares, after the iteration. To even out their lengths in
    this step, before and after, learns more from as much text (scripts/LOG.md: What learns more
    from each token in a quarter of an epoch?).
    """
    return _equalize_columns(iterate_newton_schulz(_equalize_columns(matrices)))


def _equalize_columns(matrices: Tensor) -> Tensor:
    """Scale the columns of matrices (N, R, C) to the length √(R/C), as if rows had length 1."""
    R, C = matrices.shape[1:]
    lengths = torch.linalg.vector_norm(matrices, dim=1, keepdim=True)  # (N, 1, C)
    least = lengths.mean(dim=2, keepdim=True) / MAX_COLUMN_SCALE  # (N, 1, 1)
    return matrices * ((R / C) ** 0.5 / lengths.maximum(least + 1e-30))


def iterate_newton_schulz(matrices: Tensor) -> Tensor:
    """Bring all singular values of matrices (N, R, C), R <= C, near 1.

    Five steps of an iteration whose coefficients make small singular values grow fastest. They end
    between 0.7 and 1.2, not exactly at 1 (Jordan et al. 2024).
    """
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)  # (N, 1, 1)
    x = matrices / (norms + 1e-7)  # singular values <= 1
    for _ in range(5):
        gram = torch.bmm(x, x.mT)  # (N, R, R)
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum (Jordan et al. 2024): no direction of a matrix learns faster.

    Three things differ from torch.optim.Muon. Columns of an update are equally long. Matrices of
    one shape are orthogonalized in one batch, which is faster for small ones (scripts/LOG.md:
    Should Muon take matrices one by one?). And it computes in `dtype`, because not every processor
    is fast at bfloat16.
    """

    def __init__(
        self,
        matrices: list[Tensor],
        weight_decay: float,
        dtype: torch.dtype,
        orthogonalize: Orthogonalize = orthogonalize,
    ) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay, "momentum": 0.95})
        # Gradients are too small for float16.
        self.dtype = torch.float32 if dtype == torch.float16 else dtype
        self.orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices; overwrites their gradients.

        On an accelerator, a `_foreach_` function takes all matrices of a shape in one kernel.
        """
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[Tensor]] = {}  # a transpose has the same shape
            for matrix in group["params"]:
                if matrix.grad is None:  # not used, in a model of your own
                    continue
                shape = (min(matrix.shape), max(matrix.shape))  # (R, C)
                by_shape.setdefault(shape, []).append(matrix)
            for matrices in by_shape.values():
                momenta = self._update_momenta(matrices, group["momentum"])  # (R, C) each
                updates = self.orthogonalize(torch.stack(momenta).to(self.dtype))  # (N, R, C)
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                _add_updates(matrices, updates.to(matrices[0].dtype), group["lr"])

    def _update_momenta(self, matrices: list[Tensor], momentum: float) -> list[Tensor]:
        """Update the mean gradients of matrices and return their Nesterov momenta (R, C).

        A momentum (outputs, inputs) is transposed unless it is wide, so that R <= C.
        """
        gradients = []
        means = []
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            gradients.append(matrix.grad)
            means.append(state["momentum"])
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        # Nesterov looks one step ahead: the mean counts the current gradient a second time.
        torch._foreach_lerp_(gradients, means, momentum)
        # R <= C makes the iteration's Gram matrix, (R, R), the smaller one. Columns of square
        # matrices then are outputs, which are better made equally long than inputs.
        return [each.T if each.shape[0] >= each.shape[1] else each for each in gradients]


def _add_updates(matrices: list[Tensor], updates: Tensor, lr: float) -> None:
    """Subtract lr times their updates (N, R, C), transposed back, from matrices."""
    # An orthogonal matrix keeps the length of its input. Spread over more outputs, that changes
    # each only √(columns/rows) times as much; the scale of tall matrices compensates.
    R, C = updates.shape[1:]
    pairs = list(zip(matrices, updates, strict=True))
    wide = [(matrix, update) for matrix, update in pairs if matrix.shape[0] < matrix.shape[1]]
    tall = [(matrix, update.T) for matrix, update in pairs if matrix.shape[0] >= matrix.shape[1]]
    for some, scale in ((wide, 1.0), (tall, (C / R) ** 0.5)):
        if some:
            chosen, chosen_updates = zip(*some, strict=True)
            torch._foreach_add_(chosen, chosen_updates, alpha=-lr * scale)


class Optimizer:
    """AdamW for all parameters, or Muon for the blocks' matrices and AdamW for the rest.

    | parameter                      | optimizer      | weight decay |
    |--------------------------------|----------------|--------------|
    | matrices of the blocks         | Muon, or AdamW | yes          |
    | head, also where it is tied    | AdamW          | yes          |
    | embeddings of an untied head   | AdamW          | no           |
    | positions, norms, biases       | AdamW          | no           |

    The rates are `lr` for AdamW, `embed_lr` for the embeddings and `muon_lr` for Muon. AdamW is
    that of Loshchilov and Hutter (2019); it also takes matrices of a single row or column from
    Muon. Muon orthogonalizes in `dtype`, by the function `orthogonalize`, in which several
    processes can share the work.
    """

    def __init__(
        self,
        model: GPT,
        config: TrainConfig,
        dtype: torch.dtype = torch.float32,
        orthogonalize: Orthogonalize = orthogonalize,
    ) -> None:
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.given_groups: list[dict[str, Any]] = []  # of an optimizer that is wrapped
        self.given = ""  # its class and settings
        linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
        in_blocks = linear & set(model.blocks.parameters())
        # A single row or column has nothing to be orthogonal to.
        by_muon = {p for p in in_blocks if config.optimizer == "muon" and min(p.shape) > 1}
        # Lists in the order of the model: a set has none, and the bits depend on it.
        matrices = [p for p in self.names if p in by_muon]
        decayed = [p for p in self.names if p in linear - by_muon]
        others = [p for p in self.names if p not in linear and p is not model.embed.weight]
        # Each group has its learning rate as a multiple of `lr`.
        embed_ratio = (config.embed_lr or config.lr) / config.lr
        embed_decay = config.weight_decay if model.head is None else 0.0
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay, "lr_ratio": 1.0},
            {"params": [model.embed.weight], "weight_decay": embed_decay, "lr_ratio": embed_ratio},
            {"params": others, "weight_decay": 0.0, "lr_ratio": 1.0},
        ]
        groups = [group for group in groups if group["params"]]  # AdamW refuses an empty one
        beta1, beta2 = config.betas
        adamw = torch.optim.AdamW(groups, betas=(beta1, beta2), fused=True)
        self.optimizers: list[torch.optim.Optimizer] = [adamw]
        if matrices:
            muon = Muon(matrices, config.weight_decay, dtype, orthogonalize)
            muon.param_groups[0]["lr_ratio"] = config.muon_lr / config.lr
            self.optimizers.append(muon)

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, model: GPT) -> Optimizer:
        """Take an optimizer of torch that has parameters of a model.

        The rate of its first group becomes that of the schedule, and the others keep their ratio.
        """
        wrapped = cls.__new__(cls)
        wrapped.names = {p: name for name, p in model.named_parameters()}
        wrapped.optimizers = [optimizer]
        settings = [
            f"{key} {value}"
            for group in optimizer.param_groups
            for key, value in group.items()
            if isinstance(value, bool | int | float | str | tuple) and value
        ]
        wrapped.given = f"{type(optimizer).__name__} ({', '.join(settings)})"
        rates = [float(group.get("lr") or 0) for group in optimizer.param_groups]
        if not rates[0] > 0:
            raise ConfigError("optimizer: the learning rate of its first group must be above 0")
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group.update(lr=rate, lr_ratio=rate / rates[0])
        wrapped.given_groups = [dict(group) for group in optimizer.param_groups]
        return wrapped

    def step(self, lr: float) -> None:
        """Update the weights and clear the gradients; other rates than `lr` are in proportion."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_ratio"]
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state as `parameter/key`: names survive a change of order, indices do not.

        Of an optimizer that is wrapped, what has changed in a group is `groups.INDEX/key`.
        ConfigError for state that is neither a tensor nor a number.
        """
        state = {
            f"{self.names[parameter]}/{key}": value
            for optimizer in self.optimizers
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
        }
        for index, given in enumerate(self.given_groups):
            for key, value in self.optimizers[0].param_groups[index].items():
                is_same = not isinstance(value, Tensor) and value == given.get(key)
                if key not in ("params", "lr") and not is_same:
                    state[f"groups.{index}/{key}"] = value
        return dict(_to_tensor(*entry) for entry in state.items() if entry[1] is not None)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned; torch's own format has indices in the place of names."""
        by_owner: dict[str, dict[str, Tensor | float]] = {}
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition("/")
            value = tensor.item() if key.endswith(NUMBER) else tensor
            by_owner.setdefault(owner, {})[key.removesuffix(NUMBER)] = value
        for optimizer in self.optimizers:
            names = [self.names[p] for group in optimizer.param_groups for p in group["params"]]
            state = {i: by_owner[name] for i, name in enumerate(names) if name in by_owner}
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            for parameter, values in optimizer.state.items():
                for key, saved in by_owner[self.names[parameter]].items():
                    if isinstance(saved, Tensor):  # torch gives it the type of the parameter
                        values[key] = saved.to(values[key].device)
        for index in range(len(self.given_groups)):
            self.optimizers[0].param_groups[index].update(by_owner.get(f"groups.{index}", {}))


def _to_tensor(name: str, value: object) -> tuple[str, Tensor]:
    """Return state of an optimizer as a checkpoint holds it."""
    if isinstance(value, Tensor):
        return name, value
    if isinstance(value, float | int):  # or bool
        dtype = torch.float64 if isinstance(value, float) else None
        return name + NUMBER, torch.tensor(value, dtype=dtype)
    raise ConfigError(
        f"optimizer: a checkpoint cannot hold its {name} ({type(value).__name__}); keep tensors "
        f"and numbers"
    )
