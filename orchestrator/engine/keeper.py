"""Who carries out what the pool decides?

The keeper has the pool, the memory and the mover, and keeps the three in step: a plan comes from
the pool, the state is moved, and the pool is told. It knows lanes, but no queue and no clock.

Invariant: between two calls every sequence holds exactly what the pool says it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from orchestrator.engine.counters import Counters
from orchestrator.engine.lane import Lane
from orchestrator.engine.memory import Memory
from orchestrator.engine.mover import Mover, Parcel
from orchestrator.engine.pace import Pace
from orchestrator.engine.request import Request
from orchestrator.errors import BackendError, DecodeFailed, InvalidArgument
from orchestrator.pool.book import Seed
from orchestrator.pool.checkpoint import Checkpoint, Holder, Kind
from orchestrator.pool.losses import LossCause, Losses
from orchestrator.pool.placement import Costs, thinned
from orchestrator.pool.plans import TOKEN_WIDTH, Admission, Budgets, Export, Keep, Weights
from orchestrator.pool.pool import Forms, Pool
from orchestrator.runtime.protocol import Limits, MemoryKind, Runtime

log = logging.getLogger("orchestrator.engine")

_STATE_FRAME = 16 << 10  # headers of a saved state, generously
_ROW_FRAME = 32  # ids, positions and a share of a slice's header, per token


class Keeper:
    """Checkpoints as they are kept, moved and given up; see the module's head."""

    def __init__(
        self,
        runtime: Runtime,
        budgets: Budgets,
        counters: Counters,
        losses: Losses,
        n_lanes: int = 1,
    ) -> None:
        self.memory = Memory(runtime)
        self.mover = Mover(self.memory)
        self._counters = counters
        self._losses = losses
        self._saves: dict[int, Keep] = {}  # what goes to host memory from a lane, by sequence
        limits, kind = runtime.limits, runtime.model.memory
        self._divisible = kind == "attention" and limits.copies
        self.pool = Pool(
            limits.n_sequences,
            self.memory.ledger,
            forms=Forms(
                divisible=kind == "attention",
                resident=limits.copies,
                low_lanes=kind == "recurrent" and limits.copies,
                snapshots=limits.snapshots,
                stateful=kind == "recurrent",
                spares_first=n_lanes == 1,
            ),
            budgets=budgets,
            weights=_weights(limits, kind, self.mover.slice),
        )

    def costs(self, pace: Pace) -> Costs:
        """Return what a state costs and saves now; how many there may be is the pool's to say."""
        return pace.costs(self.pool.state_bytes, 0)

    def reply_step(self, request: Request, pace: Pace) -> int:
        """Return after how many tokens of a reply a state is to be kept, 0 for never."""
        if not request.use_cache or request.one_off or not self.pool.keeps_in_replies:
            return 0
        return self.costs(pace).reply_step

    @property
    def divisible(self) -> bool:
        """Whether rows can be cut anywhere, also those of a running lane."""
        return self._divisible

    # ---- what leaves --------------------------------------------------------------------------

    def evict(self, checkpoints: Iterable[Checkpoint], cause: LossCause = "evicted") -> None:
        """Give up what somebody may miss; it is remembered where it stood."""
        leaving = list(checkpoints)
        for checkpoint in leaving:
            if not checkpoint.is_superseded:
                self._losses.note(checkpoint.trunk, checkpoint.length, cause)
        self.drop(leaving)

    def drop(self, checkpoints: Iterable[Checkpoint], *, scrub: bool = False) -> None:
        """Give checkpoints up for good, and the rows that no other one needs."""
        holders: dict[Holder, None] = {}
        for checkpoint in list(checkpoints):
            self.mover.forget(checkpoint)
            holders[checkpoint.holder] = None
            self.pool.drop(checkpoint)
            self._counters.evicted_checkpoints += 1
        for holder in holders:
            self._settle(holder, scrub=scrub)

    def _settle(self, holder: Holder, *, scrub: bool = False) -> None:
        """Let a holder keep the rows that its checkpoints need, and no others."""
        sequence, longest = holder.sequence, holder.longest()
        if holder.is_lane:
            return
        if self.mover.is_moving(holder):
            self.mover.stop(holder)
            if longest:
                self.pool.stayed(holder)
        if sequence is None:
            row_bytes = self.mover.trim(holder, longest)
            if longest:
                self.pool.trim(holder, row_bytes)
        elif longest:
            self._strip(holder, sequence, longest)
        else:
            (self.memory.scrub if scrub else self.memory.clear)(sequence)

    def _strip(self, holder: Holder, sequence: int, length: int) -> None:
        """Cut a resident holder to `length`; unless its state is still of use it loses that too."""
        if any(checkpoint.is_live for checkpoint in holder.checkpoints):
            return
        if holder.is_whole and not self._done(lambda: self.memory.strip(sequence)):
            holder.length = 0
            self.evict(holder.checkpoints, "refused")  # it holds nothing now
            return
        holder.is_whole, holder.length = False, length
        if self.memory.ledger.length(sequence) > length:
            self.memory.cut(sequence, length)

    def clear_for(self, admission: Admission) -> bool:
        """Let leave what is in an admission's way, as `clear_way` does; its seed stays for it."""
        if admission.seed is None:
            return self.clear_way(admission.evicted)
        seed = admission.seed.checkpoint
        overrun = [seed] if admission.takes_over else []  # its rows are about to be cut
        seed.leases += 1
        try:
            return self.clear_way(admission.evicted, overrun)
        finally:
            seed.leases -= 1

    def clear_way(
        self, checkpoints: Iterable[Checkpoint], others: Iterable[Checkpoint] = ()
    ) -> bool:
        """Let checkpoints leave their sequences: to rows that stay anyway, or to host memory.

        Rows of the holders of `others` do not stay either. Returns False while some are on their
        way; ask again after the next slice. Nothing is given up before all that is to be moved
        has been.
        """
        leaving = {checkpoint: checkpoint.holder for checkpoint in checkpoints}
        shrinking = {*leaving.values(), *(checkpoint.holder for checkpoint in others)}
        sent = [holder for holder in _whole_holders(leaving) if self._send(holder, shrinking)]
        if any(self.mover.is_moving(holder) for holder in sent):
            return False
        self._drop_stayed(leaving)
        return True

    def clear_now(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Let checkpoints leave their sequences at once, without waiting for slices."""
        leaving = {checkpoint: checkpoint.holder for checkpoint in checkpoints}
        shrinking = set(leaving.values())
        for holder in _whole_holders(leaving):
            if self._send(holder, shrinking):
                self.mover.finish(holder)
        self._drop_stayed(leaving)

    def _drop_stayed(self, leaving: Mapping[Checkpoint, Holder]) -> None:
        """Give up what was to leave its sequence and found no other place."""
        there = self.pool.checkpoints
        stayed = [c for c, holder in leaving.items() if c in there and c.holder is holder]
        self.evict(c for c in stayed if c.sequence is not None)

    def _send(self, holder: Holder, shrinking: Collection[Holder]) -> bool:
        """Move a holder's checkpoints elsewhere, or begin to; False where they are not worth it.

        Not to the rows of holders that are `shrinking`.
        """
        if holder.sequence is None:
            return False
        if self.mover.is_moving(holder):
            return True
        if len(holder.checkpoints) == 1 and self._fold(*holder.checkpoints, shrinking=shrinking):
            return True
        export = self.pool.plan_export(holder)
        if export is None:
            return False
        self._begin(export, holder.sequence)
        return True

    def _fold(self, checkpoint: Checkpoint, *, shrinking: Collection[Holder]) -> bool:
        """Make a whole checkpoint a snapshot on rows that stay anyway, where there are some."""
        fold, sequence = self.pool.plan_fold(checkpoint, shrinking), checkpoint.sequence
        if fold is None or sequence is None:
            return False
        self.evict(fold.evicted)
        if not fold.holder.checkpoints and not fold.holder.is_lane:
            return False  # it could not be stripped
        n_bytes = self.mover.take(checkpoint, sequence)
        if n_bytes is None:
            return False
        self.memory.clear(sequence)
        self.pool.folded(fold, n_bytes)
        return True

    def _begin(self, export: Export, sequence: int) -> None:
        holder = export.holder
        self.evict(export.evicted)
        if not holder.checkpoints:
            return  # it could not be stripped
        self.pool.exporting(export)

        def arrived(parcel: Parcel | None) -> None:
            if parcel is None:
                self.evict(holder.checkpoints, "refused")
                return
            self.memory.clear(sequence)
            self.pool.exported(holder, len(parcel.state), parcel.row_bytes)
            self._counters.exported_checkpoints += len(holder.checkpoints)

        self.mover.begin_export(holder, sequence, arrived)

    def lose(self) -> None:
        """Empty every sequence; what is in host memory stays."""
        self.mover.reset()
        self._saves.clear()
        self.memory.reset()
        for checkpoint in self.pool.lose():
            self._losses.note(checkpoint.trunk, checkpoint.length, "evicted")
        self.mover.retain(self.pool.checkpoints)
        self._shrink()

    def resize(self, budgets: Budgets) -> None:
        """Take other budgets and make what is there fit them."""
        self.pool.budgets = budgets
        for sequence in list(self._saves):
            self._stop_saving(sequence)
        for holder in self.pool.moving:
            self.mover.stop(holder)
            self.pool.stayed(holder)
        self.fit()

    def fit(self) -> None:
        """Let leave what no longer fits the budgets, now that nothing else holds it."""
        self._shrink()
        self.drop(self.pool.plan_history())
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
        elif self._sow(admission, seed):
            self.pool.admitted(admission)
            seated(True)
        else:
            lost = seed.checkpoint.holder.checkpoints if admission.takes_over else [seed.checkpoint]
            there = [c for c in lost if c in self.pool.checkpoints]
            self.evict(there, "refused")  # a sequence that was to be taken over holds nothing now
            return False
        return True

    def _sow(self, admission: Admission, seed: Seed) -> bool:
        """Put a resident checkpoint under a lane; False when it turns out to be of no use."""
        checkpoint, sequence = seed.checkpoint, admission.sequence
        source = checkpoint.holder.sequence
        if source is None or checkpoint not in self.pool.checkpoints:
            return False  # what made way on its rows may have cost it too
        if checkpoint.is_live and admission.takes_over:
            return self._done(lambda: self.memory.cut(sequence, seed.length))
        if checkpoint.is_live:
            return self._done(lambda: self.memory.copy(source, sequence, seed.length))
        return self._done(lambda: self._lay(admission, checkpoint, source))

    def _lay(self, admission: Admission, checkpoint: Checkpoint, source: int) -> None:
        """Put a snapshot's rows and its state in the lane's sequence."""
        sequence, length = admission.sequence, checkpoint.length
        if sequence != source:
            self.memory.copy_rows(source, sequence, length)
        else:
            self.drop(admission.overrun)
            if checkpoint.holder.is_whole:
                self.memory.strip(sequence)
            self.memory.cut(sequence, length)
        self.mover.put(checkpoint, sequence)

    def _done(self, change: Callable[[], None]) -> bool:
        """Change the memory; False when it refuses, which costs a checkpoint and nothing else."""
        try:
            change()
        except DecodeFailed:
            raise
        except (InvalidArgument, BackendError, MemoryError) as refusal:
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
                    self.evict([checkpoint], "refused")
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
        checkpoint, parcel = self._left_by(plan.checkpoint, plan.sequence)
        n_bytes, row_bytes = (len(parcel.state), parcel.row_bytes) if parcel else (0, 0)
        holder = self.pool.released(plan.with_checkpoint(checkpoint), n_bytes, row_bytes)
        self._settle(holder)
        self._merge(holder)
        self._counters.kept_checkpoints += checkpoint is not None
        if not parks:  # a lane may pass the resident budget, what it leaves behind may not
            self.drop(self.pool.plan_history())
            self.clear_now(self.pool.plan_room(0) or ())
        return checkpoint

    def _left_by(
        self, checkpoint: Checkpoint | None, sequence: int
    ) -> tuple[Checkpoint | None, Parcel | None]:
        """Let the state of an ending lane be where it is planned to; None where it is not."""
        if checkpoint is None or checkpoint.sequence == sequence:
            return checkpoint, None
        if checkpoint.sequence is not None:
            return self._copied(checkpoint, sequence), None
        parcel = self.mover.save(checkpoint, sequence)
        self._counters.exported_checkpoints += parcel is not None
        return (checkpoint if parcel else None), parcel

    def _merge(self, holder: Holder) -> None:
        """Let one holder keep what several on its path did."""
        for source, target in self.pool.plan_merges(holder):
            sequence = source.sequence
            self.pool.merged(source, target)
            if sequence is not None:
                self.memory.clear(sequence)

    def _abandon(self, lane: Lane) -> None:
        """Stop filling the sequence of a lane that ends before its seed stood."""
        self.mover.abandon(lane.sequence)
        seed = lane.admission.seed
        if seed is not None and seed.checkpoint in self.pool.checkpoints:
            seed.checkpoint.leases -= 1
            self._shrink()

    def _shrink(self) -> None:
        """Give up what no longer fits host memory, and only a lease kept there."""
        self.evict(self.pool.plan_shrink())

    def _copied(self, checkpoint: Checkpoint, source: int) -> Checkpoint | None:
        """Copy a lane's state to a checkpoint's sequence; None when that is refused."""
        target, length = checkpoint.sequence, checkpoint.length
        if target is None:
            return None
        done = self._done(lambda: self.memory.copy(source, target, length))
        return checkpoint if done else None

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
        if not self.clear_way(plan.evicted, plan.dropped):
            return False
        self.evict(c for c in plan.dropped if c in self.pool.checkpoints)  # else it left for those
        if plan.checkpoint.sequence is None:
            self._begin_saving(lane, plan)
            return False
        if plan.is_snapshot:
            self._take(plan, lane.sequence)
        elif self._copied(plan.checkpoint, lane.sequence) is not None:
            self._kept(plan)
        return True

    def _take(self, plan: Keep, sequence: int) -> None:
        """Take a snapshot of a lane, on its own rows."""
        n_bytes = self.mover.take(plan.checkpoint, sequence)
        if n_bytes is not None:
            self._counters.snapshot_bytes += n_bytes
            self._kept(plan, n_bytes)

    def _kept(self, plan: Keep, n_bytes: int = 0, row_bytes: int = 0) -> None:
        self.pool.kept(plan, n_bytes, row_bytes)
        self._losses.regained(plan.checkpoint.trunk, plan.checkpoint.length)
        self._counters.kept_checkpoints += 1
        self.drop(self.pool.plan_history())

    def thin(self, lane: Lane) -> None:
        """Drop the states inside a running reply that one further on makes pointless."""
        own = self.pool.inside_reply(lane.admission, lane.n_prompt)
        staying = thinned([length - lane.n_prompt for length in own], lane.fed - lane.n_prompt)
        kept = {at + lane.n_prompt for at in staying}
        self.drop([c for length, c in own.items() if length not in kept and not c.is_held])

    def _begin_saving(self, lane: Lane, plan: Keep) -> None:
        """Move a lane's state to host memory, slice by slice; the lane goes on afterwards."""
        sequence = lane.sequence

        def arrived(parcel: Parcel | None) -> None:
            del self._saves[sequence]
            lane.owed = None
            if parcel is None:
                self.pool.unsaved(plan)
                return
            self._kept(plan, len(parcel.state), parcel.row_bytes)
            self._counters.exported_checkpoints += 1

        self.pool.saving(plan)
        self._saves[sequence] = plan
        self.mover.begin_saving(plan.checkpoint, sequence, arrived)

    def _stop_saving(self, sequence: int) -> None:
        """Drop what of a lane's state is on its way to host memory."""
        plan = self._saves.pop(sequence, None)
        if plan is not None:
            self.mover.forget(plan.checkpoint)
            self.pool.unsaved(plan)

    def condemn(self, lane: Lane) -> None:
        """Give up all that may hold what a lane left there, and overwrite its sequence."""
        serial, rows = lane.admission.serial, self.pool.lane(lane.sequence)
        kept = [c for c in self.pool.checkpoints if c.serial == serial or c.holder is rows]
        self.drop(kept, scrub=True)
        self.memory.scrub(lane.sequence)

    def forget(self, conversation: str) -> None:
        """Give up what a conversation alone kept or used, also what is on its way out."""
        kept = self.pool.plan_forget(conversation)
        self.drop([c for c in kept if not c.leases])


def _whole_holders(checkpoints: Collection[Checkpoint]) -> list[Holder]:
    """Return the holders all of whose checkpoints are among these."""
    holders = dict.fromkeys(checkpoint.holder for checkpoint in checkpoints)
    return [h for h in holders if all(c in checkpoints for c in h.checkpoints)]


def _weights(limits: Limits, memory: MemoryKind, slice_: int) -> Weights:
    """Return what a saved state takes at most: its rows, where there are, and its recurrent half.

    The tokens it belongs to are saved with either.
    """
    cell = TOKEN_WIDTH if memory == "recurrent" else limits.cell_bytes + _ROW_FRAME
    return Weights(limits.state_bytes + _STATE_FRAME, cell, slice_)
