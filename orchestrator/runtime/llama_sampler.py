"""How does llama.cpp choose a token for one lane?

One sampler chain per lane. The cheap filter over the whole vocabulary goes first: with `top_k`
ahead of `top_p` a vocabulary of 150,000 costs a fraction of a millisecond, the other way round
fifteen. Biases come before the chain, because a banned token has to be gone, not only unlikely:
llama.cpp's typical filter computes nonsense where a probability is zero.

A grammar is not asked about the whole vocabulary, which would be dear, but about the one token
that was chosen without it. Only where it refuses, the choice is made again among those it allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BackendError
from orchestrator.runtime.candidates import Candidates
from orchestrator.runtime.library import api
from orchestrator.runtime.llama_grammar import LaneGrammar, grammar_of
from orchestrator.runtime.sampling import (
    BAN,
    GrammarFailed,
    Sampling,
    TokenLogprob,
    token_logprob,
)
from orchestrator.text.tokenizer import Tokenizer

_COLDEST = 1e-6
"""Below this temperature the best token always wins; logits divided by less could overflow."""

_SEED_MOST = 2**32 - 2  # llama.cpp takes the next one for a wish for chance
_IMPOSSIBLE = 1e-30
"""Tokens this much less likely than the best one are dropped ahead of the typical filter, which
takes logarithms of all probabilities."""


def new_chain(sampling: Sampling, n_vocab: int) -> Any:
    """Return a llama.cpp sampler chain for `sampling`; the caller frees it."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for part in _parts(sampling, n_vocab):
        api.llama_sampler_chain_add(chain, part)
    return chain


def _parts(sampling: Sampling, n_vocab: int) -> list[Any]:
    parts = []
    if _penalises(sampling):
        parts.append(
            api.llama_sampler_init_penalties(
                n_vocab,
                sampling.repeat_last,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
    if sampling.temperature < _COLDEST:
        return [*parts, api.llama_sampler_init_greedy()]
    if sampling.top_k:
        parts.append(api.llama_sampler_init_top_k(sampling.top_k))
    if sampling.typical_p < 1:
        parts.append(api.llama_sampler_init_min_p(_IMPOSSIBLE, 1))
        parts.append(api.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1:
        parts.append(api.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p:
        parts.append(api.llama_sampler_init_min_p(sampling.min_p, 1))
    parts.append(api.llama_sampler_init_temp(sampling.temperature))
    return [*parts, api.llama_sampler_init_dist(min(sampling.seed or 0, _SEED_MOST))]


def _penalises(sampling: Sampling) -> bool:
    penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    return sampling.repeat_last > 0 and penalties != (1, 0, 0)


class _Bias:
    """A request's `logit_bias`, ready to be added to rows of logits."""

    def __init__(self, sampling: Sampling, n_vocab: int) -> None:
        bias = sampling.logit_bias
        self._tokens = np.array(list(bias), np.int32)
        self._values = np.array(list(bias.values()), np.float32)
        banned = self._tokens[self._values == BAN]
        self.choices = (
            np.delete(_vocabulary(n_vocab), banned) if banned.size else _vocabulary(n_vocab)
        )
        self.is_empty = not bias

    def added(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits with the bias; those of banned tokens mean nothing."""
        if self.is_empty:
            return logits
        logits = logits.copy()
        logits[self._tokens] += self._values
        return logits


@functools.lru_cache(maxsize=2)
def _vocabulary(n_vocab: int) -> NDArray[np.int32]:
    tokens = np.arange(n_vocab, dtype=np.int32)
    tokens.setflags(write=False)
    return tokens


class LlamaSampler:
    """One lane's choices.

    `row_of` returns a view of a row of the latest decode call, and refuses any other. `vocabulary`
    is llama.cpp's and `tokenizer` ours, of the model behind `context`.
    """

    def __init__(
        self,
        context: Any,
        vocabulary: Any,
        tokenizer: Tokenizer,
        sampling: Sampling,
        history: Sequence[int],
        *,
        row_of: Callable[[int], NDArray[np.float32]],
    ) -> None:
        grammar = grammar_of(sampling)
        self._context = context
        self._row_of = row_of
        self._bias = _Bias(sampling, tokenizer.n_vocab)
        self._n_top = sampling.logprobs
        self._last: TokenLogprob | None = None
        self._candidates: Candidates | None = None
        if grammar is not None or not self._bias.is_empty:
            self._candidates = Candidates(tokenizer.n_vocab)
        self._grammar = LaneGrammar(grammar, vocabulary, tokenizer) if grammar is not None else None
        self._chain = new_chain(sampling, tokenizer.n_vocab)
        for token in history[-sampling.repeat_last :] if _penalises(sampling) else ():
            api.llama_sampler_accept(self._chain, token)

    @property
    def last_logprob(self) -> TokenLogprob | None:
        """See `Sampler.last_logprob`."""
        return self._last

    def sample(self, row: int) -> int:
        """Return the next token from `row` of the latest decode call, and remember it."""
        logits = self._row_of(row)
        if self._chain is None:
            raise BackendError("a sampler was closed; its lane has ended")
        if not np.isfinite(logits).all():
            raise BackendError(
                "the model's logits are not finite numbers; its file may be damaged, "
                "or its key-value type may be too small for it"
            )
        if self._candidates is None:
            token = int(api.llama_sampler_sample(self._chain, self._context, row))
        else:
            token = self._choose(self._candidates, self._bias.added(logits))
            api.llama_sampler_accept(self._chain, token)
        if self._n_top is not None:
            self._last = token_logprob(logits, token, self._n_top)
        return token

    def _choose(self, candidates: Candidates, logits: NDArray[np.float32]) -> int:
        token = self._drawn(candidates, self._bias.choices, logits)
        grammar = self._grammar
        if grammar is None or grammar.takes(token):
            return token
        fitting = grammar.allowed(self._bias.choices)
        while fitting.size:
            token = self._drawn(candidates, fitting, logits)
            if grammar.takes(token):
                return token
            fitting = fitting[fitting != token]
        raise GrammarFailed(
            "the grammar allows no token of this model's vocabulary here; it may ask for "
            "characters the model cannot write, or logit_bias may ban what it needs"
        )

    def _drawn(
        self, candidates: Candidates, tokens: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> int:
        candidates.fill(tokens, logits[tokens])
        candidates.apply(self._chain)
        return candidates.selected()

    def close(self) -> None:
        """Free chain and grammar; closing twice is harmless."""
        if self._grammar is not None:
            self._grammar.close()
        if self._chain is not None:
            api.llama_sampler_free(self._chain)
            self._chain = None
