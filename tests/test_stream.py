"""How events reach a reader: order, diversion, and the end told before anybody reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from orchestrator.engine.request import Finished, Outcome, Prefilling, Text, Timings, Usage
from orchestrator.engine.stream import Heard, Last, Stream
from orchestrator.errors import BackendError, OrchestratorError

WAIT = 20.0  # seconds that nothing here ever takes
USAGE = Usage(1, 1, 0, 1)
END = Finished(Outcome("ab", (1, 2), "stop", USAGE, Timings(0.0, 0.0, 0.0, 0.0, 0.0)))


def heard_by(*events: Heard) -> Stream:
    """Return a stream that was told `events`."""
    stream = Stream()
    for event in events:
        stream.listener(event)
    return stream


def in_time(work: Callable[[], object]) -> None:
    """Do something in a thread, and fail where it never comes back."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_events_are_read_in_their_order_to_the_end_and_not_beyond() -> None:
    events: list[Heard] = [Prefilling(1, 1, 0), Text("a"), Text("b"), END]
    stream = heard_by(*events)
    assert list(stream) == events
    assert list(stream) == []
    assert stream.is_over
    assert stream.outcome() == END.outcome


def test_what_waits_is_diverted_first_and_what_comes_follows() -> None:
    stream = heard_by(Prefilling(1, 1, 0), Text("a"))
    got: list[Heard] = []
    stream.divert(got.append)
    stream.listener(Text("b"))
    stream.listener(END)
    assert got == [Prefilling(1, 1, 0), Text("a"), Text("b"), END]
    assert not stream.is_over
    assert stream.take(got[-1]) is END
    assert stream.is_over
    assert stream.result() == END.outcome
    assert got[4:] == [END]  # for whoever else waits


def test_events_that_come_while_others_are_diverted_stay_behind_them() -> None:
    stream = heard_by(*(Text(str(number)) for number in range(200)))
    got: list[Heard] = []
    begun = threading.Event()

    def tell() -> None:
        begun.wait(WAIT)
        for number in range(200, 400):
            stream.listener(Text(str(number)))

    def deliver(event: Heard) -> None:
        begun.set()
        got.append(event)

    teller = threading.Thread(target=tell)
    teller.start()
    stream.divert(deliver)
    teller.join(WAIT)
    assert got == [Text(str(number)) for number in range(400)]


def test_an_error_ends_a_diverted_stream_as_any_other() -> None:
    stream = heard_by()
    got: list[Heard] = []
    stream.divert(got.append)
    stream.listener(BackendError("broke"))
    with pytest.raises(BackendError, match="broke"):
        stream.take(got[0])
    assert stream.is_over
    with pytest.raises(OrchestratorError, match="raised before"):
        stream.result()


def test_the_end_is_told_before_any_reader_gets_it() -> None:
    stream = heard_by(Text("a"))
    order: list[object] = []
    stream.on_end(lambda last: order.append(("told", last)))
    stream.divert(order.append)
    stream.listener(END)
    assert order == [Text("a"), ("told", END), END]
    stream.take(END)  # delivered again, told once
    assert order == [Text("a"), ("told", END), END, END]
    told: list[Last] = []
    early = heard_by()
    early.on_end(told.append)
    early.listener(BackendError("broke"))
    early.listener(Text("late"))
    assert [str(each) for each in told] == ["broke"]


def test_a_watcher_that_comes_after_the_end_is_told_at_once() -> None:
    told: list[Last] = []
    heard_by(Text("a"), END).on_end(told.append)
    assert told == [END]


def test_a_request_that_ends_in_the_midst_of_a_delivery_is_heard() -> None:
    got: list[Heard] = []

    def work() -> None:
        stream = Stream()

        def deliver(event: Heard) -> None:
            got.append(event)
            if event == Text("a"):  # as where a finalizer cancels what never ran
                stream.listener(END)

        stream.divert(deliver)
        stream.listener(Text("a"))

    in_time(work)
    assert got == [Text("a"), END]


def test_a_stream_that_nobody_holds_cancels_its_request_and_one_that_ended_once() -> None:
    cancelled: list[int] = []
    stream = Stream()
    listener = stream.listener
    stream.on_cancel(lambda: cancelled.append(1))
    canceller = stream.canceller
    del stream
    assert cancelled == [1]
    canceller()
    listener(END)
    assert cancelled == [1]
