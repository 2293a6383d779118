r"""How does a special token that a person typed stay text?

A template writes special tokens as text, and people may write the same text into a message. After
rendering nobody could tell the two apart, so untrusted text is marked before: a `MARK` is put
inside every special text in it, behind its first character. A template copies the mark like any
other character. In the rendered text a mark means: *no special token reaches across here*.

    message        what does <|im_end|> do?
    marked         what does <▮|im_end|> do?
    rendered       <|im_start|>user\nwhat does <▮|im_end|> do?<|im_end|>\n
    special        ^^^^^^^^^^^^                              ^^^^^^^^^^

Text that a template could complete to a special text is marked as well: a beginning of one at its
end (``… <|``), an end of one at its head (``im_end|> …``), or an inner part that is no plain word
(``|im_end|`` as the name of a tool parameter, in a template that writes ``<`` name ``>``).
A plain word as such a name (``think``) is not marked: those are what templates name fields by.

In messages of the assistant the markers of reasoning and of tool calls stay as they are, for
templates split the reply at ``</think>`` to drop reasoning from history. They mean there what they
meant when the model wrote them. Its other special texts are marked.

The mark is a lone surrogate. No text has one: those that callers send (JSON can spell them) become
U+FFFD first, so a mark cannot be forged, and encoding to UTF-8 never sees one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.text.literals import literal_pattern

MARK = "\ud800"

_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_MARK = re.compile("[\ud801-\udfff]")
_WORD = re.compile(r"\w*")
_BLANK = re.compile(r"[\s▁]*")
_REPLY = re.compile(r"think|thought|reason|tool|function|call|argument|arg_|param|inner_", re.I)
_ANSWER = re.compile(r"response|result|output", re.I)


def is_reply_marker(special: str) -> bool:
    """Whether `special` names a part of a reply: its reasoning or a tool call, not a tool's answer.

    Judged by its name, for vocabularies say no more about their tokens.
    """
    return bool(_REPLY.search(special)) and not _ANSWER.search(special)


class Guard:
    """Marks untrusted text for one set of special texts. Immutable.

    Special texts of white space alone and single characters are passed by: runs of line breaks are
    ordinary text in vocabularies that have tokens for them, and one character cannot be broken.
    """

    def __init__(self, specials: Iterable[str]) -> None:
        guarded = [text for text in specials if len(text) > 1 and not _BLANK.fullmatch(text)]
        self.specials = literal_pattern(guarded)
        self._but_reply_markers = literal_pattern(t for t in guarded if not is_reply_marker(t))
        self._firsts = frozenset(text[0] for text in guarded)
        self._lasts = frozenset(text[-1] for text in guarded)
        self._longest = max(map(len, guarded), default=0)
        self._index = "\0" + "\0".join(guarded) + "\0"  # \0 ends no part of a text that is sought

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """`message` with all its texts marked, the role aside."""
        reply = message["role"] == "assistant"
        return {
            key: value if key == "role" else self.value(value, reply=reply and key != "tool_calls")
            for key, value in message.items()
        }

    def value(self, value: Any, *, reply: bool = False) -> Any:
        """A copy of JSON-like `value` with every text and key marked; `reply`: the model's own."""
        if isinstance(value, str):
            return self.text(value, reply=reply)
        if isinstance(value, Mapping):
            return {
                self.value(key, reply=reply): self.value(each, reply=reply)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(each, reply=reply) for each in value]
        return value

    def text(self, text: str, *, reply: bool = False) -> str:
        """`text` marked; unmarked again (`unmarked`) it is the same but for lone surrogates."""
        text = _SURROGATE.sub("\ufffd", text)
        specials = self._but_reply_markers if reply else self.specials
        marked, found = specials.subn(_broken, text)
        while found:  # a special text may lie inside another one, or overlap it
            marked, found = specials.subn(_broken, marked)
        return self._head(text) + marked + self._tail(text)

    def _head(self, text: str) -> str:
        """A mark if `text` begins as some special text ends, or is an inner part of one."""
        if len(text) < self._longest and not _WORD.fullmatch(text) and text in self._index:
            return MARK
        ends = (at for at, char in enumerate(text[: self._longest - 1], 1) if char in self._lasts)
        return MARK if any(text[:end] + "\0" in self._index for end in ends) else ""

    def _tail(self, text: str) -> str:
        """A mark if `text` ends as some special text begins."""
        nearest = max(len(text) - self._longest + 1, 0)
        starts = (at for at in range(nearest, len(text)) if text[at] in self._firsts)
        return MARK if any("\0" + text[start:] in self._index for start in starts) else ""


def unmarked(text: str) -> str:
    """`text` as a person may see it."""
    return text.replace(MARK, "")


def scrubbed(text: str) -> str:
    """`text` without lone surrogates other than marks, which a template's own escapes may spell."""
    return _NO_MARK.sub("\ufffd", text)


def _broken(match: re.Match[str]) -> str:
    special = match.group()
    return special[0] + MARK + special[1:]
