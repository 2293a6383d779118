"""How is one question answered in a script?

The answer is on standard output and nothing else is; everything said about it goes to standard
error.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import click

from orchestrator.cli.asking import Asking
from orchestrator.cli.conversation import Conversation
from orchestrator.cli.opening import ChatEngine
from orchestrator.cli.render import (
    ReplyView,
    plain_view,
    print_dim,
    silent_view,
    terminal,
    terminal_view,
)
from orchestrator.cli.reply import Reply, follow
from orchestrator.cli.report import as_json, outcome_line, timings_line

INTERRUPTED = 130
PATIENCE = 3.0
"""Seconds of silence on standard input after which it is said what is being waited for."""


def question(prompt: str | None) -> str:
    """Return what is asked: `prompt`, what is piped in, or both with a blank line between.

    Raises click's UsageError when there is neither, or when what is piped in is not UTF-8.
    """
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read(sys.stdin.buffer)
    asked = "\n\n".join(part for part in (prompt, piped.strip("\n")) if part)
    if not asked.strip():
        raise click.UsageError("there is nothing to answer: give a PROMPT, or pipe one in")
    return asked


def _read(file: BinaryIO) -> str:
    with _patience():
        payload = file.read()
    try:
        return payload.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"standard input is not UTF-8 text: byte {payload[error.start]:#04x} "
            f"at offset {error.start:,}"
        ) from error


@contextmanager
def _patience() -> Iterator[None]:
    """Say what is awaited if it takes long: a pipe that nobody closes looks like a hang."""
    message = "reading standard input to its end …"
    timer = threading.Timer(PATIENCE, click.echo, (message,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def answer(
    engine: ChatEngine, conversation: Conversation, asked: str, asking: Asking, *, as_object: bool
) -> int:
    """Print the reply to `asked` (one JSON object if `as_object`) and return the exit status."""
    reply = follow(asking.ask(engine, conversation.prompt(asked)), _view(as_object=as_object))
    if as_object:
        document = json.dumps(as_json(reply, engine.model.name), ensure_ascii=False)
        sys.stdout.buffer.write(document.encode("utf-8", "replace") + b"\n")
        sys.stdout.buffer.flush()
    if asking.verbose or not as_object:
        _account(reply, asking)
    return INTERRUPTED if reply.cancelled else 0


def _view(*, as_object: bool) -> ReplyView:
    err = terminal(stderr=True)
    if as_object:
        return silent_view(err)
    if sys.stdout.isatty():
        return terminal_view(terminal(), err)
    return plain_view(sys.stdout.buffer, err)


def _account(reply: Reply, asking: Asking) -> None:
    err = terminal(stderr=True)
    # An answer in a pipe ends without a line's end, and the pipe may lead to this very terminal.
    if err.is_terminal and not sys.stdout.isatty():
        err.print()
    print_dim(err, outcome_line(reply.outcome))
    if asking.verbose:
        print_dim(err, timings_line(reply.outcome))
