"""Which tokens and messages does a session consist of, and which tokens are whose?

A script is what a session has been given and has generated so far, as a value: every verb returns
a new one, a refused one raises before anything changed, and branches share what they have in
common. There are two kinds:

    TokenScript     [ given ][ generated ][ given ]            all of it is the next prompt
    MessageScript   [ system ][ user ][ assistant ][ user ]    the template makes the next prompt

A template may render earlier messages otherwise than before (it drops reasoning, it moves the
system text to the last message). So the spans of messages are found in the latest rendering
(`ChatCodec.ends`), anew wherever it differs from the one before; a message that was not rendered
yet holds no tokens.

Invariant: the events tile the tokens ``[0, length)`` in order.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from orchestrator.engine.request import (
    FinishReason,
    Outcome,
    Priority,
    Request,
    Sampling,
    TemplateArguments,
    check_extras,
)
from orchestrator.errors import InvalidArgument, TemplateError
from orchestrator.text.codec import Prompt
from orchestrator.text.encoder import common_length
from orchestrator.text.messages import normalised
from orchestrator.text.reasoning import ReasoningSplitter

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine

T = TypeVar("T")
Message = Mapping[str, object]
EventKind = Literal["tokens", "message", "reply"]


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """What was added at once, and the tokens ``[start, end)`` of the session that it holds.

    `role` is that of a message, None where the session is driven by tokens. A reply also has
    `finish_reason` and `cached_tokens`, the length of the prefix it was started from. Between
    messages its span begins where the input ends: the generation prompt belongs to it.
    """

    kind: EventKind
    start: int
    end: int
    role: str | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Spans:
    """All tokens of a session and the events they belong to."""

    tokens: tuple[int, ...]
    events: tuple[SessionEvent, ...]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What is the same for every reply of a session; None leaves `sampling` to the model."""

    tools: Sequence[Message] | None = None
    template_arguments: TemplateArguments | None = None
    sampling: Sampling | None = None
    priority: Priority = "default"
    client: str | None = None

    def check(self) -> None:
        """Raise `InvalidArgument` for what no request may have."""
        check_extras(self.tools, self.template_arguments)
        sampling = Sampling() if self.sampling is None else self.sampling
        Request((0,), sampling=sampling, priority=self.priority, client=self.client)


@dataclass(frozen=True, slots=True)
class TokenScript:
    """A session driven by tokens."""

    tokens: tuple[int, ...] = ()
    events: tuple[SessionEvent, ...] = ()

    def __len__(self) -> int:
        return len(self.events)

    def with_tokens(self, tokens: tuple[int, ...]) -> TokenScript:
        start = len(self.tokens)
        event = SessionEvent("tokens", start, start + len(tokens))
        return TokenScript(self.tokens + tokens, (*self.events, event))

    def with_reply(self, outcome: Outcome, *, opens_reasoning: bool) -> TokenScript:
        """It with what was generated, to the token; the end token is no part of that."""
        start = len(self.tokens)
        event = _reply_event(start, start + len(outcome.tokens), outcome)
        return TokenScript(self.tokens + outcome.tokens, (*self.events, event))

    def first(self, n_events: int) -> TokenScript:
        events = self.events[:n_events]
        return TokenScript(self.tokens[: events[-1].end if events else 0], events)

    def encoded(self, engine: Engine, settings: SessionSettings) -> TokenScript:
        return self

    def prompt(self) -> Prompt:
        given = (event.start for event in self.events if event.kind == "tokens" and event.start)
        return Prompt(self.tokens, turn=0, floor=0, text="", opener="", starts=tuple(given))

    def spans(self, engine: Engine, settings: SessionSettings) -> tuple[TokenScript, Spans]:
        return self, Spans(self.tokens, self.events)


@dataclass(frozen=True, slots=True)
class _Said:
    """One message; `outcome` is that of a reply which the session generated."""

    message: Message
    role: str
    outcome: Outcome | None = None

    def event(self, start: int, end: int) -> SessionEvent:
        if self.outcome is None:
            return SessionEvent("message", start, end, self.role)
        return replace(_reply_event(start, end, self.outcome), role=self.role)


@dataclass(frozen=True, slots=True)
class MessageScript:
    """A session driven by messages.

    `latest` is the encoding of the first `n_encoded` of them, in which the first messages end at
    `ends`. If the next one is a reply, it was generated from there.
    """

    said: tuple[_Said, ...] = ()
    latest: Prompt | None = None
    n_encoded: int = 0
    ends: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.said)

    def messages(self) -> list[Message]:
        return [each.message for each in self.said]

    def with_messages(self, messages: Sequence[Message]) -> MessageScript:
        """It with messages more. Raises `InvalidArgument` for what is none."""
        if not messages:
            return self
        told = owned("a message", list(messages))
        normalised([*self.messages(), *told])  # complains, naming the place in the whole chat
        roles = [normalised([each])[0]["role"] for each in told]
        said = (_Said(each, role) for each, role in zip(told, roles, strict=True))
        return replace(self, said=(*self.said, *said))

    def with_reply(self, outcome: Outcome, *, opens_reasoning: bool) -> MessageScript:
        message = _assistant(outcome.text, opens_reasoning=opens_reasoning)
        return replace(self, said=(*self.said, _Said(message, "assistant", outcome)))

    def first(self, n_events: int) -> MessageScript:
        return MessageScript(self.said[:n_events])

    def encoded(self, engine: Engine, settings: SessionSettings) -> MessageScript:
        """It with all its messages rendered. Raises `TemplateError` and `EngineClosed`."""
        if self.latest is not None and self.n_encoded == len(self.said):
            return self
        prompt = engine.encode(
            self.messages(),
            tools=settings.tools,
            template_arguments=settings.template_arguments,
        )
        same = 0 if self.latest is None else common_length(self.latest.tokens, prompt.tokens)
        ends = tuple(itertools.takewhile(lambda end: end < same, self.ends))
        return MessageScript(self.said, prompt, len(self.said), ends)

    def prompt(self) -> Prompt:
        assert self.latest is not None
        return self.latest

    def spans(self, engine: Engine, settings: SessionSettings) -> tuple[MessageScript, Spans]:
        """Return it with its spans known, and them. What cannot be rendered yet holds no token."""
        told = self
        if not self._is_just_replied:
            with suppress(TemplateError, InvalidArgument):
                told = self.encoded(engine, settings)
        prompt = told.latest
        if prompt is None:
            return told, Spans((), tuple(each.event(0, 0) for each in told.said))
        ends = engine.message_ends(
            told.messages()[: told.n_encoded],
            prompt,
            tools=settings.tools,
            template_arguments=settings.template_arguments,
            known=told.ends,
        )
        told = replace(told, ends=ends)
        return told, told._spans(prompt)

    @property
    def _is_just_replied(self) -> bool:
        return self.n_encoded == len(self.said) - 1 and self.said[-1].outcome is not None

    def _spans(self, prompt: Prompt) -> Spans:
        ends = [0, *self.ends]
        tokens = prompt.tokens[: ends[-1]]
        if len(self.said) > self.n_encoded and (reply := self.said[self.n_encoded].outcome):
            tokens = prompt.tokens + reply.tokens
        ends += [len(tokens)] * (len(self.said) - self.n_encoded)
        spans = itertools.pairwise(ends)
        events = (each.event(*span) for each, span in zip(self.said, spans, strict=True))
        return Spans(tokens, tuple(events))


def _reply_event(start: int, end: int, outcome: Outcome) -> SessionEvent:
    return SessionEvent(
        kind="reply",
        start=start,
        end=end,
        finish_reason=outcome.finish_reason,
        cached_tokens=outcome.usage.cached_tokens,
    )


def _assistant(text: str, *, opens_reasoning: bool) -> Message:
    """The message of a reply; white space between its reasoning and its answer belongs to none."""
    splitter = ReasoningSplitter(inside=opens_reasoning)
    sides = {"reasoning": "", "content": ""}
    for side, piece in (*splitter.feed(text), *splitter.finish()):
        sides[side] += piece
    if not sides["reasoning"]:
        return {"role": "assistant", "content": sides["content"]}
    return {
        "role": "assistant",
        "reasoning_content": sides["reasoning"].strip(),
        "content": sides["content"].lstrip(),
    }


def owned(what: str, value: T) -> T:
    """A copy that the caller cannot change afterwards."""
    try:
        return copy.deepcopy(value)
    except (RecursionError, TypeError) as error:
        raise InvalidArgument(f"{what} is not made of plain values: {error}") from error


Script = TokenScript | MessageScript
