"""Is a JSON value valid under a schema? Read straight from the specification, for tests alone."""

from __future__ import annotations

import datetime
import ipaddress
import re
import uuid
from collections.abc import Callable
from typing import Any

_KINDS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
}


def _instant(text: str) -> bool:
    return bool(datetime.datetime.fromisoformat(text))


_FORMATS: dict[str, Callable[[str], object]] = {
    "date": lambda text: len(text) == 10 and datetime.date.fromisoformat(text),
    "time": lambda text: _instant(f"2000-01-01T{text}"),
    "date-time": lambda text: text[10] == "T" and _instant(text),
    "uuid": lambda text: len(text) == 36 and uuid.UUID(text),
    "ipv4": lambda text: bool(ipaddress.IPv4Address(text)) or text == "0.0.0.0",
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s.-][^@\s]*\.[a-z]+", text),
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def is_valid(value: Any, schema: Any, root: Any = None) -> bool:
    """Return whether `value` satisfies `schema`; an unknown keyword is a mistake of the test."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(_holds(key, value, schema, root) for key in schema)


def _holds(key: str, value: Any, schema: dict[str, Any], root: Any) -> bool:
    wanted = schema[key]

    def valid(part: Any, inner: Any) -> bool:
        return is_valid(part, inner, root)

    number, string = _KINDS["number"](value), isinstance(value, str)
    length = len(value) if isinstance(value, str | list) else 0
    first = schema.get("prefixItems", [])
    checks: dict[str, Callable[[], object]] = {
        "$defs": lambda: True,
        "$ref": lambda: valid(value, _target(root, wanted)),
        "type": lambda: any(
            _KINDS[name](value) for name in ([wanted] if isinstance(wanted, str) else wanted)
        ),
        "const": lambda: _same(value, wanted),
        "enum": lambda: any(_same(value, each) for each in wanted),
        "allOf": lambda: all(valid(value, each) for each in wanted),
        "anyOf": lambda: any(valid(value, each) for each in wanted),
        "oneOf": lambda: sum(valid(value, each) for each in wanted) == 1,
        "minimum": lambda: not number or value >= wanted,
        "maximum": lambda: not number or value <= wanted,
        "exclusiveMinimum": lambda: not number or value > wanted,
        "exclusiveMaximum": lambda: not number or value < wanted,
        "minLength": lambda: not string or length >= wanted,
        "maxLength": lambda: not string or length <= wanted,
        "pattern": lambda: not string or re.search(wanted, value, re.ASCII),
        "format": lambda: not string or _FORMATS[wanted](value),
        "minItems": lambda: not isinstance(value, list) or length >= wanted,
        "maxItems": lambda: not isinstance(value, list) or length <= wanted,
        "prefixItems": lambda: not isinstance(value, list) or all(map(valid, value, wanted)),
        "items": lambda: (
            not isinstance(value, list) or all(valid(each, wanted) for each in value[len(first) :])
        ),
        "required": lambda: not isinstance(value, dict) or set(wanted) <= value.keys(),
        "properties": lambda: (
            not isinstance(value, dict)
            or all(valid(value[name], wanted[name]) for name in wanted if name in value)
        ),
        "additionalProperties": lambda: (
            not isinstance(value, dict)
            or all(valid(value[n], wanted) for n in value if n not in schema.get("properties", {}))
        ),
    }
    return bool(checks[key]())


def _target(root: Any, reference: str) -> Any:
    place = root
    for step in reference.removeprefix("#").split("/")[1:]:
        place = place[step]
    return place
