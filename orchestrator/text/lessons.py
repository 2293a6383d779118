r"""What does a template write between two messages?

It is tried out on small chats of known words, each rendered whole and also only so far. Between
any two messages of the same roles the template writes the same, a *seam*: what closes the one and
what opens the other.

    chat       [user] a1b [assistant] c2d [user] e3f
    whole      <|im_start|>user\na1b<|im_end|>\n<|im_start|>assistant\nc2d<|im_end|>\n …
    so far     <|im_start|>user\na1b<|im_end|>\n
                                  └─ closes ──┘└────── opens ────────┘

What is the same in all chats is the seam, and what differs is what the messages said: replies with
and without reasoning, calls with and without arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

from orchestrator.errors import TemplateError
from orchestrator.text.encoder import common_length
from orchestrator.text.messages import Message
from orchestrator.text.template import ChatTemplate

Roles = tuple[str, str]

_WORDS = {
    ("probe", "abcde1234"): ("a1b", "c2d", "e3f", "g4h", "i5j", "k6l"),
    ("sound", "vwxyz6789"): ("m7n", "o8p", "q9r", "s0t", "u1v", "w2x"),
}
"""What the messages of learning chats say, by the name and id of a tool's call.

No two begin or end alike.
"""

_CHATS = (
    "uauau",
    "urau",
    "ukau",
    "ur",
    "uuau",
    "uaau",
    "suau",
    "ucta",
    "uctau",
    "ucttau",
    "uctctr",
    "udtdta",
)
"""A letter for each message; see `_said`."""


@dataclass(frozen=True, slots=True)
class Seam:
    """What a template writes between two messages; the first one ends after `cut` characters."""

    text: str
    cut: int


@dataclass(frozen=True, slots=True)
class _Gap:
    """A place between two messages of the `roles`, in a learning chat.

    `body` is the whole first message, which the seam of the roles `opened` began; `after` is all
    that follows.
    """

    roles: Roles
    opened: Roles
    body: str
    after: str


@lru_cache(maxsize=16)
def learned(source: str, bos_text: str, eos_text: str) -> Mapping[Roles, Seam]:
    """The seams of a template, by the roles of the messages on both sides; a few dozen renderings.

    A pair of roles that the template refuses has none.
    """
    template = ChatTemplate(source, bos_text=bos_text, eos_text=eos_text)
    gaps = defaultdict[Roles, list[_Gap]](list)
    for gap in _gaps(template):
        gaps[gap.roles].append(gap)
    openings = {roles: _common_start([gap.after for gap in each]) for roles, each in gaps.items()}
    seams = {}
    for roles, each in gaps.items():
        bodies = [gap.body[len(openings.get(gap.opened, "")) :] for gap in each]
        closing = _common_start([body[::-1] for body in bodies])[::-1]
        cut = len(closing) or _cut_before(openings, roles)
        seams[roles] = Seam(closing + openings[roles], cut)
    return {roles: seam for roles, seam in seams.items() if seam.text.strip()}


def _gaps(template: ChatTemplate) -> Iterator[_Gap]:
    """Every place between two messages of all learning chats."""
    for letters in _CHATS:
        for (name, id_), words in _WORDS.items():
            said = zip(letters, words, strict=False)
            chat = [_said(letter, word, name, id_) for letter, word in said]
            whole = _rendered(template, chat)
            if whole is not None:
                yield from _between(template, chat, words, whole)


def _between(
    template: ChatTemplate, chat: Sequence[Message], words: Sequence[str], whole: str
) -> Iterator[_Gap]:
    """Every place between two messages of a chat that was rendered `whole`."""
    roles = ["", *(message["role"] for message in chat)]
    start = 0
    for at in range(1, len(chat)):
        end = _end(template, whole, chat[:at], words[at - 1])
        if end is not None:
            opened, pair = (roles[at - 1], roles[at]), (roles[at], roles[at + 1])
            yield _Gap(pair, opened, whole[start:end], whole[end:])
        start = end or 0


def _end(template: ChatTemplate, whole: str, chat: Sequence[Message], word: str) -> int | None:
    """Where in a rendered chat its first messages end, the last of which says `word`.

    Where the template refuses to end there, that is right behind the word.
    """
    alone = _rendered(template, chat)
    if alone is not None and whole.startswith(alone):
        return len(alone)
    at = whole.rfind(word)
    if at < 0 or alone is None:
        return at + len(word) if at >= 0 else None
    last = alone.rfind(word)
    return at + common_length(alone[last:], whole[at:]) if last >= 0 else None


def _rendered(template: ChatTemplate, chat: Sequence[Message]) -> str | None:
    try:
        messages = template.prepared(chat)
        return template.fill(messages, add_generation_prompt=False)
    except TemplateError:
        return None


def _said(letter: str, word: str, name: str, id_: str) -> Message:
    """A message of a learning chat.

    `u`, `a`, `s`, `t`: what the user, the assistant, the system and a tool say; `r` a reply with
    reasoning, `k` one with the reasoning in its text, `c` a call of a tool, `d` one with an
    announcement and another argument, or none.
    """
    given = {"where": word} if letter == "c" else {"n": 7} if name == "probe" else {}
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": given}}
    forms: dict[str, Message] = {
        "u": {"role": "user", "content": word},
        "a": {"role": "assistant", "content": word},
        "s": {"role": "system", "content": word},
        "t": {"role": "tool", "tool_call_id": id_, "name": name, "content": word},
        "r": {"role": "assistant", "content": word, "reasoning_content": "hm"},
        "k": {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{word}"},
        "c": {"role": "assistant", "content": None, "tool_calls": [call]},
        "d": {"role": "assistant", "content": word, "tool_calls": [call]},
    }
    return forms[letter]


def _cut_before(openings: Mapping[Roles, str], roles: Roles) -> int:
    """Where in what comes between two messages the second one begins, judged by its openings."""
    whole = openings[roles]
    others = [each for (_, to), each in openings.items() if to == roles[1] and each]
    return max((len(whole) - len(each) for each in others if whole.endswith(each)), default=0)


def _common_start(texts: Sequence[str]) -> str:
    return reduce(lambda first, second: first[: common_length(first, second)], texts)
