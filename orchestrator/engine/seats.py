"""Who has a lane, who gets the next one, and who makes way?

    waiting ──seat──▶ lane ──release──▶ gone
       ▲               │
       └─────park──────┘      a parked request keeps its state by a lease, and all it has said

Requests are seated in the scheduler's order as far as the pool has room. An interactive request
takes a lane, and if need be the room, from a background one. What is parked goes on from its own
state; only if that had to leave host memory too is anything evaluated again.

Invariant: a request that was queued is waiting, in a lane, or answered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from orchestrator.engine.counters import Counters
from orchestrator.engine.keeper import Keeper
from orchestrator.engine.lane import REPLY_OUTLOOK, Lane
from orchestrator.engine.pace import STEP_SECONDS, Pace
from orchestrator.engine.records import Records
from orchestrator.engine.request import Request
from orchestrator.engine.scheduler import Patience, Scheduler
from orchestrator.engine.sharing import Sharing
from orchestrator.engine.ticket import Clock, Ticket
from orchestrator.errors import PoolFull
from orchestrator.pool.checkpoint import Checkpoint, Kind
from orchestrator.pool.plans import Admission, Budgets, Claim
from orchestrator.runtime.protocol import Runtime, Sampling

_QUANTUM = 0.1
"""An aged background lane is safe for this part of the time that it waited."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a core is set up. `checkpoints` False keeps and reuses nothing.

    `step_seconds`: how long a step may last while lanes speak and others read.
    """

    n_lanes: int = 1
    checkpoints: bool = True
    budgets: Budgets = field(default_factory=Budgets)
    patience: Patience = field(default_factory=Patience)
    step_seconds: float = STEP_SECONDS


class Seats:
    """The lanes, and the requests that wait for one. Used on the engine's thread."""

    def __init__(
        self,
        runtime: Runtime,
        keeper: Keeper,
        records: Records,
        pace: Pace,
        options: Options,
        counters: Counters,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.lanes: list[Lane] = []
        self.scheduler = Scheduler(options.patience)
        self._runtime = runtime
        self._keeper = keeper
        self._records = records
        self._pace = pace
        self._options = options
        self._counters = counters
        self._clock = clock
        self._rng = rng
        self._sharing = Sharing(keeper)
        self._seating: Ticket | None = None  # out of the queue and not in a lane yet

    @property
    def n_lanes(self) -> int:
        """How many requests run at once."""
        return self._options.n_lanes

    def uses_cache(self, request: Request) -> bool:
        """Return whether a request may start from a checkpoint."""
        return request.use_cache and self._options.checkpoints

    def depart(self, ticket: Ticket) -> None:
        """Note that a request is over, in whatever way."""
        self.scheduler.shares.leave(ticket.request.client)

    # ---- waiting ------------------------------------------------------------------------------

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a request whose place was reserved."""
        self.scheduler.add(ticket)
        for lane in self.lanes:
            self._announce(ticket, lane)

    def leave_queue(self, ticket: Ticket) -> None:
        """Take a request that is over out of the queue, with what is held for it."""
        self.scheduler.remove(ticket)
        self.depart(ticket)
        ticket.take()
        lane = ticket.lane
        if lane is not None:
            self._release_lease(lane)
            lane.sampler.close()
            if not lane.admission.keeps:
                self._discard(lane.parked)
            self._keeper.fit()

    def vacate(self) -> list[Ticket]:
        """Give all lanes up without touching their states; return the requests to be answered."""
        lanes, self.lanes = self.lanes, []
        tickets = [lane.ticket for lane in lanes]
        if self._seating is not None and self._seating not in tickets:
            tickets.append(self._seating)
        self._seating = None
        for lane in lanes:
            lane.sampler.close()
        for ticket in tickets:
            self.depart(ticket)
        return tickets

    def _announce(self, ticket: Ticket, lane: Lane) -> None:
        if ticket.lane is None and self.uses_cache(ticket.request):
            self._sharing.announce(ticket, lane, self._reusable(ticket))

    def _awaits_prefix(self, ticket: Ticket) -> bool:
        """Return whether a request waits on for what a lane is reading; costs it patience."""
        if ticket.lane is not None or not self.uses_cache(ticket.request):
            return False
        if not self._sharing.awaits(ticket, self.lanes, self._reusable(ticket)):
            return False
        self._counters.waited += ticket.patience == self._options.patience.prefix_steps
        ticket.patience -= 1
        return True

    def _unread(self, ticket: Ticket) -> int:
        """Return how many tokens a waiting request would have to read."""
        if ticket.lane is not None:
            return max(1, ticket.lane.n_prompt - ticket.lane.fed)
        return len(ticket.request.tokens) - self._reusable(ticket)

    def _reusable(self, ticket: Ticket) -> int:
        """Return how many tokens a request that never ran would reuse by now."""
        if not self.uses_cache(ticket.request):
            return 0
        book = self._keeper.pool.book
        if ticket.reusable[0] != book.version:
            seed = book.longest(ticket.path)
            ticket.reusable = (book.version, seed.length if seed else 0)
        return ticket.reusable[1]

    # ---- getting a lane -----------------------------------------------------------------------

    def admit(self) -> None:
        """Give lanes to waiting requests, in order, as far as there is room."""
        if not len(self.scheduler) or (self._are_taken and not self._any_makes_way):
            return
        for ticket in self.scheduler.order(self._clock(), self._unread):
            if self._are_taken and not self._preempt_for(ticket):
                continue
            if not self._awaits_prefix(ticket) and not self._seat(ticket):
                return

    @property
    def _are_taken(self) -> bool:
        return len(self.lanes) >= self._options.n_lanes

    def _seat(self, ticket: Ticket, *, cold: bool = False) -> bool:
        """Give a request a lane; False when nothing more can be admitted in this step.

        `cold` starts it from nothing, whatever there is.
        """
        lane = ticket.lane
        if lane is not None:
            self._release_lease(lane)
        admission = self._keeper.pool.plan_admission(self._claim(ticket, cold=cold))
        if admission is None or not self._keeper.clear_for(admission):
            if lane is not None:
                self._hold(lane)  # what left for this may have been its own
            return admission is None and self._without_room(ticket, cold=cold)
        self.scheduler.remove(ticket)
        if ticket.take():
            self._open(ticket, admission)
        else:
            self.depart(ticket)
        return True

    def _claim(self, ticket: Ticket, *, cold: bool) -> Claim:
        """Return what a request asks of the pool; beside others also room for its reply."""
        request, lane = ticket.request, ticket.lane
        uses_cache = self.uses_cache(request)
        return Claim(
            path=lane.known if lane else ticket.path,
            turn=request.turn,
            base=request.base,
            conversation=lane.admission.conversation if lane else request.conversation,
            reserve=sum(other.outlook for other in self.lanes) + self._reply_outlook(ticket),
            reuses=uses_cache and not cold,
            keeps=uses_cache and not request.one_off,
            own=lane.own if lane and not cold else None,
            starts=request.starts,
            marks=request.marks,
            branch=0 if lane else self._records.fork(ticket.path),
            costs=self._keeper.costs(self._pace),
        )

    def _reply_outlook(self, ticket: Ticket) -> int:
        if not self.lanes:
            return 0  # alone it gets whatever there is
        if ticket.lane is not None:
            return ticket.lane.outlook - ticket.lane.remaining
        request = ticket.request
        most = REPLY_OUTLOOK if request.max_tokens is None else request.max_tokens
        room = self._runtime.limits.n_context - len(request.tokens)
        return max(0, min(most, REPLY_OUTLOOK, room))

    def _open(self, ticket: Ticket, admission: Admission) -> None:
        """Carry an admission out and open the request's lane, or open it again."""
        self._seating = ticket
        lane = ticket.lane
        if lane is None:
            lane = self._new_lane(ticket, admission)
            self._records.begin(lane, self.lanes, uses_cache=self.uses_cache(ticket.request))
            self._counters.requests += 1
        else:
            lane.seat(admission)
        self.lanes.append(lane)
        if not self._keeper.admit(admission, lambda stands: self._seated(lane, stands)):
            self.lanes.remove(lane)
            self._hold(lane)
            self._give_back(lane)
        self._seating = None

    def _new_lane(self, ticket: Ticket, admission: Admission) -> Lane:
        request = ticket.request
        n_seen = request.sampling.repeat_last
        seen = request.tokens[-n_seen:] if n_seen else ()
        return Lane(
            ticket,
            admission,
            self._runtime.sampler(self._seeded(request.sampling), seen),
            self._runtime.tokenizer,
            self._runtime.limits.n_context,
            self._clock(),
            self._keeper.reply_step(request, self._pace),
        )

    def _seeded(self, sampling: Sampling) -> Sampling:
        if sampling.seed is not None:
            return sampling
        return replace(sampling, seed=self._rng.randrange(2**32))

    def _seated(self, lane: Lane, stands: bool) -> None:
        """Begin a lane whose seed stands, or admit it again where it was refused."""
        parked, lane.parked = lane.parked, None
        self._discard(parked)
        if not stands:
            self._keeper.release(lane, None)
            self.lanes.remove(lane)
            self._give_back(lane)
            return
        cached = lane.cached
        lane.begin()
        self._records.stands(lane)
        self._counters.reused += lane.cached - cached
        for ticket in self.scheduler:
            self._announce(ticket, lane)

    def _give_back(self, lane: Lane) -> None:
        """Let a request wait again, with all that its lane has said."""
        lane.ticket.lane = lane
        self.scheduler.put_back(lane.ticket)

    def release(self, lane: Lane, kind: Kind | None) -> None:
        """End a lane; its state is kept as a checkpoint of `kind` where that is of use."""
        self.lanes.remove(lane)
        self.depart(lane.ticket)
        lane.sampler.close()
        self._keeper.release(lane, kind)

    # ---- making way ---------------------------------------------------------------------------

    @property
    def _any_makes_way(self) -> bool:
        """Whether a lane might be taken over."""
        return self.scheduler.any_urgent and any(lane.ticket.rank == 2 for lane in self.lanes)

    def _victim_for(self, ticket: Ticket) -> Lane | None:
        """Return the background lane that makes way for an interactive request, if one does."""
        if ticket.rank != 0:
            return None
        victims = [
            lane
            for lane in self.lanes
            if lane.ticket.rank == 2 and not self._is_safe(lane.ticket, ticket)
        ]
        return victims[-1] if victims else None

    def _is_safe(self, running: Ticket, other: Ticket) -> bool:
        """Return whether a background request may run on for a while, having waited so long.

        Without that, interactive requests that never end would keep it from ever beginning.
        """
        now = self._clock()
        if self.scheduler.level(running, now) > self.scheduler.level(other, now):
            return False
        return now - running.seated <= _QUANTUM * running.waited

    def _preempt_for(self, ticket: Ticket) -> bool:
        """Let a background lane make way for an interactive request, if there is one."""
        victim = self._victim_for(ticket)
        if victim is not None:
            self._park(victim)
        return victim is not None

    def _park(self, lane: Lane) -> None:
        """Put a lane's request back into the queue; its state stays, held by a lease."""
        lane.owed = None
        self._keeper.release(lane, "partial", parks=True)
        self.lanes.remove(lane)  # only now: where that fails it is ended with the other lanes
        if lane.is_ready:  # else it is what it was being given
            seed = self._keeper.pool.book.longest(lane.known)
            lane.parked = seed.checkpoint if seed and seed.length == lane.fed else None
        self._hold(lane)
        self._give_back(lane)
        self._counters.preempted += 1

    def _parked(self, lane: Lane) -> Checkpoint | None:
        """Return the state of a preempted request, None once it is gone.

        A lease keeps it from what makes room, not from being found damaged by somebody else.
        """
        if lane.parked not in self._keeper.pool.checkpoints:
            lane.parked = None
        return lane.parked

    def _hold(self, lane: Lane) -> None:
        """Hold on to the state of a preempted request, if it still stands."""
        parked = self._parked(lane)
        if parked is not None:
            parked.leases += 1

    def _release_lease(self, lane: Lane) -> None:
        parked = self._parked(lane)
        if parked is not None:
            parked.leases -= 1

    def _discard(self, parked: Checkpoint | None) -> None:
        """Give up a state that was kept for a preempted request alone."""
        if parked is None or parked.leases or parked.kind != "partial":
            return
        if parked in self._keeper.pool.checkpoints:
            self._keeper.drop([parked])

    def hold_what_stands(self) -> None:
        """Hold on to the states of parked requests that a loss of all sequences left."""
        for ticket in self.scheduler:
            if ticket.lane is not None:
                self._hold(ticket.lane)

    def free_exported(self) -> None:
        """Give up the states of parked requests in host memory; they read again."""
        for ticket in self.scheduler:
            lane = ticket.lane
            parked = self._parked(lane) if lane else None
            if lane is not None and parked is not None and parked.sequence is None:
                self._release_lease(lane)
                lane.parked = None

    def _without_room(self, ticket: Ticket, *, cold: bool) -> bool:
        """Act where a request finds no room; True when it was refused for good."""
        if self.lanes or self._keeper.mover.is_busy:
            victim = self._victim_for(ticket)
            if victim is not None:
                self._give_way(victim)
                return self._seat(ticket)  # at once, or the next step would give it away again
            return False
        if self._reclaim(ticket):
            return self._seat(ticket)
        if not cold:  # an import also brings rows that are cut again
            return self._seat(ticket, cold=True)
        self.leave_queue(ticket)
        ticket.answer(
            PoolFull(
                f"a prompt of {len(ticket.request.tokens):,} tokens finds no room among "
                f"{self._runtime.limits.n_cells:,} cells; shorten it or open a larger context"
            )
        )
        return True

    def _give_way(self, lane: Lane) -> None:
        """Park a lane and take its state out of the pool, to host memory if it fits there."""
        self._park(lane)
        if lane.parked is not None:
            self._evacuate(lane, lane.parked)

    def _evacuate(self, lane: Lane, parked: Checkpoint) -> None:
        if parked.holder.is_lane:
            return  # on the rows of one that runs it takes no room
        self._keeper.clear_now(list(parked.holder.checkpoints))
        if parked not in self._keeper.pool.checkpoints:
            lane.parked = None

    def _reclaim(self, besides: Ticket | None = None) -> bool:
        """Take the state of a parked request out of the pool; False when there is none."""
        for ticket in self.scheduler:
            lane = None if ticket is besides else ticket.lane
            parked = self._parked(lane) if lane else None
            if lane is None or parked is None or parked.sequence is None:
                continue
            if not parked.holder.is_lane:
                self._evacuate(lane, parked)
                return True
        return False

    def make_way(self) -> Lane | None:
        """Let somebody give room up when a decode call finds none.

        Returns the lane that is the last one left and finds none either.
        """
        if self._reclaim():
            return None
        last = max(self.lanes, key=lambda lane: (lane.ticket.rank, self.lanes.index(lane)))
        if len(self.lanes) == 1:
            return last
        self._give_way(last)
        return None
