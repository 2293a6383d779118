"""What does the engine hold right now?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.engine.counters import Counters
from orchestrator.engine.keeper import Keeper
from orchestrator.engine.lane import Lane
from orchestrator.engine.request import Priority
from orchestrator.engine.seats import Seats
from orchestrator.pool.checkpoint import Checkpoint, Kind
from orchestrator.runtime.protocol import Limits


@dataclass(frozen=True, slots=True)
class LaneView:
    """One running request: what it does, and how many of its `known` tokens are `fed`."""

    sequence: int
    priority: Priority
    doing: str
    fed: int
    known: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the pool holds now, in sequences, cells (one per token) and bytes.

    `cells_total` is None where tokens take no cell; `cells_budget` is what checkpoints may fill,
    lanes included (None: all). `checkpoints` counts by kind, `resident` and `exported` the same
    in each tier; of the resident ones `snapshots` have their recurrent state in host memory, where
    those take `snapshot_bytes`. `resident_bytes` are what the used sequences and cells take in the
    context, `exported_bytes` all of host memory; a budget of None is none.
    """

    lanes: int
    lanes_total: int
    queued: int
    paused: int
    sequences_used: int
    sequences_total: int
    cells_used: int
    cells_total: int | None
    cells_budget: int | None
    checkpoints: dict[Kind, int]
    resident: dict[Kind, int]
    exported: dict[Kind, int]
    resident_bytes: int
    exported_bytes: int
    exported_bytes_budget: int
    exported_tokens: int
    exported_tokens_budget: int | None
    snapshots: int = 0
    snapshot_bytes: int = 0
    running: tuple[LaneView, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the pool holds now, and totals since the engine was opened."""

    occupancy: Occupancy
    counters: Counters

    @property
    def checkpoints(self) -> Mapping[Kind, int]:
        """How many checkpoints there are of each kind."""
        return self.occupancy.checkpoints


def observe(seats: Seats, keeper: Keeper, limits: Limits) -> Occupancy:
    """Return what lanes, queue and pool hold."""
    pool, ledger, waiting = keeper.pool, keeper.memory.ledger, seats.scheduler
    used = limits.n_sequences - pool.free_sequences
    budgets = pool.budgets
    snapshots = [c for c in pool.book.resident() if not c.is_live]
    return Occupancy(
        lanes=len(seats.lanes),
        lanes_total=seats.n_lanes,
        queued=len(waiting),
        paused=sum(ticket.lane is not None for ticket in waiting),
        sequences_used=used,
        sequences_total=limits.n_sequences,
        cells_used=ledger.used,
        cells_total=None if ledger.free is None else limits.n_cells,
        cells_budget=None if ledger.free is None else budgets.resident_cells,
        checkpoints=_kinds(pool.checkpoints),
        resident=_kinds(pool.book.resident()),
        exported=_kinds(pool.book.exported()),
        resident_bytes=used * limits.state_bytes + ledger.used * limits.cell_bytes,
        exported_bytes=pool.exported_bytes,
        exported_bytes_budget=budgets.exported_bytes,
        exported_tokens=pool.exported_tokens,
        exported_tokens_budget=budgets.exported_tokens,
        snapshots=len(snapshots),
        snapshot_bytes=sum(c.n_bytes for c in snapshots),
        running=tuple(_view(lane) for lane in seats.lanes),
    )


def _kinds(checkpoints: Iterable[Checkpoint]) -> dict[Kind, int]:
    return dict(Counter(checkpoint.kind for checkpoint in checkpoints))


def _view(lane: Lane) -> LaneView:
    doing = "reads" if lane.is_reading else "speaks"
    return LaneView(
        lane.sequence,
        lane.ticket.request.priority,
        doing if lane.is_ready else "fetches its state",
        lane.fed,
        lane.fed + lane.remaining,
    )
