"""One running request: how far it is, what it has said, and how long it took.

Progress is counters, not states. `known` are the prompt's tokens and those sampled so far, `fed`
of them stand in the sequence; a lane reads while more than the last sampled token is missing, and
decodes one token per step from then on. It touches no runtime; the core evaluates and reports.

    known   p p p p p p p p │ r r r
    fed     ─────────────────────►      at most one short of `known` once the reply has begun

A lane that is preempted keeps all of this and gets another sequence later. If its state is gone
by then it reads its own reply again, and samples nothing twice.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from orchestrator.engine.request import (
    Event,
    FinishReason,
    Outcome,
    Prefilling,
    Text,
    Timings,
    TokenLogprob,
    Usage,
)
from orchestrator.engine.ticket import Ticket
from orchestrator.engine.why import Start
from orchestrator.pool.book import Seed
from orchestrator.pool.checkpoint import Checkpoint, Kind, Stop, Tier
from orchestrator.pool.index import common_length
from orchestrator.pool.losses import Loss
from orchestrator.pool.placement import serving
from orchestrator.pool.plans import Admission
from orchestrator.runtime.protocol import Chunk, Sampler
from orchestrator.text.detokenizer import Detokenizer
from orchestrator.text.stops import StopStrings
from orchestrator.text.tokenizer import Tokenizer

REPLY_OUTLOOK = 256
"""Cells that are counted on for a reply without `max_tokens` when others are admitted."""


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
    """A request in a sequence; see the module's head."""

    def __init__(
        self,
        ticket: Ticket,
        admission: Admission,
        sampler: Sampler,
        tokenizer: Tokenizer,
        n_context: int,
        now: float,
        reply_step: int = 0,
    ) -> None:
        request = ticket.request
        self.ticket = ticket
        self.sampler = sampler
        self.n_prompt = len(request.tokens)
        self.cached = self.prefilled = self.replayed = 0
        self.parked: Checkpoint | None = None  # its state, while it is preempted
        self.owed: Stop | None = None  # a state to keep before it goes on
        self.shared: dict[int, int] = {}  # number of a waiting ticket -> tokens in common
        self.start: Start | None = None  # what was known of its prompt when it got a lane
        self.loss: Loss | None = None  # what would have served it, and is gone
        self._seen = 0  # the most of `known` that ever stood in a sequence
        self._origin: tuple[Kind, Tier] | None = None  # what first spared it some of its prompt
        self._known = array("i")
        self._known.frombytes(ticket.path)
        self._n_context = n_context
        self._reply_step = reply_step  # tokens of the reply between two states, 0: none
        self._reply = _Reply(Detokenizer(tokenizer), StopStrings(request.stop))
        self._logprobs: list[TokenLogprob] = []
        self._tokenizer = tokenizer
        self._watch = _Watch(now)
        self.seat(admission)

    def seat(self, admission: Admission) -> None:
        """Go on in a sequence that is to hold what the admission's seed says, once `begin` is told.

        Stops that others had it keep are gone; they are planted again if they are still wanted.
        """
        self.admission = admission
        self._tier: Tier | None = admission.seed.checkpoint.tier if admission.seed else None
        self.fed = 0
        self.stops = list(admission.stops)
        self.is_ready = False

    @property
    def _start(self) -> int:
        """Where it stands, or will stand once its seed does."""
        seed = self.admission.seed
        return self.fed if self.is_ready else seed.length if seed else 0

    def begin(self) -> None:
        """Note that the seed stands in the sequence."""
        self.fed = self._start
        self.stops = [stop for stop in self.stops if stop.length > self.fed]
        if self.fed > self._seen:
            self.cached += self.fed - self._seen
            self._seen = self.fed
            self._note_origin()
        self.is_ready = True

    def _note_origin(self) -> None:
        seed = self.admission.seed
        if self._origin is None and seed is not None and self._tier is not None:
            self._origin = seed.checkpoint.kind, self._tier

    # ---- how far it is ------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """The sequence it runs in."""
        return self.admission.sequence

    @property
    def path(self) -> bytes:
        """The packed tokens that stand in its sequence."""
        return self._known[: self.fed].tobytes()

    @property
    def known(self) -> bytes:
        """The packed tokens of its prompt and its reply so far."""
        return self._known.tobytes()

    @property
    def n_evaluated(self) -> int:
        """The most of `known` that ever stood in a sequence."""
        return self._seen

    @property
    def evaluated(self) -> bytes:
        """The packed tokens that ever stood in a sequence."""
        return self._known[: self._seen].tobytes()

    @property
    def own(self) -> Seed | None:
        """Its own state while it is preempted, as far as it had come itself."""
        if self.parked is None:
            return None
        return Seed(self.parked, min(common_length(self.parked.path, self.known), self._seen))

    @property
    def remaining(self) -> int:
        """Tokens to evaluate before the next one is sampled."""
        return len(self._known) - self.fed

    @property
    def may_advance(self) -> bool:
        """Whether its next chunk may be evaluated now."""
        return self.is_ready and self.owed is None

    @property
    def is_reading(self) -> bool:
        """Whether more is to be evaluated than the token sampled last."""
        return self.fed < self.n_prompt or self.remaining > 1

    @property
    def is_at_reply_point(self) -> bool:
        """Whether its reply stands where a state inside it is due."""
        said = self.fed - self.n_prompt
        return said > 0 and self._reply_step > 0 and said % self._reply_step == 0

    @property
    def outlook(self) -> int:
        """Cells it will probably still take: what it reads, and a reply of usual length."""
        most = self.ticket.request.max_tokens
        reply = REPLY_OUTLOOK if most is None else min(most, REPLY_OUTLOOK)
        room = self._n_context - len(self._known)
        return self.remaining + max(0, min(room, reply - len(self._reply.tokens)))

    def next_chunk(self, n_most: int) -> Chunk:
        """Return what to evaluate next, at most `n_most` tokens and never across a stop."""
        end = min(self.fed + n_most, len(self._known))
        end = min(end, next((s.length for s in self.stops if not s.is_soft), end))
        tokens = tuple(self._known[self.fed : end])
        return Chunk(self.sequence, self.fed, tokens, wants_logits=end == len(self._known))

    def plant(self, length: int) -> Stop | None:
        """Have a state kept at `length` for others, or return the stop that serves them anyway.

        None when the lane is past it.
        """
        stop = serving(self.stops, length)
        if stop is None and self._start < length <= len(self._known):
            stop = Stop(length, "shared")
            self.stops.append(stop)
            self.stops.sort(key=lambda stop: stop.length)
        return stop

    # ---- what happens to it -------------------------------------------------------------------

    def took(self, chunk: Chunk, seconds: float) -> Stop | None:
        """Note that a chunk was evaluated; return the stop it ended at, if there is one."""
        was_reading = self.is_reading
        self.fed += len(chunk.tokens)
        self._count(chunk)
        if not was_reading:
            return None
        self._watch.prefill += seconds
        if self.fed <= self.n_prompt:
            self._tell(Prefilling(self.fed, self.n_prompt, self.cached))
        return self._reached()

    def _reached(self) -> Stop | None:
        """Return the stop that was reached, of several the hard one."""
        reached = [stop for stop in self.stops if stop.length <= self.fed]
        del self.stops[: len(reached)]
        return min(reached, key=lambda stop: stop.is_soft, default=None)

    def _count(self, chunk: Chunk) -> None:
        """Tell prompt tokens read for the first time from what is read again."""
        self.replayed += max(0, min(chunk.end, self._seen) - chunk.start)
        self.prefilled += max(0, min(chunk.end, self.n_prompt) - max(chunk.start, self._seen))
        self._seen = max(self._seen, chunk.end)

    def say(self, token: int, now: float) -> FinishReason | None:
        """Take a sampled token; return why the reply ends here, None while it goes on."""
        if self._watch.first is None:
            self._watch.first = now
        if self._tokenizer.is_end(token):
            return "stop"
        self._known.append(token)
        if self.sampler.last_logprob is not None:
            self._logprobs.append(self.sampler.last_logprob)
        self._show(self._reply.add(token), now)
        if self._reply.stopped:
            return "stop"
        most = self.ticket.request.max_tokens
        if len(self._reply.tokens) == most or self.fed == self._n_context:
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
            logprobs=tuple(self._logprobs),
        )

    def _show(self, text: str, now: float) -> None:
        if text:
            self._watch.shown = now if self._watch.shown is None else self._watch.shown
            self._tell(Text(text))

    def _tell(self, event: Event) -> None:
        self.ticket.listener(event)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=len(self._reply.tokens),
            cached_tokens=self.cached,
            prefilled_tokens=self.prefilled,
            seeded_from=self._origin[0] if self._origin else None,
            seeded_tier=self._origin[1] if self._origin else None,
            replayed_tokens=self.replayed,
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
