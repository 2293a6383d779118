"""What did the last requests take, and what was ever seen of their prompts?

    got a lane ─▶ begin    what its prompt shares with all that was seen; it is seen from now on
    seed stands ─▶ stands  which checkpoint that is gone would have served it better
    ended ─▶ end           why it evaluated what it did (`why`), and its record

A prompt counts as seen from its admission on, so that requests that run side by side are told
apart from new ones; once the request has ended, what was really evaluated counts, its reply
included. Used on the engine's thread; nothing is done here per step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from orchestrator.engine.lane import Lane
from orchestrator.engine.request import FinishReason, Outcome, Timings, Usage
from orchestrator.engine.ticket import Clock
from orchestrator.engine.why import Earlier, Miss, Start, explain
from orchestrator.pool.index import common_length
from orchestrator.pool.losses import Losses
from orchestrator.pool.seen import Seen
from orchestrator.text.tokenizer import Tokenizer

log = logging.getLogger("orchestrator.engine")

N_RECORDS = 100
N_TOKENS_SEEN = 1 << 20
"""Tokens of paths that are remembered: 4 MB, and as much for the places of lost checkpoints."""

_WIDTH = 4  # bytes of one packed token
_N_BEYOND = 1024  # tokens more than the prompt has left: what was taken out may be longer


@dataclass(frozen=True, slots=True)
class Record:
    """One request that ended with an outcome. `at` in seconds since 1970."""

    at: float
    usage: Usage
    timings: Timings
    finish_reason: FinishReason
    miss: Miss | None = None
    conversation: str | None = None


Sink = Callable[[Record], object]


class Records:
    """See the module's head. `wall` tells the time of day; it alone adds to `seen`."""

    def __init__(self, seen: Seen, losses: Losses, tokenizer: Tokenizer, wall: Clock) -> None:
        self.last: deque[Record] = deque(maxlen=N_RECORDS)
        self.sink: Sink = lambda record: None
        self._seen = seen
        self._losses = losses
        self._tokenizer = tokenizer
        self._wall = wall

    def fork(self, prompt: bytes) -> int:
        """Return where a packed prompt leaves a path seen before, 0 where it does not.

        A chat that goes on leaves its last turn in the generation prompt or the reply; that is no
        place where others will, and its turn point serves it.
        """
        seen = self._seen.nearest(prompt, 1)
        earlier = seen.note
        if not seen.beyond or not isinstance(earlier, Earlier):
            return 0
        return seen.length if seen.length < (earlier.turn or earlier.n_prompt) else 0

    def begin(self, lane: Lane, others: Iterable[Lane], *, uses_cache: bool) -> None:
        """Note what is known of a prompt that gets a lane for the first time, beside `others`."""
        request, prompt = lane.ticket.request, lane.ticket.path
        length = self._seen.common(prompt)
        seen = self._seen.nearest(prompt, lane.n_prompt - length + _N_BEYOND)
        path = prompt[: length * _WIDTH] + seen.beyond
        earlier = [note for _, note in self._seen.ends(path) if isinstance(note, Earlier)]
        if isinstance(seen.note, Earlier):
            earlier.append(seen.note)
        lane.start = Start(
            prompt=prompt,
            seen=seen,
            earlier=earlier,
            conversation=lane.admission.conversation,
            turn=request.turn,
            base=request.base,
            ends=request.ends,
            uses_cache=uses_cache,
            is_concurrent=any(_is_reading(other, prompt, length) for other in others),
        )
        if length < lane.n_prompt:
            self._seen.add(prompt, _told(lane, lane.n_prompt))

    def stands(self, lane: Lane) -> None:
        """Note which checkpoint that is gone would have served a lane, now that its seed stands."""
        if lane.loss is None and lane.start is not None:
            most = min(lane.start.seen.length, lane.n_prompt - 1)
            lane.loss = self._losses.longest(lane.start.prompt, most)

    def end(self, lane: Lane, outcome: Outcome) -> Outcome:
        """Record how a request ended; return the outcome with what is known of its prompt."""
        self.leave(lane)
        start, usage = lane.start, outcome.usage
        if start is None:
            return outcome
        read = min(lane.n_evaluated, lane.n_prompt)
        seen = max(start.seen.length, usage.cached_tokens)
        miss = explain(start, usage.cached_tokens, read, lane.loss, self._tokenizer)
        outcome = replace(outcome, usage=replace(usage, seen_tokens=seen), miss=miss)
        self._keep(
            Record(
                at=self._wall(),
                usage=outcome.usage,
                timings=outcome.timings,
                finish_reason=outcome.finish_reason,
                miss=miss,
                conversation=lane.ticket.request.conversation,
            )
        )
        return outcome

    def leave(self, lane: Lane) -> None:
        """Note that a request ended, in whatever way: it is seen as far as it was evaluated."""
        known_before = lane.start.seen.length if lane.start else lane.n_prompt
        if max(lane.n_evaluated, known_before) < lane.n_prompt:
            self._seen.remove(lane.ticket.path)
        self._seen.add(lane.evaluated, _told(lane, lane.n_evaluated))

    def forget(self, conversation: str) -> None:
        """Take out of all that was seen, and lost, what a conversation was seen with."""
        for path in self._seen.paths(lambda note: _is_of(note, conversation)):
            self._seen.remove(path)
            self._losses.forget(path)

    def _keep(self, record: Record) -> None:
        self.last.append(record)
        try:
            self.sink(record)
        except Exception:  # what it raises is its own, and ends nobody's request
            log.exception("what records are handed to raised")


def _told(lane: Lane, end: int) -> Earlier:
    return Earlier(lane.ticket.request.turn, lane.n_prompt, end, lane.admission.conversation)


def _is_of(note: object, conversation: str) -> bool:
    return isinstance(note, Earlier) and note.conversation == conversation


def _is_reading(lane: Lane, prompt: bytes, length: int) -> bool:
    """Return whether a lane has yet to evaluate some of the tokens that a prompt shares with it."""
    return lane.n_evaluated < length <= common_length(lane.known, prompt)
