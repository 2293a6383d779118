"""Many conversations in one pool: who starts warm, and where."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from scenarios import (
    OPENER,
    Simulated,
    Talk,
    a_burst_that_shares_a_prefix,
    a_prompt_again,
    branches,
    converse,
    one_waits_for_another_s_turn_point,
    round_robin,
    simulated,
    turns_of_a_codec,
    two_that_share_a_beginning,
    words,
)
from simulation import KINDS, request

from orchestrator.engine.core import Options
from orchestrator.pool.book import Book
from orchestrator.pool.checkpoint import Checkpoint, Holder
from orchestrator.pool.index import pack
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import MemoryKind
from orchestrator.text.bytes import ByteTokenizer
from orchestrator.text.codec import ChatCodec
from orchestrator.text.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
WHOLE: tuple[MemoryKind, ...] = ("hybrid", "recurrent", "windowed")
"""Memory whose states cannot be cut: what they start from was kept exactly there."""

every_kind = pytest.mark.parametrize("memory", KINDS)
every_whole_kind = pytest.mark.parametrize("memory", WHOLE)


def lanes(n_lanes: int, **budgets: int) -> Options:
    """Return options with so many lanes."""
    return Options(n_lanes=n_lanes, budgets=Budgets(**budgets))


# ---- bursts, and the same again -----------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("n_lanes", [1, 2, 5])
def test_of_five_requests_at_once_that_share_a_prefix_one_reads_it(
    memory: MemoryKind, n_lanes: int
) -> None:
    front = simulated(memory, lanes(n_lanes), n_sequences=16, n_cells=16384)
    a_burst_that_shares_a_prefix(front, 5, 2048)


@every_kind
def test_a_burst_of_many_reads_a_long_prefix_once_in_all(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(4), n_sequences=16, n_context=8192, n_cells=16384)
    shared = words("shared", 5000)
    front.ask_all(request(shared + words(f"{n} own", 8), max_tokens=2) for n in range(32))
    assert front.core.counters.prefilled <= 1.05 * (5000 + 32 * 8)


@every_kind
def test_identical_requests_at_once_have_one_answer_and_one_prefill(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(8), n_sequences=16, n_cells=16384)
    answers = front.ask_all([request(words("same", 500))] * 8)
    assert len({answer.outcome.tokens for answer in answers}) == 1
    assert sorted(answer.cached for answer in answers) == [0] + [499] * 7


@every_kind
def test_a_resent_prompt_starts_one_token_short_of_its_end(memory: MemoryKind) -> None:
    a_prompt_again(simulated(memory), 600)


@every_kind
@pytest.mark.parametrize("exported_bytes", [0, 1 << 20])
def test_a_resent_prompt_starts_one_short_when_every_sequence_is_in_use(
    memory: MemoryKind, exported_bytes: int
) -> None:
    front = simulated(memory, lanes(2, exported_bytes=exported_bytes), n_sequences=4)
    for number in range(6):
        converse(front, [Talk(words(f"talk {number}", 50))], 1)
    assert front.core.occupancy().sequences_used == 4
    a_prompt_again(front, 600)


@every_kind
def test_a_resent_prompt_starts_one_short_beside_lanes_that_speak(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(3), n_sequences=4)
    speaking = [front.submit(request(words(n, 30), max_tokens=300)) for n in ("one", "two")]
    front.step_until(lambda: front.core.counters.sampled > 10)
    asked = request(words("again", 600))
    for cached in (0, 599):
        answer = front.submit(asked)
        front.step_until(lambda answer=answer: answer.is_over)  # type: ignore[misc]
        assert answer.cached == cached
        front.compare(answer)
    assert not any(each.is_over for each in speaking)
    front.run()
    for each in speaking:
        front.compare(each)


# ---- turns --------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("template", ["chatml", "empty_think", "thinking"])
def test_a_turn_in_messages_starts_where_the_last_input_ended_or_where_its_reply_did(
    memory: MemoryKind, template: str
) -> None:
    path = TEMPLATES / f"{template}.jinja"
    jinja = ChatTemplate.from_file(path, bos_text="<s>", eos_text="</s>")
    codec = ChatCodec(ByteTokenizer.for_chat(), jinja)
    turns_of_a_codec(simulated(memory), codec, 6)


@every_whole_kind
def test_the_first_branch_of_a_long_chat_is_cold_and_others_start_where_it_left(
    memory: MemoryKind,
) -> None:
    reused = branches(simulated(memory, lanes(1), n_sequences=31), 4)
    cold, *later = (reused[turn][0] for turn in (1, 2, 3))
    assert cold == 0
    assert all(reused[1][1] <= cached <= reused[2][1] + len(OPENER) for cached in later)
    cached, end = reused[4]
    assert cached == end > 0


@every_whole_kind
def test_a_long_chat_holds_one_turn_checkpoint(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(1), n_sequences=31)
    converse(front, [Talk(words("head", 60))], 4)
    assert front.core.occupancy().checkpoints["turn"] == 1


@every_whole_kind
def test_with_a_budget_for_history_every_branch_is_warm(memory: MemoryKind) -> None:
    reused = branches(simulated(memory, lanes(1, history=16), n_sequences=31), 4)
    assert all(cached == end > 0 for cached, end in reused.values())


def test_where_rows_can_be_cut_every_branch_is_warm() -> None:
    reused = branches(simulated("attention", lanes(1), n_sequences=31), 4)
    assert all(cached >= end > 0 for cached, end in reused.values())


@every_kind
def test_two_chats_that_share_a_beginning_read_it_once_and_go_on_apart(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(2), n_sequences=8, n_cells=8192)
    two_that_share_a_beginning(front, 1500)


@every_whole_kind
def test_a_turn_point_kept_first_serves_the_request_queued_behind_it(memory: MemoryKind) -> None:
    one_waits_for_another_s_turn_point(simulated(memory, lanes(2), n_cells=8192))


# ---- long chats, and many -----------------------------------------------------------------------

TIGHT = {"resident_cells": 4096, "exported_tokens": 8000, "exported_bytes": 1 << 20}


@every_kind
def test_thirty_turns_that_fill_the_resident_budget_are_warm(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(2, **TIGHT), n_sequences=31, n_context=8192)
    converse(front, [Talk(words("head", 200))], 30, size=90)
    assert front.core.counters.replayed == 0


@every_kind
def test_thirty_turns_of_two_chats_that_overflow_the_resident_budget_are_warm(
    memory: MemoryKind,
) -> None:
    front = simulated(memory, lanes(2, **TIGHT), n_sequences=31, n_context=8192)
    converse(front, [Talk(words(name, 200)) for name in ("one", "two")], 30, size=80)
    assert front.core.counters.replayed == 0


@every_kind
def test_thirty_turns_are_warm_beside_a_stranger_s_every_time(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(2, **TIGHT), n_sequences=31, n_context=8192)
    talk = Talk(words("head", 200))
    for number in range(30):
        stranger = front.submit(request(words(f"stranger {number}", 700), turn=600, max_tokens=40))
        converse(front, [talk], 1, size=80)
        front.run()
        front.compare(stranger)
    assert front.core.occupancy().exported_tokens > 0 or memory == "recurrent"


@every_kind
def test_two_hundred_turns_are_warm(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(2, **TIGHT), n_sequences=31, n_context=8192)
    compare_every = 1 if memory == "hybrid" else 8
    converse(front, [Talk(words("head", 50), max_tokens=3)], 200, 5, compare_every)
    kinds = front.core.occupancy().checkpoints
    assert kinds.get("turn", 0) <= 1


@every_kind
def test_twelve_chats_round_robin_on_four_lanes_return_warm(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(4), n_sequences=32, n_context=4096, n_cells=16384)
    round_robin(front, 12, 4)


@every_kind
def test_twelve_chats_return_warm_from_host_memory_when_sequences_are_few(
    memory: MemoryKind,
) -> None:
    front = simulated(memory, lanes(4, exported_bytes=1 << 22), n_sequences=8, n_cells=4096)
    round_robin(front, 12, 4)
    assert front.core.counters.imported_checkpoints > 0


# ---- parked conversations -----------------------------------------------------------------------


@every_whole_kind
def test_of_several_parked_chats_the_longest_match_wins(memory: MemoryKind) -> None:
    front = simulated(memory, n_sequences=16)
    history = words("history", 400)
    for end in (100, 300, 200):
        front.ask_all([request(history[:end] + OPENER, turn=end, conversation=f"to {end}")])
    (answer,) = front.ask_all([request(history + OPENER, turn=400)])
    assert answer.cached == 300


@every_kind
def test_a_match_of_nothing_is_no_match(memory: MemoryKind) -> None:
    front = simulated(memory, n_sequences=16)
    front.ask_all([request(words(f"{n} parked", 100), turn=80) for n in range(3)])
    (answer,) = front.ask_all([request(words("other", 100), turn=80)])
    assert (answer.cached, answer.outcome.usage.seeded_from) == (0, None)


@every_kind
def test_an_empty_pool_and_a_prompt_of_one_token_start_cold(memory: MemoryKind) -> None:
    front = simulated(memory)
    for _ in range(2):  # a strict prefix of one token is empty
        (answer,) = front.ask_all([request(b"x", max_tokens=0)])
        assert (answer.cached, answer.outcome.usage.prefilled_tokens) == (0, 1)


def returns(front: Simulated, talks: list[Talk]) -> list[bool]:
    """Return for each chat whether its next turn would be warm, without taking it."""
    book = front.core._keeper.pool.book
    ends = []
    for talk in talks:
        seed = book.longest(pack([*talk.history[: talk.input_end], 0]))
        ends.append(seed is not None and seed.length == talk.input_end)
    return ends


@every_whole_kind
def test_the_chat_used_longest_ago_leaves_first(memory: MemoryKind) -> None:
    front = simulated(memory, n_sequences=6)
    talks = [Talk(words(f"talk {n}", 60), f"talk {n}") for n in range(9)]
    for number in range(9):
        converse(front, talks[number : number + 1], 1)
    warm = returns(front, talks)
    assert all(later or not earlier for earlier, later in pairwise(warm))
    assert warm[-1]
    assert not warm[0]


@every_whole_kind
def test_a_chat_that_was_returned_to_outlives_those_that_were_not(memory: MemoryKind) -> None:
    front = simulated(memory, n_sequences=5)
    talks = [Talk(words(f"talk {n}", 60), f"talk {n}") for n in range(5)]
    converse(front, talks[:1], 1)
    for number in range(1, 5):
        converse(front, talks[number : number + 1], 1)
        converse(front, talks[:1], 1)
    assert returns(front, talks)[0]


@pytest.mark.parametrize("sequences", [(3, None), (None, 3)])
@pytest.mark.parametrize("divisible", [True, False])
def test_of_two_equal_matches_the_resident_one_wins(
    sequences: tuple[int | None, int | None], divisible: bool
) -> None:
    book, path = Book(divisible=divisible), pack(b"equal")
    for number, sequence in enumerate(sequences):
        holder = Holder(sequence, path, length=5)
        book.add(Checkpoint(path, 5, "turn", f"talk {number}", number, holder))
    seed = book.longest(pack(b"equal and more"))
    assert seed is not None
    assert (seed.checkpoint.tier, seed.length) == ("resident", 5)


@every_whole_kind
def test_a_turn_that_two_chats_go_on_from_stays_for_the_second(memory: MemoryKind) -> None:
    front = simulated(memory, lanes(1), n_sequences=12)
    talks = [Talk(words("same", 120), name) for name in ("one", "two")]
    converse(front, talks, 1)
    for talk in talks:
        end = talk.input_end
        (answer,) = front.ask_all([talk.turn(words(f"next of {talk.conversation}", 40))])
        front.check_reused(answer, end)
