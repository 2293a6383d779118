"""How do messages become the text a model was trained on?

By the chat template that came with the model: a Jinja program, run in `sandbox.py`. It decides
everything about the text; nothing here looks into the text it makes.

Templates disagree about things that no caller can know: whether a tool call's arguments are an
object or JSON text, whether a message with tool calls has null content; a few read content only in
parts, or want an empty list where there are no tools. Each template is asked once, by rendering
small chats in each form (`Dialect`), and gets what it understands from then on.

Invariant: rendering is a pure function of its arguments and the clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2
import jinja2.meta

from orchestrator.errors import ConfigError, InvalidArgument, TemplateError
from orchestrator.text.messages import Message, normalised
from orchestrator.text.sandbox import (
    GUARD,
    MAX_TEXT,
    Clock,
    Refusal,
    TemplateSandbox,
    bounded_range,
)

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

MAX_SOURCE = 2 * 2**20  # bytes of a template file; published ones have up to 20 thousand
RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "range", GUARD)
)

_FILE_NAME = "<chat template>"  # by it a line of the template is known in a traceback
_REMEDY = "choose another template with --chat-template FILE"
# What a program may raise that is wrong: anything but what stops the process.
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


_CHOICES = tuple(product((False, True), repeat=2))


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of messages that one template understands."""

    text_arguments: bool = False
    null_content: bool = False
    parts: bool = False
    lists_tools: bool = False  # it iterates over the tools even where there are none


class ChatTemplate:
    """One Jinja chat template. Immutable and safe to use from several threads.

    `bos_text` and `eos_text` are what the template sees as ``bos_token`` and ``eos_token``;
    `clock` answers ``strftime_now``. Attributes: `source`, `name` (for messages to people),
    `variables` (every name the template reads and does not set itself), `is_fallback` (True for
    the ChatML that stands in where a model brings no template). Raises TemplateError, with
    the line, for a source that is no Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_text: str,
        eos_text: str,
        name: str = "chat template",
        clock: Clock = datetime.now,
        is_fallback: bool = False,
    ) -> None:
        self.source = source
        self.name = name
        self.is_fallback = is_fallback
        self.bos_text = bos_text
        self.eos_text = eos_text
        self._sandbox = TemplateSandbox(clock)
        self._program, self.variables = self._compiled(source)

    @classmethod
    def from_file(
        cls, path: str | Path, *, bos_text: str, eos_text: str, clock: Clock = datetime.now
    ) -> ChatTemplate:
        """The template in the file at `path`, UTF-8. Raises ConfigError if it cannot be read."""
        source = _source_of(Path(path))
        return cls(source, bos_text=bos_text, eos_text=eos_text, name=str(path), clock=clock)

    @classmethod
    def fallback(cls, *, bos_text: str = "", eos_text: str = "") -> ChatTemplate:
        """Plain ChatML, for a model that brings no template; `is_fallback` says so."""
        return cls(CHATML, bos_text=bos_text, eos_text=eos_text, name="ChatML", is_fallback=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. `arguments` are the template's own, such as ``enable_thinking``.

        Raises InvalidArgument for messages or arguments that no template takes, TemplateError with
        the template's own words when it refuses, or with the line where it fails.
        """
        return self.fill(
            self.prepared(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            arguments=arguments,
        )

    def prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """`messages` normalised and in this template's dialect."""
        return [_spoken(message, self.dialect) for message in normalised(messages)]

    def fill(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
        guard: Callable[[Any], Any] | None = None,
    ) -> str:
        """As `render`, for messages that are `prepared` already.

        `guard` is applied to values that the template parses from JSON text on its own.
        """
        arguments = arguments or {}
        for name in sorted(RESERVED & arguments.keys()):
            raise InvalidArgument(f'"{name}" is set by the chat itself; leave it out of arguments')
        chat = self._variables(
            messages, tools, self.dialect, add_generation_prompt=add_generation_prompt
        )
        return self._run(chat | _own_lists(arguments) | {GUARD: guard})

    @cached_property
    def dialect(self) -> Dialect:
        """Found by rendering two small chats in every form; the first that comes out whole wins."""
        forms = (Dialect(parts=parts, lists_tools=lists) for parts, lists in _CHOICES)
        plain = self._first("needle", _PLAIN_CHAT, [], forms, Dialect())
        forms = (replace(plain, text_arguments=text, null_content=null) for text, null in _CHOICES)
        return self._first("haystack", _TOOL_CHAT, [_TOOL], forms, plain)

    def _first(
        self,
        needle: str,
        chat: list[Message],
        tools: list[Message],
        forms: Iterable[Dialect],
        otherwise: Dialect,
    ) -> Dialect:
        """The first of `forms` in which `chat` shows its needle."""
        return next((form for form in forms if self._shows(needle, chat, tools, form)), otherwise)

    def _shows(self, needle: str, chat: list[Message], tools: list[Message], form: Dialect) -> bool:
        messages = [_spoken(message, form) for message in chat]
        try:
            text = self._run(self._variables(messages, tools, form, add_generation_prompt=False))
        except TemplateError:
            return False
        return needle in text and _AS_PYTHON not in text

    def _variables(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        form: Dialect,
        *,
        add_generation_prompt: bool,
    ) -> dict[str, Any]:
        return {
            "documents": None,
            "range": bounded_range(),
            "messages": _own_lists(messages),
            "tools": _own_lists(tools) if tools else ([] if form.lists_tools else None),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_text,
            "eos_token": self.eos_text,
        }

    def _compiled(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        sandbox = self._sandbox
        try:
            tree = sandbox.parse(source)
            code = sandbox.compile(tree, filename=_FILE_NAME)
            program = jinja2.Template.from_code(sandbox, code, dict(sandbox.globals))
            return program, frozenset(jinja2.meta.find_undeclared_variables(tree))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f'chat template "{self.name}", line {error.lineno}: {error.message}; {_REMEDY}'
            ) from error
        except RecursionError as error:
            raise TemplateError(
                f'chat template "{self.name}" is nested too deeply; {_REMEDY}'
            ) from error

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return "".join(_bounded(self._program.generate(variables)))
        except Refusal as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        except _FAULTS as error:
            raise TemplateError(
                f'chat template "{self.name}"{_line(error.__traceback__)}: {error}; '
                f"change the messages, or {_REMEDY}"
            ) from error


_TOOL = {
    "type": "function",
    "function": {
        "name": "find_hay",
        "description": "Finds hay.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
_TOOL_CALL = {
    "id": "call00001",  # nine characters: Mistral's templates insist
    "type": "function",
    "function": {"name": "find_hay", "arguments": {"where": "haystack"}},
}
_AS_PYTHON = "{'where'"  # an object printed where JSON text was meant
_PLAIN_CHAT: list[Message] = [{"role": "user", "content": "needle"}]
_TOOL_CHAT: list[Message] = [
    {"role": "user", "content": "needle"},
    {"role": "assistant", "content": None, "tool_calls": [_TOOL_CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "find_hay", "content": "found"},
]


def _spoken(message: Message, dialect: Dialect) -> Message:
    """A normalised message in the form of `dialect`."""
    content = message["content"]
    if content is None and not dialect.null_content:
        content = ""
    if dialect.parts and content is not None:
        content = [{"type": "text", "text": content}]
    spoken = {**message, "content": content}
    if message.get("tool_calls"):
        spoken["tool_calls"] = [_call(call, dialect) for call in message["tool_calls"]]
    return spoken


def _call(call: Any, dialect: Dialect) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    given = function["arguments"]
    wanted = _as_text(given) if dialect.text_arguments else _as_object(given)
    return {**call, "function": {**function, "arguments": wanted}}


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    """JSON text as its object. A model may have written what is no JSON: that stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _own_lists(value: Any) -> Any:
    """A copy of lists and objects, so that a template's changes end with its rendering."""
    if isinstance(value, Mapping):
        return {key: _own_lists(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_own_lists(each) for each in value]
    return value


def _bounded(texts: Iterator[str]) -> Iterator[str]:
    left = MAX_TEXT
    for text in texts:
        left -= len(text)
        if left < 0:
            raise jinja2.TemplateRuntimeError(f"the text grows over {MAX_TEXT:,} characters")
        yield text


def _line(trace: TracebackType | None) -> str:
    """The innermost line of the template in `trace`, as a message says it."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line else ""


def _source_of(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_SOURCE:
            raise ConfigError(
                f"chat template {path} has {size:,} bytes, the limit is {MAX_SOURCE:,}; "
                "is it a Jinja file?"
            )
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read chat template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat template {path} is not UTF-8 text; is it a Jinja file?") from error
