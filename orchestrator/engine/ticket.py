"""A request on its way: who listens, when it came, and whether it is still wanted.

A ticket waits, is taken into a lane, may be put back (preempted) with all it has said, and is
answered once. Anybody may cancel it at any time from any thread: a ticket that has never run is
answered there and then, one that runs before its next token or chunk.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.engine.request import (
    PRIORITIES,
    Event,
    Finished,
    FinishReason,
    Outcome,
    Request,
    Timings,
    Usage,
)
from orchestrator.errors import OrchestratorError
from orchestrator.pool.index import pack

if TYPE_CHECKING:
    from orchestrator.engine.lane import Lane

Listener = Callable[[Event | OrchestratorError], None]
Clock = Callable[[], float]

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Ticket:
    """One submitted request.

    `path` is its packed prompt. `lane` is where it stood when it was preempted, None before it
    ever ran; `patience` the steps it will still wait for a prefix that another lane reads. It has
    been in the queue for `waited` seconds in all, not counting those since `queued`; it
    last left the queue at `seated`.
    """

    request: Request
    listener: Listener
    clock: Clock
    patience: int = 0
    submitted: float = 0.0
    waited: float = 0.0
    queued: float | None = None
    seated: float = 0.0
    path: bytes = b""
    number: int = field(default_factory=lambda: next(_numbers))
    lane: Lane | None = None
    reusable: tuple[int, int] = (-1, 0)  # version of the pool, and what it would reuse then
    is_cancelled: bool = False
    is_answered: bool = False
    _is_taken: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Note when it came, and pack its prompt while the caller's thread has time for it."""
        self.submitted = self.clock()
        self.path = pack(self.request.tokens)

    @property
    def rank(self) -> int:
        """0 for interactive, higher for what may wait."""
        return PRIORITIES.index(self.request.priority)

    @property
    def has_expired(self) -> bool:
        """Whether its deadline has passed."""
        deadline = self.request.deadline
        return deadline is not None and self.clock() - self.submitted >= deadline

    def take(self) -> bool:
        """Take it out of the queue; False when it was answered in the meantime."""
        with self._lock:
            self._is_taken = True
            return not self.is_answered

    def cancel(self) -> None:
        """Ask for its end; safe in any thread, harmless twice."""
        with self._lock:
            self.is_cancelled = True
            if self._is_taken or self.is_answered:
                return
            self.is_answered = True
        self.listener(Finished(self.never_ran("cancelled")))

    def answer(self, last: Finished | OrchestratorError) -> None:
        """Give its last event, unless it has had one."""
        with self._lock:
            if self.is_answered:
                return
            self.is_answered = True
        self.listener(last)

    def never_ran(self, reason: FinishReason) -> Outcome:
        """Return the outcome of a request that ended before it got a lane."""
        waited = self.clock() - self.submitted
        usage = Usage(len(self.request.tokens), 0, 0, 0)
        return Outcome("", (), reason, usage, Timings(waited, None, 0.0, 0.0, waited))
