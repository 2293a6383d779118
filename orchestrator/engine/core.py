"""The loop, without its thread: reap, move, admit, evaluate, keep, sample.

Single-threaded and clocked from outside, so that tests walk it step by step on the simulated
runtime. What is kept is the pool's decision, who has a lane that of the seats, how much is read
in a step the pace's; this module only asks them in turn:

    submit ─▶ queue ─▶ seats ─▶ lanes ─▶ decode call ─▶ keep at stops, sample ─▶ listener

A step makes at most two kinds of decode call: one token for every lane that speaks, then equal
chunks of the prompts of those that read. llama.cpp would cut a mixed call into equal-length
pieces anyway: on the demo model and two cores a mixed call took 0.90 to 1.11 of separate ones, a
joint one for prompts 0.84 to 1.08 (`tests/bench_lanes.py`), so calls are kept apart and short.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from orchestrator.engine.counters import Counters
from orchestrator.engine.keeper import Keeper
from orchestrator.engine.lane import Lane
from orchestrator.engine.occupancy import Occupancy, observe
from orchestrator.engine.pace import Pace
from orchestrator.engine.records import N_TOKENS_SEEN, Record, Records, Sink
from orchestrator.engine.request import Finished, FinishReason, Request
from orchestrator.engine.seats import Options as Options
from orchestrator.engine.seats import Seats
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
from orchestrator.pool.checkpoint import Kind, Stop
from orchestrator.pool.losses import Losses
from orchestrator.pool.plans import Budgets
from orchestrator.pool.seen import Seen
from orchestrator.runtime.protocol import Chunk, Runtime
from orchestrator.runtime.sampling import GrammarFailed

log = logging.getLogger("orchestrator.engine")

_RETRY_LEAST = 1.0  # seconds


class Core:
    """See the module's head. All methods but `ticket` are called from one thread."""

    def __init__(
        self,
        runtime: Runtime,
        clock: Clock,
        options: Options | None = None,
        rng: random.Random | None = None,
        wall: Clock = time.time,
    ) -> None:
        options = options or Options()
        limits = runtime.limits
        if not (isinstance(options.n_lanes, int) and 1 <= options.n_lanes <= limits.n_sequences):
            raise InvalidArgument(
                f"{options.n_lanes} lanes do not fit {limits.n_sequences} sequences; "
                "give at least 1 lane and at least as many sequences"
            )
        self._runtime = runtime
        self._clock = clock
        self.counters = Counters()
        losses = Losses(N_TOKENS_SEEN, divisible=runtime.model.memory == "attention")
        self._keeper = Keeper(runtime, options.budgets, self.counters, losses, options.n_lanes)
        self._records = Records(Seen(N_TOKENS_SEEN), losses, runtime.tokenizer, wall)
        rng = rng or random.Random()
        self._pace = Pace(limits.n_batch, options.step_seconds)
        self._seats = Seats(
            runtime, self._keeper, self._records, self._pace, options, self.counters, clock, rng
        )

    # ---- from outside -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or moving."""
        seats = self._seats
        return not (seats.lanes or len(seats.scheduler) or self._keeper.mover.is_busy)

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
            self._seats.scheduler.reserve(self._retry_after)
        except Busy:
            self.counters.busy += 1
            raise
        return ticket

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a checked request."""
        self._seats.enqueue(ticket)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Check and queue a request in one go."""
        ticket = self.ticket(request, listener)
        self.enqueue(ticket)
        return ticket

    def step(self) -> None:
        """Do one turn of the loop. Never raises for what goes wrong with a request or a decode."""
        with self._recovering():
            self._reap()
            self._move()
            self._seats.admit()
            n_speaking = self._speak()
            self._read(n_speaking)

    def warm(self, path: bytes) -> int:
        """Return how many tokens a packed prompt would be started from now."""
        seed = self._keeper.pool.book.longest(path)
        return seed.length if seed else 0

    def branch(self, conversation: str, other: str) -> None:
        """Let another conversation go on from where one stands, whatever that one does next."""
        self._keeper.pool.branch(conversation, other)

    def forget(self, conversation: str) -> None:
        """Give up every checkpoint of a conversation, except what a running request needs.

        Requests that were cancelled before are ended first, so that they leave nothing either.
        """
        with self._recovering():
            self._reap()
        with self._recovering():
            self._keeper.forget(conversation)
        self._records.forget(conversation)

    def resize(self, budgets: Budgets) -> None:
        """Take other budgets from now on."""
        if budgets.exported_bytes < self._keeper.pool.exported_bytes:
            self._seats.free_exported()
        with self._recovering():
            self._keeper.resize(budgets)

    def occupancy(self) -> Occupancy:
        """Return what lanes, queue and pool hold now."""
        return observe(self._seats, self._keeper, self._runtime.limits)

    def requests(self) -> tuple[Record, ...]:
        """Return the records of the requests that ended last, the latest at the end."""
        return tuple(self._records.last)

    def report_to(self, sink: Sink) -> None:
        """Hand every record to `sink` from now on, before its request is answered."""
        self._records.sink = sink

    def fail_all(self, error: OrchestratorError) -> None:
        """End everything that runs with `error` and forget every state in the context.

        Queued requests stay, and so do checkpoints in host memory.
        """
        log.error("all states are dropped: %s", error)
        try:
            for ticket in self._seats.vacate():
                ticket.answer(error)
        finally:
            self._keeper.lose()
            self._seats.hold_what_stands()
            self.counters.recoveries += 1

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Start over where the memory turns out to hold something else than it should."""
        try:
            yield
        except DecodeFailed as failure:
            self.fail_all(failure)

    def end_all(self, error: OrchestratorError) -> None:
        """End everything, queued requests too, before the runtime is closed."""
        for ticket in self._seats.vacate():
            ticket.answer(error)
        for ticket in self._seats.scheduler:
            self._seats.leave_queue(ticket)
            ticket.answer(error)

    def _retry_after(self) -> float:
        """Return in about how many seconds the queue will be shorter; called in any thread."""
        ahead = [lane.outlook for lane in list(self._seats.lanes)]
        mean = sum(ahead) / max(1, len(ahead))
        return max(_RETRY_LEAST, self._pace.seconds(0, int(mean)))

    # ---- coming to an end ---------------------------------------------------------------------

    def _reap(self) -> None:
        """End what was cancelled, or ran out of time, since the last step."""
        for ticket in self._seats.scheduler:
            if ticket.is_answered or ticket.is_cancelled or ticket.has_expired:
                self._end_waiting(ticket)
        for lane in list(self._seats.lanes):
            if lane.ticket.is_cancelled:
                self._finish(lane, "cancelled")
            elif lane.ticket.has_expired:
                self._finish(lane, "deadline")

    def _end_waiting(self, ticket: Ticket) -> None:
        """End a request that waits: one that never ran, or one that was preempted."""
        cancelled = ticket.is_answered or ticket.is_cancelled
        reason: FinishReason = "cancelled" if cancelled else "deadline"
        self._count_end(reason)
        lane = ticket.lane
        if lane is None:
            outcome = ticket.never_ran(reason)
        else:
            outcome = self._records.end(lane, lane.finish(reason, self._clock()))
        try:
            self._seats.leave_queue(ticket)
        finally:
            ticket.answer(Finished(outcome))

    def _count_end(self, reason: FinishReason) -> None:
        self.counters.cancelled += reason == "cancelled"
        self.counters.expired += reason == "deadline"

    def _finish(self, lane: Lane, reason: FinishReason) -> None:
        """End a lane well: its sequence becomes a checkpoint where that is of use."""
        outcome = self._records.end(lane, lane.finish(reason, self._clock()))
        kind: Kind = "partial" if lane.is_reading else "reply"
        keeps = self._seats.uses_cache(lane.ticket.request)
        self._count_end(reason)
        try:
            self._seats.release(lane, kind if keeps else None)
        finally:
            lane.ticket.answer(Finished(outcome))

    def _fail(self, lane: Lane, error: OrchestratorError, *, suspect: bool) -> None:
        """End a lane with an error; where its states are `suspect`, what was kept of it as well."""
        try:
            if suspect:
                self._keeper.condemn(lane)
            self._records.leave(lane)
            self._seats.release(lane, None)
        finally:
            lane.ticket.answer(error)

    # ---- evaluating ---------------------------------------------------------------------------

    def _move(self) -> None:
        """Move a slice of what is on its way; all of it where nobody would notice."""
        mover = self._keeper.mover
        mover.advance()
        while mover.is_busy and not any(lane.may_advance for lane in self._seats.lanes):
            mover.advance()
        for lane in self._seats.lanes:
            if lane.owed is not None and self._keeper.keep(lane, lane.owed.kind):
                lane.owed = None

    def _speak(self) -> int:
        """Evaluate the latest token of every lane that speaks; return how many there are."""
        lanes = [lane for lane in self._seats.lanes if lane.may_advance and not lane.is_reading]
        lanes.sort(key=lambda lane: lane.sequence)
        n_joint = max(1, self._runtime.limits.n_joint or len(lanes))
        calls = range(0, len(lanes), n_joint)
        begun = self._clock()
        for first in calls:
            group = [lane for lane in lanes[first : first + n_joint] if lane in self._seats.lanes]
            if group:
                self._evaluate(group, [lane.next_chunk(1) for lane in group])
        if lanes:
            self._pace.decoded(self._clock() - begun, len(lanes), len(calls))
        return len(lanes)

    def _read(self, n_speaking: int) -> None:
        """Evaluate a chunk of the prompts that come first, as long as the pace allows."""
        lanes = [lane for lane in self._seats.lanes if lane.may_advance and lane.is_reading]
        if not lanes:
            return
        group, chunks = self._equal_chunks(self._in_order(lanes), self._pace.budget(n_speaking))
        begun = self._clock()
        self._evaluate(group, chunks)
        self._pace.read(sum(len(chunk.tokens) for chunk in chunks), self._clock() - begun)

    def _in_order(self, lanes: Sequence[Lane]) -> list[Lane]:
        of = {lane.ticket: lane for lane in lanes}
        ranked = self._seats.scheduler.ranked(
            of, self._clock(), lambda ticket: of[ticket].remaining
        )
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
        n_most = min(n_joint, budget // length) if limits.mixes else 1
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
            last = self._seats.make_way()
            if last is not None:
                self._fail(last, full, suspect=False)
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
        self._seats.scheduler.shares.serve(lane.ticket.request.client, len(chunk.tokens))
        if stop is not None:
            self._keep(lane, stop)
        elif lane.is_at_reply_point:
            self._keep_in_reply(lane)
        if row is not None:
            self._sample(lane, row)

    def _keep(self, lane: Lane, stop: Stop) -> None:
        """Keep a state, or have the lane wait until what leaves for it is gone."""
        begun, taken = self._clock(), self.counters.snapshot_bytes
        if not self._keeper.keep(lane, stop.kind):
            lane.owed = stop
        self._pace.moved(self.counters.snapshot_bytes - taken, self._clock() - begun)

    def _keep_in_reply(self, lane: Lane) -> None:
        """Keep a state inside a reply, and of those before it what still is of use."""
        self._keep(lane, Stop(lane.fed, "reply"))
        self._keeper.thin(lane)

    def _sample(self, lane: Lane, row: int) -> None:
        if lane.ticket.request.max_tokens == 0:
            self._finish(lane, "length")
            return
        try:
            token = lane.sampler.sample(row)
        except BackendError as failure:
            self._fail(lane, failure, suspect=not isinstance(failure, GrammarFailed))
            return
        self.counters.sampled += 1
        reason = lane.say(token, self._clock())
        if reason is not None:
            self._finish(lane, reason)
