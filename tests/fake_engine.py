"""An engine that answers from a script, for tests of the command line.

Run as a program it is the command line itself with this engine behind it:
``python tests/fake_engine.py chat "Hello"``. `FAKE_REPLY` sets what it says, `FAKE_PACE` the
seconds between two pieces and `FAKE_DELAY` those before the first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from orchestrator.cli.opening import Messages, Opening, Progress
from orchestrator.engine.counters import Counters
from orchestrator.engine.occupancy import EngineStats, Occupancy
from orchestrator.engine.records import Record
from orchestrator.engine.request import (
    Event,
    Finished,
    FinishReason,
    Outcome,
    Prefilling,
    Priority,
    Sampling,
    Text,
    Timings,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, slots=True)
class FakeModel:
    name: str = "fake"
    architecture: str = "granitehybrid"
    memory: str = "hybrid"
    n_context: int = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call of `chat` was given."""

    messages: list[dict[str, object]]
    sampling: Sampling | None
    max_tokens: int | None
    stop: tuple[str, ...]
    template_arguments: Mapping[str, object] | None
    conversation: str | None
    use_cache: bool
    priority: Priority


@dataclass(slots=True)
class FakeStream:
    """Says `words`; `before_word` runs before each of them, with its place."""

    words: Sequence[str]
    opens_reasoning: bool = False
    before_word: Callable[[int], None] = lambda place: None
    error: Exception | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[Event]:
        yield Prefilling(done=10, total=30, cached=10)
        yield Prefilling(done=30, total=30, cached=10)
        if self.error is not None:
            raise self.error
        said: list[str] = []
        for place, word in enumerate(self.words):
            self.before_word(place)
            if self.cancelled.is_set():
                break
            said.append(word)
            yield Text(word)
        reason: FinishReason = "cancelled" if self.cancelled.is_set() else "stop"
        ended = outcome("".join(said), len(said), reason)
        yield Finished(replace(ended, logprobs=self.logprobs))


def outcome(text: str, length: int, reason: FinishReason = "stop") -> Outcome:
    return Outcome(
        text=text,
        tokens=tuple(range(length)),
        finish_reason=reason,
        usage=Usage(30, length, cached_tokens=10, prefilled_tokens=20, seeded_from="turn"),
        timings=Timings(0.0, 0.25, prefill=0.2, decode=0.5, total=0.75),
    )


@dataclass(slots=True)
class FakeEngine:
    """Gives `streams` one after the other, then what `reply` makes of the messages."""

    streams: list[FakeStream] = field(default_factory=list)
    reply: Callable[[Messages], str] = lambda messages: f"echo {messages[-1]['content']}"
    model: FakeModel = FakeModel()
    asked: list[Asked] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    closed: bool = False
    notes: Sequence[str] = ()
    sink: Callable[[Record], object] = lambda record: None
    variables: frozenset[str] = frozenset({"enable_thinking", "k", "tags", "n"})

    def unknown_arguments(self, arguments: Mapping[str, object]) -> list[str]:
        return [name for name in arguments if name not in self.variables]

    def open(self, opening: Opening, on_progress: Progress) -> FakeEngine:
        self.openings.append(opening)
        on_progress("opening the fake")
        return self

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closed = True

    def chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling | None,
        max_tokens: int | None,
        stop: Sequence[str],
        template_arguments: Mapping[str, object] | None,
        conversation: str | None,
        use_cache: bool,
        priority: Priority,
    ) -> FakeStream:
        self.asked.append(
            Asked(
                [dict(message) for message in messages],
                sampling,
                max_tokens,
                tuple(stop),
                template_arguments,
                conversation,
                use_cache,
                priority,
            )
        )
        if self.streams:
            return self.streams.pop(0)
        return FakeStream([f"{word} " for word in self.reply(messages).split(" ")])

    def report_to(self, sink: Callable[[Record], object]) -> None:
        self.sink = sink

    def stats(self) -> EngineStats:
        """Return what an engine held that had served two turns."""
        now = Occupancy(
            *(0, 2, 0, 0, 3, 8, 120, 512, None),
            checkpoints={"turn": 1, "reply": 2},
            resident={"turn": 1, "reply": 2},
            exported={},
            resident_bytes=3_000_000,
            exported_bytes=0,
            exported_bytes_budget=1 << 30,
            exported_tokens=0,
            exported_tokens_budget=None,
        )
        return EngineStats(now, Counters(requests=2, prefilled=40, reused=37, cancelled=1))


def paced(text: str, pace: float, delay: float) -> FakeStream:
    """Return a stream that says `text` in pieces, `pace` seconds apart, after `delay` seconds."""
    pieces = [text[place : place + 4] for place in range(0, len(text), 4)]
    return FakeStream(pieces, before_word=lambda place: time.sleep(pace if place else delay))


class PacedEngine(FakeEngine):
    """Says `FAKE_REPLY` at the pace of `FAKE_PACE`, whatever it is asked."""

    def chat(self, messages: Messages, **options: object) -> FakeStream:
        text = os.environ.get("FAKE_REPLY", "A **bold** reply.\n")
        pace, delay = os.environ.get("FAKE_PACE", "0"), os.environ.get("FAKE_DELAY", "0")
        return paced(text, float(pace), float(delay))


if __name__ == "__main__":
    from orchestrator.cli.main import main

    sys.exit(main(open_engine=PacedEngine().open))
