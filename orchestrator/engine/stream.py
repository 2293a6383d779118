"""How does a reply reach the thread that asked for it?

Events pass through a queue; waiting on it can be interrupted, so Ctrl-C works in the caller's
thread while the engine's goes on.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from orchestrator.engine.request import Event, Finished, Outcome
from orchestrator.errors import OrchestratorError


class Stream:
    """The events of one request; the last one is `Finished`, or iterating raises its error.

    Leaving the `with` block, or dropping the stream before its end, cancels the request.
    """

    def __init__(self, opens_reasoning: bool = False) -> None:
        self.opens_reasoning = opens_reasoning
        self._events: queue.SimpleQueue[Event | OrchestratorError] = queue.SimpleQueue()
        self._outcome: Outcome | None = None
        self._ended = False
        self._cancel: Callable[[], object] = lambda: None

    @property
    def listener(self) -> Callable[[Event | OrchestratorError], None]:
        """Where the engine's thread puts events."""
        return self._events.put

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """Say how the request is cancelled; also done when the stream is collected."""
        self._cancel = weakref.finalize(self, cancel)

    def cancel(self) -> None:
        """End the request before its next token or chunk; safe in any thread, harmless twice.

        Iterating then ends with a `Finished` that holds what was said until then.
        """
        self._cancel()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, OrchestratorError):
            self._end(event)
            raise event
        if isinstance(event, Finished):
            self._outcome = event.outcome
            self._end(event)
        return event

    def _end(self, last: Event | OrchestratorError) -> None:
        self._ended = True
        self._events.put(last)  # for whoever else waits on this stream in another thread

    def outcome(self) -> Outcome:
        """Wait for the end and return the outcome, or raise the request's error."""
        for _ in self:
            pass
        if self._outcome is None:
            raise OrchestratorError("the request has ended with an error that was raised before")
        return self._outcome

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
