"""How is one of thousands of literal strings found in a long text, the longest first?

Vocabularies bring up to several thousand special texts, nearly all beginning alike (``<|``). One
flat alternation would try each of them at every ``<``; grouping by the first characters keeps
a scan near the speed of a search for a single character.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_GROUPED = 3  # characters that a group shares: past "<|", before the names differ

NEVER = re.compile(r"(?!)")


def literal_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `texts` (empty ones aside), the longest where several begin."""
    groups: dict[str, list[str]] = defaultdict(list)
    for text in sorted({text for text in texts if text}, key=lambda text: (-len(text), text)):
        groups[text[:_GROUPED]].append(text[_GROUPED:])
    if not groups:
        return NEVER
    # A short text may begin a longer one, so whole groups come before the texts below their size.
    heads = sorted(groups, key=lambda head: (-len(head), head))
    return re.compile("|".join(_group(head, groups[head]) for head in heads))


def _group(head: str, tails: list[str]) -> str:
    return f"{re.escape(head)}(?:{'|'.join(re.escape(tail) for tail in tails)})"


def begun_length(text: str, literals: Sequence[str]) -> int:
    """The length of the longest end of `text` that begins one of `literals` and is not all of it.

    That end must be held back in a stream: the next characters may complete a literal.
    """
    longest = max((len(literal) for literal in literals), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(literal) > length and literal.startswith(end) for literal in literals):
            return length
    return 0
