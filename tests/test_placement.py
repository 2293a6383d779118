"""Where states are kept along prompts and replies, and what that costs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import Simulation

from orchestrator.engine.core import Options
from orchestrator.engine.request import GREEDY, Event, Finished, Request
from orchestrator.errors import InvalidArgument, OrchestratorError
from orchestrator.pool.checkpoint import Kind, Stop
from orchestrator.pool.placement import (
    BRANCH_MOST,
    REPLY_LEAST,
    RESEND_GAP,
    Costs,
    Points,
    place,
    reply_point,
    serving,
    thinned,
)
from orchestrator.runtime.protocol import MemoryKind
from orchestrator.runtime.simulated import Cost

LAPTOP = Costs(6 << 20, 0.001, 0.005, 0.03, n_states=32)
"""A small hybrid on two cores: a pass costs six tokens, a state a fifth of one."""

CARD = Costs(150 << 20, 0.025, 0.0002, 0.02, n_states=32)
"""A large one on a graphics card: a pass costs a hundred tokens, a state more than that."""

TINY = Costs(10 << 10, 0.00005, 0.0001, 0.0015, n_states=32)
FREE = Costs(1, 0.0, 1.0, 0.0, n_states=32)

machines = st.sampled_from([LAPTOP, CARD, TINY, FREE])


def told(points: Points, seeded: int = 0, costs: Costs = LAPTOP) -> list[tuple[Kind, int]]:
    """Return kind and length of the stops of a prefill."""
    return [(stop.kind, stop.length) for stop in place(points, seeded, costs, divisible=False)]


def of_kind(kind: Kind, points: Points, seeded: int = 0, costs: Costs = LAPTOP) -> list[int]:
    return [length for each, length in told(points, seeded, costs) if each == kind]


# ---- what is always kept ------------------------------------------------------------------------


def test_a_prefill_stops_where_the_input_ends_and_one_short_of_the_end() -> None:
    far = 60 + RESEND_GAP + 2
    assert told(Points(far, turn=60)) == [("turn", 60), ("resend", far - 1)]


def test_no_resend_point_is_kept_where_the_turn_point_is_nearly_as_good() -> None:
    assert told(Points(60 + RESEND_GAP + 1, turn=60)) == [("turn", 60)]


def test_a_turn_of_a_few_tokens_is_kept_like_any_other() -> None:
    assert told(Points(5, turn=1)) == [("turn", 1)]
    assert told(Points(31, turn=28), seeded=27) == [("turn", 28)]


def test_a_point_that_the_seed_serves_is_not_kept_again() -> None:
    points = Points(103, turn=100, base=60, starts=(60, 90), marks=(70,), branch=80)
    assert told(points, seeded=100) == told(points, seeded=102) == []
    assert told(replace(points, turn=0), seeded=79) == [("resend", 102)]


def test_rows_that_can_be_cut_need_no_stops() -> None:
    assert place(Points(500, turn=100, marks=(50,)), 0, LAPTOP, divisible=True) == ()


def test_without_room_for_any_state_there_are_no_stops() -> None:
    nothing = replace(LAPTOP, n_states=0)
    assert place(Points(500, turn=100, marks=(50,)), 0, nothing, divisible=False) == ()


def test_a_prompt_of_one_token_has_no_place_for_a_state() -> None:
    assert told(Points(1)) == []


def test_marks_are_kept_wherever_they_are_and_however_little_room_there_is() -> None:
    marks = (1, 2, 99, 101)
    points = Points(200, turn=100, marks=marks)
    assert of_kind("mark", points) == [1, 2, 99, 101]
    assert of_kind("mark", points, costs=replace(LAPTOP, n_states=2)) == [1, 2, 99, 101]
    assert of_kind("mark", points, costs=CARD) == [1, 2, 99, 101]


def test_a_mark_where_the_input_ends_is_the_turn_point() -> None:
    assert told(Points(61, turn=60, marks=(60,))) == [("turn", 60)]


# ---- the base and branch points -----------------------------------------------------------------


def test_the_base_is_kept_once_it_saves_more_than_a_stop() -> None:
    least = LAPTOP.stop_least
    assert of_kind("system", Points(100, turn=90, base=least)) == []
    assert of_kind("system", Points(100, turn=90, base=least + 1)) == [least + 1]


def test_a_long_base_is_kept_however_short_the_question_is() -> None:
    assert of_kind("system", Points(3010, turn=3002, base=3000)) == [3000]


@pytest.mark.parametrize("costs", [LAPTOP, CARD, TINY, FREE])
def test_whoever_shares_a_head_of_any_length_reads_little_more_than_the_rest(costs: Costs) -> None:
    for head in (*range(1, 80), 369, 5000):
        for tail in (1, 5, 40):
            points = Points(head + tail, turn=head + tail // 2, branch=head)
            kept = [length for _, length in told(points, costs=costs)]
            nearest = max((at for at in kept if at <= head), default=0)
            assert head - nearest <= BRANCH_MOST


def test_a_dear_pass_does_not_keep_a_branch_from_being_kept() -> None:
    assert CARD.stop_least > 300
    assert of_kind("shared", Points(100, turn=90, branch=20), costs=CARD) == [20]
    assert of_kind("shared", Points(100, turn=90, branch=BRANCH_MOST), costs=CARD) == []


def test_the_whole_prompt_seen_before_makes_no_branch() -> None:
    assert of_kind("shared", Points(100, turn=90, branch=100)) == []


def test_of_two_places_nearly_the_same_the_better_known_is_kept() -> None:
    assert told(Points(90, turn=80, base=50, branch=54))[:1] == [("shared", 54)]
    assert told(Points(90, turn=80, base=50, branch=53), seeded=50)[0] == ("turn", 80)
    assert told(Points(90, turn=54, base=50))[:2] == [("system", 50), ("turn", 54)]
    assert of_kind("message", Points(4000, turn=3990, base=100, starts=(97,))) == []
    assert of_kind("message", Points(4000, turn=3990, starts=(2000,), branch=2003)) == []
    assert of_kind("message", Points(4000, turn=3990, starts=(2000,), marks=(1998,))) == []
    assert of_kind("message", Points(4000, turn=3990, starts=(2000,))) == [2000]


# ---- message starts -----------------------------------------------------------------------------


def chat(n_messages: int, length: int = 100) -> Points:
    """Return the points of a chat whose user messages start every `length` tokens."""
    end = n_messages * length
    return Points(end + 3, turn=end, starts=tuple(range(0, end, length)))


def test_message_starts_are_all_kept_where_there_is_room_and_time() -> None:
    assert of_kind("message", chat(12, length=1000)) == list(range(1000, 12000, 1000))


def test_in_a_short_chat_read_cold_few_messages_are_worth_a_pass() -> None:
    assert of_kind("message", chat(12, length=60)) == [420, 660]
    assert of_kind("message", chat(3, length=60)) == []


def test_with_little_room_the_newest_messages_are_kept_densest() -> None:
    kept = of_kind("message", chat(200), costs=replace(LAPTOP, n_states=24))
    assert kept[-3:] == [19700, 19800, 19900]
    ages = [20000 - at for at in kept]
    assert all(far <= 3 * near for far, near in pairwise(ages))
    assert min(kept) < 20000 / 2


def test_a_message_that_the_next_turn_brings_is_kept_before_it_is_read() -> None:
    assert of_kind("message", chat(40), seeded=3850) == [3900]


def test_a_message_shortly_after_the_seed_is_not_worth_a_pass() -> None:
    assert of_kind("message", chat(40), seeded=3900 - LAPTOP.stop_least) == []
    assert of_kind("message", chat(40), seeded=3900 - LAPTOP.stop_least - 1) == [3900]


def test_where_a_pass_is_dear_messages_shorter_than_it_are_read_again() -> None:
    kept = of_kind("message", chat(400), costs=CARD)
    assert all(b - a > CARD.stop_least for a, b in pairwise([0, *kept]))


def test_of_two_turns_of_one_chat_one_wants_all_that_the_other_does_of_its_past() -> None:
    costs = replace(LAPTOP, n_states=24)
    for n_messages in range(40, 400):
        past, turns = n_messages * 50, (chat(n_messages), chat(n_messages + 1))
        before, now = (
            {at for at in of_kind("message", turn, costs=costs) if at < past} for turn in turns
        )
        assert min(len(before - now), len(now - before)) <= 1


# ---- anchors ------------------------------------------------------------------------------------


def widest(points: Points, seeded: int, stops: tuple[Stop, ...]) -> int:
    """Return how many tokens the dearest fork of a prompt costs."""
    places = [seeded, *(stop.length for stop in stops), points.n_prompt]
    return max(b - a for a, b in pairwise(places))


def test_a_long_prompt_has_soft_anchors_at_multiples_of_a_power_of_two() -> None:
    stops = place(Points(30000, turn=29990), 0, LAPTOP, divisible=False)
    anchors = [stop for stop in stops if stop.kind == "anchor"]
    assert [stop.length for stop in anchors] == list(range(1024, 29000, 1024))
    assert all(stop.is_soft for stop in anchors)
    assert not any(stop.is_soft for stop in stops if stop.kind != "anchor")


@given(n_states=st.integers(1, 300), n_prompt=st.integers(2, 300_000), opener=st.integers(1, 40))
def test_a_fork_anywhere_costs_at_most_twice_the_even_spacing(
    n_states: int, n_prompt: int, opener: int
) -> None:
    costs = replace(LAPTOP, n_states=n_states)
    points = Points(n_prompt, turn=max(0, n_prompt - opener))
    stops = place(points, 0, costs, divisible=False)
    assert widest(points, 0, stops) <= max(2 * n_prompt / n_states, costs.anchor_least)


@given(data=st.data(), n_states=st.integers(8, 100), n_prompt=st.integers(100, 100_000))
def test_other_points_make_no_hole_between_anchors(
    data: st.DataObject, n_states: int, n_prompt: int
) -> None:
    costs = replace(LAPTOP, n_states=n_states)
    inside = st.integers(1, n_prompt - 1)
    starts = tuple(sorted(data.draw(st.sets(inside, max_size=40))))
    points = Points(n_prompt, n_prompt - 8, data.draw(inside), starts, (), data.draw(inside))
    stops = place(points, 0, costs, divisible=False)
    assert widest(points, 0, stops) <= max(4 * n_prompt / n_states, 2 * costs.anchor_least)


def test_a_short_prompt_has_no_anchors_closer_than_pays() -> None:
    assert LAPTOP.anchor_least == 64
    assert of_kind("anchor", Points(70, turn=60)) == []
    assert of_kind("anchor", Points(300, turn=290)) == [64, 128, 192, 256]
    assert CARD.anchor_least == 16384
    assert of_kind("anchor", Points(30000, turn=29990), costs=CARD) == [16384]


def test_a_longer_prompt_drops_every_second_anchor() -> None:
    for shorter in range(1000, 50_000, 1777):
        longer = 2 * shorter
        few, many = (set(of_kind("anchor", Points(n))) for n in (longer, shorter))
        gap = 2 * shorter // LAPTOP.n_states
        assert {at for at in few if at < shorter - gap} <= many


def grown(rng: random.Random, costs: Costs) -> tuple[Points, set[int]]:
    """Hold a chat, every turn warm from the one before; return its end and all that was kept."""
    kept, seeded, starts = {0}, 0, [0]
    points = Points(1)
    for _ in range(rng.randrange(5, 60)):
        end = starts[-1] + rng.randrange(10, 900)
        points = Points(end + 4, turn=end, starts=tuple(starts))
        kept |= {stop.length for stop in place(points, seeded, costs, divisible=False)}
        seeded = end
        starts.append(end + rng.randrange(10, 900))
    return points, kept


@pytest.mark.parametrize("seed", range(40))
def test_a_chat_that_grew_turn_by_turn_has_no_hole(seed: int) -> None:
    points, kept = grown(random.Random(seed), LAPTOP)
    places = sorted({*kept, points.n_prompt})
    gap = max(b - a for a, b in pairwise(places))
    assert gap <= max(2 * points.n_prompt / LAPTOP.n_states, LAPTOP.anchor_least)


@pytest.mark.parametrize("seed", range(40))
def test_a_grown_chat_read_cold_wants_the_anchors_that_it_has_or_nearly(seed: int) -> None:
    points, kept = grown(random.Random(seed), LAPTOP)
    least = LAPTOP.anchor_least
    for anchor in of_kind("anchor", points):
        assert anchor % least == 0
        assert any(abs(anchor - at) <= 2 * points.n_prompt // LAPTOP.n_states for at in kept)


# ---- whatever is asked --------------------------------------------------------------------------


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Points, int]:
    """Any prompt, and how much of it is there already."""
    n_prompt = draw(st.one_of(st.integers(1, 200), st.integers(1, 60_000)))
    inside = st.integers(0, n_prompt)
    places = st.sets(inside, max_size=draw(st.sampled_from([0, 5, 60])))
    points = Points(
        n_prompt,
        turn=draw(st.integers(0, n_prompt - 1)),
        base=draw(inside),
        starts=tuple(sorted(draw(places))),
        marks=tuple(sorted(draw(st.sets(inside, max_size=4)))),
        branch=draw(inside),
    )
    return points, draw(st.one_of(st.just(0), st.integers(0, n_prompt - 1)))


NEEDED = ("turn", "mark", "shared", "system")


@given(asked=prompts(), costs=machines, n_states=st.integers(1, 80))
def test_stops_ascend_between_the_seed_and_the_end_within_the_room(
    asked: tuple[Points, int], costs: Costs, n_states: int
) -> None:
    points, seeded = asked
    stops = place(points, seeded, replace(costs, n_states=n_states), divisible=False)
    lengths = [stop.length for stop in stops]
    assert all(a < b for a, b in pairwise([seeded, *lengths, points.n_prompt]))
    needed = sum(stop.kind in NEEDED for stop in stops)
    assert len(stops) <= max(n_states, needed)


@given(asked=prompts(), costs=machines)
def test_stops_take_little_of_a_prefill(asked: tuple[Points, int], costs: Costs) -> None:
    points, seeded = asked
    kinds = [stop.kind for stop in place(points, seeded, costs, divisible=False)]
    hard = costs.pass_seconds + costs.state_seconds
    needed = hard * sum(kind in (*NEEDED, "resend") for kind in kinds)
    extra = hard * kinds.count("message") + costs.state_seconds * kinds.count("anchor")
    cold = points.n_prompt * costs.token_seconds
    assert needed + extra <= max(0.03 * cold, needed + 0.01 * cold) + 1e-9


def test_a_long_chat_read_cold_takes_at_most_three_parts_in_a_hundred_longer() -> None:
    points = replace(chat(200), base=400, marks=(5000,), branch=7000)
    kinds = [stop.kind for stop in place(points, 0, LAPTOP, divisible=False)]
    passes = sum(kind != "anchor" for kind in kinds)
    cold = points.n_prompt * LAPTOP.token_seconds
    extra = passes * LAPTOP.pass_seconds + len(kinds) * LAPTOP.state_seconds
    assert {"turn", "system", "mark", "shared", "message", "anchor"} <= set(kinds)
    assert extra <= 0.03 * cold


def test_the_scarcer_the_room_the_fewer_kinds_there_are() -> None:
    points = replace(chat(50), base=400, branch=2050)

    def kinds(n_states: int) -> set[Kind]:
        return {kind for kind, _ in told(points, costs=replace(LAPTOP, n_states=n_states))}

    assert kinds(1) == kinds(3) == {"turn", "shared", "system"}
    assert kinds(4) == {"turn", "shared", "system", "anchor"}
    assert kinds(12) == {"turn", "shared", "system", "anchor", "message"}


@pytest.mark.parametrize("field", ["token_seconds", "state_seconds", "pass_seconds", "n_states"])
def test_costs_that_cannot_be_are_refused(field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        replace(LAPTOP, **{field: -1})


# ---- who is served by a stop --------------------------------------------------------------------


def test_a_hard_stop_shortly_before_a_length_serves_it_and_a_soft_one_does_not() -> None:
    hard, soft = Stop(100, "turn"), Stop(103, "anchor", is_soft=True)
    assert serving([hard, soft], 100 + RESEND_GAP) == hard
    assert serving([hard, soft], 101 + RESEND_GAP) is None
    assert serving([hard], 99) is None


# ---- inside a reply -----------------------------------------------------------------------------


def replied(length: int, costs: Costs) -> tuple[int, ...]:
    """Return which points of a reply there are, once it has so many tokens."""
    points: tuple[int, ...] = ()
    for said in range(1, length + 1):
        if reply_point(said, costs):
            points = (*points, said)
        points = thinned(points, said)
    return points


@pytest.mark.parametrize("costs", [LAPTOP, TINY, CARD])
def test_the_newest_point_of_a_reply_is_close_behind_its_tip(costs: Costs) -> None:
    assert LAPTOP.reply_step == TINY.reply_step == REPLY_LEAST
    step, points = costs.reply_step, tuple[int, ...]()
    for said in range(1, 3 * step + 3000):
        points = thinned((*points, said) if reply_point(said, costs) else points, said)
        assert said - max(points, default=0) < max(step, 1)


def test_points_of_a_reply_are_few_and_a_fork_costs_at_most_twice_its_age() -> None:
    for length in (17, 300, 2000, 5000, 32_767, 32_768):
        points = replied(length, LAPTOP)
        assert len(points) <= length.bit_length() + 1 - REPLY_LEAST.bit_length() + 1
        for fork in range(length):
            nearest = max((at for at in points if at <= fork), default=0)
            assert fork - nearest <= max(2 * (length - fork), REPLY_LEAST)


def test_states_in_a_reply_take_little_of_its_time() -> None:
    for costs in (LAPTOP, CARD, TINY):
        step_seconds = costs.reply_step * (costs.pass_seconds + costs.token_seconds)
        assert costs.state_seconds <= 0.03 * step_seconds


def test_without_room_no_state_is_taken_in_a_reply() -> None:
    assert not any(reply_point(said, replace(LAPTOP, n_states=0)) for said in range(100))
    assert not reply_point(0, LAPTOP)


# ---- heads that many share ----------------------------------------------------------------------

TAIL = 5


def head_of(length: int, n_requests: int) -> list[Request]:
    """Return requests that begin with the same so many tokens and then part at once."""
    head = tuple(32 + number * 7 % 90 for number in range(length))
    tails = (tuple(33 + number + at * 11 % 40 for at in range(TAIL)) for number in range(99))
    return [
        Request(head + tail, sampling=GREEDY, max_tokens=1)
        for tail, _ in zip(tails, range(n_requests), strict=False)
    ]


@pytest.mark.parametrize("memory", ["hybrid", "recurrent"])
@pytest.mark.parametrize("length", [1, 5, 12, 16, 17, 30, 63, 64, 369])
def test_of_those_who_come_with_one_head_the_third_reads_little_more_than_its_own(
    memory: MemoryKind, length: int
) -> None:
    simulated = Simulation(memory, cost=Cost(call=0.01, token=0.001))
    read = [simulated.ask(asked).usage.prefilled_tokens for asked in head_of(length, 12)]
    assert max(read[2:]) <= TAIL + BRANCH_MOST


@pytest.mark.parametrize("n_lanes", [1, 4])
@pytest.mark.parametrize("length", [1, 5, 12, 16, 17, 30, 63, 64, 369])
def test_a_crowd_with_one_head_reads_it_once_unless_it_is_hardly_one(
    n_lanes: int, length: int
) -> None:
    options = Options(n_lanes=n_lanes)
    simulated = Simulation(options=options, cost=Cost(call=0.01, token=0.001))
    heard: list[list[Event | OrchestratorError]] = []
    for asked in head_of(length, 12):
        heard.append([])
        simulated.core.submit(asked, heard[-1].append)
    simulated.run()
    ends = [events[-1] for events in heard]
    read = [end.outcome.usage.prefilled_tokens for end in ends if isinstance(end, Finished)]
    assert len(read) == len(ends)
    assert max(read[2:]) <= TAIL + BRANCH_MOST
    if length > BRANCH_MOST:
        assert sum(read) == length + 12 * TAIL
