"""Random walks: whatever is asked, in whatever order, whatever fails, replies are the cold ones.

Thousands of operations on a pool that is too small for them, with every invariant checked after
each. The mutants at the end show that the walk would notice a state that does not fit its rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest
from simulation import KINDS, Simulation, cold, request

from orchestrator.engine.core import Options
from orchestrator.engine.request import Event, Finished, Priority, Request
from orchestrator.engine.scheduler import Patience
from orchestrator.engine.ticket import Ticket
from orchestrator.errors import DecodeFailed, OrchestratorError, StateRefused
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import MemoryKind
from orchestrator.runtime.simulated import SimulatedRuntime

N_CONTEXT = 240
OPENER = "<a>"


@cache
def cold_tokens(request: Request, memory: MemoryKind) -> tuple[int, ...]:
    """Return what an uncached engine says to a request."""
    return cold(request, memory, end_every=40).tokens


@dataclass(slots=True)
class Asked:
    """One request of the walk and what came of it."""

    request: Request
    ticket: Ticket
    events: list[Event | OrchestratorError] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished | OrchestratorError)


class Walk:
    """A random client of a small pool."""

    def __init__(self, memory: MemoryKind, seed: int, *, copies: bool = True) -> None:
        self.rng = random.Random(seed)
        self.memory: MemoryKind = memory
        self.budgets = Budgets(
            resident_cells=self.rng.choice([None, 200, 400]),
            exported_bytes=self.rng.choice([0, 40_000, 400_000]),
            exported_tokens=self.rng.choice([None, 500]),
            history=self.rng.choice([0, 3]),
        )
        n_lanes = self.rng.randrange(1, 5)
        self.simulation = Simulation(
            memory,
            n_sequences=self.rng.randrange(n_lanes, 9),
            n_context=N_CONTEXT,
            n_cells=self.rng.choice([N_CONTEXT, 2 * N_CONTEXT]),
            n_batch=self.rng.choice([7, 32, 64]),
            end_every=40,
            copies=copies,
            options=Options(
                n_lanes=n_lanes,
                budgets=self.budgets,
                patience=Patience(ageing=3.0, prefix_steps=self.rng.choice([0, 50])),
            ),
        )
        self.histories = ["s" * 70, "t" * 9, ""]
        self.asked: list[Asked] = []
        self.reused = 0

    def run(self, n_operations: int) -> None:
        for _ in range(n_operations):
            self._operate()
            self.simulation.check()
        self.simulation.runtime.fails_next = None
        self.simulation.run()
        for asked in self.asked:
            self._judge(asked)

    def _operate(self) -> None:
        operations: list[tuple[Callable[[], None], int]] = [
            (self.simulation.core.step, 60),
            (self._submit, 14),
            (self._cancel, 4),
            (self._resize, 2),
            (self._fail, 2),
            (self._forget, 1),
            (lambda: self.simulation.clock.advance(1.0), 5),
        ]
        actions, weights = zip(*operations, strict=True)
        self.rng.choices(actions, weights)[0]()

    def _submit(self) -> None:
        if sum(not asked.is_over for asked in self.asked) > 12:
            return
        history = self.rng.choice(self.histories) + f"<u>{self.rng.choice('xyz') * 11}"
        if len(history) > N_CONTEXT - 60:
            history = history[: self.rng.randrange(60, 120)]
        self.histories.append(history)
        priorities: list[Priority] = ["interactive", "default", "background"]
        wanted = request(
            history + OPENER,
            turn=len(history),
            max_tokens=self.rng.choice([0, 1, 5, 30]),
            conversation=self.rng.choice([None, None, "a", "b"]),
            use_cache=self.rng.random() < 0.95,
            one_off=self.rng.random() < 0.1,
            base=self.rng.choice([0, 70]) if history.startswith("s" * 70) else 0,
            priority=self.rng.choice(priorities),
            client=self.rng.choice([None, "c", "d"]),
            deadline=self.rng.choice([None, None, None, 20.0]),
        )
        events: list[Event | OrchestratorError] = []
        ticket = self.simulation.core.submit(wanted, events.append)
        self.asked.append(Asked(wanted, ticket, events))

    def _cancel(self) -> None:
        if self.asked:
            asked = self.rng.choice(self.asked[-8:])
            asked.is_cancelled = True
            asked.ticket.cancel()

    def _resize(self) -> None:
        shrunk = Budgets(exported_bytes=self.rng.choice([0, 20_000]), resident_cells=150)
        self.budgets = self.rng.choice([shrunk, self.budgets])
        self.simulation.core.resize(self.budgets)

    def _fail(self) -> None:
        runtime, refused = self.simulation.runtime, StateRefused("checksum", "damaged in a test")
        failing = self.rng.choice(["fails_next_copy", "fails_next_restore", "fails_next"])
        lost = DecodeFailed("lost in a test") if self.rng.random() < 0.2 else None
        setattr(runtime, failing, lost if failing == "fails_next" else refused)

    def _forget(self) -> None:
        self.simulation.core.forget(self.rng.choice("ab"))

    def _judge(self, asked: Asked) -> None:
        assert asked.is_over, "a request was never answered"
        assert sum(isinstance(e, Finished | OrchestratorError) for e in asked.events) == 1
        last = asked.events[-1]
        if isinstance(last, OrchestratorError):
            assert isinstance(last, DecodeFailed), last
            return
        assert isinstance(last, Finished)
        outcome = last.outcome
        plain = request(asked.request.tokens, max_tokens=asked.request.max_tokens or 0)
        said = cold_tokens(plain, self.memory)
        if outcome.finish_reason in ("cancelled", "deadline"):
            assert said[: len(outcome.tokens)] == outcome.tokens
        else:
            assert outcome.tokens == said
            usage = outcome.usage
            assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
        self.reused += outcome.usage.cached_tokens


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("memory", KINDS)
def test_a_walk_of_thousands_of_operations_never_says_anything_wrong(
    memory: MemoryKind, seed: int
) -> None:
    walk = Walk(memory, seed)
    walk.run(1500)
    limits, options = walk.simulation.runtime.limits, walk.simulation.core._seats._options
    assert walk.reused > 0 or limits.n_sequences <= options.n_lanes + 1
    assert walk.simulation.core.is_idle


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory", KINDS)
def test_a_walk_without_copies_never_says_anything_wrong(memory: MemoryKind, seed: int) -> None:
    walk = Walk(memory, 100 + seed, copies=False)
    walk.run(1500)
    assert walk.simulation.core.is_idle


# ---- mutants: each must be noticed --------------------------------------------------------------


def _stateless_copy(self: SimulatedRuntime, source: int, target: int, length: int | None) -> None:
    """Share the rows and leave the recurrent state behind."""
    _true_copy(self, source, target, length)
    self._held[target].state = 0


def _early_copy(self: SimulatedRuntime, source: int, target: int, length: int | None) -> None:
    """Share the rows with the state of one token before."""
    _true_copy(self, source, target, length)
    self._held[target].state ^= 1


def _rowless_copy(self: SimulatedRuntime, source: int, target: int, length: int | None) -> None:
    """Take the state along over the rows of nothing in particular."""
    _true_copy(self, source, target, length)
    self._held[target].rows ^= 1


_true_copy = SimulatedRuntime.copy


@pytest.mark.parametrize("mutant", [_stateless_copy, _early_copy, _rowless_copy])
def test_the_walk_notices_a_state_that_does_not_belong_to_its_rows(
    mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        SimulatedRuntime,
        "copy",
        lambda self, source, target, length=None: mutant(self, source, target, length),
    )
    with pytest.raises(AssertionError):
        _walk_a_dozen()


def _walk_a_dozen() -> None:
    for seed in range(12):
        Walk("hybrid", seed).run(1500)
