"""What is said about a reply beside the reply itself?"""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from orchestrator.cli.inline import DIM
from orchestrator.cli.reply import Reply
from orchestrator.engine.request import Outcome, TokenLogprob

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

    `reasoning` is there only where there is any, `logprobs` only where they were asked for.
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
        },
        "timings": asdict(outcome.timings),
        "finish_reason": outcome.finish_reason,
    }


def _likelihood(each: TokenLogprob) -> dict[str, object]:
    top = [{"token": token, "logprob": value} for token, value in each.top]
    return {"token": each.token, "logprob": each.logprob, "top": top}


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
        elif isinstance(held, tuple) and held and all(is_dataclass(one) for one in held):
            rows += [(name, ""), *((f"{indent}  {at}", _line(one)) for at, one in enumerate(held))]
        else:
            rows.append((name, _shown(held, in_bytes="_bytes" in each.name)))
    return rows


def _line(value: Any) -> str:
    """Return the fields of a dataclass in one line."""
    named = ((each.name.replace("_", " "), getattr(value, each.name)) for each in fields(value))
    return ", ".join(f"{name} {_shown(held)}" for name, held in named)


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
