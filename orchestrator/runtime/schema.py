"""Which GBNF stands for the JSON texts that a JSON schema allows?

Written for this package because llama-cpp-python's own converter cannot be relied on: it lets
line breaks into strings, writes wrong constants where a backslash occurs, takes two references
for one when their last words agree, and passes over what it does not know.

Every text of the grammar is valid under the schema; the other way round only the useful part is
promised. What a schema leaves open is not filled: properties and items that are not described do
not appear, objects keep the order of their properties, numbers have a bounded number of digits. A
keyword that cannot be followed is refused with its place, never passed over.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.grammar import ROOT, check_gbnf
from orchestrator.runtime.pattern import (
    PLAIN,
    class_of,
    holds,
    literal,
    pattern_to_gbnf,
    without,
)
from orchestrator.runtime.ranges import fractions_between, wholes_between
from orchestrator.runtime.subschemas import (
    Found,
    NoValue,
    Schema,
    Schemas,
    bounds_of,
    canonical,
    number_bounds,
    refusal,
    types_of,
    whole_bounds,
)

_SPACE = r'(" " | "\n" [ \t]{0,20})?'
"""Between the parts of an object or array: bounded, or a small model fills pages with it."""

_HEX = "[0-9a-fA-F]"
_BASIC = {
    "ws": _SPACE,
    "char": rf'{class_of(PLAIN)} | "\\" (["\\/bfnrt] | "u" unit)',
    "unit": (
        rf"[0-9a-cA-CeEfF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}} "
        rf'| [dD] [89abAB] {_HEX}{{2}} "\\u" [dD] [c-fC-F] {_HEX}{{2}}'
    ),
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": 'integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws (string ":" ws value ("," ws string ":" ws value)* ws)? "}"',
    "array": '"[" ws (value ("," ws value)* ws)? "]"',
}
"""Rules that all grammars have, needed or not."""

_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")

_DATE = (
    '[12] [0-9]{3} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01]) '
    '| ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") '
    '| "02" "-" ("0" [1-9] | "1" [0-9] | "2" [0-8]))'
)
_CLOCK = '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]'
_TIME = f'{_CLOCK} ":" [0-5] [0-9] ("." [0-9]{{1,9}})? ("Z" | [-+] {_CLOCK})'
_BYTE = '("25" [0-5] | "2" [0-4] [0-9] | "1" [0-9] [0-9] | [1-9]? [0-9])'
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": f'{_HEX}{{8}} ("-" {_HEX}{{4}}){{3}} "-" {_HEX}{{12}}',
    "ipv4": f'{_BYTE} ("." {_BYTE}){{3}}',
    "email": '[a-z0-9] [a-z0-9_+-]{0,30} ("." [a-z0-9_+-]{1,30})? "@" '
    '([a-z0-9]{1,20} ("-" [a-z0-9]{1,20})? "."){1,3} [a-z]{2,10}',
}


@functools.lru_cache(maxsize=64)
def schema_to_gbnf(text: str) -> str:
    """Return the grammar of the schema that `text` holds as JSON.

    Raises `InvalidArgument` naming what cannot be followed and its place in the schema.
    """
    schema: Schema = json.loads(text)
    try:
        grammar = _Converter(schema).convert()
    except RecursionError as error:
        raise InvalidArgument("json_schema is nested too deeply; name parts of it") from error
    try:
        check_gbnf(grammar)
    except InvalidArgument as error:
        raise InvalidArgument(f"json_schema cannot be followed: {error}") from error
    return grammar


class _Converter:
    """Collects the rules of one grammar. Expressions it returns can be put in a sequence."""

    def __init__(self, root: Schema) -> None:
        self._schemas = Schemas(root)
        self._rules = dict(_BASIC)
        self._names: dict[str, str] = {}  # expression -> the rule that stands for it
        self._combined: dict[str, str] = {}  # a schema that names others -> its rule
        self._impossible: set[str] = set()

    def convert(self) -> str:
        """Return the text of the whole grammar."""
        rules = {ROOT: self._visit(self._schemas.root), **self._rules}
        return "\n".join(f"{name} ::= {expression}" for name, expression in rules.items())

    def _rule(self, expression: str) -> str:
        """Return the name of a rule that stands for `expression`; equal ones share it."""
        if expression in self._rules:
            return expression
        if expression not in self._names:
            name = self._names[expression] = f"r{len(self._names)}"
            self._rules[name] = expression
        return self._names[expression]

    def _one_of(self, ways: Iterable[str]) -> str:
        return self._rule(" | ".join(dict.fromkeys(ways)))

    def _visit(self, found: Found) -> str:
        """Return the expression of a schema; raises `NoValue` where it allows none."""
        schema = self._schemas.understood(found)
        if not schema:
            return "value"
        if any(keyword in schema for keyword in _COMBINING):
            return self._combination(Found(schema, found.path))
        if "const" in schema or "enum" in schema:
            return self._values(schema, found.path)
        return self._types(schema, found.path)

    def _combination(self, found: Found) -> str:
        """Return the rule of a schema that names others, perhaps itself among them."""
        key = canonical(found.schema)
        if key in self._impossible:
            raise NoValue(f"json_schema allows no value at {found.path}")
        if key not in self._combined:
            words = re.findall("[a-zA-Z0-9]+", found.schema.get("$ref", found.path))
            name = f"{words[-1] if words else 'whole'}-{len(self._combined)}"
            self._combined[key] = name
            self._rules[name] = '""'  # taken, before it is met again inside itself
            try:
                self._rules[name] = self._combine(found)
            except NoValue:
                self._impossible.add(key)
                raise
        return self._combined[key]

    def _combine(self, found: Found) -> str:
        schema = found.schema
        if set(schema) == {"$ref"}:
            return self._visit(self._schemas.target(schema["$ref"], found.path))
        if "$ref" in schema or "allOf" in schema:
            return self._visit(self._schemas.flat(found))
        return self._union(found, "anyOf" if "anyOf" in schema else "oneOf")

    def _union(self, found: Found, keyword: str) -> str:
        alternatives = self._schemas.alternatives(found, keyword)
        if keyword == "oneOf":
            self._schemas.check_apart(alternatives, found.path)
        return self._any(alternatives, found.path)

    def _any(self, alternatives: Iterable[Found], path: str) -> str:
        """Return the union of those alternatives that allow a value at all."""
        ways, last = [], NoValue(f"json_schema allows no value at {path}")
        for alternative in alternatives:
            try:
                ways.append(self._visit(alternative))
            except NoValue as nothing:
                last = nothing
        if not ways:
            raise last
        return self._one_of(ways)

    def _values(self, schema: Schema, path: str) -> str:
        beside = set(schema) - {"const", "enum", "type"}
        if beside:
            raise refusal(min(beside), path, "is not supported beside const or enum")
        values = self._schemas.values(schema)
        if not values:
            raise NoValue(f"json_schema allows no value at {path}: const, enum and type disagree")
        return self._one_of(literal(json.dumps(value, ensure_ascii=False)) for value in values)

    def _types(self, schema: Schema, path: str) -> str:
        by_type: dict[str, Callable[[Schema, str], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
        }
        ways, last = [], NoValue(f"json_schema allows no value at {path}")
        for name in types_of(schema):
            try:
                ways.append(by_type[name](schema, path) if name in by_type else name)
            except NoValue as nothing:
                last = nothing
        if not ways:
            raise last
        return self._one_of(ways)

    # ---- objects ------------------------------------------------------------------------------

    def _object(self, schema: Schema, path: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        rest = schema.get("additionalProperties")
        if not properties and not required and rest in (None, True):
            return "object"
        properties = properties | {name: rest for name in required if name not in properties}
        members = []
        for name, inner in properties.items():
            place = Found(True if inner is None else inner, f"{path}/properties/{name}")
            pair = self._pair(json.dumps(name, ensure_ascii=False), place, name in required)
            if pair is not None:
                members.append((pair, name in required))
        return self._rule(_object_of(members, self._others(rest, properties, path), self._rule))

    def _pair(self, key: str, place: Found, required: bool) -> str | None:
        """Return key and value, or None where an optional value cannot be had."""
        try:
            return self._rule(f'{literal(key)} ":" ws {self._visit(place)}')
        except NoValue:
            if required:
                raise
            return None

    def _others(self, rest: object, names: Iterable[str], path: str) -> str | None:
        """Return a pair with a key that is none of `names`, None where there is to be none."""
        if rest is None or rest is False:
            return None
        try:
            value = self._visit(Found(rest, f"{path}/additionalProperties"))
        except NoValue:
            return None
        # A key is written without escapes here, so it cannot be a name that needs some.
        spelled = [name for name in names if all(holds(PLAIN, ord(each)) for each in name)]
        return self._rule(f'"\\"" {self._key_without(spelled)} "\\"" ":" ws {value}')

    def _key_without(self, names: Sequence[str]) -> str:
        """Return any text, without escapes, that is none of `names`."""
        first = sorted({name[0] for name in names if name})
        others = class_of(without(PLAIN, [(ord(each), ord(each)) for each in first]))
        ways = [f"{others} {class_of(PLAIN)}*"]
        for character in first:
            rest = [name[1:] for name in names if name[:1] == character]
            ways.append(f"{literal(character)} {self._key_without(rest)}")
        if "" not in names:
            ways.append('""')
        return self._rule(" | ".join(ways))

    # ---- arrays -------------------------------------------------------------------------------

    def _array(self, schema: Schema, path: str) -> str:
        low, high = bounds_of(schema, "minItems", "maxItems", path)
        first: list[str] = []
        for place, inner in enumerate(schema.get("prefixItems", [])):
            try:
                first.append(self._visit(Found(inner, f"{path}/prefixItems/{place}")))
            except NoValue:
                high = place if high is None else min(high, place)
                break
        rest = self._rest(schema, len(first) if first else None, low, path)
        if rest is None:
            high = len(first) if high is None else min(high, len(first))
        if high is not None and low > high:
            raise NoValue(f"json_schema allows no array of {low} items at {path}")
        return self._rule(f'"[" ws {self._items(first, rest, low, high)} "]"')

    def _rest(self, schema: Schema, n_first: int | None, low: int, path: str) -> str | None:
        """Return what the items after the first ones are, None where there are to be none."""
        described = "items" in schema
        if not described and n_first is not None and low <= n_first:
            return None
        try:
            return self._visit(Found(schema.get("items", True), f"{path}/items"))
        except NoValue:
            return None

    def _items(self, first: list[str], rest: str | None, low: int, high: int | None) -> str:
        """Return a list of `low` to `high` items: the `first` in their places, then `rest`."""
        if high is not None:
            first = first[:high]
        leading = max(len(first), 1)
        tail = ""
        if rest is not None and high != len(first):
            more = self._rule(f'"," ws {rest}')
            room = None if high is None else high - leading
            tail = _times(more, max(0, low - leading), room)
        for place in range(len(first) - 1, 0, -1):
            item = self._rule(f'"," ws {first[place]} {tail}')
            tail = item if place < low else f"{item}?"
        head = first[0] if first else rest
        if head is None or high == 0:
            return ""
        return f"{head} {tail} ws" if low else f"({head} {tail} ws)?"

    # ---- strings and numbers ------------------------------------------------------------------

    def _string(self, schema: Schema, path: str) -> str:
        given = [key for key in ("pattern", "format") if key in schema]
        lengths = [key for key in ("minLength", "maxLength") if key in schema]
        if len(given) > 1 or (given and lengths):
            raise refusal((given + lengths)[1], path, f"is not supported beside {given[0]}")
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                known = ", ".join(_FORMATS)
                raise refusal(
                    "format", path, f'"{schema["format"]}" is not supported; known: {known}'
                )
            return self._rule(f'"\\"" {_FORMATS[schema["format"]]} "\\""')
        if "pattern" in schema:
            try:
                inside = pattern_to_gbnf(schema["pattern"], self._rule)
            except InvalidArgument as error:
                raise refusal("pattern", path, f"cannot be followed: {error}") from error
            return self._rule(f'"\\"" {inside} "\\""')
        if not lengths:
            return "string"
        low, high = bounds_of(schema, "minLength", "maxLength", path)
        return self._rule(f'"\\"" {_times("char", low, high)} "\\""')

    def _integer(self, schema: Schema, path: str) -> str:
        low, high = whole_bounds(schema)
        if low is None and high is None:
            return "integer"
        ways = wholes_between(low, high)
        if not ways:
            raise NoValue(f"json_schema allows no whole number at {path}")
        return self._one_of(ways)

    def _number(self, schema: Schema, path: str) -> str:
        bounds = number_bounds(schema, path)
        if bounds.low is None and bounds.high is None:
            return "number"
        ways = fractions_between(bounds.low, bounds.high, above=bounds.above, below=bounds.below)
        if not ways:
            raise NoValue(f"json_schema allows no number at {path}")
        return self._one_of(ways)


def _object_of(
    members: Sequence[tuple[str, bool]], other: str | None, rule: Callable[[str], str]
) -> str:
    """Return an object of pairs in their order; those not required may be left out.

    Built from its end: `tail` is what may follow a pair, and `heads` are the pairs that may come
    first, each with its tail.
    """
    tail = f'("," ws {other})*' if other else ""
    heads = [f"{other} {tail}"] if other else []
    empty = True
    for pair, required in reversed(members):
        head = f"{pair} {tail}"
        heads = [head] if required else [head, *heads]
        empty = empty and not required
        tail = rule(f'"," ws {head}' if required else f'("," ws {pair})? {tail}')
    if not heads:
        return '"{" ws "}"'
    inside = f"({' | '.join(heads)}) ws"
    return f'"{{" ws ({inside})? "}}"' if empty else f'"{{" ws {inside} "}}"'


def _times(item: str, low: int, high: int | None) -> str:
    """Return a repetition of `item`."""
    if high is None:
        return f"{item}{{{low},}}"
    return f"{item}{{{low},{high}}}" if high > 0 else ""
