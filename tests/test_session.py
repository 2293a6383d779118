"""Sessions: sequences that grow by tokens or by messages, their spans, branches and ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real import open_engine
from simulation import KINDS

from orchestrator.engine.core import Options
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import GREEDY, Outcome, Request, Sampling
from orchestrator.engine.script import SessionEvent
from orchestrator.engine.session import Session
from orchestrator.errors import (
    BackendError,
    EngineClosed,
    InvalidArgument,
    PromptTooLong,
    SessionBusy,
    SessionClosed,
    TemplateError,
)
from orchestrator.runtime.protocol import Chunk, Limits, MemoryKind
from orchestrator.runtime.simulated import FailingRuntime, SimulatedRuntime
from orchestrator.text.bytes import ByteTokenizer
from orchestrator.text.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
WAIT = 20.0  # seconds that nothing here ever takes
LIMITS = Limits(8, 4096, 4096, 64, 1000, 10)
SYSTEM = "Be brief."


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def template(name: str) -> ChatTemplate:
    return ChatTemplate.from_file(TEMPLATES / f"{name}.jinja", bos_text="<s>", eos_text="</s>")


def engine_over(
    runtime: Callable[[], SimulatedRuntime] = lambda: SimulatedRuntime(LIMITS),
    *,
    checkpoints: bool = True,
    named: str = "chatml",
    n_lanes: int = 1,
) -> Engine:
    """Return an engine over a runtime whose replies never end by themselves."""
    options = Options(n_lanes=n_lanes, checkpoints=checkpoints)
    return Engine.over(runtime, template=template(named), options=options, sampling=GREEDY)


def cold(
    tokens: Sequence[int],
    max_tokens: int,
    runtime: Callable[[], SimulatedRuntime] = lambda: SimulatedRuntime(LIMITS),
) -> tuple[int, ...]:
    """Return what an engine answers that keeps nothing."""
    with engine_over(runtime, checkpoints=False) as engine:
        request = Request(tuple(tokens), sampling=GREEDY, max_tokens=max_tokens)
        return engine.generate(request).outcome().tokens


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_over() as engine:
        yield engine


class Gated(SimulatedRuntime):
    """A runtime that waits for a permit before each decode call after the first `free` ones."""

    def __init__(self, free: int) -> None:
        super().__init__(LIMITS)
        self._permits = threading.Semaphore(free)

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Wait for a permit, then decode."""
        assert self._permits.acquire(timeout=WAIT)
        return super().decode(chunks)

    def go_on(self, calls: int = 1_000_000) -> None:
        """Let so many decode calls run, everything by default."""
        self._permits.release(calls)


def text_of(engine: Engine, tokens: Sequence[int]) -> str:
    """Return what tokens spell, special ones included."""
    tokenizer = ByteTokenizer.for_chat()
    return "".join(tokenizer.token_text(token) for token in tokens)


def kinds(session: Session) -> list[tuple[str, str | None, int, int]]:
    """Return the events as (kind, role, start, end)."""
    return [(e.kind, e.role, e.start, e.end) for e in session.inspect().events]


def check_tiling(session: Session) -> tuple[SessionEvent, ...]:
    """Assert that the events follow each other from 0 to the length, and return them."""
    view = session.inspect()
    edges = [0, *(event.end for event in view.events)]
    assert [event.start for event in view.events] == edges[:-1]
    assert edges[-1] == view.length
    assert edges == sorted(edges)
    return view.events


def asked_by(engine: Engine) -> list[Request]:
    """Return a list that every request of `engine` is noted in from now on."""
    asked: list[Request] = []
    generate = engine.generate

    def noting(request: Request, **more: Any) -> Any:
        asked.append(request)
        return generate(request, **more)

    engine.generate = noting  # type: ignore[method-assign]
    return asked


# --- driven by tokens ---


def test_only_what_was_appended_is_evaluated_and_the_replies_are_those_of_a_cold_engine(
    engine: Engine,
) -> None:
    session = engine.create_session()
    held: tuple[int, ...] = ()
    for turn in range(5):
        added = tuple(range(40 + turn, 70 + turn))
        session.append(added)
        held += added
        outcome = session.generate(max_tokens=9).outcome()
        assert outcome.tokens == cold(held, 9)
        usage = outcome.usage
        assert usage.prompt_tokens == len(held)
        if turn:  # the token sampled last was never fed
            assert (usage.prefilled_tokens, usage.seeded_from) == (len(added) + 1, "reply")
        held += outcome.tokens
    assert session.inspect().length == len(held) == 5 * (30 + 9)


def test_a_reply_that_the_model_ended_is_evaluated_whole() -> None:
    def ending() -> SimulatedRuntime:
        return SimulatedRuntime(LIMITS, end_every=12)

    with engine_over(ending) as engine:
        session = engine.create_session()
        held: tuple[int, ...] = ()
        for turn in range(6):
            session.append([50, 51, 52])
            held += (50, 51, 52)
            outcome = session.generate().outcome()
            assert outcome.finish_reason == "stop"
            assert outcome.tokens == cold(held, 4000, ending)
            if turn:
                assert outcome.usage.prefilled_tokens == 3
            held += outcome.tokens


def test_text_is_encoded_on_its_own_and_gets_one_bos() -> None:
    tokenizer = ByteTokenizer(["<s>", "<|x|>"], bos="<s>", eos="<s>", adds_bos=True)
    with engine_over(lambda: SimulatedRuntime(LIMITS, tokenizer=tokenizer)) as engine:
        session = engine.create_session()
        session.append("ab<|x|>")
        session.append("c<|x|>", special=False)
        session.append("<s>")
        session.append([100])
        asked = asked_by(engine)
        session.generate(max_tokens=1).outcome()
        assert asked[0].tokens == (256, *b"ab", 257, *b"c<|x|>", 256, 100)
        with pytest.raises(InvalidArgument, match="empty"):
            session.append("")


def test_events_tell_what_was_added_and_where(engine: Engine) -> None:
    session = engine.create_session(name="draft")
    session.append([65, 66, 67])
    session.append("hello")
    first = session.generate(max_tokens=4).outcome()
    session.append([68])
    second = session.generate(max_tokens=2, stop=()).outcome()
    events = check_tiling(session)
    assert events == (
        SessionEvent("tokens", 0, 3),
        SessionEvent("tokens", 3, 8),
        SessionEvent("reply", 8, 12, None, "length", 0),
        SessionEvent("tokens", 12, 13),
        SessionEvent("reply", 13, 15, None, "length", second.usage.cached_tokens),
    )
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 11
    view = session.inspect()
    assert (view.name, view.length, view.is_generating) == ("draft", 15, False)


def test_it_tells_how_much_of_it_is_warm(engine: Engine) -> None:
    session = engine.create_session()
    assert session.inspect().warm == 0
    session.append(range(40, 80))
    assert session.inspect().warm == 0
    session.generate(max_tokens=5).outcome()
    assert session.inspect().warm == 44
    session.append([40])
    assert session.inspect().warm == 44
    outcome = session.generate(max_tokens=1).outcome()
    assert outcome.usage.cached_tokens == 44
    assert outcome.tokens == cold([*range(40, 80), *cold(range(40, 80), 5), 40], 1)


def test_reading_ahead_leaves_no_event(engine: Engine) -> None:
    session = engine.create_session()
    session.append(range(40, 90))
    assert session.generate(max_tokens=0).outcome().tokens == ()
    assert [event.kind for event in session.inspect().events] == ["tokens"]
    outcome = session.generate(max_tokens=3).outcome()
    assert outcome.usage.cached_tokens == 49
    assert outcome.tokens == cold(range(40, 90), 3)


def test_generating_again_goes_on_where_the_reply_ended(engine: Engine) -> None:
    session = engine.create_session()
    session.append([70, 71])
    tokens = [token for _ in range(4) for token in session.generate(max_tokens=3).outcome().tokens]
    assert tuple(tokens) == cold([70, 71], 12)
    assert check_tiling(session)[-1].cached_tokens == 2 + 9 - 1


@pytest.mark.parametrize("memory", ["hybrid", "recurrent", "attention", "windowed"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 9)),
            st.tuples(st.just("generate"), st.integers(0, 5)),
            st.tuples(st.just("fork"), st.integers(0, 99)),
        ),
        max_size=12,
    )
)
def test_whatever_is_appended_generated_and_forked_the_tokens_are_those_fed_cold(
    memory: MemoryKind, steps: list[tuple[str, int]]
) -> None:
    def runtime() -> SimulatedRuntime:
        return SimulatedRuntime(LIMITS, memory=memory, end_every=7)

    with engine_over(runtime) as warm, engine_over(runtime, checkpoints=False) as other:
        sessions: list[tuple[Session, tuple[int, ...]]] = [(warm.create_session(), ())]
        fed = 0  # what the latest reply left behind in the pool, if it was this session's
        for step, number in steps:
            session, held = sessions[-1]
            if step == "append":
                session.append([32 + number] * number)
                sessions[-1] = (session, held + (32 + number,) * number)
            elif step == "fork":
                session, held = sessions[number % len(sessions)]
                sessions.append((session.fork(), held))
                fed = 0
            elif held:
                request = Request(held, sampling=GREEDY, max_tokens=number)
                wanted = other.generate(request).outcome()
                outcome = session.generate(max_tokens=number).outcome()
                assert outcome.tokens == wanted.tokens
                if fed < len(held):  # a token at least must be left to evaluate
                    assert outcome.usage.cached_tokens >= fed
                sessions[-1] = (session, held + wanted.tokens)
                fed = len(sessions[-1][1]) - 1 if wanted.tokens else 0
                fed += wanted.finish_reason == "stop" and bool(wanted.tokens)
            check_tiling(sessions[-1][0])
            assert sessions[-1][0].inspect().length == len(sessions[-1][1])


# --- what is kept when a reply does not end by itself ---


def test_a_cancelled_reply_is_kept_as_far_as_it_was_generated() -> None:
    runtime = Gated(free=4)
    with engine_over(lambda: runtime) as engine:
        session = engine.create_session()
        session.append(range(40, 60))
        stream = session.generate()
        for _ in range(4):
            next(stream)
        stream.cancel()
        runtime.go_on()
        outcome = stream.outcome()
        assert outcome.finish_reason == "cancelled"
        assert session.inspect().events[-1] == SessionEvent(
            "reply", 20, 20 + len(outcome.tokens), None, "cancelled", 0
        )
        session.append([41])
        after = session.generate(max_tokens=5).outcome()
        assert after.usage.prefilled_tokens == 2
        assert after.tokens == cold([*range(40, 60), *outcome.tokens, 41], 5)


def test_a_reply_cancelled_before_its_first_token_leaves_nothing() -> None:
    runtime = Gated(free=0)
    with engine_over(lambda: runtime) as engine:
        session = engine.create_session()
        session.append(range(40, 60))
        stream = session.generate()
        stream.cancel()
        runtime.go_on()
        assert stream.outcome().tokens == ()
        assert kinds(session) == [("tokens", None, 0, 20)]
        assert session.generate(max_tokens=5).outcome().tokens == cold(range(40, 60), 5)


def test_a_dropped_stream_ends_its_reply_and_the_session_goes_on() -> None:
    runtime = Gated(free=2)
    with engine_over(lambda: runtime) as engine:
        session = engine.create_session()
        session.append([65])
        stream = session.generate()
        next(stream)
        with pytest.raises(SessionBusy):
            session.append([66])
        del stream
        gc.collect()
        runtime.go_on()
        engine.complete("y", max_tokens=1).outcome()  # comes after it
        session.append([66])
        assert session.inspect().events[-2].finish_reason == "cancelled"


def test_after_an_error_the_session_is_as_before() -> None:
    runtime = FailingRuntime(LIMITS)
    with engine_over(lambda: runtime) as engine:
        session = engine.create_session()
        session.append(range(40, 60))
        first = session.generate(max_tokens=3).outcome()
        before = session.inspect().events
        runtime.fails_next = BackendError("the backend broke")
        with pytest.raises(BackendError):
            session.generate(max_tokens=3).outcome()
        assert session.inspect().events == before
        again = session.generate(max_tokens=3).outcome()
        assert again.tokens == cold([*range(40, 60), *first.tokens], 3)


def test_a_reply_that_nobody_reads_is_part_of_the_session_all_the_same(engine: Engine) -> None:
    session = engine.create_session()
    session.append([65])
    stream = session.generate(max_tokens=5)
    engine.complete("y", max_tokens=1).outcome()  # comes after it
    assert session.inspect().length == 6
    assert len(stream.outcome().tokens) == 5


# --- one at a time, from any thread ---


def test_a_session_takes_nothing_while_it_generates() -> None:
    runtime = Gated(free=1)
    with engine_over(lambda: runtime) as engine:
        session = engine.create_session()
        session.append([65, 66])
        stream = session.generate(max_tokens=50)
        calls: list[Callable[[], object]] = [
            session.generate,
            lambda: session.append([67]),
            lambda: session.append("x"),
        ]
        for call in calls:
            with pytest.raises(SessionBusy, match=r"outcome"):
                call()
        branch = session.fork()
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(session.inspect)
            while not seen.done():
                runtime.go_on(1)
                time.sleep(0.01)
        assert (seen.result().is_generating, seen.result().length) == (True, 2)
        runtime.go_on()
        assert len(stream.outcome().tokens) == 50
        session.append([67])
        assert session.inspect().length == 53
        assert branch.inspect().length == 2


def test_of_many_threads_that_generate_at_once_one_does() -> None:
    runtime = Gated(free=0)
    with engine_over(lambda: runtime) as engine:
        session = engine.create_session()
        session.append([65])
        gate = threading.Barrier(8)

        def ask() -> object:
            gate.wait(WAIT)
            try:
                return session.generate(max_tokens=4)
            except SessionBusy as busy:
                return busy

        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda _: ask(), range(8)))
        (stream,) = [each for each in got if not isinstance(each, SessionBusy)]
        runtime.go_on()
        assert len(stream.outcome().tokens) == 4  # type: ignore[attr-defined]
        assert session.inspect().length == 5


def test_sessions_side_by_side_get_what_each_would_get_alone() -> None:
    def converse(session: Session) -> list[tuple[int, ...]]:
        seed = ord(session.name)
        outcomes: list[Outcome] = []
        for turn in range(4):
            session.append([seed, 40 + turn] * 10)
            outcomes.append(session.generate(max_tokens=6).outcome())
        assert all(each.usage.cached_tokens > 0 for each in outcomes[1:])
        return [each.tokens for each in outcomes]

    with engine_over(lambda: SimulatedRuntime(Limits(16, 4096, 4096, 64, 1000, 10))) as engine:
        sessions = [engine.create_session(name=name) for name in "abcd"]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(converse, sessions))
    with engine_over() as engine:
        alone = [converse(engine.create_session(name=name)) for name in "abcd"]
    assert together == alone


# --- driven by messages ---


@pytest.mark.parametrize("named", ["chatml", "thinking", "empty_think"])
def test_messages_are_warm_from_turn_to_turn_and_as_cold(named: str) -> None:
    with engine_over(named=named) as warm, engine_over(named=named, checkpoints=False) as other:
        session = warm.create_session(system=SYSTEM)
        messages: list[dict[str, object]] = [{"role": "system", "content": SYSTEM}]
        turn = 0
        for question in ("first", "second", "third"):
            session.append_message(user(question))
            messages.append(user(question))
            outcome = session.generate(max_tokens=7).outcome()
            assert outcome.tokens == other.chat(messages, max_tokens=7).outcome().tokens
            assert outcome.usage.cached_tokens >= turn
            turn = warm.encode(messages).turn
            reply = {"role": "assistant", "content": outcome.text}
            if named == "thinking":  # the reply never left the reasoning that was opened for it
                reply = {
                    "role": "assistant",
                    "reasoning_content": outcome.text.strip(),
                    "content": "",
                }
            messages.append(dict(reply))
        assert turn > 0


def test_the_span_of_a_message_is_what_it_added(engine: Engine) -> None:
    session = engine.create_session(system=SYSTEM)
    session.append_message(user("one"))
    outcome = session.generate(max_tokens=4).outcome()
    session.append_message(user("two"))
    events = check_tiling(session)
    prompt = engine.encode(
        [
            {"role": "system", "content": SYSTEM},
            user("one"),
            {"role": "assistant", "content": outcome.text},
            user("two"),
        ]
    )
    spelt = [text_of(engine, prompt.tokens[event.start : event.end]) for event in events]
    assert spelt == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\none<|im_end|>\n",
        f"<|im_start|>assistant\n{outcome.text}<|im_end|>\n",
        "<|im_start|>user\ntwo<|im_end|>\n",
    ]
    assert [(event.kind, event.role) for event in events] == [
        ("message", "system"),
        ("message", "user"),
        ("reply", "assistant"),
        ("message", "user"),
    ]


def test_a_reply_just_generated_spans_its_opener_and_its_tokens(engine: Engine) -> None:
    session = engine.create_session()
    session.append_message(user("one"))
    outcome = session.generate(max_tokens=4).outcome()
    prompt = engine.encode([user("one")])
    assert check_tiling(session)[-1] == SessionEvent(
        "reply", prompt.turn, len(prompt.tokens) + 4, "assistant", "length", 0
    )
    assert outcome.usage.prompt_tokens == len(prompt.tokens)


def test_spans_stay_true_when_the_template_renders_history_anew() -> None:
    with engine_over(named="thinking") as engine:
        session = engine.create_session()
        session.append_message(user("one"))
        session.generate(max_tokens=30).outcome()
        before = check_tiling(session)
        session.append_message(user("two"))
        after = check_tiling(session)
        assert after[0] == before[0]
        assert after[1].end < before[1].end  # its reasoning is gone
        prompt = engine.encode([user("one"), {"role": "assistant", "content": ""}, user("two")])
        spelt = [text_of(engine, prompt.tokens[event.start : event.end]) for event in after]
        assert spelt == [
            "<|im_start|>user\none<|im_end|>\n",
            "<|im_start|>assistant\n<|im_end|>\n",
            "<|im_start|>user\ntwo<|im_end|>\n",
        ]


message_texts = st.sampled_from(["", "a", "b c", "<think>\nhm\n</think>\n\nso", "<|im_end|>"])
told = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "tool"]),
    message_texts,
)


@pytest.mark.parametrize("named", ["chatml", "thinking", "empty_think"])
@settings(max_examples=25, deadline=None)
@given(messages=st.lists(told, min_size=1, max_size=7), looks=st.sets(st.integers(0, 7)))
def test_looking_on_the_way_changes_nothing_of_what_is_seen_in_the_end(
    named: str, messages: list[dict[str, object]], looks: set[int]
) -> None:
    with engine_over(named=named) as engine:
        session = engine.create_session(system=SYSTEM)
        for place, message in enumerate(messages):
            session.append_message(message)
            if place in looks:
                check_tiling(session)
        at_once = engine.create_session(system=SYSTEM, messages=messages)
        assert check_tiling(session) == check_tiling(at_once)


def test_spans_are_found_anew_where_a_message_that_was_measured_is_rendered_otherwise() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}
    with engine_over(named="thinking") as engine:
        session = engine.create_session(messages=[user("one"), thought])
        whole = check_tiling(session)[1].end
        session.append_message(user("a much longer question"))
        at_once = session.fork()
        assert check_tiling(session)[1].end < whole
        assert check_tiling(session) == check_tiling(at_once)


def test_the_reasoning_of_a_reply_is_kept_apart_from_its_answer() -> None:
    source = (
        "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    apart = ChatTemplate(source, bos_text="", eos_text="")
    with Engine.over(lambda: SimulatedRuntime(LIMITS), template=apart, sampling=GREEDY) as engine:
        asked = asked_by(engine)
        session = engine.create_session(messages=[user("one")])
        outcome = session.generate(max_tokens=6).outcome()
        session.append_message(user("two"))
        session.generate(max_tokens=1).outcome()
        text = f"[|one][{outcome.text.strip()}|][|two]<think>"
        assert asked[1].tokens == engine.tokenize(text)


def test_what_the_template_does_not_take_yet_holds_no_tokens() -> None:
    source = (
        "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    picky = ChatTemplate(source, bos_text="", eos_text="")
    with Engine.over(lambda: SimulatedRuntime(LIMITS), template=picky) as engine:
        session = engine.create_session(system=SYSTEM)
        assert kinds(session) == [("message", "system", 0, 0)]
        with pytest.raises(TemplateError, match="no question"):
            session.generate()
        session.append_message(user("hi"))
        assert [(start, end) for *_, start, end in kinds(session)] == [(0, 17), (17, 25)]
        assert len(session.generate(max_tokens=3).outcome().tokens) == 3


def test_a_message_that_the_template_refuses_is_taken_back_by_a_branch() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }};{% endfor %}"
    )
    picky = ChatTemplate(source, bos_text="", eos_text="")
    with Engine.over(lambda: SimulatedRuntime(LIMITS), template=picky) as engine:
        session = engine.create_session(messages=[user("hi")])
        session.append_message({"role": "tool", "content": "r"})
        with pytest.raises(TemplateError, match="no tools"):
            session.generate()
        branch = session.fork(events=1)
        assert len(branch.generate(max_tokens=2).outcome().tokens) == 2
        assert len(session.inspect().events) == 2


def test_tools_and_template_arguments_are_those_of_every_reply() -> None:
    source = (
        "{{ tools | tojson if tools }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    moody = ChatTemplate(source, bos_text="", eos_text="")
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
    arguments: dict[str, object] = {"mood": "glad"}
    with Engine.over(lambda: SimulatedRuntime(LIMITS), template=moody) as engine:
        session = engine.create_session(tools=tools, template_arguments=arguments)
        tools.clear()
        arguments.clear()
        session.append_message(user("hi"))
        usage = session.generate(max_tokens=1).outcome().usage
        assert usage.prompt_tokens == len('[{"type": "function", "function": {"name": "f"}}]gladhi')


def test_a_caller_s_later_changes_to_a_message_change_nothing(engine: Engine) -> None:
    message = user("hi")
    session = engine.create_session(messages=[message])
    more = user("there")
    session.append_message(more)
    length = session.inspect().length
    message["content"] = more["content"] = "something much longer"
    assert session.fork().inspect().length == session.inspect().length == length


def test_a_session_is_driven_by_tokens_or_by_messages(engine: Engine) -> None:
    by_tokens = engine.create_session()
    by_tokens.append("x")
    with pytest.raises(InvalidArgument, match="driven by tokens"):
        by_tokens.append_message(user("hi"))
    for by_messages in (
        engine.create_session(system=SYSTEM),
        engine.create_session(tools=[{"type": "function", "function": {"name": "f"}}]),
    ):
        with pytest.raises(InvalidArgument, match="driven by messages"):
            by_messages.append("x")
    assert by_tokens.inspect().length == 1


# --- branches ---


def test_a_branch_starts_from_what_it_shares_and_disturbs_nothing(engine: Engine) -> None:
    session = engine.create_session()
    session.append(range(40, 80))
    first = session.generate(max_tokens=5).outcome()
    prefilled = engine.stats().counters.prefilled
    branch = session.fork()
    assert engine.stats().counters.prefilled == prefilled
    assert branch.inspect().events == session.inspect().events
    held = (*range(40, 80), *first.tokens)
    for each, added in ((branch, 50), (session, 60), (branch, 51)):
        each.append([added])
    other = branch.generate(max_tokens=4).outcome()
    assert other.usage.prefilled_tokens == 3
    assert other.tokens == cold([*held, 50, 51], 4)
    mine = session.generate(max_tokens=4).outcome()
    assert mine.usage.cached_tokens > 0
    assert mine.tokens == cold([*held, 60], 4)


def test_a_branch_of_fewer_events_goes_back(engine: Engine) -> None:
    session = engine.create_session()
    session.append([65, 66])
    session.generate(max_tokens=3).outcome()
    session.append([67])
    assert [session.fork(events=n).inspect().length for n in range(4)] == [0, 2, 5, 6]
    for wrong in (-1, 4, "1", 1.5):
        with pytest.raises(InvalidArgument, match="0 to 3"):
            session.fork(events=wrong)  # type: ignore[arg-type]
    chat = engine.create_session(messages=[user("a"), user("b")])
    assert [event.end for event in chat.fork(events=1).inspect().events] == [
        chat.inspect().events[0].end
    ]


# --- names, settings, refusals ---


def test_every_session_and_branch_has_a_conversation_of_its_own(engine: Engine) -> None:
    asked = asked_by(engine)
    session = engine.create_session(name="same")
    session.append("x")
    for each in (session, session, session.fork(name="same"), engine.create_session(name="same")):
        each.append("y")
        each.generate(max_tokens=1).outcome()
    names = [request.conversation for request in asked]
    assert names[0] == names[1]
    assert len({*names, "same"}) == 4


def test_a_prompt_of_messages_tells_where_it_may_be_kept(engine: Engine) -> None:
    asked = asked_by(engine)
    engine.create_session(system=SYSTEM, messages=[user("hi")]).generate(max_tokens=1).outcome()
    prompt = engine.encode([{"role": "system", "content": SYSTEM}, user("hi")])
    assert (asked[0].turn, asked[0].base) == (prompt.turn, prompt.base)
    assert 0 < prompt.base < prompt.turn


def test_settings_hold_for_every_reply_unless_one_says_otherwise(engine: Engine) -> None:
    asked = asked_by(engine)
    warmly = Sampling(temperature=0.5)
    session = engine.create_session(sampling=warmly, priority="background", client="me")
    session.append("x")
    session.generate(max_tokens=1).outcome()
    options: dict[str, Any] = {"priority": "interactive", "stop": ("z",), "deadline": 60.0}
    session.generate(sampling=GREEDY, max_tokens=2, **options).outcome()
    first, second = asked
    assert (first.sampling, first.priority, first.client) == (warmly, "background", "me")
    assert (first.deadline, first.stop, first.max_tokens) == (None, (), 1)
    assert (second.sampling, second.priority, second.client) == (GREEDY, "interactive", "me")
    assert (second.deadline, second.stop, second.max_tokens) == (60.0, ("z",), 2)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": 5},
        {"priority": "urgent"},
        {"client": 3},
        {"name": 3},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [5]},
        {"system": 5},
        {"tools": [threading.Lock()]},
    ],
)
def test_a_session_that_cannot_be_is_not_created(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        engine.create_session(**options)


@pytest.mark.parametrize(
    "tokens", [[], [-1], [10**6], [1.5], ["a"], b"bytes", {1, 2}, None, 5, "\ud800" * 0]
)
def test_bad_tokens_change_nothing(engine: Engine, tokens: Any) -> None:
    session = engine.create_session()
    session.append([65])
    with pytest.raises(InvalidArgument):
        session.append(tokens)
    assert kinds(session) == [("tokens", None, 0, 1)]


@pytest.mark.parametrize(
    "message",
    [
        5,
        "hi",
        {},
        {"role": "wizard"},
        {"role": "user", "content": 5},
        {"role": "user", "content": "x", "lock": threading.Lock()},
    ],
)
def test_a_bad_message_changes_nothing(engine: Engine, message: Any) -> None:
    session = engine.create_session(messages=[user("hi")])
    before = session.inspect()
    with pytest.raises(InvalidArgument):
        session.append_message(message)
    assert session.inspect() == before


def test_more_than_the_context_holds_is_refused_and_changes_nothing(engine: Engine) -> None:
    session = engine.create_session()
    session.append([65] * 4000)
    for more in ([66] * 97, "x" * 97):
        with pytest.raises(PromptTooLong):
            session.append(more)
    session.append([66] * 96)
    assert session.inspect().length == 4096
    with pytest.raises(InvalidArgument):
        session.generate(max_tokens=-1)
    assert len(session.generate().outcome().tokens) == 1


def test_an_empty_session_has_nothing_to_go_on_from(engine: Engine) -> None:
    for session in (engine.create_session(), engine.create_session(tools=[{"a": 1}])):
        with pytest.raises(InvalidArgument, match="empty"):
            session.generate()
        assert session.inspect().events == ()


# --- closing ---


def test_a_closed_session_refuses_and_the_engine_has_forgotten_it(engine: Engine) -> None:
    with engine.create_session() as session, engine.create_session() as other:
        for each in (session, other):
            each.append([ord(each.name[-1])] * 30)
            each.generate(max_tokens=5).outcome()
        both = sum(engine.stats().checkpoints.values())
        session.close()
        left = sum(engine.stats().checkpoints.values())
        assert 0 < left < both
        assert other.inspect().warm == 34
    assert sum(engine.stats().checkpoints.values()) == 0
    session.close()
    calls: list[Callable[[], object]] = [
        session.generate,
        session.inspect,
        session.fork,
        lambda: session.append([65]),
        lambda: session.append_message(user("hi")),
    ]
    for call in calls:
        with pytest.raises(SessionClosed, match="closed"):
            call()


def test_closing_ends_what_runs_and_nothing_of_it_is_kept() -> None:
    runtime = Gated(free=3)
    with engine_over(lambda: runtime) as engine:
        session = engine.create_session()
        session.append(range(40, 60))
        stream = session.generate()
        next(stream)
        closer = threading.Thread(target=session.close)
        closer.start()
        runtime.go_on()
        assert stream.outcome().finish_reason == "cancelled"
        closer.join(WAIT)
        assert not closer.is_alive()
        assert sum(engine.stats().checkpoints.values()) == 0


def test_sessions_of_a_closed_engine_say_so_and_close_without_harm(engine: Engine) -> None:
    session = engine.create_session()
    session.append([65])
    engine.close()
    with pytest.raises(EngineClosed):
        session.generate()
    with pytest.raises(EngineClosed):
        session.append("x")
    session.close()


# --- a real model ---


@pytest.mark.models
def test_sessions_on_a_tiny_model_are_warm_and_as_cold() -> None:
    with open_engine("lfm2") as warm, open_engine("lfm2", cached=False) as other:
        raw, chat = warm.create_session(sampling=GREEDY), conversation(warm)
        cold_chat = conversation(other)
        held: tuple[int, ...] = ()
        for turn in range(3):
            text = f"{turn} is a number, and "
            raw.append(text)
            held += warm.tokenize(text, continues=bool(held))
            mine = raw.generate(max_tokens=8).outcome()
            request = Request(held, sampling=GREEDY, max_tokens=8)
            assert mine.tokens == other.generate(request).outcome().tokens
            assert mine.usage.cached_tokens == (len(held) - len(warm.tokenize(text)) - 1) * bool(
                turn
            )
            held += mine.tokens
            for each in (chat, cold_chat):
                each.append_message(user(f"And what is {turn}?"))
            said, uncached = (each.generate(max_tokens=8).outcome() for each in (chat, cold_chat))
            assert said.tokens == uncached.tokens
            assert uncached.usage.cached_tokens == 0
            assert (said.usage.cached_tokens > 0) == (turn > 0)
        for each in (raw, chat):
            check_tiling(each)
        branch = raw.fork()
        branch.append("?")
        assert branch.generate(max_tokens=4).outcome().usage.prefilled_tokens == 2


def conversation(engine: Engine) -> Session:
    return engine.create_session(system=SYSTEM, sampling=GREEDY)


@pytest.mark.parametrize("memory", KINDS)
def test_a_branch_stays_warm_though_the_original_goes_on_first_and_is_closed(
    memory: MemoryKind,
) -> None:
    with Engine.over(lambda: SimulatedRuntime(LIMITS, memory=memory)) as engine:
        session = engine.create_session(sampling=GREEDY)
        session.append(tuple(range(40, 100)))
        session.generate(max_tokens=8).outcome()
        branch = session.fork()
        length = branch.inspect().length
        session.append((50, 51, 52))
        session.generate(max_tokens=8).outcome()
        session.close()
        branch.append((60, 61, 62))
        assert branch.generate(max_tokens=8).outcome().usage.cached_tokens >= length - 1
        branch.close()
        assert not engine.stats().checkpoints
