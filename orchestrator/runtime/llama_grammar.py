"""Which tokens may a lane say next so that its reply stays within a grammar?

llama.cpp keeps the place in the grammar. What it gets wrong is put right here: it takes a control
token for the text of its name, which no reply shows, and lets a reply end inside a character or
hold bytes that are no UTF-8.

Invariant: a token reaches llama.cpp's `accept` only right after `apply` let that very token
through. Anything else ends the process.
"""

from __future__ import annotations

import codecs
import functools
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.candidates import Candidates
from orchestrator.runtime.grammar import ROOT, check_gbnf
from orchestrator.runtime.library import api
from orchestrator.runtime.sampling import GrammarFailed, Sampling
from orchestrator.runtime.schema import schema_to_gbnf
from orchestrator.text.tokenizer import Tokenizer

_STEP_MOST, _LOOK_MOST = 0.25, 2.0
"""Seconds of computing that going on by one token, and looking at all of them, may take. With an
ambiguous grammar both can grow fivefold at every character, and other lanes are waiting."""

_N_LOOK = 4096  # tokens looked at between two glances at the clock

_decoder = codecs.getincrementaldecoder("utf-8")


def grammar_of(sampling: Sampling) -> str | None:
    """Return the GBNF that a lane must follow, None where there is none.

    Touches no model, so that it may run beside the engine's thread. Raises `InvalidArgument` for
    what cannot be followed.
    """
    if isinstance(sampling.json_schema, str):
        return _parsed(schema_to_gbnf(sampling.json_schema))
    return None if sampling.grammar is None else _parsed(sampling.grammar)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> str:
    check_gbnf(text)
    api.llama_sampler_free(_new(text, None))
    return text


def _new(text: str, vocabulary: Any) -> Any:
    """Return a grammar at its beginning; without a vocabulary it can only be freed."""
    grammar = api.llama_sampler_init_grammar(vocabulary, text.encode(), ROOT.encode())
    if not grammar:
        raise InvalidArgument("llama.cpp refuses the grammar, though nothing seems wrong with it")
    return grammar


class LaneGrammar:
    """A lane's place in its grammar. `vocabulary` is llama.cpp's, of a model that stays open."""

    def __init__(self, text: str, vocabulary: Any, tokenizer: Tokenizer) -> None:
        self._grammar = _new(text, vocabulary)
        self._tokenizer = tokenizer
        self._unfinished = b""  # the beginning of a character
        self._candidates = Candidates(_N_LOOK)

    def allowed(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return those of `tokens` that llama.cpp lets through; `takes` has the last word."""
        begun = time.thread_time()
        passed = [np.empty(0, np.int32)]
        for start in range(0, tokens.size, _N_LOOK):
            passed.append(self._passed(tokens[start : start + _N_LOOK]))
            _check_pace(begun, _LOOK_MOST)
        return np.concatenate(passed)

    def takes(self, token: int) -> bool:
        """Go on with `token` if the reply may, or end with it; else change nothing."""
        unfinished = self._after(token)
        if unfinished is None or not self._passed(np.array([token], np.int32)).size:
            return False
        self._unfinished = unfinished
        if not self._tokenizer.is_end(token):
            begun = time.thread_time()
            api.llama_sampler_accept(self._grammar, token)
            _check_pace(begun, _STEP_MOST)
        return True

    def _passed(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        self._candidates.fill(tokens, 0.0)
        self._candidates.apply(self._grammar)
        return tokens[np.isfinite(self._candidates.logits())]

    def _after(self, token: int) -> bytes | None:
        """Return what of a character is open after `token`; None where it cannot follow."""
        if self._tokenizer.is_end(token):
            return None if self._unfinished else b""
        piece = self._tokenizer.piece(token)
        if not piece or 0 in piece:
            return None  # it shows nothing, or llama.cpp would see less of it than a reader
        decoder = _decoder("strict")
        try:
            decoder.decode(self._unfinished + piece)
        except UnicodeDecodeError:
            return None
        unfinished = decoder.getstate()[0]
        # Half a surrogate never becomes a character; the decoder would find out a byte later.
        return None if unfinished[:1] == b"\xed" and unfinished[1:2] > b"\x9f" else unfinished

    def close(self) -> None:
        """Free llama.cpp's part; closing twice is harmless."""
        if self._grammar is not None:
            api.llama_sampler_free(self._grammar)
            self._grammar = None


def _check_pace(begun: float, most: float) -> None:
    """Give a lane up whose grammar has become too much work, by this thread's own clock."""
    spent = time.thread_time() - begun
    if spent > most:
        raise GrammarFailed(
            f"the grammar took {spent:.2g} s for one token, {most:g} are allowed; it can be read "
            "in too many ways, let its alternatives begin differently"
        )
