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
from collections.abc import Iterator
from contextlib import contextmanager
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

_PATIENCE = 10.0
"""Seconds of computing that one step of a grammar may take. What llama.cpp has to follow can
double with every character of an ambiguous one, and other lanes are waiting."""

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
        self._one = Candidates(1)
        self._all = Candidates(tokenizer.n_vocab)

    def allowed(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return those of `tokens` that llama.cpp lets through; `takes` has the last word."""
        with _patience():
            return self._passed(self._all, tokens)

    def takes(self, token: int) -> bool:
        """Go on with `token` if the reply may, or end with it; else change nothing."""
        unfinished = self._after(token)
        if unfinished is None or not self._passed(self._one, np.array([token], np.int32)).size:
            return False
        if not self._tokenizer.is_end(token):
            with _patience():
                api.llama_sampler_accept(self._grammar, token)
        self._unfinished = unfinished
        return True

    def _passed(self, candidates: Candidates, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        candidates.fill(tokens, 0.0)
        candidates.apply(self._grammar)
        return tokens[np.isfinite(candidates.logits())]

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
        return decoder.getstate()[0]

    def close(self) -> None:
        """Free llama.cpp's part; closing twice is harmless."""
        if self._grammar is not None:
            api.llama_sampler_free(self._grammar)
            self._grammar = None


@contextmanager
def _patience() -> Iterator[None]:
    """Give a lane up whose grammar has become too much work, by this thread's own clock."""
    begun = time.thread_time()
    yield
    spent = time.thread_time() - begun
    if spent > _PATIENCE:
        raise GrammarFailed(
            f"the grammar took {spent:.0f} s for one token, {_PATIENCE:.0f} are allowed; it can be "
            "read in too many ways, let its alternatives begin differently"
        )
