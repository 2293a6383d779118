"""The conversation of a chat: what commands make of it, and how it is kept in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.cli import conversation as module
from orchestrator.cli.conversation import Conversation, ConversationError, Exchange, load, save

TALK = Conversation("Be brief.", (Exchange("Hi", "Hello"), Exchange("Why?", "So.", "let me see")))


def test_messages_alternate_after_the_system_text() -> None:
    assert TALK.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "let me see"},
    ]


def test_a_prompt_ends_with_the_new_message_and_leaves_the_conversation_alone() -> None:
    assert TALK.prompt("More")[-1] == {"role": "user", "content": "More"}
    assert len(TALK.messages()) == 5


def test_no_system_message_is_sent_for_an_empty_system_text() -> None:
    assert TALK.with_system("").messages()[0]["role"] == "user"


def test_undo_takes_the_last_exchange_and_refuses_when_there_is_none() -> None:
    assert TALK.without_last().exchanges == (Exchange("Hi", "Hello"),)
    with pytest.raises(ConversationError, match="nothing has been said"):
        Conversation("system").without_last()


def test_emptied_keeps_the_system_text() -> None:
    assert TALK.emptied() == Conversation("Be brief.")


@pytest.mark.parametrize(
    "talk", [TALK, Conversation(), Conversation("only"), Conversation("", (Exchange("", "é\n☃"),))]
)
def test_a_saved_conversation_loads_as_it_was(tmp_path: Path, talk: Conversation) -> None:
    save(talk, tmp_path / "talk.json")
    assert load(tmp_path / "talk.json") == talk


def test_saving_again_replaces_the_older_conversation(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    save(TALK, file)
    save(TALK.emptied(), file)
    assert load(file) == TALK.emptied()
    assert os.listdir(tmp_path) == ["talk.json"]


def test_a_file_that_holds_something_else_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my notes")
    with pytest.raises(ConversationError, match="not overwritten, choose another name"):
        save(TALK, file)
    assert file.read_text() == "my notes"


def test_a_save_that_fails_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk.json"
    save(TALK, file)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConversationError, match="was not saved: No space left on device"):
        save(TALK.emptied(), file)
    assert load(file) == TALK
    assert os.listdir(tmp_path) == ["talk.json"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match=r"nowhere.*was not saved: No such file"):
        save(TALK, tmp_path / "nowhere" / "talk.json")


def document(messages: object, **changes: object) -> str:
    head = {"format": module.FORMAT, "version": module.VERSION, "messages": messages}
    return json.dumps(head | changes)


def say(role: str, content: object = "x") -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no saved conversation: not JSON"),
        ('{"format": ', "is no saved conversation: not JSON"),
        ("[" * 100_000, "is no saved conversation: not JSON"),
        ("[1]", 'no "format"'),
        ("{}", 'no "format"'),
        (document([], version=9), "version is 9, expected 1"),
        (document({}), '"messages" is no list'),
        (document([1]), "message 1 is no object"),
        (document([say("user")]), "its last message has no reply"),
        (document([say("assistant")]), 'message 1 has the role "assistant", expected "user"'),
        (document([say("user"), say("user")]), 'message 2 has the role "user"'),
        (document([say("system"), say("system")]), 'message 2 has the role "system"'),
        (document([say("user"), say("assistant", 3)]), 'message 2 has no text under "content"'),
        (document([say("system", None)]), 'message 1 has no text under "content"'),
        (document([{"content": "x"}]), 'message 1 has no text under "role"'),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(ConversationError) as raised:
        load(file)
    assert said in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match="cannot be read: No such file"):
        load(tmp_path / "talk.json")
    (tmp_path / "talk.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConversationError, match="no saved conversation"):
        load(tmp_path / "talk.json")


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/a", "x" * 300, "loop", "/dev/zero", "/dev/full", "."]
)
def test_a_path_that_holds_nothing_is_refused_and_never_a_defect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConversationError):
        load(Path(name))
    with pytest.raises(ConversationError):
        save(Conversation(), Path(name))


def test_half_a_character_smuggled_in_by_a_file_can_be_saved_again(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    save(Conversation("", (Exchange("hi", "ho"),)), file)
    file.write_text(file.read_text().replace("ho", "\\ud800"))
    smuggled = load(file)
    save(smuggled, tmp_path / "again.json")
    assert load(tmp_path / "again.json") == smuggled
