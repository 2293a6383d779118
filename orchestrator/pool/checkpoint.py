"""What is a checkpoint?

The state of a model exactly where a token path ends: its rows, its recurrent state and the
tokens really fed, never one without the other. Here it is resident, in a sequence of the pool;
seeding a lane from it copies no cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["turn", "resend", "reply", "partial"]
"""Why a checkpoint was kept.

turn     where a chat's input ends, before the generation prompt: serves the next turn
resend   one token before the end of the prompt: serves the same prompt again
reply    where generation ended: serves a caller who extends the reply verbatim
partial  where a cancelled request stood
"""


Conversation = str | int
"""A chat's name as its caller gave it, or a number of the pool's own; the two never meet."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One kept state; compared by identity.

    `path` are the packed tokens (`index.pack`) that `sequence` holds; `serial` is the admission
    that kept it, which orders the turns of one `conversation`.
    """

    sequence: int
    path: bytes
    length: int
    kind: Kind
    conversation: Conversation
    serial: int


@dataclass(frozen=True, slots=True)
class Stop:
    """A position where a prefill chunk must end, because a state is wanted there."""

    length: int
    kind: Kind
