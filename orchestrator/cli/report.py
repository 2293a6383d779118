"""What is said about a reply beside the reply itself?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from orchestrator.cli.inline import DIM
from orchestrator.cli.reply import Reply
from orchestrator.engine.request import Outcome, TokenLogprob

if TYPE_CHECKING:
    from orchestrator.engine.counters import Counters
    from orchestrator.engine.occupancy import EngineStats, Occupancy

_ENDS = {"length": "cut off at the limit", "cancelled": "stopped", "deadline": "out of time"}


def outcome_line(outcome: Outcome) -> str:
    """Return one line: tokens of the prompt, reused, evaluated; time to first text; pace."""
    usage, timings = outcome.usage, outcome.timings
    tier = ", from host memory" if usage.seeded_tier == "exported" else ""
    origin = f" ({usage.seeded_from}{tier})" if usage.seeded_from else ""
    parts = [
        f"prompt {usage.prompt_tokens:,}",
        f"reused {usage.cached_tokens:,}{origin}",
        f"prefilled {usage.prefilled_tokens:,}",
    ]
    if timings.time_to_first_token is not None:
        parts.append(f"first token {timings.time_to_first_token:.2f} s")
    rate = timings.decode_rate(usage)
    if rate is not None:
        parts.append(f"{rate:.1f} tok/s")
    if outcome.finish_reason in _ENDS:
        parts.append(_ENDS[outcome.finish_reason])
    return " · ".join(parts)


def timings_line(outcome: Outcome) -> str:
    """Return one line of the reply's length and where the time went, in seconds."""
    usage, timings = outcome.usage, outcome.timings
    rate = timings.prefill_rate(usage)
    pace = f" at {rate:,.0f} tok/s" if rate is not None else ""
    return (
        f"reply {usage.completion_tokens:,} · queued {timings.queued:.3f} s · "
        f"prefill {timings.prefill:.3f} s{pace} · decode {timings.decode:.3f} s · "
        f"total {timings.total:.3f} s"
    )


def as_json(reply: Reply, model: str) -> dict[str, object]:
    """Return a reply as one object; times are in seconds.

    `reasoning` is there only where there is any, `logprobs` only where they were asked for. `miss`
    is null where all that was evaluated was new.
    """
    outcome = reply.outcome
    usage = outcome.usage
    reasoning = {"reasoning": reply.reasoning} if reply.reasoning else {}
    likelihoods = [_likelihood(each) for each in outcome.logprobs]
    return {
        "model": model,
        "text": reply.content,
        **reasoning,
        "tokens": list(outcome.tokens),
        **({"logprobs": likelihoods} if likelihoods else {}),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "prefilled_tokens": usage.prefilled_tokens,
            "seen_tokens": usage.seen_tokens,
            "seeded_from": usage.seeded_from,
            "seeded_tier": usage.seeded_tier,
        },
        "miss": None if outcome.miss is None else asdict(outcome.miss),
        "timings": asdict(outcome.timings),
        "finish_reason": outcome.finish_reason,
    }


def _likelihood(each: TokenLogprob) -> dict[str, object]:
    top = [{"token": token, "logprob": value} for token, value in each.top]
    return {"token": each.token, "logprob": each.logprob, "top": top}


def held(stats: EngineStats) -> Table:
    """Return a table of what the engine holds now and what has happened since it was opened."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=DIM)
    for name, text in [*_holdings(stats.occupancy), *_history(stats.counters)]:
        table.add_row(name, Text(text))
    for at, lane in enumerate(stats.occupancy.running):
        how_far = f"{lane.priority}, {lane.doing}, {lane.fed:,} of {lane.known:,} tokens"
        table.add_row(f"lane {at}", Text(how_far))
    return table


def _holdings(now: Occupancy) -> list[tuple[str, str]]:
    cells = (
        "take no room in this model"
        if now.cells_total is None
        else (f"{now.cells_used:,} of {now.cells_total:,} in use{_at_most(now.cells_budget)}")
    )
    waiting = f", {now.paused} of them preempted" if now.paused else ""
    return [
        ("lanes", f"{now.lanes} of {now.lanes_total} busy, {now.queued} requests waiting{waiting}"),
        ("sequences", f"{now.sequences_used} of {now.sequences_total} in use"),
        ("cells", cells),
        ("in context", f"{_kinds(now.resident)} · {decimal(now.resident_bytes)}"),
        *_snapshots(now),
        (
            "in host memory",
            f"{_kinds(now.exported)}{', and those states' if now.snapshots else ''} ·"
            f" {decimal(now.exported_bytes)} of"
            f" {decimal(now.exported_bytes_budget)}{_at_most(now.exported_tokens_budget)}",
        ),
    ]


def _snapshots(now: Occupancy) -> list[tuple[str, str]]:
    """Return how many of those in context have their state in host memory, if any."""
    if not now.snapshots:
        return []
    size = decimal(now.snapshot_bytes)
    return [("", f"{now.snapshots:,} of these with their state in host memory · {size}")]


def _at_most(budget: int | None) -> str:
    return "" if budget is None else f", {budget:,} tokens at most"


def _kinds(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no checkpoint"


def _history(since: Counters) -> list[tuple[str, str]]:
    """Return what happened, without what never did."""
    ends = {
        "begun": since.requests,
        "cancelled": since.cancelled,
        "out of time": since.expired,
        "refused, the queue being full": since.busy,
        "preempted": since.preempted,
        "waited for another's prompt": since.waited,
    }
    prompts = {
        "evaluated": since.prefilled,
        "reused": since.reused,
        "evaluated again": since.replayed,
    }
    kept = {
        "kept": since.kept_checkpoints,
        "dropped": since.evicted_checkpoints,
        "moved to host memory": since.exported_checkpoints,
        "and back": since.imported_checkpoints,
        "found unusable": since.refused_checkpoints,
    }
    decodes = f"{since.sampled:,} in {since.decode_calls:,} decode calls"
    lost = {"times every state was lost": since.recoveries}
    return [
        ("requests", _counted(ends, always=1)),
        ("prompt tokens", _counted(prompts, always=2)),
        ("reply tokens", decodes),
        ("checkpoints", _counted(kept | lost, always=1)),
    ]


def _counted(counts: Mapping[str, int], *, always: int) -> str:
    """Return counts with their names: the first few, and what is not zero."""
    shown = (item for at, item in enumerate(counts.items()) if item[1] or at < always)
    return " · ".join(f"{count:,} {name}" for name, count in shown)


def figures(value: Any) -> Table:
    """Return a table of the fields of a dataclass; the fields of one inside it come indented."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=DIM)
    for name, text in _rows(value):
        table.add_row(name, Text(text))
    return table


def _rows(value: Any, indent: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for each in fields(value):
        name, held = indent + each.name.replace("_", " "), getattr(value, each.name)
        if is_dataclass(held):
            rows += [(name, ""), *_rows(held, indent + "  ")]
        else:
            rows.append((name, _shown(held, in_bytes="_bytes" in each.name)))
    return rows


def _shown(value: object, *, in_bytes: bool = False) -> str:
    if in_bytes and isinstance(value, int):
        return decimal(value)
    if value is None:
        return "no limit"
    if value == ():
        return "none"
    if isinstance(value, bytes):
        return value.hex()[:16]
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(held)}" for key, held in value.items()) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
