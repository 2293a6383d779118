"""Whole traces: what the engine evaluates again, with room for everything and with too little.

Every reply of a trace is compared with that of an uncached engine, and what usage reports with
what the decode call was given (`traces.play`). `bench_reuse.py` prints the same as a table.
"""

from __future__ import annotations

from functools import cache

import pytest
from baselines import Map, Played, Store, lru, oracle
from scenarios import Alone
from simulation import KINDS, cold
from traces import (
    CELL_BYTES,
    STATE_BYTES,
    Author,
    Bill,
    Ideal,
    Step,
    Trace,
    Trie,
    asking,
    cramped,
    drawn,
    play,
    stage,
)

from orchestrator.runtime.protocol import MemoryKind

CEILING = 1.05
SHARES = (0.10, 0.25, 0.50)
OPERATIONS = {"append", "regenerate", "branch", "edit", "aside", "sub-agent"}

every_number_of_lanes = pytest.mark.parametrize("n_lanes", [1, 4])


# ---- the engine on a trace ----------------------------------------------------------------------


TRACES = [*((memory, 1) for memory in KINDS), ("hybrid", 2)]


@every_number_of_lanes
@pytest.mark.parametrize(("memory", "seed"), TRACES)
def test_with_room_for_all_a_trace_costs_hardly_more_than_any_engine_must_pay(
    memory: MemoryKind, seed: int, n_lanes: int
) -> None:
    bill = play(drawn(seed, memory), stage(memory, n_lanes))
    assert bill.reused > 3 * bill.prefilled
    assert bill.ratio <= CEILING


@every_number_of_lanes
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", [1, 2])
def test_with_too_little_room_the_engine_is_no_worse_than_least_recent_use(
    seed: int, share: float, n_lanes: int
) -> None:
    recent, _ = on_paper(seed, share)
    assert played(seed, share, n_lanes).evaluated <= recent.prefilled


@every_number_of_lanes
@pytest.mark.parametrize("share", [0.25, 0.50])
@pytest.mark.parametrize("seed", [1, 2])
def test_with_a_quarter_of_the_room_most_of_what_foresight_would_spare_is_spared(
    seed: int, share: float, n_lanes: int
) -> None:
    recent, foreseen = on_paper(seed, share)
    spared = recent.prefilled - played(seed, share, n_lanes).evaluated
    assert spared >= 0.75 * (recent.prefilled - foreseen.prefilled)


@cache
def played(seed: int, share: float, n_lanes: int) -> Bill:
    """Return what a trace costs with room for a part of its working set."""
    cells, states = (int(share * n) for n in (working_set(seed).n_rows, working_set(seed).n_states))
    return play(drawn(seed), cramped("hybrid", n_lanes, cells, states))


@cache
def places(seed: int) -> Map:
    """Return the places of a trace."""
    return Map(drawn(seed))


@cache
def working_set(seed: int) -> Played:
    """Return what holding everything that is of use again comes to."""
    return oracle(places(seed))


@cache
def on_paper(seed: int, share: float) -> tuple[Played, Played]:
    """Return what least recent use and an oracle make of as many bytes."""
    capacity = int(share * working_set(seed).n_bytes)
    return lru(places(seed), capacity), oracle(places(seed), capacity)


# ---- the traces themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_a_trace_has_requests_of_every_kind(seed: int) -> None:
    steps = drawn(seed).steps
    assert {step.name for step in steps} == OPERATIONS
    asked = [step.request for step in steps]
    for some in (
        [each.conversation is None for each in asked],
        [each.one_off for each in asked],
        [each.sampling.temperature > 0 for each in asked],
        [step.wanted.finish_reason == "stop" for step in steps],
        [each.base > 1000 for each in asked],
    ):
        assert 0 < sum(some) < len(steps)
    assert all(0 < each.base < each.turn < len(each.tokens) for each in asked)
    assert all(each.starts[0] == each.base for each in asked)
    assert all(earlier < n for n, step in enumerate(steps) for earlier in step.after)


def test_a_seed_draws_the_same_trace_every_time() -> None:
    one, other = (Author(5, Alone("hybrid", 4096, 60)).write(12, "hybrid") for _ in range(2))
    for mine, yours in zip(one.steps, other.steps, strict=True):
        assert mine.request == yours.request
        assert (mine.fed, mine.at, mine.after) == (yours.fed, yours.at, yours.after)
    assert one.steps[3].request != drawn(6, n_steps=4).steps[3].request


def step(text: bytes, *, turn: int = 0, max_tokens: int = 3, one_off: bool = False) -> Step:
    """Return a step of a trace that is made by hand."""
    asked = asking(text, turn=turn, max_tokens=max_tokens, one_off=one_off)
    return Step("append", asked, cold(asked), 0.0, ())


def by_hand(*steps: Step) -> Trace:
    """Return a trace that is made by hand."""
    return Trace(0, "hybrid", steps)


def test_the_ideal_is_the_size_of_the_trie_and_a_token_for_each_prompt_again() -> None:
    first = step(b"one and the same")
    assert by_hand(first, step(b"one and another")).ideal() == Ideal(16 + 7, 0)
    assert by_hand(first, first, step(b"one and")).ideal() == Ideal(16, 2)


def test_what_was_said_is_not_new_but_for_the_last_token_which_nobody_evaluated() -> None:
    first = step(b"go on: ", max_tokens=8)
    said = bytes(first.wanted.tokens)
    assert len(first.fed) == 7 + 7
    assert by_hand(first, step(b"go on: " + said + b"!?")).ideal() == Ideal(7 + 1 + 2, 0)


def test_what_a_one_off_request_evaluated_is_new_to_everybody_else() -> None:
    aside = step(b"a title for this", one_off=True)
    assert by_hand(aside, step(b"a title for that")).ideal() == Ideal(16 + 16, 0)


def test_a_trie_counts_what_two_paths_have_in_common() -> None:
    trie = Trie()
    assert trie.common(b"abc") == 0
    nodes = trie.grow(b"abc")
    assert trie.grow(b"abd")[:2] == nodes[:2]
    assert (trie.common(b"abx"), trie.common(b"abcd"), len(trie)) == (2, 3, 4)


# ---- the engines on paper -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_oracle_that_holds_its_working_set_pays_the_ideal(seed: int) -> None:
    whole = working_set(seed)
    assert whole.prefilled == drawn(seed).ideal().total
    assert oracle(places(seed), whole.n_bytes).prefilled == whole.prefilled


@pytest.mark.parametrize("share", [0.05, *SHARES, 1.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_whoever_foresees_evaluates_no_more_than_whoever_remembers(seed: int, share: float) -> None:
    capacity = int(share * working_set(seed).n_bytes)
    foreseen = oracle(places(seed), capacity)
    assert foreseen.n_bytes <= capacity
    for messages in (False, True):
        recent = lru(places(seed), capacity, messages=messages)
        assert recent.n_bytes <= capacity
        assert drawn(seed).ideal().total <= foreseen.prefilled <= recent.prefilled


def test_of_three_in_turn_with_room_for_two_foresight_finds_two_and_recency_none() -> None:
    """The same three prompts of 20 tokens, three times over; 22 are fed for each."""
    trace = by_hand(*[step(name * 20, turn=15) for name in (b"a", b"b", b"c")] * 3)
    places = Map(trace)
    capacity = 2 * (19 * CELL_BYTES + STATE_BYTES) + 22 * CELL_BYTES
    assert trace.ideal() == Ideal(60, 6)
    assert oracle(places).prefilled == 60 + 6
    assert lru(places).prefilled == 60 + 6 * 5
    assert oracle(places, capacity).prefilled == 20 + 20 + 3 * 20 + 4
    assert lru(places, capacity).prefilled == 9 * 20


def test_rows_that_two_states_share_are_counted_once() -> None:
    """Of two states, after 14 and after 15 tokens, that have ten in common."""
    places = Map(by_hand(step(b"0123456789abcd"), step(b"0123456789vwxyz")))
    one, other = (path.nodes[-3] for path in places.paths)
    store = Store(places)
    store.keep(one)
    store.keep(other)
    assert store.n_rows == 14 + 15 - 10
    assert store.freed(other) == 5 * CELL_BYTES + STATE_BYTES
    assert store.missing(places.paths[1].nodes) == 2
    store.give_up(other)
    assert (store.n_rows, store.missing(places.paths[1].nodes)) == (14, 7)
    assert store.n_bytes == 14 * CELL_BYTES + STATE_BYTES
