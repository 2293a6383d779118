"""Where does each part of a reply go, and in what form?

The answer goes to standard output: as Markdown on a terminal, else byte for byte. Reasoning goes
to standard error, dim. While the prompt is being read a spinner on standard error counts its
tokens; it is gone before the first text appears.

Invariant: no control character a model wrote reaches a terminal (`clean`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import BinaryIO, Protocol

from rich.console import Console
from rich.status import Status
from rich.text import Text

from orchestrator.cli.flow import Flow
from orchestrator.cli.inline import DIM
from orchestrator.cli.markdown import MarkdownStream
from orchestrator.engine.request import Prefilling
from orchestrator.text.reasoning import Side

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def clean(text: str) -> str:
    """Return `text` without what a terminal would obey instead of show; tab and newline stay."""
    return _CONTROLS.sub("", text)


def terminal(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it stands: no markup, no guesses about numbers."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def print_dim(console: Console, text: str) -> None:
    """Print one quiet line."""
    # Wrapped for a reader only: a line in a log file stays one line.
    console.print(Text(clean(text), DIM), soft_wrap=not console.is_terminal)


LINE_INTERVAL = 5.0
"""Seconds between two lines about a long wait where there is no spinner."""


class Sink(Protocol):
    """Takes text piece by piece; `finish` ends it."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None: ...


class Nowhere:
    """Takes text and shows nothing."""

    def feed(self, text: str) -> None:
        """Drop `text`."""

    def finish(self) -> None:
        """Do nothing."""


class Bytes:
    """Writes text as it is, at once. A reply that holds half a surrogate pair shows ``?``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def feed(self, text: str) -> None:
        """Write and flush `text`."""
        self._file.write(text.encode("utf-8", "replace"))
        self._file.flush()

    def finish(self) -> None:
        """Write nothing more: not even a line's end is added."""


class Styled:
    """Writes Markdown to a terminal."""

    def __init__(self, console: Console) -> None:
        self._markdown = MarkdownStream(console)

    def feed(self, text: str) -> None:
        """Write what can be told of `text`."""
        self._markdown.feed(clean(text))

    def finish(self) -> None:
        """Write the rest and end the line."""
        self._markdown.finish()


class Dim:
    """Writes plain text, quietly, and a blank line after it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._flow: Flow | None = None

    def feed(self, text: str) -> None:
        """Write `text`, wrapped at words."""
        first, *rest = clean(text).split("\n")
        self._write(first)
        for line in rest:
            self._end_line()
            self._write(line)
        self._console.file.flush()

    def finish(self) -> None:
        """End the line, and set what follows apart."""
        if self._flow is not None:
            self._flow.end()
            self._flow = None
        self._console.print()

    def _write(self, text: str) -> None:
        if text:
            self._flow = self._flow or Flow(self._console)
            self._flow.write([(text, DIM)])

    def _end_line(self) -> None:
        (self._flow or Flow(self._console)).end()
        self._flow = None


class Waiting:
    """A spinner on a terminal from the question to the first text; elsewhere a line now and then.

    `clock` gives seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._due = clock() + LINE_INTERVAL
        self._status: Status | None = None
        if console.is_terminal:
            self._status = console.status(Text("waiting", DIM), spinner_style=DIM)
            self._status.start()

    def update(self, text: str) -> None:
        """Say what is being waited for."""
        if self._status is not None:
            self._status.update(Text(clean(text), DIM))
        elif not self._console.is_terminal and self._clock() >= self._due:
            self._due = self._clock() + LINE_INTERVAL
            print_dim(self._console, text)

    def stop(self) -> None:
        """Take it off the screen, for good."""
        if self._status is not None:
            self._status.stop()
            self._status = None


class ReplyView:
    """Shows one reply: its prompt being read, its reasoning, its answer. `end` it in any case."""

    def __init__(self, content: Sink, reasoning: Sink, waiting: Waiting) -> None:
        self._sinks: dict[Side, Sink] = {"content": content, "reasoning": reasoning}
        self._side: Side | None = None
        self._waiting = waiting

    def reading(self, event: Prefilling) -> None:
        """Count the tokens of a prompt that is being read."""
        reused = f", {event.cached:,} of them reused" if event.cached else ""
        self._waiting.update(f"reading {event.done:,} of {event.total:,} tokens{reused}")

    def show(self, side: Side, text: str) -> None:
        """Show a piece of the reply."""
        self._turn_to(side)
        self._sinks[side].feed(text)

    def end(self) -> None:
        """Show what is left, and leave the terminal at the beginning of a line."""
        self._turn_to(None)

    def _turn_to(self, side: Side | None) -> None:
        self._waiting.stop()
        if self._side is not None and side != self._side:
            self._sinks[self._side].finish()
        self._side = side


def terminal_view(out: Console, err: Console) -> ReplyView:
    """Return a view for a reader at a terminal."""
    return ReplyView(Styled(out), Dim(err), Waiting(err))


def plain_view(out: BinaryIO, err: Console) -> ReplyView:
    """Return a view that writes the bare answer to `out`."""
    return ReplyView(Bytes(out), Dim(err), Waiting(err))


def silent_view(err: Console) -> ReplyView:
    """Return a view that shows only that it is waiting."""
    return ReplyView(Nowhere(), Nowhere(), Waiting(err))
