"""What is a checkpoint, and who keeps its rows?

The state of a model exactly where a token path ends: its rows, its recurrent state and the
tokens really fed, never one without the other. Its rows are kept by a holder, and its recurrent
state in one of two ways:

    whole      the holder's sequence ends with it: seeding a lane copies the sequence, moves nothing
    snapshot   it lies in host memory; the holder's rows are those of a longer path, or stripped

    holder     rows 0 ───────────●──────────●───────────────●   one sequence, or host memory
                             snapshot   snapshot      whole or snapshot

So one sequence serves every branch point along its path. A holder is resident (a sequence of the
pool, a running lane's too) or exported (its rows lie in host memory). A snapshot lives exactly as
long as its rows: it is entered in its holder, and what empties or cuts the holder drops it first.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "turn", "resend", "reply", "partial", "shared", "system", "mark", "message", "anchor"
]
"""Why a checkpoint was kept.

turn     where a chat's input ends, before the generation prompt: serves the next turn
resend   one token before the end of the prompt: serves the same prompt again
reply    where generation ended: serves a caller who extends the reply verbatim
partial  where a cancelled or a preempted request stood
shared   where requests go their own way: those waiting behind this one, or those seen before
system   where the system and tools block ends: serves every chat under the same one
mark     where the caller asked for one
message  where a message of the user starts: serves who edits that message
anchor   a place on a long way, for whoever leaves it somewhere
"""

Tier = Literal["resident", "exported"]

Conversation = str | int
"""A chat's name as its caller gave it, or a number of the pool's own; the two never meet."""

_WIDTH = 4  # bytes of one packed token
_COMMON = frozenset[Kind](("shared", "system", "mark", "message", "anchor"))
_WAYSIDE = frozenset[Kind](("message", "anchor"))


@dataclass(slots=True, eq=False)
class Holder:
    """Rows of the first tokens of `trunk`, kept for its checkpoints; compared by identity.

    `sequence` is where they are resident, None once they take `n_bytes` of host memory. `is_lane`:
    a request runs there and goes on; else there are rows for `length` tokens, those of its longest
    checkpoint. `is_whole`: its sequence still ends with a recurrent state. `leases` count
    transfers that need the rows to stay.
    """

    sequence: int | None
    trunk: bytes = field(repr=False)
    is_lane: bool = False
    is_whole: bool = True
    length: int = 0
    n_bytes: int = 0
    leases: int = 0
    checkpoints: dict[Checkpoint, None] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> bytes:
        """The packed tokens whose rows it keeps; of a lane, of those its checkpoints need."""
        return self.trunk[: _WIDTH * (self.longest() if self.is_lane else self.length)]

    def covers(self, path: bytes, n_rows: int) -> bool:
        """Return whether a path's rows are among the first `n_rows` kept here."""
        return len(path) <= _WIDTH * n_rows and self.trunk.startswith(path)

    def longest(self, without: Set[Checkpoint] = frozenset()) -> int:
        """Return the rows its checkpoints need, in tokens, once some of them are gone."""
        return max((c.length for c in self.checkpoints if c not in without), default=0)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One kept state; compared by identity. The pool alone writes to it.

    It stands for the first `length` packed tokens (`index.pack`) of `trunk`; `serial` is the
    admission that kept it, which orders the turns of one `conversation`. `is_live`: the state is
    that of its holder's sequence, else it takes `n_bytes` of host memory.

    `tick` is its last use on the pool's logical clock; `users` the conversations that started
    from it; `leases` how many running admissions and transfers need it to stay.
    """

    trunk: bytes = field(repr=False)
    length: int
    kind: Kind
    conversation: Conversation
    serial: int
    holder: Holder
    is_live: bool = True
    n_bytes: int = 0
    tick: int = 0
    is_superseded: bool = False
    leases: int = 0
    users: set[Conversation] = field(default_factory=set)

    @property
    def path(self) -> bytes:
        """The packed tokens it stands for."""
        return self.trunk[: _WIDTH * self.length]

    @property
    def sequence(self) -> int | None:
        """Where its rows are resident, None where they are exported."""
        return self.holder.sequence

    @property
    def tier(self) -> Tier:
        """Where its rows live."""
        return "exported" if self.holder.sequence is None else "resident"

    @property
    def is_held(self) -> bool:
        """Whether something under way needs it to stay."""
        return bool(self.leases or self.holder.leases)

    @property
    def is_common(self) -> bool:
        """Whether it belongs to no single turn of a chat, and so is never superseded by one."""
        return self.kind in _COMMON

    @property
    def is_wayside(self) -> bool:
        """Whether it was kept for whoever leaves the path here."""
        return self.kind in _WAYSIDE

    @property
    def is_history(self) -> bool:
        """Whether it serves only those who go back: the `history` budget counts it."""
        return self.is_wayside or (self.is_superseded and self.kind in ("turn", "reply"))


@dataclass(frozen=True, slots=True)
class Stop:
    """A position where a state is wanted. A prefill chunk ends exactly there, or, where it
    `is_soft`, the state is taken at the first chunk end at or after it.
    """

    length: int
    kind: Kind
    is_soft: bool = False
