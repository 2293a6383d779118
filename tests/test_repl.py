"""A chat at the terminal: what each command does, and what the keys do."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeStream
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from orchestrator.cli.asking import Asking
from orchestrator.cli.conversation import Conversation, Exchange, load
from orchestrator.cli.editor import CommandCompleter, LineEditor, history
from orchestrator.cli.repl import COMMANDS, Repl, Screen
from orchestrator.errors import PromptTooLong

Line = str | type[BaseException]


@dataclass(slots=True)
class ScriptedEditor:
    """Types `lines`, one for each time it is asked; an exception among them is raised."""

    lines: list[Line]
    prefilled: list[str] = field(default_factory=list)

    def ask(self, prefilled: str = "") -> str:
        self.prefilled.append(prefilled)
        line: Line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line


@dataclass(slots=True)
class Talk:
    """What is left of a chat that has ended."""

    repl: Repl
    engine: FakeEngine
    editor: ScriptedEditor
    screen: str

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(each.user, each.reply.strip()) for each in self.repl.conversation.exchanges]

    def sent(self, place: int) -> list[object]:
        """Return the texts of the messages of one request."""
        return [message["content"] for message in self.engine.asked[place].messages]


def talk(*lines: Line, engine: FakeEngine | None = None, system: str = "") -> Talk:
    engine = engine or FakeEngine()
    editor = ScriptedEditor(list(lines))
    file = io.StringIO()
    console = Console(file=file, width=100, highlight=False)
    repl = Repl(engine, Asking(), Conversation(system), editor, Screen(console, console))
    repl.run()
    return Talk(repl, engine, editor, file.getvalue())


def test_a_message_is_sent_with_everything_said_before_it() -> None:
    ended = talk("one", "two", system="Be brief.")
    assert ended.sent(1) == ["Be brief.", "one", "echo one ", "two"]
    assert ended.said == [("one", "echo one"), ("two", "echo two")]


def test_every_turn_of_a_chat_carries_its_name_and_a_reset_changes_it() -> None:
    names = [each.conversation for each in talk("one", "two", "/reset", "three").engine.asked]
    assert names[0] == names[1] != names[2]


def test_each_reply_is_followed_by_one_line_of_figures() -> None:
    assert "prompt 30 · reused 10 (turn) · prefilled 20 · first token 0.25 s" in talk("hi").screen


def test_an_empty_line_asks_for_nothing() -> None:
    assert talk("", "   ").engine.asked == []


def test_regen_sends_the_same_messages_and_replaces_the_reply() -> None:
    engine = FakeEngine(streams=[FakeStream(["first"]), FakeStream(["second"])])
    ended = talk("hi", "/regen", engine=engine)
    assert ended.sent(0) == ended.sent(1) == ["hi"]
    assert ended.said == [("hi", "second")]


def test_undo_drops_the_last_exchange() -> None:
    ended = talk("one", "two", "/undo")
    assert ended.said == [("one", "echo one")]
    assert "dropped: two" in ended.screen


def test_edit_opens_the_last_message_and_sends_what_became_of_it() -> None:
    ended = talk("one", "two", "/edit", "three")
    assert ended.editor.prefilled[3] == "two"
    assert ended.sent(2) == ["one", "echo one ", "three"]
    assert ended.said == [("one", "echo one"), ("three", "echo three")]


@pytest.mark.parametrize("given_up", ["", KeyboardInterrupt, EOFError])
def test_an_edit_that_is_given_up_changes_nothing(given_up: Line) -> None:
    ended = talk("one", "/edit", given_up, "two")
    assert ended.said == [("one", "echo one"), ("two", "echo two")]


def test_system_sets_shows_and_takes_away_the_system_text() -> None:
    ended = talk("/system", "/system Be brief.", "/system", "a", "/system -", "b")
    assert "no system text" in ended.screen
    assert "\nBe brief.\n" in ended.screen
    assert ended.sent(0) == ["Be brief.", "a"]
    assert ended.sent(1) == ["a", "echo a ", "b"]


def test_reset_keeps_the_system_text() -> None:
    assert talk("one", "/reset", "two", system="S").sent(1) == ["S", "two"]


def test_stats_says_what_is_held_and_what_has_happened() -> None:
    screen = " ".join(talk("/stats").screen.split())
    assert "lanes 0 of 2 busy, 0 requests waiting" in screen
    assert "sequences 3 of 8 in use" in screen
    assert "in context 1 turn, 2 reply · 3.0 MB" in screen
    assert "requests 2 begun · 1 cancelled" in screen
    assert "prompt tokens 40 evaluated · 37 reused" in screen


def test_why_says_what_the_last_request_reused() -> None:
    ended = talk("/why", "one", "/why")
    assert "nothing was asked yet; ask something, then /why" in ended.screen
    assert "10 of 30 prompt tokens were reused (turn)" in ended.screen


def test_help_names_every_command() -> None:
    ended = talk("/help")
    assert [name for name in COMMANDS if f"/{name}" not in ended.screen] == []


def test_a_saved_chat_can_be_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk("one", f"/save {file}", system="S")
    ended = talk("lost", f"/load {file}", "two")
    assert ended.sent(1) == ["S", "one", "echo one ", "two"]
    assert "loaded 1 exchange\n" in ended.screen
    assert load(file).exchanges == (Exchange("one", "echo one "),)


def test_a_damaged_file_is_refused_and_the_chat_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("{")
    ended = talk("one", f"/load {file}", "two")
    assert "damaged" in ended.screen
    assert ended.said == [("one", "echo one"), ("two", "echo two")]


@pytest.mark.parametrize("line", ["/exit", "/quit", "/EXIT", EOFError])
def test_exit_and_the_end_of_input_leave(line: Line) -> None:
    assert talk(line, "never asked").engine.asked == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/regne", "/regne is no command; did you mean /regen?"),
        ("/xyzzy", "/xyzzy is no command; /help lists the commands"),
        ("/save", "/save needs a FILE"),
        ("/undo 2", "/undo takes nothing after it"),
        ("/undo", "nothing has been said yet"),
        ("/regen", "nothing has been said yet"),
        ("/edit", "nothing has been said yet"),
    ],
)
def test_a_command_that_does_not_fit_is_told_in_one_line(line: str, told: str) -> None:
    ended = talk(line)
    assert f"error: {told}" in ended.screen
    assert ended.engine.asked == []


@pytest.mark.parametrize(
    ("typed", "sent"), [("/etc/hosts is gone", "/etc/hosts is gone"), ("//help me", "/help me")]
)
def test_a_message_may_begin_with_a_slash(typed: str, sent: str) -> None:
    assert talk(typed).sent(0) == [sent]


def test_an_error_of_a_request_is_told_and_the_chat_stays_as_it_was() -> None:
    engine = FakeEngine(streams=[FakeStream([], error=PromptTooLong(9001, 8192))])
    ended = talk("long", "short", engine=engine)
    assert "9,001 tokens, the context holds 8,192; /undo or /reset" in " ".join(
        ended.screen.split()
    )
    assert ended.said == [("short", "echo short")]


def test_reasoning_is_kept_beside_the_answer() -> None:
    engine = FakeEngine(streams=[FakeStream(["hm", "m</think>\n\n", "So."], opens_reasoning=True)])
    ended = talk("why?", engine=engine)
    assert ended.repl.conversation.last() == Exchange("why?", "So.", "hmm")


def test_a_reply_without_reasoning_is_kept_to_the_byte() -> None:
    engine = FakeEngine(streams=[FakeStream([" \n So", ".\n "])])
    assert talk("why?", engine=engine).repl.conversation.last().reply == " \n So.\n "


def interrupted(place: int) -> FakeStream:
    """Return a stream in which Ctrl-C is pressed before the word at `place`."""

    def press(at: int) -> None:
        if at == place:
            os.kill(os.getpid(), signal.SIGINT)
            assert stream.cancelled.wait(5)

    stream = FakeStream(["one ", "two ", "three "], before_word=press)
    return stream


def test_ctrl_c_stops_the_reply_and_keeps_what_was_said() -> None:
    ended = talk("count", "more", engine=FakeEngine(streams=[interrupted(2)]))
    assert "· stopped" in ended.screen
    assert ended.said == [("count", "one two"), ("more", "echo more")]


def test_ctrl_c_before_the_first_word_adds_nothing() -> None:
    ended = talk("count", "more", engine=FakeEngine(streams=[interrupted(0)]))
    assert "nothing was added" in ended.screen
    assert ended.said == [("more", "echo more")]


def test_ctrl_c_before_the_first_word_of_regen_keeps_the_old_reply() -> None:
    engine = FakeEngine(streams=[FakeStream(["kept"]), interrupted(0)])
    assert talk("hi", "/regen", engine=engine).said == [("hi", "kept")]


def test_ctrl_c_at_the_prompt_says_how_to_leave() -> None:
    ended = talk(KeyboardInterrupt, "hi")
    assert "Ctrl-D or /exit leaves" in ended.screen
    assert ended.said == [("hi", "echo hi")]


# ---- the keys -----------------------------------------------------------------------------------


@contextmanager
def keyboard() -> Iterator[tuple[PipeInput, Callable[[], LineEditor]]]:
    """Give a keyboard to type on and a function that makes the editor it is plugged into."""
    names = {f"/{name}": command.about for name, command in COMMANDS.items()}
    kept = InMemoryHistory()
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys, lambda: LineEditor(CommandCompleter(names, ["/save"]), kept)


def typed(keys: str, prefilled: str = "") -> str:
    with keyboard() as (pipe, editor):
        pipe.send_text(keys)
        return editor().ask(prefilled)


ENTER, ALT_ENTER, UP, PASTE, PASTED = "\r", "\x1b\r", "\x1b[A", "\x1b[200~", "\x1b[201~"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (f"hello{ENTER}", "hello"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f"one\\{ENTER}two{ENTER}", "one\ntwo"),
        (f"{PASTE}one\ntwo{PASTED}{ENTER}", "one\ntwo"),
    ],
)
def test_enter_sends_and_there_are_three_ways_to_a_second_line(keys: str, text: str) -> None:
    assert typed(keys) == text


def test_a_prefilled_line_can_be_edited() -> None:
    assert typed(f"!{ENTER}", prefilled="hello") == "hello!"


def test_an_older_line_is_recalled() -> None:
    with keyboard() as (pipe, editor):
        editing = editor()
        pipe.send_text(f"first{ENTER}")
        assert editing.ask() == "first"
        pipe.send_text(f"{UP}{ENTER}")
        assert editing.ask() == "first"


@pytest.mark.parametrize(("key", "raised"), [("\x03", KeyboardInterrupt), ("\x04", EOFError)])
def test_ctrl_c_and_ctrl_d_are_told_apart(key: str, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        typed(key)


def completions(text: str) -> list[str]:
    names = {f"/{name}": command.about for name, command in COMMANDS.items()}
    completer = CommandCompleter(names, ["/save"])
    return [each.text for each in completer.get_completions(Document(text), CompleteEvent())]


def test_commands_are_completed_and_messages_are_not() -> None:
    assert completions("/s") == ["/system", "/stats", "/save"]
    assert completions("s") == []


def test_the_path_of_a_file_is_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    assert completions(f"/save {tmp_path}/ta") == ["lk.json"]


def test_the_history_is_kept_in_the_state_directory_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path / "state"))
    history().store_string("hello")
    file = tmp_path / "state" / "chat_history"
    assert "hello" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


def test_a_state_directory_that_cannot_be_made_costs_the_history_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path / "file" / "state"))
    assert isinstance(history(), InMemoryHistory)
