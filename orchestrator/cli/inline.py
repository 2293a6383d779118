"""Which parts of a line are bold, code or a link, while the line is still being written?

Pure: text in, styled pieces out. A span is held until it closes; one that has not closed after
`SPAN_LIMIT` characters or at the end of its line is literal text, so nothing is ever lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.style import Style

SPAN_LIMIT = 240
"""Characters a span may stay open while more text is awaited."""

PLAIN = Style()
DIM = Style(dim=True)
CODE = Style(color="cyan")

Piece = tuple[str, Style]


@dataclass(frozen=True, slots=True)
class _Span:
    """A kind of markup: `opens` matches where it may begin, `whole` once it is complete."""

    opens: re.Pattern[str]
    whole: re.Pattern[str]
    style: Style
    nests: bool = True


def _delimited(mark: str, style: Style) -> _Span:
    """Return the span between two `mark`: none inside a word, none beside a space."""
    m, c = re.escape(mark), re.escape(mark[0])
    opens = rf"(?<![0-9A-Za-z]){m}(?!{c})(?=\S|$)"
    after = r"(?!\w)" if mark[0] == "_" else ""
    whole = rf"{opens}(?=\S)(.+?)(?<![\s{c}]){m}(?!{c}){after}"
    return _Span(re.compile(opens), re.compile(whole), style)


_SPANS = (
    _Span(re.compile("`"), re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)"), CODE, nests=False),
    *(_delimited(mark * 3, Style(bold=True, italic=True)) for mark in "*_"),
    *(_delimited(mark * 2, Style(bold=True)) for mark in "*_"),
    *(_delimited(mark, Style(italic=True)) for mark in "*_"),
    _delimited("~~", Style(strike=True)),
)
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^()\s]+)\)")
_LINK_OPENS = re.compile(r"\[[^\]\n]*(\](\([^()\s]*)?)?$")
_ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")
_LITERAL = re.compile(r"[^*_`~\[\\]+")
_RUN = re.compile(r"(.)\1*", re.DOTALL)


def inline(text: str, style: Style = PLAIN) -> list[Piece]:
    """Return the styled pieces of a text that is complete."""
    return _scan(text, 0, style, final=True)[0]


class InlineStream:
    """Styles one line as it comes."""

    def __init__(self) -> None:
        # From one character before the first undecided one: a mark inside a word is no mark.
        self._text = ""
        self._place = 0

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """Return the pieces that can be told now; all that are left if `final`."""
        self._text += text
        pieces, place = _scan(self._text, self._place, PLAIN, final=final)
        kept = max(place - 1, 0)
        self._text, self._place = self._text[kept:], place - kept
        return pieces


def _scan(text: str, place: int, style: Style, *, final: bool) -> tuple[list[Piece], int]:
    """Return the pieces from `place` on, and the first place that waits for more text."""
    pieces: list[Piece] = []
    while place < len(text):
        found = _piece(text, place, style, final=final)
        if found is None:
            break
        length, parts = found
        pieces += parts
        place += length
    return pieces, place


def _piece(text: str, place: int, style: Style, *, final: bool) -> tuple[int, list[Piece]] | None:
    """Return the length and the pieces of what stands at `place`, None while it is undecided."""
    if literal := _LITERAL.match(text, place):
        return len(literal[0]), [(literal[0], style)]
    if escape := _ESCAPE.match(text, place):
        return 2, [(escape[1], style)]
    complete = _link(text, place, style) or _span(text, place, style)
    if complete is not None:
        # A mark at the very end may yet be followed by another, which makes it a different mark.
        return complete if final or place + complete[0] < len(text) else None
    if not final and _may_open(text, place):
        return None
    run = _RUN.match(text, place)
    marks = run[0] if run else text[place]
    return len(marks), [(marks, style)]


def _may_open(text: str, place: int) -> bool:
    if len(text) - place > SPAN_LIMIT:
        return False
    run = _RUN.match(text, place)
    if (run and run.end() == len(text)) or _LINK_OPENS.match(text, place):
        return True
    return any(span.opens.match(text, place) for span in _SPANS)


def _span(text: str, place: int, style: Style) -> tuple[int, list[Piece]] | None:
    for span in _SPANS:
        # The end bounds the search: a line of nothing but openers stays linear.
        if match := span.whole.match(text, place, place + 2 * SPAN_LIMIT):
            inner, combined = match[match.lastindex or 0], style + span.style
            return len(match[0]), inline(inner, combined) if span.nests else [(inner, combined)]
    return None


def _link(text: str, place: int, style: Style) -> tuple[int, list[Piece]] | None:
    match = _LINK.match(text, place)
    if match is None:
        return None
    # The address is always shown: a model may call it by any name.
    label, address = match[1], match[2]
    pieces = [(label, style + Style(underline=True))]
    return len(match[0]), pieces if label == address else [*pieces, (f" ({address})", style + DIM)]
