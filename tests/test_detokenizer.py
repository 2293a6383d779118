"""Text that arrives in pieces of characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text.bytes import ByteTokenizer
from orchestrator.text.detokenizer import Detokenizer

TOKENIZER = ByteTokenizer.for_chat()

nearly_utf8 = st.lists(
    st.one_of(st.binary(max_size=3), st.text(max_size=2).map(str.encode)), max_size=12
).map(b"".join)


def streamed(tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*map(detokenizer.feed, tokens), detokenizer.finish()]


@given(nearly_utf8)
def test_the_stream_joined_is_the_whole_decoded(data: bytes) -> None:
    assert "".join(streamed(list(data))) == data.decode("utf-8", errors="replace")


@given(st.text())
def test_no_character_is_ever_shown_in_part(text: str) -> None:
    assert "\ufffd" in text or "\ufffd" not in "".join(streamed(list(text.encode())))


def test_a_character_appears_with_its_last_byte() -> None:
    assert streamed(list("🦙".encode())) == ["", "", "", "🦙", ""]


def test_a_reply_that_ends_inside_a_character_ends_with_one_replacement() -> None:
    assert streamed(list("🦙".encode()[:3])) == ["", "", "", "\ufffd"]


def test_a_control_token_shows_nothing_and_a_marker_its_text() -> None:
    tokens = TOKENIZER.encode("a<|im_end|><think>", special=True)
    assert streamed(tokens) == ["a", "", "<think>", ""]


def test_a_finished_detokenizer_begins_anew() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    detokenizer.feed(0xF0)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.feed(ord("a")) == "a"
