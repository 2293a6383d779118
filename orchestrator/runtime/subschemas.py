"""What does one place of a JSON schema say, once references and combinations are resolved?

Knows the keywords and their values, and refuses what it does not know. Two schemas that must both
hold become one here (`allOf`, a `$ref` with neighbours), and it is told whether two can hold at
once (`oneOf`). What the result looks like as a grammar is the converter's business.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.grammar import N_REPEATED_MOST

Schema = dict[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_KEYWORDS_OF = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "additionalItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_SAYS_NOTHING = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
}
_HARMLESS = {"uniqueItems": False, "nullable": False, "minProperties": 0}
"""Keywords that are not supported, with the value that asks for nothing."""


_PATIENCE = 2.0
"""Seconds of computing after which a schema is given up: combinations can multiply without end."""


class NoValue(InvalidArgument):
    """A schema that nothing satisfies, where it stands."""


@dataclass(frozen=True, slots=True)
class Found:
    """A schema and its place: a JSON pointer behind a ``#``."""

    schema: Any
    path: str


def refusal(keyword: str, path: str, message: str) -> InvalidArgument:
    """Return the error for a keyword at a place."""
    return InvalidArgument(f'json_schema: "{keyword}" at {path} {message}')


# ---- single keywords ---------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _is_list_of(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _names_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, _SCHEMA) for each in value.values())


_SCHEMA = (dict, bool)
_COUNT = (lambda value: _is_whole(value) and value >= 0, "a count")
_NUMBER = (_is_number, "a number")
_TEXT = (lambda value: isinstance(value, str), "a text")
_PART = (lambda value: isinstance(value, _SCHEMA), "a schema")
_PARTS = (lambda value: bool(value) and _is_list_of(_SCHEMA)(value), "a list of schemas")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_names_types, f"one or more of {', '.join(TYPES)}"),
    "const": (lambda value: True, "any value"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "$ref": _TEXT,
    "allOf": _PARTS,
    "anyOf": _PARTS,
    "oneOf": _PARTS,
    "properties": (_are_schemas, "a schema for each name"),
    "required": (_is_list_of(str), "a list of names"),
    "additionalProperties": _PART,
    "items": (lambda value: _PART[0](value) or _is_list_of(_SCHEMA)(value), "a schema"),
    "additionalItems": _PART,
    "prefixItems": _PARTS,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "pattern": _TEXT,
    "format": _TEXT,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
}
"""The keywords that are understood, with what their values must be."""


def _check(keyword: str, value: object, path: str) -> None:
    if keyword not in _VALUES:
        near = difflib.get_close_matches(keyword, _VALUES, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else "; leave it out"
        raise refusal(keyword, path, f"is not supported{hint}")
    is_right, wanted = _VALUES[keyword]
    if not is_right(value):
        text = json.dumps(value, ensure_ascii=False)
        raise refusal(keyword, path, f"is {text[:60]}; give {wanted}")


def is_of(value: object, name: str) -> bool:
    """Return whether a JSON value is of a type; a whole number is one however it is written."""
    if name == "integer":
        return _is_whole(value)
    if name == "number":
        return _is_number(value)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name])


def types_of(schema: Schema) -> list[str]:
    """Return the types a schema allows: those it names, else those its keywords speak of."""
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return [name for name in named if not (name == "integer" and "number" in named)]
    spoken = [name for name, keys in _KEYWORDS_OF.items() if any(key in schema for key in keys)]
    return spoken or [name for name in TYPES if name != "integer"]


def bounds_of(schema: Schema, least: str, most: str, path: str) -> tuple[int, int | None]:
    """Return a lower and an upper count. An upper one beyond what can be counted is lowered."""
    low, high = int(schema.get(least, 0)), schema.get(most)
    if low > N_REPEATED_MOST:
        raise refusal(least, path, f"is {low:,}, at most {N_REPEATED_MOST:,} can be counted")
    if high is not None and low > high:
        raise NoValue(f"json_schema allows no value at {path}: {least} is above {most}")
    return low, None if high is None else min(int(high), N_REPEATED_MOST)


def whole_bounds(schema: Schema) -> tuple[int | None, int | None]:
    """Return the least and the greatest whole number a schema allows; None is no bound."""
    low = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    low += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    high = [math.floor(schema["maximum"])] if "maximum" in schema else []
    high += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(low, default=None), min(high, default=None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of numbers, None where there is none; `above` and `below` exclude the bound itself."""

    low: int | None
    high: int | None
    above: bool
    below: bool


def number_bounds(schema: Schema, path: str) -> Bounds:
    """Return the bounds of a number, which must be whole to be followed."""
    keywords = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    for keyword in keywords:
        if not _is_whole(schema.get(keyword, 0)):
            raise refusal(
                keyword, path, f"is {schema[keyword]}; only whole bounds are supported, or integers"
            )
    least, above, most, below = (schema.get(keyword) for keyword in keywords)
    is_above = above is not None and (least is None or above >= least)
    is_below = below is not None and (most is None or below <= most)
    low, high = above if is_above else least, below if is_below else most
    return Bounds(
        None if low is None else int(low), None if high is None else int(high), is_above, is_below
    )


# ---- schemas that must hold together -----------------------------------------------------------


class Schemas:
    """All the places of one schema document."""

    def __init__(self, root: Any) -> None:
        self._document = root
        self._begun = time.thread_time()
        self.root = Found(root, "#")

    def understood(self, found: Found) -> Schema:
        """Return the keywords that constrain; raises for those that cannot be followed."""
        if time.thread_time() - self._begun > _PATIENCE:
            raise InvalidArgument(
                f"json_schema takes more than {_PATIENCE:g} s to resolve; combine less with allOf"
            )
        if found.schema is True:
            return {}
        if found.schema is False:
            raise NoValue(f"json_schema allows no value at {found.path}")
        schema: Schema = {}
        for keyword, value in found.schema.items():
            if keyword == "$id" and found.path != "#":
                raise refusal(keyword, found.path, "is supported at the root only")
            harmless = keyword in _HARMLESS and value is _HARMLESS[keyword]
            if keyword in _SAYS_NOTHING or keyword.startswith("x-") or harmless:
                continue
            _check(keyword, value, found.path)
            schema[keyword] = value
        return _with_prefix_items(schema)

    def target(self, reference: str, path: str) -> Found:
        """Return what a reference leads to."""
        if not reference.startswith("#"):
            raise refusal(
                "$ref", path, f'is "{reference}", only references inside ("#…") are followed'
            )
        pointer = unquote(reference[1:])
        place: Any = self._document
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
                place = place[int(key)]
            elif isinstance(place, dict) and key in place:
                place = place[key]
            else:
                raise refusal("$ref", path, f'is "{reference}", and there is no {key!r} there')
        if not isinstance(place, _SCHEMA) or (pointer and not pointer.startswith("/")):
            raise refusal("$ref", path, f'is "{reference}", which is no place with a schema')
        return Found(place, f"#{pointer}")

    def flat(self, found: Found, seen: frozenset[str] = frozenset()) -> Found:
        """Return one schema without ``$ref`` and ``allOf`` that holds where `found` does."""
        schema = self.understood(found)
        parts = [Found({k: v for k, v in schema.items() if k not in ("$ref", "allOf")}, found.path)]
        if "$ref" in schema:
            target = self.target(schema["$ref"], found.path)
            if target.path in seen:
                raise refusal("$ref", found.path, "leads back to itself")
            parts.append(self.flat(target, seen | {target.path}))
        for place, inner in enumerate(schema.get("allOf", [])):
            parts.append(self.flat(Found(inner, f"{found.path}/allOf/{place}"), seen))
        return Found(functools.reduce(_both, parts).schema, found.path)

    def alternatives(self, found: Found, keyword: str) -> list[Found]:
        """Return the alternatives of ``anyOf`` or ``oneOf``, each with what stands beside it."""
        beside = {key: value for key, value in found.schema.items() if key != keyword}
        result = []
        for place, inner in enumerate(found.schema[keyword]):
            alternative = Found(inner, f"{found.path}/{keyword}/{place}")
            if beside:
                alternative = self._beside(beside, alternative)
            result.append(alternative)
        return result

    def _beside(self, beside: Schema, alternative: Found) -> Found:
        try:
            flat = self.flat(alternative)
        except NoValue:
            return Found(False, alternative.path)
        return _both(flat, Found(beside, alternative.path))

    # ---- can two hold at once? ----------------------------------------------------------------

    def check_apart(self, alternatives: Sequence[Found], path: str) -> None:
        """Refuse ``oneOf`` where a value might satisfy two: a grammar cannot exclude that."""
        flat = []
        for alternative in alternatives:
            with contextlib.suppress(NoValue):
                flat.append((alternative.path, self.flat(alternative)))
        for (place, one), (other_place, other) in itertools.combinations(flat, 2):
            if not self._are_apart(one, other):
                raise refusal(
                    "oneOf", path, f"has alternatives that may hold at once, {place} and "
                    f"{other_place}; use anyOf, or tell them apart by a required const"
                )  # fmt: skip

    def _are_apart(self, one: Found, other: Found, depth: int = 0) -> bool:
        """Return whether no value made for one of two flat schemas satisfies the other."""
        a, b = one.schema, other.schema
        if depth > 4 or {"anyOf", "oneOf"} & {*a, *b}:
            return False
        made, others_made = self._kinds(a, types_of(a)), self._kinds(b, types_of(b))
        named, others_named = (self._kinds(each, each.get("type", TYPES)) for each in (a, b))
        if not _overlap(made, others_named) and not _overlap(others_made, named):
            return True
        values, other_values = self.values(a), self.values(b)
        if values is not None and other_values is not None:
            return not {canonical(v) for v in values} & {canonical(v) for v in other_values}
        if made == others_made == {"object"}:
            return self._objects_are_apart(a, b, one.path, depth)
        return False

    def _kinds(self, schema: Schema, types: str | Iterable[str]) -> set[str]:
        """Return the types of a schema's values, where it lists them, else `types`."""
        values = self.values(schema)
        if values is None:
            return {types} if isinstance(types, str) else set(types)
        return {name for name in TYPES for value in values if is_of(value, name)}

    def _objects_are_apart(self, a: Schema, b: Schema, path: str, depth: int) -> bool:
        """Return whether a property that both must have differs, or each wants one that objects
        made for the other lack.
        """
        if _wants_more(a, b) and _wants_more(b, a):
            return True
        shared = {*a.get("required", [])} & {*b.get("required", [])}
        shared &= {*a.get("properties", {})} & {*b.get("properties", {})}
        return any(self._differ(a, b, name, path, depth) for name in shared)

    def _differ(self, a: Schema, b: Schema, name: str, path: str, depth: int) -> bool:
        try:
            one, other = (self.flat(Found(each["properties"][name], path)) for each in (a, b))
        except NoValue:
            return True
        return self._are_apart(one, other, depth + 1)

    def values(self, schema: Schema) -> list[Any] | None:
        """Return the values that ``const`` and ``enum`` leave, None where there is neither."""
        if "const" not in schema and "enum" not in schema:
            return None
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [value for value in values if canonical(value) == canonical(schema["const"])]
        names = types_of(schema) if "type" in schema else TYPES
        return [value for value in values if any(is_of(value, name) for name in names)]


def canonical(value: Any) -> str:
    """Return one text for all writings of a JSON value: 1.0 is 1, and keys have no order."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_normal(each) for each in value]
    if isinstance(value, dict):
        return {key: _normal(each) for key, each in value.items()}
    return value


def _overlap(names: set[str], others: set[str]) -> bool:
    numbers = {"integer", "number"}
    return bool(names & others) or bool(names & numbers and others & numbers)


def _wants_more(schema: Schema, than: Schema) -> bool:
    """Return whether `schema` requires a property that objects made for `than` never have."""
    if than.get("additionalProperties", False) is not False:
        return False
    return not set(schema.get("required", [])) <= {
        *than.get("properties", {}),
        *than.get("required", []),
    }


def _with_prefix_items(schema: Schema) -> Schema:
    """Write a list of items as newer drafts do: ``items`` is for those behind the first ones."""
    additional = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        first = schema.pop("items")
        if first:
            schema["prefixItems"] = first
        if additional is not None:
            schema["items"] = additional
    return schema


# ---- two schemas made one ----------------------------------------------------------------------


def _both(one: Found, other: Found) -> Found:
    """Return a schema that holds where both do; raises where that takes more than this can."""
    path = one.path
    a, b = one.schema, other.schema
    if a is False or b is False:
        return Found(False, path)
    _refuse_entangled(a, b, path)
    result = dict(a)
    for keyword, value in b.items():
        if keyword not in result or canonical(result[keyword]) == canonical(value):
            result[keyword] = value
        elif keyword in _JOINED:
            result[keyword] = _JOINED[keyword](result[keyword], value)
        else:
            raise refusal(keyword, path, "stands in two schemas that must both hold; join them")
    if [] in (result.get("type"), result.get("enum")):
        raise NoValue(
            f"json_schema allows no value at {path}: two schemas there exclude each other"
        )
    return Found(result, path)


def _refuse_entangled(a: Schema, b: Schema, path: str) -> None:
    """Refuse keywords that mean the neighbours in their own schema, not those beside it."""
    for one, other in ((a, b), (b, a)):
        names = set(other.get("properties", {})) - set(one.get("properties", {}))
        if names and one.get("additionalProperties", True) is not True:
            raise refusal("additionalProperties", path, "is not supported beside other properties")
        if "items" in one and "prefixItems" in other and "prefixItems" not in one:
            raise refusal("items", path, "is not supported beside prefixItems of another schema")


def _join_types(a: object, b: object) -> list[str]:
    names, others = types_of({"type": a}), types_of({"type": b})
    both = [name for name in names if name in others]
    numbers = {(name, other) for name in names for other in others}
    if numbers & {("number", "integer"), ("integer", "number")}:
        both.append("integer")
    return both


def _join_properties(a: Schema, b: Schema) -> Schema:
    both = {name: {"allOf": [a[name], b[name]]} for name in a if name in b}
    return {**a, **b, **both}


def _join_values(a: list[Any], b: list[Any]) -> list[Any]:
    others = {canonical(value) for value in b}
    return [value for value in a if canonical(value) in others]


_JOINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "type": _join_types,
    "properties": _join_properties,
    "required": lambda a, b: list(dict.fromkeys([*a, *b])),
    "enum": _join_values,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minItems", "minLength"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxItems", "maxLength"), min),
}
