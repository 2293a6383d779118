r"""What are the tokens of a marked text, and how much of them is known from what was fed before?

A chat is encoded again every turn, several times over (`codec.py`), and grows by a few hundred
characters. So a text is encoded in pieces, cut only where that cannot change the tokens, and what
it has in common with texts and replies that were fed before is taken from there (`fed.py`).

    text    <s>system … |<|im_end|>\n<|im_start|>user\n … |<|im_end|>\n …
    cuts    0           41                               97

A *cut* lies where a clean special text begins (`spelling.py`) that does not follow white space: no
other special text can reach across it, and tokenizers encode both sides apart anyway (`Tokenizer`).
White space is left alone because some tokens swallow it.

Where a text goes on behind a sampled reply with anything but a special token, what follows is
encoded by itself, as a text that begins in the middle: no BOS, and none of the spaces that some
vocabularies put before a text. If that cannot be had, the reply is encoded anew.

Invariant: the tokens are those of encoding the whole text at once, whatever was encoded before,
but for replies that were sampled otherwise; those are as sampled, and spell the same.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from orchestrator.text.fed import N_BYTES, Edge, Fed, followed, replied
from orchestrator.text.guard import MARK, Guard
from orchestrator.text.spelling import CLOSE, OPEN, Speller, parts, read
from orchestrator.text.tokenizer import Tokenizer

Items = TypeVar("Items", str, bytes, tuple[int, ...], "array[int]")

_N_HEARD = 256  # replies that wait to be taken in by the next encoding
_N_COUNTED = 1 << 16  # bytes, beside twice the text, that may be encoded to count tokens in it
_ANCHORS = (b"\n", b".", b"a")  # a text that begins in the middle is encoded behind one of these


@dataclass(frozen=True, slots=True)
class Encoding:
    """A marked text, its spelling, and its tokens.

    `edges` hold all of them but those of the end, behind the last place where it may be cut. The
    BOS that a tokenizer adds belongs to what comes first.
    """

    text: str
    spelling: bytes
    tokens: array[int]
    edges: tuple[Edge, ...] = ()

    @property
    def n_said(self) -> int:
        """How many of the tokens are as they were sampled."""
        return sum(edge.n_said for edge in self.edges)


NOTHING = Encoding("", b"", array("i"))


class Encoder:
    """Encodes marked texts with one tokenizer. Safe to use from several threads.

    `n_bytes` bounds what it remembers of them.
    """

    def __init__(self, tokenizer: Tokenizer, guard: Guard, n_bytes: int = N_BYTES) -> None:
        self._tokenizer = tokenizer
        self._guard = guard
        self._speller = Speller(tokenizer, guard)
        bos = "" if tokenizer.bos is None else tokenizer.token_text(tokenizer.bos)
        self._bos_spelling = self._speller.text(bos)
        self._fed = Fed(n_bytes)
        self._heard: deque[tuple[Encoding, Sequence[int]]] = deque(maxlen=_N_HEARD)
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """What it remembers."""
        return self._fed.n_bytes

    def encode(self, text: str, known: Encoding | None = None) -> Encoding:
        """The tokens of marked `text`; with `known`, its head is taken from nowhere else."""
        spelling = self._speller.text(text)
        edges = self._longest(spelling) if known is None else self._along(known, spelling)
        while (encoding := self._continued(text, spelling, edges)) is None:
            edges = edges[:-1]
        return encoding

    def remember(self, encoding: Encoding) -> None:
        """Keep `encoding` for the texts to come."""
        with self._lock:
            self._fed.keep(encoding.edges)

    def hear(self, prompt: Encoding, tokens: Sequence[int]) -> None:
        """Note that `tokens` were sampled after `prompt`; quick, and waits for nothing."""
        self._heard.append((prompt, tokens))

    # ---- which tokens stand for a part of a text ----------------------------------------------

    def counts(self, encoding: Encoding, cuts: Sequence[int]) -> tuple[int, ...] | None:
        """How many of the tokens stand for the text before each of the ascending `cuts`.

        A token that reaches across a cut does not count. None where the text has so few places to
        be cut at that most of it would have to be encoded for every one.
        """
        counted = _Counted(self, encoding)
        offset, found = 0, []
        for start, end in pairwise((0, *cuts)):
            offset += len(self._speller.text(encoding.text[start:end]))
            count = counted.before(offset)
            if count is None:
                return None
            found.append(count)
        return tuple(found)

    def begun(self, piece: bytes, *, is_first: bool, joins: bool) -> Sequence[int]:
        """The tokens of the beginning of a piece; `joins`: it follows a sampled token."""
        encoded = self._joined(piece) if joins else self._piece(piece)
        return [*(self._bos(piece) if is_first else ()), *(encoded or ())]

    # ---- what is known of a text --------------------------------------------------------------

    def _longest(self, spelling: bytes) -> tuple[Edge, ...]:
        with self._lock:
            self._take_in()
            return self._fed.longest(spelling, self._next_cut)

    def _take_in(self) -> None:
        """Remember the replies that were heard. That takes a while, so whoever encodes does it."""
        while self._heard:
            prompt, tokens = self._heard.popleft()
            lead = prompt.spelling[_length(prompt.edges) :]
            of_lead = prompt.tokens[sum(len(edge.tokens) for edge in prompt.edges) :]
            for reply in self._speller.replies(tokens):
                self._fed.keep((*prompt.edges, replied(lead, of_lead, reply, tokens)))

    def _along(self, known: Encoding, spelling: bytes) -> tuple[Edge, ...]:
        """The edges of `known` that a spelling follows."""
        at = 0
        for number, edge in enumerate(known.edges):
            end = at + len(edge.text)
            if edge.said is not None:
                part = followed(edge, spelling, at)
                if part is not edge:
                    return known.edges[:number] if part is None else (*known.edges[:number], part)
            elif not (spelling.startswith(edge.text, at) and self._is_clean(spelling, end)):
                return known.edges[:number]
            at = end
        return known.edges

    def _next_cut(self, spelling: bytes, at: int) -> int:
        """The first place behind `at` where a spelling may be cut, its length if there is none."""
        while (at := spelling.find(OPEN, at + 1)) >= 0:
            if self._is_clean(spelling, at) and not _follows_space(spelling, at):
                return at
        return len(spelling)

    def _is_clean(self, spelling: bytes, at: int) -> bool:
        """Whether a clean special text begins at `at`."""
        if not spelling.startswith(OPEN, at):
            return False
        return spelling[at + 1 : spelling.index(CLOSE, at)] in self._speller.clean

    # ---- what is new --------------------------------------------------------------------------

    def _continued(self, text: str, spelling: bytes, head: tuple[Edge, ...]) -> Encoding | None:
        """The encoding that begins with `head`; None if what follows cannot be joined to that."""
        tokens, edges = array("i"), [*head]
        for edge in head:
            tokens.extend(edge.tokens)
        start = _length(head)
        bos = [] if head else self._bos(spelling)
        joins = bool(head) and head[-1].said is not None
        for begin, end in pairwise((start, *self._cuts(spelling, start))):
            piece = spelling[begin:end]
            encoded = self._joined(piece) if joins else self._piece(piece)
            if encoded is None:
                return None
            made = array("i", [*bos, *encoded])
            tokens.extend(made)
            if end < len(spelling):  # the end of the text is no cut: more may join its last token
                edges.append(Edge(piece, made))
            bos, joins = [], False
        tokens.extend(bos)
        return Encoding(text, spelling, tokens, tuple(edges))

    def _cuts(self, spelling: bytes, start: int) -> Iterator[int]:
        at = start
        while at < len(spelling):
            at = self._next_cut(spelling, at)
            yield at

    def _bos(self, spelling: bytes) -> list[int]:
        bos = self._tokenizer.bos
        if bos is None or not self._tokenizer.adds_bos or spelling.startswith(self._bos_spelling):
            return []
        return [bos]

    def _piece(self, spelling: bytes) -> list[int]:
        """The tokens of a piece that begins where tokenizers cut anyway."""
        text = read(spelling)
        if self._speller.text(text) == spelling:  # what looks like a special token is one
            return self._trusted(text)
        tokens: list[int] = []
        trusted = ""
        for part, is_plain in self._parts(spelling, text):
            if is_plain:
                tokens += self._trusted(trusted) + self._plain(part)
                trusted = ""
            else:
                trusted += part
        return tokens + self._trusted(trusted)

    def _trusted(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=True) if text else []

    def _parts(self, spelling: bytes, text: str) -> Iterator[tuple[str, bool]]:
        """The special texts and what lies between; that is plain if it looks like special ones."""
        bounds = [0]
        for part in parts(spelling):
            bounds.append(bounds[-1] + len(read(part)))
        spans = list(pairwise(bounds))
        special = set(spans[1::2])
        alike = [match.span() for match in self._guard.specials.finditer(text)]
        alike = [span for span in alike if span not in special]
        ends = [end for _, end in alike]
        for number, (start, end) in enumerate(spans):
            nearest = bisect_right(ends, start)
            overlaps = nearest < len(alike) and alike[nearest][0] < end
            yield text[start:end], overlaps and number % 2 == 0

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        tokens = self._tokenizer.encode(text, special=False)
        if not self._forms_special(text, tokens):
            return tokens
        broken = filter(None, self._guard.text(text).split(MARK))
        return [t for part in broken for t in self._tokenizer.encode(part, special=False)]

    def _forms_special(self, text: str, tokens: list[int]) -> bool:
        """Whether a special text in plain `text` became one token all the same (a marker's)."""
        found = set(self._guard.specials.findall(text))
        ids = {tuple(self._tokenizer.encode(special, special=True)) for special in found}
        return any((token,) in ids for token in set(tokens))

    # ---- what follows a reply -----------------------------------------------------------------

    def _joined(self, spelling: bytes) -> list[int] | None:
        """The tokens of a piece that begins behind a sampled token."""
        end = spelling.find(OPEN)
        plain, rest = (spelling, b"") if end < 0 else (spelling[:end], spelling[end:])
        tokens = self._in_the_middle(plain)
        return None if tokens is None else tokens + self._piece(rest)

    def _in_the_middle(self, plain: bytes) -> list[int] | None:
        """The tokens of a text that spell just that, whatever a tokenizer puts before a text."""
        tokens = self._piece(plain)
        if self._shown(tokens) == plain:
            return tokens
        for anchor in _ANCHORS:
            tokens = self._piece(anchor + plain)
            start, left = len(tokens), len(plain)
            while left > 0 and start:
                start -= 1
                left -= len(self._tokenizer.piece(tokens[start]))
            if self._shown(tokens[start:]) == plain:
                return tokens[start:]
        return None

    def _shown(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._tokenizer.piece, tokens))


class _Counted:
    """An encoding through which one walks from left to right."""

    def __init__(self, encoder: Encoder, encoding: Encoding) -> None:
        self._encoder = encoder
        self._edges = [*encoding.edges, _tail(encoding)]
        self._at = 0  # the edge, and where it begins
        self._start = 0
        self._n_before = 0
        self._n_bytes_left = _N_COUNTED + 2 * len(encoding.spelling)
        self._known: dict[tuple[bytes, bool, bool], array[int]] = {}

    def before(self, offset: int) -> int | None:
        """How many tokens stand for the spelling before `offset`; None if that takes too long."""
        if not offset:
            return 0
        edge = self._edges[self._at]
        while self._start + len(edge.text) < offset and self._at + 1 < len(self._edges):
            self._start += len(edge.text)
            self._n_before += len(edge.tokens)
            self._at += 1
            edge = self._edges[self._at]
        part = edge.text[: offset - self._start]
        within = self._within(edge, part)
        return None if within is None else self._n_before + within

    def _within(self, edge: Edge, part: bytes) -> int | None:
        said = edge.said
        if part == edge.text or not part:
            return len(edge.tokens) if part else 0
        if said is not None and len(part) > said.start:
            cut = bisect_right(said.cuts, len(part))
            return said.counts[cut - 1] if cut else said.n_before
        tokens = self._begun(part)
        return None if tokens is None else common_length(edge.tokens, tokens)

    def _begun(self, part: bytes) -> array[int] | None:
        joins = self._at > 0 and self._edges[self._at - 1].said is not None
        key = part, self._at == 0, joins
        if key not in self._known:
            self._n_bytes_left -= len(part)
            if self._n_bytes_left < 0:
                return None
            tokens = self._encoder.begun(part, is_first=self._at == 0, joins=joins)
            self._known[key] = array("i", tokens)
        return self._known[key]


def _tail(encoding: Encoding) -> Edge:
    """What is behind the last edge."""
    n_tokens = sum(len(edge.tokens) for edge in encoding.edges)
    return Edge(encoding.spelling[_length(encoding.edges) :], encoding.tokens[n_tokens:])


def _length(edges: Sequence[Edge]) -> int:
    return sum(len(edge.text) for edge in edges)


def _follows_space(spelling: bytes, at: int) -> bool:
    before = spelling[max(0, at - 5) : at].rstrip(CLOSE)
    return before.decode("utf-8", "ignore")[-1:].isspace()


def common_length(first: Items, second: Items) -> int:
    """The length of the longest common prefix, by comparing slices: a few passes at C speed."""
    low, step = 0, 256
    limit = min(len(first), len(second))
    while low < limit and first[low : low + step] == second[low : low + step]:
        low = min(low + step, limit)
        step *= 2
    high = min(low + step, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
