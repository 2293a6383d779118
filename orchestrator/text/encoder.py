r"""What are the tokens of a marked text, and how much of them is known from the texts before?

A chat is encoded again every turn, three times over (`codec.py`), and grows by a few hundred
characters. So a text is encoded in pieces, cut only where that cannot change the tokens, and every
piece at the head that an earlier text had in common is taken from there.

    text    <s>system … |<|im_end|>\n<|im_start|>user\n … |<|im_end|>\n …
    cuts    0           41                               97

A *cut* lies where a clean special text begins that does not follow white space. Clean: its first
character is an inner character of no special text, and none of its others begins one; so no other
special text can reach across the cut or into it, and tokenizers encode both sides apart anyway
(`Tokenizer`). White space is left alone because some tokens swallow it.

Invariant: the tokens are those of encoding the whole text at once, whatever was encoded before.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from orchestrator.text.guard import MARK, Guard, unmarked
from orchestrator.text.literals import literal_pattern
from orchestrator.text.tokenizer import Tokenizer

Items = TypeVar("Items", str, tuple[int, ...])

REMEMBERED = 16  # texts, as many as chats that are likely to go on side by side


@dataclass(frozen=True, slots=True)
class Encoding:
    """A marked text and its tokens. `counts[i]` tokens stand for the text before `cuts[i]`.

    Both begin with 0 and ascend; cuts are in characters. The BOS that a tokenizer adds belongs
    to the first piece.
    """

    text: str
    tokens: tuple[int, ...]
    cuts: tuple[int, ...] = (0,)
    counts: tuple[int, ...] = (0,)


_NOTHING = Encoding("", ())


class Encoder:
    """Encodes marked texts with one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, guard: Guard) -> None:
        self._tokenizer = tokenizer
        self._guard = guard
        self._clean = literal_pattern(_clean(tokenizer.special_texts()))
        self._bos_text = "" if tokenizer.bos is None else tokenizer.token_text(tokenizer.bos)
        self._recent: deque[Encoding] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()

    def encode(self, text: str, known: Sequence[Encoding] | None = None) -> Encoding:
        """The tokens of marked `text`; `known` encodings (those remembered) spare its head."""
        if known is None:
            with self._lock:
                known = tuple(self._recent)
        head, kept = max(
            ((each, self._kept(each, text)) for each in known),
            key=lambda found: found[0].cuts[found[1]],
            default=(_NOTHING, 0),
        )
        return self._continued(text, head, kept)

    def remember(self, encoding: Encoding) -> None:
        """Keeps `encoding` for the texts to come, in place of the one that it continues."""
        with self._lock:
            for old in self._recent:
                if common_length(old.text, encoding.text) * 2 > len(old.text):
                    self._recent.remove(old)
                    break
            self._recent.append(encoding)

    def _kept(self, known: Encoding, text: str) -> int:
        """The index of the last cut of `known` up to which `text` is the same."""
        if len(known.cuts) == 1:
            return 0
        at = bisect_right(known.cuts, common_length(known.text, text)) - 1
        while at > 0 and not self._clean.match(text, known.cuts[at]):
            at -= 1
        return at

    def _continued(self, text: str, head: Encoding, kept: int) -> Encoding:
        start = head.cuts[kept]
        cuts, counts = [*head.cuts[: kept + 1]], [*head.counts[: kept + 1]]
        tokens = [*head.tokens[: counts[-1]]] if start else self._bos(text)
        for begin, end in pairwise((start, *self._cuts(text, start), len(text))):
            tokens += self._piece(text[begin:end])
            cuts.append(end)
            counts.append(len(tokens))
        # The end of the text is no cut: more text may join its last token.
        return Encoding(text, tuple(tokens), tuple(cuts[:-1]), tuple(counts[:-1]))

    def _bos(self, text: str) -> list[int]:
        bos = self._tokenizer.bos
        if bos is None or not self._tokenizer.adds_bos or text.startswith(self._bos_text):
            return []
        return [bos]

    def _cuts(self, text: str, start: int) -> Iterator[int]:
        for match in self._clean.finditer(text, start):
            at = match.start()
            if at > start and not text[at - 1].isspace():
                yield at

    def _piece(self, text: str) -> list[int]:
        """The tokens of a piece: what lies between two specials is plain if it has a mark."""
        tokens: list[int] = []
        done = 0
        for start, end in self._plain_spans(text):
            tokens += self._trusted(text[done:start])
            tokens += self._plain(text[start:end])
            done = end
        return tokens + self._trusted(text[done:])

    def _trusted(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=True) if text else []

    def _plain_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """``[start, end)`` of every stretch between special texts that holds a mark."""
        if MARK not in text:
            return
        start = 0
        for match in self._guard.specials.finditer(text):
            if MARK in text[start : match.start()]:
                yield start, match.start()
            start = match.end()
        if MARK in text[start:]:
            yield start, len(text)

    def _plain(self, marked: str) -> list[int]:
        text = unmarked(marked)
        tokens = self._tokenizer.encode(text, special=False)
        if not self._forms_special(text, tokens):
            return tokens
        parts = (self._tokenizer.encode(part, special=False) for part in marked.split(MARK))
        return [token for part in parts for token in part]

    def _forms_special(self, text: str, tokens: list[int]) -> bool:
        """Whether a special text in plain `text` became one token all the same (a marker's)."""
        found = set(self._guard.specials.findall(text))
        ids = {tuple(self._tokenizer.encode(special, special=True)) for special in found}
        return any((token,) in ids for token in set(tokens))


def _clean(specials: Iterable[str]) -> list[str]:
    """The special texts at whose beginning any text may be cut."""
    specials = [text for text in specials if text]
    firsts = {text[0] for text in specials}
    inner = {char for text in specials for char in text[1:]}
    return [text for text in specials if text[0] not in inner and firsts.isdisjoint(text[1:])]


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
