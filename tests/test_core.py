"""The loop on the simulated runtime: warm equals cold, and what is reused is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import KINDS, Simulation, cold, request

from orchestrator.engine.core import Options
from orchestrator.engine.request import Event, Finished, Outcome, Prefilling, Request, Text
from orchestrator.engine.ticket import Ticket
from orchestrator.errors import BackendError, DecodeFailed, OrchestratorError, PromptTooLong
from orchestrator.pool.placement import RESEND_GAP
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import MemoryKind
from orchestrator.runtime.simulated import FailingRuntime

HEAD = "You are a helpful assistant. " * 8
OPENER = "<assistant>[think]\n"  # what the generation prompt adds and history drops


class Chat:
    """A chat whose history renders differently from its generation prompt."""

    def __init__(self, head: str = HEAD, conversation: str | None = None) -> None:
        self.history = head
        self.conversation = conversation
        self.input_end = 0

    def turn(self, text: str, max_tokens: int = 12) -> Request:
        """Return the request of the next turn."""
        self.history += f"<user>{text}"
        self.input_end = len(self.history)
        return request(
            self.history + OPENER,
            turn=self.input_end,
            max_tokens=max_tokens,
            conversation=self.conversation,
        )

    def hear(self, outcome: Outcome) -> None:
        """Append the reply as history shows it."""
        self.history += f"<assistant>{outcome.text}"


@pytest.mark.parametrize("memory", KINDS)
def test_every_turn_starts_where_the_last_input_ended_and_answers_as_cold(
    memory: MemoryKind,
) -> None:
    simulation, chat, input_end = Simulation(memory), Chat(), 0
    for turn in range(30):
        asked = chat.turn(f"question {turn}")
        outcome = simulation.ask(asked)
        assert outcome.tokens == cold(asked, memory).tokens
        assert outcome.usage.cached_tokens >= input_end
        if memory != "attention":
            assert outcome.usage.cached_tokens == input_end
        input_end = chat.input_end
        chat.hear(outcome)


@pytest.mark.parametrize("memory", KINDS)
def test_the_same_prompt_again_starts_one_token_short_of_its_end(memory: MemoryKind) -> None:
    simulation, asked = Simulation(memory), request("x" * 600)
    first, again = simulation.ask(asked), simulation.ask(asked)
    assert (again.usage.cached_tokens, again.usage.prefilled_tokens) == (599, 1)
    assert again.tokens == first.tokens == cold(asked, memory).tokens


def test_a_resent_prompt_starts_at_its_turn_point_when_that_is_nearly_its_end() -> None:
    simulation = Simulation()
    asked = request("x" * 600, turn=600 - RESEND_GAP)
    simulation.ask(asked)
    again = simulation.ask(asked)
    assert again.usage.cached_tokens == 600 - RESEND_GAP
    assert again.usage.seeded_from == "turn"
    assert simulation.core.occupancy().checkpoints.get("resend") is None


def test_a_resent_prompt_starts_one_short_also_when_every_sequence_is_in_use() -> None:
    simulation = Simulation(n_sequences=3)
    for number in range(6):
        simulation.ask(request(f"{number} " + "y" * 100, turn=50))
    asked = request("x" * 600)
    simulation.ask(asked)
    assert simulation.core.occupancy().sequences_used == 3
    assert simulation.ask(asked).usage.cached_tokens == 599


@pytest.mark.parametrize("memory", KINDS)
def test_a_reply_extended_verbatim_evaluates_only_what_is_new(memory: MemoryKind) -> None:
    simulation = Simulation(memory)
    first = simulation.ask(request("Once upon a time"))
    fed = [*b"Once upon a time", *first.tokens]
    asked = request([*fed, *b" and then"])
    outcome = simulation.ask(asked)
    assert outcome.usage.cached_tokens == len(fed) - 1  # the last token was never evaluated
    assert outcome.usage.seeded_from == "reply"
    assert outcome.tokens == cold(asked, memory).tokens


def test_a_long_chat_holds_the_checkpoints_of_one_turn() -> None:
    simulation, chat = (
        Simulation(n_sequences=31, options=Options(budgets=Budgets(history=0))),
        Chat(),
    )
    for turn in range(30):
        chat.hear(simulation.ask(chat.turn(f"question {turn}")))
    assert simulation.core.occupancy().checkpoints == {"turn": 1, "resend": 1, "reply": 1}


def test_history_keeps_what_a_chat_has_gone_past_within_its_budget() -> None:
    simulation, chat = (
        Simulation(n_sequences=31, options=Options(budgets=Budgets(history=6))),
        Chat(),
    )
    asked = []
    for turn in range(10):
        asked.append(chat.turn(f"question {turn}"))
        chat.hear(simulation.ask(asked[-1]))
    kinds = simulation.core.occupancy().checkpoints
    assert sum(kinds.values()) == 6 + 3
    back = request([*asked[-2].tokens[: asked[-2].turn], *b" said otherwise"])
    outcome = simulation.ask(back)
    assert outcome.usage.cached_tokens == asked[-2].turn
    assert outcome.tokens == cold(back).tokens


@pytest.mark.parametrize("n_sequences", [1, 2, 3])
@pytest.mark.parametrize("memory", KINDS)
def test_thirty_turns_stay_warm_and_right_with_hardly_any_sequences(
    memory: MemoryKind, n_sequences: int
) -> None:
    simulation, chat = Simulation(memory, n_sequences=n_sequences), Chat()
    for turn in range(30):
        asked = chat.turn(f"question {turn}")
        outcome = simulation.ask(asked)
        assert outcome.tokens == cold(asked, memory).tokens
        if turn and n_sequences > 1:
            assert outcome.usage.cached_tokens > 0
        chat.hear(outcome)


@pytest.mark.parametrize("memory", KINDS)
def test_a_full_context_ends_the_reply_with_length(memory: MemoryKind) -> None:
    simulation = Simulation(memory, n_context=64)
    outcome = simulation.ask(request("x" * 50, max_tokens=1000))
    assert outcome.finish_reason == "length"
    assert len(outcome.tokens) == 64 - 50 + 1
    exact = simulation.ask(request("y" * 64, max_tokens=1000))
    assert (exact.finish_reason, len(exact.tokens)) == ("length", 1)
    assert simulation.ask(request("x" * 50)).tokens == cold(request("x" * 50), memory).tokens


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    simulation = Simulation(n_context=64)
    with pytest.raises(PromptTooLong, match=r"65 tokens, the context holds 64") as refused:
        simulation.ask(request("x" * 65))
    assert (refused.value.n_prompt, refused.value.n_context) == (65, 64)
    assert simulation.core.is_idle


def test_what_is_reported_is_what_the_decode_call_evaluated() -> None:
    simulation, chat, prefilled = Simulation(), Chat(), 0
    for turn in range(5):
        before = simulation.runtime.decoded_tokens
        outcome = simulation.ask(chat.turn(f"question {turn}"))
        evaluated = simulation.runtime.decoded_tokens - before
        usage = outcome.usage
        assert evaluated == usage.prefilled_tokens + usage.completion_tokens - 1
        assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
        prefilled += usage.prefilled_tokens
        chat.hear(outcome)
    assert simulation.core.counters.prefilled == prefilled


def test_max_tokens_zero_reads_the_prompt_and_says_nothing() -> None:
    simulation, asked = Simulation(), request("x" * 40, max_tokens=0)
    outcome = simulation.ask(asked)
    assert (outcome.tokens, outcome.text, outcome.finish_reason) == ((), "", "length")
    assert simulation.ask(asked).usage.prefilled_tokens == 1


def test_without_cache_nothing_is_kept_and_nothing_reused() -> None:
    simulation, asked = Simulation(), request("x" * 40, use_cache=False)
    for _ in range(2):
        assert simulation.ask(asked).usage.cached_tokens == 0
    assert simulation.core.occupancy().sequences_used == 0


def test_without_cache_nothing_is_reused_of_what_others_kept() -> None:
    simulation = Simulation()
    simulation.ask(request("x" * 40))
    fresh = simulation.ask(request("x" * 40, use_cache=False))
    assert (fresh.usage.cached_tokens, fresh.usage.seeded_from) == (0, None)


def test_events_tell_progress_text_and_the_end_in_order() -> None:
    simulation = Simulation(n_batch=16)
    events: list[Event | OrchestratorError] = []
    simulation.core.submit(request("x" * 40), events.append)
    simulation.run()
    progress = [event for event in events if isinstance(event, Prefilling)]
    assert [event.done for event in progress] == [16, 32, 39, 40]
    assert isinstance(events[-1], Finished)
    said = "".join(event.text for event in events if isinstance(event, Text))
    assert said == events[-1].outcome.text != ""


def test_a_stop_string_ends_the_reply_and_is_not_shown() -> None:
    whole = cold(request("tell me", max_tokens=40)).text
    stop = whole[10:13]
    asked = replace(request("tell me", max_tokens=40), stop=(stop,))
    outcome = Simulation().ask(asked)
    assert outcome.text == whole[: whole.index(stop)]
    assert outcome.finish_reason == "stop"


# ---- cancelling and failing ---------------------------------------------------------------------


def start(simulation: Simulation, asked: Request) -> tuple[Ticket, list[Event | OrchestratorError]]:
    """Submit a request; return its ticket and the list its events will be in."""
    events: list[Event | OrchestratorError] = []
    return simulation.core.submit(asked, events.append), events


@pytest.mark.parametrize("memory", KINDS)
def test_a_cancelled_prefill_keeps_what_was_read(memory: MemoryKind) -> None:
    simulation = Simulation(memory, n_batch=16)
    asked = request("x" * 100)
    ticket, events = start(simulation, asked)
    for _ in range(3):
        simulation.core.step()
    ticket.cancel()
    simulation.run()
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.outcome.finish_reason == "cancelled"
    again = simulation.ask(asked)
    assert again.usage.cached_tokens == 48
    assert again.usage.seeded_from == "partial"
    assert again.tokens == cold(asked, memory).tokens


def test_a_cancelled_reply_keeps_what_it_said() -> None:
    simulation, asked = Simulation(), request("x" * 10, max_tokens=100)
    ticket, events = start(simulation, asked)
    for _ in range(8):
        simulation.core.step()
    ticket.cancel()
    simulation.run()
    last = events[-1]
    assert isinstance(last, Finished)
    said = last.outcome.tokens
    assert 0 < len(said) < 100
    assert said == cold(asked).tokens[: len(said)]
    longer = request([*b"x" * 10, *said, *b"?"])
    assert simulation.ask(longer).usage.cached_tokens == 10 + len(said) - 1


def test_a_queued_request_is_cancelled_without_ever_running() -> None:
    simulation = Simulation()
    start(simulation, request("first", max_tokens=50))
    ticket, events = start(simulation, request("second"))
    ticket.cancel()
    simulation.core.step()
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.outcome.finish_reason == "cancelled"
    assert last.outcome.usage.prefilled_tokens == 0
    simulation.run()


def test_a_failed_decode_drops_every_state_and_the_next_request_is_right() -> None:
    simulation, chat = Simulation(), Chat()
    chat.hear(simulation.ask(chat.turn("one")))
    asked = chat.turn("two")
    simulation.runtime.fails_next = DecodeFailed("llama_decode failed with -3")
    with pytest.raises(DecodeFailed):
        simulation.ask(asked)
    assert simulation.core.occupancy().sequences_used == 0
    outcome = simulation.ask(asked)
    assert outcome.usage.cached_tokens == 0
    assert outcome.tokens == cold(asked).tokens


def test_a_lane_that_fails_takes_only_its_own_checkpoints_with_it() -> None:
    simulation, chat = Simulation(), Chat()
    chat.hear(simulation.ask(chat.turn("one")))
    kept = simulation.core.occupancy().checkpoints
    failing = request("z" * 30, turn=20)
    _, events = start(simulation, failing)
    simulation.core.step()  # to the turn point: one state of the failing request is kept
    lane = simulation.core._seats.lanes[0]
    simulation.core._fail(lane, BackendError("logits are not finite"), suspect=True)
    simulation.check()
    assert isinstance(events[-1], BackendError)
    assert simulation.core.occupancy().checkpoints == kept
    assert len(simulation.runtime.scrubbed) == 2  # the lane's sequence and the one it had kept
    assert simulation.ask(chat.turn("two")).usage.cached_tokens > 0


def test_a_request_that_cannot_be_seated_is_answered_and_not_lost() -> None:
    simulation = Simulation()
    simulation.ask(request("x" * 40))

    simulation.runtime.fails_next_copy = DecodeFailed("the copy does not hold what it should")
    _, events = start(simulation, request("x" * 50))
    simulation.core.step()
    assert isinstance(events[-1], DecodeFailed)
    assert simulation.core.is_idle


def test_a_runtime_that_does_not_hold_what_it_was_given_is_not_believed() -> None:
    class Forgetful(FailingRuntime):
        forgets = False

        def length(self, sequence: int) -> int:
            held = super().length(sequence)
            return held - 1 if self.forgets and held else held

    simulation = Simulation()
    simulation.ask(request("x" * 40))
    simulation.runtime.__class__ = Forgetful
    simulation.runtime.forgets = True  # type: ignore[attr-defined]
    _, events = start(simulation, request("x" * 50))
    for _ in range(2):  # the copy of its checkpoint is refused first
        simulation.core.step()
    assert isinstance(events[-1], DecodeFailed)
    simulation.runtime.forgets = False  # type: ignore[attr-defined]
    assert simulation.ask(request("x" * 50)).usage.cached_tokens == 0


def test_lanes_that_outgrow_the_pool_make_way_and_all_end_as_cold() -> None:
    simulation = Simulation(n_context=100, n_cells=100, options=Options(n_lanes=2))
    asked = [request(f"{name} " + "q" * 20, max_tokens=70) for name in "ab"]
    heard = [start(simulation, each)[1] for each in asked]
    simulation.run()
    for each, events in zip(asked, heard, strict=True):
        assert isinstance(events[-1], Finished)
        assert events[-1].outcome.tokens == cold(each).tokens
    assert simulation.core.counters.preempted == 0  # the second waits for room instead


# ---- several at once ----------------------------------------------------------------------------


def test_requests_beyond_the_lanes_wait_their_turn_and_all_are_answered() -> None:
    simulation = Simulation(n_sequences=8, options=Options(n_lanes=2))
    asked = [request(f"{number} " + "q" * 30) for number in range(5)]
    heard = [start(simulation, each)[1] for each in asked]
    simulation.run()
    for each, events in zip(asked, heard, strict=True):
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.outcome.tokens == cold(each).tokens


walks = st.lists(
    st.tuples(
        st.sampled_from(["ask", "edit", "again", "cancel", "step", "fail", "other"]),
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), walks)
def test_whatever_happens_every_answer_is_the_cold_one(
    memory: MemoryKind,
    n_sequences: int,
    n_lanes: int,
    history: int,
    walk: list[tuple[str, int]],
) -> None:
    options = Options(n_lanes=min(n_lanes, n_sequences), budgets=Budgets(history=history))
    simulation = Simulation(
        memory, n_sequences=n_sequences, n_context=80, n_cells=160, n_batch=8, options=options
    )
    heard: list[tuple[Request, Ticket, list[Event | OrchestratorError]]] = []
    for name, number in walk:
        if name in ("ask", "edit", "again", "other"):
            asked = _next(name, number, heard)
            heard.append((asked, *start(simulation, asked)))
        elif name == "cancel" and heard:
            heard[number % len(heard)][1].cancel()
        elif name == "fail":
            simulation.runtime.fails_next = DecodeFailed("told to fail")
        for _ in range(number if name == "step" else 1):
            simulation.core.step()
            simulation.check()
    simulation.runtime.fails_next = None
    simulation.run()
    for asked, _, events in heard:
        _check_answer(asked, events, memory)


def _next(
    name: str,
    number: int,
    heard: list[tuple[Request, Ticket, list[Event | OrchestratorError]]],
) -> Request:
    """Return a request that grows, edits or repeats an earlier one, or is new."""
    if not heard or name == "other":
        return request(f"new {number} " + "n" * number, turn=4, max_tokens=5)
    earlier, _, events = heard[number % len(heard)]
    if name == "again":
        return earlier
    tokens = list(earlier.tokens)
    last = events[-1] if events else None
    if name == "ask" and isinstance(last, Finished):
        tokens = [*tokens[: earlier.turn], *b"A", *last.outcome.tokens, *b" next"]
    else:
        tokens = [*tokens[: max(1, len(tokens) - number)], *b"edited"]
    tokens = tokens[:70]
    return request(tokens, turn=max(0, len(tokens) - 2), max_tokens=5)


def _check_answer(
    asked: Request, events: list[Event | OrchestratorError], memory: MemoryKind
) -> None:
    last = events[-1]
    if isinstance(last, OrchestratorError):
        return
    assert isinstance(last, Finished)
    wanted = cold(asked, memory).tokens
    said = last.outcome.tokens
    assert said == (wanted[: len(said)] if last.outcome.finish_reason == "cancelled" else wanted)
