"""``orchestrator chat``: what do its options mean, and which kind of chat is wanted?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orchestrator import config
from orchestrator.cli.asking import Asking
from orchestrator.cli.conversation import Conversation
from orchestrator.cli.keyboard import silent_keys
from orchestrator.cli.opening import ChatEngine, Opening, Seam
from orchestrator.cli.render import Waiting, print_dim, terminal
from orchestrator.cli.report import figures
from orchestrator.config import ModelSpec
from orchestrator.engine.request import Sampling
from orchestrator.errors import ConfigError

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty", "seed", "logprobs"),
)
_FORMS = ("grammar", "json_schema")
PROGRESS_INTERVAL = 2.0
"""Seconds between two lines about progress where there is no terminal to count on."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command, one field each, as click hands them over."""

    prompt: str | None
    model: str | None
    system: str | None
    ctx: int | None
    threads: int | None
    gpu_layers: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repeat_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    grammar: Path | None
    json_schema: Path | None
    logprobs: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    chat_template: Path | None
    template_arg: tuple[tuple[str, object], ...]
    no_cache: bool
    exact: bool
    json: bool
    verbose: bool
    config: Path | None

    def opening(self, spec: ModelSpec) -> Opening:
        """Return how the model is opened; the engine lets an option win over the file."""
        return Opening(
            model=spec,
            ctx=self.ctx,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            chat_template=self.chat_template,
            checkpoints=0 if self.no_cache else None,
            exact=self.exact,
        )

    def asking(self, spec: ModelSpec) -> Asking:
        """Return how replies are asked for. Raises `InvalidArgument` for a value out of range."""
        return Asking(
            sampling=self._sampling(spec.sampling),
            max_tokens=self.max_tokens,
            stop=self.stop,
            template_arguments=dict(self.template_arg),
            use_cache=not self.no_cache,
            verbose=self.verbose,
        )

    def _sampling(self, of_model: Mapping[str, int | float]) -> Sampling | None:
        given = {name: getattr(self, name) for name in _SAMPLING}
        chosen: dict[str, Any] = dict(of_model)
        chosen |= {name: value for name, value in given.items() if value is not None}
        files = {name: getattr(self, name) for name in _FORMS}
        chosen |= {name: _read(file) for name, file in files.items() if file is not None}
        return Sampling(**chosen) if chosen else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f'"{file}" cannot be read: {error.strerror or error}') from error
    except UnicodeDecodeError as error:
        raise ConfigError(f'"{file}" is not UTF-8 text: offset {error.start:,}') from error


def _utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # the shell hands over any bytes
        raise click.BadParameter("not valid UTF-8") from error
    return text


def _template_arguments(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, object], ...]:
    return tuple(_template_argument(value) for value in values)


def _template_argument(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise click.BadParameter(f"{text!r} is not KEY=JSON, like enable_thinking=false")
    try:
        return key, json.loads(value)
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} is not JSON; a text needs quotes of its own: '{key}=\"{value}\"'"
        ) from error


def _not_empty(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    if "" in values:
        raise click.BadParameter("a stop string cannot be empty")
    return values


@click.command()
@click.argument("prompt", type=_utf8, required=False)
@click.option("-m", "--model", metavar="NAME|PATH", help="A name in models.toml, or a GGUF file.")
@click.option("--system", type=_utf8, metavar="TEXT", help="The system text.")
@click.option("--ctx", type=COUNT, metavar="N", help="Tokens in the context.")
@click.option("--threads", type=COUNT, metavar="N", help="Threads to compute with.")
@click.option(
    "--gpu-layers",
    type=click.IntRange(min=-1),
    metavar="N",
    help="Layers on the GPU; -1 and the default are all, where there is one.",
)
@click.option("--temperature", type=float, metavar="X", help="0 always takes the likeliest token.")
@click.option("--top-p", type=float, metavar="X", help="Sample from this much probability.")
@click.option("--top-k", type=int, metavar="N", help="Sample from the N likeliest tokens.")
@click.option("--min-p", type=float, metavar="X", help="Least probability, relative to the best.")
@click.option("--typical-p", type=float, metavar="X", help="Sample what surprises as expected.")
@click.option("--repeat-penalty", type=float, metavar="X", help="Above 1 discourages repetition.")
@click.option(
    "--frequency-penalty", type=float, metavar="X", help="Above 0 discourages each repetition."
)
@click.option(
    "--presence-penalty", type=float, metavar="X", help="Above 0 discourages what was said."
)
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same reply.")
@click.option("--grammar", type=FILE, metavar="FILE", help="GBNF rules for the reply to follow.")
@click.option("--json-schema", type=FILE, metavar="FILE", help="A schema for the reply to follow.")
@click.option(
    "--logprobs", type=int, metavar="N", help="With --json: N likely alternatives per token."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=0), metavar="N", help="Longest reply, in tokens."
)
@click.option(
    "--stop",
    type=_utf8,
    multiple=True,
    metavar="S",
    callback=_not_empty,
    help="End before S. May be repeated.",
)
@click.option("--chat-template", type=FILE, metavar="FILE", help="A Jinja template to use instead.")
@click.option(
    "--template-arg",
    multiple=True,
    metavar="KEY=JSON",
    callback=_template_arguments,
    help="A variable for the template. May be repeated.",
)
@click.option("--no-cache", is_flag=True, help="Read every prompt from its first token.")
@click.option("--exact", is_flag=True, help="The very same bits with kept states and without.")
@click.option("--json", is_flag=True, help="Print the reply as one JSON object.")
@click.option("--verbose", is_flag=True, help="Say more on standard error.")
@click.option("--config", type=FILE, metavar="FILE", help="Read this instead of models.toml.")
@click.pass_obj
def chat(seam: Seam, /, **values: Any) -> int:
    """Chat with a model, or answer PROMPT.

    Without PROMPT on a terminal this is a conversation. With PROMPT, or with text piped in, one
    reply goes to standard output and everything else to standard error; given both, the text
    follows PROMPT.
    """
    options = Options(**values)
    if options.logprobs is not None and not options.json:
        raise click.UsageError("--logprobs needs --json, which shows them")
    spec = config.resolve(options.model, config.load(config.find(options.config)))
    asking = options.asking(spec)
    if options.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return _converse(seam, options, spec, asking)
    from orchestrator.cli.oneshot import answer, question

    asked = question(options.prompt)
    with _opened(seam, options, spec) as engine:
        before = Conversation(options.system or "")
        return answer(engine, before, asked, asking, as_object=options.json)


def _converse(seam: Seam, options: Options, spec: ModelSpec, asking: Asking) -> int:
    if options.json:
        raise click.UsageError("--json needs a PROMPT, or text piped in")
    if not sys.stdout.isatty():
        raise click.UsageError("standard output is no terminal: give a PROMPT, or pipe one in")
    from orchestrator.cli.editor import CommandCompleter, LineEditor, history
    from orchestrator.cli.repl import COMMANDS, Repl, Screen

    names = {f"/{name}": command.about for name, command in COMMANDS.items()}
    files = [f"/{name}" for name, command in COMMANDS.items() if command.takes == "FILE"]
    with _opened(seam, options, spec) as engine:
        editor = LineEditor(CommandCompleter(names, files), history())
        screen = Screen(terminal(), terminal(stderr=True))
        print_dim(screen.err, _greeting(engine))
        Repl(engine, asking, Conversation(options.system or ""), editor, screen).run()
    return 0


def _greeting(engine: ChatEngine) -> str:
    model = engine.model
    return (
        f"{model.name} · {model.architecture}, {model.memory} memory, "
        f"{model.n_context:,} tokens · /help lists the commands, Ctrl-D leaves"
    )


@contextmanager
def _opened(seam: Seam, options: Options, spec: ModelSpec) -> Iterator[ChatEngine]:
    """Open the engine with its progress on standard error, and close it at the end."""
    from orchestrator.store.journal import Entry, JournalWriter

    err = terminal(stderr=True)
    progress = _Progress(Waiting(err), interactive=err.is_terminal)
    try:
        with silent_keys():
            opened = seam.open_engine(options.opening(spec), progress.say)
    finally:
        progress.waiting.stop()
    with JournalWriter() as journal, opened as engine:
        engine.report_to(lambda record: journal.put(Entry(engine.model.name, record)))
        for note in (*engine.notes, *_unread(engine, options)):
            print_dim(err, note)
        if options.verbose:
            err.print(figures(engine.model))
        yield engine


def _unread(engine: ChatEngine, options: Options) -> list[str]:
    """Return a warning for each template argument that will change nothing."""
    unknown = engine.unknown_arguments(dict(options.template_arg))
    return [f"--template-arg {name}: the chat template never reads it" for name in unknown]


@dataclass(slots=True)
class _Progress:
    """What is said while a model is opened: on the spinner, or as a line now and then."""

    waiting: Waiting
    interactive: bool
    due: float = 0.0

    def say(self, text: str) -> None:
        if self.interactive:
            self.waiting.update(text)
        elif time.monotonic() >= self.due:
            self.due = time.monotonic() + PROGRESS_INTERVAL
            click.echo(text, err=True)
