"""What callers send and templates see: roles, contents, system messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument
from orchestrator.text.messages import normalised


def said(role: str, content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


texts = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5))),
)
chats = st.lists(
    st.builds(
        said, st.sampled_from(["system", "developer", "user", "assistant", "tool"]), content=texts
    ),
    min_size=1,
    max_size=6,
)


def test_a_developer_message_is_a_system_message() -> None:
    assert normalised([said("developer"), said("user")]) == normalised(
        [said("system"), said("user")]
    )


def test_leading_system_messages_become_one_in_their_order() -> None:
    chat = [said("system", "A"), said("developer", "B"), said("system", ""), said("user")]
    assert normalised(chat) == [said("system", "A\n\nB"), said("user")]


def test_a_later_system_message_stays_where_it_is() -> None:
    chat = [said("system", "A"), said("user"), said("system", "B")]
    assert normalised(chat) == chat


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    assert normalised([said("user", parts)])[0]["content"] == "a\nb\nc"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_its_kind(kind: str) -> None:
    with pytest.raises(InvalidArgument, match=rf'messages\[1\].*"{kind}".*reads text only'):
        normalised([said("system"), said("user", [{"type": kind}])])


def test_null_content_is_empty_but_stays_null_beside_tool_calls() -> None:
    call = said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    assert normalised([said("user", None)]) == [said("user", "")]
    assert normalised([{"role": "user"}]) == [said("user", "")]
    assert normalised([call]) == [call]


def test_an_unknown_role_is_refused_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match=r"known roles are system, user.*\"assistant\""):
        normalised([said("asistant")])


@pytest.mark.parametrize(
    "chat",
    [
        [],
        "hi",
        {"role": "user"},
        ["hi"],
        [{"content": "hi"}],
        [said("user", 3)],
        [said("user", b"")],
        [said("assistant", tool_calls="f()")],
    ],
)
def test_what_is_no_list_of_messages_is_refused(chat: Any) -> None:
    with pytest.raises(InvalidArgument):
        normalised(chat)


@given(chats)
def test_normalising_twice_is_normalising_once(chat: list[dict[str, Any]]) -> None:
    once = normalised(chat)
    assert normalised(once) == once


@given(chats, chats)
def test_what_is_added_at_the_end_changes_nothing_before(
    chat: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    chat = [*chat, said("user")]
    assert normalised([*chat, *more])[: len(normalised(chat))] == normalised(chat)
