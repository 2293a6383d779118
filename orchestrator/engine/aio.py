"""How does an asyncio program use the engine without ever waiting in its loop?

    async with await AsyncEngine.open("demo") as engine:
        async for event in await engine.chat([{"role": "user", "content": "Hello"}]):
            ...

Text becomes tokens in a few threads that the engine keeps for it; from there on no reply needs a
thread: the engine's own hands every event to the loop (`call_soon_threadsafe`), however many
replies there are.

    loop    chat ┐                    ┌▶ event ─▶ event ─▶ …
    threads      └▶ encode, submit ┐  │
    engine                         └▶ step, step, step, …

Invariants: nothing here waits in the loop's thread; a task that is cancelled cancels what it
waits for, also where that has only just come about; a loop that was closed disturbs nobody.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from orchestrator.engine.engine import Engine, ModelInfo
from orchestrator.engine.request import Event, Outcome
from orchestrator.engine.session import Session
from orchestrator.engine.stream import Heard, Stream
from orchestrator.errors import EngineClosed

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_N_THREADS = 4  # encoding takes turns anyway; what waits for the engine waits beside it


class AsyncStream:
    """The events of one request, in one event loop; see `Stream`.

    Iterating ends with `Finished` or raises the request's error. Cancelling the task that waits
    for an event or the outcome, leaving the `async with` block, and dropping the stream all cancel
    the request. To be used in the loop it was made in.
    """

    def __init__(self, stream: Stream) -> None:
        self.opens_reasoning = stream.opens_reasoning
        self._stream = stream
        self._events: asyncio.Queue[Heard] = asyncio.Queue()
        put = self._events.put_nowait
        stream.divert(_deliverer(asyncio.get_running_loop(), put, stream.canceller))

    def cancel(self) -> None:
        """End the request before its next token or chunk; safe in any thread, harmless twice."""
        self._stream.cancel()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        if self._stream.is_over:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._stream.take(event)

    async def outcome(self) -> Outcome:
        """Wait for the end and return the outcome, or raise the request's error."""
        async for _ in self:
            pass
        return self._stream.result()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


def _deliverer(
    loop: asyncio.AbstractEventLoop,
    put: Callable[[Heard], None],
    cancel: Callable[[], object],
) -> Callable[[Heard], None]:
    """What the engine calls with an event. It holds no stream, so a dropped one is collected."""

    def deliver(event: Heard) -> None:
        try:
            loop.call_soon_threadsafe(put, event)
        except RuntimeError:  # the loop is closed: nobody will ever listen
            cancel()

    return deliver


# ---- calls that wait do so in a thread -----------------------------------------------------------


class _Front(Generic[T]):
    """Something of the engine's, and the threads in which calls to it wait."""

    def __init__(self, inner: T, threads: Executor) -> None:
        self._inner = inner
        self._threads = threads


Method = Callable[Concatenate[_Front[T], P], Coroutine[Any, Any, R]]


async def _in_thread(
    threads: Executor, work: Callable[[], R], undo: Callable[[R], object] = lambda result: None
) -> R:
    """Return what `work` returns in a thread; `undo` that where nobody waits for it any more."""
    try:
        future = threads.submit(work)
    except RuntimeError as error:
        raise EngineClosed("the engine is closed; open a new one") from error
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(functools.partial(_undone, undo))
        raise


def _undone(undo: Callable[[R], object], future: Future[R]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


def _calling(method: Callable[Concatenate[T, P], R]) -> Method[T, P, R]:
    """A method of the same arguments that runs `method` in a thread."""

    @functools.wraps(method)
    async def call(self: _Front[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        work = functools.partial(method, self._inner, *args, **kwargs)
        return await _in_thread(self._threads, work)

    return call


def _streaming(method: Callable[Concatenate[T, P], Stream]) -> Method[T, P, AsyncStream]:
    """As `_calling`, for what returns a stream."""

    @functools.wraps(method)
    async def call(self: _Front[T], /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream:
        work = functools.partial(method, self._inner, *args, **kwargs)
        return AsyncStream(await _in_thread(self._threads, work, Stream.cancel))

    return call


def _beginning(method: Callable[Concatenate[T, P], Session]) -> Method[T, P, AsyncSession]:
    """As `_calling`, for what returns a session."""

    @functools.wraps(method)
    async def call(self: _Front[T], /, *args: P.args, **kwargs: P.kwargs) -> AsyncSession:
        work = functools.partial(method, self._inner, *args, **kwargs)
        return AsyncSession(await _in_thread(self._threads, work, Session.close), self._threads)

    return call


def _opening(open_: Callable[P, Engine]) -> Callable[P, Coroutine[Any, Any, AsyncEngine]]:
    """As `open_`, in a thread; an engine that nobody waits for any more is closed again."""

    @functools.wraps(open_)
    async def call(*args: P.args, **kwargs: P.kwargs) -> AsyncEngine:
        threads = ThreadPoolExecutor(1, "orchestrator-open")
        try:
            work = functools.partial(open_, *args, **kwargs)
            return AsyncEngine(await _in_thread(threads, work, Engine.close))
        finally:
            threads.shutdown(wait=False)

    return call


# ---- the engine and its sessions -----------------------------------------------------------------


class AsyncSession(_Front[Session]):
    """A `Session` in an event loop: the same methods, to be awaited."""

    append = _calling(Session.append)
    append_message = _calling(Session.append_message)
    generate = _streaming(Session.generate)
    fork = _beginning(Session.fork)
    inspect = _calling(Session.inspect)

    @property
    def name(self) -> str:
        """What people call it."""
        return self._inner.name

    async def close(self) -> None:
        """Cancel what runs and let the engine forget what it kept; twice is harmless."""
        with suppress(EngineClosed):
            await _in_thread(self._threads, self._inner.close)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncEngine(_Front[Engine]):
    """An `Engine` in an event loop: the same methods, to be awaited.

    Made by `open`, or over an engine that is open already; closing it closes that engine.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, ThreadPoolExecutor(_N_THREADS, "orchestrator-async"))

    open = staticmethod(_opening(Engine.open))

    chat = _streaming(Engine.chat)
    complete = _streaming(Engine.complete)
    generate = _streaming(Engine.generate)
    encode = _calling(Engine.encode)
    create_session = _beginning(Engine.create_session)
    forget = _calling(Engine.forget)
    stats = _calling(Engine.stats)

    @property
    def engine(self) -> Engine:
        """The engine itself, for other threads."""
        return self._inner

    @property
    def model(self) -> ModelInfo:
        """What is loaded."""
        return self._inner.model

    async def close(self) -> None:
        """End what runs with `EngineClosed` and free the model; closing twice is harmless."""
        with suppress(EngineClosed):
            await _in_thread(self._threads, self._inner.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
