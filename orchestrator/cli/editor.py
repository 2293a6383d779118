"""How is a line typed, recalled and completed?

The only module that knows prompt_toolkit. Enter sends; a backslash at the end of the line or
Alt-Enter begins a new one; pasted text keeps its lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from orchestrator.errors import ConfigError
from orchestrator.paths import state_dir

_STYLE = Style.from_dict({"mark": "ansigreen bold", "more": "ansibrightblack"})


def history() -> History:
    """Return the history file of this user, or one in memory where no file can be written."""
    try:
        file = state_dir() / "chat_history"
        file.touch(mode=0o600)
        with file.open("ab"):
            return FileHistory(file)
    except (OSError, ConfigError):
        return InMemoryHistory()


class CommandCompleter(Completer):
    """Completes the names of `commands`, and a file's path after those marked as taking one."""

    def __init__(self, commands: Mapping[str, str], takes_file: Iterable[str]) -> None:
        self._commands = commands
        self._takes_file = frozenset(takes_file)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Complete the word before the cursor of a line that begins with a slash."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text.partition(" ")
        if not space:
            yield from self._names(name)
        elif name in self._takes_file:
            yield from self._paths.get_completions(Document(rest, len(rest)), event)

    def _names(self, begun: str) -> Iterator[Completion]:
        for name, about in self._commands.items():
            if name.startswith(begun):
                yield Completion(name, start_position=-len(begun), display_meta=about)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class LineEditor:
    """Asks for one message at a time."""

    def __init__(self, completer: Completer, kept: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=FormattedText([("class:mark", "› ")]),
            prompt_continuation=FormattedText([("class:more", "· ")]),
            multiline=True,
            completer=completer,
            complete_while_typing=False,
            history=kept,
            key_bindings=_bindings(),
            style=_STYLE,
        )

    def ask(self, prefilled: str = "") -> str:
        """Return what was typed, as text that is valid UTF-8; `prefilled` stands there to edit.

        Raises KeyboardInterrupt on Ctrl-C and EOFError on Ctrl-D in an empty line.
        """
        text = self._session.prompt(default=prefilled)
        return text.encode("utf-8", "replace").decode("utf-8")
