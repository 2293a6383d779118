"""What is asked of the pool, and what does it plan?

Values alone: budgets and claims go in, plans come out. A plan names what leaves and what arrives;
the engine carries it out and tells the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.errors import InvalidArgument
from orchestrator.pool.book import Seed
from orchestrator.pool.checkpoint import Checkpoint, Conversation, Holder, Stop
from orchestrator.pool.placement import Costs, Points

TOKEN_WIDTH = 4  # bytes of one packed token

UNMEASURED = Costs(0, 0.0, token_seconds=1.0, pass_seconds=6.0, n_states=0)
"""A pass as long as six tokens, as on a small model, and states for nothing."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """What checkpoints may take.

    `resident_cells` of the pool, lanes included (None: all of them); `exported_bytes` of host
    memory, for snapshots and for what is exported, and `exported_tokens` whose rows lie there
    (None: not counted); `history`: how many states may stay that only serve who goes back
    (superseded turns and replies, starts of messages, anchors) while nothing else wants their room.
    """

    resident_cells: int | None = None
    exported_bytes: int = 0
    exported_tokens: int | None = None
    history: int = 0

    def __post_init__(self) -> None:
        for name in ("resident_cells", "exported_bytes", "exported_tokens", "history"):
            value = getattr(self, name)
            if value is None and name in ("resident_cells", "exported_tokens"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{name} is {value!r}, must be a whole number of 0 or more")


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of host memory: upper bounds for a recurrent state and for the rows of a token.

    `slice`: how many tokens' rows are moved together (0: all of them).
    """

    state: int = 0
    cell: int = 0
    slice: int = 0

    def rows(self, length: int) -> int:
        """Return the bytes of `length` rows."""
        return self.cell * length

    def of(self, length: int) -> int:
        """Return the bytes of a checkpoint of `length` tokens with its rows."""
        return self.state + self.rows(length)

    def brought(self, length: int, held: int) -> int:
        """Return how many of `held` exported rows are brought back to have the first `length`."""
        return held if not self.slice else min(held, -(-length // self.slice) * self.slice)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request asks of the pool.

    `path` is its packed prompt, `turn` and `base` the lengths where its input and its system block
    end (0: none), `starts` where messages of the user start, `marks` places the caller asks for,
    `branch` the length of the longest path seen before that it begins with. `costs`: what states
    and tokens cost now, their number set aside. `reserve` cells beyond the prompt must be free as
    well: for the reply, and for what running lanes still need. `reuses`: may start from a
    checkpoint; `keeps`: may leave some. `own` is what a request that may not reuse starts from all
    the same: its own state, preempted.
    """

    path: bytes
    turn: int = 0
    base: int = 0
    conversation: Conversation | None = None
    reserve: int = 0
    reuses: bool = True
    keeps: bool = True
    own: Seed | None = None
    starts: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    branch: int = 0
    costs: Costs = UNMEASURED

    @property
    def points(self) -> Points:
        """What is known of the prompt, for placement."""
        marks = (self.starts, self.marks)
        return Points(self.length, self.turn, self.base, *marks, branch=self.branch)

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.path) // TOKEN_WIDTH


@dataclass(frozen=True, slots=True)
class Admission:
    """How a request gets a lane.

    Evict `evicted`; then, with a seed, copy it to `sequence` (or import it there, where it is
    exported), or cut it in place where `sequence` is the seed's own (no other was to be had, so
    the lane takes the holder over; `overrun` are the checkpoints beyond that length).
    """

    sequence: int
    seed: Seed | None
    evicted: tuple[Checkpoint, ...]
    stops: tuple[Stop, ...]
    conversation: Conversation
    serial: int
    keeps: bool = True
    turn: Checkpoint | None = None
    has_turn: bool = True
    trunk: bytes = b""
    overrun: tuple[Checkpoint, ...] = ()

    @property
    def takes_over(self) -> bool:
        """Whether the lane lives in the seed's own sequence."""
        return self.seed is not None and self.seed.checkpoint.sequence == self.sequence


@dataclass(frozen=True, slots=True)
class Keep:
    """Evict `evicted` from their sequences, drop `dropped`, then keep a lane's state as
    `checkpoint`, then tell `kept`.

    Its holder says how: that of the lane, then its recurrent state is saved; a spare sequence, then
    the lane is copied there; one without a sequence, then all of the lane is saved.
    """

    checkpoint: Checkpoint
    evicted: tuple[Checkpoint, ...] = ()
    dropped: tuple[Checkpoint, ...] = ()

    @property
    def is_snapshot(self) -> bool:
        """Whether the recurrent state alone is taken."""
        return self.checkpoint.holder.is_lane


@dataclass(frozen=True, slots=True)
class Release:
    """A lane ends. Without a checkpoint its sequence is cleared; a checkpoint takes the sequence
    over, or the lane is copied to the checkpoint's own (or saved, where it has none) and cleared.

    Where snapshots lie along the lane's `path`, its sequence stays as their holder, cut to what
    they need. `evicted` are checkpoints that the new one makes pointless, or that make room for it.
    `heads`: the next turn will start from it, there being no turn point.
    """

    sequence: int
    path: bytes
    checkpoint: Checkpoint | None
    evicted: tuple[Checkpoint, ...] = ()
    heads: bool = False

    def with_checkpoint(self, checkpoint: Checkpoint | None) -> Release:
        """Return what was really done, where saving the state came to nothing."""
        return replace(self, checkpoint=checkpoint)


@dataclass(frozen=True, slots=True)
class Export:
    """Drop `evicted` from host memory, then move `holder` there; at most `n_bytes` more."""

    holder: Holder
    evicted: tuple[Checkpoint, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Drop `evicted` from host memory, then save the state of the whole `checkpoint` there, as a
    snapshot on the rows of `holder`; its own sequence is free then.
    """

    checkpoint: Checkpoint
    holder: Holder
    evicted: tuple[Checkpoint, ...]
