"""Checkpoints in host memory: how they get there and back, and what they may take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from scenarios import Simulated, Talk, converse, round_robin, simulated, words
from simulation import KINDS, request

from orchestrator.engine.core import Options
from orchestrator.engine.request import Request
from orchestrator.errors import BackendError, DecodeFailed, PoolFull, StateRefused
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import MemoryKind
from orchestrator.runtime.simulated import Cost

every_kind = pytest.mark.parametrize("memory", KINDS)
every_kind_with_cells = pytest.mark.parametrize("memory", ["hybrid", "attention", "windowed"])
every_sliced_kind = pytest.mark.parametrize("memory", ["hybrid", "attention"])

ROOM = 1 << 40
WIDE = 1 << 20
"""Bytes of a cell so wide that a slice is 64 tokens."""


def front(
    memory: MemoryKind = "hybrid", n_lanes: int = 1, *, cost: Cost | None = None, **more: Any
) -> Simulated:
    """Return a front; `more` are its budgets and the sizes of its runtime."""
    budgets = {"exported_bytes": ROOM}
    budgets |= {name: more.pop(name) for name in list(more) if name in Budgets.__slots__}
    return simulated(
        memory, Options(n_lanes=n_lanes, budgets=Budgets(**budgets)), cost=cost, **more
    )


def talks(count: int, size: int = 100) -> list[Talk]:
    """Return chats that have nothing in common."""
    return [Talk(words(f"{n} talk", size), f"talk {n}") for n in range(count)]


def go_on(front: Simulated, talk: Talk) -> str | None:
    """Take a chat's next turn, which must be warm; return the tier it started from."""
    end = talk.input_end
    (answer,) = front.ask_all([talk.turn(b"and then?")])
    front.check_reused(answer, end)
    talk.hear(answer)
    return answer.outcome.usage.seeded_tier


def exported(front: Simulated, talk: Talk) -> None:
    """Hold a chat's first turn and move all that it kept to host memory."""
    converse(front, [talk], 1)
    keeper = front.core._keeper
    keeper.clear_now(list(keeper.pool.book.resident()))
    front.check()
    assert any(c.conversation == talk.conversation for c in keeper.pool.book.exported())


def speaker(front: Simulated) -> Request:
    """Start a request that goes on speaking; return it."""
    asked = request(words("speaker", 20), max_tokens=2000, use_cache=False)
    front.submit(asked)
    sampled = front.core.counters.sampled
    front.step_until(lambda: front.core.counters.sampled > sampled + 3)
    return asked


class Log:
    """The runtime's calls by name, in order, and when each ended."""

    def __init__(self, front: Simulated, *names: str) -> None:
        self.calls: list[tuple[str, float]] = []
        for name in names:
            self._watch(front, name)

    def _watch(self, front: Simulated, name: str) -> None:
        runtime, call = front.simulation.runtime, getattr(front.simulation.runtime, name)

        def watched(*arguments: Any) -> Any:
            result = call(*arguments)
            self.calls.append((name, front.simulation.clock()))
            return result

        setattr(runtime, name, watched)

    def names(self) -> list[str]:
        """Return the names alone."""
        return [name for name, _ in self.calls]


# ---- out and back -------------------------------------------------------------------------------


@every_kind
def test_chats_come_back_from_host_memory_when_sequences_are_few(memory: MemoryKind) -> None:
    simulated, chats = front(memory, n_sequences=4), talks(6)
    for chat in chats:
        converse(simulated, [chat], 1)
    tiers = [go_on(simulated, chat) for chat in chats]
    assert tiers[0] == "exported"
    counters = simulated.core.counters
    assert counters.exported_checkpoints >= counters.imported_checkpoints > 0


@every_kind_with_cells
def test_chats_come_back_from_host_memory_when_cells_are_few(memory: MemoryKind) -> None:
    simulated, chats = front(memory, n_sequences=32, resident_cells=500), talks(6)
    for chat in chats:
        converse(simulated, [chat], 1)
    tiers = [go_on(simulated, chat) for chat in chats]
    assert tiers[0] == "exported"
    assert simulated.core.occupancy().cells_used <= 500


@every_kind
def test_without_a_budget_nothing_is_moved_and_all_is_right(memory: MemoryKind) -> None:
    simulated, chats = front(memory, n_sequences=3, exported_bytes=0), talks(6)
    for chat in chats + chats:
        (answer,) = simulated.ask_all([chat.turn(b"hello")])
        chat.hear(answer)
    assert simulated.core.counters.exported_checkpoints == 0


@every_kind
@pytest.mark.parametrize("n_lanes", [1, 3])
def test_a_pool_that_cannot_copy_keeps_everything_in_host_memory(
    memory: MemoryKind, n_lanes: int
) -> None:
    simulated = front(memory, n_lanes, n_sequences=n_lanes, copies=False, n_cells=8192)
    round_robin(simulated, 4, 4)
    occupancy = simulated.core.occupancy()
    assert occupancy.sequences_used == 0
    assert occupancy.exported == occupancy.checkpoints
    assert simulated.core.counters.imported_checkpoints >= 12


@every_kind
def test_the_oldest_chat_leaves_host_memory_first(memory: MemoryKind) -> None:
    simulated = front(memory, n_sequences=2, exported_tokens=400)
    chats = talks(8)
    for chat in chats:
        converse(simulated, [chat], 1)
    kept = {c.conversation for c in simulated.core._keeper.pool.book.exported()}
    gone = [chat.conversation not in kept for chat in chats[:-2]]
    assert gone[0]
    assert not gone[-1]
    assert gone == sorted(gone, reverse=True)


# ---- slices -------------------------------------------------------------------------------------


@every_sliced_kind
def test_no_two_slices_out_pass_between_two_tokens_of_a_speaking_lane(memory: MemoryKind) -> None:
    simulated = front(memory, 2, n_sequences=2, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    converse(simulated, [chat], 1)
    speaker(simulated)
    log = Log(simulated, "decode", "save_rows", "save_state")
    asked = [request(words(f"{n} new", 90), use_cache=False) for n in range(2)]
    answers = [simulated.submit(each) for each in asked]
    simulated.step_until(lambda: all(answer.is_over for answer in answers))
    names = log.names()
    assert names.count("save_rows") >= 10
    for earlier, later in pairwise(names):
        assert "decode" in (earlier, later)
    simulated.run()
    for answer in answers:
        simulated.compare(answer)
    assert go_on(simulated, chat) == "exported"


@every_sliced_kind
def test_no_two_slices_in_pass_between_two_tokens_of_a_speaking_lane(memory: MemoryKind) -> None:
    simulated = front(memory, 2, n_sequences=3, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    exported(simulated, chat)
    speaker(simulated)
    end = chat.input_end
    log = Log(simulated, "decode", "restore_rows", "restore_state")
    answer = simulated.submit(chat.turn(b"and then?"))
    simulated.step_until(lambda: answer.is_over)
    names = log.names()
    assert names.count("restore_rows") >= 10
    for earlier, later in pairwise(names):
        assert "decode" in (earlier, later)
    simulated.check_reused(answer, end)
    simulated.run()
    simulated.compare(answer)


@every_sliced_kind
def test_a_speaking_lane_waits_for_one_slice_at_most(memory: MemoryKind) -> None:
    cost = Cost(call=0.01, token=0.0001, moved=0.0001)  # a slice of 64 tokens takes 6.4 ms
    simulated = front(memory, 2, n_sequences=3, cell_bytes=WIDE, cost=cost)
    chat = Talk(words("chat", 2000), "chat")
    exported(simulated, chat)
    speaker(simulated)
    log = Log(simulated, "decode")
    answer = simulated.submit(chat.turn(b"and then?"))
    simulated.step_until(lambda: bool(answer.events))
    gaps = [later[1] - earlier[1] for earlier, later in pairwise(log.calls)]
    assert len(gaps) >= 2000 // 64
    assert max(gaps) <= 0.0101 + 2 * 0.0064
    simulated.run()
    simulated.compare(answer)


@pytest.mark.parametrize("memory", ["windowed", "attention"])
def test_a_state_saved_from_a_running_lane_holds_nobody_up(memory: MemoryKind) -> None:
    """No sequence is to spare, so the turn's state goes from the lane to host memory."""
    cost = Cost(call=0.01, token=0.0001, moved=0.0001)
    simulated = front(memory, 2, n_sequences=2, cell_bytes=WIDE, cost=cost)
    speaker(simulated)
    history = words("chat", 2000)
    asked = request([*history, *b"<assistant>"], turn=2000, conversation="chat")
    log = Log(simulated, "decode")
    answer = simulated.submit(asked)
    simulated.step_until(lambda: answer.is_over)
    gaps = [later[1] - earlier[1] for earlier, later in pairwise(log.calls)]
    assert max(gaps) <= 0.0101 + 256 * 0.0001 + 0.0064
    simulated.compare(answer)
    assert simulated.core.counters.exported_checkpoints == (memory != "attention")
    following = request([*history, *words("next", 30)], turn=2020, conversation="chat")
    (answer,) = [simulated.submit(following)]
    simulated.step_until(lambda: answer.is_over)
    simulated.check_reused(answer, 2000)
    simulated.compare(answer)


@pytest.mark.parametrize("what", ["cancel", "fail", "resize", "save fails"])
def test_a_save_that_is_broken_off_leaves_nothing_behind(what: str) -> None:
    simulated = front("windowed", 2, n_sequences=2, cell_bytes=WIDE)
    speaker(simulated)
    log = Log(simulated, "save_rows")
    asked = request([*words("chat", 1000), *b"<assistant>"], turn=1000)
    answer = simulated.submit(asked)
    simulated.step_until(lambda: len(log.calls) == 4)
    if what == "cancel":
        answer.cancel()
    elif what == "fail":
        simulated.simulation.runtime.fails_next = DecodeFailed("llama_decode failed with -3")
    elif what == "resize":
        simulated.core.resize(Budgets())
    else:
        simulated.simulation.runtime.fails_next_save = StateRefused("rows", "too few")
    simulated.step_until(lambda: answer.is_over)
    assert not simulated.core._keeper.mover.is_busy
    assert simulated.core._keeper.pool.exported_bytes == 0
    if what in ("resize", "save fails"):
        simulated.compare(answer)
    simulated.run()
    simulated.ask_all([asked])


@every_kind
def test_a_state_moves_at_once_while_nobody_speaks(memory: MemoryKind) -> None:
    simulated = front(memory, n_sequences=2, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    exported(simulated, chat)
    simulated.submit(chat.turn(b"and then?"))
    simulated.step(2)
    assert simulated.core.counters.imported_checkpoints == 1
    simulated.run()


# ---- what goes wrong ----------------------------------------------------------------------------

REFUSALS = [StateRefused("checksum", "the state is damaged"), PoolFull("no cell is left")]


@every_kind
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_failed_import_reads_the_prompt_again_and_drops_the_checkpoint(
    memory: MemoryKind, refusal: BackendError
) -> None:
    simulated = front(memory, n_sequences=2)
    chat = Talk(words("chat", 200), "chat")
    exported(simulated, chat)
    simulated.simulation.runtime.fails_next_restore = refusal
    (answer,) = simulated.ask_all([chat.turn(b"and then?")])
    assert answer.cached == 0
    counters = simulated.core.counters
    assert (counters.refused_checkpoints, counters.imported_checkpoints) == (1, 0)
    chat.hear(answer)
    go_on(simulated, chat)


@every_sliced_kind
def test_an_import_that_fails_halfway_reads_the_prompt_again(memory: MemoryKind) -> None:
    simulated = front(memory, 2, n_sequences=3, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    exported(simulated, chat)
    speaker(simulated)
    log = Log(simulated, "restore_rows")
    answer = simulated.submit(chat.turn(b"and then?"))
    simulated.step_until(lambda: len(log.calls) == 4)
    simulated.simulation.runtime.fails_next_restore = StateRefused("checksum", "damaged")
    simulated.run()
    simulated.compare(answer)
    assert answer.cached == 0
    assert simulated.core.counters.refused_checkpoints == 1


@every_sliced_kind
def test_a_request_cancelled_while_its_state_comes_in_leaves_the_checkpoint(
    memory: MemoryKind,
) -> None:
    simulated = front(memory, 2, n_sequences=3, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    exported(simulated, chat)
    speaker(simulated)
    end, log = chat.input_end, Log(simulated, "restore_rows")
    asked = chat.turn(b"and then?")
    answer = simulated.submit(asked)
    simulated.step_until(lambda: len(log.calls) == 4)
    answer.cancel()
    simulated.step()
    assert answer.outcome.finish_reason == "cancelled"
    simulated.run()
    (again,) = simulated.ask_all([asked])
    simulated.check_reused(again, end)
    assert again.outcome.usage.seeded_tier == "exported"


@every_kind
def test_after_a_failed_decode_chats_go_on_from_host_memory(memory: MemoryKind) -> None:
    simulated, chats = front(memory, n_sequences=2), talks(4)
    for chat in chats:
        converse(simulated, [chat], 1)
    simulated.simulation.runtime.fails_next = DecodeFailed("llama_decode failed with -3")
    with pytest.raises(DecodeFailed):
        simulated.ask(request(words("unlucky", 50)))
    occupancy = simulated.core.occupancy()
    assert (occupancy.sequences_used, occupancy.cells_used) == (0, 0)
    assert go_on(simulated, chats[0]) == "exported"
    assert simulated.core.counters.recoveries == 1


@every_sliced_kind
@pytest.mark.parametrize("direction", ["save_rows", "restore_rows"])
def test_a_failed_decode_while_slices_move_leaves_no_half_of_anything(
    memory: MemoryKind, direction: str
) -> None:
    simulated = front(memory, 2, n_sequences=2, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    if direction == "restore_rows":
        exported(simulated, chat)
    else:
        converse(simulated, [chat], 1)
    speaker(simulated)
    log, end = Log(simulated, direction), chat.input_end
    following = chat.turn(b"and then?")
    coming = following if direction == "restore_rows" else request(words("new", 90), turn=80)
    answer = simulated.submit(coming)
    simulated.step_until(lambda: len(log.calls) == 3)
    simulated.simulation.runtime.fails_next = DecodeFailed("llama_decode failed with -3")
    simulated.run()
    assert answer.is_over
    assert simulated.core.counters.recoveries == 1
    (again,) = simulated.ask_all([following])
    if direction == "restore_rows":  # whole in host memory all the time
        simulated.check_reused(again, end)
    else:
        assert again.cached == 0


# ---- budgets ------------------------------------------------------------------------------------


@every_kind
def test_the_budgets_hold_after_every_step_of_a_crowd(memory: MemoryKind) -> None:
    """Also while states are on their way: `Front.step` checks, here are the numbers it checks."""
    n_bytes, n_tokens, n_cells = 60_000, 1200, 900
    simulated = front(
        memory,
        3,
        n_sequences=6,
        resident_cells=n_cells,
        exported_bytes=n_bytes,
        exported_tokens=n_tokens,
    )
    chats = talks(9)
    most = [0, 0]
    for _ in range(3):
        answers = [simulated.submit(chat.turn(b"go on")) for chat in chats]
        while not simulated.core.is_idle:
            simulated.step()
            occupancy = simulated.core.occupancy()
            most = [
                max(most[0], occupancy.exported_bytes),
                max(most[1], occupancy.exported_tokens),
            ]
            assert simulated.core._keeper.mover.n_bytes <= n_bytes
        for chat, answer in zip(chats, answers, strict=True):
            simulated.compare(answer)
            chat.hear(answer)
    assert 0 < most[0] <= n_bytes
    assert 0 < most[1] <= n_tokens


@every_kind
def test_shrinking_the_exported_budget_drops_the_oldest_until_it_holds(memory: MemoryKind) -> None:
    simulated, chats = front(memory, n_sequences=2), talks(8)
    for chat in chats:
        converse(simulated, [chat], 1)
    before = simulated.core.occupancy().exported_tokens
    simulated.core.resize(Budgets(exported_bytes=ROOM, exported_tokens=before // 2))
    simulated.check()
    assert 0 < simulated.core.occupancy().exported_tokens <= before // 2
    assert go_on(simulated, chats[-3]) == "exported"
    simulated.core.resize(Budgets())
    simulated.check()
    assert simulated.core.occupancy().exported_bytes == 0
    for chat in chats:
        (answer,) = simulated.ask_all([chat.turn(b"hello")])
        assert answer.cached == 0 or answer.outcome.usage.seeded_tier == "resident"


@every_kind_with_cells
def test_shrinking_the_resident_budget_moves_checkpoints_out(memory: MemoryKind) -> None:
    simulated, chats = front(memory, n_sequences=16), talks(4)
    for chat in chats:
        converse(simulated, [chat], 1)
    simulated.core.resize(Budgets(resident_cells=150, exported_bytes=ROOM))
    simulated.check()
    cells = simulated.core.occupancy().cells_used
    assert cells is not None
    assert cells <= 150
    assert go_on(simulated, chats[0]) == "exported"


@every_sliced_kind
@pytest.mark.parametrize("direction", ["save_rows", "restore_rows"])
def test_a_budget_that_shrinks_while_slices_move_holds_and_nothing_goes_wrong(
    memory: MemoryKind, direction: str
) -> None:
    simulated = front(memory, 2, n_sequences=2, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    if direction == "restore_rows":
        exported(simulated, chat)
    else:
        converse(simulated, [chat], 1)
    speaker(simulated)
    log = Log(simulated, direction)
    following = chat.turn(b"and then?")
    coming = following if direction == "restore_rows" else request(words("new", 90), turn=80)
    answer = simulated.submit(coming)
    simulated.step_until(lambda: len(log.calls) == 3)
    simulated.core.resize(Budgets())
    simulated.run()
    simulated.compare(answer)
    assert simulated.core.occupancy().exported_bytes == 0
    simulated.ask_all([following])


# ---- one-off requests, forgetting and leases ----------------------------------------------------


@every_kind
def test_a_one_off_request_starts_warm_keeps_nothing_and_pushes_nobody_out(
    memory: MemoryKind,
) -> None:
    simulated, chats = front(memory, n_sequences=8, exported_bytes=0), talks(2)
    converse(simulated, chats, 2)
    before = simulated.core.occupancy().checkpoints
    title = request([*chats[0].history, *b"<user>title?"], one_off=True)
    (answer,) = simulated.ask_all([title])
    simulated.check_reused(answer, chats[0].input_end)
    simulated.ask_all([request(words(f"{n} tags", 300), one_off=True) for n in range(5)])
    assert simulated.core.occupancy().checkpoints == before
    for chat in chats:
        go_on(simulated, chat)


@every_kind
def test_a_forgotten_conversation_is_gone_from_both_tiers_and_others_stay(
    memory: MemoryKind,
) -> None:
    simulated, chats = front(memory, n_sequences=3), talks(5)
    for chat in chats:
        converse(simulated, [chat], 1)
    forgotten = [*chats[:2], chats[-1]]
    for chat in forgotten:
        assert chat.conversation is not None
        simulated.core.forget(chat.conversation)
        simulated.check()
    names = {c.conversation for c in simulated.core._keeper.pool.checkpoints}
    assert names.isdisjoint({chat.conversation for chat in forgotten})
    for chat in forgotten:
        (answer,) = simulated.ask_all([chat.turn(b"still there?")])
        assert answer.cached == 0
    assert go_on(simulated, chats[2])


@every_sliced_kind
def test_a_conversation_is_forgotten_also_while_its_state_moves_out(memory: MemoryKind) -> None:
    simulated = front(memory, 2, n_sequences=2, cell_bytes=WIDE)
    chat = Talk(words("chat", 640), "chat")
    converse(simulated, [chat], 1)
    speaker(simulated)
    log = Log(simulated, "save_rows")
    answers = [simulated.submit(request(words(f"{n} new", 90), turn=80)) for n in range(2)]
    simulated.step_until(lambda: len(log.calls) == 3)
    simulated.core.forget("chat")
    simulated.check()
    simulated.run()
    assert "chat" not in {c.conversation for c in simulated.core._keeper.pool.checkpoints}
    for answer in answers:
        simulated.compare(answer)


@every_kind
def test_a_conversation_whose_request_was_cancelled_first_is_forgotten_whole(
    memory: MemoryKind,
) -> None:
    simulated = front(memory, 2)
    chat = Talk(words("chat", 300), "chat", max_tokens=50)
    answer = simulated.submit(chat.turn(b"hello"))
    simulated.step_until(lambda: simulated.core.counters.sampled > 10)
    answer.cancel()
    simulated.core.forget("chat")
    simulated.run()
    assert answer.outcome.finish_reason == "cancelled"
    occupancy = simulated.core.occupancy()
    assert (occupancy.checkpoints, occupancy.sequences_used) == ({}, 0)


@every_kind
def test_a_conversation_that_goes_on_is_right_though_it_was_forgotten_meanwhile(
    memory: MemoryKind,
) -> None:
    simulated = front(memory, 2)
    chat = Talk(words("chat", 300), "chat", max_tokens=50)
    converse(simulated, [chat], 1)
    answer = simulated.submit(chat.turn(b"hello"))
    simulated.step_until(lambda: simulated.core.counters.sampled > 60)
    simulated.core.forget("chat")
    simulated.run()
    simulated.compare(answer)
    chat.hear(answer)
    simulated.ask_all([chat.turn(b"and on")])


@every_sliced_kind
def test_a_state_that_comes_in_stays_where_it_is_until_it_stands(memory: MemoryKind) -> None:
    """A crowd that wants host memory does not take what a lane is being filled from."""
    simulated = front(memory, 3, n_sequences=4, cell_bytes=WIDE, exported_tokens=800)
    chat = Talk(words("chat", 640), "chat")
    exported(simulated, chat)
    speaker(simulated)
    end = chat.input_end
    log = Log(simulated, "restore_rows")
    answer = simulated.submit(chat.turn(b"and then?"))
    simulated.step_until(lambda: len(log.calls) == 2)
    crowd = [simulated.submit(request(words(f"{n} crowd", 300), turn=280)) for n in range(4)]
    simulated.step_until(lambda: answer.is_over)
    simulated.check_reused(answer, end)
    simulated.run()
    for each in (answer, *crowd):
        simulated.compare(each)
