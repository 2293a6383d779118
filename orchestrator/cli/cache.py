"""``orchestrator cache``: what did the last requests reuse, and what kept them from more?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from orchestrator.cli.inline import DIM, PLAIN
from orchestrator.cli.render import clean, print_dim, terminal

if TYPE_CHECKING:
    from orchestrator.store.journal import Entry

N_LAST = 20

_COLUMNS = ("time", "model", "prompt", "reused", "prefilled", "from")
_COUNTS = ("prompt", "reused", "prefilled")
_MODEL_MOST = 16  # characters of a model's name
_WIDE = 110  # columns from which on the reason has a column of its own
_INDENT = 10


@click.group()
def cache() -> None:
    """Say what is reused from request to request."""


@cache.command()
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=N_LAST,
    show_default=True,
    metavar="N",
    help="So many requests.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain(last: int, as_json: bool) -> None:
    """Say what the last requests reused, and why not more.

    Below them, causes that came again are summed up once, with what they cost.
    """
    from orchestrator.store.journal import read_journal

    journal = read_journal()
    err = terminal(stderr=True)
    if journal.n_damaged:
        lines = "line was" if journal.n_damaged == 1 else "lines were"
        print_dim(err, f"{journal.n_damaged:,} damaged {lines} skipped in {journal.path}")
    entries = journal.entries[-last:]
    if as_json:
        click.echo(_as_json(entries))
    elif entries:
        _show(entries)
    else:
        print_dim(
            err,
            f"no request is recorded in {journal.path} yet; ask something "
            "(orchestrator chat), then call this again",
        )


def _show(entries: Sequence[Entry]) -> None:
    from orchestrator.cli.causes import reason, repeated

    out = terminal()
    rows = [_cells(entry) for entry in entries]
    reasons = [reason(entry.record.miss) for entry in entries]
    if out.width >= _WIDE:
        out.print(_table(rows, reasons))
    else:
        _print_narrow(out, rows, reasons)
    lines = repeated(entries)
    if lines:
        out.print()
    models = {entry.model for entry in entries}
    for each in lines:
        name = f"{clean(each.model)}: " if len(models) > 1 else ""
        out.print(Text(name + each.line()), soft_wrap=not out.is_terminal)


def _cells(entry: Entry) -> list[str]:
    """Return what is told of a request beside the reason."""
    from orchestrator.cli.causes import origin

    usage = entry.record.usage
    model = clean(entry.model)
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens)
    return [
        _when(entry.record.at),
        model if len(model) <= _MODEL_MOST else f"{model[: _MODEL_MOST - 1]}…",
        *(f"{count:,}" for count in counts),
        clean(origin(usage)),
    ]


def _table(rows: Sequence[Sequence[str]], reasons: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=DIM)
    for name in _COLUMNS:
        justify: JustifyMethod = "right" if name in _COUNTS else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    table.add_column("why", ratio=1, overflow="fold")
    for row, told in zip(rows, reasons, strict=True):
        table.add_row(*map(Text, row), Text(told))
    return table


def _print_narrow(out: Console, rows: Sequence[Sequence[str]], reasons: Sequence[str]) -> None:
    """Print each request on a line, and the reason below it."""
    widths = [max(map(cell_len, column)) for column in zip(_COLUMNS, *rows, strict=True)]

    def line(cells: Sequence[str], style: Style = PLAIN) -> Text:
        padded = []
        for name, cell, width in zip(_COLUMNS, cells, widths, strict=True):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if name in _COUNTS else cell + space)
        return Text("  ".join(padded).rstrip(), style)

    out.print(line(_COLUMNS, DIM), soft_wrap=True)
    for row, told in zip(rows, reasons, strict=True):
        out.print(line(row), soft_wrap=True)
        if told and out.is_terminal:
            out.print(Padding(Text(told, DIM), (0, 0, 0, _INDENT)))
        elif told:
            out.print(Text(" " * _INDENT + told), soft_wrap=True)


def _when(at: float) -> str:
    then = datetime.fromtimestamp(at)
    today = then.date() == datetime.now().date()
    return then.strftime("%H:%M:%S" if today else "%b %d %H:%M")


def _as_json(entries: Sequence[Entry]) -> str:
    from orchestrator.cli.causes import repeated

    requests = [{"model": each.model, **dataclasses.asdict(each.record)} for each in entries]
    causes = [dataclasses.asdict(each) for each in repeated(entries)]
    return json.dumps({"requests": requests, "repeated": causes}, ensure_ascii=False)
