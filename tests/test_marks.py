"""Places that a caller marks, and starts of messages, on their way from text to the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.engine.aio import AsyncEngine
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import GREEDY, MARKS_MOST, Outcome, Request
from orchestrator.errors import InvalidArgument
from orchestrator.runtime.protocol import Limits
from orchestrator.runtime.simulated import SimulatedRuntime
from orchestrator.text.template import ChatTemplate

Message = dict[str, object]

SYSTEM: Message = {"role": "system", "content": "Be brief, kind and to the point."}
LONG = "a question of quite some length, " * 4


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.over(lambda: SimulatedRuntime(Limits(8, 4096, 4096, 64, 1000, 10))) as engine:
        yield engine


def asked_by(engine: Engine) -> list[Request]:
    """Return a list that every request of `engine` is noted in from now on."""
    asked: list[Request] = []
    generate = engine.generate

    def noting(request: Request, **more: Any) -> Any:
        asked.append(request)
        return generate(request, **more)

    engine.generate = noting  # type: ignore[method-assign]
    return asked


def chat(engine: Engine, *messages: Message, **options: Any) -> Outcome:
    return engine.chat(messages, sampling=GREEDY, max_tokens=2, **options).outcome()


# ---- what a request may say ---------------------------------------------------------------------


def test_places_are_put_in_order_and_each_counts_once() -> None:
    asked = Request((1, 2, 3, 4), marks=(3, 1, 3), starts=[2, 1])  # type: ignore[arg-type]
    assert (asked.marks, asked.starts) == ((1, 3), (1, 2))


@pytest.mark.parametrize("name", ["marks", "starts"])
@pytest.mark.parametrize(
    "places", ["12", b"12", 5, {1}, (0,), (4,), (-1,), (True,), (1.0,), ("1",)]
)
def test_a_place_that_is_none_inside_the_prompt_is_refused(name: str, places: object) -> None:
    fields: dict[str, Any] = {name: places}
    with pytest.raises(InvalidArgument):
        Request((1, 2, 3, 4), **fields)


def test_more_marks_than_can_be_worth_a_pass_are_refused() -> None:
    tokens = tuple(range(2 * MARKS_MOST))
    assert len(Request(tokens, marks=tuple(range(1, MARKS_MOST + 1))).marks) == MARKS_MOST
    with pytest.raises(InvalidArgument, match=f"{MARKS_MOST + 1} marks.*give fewer"):
        Request(tokens, marks=tuple(range(1, MARKS_MOST + 2)))


# ---- chats --------------------------------------------------------------------------------------


def test_a_mark_is_where_so_many_messages_end(engine: Engine) -> None:
    asked = asked_by(engine)
    messages = [SYSTEM, user("one"), said("two"), user("three")]
    prompt = engine.encode(messages)
    chat(engine, *messages, marks=(1, 3, 4))
    assert asked[0].marks == (prompt.ends[0], prompt.ends[2], prompt.ends[3])
    assert prompt.ends[3] == prompt.turn


def test_a_request_carries_where_messages_of_the_user_start(engine: Engine) -> None:
    asked = asked_by(engine)
    messages = [SYSTEM, user("one"), said("two"), user("three")]
    prompt = engine.encode(messages)
    chat(engine, *messages)
    assert asked[0].starts == prompt.starts == (prompt.ends[0], prompt.ends[2])
    assert asked[0].marks == ()


def test_whoever_goes_on_from_a_mark_reads_nothing_before_it(engine: Engine) -> None:
    messages = [user(LONG), said(LONG), user(LONG), said(LONG), user("now?")]
    chat(engine, *messages, marks=(2,))
    mark = engine.encode(messages).ends[1]
    other = chat(engine, *messages[:2], user("or " + LONG))
    assert other.usage.cached_tokens == mark
    assert other.usage.seeded_from == "mark"


@pytest.mark.parametrize("marks", [(0,), (3,), (-1,), "12", 5, (True,), (None,), (1,) * 65])
def test_a_mark_that_no_message_ends_is_refused(engine: Engine, marks: Any) -> None:
    with pytest.raises(InvalidArgument):
        chat(engine, SYSTEM, user("one"), marks=marks)
    assert engine.stats().counters.requests == 0


def test_marks_are_found_by_rendering_where_the_template_shows_no_seams() -> None:
    source = "{% for m in messages %}{{ loop.index }}{{ m.content }}{{ loop.index }}{% endfor %}"
    template = ChatTemplate(source, bos_text="", eos_text="")
    limits = Limits(8, 512, 512, 64, 1000, 10)
    with Engine.over(lambda: SimulatedRuntime(limits), template=template) as engine:
        asked = asked_by(engine)
        chat(engine, user("one"), said("two"), user("three"), marks=(1, 2))
    assert asked[0].marks == (len("1one1"), len("1one12two2"))


# ---- raw text -----------------------------------------------------------------------------------


def test_a_mark_in_raw_text_counts_characters(engine: Engine) -> None:
    asked = asked_by(engine)
    engine.complete("ähm, so", marks=(1, 4), max_tokens=1).outcome()
    assert asked[0].marks == (2, 5)  # a byte is a token here
    with pytest.raises(InvalidArgument, match="1 to 7"):
        engine.complete("ähm, so", marks=(8,))
    engine.complete("ab", marks=(2,), max_tokens=1).outcome()
    assert asked[1].marks == ()  # nothing would be left to read


def test_a_mark_inside_a_special_token_is_before_it(engine: Engine) -> None:
    asked = asked_by(engine)
    engine.complete("ab<|im_end|>c", marks=(4,), max_tokens=1).outcome()
    assert asked[0].marks == (2,)


# ---- sessions -----------------------------------------------------------------------------------


def test_a_mark_in_a_session_counts_events(engine: Engine) -> None:
    asked = asked_by(engine)
    session = engine.create_session(system="Be brief.")
    session.append_message(user("one"))
    session.generate(max_tokens=3, marks=(1,)).outcome()
    session.append_message(user("two"))
    session.generate(max_tokens=3, marks=(1, 3)).outcome()
    ends = [event.end for event in session.inspect().events]
    assert [request.marks for request in asked] == [(ends[0],), (ends[0], ends[2])]
    with pytest.raises(InvalidArgument, match="1 to 5"):
        session.generate(marks=(6,))


def test_a_mark_in_a_session_of_tokens_counts_events_too(engine: Engine) -> None:
    asked = asked_by(engine)
    session = engine.create_session()
    session.append("abc")
    session.append("de")
    session.generate(max_tokens=4, marks=(1, 2)).outcome()
    session.append("fg")
    session.generate(max_tokens=1, marks=(3,)).outcome()
    assert [request.marks for request in asked] == [(3,), (9,)]
    assert [request.starts for request in asked] == [(3,), (3, 9)]


def test_a_branch_that_begins_at_a_mark_reads_nothing_before_it(engine: Engine) -> None:
    session = engine.create_session()
    for _ in range(3):
        session.append(LONG)
    session.generate(max_tokens=2, marks=(2,)).outcome()
    branch = session.fork(events=2)
    branch.append("or else " + LONG)
    assert branch.generate(max_tokens=2).outcome().usage.cached_tokens == 2 * len(LONG)


# ---- asyncio ------------------------------------------------------------------------------------


def test_marks_go_through_an_event_loop_as_well(engine: Engine) -> None:
    asked = asked_by(engine)

    async def ask() -> None:
        front = AsyncEngine(engine)
        await (await front.chat([SYSTEM, user("one")], marks=(1,), max_tokens=1)).outcome()
        await (await front.complete("abcd", marks=(2,), max_tokens=1)).outcome()
        session = await front.create_session()
        await session.append("abc")
        await session.append("de")
        await (await session.generate(marks=(1,), max_tokens=1)).outcome()

    asyncio.run(ask())
    assert [request.marks for request in asked] == [
        (engine.encode([SYSTEM, user("one")]).ends[0],),
        (2,),
        (3,),
    ]
