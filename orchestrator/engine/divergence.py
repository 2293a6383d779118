r"""How do two token paths go on after they part, and how is that told to a person?

    before   … now is │ 10:01 in Berlin. Be brief. ‹user› hi ‹assistant› Hello
    after    … now is │ 10:02 in Berlin. Be brief. ‹user› hi ‹assistant› Hello ‹user› more
                        ~~~~~ ==========================================
                      changed  recurs: evaluated before, but after another beginning

Two runs of tokens count as the same text from `RUN_LEAST` tokens on; template glue and common
phrases are shorter. The count is never too high, and may be a little too low where very much was
changed: the search is bounded.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

from orchestrator.pool.index import common_length
from orchestrator.text.encoder import common_length as common_text
from orchestrator.text.tokenizer import Tokenizer

RUN_LEAST = 16
N_PROBES = 48
N_CHARS = 40  # of each side that a person is shown

_WIDTH = 4  # bytes of one packed token
_N_TOKENS = 48  # of each side that are looked at for what to show
_N_CONTEXT = 16  # tokens before the place, for the word that it lies in
_FAR = 1 << 40
_WORD_MOST = 16  # characters of that word

_BROKEN = "\ufffd"  # a character of which a part is missing
_WORD = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True, slots=True)
class Recurrence:
    """`n_tokens` of the new path are in the old one too, the first of them at `new` and `old`.

    Positions count from the place where the paths part; where nothing recurs they lie beyond all.
    """

    n_tokens: int = 0
    old: int = _FAR
    new: int = _FAR


_NOTHING = Recurrence()


def recurring(old: bytes, new: bytes) -> Recurrence:
    """Return how much of a packed path comes in another one, in the same order."""
    n_old, n_new = len(old) // _WIDTH, len(new) // _WIDTH
    n_tokens = 0
    first = (_FAR, _FAR)
    at_old = at_new = skipped = 0
    for _ in range(N_PROBES):
        probe = at_old + skipped
        if probe + RUN_LEAST > n_old or at_new + RUN_LEAST > n_new:
            break
        found = _find(new, old[probe * _WIDTH : (probe + RUN_LEAST) * _WIDTH], at_new)
        if found is None:
            skipped = max(skipped + 1, skipped * 3 // 2)
            continue
        back = _common_end(_part(old, at_old, probe), _part(new, at_new, found))
        run = back + common_length(old[probe * _WIDTH :], new[found * _WIDTH :])
        if not n_tokens:
            first = (probe - back, found - back)
        n_tokens += run
        at_old, at_new, skipped = probe - back + run, found - back + run, 0
    return Recurrence(n_tokens, *first)


def _part(path: bytes, start: int, end: int) -> bytes:
    return path[start * _WIDTH : end * _WIDTH]


def _find(path: bytes, run: bytes, start: int) -> int | None:
    """Return where a run of tokens begins in `path`, at `start` or later."""
    at = path.find(run, start * _WIDTH)
    while at % _WIDTH and at >= 0:  # bytes of two neighbours look like a token
        at = path.find(run, at + 1)
    return at // _WIDTH if at >= 0 else None


def _common_end(a: bytes, b: bytes) -> int:
    """Return how many tokens two paths share at their ends."""
    same, most = 0, min(len(a), len(b)) // _WIDTH
    while same < most and _from_end(a, same) == _from_end(b, same):
        same += 1
    return same


def _from_end(path: bytes, place: int) -> bytes:
    end = len(path) - place * _WIDTH
    return path[end - _WIDTH : end]


# ---- for a person -------------------------------------------------------------------------------


def spelled(path: bytes, tokenizer: Tokenizer) -> str:
    """Return the text of packed tokens, special ones included."""
    pieces = (tokenizer.piece(t) or tokenizer.token_text(t).encode() for t in _unpacked(path))
    return b"".join(pieces).decode("utf-8", "replace")


def _unpacked(path: bytes) -> array[int]:
    tokens = array("i")
    tokens.frombytes(path)
    return tokens


def sides(
    shared: bytes, old: bytes, new: bytes, tokenizer: Tokenizer, recurs: Recurrence = _NOTHING
) -> tuple[str, str]:
    """Return what stood where two paths part, and what stands there instead: a few words each.

    Both begin with the word that the place lies in, where it lies in one, and end with the message.
    An empty one says that something was put in, or taken out. `recurs` tells where the paths come
    together again.
    """
    around = _before(shared, tokenizer)
    ends = _ends(old, new, tokenizer, recurs)
    before, after = (
        spelled(around + path[: end * _WIDTH], tokenizer).strip(_BROKEN)
        for path, end in zip((old, new), ends, strict=True)
    )
    same = common_text(before, after)  # a character may lie across the place
    word = re.split(r"\s", before[:same])[-1][-_WORD_MOST:]
    before, after = before[same:], after[same:]
    if ends != (recurs.old, recurs.new):
        before, after = _until_they_meet(before, after)
    elif (word or (before and after)) and not any(t[-1:].isspace() for t in (before, after)):
        rest = _rest_of_word(old[recurs.old * _WIDTH :], tokenizer)
        before, after = before + rest, after + rest
    before, after = word + before, word + after
    if before.strip() != after.strip():  # else the white space is what differs
        before, after = before.strip(" "), after.strip(" ")
    return shown(before), shown(after)


def _ends(old: bytes, new: bytes, tokenizer: Tokenizer, recurs: Recurrence) -> tuple[int, int]:
    """Return how many tokens of two paths to look at: to the message's end, or where they meet."""
    most = min(recurs.old, _N_TOKENS), min(recurs.new, _N_TOKENS)
    until = _to_end(old[: most[0] * _WIDTH], tokenizer), _to_end(new[: most[1] * _WIDTH], tokenizer)
    return until if any(until) else most  # both messages end there, and not alike


def _to_end(path: bytes, tokenizer: Tokenizer) -> int:
    """Return how many tokens of a path stand before one that ends a message."""
    tokens = _unpacked(path)
    return next((n for n, t in enumerate(tokens) if tokenizer.is_end(t)), len(tokens))


def _before(path: bytes, tokenizer: Tokenizer) -> bytes:
    """Return the last few tokens of a path, none before a special one that nobody is shown."""
    tokens = _unpacked(path[-_N_CONTEXT * _WIDTH :])
    length = next(
        (n for n, t in enumerate(reversed(tokens)) if not tokenizer.piece(t)), len(tokens)
    )
    return tokens[len(tokens) - length :].tobytes()


def _rest_of_word(path: bytes, tokenizer: Tokenizer) -> str:
    """Return what a path begins with, up to white space or a special token."""
    tokens = _unpacked(path[: _N_CONTEXT * _WIDTH])
    length = next((n for n, t in enumerate(tokens) if not tokenizer.piece(t)), len(tokens))
    text = spelled(tokens[:length].tobytes(), tokenizer)
    return re.split(r"\s", text)[0][:_WORD_MOST]


def _until_they_meet(before: str, after: str) -> tuple[str, str]:
    """Cut two texts that begin differently where they go on with the same two words."""
    old, new = _WORD.findall(before), _WORD.findall(after)
    meetings = [
        (i + j, i, j)
        for i in range(len(old) - 1)
        for j in range(len(new) - 1)
        if old[i : i + 2] == new[j : j + 2]
    ]
    if not meetings:
        return before, after
    _, i, j = min(meetings)
    return "".join(old[:i]), "".join(new[:j])


def shown(text: str) -> str:
    """Return a text on one line, cut to `N_CHARS`, with what cannot be seen escaped."""
    line = "".join(char if char.isprintable() else _escaped(char) for char in text)
    return line if len(line) <= N_CHARS else f"{line[: N_CHARS - 1]}…"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
