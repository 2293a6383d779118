"""What has happened since the engine was opened, and what it holds now."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from orchestrator.engine.request import Priority
from orchestrator.pool.checkpoint import Kind


@dataclass(slots=True)
class Counters:
    """Totals since the engine was opened; the engine's thread alone writes to them.

    Tokens: `prefilled` prompt tokens evaluated, `reused` not evaluated because a checkpoint held
    them, `replayed` evaluated again after a preemption, `sampled`. `waited` requests that waited
    for a prefix, `preempted` lanes that made way. `recoveries`: how often every state in the pool
    was dropped after a failed decode. Checkpoints: `kept`, `evicted` (dropped for good),
    `exported`, `imported`, and `refused` (imports and copies that failed). `decode_calls` of
    llama.cpp's decode.
    """

    requests: int = 0
    prefilled: int = 0
    reused: int = 0
    replayed: int = 0
    sampled: int = 0
    waited: int = 0
    preempted: int = 0
    cancelled: int = 0
    expired: int = 0
    busy: int = 0
    kept_checkpoints: int = 0
    evicted_checkpoints: int = 0
    exported_checkpoints: int = 0
    imported_checkpoints: int = 0
    refused_checkpoints: int = 0
    recoveries: int = 0
    decode_calls: int = 0

    def snapshot(self) -> Counters:
        """Return a copy that does not change any more."""
        return replace(self)


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
    in each tier. `resident_bytes` are what the used sequences and cells take in the context,
    `exported_bytes` host memory; a budget of None is none.
    """

    lanes: int
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
    running: tuple[LaneView, ...] = field(default_factory=tuple)
