"""What may a caller send as messages, and in what single form do templates see them?

Published templates differ in what they accept; clients differ in what they send. Everything that
does not depend on a template is settled here: roles, content in parts, content that is null,
several system messages at the head. What depends on the template is in `template.py`.

Invariants: the input is never changed; normalising twice gives the same as once; adding messages
at the end does not change how the earlier ones come out (a chat's prompts must keep their head).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from orchestrator.errors import InvalidArgument

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"developer": "system"}
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """`messages` with known roles, contents that are texts, and one system message at the head.

    ``developer`` becomes ``system``; leading system messages are joined in order by a blank line;
    text parts are joined by a line break; content that is null or missing becomes ``""``, but
    stays null beside tool calls. Other keys pass unchanged. Raises InvalidArgument, naming
    the message by its index.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidArgument('messages are a list of objects like {"role": …, "content": …}')
    if not messages:
        raise InvalidArgument("there are no messages; give at least one from the user")
    return _with_one_head([_normalised(at, message) for at, message in enumerate(messages)])


def _normalised(at: int, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidArgument(f"messages[{at}] is no object with a role and a content")
    role = _role(at, message.get("role"))
    if not isinstance(message.get("tool_calls"), list | tuple | None):
        raise InvalidArgument(f"messages[{at}] has tool_calls that are no list")
    return {**message, "role": role, "content": _content(at, message)}


def _role(at: int, role: object) -> str:
    if isinstance(role, str):
        role = _ALIASES.get(role, role)
        if role in ROLES:
            return role
    known = ", ".join((*ROLES, *_ALIASES))
    near = get_close_matches(str(role), (*ROLES, *_ALIASES), n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise InvalidArgument(f"messages[{at}] has the role {role!r}, known roles are {known}{hint}")


def _content(at: int, message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if content is None:
        return None if message.get("tool_calls") else ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_part(at, part) for part in content)
    raise InvalidArgument(
        f"messages[{at}] has a content of type {type(content).__name__}; it must be a text"
    )


def _part(at: int, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in _TEXT_FIELDS:
        text = part.get(_TEXT_FIELDS[kind])
        if isinstance(text, str):
            return text
    raise InvalidArgument(
        f'messages[{at}] has a content part of type "{kind}"; this model reads text only, '
        "so leave out images, audio and files"
    )


def _with_one_head(messages: list[Message]) -> list[Message]:
    heads = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(heads) < 2:
        return messages
    joined = "\n\n".join(head["content"] for head in heads if head["content"])
    return [{**heads[0], "content": joined}, *messages[len(heads) :]]
