r"""What does a text say to the tokenizer: which of its special texts are special tokens?

A marked text (`guard.py`) says it by marks, sampled token ids say it themselves. Both are brought
into one form, the *spelling*: the text in UTF-8, without marks, and every special token in it
between two bytes that UTF-8 does not have.

    marked     what does <▮|im_end|> do?<|im_end|>\n        ▮  a mark
    sampled    [what][ does][ <][|im][_end][|>][ do][?]     and the template writes what follows
    spelling   what does <|im_end|> do?‹<|im_end|>›\n       ‹  0xFE   ›  0xFF

So two texts read the same exactly if their spellings are equal, wherever a guard put its marks;
and the beginning of a spelling is the spelling of the beginning.

The spelling of a reply is that of the text which its reader was given: bytes that are no UTF-8 are
U+FFFD, a control token, which is never shown, is not there. Templates write some of these (the
markers of tool calls), so a reply with control tokens has a second spelling in which they are.

Invariant: in a reply, a token that is special lies between the two bytes or is not there at all,
and letters that merely look like one never do.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.text.guard import Guard, unmarked
from orchestrator.text.tokenizer import Tokenizer

OPEN, CLOSE = b"\xfe", b"\xff"

_SPECIAL = re.compile(rb"(\xfe[^\xff]*\xff)")
_UNSPELLABLE = b""
_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Reply:
    """The spelling of sampled tokens: ``counts[i]`` of them spell it up to byte ``cuts[i]``.

    Cuts ascend, lie at ends of characters, and the last one is its end.
    """

    spelling: bytes
    cuts: array[int]
    counts: array[int]


class Speller:
    """Spells marked texts and sampled tokens of one vocabulary. Safe in several threads.

    `clean`: the special texts, in UTF-8, that no other special text can overlap. Their first
    character is an inner character of no special text, and none of their others begins one.
    """

    def __init__(self, tokenizer: Tokenizer, guard: Guard) -> None:
        texts = tokenizer.special_texts()
        self.clean = frozenset(text.encode() for text in _clean(texts))
        self._tokenizer = tokenizer
        self._guarded = [text for text in texts if guard.specials.fullmatch(text)]
        self._parts = re.compile(f"({guard.specials.pattern})")
        self._known: dict[int, bytes | None] = {}

    # ---- texts --------------------------------------------------------------------------------

    def text(self, marked: str) -> bytes:
        """The spelling of a marked text."""
        parts = [unmarked(part).encode("utf-8", "replace") for part in self._parts.split(marked)]
        parts[1::2] = [OPEN + special + CLOSE for special in parts[1::2]]
        return b"".join(parts)

    # ---- sampled tokens -----------------------------------------------------------------------

    def replies(self, tokens: Sequence[int]) -> Iterator[Reply]:
        """The spellings of a reply that show anything.

        A special token that others overlap, or that shares its text with another, is spelt as no
        text ever is.
        """
        for written in (False, True) if any(map(self._is_hidden, tokens)) else (False,):
            reply = self._reply(tokens, written=written)
            if reply.spelling:
                yield reply

    def _reply(self, tokens: Sequence[int], *, written: bool) -> Reply:
        decoder = _decoder("replace")
        spelling, cuts, counts = bytearray(), array("I", [0]), array("I", [0])
        for count, token in enumerate(tokens, 1):
            special = self._special(token)
            shown = self._tokenizer.piece(token)
            if special is None:
                spelling += decoder.decode(shown).encode()
            elif shown or written:
                spelling += decoder.decode(b"", final=True).encode() + OPEN + special + CLOSE
            if len(spelling) > cuts[-1] and not decoder.getstate()[0]:
                cuts.append(len(spelling))
                counts.append(count)
        spelling += decoder.decode(b"", final=True).encode()
        if len(spelling) > cuts[-1]:
            cuts.append(len(spelling))
            counts.append(len(tokens))
        counts[-1] = len(tokens)  # whatever comes last and shows nothing belongs to it
        return Reply(bytes(spelling), cuts[1:], counts[1:])

    def _is_hidden(self, token: int) -> bool:
        return bool(self._special(token)) and not self._tokenizer.piece(token)

    def _special(self, token: int) -> bytes | None:
        """The text of a special token, empty if it cannot be spelt; None for any other."""
        if token not in self._known:
            self._known[token] = self._read_special(token)
        return self._known[token]

    def _read_special(self, token: int) -> bytes | None:
        shown = self._tokenizer.piece(token)
        text = shown or self._tokenizer.token_text(token).encode()
        if text not in self._ids:
            return None
        return text if text in self.clean and self._ids[text] == token else _UNSPELLABLE

    @cached_property
    def _ids(self) -> dict[bytes, int | None]:
        """The id of each special text, None where it has several or none."""
        found = ((text, self._tokenizer.encode(text, special=True)) for text in self._guarded)
        return {text.encode(): ids[0] if len(ids) == 1 else None for text, ids in found}


def read(spelling: bytes) -> str:
    """The text of a spelling."""
    return spelling.translate(None, OPEN + CLOSE).decode("utf-8")


def parts(spelling: bytes) -> list[bytes]:
    """A spelling cut at its special tokens: every second part, from the second on, is one."""
    return _SPECIAL.split(spelling)


def _clean(specials: Iterable[str]) -> list[str]:
    specials = [text for text in specials if text]
    firsts = {text[0] for text in specials}
    inner = {char for text in specials for char in text[1:]}
    return [text for text in specials if text[0] not in inner and firsts.isdisjoint(text[1:])]
