"""What does a chat at the terminal do with each line that is typed?

A line is a message or a command. A command changes the conversation or asks for a reply; what is
typed, shown and said lives in other modules. Errors of a request or a file are printed, and the
conversation stays as it was.
"""

from __future__ import annotations

import difflib
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from orchestrator.cli.asking import Asking
from orchestrator.cli.causes import answer
from orchestrator.cli.conversation import Conversation, Exchange, load, save
from orchestrator.cli.keyboard import silent_keys
from orchestrator.cli.opening import ChatEngine
from orchestrator.cli.render import clean, print_dim, terminal_view
from orchestrator.cli.reply import follow
from orchestrator.cli.report import held, outcome_line, timings_line
from orchestrator.engine.request import Outcome
from orchestrator.errors import OrchestratorError, PromptTooLong, RequestError

_COMMAND = re.compile(r"/([A-Za-z?]*)(?:\s+(.*))?$", re.DOTALL)
"""A slash and a word: ``/etc/hosts is gone`` is a message."""


class Editor(Protocol):
    """Asks for a line; see `LineEditor`."""

    def ask(self, prefilled: str = "") -> str: ...


@dataclass(frozen=True, slots=True)
class Command:
    """One word after a slash: what it takes, what it does, and the verb that does it."""

    takes: str
    about: str
    run: Callable[[Repl, str], None]


class Leave(Exception):
    """The user is done."""


@dataclass(frozen=True, slots=True)
class Screen:
    """The two ends of a terminal: the answers' and that of everything else."""

    out: Console
    err: Console


class Repl:
    """A chat at the terminal. `run` it until the user leaves."""

    def __init__(
        self,
        engine: ChatEngine,
        asking: Asking,
        conversation: Conversation,
        editor: Editor,
        screen: Screen,
    ) -> None:
        self.conversation = conversation
        self._engine = engine
        self._asking = asking
        self._editor = editor
        self._screen = screen
        self._name = uuid.uuid4().hex
        self._last: Outcome | None = None

    def run(self) -> None:
        """Read lines and act on them until Ctrl-D or ``/exit``."""
        try:
            while True:
                self._turn()
        except (EOFError, Leave):
            return

    def _turn(self) -> None:
        try:
            line = self._editor.ask().strip()
        except KeyboardInterrupt:
            self.say("Ctrl-D or /exit leaves")
            return
        try:
            self._act(line)
        except PromptTooLong as full:
            self._complain(
                f"the conversation would have {full.n_prompt:,} tokens, the context holds "
                f"{full.n_context:,}; /undo or /reset makes room, or /save FILE and start again "
                "with a larger --ctx"
            )
        except OrchestratorError as error:
            self._complain(str(error))
        except KeyboardInterrupt:
            self.say("interrupted")

    def _act(self, line: str) -> None:
        typed = _COMMAND.match(line)
        if not line:
            return
        if typed is None:
            self.reply_to(line.removeprefix("/") if line.startswith("//") else line)
            return
        name, argument = typed[1].lower(), (typed[2] or "").strip()
        command = COMMANDS.get(ALIASES.get(name, name))
        if command is None:
            raise RequestError(_unknown(name))
        if command.takes.isalpha() and not argument:
            raise RequestError(f"/{name} needs a {command.takes}: /{name} {command.takes}")
        if argument and not command.takes:
            raise RequestError(f"/{name} takes nothing after it")
        command.run(self, argument)

    def reply_to(self, message: str, before: Conversation | None = None) -> None:
        """Ask for a reply to `message` and add both to `before`, the conversation if None.

        A message that got no word of reply changes nothing.
        """
        before = self.conversation if before is None else before
        stream = self._asking.ask(self._engine, before.prompt(message), self._name)
        with silent_keys():
            reply = follow(stream, terminal_view(self._screen.out, self._screen.err))
        self._last = reply.outcome
        if reply.cancelled and not reply.content:
            self.say("stopped before the answer began; nothing was added to the conversation")
            return
        self.conversation = before.with_exchange(Exchange(message, reply.content, reply.reasoning))
        self.say(outcome_line(reply.outcome))
        if self._asking.verbose:
            self.say(timings_line(reply.outcome))

    def begin(self, conversation: Conversation) -> None:
        """Go on with another conversation, under a name of its own."""
        self.conversation = conversation
        self._name = uuid.uuid4().hex

    def edit(self) -> None:
        """Let the last message be edited, and ask again."""
        last = self.conversation.last()
        try:
            message = self._editor.ask(last.user).strip()
        except (KeyboardInterrupt, EOFError):
            message = ""
        if message:
            self.reply_to(message, self.conversation.without_last())
        else:
            self.say("not edited")

    def show_figures(self) -> None:
        """Print what the engine holds and has done."""
        self._screen.err.print(held(self._engine.stats()))

    def explain(self) -> None:
        """Say what the last request reused, and what kept it from more."""
        if self._last is None:
            self.say("nothing was asked yet; ask something, then /why")
        else:
            self.say(answer(self._last))

    def print_help(self) -> None:
        """Print the commands and the keys."""
        for name, command in COMMANDS.items():
            usage = f"/{name} {command.takes}".strip()
            self._screen.err.print(Text.assemble(f"{usage:<16}", (command.about, "dim")))
        self.say("Enter sends · Alt-Enter or \\ at the end: a new line · Ctrl-C stops a reply")

    def say(self, text: str) -> None:
        """Print one quiet line."""
        print_dim(self._screen.err, text)

    def _complain(self, text: str) -> None:
        self._screen.err.print(Text.assemble(("error: ", "red"), clean(text)))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
    return f"/{name} is no command; {hint}"


def _regenerate(repl: Repl, argument: str) -> None:
    repl.reply_to(repl.conversation.last().user, repl.conversation.without_last())


def _undo(repl: Repl, argument: str) -> None:
    dropped = repl.conversation.last()
    repl.conversation = repl.conversation.without_last()
    repl.say(f"dropped: {_shortened(dropped.user)}")


def _shortened(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _system(repl: Repl, argument: str) -> None:
    if not argument:
        repl.say(repl.conversation.system or "no system text; /system TEXT sets one")
        return
    text = "" if argument == "-" else argument
    repl.conversation = repl.conversation.with_system(text)
    repl.say("system text set" if text else "system text taken away")


def _reset(repl: Repl, argument: str) -> None:
    repl.begin(repl.conversation.emptied())
    repl.say("a new conversation; the system text stays" if repl.conversation.system else "reset")


def _save(repl: Repl, argument: str) -> None:
    save(repl.conversation, Path(argument))
    repl.say(f"saved to {argument}")


def _load(repl: Repl, argument: str) -> None:
    repl.begin(load(Path(argument)))
    exchanges = repl.conversation.exchanges
    repl.say(f"loaded {len(exchanges)} {'exchange' if len(exchanges) == 1 else 'exchanges'}")
    if exchanges:
        repl.say(f"last message: {_shortened(exchanges[-1].user)}")


def _leave(repl: Repl, argument: str) -> None:
    raise Leave


COMMANDS: Mapping[str, Command] = {
    "regen": Command("", "ask for the last reply again", _regenerate),
    "undo": Command("", "drop the last exchange", _undo),
    "edit": Command("", "edit the last message and ask again", lambda repl, _: repl.edit()),
    "system": Command("[TEXT]", "show or set the system text; - takes it away", _system),
    "reset": Command("", "begin a new conversation", _reset),
    "stats": Command("", "what the engine holds and has done", lambda repl, _: repl.show_figures()),
    "why": Command("", "what the last request evaluated, and why", lambda repl, _: repl.explain()),
    "save": Command("FILE", "save the conversation", _save),
    "load": Command("FILE", "go on with a saved conversation", _load),
    "help": Command("", "this list", lambda repl, _: repl.print_help()),
    "exit": Command("", "leave; so does Ctrl-D", _leave),
}
ALIASES = {"quit": "exit", "bye": "exit", "q": "exit", "?": "help", "h": "help", "": "help"}
