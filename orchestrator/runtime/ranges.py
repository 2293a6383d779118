"""Which GBNF stands for the numbers between two bounds, as JSON writes them?

Whole numbers are exact. Of the numbers with a fraction, those are taken whose digits decide it:
up to `_N_FRACTION` digits behind the point, no exponent, bounds that are whole. Nothing is
written with a leading zero, and a whole zero never with a sign.

    12 to 34      "1" [2-9] | "2" [0-9] | "3" [0-4]
"""

from __future__ import annotations

N_DIGITS = 16
"""Digits before the point of a number without a bound; more are beyond exact computing."""

_N_FRACTION = 15
_FRACTION = f'("." [0-9]{{1,{_N_FRACTION}}})?'
_SOME_FRACTION = f'"." [0-9]{{0,{_N_FRACTION - 1}}} [1-9]'


def wholes_between(low: int | None, high: int | None) -> list[str]:
    """Return GBNF alternatives for the whole numbers from `low` to `high`; None is no bound."""
    ways = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        most = None if low is None else -low
        ways += [f'"-" {way}' for way in _counts(least, most)]
    if high is None or high >= 0:
        ways += _counts(max(low or 0, 0), high)
    return ways


def fractions_between(
    low: int | None, high: int | None, *, above: bool = False, below: bool = False
) -> list[str]:
    """Return alternatives for the numbers from `low` to `high`, without the bounds themselves
    where they must lie `above` the lower and `below` the upper.
    """
    ways = []
    if low is None or low < 0:
        least, open_least = (-high, below) if high is not None and high <= 0 else (0, False)
        most = None if low is None else -low
        ways += [f'"-" {way}' for way in _magnitudes(least, open_least, most, above)]
    if high is None or high >= 0:
        least, open_least = (low, above) if low is not None and low >= 0 else (0, False)
        ways += _magnitudes(least, open_least, high, below)
    return ways


def _magnitudes(low: int, open_low: bool, high: int | None, open_high: bool) -> list[str]:
    """Return alternatives for numbers without a sign. Below the upper bound any digits may follow
    the point, right above an open lower one not only zeros.
    """
    if high is not None and high <= low:
        return [f'"{low}"'] if high == low and not (open_low or open_high) else []
    ways = []
    if open_low:
        ways.append(f'"{low}" {_SOME_FRACTION}')
        low += 1
    if high is None or low <= high - 1:
        ways += [f"({way}) {_FRACTION}" for way in _counts(low, None if high is None else high - 1)]
    if high is not None and not open_high:
        ways.append(f'"{high}"')
    return ways


def _counts(low: int, high: int | None) -> list[str]:
    """Return alternatives for the whole numbers from `low`, which is not negative, to `high`."""
    if high is None:
        length = len(str(low))
        longer = f"[1-9] [0-9]{{{length},{max(N_DIGITS - 1, length)}}}"
        return [*_counts(low, 10**length - 1), longer]
    ways = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        ways.append(_digits(str(low), str(last)))
        low = last + 1
    return ways


def _digits(low: str, high: str) -> str:
    """Return GBNF for the digit strings from `low` to `high`, both of one length."""
    if not low:
        return ""
    if set(low) == {"0"} and set(high) == {"9"}:
        return "[0-9]" if len(low) == 1 else f"[0-9]{{{len(low)}}}"
    first, last = low[0], high[0]
    if first == last:
        return f'"{first}" {_digits(low[1:], high[1:])}'.rstrip()
    nines, zeros = "9" * (len(low) - 1), "0" * (len(low) - 1)
    ways = []
    if low[1:] != zeros:
        ways.append(f'"{first}" {_digits(low[1:], nines)}')
        first = chr(ord(first) + 1)
    below = last if high[1:] == nines else chr(ord(last) - 1)
    if first <= below:
        digit = f'"{first}"' if first == below else f"[{first}-{below}]"
        ways.append(f"{digit} {_digits(zeros, nines)}".rstrip())
    if high[1:] != nines:
        ways.append(f'"{last}" {_digits(zeros, high[1:])}')
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"
