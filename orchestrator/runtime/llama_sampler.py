"""How does llama.cpp choose a token for one lane?

One sampler chain per lane. The cheap filter over the whole vocabulary goes first: with `top_k`
ahead of `top_p` a vocabulary of 150,000 costs a fraction of a millisecond, the other way round
fifteen. A lane with neither bias nor grammar is left to llama.cpp alone.

Else the scores of all tokens are made first (logits, bias, penalties) and the chain chooses among
them. A banned token is taken out, because llama.cpp's typical filter computes nonsense where a
probability is zero. A grammar is not asked about the whole vocabulary, which takes 200 ns a token,
but about the one token that was chosen without it. Only where it refuses, the choice is made again
among the tokens it allows, of which the best are enough if `top_k` drops the others anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BackendError
from orchestrator.runtime.candidates import Candidates
from orchestrator.runtime.library import api
from orchestrator.runtime.llama_grammar import LaneGrammar, grammar_of
from orchestrator.runtime.sampling import (
    GrammarFailed,
    LogitBias,
    Sampling,
    TokenLogprob,
    token_logprob,
)
from orchestrator.text.tokenizer import Tokenizer

Tokens = NDArray[np.int32]
Scores = NDArray[np.float32]

_COLDEST = 1e-6
"""Below this temperature the best token always wins; logits divided by less could overflow."""

_SEED_MOST = 2**32 - 2  # llama.cpp takes the next one for a wish for chance
_IMPOSSIBLE = 1e-30
"""Tokens this much less likely than the best one are dropped ahead of the typical filter, which
takes the logarithms of all probabilities."""

_N_BEST = 1024
"""Tokens a grammar is asked about first, where a few that it allows are enough."""


def new_chain(sampling: Sampling, *parts: Any) -> Any:
    """Return a sampler chain of `parts` and of the filters of `sampling`; the caller frees it."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for part in (*parts, *_filters(sampling)):
        api.llama_sampler_chain_add(chain, part)
    return chain


def _filters(sampling: Sampling) -> list[Any]:
    if _is_greedy(sampling):
        return [api.llama_sampler_init_greedy()]
    parts = []
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


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < _COLDEST


def _penalties(sampling: Sampling, n_vocab: int, history: Sequence[int]) -> Any | None:
    """Return a sampler that has seen the end of `history`, None where nothing is penalised."""
    values = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if not sampling.repeat_last or values == (1, 0, 0):
        return None
    penalties = api.llama_sampler_init_penalties(n_vocab, sampling.repeat_last, *values)
    for token in history[-sampling.repeat_last :]:
        api.llama_sampler_accept(penalties, token)
    return penalties


@functools.lru_cache(maxsize=2)
def _vocabulary(n_vocab: int) -> Tokens:
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
        row_of: Callable[[int], Scores],
    ) -> None:
        grammar = grammar_of(sampling)
        n_vocab = tokenizer.n_vocab
        penalties = _penalties(sampling, n_vocab, history)
        self._context = context
        self._row_of = row_of
        self._n_top = sampling.logprobs
        self._last: TokenLogprob | None = None
        self._chooser: _Chooser | None = None
        self._chain: Any = None
        self._takes_best = _is_greedy(sampling) and penalties is None and grammar is None
        if grammar is None and not sampling.logit_bias:
            self._chain = new_chain(sampling, *filter(None, [penalties]))
        else:
            lane = None if grammar is None else LaneGrammar(grammar, vocabulary, tokenizer)
            self._chooser = _Chooser(sampling, n_vocab, penalties, lane)

    @property
    def last_logprob(self) -> TokenLogprob | None:
        """See `Sampler.last_logprob`."""
        return self._last

    def sample(self, row: int) -> int:
        """Return the next token from `row` of the latest decode call, and remember it."""
        logits = self._row_of(row)
        if not np.isfinite(logits).all():
            raise BackendError(
                "the model's logits are not finite numbers; its file may be damaged, "
                "or its key-value type may be too small for it"
            )
        if self._chooser is not None:
            token = self._chooser.choose(logits)
        elif self._chain is not None and self._takes_best:
            token = int(logits.argmax())  # the first of equals, as llama.cpp's own does
        elif self._chain is not None:
            token = int(api.llama_sampler_sample(self._chain, self._context, row))
        else:
            raise BackendError("a sampler was closed; its lane has ended")
        if self._n_top is not None:
            self._last = token_logprob(logits, token, self._n_top)
        return token

    def close(self) -> None:
        """Free all it holds; closing twice is harmless."""
        if self._chooser is not None:
            self._chooser.close()
        if self._chain is not None:
            api.llama_sampler_free(self._chain)
        self._chooser = self._chain = None


class _Chooser:
    """The choices of a lane with a bias or a grammar; frees both samplers that it is given."""

    def __init__(
        self, sampling: Sampling, n_vocab: int, penalties: Any | None, grammar: LaneGrammar | None
    ) -> None:
        bias = LogitBias(sampling.logit_bias)
        self._biased = np.array(list(bias), np.int32)
        self._biases = np.array(list(bias.values()), np.float32)
        self._choices = (
            np.delete(_vocabulary(n_vocab), bias.banned()) if bias else _vocabulary(n_vocab)
        )
        self._penalties = penalties
        self._grammar = grammar
        self._chain = new_chain(sampling)
        self._candidates = Candidates(n_vocab)
        self._is_greedy = _is_greedy(sampling)
        self._n_enough = 1 if self._is_greedy else sampling.top_k or n_vocab

    def choose(self, logits: Scores) -> int:
        """Return the next token, and remember it."""
        scores = self._scores(logits)
        token = self._drawn(self._choices, scores)
        if self._grammar is not None and not self._grammar.takes(token):
            token = self._fitting(self._grammar, scores)
        if self._penalties is not None:
            api.llama_sampler_accept(self._penalties, token)
        return token

    def _scores(self, logits: Scores) -> Scores:
        """Return the scores of all tokens; those of banned ones mean nothing."""
        scores = logits.copy()
        scores[self._biased] += self._biases
        if self._penalties is not None:
            self._candidates.fill(_vocabulary(scores.size), scores)
            self._candidates.apply(self._penalties)  # keeps their order
            scores = self._candidates.logits().copy()
        return scores

    def _drawn(self, tokens: Tokens, scores: Scores) -> int:
        if self._is_greedy:  # without a copy into llama.cpp's array
            return int(tokens[scores[tokens].argmax()])
        self._candidates.fill(tokens, scores[tokens])
        self._candidates.apply(self._chain)
        return self._candidates.selected()

    def _fitting(self, grammar: LaneGrammar, scores: Scores) -> int:
        """Return a token that the grammar takes, and let it be taken."""
        for tokens, n_least in self._pools(scores):
            allowed = grammar.allowed(tokens)
            while allowed.size >= n_least:
                token = self._drawn(allowed, scores)
                if grammar.takes(token):
                    return token
                allowed = allowed[allowed != token]
        raise GrammarFailed(
            "the grammar allows no token of this model's vocabulary here; it may ask for "
            "characters the model cannot write, or logit_bias may ban what it needs"
        )

    def _pools(self, scores: Scores) -> Iterator[tuple[Tokens, int]]:
        """Yield tokens to look among, with how many of them must be allowed to decide.

        If the best tokens hold as many allowed ones as the chain would keep of all, no other
        can change the choice.
        """
        if self._n_enough <= _N_BEST < self._choices.size:
            places = np.argpartition(scores[self._choices], -_N_BEST)[-_N_BEST:]
            yield np.sort(self._choices[places]), self._n_enough
        yield self._choices, 1

    def close(self) -> None:
        """Free chain, penalties and grammar."""
        api.llama_sampler_free(self._chain)
        if self._penalties is not None:
            api.llama_sampler_free(self._penalties)
        if self._grammar is not None:
            self._grammar.close()
