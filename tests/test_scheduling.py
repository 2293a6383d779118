"""Who goes next, who makes way, who is refused and who is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from scenarios import Answer, Simulated, simulated, words
from simulation import KINDS, request

from orchestrator.engine.core import Options
from orchestrator.engine.request import Request
from orchestrator.engine.scheduler import Patience
from orchestrator.errors import Busy
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import Chunk, MemoryKind
from orchestrator.runtime.simulated import Cost

every_kind = pytest.mark.parametrize("memory", KINDS)

COST = Cost(call=0.010, token=0.001)
"""A decode call of one lane takes 11 ms; a hundred tokens of prompt about as many more."""


def front(
    memory: MemoryKind = "hybrid",
    n_lanes: int = 1,
    *,
    cost: Cost | None = None,
    patience: Patience | None = None,
    step_seconds: float = 0.1,
    budgets: Budgets | None = None,
    **sizes: Any,
) -> Simulated:
    """Return a front with room for everybody."""
    options = Options(
        n_lanes=n_lanes,
        budgets=budgets or Budgets(),
        patience=patience or Patience(),
        step_seconds=step_seconds,
    )
    sizes = {"n_sequences": 16, "n_cells": 16384, **sizes}
    return simulated(memory, options, cost=cost, **sizes)


def ask(name: str, length: int = 40, **fields: Any) -> Request:
    """Return a request whose prompt is nobody else's."""
    return request(words(name, length), **fields)


def order_of_ends(front: Simulated, answers: dict[str, Answer]) -> list[str]:
    """Run everything; return the names in the order in which they ended."""
    ended: list[str] = []
    while not front.core.is_idle:
        front.step()
        ended += [name for name in answers if answers[name].is_over and name not in ended]
    for answer in answers.values():
        front.compare(answer)
    return ended


class Calls:
    """What was handed to the decode call, and when."""

    def __init__(self, front: Simulated) -> None:
        self.made: list[tuple[float, list[Chunk]]] = []
        runtime, decode = front.simulation.runtime, front.simulation.runtime.decode

        def watched(chunks: Sequence[Chunk]) -> list[int | None]:
            rows = decode(chunks)
            self.made.append((front.simulation.clock(), list(chunks)))
            return rows

        runtime.decode = watched  # type: ignore[method-assign]

    def of(self, sequence: int) -> list[float]:
        """Return when each decode call of one token of a sequence ended."""
        return [
            ended
            for ended, chunks in self.made
            if any(c.sequence == sequence and len(c.tokens) == 1 for c in chunks)
        ]


def sequence_of(front: Simulated, answer: Answer) -> int:
    """Return the sequence that a running request has."""
    return next(lane.sequence for lane in front.core._seats.lanes if lane.ticket is answer.ticket)


# ---- pace ---------------------------------------------------------------------------------------


@every_kind
def test_whoever_speaks_gets_a_token_in_every_step_while_another_reads(memory: MemoryKind) -> None:
    simulated = front(memory, 2, cost=COST)
    calls = Calls(simulated)
    speaker = simulated.submit(ask("speaker", max_tokens=200))
    simulated.step_until(lambda: simulated.core.counters.sampled > 5)
    sequence = sequence_of(simulated, speaker)
    reader = simulated.submit(ask("reader", 3000))
    while not reader.is_over and not simulated.core.counters.prefilled >= 3040:
        before, calls.made = len(calls.of(sequence)), calls.made
        simulated.step()
        assert len(calls.of(sequence)) == before + 1
    simulated.run()
    simulated.compare(speaker)
    simulated.compare(reader)


@every_kind
def test_a_running_stream_keeps_its_pace_while_a_long_prompt_is_read(memory: MemoryKind) -> None:
    simulated = front(memory, 2, cost=COST)
    simulated.ask(ask("first", 500))  # the rates are learned
    calls = Calls(simulated)
    speaker = simulated.submit(ask("speaker", max_tokens=300))
    simulated.step_until(lambda: simulated.core.counters.sampled > 30)
    sequence = sequence_of(simulated, speaker)
    n_before = len(calls.of(sequence))
    reader = simulated.submit(ask("reader", 3500, max_tokens=1))
    simulated.step_until(lambda: reader.is_over)
    times = calls.of(sequence)[n_before - 1 :]
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    assert len(gaps) > 20
    assert gaps[-1] <= 0.12  # a step of 100 ms, and what one measurement was off
    assert gaps[len(gaps) // 2] <= 0.101
    simulated.run()
    simulated.compare(speaker)


def test_slow_decode_calls_leave_as_much_time_again_for_prompts() -> None:
    """Where a token takes longer than a step should, reading still gets half of the time."""
    simulated = front(n_lanes=2, cost=Cost(call=0.2, token=0.001))
    simulated.ask(ask("first", 500))
    calls = Calls(simulated)
    speaker = simulated.submit(ask("speaker", max_tokens=60))
    simulated.step_until(lambda: simulated.core.counters.sampled > 20)
    sequence, n_before = sequence_of(simulated, speaker), len(calls.made)
    reader = simulated.submit(ask("reader", 3000, max_tokens=1))
    simulated.step_until(lambda: reader.is_over)
    sizes = [len(c.tokens) for _, chunks in calls.made[n_before:] for c in chunks]
    assert max(sizes) > 100
    times = calls.of(sequence)
    assert max(b - a for a, b in pairwise(times)) <= 3 * 0.2 + 0.1
    simulated.run()


def test_nobody_speaking_a_prompt_is_read_in_whole_batches() -> None:
    simulated = front(n_lanes=2, cost=COST, n_batch=256)
    calls = Calls(simulated)
    simulated.ask(ask("reader", 1025, max_tokens=1))
    assert [len(chunks[0].tokens) for _, chunks in calls.made] == [256, 256, 256, 256, 1]


@every_kind
def test_prompts_that_are_read_together_are_read_in_equal_chunks(memory: MemoryKind) -> None:
    simulated = front(memory, 4, n_batch=64)
    calls = Calls(simulated)
    answers = simulated.ask_all(ask(f"{n} reader", 150 + 30 * n) for n in range(4))
    joint = [chunks for _, chunks in calls.made if len(chunks) > 1]
    assert joint
    for _, chunks in calls.made:
        assert len({len(chunk.tokens) for chunk in chunks}) == 1
    assert [answer.cached for answer in answers] == [0] * 4


# ---- order --------------------------------------------------------------------------------------


def test_interactive_goes_before_default_before_background() -> None:
    simulated = front()
    answers = {
        name: simulated.submit(ask(name, priority=name))
        for name in ("background", "default", "interactive")
    }
    assert order_of_ends(simulated, answers) == ["interactive", "default", "background"]


def test_waiting_long_enough_counts_as_a_class() -> None:
    simulated = front(patience=Patience(ageing=10))
    simulated.submit(ask("running", max_tokens=50))
    simulated.step()
    answers = {"old": simulated.submit(ask("old", priority="background"))}
    simulated.simulation.clock.advance(25)
    answers["new"] = simulated.submit(ask("new", priority="default"))
    assert order_of_ends(simulated, answers) == ["old", "new"]


def test_the_shortest_prefill_goes_first_within_a_class() -> None:
    simulated = front()
    answers = {
        name: simulated.submit(ask(name, length))
        for name, length in (("long", 900), ("middle", 300), ("short", 30))
    }
    assert order_of_ends(simulated, answers) == ["short", "middle", "long"]


def test_what_is_left_to_read_counts_and_not_the_length_of_the_prompt() -> None:
    simulated = front()
    warm = ask("warm", 900)
    simulated.ask(warm)
    answers = {"cold": simulated.submit(ask("cold", 300)), "warm": simulated.submit(warm)}
    assert order_of_ends(simulated, answers) == ["warm", "cold"]
    assert answers["warm"].cached == 899


def test_equals_are_served_in_the_order_they_came() -> None:
    simulated = front()
    answers = {name: simulated.submit(ask(name)) for name in ("one", "two", "six")}
    assert order_of_ends(simulated, answers) == ["one", "two", "six"]


def test_a_client_with_many_requests_does_not_keep_another_waiting() -> None:
    simulated = front()
    answers = {
        f"many {n}": simulated.submit(ask(f"{n} many", 100, client="many")) for n in range(6)
    }
    answers["few"] = simulated.submit(ask("few", 100, client="few"))
    ended = order_of_ends(simulated, answers)
    assert ended.index("few") <= 1


def test_clients_that_always_have_requests_are_served_alike() -> None:
    simulated = front()
    answers = {
        f"{client} {n}": simulated.submit(ask(f"{n} {client}", length, client=client))
        for n in range(8)
        for client, length in (("long", 400), ("short", 100))
    }
    ended = order_of_ends(simulated, answers)
    longs = [place for place, name in enumerate(ended) if name.startswith("long")]
    assert longs[1] > 3  # one long request is worth four short ones


def test_a_client_that_was_away_has_saved_nothing_up() -> None:
    simulated = front()
    simulated.ask(ask("early", client="idle"))
    for n in range(5):
        simulated.ask(ask(f"{n} busy", 500, client="busy"))
    answers = {}
    for n in range(4):
        answers[f"idle {n}"] = simulated.submit(ask(f"{n} idle", 200, client="idle"))
        answers[f"busy {n}"] = simulated.submit(ask(f"{n} more", 200, client="busy"))
    ended = order_of_ends(simulated, answers)
    assert {name.split()[0] for name in ended[:2]} == {"idle", "busy"}


# ---- making way ---------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("said", [0, 20])
def test_a_background_lane_makes_way_and_goes_on_without_replaying_anything(
    memory: MemoryKind, said: int
) -> None:
    simulated = front(memory, n_batch=64)
    background = simulated.submit(ask("slow", 500, priority="background", max_tokens=60))
    simulated.step_until(lambda: simulated.core.counters.prefilled >= 64)
    simulated.step_until(lambda: simulated.core.counters.sampled >= said)
    urgent = simulated.submit(ask("urgent", 50, priority="interactive"))
    simulated.step_until(lambda: urgent.is_over)
    assert not background.is_over
    assert simulated.core.counters.preempted == 1
    simulated.run()
    simulated.compare(urgent)
    simulated.compare(background)
    usage = background.outcome.usage
    assert usage.replayed_tokens == 0
    assert (usage.cached_tokens, usage.prefilled_tokens) == (0, 500)
    assert simulated.simulation.runtime.decoded_tokens == 500 + 60 - 1 + 50 + 12 - 1


@every_kind
def test_a_preempted_request_goes_on_from_host_memory_where_its_cells_were_taken(
    memory: MemoryKind,
) -> None:
    budgets = Budgets(exported_bytes=1 << 20)
    simulated = front(memory, n_sequences=2, n_context=600, n_cells=600, budgets=budgets)
    background = simulated.submit(ask("slow", 300, priority="background", max_tokens=60))
    simulated.step_until(lambda: simulated.core.counters.sampled >= 20)
    urgent = [simulated.submit(ask(name, 500, priority="interactive")) for name in ("one", "two")]
    simulated.run()
    for answer in (*urgent, background):
        simulated.compare(answer)
    assert background.outcome.usage.replayed_tokens == 0
    if memory != "recurrent":  # whose tokens take no cells
        assert simulated.core.counters.imported_checkpoints == 1


@every_kind
def test_a_preempted_request_reads_again_what_found_no_place_and_says_nothing_twice(
    memory: MemoryKind,
) -> None:
    simulated = front(memory, n_sequences=1, n_context=600, n_cells=600)
    background = simulated.submit(ask("slow", 300, priority="background", max_tokens=60))
    simulated.step_until(lambda: simulated.core.counters.sampled >= 20)
    urgent = simulated.submit(ask("urgent", 500, priority="interactive"))
    simulated.run()
    simulated.compare(urgent)
    simulated.compare(background)
    usage = background.outcome.usage
    assert usage.replayed_tokens > 0
    assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens


def test_only_background_lanes_make_way_and_only_for_interactive_requests() -> None:
    for running, coming in (("default", "interactive"), ("background", "default")):
        simulated = front()
        first = simulated.submit(ask("first", max_tokens=40, priority=running))
        simulated.step_until(lambda core=simulated.core: core.counters.sampled > 2)  # type: ignore[misc]
        second = simulated.submit(ask("second", priority=coming))
        simulated.step_until(lambda first=first: first.is_over)  # type: ignore[misc]
        assert not second.is_over
        simulated.run()
        assert simulated.core.counters.preempted == 0


def test_an_interactive_request_is_answered_soon_behind_eight_background_prefills() -> None:
    def first_token(n_background: int) -> float:
        simulated = front(n_lanes=4, cost=COST)
        simulated.ask(ask("first", 500))
        for n in range(n_background):
            simulated.submit(ask(f"{n} slow", 3000, priority="background", max_tokens=50))
        simulated.step(4)
        urgent = simulated.submit(ask("urgent", 300, priority="interactive"))
        simulated.step_until(lambda: urgent.is_over)
        simulated.compare(urgent)
        first = urgent.outcome.timings.time_to_first_token
        assert first is not None
        return first

    chunk = COST.call + 256 * COST.token
    assert first_token(8) <= 2 * first_token(0) + chunk


def test_a_background_request_ends_although_interactive_ones_never_stop_coming() -> None:
    simulated = front(cost=COST, patience=Patience(ageing=2))
    slow = simulated.submit(ask("slow", 200, priority="background", max_tokens=30))
    simulated.step(5)
    urgent: list[Answer] = []
    for number in range(400):
        if slow.is_over:
            break
        urgent.append(simulated.submit(ask(f"{number} urgent", priority="interactive")))
        simulated.step_until(lambda: sum(not each.is_over for each in urgent) < 2)
    assert slow.is_over
    assert simulated.core.counters.preempted > 0
    simulated.run()
    for answer in (slow, *urgent[-5:]):
        simulated.compare(answer)


# ---- waiting for a prefix -----------------------------------------------------------------------


@every_kind
def test_an_interactive_request_never_waits_for_a_prefix(memory: MemoryKind) -> None:
    simulated = front(memory, 2, n_batch=64)
    shared = words("shared", 1000)
    simulated.submit(request(shared + b"one", max_tokens=1))
    simulated.step()
    urgent = simulated.submit(request(shared + b"two", max_tokens=1, priority="interactive"))
    simulated.step()
    assert simulated.core.occupancy().lanes == 2
    simulated.run()
    simulated.compare(urgent)
    assert simulated.core.counters.waited == 0


@every_kind
def test_waiting_for_a_prefix_ends_after_so_many_steps(memory: MemoryKind) -> None:
    simulated = front(memory, 2, n_batch=16, patience=Patience(prefix_steps=5))
    shared = words("shared", 1000)
    first = simulated.submit(request(shared + b"one", max_tokens=1))
    simulated.step()
    second = simulated.submit(request(shared + b"two", max_tokens=1))
    for _ in range(5):
        simulated.step()
        assert simulated.core.occupancy().lanes == 1
    simulated.step()
    assert simulated.core.occupancy().lanes == 2
    simulated.run()
    simulated.compare(first)
    simulated.compare(second)
    assert simulated.core.counters.waited == 1


def test_a_request_whose_leader_was_cancelled_does_not_wait_for_it_any_more() -> None:
    simulated = front(n_lanes=2, n_batch=64)
    shared = words("shared", 1000)
    first = simulated.submit(request(shared + b"one"))
    simulated.step(3)
    second = simulated.submit(request(shared + b"two"))
    simulated.step(2)
    first.cancel()
    simulated.run()
    assert first.outcome.finish_reason == "cancelled"
    assert second.cached == first.outcome.usage.prefilled_tokens > 0
    simulated.compare(second)


# ---- refused, late, cancelled -------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    simulated = front(cost=COST, patience=Patience(n_waiting=3))
    running = simulated.submit(ask("running", max_tokens=200))
    simulated.step(20)
    queued = [simulated.submit(ask(f"{n} queued")) for n in range(3)]
    with pytest.raises(Busy) as refused:
        simulated.submit(ask("too many"))
    assert (refused.value.waiting, refused.value.n_waiting) == (3, 3)
    left = 200 - simulated.core.counters.sampled
    assert refused.value.retry_after == pytest.approx(left * 0.011, rel=0.3)
    assert simulated.core.counters.busy == 1
    queued[0].cancel()
    simulated.step()
    queued.append(simulated.submit(ask("in time")))
    simulated.run()
    for answer in (running, *queued[1:]):
        simulated.compare(answer)


def test_a_preempted_request_finds_its_place_in_a_full_queue() -> None:
    simulated = front(patience=Patience(n_waiting=1))
    slow = simulated.submit(ask("slow", priority="background", max_tokens=50))
    simulated.step_until(lambda: simulated.core.counters.sampled > 5)
    urgent = simulated.submit(ask("urgent", priority="interactive"))
    simulated.step()
    assert simulated.core.occupancy().paused == 1
    with pytest.raises(Busy):
        simulated.submit(ask("too many"))
    simulated.run()
    simulated.compare(slow)
    simulated.compare(urgent)


def test_a_deadline_ends_a_queued_request_that_never_ran() -> None:
    simulated = front(cost=COST)
    running = simulated.submit(ask("running", max_tokens=500))
    simulated.step()
    late = simulated.submit(ask("late", deadline=1.0))
    simulated.step_until(lambda: late.is_over)
    assert late.outcome.finish_reason == "deadline"
    assert late.outcome.usage.prefilled_tokens == 0
    assert 1.0 <= late.outcome.timings.total < 1.1
    simulated.run()
    simulated.compare(running)
    assert simulated.core.counters.expired == 1


@every_kind
def test_a_deadline_ends_a_running_request_with_what_it_has_said(memory: MemoryKind) -> None:
    simulated = front(memory, cost=COST)
    asked = ask("late", 100, max_tokens=500, deadline=1.0)
    outcome = simulated.ask(asked)
    assert outcome.finish_reason == "deadline"
    assert 1.0 <= outcome.timings.total < 1.2
    assert 0 < len(outcome.tokens) < 500
    assert outcome.tokens == simulated.cold(asked).tokens[: len(outcome.tokens)]
    (again,) = simulated.ask_all([ask("late", 100)])
    assert again.cached == 99


def test_a_deadline_ends_a_preempted_request_with_what_it_had_said() -> None:
    simulated = front(cost=COST)
    slow = simulated.submit(ask("slow", 100, priority="background", max_tokens=500, deadline=2.0))
    simulated.step_until(lambda: simulated.core.counters.sampled > 20)
    urgent = simulated.submit(ask("urgent", priority="interactive", max_tokens=400))
    simulated.step_until(lambda: slow.is_over)
    assert not urgent.is_over
    assert slow.outcome.finish_reason == "deadline"
    assert len(slow.outcome.tokens) > 20
    simulated.run()
    simulated.compare(urgent)


def test_a_queued_request_is_cancelled_at_once_from_another_thread() -> None:
    simulated = front()
    running = simulated.submit(ask("running", max_tokens=50))
    simulated.step()
    queued = simulated.submit(ask("queued"))
    other = threading.Thread(target=queued.cancel)
    other.start()
    other.join()
    assert queued.is_over  # before any further step
    assert queued.outcome.finish_reason == "cancelled"
    simulated.run()
    simulated.compare(running)
    assert simulated.core.counters.requests == 1


@every_kind
def test_a_cancelled_prefill_stops_within_a_chunk_and_what_was_read_is_reused(
    memory: MemoryKind,
) -> None:
    simulated = front(memory, n_batch=32)
    answer = simulated.submit(ask("long", 640))
    simulated.step(5)
    answer.cancel()
    evaluated = simulated.simulation.runtime.decoded_tokens
    simulated.step()
    assert answer.outcome.finish_reason == "cancelled"
    assert simulated.simulation.runtime.decoded_tokens == evaluated == 5 * 32
    (again,) = simulated.ask_all([ask("long", 640)])
    assert again.cached == evaluated


@every_kind
def test_a_cancelled_reply_stops_within_a_token_while_others_go_on(memory: MemoryKind) -> None:
    simulated = front(memory, 3)
    answers = [simulated.submit(ask(f"{n} speaks", max_tokens=60)) for n in range(3)]
    simulated.step_until(lambda: simulated.core.counters.sampled > 30)
    answers[1].cancel()
    sampled = simulated.core.counters.sampled
    simulated.step()
    assert answers[1].is_over
    assert simulated.core.counters.sampled == sampled + 2
    simulated.run()
    said = answers[1].outcome.tokens
    assert said == simulated.cold(answers[1].request).tokens[: len(said)]
    simulated.compare(answers[0])
    simulated.compare(answers[2])


@every_kind
def test_a_cancelled_preempted_request_leaves_its_state_for_the_next(memory: MemoryKind) -> None:
    simulated = front(memory)
    asked = ask("slow", 300, priority="background", max_tokens=60)
    slow = simulated.submit(asked)
    simulated.step_until(lambda: simulated.core.counters.sampled > 20)
    urgent = simulated.submit(ask("urgent", priority="interactive", max_tokens=30))
    simulated.step(3)
    slow.cancel()
    simulated.step()
    assert slow.outcome.finish_reason == "cancelled"
    said = slow.outcome.tokens
    simulated.run()
    simulated.compare(urgent)
    longer = request([*asked.tokens, *said, *b" and on"])
    (answer,) = simulated.ask_all([longer])
    assert answer.cached == 300 + len(said) - 1


@pytest.mark.parametrize("fields", [{"use_cache": False}, {"one_off": True}])
@pytest.mark.parametrize("ends", ["cancelled", "deadline", "well"])
def test_a_preempted_request_that_is_to_keep_nothing_leaves_nothing(
    fields: dict[str, Any], ends: str
) -> None:
    simulated = front()
    asked = ask("slow", 300, priority="background", max_tokens=60)
    slow = simulated.submit(replace(asked, deadline=5.0 if ends == "deadline" else None, **fields))
    simulated.step_until(lambda: simulated.core.counters.sampled > 20)
    urgent = simulated.submit(ask("urgent", priority="interactive", max_tokens=30, use_cache=False))
    simulated.step(3)
    if ends == "cancelled":
        slow.cancel()
    elif ends == "deadline":
        simulated.simulation.clock.advance(6)
    simulated.run()
    simulated.compare(urgent)
    if ends == "well":
        simulated.compare(slow)
        assert slow.outcome.usage.replayed_tokens == 0
    occupancy = simulated.core.occupancy()
    assert (occupancy.checkpoints, occupancy.sequences_used) == ({}, 0)
