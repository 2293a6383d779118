"""The engine in an event loop: streams, cancelling, closing, and a loop that is never blocked."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from real import open_engine

from orchestrator.engine import aio
from orchestrator.engine.aio import AsyncEngine, AsyncStream
from orchestrator.engine.core import Options
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import GREEDY, Finished, Outcome, Prefilling, Text
from orchestrator.errors import (
    ConfigError,
    EngineClosed,
    InvalidArgument,
    PromptTooLong,
    SessionBusy,
    SessionClosed,
)
from orchestrator.runtime.protocol import Chunk, Limits
from orchestrator.runtime.simulated import SimulatedRuntime
from orchestrator.text.bytes import ByteTokenizer

HELLO: list[dict[str, object]] = [{"role": "user", "content": "hello"}]
WAIT = 20.0  # seconds that nothing here ever takes
LIMITS = Limits(8, 4096, 4096, 64, 1000, 10)


def simulated() -> SimulatedRuntime:
    """Return a runtime whose replies never end by themselves."""
    return SimulatedRuntime(LIMITS)


def over(
    runtime: Callable[[], SimulatedRuntime] = simulated,
    *,
    checkpoints: bool = True,
    n_lanes: int = 1,
) -> AsyncEngine:
    options = Options(n_lanes=n_lanes, checkpoints=checkpoints)
    return AsyncEngine(Engine.over(runtime, options=options, sampling=GREEDY))


def cold(*prompts: str, max_tokens: int) -> list[tuple[int, ...]]:
    """Return what an engine answers that keeps nothing."""
    with over(checkpoints=False).engine as engine:
        return [engine.complete(p, max_tokens=max_tokens).outcome().tokens for p in prompts]


class Gated(SimulatedRuntime):
    """A runtime that waits for a permit before each decode call after the first `free` ones."""

    def __init__(self, free: int) -> None:
        super().__init__(LIMITS)
        self.calls = 0
        self.waits = threading.Event()
        self._permits = threading.Semaphore(free)

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Wait for a permit, then decode."""
        if not self._permits.acquire(blocking=False):
            self.waits.set()
            assert self._permits.acquire(timeout=WAIT)
        self.calls += 1
        return super().decode(chunks)

    def go_on(self) -> None:
        """Let everything run."""
        self._permits.release(1_000_000)


class SlowTokenizer(ByteTokenizer):
    """A vocabulary that reads the word ``slow`` only once it may."""

    def __init__(self) -> None:
        super().__init__(["<s>"], bos="<s>")
        self.asked, self.may = threading.Event(), threading.Event()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Wait, then encode."""
        if "slow" in text:
            self.asked.set()
            assert self.may.wait(WAIT)
        return super().encode(text, special=special)


async def become(condition: Callable[[], bool]) -> None:
    """Wait in the loop until something has come about."""
    until = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.005)


async def idle(engine: AsyncEngine) -> None:
    """Wait until nothing runs or waits in the engine."""
    until = time.monotonic() + WAIT
    while (now := (await engine.stats()).occupancy).lanes or now.queued:
        assert time.monotonic() < until
        await asyncio.sleep(0.005)


# --- streams ---


def test_a_chat_streams_as_in_any_thread_and_its_next_turn_is_warm() -> None:
    async def main() -> None:
        async with over() as engine, over(checkpoints=False) as other:
            events = [event async for event in await engine.chat(HELLO, max_tokens=10)]
            assert isinstance(events[0], Prefilling)
            assert isinstance(events[-1], Finished)
            text = "".join(event.text for event in events if isinstance(event, Text))
            outcome = events[-1].outcome
            assert (outcome.text, len(outcome.tokens)) == (text, 10)
            history: list[dict[str, object]] = [*HELLO]
            history += [{"role": "assistant", "content": text}, *HELLO]
            warm = await (await engine.chat(history, max_tokens=5)).outcome()
            uncached = await (await other.chat(history, max_tokens=5)).outcome()
            assert warm.tokens == uncached.tokens
            assert warm.usage.cached_tokens >= (await engine.encode(HELLO)).turn > 0
            assert uncached.usage.cached_tokens == 0

    asyncio.run(main())


def test_many_streams_at_once_need_no_thread_each_and_get_what_each_would_get_alone() -> None:
    prompts = [f"task {number} says " + "z" * (number % 7) for number in range(64)]
    wanted = cold(*prompts, max_tokens=8)

    async def main() -> None:
        before = threading.active_count()
        async with over(n_lanes=3) as engine:

            async def ask(prompt: str) -> Outcome:
                return await (await engine.complete(prompt, max_tokens=8)).outcome()

            tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts]
            outcomes = await asyncio.gather(*tasks)
            assert threading.active_count() <= before + 1 + 4  # the engine's and those that encode
            assert [each.tokens for each in outcomes] == wanted
            await ask(prompts[-1])
            again = await ask(prompts[-1])
            assert again.tokens == wanted[-1]
            assert again.usage.cached_tokens == again.usage.prompt_tokens - 1

    asyncio.run(main())


def test_two_tasks_that_wait_on_one_stream_both_come_back() -> None:
    runtime = Gated(free=1)

    async def main() -> None:
        async with over(lambda: runtime) as engine:
            stream = await engine.complete("x", max_tokens=5)
            waiting = [asyncio.create_task(stream.outcome()) for _ in range(2)]
            await asyncio.sleep(0.05)
            runtime.go_on()
            first, second = await asyncio.wait_for(asyncio.gather(*waiting), WAIT)
            assert first == second == await stream.outcome()
            assert [event async for event in stream] == []

    asyncio.run(main())


def test_what_is_wrong_with_a_request_is_raised_where_it_was_made() -> None:
    async def main() -> None:
        async with over() as engine:
            with pytest.raises(PromptTooLong):
                await engine.complete("x" * 5000)
            with pytest.raises(InvalidArgument):
                await engine.chat([])
            assert (await engine.stats()).counters.requests == 0

    asyncio.run(main())


# --- the loop is never blocked ---


def test_the_loop_goes_on_while_a_prompt_is_encoded() -> None:
    tokenizer = SlowTokenizer()

    async def main() -> None:
        async with over(lambda: SimulatedRuntime(LIMITS, tokenizer=tokenizer)) as engine:
            asking = asyncio.create_task(engine.complete("slow", max_tokens=2))
            await become(tokenizer.asked.is_set)
            assert not asking.done()
            tokenizer.may.set()  # nobody could, if the loop were the one that waits
            assert len((await (await asking).outcome()).tokens) == 2

    asyncio.run(main())


def test_the_loop_goes_on_while_the_engine_steps() -> None:
    runtime = Gated(free=1)

    async def main() -> None:
        async with over(lambda: runtime) as engine:
            stream = await engine.complete("x", max_tokens=5)
            await become(runtime.waits.is_set)
            figures = asyncio.create_task(engine.stats())
            await asyncio.sleep(0.05)
            assert not figures.done()
            runtime.go_on()
            await figures
            await stream.outcome()

    asyncio.run(main())


# --- cancelling ---


def test_cancelling_the_task_that_waits_cancels_the_request() -> None:
    runtime = Gated(free=4)

    async def main() -> None:
        async with over(lambda: runtime) as engine:
            stream = await engine.complete("x")
            begun = asyncio.Event()

            async def read() -> None:
                async for event in stream:
                    if isinstance(event, Text):
                        begun.set()

            task = asyncio.create_task(read())
            await asyncio.wait_for(begun.wait(), WAIT)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            runtime.go_on()
            outcome = await stream.outcome()
            assert outcome.finish_reason == "cancelled"
            assert 0 < len(outcome.tokens) < 100

    asyncio.run(main())


def test_a_time_limit_on_the_outcome_cancels_the_request() -> None:
    async def main() -> None:
        async with over(lambda: Paced(LIMITS)) as engine:
            stream = await engine.complete("x")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.outcome(), 0.05)
            assert (await stream.outcome()).finish_reason == "cancelled"

    asyncio.run(main())


class Paced(SimulatedRuntime):
    """A runtime that takes a while for every call."""

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Decode after a pause."""
        time.sleep(0.005)
        return super().decode(chunks)


def test_cancelling_a_task_that_is_still_encoding_leaves_no_request_behind() -> None:
    tokenizer = SlowTokenizer()
    runtime = Gated(free=0)
    runtime.tokenizer = tokenizer

    async def main() -> None:
        async with over(lambda: runtime) as engine:
            asking = asyncio.create_task(engine.complete("slow"))
            await become(tokenizer.asked.is_set)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            tokenizer.may.set()
            runtime.go_on()
            assert len((await (await engine.complete("y", max_tokens=3)).outcome()).tokens) == 3
            await idle(engine)
            assert runtime.calls < 50  # the reply it asked for would never have ended

    asyncio.run(main())


def test_a_stream_that_is_dropped_stops_its_request() -> None:
    runtime = Gated(free=3)

    async def main() -> None:
        async with over(lambda: runtime) as engine:
            stream = await engine.complete("x")
            await anext(stream)
            del stream
            gc.collect()
            runtime.go_on()
            await idle(engine)
            assert runtime.calls < 50

    asyncio.run(main())


def test_leaving_a_stream_s_block_stops_its_request() -> None:
    runtime = Gated(free=3)

    async def main() -> None:
        async with over(lambda: runtime) as engine:
            async with await engine.complete("x") as stream:
                await anext(stream)
            runtime.go_on()
            assert (await stream.outcome()).finish_reason == "cancelled"

    asyncio.run(main())


def test_a_loop_that_is_closed_disturbs_nobody_and_its_requests_end() -> None:
    runtime = Gated(free=2)
    held: list[AsyncStream] = []
    with Engine.over(lambda: runtime, sampling=GREEDY, options=Options(n_lanes=2)) as engine:
        beside = engine.complete("beside", max_tokens=40)

        async def main() -> None:
            held.append(await AsyncEngine(engine).complete("x"))

        asyncio.run(main())
        runtime.go_on()
        assert beside.outcome().tokens == cold("beside", max_tokens=40)[0]
        until = time.monotonic() + WAIT
        while engine.stats().occupancy.lanes:
            assert time.monotonic() < until
            time.sleep(0.005)
        assert engine.stats().counters.recoveries == 0
        assert runtime.calls < 500


# --- opening and closing ---


def test_closing_ends_what_runs_with_a_typed_error_and_is_harmless_twice() -> None:
    runtime = Gated(free=3)

    async def main() -> None:
        engine = over(lambda: runtime)
        stream = await engine.complete("x")
        await anext(stream)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.02)
        runtime.go_on()
        with pytest.raises(EngineClosed):
            await stream.outcome()
        await closing
        await engine.close()
        for call in (engine.complete("y"), engine.stats(), engine.create_session()):
            with pytest.raises(EngineClosed):
                await call

    asyncio.run(main())


def test_what_stops_a_model_from_opening_is_raised_where_it_was_opened() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="no model is named"):
            await AsyncEngine.open("no-such-model")

    asyncio.run(main())


def test_what_a_thread_opened_for_a_task_that_is_gone_is_undone() -> None:
    begun, may = threading.Event(), threading.Event()
    undone: list[str] = []

    def work() -> str:
        begun.set()
        assert may.wait(WAIT)
        return "opened"

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            task = asyncio.create_task(aio._in_thread(threads, work, undone.append))
            await become(begun.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may.set()
            await become(lambda: undone == ["opened"])

    asyncio.run(main())


def test_an_engine_that_nobody_waits_for_any_more_is_closed_again() -> None:
    opening, may, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(SimulatedRuntime):
        def close(self) -> None:
            closed.set()

    def open_slowly() -> SimulatedRuntime:
        opening.set()
        assert may.wait(WAIT)
        return Slow(LIMITS)

    async def main() -> None:
        opened = asyncio.create_task(aio._opening(Engine.over)(open_slowly))
        await become(opening.is_set)
        opened.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opened
        may.set()
        await become(closed.is_set)

    asyncio.run(main())


# --- sessions ---


def test_a_session_in_a_loop_is_warm_and_as_cold() -> None:
    async def main() -> None:
        async with over() as engine, over(checkpoints=False) as other:
            held = ""
            async with await engine.create_session(name="draft") as session:
                for turn in range(3):
                    await session.append(f"part {turn};")
                    held += f"part {turn};"
                    outcome = await (await session.generate(max_tokens=6)).outcome()
                    wanted = await (await other.complete(held, max_tokens=6)).outcome()
                    assert outcome.tokens == wanted.tokens
                    assert outcome.usage.cached_tokens == (len(held) - 8 if turn else 0)
                    held += outcome.text
                branch = await session.fork(events=2)
                view = await branch.inspect()
                assert (session.name, view.length) == ("draft", 13)
                with pytest.raises(InvalidArgument):
                    await session.append_message(HELLO[0])
            with pytest.raises(SessionClosed):
                await session.inspect()

    asyncio.run(main())


def test_a_session_in_a_loop_takes_nothing_while_it_generates() -> None:
    runtime = Gated(free=1)

    async def main() -> None:
        async with over(lambda: runtime) as engine:
            session = await engine.create_session(messages=HELLO)
            stream = await session.generate()
            await anext(stream)
            with pytest.raises(SessionBusy):
                await session.append_message(HELLO[0])
            closing = asyncio.create_task(session.close())
            await asyncio.sleep(0.02)
            runtime.go_on()
            assert (await stream.outcome()).finish_reason == "cancelled"
            await closing

    asyncio.run(main())


# --- a real model ---


@pytest.mark.models
def test_chats_side_by_side_on_a_tiny_model_are_warm_and_as_cold() -> None:
    questions = ("What is the capital of France?", "Why?")

    async def converse(engine: AsyncEngine, name: str) -> list[Outcome]:
        messages: list[dict[str, object]] = [{"role": "system", "content": name}]
        outcomes = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            stream = await engine.chat(messages, sampling=GREEDY, max_tokens=6, conversation=name)
            outcomes.append(await stream.outcome())
            messages.append({"role": "assistant", "content": outcomes[-1].text})
        return outcomes

    async def main(warm: Engine, other: Engine) -> None:
        one, two = AsyncEngine(warm), AsyncEngine(other)
        together = await asyncio.gather(*(converse(one, name) for name in ("Anna", "Bert")))
        alone = [await converse(two, name) for name in ("Anna", "Bert")]
        for mine, uncached in zip(together, alone, strict=True):
            assert [each.tokens for each in mine] == [each.tokens for each in uncached]
            assert [each.usage.cached_tokens > 0 for each in mine] == [False, True]
            assert [each.usage.cached_tokens for each in uncached] == [0, 0]

    with open_engine("lfm2") as warm, open_engine("lfm2", cached=False) as other:
        asyncio.run(main(warm, other))
