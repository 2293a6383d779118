"""How much of this prompt was evaluated before, whatever became of its states?

A bounded record of the token paths that requests took: a radix tree in which paths share what
they have in common, so it holds as many tokens as their trie does. A path is packed bytes, four
to a token (`index.pack`). Adding one that extends another costs what is new; a look-up costs the
branches on the prompt's own path. Asking is no use of a path, adding it is.

    a b c d e ■          two paths; of `a b c x y` three tokens were seen, and what was seen
          └ f g ■        beyond them is `d e` or `f g`, whichever was added last

Invariants: the tree holds at most `n_tokens_most` tokens; the paths used least recently left
first; a node ends a path or branches, all but the root.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.errors import InvalidArgument
from orchestrator.pool.index import common_length

_WIDTH = 4  # bytes of one packed token


@dataclass(frozen=True, slots=True)
class Sighting:
    """Where a path leaves what was seen, and what went on there instead.

    Its first `length` tokens were seen. `beyond` are packed tokens that followed there on the
    path added last, the first of them only, and `note` is what was noted with that. Where nothing
    followed, `beyond` is empty and `note` is that of the path which ends there, if one does.
    """

    length: int
    beyond: bytes = b""
    note: object = None


class _Node:
    """The end of `edge`. `latest` is where the path ends that passed here last, at its `tick`."""

    __slots__ = ("children", "edge", "latest", "note", "parent", "tick")

    def __init__(self, edge: bytes, parent: _Node | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.latest: _Node = self
        self.note: object = None
        self.tick = 0


class Seen:
    """See the module's head. `n_tokens_most` 0 records nothing."""

    def __init__(self, n_tokens_most: int) -> None:
        if not isinstance(n_tokens_most, int) or n_tokens_most < 0:
            raise InvalidArgument(
                f"a record of {n_tokens_most!r} tokens cannot be; give a whole number of 0 or more"
            )
        self.n_tokens_most = n_tokens_most
        self.n_tokens = 0
        self._root = _Node(b"", None)
        self._ends: OrderedDict[_Node, None] = OrderedDict()  # where paths end, by last use
        self._clock = 0

    def __len__(self) -> int:
        """Return how many paths are recorded."""
        return len(self._ends)

    # ---- asking -------------------------------------------------------------------------------

    def common(self, path: bytes) -> int:
        """Return how many leading tokens a path shares with any that was seen."""
        return self._follow(path)[1]

    def nearest(self, path: bytes, n_beyond: int = 64) -> Sighting:
        """Return where a path leaves all that was seen, with up to `n_beyond` tokens seen there."""
        node, length, inside = self._follow(path)
        if not inside and node.children:
            node = max(node.children.values(), key=lambda child: child.latest.tick)
        elif not inside:
            return Sighting(length, b"", node.note)
        most = n_beyond * _WIDTH
        beyond = node.edge[inside * _WIDTH :][:most]
        for edge in self._edges_below(node):
            if len(beyond) >= most:
                break
            beyond += edge[: most - len(beyond)]
        return Sighting(length, beyond, node.latest.note)

    def ends(self, path: bytes) -> Iterator[tuple[int, object]]:
        """Yield (length in tokens, note) of every path that `path` begins with, short to long."""
        node, offset = self._root, 0
        while True:
            child = node.children.get(path[offset : offset + _WIDTH])
            if child is None or not path.startswith(child.edge, offset):
                return
            offset += len(child.edge)
            node = child
            if node in self._ends:
                yield offset // _WIDTH, node.note

    def _follow(self, path: bytes) -> tuple[_Node, int, int]:
        """Return the last node that `path` reaches into, its tokens seen, those on the edge.

        The latter are 0 where it leaves at the node itself.
        """
        node, offset = self._root, 0
        while True:
            child = node.children.get(path[offset : offset + _WIDTH])
            if child is None:
                return node, offset // _WIDTH, 0
            if not path.startswith(child.edge, offset):
                inside = common_length(child.edge, path[offset : offset + len(child.edge)])
                return child, offset // _WIDTH + inside, inside
            offset += len(child.edge)
            node = child

    def _edges_below(self, node: _Node) -> Iterator[bytes]:
        """Walk the edges from `node` down to where its latest path ends."""
        trail, at = [], node.latest
        while at is not node:
            trail.append(at.edge)
            assert at.parent is not None
            at = at.parent
        return reversed(trail)

    # ---- recording ----------------------------------------------------------------------------

    def add(self, path: bytes, note: object = None) -> None:
        """Record a path, or that it was taken again; `note` replaces what was noted with it.

        Of a path longer than the whole record its beginning is recorded.
        """
        path = path[: self.n_tokens_most * _WIDTH]
        if not path:
            return
        end = self._grow(path)
        self._clock += 1
        end.note, end.tick = note, self._clock
        self._ends[end] = None
        self._ends.move_to_end(end)
        at: _Node | None = end
        while at is not None:
            at.latest = end
            at = at.parent
        while self.n_tokens > self.n_tokens_most:
            self._forget_oldest()

    def remove(self, path: bytes) -> bool:
        """Take a path out of the record; False where none ended there."""
        node, length, inside = self._follow(path)
        if inside or length * _WIDTH != len(path) or node not in self._ends:
            return False
        del self._ends[node]
        self._forget(node)
        return True

    def paths(self, chooses: Callable[[object], bool]) -> list[bytes]:
        """Return the recorded paths whose notes `chooses` accepts; looks at all of them."""
        return [_path_to(node) for node in self._ends if chooses(node.note)]

    def clear(self) -> None:
        """Forget everything."""
        while self._ends:
            self._forget_oldest()

    def _grow(self, path: bytes) -> _Node:
        """Return the node where `path` ends, made if it was missing."""
        node, length, inside = self._follow(path)
        if inside:
            node = self._split(node, inside * _WIDTH)
        rest = path[length * _WIDTH :]
        if rest:
            node.children[rest[:_WIDTH]] = child = _Node(rest, node)
            self.n_tokens += len(rest) // _WIDTH
            node = child
        return node

    def _split(self, lower: _Node, cut: int) -> _Node:
        """Return a new node on the edge of `lower`, `cut` bytes from where that begins."""
        parent = lower.parent
        assert parent is not None
        upper = _Node(lower.edge[:cut], parent)
        upper.latest = lower.latest
        lower.edge, lower.parent = lower.edge[cut:], upper
        upper.children[lower.edge[:_WIDTH]] = lower
        parent.children[upper.edge[:_WIDTH]] = upper
        return upper

    def _forget_oldest(self) -> None:
        """Let the path used least recently leave."""
        node, _ = self._ends.popitem(last=False)
        self._forget(node)

    def _forget(self, node: _Node) -> None:
        """Drop what is left of a path that ended at `node`, as far as no other one shares it."""
        gone, node.note = node, None
        if not node.children:
            node = self._cut_off(node)
        self._renew(node, gone)
        if node.parent is not None and len(node.children) == 1 and node not in self._ends:
            self._join(node)

    def _cut_off(self, leaf: _Node) -> _Node:
        """Take a leaf away; return the node it hung on."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge[:_WIDTH]]
        self.n_tokens -= len(leaf.edge) // _WIDTH
        leaf.latest = parent  # a reference to itself would keep it until the next collection
        return parent

    def _renew(self, node: _Node, gone: _Node) -> None:
        """Say from `node` upwards which path is the latest, where it was the one that is gone."""
        at: _Node | None = node
        while at is not None and at.latest is gone:
            ends = [child.latest for child in at.children.values()]
            if at in self._ends or not ends:
                ends.append(at)
            at.latest = max(ends, key=lambda end: end.tick)
            at = at.parent

    def _join(self, node: _Node) -> None:
        """Give the edge of a node that no longer branches to its only child."""
        (child,) = node.children.values()
        parent = node.parent
        assert parent is not None
        child.edge, child.parent = node.edge + child.edge, parent
        parent.children[child.edge[:_WIDTH]] = child


def _path_to(node: _Node) -> bytes:
    """Return the packed path that ends at a node."""
    edges: list[bytes] = []
    above: _Node | None = node
    while above is not None:
        edges.append(above.edge)
        above = above.parent
    return b"".join(reversed(edges))
