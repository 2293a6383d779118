"""``orchestrator cache``: what did the last requests reuse, and what kept them from more?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from orchestrator.cli.inline import DIM
from orchestrator.cli.render import clean, print_dim, terminal

if TYPE_CHECKING:
    from orchestrator.store.journal import Entry

N_LAST = 20


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
    from orchestrator.cli.causes import repeated

    out = terminal()
    out.print(_table(entries))
    lines = repeated(entries)
    if lines:
        out.print()
    models = {entry.model for entry in entries}
    for each in lines:
        name = f"{clean(each.model)}: " if len(models) > 1 else ""
        out.print(Text(name + each.line()), soft_wrap=not out.is_terminal)


def _table(entries: Sequence[Entry]) -> Table:
    from orchestrator.cli.causes import origin, reason

    table = Table(box=None, padding=(0, 2, 0, 0), header_style=DIM)
    table.add_column("time", no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=16)
    for name in ("prompt", "reused", "prefilled"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("why", ratio=1, min_width=20, overflow="fold")
    for entry in entries:
        usage = entry.record.usage
        table.add_row(
            _when(entry.record.at),
            Text(clean(entry.model)),
            f"{usage.prompt_tokens:,}",
            f"{usage.cached_tokens:,}",
            f"{usage.prefilled_tokens:,}",
            Text(clean(origin(usage))),
            Text(reason(entry.record.miss)),
        )
    return table


def _when(at: float) -> str:
    then = datetime.fromtimestamp(at)
    today = then.date() == datetime.now().date()
    return then.strftime("%H:%M:%S" if today else "%b %d %H:%M")


def _as_json(entries: Sequence[Entry]) -> str:
    from orchestrator.cli.causes import repeated

    requests = [{"model": each.model, **dataclasses.asdict(each.record)} for each in entries]
    causes = [dataclasses.asdict(each) for each in repeated(entries)]
    return json.dumps({"requests": requests, "repeated": causes}, ensure_ascii=False)
