r"""Do two texts go on with the same JSON object, written in two ways?

A model calls a tool with JSON of its own making; a client parses that and sends it back, and a
template writes it anew: other white space, other order of keys, other escapes.

    sampled     {"name": "f", "arguments": {"a": 1, "b": "ü"}}
    rendered    {"name": "f", "arguments": {"b": "\u00fc", "a": 1}}
                                           ^ both objects begin here, and are equal

Equal is what every reader of JSON takes for the same: objects with the same keys and equal values
in any order, strings that are equal once read, numbers that are written alike (1 and 1.0 differ).
An object that names a key twice equals nothing.
"""

from __future__ import annotations

import json
from typing import Any

N_TRIES = 32
"""Braces that begin no object, or different ones, after which no more are tried."""


def same_objects(first: str, second: str, parted: int) -> tuple[int, int] | None:
    """Where two equal objects around character `parted`, up to which the texts agree, end.

    None where there are none. The outermost that are equal count.
    """
    at, tries = first.find("{", 0, parted), 0
    while at >= 0 and tries < N_TRIES:
        found = _object(first, at)
        if found is not None and found[1] <= parted:
            at = first.find("{", found[1], parted)
            continue
        ends = _ends(found, _object(second, at))
        if ends is not None:
            return ends
        at, tries = first.find("{", at + 1, parted), tries + 1
    return None


def _ends(first: tuple[Any, int] | None, second: tuple[Any, int] | None) -> tuple[int, int] | None:
    try:
        if first is not None and second is not None and first[0] == second[0]:
            return first[1], second[1]
    except RecursionError:
        pass
    return None


def _object(text: str, at: int) -> tuple[Any, int] | None:
    """The value of the object that begins at `at`, and where it ends."""
    try:
        return _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key comes twice")
    return members


def _number(text: str) -> tuple[str]:
    """As it is written. A tuple, for JSON makes none, and so it equals no string."""
    return (text,)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_decoder = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_number, parse_float=_number, parse_constant=_refused
)
