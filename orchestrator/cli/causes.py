"""How is it told why a request evaluated what had been evaluated before?

One line for each request, and one for each cause that comes again, with what it cost in all.
Token counts and words come from the engine; seconds are an estimate from the pace of each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.cli.render import clean
from orchestrator.engine.request import Outcome, Usage
from orchestrator.engine.why import Cause, Miss
from orchestrator.store.journal import Entry

N_EXAMPLES = 3

_TOLD: dict[Cause, str] = {
    "never seen": "a beginning that was never seen",
    "evicted": "a kept state had to make room",
    "refused": "a kept state could not be put back",
    "concurrent": "another request was still reading the same",
    "short": "no state was kept there",
    "off": "reuse is switched off",
}
_VERBS: dict[Cause, str] = {
    "template": "is rendered anew",
    "edited": "changes",
    "retokenised": "has the same text in other tokens",
}


def place(miss: Miss) -> str:
    """Return what changed: the system prompt, a message, or the prompt where that is not known."""
    if miss.in_system:
        return "system prompt"
    return "prompt" if miss.message is None else f"messages[{miss.message}]"


def change(miss: Miss) -> str:
    """Return the words on both sides of a change, empty where there is none."""
    if not (miss.before or miss.after) or miss.cause not in _VERBS:
        return ""
    return f"{_quoted(miss.before)} -> {_quoted(miss.after)}"


def _quoted(words: str) -> str:
    return f"`{clean(words)}`" if words else "nothing"


def reason(miss: Miss | None) -> str:
    """Return in a few words why more was evaluated than had to be; empty where it was not."""
    if miss is None:
        return ""
    at = f"at token {miss.position:,}"
    verb = _VERBS.get(miss.cause)
    if verb is None:
        told = _TOLD.get(miss.cause, clean(miss.cause))
        return told if miss.cause in ("never seen", "off") else f"{told} {_again(miss.tokens)}"
    changed = change(miss)
    colon = f": {changed}" if changed else ""
    return f"{place(miss)} {verb} {at}{colon} {_again(miss.tokens)}"


def _again(tokens: int) -> str:
    return f"({tokens:,} read again)"


def origin(usage: Usage) -> str:
    """Return what a request was started from."""
    if usage.seeded_from is None:
        return "cold"
    return usage.seeded_from + (", host" if usage.seeded_tier == "exported" else "")


def answer(outcome: Outcome) -> str:
    """Return in a sentence what the last request reused, and what kept it from more."""
    usage = outcome.usage
    begun = (
        f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens were reused"
        f" ({origin(usage)}), {usage.seen_tokens:,} had been seen before; "
    )
    return begun + (reason(outcome.miss) or "all that was evaluated was new")


# ---- what comes again ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repeated:
    """A cause that several requests of a model met. `seconds` is about what it cost, if known."""

    model: str
    cause: Cause
    where: str
    positions: tuple[int, ...]
    examples: tuple[str, ...]
    n_requests: int
    tokens: int
    seconds: float | None

    def line(self) -> str:
        """Return it in one line."""
        low, high = min(self.positions), max(self.positions)
        at = f"at token {low:,}" if low == high else f"at tokens {low:,} to {high:,}"
        verb = _VERBS.get(self.cause)
        told = f"{self.where} {verb} {at}" if verb else _TOLD.get(self.cause, clean(self.cause))
        more = ", …" if len(self.examples) > N_EXAMPLES else ""
        shown = ": " + ", ".join(self.examples[:N_EXAMPLES]) + more if self.examples else ""
        lasted = f", about {duration(self.seconds)}" if self.seconds is not None else ""
        return (
            f"{told} in {self.n_requests:,} requests{shown}; "
            f"{self.tokens:,} tokens read again{lasted}"
        )


def repeated(entries: Iterable[Entry]) -> list[Repeated]:
    """Return the causes that more than one request met and that cost something, dearest first."""
    groups: dict[tuple[object, ...], list[tuple[Entry, Miss]]] = {}
    for entry in entries:
        miss = entry.record.miss
        if miss is not None and miss.tokens:
            groups.setdefault(_likeness(entry.model, miss), []).append((entry, miss))
    found = [_summed(group) for group in groups.values() if len(group) > 1]
    return sorted(found, key=lambda each: -each.tokens)


def _likeness(model: str, miss: Miss) -> tuple[object, ...]:
    """Return what is the same for two requests that met the same cause."""
    return model, miss.cause, miss.in_system, miss.position if miss.in_system else None


def _summed(group: Sequence[tuple[Entry, Miss]]) -> Repeated:
    entry, first = group[0]
    misses = [miss for _, miss in group]
    wheres = {place(miss) for miss in misses}
    costs = [seconds for each, miss in group if (seconds := _seconds(each, miss)) is not None]
    return Repeated(
        model=entry.model,
        cause=first.cause,
        where=wheres.pop() if len(wheres) == 1 else "a message",
        positions=tuple(miss.position for miss in misses),
        examples=tuple(dict.fromkeys(filter(None, map(change, misses)))),
        n_requests=len(group),
        tokens=sum(miss.tokens for miss in misses),
        seconds=sum(costs) * len(group) / len(costs) if costs else None,
    )


def _seconds(entry: Entry, miss: Miss) -> float | None:
    """Return about how long the tokens of a miss took, None where nothing was measured."""
    rate = entry.record.timings.prefill_rate(entry.record.usage)
    return miss.tokens / rate if rate else None


def duration(seconds: float) -> str:
    """Return a length of time for a person, in the unit that fits it."""
    if seconds < 1:
        return "less than 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
