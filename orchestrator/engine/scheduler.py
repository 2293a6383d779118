"""Whose turn is it?

Waiting requests are ordered by

    class, aged      interactive < default < background; every `ageing` seconds in the queue, those
                     before a preemption too, count as one class, so that nothing waits for ever
    share            the client that has been served least, within a class
    remaining        the shortest prefill first, within a client
    arrival          first come, first served, among equals

A client that comes back after a pause starts level with the least served of those that are here
(start-time fair queueing): idling saves nothing up. The scheduler knows no pool and no runtime.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from orchestrator.engine.ticket import Ticket
from orchestrator.errors import Busy, InvalidArgument


@dataclass(frozen=True, slots=True)
class Patience:
    """How requests wait. `n_waiting` at most; `ageing` in seconds per class; `prefix_steps` is
    how long one waits for a prefix that another is reading.
    """

    n_waiting: int = 256
    ageing: float = 30.0
    prefix_steps: int = 2000

    def __post_init__(self) -> None:
        whole = all(
            isinstance(count, int) and not isinstance(count, bool)
            for count in (self.n_waiting, self.prefix_steps)
        )
        timed = isinstance(self.ageing, int | float) and self.ageing > 0  # nor is it nan
        if not (whole and timed and self.n_waiting >= 1 and self.prefix_steps >= 0):
            raise InvalidArgument(
                f"a queue of {self.n_waiting!r} requests with ageing {self.ageing!r} s and "
                f"{self.prefix_steps!r} steps of patience cannot be; give at least 1, more than 0 "
                "and at least 0"
            )


class Shares:
    """Tokens evaluated for each client, comparable among those that are here."""

    def __init__(self) -> None:
        self._served: dict[str | None, float] = {}
        self._present: dict[str | None, int] = {}

    def arrive(self, client: str | None) -> None:
        """Note a request of a client."""
        if client not in self._present:
            floor = min((self._served[other] for other in self._present), default=0.0)
            self._served[client] = max(self._served.get(client, 0.0), floor)
        self._present[client] = self._present.get(client, 0) + 1

    def leave(self, client: str | None) -> None:
        """Note that a request of a client ended."""
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client]
            self._forget_absent()

    def _forget_absent(self) -> None:
        """Remember nothing that would make no difference, whoever left and however long ago."""
        floor = min((self._served[other] for other in self._present), default=math.inf)
        self._served = {
            client: served
            for client, served in self._served.items()
            if client in self._present or served > floor
        }

    def serve(self, client: str | None, tokens: int) -> None:
        """Note tokens evaluated for a client that is here."""
        self._served[client] += tokens

    def of(self, client: str | None) -> float:
        """Return what a client that is here was served."""
        return self._served[client]


class Scheduler:
    """The waiting requests. `reserve` may be called in any thread, the rest on the engine's."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._tickets: dict[Ticket, None] = {}
        self._places = threading.Lock()
        self._n_urgent = 0  # interactive ones
        self._n_taken = 0  # places in the queue, also of what is still on its way to it
        self.shares = Shares()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets))

    @property
    def any_urgent(self) -> bool:
        """Whether an interactive request waits."""
        return self._n_urgent > 0

    def reserve(self, retry_after: Callable[[], float]) -> None:
        """Take a place in the queue; raises `Busy` when there is none."""
        with self._places:
            if self._n_taken < self._patience.n_waiting:
                self._n_taken += 1
                return
            waiting = self._n_taken
        raise Busy(waiting, self._patience.n_waiting, retry_after())

    def add(self, ticket: Ticket) -> None:
        """Queue a ticket whose place was reserved."""
        ticket.patience = self._patience.prefix_steps
        ticket.queued = ticket.submitted
        self._enter(ticket)
        self.shares.arrive(ticket.request.client)

    def put_back(self, ticket: Ticket) -> None:
        """Queue a ticket again that ran; it keeps its age, and is never refused."""
        with self._places:
            self._n_taken += 1
        ticket.queued = ticket.clock()
        self._enter(ticket)

    def _enter(self, ticket: Ticket) -> None:
        self._tickets[ticket] = None
        self._n_urgent += ticket.rank == 0

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue."""
        del self._tickets[ticket]
        self._n_urgent -= ticket.rank == 0
        ticket.seated = ticket.clock()
        ticket.waited += self._since_queued(ticket, ticket.seated)
        ticket.queued = None
        with self._places:
            self._n_taken -= 1

    def level(self, ticket: Ticket, now: float) -> int:
        """Return a ticket's class once its waiting is counted; lower goes first."""
        waited = ticket.waited + self._since_queued(ticket, now)
        return ticket.rank - int(waited / self._patience.ageing)

    @staticmethod
    def _since_queued(ticket: Ticket, now: float) -> float:
        return 0.0 if ticket.queued is None else now - ticket.queued

    def order(self, now: float, remaining: Callable[[Ticket], int]) -> list[Ticket]:
        """Return the waiting tickets, the next one first."""
        return self.ranked(self._tickets, now, remaining)

    def ranked(
        self, tickets: Iterable[Ticket], now: float, remaining: Callable[[Ticket], int]
    ) -> list[Ticket]:
        """Return any tickets in the order in which they are to be served."""
        return sorted(
            tickets,
            key=lambda ticket: (
                self.level(ticket, now),
                self.shares.of(ticket.request.client),
                remaining(ticket),
                ticket.number,
            ),
        )
