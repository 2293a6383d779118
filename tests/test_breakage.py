"""What broke once under attack: odd timings, pools too small, states found damaged, wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulation import KINDS, Simulation, cold, request

from orchestrator.engine.core import Options
from orchestrator.engine.engine import Engine
from orchestrator.engine.opening import Choices
from orchestrator.engine.request import Event, Finished, Outcome, Request, Usage
from orchestrator.engine.scheduler import Patience, Shares
from orchestrator.engine.ticket import Ticket
from orchestrator.errors import (
    DecodeFailed,
    InvalidArgument,
    OrchestratorError,
    PoolFull,
    StateRefused,
)
from orchestrator.pool.eviction import OF_ONE_TURN, SHARED
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import Limits, MemoryKind
from orchestrator.runtime.simulated import SimulatedRuntime

MEMORY = Budgets(exported_bytes=1 << 30)
DAMAGED = StateRefused("checksum", "damaged in a test")


class Asked:
    """A request in the simulation, and what came of it."""

    def __init__(self, simulation: Simulation, wanted: Request) -> None:
        self.events: list[Event | OrchestratorError] = []
        self.ticket: Ticket = simulation.core.submit(wanted, self.events.append)

    @property
    def outcome(self) -> Outcome:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last.outcome

    @property
    def usage(self) -> Usage:
        return self.outcome.usage


def steps(simulation: Simulation, count: int) -> None:
    """Take steps, with every invariant checked after each."""
    for _ in range(count):
        simulation.core.step()
        simulation.check()


# ---- shares of clients --------------------------------------------------------------------------


def test_a_client_that_is_gone_is_forgotten_however_much_it_was_served() -> None:
    shares = Shares()
    shares.arrive("waits")
    for number in range(100):
        shares.arrive(f"client {number}")
        shares.serve(f"client {number}", 50)
        shares.leave(f"client {number}")
    shares.serve("waits", 50)
    shares.leave("waits")
    shares.arrive("client 7")
    assert shares.of("client 7") == 0, "a debt outlived everybody it was owed to"
    assert len(shares._served) == 1


# ---- what a report says -------------------------------------------------------------------------


def test_a_request_whose_import_was_refused_says_that_it_started_cold() -> None:
    simulation = Simulation(n_sequences=1, options=Options(budgets=MEMORY))
    simulation.ask(request("a" * 40 + "<a>", turn=40, max_tokens=1))
    simulation.ask(request("b" * 40, max_tokens=1))
    simulation.runtime.fails_next_restore = DAMAGED
    usage = simulation.ask(request("a" * 40 + "<u>", max_tokens=1)).usage
    assert (usage.cached_tokens, usage.seeded_from, usage.seeded_tier) == (0, None, None)


def test_a_preempted_request_that_goes_on_from_anothers_state_says_from_which() -> None:
    simulation = Simulation(
        n_sequences=6, n_batch=10, options=Options(n_lanes=1, budgets=Budgets(history=9))
    )
    slow = Asked(simulation, request("p" * 80, priority="background", max_tokens=1))
    steps(simulation, 2)
    fast = Asked(simulation, request("p" * 60, priority="interactive", max_tokens=1))
    simulation.run()
    assert fast.usage.seeded_from == "partial"
    assert slow.usage.cached_tokens > 0
    assert slow.usage.seeded_from is not None


@pytest.mark.parametrize("memory", KINDS)
def test_a_preempted_request_without_the_cache_goes_on_from_its_own_state_alone(
    memory: MemoryKind,
) -> None:
    simulation = Simulation(memory, n_sequences=6, n_batch=10)
    plain = Asked(
        simulation, request("p" * 80, priority="background", use_cache=False, max_tokens=4)
    )
    steps(simulation, 2)
    Asked(simulation, request("p" * 60, priority="interactive", max_tokens=1))
    simulation.run()
    assert simulation.core.counters.preempted == 1
    assert (plain.usage.cached_tokens, plain.usage.prefilled_tokens) == (0, 80)
    assert plain.usage.seeded_from is None


# ---- too little room, and states that turn out to be damaged ------------------------------------


def test_a_prompt_that_fits_is_read_where_what_it_would_start_from_does_not() -> None:
    simulation = Simulation(
        "attention", n_context=40, n_sequences=1, options=Options(budgets=MEMORY)
    )
    simulation.ask(request("a" * 20 + "b" * 19, max_tokens=1))
    simulation.ask(request("x" * 39, max_tokens=1))  # the first one is in host memory now
    wanted = request("a" * 20 + "c" * 5, max_tokens=3)
    assert simulation.ask(wanted).tokens == cold(wanted, "attention").tokens


def _preempted(simulation: Simulation) -> Asked:
    """Return a background request of 80 tokens that is preempted after 20, by one that runs."""
    slow = Asked(simulation, request("p" * 80, priority="background", max_tokens=4))
    steps(simulation, 2)
    Asked(simulation, request("q" * 30, priority="interactive", one_off=True, max_tokens=3))
    steps(simulation, 1)
    assert simulation.core.counters.preempted == 1
    return slow


def test_a_preempted_request_outlives_that_another_finds_its_state_damaged() -> None:
    simulation = Simulation(n_sequences=6, n_batch=10, options=Options(n_lanes=1, budgets=MEMORY))
    slow = _preempted(simulation)
    other = Asked(simulation, request("p" * 70, priority="interactive", one_off=True, max_tokens=3))
    Asked(simulation, request("z" * 90, priority="interactive", one_off=True, max_tokens=3))
    while simulation.core.counters.refused_checkpoints == 0:
        simulation.runtime.fails_next_copy = DAMAGED
        steps(simulation, 1)
    simulation.runtime.fails_next_copy = None
    steps(simulation, 2)
    simulation.runtime.fails_next = PoolFull("no cell is free, in a test")
    simulation.run()
    assert other.outcome.tokens == cold(request("p" * 70, max_tokens=3)).tokens
    assert slow.outcome.tokens == cold(request("p" * 80, max_tokens=4)).tokens


def _refuse_rows(*arguments: object) -> None:
    raise DAMAGED


def test_two_that_import_one_damaged_state_both_read_their_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(n_sequences=4, options=Options(n_lanes=2, budgets=MEMORY))
    simulation.ask(request("a" * 200 + "<a>", turn=200, max_tokens=1))
    keeper = simulation.core._keeper
    keeper.clear_now(list(keeper.pool.book.resident()))
    monkeypatch.setattr(simulation.runtime, "restore_rows", _refuse_rows)
    both = [
        Asked(simulation, request("a" * 200 + end, max_tokens=3)) for end in ("<u>one", "<u>two")
    ]
    simulation.run()
    assert simulation.core.counters.refused_checkpoints == 2
    for asked in both:
        assert asked.outcome.tokens == cold(asked.ticket.request).tokens


def test_a_budget_shrinks_also_under_a_state_whose_import_is_given_up() -> None:
    simulation = Simulation(n_sequences=1, options=Options(budgets=MEMORY))
    simulation.core._keeper.mover._slice = 16
    simulation.ask(request("a" * 200 + "<a>", turn=200, max_tokens=1))
    simulation.ask(request("x" * 100, max_tokens=1))
    asked = Asked(simulation, request("a" * 200 + "<u>", max_tokens=3))
    while not simulation.core._seats.lanes:
        simulation.core._keeper.mover.advance()
        simulation.core._seats.admit()
    simulation.core.resize(Budgets())
    simulation.check()
    asked.ticket.cancel()
    simulation.core._reap()
    simulation.check()
    assert simulation.core.occupancy().exported_bytes == 0


def test_a_request_that_keeps_nothing_leaves_nothing_when_its_state_was_on_its_way_back() -> None:
    simulation = Simulation(n_batch=10, options=Options(budgets=MEMORY))
    slow = Asked(simulation, request("p" * 80, priority="background", one_off=True))
    steps(simulation, 4)
    seats = simulation.core._seats
    seats._give_way(seats.lanes[0])
    assert simulation.core.occupancy().exported == {"partial": 1}
    seats.admit()
    assert not seats.lanes[0].is_ready
    seats._park(seats.lanes[0])
    simulation.check()
    slow.ticket.cancel()
    simulation.run()
    assert not simulation.core.occupancy().checkpoints


def test_the_cells_that_an_import_has_yet_to_fill_are_promised_to_nobody_else() -> None:
    simulation = Simulation(n_context=400, options=Options(n_lanes=2, budgets=MEMORY))
    simulation.ask(request("a" * 200 + "<a>", turn=200, max_tokens=1))
    keeper = simulation.core._keeper
    keeper.clear_now(list(keeper.pool.book.resident()))
    asked = Asked(simulation, request("a" * 200 + "<u>", max_tokens=3))
    simulation.core._seats.admit()
    assert not simulation.core._seats.lanes[0].is_ready
    assert keeper.pool.plan_room(250) is None
    simulation.run()
    assert asked.usage.cached_tokens == 200
    assert keeper.pool.plan_room(400) is not None


def test_the_state_of_a_preempted_request_that_is_cancelled_leaves_if_it_does_not_fit() -> None:
    budgets = Budgets(resident_cells=25)
    simulation = Simulation(n_sequences=6, n_batch=10, options=Options(budgets=budgets))
    slow = _preempted(simulation)
    steps(simulation, 1)
    slow.ticket.cancel()
    simulation.core.forget("nobody")  # ends what was cancelled, and steps no further
    simulation.check()


def test_a_state_that_a_preempted_request_holds_makes_room_for_no_other() -> None:
    simulation = Simulation(n_sequences=2, n_batch=10)
    slow = Asked(simulation, request("p" * 80, priority="background", max_tokens=4))
    steps(simulation, 2)
    Asked(simulation, request("q" * 40 + "<a>" * 9, turn=40, priority="interactive"))
    simulation.run()
    assert simulation.core.counters.preempted == 1
    assert (slow.usage.prefilled_tokens, slow.usage.replayed_tokens) == (80, 0)


def test_however_little_a_preempted_request_has_read_it_is_not_read_again() -> None:
    simulation = Simulation(n_batch=10, options=Options(budgets=MEMORY))
    slow = Asked(simulation, request("p" * 80, priority="background", max_tokens=1))
    steps(simulation, 1)
    simulation.core._seats._give_way(simulation.core._seats.lanes[0])
    assert simulation.core.occupancy().exported == {"partial": 1}
    simulation.run()
    assert (slow.usage.prefilled_tokens, slow.usage.replayed_tokens) == (80, 0)


def test_a_system_block_is_worth_more_once_a_second_chat_began_with_it() -> None:
    simulation = Simulation()
    book = simulation.core._keeper.pool.book
    groups = []
    for user in ("a" * 30, "b" * 30):
        text = "s" * 80 + user
        simulation.ask(request(text + "<a>", turn=len(text), base=80, max_tokens=1))
        (block,) = (c for c in book.checkpoints if c.kind == "system")
        groups.append(book.standing(block).group)
    assert groups == [OF_ONE_TURN, SHARED]


def test_no_state_in_host_memory_outlasts_its_budget_when_all_sequences_are_lost() -> None:
    simulation = Simulation(options=Options(budgets=MEMORY))
    simulation.ask(request("a" * 200 + "<a>", turn=200, max_tokens=1))
    keeper = simulation.core._keeper
    keeper.clear_now(list(keeper.pool.book.resident()))
    Asked(simulation, request("a" * 200 + "<u>", max_tokens=3))
    simulation.core._seats.admit()
    simulation.core.resize(Budgets())
    simulation.core.fail_all(DecodeFailed("lost in a test"))
    simulation.check()
    assert simulation.core.occupancy().exported_bytes == 0


# ---- many waiting, and those who listen ---------------------------------------------------------


def test_what_waiting_requests_share_is_remembered_only_while_a_lane_runs() -> None:
    simulation = Simulation(n_batch=16, options=Options(n_lanes=2))
    waiting = [
        Asked(simulation, request("s" * 100 + chr(65 + number), max_tokens=1))
        for number in range(40)
    ]
    steps(simulation, 1)
    lanes = simulation.core._seats.lanes
    assert any(len(lane.shared) > 30 for lane in lanes)
    simulation.run()
    assert all(asked.usage.cached_tokens == 100 for asked in waiting[1:])
    assert not hasattr(waiting[0].ticket, "shared")


def test_nobody_waits_for_a_prefix_that_a_lane_is_not_going_to_keep() -> None:
    simulation = Simulation(n_batch=16, options=Options(n_lanes=2))
    for one_off in (True, False):
        Asked(simulation, request("s" * 200 + "<a>", one_off=one_off, max_tokens=1))
    simulation.run()
    assert simulation.core.counters.waited == 0


def test_a_stream_whose_watcher_raises_still_ends_and_so_do_the_others() -> None:
    with _engine() as engine:
        streams = [engine.complete("x" * 40, max_tokens=2000) for _ in range(3)]
        streams[0].on_end(_raise)
        streams[1].divert(_raise)
        for stream in streams[:2]:
            stream.cancel()
        assert streams[0].outcome().finish_reason == "cancelled"
        streams[2].cancel()
        assert streams[2].outcome().finish_reason == "cancelled"
        assert engine.stats().counters.recoveries == 0


def test_the_engine_says_so_where_its_own_thread_would_wait_for_itself() -> None:
    with _engine() as engine:
        errors: list[Exception] = []

        def look(last: object) -> None:
            try:
                engine.stats()
            except InvalidArgument as error:
                errors.append(error)

        stream = engine.complete("x" * 40, max_tokens=2000)
        next(stream)
        stream.on_end(look)
        stream.cancel()
        assert stream.outcome().finish_reason == "cancelled"
        assert "own thread" in str(errors[0])


def _engine() -> Engine:
    limits = Limits(4, 4096, 4096, 64, 1000, 10)
    return Engine.over(lambda: SimulatedRuntime(limits), options=Options(n_lanes=3))


def _raise(event: object) -> None:
    raise RuntimeError("raised by a listener, in a test")


# ---- wrong calls --------------------------------------------------------------------------------

WRONG: dict[str, tuple[object, ...]] = {
    "stop": (None, 7, b"x", {"a"}, {"a": 1}, [None], [""]),
    "max_tokens": (True, -1, 1.5, "x", 2**31),
    "use_cache": (None, 1, "no"),
    "one_off": (None, 0, "no"),
    "priority": (None, "urgent", ["default"], float("nan")),
    "client": (3, b"x", ["a"]),
    "conversation": (3, b"x", ["a"]),
    "deadline": (0, -1, float("nan"), float("inf"), True, "1", [1]),
    "sampling": (3, {}, "greedy"),
    "tools": (3, "x", [1], {"a": 1}),
    "template_arguments": (3, "x", [1]),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_a_wrong_argument_is_refused_before_anything_is_queued(name: str, value: object) -> None:
    chat: Any = [{"role": "user", "content": "hello"}]
    with _engine() as engine:
        ask: Any = engine.chat
        with pytest.raises(InvalidArgument):
            ask(chat, **{name: value})
        assert engine.stats().counters.requests == 0
        assert engine.chat(chat, max_tokens=2).outcome().finish_reason == "length"


@pytest.mark.parametrize("value", [None, 3, 1.5, b"x", ["a"], object()])
def test_what_is_no_name_no_text_and_no_request_is_refused_in_words(value: Any) -> None:
    with _engine() as engine:
        calls: list[Callable[[Any], object]] = [
            engine.forget,  # a number would name a chat of the pool's own
            engine.complete,
            engine.tokenize,
            engine.generate,
            lambda name: engine.create_session(messages=name).generate(),
            lambda name: engine.create_session(tools=[name]),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument):
                call(value)


@pytest.mark.parametrize("tokens", [None, 3, b"x", {1}, [1.5], [-1], [2**40], [True, "a"]])
def test_what_are_no_tokens_is_refused_also_where_nothing_is_asked(tokens: Any) -> None:
    with _engine() as engine:
        for call in (engine.warm, engine.create_session().append):
            with pytest.raises(InvalidArgument):
                call(tokens)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Patience, "ageing", float("nan")),
        (Patience, "ageing", "x"),
        (Patience, "n_waiting", 1.5),
        (Patience, "prefix_steps", None),
        (Budgets, "exported_bytes", None),
        (Budgets, "exported_bytes", float("nan")),
        (Budgets, "resident_cells", "x"),
        (Budgets, "history", True),
        (Choices, "exact", "no"),
        (Choices, "chat_template", "{{ messages }}"),
        (Choices, "gpu_layers", 2**40),
        (Choices, "lanes", True),
    ],
)
def test_a_wrong_size_is_refused_when_it_is_given(kind: Any, name: str, value: object) -> None:
    with pytest.raises(InvalidArgument):
        kind(**{name: value})


@pytest.mark.parametrize("model", [True, 3, 1.5, b"demo", ["demo"]])
def test_what_names_no_model_is_refused_in_words(model: Any) -> None:
    with pytest.raises(InvalidArgument, match="give a name"):
        Engine.open(model)


# ---- the last moment before a lane, and a budget that goes -------------------------------------


@pytest.mark.parametrize("memory", KINDS)
def test_a_preempted_state_in_host_memory_leaves_when_its_budget_does(memory: MemoryKind) -> None:
    simulation = Simulation(
        memory, n_sequences=2, n_context=600, n_cells=600, options=Options(budgets=MEMORY)
    )
    background = Asked(simulation, request("b" * 300, priority="background", max_tokens=60))
    while simulation.core.counters.sampled < 20:
        steps(simulation, 1)
    for name in "cd":
        Asked(simulation, request(name * 500, priority="interactive", max_tokens=30))
    while simulation.core.occupancy().paused == 0:
        steps(simulation, 1)
    steps(simulation, 3)
    simulation.core.resize(Budgets())
    simulation.check()
    assert simulation.core.occupancy().exported_bytes == 0
    simulation.run()
    assert background.outcome.tokens == cold(request("b" * 300, max_tokens=60), memory).tokens


def test_a_request_cancelled_while_it_gets_its_lane_never_runs() -> None:
    simulation = Simulation(options=Options(n_lanes=2))
    asked = Asked(simulation, request("x" * 50))
    asked.ticket.is_answered = True  # as its canceller does between the reaping and the seating
    simulation.core._seats.admit()
    assert not simulation.core._seats.lanes
    assert simulation.core.is_idle
    assert simulation.core.counters.requests == 0
