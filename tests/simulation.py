"""A core over the simulated runtime, and what must hold of it after every step."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.engine.core import Core, Options
from orchestrator.engine.request import GREEDY, Event, Finished, Outcome, Request
from orchestrator.errors import OrchestratorError
from orchestrator.runtime.protocol import Limits, MemoryKind
from orchestrator.runtime.simulated import Cost, FailingRuntime, ManualClock
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
    ) -> None:
        limits = Limits(
            n_sequences=n_sequences,
            n_cells=n_cells or n_context,
            n_context=n_context,
            n_batch=n_batch,
            state_bytes=1000,
            cell_bytes=10,
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
        pool, ledger = self.core._pool, self.core._memory.ledger
        lanes = {lane.sequence: len(lane.fed) for lane in self.core._lanes}
        kept = {c.sequence: c.length for c in pool.checkpoints}
        assert len(kept) == len(pool.checkpoints), "two checkpoints in one sequence"
        assert not lanes.keys() & kept.keys(), "a lane runs in a checkpoint's sequence"
        held = lanes | kept
        n_sequences = self.runtime.limits.n_sequences
        assert pool.free_sequences == n_sequences - len(held)
        for sequence in range(n_sequences):
            assert self.runtime.length(sequence) == held.get(sequence, 0)
            assert ledger.length(sequence) == held.get(sequence, 0)
        assert ledger.used == self.runtime.used_cells


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
    )
