r"""Why was more of this prompt evaluated than had to be?

What stood in a lane's sequence when it began, and what was ever seen of its prompt, cut it in
three. Nothing here decides what is kept; it tells afterwards where reuse was lost, and to what.

    0 ───────────── cached ──────── lost ──────── seen ────────────────────── n_prompt
    [    reused     ][  seen before, read again  ]│[ never seen at this place          ]
                     ├─────────────┤              └ here the prompt leaves the longest path seen
                     └ a checkpoint stood at the end of this, and is gone

    what went on there instead  ┌ turn           ┌ n_prompt of the earlier request
    … input of an earlier one   ]│<|im_start|>… │ its reply …            │
                                 └──── a template renders these anew ────┘

What is left of the prompt is a *fork* if another path went on where the prompt leaves: in the same
chat, inside the reply of an earlier request, or so that what comes after the change had come after
it before (`divergence.recurring`). Any other prompt that shares a beginning is simply another one.

    never seen   it began from token 0, and what it shares with others is no more than every chat
                 has in common (less than `COMMON_MOST` tokens)
    template     a fork in the generation prompt or the reply of an earlier request, whose answer
                 is there all the same: its reasoning, its opening or white space was rewritten
    edited       any other fork: words of a message, of the system prompt or of the tools
    retokenised  a fork in the tokens, none in their text
    evicted      a checkpoint that would have served had to leave
    refused      a checkpoint that would have served could not be put back
    concurrent   another request was still reading what the two share
    short        no state was kept there: it would have saved too little, or others came first
    off          the request was not to reuse anything

Each accounts for the tokens it made be read again: a checkpoint that is gone for those up to its
end, a fork for those that it moved behind another beginning and for what was lost before it. The
one with the most is the reason, and only its tokens are told.

Invariant: `tokens` is never more than the request evaluated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.engine.divergence import Recurrence, recurring, sides, spelled
from orchestrator.pool.losses import Loss
from orchestrator.pool.seen import Sighting
from orchestrator.text.reasoning import CLOSE
from orchestrator.text.tokenizer import Tokenizer

Cause = Literal[
    "never seen",
    "template",
    "edited",
    "retokenised",
    "evicted",
    "refused",
    "concurrent",
    "short",
    "off",
]

COMMON_MOST = 64
"""Tokens that prompts share because one template made them, and not because one follows another."""

_WIDTH = 4  # bytes of one packed token
_NOTHING = Recurrence()
_N_REWRITTEN = 512  # tokens that may be the same text in others, or in other white space
_N_AROUND = 64  # tokens that a history may put around a reply
_N_SURE = 40  # characters of an answer that tell it from any other


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a request evaluated tokens that had been evaluated before.

    `position` is the token where its prompt leaves the longest path seen, `message` the index of
    the message there (None: not known, or past the last one); `in_system`: that lies in the system
    prompt or the tools. `before` and `after` are a few words of what was seen there and of what
    the prompt has there, fit for one line; `after` is empty where the prompt ends there, both are
    where it goes on past all that was seen. `tokens` is what it cost.
    """

    cause: Cause
    position: int
    message: int | None = None
    in_system: bool = False
    before: str = ""
    after: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Earlier:
    """A request that was seen: `turn` and `n_prompt` as in a request, its reply ends at `end`."""

    turn: int
    n_prompt: int
    end: int
    conversation: str | int | None = None

    def replied_at(self, position: int) -> bool:
        """Return whether its generation prompt or its reply has a token there."""
        return (self.turn or self.n_prompt) <= position < self.end


@dataclass(frozen=True, slots=True)
class Start:
    """How a request began, noted when it got its lane.

    `prompt` is packed; `seen` is where it leaves what was seen, with all that followed there, and
    `earlier` are the requests of that path. `turn`, `base` and `ends` as in a request.
    """

    prompt: bytes
    seen: Sighting
    earlier: Sequence[Earlier] = ()
    conversation: str | int | None = None
    turn: int = 0
    base: int = 0
    ends: Sequence[int] = ()
    uses_cache: bool = True
    is_concurrent: bool = False


@dataclass(frozen=True, slots=True)
class _Fork:
    """Where another path went on, and what of the prompt comes after it all the same."""

    cause: Cause
    recurs: Recurrence


def explain(
    start: Start, cached: int, evaluated: int, loss: Loss | None, tokenizer: Tokenizer
) -> Miss | None:
    """Return why a request that reused `cached` tokens did not reuse more.

    None where all it evaluated was new. It had come as far as `evaluated` tokens of its prompt
    when it ended; `loss` is the longest checkpoint gone that would have served it.
    """
    if evaluated <= cached:
        return None
    seen = max(start.seen.length, cached)
    most = min(seen, len(start.prompt) // _WIDTH - 1, evaluated)
    if not start.uses_cache:
        return _miss(start, "off", most, _NOTHING, tokenizer) if most else None
    fork = _fork(start, tokenizer) if seen == start.seen.length else None
    costs = _costs(start, cached, most, loss, fork)
    if fork is not None:
        costs[fork.cause] += min(fork.recurs.n_tokens, max(0, evaluated - seen))
    recurs = fork.recurs if fork else _NOTHING
    cause = max((each for each in costs if costs[each]), key=lambda c: costs[c], default=None)
    is_new = cause is None or (cause in ("short", "edited") and not recurs.n_tokens)
    if is_new and cached == 0 and seen < COMMON_MOST:
        return _miss(start, "never seen", most, _NOTHING, tokenizer)
    return None if cause is None else _miss(start, cause, costs[cause], recurs, tokenizer)


def _costs(
    start: Start, cached: int, most: int, loss: Loss | None, fork: _Fork | None
) -> dict[Cause, int]:
    """Return what made tokens be read again that stand before `most`, and how many."""
    costs: dict[Cause, int] = {}
    gone = cached
    if loss is not None and loss.length > cached:
        gone = min(loss.length, most)
        costs[loss.cause] = gone - cached
    if fork is not None:
        costs[fork.cause] = max(0, most - gone)
    elif most > gone:
        costs["concurrent" if start.is_concurrent else "short"] = most - gone
    return costs


def _miss(
    start: Start,
    cause: Cause,
    tokens: int,
    recurs: Recurrence,
    tokenizer: Tokenizer,
) -> Miss:
    position = start.seen.length
    inside = bisect_right(start.ends, position)
    before = after = ""
    if start.seen.beyond and cause not in ("never seen", "off"):
        shared, old, new = _paths(start)
        note = start.seen.note
        if isinstance(note, Earlier) and note.turn > position:
            old = old[: (note.turn - position) * _WIDTH]
        before, after = sides(shared, old, new, tokenizer, recurs)
    return Miss(
        cause=cause,
        position=position,
        message=inside if inside < len(start.ends) else None,
        in_system=position < start.base,
        before=before,
        after=after,
        tokens=tokens,
    )


def _paths(start: Start) -> tuple[bytes, bytes, bytes]:
    """Return what a prompt shares with what was seen, what went on there, and what it has there.

    Of the prompt the input is looked at: every generation prompt is like every other.
    """
    place = start.seen.length * _WIDTH
    until = start.turn * _WIDTH or len(start.prompt)
    return start.prompt[:place], start.seen.beyond, start.prompt[place:until]


def _fork(start: Start, tokenizer: Tokenizer) -> _Fork | None:
    """Return the change that the prompt made where it leaves what was seen, None if it did not."""
    _, old, new = _paths(start)
    if not (old and new):
        return None
    recurs = recurring(old, new)
    cause = _rewritten(start, old, new, recurs, tokenizer)
    if cause is None and (recurs.n_tokens or _is_same_chat(start)):
        cause = "edited"
    return None if cause is None else _Fork(cause, recurs)


def _is_same_chat(start: Start) -> bool:
    note = start.seen.note
    return isinstance(note, Earlier) and start.conversation == note.conversation is not None


def _rewritten(
    start: Start, old: bytes, new: bytes, recurs: Recurrence, tokenizer: Tokenizer
) -> Cause | None:
    """Return what made other tokens of the same words, None where somebody changed them."""
    position = start.seen.length
    replies = [each for each in start.earlier if each.replied_at(position)]
    if max(recurs.old, recurs.new) <= _N_REWRITTEN:
        before = spelled(old[: recurs.old * _WIDTH], tokenizer)
        after = spelled(new[: recurs.new * _WIDTH], tokenizer)
        if before == after:
            return "retokenised"
        if replies and "".join(before.split()) == "".join(after.split()):
            return "template"
    for each in replies:
        begin, end = each.n_prompt - position, each.end - position
        shown = spelled(new[: (end + _N_AROUND) * _WIDTH], tokenizer)
        if _shows(shown, spelled(old[max(0, begin) * _WIDTH : end * _WIDTH], tokenizer), begin > 0):
            return "template"
    return None


def _shows(text: str, reply: str, whole: bool) -> bool:
    """Return whether a history shows a reply's answer, where its reasoning is gone from it.

    `whole`: the reply is there from its beginning; else a part of it is, and had reasoning left.
    """
    _, closed, answer = reply.rpartition(CLOSE)
    begin = answer.strip()[:_N_SURE]
    return bool(begin and (whole or closed)) and begin in text
