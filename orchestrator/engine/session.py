"""How does a caller hold a sequence of tokens that grows, and ask for what comes next?

A session is driven by tokens, which are fed exactly as they were given and generated, or by
messages, which the chat template turns into tokens anew for every reply; what is added first
decides. What it consists of is a value (`script`); here it gets a name, a lock and an engine:

    append, append_message ─▶ script ─▶ generate ─▶ request ─▶ … ─▶ reply ─▶ script
                                └─▶ fork: another session with the same script

Invariants: a call that is refused changes nothing; one reply at a time; the engine's thread never
waits for a session: how a reply ended is put aside there, and taken in by the next call here.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, cast

from orchestrator.engine.request import (
    Finished,
    Priority,
    Request,
    Sampling,
    check_marks,
    inside,
)
from orchestrator.engine.script import (
    Message,
    MessageScript,
    Script,
    SessionEvent,
    SessionSettings,
    Spans,
    TokenScript,
    owned,
)
from orchestrator.engine.stream import Last, Stream
from orchestrator.errors import (
    EngineClosed,
    InvalidArgument,
    PromptTooLong,
    SessionBusy,
    SessionClosed,
)
from orchestrator.text.reasoning import leaves_open

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class SessionView:
    """What a session holds now. `length` in tokens; `is_generating`: a reply is on its way.

    `warm` is how many of them a reply would be started from now.
    """

    name: str
    length: int
    events: tuple[SessionEvent, ...]
    is_generating: bool
    warm: int


@dataclass(slots=True, eq=False)
class _Running:
    """A reply on its way. `end` is called in any thread, by a finalizer too, and never waits."""

    cancel: Callable[[], object]
    opens_reasoning: bool
    last: Last | None = None

    def end(self, last: Last) -> None:
        self.last = last


class Session:
    """A growing sequence of tokens. Made by `Engine.create_session`; safe in any thread.

    Closing it, or leaving its `with` block, lets the engine give up what it kept for it.
    """

    @classmethod
    def create(
        cls,
        engine: Engine,
        settings: SessionSettings,
        messages: Sequence[Message] = (),
        name: str | None = None,
    ) -> Session:
        """Return a new one; what it is driven by is open where there are no messages and tools."""
        settings.check()
        settings = replace(
            settings,
            tools=owned("tools", settings.tools),
            template_arguments=owned("template_arguments", settings.template_arguments),
        )
        told = bool(messages or settings.tools or settings.template_arguments)
        return cls(
            engine, settings, MessageScript().with_messages(messages) if told else None, name
        )

    def __init__(
        self,
        engine: Engine,
        settings: SessionSettings,
        script: Script | None = None,
        name: str | None = None,
    ) -> None:
        if not (name is None or isinstance(name, str)):
            raise InvalidArgument(f"the name is {name!r}; give a text")
        settings.check()
        self.name = f"session {next(_numbers)}" if name is None else name
        self._engine = engine
        self._settings = settings
        self._script = script
        self._conversation = f"session:{uuid.uuid4().hex}"  # meets no name that a caller chose
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._is_closed = False

    # ---- adding -------------------------------------------------------------------------------

    def append(self, tokens: Sequence[int] | str, *, special: bool = True) -> None:
        """Add token ids, or a text encoded on its own; nothing is evaluated yet.

        `special` False leaves special tokens in a text as plain text. Raises `InvalidArgument`,
        also in a session driven by messages, and `PromptTooLong`.
        """
        with self._lock:
            script = self._idle()
            if isinstance(script, MessageScript):
                raise InvalidArgument(
                    f'"{self.name}" is driven by messages; append a message, or create a session '
                    "without a system text, messages and tools"
                )
            held = script or TokenScript()
            added = self._ids(tokens, special=special, continues=bool(held.tokens))
            self._check_length(len(held.tokens) + len(added))
            self._script = held.with_tokens(added)

    def append_message(self, message: Message) -> None:
        """Add a chat message; nothing is rendered or evaluated yet.

        Whether the template takes the chat shows when a reply is asked for. Raises
        `InvalidArgument`, also in a session driven by tokens.
        """
        with self._lock:
            script = self._idle()
            if isinstance(script, TokenScript):
                raise InvalidArgument(
                    f'"{self.name}" is driven by tokens; append tokens or text, or create a '
                    "session for messages"
                )
            self._script = (script or MessageScript()).with_messages([message])

    def _ids(
        self, tokens: Sequence[int] | str, *, special: bool, continues: bool
    ) -> tuple[int, ...]:
        if isinstance(tokens, str):
            tokens = self._engine.tokenize(tokens, special=special, continues=continues)
        ids = Request(cast("tuple[int, ...]", tokens)).tokens  # complains about what are no ids
        n_vocab = self._engine.model.n_vocab
        if min(ids) < 0 or max(ids) >= n_vocab:
            raise InvalidArgument(f"token ids must lie in 0 to {n_vocab - 1}")
        return ids

    def _check_length(self, length: int) -> None:
        if length > self._engine.model.n_context:
            raise PromptTooLong(length, self._engine.model.n_context)

    # ---- asking -------------------------------------------------------------------------------

    def generate(
        self,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        marks: Sequence[int] = (),
        priority: Priority | None = None,
        deadline: float | None = None,
    ) -> Stream:
        """Return the stream of what comes next; once it has ended, that is part of the session.

        None takes what the session was created with. `marks`: after so many events, as `fork`
        counts them, a state is kept whatever it costs, for branches that will begin there.

        A reply that was cancelled, or reached its deadline, is kept as far as it was generated,
        and not at all if that is no token. After an error the session is as before. Raises
        `RequestError`; nothing was queued then.
        """
        with self._lock:
            script = self._idle()
            if not script:
                raise InvalidArgument(f'"{self.name}" is empty; append something first')
            script = script.encoded(self._engine, self._settings)
            prompt, settings = script.prompt(), self._settings
            marked = check_marks(marks, len(script))
            events = script.spans(self._engine, settings)[1].events if marked else ()
            chosen = settings.sampling if sampling is None else sampling
            request = Request(
                tokens=prompt.tokens,
                turn=prompt.turn,
                base=prompt.base,
                ends=prompt.ends,
                starts=prompt.starts,
                marks=inside((events[mark - 1].end for mark in marked), len(prompt.tokens)),
                sampling=self._engine.default_sampling if chosen is None else chosen,
                max_tokens=max_tokens,
                stop=stop,
                conversation=self._conversation,
                priority=settings.priority if priority is None else priority,
                client=settings.client,
                deadline=deadline,
            )
            opens_reasoning = leaves_open(prompt.opener)
            stream = self._engine.generate(request, prompt=prompt, opens_reasoning=opens_reasoning)
            self._script = script
            self._running = _Running(stream.canceller, opens_reasoning)
            stream.on_end(self._running.end)
            return stream

    # ---- the session itself -------------------------------------------------------------------

    def fork(self, *, events: int | None = None, name: str | None = None) -> Session:
        """Return a branch that shares what was said, without evaluating anything.

        What the engine keeps of that now it keeps for the branch as well, also when the original
        goes on first. `events`: only the first so many, to take back what came
        after; a reply on its way is not among them. Raises `InvalidArgument`, `EngineClosed`.
        """
        with self._lock:
            script = self._settled()
        held = 0 if script is None else len(script)
        if events is not None:
            if not (isinstance(events, int) and 0 <= events <= held):
                raise InvalidArgument(f"events is {events!r}, must lie in 0 to {held}")
            script = None if script is None else script.first(events)
        branch = Session(self._engine, self._settings, script, name)
        self._engine.branch(self._conversation, branch._conversation)
        return branch

    def inspect(self) -> SessionView:
        """Return what the session holds now.

        Messages that the template does not take yet hold no tokens. The engine is asked between
        two of its steps. Raises `EngineClosed`.
        """
        with self._lock:
            spans, script = Spans((), ()), self._settled()
            if script is not None:
                self._script, spans = script.spans(self._engine, self._settings)
            is_generating = self._running is not None
        return SessionView(
            name=self.name,
            length=len(spans.tokens),
            events=spans.events,
            is_generating=is_generating,
            warm=self._engine.warm(spans.tokens),
        )

    def close(self) -> None:
        """Cancel what runs and let the engine forget what it kept; twice is harmless."""
        with self._lock:
            running, was_closed = self._running, self._is_closed
            self._is_closed = True
        if was_closed:
            return
        if running is not None:
            running.cancel()
        with suppress(EngineClosed):
            self._engine.forget(self._conversation)  # ends first what was cancelled

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _settled(self) -> Script | None:
        """What the session consists of, a reply that has ended included; to be called locked."""
        if self._is_closed:
            raise SessionClosed(f'"{self.name}" is closed; create another session')
        running = self._running
        if running is not None and running.last is not None:
            self._running = None
            if self._script is not None and isinstance(running.last, Finished):
                outcome, opens = running.last.outcome, running.opens_reasoning
                if outcome.tokens or outcome.finish_reason == "stop":
                    self._script = self._script.with_reply(outcome, opens_reasoning=opens)
        return self._script

    def _idle(self) -> Script | None:
        """As `_settled`; raises `SessionBusy` while a reply is on its way."""
        script = self._settled()
        if self._running is not None:
            raise SessionBusy(
                f'"{self.name}" is generating a reply; read its stream to the end, or cancel it '
                "and wait for its outcome"
            )
        return script
