"""Can llama.cpp follow this grammar without harm, and what is wrong with it if not?

GBNF is read here by llama.cpp's own rules before llama.cpp sees it, because its parser is no
judge of a text that anybody may send: it prints to standard error, never comes back from
``{5,3}`` or from recursion that hides behind a rule which may be empty, needs exponential time
for a chain of rules that begin alike, and lets grammars through that end the process later (a
reference to a token after a character, a rule that goes round without a character).

What is taken is a little less than llama.cpp takes. Refused are token references (``<[7]>``),
repetitions of what may be empty, rules without an end, and rules that are defined twice.

Rules are held as llama.cpp holds them, with groups and repetitions as rules of their own: a rule
is a list of alternatives, an alternative a list of elements, an element `CHARACTER` or the number
of another rule.
"""

from __future__ import annotations

import functools
import graphlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.errors import InvalidArgument

ROOT = "root"
CHARACTER = -1

N_REPEATED_MOST = 2000
"""How often llama.cpp repeats an item; a larger bound it would take for none."""

_N_ELEMENTS_MOST = 200_000
_N_NESTED_MOST = 50
_N_WAYS_MOST = 4_000
_N_DEEP_MOST = 2_500

_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX = {"x": 2, "u": 4, "U": 8}

Alternative = list[int]
Rule = list[Alternative]


@functools.lru_cache(maxsize=64)
def check_gbnf(text: str) -> None:
    """Raise `InvalidArgument` for a grammar that cannot be followed, saying where and why."""
    _Rules(_Parser(text).parse()).check()


@dataclass(slots=True)
class _Table:
    """Rules by number; those of groups and repetitions bear the name of the rule around them."""

    names: list[str] = field(default_factory=list)
    rules: list[Rule | None] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    n_elements: int = 0

    def number(self, name: str) -> int:
        """Return the number of a rule that the text names."""
        if name not in self.numbers:
            self.numbers[name] = self.new(name)
        return self.numbers[name]

    def new(self, name: str) -> int:
        self.names.append(name)
        self.rules.append(None)
        return len(self.rules) - 1

    def define(self, number: int, rule: Rule) -> None:
        self.grow(sum(len(alternative) + 1 for alternative in rule))
        self.rules[number] = rule

    def grow(self, count: int) -> None:
        """Count elements, so that a few characters cannot ask for gigabytes."""
        self.n_elements += count
        if self.n_elements > _N_ELEMENTS_MOST:
            raise InvalidArgument(
                f"the grammar has more than {_N_ELEMENTS_MOST:,} elements once its repetitions are "
                "written out; lower their bounds"
            )


class _Parser:
    """Reads GBNF as llama.cpp does, character by character."""

    def __init__(self, text: str) -> None:
        self._text = text + "\0"
        self._at = 0
        self._depth = 0
        self._table = _Table()

    def parse(self) -> _Table:
        """Return the rules of the whole text."""
        self._skip_space(lines=True)
        while self._next() != "\0":
            self._rule()
        if ROOT not in self._table.numbers:
            raise InvalidArgument(
                f'the grammar has no rule "{ROOT}"; name the one to begin with so'
            )
        for name, number in self._table.numbers.items():
            if self._table.rules[number] is None:
                raise InvalidArgument(f'the grammar uses a rule "{name}" and does not define it')
        return self._table

    def _next(self) -> str:
        return self._text[self._at]

    def _error(self, message: str) -> InvalidArgument:
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - before.rfind("\n")
        return InvalidArgument(f"the grammar is wrong at line {line}, column {column}: {message}")

    def _skip_space(self, *, lines: bool) -> None:
        while (character := self._next()) in (" \t#\r\n" if lines else " \t#"):
            if character == "#":
                while self._next() not in "\r\n\0":
                    self._at += 1
            else:
                self._at += 1

    def _take(self, wanted: str, *, lines: bool) -> None:
        if not self._text.startswith(wanted, self._at):
            raise self._error(f"{wanted!r} is expected")
        self._at += len(wanted)
        self._skip_space(lines=lines)

    def _word(self, allowed: Iterable[str], what: str) -> str:
        start = self._at
        while self._next() in allowed:
            self._at += 1
        if self._at == start:
            raise self._error(f"{what} is expected")
        return self._text[start : self._at]

    def _rule(self) -> None:
        name = self._word(_NAME, "the name of a rule")
        number = self._table.number(name)
        if self._table.rules[number] is not None:
            raise self._error(f'the rule "{name}" is defined twice')
        self._skip_space(lines=False)
        self._take("::=", lines=True)
        self._alternatives(name, number, nested=False)
        if self._next() not in "\r\n\0":
            raise self._error("a line's end is expected; alternatives need a | before it")
        self._skip_space(lines=True)

    def _alternatives(self, name: str, number: int, *, nested: bool) -> None:
        rule = [self._sequence(name, nested=nested)]
        while self._next() == "|":
            self._take("|", lines=True)
            rule.append(self._sequence(name, nested=nested))
        self._table.define(number, rule)

    def _sequence(self, name: str, *, nested: bool) -> Alternative:
        sequence: Alternative = []
        last = 0  # where the item begins that a repetition would repeat
        n_rules = 1  # how many rules that item stands for, in llama.cpp's count
        while True:
            character = self._next()
            if character in "*+?{":
                low, high = self._bounds(nested=nested)
                n_rules *= max(1, low if high is None else high)
                if n_rules > N_REPEATED_MOST:
                    raise self._error(f"an item is repeated more than {N_REPEATED_MOST:,} times")
                self._repeat(sequence, last, low, high, name)
                continue
            before = len(self._table.rules)
            item = self._item(name, nested=nested)
            if item is None:
                return sequence
            last = len(sequence)
            sequence += item
            n_rules = max(1, len(self._table.rules) - before) if character == "(" else 1

    def _item(self, name: str, *, nested: bool) -> Alternative | None:
        """Read one item of a sequence; None where the sequence ends."""
        character = self._next()
        if character == '"':
            item = self._literal()
        elif character == "[":
            item = self._class()
        elif character == "(":
            item = self._group(name)
        elif character == ".":
            self._at += 1
            item = [CHARACTER]
        elif character in _NAME:
            item = [self._table.number(self._word(_NAME, "a name"))]
        elif character in "<!":
            raise self._error("references to tokens are not supported; write the text instead")
        else:
            return None
        self._skip_space(lines=nested)
        return item

    def _literal(self) -> Alternative:
        self._at += 1
        length = 0
        while self._next() != '"':
            self._character()
            length += 1
        self._at += 1
        return [CHARACTER] * length

    def _class(self) -> Alternative:
        """Read a class of characters; only the first of its elements is one to be matched."""
        self._at += 1
        if self._next() == "^":
            self._at += 1
        if self._next() == "]":
            raise self._error("an empty class matches nothing; put characters in it")
        n_elements = 0
        while self._next() != "]":
            low = self._character()
            n_elements += 1
            if self._next() == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                n_elements += 1
                if self._character() < low:
                    raise self._error("a range ends before it begins; turn it round")
        self._at += 1
        return [CHARACTER] * n_elements

    def _group(self, name: str) -> Alternative:
        self._depth += 1
        if self._depth > _N_NESTED_MOST:
            raise self._error(f"groups are nested more than {_N_NESTED_MOST} deep; name some")
        self._take("(", lines=True)
        number = self._table.new(name)
        self._alternatives(name, number, nested=True)
        if self._next() != ")":
            raise self._error("')' is expected")
        self._at += 1
        self._depth -= 1
        return [number]

    def _character(self) -> int:
        character = self._next()
        if character == "\0":
            raise self._error("the text ends inside quotes or brackets")
        self._at += 1
        if character != "\\":
            return ord(character)
        escape = self._next()
        self._at += 1
        if escape in _ESCAPES:
            return ord(_ESCAPES[escape])
        if escape not in _HEX:
            raise self._error(f"\\{escape} is no escape".replace("\0", ""))
        digits = self._text[self._at : self._at + _HEX[escape]]
        if len(digits) < _HEX[escape] or not set(digits) <= set("0123456789abcdefABCDEF"):
            raise self._error(f"\\{escape} needs {_HEX[escape]} hexadecimal digits")
        self._at += len(digits)
        if int(digits, 16) > 0x10FFFF:
            raise self._error(f"\\{escape}{digits} is beyond Unicode, which ends at 10FFFF")
        return int(digits, 16)

    def _bounds(self, *, nested: bool) -> tuple[int, int | None]:
        """Read ``*``, ``+``, ``?`` or ``{low,high}``."""
        character = self._next()
        self._take(character, lines=nested)
        if character != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        low = self._count(nested=nested)
        high: int | None = low
        if self._next() == ",":
            self._take(",", lines=nested)
            high = None if self._next() == "}" else self._count(nested=nested)
        self._take("}", lines=nested)
        if high is not None and high < low:
            raise self._error(f"a repetition of {low} to {high} times; turn the bounds round")
        return low, high

    def _count(self, *, nested: bool) -> int:
        digits = self._word("0123456789", "a number")
        self._skip_space(lines=nested)
        if len(digits) > 9 or int(digits) > N_REPEATED_MOST:
            raise self._error(
                f"{digits[:20]} repetitions; at most {N_REPEATED_MOST:,} are possible"
            )
        return int(digits)

    def _repeat(
        self, sequence: Alternative, last: int, low: int, high: int | None, name: str
    ) -> None:
        """Write out a repetition of ``sequence[last:]``.

        S{2,4} becomes S S R2 with R2 ::= S R1 | and R1 ::= S | ; S{2,} becomes S S R, R ::= S R | .
        """
        item = sequence[last:]
        if not item:
            raise self._error("there is nothing before it to repeat")
        del sequence[last:]
        self._table.grow(len(item) * low)
        sequence += item * low
        rest: int | None = None
        for _ in range(1 if high is None else high - low):
            number = self._table.new(name)
            follow = number if high is None else rest
            self._table.define(number, [item if follow is None else [*item, follow], []])
            rest = number
        if rest is not None:
            sequence.append(rest)


class _Rules:
    """What the rules can become."""

    def __init__(self, table: _Table) -> None:
        self._names = table.names
        self._rules = [rule or [] for rule in table.rules]

    def check(self) -> None:
        """Refuse what would never end, or would take too long to follow."""
        endless = set(range(len(self._rules))) - self._closed(with_characters=True)
        if endless:
            inner = {n: {e for way in self._rules[n] for e in way} & endless for n in endless}
            raise InvalidArgument(
                f"the grammar can never end, for it goes round in {self._circle(inner)}; "
                "let a way lead out"
            )
        beginnings = self._beginnings(self._closed(with_characters=False))
        first = {n: {e for e in each if e != CHARACTER} for n, each in enumerate(beginnings)}
        if circle := self._circle(first):
            raise InvalidArgument(
                f"the grammar goes round in {circle} without a character, or repeats there what "
                "may be empty; let a character come first"
            )
        self._check_beginnings(beginnings, graphlib.TopologicalSorter(first).static_order())

    def _closed(self, *, with_characters: bool) -> set[int]:
        """Return the rules that can be finished, using characters or not."""
        users: dict[int, list[tuple[int, int]]] = {}  # rule -> where it keeps others waiting
        waiting: dict[tuple[int, int], int] = {}
        closed: set[int] = set()
        for number, rule in enumerate(self._rules):
            for place, alternative in enumerate(rule):
                if CHARACTER in alternative and not with_characters:
                    continue
                needed = set(alternative) - {CHARACTER}
                waiting[number, place] = len(needed)
                for each in needed:
                    users.setdefault(each, []).append((number, place))
                if not needed:
                    closed.add(number)
        done = list(closed)
        while done:
            for user in users.get(done.pop(), []):
                waiting[user] -= 1
                if not waiting[user] and user[0] not in closed:
                    closed.add(user[0])
                    done.append(user[0])
        return closed

    def _beginnings(self, maybe_empty: set[int]) -> list[list[int]]:
        """Return for every rule the elements that what it stands for can begin with."""
        beginnings = []
        for rule in self._rules:
            first: list[int] = []
            for alternative in rule:
                for element in alternative:
                    first.append(element)
                    if element not in maybe_empty:
                        break
            beginnings.append(first)
        return beginnings

    def _circle(self, graph: Mapping[int, Iterable[int]]) -> str:
        """Return the names of rules that lead back to the first of them, if there are any."""
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as cycle:
            names = list(dict.fromkeys(self._names[number] for number in cycle.args[1]))
            return ", ".join(f'"{name}"' for name in names[:6])
        return ""

    def _check_beginnings(self, beginnings: list[list[int]], order: Iterable[int]) -> None:
        """Bound the stacks that llama.cpp opens for a rule, and how deep it looks into it."""
        ways, depth = [0] * len(beginnings), [0] * len(beginnings)
        for number in order:
            inner = [element for element in beginnings[number] if element != CHARACTER]
            ways[number] = 1 + len(beginnings[number]) + sum(ways[each] for each in inner)
            depth[number] = 1 + max((depth[each] for each in inner), default=0)
            if ways[number] > _N_WAYS_MOST or depth[number] > _N_DEEP_MOST:
                raise InvalidArgument(
                    f'the rule "{self._names[number]}" of the grammar can begin in too many ways; '
                    "let fewer of its parts be left out, and fewer begin alike"
                )
