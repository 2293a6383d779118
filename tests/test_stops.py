"""Stop strings in a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument
from orchestrator.text.stops import MAX_STOP_LENGTH, MAX_STOPS, StopStrings

words = st.text(alphabet="ab\n", min_size=1, max_size=4)


def streamed(stops: list[str], chunks: list[str]) -> tuple[str, bool]:
    watch = StopStrings(stops)
    shown, stopped = "", False
    for chunk in chunks:
        text, stopped = watch.feed(chunk)
        shown += text
    return shown + watch.finish(), stopped


def cut(stops: list[str], text: str) -> tuple[str, bool]:
    """The oracle: looks at every prefix of the whole text for one that ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(st.lists(words, max_size=4), st.lists(st.text(alphabet="ab\n", max_size=5), max_size=8))
def test_the_stream_is_cut_where_the_whole_text_would_be(
    stops: list[str], chunks: list[str]
) -> None:
    assert streamed(stops, chunks) == cut(stops, "".join(chunks))


@given(words, st.lists(st.text(alphabet="ab\n", max_size=5), max_size=8))
def test_one_stop_string_is_found_where_find_finds_it(stop: str, chunks: list[str]) -> None:
    text = "".join(chunks)
    at = text.find(stop)
    assert streamed([stop], chunks) == ((text[:at], True) if at >= 0 else (text, False))


def test_nothing_that_may_begin_a_stop_string_is_shown_before_it_is_decided() -> None:
    watch = StopStrings(["</end>"])
    assert [watch.feed(char)[0] for char in "a</en."] == ["a", "", "", "", "", "</en."]


def test_after_a_stop_nothing_more_is_shown() -> None:
    watch = StopStrings(["b"])
    assert watch.feed("abc") == ("a", True)
    assert watch.feed("more") == ("", True)
    assert (watch.finish(), watch.matched) == ("", "b")


def test_the_stop_string_that_is_complete_first_ends_the_reply() -> None:
    assert streamed(["abcd", "bc"], ["ab", "cd"]) == ("a", True)


def test_of_two_that_end_together_the_longer_one_counts() -> None:
    assert streamed(["bc", "abc"], ["xabc"]) == ("x", True)


@pytest.mark.parametrize(
    "stops", [[""], ["x" * (MAX_STOP_LENGTH + 1)], ["x"] * (MAX_STOPS + 1), "stop"]
)
def test_a_stop_string_out_of_bounds_is_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        StopStrings(stops)
