"""How does a reply reach whoever asked for it?

Events come from the engine's thread, or from whichever thread cancels a request that never ran.
They pass through a channel to one reader: threads that wait on its queue (`Stream`), or, once it
is diverted, an event loop (`aio.AsyncStream`). What an end and an error mean is told here for
both. Waiting on the queue can be interrupted, so Ctrl-C works in the caller's thread.

Invariants: events arrive in order, none is lost when a channel is diverted, and the one that ends
the request comes last; the channel knows no stream, so a stream that nobody holds is collected
and cancels its request.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from orchestrator.engine.request import Event, Finished, Outcome
from orchestrator.errors import OrchestratorError

log = logging.getLogger("orchestrator.engine")

T = TypeVar("T")
Heard = Event | OrchestratorError
Last = Finished | OrchestratorError


class _Channel:
    """Where one request's events go. `put` may be called in any thread, also by a finalizer."""

    def __init__(self) -> None:
        # Collecting a stream may end a request in the midst of a call here, in the same thread.
        self._lock = threading.RLock()
        self._waiting: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._deliver: Callable[[Heard], object] = self._waiting.put
        self._watch: Callable[[Last], object] = lambda last: None
        self._last: Last | None = None

    def put(self, event: Heard) -> None:
        """Take an event from the engine."""
        with self._lock:
            if isinstance(event, Last):
                self._last = event
                self._tell(self._watch, event)
            self._tell(self._deliver, event)

    @staticmethod
    def _tell(told: Callable[[T], object], event: T) -> None:
        """Call what a reader gave; what it raises is its own, and ends nobody else's request."""
        try:
            told(event)
        except Exception:
            log.exception("what listens to a stream raised")

    def again(self, last: Last) -> None:
        """Deliver the last event once more, for whoever else waits."""
        with self._lock:
            self._tell(self._deliver, last)

    def get(self) -> Heard:
        """Wait for the next event."""
        return self._waiting.get()

    def divert(self, deliver: Callable[[Heard], object]) -> None:
        """Hand what is waiting and all that comes to `deliver`, in order, one at a time."""
        with self._lock:
            while not self._waiting.empty():
                deliver(self._waiting.get())
            self._deliver = deliver

    def on_end(self, watch: Callable[[Last], object]) -> None:
        """Call `watch` with the last event before it is delivered, at once if it has come."""
        with self._lock:
            self._watch = watch
            if self._last is not None:
                watch(self._last)


class Stream:
    """The events of one request; the last one is `Finished`, or iterating raises its error.

    Leaving the `with` block, or dropping the stream before its end, cancels the request.
    """

    def __init__(self, opens_reasoning: bool = False) -> None:
        self.opens_reasoning = opens_reasoning
        self._channel = _Channel()
        self._outcome: Outcome | None = None
        self._ended = False
        self._cancel: Callable[[], object] = lambda: None

    # ---- the engine's side --------------------------------------------------------------------

    @property
    def listener(self) -> Callable[[Heard], None]:
        """Where the engine puts events."""
        return self._channel.put

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """Say how the request is cancelled; also done when the stream is collected."""
        self._cancel = weakref.finalize(self, cancel)

    def on_end(self, watch: Callable[[Last], object]) -> None:
        """Call `watch` with `Finished` or the error before any reader gets it.

        Only one watcher is called. It is called in the thread that ends the request, the engine's
        as a rule: it must be quick, wait for nothing and not raise.
        """
        self._channel.on_end(watch)

    # ---- the reader's side --------------------------------------------------------------------

    def cancel(self) -> None:
        """End the request before its next token or chunk; safe in any thread, harmless twice.

        Iterating then ends with a `Finished` that holds what was said until then.
        """
        self._cancel()

    @property
    def canceller(self) -> Callable[[], object]:
        """What `cancel` does, without a reference to the stream."""
        return self._cancel

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        return self.take(self._channel.get())

    def outcome(self) -> Outcome:
        """Wait for the end and return the outcome, or raise the request's error."""
        for _ in self:
            pass
        return self.result()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    # ---- for another front --------------------------------------------------------------------

    def divert(self, deliver: Callable[[Heard], object]) -> None:
        """From now on hand events to `deliver`, those that wait first; iterate no more.

        `deliver` is called by the engine and must be quick, wait for nothing and not raise. Each
        event it was given is to be passed to `take` by the reader.
        """
        self._channel.divert(deliver)

    @property
    def is_over(self) -> bool:
        """Whether a reader has taken the last event."""
        return self._ended

    def take(self, event: Heard) -> Event:
        """Note that a reader got `event` and return it, or raise the error it is."""
        if isinstance(event, Finished):
            self._outcome = event.outcome
        if isinstance(event, Last):
            self._ended = True
            self._channel.again(event)  # for whoever else waits on this stream
        if isinstance(event, OrchestratorError):
            raise event
        return event

    def result(self) -> Outcome:
        """Return the outcome once the stream is over; raises where it ended with an error."""
        if self._outcome is None:
            raise OrchestratorError("the request has ended with an error that was raised before")
        return self._outcome
