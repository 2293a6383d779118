"""The loop, without its thread: admit, evaluate, keep, sample, finish.

Single-threaded and clocked from outside, so that tests walk it step by step on the simulated
runtime. What is kept is the pool's decision, who goes next the scheduler's, how much is read in a
step the pace's; this module only asks them in turn:

    submit ─▶ scheduler ─▶ admit ─▶ lanes ─▶ decode call ─▶ keep at stops, sample ─▶ listener
                  ▲                   │
                  └── preempted ◀─────┘

A step makes at most two kinds of decode call: one token for every lane that speaks, then equal
chunks of the prompts of those that read. llama.cpp would cut a mixed call into equal-length
pieces anyway (`tests/bench_lanes.py` has the figures).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.engine.counters import Counters, LaneView, Occupancy
from orchestrator.engine.keeper import Keeper
from orchestrator.engine.lane import Lane
from orchestrator.engine.pace import STEP_SECONDS, Pace
from orchestrator.engine.request import Finished, FinishReason, Request
from orchestrator.engine.scheduler import Patience, Scheduler
from orchestrator.engine.ticket import Clock, Listener, Ticket
from orchestrator.errors import (
    BackendError,
    Busy,
    DecodeFailed,
    InvalidArgument,
    OrchestratorError,
    PoolFull,
    PromptTooLong,
)
from orchestrator.pool.checkpoint import Checkpoint, Kind, Stop
from orchestrator.pool.index import common_length
from orchestrator.pool.placement import BLOCK_LEAST
from orchestrator.pool.pool import Admission, Budgets, Claim
from orchestrator.runtime.protocol import Chunk, Runtime, Sampling

log = logging.getLogger("orchestrator.engine")

_RETRY_LEAST = 1.0  # seconds


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


class Core:
    """See the module's head. All methods but `ticket` are called from one thread."""

    def __init__(
        self,
        runtime: Runtime,
        clock: Clock,
        options: Options | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._options = options or Options()
        limits = runtime.limits
        if not 1 <= self._options.n_lanes <= limits.n_sequences:
            raise InvalidArgument(
                f"{self._options.n_lanes} lanes do not fit {limits.n_sequences} sequences; "
                "give at least 1 lane and at least as many sequences"
            )
        self._runtime = runtime
        self._clock = clock
        self._rng = rng or random.Random()
        self.counters = Counters()
        self._keeper = Keeper(runtime, self._options.budgets, self.counters)
        self._scheduler = Scheduler(self._options.patience)
        self._pace = Pace(limits.n_batch, self._options.step_seconds)
        self._lanes: list[Lane] = []
        self._seating: Ticket | None = None  # out of the queue and not in a lane yet

    # ---- from outside -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or moving."""
        return not len(self._scheduler) and not self._lanes and not self._keeper.mover.is_busy

    def ticket(self, request: Request, listener: Listener) -> Ticket:
        """Check a request and return a ticket to `enqueue`; safe in any thread.

        `listener` gets its events, the last one `Finished` or an error: on the engine's thread,
        or on the one that cancels it before it ever ran. Raises `PromptTooLong`,
        `InvalidArgument`, or `Busy` when the queue is full.
        """
        limits, model = self._runtime.limits, self._runtime.model
        if len(request.tokens) > limits.n_context:
            raise PromptTooLong(len(request.tokens), limits.n_context)
        if min(request.tokens) < 0 or max(request.tokens) >= model.n_vocab:
            raise InvalidArgument(f"token ids must lie in 0 to {model.n_vocab - 1}")
        self._runtime.check_sampling(request.sampling)
        ticket = Ticket(request, listener, self._clock)
        try:
            self._scheduler.reserve(self._retry_after)
        except Busy:
            self.counters.busy += 1
            raise
        return ticket

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a checked request."""
        self._scheduler.add(ticket)
        for lane in self._lanes:
            self._announce(ticket, lane)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Check and queue a request in one go."""
        ticket = self.ticket(request, listener)
        self.enqueue(ticket)
        return ticket

    def step(self) -> None:
        """Do one turn of the loop. Never raises for what goes wrong with a request or a decode."""
        try:
            self._reap()
            self._move()
            self._admit()
            n_speaking = self._speak()
            self._read(n_speaking)
        except DecodeFailed as failure:
            self.fail_all(failure)

    def forget(self, conversation: str) -> None:
        """Give up every checkpoint of a conversation, except what a running request needs.

        Requests that were cancelled before are ended first, so that they leave nothing either.
        """
        try:
            self._reap()
        except DecodeFailed as failure:
            self.fail_all(failure)
        self._keeper.forget(conversation)

    def resize(self, budgets: Budgets) -> None:
        """Take other budgets from now on."""
        shrinks = budgets.exported_bytes < self._keeper.pool.exported_bytes
        for ticket in self._scheduler if shrinks else ():
            lane = ticket.lane
            if lane is not None and lane.parked is not None and lane.parked.sequence is None:
                self._unpark(lane)  # what was preempted reads again what finds no room
                lane.parked = None
        self._keeper.resize(budgets)

    def fail_all(self, error: OrchestratorError) -> None:
        """End everything that runs with `error` and forget every state in the context.

        Queued requests stay, and so do checkpoints in host memory.
        """
        log.error("all states are dropped: %s", error)
        try:
            self._end_lanes(error)
        finally:
            self._keeper.lose()
            for ticket in self._scheduler:
                if ticket.lane is not None:
                    self._hold_what_stands(ticket.lane)
            self.counters.recoveries += 1

    def end_all(self, error: OrchestratorError) -> None:
        """End everything, queued requests too, before the runtime is closed."""
        self._end_lanes(error)
        for ticket in self._scheduler:
            self._scheduler.remove(ticket)
            self._depart(ticket)
            if ticket.lane is not None:
                ticket.lane.sampler.close()
            ticket.answer(error)

    def _end_lanes(self, error: OrchestratorError) -> None:
        lanes, self._lanes = self._lanes, []
        tickets = [lane.ticket for lane in lanes]
        if self._seating is not None and self._seating not in tickets:
            tickets.append(self._seating)
        self._seating = None
        for ticket in tickets:
            self._depart(ticket)
            ticket.answer(error)
        for lane in lanes:
            lane.sampler.close()

    def _depart(self, ticket: Ticket) -> None:
        self._scheduler.shares.leave(ticket.request.client)

    def _retry_after(self) -> float:
        """Return in about how many seconds the queue will be shorter."""
        ahead = [lane.outlook for lane in list(self._lanes)]
        mean = sum(ahead) / max(1, len(ahead))
        return max(_RETRY_LEAST, self._pace.seconds(0, int(mean)))

    # ---- coming and going ---------------------------------------------------------------------

    def _reap(self) -> None:
        """End what was cancelled, or ran out of time, since the last step."""
        for ticket in self._scheduler:
            if ticket.is_answered or ticket.is_cancelled or ticket.has_expired:
                self._scheduler.remove(ticket)
                self._end_waiting(ticket)
        for lane in list(self._lanes):
            if lane.ticket.is_cancelled:
                self._finish(lane, "cancelled")
            elif lane.ticket.has_expired:
                self._finish(lane, "deadline")

    def _end_waiting(self, ticket: Ticket) -> None:
        """End a request that waits: one that never ran, or one that was preempted."""
        reason: FinishReason = "deadline" if ticket.has_expired else "cancelled"
        self._count_end("cancelled" if ticket.is_answered or ticket.is_cancelled else reason)
        self._depart(ticket)
        ticket.take()
        lane = ticket.lane
        if lane is None:
            ticket.answer(Finished(ticket.never_ran(reason)))
            return
        self._unpark(lane)
        if not lane.admission.keeps:
            self._discard(lane.parked)
        lane.sampler.close()
        reason = "cancelled" if ticket.is_cancelled else reason
        ticket.answer(Finished(lane.finish(reason, self._clock())))

    def _count_end(self, reason: FinishReason) -> None:
        self.counters.cancelled += reason == "cancelled"
        self.counters.expired += reason == "deadline"

    def _move(self) -> None:
        """Move a slice of what is on its way; all of it where nobody would notice."""
        mover = self._keeper.mover
        mover.advance()
        while mover.is_busy and not any(lane.is_ready for lane in self._lanes):
            mover.advance()
        for lane in self._lanes:
            if lane.owed is not None and self._keeper.keep(lane, lane.owed.kind):
                lane.owed = None

    def _admit(self) -> None:
        """Give lanes to waiting requests, in order, as far as there is room."""
        n_free = self._options.n_lanes - len(self._lanes)
        if not len(self._scheduler) or (not n_free and not self._any_makes_way):
            return
        for ticket in self._scheduler.order(self._clock(), self._unread):
            if len(self._lanes) >= self._options.n_lanes and not self._preempt_for(ticket):
                continue
            if not self._waits(ticket) and not self._seat(ticket):
                return

    def _unread(self, ticket: Ticket) -> int:
        """Return how many tokens a waiting request would have to read."""
        if ticket.lane is not None:
            return max(1, ticket.lane.n_prompt - ticket.lane.fed)
        if not self._uses_cache(ticket.request):
            return len(ticket.request.tokens)
        book = self._keeper.pool.book
        if ticket.reusable[0] != book.version:
            seed = book.longest(ticket.path)
            ticket.reusable = (book.version, seed.length if seed else 0)
        return len(ticket.request.tokens) - ticket.reusable[1]

    def _seat(self, ticket: Ticket) -> bool:
        """Give a request a lane; False when nothing more can be admitted in this step."""
        lane = ticket.lane
        if lane is not None:
            self._unpark(lane)
        admission = self._plan(ticket)
        if admission is None or not self._keeper.clear_way(admission.evicted):
            if lane is not None:
                self._repark(lane)
            return admission is None and self._without_room(ticket)
        self._scheduler.remove(ticket)
        if ticket.take():
            self._open(ticket, admission)
        else:
            self._depart(ticket)
        return True

    def _plan(self, ticket: Ticket) -> Admission | None:
        request, lane = ticket.request, ticket.lane
        outlook = sum(other.outlook for other in self._lanes)
        if self._lanes:
            outlook += lane.outlook if lane else min(request.max_tokens or 0, 256)
        uses_cache = self._uses_cache(request)
        return self._keeper.pool.plan_admission(
            Claim(
                path=lane.known if lane else ticket.path,
                turn=request.turn,
                base=request.base,
                conversation=lane.admission.conversation if lane else request.conversation,
                reserve=outlook,
                reuses=uses_cache or lane is not None,
                keeps=uses_cache and not request.one_off,
            )
        )

    def _open(self, ticket: Ticket, admission: Admission) -> None:
        """Carry an admission out and open the request's lane, or open it again."""
        self._seating = ticket
        lane = ticket.lane
        if lane is None:
            lane = self._new_lane(ticket, admission)
            self.counters.requests += 1
        else:
            lane.seat(admission)
        self._lanes.append(lane)
        if not self._keeper.admit(admission, lambda stands: self._seated(lane, stands)):
            self._lanes.remove(lane)
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
        )

    def _seated(self, lane: Lane, stands: bool) -> None:
        """Begin a lane whose seed stands, or admit it again where it was refused."""
        parked, lane.parked = lane.parked, None
        self._discard(parked)
        if stands:
            cached = lane.cached
            lane.begin()
            self.counters.reused += lane.cached - cached
            for ticket in self._scheduler:
                self._announce(ticket, lane)
            return
        self._keeper.release(lane, None)
        self._lanes.remove(lane)
        self._give_back(lane)

    def _give_back(self, lane: Lane) -> None:
        """Let a request wait again, with all that its lane has said."""
        lane.ticket.lane = lane
        self._scheduler.put_back(lane.ticket)

    def _seeded(self, sampling: Sampling) -> Sampling:
        if sampling.seed is not None:
            return sampling
        return replace(sampling, seed=self._rng.randrange(2**32))

    def _uses_cache(self, request: Request) -> bool:
        return request.use_cache and self._options.checkpoints

    # ---- waiting for others, and making way for them ------------------------------------------

    def _announce(self, ticket: Ticket, lane: Lane) -> None:
        """Have a lane keep what a request behind it shares, also while no other lane is free.

        Where rows can be cut what the lane leaves behind serves anyway.
        """
        if ticket.lane is None and self._uses_cache(ticket.request) and not self._divisible:
            self._shared_with(ticket, lane, len(ticket.request.tokens) - self._unread(ticket))

    def _waits(self, ticket: Ticket) -> bool:
        """Return whether a request had better wait for a prefix that a lane is reading.

        The lane is told to keep a state there; an interactive request takes what there is.
        """
        if ticket.lane is not None or not self._uses_cache(ticket.request):
            return False
        had = len(ticket.request.tokens) - self._unread(ticket)
        awaited = max((self._shared_with(ticket, lane, had) for lane in self._lanes), default=0)
        if not awaited or ticket.rank == 0 or ticket.patience <= 0:
            return False
        self.counters.waited += ticket.patience == self._options.patience.prefix_steps
        ticket.patience -= 1
        return True

    def _shared_with(self, ticket: Ticket, lane: Lane, had: int) -> int:
        """Return the length a lane will have kept for a waiting request; 0 if not worth it."""
        other = lane.ticket
        length = ticket.shared.get(other.number)
        if length is None:
            length = min(common_length(ticket.path, other.path), len(ticket.request.tokens) - 1)
            ticket.shared[other.number] = length
        if length - had < BLOCK_LEAST or not lane.admission.keeps:
            return 0
        if lane.is_ready and lane.fed >= length and self._divisible:
            self._keeper.keep(lane, "shared", length)  # rows can be cut: no need to wait
            return 0
        stop = lane.plant(length)
        return stop.length if stop is not None and stop.length - had >= BLOCK_LEAST else 0

    @property
    def _divisible(self) -> bool:
        return self._runtime.model.memory == "attention" and self._runtime.limits.copies

    @property
    def _any_makes_way(self) -> bool:
        return any(lane.ticket.rank == 2 for lane in self._lanes)

    def _victim_for(self, ticket: Ticket) -> Lane | None:
        """Return the background lane that makes way for an interactive request, if one does.

        One that has waited for its turn so long that it would go first makes way for nobody.
        """
        if ticket.rank != 0:
            return None
        now = self._clock()
        level = self._scheduler.level(ticket, now)
        victims = [
            lane
            for lane in self._lanes
            if lane.ticket.rank == 2 and self._scheduler.level(lane.ticket, now) > level
        ]
        return victims[-1] if victims else None

    def _preempt_for(self, ticket: Ticket) -> bool:
        """Let a background lane make way for an interactive request, if there is one."""
        victim = self._victim_for(ticket)
        if victim is not None:
            self._park(victim)
        return victim is not None

    def _park(self, lane: Lane) -> None:
        """Put a lane's request back into the queue; its state stays, held by a lease."""
        self._lanes.remove(lane)
        lane.owed = None
        kept = lane.fed if lane.is_ready else 0
        self._keeper.release(lane, "partial", parks=True)
        seed = self._keeper.pool.book.longest(lane.known) if kept else None
        lane.parked = seed.checkpoint if seed and seed.length == kept else None
        self._repark(lane)
        self._give_back(lane)
        self.counters.preempted += 1

    def _repark(self, lane: Lane) -> None:
        if lane.parked is not None:
            lane.parked.leases += 1

    def _unpark(self, lane: Lane) -> None:
        if lane.parked is not None:
            lane.parked.leases -= 1

    def _hold_what_stands(self, lane: Lane) -> None:
        """Hold on to the state of a preempted request where a loss of all sequences left it."""
        if lane.parked in self._keeper.pool.checkpoints:
            self._repark(lane)
        else:
            lane.parked = None

    def _discard(self, parked: Checkpoint | None) -> None:
        """Give up a state that was kept for a preempted request alone."""
        if parked is None or parked.leases or parked.kind != "partial":
            return
        if parked in self._keeper.pool.checkpoints:
            self._keeper.drop([parked])

    def _without_room(self, ticket: Ticket) -> bool:
        """Act where a request finds no room; True when it was refused for good."""
        if self._lanes or self._keeper.mover.is_busy:
            victim = self._victim_for(ticket)
            if victim is not None:
                self._give_way(victim)
                return self._seat(ticket)  # at once, or the next step would give it away again
            return False
        if self._reclaim(ticket):
            return self._seat(ticket)
        self._scheduler.remove(ticket)
        self._depart(ticket)
        ticket.take()
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
            self._evacuate(lane)

    def _evacuate(self, lane: Lane) -> None:
        parked = lane.parked
        if parked is None:
            return
        self._keeper.clear_now([parked])
        if parked not in self._keeper.pool.checkpoints:
            lane.parked = None

    def _reclaim(self, besides: Ticket | None = None) -> bool:
        """Take the state of a preempted request out of the pool; False when there is none."""
        for ticket in self._scheduler:
            lane = ticket.lane
            if ticket is besides or lane is None or lane.parked is None:
                continue
            if lane.parked.sequence is not None:
                self._evacuate(lane)
                return True
        return False

    def _make_way(self, full: PoolFull) -> None:
        """Let somebody give room up when a decode call finds none; the last one fails."""
        if self._reclaim():
            return
        last = max(self._lanes, key=lambda lane: (lane.ticket.rank, self._lanes.index(lane)))
        if len(self._lanes) > 1:
            self._give_way(last)
        else:
            self._fail(last, full, suspect=False)

    def _finish(self, lane: Lane, reason: FinishReason) -> None:
        """End a lane well: its sequence becomes a checkpoint where that is of use."""
        outcome = lane.finish(reason, self._clock())
        kind: Kind = "partial" if lane.is_reading else "reply"
        self._count_end(reason)
        try:
            self._leave(lane, kind if self._uses_cache(lane.ticket.request) else None)
        finally:
            lane.ticket.answer(Finished(outcome))

    def _fail(self, lane: Lane, error: OrchestratorError, *, suspect: bool) -> None:
        """End a lane with an error; where its states are `suspect`, what was kept of it as well."""
        try:
            if suspect:
                serial = lane.admission.serial
                kept = [c for c in self._keeper.pool.checkpoints if c.serial == serial]
                self._keeper.drop(kept, scrub=True)
                self._keeper.memory.scrub(lane.sequence)
            self._leave(lane, None)
        finally:
            if lane in self._lanes:
                self._lanes.remove(lane)
            lane.ticket.answer(error)

    def _leave(self, lane: Lane, kind: Kind | None) -> None:
        self._lanes.remove(lane)
        self._depart(lane.ticket)
        lane.sampler.close()
        self._keeper.release(lane, kind)

    # ---- evaluating ---------------------------------------------------------------------------

    def _speak(self) -> int:
        """Evaluate the latest token of every lane that speaks; return how many there are."""
        lanes = [lane for lane in self._lanes if lane.may_advance and not lane.is_reading]
        lanes.sort(key=lambda lane: lane.sequence)
        n_joint = self._runtime.limits.n_joint or len(lanes)
        begun = self._clock()
        for first in range(0, len(lanes), max(1, n_joint)):
            group = [lane for lane in lanes[first : first + n_joint] if lane in self._lanes]
            if group:
                self._evaluate(group, [lane.next_chunk(1) for lane in group])
        if lanes:
            self._pace.decoded(self._clock() - begun)
        return len(lanes)

    def _read(self, n_speaking: int) -> None:
        """Evaluate a chunk of the prompts that come first, as long as the pace allows."""
        lanes = [lane for lane in self._lanes if lane.may_advance and lane.is_reading]
        if not lanes:
            return
        group, chunks = self._equal_chunks(self._in_order(lanes), self._pace.budget(n_speaking))
        begun = self._clock()
        self._evaluate(group, chunks)
        self._pace.read(sum(len(chunk.tokens) for chunk in chunks), self._clock() - begun)

    def _in_order(self, lanes: Sequence[Lane]) -> list[Lane]:
        of = {lane.ticket: lane for lane in lanes}
        ranked = self._scheduler.ranked(of, self._clock(), lambda ticket: of[ticket].remaining)
        return [of[ticket] for ticket in ranked]

    def _equal_chunks(self, lanes: Sequence[Lane], budget: int) -> tuple[list[Lane], list[Chunk]]:
        """Return a chunk of the first lane, and of those that have as much left to read.

        Together they stay within `budget` tokens; unequal ones would share no pass over the
        weights.
        """
        first = lanes[0].next_chunk(budget)
        length = len(first.tokens)
        limits = self._runtime.limits
        n_joint = limits.n_joint or limits.n_sequences
        n_most = min(n_joint, budget // length) if limits.copies else 1
        chosen = [(lanes[0], first)]
        for lane in lanes[1:]:
            if len(chosen) >= n_most:
                break
            chunk = lane.next_chunk(length)
            if len(chunk.tokens) == length:
                chosen.append((lane, chunk))
        chosen.sort(key=lambda pair: pair[0].sequence)
        return [lane for lane, _ in chosen], [chunk for _, chunk in chosen]

    def _evaluate(self, lanes: Sequence[Lane], chunks: Sequence[Chunk]) -> None:
        """Evaluate a chunk of each lane in one decode call and act on what comes out."""
        begun = self._clock()
        try:
            rows = self._decode(chunks)
        except PoolFull as full:
            self._make_way(full)
            return
        seconds = self._clock() - begun
        for lane, chunk, row in zip(lanes, chunks, rows, strict=True):
            self._settle(lane, chunk, row, seconds)

    def _decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Make room for a decode call, then make it. Raises `PoolFull` with nothing evaluated."""
        cells = sum(len(chunk.tokens) for chunk in chunks)
        leaving = self._keeper.pool.plan_room(cells)
        if leaving is None:
            raise PoolFull(
                f"{cells} cells are wanted and every one of {self._runtime.limits.n_cells} is in "
                "use by running requests; raise ctx or send fewer at once"
            )
        self._keeper.clear_now(leaving)
        self.counters.decode_calls += 1
        return self._keeper.memory.decode(chunks)

    def _settle(self, lane: Lane, chunk: Chunk, row: int | None, seconds: float) -> None:
        """Keep a state at a stop; sample where logits were asked for."""
        prefilled, replayed = lane.prefilled, lane.replayed
        stop = lane.took(chunk, seconds)
        self.counters.prefilled += lane.prefilled - prefilled
        self.counters.replayed += lane.replayed - replayed
        self._scheduler.shares.serve(lane.ticket.request.client, len(chunk.tokens))
        if stop is not None:
            self._keep(lane, stop)
        if row is not None:
            self._sample(lane, row)

    def _keep(self, lane: Lane, stop: Stop) -> None:
        """Keep a state, or have the lane wait until what leaves for it is gone."""
        if not self._keeper.keep(lane, stop.kind):
            lane.owed = stop

    def _sample(self, lane: Lane, row: int) -> None:
        if lane.ticket.request.max_tokens == 0:
            self._finish(lane, "length")
            return
        try:
            token = lane.sampler.sample(row)
        except BackendError as failure:
            self._fail(lane, failure, suspect=True)
            return
        self.counters.sampled += 1
        reason = lane.say(token, self._clock())
        if reason is not None:
            self._finish(lane, reason)

    # ---- what there is ------------------------------------------------------------------------

    def occupancy(self) -> Occupancy:
        """Return what the pool holds now."""
        limits, pool, ledger = self._runtime.limits, self._keeper.pool, self._keeper.memory.ledger
        used = limits.n_sequences - pool.free_sequences
        budgets = pool.budgets
        return Occupancy(
            lanes=len(self._lanes),
            queued=len(self._scheduler),
            paused=sum(ticket.lane is not None for ticket in self._scheduler),
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
            running=tuple(_view(lane) for lane in self._lanes),
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
