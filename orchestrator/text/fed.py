r"""Which tokens stood for a text when it was last fed to the model?

A reply is sampled as certain ids. Encoding its text again often gives others (``.`` and ``\n\n``
against ``.\n\n``), and then no state that was kept of it serves the next turn. So everything that
was fed is kept as a tree over spellings (`spelling.py`), whose edges hold their tokens:

    root ─ <|im_start|>user\nhi ─ <|im_end|>\n ┬ <|im_start|>assistant\n │ Hello│.│\n\n│Who ─ …
                                               └ <|im_start|>assistant\n │ Hi│!           ─ …
           pieces, encoded                       end of a prompt         replies, as sampled

A *piece* reaches from one place where any text may be cut to the next (`encoder.py`); a *reply*
begins with the end of its prompt, behind the last such place. A text follows a piece if it repeats
all of it and may be cut there. It follows a reply

- to its end, whatever comes then;
- else to its last token behind which a special token or a word begins in the text, if it follows
  that far: what is left is then encoded as it would be anyway (a space that differs is a
  difference, and the reply is its own up to the word before);
- past a JSON object that differs in writing alone (`same_json.py`), if all of the object was
  sampled. Its tokens are the sampled ones, and spell it as the model wrote it.

Of all paths that a text follows the longest counts, then the one of most replies (and rather whole
ones), then the latest.

Invariants: but for such objects, the tokens of an edge spell its text, or are what its text was
encoded as; a parent was used no earlier than its children; the bytes held are within the budget.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.text.same_json import same_objects
from orchestrator.text.spelling import CLOSE, OPEN, Reply

N_BYTES = 64 << 20
"""What is held at most: a long chat takes a few hundred thousand bytes, whatever its turns."""

_NODE_BYTES = 700  # of an edge and its node, without what they hold
_N_NEAR = 8  # replies to one prompt that are tried, on either side of where a text would stand
_N_SORTED = 1 << 16  # bytes of a text that decide where it would stand


@dataclass(frozen=True, slots=True)
class Said:
    """The part of an edge that was sampled: from byte `start` and after `n_before` tokens.

    ``counts[i]`` tokens of the edge spell it up to ``cuts[i]``, the last of which is its end; that
    is where the reply ended unless `is_part`.
    """

    start: int
    n_before: int
    cuts: array[int]
    counts: array[int]
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """A stretch of text and its tokens; `said` is None for a piece."""

    text: bytes
    tokens: array[int]
    said: Said | None = None

    @property
    def n_said(self) -> int:
        """Its sampled tokens."""
        return 0 if self.said is None else len(self.tokens) - self.said.n_before

    @property
    def n_bytes(self) -> int:
        """What it takes in memory."""
        cuts = 0 if self.said is None else 2 * len(self.said.cuts)
        return _NODE_BYTES + len(self.text) + 4 * (len(self.tokens) + cuts)


def replied(lead: bytes, tokens: array[int], reply: Reply, sampled: Sequence[int]) -> Edge:
    """The edge of a `reply` after `lead`, the end of its prompt, which `tokens` stand for."""
    start, n_before = len(lead), len(tokens)
    cuts = array("I", (start + cut for cut in reply.cuts))
    counts = array("I", (n_before + count for count in reply.counts))
    taken = array("i", sampled[: reply.counts[-1]])
    return Edge(lead + reply.spelling, tokens + taken, Said(start, n_before, cuts, counts))


# ---- how far a text follows a reply --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stretch:
    """``[start, end)`` of an edge, which the text repeats `shift` bytes further on."""

    start: int
    end: int
    shift: int


def followed(edge: Edge, text: bytes, at: int) -> Edge | None:
    """As much of a reply's edge as `text` follows from `at` on, with the text as it is there.

    The edge itself where it is followed to the end word by word, None where it is not at all.
    """
    said = edge.said
    if said is None:
        return None
    if text.startswith(edge.text, at) and _may_end(said, -1, text, at + len(edge.text)):
        return edge
    stretches = list(_stretches(edge.text, said.start, text, at))
    for number in range(len(stretches), 0, -1):
        cut = _cut(said, stretches[number - 1], text)
        if cut is not None:
            return _part(edge, said, cut, stretches[:number], text, at)
    return None


def _stretches(known: bytes, said: int, text: bytes, at: int) -> Iterator[_Stretch]:
    start, shift = 0, at
    while True:
        end = start + _common(known, start, text, start + shift)
        yield _Stretch(start, end, shift)
        ends = None
        if end < len(known) and end + shift < len(text):
            ends = _past_object(known, max(start, said), end, text, shift)
        if ends is None:
            return
        start, shift = ends[0], ends[1] - ends[0]


def _past_object(
    known: bytes, start: int, parted: int, text: bytes, shift: int
) -> tuple[int, int] | None:
    """Where equal objects end that begin in ``[start, parted)`` of both texts, behind specials."""
    start = max(start, known.rfind(CLOSE, start, parted) + 1)
    if known.find(b"{", start, parted) < 0:
        return None
    first = _up_to_special(known, start)
    second = _up_to_special(text, start + shift)
    n_common = len(known[start:parted].decode("utf-8", "ignore"))
    ends = same_objects(first, second, n_common)
    if ends is None:
        return None
    return start + len(first[: ends[0]].encode()), start + shift + len(second[: ends[1]].encode())


def _up_to_special(text: bytes, start: int) -> str:
    end = text.find(OPEN, start)
    return text[start : len(text) if end < 0 else end].decode()


def _cut(said: Said, stretch: _Stretch, text: bytes) -> int | None:
    """The number of the last cut in a stretch up to which tokens may be taken."""
    first = bisect_left(said.cuts, stretch.start)
    for number in range(bisect_right(said.cuts, stretch.end) - 1, first - 1, -1):
        if _may_end(said, number, text, said.cuts[number] + stretch.shift):
            return number
    return None


def _may_end(said: Said, cut: int, text: bytes, at: int) -> bool:
    """Whether sampled tokens may be taken up to a cut which is `at` in a text.

    That is where the reply ended, and else where tokenizers cut anyway: at a special token, and at
    a space behind a word.
    """
    if cut in (-1, len(said.cuts) - 1) and not said.is_part:
        return True
    if at == len(text) or text.startswith(OPEN, at):
        return True
    return text.startswith(b" ", at) and not text[at - 1 : at].isspace()


def _part(
    edge: Edge, said: Said, cut: int, stretches: Sequence[_Stretch], text: bytes, at: int
) -> Edge:
    """An edge up to a cut that lies in the last of `stretches`."""
    cuts, counts = array("I"), array("I")
    for stretch in stretches:
        first = bisect_left(said.cuts, stretch.start)
        last = min(bisect_right(said.cuts, stretch.end), cut + 1)
        shift = stretch.shift - at
        cuts.extend(place + shift for place in said.cuts[first:last])
        counts.extend(said.counts[first:last])
    tokens = edge.tokens[: counts[-1]]
    is_part = said.is_part or cut < len(said.cuts) - 1
    taken = Said(said.start, said.n_before, cuts, counts, is_part)
    return Edge(text[at : at + cuts[-1]], tokens, taken)


def _common(first: bytes, at_first: int, second: bytes, at_second: int) -> int:
    """How many bytes the ends of two texts have in common."""
    low, step = 0, 256
    limit = min(len(first) - at_first, len(second) - at_second)

    def agree(start: int, end: int) -> bool:
        return (
            first[at_first + start : at_first + end] == second[at_second + start : at_second + end]
        )

    while low < limit and agree(low, min(low + step, limit)):
        low = min(low + step, limit)
        step *= 2
    high = min(low + step, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if agree(low, middle):
            low = middle
        else:
            high = middle - 1
    return low


# ---- the tree ------------------------------------------------------------------------------------


class _Node:
    """The end of `edge`. `replies` are sorted by their texts, of which several may be alike."""

    __slots__ = ("edge", "parent", "pieces", "replies", "used")

    def __init__(self, edge: Edge, parent: _Node | None) -> None:
        self.edge = edge
        self.parent = parent
        self.pieces: dict[bytes, _Node] = {}
        self.replies: list[_Node] = []
        self.used = 0

    def near(self, text: bytes, at: int) -> list[_Node]:
        """The replies that `text` may follow from `at` on."""
        if not self.replies:
            return []
        place = bisect_left(self.replies, text[at : at + _N_SORTED], key=_text)
        return self.replies[max(0, place - _N_NEAR) : place + _N_NEAR]

    def find(self, edge: Edge) -> _Node | None:
        """The child of the same text and, for a reply, the same tokens."""
        if edge.said is None:
            return self.pieces.get(edge.text)
        for place in range(bisect_left(self.replies, edge.text, key=_text), len(self.replies)):
            node = self.replies[place]
            if node.edge.text != edge.text:
                break
            if node.edge.tokens == edge.tokens and node.edge.said == edge.said:
                return node
        return None

    def add(self, edge: Edge) -> _Node:
        """Return a new child."""
        node = _Node(edge, self)
        if edge.said is None:
            self.pieces[edge.text] = node
        else:
            place = bisect_right(self.replies, edge.text, key=_text)
            self.replies.insert(place, node)
        return node

    def remove(self, child: _Node) -> None:
        """Take a child away."""
        if child.edge.said is None:
            del self.pieces[child.edge.text]
        else:
            self.replies.remove(child)


def _text(node: _Node) -> bytes:
    return node.edge.text


@dataclass(frozen=True, slots=True)
class _Found:
    """A path that a text follows up to `at`: the one `before`, and `edge`, which led to `node`.

    The edge has the text as it is here. That of the node may be a longer reply, or have JSON
    objects as they were written before: what followed it then may follow it here. `n_replies`
    counts whole ones twice.
    """

    at: int
    n_replies: int
    node: _Node
    edge: Edge | None = None
    before: _Found | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.at, self.n_replies, self.node.used

    def along(self, edge: Edge, node: _Node) -> _Found:
        """It and an edge more."""
        is_whole = len(edge.tokens) == len(node.edge.tokens)
        n_replies = 0 if edge.said is None else 1 + is_whole
        return _Found(self.at + len(edge.text), self.n_replies + n_replies, node, edge, self)

    def path(self) -> tuple[Edge, ...]:
        """All its edges."""
        edges: list[Edge] = []
        found: _Found | None = self
        while found is not None and found.edge is not None:
            edges.append(found.edge)
            found = found.before
        return tuple(reversed(edges))


def _further(found: _Found, text: bytes, next_cut: Callable[[bytes, int], int]) -> Iterator[_Found]:
    node, at = found.node, found.at
    if node.pieces:
        cut = next_cut(text, at)
        piece = node.pieces.get(text[at:cut]) if cut < len(text) else None
        if piece is not None:
            yield found.along(piece.edge, piece)
    for reply in node.near(text, at):
        part = followed(reply.edge, text, at)
        if part is not None:
            yield found.along(part, reply)


class Fed:
    """What was fed, least recently used first out. To be used by one thread at a time."""

    def __init__(self, n_bytes: int = N_BYTES) -> None:
        self._root = _Node(Edge(b"", array("i")), None)
        self._nodes: OrderedDict[_Node, None] = OrderedDict()  # as they were last used
        self._n_bytes_most = n_bytes
        self._clock = 0
        self.n_bytes = 0

    def longest(self, text: bytes, next_cut: Callable[[bytes, int], int]) -> tuple[Edge, ...]:
        """The edges of the longest path that a spelling follows.

        `next_cut` says where, after a position, it may be cut next: its length for nowhere.
        """
        best = _Found(0, 0, self._root)
        open_ = [best]
        while open_:
            found = open_.pop()
            best = max(best, found, key=lambda each: each.rank)
            open_ += _further(found, text, next_cut)
        return best.path()

    def keep(self, path: Sequence[Edge]) -> None:
        """Hold a path, and note that it was used."""
        node = self._root
        for edge in path:
            child = node.find(edge)
            if child is None:
                child = node.add(edge)
                self.n_bytes += edge.n_bytes
            node = child
        self._use(node)
        while self.n_bytes > self._n_bytes_most:
            self._drop_oldest()

    def _use(self, node: _Node) -> None:
        self._clock += 1
        while node.parent is not None:
            node.used = self._clock
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            node = node.parent

    def _drop_oldest(self) -> None:
        """Let go of what was used longest ago: never what another node hangs on."""
        node, _ = self._nodes.popitem(last=False)
        self.n_bytes -= node.edge.n_bytes
        assert node.parent is not None
        node.parent.remove(node)
