"""Which GBNF stands for the JSON strings whose text matches a regular expression?

The expressions are those of JSON Schema (ECMA-262) without what no grammar can say: looking
around, references back, word boundaries. As there, a pattern may match anywhere in the text
unless it is anchored. Characters that JSON wants escaped are written in one way only, the
shortest; all others stand for themselves.

A class of characters is a sorted list of disjoint, inclusive ranges of code points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.grammar import N_REPEATED_MOST

Ranges = list[tuple[int, int]]
Define = Callable[[str], str]
"""Takes a GBNF expression and returns the name of a rule that stands for it."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_CONTROLS = range(0x20)


def literal(text: str) -> str:
    """Return a GBNF literal of `text`."""
    return f'"{"".join(_in_quotes(character) for character in text)}"'


def _in_quotes(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character >= " " and character != "\x7f" else f"\\x{ord(character):02X}"


def class_of(ranges: Ranges) -> str:
    """Return a GBNF class of characters that stand for themselves."""
    return f"[{''.join(_range(low, high) for low, high in ranges)}]"


def _range(low: int, high: int) -> str:
    return _point(low) if low == high else f"{_point(low)}-{_point(high)}"


def _point(point: int) -> str:
    character = chr(point)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{point:02X}" if point < 0x100 else f"\\U{point:08X}"


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges sorted, those that touch or overlap made one."""
    result: Ranges = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def without(ranges: Ranges, taken: Iterable[tuple[int, int]]) -> Ranges:
    """Return what is left of `ranges` when others are taken out."""
    result = list(ranges)
    for start, end in taken:
        parts = [((low, min(high, start - 1)), (max(low, end + 1), high)) for low, high in result]
        result = [part for pair in parts for part in dict.fromkeys(pair) if part[0] <= part[1]]
    return united(result)


EVERY: Ranges = [(0, _LAST)]
PLAIN = without(EVERY, [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), _SURROGATES])
"""What JSON strings hold as it is. A DEL is allowed as well, but nobody wants to see one."""


def in_json(ranges: Ranges) -> str:
    """Return GBNF for one character of a JSON string out of `ranges`."""
    plain = without(ranges, [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), _SURROGATES])
    ways = [class_of(plain)] if plain else []
    escapes = _escapes([point for point in (*_CONTROLS, 0x22, 0x5C) if holds(ranges, point)])
    if escapes:
        ways.append(f"{literal(chr(0x5C))} ({' | '.join(escapes)})")
    return f"({' | '.join(ways)})"


def _escapes(points: list[int]) -> list[str]:
    """Return GBNF for what follows the backslash of an escaped character."""
    short = "".join(_SHORT[point] for point in points if point in _SHORT)
    ways = [class_of([(ord(letter), ord(letter)) for letter in short])] if short else []
    for high in (0, 1):
        digits = "".join(f"{p % 16:x}" for p in points if p not in _SHORT and p >> 4 == high)
        if digits:
            ways.append(f'"u00{high}" [{digits}]')
    return ways


def holds(ranges: Ranges, point: int) -> bool:
    """Return whether a code point lies in one of the ranges."""
    return any(low <= point <= high for low, high in ranges)


_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [
    (9, 13),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): without(EVERY, ranges) for name, ranges in _CLASSES.items()}
_LETTERS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_HEX = {"x": 2, "u": 4}
_N_NESTED_MOST = 20


def pattern_to_gbnf(pattern: str, define: Define) -> str:
    """Return GBNF for the inside of a JSON string that matches `pattern`.

    Raises `InvalidArgument` saying where the pattern is wrong or asks for too much.
    """
    return _Pattern(pattern, define).translate()


class _Pattern:
    """Reads one regular expression from left to right."""

    def __init__(self, text: str, define: Define) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._define = define
        self._anything = f"{define(in_json(EVERY))}*"

    def translate(self) -> str:
        expression = self._alternatives()
        if self._at < len(self._text):
            raise self._error("a ) without its (")
        return expression

    def _error(self, message: str) -> InvalidArgument:
        return InvalidArgument(f"the pattern {self._text!r} at offset {self._at}: {message}")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, wanted: str) -> bool:
        if not self._text.startswith(wanted, self._at):
            return False
        self._at += len(wanted)
        return True

    def _alternatives(self) -> str:
        ways = [self._sequence()]
        while self._takes("|"):
            ways.append(self._sequence())
        return f"({' | '.join(ways)})"

    def _sequence(self) -> str:
        """Read up to a ``|``, a ``)`` or the end. Only outside of groups are there anchors."""
        outside = self._depth == 0
        items = [] if not outside or self._takes("^") else [self._anything]
        ended = False
        while self._next() not in ("", "|", ")"):
            if outside and self._takes("$"):
                ended = True
                if self._next() not in ("", "|"):
                    raise self._error("something follows the $; nothing can")
                break
            items.append(self._quantified(self._item()))
        if outside and not ended and items != [self._anything]:
            items.append(self._anything)
        return " ".join(items) or '""'

    def _item(self) -> str:
        character = self._next()
        if character == "(":
            return self._group()
        if character in "^$":
            raise self._error(f"{character} is understood at the ends of the whole pattern only")
        if character in "*+?{}]":
            raise self._error(f"{character} has nothing to act on; write \\{character} for itself")
        return self._define(in_json(self._one()))

    def _group(self) -> str:
        self._at += 1
        if self._takes("?") and not self._takes(":"):
            if not self._takes("<") or self._next() in ("=", "!", ""):
                raise self._error("looking ahead or behind is not supported")
            self._at = self._text.find(">", self._at) + 1 or len(self._text)
        self._depth += 1
        if self._depth > _N_NESTED_MOST:
            raise self._error(f"groups are nested more than {_N_NESTED_MOST} deep")
        expression = self._alternatives()
        if not self._takes(")"):
            raise self._error("a ( without its )")
        self._depth -= 1
        return self._define(expression)

    def _one(self) -> Ranges:
        """Read what stands for one character."""
        if self._takes("["):
            return self._class()
        if self._takes("."):
            return without(EVERY, _LINE_ENDS)
        if self._next() == "\\":
            return self._escaped(in_class=False)
        return self._itself()

    def _itself(self) -> Ranges:
        point = ord(self._next())
        if holds([_SURROGATES], point):
            raise self._error("half a character; write the whole one")
        self._at += 1
        return [(point, point)]

    def _class(self) -> Ranges:
        complement = self._takes("^")
        ranges: Ranges = []
        while not self._takes("]"):
            ranges += self._class_part()
        ranges = united(ranges)
        if complement:
            ranges = without(EVERY, ranges)
        if not without(ranges, [_SURROGATES]):
            raise self._error("an empty class matches nothing")
        return ranges

    def _class_part(self) -> Ranges:
        low = self._class_point()
        if self._next() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return low
        self._at += 1
        high = self._class_point()
        if len(low) > 1 or len(high) > 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
            raise self._error("a range needs one character at each end")
        if high[0][0] < low[0][0]:
            raise self._error("a range ends before it begins")
        return [(low[0][0], high[0][0])]

    def _class_point(self) -> Ranges:
        if not self._next():
            raise self._error("a [ without its ]")
        return self._escaped(in_class=True) if self._next() == "\\" else self._itself()

    def _escaped(self, *, in_class: bool) -> Ranges:
        self._at += 1
        letter = self._next()
        if letter in _HEX:
            return self._hex(letter)
        self._at += 1
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _LETTERS and not (letter == "0" and self._next().isdigit()):
            return [(_LETTERS[letter],) * 2]
        if letter == "b" and in_class:
            return [(8, 8)]
        if not letter or letter.isalnum():
            raise self._error(f"\\{letter} is not supported")
        return [(ord(letter), ord(letter))]

    def _hex(self, letter: str) -> Ranges:
        self._at += 1
        if letter == "u" and self._takes("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at : end] if end > self._at else ""
            length = len(digits) + 1
        else:
            digits = self._text[self._at : self._at + _HEX[letter]]
            length = _HEX[letter]
            digits = digits if len(digits) == length else ""
        if not digits or not set(digits) <= set("0123456789abcdefABCDEF"):
            raise self._error(f"\\{letter} needs hexadecimal digits")
        point = int(digits, 16)
        if point > _LAST or holds([_SURROGATES], point):
            raise self._error(f"\\{letter}{digits} is no character of its own")
        self._at += length
        return [(point, point)]

    def _quantified(self, item: str) -> str:
        """Read what follows an item. A lazy quantifier allows the same texts as a greedy one."""
        if self._next() in ("*", "+", "?"):
            repetition = self._next()
            self._at += 1
        elif self._takes("{"):
            repetition = self._bounds()
        else:
            return item
        self._takes("?")
        if self._next() in ("*", "+", "?", "{"):
            raise self._error("a quantifier after a quantifier; put the first in a group")
        return f"{item}{repetition}"

    def _bounds(self) -> str:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : max(end, self._at)].partition(",")
        parts = [part for part in (low, high) if part]
        if not low or not all(_is_count(part) for part in parts):
            raise self._error("a { that is no quantifier; write \\{ for itself")
        if max(map(int, parts)) > N_REPEATED_MOST or (high and int(high) < int(low)):
            raise self._error(f"a repetition must go from less to more, at most {N_REPEATED_MOST}")
        self._at = end + 1
        return f"{{{int(low)}{comma}{int(high) if high else ''}}}"


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
