"""Holders and snapshots under attack: long walks through small pools, odd timings, what fails.

The walk is nastier than that of `test_walks`: prompts with everything that is known of a chat,
replies that come back word for word, forks anywhere, slices of a few tokens, and a runtime any of
whose calls may fail, also where nobody foresaw it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from simulation import Simulation, cold, request

from orchestrator.engine import mover
from orchestrator.engine.core import Options
from orchestrator.engine.request import Event, Finished, Priority, Request
from orchestrator.engine.scheduler import Patience
from orchestrator.engine.ticket import Ticket
from orchestrator.errors import (
    BackendError,
    DecodeFailed,
    OrchestratorError,
    PoolFull,
    StateRefused,
)
from orchestrator.pool.checkpoint import Checkpoint, Holder
from orchestrator.pool.eviction import fewest
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import MemoryKind
from orchestrator.runtime.simulated import Cost, SimulatedRuntime

N_CONTEXT = 320
SLICE = 24
STATE = 17_400  # bytes that a state is counted as
OPENER = b"<a>[think]"
CHATS = ("a", "b", "c")

REFUSALS: dict[str, Callable[[], Exception]] = {
    "copy": lambda: StateRefused("checksum", "refused in a test"),
    "copy_rows": lambda: PoolFull("full in a test"),
    "save_rows": lambda: MemoryError("no memory in a test"),
    "save_state": lambda: StateRefused("finite", "not finite in a test"),
    "strip": lambda: BackendError("llama.cpp would not strip in a test"),
    "_open": lambda: StateRefused("checksum", "damaged in a test"),
}
"""What a call may raise by its contract."""

BREAKDOWNS = ("strip", "cut", "clear", "copy_rows", "save_state", "restore_rows", "restore_state")
"""What may find that nothing can be trusted any more."""


@dataclass(slots=True)
class Asked:
    """One request of a walk and what came of it."""

    request: Request
    ticket: Ticket
    events: list[Event | OrchestratorError] = field(default_factory=list)
    is_told: bool = False

    @property
    def is_over(self) -> bool:
        """Whether its last event has come."""
        return bool(self.events) and isinstance(self.events[-1], Finished | OrchestratorError)


@dataclass(frozen=True, slots=True)
class Past:
    """What a chat has come to: its tokens, and where messages of the user start in them."""

    tokens: bytes
    starts: tuple[int, ...] = ()
    base: int = 0
    conversation: str | None = None


HEADS = (
    Past(b"s" * 70, base=70),
    Past(b"s" * 70 + b"tools" * 9, base=115),
    Past(b"t" * 9),
    Past(b""),
)


@cache
def said_cold(tokens: bytes, memory: MemoryKind) -> tuple[int, ...]:
    """Return what an uncached engine with a long context says to a prompt."""
    return cold(request(tokens.decode(), max_tokens=48), memory, end_every=40).tokens


class Walk:
    """A random client of a small pool, on a runtime that may fail in any way."""

    def __init__(self, seed: int, memory: MemoryKind = "hybrid", **fixed: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.memory: MemoryKind = memory
        self.budgets = Budgets(
            resident_cells=rng.choice([None, None, 150, 400]),
            exported_bytes=rng.choice([0, STATE + 100, 4 * STATE, 30 * STATE, 1 << 30]),
            exported_tokens=rng.choice([None, None, 300]),
            history=rng.choice([0, 1, 8, 1000]),
        )
        n_lanes = rng.randrange(1, 5)
        self.simulation = self._simulate(n_lanes, **fixed)
        self.n_lanes = n_lanes
        self.pasts = list(HEADS)
        self.asked: list[Asked] = []
        self.reused = self.n_reused = self.n_failed = 0
        self.fails: list[tuple[str, Exception]] = []
        self._arm()

    def _simulate(self, n_lanes: int, **fixed: Any) -> Simulation:
        rng = self.rng
        sizes: dict[str, Any] = {
            "n_sequences": rng.choice([n_lanes, n_lanes + 1, n_lanes + 2, 9]),
            "n_cells": rng.choice([N_CONTEXT, N_CONTEXT + 60, 2 * N_CONTEXT, 6 * N_CONTEXT]),
            "n_batch": rng.choice([7, 32, 64]),
            "cost": rng.choice([None, Cost(call=0.001, token=0.01, moved=1e-6), Cost(call=0.1)]),
        }
        least, most = mover.SLICE_LEAST, mover.SLICE_MOST
        mover.SLICE_LEAST = mover.SLICE_MOST = rng.choice([SLICE, 1000])
        try:
            return Simulation(
                self.memory,
                n_context=N_CONTEXT,
                end_every=40,
                options=Options(
                    n_lanes=n_lanes,
                    budgets=self.budgets,
                    patience=Patience(ageing=3.0, prefix_steps=rng.choice([0, 50])),
                ),
                **{**sizes, **fixed},
            )
        finally:
            mover.SLICE_LEAST, mover.SLICE_MOST = least, most

    # ---- what fails ---------------------------------------------------------------------------

    def _arm(self) -> None:
        """Have the runtime raise what the walk has put in store for a call."""
        runtime = self.simulation.runtime
        for name in {*REFUSALS, *BREAKDOWNS, "decode"}:
            setattr(runtime, name, self._failing(name, getattr(runtime, name)))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def empty(sequence: int, *_: Any) -> None:
            SimulatedRuntime.clear(self.simulation.runtime, sequence)

        def attempt(*args: Any, **named: Any) -> Any:
            for failure in [f for f in self.fails if f[0] == name]:
                self.fails.remove(failure)
                self.n_failed += 1
                if name in ("_open", "restore_state", "restore_rows", "strip"):
                    empty(*args)  # by contract nothing is left there
                raise failure[1]
            return call(*args, **named)

        return attempt

    def _refuse(self) -> None:
        name = self.rng.choice(list(REFUSALS))
        self.fails.append((name, REFUSALS[name]()))

    def _break(self) -> None:
        name = self.rng.choice((*BREAKDOWNS, "decode"))
        error = self.rng.choice(
            [DecodeFailed("lost in a test"), RuntimeError("a defect in a test")]
        )
        self.fails.append((name, error))

    # ---- what is done -------------------------------------------------------------------------

    def run(self, n_operations: int, *, breaks: bool = True) -> None:
        operations: list[tuple[Callable[[], None], float]] = [
            (self._step, 60),
            (self._submit, 12),
            (self._cancel, 3),
            (self._resize, 1),
            (self._refuse, 1.5),
            (self._break, 0.15 if breaks else 0.0),
            (self._forget, 1),
            (self._branch, 1),
            (lambda: self.simulation.clock.advance(1.0), 5),
        ]
        actions, weights = zip(*operations, strict=True)
        for _ in range(n_operations):
            self.rng.choices(actions, weights)[0]()
            self.simulation.check()
            self._check_lanes()
            self._hear()
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        """Let everything end, then forget it: nothing may be left."""
        self.fails.clear()
        self.simulation.run()
        self._hear()
        assert all(asked.is_over for asked in self.asked), "a request was never answered"
        core = self.simulation.core
        pool, ledger = core._keeper.pool, core._keeper.memory.ledger
        assert not any(c.is_held for c in pool.checkpoints)
        pool.budgets = Budgets()
        core.resize(Budgets(exported_bytes=0))
        self.simulation.check()
        assert pool.exported_bytes == core._keeper.mover.n_bytes == 0
        core._keeper.drop(pool.checkpoints)
        self.simulation.check()
        assert core._keeper.mover.n_bytes == 0
        assert pool.free_sequences == self.simulation.runtime.limits.n_sequences
        assert ledger.used == self.simulation.runtime.used_cells == 0
        book = pool.book
        left = [book._of, book.latest, book._established, book._index.nearest(b"")[1]]
        left += [pool._lanes, pool._moving, pool._saving, pool._arriving]
        assert not any(left)

    def _check_lanes(self) -> None:
        """Assert that snapshots on a lane's rows are of tokens that really stand there."""
        core = self.simulation.core
        lanes = {lane.sequence: lane for lane in core._seats.lanes}
        for checkpoint in core._keeper.pool.checkpoints:
            if checkpoint.holder.is_lane:
                lane = lanes[checkpoint.holder.sequence or 0]
                assert lane.path.startswith(checkpoint.path) or not lane.is_ready
                assert checkpoint.length <= self.simulation.runtime.length(lane.sequence)

    def _step(self) -> None:
        try:
            self.simulation.core.step()
        except RuntimeError as defect:  # as the worker does it
            self.simulation.core.fail_all(BackendError(str(defect)))

    def _submit(self) -> None:
        if sum(not asked.is_over for asked in self.asked[-40:]) > 10:
            return
        rng, past = self.rng, self.rng.choice([*self.pasts[-30:], *HEADS])
        cut = len(past.tokens)
        if rng.random() < 0.2:  # a fork anywhere
            cut = rng.randrange(cut + 1)
        said = rng.choice([b"x", b"y", b"what "]) * rng.choice([1, 3, 11, 30])
        history = past.tokens[:cut] + b"<u>" + said
        starts = (*(s for s in past.starts if s < cut), cut)
        if len(history) + len(OPENER) > N_CONTEXT - 20:
            history = history[: rng.randrange(40, 120)]
            starts = tuple(s for s in starts if s < len(history))
        tokens = history + rng.choice([OPENER, OPENER, b"<a>", b""])
        if past.tokens and rng.random() < 0.1:
            tokens = past.tokens  # the same again
        if len(tokens) > N_CONTEXT:
            return
        conversation = rng.choice([None, past.conversation, past.conversation, *CHATS])
        priorities: list[Priority] = ["interactive", "default", "background"]
        length = len(tokens)
        wanted = request(
            tokens.decode(),
            turn=min(len(history), length - 1) if rng.random() < 0.8 else 0,
            max_tokens=rng.choice([0, 1, 5, 40]),
            conversation=conversation,
            use_cache=rng.random() < 0.95,
            one_off=rng.random() < 0.1,
            base=past.base if past.base < length else 0,
            starts=tuple(s for s in starts if 0 < s < length),
            marks=tuple(sorted({rng.randrange(1, length) for _ in range(3)}))
            if rng.random() < 0.15 and length > 4
            else (),
            priority=rng.choice(priorities),
            client=rng.choice([None, "c", "d"]),
            deadline=rng.choice([None, None, None, 20.0]),
        )
        events: list[Event | OrchestratorError] = []
        ticket = self.simulation.core.submit(wanted, events.append)
        self.asked.append(Asked(wanted, ticket, events))

    def _cancel(self) -> None:
        if self.asked:
            self.rng.choice(self.asked[-8:]).ticket.cancel()

    def _resize(self) -> None:
        shrunk = Budgets(
            exported_bytes=self.rng.choice([0, STATE, 3 * STATE]),
            resident_cells=self.rng.choice([60, 150, None]),
            history=self.rng.choice([0, 2]),
        )
        self._call(lambda: self.simulation.core.resize(self.rng.choice([shrunk, self.budgets])))

    def _forget(self) -> None:
        self._call(lambda: self.simulation.core.forget(self.rng.choice(CHATS)))

    def _branch(self) -> None:
        chat, other = self.rng.sample(CHATS, 2)
        self.simulation.core.branch(chat, other)

    def _call(self, work: Callable[[], None]) -> None:
        """Do what is called from outside, where defects are the caller's."""
        held = [(n, e) for n, e in self.fails if isinstance(e, RuntimeError)]
        self.fails = [failure for failure in self.fails if failure not in held]
        work()
        self.fails += held

    # ---- what came of it ----------------------------------------------------------------------

    def _hear(self) -> None:
        for asked in self.asked[-60:]:
            if asked.is_over and not asked.is_told:
                asked.is_told = True
                self._judge(asked)

    def _judge(self, asked: Asked) -> None:
        assert sum(isinstance(e, Finished | OrchestratorError) for e in asked.events) == 1
        last = asked.events[-1]
        if isinstance(last, OrchestratorError):
            assert isinstance(last, BackendError), last
            assert "in a test" in str(last), last
            return
        assert isinstance(last, Finished)
        outcome, wanted = last.outcome, asked.request
        said = said_cold(bytes(wanted.tokens), self.memory)
        n_said = len(outcome.tokens)
        assert said[:n_said] == outcome.tokens
        usage = outcome.usage
        if outcome.finish_reason not in ("cancelled", "deadline"):
            is_full = len(wanted.tokens) + n_said > N_CONTEXT
            assert is_full or n_said == min(len(said), wanted.max_tokens or 0)
            assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
        self.reused += usage.cached_tokens
        self.n_reused += usage.cached_tokens > 0
        self._go_on(wanted, bytes(outcome.tokens))

    def _go_on(self, wanted: Request, reply: bytes) -> None:
        """Remember a chat as history renders it, or with its reply as it was said."""
        tokens, end = bytes(wanted.tokens), wanted.turn or len(wanted.tokens)
        verbatim = self.rng.random() < 0.5
        history = tokens + reply if verbatim else tokens[:end] + b"<a>" + reply
        if all(token < 128 for token in reply):
            self.pasts.append(Past(history, wanted.starts, wanted.base, wanted.conversation))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_wrong_is_said_and_nothing_is_left_whatever_fails_on_a_walk(seed: int) -> None:
    walk = Walk(seed)
    walk.run(600)
    assert walk.n_failed > 0
    assert walk.n_reused > 0 or walk.simulation.runtime.limits.n_sequences <= walk.n_lanes + 1


@pytest.mark.parametrize("memory", ["attention", "windowed", "recurrent"])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_left_of_a_walk_without_snapshots_either(memory: MemoryKind, seed: int) -> None:
    Walk(seed, memory).run(600)


# ---- what broke, one by one ----------------------------------------------------------------------


def submit(simulation: Simulation, wanted: Request) -> Asked:
    """Queue a request and keep what is heard of it."""
    events: list[Event | OrchestratorError] = []
    return Asked(wanted, simulation.core.submit(wanted, events.append), events)


def check_answered(*answers: Asked) -> None:
    """Assert that requests ended well and said what they say cold and alone."""
    for asked in answers:
        last = asked.events[-1]
        assert isinstance(last, Finished), last
        assert last.outcome.tokens == cold(asked.request).tokens


def kinds(simulation: Simulation) -> list[tuple[str, int]]:
    """Return kind and length of all that is kept."""
    kept = simulation.core._keeper.pool.checkpoints
    return sorted((c.kind, c.length) for c in kept)


def test_what_a_request_starts_from_stays_while_room_is_made_for_it_in_host_memory() -> None:
    simulation = Simulation(
        n_sequences=2, options=Options(n_lanes=2, budgets=Budgets(exported_bytes=19_200))
    )
    simulation.ask(request("b" * 40, turn=39, conversation="b", max_tokens=0))
    simulation.ask(request("a" * 33, marks=(28,), max_tokens=0))
    assert ("mark", 28) in kinds(simulation)
    usage = simulation.ask(request("a" * 28 + "c" * 20, max_tokens=0)).usage
    assert (usage.cached_tokens, usage.seeded_from) == (28, "mark")


def test_a_running_lane_never_leaves_its_sequence_for_a_parked_request_whose_state_it_has() -> None:
    simulation = Simulation(
        n_sequences=6,
        n_context=300,
        n_batch=14,
        options=Options(n_lanes=4, budgets=Budgets(exported_bytes=1 << 30)),
    )
    lanes = simulation.core._seats.lanes
    runs = submit(simulation, request("s" * 70 + "b" * 60))
    parks = submit(simulation, request("s" * 70 + "a" * 50, priority="background"))
    _step_until(simulation, lambda: [lane.fed for lane in lanes] == [70])
    first = submit(simulation, request("d" * 60, priority="interactive"))  # it is read before them
    _step_until(simulation, lambda: len(lanes) == 3)
    assert [lane.fed for lane in lanes if lane.ticket.request is not first.request] == [70, 70]
    urgent = submit(simulation, request("c" * 140, priority="interactive"))
    _step_until(simulation, lambda: simulation.core.counters.preempted > 0)
    assert ("shared", 70) in kinds(simulation)
    assert not simulation.core._keeper.pool.moving
    simulation.run()
    assert simulation.core.counters.recoveries == 0
    check_answered(runs, parks, first, urgent)


def _step_until(simulation: Simulation, reached: Callable[[], bool]) -> None:
    for _ in range(1000):
        if reached():
            return
        simulation.core.step()
        simulation.check()
    raise AssertionError("it never came to that")


LOST = DecodeFailed("lost in a test")
ROOMY = Budgets(exported_bytes=1 << 30)


def fail_once(simulation: Simulation, name: str, error: Exception) -> None:
    """Have the next call of a method of the runtime raise."""
    runtime = simulation.runtime

    def fail(*arguments: Any) -> None:
        delattr(runtime, name)
        if name == "strip":
            runtime.clear(*arguments)  # as the contract has it
        raise error

    setattr(runtime, name, fail)


def test_rows_that_arrived_before_all_was_lost_do_not_stay_in_host_memory_for_ever() -> None:
    simulation = Simulation(n_sequences=1, options=Options(budgets=ROOMY))
    simulation.ask(request("a" * 40, max_tokens=1))
    fail_once(simulation, "clear", LOST)  # once they are saved and before the pool is told
    simulation.ask(request("b" * 40, max_tokens=1))
    assert simulation.core.counters.recoveries == 1
    simulation.check()
    assert not simulation.core._keeper.mover._rows.keys() - {
        c.holder for c in simulation.core._keeper.pool.checkpoints
    }


def test_a_request_is_answered_also_where_parking_it_finds_that_all_is_lost() -> None:
    simulation = Simulation(n_batch=10, options=Options(budgets=ROOMY))
    slow = submit(simulation, request("p" * 80, priority="background", marks=(10,)))
    _step_until(simulation, lambda: kinds(simulation) == [("mark", 10)])
    submit(simulation, request("q" * 80, priority="interactive"))
    fail_once(simulation, "strip", LOST)
    simulation.run()
    assert simulation.core.counters.recoveries == 1
    assert slow.is_over


def test_a_cancelled_request_is_answered_also_where_its_leaving_finds_that_all_is_lost() -> None:
    simulation = Simulation(n_batch=10)
    slow = submit(simulation, request("p" * 80, priority="background", one_off=True))
    _step_until(simulation, lambda: bool(simulation.core._seats.lanes))
    submit(simulation, request("q" * 80, priority="interactive"))
    _step_until(simulation, lambda: simulation.core.counters.preempted == 1)
    slow.ticket.cancel()
    fail_once(simulation, "clear", LOST)
    simulation.run()
    assert simulation.core.counters.recoveries == 1
    assert slow.is_over


@pytest.mark.parametrize("what", ["forget", "resize"])
def test_all_is_begun_again_where_a_call_from_outside_finds_that_it_is_lost(what: str) -> None:
    simulation = Simulation(options=Options(budgets=ROOMY))
    simulation.ask(request("a" * 40, conversation="a", max_tokens=1))
    fail_once(simulation, "clear", LOST)
    if what == "forget":
        simulation.core.forget("a")
    else:
        simulation.core.resize(Budgets(resident_cells=10))
    simulation.check()
    assert simulation.core.counters.recoveries == 1
    assert simulation.runtime.used_cells == 0


def test_a_holder_that_could_not_be_stripped_costs_its_checkpoints_and_no_request() -> None:
    simulation = Simulation(options=Options(n_lanes=2, budgets=ROOMY))
    runtime = simulation.runtime

    def strip(sequence: int) -> None:
        runtime.clear(sequence)
        raise BackendError("would not strip in a test")

    runtime.strip = strip  # type: ignore[method-assign]
    first = simulation.ask(request("a" * 60, marks=(30,), max_tokens=4))
    simulation.core._keeper.drop([c for c in simulation.core._keeper.pool.checkpoints if c.is_live])
    simulation.check()
    assert not kinds(simulation)
    assert simulation.ask(request("a" * 60, max_tokens=4)).tokens == first.tokens


def test_a_state_is_not_folded_onto_rows_that_go_with_what_leaves_for_it() -> None:
    simulation = Simulation(n_sequences=2, options=Options(n_lanes=2, budgets=ROOMY))
    keeper = simulation.core._keeper
    simulation.ask(request("a" * 60, marks=(30, 50), max_tokens=0))
    keeper.drop([c for c in keeper.pool.checkpoints if c.kind != "mark"])
    simulation.ask(request("a" * 40, max_tokens=0))
    keeper.drop([c for c in keeper.pool.checkpoints if c.kind == "resend"])
    assert kinds(simulation) == [("mark", 30), ("mark", 50), ("reply", 40)]
    simulation.core.resize(Budgets(exported_bytes=17_384 + 128))
    simulation.ask(request("z" * 20, max_tokens=0, one_off=True))
    simulation.check()
    wanted = request("a" * 39 + "b", max_tokens=3)
    assert simulation.ask(wanted).tokens == cold(wanted).tokens


def test_a_request_is_seated_cold_where_its_seed_goes_while_room_is_made_for_it() -> None:
    simulation = Simulation(n_sequences=2, options=Options(n_lanes=2))
    keeper = simulation.core._keeper
    simulation.core.resize(ROOMY)
    simulation.ask(request("a" * 60, marks=(30,), max_tokens=0))
    simulation.core.resize(Budgets(exported_bytes=200, resident_cells=60))
    keeper.drop([c for c in keeper.pool.checkpoints if c.kind == "resend"])
    assert kinds(simulation) == [("mark", 30), ("reply", 60)]
    fail_once(simulation, "strip", BackendError("would not strip in a test"))
    wanted = request("a" * 30 + "b" * 20, max_tokens=3)
    assert simulation.ask(wanted).tokens == cold(wanted).tokens
    assert simulation.core.counters.recoveries == 0


# ---- what took too long --------------------------------------------------------------------------


def test_few_questions_find_the_few_that_matter_among_many() -> None:
    rng = random.Random(1)
    for _ in range(200):
        holder = Holder(None, b"")
        many = [Checkpoint(b"", n, "mark", 0, 0, holder) for n in range(rng.choice([3, 40, 300]))]
        wanted = [set(rng.sample(many, min(3, len(many)))) for _ in range(2)]
        asked = 0

        def enough(victims: Sequence[Checkpoint], sets: Sequence[set[Checkpoint]] = wanted) -> bool:
            nonlocal asked
            asked += 1
            return any(each <= {*victims} for each in sets)

        found, n_asked = fewest(many, enough), asked
        assert found == _fewest_one_by_one(many, enough)
        assert n_asked <= 12 * len(many).bit_length()


def _fewest_one_by_one(
    many: Sequence[Checkpoint], enough: Callable[[Sequence[Checkpoint]], bool]
) -> tuple[Checkpoint, ...]:
    """Return what `fewest` does, by asking for each in turn."""
    victims = next(many[:n] for n in range(len(many) + 1) if enough(many[:n]))
    for spared in reversed(victims):
        rest = [victim for victim in victims if victim is not spared]
        victims = rest if enough(rest) else victims
    return tuple(victims)


# ---- what no test noticed ------------------------------------------------------------------------


def test_exported_rows_that_were_trimmed_bring_back_what_still_lies_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "SLICE_LEAST", SLICE)
    monkeypatch.setattr(mover, "SLICE_MOST", SLICE)
    simulation = Simulation(n_sequences=1, options=Options(budgets=ROOMY))
    keeper = simulation.core._keeper
    simulation.ask(request("a" * 80, marks=(SLICE + 1, 60), max_tokens=0))
    simulation.ask(request("b" * 30, max_tokens=0, one_off=True))
    keeper.drop([c for c in keeper.pool.checkpoints if c.length > SLICE + 1])
    simulation.check()
    (left,) = keeper.pool.checkpoints
    assert (left.tier, left.holder.length) == ("exported", 2 * SLICE)
    wanted = request("a" * (SLICE + 1) + "c" * 9, max_tokens=3)
    outcome = simulation.ask(wanted)
    assert outcome.tokens == cold(wanted).tokens
    assert outcome.usage.cached_tokens == SLICE + 1


def test_of_the_states_inside_a_reply_about_one_stays_per_doubling_of_the_distance() -> None:
    simulation = Simulation(options=Options(budgets=Budgets(exported_bytes=1 << 30, history=1000)))
    simulation.ask(request("a" * 10, max_tokens=100))
    inside = {length - 10 for kind, length in kinds(simulation) if kind == "reply"}
    assert {64, 80, 96} <= inside
    assert not inside & {16, 32, 48}


def test_a_smaller_history_gives_up_what_spares_the_least_and_no_more() -> None:
    simulation = Simulation(options=Options(budgets=Budgets(exported_bytes=1 << 30, history=1000)))
    simulation.ask(request("a" * 2000, starts=(1000, 1500, 1800), max_tokens=0))
    book = simulation.core._keeper.pool.book
    *others, dearest = book.history()
    assert others
    simulation.core.resize(Budgets(exported_bytes=1 << 30, history=1))
    assert [c for c in book.checkpoints if c.is_history] == [dearest]


def test_a_holder_on_its_way_out_stays_where_one_of_its_states_is_dropped_meanwhile() -> None:
    simulation = Simulation(n_sequences=1, options=Options(budgets=ROOMY))
    keeper = simulation.core._keeper
    simulation.ask(request("a" * 80, marks=(25, 60), max_tokens=0))
    assert not keeper.clear_way(list(keeper.pool.checkpoints))
    (holder,) = keeper.pool.moving
    keeper.drop([max(holder.checkpoints, key=lambda c: c.length)])
    assert not keeper.pool.moving
    assert not keeper.mover.is_busy
    simulation.check()
    assert ("mark", 60) in kinds(simulation)
