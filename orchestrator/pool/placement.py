"""Where along a prompt, and inside a reply, is a state worth keeping?

    0 ──────────┐base ┌message ──┐branch ┌message ── input ─┐turn  generation prompt  ┌resend
    [ system    | user …         ┊       | user …           ]│<|im_start|>assistant … │t]  reply …
          ·     ·     ·     ·     ·     ·     ·     ·                anchors: soft

The turn point serves the next turn, which renders the history anew and may open the assistant's
turn differently; the resend point the same prompt again; the base every chat that begins like this
one; a branch whoever else goes on from where a second request left a path taken before; a message
start an edit of that message; a mark whatever the caller has in mind. What parts from a prompt
anywhere else starts from an anchor.

A *hard* stop ends a chunk exactly there and costs one more pass over the weights. A *soft* one is
kept at the first chunk end at or after it and costs the state alone. What a point costs is weighed
against the tokens it saves over the point before it, all of it measured (`Costs`): no prompt is too
short and no distance too small by decree, but for two (`RESEND_GAP`, `BRANCH_MOST`) that are
smaller than anything measured would have them.

Everything is a function of absolute positions. Anchors are multiples of a power of two, of which a
longer prompt takes every second one, and message starts are thinned by their ordinal: so a chat
that grows wants much the same of its past, and what was kept early goes on to serve.

Invariants: stops ascend, lie in ``(seeded, n_prompt)`` and number at most `n_states` unless the
needed ones alone (turn, marks, branch, base) are more; where there is room for n states and a
state is cheap, no position is further than ``2 n_prompt / n`` from the point before it; anchors
and message starts never take a cold prefill beyond 1.03 of its time without any stop, or by more
than 0.01 of it where the needed stops alone do that.

A model that only has attention needs no stops of its own: its rows can be cut anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from orchestrator.errors import InvalidArgument
from orchestrator.pool.checkpoint import Kind, Stop

RESEND_GAP = 6
"""A resend point must save more tokens than this over the point before it.

Evaluating this many tokens in one pass costs about what evaluating one does (the weights are
read once either way). Two places this close together are one, where either may be kept.
"""

BRANCH_MOST = 16
"""Tokens that a branch point need not save more than, however dear a pass is.

The place was seen twice and will be seen again, so it pays for its pass over many requests. It is
also how long a prefix may be that requests side by side read each for itself.
"""

REPLY_LEAST = 16
"""Tokens of a reply between two states at least: reading so many again is hardly felt."""

_EXTRA = 0.03  # part of a cold prefill that all its stops may cost
_EXTRA_LEAST = 0.01  # what anchors and message starts may cost where the needed stops took that
_ODDS = 8  # about one prompt in so many is ever left inside the gap before a given anchor


@dataclass(frozen=True, slots=True)
class Points:
    """What is known of a prompt; all in tokens.

    `turn`: where the input ends (0: no such place). `base`: where the system text and the tools
    end. `starts`: where messages of the user start, ascending. `marks`: places the caller asks
    for. `branch`: the length of the longest path seen before that the prompt begins with.
    """

    n_prompt: int
    turn: int = 0
    base: int = 0
    starts: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What a state costs and what it saves, as measured.

    `state_bytes` and `state_seconds` to take one, and about as long again to put it back;
    `token_seconds` to read a prompt token; `pass_seconds` for one more pass over the weights.
    `n_states`: how many states one prompt may hold within the budgets, those it holds already
    and those that would leave for it included.
    """

    state_bytes: int
    state_seconds: float
    token_seconds: float
    pass_seconds: float
    n_states: int

    def __post_init__(self) -> None:
        if self.token_seconds <= 0:
            raise InvalidArgument(
                f"token_seconds is {self.token_seconds}, must be above 0; leave it to `Pace.costs`"
            )
        for name in ("state_bytes", "state_seconds", "pass_seconds", "n_states"):
            value = getattr(self, name)
            if value < 0:
                raise InvalidArgument(f"{name} is {value}, must be 0 or more")

    @property
    def stop_least(self) -> int:
        """Tokens that take as long to read as a hard stop and one return to it."""
        return int((self.pass_seconds + 2 * self.state_seconds) / self.token_seconds)

    @property
    def anchor_least(self) -> int:
        """Tokens between two anchors below which they cannot pay.

        All of them must cost little, and each has to save more than a pass and a state in one of
        `_ODDS` prompts.
        """
        cheap = self.state_seconds / (_EXTRA_LEAST * self.token_seconds)
        return _power_above(max(1, cheap, _ODDS * self.stop_least))

    @property
    def reply_step(self) -> int:
        """Tokens between two states taken inside a reply: see `reply_point`."""
        say = self.pass_seconds + self.token_seconds  # about what saying a token takes
        cheap = self.state_seconds / (_EXTRA * say)
        pays = 2 * self.state_seconds / self.token_seconds
        return _power_above(max(REPLY_LEAST, cheap, pays))


# ---- along a prompt ------------------------------------------------------------------------------


def place(points: Points, seeded: int, costs: Costs, *, divisible: bool) -> tuple[Stop, ...]:
    """Return the stops of a prefill that starts from `seeded` tokens, in order.

    `divisible` says that kept rows can be cut to any length. Turn and marks are always among
    them, branch and base where they save more than a stop costs; then what the budgets and the
    time allow of the resend point, message starts (the newest densest) and anchors.
    """
    if divisible or costs.n_states < 1:
        return ()
    draft = _Draft(points, seeded, costs, _needed(points, seeded, costs))
    return draft.stops()


def serving(stops: Sequence[Stop], length: int) -> Stop | None:
    """Return the stop that gives back (nearly) all of the first `length` tokens, if one does.

    A soft one does not: nobody knows yet where it will be kept.
    """
    near = [s for s in stops if not s.is_soft and 0 <= length - s.length <= RESEND_GAP]
    return max(near, key=lambda stop: stop.length, default=None)


def _needed(points: Points, seeded: int, costs: Costs) -> dict[int, Kind]:
    """Return the points that are kept whatever the room: by length, the first kind that fits."""
    end = points.n_prompt
    needed: dict[int, Kind] = {}
    if seeded < points.turn < end:
        needed[points.turn] = "turn"
    for mark in points.marks:
        if seeded < mark < end:
            needed.setdefault(mark, "mark")
    branch, least = points.branch, min(costs.stop_least, BRANCH_MOST)
    if branch < end and branch - _before(needed, branch, seeded) > least:
        needed[branch] = "shared"
    base = points.base
    is_forked = any(base < p <= base + RESEND_GAP for p, kind in needed.items() if kind != "turn")
    if not is_forked and base < end and base - _before(needed, base, seeded) > costs.stop_least:
        needed[base] = "system"
    return needed


def _before(points: Iterable[int], length: int, seeded: int) -> int:
    """Return the last point at or before `length`."""
    return max((point for point in points if point <= length), default=seeded)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A prefill whose needed stops are known, and what may be added to them."""

    points: Points
    seeded: int
    costs: Costs
    needed: Mapping[int, Kind]

    def stops(self) -> tuple[Stop, ...]:
        """Return the needed stops and the best selection that there is room and time for."""
        fitting = (extras for extras in self._selections() if self._fits(extras))
        kinds = {**next(fitting, {}), **self.needed}
        return tuple(Stop(at, kinds[at], is_soft=kinds[at] == "anchor") for at in sorted(kinds))

    def _fits(self, extras: Mapping[int, Kind]) -> bool:
        """Return whether there is room for these as well, and the time they take is due."""
        kinds = list(extras.values())
        if len(self.needed) + len(kinds) > self.costs.n_states:
            return False
        states = kinds.count("anchor") * self.costs.state_seconds
        return kinds.count("message") * self._stop_seconds + states <= self._seconds

    @property
    def _stop_seconds(self) -> float:
        return self.costs.pass_seconds + self.costs.state_seconds

    @property
    def _seconds(self) -> float:
        """Return what message starts and anchors may take beside the other stops."""
        cold = self.points.n_prompt * self.costs.token_seconds
        taken = (len(self.needed) + len(self._resend)) * self._stop_seconds
        return max(_EXTRA * cold - taken, _EXTRA_LEAST * cold)

    def _selections(self) -> Iterator[dict[int, Kind]]:
        """Yield what may be added to the needed stops, the richest first."""
        gap, step = self._spacing
        resend = self._resend
        for messages in self._messages():
            hard: dict[int, Kind] = {**dict.fromkeys(messages, "message"), **resend}
            yield self._with_anchors(hard, gap, step)
        while step < self.points.n_prompt:
            step *= 2
            yield self._with_anchors(resend, max(gap, step), step)
        yield resend

    @property
    def _spacing(self) -> tuple[int, int]:
        """Return the gap that n states can keep to, and the power of two that anchors lie on."""
        gap = 2 * self.points.n_prompt // self.costs.n_states
        step = max(self.costs.anchor_least, _power_below(gap))
        return max(gap, step), step

    @property
    def _resend(self) -> dict[int, Kind]:
        """Return the point one token before the end, if it saves enough."""
        end = self.points.n_prompt - 1
        saved = end - _before(self.needed, end, self.seeded)
        return {end: "resend"} if saved > RESEND_GAP else {}

    def _with_anchors(self, extras: Mapping[int, Kind], gap: int, step: int) -> dict[int, Kind]:
        """Return `extras` with anchors, multiples of `step`, wherever points are over `gap` apart.

        ``gap >= step``, so there always is one within the gap.
        """
        found = dict(extras)
        reached = self.seeded
        for point in (*sorted({*extras, *self.needed}), self.points.n_prompt):
            while point - reached > gap:
                reached = (reached + gap) // step * step
                found[reached] = "anchor"
            reached = point
        return found

    def _messages(self) -> Iterator[Sequence[int]]:
        """Yield ever fewer message starts, down to none.

        One that is the ``2**k * odd`` th of them counts as ``2**k`` times younger than it is: so
        the newest are dense, and of older ones there are as many per doubling of their age.
        """
        total = len(self.points.starts)
        ranked = sorted(
            self._apart(), key=lambda found: (total - found[0]) / (found[0] & -found[0])
        )
        n_most = max(0, self.costs.n_states - len(self.needed) - len(self._resend))
        if self._stop_seconds > 0:
            n_most = min(n_most, int(self._seconds / self._stop_seconds))
        while n_most and ranked:
            yield [start for _, start in ranked[:n_most]]
            n_most = 3 * min(n_most, len(ranked)) // 4
        yield ()

    def _apart(self) -> list[tuple[int, int]]:
        """Return ordinal and place of the starts that save more than a stop costs.

        Those that a fork follows at once are left out: it serves them.
        """
        end = self.points.n_prompt
        ordered = sorted(self.needed)
        reached, kept = self.seeded, list[tuple[int, int]]()
        first = bisect_right(self.points.starts, self.seeded)
        for i, start in enumerate(self.points.starts[first:], first + 1):
            at = bisect_right(ordered, start)
            before = max((reached, *ordered[:at][-1:]))
            is_forked = any(
                point - start <= RESEND_GAP and self.needed[point] != "turn"
                for point in ordered[at : at + 1]
            )
            if before + self.costs.stop_least < start < end and not is_forked:
                kept.append((i, start))
                reached = start
        return kept


def _power_below(length: float) -> int:
    """Return the largest power of two that is not above `length`, at least 1."""
    return 1 << max(0, int(length).bit_length() - 1)


def _power_above(length: float) -> int:
    """Return the smallest power of two that is not below `length`, at least 1."""
    return 1 << (max(1, ceil(length)) - 1).bit_length()


# ---- inside a reply ------------------------------------------------------------------------------


def reply_point(length: int, costs: Costs) -> bool:
    """Return whether a state is to be kept once a reply has `length` tokens.

    It serves a caller who trims the end of the reply or edits inside it. The newest is less than
    `Costs.reply_step` behind the tip, all of them together take 0.03 of the time; see `thinned`.
    """
    return costs.n_states > 0 and length > 0 and length % costs.reply_step == 0


def thinned(points: Iterable[int], tip: int) -> tuple[int, ...]:
    """Return which of the points in a reply of `tip` tokens stay, ascending.

    A multiple of 2**k stays until the tip is 2**(k + 1) past it. So there is about one per doubling
    of the distance from the tip, and a fork that far behind the tip has to read again at most twice
    as much. What is once left out is never wanted again.
    """
    return tuple(at for at in sorted(points) if tip - at < 2 * (at & -at))
