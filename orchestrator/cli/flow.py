"""How is running text wrapped at words when its end is not known yet?

A word is written when it is known to have ended; what has been written stays. Knows styles and
cells, and no Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from orchestrator.cli.inline import PLAIN, Piece

MAX_WIDTH = 100
"""Wider text is hard to read, however wide the terminal."""
MIN_WIDTH = 8
"""Cells beside the indent that are used even where the terminal is narrower."""

_ATOM = re.compile(r"\s+|\S")


@dataclass(slots=True)
class Flow:
    """One line of running text, with `indent` cells before each line it is wrapped to.

    `column` counts the cells of the terminal's current line that are taken.
    """

    console: Console
    indent: int = 0
    column: int = 0
    _space: str = ""
    _word: list[Piece] = field(default_factory=list)
    _length: int = 0

    def write(self, pieces: Iterable[Piece]) -> None:
        """Take styled text without line breaks."""
        for text, style in pieces:
            for atom in _atoms(text):
                self._take((atom, style))

    def end(self) -> None:
        """Write the last word and the end of the line."""
        self._put_word()
        self.console.print(soft_wrap=True)

    def _take(self, piece: Piece) -> None:
        atom, style = piece
        if atom.isspace():
            self._put_word()
            self._space += atom.expandtabs(4)
            return
        if _is_wide(atom):  # such text has no spaces and may be parted anywhere
            self._put_word()
        room = self._width - self.indent
        while atom:  # a word longer than a line is parted where the line is full
            free = room - self._length
            self._word.append((atom[:free], style))
            self._length += cell_len(atom[:free])
            atom = atom[free:]
            if self._length >= room:
                self._put_word()

    def _put_word(self) -> None:
        if not self._word:
            return
        gap = len(self._space)
        if self.column + gap + self._length > self._width and self.column > self.indent:
            self._print(("\n" + " " * self.indent, PLAIN))
            self.column = self.indent
        else:
            self._print((self._space, PLAIN))
            self.column += gap
        for piece in self._word:
            self._print(piece)
        self.column += self._length
        self._space, self._word, self._length = "", [], 0

    def _print(self, piece: Piece) -> None:
        if piece[0]:
            self.console.print(Text(*piece), end="", soft_wrap=True)

    @property
    def _width(self) -> int:
        return max(min(self.console.width, MAX_WIDTH), self.indent + MIN_WIDTH)


def _is_wide(atom: str) -> bool:
    return len(atom) == 1 and cell_len(atom) == 2


def _atoms(text: str) -> Iterator[str]:
    """Part `text` into runs of space, single wide characters and runs of narrow ones."""
    run = ""
    for match in _ATOM.finditer(text):
        atom = match[0]
        if not (atom.isspace() or _is_wide(atom)):
            run += atom
            continue
        if run:
            yield run
        run = ""
        yield atom
    if run:
        yield run
