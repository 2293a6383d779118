"""A core over the simulated runtime, and what must hold of it after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.engine.core import Core, Options
from orchestrator.engine.request import GREEDY, Event, Finished, Outcome, Request
from orchestrator.errors import OrchestratorError
from orchestrator.runtime.protocol import Limits, MemoryKind
from orchestrator.runtime.simulated import (
    Cost,
    FailingRuntime,
    ManualClock,
    SimulatedRuntime,
)
from orchestrator.text.bytes import ByteTokenizer

KINDS: tuple[MemoryKind, ...] = ("hybrid", "recurrent", "attention", "windowed")


class Simulation:
    """A core, its runtime and its clock, driven one request at a time or step by step."""

    def __init__(
        self,
        memory: MemoryKind = "hybrid",
        *,
        n_sequences: int = 8,
        n_context: int = 4096,
        n_cells: int | None = None,
        n_batch: int = 256,
        end_every: int = 0,
        options: Options | None = None,
        cost: Cost | None = None,
        copies: bool = True,
        cell_bytes: int = 10,
    ) -> None:
        limits = Limits(
            n_sequences=n_sequences,
            n_cells=n_cells or n_context,
            n_context=n_context,
            n_batch=n_batch,
            state_bytes=1000,
            cell_bytes=cell_bytes,
            copies=copies,
            sliced=copies,
        )
        self.clock = ManualClock()
        self.runtime = FailingRuntime(
            limits,
            memory=memory,
            tokenizer=ByteTokenizer.for_chat(),
            end_every=end_every,
            clock=self.clock,
            cost=cost,
        )
        self.core = Core(self.runtime, self.clock, options)

    def run(self) -> None:
        """Step until nothing is left, checking the invariants after each step."""
        for _ in range(100_000):
            if self.core.is_idle:
                return
            self.core.step()
            self.check()
        raise AssertionError("the core never came to rest")

    def ask(self, request: Request) -> Outcome:
        """Run one request to its end; raises the error it ended with."""
        events: list[Event | OrchestratorError] = []
        self.core.submit(request, events.append)
        self.run()
        last = events[-1]
        if isinstance(last, OrchestratorError):
            raise last
        assert isinstance(last, Finished)
        return last.outcome

    def check(self) -> None:
        """Assert what must hold between steps."""
        check(self.core, self.runtime)


def check(core: Core, runtime: SimulatedRuntime) -> None:
    """Assert that pool, ledger, mover and runtime say the same, and that every budget holds."""
    keeper = core._keeper
    pool, ledger, book = keeper.pool, keeper.memory.ledger, keeper.pool.book
    lanes = {lane.sequence: lane for lane in core._seats.lanes}
    check_holders(core)
    resident = {c.sequence: c.holder for c in book.resident() if not c.holder.is_lane}
    assert len(lanes) == len(core._seats.lanes), "two lanes in one sequence"
    assert not lanes.keys() & resident.keys(), "a lane runs in a checkpoint's sequence"
    n_sequences = runtime.limits.n_sequences
    assert pool.free_sequences == n_sequences - len(lanes) - len(resident)
    for sequence in range(n_sequences):
        held = runtime.length(sequence)
        assert ledger.length(sequence) == held
        if sequence in resident:
            assert held == resident[sequence].length
            assert runtime.is_incomplete(sequence) != resident[sequence].is_whole
        elif sequence in lanes:
            assert not lanes[sequence].is_ready or held == lanes[sequence].fed
        else:
            assert held == 0
    assert ledger.used == runtime.used_cells
    check_budgets(core)
    check_chats(core)


def check_holders(core: Core) -> None:
    """Assert that every checkpoint is entered where its rows are, and a live one at their end."""
    pool = core._keeper.pool
    holders = dict.fromkeys(c.holder for c in pool.checkpoints)
    assert sum(len(holder.checkpoints) for holder in holders) == len(pool.checkpoints)
    sequences = [holder.sequence for holder in holders if holder.sequence is not None]
    assert len(sequences) == len(set(sequences)), "two holders in one sequence"
    for holder in holders:
        live = [c for c in holder.checkpoints if c.is_live]
        if holder.is_lane:
            assert holder is pool.lane(holder.sequence or 0)
            assert not live
            continue
        if holder.sequence is None:
            assert not live
            assert holder.length >= holder.longest()
        else:
            assert holder.length == holder.longest()
            assert len(live) == holder.is_whole
            assert all(c.length == holder.length for c in live)
        for checkpoint in holder.checkpoints:
            assert holder.path.startswith(checkpoint.path)


def check_budgets(core: Core) -> None:
    """Assert that what is exported fits, and that lanes alone pass the resident budget."""
    keeper = core._keeper
    pool, ledger = keeper.pool, keeper.memory.ledger
    exported = dict.fromkeys(c.holder for c in pool.book.exported())
    n_bytes = sum(c.n_bytes for c in pool.checkpoints) + sum(h.n_bytes for h in exported)
    assert pool.book.exported_bytes == n_bytes == keeper.mover.n_bytes
    assert pool.book.exported_tokens == sum(holder.length for holder in exported)
    in_use = all(c.leases for c in pool.book.exported())
    if not in_use:  # a budget may shrink under a state that is in use
        assert pool.exported_bytes <= pool.budgets.exported_bytes
        tokens = pool.budgets.exported_tokens
        assert tokens is None or pool.exported_tokens <= tokens
    cells = pool.budgets.resident_cells
    if cells is not None and ledger.free is not None and ledger.used > cells:
        movable = [
            c.sequence
            for c in pool.book.resident()
            if not c.holder.is_lane and not any(other.leases for other in c.holder.checkpoints)
        ]
        sequences = [sequence for sequence in movable if sequence is not None]
        assert not ledger.freed_by(sequences), "a checkpoint stays beyond the resident budget"


def check_chats(core: Core) -> None:
    """Assert that leases are those of what runs or waits, and that latest turns are current."""
    keeper = core._keeper
    seeds = [lane.admission.seed for lane in core._seats.lanes if not lane.is_ready]
    holders = [seed.checkpoint for seed in seeds if seed is not None]
    holders += [t.lane.parked for t in core._seats.scheduler if t.lane and t.lane.parked]
    moving = keeper.pool.moving
    for checkpoint in keeper.pool.checkpoints:
        assert checkpoint.leases == holders.count(checkpoint)
        assert checkpoint.holder.leases == (checkpoint.holder in moving)
    for conversation, turn in keeper.pool.book.latest.items():
        assert turn in keeper.pool.checkpoints
        assert turn.kind in ("turn", "reply")
        assert turn.conversation == conversation
        assert not turn.is_superseded


def cold(request: Request, memory: MemoryKind = "hybrid", *, end_every: int = 0) -> Outcome:
    """Return what an uncached engine of its own answers."""
    alone = Simulation(memory, options=Options(checkpoints=False), end_every=end_every)
    return alone.ask(request)


def request(
    tokens: Sequence[int] | str,
    *,
    turn: int = 0,
    max_tokens: int = 12,
    conversation: str | None = None,
    use_cache: bool = True,
    **more: Any,
) -> Request:
    """Return a greedy request over token ids, or over the bytes of a text."""
    ids = tokens.encode() if isinstance(tokens, str) else tokens
    return Request(
        tokens=tuple(ids),
        turn=turn,
        sampling=GREEDY,
        max_tokens=max_tokens,
        conversation=conversation,
        use_cache=use_cache,
        **more,
    )
