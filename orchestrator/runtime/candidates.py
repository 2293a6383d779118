"""How are tokens and their logits handed to llama.cpp's samplers?

In one array that a sampler sorts, shortens and marks a choice in; so it is filled anew for every
use.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BackendError
from orchestrator.runtime.library import api

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Candidates:
    """Room for `n_most` tokens to choose from."""

    def __init__(self, n_most: int) -> None:
        self._data = np.zeros(n_most, _CANDIDATE)
        pointer = self._data.ctypes.data_as(api.llama_token_data_p)
        self._array = api.llama_token_data_array(pointer, 0, -1, False)

    def fill(self, tokens: NDArray[np.int32], logits: NDArray[np.float32] | float) -> None:
        """Hold `tokens`, at least one and at most as many as there is room for."""
        if not 0 < tokens.size <= self._data.size:
            raise BackendError(f"{tokens.size} tokens to choose from; give 1 to {self._data.size}")
        part = self._data[: tokens.size]
        part["id"], part["logit"], part["p"] = tokens, logits, 0
        array = self._array
        array.size, array.selected, array.sorted = tokens.size, -1, False

    def apply(self, sampler: Any) -> None:
        """Let a sampler of llama.cpp work on what is held."""
        api.llama_sampler_apply(sampler, ctypes.byref(self._array))

    def logits(self) -> NDArray[np.float32]:
        """Return the logits, in whatever order they are now; valid until the next `fill`."""
        logits: NDArray[np.float32] = self._data["logit"][: self._array.size]
        return logits

    def selected(self) -> int:
        """Return the token that a sampler chose."""
        if not 0 <= self._array.selected < self._array.size:
            raise BackendError("llama.cpp's samplers chose no token; its version may not fit")
        return int(self._data["id"][self._array.selected])
