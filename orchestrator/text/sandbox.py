"""In what surroundings does a chat template from an unknown file run?

A template is a program that came with the weights. It gets the functions and filters that
published templates expect (those of Hugging Face's `apply_chat_template`), Jinja's sandbox, and
bounds where a bound is cheap: the numbers a `range` yields, the size of a repetition or a power,
and the size of the text. A loop nested in loops over its own lists is not bounded.

The sandbox here is not the immutable one: published templates append to lists. Who renders hands
each rendering its own lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

Clock = Callable[[], datetime]

GUARD = "_guard"  # the variable that holds what guards text parsed by the template itself

MAX_NUMBERS = 200_000  # that all the ranges of one rendering yield together
MAX_REPEATED = 1_000_000  # items of a repeated text or list
MAX_BITS = 65_536  # of a power
MAX_TEXT = 64 * 2**20  # characters of a rendering

_BEYOND_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]")


class Refusal(jinja2.TemplateError):
    """A template called `raise_exception`; the message is its own."""


class _Generation(Extension):
    """`{% generation %}`: tells a trainer which text the model wrote; here it is a plain scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateSandbox(SandboxedEnvironment):
    """Jinja as published chat templates expect it, with bounds."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters |= {"tojson": tojson, "from_json": _parsed, "fromjson": _parsed, "safe": str}
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda layout: clock().strftime(layout),
        }

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """The product or power of two values. Raises TemplateRuntimeError beyond the bounds."""
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        else:
            _check_power(left, right)
        return super().call_binop(context, operator, left, right)


def _check_repetition(sequence: Any, times: Any) -> None:
    if not isinstance(sequence, str | bytes | list | tuple) or not isinstance(times, int):
        return
    if len(sequence) * times > MAX_REPEATED:
        raise jinja2.TemplateRuntimeError(f"a repetition makes more than {MAX_REPEATED:,} items")


def _check_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and base.bit_length() * exponent > MAX_BITS:
        raise jinja2.TemplateRuntimeError(f"a power has more than {MAX_BITS:,} bits")


def bounded_range() -> Callable[..., range]:
    """A `range` for one rendering; all its calls together yield at most MAX_NUMBERS numbers."""
    left = MAX_NUMBERS

    def counted(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise jinja2.TemplateRuntimeError(f"ranges yield more than {MAX_NUMBERS:,} numbers")
        return numbers

    return counted


def _refuse(message: object = "") -> NoReturn:
    raise Refusal(str(message))


@jinja2.pass_context
def _parsed(context: jinja2.runtime.Context, text: Any) -> Any:
    """JSON text as its value. Escapes may spell special texts, so the value is guarded anew."""
    guard: Callable[[Any], Any] | None = context.get(GUARD)
    value = json.loads(text)
    return value if guard is None else guard(value)


def _listed(value: Any) -> list[Any]:
    """What Jinja's `map` and `select` yield, as a list; nothing else has a JSON form."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`value` as JSON, as Hugging Face's filter writes it: nothing is escaped for HTML.

    Lone surrogates pass through even with `ensure_ascii`: they are `guard.MARK`s, no text.
    """
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )
    return _BEYOND_ASCII.sub(lambda char: json.dumps(char[0])[1:-1], text) if ensure_ascii else text
