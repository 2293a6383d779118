"""Does a reply under a JSON schema satisfy it, and is what cannot be promised refused?"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_walks import Walks, open_walks
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from json_oracle import is_valid

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.sampling import Sampling
from orchestrator.runtime.schema import schema_to_gbnf


@pytest.fixture(scope="module")
def walks() -> Iterator[Walks]:
    with open_walks() as opened:
        yield opened


def grammar_for(schema: object) -> str:
    """Return the grammar of a schema, by the way a request takes."""
    text = Sampling(json_schema=schema).json_schema  # type: ignore[arg-type]
    assert isinstance(text, str)
    return schema_to_gbnf(text)


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
SHAPES = {
    "$defs": {
        "circle": {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}},
            "required": ["kind", "radius"],
        },
        "group": {
            "type": "object",
            "properties": {
                "kind": {"const": "group"},
                "members": {"type": "array", "items": {"$ref": "#/$defs/shape"}, "minItems": 1},
            },
            "required": ["kind", "members"],
            "additionalProperties": False,
        },
        "shape": {"oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/group"}]},
    },
    "$ref": "#/$defs/shape",
}
PERSON = {
    "title": "Person",
    "description": "As pydantic writes them.",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "type": "string", "minLength": 1, "maxLength": 5},
        "age": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        (True, ["1", '{"a": [null]}'], ["", "{a}", "01", "[1,]", '"\n"', '"\\x"', "+1", "1."]),
        ({}, ["[]", '"\\ud83d\\ude00"', "-0.5e3"], ['"\\ud83d"', "nul", "1 2"]),
        (INTEGER, ["0", "-12"], ["1.5", '"1"', "00"]),
        ({"type": "number", "minimum": 1, "exclusiveMaximum": 3},
         ["1", "1.5", "2.999"], ["3", "0.9", "-1"]),
        ({"type": ["integer", "null"], "minimum": 98, "maximum": 102},
         ["98", "99", "100", "102", "null"], ["97", "103", "9", "1000"]),
        ({"type": "string", "minLength": 2, "maxLength": 3},
         ['"ab"', '"é😀\\n"', '"\\u00e9x"'], ['"a"', '"abcd"', '"\\u00e9"']),
        ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}, ['"AB-1"'], ['"AB-"', '"xAB-1"']),
        ({"pattern": "b"}, ['"abc"', '"b"'], ['"ac"', "1"]),
        ({"format": "date"}, ['"2024-02-28"'], ['"2023-02-29"', '"2024-13-01"', '"2024-04-31"']),
        ({"enum": ["a\\b", 'q"', "\n", 1.5, None, {"k": [1]}]},
         ['"a\\\\b"', '"q\\""', '"\\n"', "1.5", "null", '{"k": [1]}'], ['"a\\b"', "2"]),
        ({"const": "é", "type": "string"}, ['"é"'], ['"e"']),
        ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
         ["[1]", "[1,\n 2]"], ["[]", "[1,2,3]", '["a"]']),
        ({"prefixItems": [INTEGER, TEXT], "minItems": 1},
         ["[1]", '[1,"a"]'], ["[]", '["a"]', '[1,"a",2]']),
        ({"items": [INTEGER], "additionalItems": TEXT}, ["[]", '[1,"a","b"]'], ["[1,2]"]),
        (PERSON, ['{"name": "Bo"}', '{"name":"Bo","age":null,"tags":["a"]}'],
         ["{}", '{"name":""}', '{"name":"Bo","x":1}', '{"age":3}', '{"age":1,"name":"Bo"}']),
        ({"properties": {"a": INTEGER, "b": TEXT}, "required": ["b"]},
         ['{"a":1,"b":"x"}', '{"b":"x"}'], ['{"a":1}', '{"a":1,}', '{,"b":"x"}']),
        ({"additionalProperties": INTEGER}, ["{}", '{"x":1,"y":2}'], ['{"x":""}']),
        ({"properties": {"ab": TEXT}, "additionalProperties": INTEGER},
         ['{"ab":"x"}', '{"a":1}', '{"abc":1}', '{"b":1,"":2}'], ['{"ab":1}', '{"\\u0061b":1}']),
        ({"required": ["x"], "additionalProperties": TEXT}, ['{"x":"y"}'], ["{}", '{"x":1}']),
        ({"allOf": [{"properties": {"a": INTEGER}}, {"required": ["a"]},
                    {"properties": {"a": {"minimum": 5}}}]}, ['{"a":5}'], ["{}", '{"a":4}']),
        ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER},
          "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ["{}"]),
        (SHAPES, ['{"kind": "circle","radius":1}',
                  '{"kind":"group","members":[{"kind":"circle","radius":0.5}]}'],
         ['{"kind":"group","members":[]}', '{"kind":"circle"}']),
        ({"$ref": "#/$defs/a/x", "$defs": {"a": {"x": INTEGER}, "b": {"x": TEXT}}}, ["1"], ['"a"']),
        ({"items": {"$ref": "#"}, "type": "array", "maxItems": 1}, ["[]", "[[[]]]"], ["[1]"]),
        ({"properties": {"a/b~c%": {"$ref": "#/properties/x%20y"}, "x y": INTEGER,
                         "z": {"$ref": "#/properties/a~1b~0c%25"}}},
         ['{"a/b~c%":1,"x y":2,"z":3}'], ['{"z":""}']),
        ({"anyOf": [{"type": "string", "enum": [1]}, INTEGER]}, ["1"], ['"1"']),
        ({"properties": {"a": False, "b": INTEGER}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"uniqueItems": False, "type": "array", "x-order": 1, "default": []}, ["[]"], ["1"]),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
@pytest.mark.models
def test_a_schema_allows_and_forbids(
    walks: Walks, schema: Any, fits: list[str], fails: list[str]
) -> None:
    grammar = schema_to_gbnf(json.dumps(schema))
    assert [text for text in fits if not walks.accepts(grammar, text)] == []
    assert [text for text in fails if walks.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "object", "patternProperties": {}}, '"patternProperties" at # is not supported'),
        ({"not": {}}, '"not" at #'),
        ({"if": {}, "then": {}}, '"if" at #'),
        ({"properties": {"a": {"items": {"multipleOf": 3}}}}, "at #/properties/a/items"),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"type": "array", "contains": {}}, '"contains"'),
        ({"nullable": True}, '"nullable"'),
        ({"minLenght": 3}, 'did you mean "minLength"'),
        ({"properties": {"a": {"$id": "x"}}}, '"\\$id" at #/properties/a'),
        ({"type": "text"}, '"type" at # is "text"; give one or more of'),
        ({"type": []}, '"type" at #'),
        ({"minLength": -1}, "give a count"),
        ({"maxItems": 1.5}, "give a count"),
        ({"exclusiveMinimum": True}, "give a number"),
        ({"required": "a"}, "give a list of names"),
        ({"properties": {"a": 1}}, "give a schema for each name"),
        ({"enum": []}, "give a list of values"),
        ({"anyOf": []}, "give a list of schemas"),
        ({"format": "hostname"}, '"format" at # .*known: date'),
        ({"pattern": "a", "maxLength": 3}, '"maxLength" at # is not supported beside pattern'),
        ({"enum": ["a"], "minLength": 1}, '"minLength" at # is not supported beside const'),
        ({"type": "number", "minimum": 0.5}, "only whole bounds"),
        ({"minLength": 3000}, "at most 2,000"),
        ({"$ref": "other.json"}, "only references inside"),
        ({"$ref": "#/$defs/a"}, "there is no '\\$defs'"),
        ({"$ref": "#a"}, "no place with a schema"),
        ({"$ref": "#/title", "title": "x"}, "no place with a schema"),
        ({"$ref": "#"}, "never end"),
        ({"$defs": {"a": {"$ref": "#/$defs/a", "type": "object"}}, "$ref": "#/$defs/a"},
         "leads back to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "never end"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "may hold at once, #/oneOf/0 and #/oneOf/1"),
        ({"oneOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]}, "at once"),
        ({"oneOf": [TEXT, {"required": ["a"]}]}, "at once"),  # what is no object lacks nothing
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, '"pattern" at # stands in two'),
        ({"allOf": [{"properties": {"a": {}}}, {"additionalProperties": False}]},
         '"additionalProperties" at #'),
        ({"allOf": [INTEGER, TEXT]}, "allows no value"),
        ({"type": "string", "const": 1}, "allows no value"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "allows no whole number"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems is above maxItems"),
        ({"type": "array", "items": False, "minItems": 1}, "no array of 1 items"),
        ({"required": ["a"], "additionalProperties": False}, "allows no value"),
        ({"pattern": "(?=a)"}, "ahead or behind"),
        ({"pattern": "(a"}, "without its \\)"),
        ({"pattern": "a)"}, "without its \\("),
        ({"pattern": "a\\b"}, "not supported"),
        ({"pattern": "(a)\\1"}, "not supported"),
        ({"pattern": "x^"}, "ends of the whole pattern"),
        ({"pattern": "[b-a]"}, "before it begins"),
        ({"pattern": "[a"}, "without its \\]"),
        ({"pattern": "+"}, "nothing to act on"),
        ({"pattern": "a{,3}"}, "no quantifier"),
        ({"pattern": "(a*)*"}, "may be empty"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_place(schema: object, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint) as refusal:
        grammar_for(schema)
    assert "json_schema" in str(refusal.value)


def test_a_schema_nested_without_measure_is_refused() -> None:
    text = '{"items": ' * 5000 + "{}" + "}" * 5000
    with pytest.raises(InvalidArgument, match="json_schema"):
        grammar_for(text)
    deep: dict[str, object] = {}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        grammar_for(deep)


def test_a_schema_whose_combinations_multiply_is_given_up() -> None:
    both = [{"$ref": f"#/$defs/{n + 1}"} for n in range(60) for _ in range(2)]
    defs = {str(n): {"allOf": both[2 * n : 2 * n + 2]} for n in range(60)} | {"60": TEXT}
    with pytest.raises(InvalidArgument, match="more than 2 s to resolve"):
        grammar_for({"$ref": "#/$defs/0", "$defs": defs})


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[^a-y]{1,3}$", r"^\w+-\S$", r"b", r"a|^b$|c$", r"^(?:x(?:y|)z){2}$", r"^$", r"",
        r'^["\\]{2}$', r"^\u00e9[\x00-\x1f]$", r"^[\d\-\]]+?$", r"^[\t\b]$", r"^a{0}b$",
        r"^\/\.\*$", r"^[\s\S]$", r"^(a|b{2,3})c?$",
    ],
)  # fmt: skip
@pytest.mark.models
def test_a_pattern_matches_what_a_regular_expression_does(walks: Walks, pattern: str) -> None:
    grammar = grammar_for({"type": "string", "pattern": pattern})
    expression = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    texts = ["", "a", "b", "bb", "xbx", "c", "cd", "é", "é\x01", "é\n", '"\\', '""', "ab-c", "a-1"]
    texts += ["xyzxz", "xzxz", "-]1", "\t", "\b", "/.*", "z", "Zé", "bbc", "ac", "bbbbc", "zzzz"]
    for text in texts:
        taken = walks.accepts(grammar, json.dumps(text, ensure_ascii=False))
        assert taken is bool(expression.search(text)), text


@pytest.mark.models
def test_every_whole_number_between_two_bounds_is_allowed_and_no_other(walks: Walks) -> None:
    for low, high in (
        (0, 7),
        (-12, 12),
        (7, 123),
        (99, 101),
        (-205, -98),
        (0, 0),
        (None, 5),
        (8, None),
    ):
        bounds = {} if low is None else {"minimum": low}
        bounds |= {} if high is None else {"maximum": high}
        grammar = grammar_for({"type": "integer", **bounds})
        for number in range(-250, 251):
            inside = (low is None or low <= number) and (high is None or number <= high)
            assert walks.accepts(grammar, str(number)) is inside, (low, high, number)


# ---- any schema ----------------------------------------------------------------------------------

SCALARS = st.sampled_from(
    [1, 0, -3, 2.5, True, False, None, "a", "b\\c", 'q"', "é\n", [1], {"k": 1}]
)
SMALL = st.integers(0, 4)
NAMES = ["a", "ab", "b c", 'é"', "x\\y", ""]


def _some(optional: dict[str, Any], **fixed: object) -> st.SearchStrategy[Any]:
    """Return schemas with the `fixed` keywords and any of the optional ones."""
    return st.fixed_dictionaries({}, optional=optional).map(lambda drawn: {**fixed, **drawn})


LEAVES = st.one_of(
    st.sampled_from([True, {}, {"type": "boolean"}, {"$ref": "#/$defs/list"}]),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    _some({"minimum": st.sampled_from([-120, -3, 0, 99, 100.5]),
           "maximum": st.sampled_from([-2, 0, 7, 1234, 99_999]),
           "exclusiveMinimum": st.sampled_from([-10, 0, 3])}, type="integer"),
    _some({"minimum": st.sampled_from([-12, -1, 0, 1]),
           "exclusiveMinimum": st.sampled_from([-2, 0, 10]),
           "maximum": st.sampled_from([-1, 0, 1, 200]),
           "exclusiveMaximum": st.sampled_from([0, 1, 15])}, type="number"),
    _some({"minLength": SMALL, "maxLength": SMALL}, type="string"),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.sampled_from(["^[a-c]{1,3}$", "^(yes|no)$", "^[^x]{2}$"]).map(lambda p: {"pattern": p}),
)  # fmt: skip


def _branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    members = st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    names = st.lists(st.sampled_from([*NAMES, "z"]), unique=True, max_size=3)
    return st.one_of(
        _some({"items": inner, "prefixItems": several, "minItems": SMALL, "maxItems": SMALL},
              type="array"),
        _some({"properties": members, "required": names,
               "additionalProperties": inner | st.booleans()}, type="object"),
        _some({"type": st.sampled_from(["string", "object", ["null", "integer"]])}).flatmap(
            lambda base: several.map(lambda schemas: {**base, "anyOf": schemas})
        ),
        several.map(lambda schemas: {"oneOf": schemas}),
        several.map(lambda schemas: {"allOf": schemas[:2]}),
    )  # fmt: skip


SCHEMAS = st.recursive(LEAVES, _branches, max_leaves=8)


@pytest.mark.models
@given(schema=SCHEMAS, rng=st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_every_text_of_any_schema_is_valid_under_it(
    walks: Walks, schema: Any, rng: random.Random
) -> None:
    document = {"allOf": [schema], "$defs": {"list": {"items": {"$ref": "#/$defs/list"},
                                                      "type": "array", "maxItems": 2}}}  # fmt: skip
    try:
        grammar = grammar_for(document)
    except InvalidArgument:
        assume(False)
    for _ in range(3):
        text = walks.text(grammar, rng, n_most=200)
        if text is not None:
            assert is_valid(json.loads(text), document), text
