r"""Where in a rendered chat does one message end and the next one begin?

A template writes the same between any two messages of the same roles: a *seam*, what closes the
one and what opens the other.

    <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n …
                       └── user │ assistant ─────────┘      └── assistant │ user ──┘

The seams of a template are learned once (`lessons.py`). From then on all messages of a chat are
found by a search for its seams in the text, in a millisecond instead of a rendering each. What is
found must be exactly the seams that the roles of the messages call for, in their order, with the
words of the user between them. Where it is not, nothing is said, and whoever asked has to try the
template out (`codec.py`).

Typed text makes no seam: one holds a special text, which is marked wherever it was typed
(`guard.py`), or else no message may hold the seam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from orchestrator.text.guard import Guard, is_reply_marker
from orchestrator.text.lessons import Roles, Seam, learned
from orchestrator.text.messages import Message
from orchestrator.text.template import ChatTemplate

_NEEDLE = 32  # characters of a question that must be found where it was asked


class Seams:
    """The seams of one template. Safe to use from several threads."""

    def __init__(self, template: ChatTemplate, guard: Guard) -> None:
        self._template = template
        self._guard = guard

    def starts(self, text: str, messages: Sequence[Message]) -> tuple[int, ...] | None:
        """Where in the rendered `text` each of the messages starts, None where that is unknown.

        Both are marked, and the text has no generation prompt. The first message starts behind a
        system text that nobody sent, else at 0.
        """
        roles = [str(message["role"]) for message in messages]
        seams = [self._learned.get(pair) for pair in pairwise(roles)]
        wanted = [seam for seam in seams if seam is not None]
        if len(wanted) < len(seams) or not self._are_untyped(messages):
            return None
        found = _found(text, {seam.text for seam in self._learned.values()})
        opening, rest = found[: len(found) - len(wanted)], found[len(found) - len(wanted) :]
        first = self._first(text, opening, roles[0])
        pairs = list(zip(rest, wanted, strict=False))
        if first is None or len(pairs) < len(wanted):
            return None
        if not all(text.startswith(seam.text, at) for at, seam in pairs):
            return None
        starts = (first, *(at + seam.cut for at, seam in pairs))
        return starts if _are_asked(text, starts, messages) else None

    def _first(self, text: str, opening: Sequence[int], role: str) -> int | None:
        """Where the first message starts, behind at most one seam; None if that makes no sense."""
        if not opening:
            return 0
        at, *more = opening
        opens = [seam for (_, to), seam in self._learned.items() if to == role]
        cuts = [at + seam.cut for seam in opens if text.startswith(seam.text, at)]
        return cuts[0] if cuts and not more else None

    def _are_untyped(self, messages: Sequence[Message]) -> bool:
        """Whether no message holds a seam that would be taken for one."""
        plain = {seam.text for seam in self._learned.values() if not self._is_marked(seam)}
        return not any(said in _content(message) for message in messages for said in plain)

    def _is_marked(self, seam: Seam) -> bool:
        """Whether a seam holds a special text that is marked in every message."""
        specials = self._guard.specials.findall(seam.text)
        return not all(map(is_reply_marker, specials))

    @cached_property
    def _learned(self) -> Mapping[Roles, Seam]:
        """What is not known before the first chat: it takes a while."""
        of = self._template
        seams = learned(of.source, of.bos_text, of.eos_text)
        return {roles: self._snapped(seam) for roles, seam in seams.items()}

    def _snapped(self, seam: Seam) -> Seam:
        """It with no cut inside a special text: a last message may be closed by another one."""
        for match in self._guard.specials.finditer(seam.text):
            if match.start() < seam.cut < match.end():
                return Seam(seam.text, match.end())
        return seam


def _found(text: str, seams: Iterable[str]) -> list[int]:
    """Where in a text seams begin, those aside that lie in another one."""
    places = []
    for seam in seams:
        at = text.find(seam)
        while at >= 0:
            places.append((at, at + len(seam)))
            at = text.find(seam, at + 1)
    found: list[int] = []
    done = 0
    for at, end in sorted(places):
        if at >= done:
            found.append(at)
        if found[-1] == at:
            done = max(done, end)
    return found


def _are_asked(text: str, starts: Sequence[int], messages: Sequence[Message]) -> bool:
    """Whether the words of every message of the user stand where it is said to be."""
    ends = (*starts[1:], len(text))
    spans = zip(messages, starts, ends, strict=True)
    asked = ((_content(m).strip()[:_NEEDLE], a, b) for m, a, b in spans if m["role"] == "user")
    return all(text.find(needle, start, end) >= 0 for needle, start, end in asked)


def _content(message: Message) -> str:
    """The text of a message, whatever form a template wants it in."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())
