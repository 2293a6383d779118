"""The engine as a user meets it: open a model, chat, look at the figures, close.

    with Engine.open("demo") as engine:
        for event in engine.chat([{"role": "user", "content": "Hello"}]):
            ...

Every method may be called from any thread. Text becomes tokens in the caller's thread; the rest
happens on the engine's own (`worker`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from orchestrator.config import ModelSpec
from orchestrator.engine.core import Core, Options
from orchestrator.engine.occupancy import EngineStats
from orchestrator.engine.opening import Choices, Opened, Progress, open_model
from orchestrator.engine.records import Record
from orchestrator.engine.request import (
    Finished,
    Priority,
    Request,
    Sampling,
    TemplateArguments,
    check_extras,
    check_marks,
    check_name,
    inside,
    token_ids,
)
from orchestrator.engine.script import SessionSettings
from orchestrator.engine.session import Session
from orchestrator.engine.stream import Heard, Stream
from orchestrator.engine.ticket import Listener
from orchestrator.engine.worker import Worker
from orchestrator.errors import EngineClosed, InvalidArgument
from orchestrator.pool.index import pack
from orchestrator.runtime.protocol import MemoryKind, Runtime
from orchestrator.text.codec import ChatCodec, Prompt
from orchestrator.text.reasoning import leaves_open
from orchestrator.text.template import ChatTemplate

Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded. `n_context` and `n_cells` in tokens; bytes per state and per cell."""

    name: str
    architecture: str
    memory: MemoryKind
    n_context: int
    n_cells: int
    n_sequences: int
    n_vocab: int
    state_bytes: int
    cell_bytes: int
    exact: bool


class Engine:
    """One model and its pool, run by a thread of its own. Made by `open` or `over`."""

    def __init__(self, worker: Worker, opened: Callable[[], Opened]) -> None:
        self._worker = worker
        self._core = worker.start()
        self._encoding = threading.Lock()  # held while the vocabulary is read, and to free it
        self._closing = weakref.finalize(self, worker.close)
        ready = opened()
        self.model = _info(ready)
        self.notes = ready.notes
        self._sampling = ready.sampling
        self._codec = ChatCodec(ready.runtime.tokenizer, ready.template)

    @classmethod
    def open(
        cls,
        model: str | Path | ModelSpec = "demo",
        *,
        ctx: int | None = None,
        threads: int | None = None,
        gpu_layers: int | None = None,
        chat_template: Path | None = None,
        checkpoints: int | None = None,
        history: int | None = None,
        lanes: int | None = None,
        exact: bool = False,
        resident_cells: int | None = None,
        exported_bytes: int | None = None,
        exported_tokens: int | None = None,
        queue: int | None = None,
        on_progress: Progress | None = None,
    ) -> Engine:
        """Open a model by its name in `models.toml`, by the path of its GGUF, or by its spec.

        `ctx` tokens per request and `lanes` requests at once (1); the pool holds both multiplied.
        `queue`: how many more may wait (256). `gpu_layers` None puts all there where the library
        can. `exact`: bitwise the same replies, warm or cold, alone or among others, at a price.

        `checkpoints`: how many states stay in the context at most; None takes what memory allows,
        0 keeps and reuses nothing. `resident_cells`: how many of its cells they may fill, lanes
        included. `exported_bytes` and `exported_tokens`: what host memory holds beyond that (an
        eighth of what is free). `history`: how many may be states that a chat has gone past, for
        going back (undo, edit); None is a half. `on_progress` gets lines for a person.

        Raises `ConfigError` or `ModelFileError` for what is wrong with the name or the file,
        `BackendError` when llama.cpp cannot open it.
        """
        choices = Choices(
            ctx=ctx,
            threads=threads,
            gpu_layers=gpu_layers,
            chat_template=chat_template,
            checkpoints=checkpoints,
            history=history,
            lanes=lanes,
            exact=exact,
            resident_cells=resident_cells,
            exported_bytes=exported_bytes,
            exported_tokens=exported_tokens,
            queue=queue,
        )
        return cls._start(lambda: open_model(model, choices, on_progress or (lambda line: None)))

    @classmethod
    def over(
        cls,
        runtime: Callable[[], Runtime],
        *,
        template: ChatTemplate | None = None,
        options: Options | None = None,
        sampling: Sampling | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Engine:
        """Run over a runtime of your own, for example a simulated one; it is opened and closed
        on the engine's thread.
        """
        return cls._start(
            lambda: Opened(
                runtime=runtime(),
                template=template or ChatTemplate.fallback(),
                options=options or Options(),
                sampling=sampling or Sampling(),
            ),
            clock,
        )

    @classmethod
    def _start(
        cls, open_: Callable[[], Opened], clock: Callable[[], float] = time.monotonic
    ) -> Engine:
        held: list[Opened] = []

        def open_core() -> Core:
            held.append(open_())
            return Core(held[0].runtime, clock, held[0].options)

        def close() -> None:
            for opened in held:
                opened.runtime.close()

        return cls(Worker(open_core, close), lambda: held[0])

    # ---- asking -------------------------------------------------------------------------------

    def chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Messages | None = None,
        template_arguments: TemplateArguments | None = None,
        conversation: str | None = None,
        marks: Sequence[int] = (),
        use_cache: bool = True,
        one_off: bool = False,
        priority: Priority = "default",
        client: str | None = None,
        deadline: float | None = None,
    ) -> Stream:
        """Return the stream of the next assistant message.

        `conversation` names the chat this is a turn of, where the prefix alone would not tell;
        `one_off` is for a side request (a title, a tag) that nothing will follow: it keeps
        nothing. `marks`: after so many messages a state is kept whatever it costs, because other
        chats will go on from exactly there; (1,) marks the end of the first. `priority`, `client`
        and `deadline` as in `Request`.
        Raises `RequestError` for what is wrong with the request; nothing was queued then.
        """
        prompt = self.encode(messages, tools=tools, template_arguments=template_arguments)
        ends = prompt.ends
        if check_marks(marks, len(messages)) and not ends:
            ends = self.message_ends(
                messages, prompt, tools=tools, template_arguments=template_arguments
            )
        request = Request(
            tokens=prompt.tokens,
            turn=prompt.turn,
            base=prompt.base,
            ends=ends,
            starts=prompt.starts,
            marks=inside((ends[mark - 1] for mark in marks), len(prompt.tokens)),
            sampling=self._sampling if sampling is None else sampling,
            max_tokens=max_tokens,
            stop=stop,
            conversation=conversation,
            use_cache=use_cache,
            one_off=one_off,
            priority=priority,
            client=client,
            deadline=deadline,
        )
        return self.generate(request, prompt=prompt, opens_reasoning=leaves_open(prompt.opener))

    def complete(
        self,
        prompt: str,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        conversation: str | None = None,
        marks: Sequence[int] = (),
        use_cache: bool = True,
        one_off: bool = False,
        priority: Priority = "default",
        client: str | None = None,
        deadline: float | None = None,
    ) -> Stream:
        """Return the stream of a continuation of raw text, without a template; see `chat`.

        `marks`: a state is kept after so many characters of the text.
        """
        if not isinstance(prompt, str):
            raise InvalidArgument(f"the prompt is {type(prompt).__name__}; give a text")
        with self._open_vocabulary():
            encoded = self._codec.complete(prompt)
            places = [self._codec.before(encoded, n) for n in check_marks(marks, len(prompt))]
        request = Request(
            tokens=encoded.tokens,
            marks=inside(places, len(encoded.tokens)),
            sampling=self._sampling if sampling is None else sampling,
            max_tokens=max_tokens,
            stop=stop,
            conversation=conversation,
            use_cache=use_cache,
            one_off=one_off,
            priority=priority,
            client=client,
            deadline=deadline,
        )
        return self.generate(request, prompt=encoded)

    def encode(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        template_arguments: TemplateArguments | None = None,
    ) -> Prompt:
        """Return the prompt that `chat` would send, as tokens and text."""
        check_extras(tools, template_arguments)
        with self._open_vocabulary():
            return self._codec.encode(messages, tools=tools, arguments=template_arguments)

    def tokenize(
        self, text: str, *, special: bool = True, continues: bool = False
    ) -> tuple[int, ...]:
        """Return the tokens of raw text; where it `continues` others, without a BOS before it.

        `special` False leaves special tokens in it as plain text. Raises `InvalidArgument` where
        there is none.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"the text is {type(text).__name__}; give a text")
        with self._open_vocabulary():
            return self._codec.raw(text, special=special, continues=continues)

    def message_ends(
        self,
        messages: Messages,
        prompt: Prompt,
        *,
        tools: Messages | None = None,
        template_arguments: TemplateArguments | None = None,
        known: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Return where in `prompt`, which `encode` made of `messages`, each of them ends.

        `known` ends, those of the first messages, are not sought again. See `ChatCodec.ends`.
        """
        with self._open_vocabulary():
            return self._codec.ends(
                messages, prompt, tools=tools, arguments=template_arguments, known=known
            )

    @contextmanager
    def _open_vocabulary(self) -> Iterator[None]:
        with self._encoding:
            if self._worker.is_closed:
                raise EngineClosed("the engine is closed; open a new one")
            yield

    def generate(
        self, request: Request, *, prompt: Prompt | None = None, opens_reasoning: bool = False
    ) -> Stream:
        """Return the stream of a request that is already in tokens.

        `prompt` is what `encode` returned, where its tokens come from there: then the reply is
        known again when it comes back as text, and not encoded otherwise than it was sampled.
        """
        if not isinstance(request, Request):
            raise InvalidArgument(f"the request is {type(request).__name__}; give a Request")
        stream = Stream(opens_reasoning)
        listener = stream.listener
        if prompt is not None:
            _check_prompt(prompt, request)
            if not request.one_off:  # of which nothing comes back
                listener = _hearing(self._codec, prompt, listener)
        ticket = self._core.ticket(request, listener)
        stream.on_cancel(ticket.cancel)
        self._worker.post(lambda core: core.enqueue(ticket))
        return stream

    def forget(self, conversation: str) -> None:
        """Give up every checkpoint that a conversation alone kept or used."""
        check_name("conversation", conversation)
        self._worker.call(lambda core: core.forget(conversation))

    def branch(self, conversation: str, other: str) -> None:
        """Let another conversation go on from where one stands, whatever that one does next."""
        self._worker.post(lambda core: core.branch(conversation, other))

    def unknown_arguments(self, arguments: TemplateArguments) -> list[str]:
        """Return the names in `arguments` that the chat template never reads."""
        check_extras(None, arguments)
        return [name for name in arguments or () if name not in self._codec.template.variables]

    @property
    def default_sampling(self) -> Sampling:
        """How a request samples that says nothing about it."""
        return self._sampling

    # ---- sessions -----------------------------------------------------------------------------

    def create_session(
        self,
        *,
        system: str | None = None,
        messages: Messages = (),
        tools: Messages | None = None,
        template_arguments: TemplateArguments | None = None,
        sampling: Sampling | None = None,
        priority: Priority = "default",
        client: str | None = None,
        name: str | None = None,
    ) -> Session:
        """Return a growing sequence of tokens, driven by messages or by tokens alone (`session`).

        With a `system` text, `messages`, `tools` or `template_arguments` it is driven by messages;
        else what is appended first decides. `name` is for people. Raises `InvalidArgument`.
        """
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise InvalidArgument(f"messages are {type(messages).__name__}; give a list of them")
        head = [] if system is None else [{"role": "system", "content": system}]
        settings = SessionSettings(tools, template_arguments, sampling, priority, client)
        return Session.create(self, settings, [*head, *messages], name)

    def warm(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` a request would be started from that goes on from them."""
        ids = token_ids(tokens)
        if ids and not 0 <= min(ids) <= max(ids) < self.model.n_vocab:
            raise InvalidArgument(f"token ids must lie in 0 to {self.model.n_vocab - 1}")
        path = pack((*ids, 0))
        return self._worker.call(lambda core: core.warm(path))

    # ---- the engine itself --------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return what the pool holds now and totals since opening."""
        return self._worker.call(
            lambda core: EngineStats(core.occupancy(), core.counters.snapshot())
        )

    def requests(self) -> tuple[Record, ...]:
        """Return what the last requests took, and why, the latest at the end."""
        return self._worker.call(lambda core: core.requests())

    def report_to(self, sink: Callable[[Record], object]) -> None:
        """Hand what each request took to `sink` from now on, before its reader knows its end.

        It is called on the engine's thread: it must be quick, wait for nothing and not raise.
        """
        self._worker.post(lambda core: core.report_to(sink))

    def close(self) -> None:
        """End what runs with `EngineClosed` and free the model; closing twice is harmless."""
        with self._encoding:
            self._closing()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_prompt(prompt: object, request: Request) -> None:
    if not isinstance(prompt, Prompt):
        raise InvalidArgument(f"the prompt is {type(prompt).__name__}; give what `encode` returned")
    if prompt.tokens != request.tokens:
        raise InvalidArgument(
            f"the request has {len(request.tokens):,} tokens, its prompt {len(prompt.tokens):,}, "
            "and they are not the same; give the prompt they were taken from, or none"
        )


def _hearing(codec: ChatCodec, prompt: Prompt, listener: Listener) -> Listener:
    """A listener that has the codec hear of the reply before anybody else does."""

    def listen(event: Heard) -> None:
        if isinstance(event, Finished):
            codec.hear(prompt, event.outcome.tokens)
        listener(event)

    return listen


def _info(opened: Opened) -> ModelInfo:
    runtime = opened.runtime
    limits = runtime.limits
    return ModelInfo(
        name=opened.name or runtime.model.name,
        architecture=runtime.model.architecture,
        memory=runtime.model.memory,
        n_context=limits.n_context,
        n_cells=limits.n_cells,
        n_sequences=limits.n_sequences,
        n_vocab=runtime.model.n_vocab,
        state_bytes=limits.state_bytes,
        cell_bytes=limits.cell_bytes,
        exact=opened.exact,
    )
