"""The engine from other threads: streams, cancelling, closing, and defects."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from orchestrator.engine.core import Options
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import GREEDY, Finished, Prefilling, Request, Sampling, Text
from orchestrator.errors import (
    BackendError,
    ConfigError,
    EngineClosed,
    InvalidArgument,
    OrchestratorError,
    PromptTooLong,
)
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import Chunk, Limits, Runtime
from orchestrator.runtime.simulated import SimulatedRuntime

HELLO: list[dict[str, object]] = [{"role": "user", "content": "hello"}]
WAIT = 20.0  # seconds that nothing here ever takes


def simulated(n_context: int = 4096) -> SimulatedRuntime:
    """Return a runtime whose replies never end by themselves."""
    return SimulatedRuntime(Limits(8, n_context, n_context, 64, 1000, 10))


class Paced(SimulatedRuntime):
    """A runtime that waits for a permit before each decode call after the first `free` ones."""

    def __init__(self, free: int) -> None:
        super().__init__(Limits(8, 4096, 4096, 64, 1000, 10))
        self.calls = 0
        self._permits = threading.Semaphore(free)

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Wait for a permit, then decode."""
        assert self._permits.acquire(timeout=WAIT)
        self.calls += 1
        return super().decode(chunks)

    def go_on(self) -> None:
        """Let everything run."""
        self._permits.release(1_000_000)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.over(simulated) as engine:
        yield engine


def test_a_chat_streams_progress_then_text_then_its_outcome(engine: Engine) -> None:
    events = list(engine.chat(HELLO, sampling=GREEDY, max_tokens=10))
    assert isinstance(events[0], Prefilling)
    assert isinstance(events[-1], Finished)
    said = "".join(event.text for event in events if isinstance(event, Text))
    assert said == events[-1].outcome.text
    assert len(events[-1].outcome.tokens) == 10


def test_the_second_turn_starts_where_the_first_input_ended(engine: Engine) -> None:
    first = engine.chat(HELLO, sampling=GREEDY, max_tokens=5).outcome()
    reply: dict[str, object] = {"role": "assistant", "content": first.text}
    history = [*HELLO, reply, *HELLO]
    second = engine.chat(history, sampling=GREEDY, max_tokens=5).outcome()
    assert second.usage.cached_tokens >= engine.encode(HELLO).turn > 0


def test_a_request_out_of_range_is_refused_where_it_was_made(engine: Engine) -> None:
    with pytest.raises(PromptTooLong):
        engine.complete("x" * 5000)
    calls: list[Callable[[], object]] = [
        lambda: engine.chat([]),
        lambda: engine.chat([{"role": "wizard", "content": "x"}]),
        lambda: engine.complete("x", max_tokens=-1),
        lambda: engine.complete("x", stop=[""]),
        lambda: engine.complete("x", stop="END"),
        lambda: engine.complete(""),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
    assert engine.stats().counters.requests == 0


def test_cancelling_from_another_thread_ends_the_stream_with_what_was_said() -> None:
    runtime = Paced(free=6)
    with Engine.over(lambda: runtime) as engine:
        stream = engine.complete("x", sampling=GREEDY)
        heard = [next(stream) for _ in range(4)]
        threading.Thread(target=stream.cancel).start()
        time.sleep(0.05)
        runtime.go_on()
        outcome = stream.outcome()
        assert outcome.finish_reason == "cancelled"
        assert 0 < len(outcome.tokens) < 100
        assert any(isinstance(event, Text) for event in heard)


def test_a_stream_that_is_dropped_stops_its_request() -> None:
    runtime = Paced(free=3)
    with Engine.over(lambda: runtime) as engine:
        stream = engine.complete("x", sampling=GREEDY)
        next(stream)
        del stream
        gc.collect()
        runtime.go_on()
        engine.complete("y", sampling=GREEDY, max_tokens=1).outcome()
        assert runtime.calls < 50


def test_leaving_a_stream_s_block_stops_its_request() -> None:
    runtime = Paced(free=3)
    with Engine.over(lambda: runtime) as engine:
        with engine.complete("x", sampling=GREEDY) as stream:
            next(stream)
        runtime.go_on()
        assert stream.outcome().finish_reason == "cancelled"


def test_cancelling_after_the_end_is_harmless(engine: Engine) -> None:
    stream = engine.complete("x", sampling=GREEDY, max_tokens=2)
    outcome = stream.outcome()
    stream.cancel()
    assert stream.outcome() == outcome
    assert list(stream) == []


def test_closing_ends_what_runs_and_what_waits_with_a_typed_error() -> None:
    runtime = Paced(free=3)
    engine = Engine.over(lambda: runtime)
    running = engine.complete("x", sampling=GREEDY)
    waiting = engine.complete("y", sampling=GREEDY)
    next(running)
    closer = threading.Thread(target=engine.close)
    closer.start()
    time.sleep(0.05)
    runtime.go_on()
    for stream in (running, waiting):
        with pytest.raises(EngineClosed):
            stream.outcome()
    closer.join(WAIT)
    assert not closer.is_alive()


def test_a_closed_engine_says_so_and_closes_twice_without_harm() -> None:
    engine = Engine.over(simulated)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.complete("x")
    with pytest.raises(EngineClosed):
        engine.stats()


def test_what_stops_a_model_from_opening_is_raised_where_it_was_opened() -> None:
    def broken() -> Runtime:
        raise ConfigError("no such model")

    before = threading.active_count()
    with pytest.raises(ConfigError, match="no such model"):
        Engine.over(broken)
    assert threading.active_count() <= before + 1


def test_a_defect_in_a_step_ends_its_request_and_the_engine_goes_on() -> None:
    class Faulty(SimulatedRuntime):
        faults = 1

        def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
            if self.faults:
                self.faults -= 1
                raise ZeroDivisionError("nobody foresaw this")
            return super().decode(chunks)

    with Engine.over(lambda: Faulty(Limits(8, 512, 512, 64, 1000, 10))) as engine:
        with pytest.raises(BackendError, match=r"internal error.*nobody foresaw this"):
            engine.complete("x", max_tokens=3).outcome()
        assert engine.complete("x", sampling=GREEDY, max_tokens=3).outcome().tokens


def test_an_error_is_raised_once_and_the_stream_then_is_over() -> None:
    engine = Engine.over(lambda: Paced(free=0))
    stream = engine.complete("x")
    closer = threading.Thread(target=engine.close, daemon=True)
    closer.start()
    engine._core._runtime.go_on()  # type: ignore[attr-defined]
    with pytest.raises(EngineClosed):
        stream.outcome()
    assert list(stream) == []
    with pytest.raises(OrchestratorError):
        stream.outcome()
    closer.join(WAIT)


def test_many_threads_get_what_each_would_get_alone() -> None:
    prompts = [f"thread {number} says " + "z" * number for number in range(24)]
    with Engine.over(simulated, options=Options(checkpoints=False)) as alone:
        wanted = [alone.complete(p, sampling=GREEDY, max_tokens=8).outcome() for p in prompts]
    with Engine.over(simulated, options=Options(n_lanes=3, budgets=Budgets(history=2))) as engine:
        with ThreadPoolExecutor(12) as pool:
            got = list(
                pool.map(
                    lambda p: engine.complete(p, sampling=GREEDY, max_tokens=8).outcome(), prompts
                )
            )
        assert [each.tokens for each in got] == [each.tokens for each in wanted]
        assert engine.stats().occupancy.lanes == 0


def test_one_thread_alone_touches_the_runtime() -> None:
    seen: set[int] = set()

    class Watched(SimulatedRuntime):
        def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
            seen.add(threading.get_ident())
            return super().decode(chunks)

        def close(self) -> None:
            seen.add(threading.get_ident())

    def open_watched() -> Runtime:
        seen.add(threading.get_ident())
        return Watched(Limits(8, 512, 512, 64, 1000, 10))

    with Engine.over(open_watched) as engine, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: engine.complete(p, max_tokens=3).outcome(), "abcdefgh"))
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_the_time_to_first_token_counts_from_the_asking(engine: Engine) -> None:
    timings = engine.complete("x", sampling=GREEDY, max_tokens=4).outcome().timings
    first = timings.time_to_first_token
    assert first is not None
    assert 0 <= timings.queued <= first <= timings.total


def test_two_threads_that_wait_on_one_stream_both_come_back() -> None:
    runtime = Paced(free=1)
    with Engine.over(lambda: runtime) as engine:
        stream = engine.complete("x", sampling=GREEDY, max_tokens=5)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(stream.outcome) for _ in range(2)]
            time.sleep(0.05)
            runtime.go_on()
            first, second = (future.result(WAIT) for future in waiting)
    assert first == second


def odd_requests() -> list[Callable[[Engine], object]]:
    """Return calls with values of the wrong kind, each to be refused in the caller's thread."""
    fields: list[dict[str, Any]] = [
        {"tokens": (1.0, 2.0)},
        {"tokens": (float("nan"),)},
        {"tokens": b"bytes"},
        {"tokens": "text"},
        {"tokens": {1: 2}},
        {"tokens": {1, 2}},
        {"tokens": ()},
        {"tokens": (2**40,)},
        {"tokens": (-1,)},
        {"turn": 2.5},
        {"turn": 3},
        {"max_tokens": 2.5},
        {"max_tokens": "5"},
        {"max_tokens": float("nan")},
        {"stop": "END"},
        {"stop": (b"x",)},
        {"sampling": {}},
        {"sampling": 5},
        {"conversation": ["x"]},
    ]
    calls: list[Callable[[Engine], object]] = [
        lambda engine: engine.complete(None),  # type: ignore[arg-type]
        lambda engine: engine.complete(b"x"),  # type: ignore[arg-type]
        lambda engine: engine.chat(HELLO, sampling=5),  # type: ignore[arg-type]
        lambda engine: engine.chat(HELLO, template_arguments=5),  # type: ignore[arg-type]
        lambda engine: engine.chat(HELLO, conversation=[1]),  # type: ignore[arg-type]
    ]
    calls += [partial(_generate, {"tokens": (1, 2, 3), **field}) for field in fields]
    return calls


def _generate(fields: dict[str, Any], engine: Engine) -> object:
    return engine.generate(Request(**fields))


def test_values_of_the_wrong_kind_are_refused_at_once_and_disturb_nobody(engine: Engine) -> None:
    running = engine.complete("x", sampling=GREEDY, max_tokens=300)
    for call in odd_requests():
        with pytest.raises(InvalidArgument):
            call(engine)
    assert len(running.outcome().tokens) == 300
    assert engine.stats().counters.recoveries == 0


@pytest.mark.parametrize("field", ["top_k", "repeat_last", "seed", "temperature"])
def test_sampling_of_the_wrong_kind_is_refused(field: str) -> None:
    wrong: dict[str, Any] = {field: "2"}
    with pytest.raises(InvalidArgument, match=field):
        Sampling(**wrong)
    if field != "temperature":
        with pytest.raises(InvalidArgument, match="whole number"):
            Sampling(**wrong | {field: 2.5})


def test_numbers_of_other_libraries_are_taken_for_what_they_are() -> None:
    numbers: dict[str, Any] = {"turn": np.int64(1), "max_tokens": np.int32(4)}
    asked = Request(tuple(np.array([1, 2, 3])), **numbers)
    assert (asked.tokens, asked.turn, asked.max_tokens) == ((1, 2, 3), 1, 4)
    assert all(type(token) is int for token in asked.tokens)


class Faulty(SimulatedRuntime):
    """A runtime whose method of a given name raises for a while."""

    def __init__(self, fault: str, times: int) -> None:
        super().__init__(Limits(8, 512, 512, 64, 1000, 10))
        self.left = times
        setattr(self, fault, lambda *_: self._fail(fault, *_))

    def _fail(self, fault: str, *arguments: object) -> object:
        if self.left:
            self.left -= 1
            raise ZeroDivisionError(f"{fault} broke")
        return getattr(SimulatedRuntime, fault)(self, *arguments)


@pytest.mark.parametrize("fault", ["decode", "copy", "clear", "sampler", "length"])
def test_whatever_breaks_every_stream_ends_and_the_engine_answers_again(fault: str) -> None:
    with Engine.over(lambda: Faulty(fault, times=1)) as engine:
        for number in range(6):
            try:
                engine.complete(f"{number % 2} x", sampling=GREEDY, max_tokens=4).outcome()
            except OrchestratorError:
                continue
        assert len(engine.complete("y", sampling=GREEDY, max_tokens=4).outcome().tokens) == 4


def test_an_engine_that_cannot_even_start_over_closes_and_says_so() -> None:
    class Beyond(SimulatedRuntime):
        def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
            raise ZeroDivisionError("decode broke")

        def reset(self) -> None:
            raise ZeroDivisionError("reset broke")

    engine = Engine.over(lambda: Beyond(Limits(8, 512, 512, 64, 1000, 10)))
    streams = [engine.complete(text) for text in "ab"]
    for stream in streams:
        with pytest.raises(OrchestratorError):
            stream.outcome()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.complete("c")
    with pytest.raises(EngineClosed):
        engine.stats()


def test_ctrl_c_while_a_model_opens_closes_it_again() -> None:
    opening, closed = threading.Event(), threading.Event()

    class Slow(SimulatedRuntime):
        def close(self) -> None:
            closed.set()

    def open_slowly() -> Runtime:
        opening.set()
        time.sleep(0.3)
        return Slow(Limits(8, 512, 512, 64, 1000, 10))

    def interrupt() -> None:
        opening.wait(WAIT)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Engine.over(open_slowly)
    assert closed.wait(WAIT)


def test_a_forked_child_is_told_that_the_engine_is_not_its_own(engine: Engine) -> None:
    child = os.fork()
    if child == 0:
        try:
            engine.complete("x")
        except EngineClosed:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_two_requests_without_a_seed_draw_differently(engine: Engine) -> None:
    drawn = {
        engine.complete("x", sampling=Sampling(temperature=1), max_tokens=20).outcome().tokens
        for _ in range(4)
    }
    assert len(drawn) > 1
