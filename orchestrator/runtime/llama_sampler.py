"""How does llama.cpp choose a token for one lane?

One sampler chain per lane. The cheap filter over the whole vocabulary goes first: with `top_k`
ahead of `top_p` a vocabulary of 150,000 costs a fraction of a millisecond, the other way round
fifteen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.errors import BackendError
from orchestrator.runtime.library import api
from orchestrator.runtime.protocol import Sampling


def new_chain(sampling: Sampling, n_vocab: int) -> Any:
    """Return a llama.cpp sampler chain for `sampling`; the caller frees it."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for part in _parts(sampling, n_vocab):
        api.llama_sampler_chain_add(chain, part)
    return chain


def _parts(sampling: Sampling, n_vocab: int) -> list[Any]:
    parts = []
    if sampling.repeat_penalty != 1.0 and sampling.repeat_last:
        parts.append(
            api.llama_sampler_init_penalties(
                n_vocab, sampling.repeat_last, sampling.repeat_penalty, 0.0, 0.0
            )
        )
    if sampling.temperature == 0:
        return [*parts, api.llama_sampler_init_greedy()]
    if sampling.top_k:
        parts.append(api.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        parts.append(api.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p:
        parts.append(api.llama_sampler_init_min_p(sampling.min_p, 1))
    parts.append(api.llama_sampler_init_temp(sampling.temperature))
    return [*parts, api.llama_sampler_init_dist(sampling.seed or 0)]


class LlamaSampler:
    """One lane's chain. `index_of` maps a row to an output of the latest decode, checked."""

    def __init__(
        self,
        context: Any,
        sampling: Sampling,
        history: Sequence[int],
        *,
        n_vocab: int,
        index_of: Callable[[int], int],
        is_finite: Callable[[int], bool],
    ) -> None:
        self._context = context
        self._index_of = index_of
        self._is_finite = is_finite
        self._chain = new_chain(sampling, n_vocab)
        if sampling.repeat_penalty != 1.0:
            for token in history:
                api.llama_sampler_accept(self._chain, token)

    def sample(self, row: int) -> int:
        """Return the next token from `row` of the latest decode call, and remember it."""
        index = self._index_of(row)
        if not self._is_finite(row):
            raise BackendError(
                "the model's logits are not finite numbers; its file may be damaged, "
                "or its key-value type may be too small for it"
            )
        return int(api.llama_sampler_sample(self._chain, self._context, index))

    def close(self) -> None:
        """Free the chain; closing twice is harmless."""
        if self._chain is not None:
            api.llama_sampler_free(self._chain)
            self._chain = None
