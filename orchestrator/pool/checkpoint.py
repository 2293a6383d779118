"""What is a checkpoint?

The state of a model exactly where a token path ends: its rows, its recurrent state and the
tokens really fed, never one without the other. It is resident, in a sequence of the pool, and
seeding a lane from it copies no cell; or exported, as bytes in host memory, and takes none.
"""

from __future__ import annotations

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
shared   where requests that waited behind this one go their own way
system   where the system and tools block ends: serves every chat under the same one
mark     where the caller asked for one
message  where a message of the user starts: serves an edit of that message
anchor   somewhere along a long prompt: serves what parts from it at no other point
"""

Tier = Literal["resident", "exported"]

Conversation = str | int
"""A chat's name as its caller gave it, or a number of the pool's own; the two never meet."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One kept state; compared by identity. The pool alone writes to it.

    `path` are the packed tokens (`index.pack`) it stands for, `length` of them; `serial` is the
    admission that kept it, which orders the turns of one `conversation`. `sequence` is where it
    is resident, None once it is exported and takes `n_bytes` of host memory.

    `tick` is its last use on the pool's logical clock; `users` the conversations that started
    from it; `leases` how many running admissions and transfers need it to stay.
    """

    path: bytes
    length: int
    kind: Kind
    conversation: Conversation
    serial: int
    sequence: int | None
    n_bytes: int = 0
    tick: int = 0
    is_superseded: bool = False
    leases: int = 0
    users: set[Conversation] = field(default_factory=set)

    @property
    def tier(self) -> Tier:
        """Where it lives."""
        return "exported" if self.sequence is None else "resident"

    @property
    def is_common(self) -> bool:
        """Whether it belongs to no single turn of a chat, and so is never superseded by one."""
        return self.kind in ("shared", "system")


@dataclass(frozen=True, slots=True)
class Stop:
    """A position where a state is wanted; a prefill chunk must end there.

    `is_soft`: it costs no pass of its own, the state is kept at the first chunk end at or after it.
    """

    length: int
    kind: Kind
    is_soft: bool = False
