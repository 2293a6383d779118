"""How is one reply followed from its stream to its end?

Splits reasoning from the answer, hands both to a view as they come, and turns Ctrl-C into a
cancelled reply instead of an exception: what was said until then is kept.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from orchestrator.cli.opening import ReplyStream
from orchestrator.cli.render import ReplyView
from orchestrator.engine.request import Finished, Outcome, Prefilling, Text
from orchestrator.text.reasoning import Piece, ReasoningSplitter, Side


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply in its parts. `content` is what was shown as the answer."""

    content: str
    reasoning: str
    outcome: Outcome

    @property
    def cancelled(self) -> bool:
        """Whether it was stopped before its end."""
        return self.outcome.finish_reason == "cancelled"


@dataclass(slots=True)
class _Parts:
    """The two sides of a reply so far.

    White space between them belongs to neither. A reply without reasoning is kept to the byte, so
    that the history renders to the tokens that were sampled.
    """

    texts: dict[Side, list[str]] = field(default_factory=lambda: {"reasoning": [], "content": []})
    reasoned: bool = False

    def take(self, piece: Piece) -> Piece | None:
        """Add a piece and return what is to be shown of it."""
        side, text = piece
        self.reasoned = self.reasoned or side == "reasoning"
        if self.reasoned and not self.texts[side]:
            text = text.lstrip()
        if not text:
            return None
        self.texts[side].append(text)
        return side, text

    def text(self, side: Side) -> str:
        text = "".join(self.texts[side])
        return text.rstrip() if side == "reasoning" else text


def follow(stream: ReplyStream, view: ReplyView) -> Reply:
    """Show `stream` in `view` to its end and return the reply.

    Ctrl-C cancels the reply; a second one raises KeyboardInterrupt. Raises what the stream raises.
    """
    try:
        with _interrupt_cancels(stream):
            return _drain(stream, view)
    except BaseException:
        stream.cancel()
        raise
    finally:
        view.end()


def _drain(stream: ReplyStream, view: ReplyView) -> Reply:
    splitter = ReasoningSplitter(inside=stream.opens_reasoning)
    parts = _Parts()
    for event in stream:
        if isinstance(event, Prefilling):
            view.reading(event)
        elif isinstance(event, Text):
            _show(splitter.feed(event.text), parts, view)
        elif isinstance(event, Finished):
            _show(splitter.finish(), parts, view)
            return Reply(parts.text("content"), parts.text("reasoning"), event.outcome)
    raise RuntimeError("the stream ended without a Finished event")


def _show(pieces: list[Piece], parts: _Parts, view: ReplyView) -> None:
    for piece in pieces:
        shown = parts.take(piece)
        if shown is not None:
            view.show(*shown)


@contextmanager
def _interrupt_cancels(stream: ReplyStream) -> Iterator[None]:
    """Let the first Ctrl-C cancel `stream`, and any other raise KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # On a thread of its own: a lock that `cancel` takes may be held by the interrupted line.
        threading.Thread(target=stream.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
