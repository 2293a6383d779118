"""Which kept token paths does this prompt begin with?

A trie over token ids, cut into stems: a stem is one long stretch of tokens with the ends and the
branches along it, so that one comparison and one bisection pass a thousand checkpoints of a chat.

    root  ──────●───┬────●────┬──●      ● values end here
                    └──●──●   └───●     ┬ a branch leaves, a stem of its own

A look-up costs the number of stems on the prompt's path, whatever stands along them. That is at
most log n to the base 1.5: a walk that finds more than two thirds of what a stem carries on one
branch bends the stem, so that it goes on along that branch. Tokens are packed, four bytes each,
and every token of the trie is kept once.

Invariants: a stem ends where values end, and no branch leaves there; `weight` counts the values on
a stem and all its branches; positions count from the root, so that bending moves none of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V", bound=Hashable)

_WIDTH = 4  # bytes of one packed token


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, four each, for use as a key."""
    packed = array("i")
    packed.extend(tokens)  # not in the constructor, which would take bytes for packed ints
    return packed.tobytes()


def common_length(a: bytes, b: bytes) -> int:
    """Return how many leading tokens two packed paths share."""
    low, high = 0, min(len(a), len(b)) // _WIDTH
    if a[: high * _WIDTH] == b[: high * _WIDTH]:
        return high
    while high - low > 1:  # the paths agree on `low` tokens and not on `high`
        middle = (low + high) // 2
        if a[low * _WIDTH : middle * _WIDTH] == b[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens between a value and its nearest neighbours that count.

    `before`: to the next one up its path, or to the root, 0 where another is in the same place;
    `after`: to the nearest one below it, None where there is none.
    """

    before: int
    after: int | None


class _Stem(Generic[V]):
    """A stretch of tokens from `start` on, with what ends along it and what branches off."""

    __slots__ = ("branches", "ends", "span", "start", "values", "weight")

    def __init__(self, start: int, span: bytes) -> None:
        self.start = start
        self.span = span
        self.ends: list[int] = []  # where values end, in order
        self.values: dict[int, dict[V, None]] = {}  # by end
        self.branches: dict[int, dict[bytes, _Stem[V]]] = {}  # by position and first token
        self.weight = 0

    @property
    def end(self) -> int:
        """Where the last token is behind us."""
        return self.start + len(self.span) // _WIDTH

    @property
    def head(self) -> bytes:
        """The first token."""
        return self.span[:_WIDTH]

    def bend(self, position: int, branch: _Stem[V]) -> None:
        """Go on along a branch; what went on from `position` before is a branch from now on."""
        rest = self.cut(position)
        siblings = self.branches[position]
        del siblings[branch.head]
        if rest.weight:
            siblings[rest.head] = rest
        if not siblings:
            del self.branches[position]
        self.span += branch.span
        self.ends += branch.ends
        self.values.update(branch.values)
        self.branches.update(branch.branches)

    def cut(self, position: int) -> _Stem[V]:
        """Take off all that lies beyond a position and return it; the weight here stays."""
        kept = (position - self.start) * _WIDTH
        rest: _Stem[V] = _Stem(position, self.span[kept:])
        self.span = self.span[:kept]
        first = bisect_right(self.ends, position)
        rest.ends = self.ends[first:]
        del self.ends[first:]
        rest.values = {end: self.values.pop(end) for end in rest.ends}
        beyond = [p for p in self.branches if p > position]
        rest.branches = {p: self.branches.pop(p) for p in beyond}
        rest.weight = sum(map(len, rest.values.values()))
        rest.weight += sum(b.weight for at in rest.branches.values() for b in at.values())
        return rest

    def strike(self, end: int) -> None:
        """Forget an end with no values left; without it the stem may reach less far."""
        del self.values[end]
        del self.ends[bisect_left(self.ends, end)]
        if end < self.end:
            return
        last = max(self.ends[-1] if self.ends else self.start, max(self.branches, default=0))
        if last in self.branches:
            self.bend(last, max(self.branches[last].values(), key=lambda b: b.weight))
        else:
            self.cut(last)

    def below(self, position: int) -> list[V]:
        """Return all values that end at a position or beyond, on branches as well."""
        ends = self.ends[bisect_left(self.ends, position) :]
        found = [value for end in ends for value in self.values[end]]
        stack = [b for p, at in self.branches.items() if p >= position for b in at.values()]
        while stack:
            stem = stack.pop()
            for values in stem.values.values():
                found.extend(values)
            for at in stem.branches.values():
                stack.extend(at.values())
        return found


class PrefixIndex(Generic[V]):
    """Values by token path. A value may be added under one path only; several may share it."""

    def __init__(self) -> None:
        self._root: _Stem[V] = _Stem(0, b"")

    def add(self, path: bytes, value: V) -> None:
        """Put `value` where the packed `path` ends."""
        end = len(path) // _WIDTH
        trail = self._walk(path)
        stem, left = trail[-1]
        for passed, _ in trail:
            passed.weight += 1
        if left < end and left == stem.end:
            stem.span += path[left * _WIDTH :]
        elif left < end:
            branch: _Stem[V] = _Stem(left, path[left * _WIDTH :])
            branch.weight = 1
            stem.branches.setdefault(left, {})[branch.head] = branch
            stem = branch
        if end not in stem.values:
            insort(stem.ends, end)
            stem.values[end] = {}
        stem.values[end][value] = None

    def remove(self, path: bytes, value: V) -> None:
        """Take `value` away again; raises `KeyError` when it is not there."""
        end = len(path) // _WIDTH
        trail = self._walk(path)
        stem, left = trail.pop()
        if left < end:
            raise KeyError(value)
        del stem.values[end][value]
        stem.weight -= 1
        for passed, _ in trail:
            passed.weight -= 1
        if not stem.weight and trail:
            parent, position = trail[-1]
            del parent.branches[position][stem.head]
            if not parent.branches[position]:
                del parent.branches[position]
        elif not stem.values[end]:
            stem.strike(end)

    def prefixes(self, path: bytes) -> Iterator[tuple[int, V]]:
        """Yield (length in tokens, value) of every path that `path` begins with, short to long.

        No other call may come in between, since look-ups bend stems as well.
        """
        for stem, left in self._walk(path):
            for end in stem.ends[: bisect_right(stem.ends, left)]:
                for value in stem.values[end]:
                    yield end, value

    def deepest(self, path: bytes, n_most: int) -> tuple[int, list[V]] | None:
        """Return the length and the values of the longest path that `path` begins with.

        Of those of at most `n_most` tokens; None where there is none.
        """
        if n_most < 0:
            return None
        for stem, left in reversed(self._walk(path[: n_most * _WIDTH])):
            passed = bisect_right(stem.ends, left)
            if passed:
                end = stem.ends[passed - 1]
                return end, list(stem.values[end])
        return None

    def at(self, path: bytes) -> list[V]:
        """Return the values whose path is `path`."""
        stem, left = self._walk(path)[-1]
        return list(stem.values.get(left, ())) if left * _WIDTH == len(path) else []

    def nearest(self, path: bytes) -> tuple[int, list[V]]:
        """Return the longest common prefix with any path, in tokens, and the values beyond it."""
        stem, left = self._walk(path)[-1]
        return left, stem.below(left)

    def spans(self, counts: Callable[[V], bool]) -> dict[V, Span]:
        """Return where each value stands among those that `counts`; walks the trie once."""
        found: dict[V, Span] = {}
        first: dict[int, int] = {}  # stem -> where the first that counts on or below it ends
        for stem, counted in reversed(list(self._stems(counts))):
            below: int | None = None
            for position in sorted({*stem.ends, *stem.branches}, reverse=True):
                branches = stem.branches.get(position, {}).values()
                known = [first[id(b)] for b in branches if id(b) in first]
                below = min(known if below is None else [below, *known], default=None)
                values = stem.values.get(position, {})
                those = [value for value in values if counts(value)]
                before = position - counted[bisect_left(counted, position, 1) - 1]
                after = None if below is None else below - position
                for value in values:
                    found[value] = Span(before if not those or those == [value] else 0, after)
                below = position if those else below
            if below is not None:
                first[id(stem)] = below
        return found

    def _stems(self, counts: Callable[[V], bool]) -> Iterator[tuple[_Stem[V], list[int]]]:
        """Yield (stem, the last counted end above it and those on it), parents first."""
        stack = [(self._root, 0)]
        while stack:
            stem, above = stack.pop()
            counted = [above, *(e for e in stem.ends if any(map(counts, stem.values[e])))]
            yield stem, counted
            for position, branches in stem.branches.items():
                last = counted[bisect_right(counted, position, 1) - 1]
                stack.extend((branch, last) for branch in branches.values())

    def _walk(self, path: bytes) -> list[tuple[_Stem[V], int]]:
        """Return the stems that `path` takes and where it leaves each; bends what is lopsided."""
        trail: list[tuple[_Stem[V], int]] = []
        stem = self._root
        while True:
            first = stem.start * _WIDTH
            left = stem.start + common_length(stem.span, path[first : first + len(stem.span)])
            branches = stem.branches.get(left)
            branch = branches and branches.get(path[left * _WIDTH : (left + 1) * _WIDTH])
            if branch and 3 * branch.weight > 2 * stem.weight:
                stem.bend(left, branch)
                continue
            trail.append((stem, left))
            if not branch:
                return trail
            stem = branch
