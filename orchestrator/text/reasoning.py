"""Which part of a streamed reply is reasoning, and which is the answer?

The splitter knows two markers and the side on which the reply begins. Every marker it meets is
taken out and decides the side of what follows, so a second opener, or a closer without an opener,
changes nothing visible. A reply that quotes a marker as text loses it: the stream does not say
which of the two was meant. All other characters are passed on unchanged, white space included.
"""

from __future__ import annotations

from typing import Literal

from orchestrator.errors import InvalidArgument
from orchestrator.text.literals import begun_length, literal_pattern

Side = Literal["reasoning", "content"]
Piece = tuple[Side, str]

OPEN, CLOSE = "<think>", "</think>"


def leaves_open(opener: str, *, opening: str = OPEN, closing: str = CLOSE) -> bool:
    """Whether `opener`, the text of a generation prompt, ends inside a reasoning block."""
    return opener.rfind(opening) > opener.rfind(closing)


class ReasoningSplitter:
    """Splits one reply. `inside`: whether the generation prompt left a reasoning block open.

    Raises InvalidArgument for a marker that is empty or begins the other one.
    """

    def __init__(self, *, inside: bool, opening: str = OPEN, closing: str = CLOSE) -> None:
        if opening.startswith(closing) or closing.startswith(opening):
            raise InvalidArgument("a reasoning marker is empty or begins the other; name two texts")
        self._side: Side = "reasoning" if inside else "content"
        self._opening = opening
        self._markers = (opening, closing)
        self._pattern = literal_pattern(self._markers)
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` completes, in order, none of them empty."""
        text = self._held + text
        pieces: list[Piece] = []
        start = 0
        for match in self._pattern.finditer(text):
            pieces.append((self._side, text[start : match.start()]))
            self._side = "reasoning" if match.group() == self._opening else "content"
            start = match.end()
        shown = len(text) - begun_length(text[start:], self._markers)
        pieces.append((self._side, text[start:shown]))
        self._held = text[shown:]
        return [piece for piece in pieces if piece[1]]

    def finish(self) -> list[Piece]:
        """What was held back as a possible marker, at the end of the reply."""
        text, self._held = self._held, ""
        return [(self._side, text)] if text else []
