"""One running request: how far it is, what it has said, and how long it took.

Progress is counters, not states: a lane prefills while it holds less than its prompt, then
decodes one token per step. It touches no runtime; the core evaluates and reports back.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.engine.request import (
    Event,
    FinishReason,
    Outcome,
    Prefilling,
    Request,
    Text,
    Timings,
    Usage,
)
from orchestrator.errors import OrchestratorError
from orchestrator.pool.checkpoint import Stop
from orchestrator.pool.pool import Admission
from orchestrator.runtime.protocol import Chunk, Sampler
from orchestrator.text.detokenizer import Detokenizer
from orchestrator.text.stops import StopStrings
from orchestrator.text.tokenizer import Tokenizer

Listener = Callable[[Event | OrchestratorError], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted request: who listens, when it came, and whether it is still wanted.

    Setting `cancelled`, from any thread, ends the request before its next token or chunk.
    """

    request: Request
    listener: Listener
    submitted: float
    cancelled: bool = False


@dataclass(slots=True)
class _Watch:
    """Seconds on the engine's clock: `first` for the first token, `shown` for the first text."""

    admitted: float
    first: float | None = None
    shown: float | None = None
    prefill: float = 0.0


@dataclass(slots=True)
class _Reply:
    """What the model has said: ids sampled, text shown, and text held back."""

    detokenizer: Detokenizer
    stops: StopStrings
    tokens: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    stopped: bool = False

    def add(self, token: int) -> str:
        """Take one token; return the text that may be shown now."""
        self.tokens.append(token)
        return self._show(self.detokenizer.feed(token))

    def close(self) -> str:
        """Return the text still held back, once no more tokens come."""
        if self.stopped:
            return ""
        shown = self._show(self.detokenizer.finish())
        rest = "" if self.stopped else self.stops.finish()
        self.shown.append(rest)
        return shown + rest

    def _show(self, text: str) -> str:
        emit, self.stopped = self.stops.feed(text)
        self.shown.append(emit)
        return emit


class Lane:
    """A request in a sequence. `fed` is every token evaluated into it or shared from its seed."""

    def __init__(
        self,
        ticket: Ticket,
        admission: Admission,
        sampler: Sampler,
        tokenizer: Tokenizer,
        n_context: int,
        now: float,
    ) -> None:
        request = ticket.request
        self.ticket = ticket
        self.admission = admission
        self.sampler = sampler
        self.cached = admission.seed.length if admission.seed else 0
        self.prefilled = 0
        self._prompt = array("i", request.tokens)
        self.fed = self._prompt[: self.cached]
        self._n_context = n_context
        self._stops = list(admission.stops)
        self._reply = _Reply(Detokenizer(tokenizer), StopStrings(request.stop))
        self._tokenizer = tokenizer
        self._watch = _Watch(now)

    @property
    def sequence(self) -> int:
        """The sequence it runs in."""
        return self.admission.sequence

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens are still to be evaluated."""
        return len(self.fed) < len(self._prompt)

    def next_chunk(self, n_most: int) -> Chunk:
        """Return what to evaluate next, at most `n_most` tokens and never across a stop."""
        start = len(self.fed)
        if not self.is_prefilling:
            return Chunk(self.sequence, start, (self._reply.tokens[-1],), wants_logits=True)
        end = min(start + n_most, len(self._prompt))
        if self._stops:
            end = min(end, self._stops[0].length)
        is_last = end == len(self._prompt)
        return Chunk(self.sequence, start, tuple(self._prompt[start:end]), wants_logits=is_last)

    def took(self, chunk: Chunk, seconds: float) -> Stop | None:
        """Note that a chunk was evaluated; return the stop it ended at, if there is one."""
        was_prefilling = self.is_prefilling
        self.fed.extend(chunk.tokens)
        if not was_prefilling:
            return None
        self.prefilled += len(chunk.tokens)
        self._watch.prefill += seconds
        self._tell(Prefilling(len(self.fed), len(self._prompt), self.cached))
        if self._stops and self._stops[0].length == len(self.fed):
            return self._stops.pop(0)
        return None

    def say(self, token: int, now: float) -> FinishReason | None:
        """Take a sampled token; return why the reply ends here, None while it goes on."""
        if self._watch.first is None:
            self._watch.first = now
        if self._tokenizer.is_end(token):
            return "stop"
        self._show(self._reply.add(token), now)
        if self._reply.stopped:
            return "stop"
        most = self.ticket.request.max_tokens
        if len(self._reply.tokens) == most or len(self.fed) == self._n_context:
            return "length"
        return None

    def finish(self, reason: FinishReason, now: float) -> Outcome:
        """Close the reply: tell the text held back and return the outcome."""
        self._show(self._reply.close(), now)
        if reason == "length" and self._reply.stopped:  # the held text ended in a stop string
            reason = "stop"
        return Outcome(
            text="".join(self._reply.shown),
            tokens=tuple(self._reply.tokens),
            finish_reason=reason,
            usage=self._usage(),
            timings=self._timings(now),
        )

    def _show(self, text: str, now: float) -> None:
        if text:
            self._watch.shown = now if self._watch.shown is None else self._watch.shown
            self._tell(Text(text))

    def _tell(self, event: Event) -> None:
        self.ticket.listener(event)

    def _usage(self) -> Usage:
        seed = self.admission.seed
        return Usage(
            prompt_tokens=len(self._prompt),
            completion_tokens=len(self._reply.tokens),
            cached_tokens=self.cached,
            prefilled_tokens=self.prefilled,
            seeded_from=seed.checkpoint.kind if seed else None,
        )

    def _timings(self, now: float) -> Timings:
        first, shown, begun = self._watch.first, self._watch.shown, self.ticket.submitted
        return Timings(
            queued=self._watch.admitted - begun,
            time_to_first_token=None if shown is None else shown - begun,
            prefill=self._watch.prefill,
            decode=0.0 if first is None else now - first,
            total=now - begun,
        )
