"""Walks through a grammar with the vocabulary of a tiny model, and no model behind it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tiny_models

from orchestrator.runtime import library
from orchestrator.runtime.library import api
from orchestrator.runtime.llama_grammar import LaneGrammar
from orchestrator.runtime.vocabulary import Vocabulary

END = tiny_models.TOKEN["<|im_end|>"]
N_BYTES = 256
_EVERY = np.arange(tiny_models.N_VOCAB, dtype=np.int32)


class Walks:
    """Texts and grammars, matched by llama.cpp. A byte is a token of these models."""

    def __init__(self, model: Any) -> None:
        self.tokenizer = Vocabulary(model)
        self._vocabulary = api.llama_model_get_vocab(model)

    @contextmanager
    def begun(self, grammar: str) -> Iterator[LaneGrammar]:
        """Open a lane's grammar and free it in the end."""
        lane = LaneGrammar(grammar, self._vocabulary, self.tokenizer)
        try:
            yield lane
        finally:
            lane.close()

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether `text` is one that the grammar allows from beginning to end."""
        with self.begun(grammar) as lane:
            return all(map(lane.takes, text.encode())) and lane.takes(END)

    def text(self, grammar: str, rng: random.Random, n_most: int = 400) -> str | None:
        """Return a random text of the grammar, None where it did not end within `n_most` bytes.

        All tokens are equally likely, the end more so, but for one preference: a quotation mark
        or bracket closes what would otherwise be long.
        """
        data = bytearray()
        with self.begun(grammar) as lane:
            while len(data) < n_most:
                if rng.random() < 0.5 and lane.takes(END):
                    return data.decode()
                choices = [int(token) for token in lane.allowed(_EVERY) if token < N_BYTES]
                closing = [token for token in choices if token in b'"]}']
                rng.shuffle(choices)
                if closing and rng.random() < 0.2:
                    choices.insert(0, rng.choice(closing))
                token = next(filter(lane.takes, choices), None)
                if token is None:
                    assert lane.takes(END), f"nothing can follow {bytes(data)!r}"
                    return data.decode()
                data.append(token)
        return None


@contextmanager
def open_walks() -> Iterator[Walks]:
    """Load a tiny model's vocabulary alone."""
    library.prepare()
    parameters = api.llama_model_default_params()
    parameters.vocab_only = True
    model = api.llama_model_load_from_file(os.fsencode(tiny_models.build("llama")), parameters)
    try:
        yield Walks(model)
    finally:
        api.llama_model_free(model)
