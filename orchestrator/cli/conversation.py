"""What has been said so far, and what does each command make of it?

A conversation is a value: every verb returns a new one, and a refused one raises before anything
changed. It knows no engine and no terminal; a file is its only way out.

Invariant: user and reply alternate, user first, and the last message is a reply. A message that
got no reply is never part of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.paths import expanded

FORMAT = "orchestrator-conversation"
VERSION = 1
SIZE_LIMIT = 64 << 20  # bytes; a long chat has some hundred thousand


class ConversationError(OrchestratorError):
    """A command does not fit the conversation, or a file holds none."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One message of the user and the reply to it; `reasoning` is empty where there was none."""

    user: str
    reply: str
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The system text (empty: none) and the exchanges, oldest first."""

    system: str = ""
    exchanges: tuple[Exchange, ...] = ()

    def prompt(self, user: str) -> list[dict[str, object]]:
        """Return the messages to send for a reply to `user`."""
        return [*self.messages(), {"role": "user", "content": user}]

    def messages(self) -> list[dict[str, object]]:
        """Return everything said, as chat messages."""
        messages: list[dict[str, object]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for exchange in self.exchanges:
            messages.append({"role": "user", "content": exchange.user})
            reply: dict[str, object] = {"role": "assistant", "content": exchange.reply}
            if exchange.reasoning:
                reply["reasoning_content"] = exchange.reasoning
            messages.append(reply)
        return messages

    def with_exchange(self, exchange: Exchange) -> Conversation:
        """Return it one exchange longer."""
        return replace(self, exchanges=(*self.exchanges, exchange))

    def with_system(self, system: str) -> Conversation:
        """Return it under another system text; empty takes it away."""
        return replace(self, system=system)

    def without_last(self) -> Conversation:
        """Return it without its last exchange. Raises `ConversationError` when there is none."""
        self.last()
        return replace(self, exchanges=self.exchanges[:-1])

    def last(self) -> Exchange:
        """Return the last exchange. Raises `ConversationError` when there is none."""
        if not self.exchanges:
            raise ConversationError("nothing has been said yet")
        return self.exchanges[-1]

    def emptied(self) -> Conversation:
        """Return it with nothing said, the system text kept."""
        return replace(self, exchanges=())


def save(conversation: Conversation, file: Path) -> None:
    """Write `conversation` to `file`, whole or not at all.

    A file that is there and holds no conversation is not overwritten. Raises `ConversationError`.
    """
    file = _found(file)
    if _may_hold_something(file):
        _refuse_foreign(file)
    document = {"format": FORMAT, "version": VERSION, "messages": conversation.messages()}
    text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
    try:
        _replace(file, text.encode("utf-8", "replace"))
    except OSError as error:
        raise ConversationError(f'"{file}" was not saved: {error.strerror or error}') from error


def load(file: Path) -> Conversation:
    """Return the conversation in `file`. Raises `ConversationError` with what is wrong with it."""
    file = _found(file)
    try:
        document = json.loads(_text_of(file))
    except OSError as error:
        raise ConversationError(f'"{file}" cannot be read: {error.strerror or error}') from error
    except (ValueError, RecursionError) as error:
        raise ConversationError(f'"{file}" is no saved conversation: not JSON ({error})') from error
    try:
        return _conversation(document)
    except ConversationError as error:
        raise ConversationError(f'"{file}" holds no conversation: {error}') from error


def _found(file: Path) -> Path:
    """Return where a file really lies, links followed."""
    try:
        return expanded(file).resolve()
    except (ConfigError, OSError, RuntimeError) as error:
        raise ConversationError(f'"{file}" cannot be found: {error}') from error


def _may_hold_something(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:
        raise ConversationError(f'"{file}" cannot be written: {error.strerror}') from error


def _text_of(file: Path) -> str:
    """Return what a file holds; a device would never end, so only plain files are read."""
    if file.exists() and not file.is_file():
        raise ConversationError(f'"{file}" is no plain file')
    if file.stat().st_size > SIZE_LIMIT:
        raise ConversationError(f'"{file}" has more than {SIZE_LIMIT:,} bytes')
    return file.read_text(encoding="utf-8")


def _refuse_foreign(file: Path) -> None:
    try:
        load(file)
    except ConversationError as error:
        raise ConversationError(f"{error}; it is not overwritten, choose another name") from error


def _replace(file: Path, payload: bytes) -> None:
    """Put `payload` in place of `file` in one step, so that a crash leaves the old one."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _conversation(document: object) -> Conversation:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConversationError(f'no "format": "{FORMAT}" at its head')
    if document.get("version") != VERSION:
        raise ConversationError(f"version is {document.get('version')!r}, expected {VERSION}")
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise ConversationError('"messages" is no list')
    roles = [_text(message, "role", place) for place, message in enumerate(messages)]
    system = _text(messages[0], "content", 0) if roles[:1] == ["system"] else ""
    first = 1 if roles[:1] == ["system"] else 0
    _check_turns(roles[first:], first)
    pairs = zip(messages[first::2], messages[first + 1 :: 2], strict=True)
    exchanges = [_exchange(user, reply, first + 2 * n) for n, (user, reply) in enumerate(pairs)]
    return Conversation(system, tuple(exchanges))


def _check_turns(roles: list[str], first: int) -> None:
    for place, role in enumerate(roles):
        expected = ("user", "assistant")[place % 2]
        if role != expected:
            raise ConversationError(
                f'message {first + place + 1} has the role "{role}", expected "{expected}"'
            )
    if len(roles) % 2:
        raise ConversationError("its last message has no reply")


def _exchange(user: object, reply: object, place: int) -> Exchange:
    return Exchange(
        user=_text(user, "content", place),
        reply=_text(reply, "content", place + 1),
        reasoning=_text(reply, "reasoning_content", place + 1, default=""),
    )


def _text(message: object, key: str, place: int, default: str | None = None) -> str:
    if not isinstance(message, Mapping):
        raise ConversationError(f"message {place + 1} is no object")
    value = message.get(key, default)
    if not isinstance(value, str):
        raise ConversationError(f'message {place + 1} has no text under "{key}"')
    return value.encode("utf-8", "replace").decode()  # JSON may smuggle in half a character
