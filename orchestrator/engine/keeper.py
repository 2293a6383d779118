"""Who carries out what the pool decides?

The keeper has the pool, the memory and the mover, and keeps the three in step: a plan comes from
the pool, the state is moved, and the pool is told. It knows lanes, but no queue and no clock.

Invariant: between two calls every sequence holds exactly what the pool says it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from orchestrator.engine.counters import Counters
from orchestrator.engine.lane import Lane
from orchestrator.engine.memory import Memory
from orchestrator.engine.mover import Mover, Parcel
from orchestrator.errors import InvalidArgument, PoolFull, StateRefused
from orchestrator.pool.checkpoint import Checkpoint, Kind
from orchestrator.pool.plans import Admission, Budgets, Export, Keep, Weights
from orchestrator.pool.pool import Pool
from orchestrator.runtime.protocol import Limits, Runtime

log = logging.getLogger("orchestrator.engine")

_STATE_FRAME = 16 << 10  # headers of a saved state, generously
_ROW_FRAME = 32  # ids, positions and a share of a slice's header, per token


class Keeper:
    """Checkpoints as they are kept, moved and given up; see the module's head."""

    def __init__(self, runtime: Runtime, budgets: Budgets, counters: Counters) -> None:
        self.memory = Memory(runtime)
        self.mover = Mover(self.memory)
        self._counters = counters
        self._saves: dict[int, Keep] = {}  # what goes to host memory from a lane, by sequence
        limits, kind = runtime.limits, runtime.model.memory
        self._divisible = kind == "attention" and limits.copies
        self.pool = Pool(
            limits.n_sequences,
            self.memory.ledger,
            divisible=kind == "attention",
            budgets=budgets,
            weights=_weights(limits),
            resident=limits.copies,
            low_lanes=kind == "recurrent" and limits.copies,
        )

    @property
    def divisible(self) -> bool:
        """Whether rows can be cut anywhere, also those of a running lane."""
        return self._divisible

    # ---- what leaves --------------------------------------------------------------------------

    def drop(self, checkpoints: Iterable[Checkpoint], *, scrub: bool = False) -> None:
        """Give checkpoints up for good."""
        for checkpoint in list(checkpoints):
            self.mover.forget(checkpoint)
            if checkpoint.sequence is not None:
                empty = self.memory.scrub if scrub else self.memory.clear
                empty(checkpoint.sequence)
            self.pool.drop(checkpoint)
            self._counters.evicted_checkpoints += 1

    def clear_way(self, checkpoints: Iterable[Checkpoint]) -> bool:
        """Let checkpoints leave their sequences: to host memory if that is worth it.

        Returns False while some are on their way; ask again after the next slice. Nothing is
        given up before all that is to be moved has been.
        """
        staying = [checkpoint for checkpoint in checkpoints if self._send(checkpoint) is None]
        if self.mover.is_busy and any(self.mover.is_moving(c) for c in checkpoints):
            return False
        self.drop(staying)
        return True

    def clear_now(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Let checkpoints leave their sequences at once, without waiting for slices."""
        for checkpoint in list(checkpoints):
            if self._send(checkpoint) is not None:
                self.mover.finish(checkpoint)
            if checkpoint.sequence is not None and checkpoint in self.pool.checkpoints:
                self.drop([checkpoint])

    def _send(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Start moving a checkpoint to host memory; None where it is not to go there."""
        if checkpoint.sequence is None or self.mover.is_moving(checkpoint):
            return checkpoint if self.mover.is_moving(checkpoint) else None
        export = self.pool.plan_export(checkpoint)
        if export is None:
            return None
        self._begin(export, checkpoint.sequence)
        return checkpoint

    def _begin(self, export: Export, sequence: int) -> None:
        checkpoint = export.checkpoint
        self.drop(export.evicted)
        self.pool.exporting(export)

        def arrived(parcel: Parcel | None) -> None:
            if parcel is None:
                self.drop([checkpoint])
                return
            self.memory.clear(sequence)
            self.pool.exported(checkpoint, parcel.n_bytes)
            self._counters.exported_checkpoints += 1

        self.mover.begin_export(checkpoint, sequence, arrived)

    def lose(self) -> None:
        """Empty every sequence; what is in host memory stays."""
        self.mover.reset()
        self._saves.clear()
        self.memory.reset()
        for checkpoint in self.pool.lose():
            self.mover.forget(checkpoint)
        self._shrink()

    def resize(self, budgets: Budgets) -> None:
        """Take other budgets and make what is there fit them."""
        self.pool.budgets = budgets
        for sequence in list(self._saves):
            self._stop_saving(sequence)
        for checkpoint in self.pool.moving:
            self.mover.forget(checkpoint)
            self.pool.stayed(checkpoint)
        self.fit()

    def fit(self) -> None:
        """Let leave what no longer fits the budgets, now that nothing else holds it."""
        self._shrink()
        self.clear_now(self.pool.plan_room(0) or ())

    # ---- lanes come and go --------------------------------------------------------------------

    def admit(self, admission: Admission, seated: Callable[[bool], None]) -> bool:
        """Give a lane its sequence and what it starts from.

        `seated` is told True once that stands, at once or slices later, or False when an import
        was refused: the lane's sequence is empty then and the checkpoint is gone. Returns False
        when a copy is refused: then there is no lane.
        """
        seed = admission.seed
        if seed is None:
            self.pool.admitted(admission)
            seated(True)
        elif seed.checkpoint.sequence is None:
            self._import(admission, seed.checkpoint, seed.length, seated)
        elif self._sow(admission, seed.checkpoint.sequence, seed.length):
            self.pool.admitted(admission)
            seated(True)
        else:
            self.drop([seed.checkpoint])
            return False
        return True

    def _sow(self, admission: Admission, source: int, length: int) -> bool:
        """Put a resident checkpoint under a lane; False when it turns out to be of no use."""
        if admission.takes_over:
            return self._done(lambda: self.memory.cut(source, length))
        return self._done(lambda: self.memory.copy(source, admission.sequence, length))

    def _done(self, change: Callable[[], None]) -> bool:
        """Change the memory; False when it refuses, which costs a checkpoint and nothing else."""
        try:
            change()
        except (InvalidArgument, StateRefused, PoolFull) as refusal:
            log.warning("a checkpoint is given up: %s", refusal)
            self._counters.refused_checkpoints += 1
            return False
        return True

    def _import(
        self,
        admission: Admission,
        checkpoint: Checkpoint,
        length: int,
        seated: Callable[[bool], None],
    ) -> None:
        self.pool.admitted(admission)
        checkpoint.leases += 1

        def arrived(stands: bool) -> None:
            self.pool.arrived(admission)
            checkpoint.leases -= 1
            if stands:
                self.memory.cut(admission.sequence, length)
                self._counters.imported_checkpoints += 1
            else:
                self._counters.refused_checkpoints += 1
                if checkpoint in self.pool.checkpoints:  # another import of it may have been first
                    self.drop([checkpoint])
            self._shrink()
            seated(stands)

        self.mover.begin_import(checkpoint, admission.sequence, arrived)

    def release(self, lane: Lane, kind: Kind | None, *, parks: bool = False) -> Checkpoint | None:
        """End a lane; its state is kept as a checkpoint of `kind` where that is of use.

        A lane that `parks` goes on later: its state is kept even if the request keeps none.
        """
        self._stop_saving(lane.sequence)
        if not lane.is_ready:
            self._abandon(lane)
            kind = None
        admission = replace(lane.admission, keeps=True) if parks else lane.admission
        plan = self.pool.plan_release(admission, lane.path, kind)
        self.drop(plan.evicted)
        checkpoint, sequence = plan.checkpoint, plan.sequence
        if checkpoint is not None and checkpoint.sequence is None:
            checkpoint = self._saved(checkpoint, sequence)
        elif checkpoint is not None and checkpoint.sequence != sequence:
            checkpoint = self._copied(checkpoint, sequence)
        if checkpoint is None or checkpoint.sequence != sequence:
            self.memory.clear(sequence)
        self.pool.released(plan.with_checkpoint(checkpoint))
        self._counters.kept_checkpoints += checkpoint is not None
        if not parks:  # a lane may pass the resident budget, what it leaves behind may not
            self.clear_now(self.pool.plan_room(0) or ())
        return checkpoint

    def _abandon(self, lane: Lane) -> None:
        """Stop filling the sequence of a lane that ends before its seed stood."""
        self.mover.abandon(lane.sequence)
        seed = lane.admission.seed
        if seed is not None and seed.checkpoint in self.pool.checkpoints:
            seed.checkpoint.leases -= 1
            self._shrink()

    def _shrink(self) -> None:
        """Give up what no longer fits host memory, and only a lease kept there."""
        self.drop(self.pool.plan_shrink())

    def _copied(self, checkpoint: Checkpoint, source: int) -> Checkpoint | None:
        """Copy a lane's state to a checkpoint's sequence; None when that is refused."""
        target, length = checkpoint.sequence, checkpoint.length
        if target is None:
            return None
        done = self._done(lambda: self.memory.copy(source, target, length))
        return checkpoint if done else None

    def _saved(self, checkpoint: Checkpoint, sequence: int) -> Checkpoint | None:
        """Save a lane's state to host memory; None when it could not be."""
        parcel = self.mover.save(checkpoint, sequence)
        if parcel is None:
            return None
        checkpoint.n_bytes = parcel.n_bytes
        self._counters.exported_checkpoints += 1
        return checkpoint

    def keep(self, lane: Lane, kind: Kind, length: int | None = None) -> bool:
        """Keep the state of a lane where it stands, or of its first `length` rows.

        Returns False while what has to leave for it, or the state itself, is on its way: the lane
        must not go on, ask again after the next slice. True does not say that it was worth it.
        """
        if lane.sequence in self._saves:
            return False
        path = lane.path if length is None else lane.known[: 4 * length]
        plan = self.pool.plan_keep(lane.admission, path, kind)
        if plan is None or (plan.checkpoint.sequence is None and path != lane.path):
            return True
        if not self.clear_way(plan.evicted):
            return False
        if plan.checkpoint.sequence is None:
            self._begin_saving(lane, plan)
            return False
        if self._copied(plan.checkpoint, lane.sequence) is not None:
            self.pool.kept(plan)
            self._counters.kept_checkpoints += 1
        return True

    def _begin_saving(self, lane: Lane, plan: Keep) -> None:
        """Move a lane's state to host memory, slice by slice; the lane goes on afterwards."""
        sequence = lane.sequence

        def arrived(parcel: Parcel | None) -> None:
            del self._saves[sequence]
            lane.owed = None
            if parcel is None:
                self.pool.unsaved(plan)
                return
            plan.checkpoint.n_bytes = parcel.n_bytes
            self.pool.kept(plan)
            self._counters.kept_checkpoints += 1
            self._counters.exported_checkpoints += 1

        self.pool.saving(plan)
        self._saves[sequence] = plan
        self.mover.begin_export(plan.checkpoint, sequence, arrived)

    def _stop_saving(self, sequence: int) -> None:
        """Drop what of a lane's state is on its way to host memory."""
        plan = self._saves.pop(sequence, None)
        if plan is not None:
            self.mover.forget(plan.checkpoint)
            self.pool.unsaved(plan)

    def forget(self, conversation: str) -> None:
        """Give up what a conversation alone kept or used, also what is on its way out."""
        kept = self.pool.plan_forget(conversation)
        self.drop(c for c in kept if c.leases == self.mover.is_moving(c))


def _weights(limits: Limits) -> Weights:
    """Return what a saved state takes at most: its rows and its recurrent half, framed."""
    return Weights(limits.state_bytes + _STATE_FRAME, limits.cell_bytes + _ROW_FRAME)
