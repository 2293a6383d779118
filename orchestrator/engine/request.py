"""What is asked of the engine, and what it answers.

These are values: frozen, checked when they are made, and safe to hand from any thread to the
engine's. They know neither pool nor runtime.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from orchestrator.engine.why import Miss as Miss
from orchestrator.errors import InvalidArgument
from orchestrator.runtime.protocol import GREEDY as GREEDY
from orchestrator.runtime.protocol import Sampling as Sampling
from orchestrator.runtime.sampling import TokenLogprob as TokenLogprob
from orchestrator.text.stops import StopStrings

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Priority = Literal["interactive", "default", "background"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "default", "background")
MARKS_MOST = 64
"""Marks of one request: each costs a pass and a state, however little it may save."""


@dataclass(frozen=True, slots=True)
class Request:
    """One reply wanted: the prompt as token ids and how to go on from it.

    `turn` is the length of the prompt prefix where the chat's input ends, before the generation
    prompt (0: no such place). `max_tokens` None goes on until the model ends or the context is
    full. `conversation` names the chat this is a turn of; None lets the prefix decide.
    `use_cache` False neither starts from a checkpoint nor keeps one; `one_off` may start from one
    and keeps none. `base` is the length of the system and tools block (0: none).

    `priority` interactive goes before default before background; within one of them the requests
    of a `client` share with those of others. `deadline`: seconds from submission after which the
    request ends with what it has said. `ends`: where in the prompt each message of the chat ends,
    for saying in which of them it differs from an earlier one; empty where there are none.
    `starts`: where messages of the user start, for edits. `marks`: up to `MARKS_MOST` places where
    a state is kept whatever it costs, because the caller will come back to them.
    """

    tokens: tuple[int, ...]
    turn: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    conversation: str | None = None
    use_cache: bool = True
    base: int = 0
    one_off: bool = False
    priority: Priority = "default"
    client: str | None = None
    deadline: float | None = None
    ends: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check everything, so that nothing the engine's thread meets is of the wrong type."""
        object.__setattr__(self, "tokens", _prompt(self.tokens))
        object.__setattr__(self, "turn", _whole("turn", self.turn, 0, len(self.tokens) - 1))
        object.__setattr__(self, "base", _whole("base", self.base, 0, len(self.tokens) - 1))
        if self.max_tokens is not None:
            most = _whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
            object.__setattr__(self, "max_tokens", most)
        for name, flag in (("use_cache", self.use_cache), ("one_off", self.one_off)):
            check_flag(name, flag)
        StopStrings(self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.sampling, Sampling):
            raise InvalidArgument(
                f"sampling is {self.sampling!r}; give a Sampling, or leave it out"
            )
        for name, text in (("conversation", self.conversation), ("client", self.client)):
            if text is not None:
                check_name(name, text)
        if self.priority not in PRIORITIES:
            raise InvalidArgument(
                f"priority is {self.priority!r}; give one of {', '.join(PRIORITIES)}"
            )
        if self.deadline is not None:
            object.__setattr__(self, "deadline", _seconds("deadline", self.deadline))
        object.__setattr__(self, "ends", _ends(self.ends, len(self.tokens)))
        object.__setattr__(self, "starts", _places("starts", self.starts, len(self.tokens)))
        check_marks(self.marks, len(self.tokens))
        object.__setattr__(self, "marks", _places("marks", self.marks, len(self.tokens)))


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False; a text "no" would count as yes."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}; give True or False")


def check_name(name: str, value: object) -> None:
    """Refuse what is no text."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {value!r}; give its name as a text")


def check_extras(tools: object, template_arguments: object) -> None:
    """Refuse what cannot be the tools of a chat, or variables of its template."""
    if not (tools is None or (isinstance(tools, Sequence) and _are_mappings(tools))):
        raise InvalidArgument(f"tools are {tools!r}; give a list of tool descriptions, or none")
    if not (template_arguments is None or isinstance(template_arguments, Mapping)):
        raise InvalidArgument(
            f"template_arguments are {template_arguments!r}; give names and values"
        )


def _are_mappings(values: Sequence[object]) -> bool:
    return all(isinstance(value, Mapping) for value in values) and not isinstance(
        values, str | bytes
    )


def _prompt(tokens: Sequence[int]) -> tuple[int, ...]:
    ids = token_ids(tokens)
    if not ids:
        raise InvalidArgument("the prompt is empty; give at least one token")
    return ids


def token_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as plain ints, or say that they are none."""
    if isinstance(tokens, str | bytes | bytearray | Mapping | Set):
        raise InvalidArgument(f"tokens are {type(tokens).__name__}; give a sequence of token ids")
    try:
        return tuple(map(operator.index, tokens))
    except TypeError as error:
        raise InvalidArgument(f"tokens must be whole numbers: {error}") from error


def _whole(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}; give a whole number")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InvalidArgument(f"{name} is {value!r}; give a whole number") from error
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}, must lie in {low} to {high}")
    return number


def _ends(ends: Sequence[int], n_prompt: int) -> tuple[int, ...]:
    if isinstance(ends, str | bytes) or not isinstance(ends, Sequence):
        raise InvalidArgument(f"ends are {ends!r}; give the positions where messages end, or none")
    places = tuple(_whole("an end of a message", end, 0, n_prompt) for end in ends)
    if any(later < earlier for earlier, later in pairwise(places)):
        raise InvalidArgument(f"ends are {ends!r}; messages end one after the other")
    return places


def _places(name: str, places: Sequence[int], n_prompt: int) -> tuple[int, ...]:
    """Return places inside a prompt in order, each once, or say what is wrong with them."""
    if isinstance(places, str | bytes) or not isinstance(places, Sequence):
        raise InvalidArgument(f"{name} are {places!r}; give positions in the prompt, or none")
    wholes = {_whole(f"a place of {name}", place, 1, n_prompt - 1) for place in places}
    return tuple(sorted(wholes))


def check_marks(marks: Sequence[int], n_parts: int) -> tuple[int, ...]:
    """Return marks that say after how many of a prompt's parts, or what is wrong with them."""
    if isinstance(marks, str | bytes) or not isinstance(marks, Sequence):
        raise InvalidArgument(f"marks are {marks!r}; give a list of whole numbers, or none")
    if len(marks) > MARKS_MOST:
        raise InvalidArgument(f"{len(marks)} marks are more than {MARKS_MOST}; give fewer")
    return tuple(_whole("a mark", mark, 1, n_parts) for mark in marks)


def inside(places: Iterable[int], n_prompt: int) -> tuple[int, ...]:
    """Return the places that have a token of the prompt on either side."""
    return tuple(place for place in places if 0 < place < n_prompt)


def _seconds(name: str, value: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}; give seconds as a number")
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument(f"{name} is {value}, must be above 0 seconds; or leave it out")
    return float(value)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, counted at the decode call.

    `cached_tokens` were reused and `prefilled_tokens` evaluated; the two add up to
    `prompt_tokens` unless the request ended before its prompt was read. `seeded_from` is the kind
    of checkpoint the request started from and `seeded_tier` where that lived, None when it
    started cold. `replayed_tokens` were evaluated once more because a preempted request had to
    give up its state. `seen_tokens` is the longest prefix that the prompt shares with any that was
    evaluated before, as far as that is remembered: what could have been reused at most.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    seeded_from: str | None = None
    seeded_tier: str | None = None
    replayed_tokens: int = 0
    seen_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `time_to_first_token` is first text minus submission, queueing included; None
    where no text came. `decode` is what follows the first token.
    """

    queued: float
    time_to_first_token: float | None
    prefill: float
    decode: float
    total: float

    def prefill_rate(self, usage: Usage) -> float | None:
        """Return prompt tokens evaluated per second, None where nothing was measured."""
        return usage.prefilled_tokens / self.prefill if self.prefill > 0 else None

    def decode_rate(self, usage: Usage) -> float | None:
        """Return tokens per second after the first, None where nothing was measured."""
        rest = usage.completion_tokens - 1
        return rest / self.decode if rest > 0 and self.decode > 0 else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request. `tokens` are the ids sampled, the end token left out.

    `logprobs` has an entry for each of them where `Sampling.logprobs` asked for it. `miss` says
    why more was evaluated than had to be, None where all of it was new.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Prefilling:
    """The prompt is being read: `done` of `total` tokens stand, `cached` of them were reused."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Text:
    """New text of the reply: whole characters, no part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every request that did not raise."""

    outcome: Outcome


Event = Prefilling | Text | Finished
TemplateArguments = Mapping[str, object]
