"""Saves and loads the checkpoints of a run on all of its ranks.

There are two ways, for the two placements of a model: rank 0 writes a whole one, and of a sharded
one each rank writes its rows. Both read either. A run picks one when it is built.
"""

from typing import TYPE_CHECKING, Any, Protocol

from gptmini.distributed.group import Group
from gptmini.errors import CheckpointError
from gptmini.runs.directory import Checkpoint, RunDirectory
from gptmini.runs.tensors import Tensors, find_infinite

if TYPE_CHECKING:
    from gptmini.distributed.sharding import Sharded


class CheckpointStore(Protocol):
    """The checkpoints of one run, as every rank saves and loads them."""

    def are_finite(self, weights: Tensors) -> bool:
        """Return whether all weights are finite, on all ranks."""

    def save(self, state: dict[str, Any], weights: Tensors, optimizer: Tensors, keep: int) -> None:
        """Write a checkpoint, then delete all but the best and the newest `keep` intact ones."""

    def load_newest(self) -> Checkpoint | None:
        """Load the newest checkpoint that is intact, the same on all ranks; None if there is none.

        CheckpointError if there are checkpoints and all are damaged.
        """

    def load_best_of(self, base: RunDirectory) -> Checkpoint:
        """Load the best weights of another run, as this rank holds them."""


class WholeCheckpoints:
    """Rank 0 writes the whole model, and every rank reads all of it."""

    def __init__(self, run: RunDirectory, group: Group) -> None:
        self.run = run
        self.group = group

    def are_finite(self, weights: Tensors) -> bool:
        return all(self.group.all_gather_object(not find_infinite(weights)))

    def save(self, state: dict[str, Any], weights: Tensors, optimizer: Tensors, keep: int) -> None:
        self.group.check_weights(weights)
        checkpoint = Checkpoint(state, weights, optimizer)
        self.group.on_rank_zero(lambda: self.run.save(checkpoint, keep))

    def load_newest(self) -> Checkpoint | None:
        """Let rank 0 find the newest intact checkpoint, and the others read the same one.

        They could find others: a disk that ranks share may be damaged for one of them alone.
        """
        checkpoint = self.group.on_all_ranks(self._load_newest_on_rank_zero)
        found = None if checkpoint is None else [checkpoint.step, checkpoint.sha256]
        chosen = self.group.broadcast_object(found)
        if chosen is None:
            return None
        step, sha256 = chosen

        def load_chosen() -> Checkpoint:
            return checkpoint or self._load_exactly(step, sha256)

        return self.group.on_all_ranks(load_chosen)

    def _load_newest_on_rank_zero(self) -> Checkpoint | None:
        return self.run.load_newest() if self.group.rank == 0 else None

    def _load_exactly(self, step: int, sha256: str) -> Checkpoint:
        """Load the checkpoint that rank 0 has chosen; CheckpointError if it is another here."""
        checkpoint = self.run.load_checkpoint(step, with_optimizer=True)
        if checkpoint.sha256 != sha256:
            raise CheckpointError(
                f"{self.run.checkpoints}: step {step} is not the checkpoint that rank 0 reads; "
                f"give all ranks the same directory"
            )
        return checkpoint

    def load_best_of(self, base: RunDirectory) -> Checkpoint:
        return self.group.on_all_ranks(base.load_best)


class ShardedCheckpoints:
    """Each rank writes its rows of every tensor, and reads its rows of what any number wrote."""

    def __init__(self, run: RunDirectory, group: Group, placement: "Sharded") -> None:
        self.run = run
        self.group = group
        self.placement = placement

    def are_finite(self, weights: Tensors) -> bool:
        slices = self.placement.to_row_slices(weights)
        local_rows = {name: row_slice.rows for name, row_slice in slices.items()}
        return all(self.group.all_gather_object(not find_infinite(local_rows)))

    def save(self, state: dict[str, Any], weights: Tensors, optimizer: Tensors, keep: int) -> None:
        """Let each rank write its rows, then rank 0 the manifest, which makes them a checkpoint."""
        slices = {
            "model": self.placement.to_row_slices(weights),
            "optimizer": self.placement.to_row_slices(optimizer),
        }
        self.group.on_rank_zero(self.run.begin_save)
        written = self.group.on_all_ranks(
            lambda: self.run.save_shard(
                state["step"], self.group.rank + 1, self.group.world_size, slices
            )
        )
        manifest: dict[str, Any] = {}
        for entries in self.group.all_gather_object(written):
            manifest |= entries
        self.group.on_rank_zero(lambda: self.run.finish_save(state, manifest, keep))

    def load_newest(self) -> Checkpoint | None:
        return self.run.load_newest(self._load_rows)

    def _load_rows(self, step: int) -> Checkpoint:
        """Load this rank's rows of a step; CheckpointError on all ranks if one cannot.

        Ranks read different files, so each may meet damage that the others do not see. They must
        agree, or they would continue from different steps.
        """
        checkpoint = None
        damage: list[str] = []
        try:
            checkpoint = self.run.load_checkpoint(
                step, with_optimizer=True, spec=self.placement.spec
            )
        except CheckpointError as error:
            damage = list(error.lines)
        damages = [line for lines in self.group.all_gather_object(damage) for line in lines]
        if checkpoint is None or damages:
            raise CheckpointError(*damages)
        return checkpoint

    def load_best_of(self, base: RunDirectory) -> Checkpoint:
        return self.group.on_all_ranks(lambda: base.load_best(self.placement.spec))
