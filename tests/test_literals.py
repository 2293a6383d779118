"""Many literal strings, searched for at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text.literals import begun_length, literal_pattern

words = st.text(alphabet="ab|", max_size=6)


@given(st.lists(words, max_size=4), st.lists(st.integers(1, 6), max_size=4), words)
def test_the_longest_literal_that_begins_is_found(
    others: list[str], lengths: list[int], text: str
) -> None:
    literals = [*others, *(text[:length] for length in lengths)]
    match = literal_pattern(literals).match(text)
    begun = [literal for literal in literals if literal and text.startswith(literal)]
    assert (match.group() if match else "") == max(begun, key=len, default="")


def test_characters_with_a_meaning_in_patterns_mean_themselves() -> None:
    assert literal_pattern(["<|a.b|>", "(", "^"]).findall("(<|a.b|><|aXb|>^") == [
        "(",
        "<|a.b|>",
        "^",
    ]


@pytest.mark.parametrize(
    ("text", "length"), [("", 0), ("x", 0), ("xa", 1), ("xab", 2), ("xabc", 0), ("xaba", 1)]
)
def test_an_end_that_begins_a_literal_is_measured_but_not_a_whole_one(
    text: str, length: int
) -> None:
    assert begun_length(text, ["abc", "12345"]) == length
