"""How does Markdown reach the terminal while it is still being written?

Nothing is ever painted twice, so nothing flickers and a long reply scrolls like any other text:

    paragraph, list item, quote    word by word
    heading                        when its line has ended
    code                           line by line, highlighted
    table                          when its last row has ended

A line break stays a line break, as replies mean it. Rejected: repainting the last block with
``rich.live``, which flickers and breaks once a block is taller than the terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.console import Console
from rich.style import Style
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from orchestrator.cli.flow import Flow
from orchestrator.cli.inline import CODE, DIM, InlineStream, inline

LEXED_LINES = 200
"""Lines of code before the current one that the highlighter looks at."""
CODE_THEME = "ansi_dark"

_HEADING = Style(bold=True, color="magenta")
_MARK = Style(color="yellow")

_FENCE = re.compile(r"( {0,12})(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$")
_HEAD = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)[ \t#]*$")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
_ITEM = re.compile(r"([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+")
_QUOTE = re.compile(r"[ \t]*>[ \t]?")
_TABLE = re.compile(r"[ \t]*\|")
_TABLE_RULE = re.compile(r"[ \t]*\|([ \t]*:?-+:?[ \t]*\|)+[ \t]*$")
_CELL_END = re.compile(r"(?<!\\)\|")

_UNDECIDED = re.compile(r"[ \t]*(#{0,6}|[-*+_~` \t]*|\d{1,9}[.)]?|>)[ \t]*$")
"""A beginning of a line that may still become more than one kind of block."""
_WHOLE = re.compile(r"[ \t]*(#{1,6}[ \t]|`{3}|~{3}|\|)")
"""A beginning of a line that is shown only when the line has ended."""


@dataclass(slots=True)
class _Code:
    """A fenced block that is open: `mark` closes it, `indent` is taken off every line."""

    mark: str
    indent: int
    language: str
    lines: list[str] = field(default_factory=list)

    def closed_by(self, line: str) -> bool:
        text = line.strip()
        return len(text) >= len(self.mark) and text == self.mark[0] * len(text)

    def highlighted(self, line: str) -> Text:
        """Return `line` in colour, as it reads after the lines before it."""
        line = line[min(self.indent, len(line) - len(line.lstrip(" "))) :]
        self.lines = [*self.lines[-LEXED_LINES:], line]
        if not self.language or not line.strip():
            return Text(line, CODE)
        syntax = Syntax("", self.language, theme=CODE_THEME, background_color="default")
        block = syntax.highlight("\n".join(self.lines))
        block.rstrip()
        # Lexers drop blank lines at the beginning, so the line is taken from the end.
        return block.split("\n")[-1]


class MarkdownStream:
    """Writes Markdown to a terminal as it comes: `feed` text, then `finish`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = ""  # the current line, as far as nothing was made of it
        self._flow: Flow | None = None  # the current line, once it is being written
        self._inline = InlineStream()
        self._code: _Code | None = None
        self._table: list[str] = []
        self._begun = False
        self._blank = False  # a blank line is owed before the next block

    def feed(self, text: str) -> None:
        """Take more text and write what can be told."""
        self._line += text
        while "\n" in self._line:
            line, _, self._line = self._line.partition("\n")
            self._end_line(line)
        if self._flow is not None:
            self._flow.write(self._inline.feed(self._line))
            self._line = ""
        elif self._shown_as_it_comes(self._line):
            self._open_flow(self._line)
            self._line = ""
        self._console.file.flush()

    def finish(self) -> None:
        """Write all that is left."""
        if self._line or self._flow:
            self._end_line(self._line)
        self._line = ""
        self._close_table()
        self._console.file.flush()

    def _shown_as_it_comes(self, line: str) -> bool:
        if self._code or not line:
            return False
        return not (_UNDECIDED.match(line) or _WHOLE.match(line))

    def _end_line(self, line: str) -> None:
        if self._flow is not None:
            self._end_flow(self._flow, line)
        elif self._code is not None:
            self._code_line(self._code, line)
        elif _TABLE.match(line):
            self._table.append(line)
        else:
            self._whole_line(line)

    def _whole_line(self, line: str) -> None:
        self._close_table()
        if not line.strip():
            self._blank = self._begun
        elif fence := _FENCE.match(line):
            self._code = _Code(fence[2], len(fence[1]), fence[3])
            self._print(Text(line.strip(), DIM))
        elif heading := _HEAD.match(line):
            self._print(Text.assemble(*inline(heading[1], _HEADING)))
        elif _RULE.match(line):
            self._print(Text("─" * min(self._console.width, 40), DIM))
        else:
            self._end_flow(self._open_flow(line), "")

    def _open_flow(self, line: str) -> Flow:
        """Write the mark of a line, and of its text what can be told."""
        self._close_table()
        lead = Text()
        if item := _ITEM.match(line):
            bullet = item[2] if item[2][0].isdigit() else "•"
            lead = Text(f"{item[1].expandtabs(4)}{bullet} ", _MARK)
            line = line[item.end() :]
        elif quote := _QUOTE.match(line):
            lead = Text("│ ", DIM)
            line = line[quote.end() :]
        self._print(lead, end="")
        self._flow = Flow(self._console, indent=lead.cell_len, column=lead.cell_len)
        self._inline = InlineStream()
        self._flow.write(self._inline.feed(line))
        return self._flow

    def _end_flow(self, flow: Flow, line: str) -> None:
        flow.write(self._inline.feed(line, final=True))
        flow.end()
        self._flow = None

    def _code_line(self, code: _Code, line: str) -> None:
        if code.closed_by(line):
            self._code = None
            self._print(Text(line.strip(), DIM))
        else:
            self._print(code.highlighted(line))

    def _close_table(self) -> None:
        lines, self._table = self._table, []
        if len(lines) >= 2 and _TABLE_RULE.match(lines[1]):
            self._print(_table(lines))
            return
        for line in lines:  # bars that make no table are text
            self._print(Text.assemble(*inline(line)))

    def _print(self, what: Text | Table, end: str = "\n") -> None:
        if self._blank:
            self._console.print()
        self._begun, self._blank = True, False
        # Text wraps in the terminal itself, so that a copied line of code is one line.
        self._console.print(what, end=end, soft_wrap=isinstance(what, Text))


def _table(lines: list[str]) -> Table:
    """Return the rows under a head line and a line of dashes as a table."""
    head, rule, *rows = ([cell.strip() for cell in _cells(line)] for line in lines)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, title in enumerate(head):
        dashes = rule[place] if place < len(rule) else ""
        table.add_column(_cell(title), justify=_justify(dashes))
    for row in rows:
        table.add_row(*(_cell(cell) for cell in row[: len(head)]))
    return table


def _cells(line: str) -> list[str]:
    line = line.strip().removeprefix("|")
    cells = _CELL_END.split(line)
    return cells[:-1] if cells and not cells[-1].strip() else cells


def _cell(text: str) -> Text:
    return Text.assemble(*inline(text))


def _justify(dashes: str) -> Literal["left", "center", "right"]:
    if dashes.endswith(":"):
        return "center" if dashes.startswith(":") else "right"
    return "left"
