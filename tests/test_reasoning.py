"""Reasoning and answer, told apart while they stream."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument
from orchestrator.text.reasoning import Piece, ReasoningSplitter, leaves_open


def streamed(chunks: list[str], *, inside: bool = False) -> list[Piece]:
    """The pieces of a whole stream, neighbours on the same side joined."""
    splitter = ReasoningSplitter(inside=inside)
    pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.finish()
    return [
        (side, "".join(text for _, text in group))
        for side, group in groupby(pieces, key=lambda piece: piece[0])
    ]


parts = st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", "a", "\n"]))


@given(parts, st.booleans(), st.data())
def test_how_the_text_is_cut_changes_nothing(
    parts: list[str], inside: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(chunks, inside=inside) == streamed([text], inside=inside)


@given(parts, st.booleans())
def test_everything_but_the_markers_comes_through(parts: list[str], inside: bool) -> None:
    text = "".join(parts)
    shown = "".join(text for _, text in streamed(list(text), inside=inside))
    assert shown == text.replace("<think>", "\0").replace("</think>", "\0").replace("\0", "")


def test_a_reply_inside_an_open_block_begins_with_reasoning() -> None:
    chunks = ["so\n</th", "ink>\n\n", "Yes."]
    assert streamed(chunks, inside=True) == [("reasoning", "so\n"), ("content", "\n\nYes.")]


def test_a_reply_may_open_its_block_itself() -> None:
    assert streamed(["<think>", "so</think>Yes."]) == [("reasoning", "so"), ("content", "Yes.")]


def test_a_repeated_opener_and_a_lone_closer_are_not_shown() -> None:
    assert streamed(["<think>so"], inside=True) == [("reasoning", "so")]
    assert streamed(["Yes.</think>"]) == [("content", "Yes.")]


def test_what_only_looked_like_a_marker_is_shown_at_the_end() -> None:
    assert streamed(["a </thin"]) == [("content", "a </thin")]


@pytest.mark.parametrize(
    ("opener", "open_"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_the_generation_prompt_tells_whether_a_block_is_open(opener: str, open_: bool) -> None:
    assert leaves_open(opener) is open_


@pytest.mark.parametrize("markers", [("", "b"), ("a", ""), ("a", "a"), ("a", "ab")])
def test_markers_that_cannot_be_told_apart_are_refused(markers: tuple[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        ReasoningSplitter(inside=False, opening=markers[0], closing=markers[1])
