"""Which kept token paths does this prompt begin with?

A radix tree over token ids. Edges are packed bytes, four to a token, so that comparing a long
span is one `memcmp`; a look-up costs the number of branches on the prompt's own path, not the
number of entries and not a step per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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


class _Node(Generic[V]):
    """The end of `edge`; `values` end exactly here, `children` go on, by first token."""

    __slots__ = ("children", "edge", "values")

    def __init__(self, edge: bytes) -> None:
        self.edge = edge
        self.values: dict[V, None] = {}
        self.children: dict[bytes, _Node[V]] = {}


class PrefixIndex(Generic[V]):
    """Values by token path. A value may be added under one path only; several may share it."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(b"")

    def add(self, path: bytes, value: V) -> None:
        """Put `value` where the packed `path` ends."""
        node, offset = self._root, 0
        while offset < len(path):
            head = path[offset : offset + _WIDTH]
            child = node.children.get(head)
            if child is None:
                child = node.children[head] = _Node(path[offset:])
            else:
                child = self._fork(node, child, path[offset:])
            offset += len(child.edge)
            node = child
        node.values[value] = None

    def remove(self, path: bytes, value: V) -> None:
        """Take `value` away again; raises `KeyError` when it is not there."""
        trail = [(self._root, b"")]
        offset = 0
        while offset < len(path):
            head = path[offset : offset + _WIDTH]
            node = trail[-1][0].children[head]
            offset += len(node.edge)
            trail.append((node, head))
        del trail[-1][0].values[value]
        self._prune(trail)

    def prefixes(self, path: bytes) -> Iterator[tuple[int, V]]:
        """Yield (length in tokens, value) of every path that `path` begins with, short to long."""
        node, offset = self._root, 0
        while True:
            for value in node.values:
                yield offset // _WIDTH, value
            child = node.children.get(path[offset : offset + _WIDTH])
            if child is None or not path.startswith(child.edge, offset):
                return
            offset += len(child.edge)
            node = child

    def nearest(self, path: bytes) -> tuple[int, list[V]]:
        """Return the longest common prefix with any path, in tokens, and the values beyond it."""
        node, offset = self._root, 0
        while True:
            child = node.children.get(path[offset : offset + _WIDTH])
            if child is None:
                return offset // _WIDTH, list(_values(node))
            if not path.startswith(child.edge, offset):
                shared = common_length(child.edge, path[offset : offset + len(child.edge)])
                return offset // _WIDTH + shared, list(_values(child))
            offset += len(child.edge)
            node = child

    def spans(self, counts: Callable[[V], bool]) -> dict[V, Span]:
        """Return where each value stands among those that `counts`; walks the tree once."""
        found: dict[V, Span] = {}
        nearest: dict[int, int] = {}  # node -> where the nearest counted one at or below it lies
        for node, end, above in reversed(list(self._walk(counts))):
            below = [nearest[id(c)] for c in node.children.values() if id(c) in nearest]
            after = min(below) - end if below else None
            counted = [value for value in node.values if counts(value)]
            for value in node.values:
                alone = not counted or counted == [value]
                found[value] = Span(end - above if alone else 0, after)
            if counted:
                nearest[id(node)] = end
            elif below:
                nearest[id(node)] = min(below)
        return found

    def _walk(self, counts: Callable[[V], bool]) -> Iterator[tuple[_Node[V], int, int]]:
        """Yield (node, where it ends, where the counted one above it ends), parents first."""
        stack = [(self._root, 0, 0)]
        while stack:
            node, end, above = stack.pop()
            yield node, end, above
            if any(counts(value) for value in node.values):
                above = end
            stack.extend((c, end + len(c.edge) // _WIDTH, above) for c in node.children.values())

    def _fork(self, parent: _Node[V], child: _Node[V], rest: bytes) -> _Node[V]:
        """Return the node on `child`'s edge where `rest` leaves it, splitting the edge there."""
        if rest.startswith(child.edge):
            return child
        cut = common_length(child.edge, rest) * _WIDTH
        upper: _Node[V] = _Node(child.edge[:cut])
        child.edge = child.edge[cut:]
        upper.children[child.edge[:_WIDTH]] = child
        parent.children[upper.edge[:_WIDTH]] = upper
        return upper

    def _prune(self, trail: list[tuple[_Node[V], bytes]]) -> None:
        """Drop the emptied end of `trail` and join a node that no longer branches."""
        while len(trail) > 1:
            node, head = trail.pop()
            if node.values or len(node.children) > 1:
                return
            parent = trail[-1][0]
            if not node.children:
                del parent.children[head]
                continue
            (only,) = node.children.values()
            only.edge = node.edge + only.edge
            parent.children[head] = only
            return


def _values(node: _Node[V]) -> Iterable[V]:
    """Walk all values at and below a node."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield from top.values
        stack.extend(top.children.values())
