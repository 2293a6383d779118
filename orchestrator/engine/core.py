"""The loop, without its thread: admit, evaluate, keep, sample, finish.

Single-threaded and clocked from outside, so that tests walk it step by step on the simulated
runtime. Decisions are the pool's; this module only carries them out:

    submit ─▶ queue ─▶ admit ─▶ lanes ─▶ decode call ─▶ keep at stops, sample ─▶ listener

A step makes at most two decode calls: one token for every lane that decodes, then one chunk of
the prompt of one lane. llama.cpp would cut a mixed call into equal-length pieces anyway.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.engine.lane import Lane, Listener, Ticket
from orchestrator.engine.memory import Memory
from orchestrator.engine.request import Finished, FinishReason, Outcome, Request, Timings, Usage
from orchestrator.errors import (
    BackendError,
    DecodeFailed,
    InvalidArgument,
    OrchestratorError,
    PoolFull,
    PromptTooLong,
    StateRefused,
)
from orchestrator.pool.checkpoint import Checkpoint, Kind, Stop
from orchestrator.pool.index import pack
from orchestrator.pool.pool import Admission, Pool, Seed
from orchestrator.runtime.protocol import Chunk, Runtime, Sampling

log = logging.getLogger("orchestrator.engine")


@dataclass(frozen=True, slots=True)
class Options:
    """How a core is set up. `checkpoints` False keeps and reuses nothing."""

    n_lanes: int = 1
    checkpoints: bool = True
    history: int = 0


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the engine was opened: requests, tokens, checkpoints, and how often every
    state had to be dropped after a failed decode.
    """

    requests: int = 0
    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    kept_checkpoints: int = 0
    evicted_checkpoints: int = 0
    recoveries: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the pool holds now. `cells_total` is None where tokens take no cell."""

    lanes: int
    queued: int
    sequences_used: int
    sequences_total: int
    cells_used: int
    cells_total: int | None
    checkpoints: dict[Kind, int]
    resident_bytes: int


class Core:
    """See the module's head. All methods are called from one thread."""

    def __init__(
        self,
        runtime: Runtime,
        clock: Callable[[], float],
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
        self._memory = Memory(runtime)
        self._pool = self._new_pool()
        self._queue: deque[Ticket] = deque()
        self._lanes: list[Lane] = []
        self._seating: Ticket | None = None  # out of the queue and not in a lane yet
        self.counters = Counters()

    def _new_pool(self) -> Pool:
        return Pool(
            self._runtime.limits.n_sequences,
            self._memory.ledger,
            divisible=self._runtime.model.memory == "attention",
            history=self._options.history,
        )

    # ---- from outside -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._queue and not self._lanes

    def ticket(self, request: Request, listener: Listener) -> Ticket:
        """Check a request and return a ticket to `enqueue`; safe in any thread.

        `listener` gets its events on the engine's thread, the last one `Finished` or an error.
        Raises `PromptTooLong` or `InvalidArgument`.
        """
        limits, model = self._runtime.limits, self._runtime.model
        if len(request.tokens) > limits.n_context:
            raise PromptTooLong(len(request.tokens), limits.n_context)
        if min(request.tokens) < 0 or max(request.tokens) >= model.n_vocab:
            raise InvalidArgument(f"token ids must lie in 0 to {model.n_vocab - 1}")
        return Ticket(request, listener, self._clock())

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a checked request."""
        self._queue.append(ticket)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Check and queue a request in one go."""
        ticket = self.ticket(request, listener)
        self.enqueue(ticket)
        return ticket

    def step(self) -> None:
        """Do one turn of the loop. Never raises for what goes wrong with a request or a decode."""
        try:
            self._reap()
            self._admit()
            self._advance([lane for lane in self._lanes if not lane.is_prefilling])
            self._advance([lane for lane in self._lanes if lane.is_prefilling][:1])
        except DecodeFailed as failure:
            self.fail_all(failure)

    def fail_all(self, error: OrchestratorError) -> None:
        """End everything that runs with `error` and forget every state; queued requests stay."""
        log.error("all states are dropped: %s", error)
        try:
            self._end_lanes(error)
        finally:
            self._memory.reset()
            self._pool = self._new_pool()
            self._count(recoveries=1)

    def end_all(self, error: OrchestratorError) -> None:
        """End everything, queued requests too, before the runtime is closed."""
        self._end_lanes(error)
        while self._queue:
            self._queue.popleft().listener(error)

    def _end_lanes(self, error: OrchestratorError) -> None:
        lanes, self._lanes = self._lanes, []
        if self._seating is not None:
            self._seating.listener(error)
            self._seating = None
        for lane in lanes:
            lane.ticket.listener(error)
        for lane in lanes:
            lane.sampler.close()

    def occupancy(self) -> Occupancy:
        """Return what the pool holds now."""
        limits, pool, ledger = self._runtime.limits, self._pool, self._memory.ledger
        used = limits.n_sequences - pool.free_sequences
        return Occupancy(
            lanes=len(self._lanes),
            queued=len(self._queue),
            sequences_used=used,
            sequences_total=limits.n_sequences,
            cells_used=ledger.used,
            cells_total=None if ledger.free is None else limits.n_cells,
            checkpoints=pool.count_by_kind(),
            resident_bytes=used * limits.state_bytes + ledger.used * limits.cell_bytes,
        )

    # ---- coming and going ---------------------------------------------------------------------

    def _reap(self) -> None:
        """End what was cancelled since the last step."""
        for ticket in [ticket for ticket in self._queue if ticket.cancelled]:
            self._queue.remove(ticket)
            ticket.listener(Finished(self._never_ran(ticket)))
        for lane in [lane for lane in self._lanes if lane.ticket.cancelled]:
            self._finish(lane, "cancelled")

    def _never_ran(self, ticket: Ticket) -> Outcome:
        waited = self._clock() - ticket.submitted
        usage = Usage(len(ticket.request.tokens), 0, 0, 0)
        return Outcome("", (), "cancelled", usage, Timings(waited, None, 0.0, 0.0, waited))

    def _admit(self) -> None:
        """Give lanes to queued requests, in order, as far as there is room."""
        while self._queue and len(self._lanes) < self._options.n_lanes:
            # out of the queue first: whatever happens from here on, it gets an answer
            ticket = self._seating = self._queue.popleft()
            request = ticket.request
            admission = self._pool.plan_admission(
                pack(request.tokens),
                turn=request.turn,
                conversation=request.conversation,
                cache=self._uses_cache(request),
            )
            if admission is None:
                self._put_back(ticket)
                return
            self._seat(ticket, admission)
            self._seating = None

    def _put_back(self, ticket: Ticket) -> None:
        """Let a request wait for room; where nothing runs that could make any, refuse it."""
        self._seating = None
        if self._lanes:
            self._queue.appendleft(ticket)
            return
        ticket.listener(
            PoolFull(
                f"a prompt of {len(ticket.request.tokens):,} tokens finds no room among "
                f"{self._runtime.limits.n_cells:,} cells; shorten it or open a larger context"
            )
        )

    def _seat(self, ticket: Ticket, admission: Admission) -> None:
        """Carry an admission out and open its lane."""
        self._evict(admission.evicted)
        if admission.seed is not None and not self._sow(admission, admission.seed):
            self._evict([admission.seed.checkpoint])
            self._queue.appendleft(ticket)  # admitted again, from the next best or cold
            return
        self._pool.admitted(admission)
        request = ticket.request
        n_seen = request.sampling.repeat_last
        seen = request.tokens[-n_seen:] if n_seen else ()
        sampler = self._runtime.sampler(self._seeded(request.sampling), seen)
        limits = self._runtime.limits
        lane = Lane(
            ticket, admission, sampler, self._runtime.tokenizer, limits.n_context, self._clock()
        )
        self._lanes.append(lane)
        self._count(requests=1, reused=lane.cached)

    def _sow(self, admission: Admission, seed: Seed) -> bool:
        """Put a checkpoint under a lane; False when it turns out to be of no use."""
        try:
            if admission.takes_over:
                self._memory.cut(admission.sequence, seed.length)
            else:
                self._memory.copy(seed.checkpoint.sequence, admission.sequence, seed.length)
        except (InvalidArgument, StateRefused, PoolFull) as refusal:
            log.warning("a checkpoint is dropped, the prompt is read again: %s", refusal)
            return False
        return True

    def _seeded(self, sampling: Sampling) -> Sampling:
        if sampling.seed is not None:
            return sampling
        return replace(sampling, seed=self._rng.randrange(2**32))

    def _uses_cache(self, request: Request) -> bool:
        return request.use_cache and self._options.checkpoints

    def _finish(self, lane: Lane, reason: FinishReason) -> None:
        """End a lane well: its sequence becomes a checkpoint where that is of use."""
        outcome = lane.finish(reason, self._clock())
        kind: Kind = "partial" if lane.is_prefilling else "reply"
        try:
            self._leave(lane, kind if self._uses_cache(lane.ticket.request) else None)
        finally:
            lane.ticket.listener(Finished(outcome))

    def _fail(self, lane: Lane, error: OrchestratorError, *, suspect: bool) -> None:
        """End a lane with an error; where its states are `suspect`, what was kept of it as well."""
        try:
            if suspect:
                serial = lane.admission.serial
                self._evict([c for c in self._pool.checkpoints if c.serial == serial], scrub=True)
                self._memory.scrub(lane.sequence)
            self._leave(lane, None)
        finally:
            if lane in self._lanes:
                self._lanes.remove(lane)
            lane.ticket.listener(error)

    def _leave(self, lane: Lane, kind: Kind | None) -> None:
        self._lanes.remove(lane)
        lane.sampler.close()
        release = self._pool.plan_release(lane.admission, lane.fed.tobytes(), kind)
        self._evict(release.evicted)
        if release.checkpoint is None:
            self._memory.clear(lane.sequence)
        else:
            self._count(kept_checkpoints=1)
        self._pool.released(release)

    # ---- evaluating ---------------------------------------------------------------------------

    def _advance(self, lanes: Sequence[Lane]) -> None:
        """Evaluate the next chunk of each lane in one decode call and act on what comes out."""
        if not lanes:
            return
        chunks = [lane.next_chunk(self._runtime.limits.n_batch) for lane in lanes]
        begun = self._clock()
        try:
            rows = self._decode(chunks)
        except PoolFull as full:
            # the youngest gives way, the others go on with the next step
            self._fail(lanes[-1], full, suspect=False)
            return
        seconds = self._clock() - begun
        for lane, chunk, row in zip(lanes, chunks, rows, strict=True):
            self._settle(lane, chunk, row, seconds)

    def _decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Make room for a decode call, then make it. Raises `PoolFull` with nothing evaluated."""
        cells = sum(len(chunk.tokens) for chunk in chunks)
        leaving = self._pool.plan_room(cells)
        if leaving is None:
            raise PoolFull(
                f"{cells} cells are wanted and every one of {self._runtime.limits.n_cells} is in "
                "use by running requests; raise ctx or send fewer at once"
            )
        self._evict(leaving)
        return self._memory.decode(chunks)

    def _settle(self, lane: Lane, chunk: Chunk, row: int | None, seconds: float) -> None:
        """Keep a state at a stop; sample where logits were asked for."""
        prefilled = len(chunk.tokens) if lane.is_prefilling else 0
        stop = lane.took(chunk, seconds)
        self._count(prefilled=prefilled)
        if stop is not None:
            self._keep(lane, stop)
        if row is not None:
            self._sample(lane, row)

    def _keep(self, lane: Lane, stop: Stop) -> None:
        keep = self._pool.plan_keep(lane.admission, lane.fed.tobytes(), stop.kind)
        if keep is None:
            return
        self._evict(keep.evicted)
        self._memory.copy(lane.sequence, keep.checkpoint.sequence)
        self._pool.kept(keep)
        self._count(kept_checkpoints=1)

    def _sample(self, lane: Lane, row: int) -> None:
        if lane.ticket.request.max_tokens == 0:
            self._finish(lane, "length")
            return
        try:
            token = lane.sampler.sample(row)
        except BackendError as failure:
            self._fail(lane, failure, suspect=True)
            return
        self._count(sampled=1)
        reason = lane.say(token, self._clock())
        if reason is not None:
            self._finish(lane, reason)

    def _evict(self, checkpoints: Iterable[Checkpoint], *, scrub: bool = False) -> None:
        for checkpoint in list(checkpoints):
            empty = self._memory.scrub if scrub else self._memory.clear
            empty(checkpoint.sequence)
            self._pool.drop(checkpoint)
            self._count(evicted_checkpoints=1)

    def _count(self, **more: int) -> None:
        now = self.counters
        self.counters = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})
