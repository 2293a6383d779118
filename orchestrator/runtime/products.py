"""What did every matrix product of a decode call come to, token by token?

llama.cpp lets a context look at the nodes of its graph as they are computed. Two ways to read a
text agree for certain only if every product agrees: a difference in its last bit can vanish where
activations are rounded to 8 bits, and come up again a thousand tokens later.

Meant for a small context that tries something out; looking makes it slower.
"""

from __future__ import annotations

import ctypes
from typing import Any

from orchestrator.runtime import library
from orchestrator.runtime.library import api

_p = ctypes.c_void_p
_PROTOTYPES: dict[str, Any] = {
    "ggml_op_desc": ctypes.CFUNCTYPE(ctypes.c_char_p, _p),
    "ggml_nrows": ctypes.CFUNCTYPE(ctypes.c_int64, _p),
    "ggml_nbytes": ctypes.CFUNCTYPE(ctypes.c_size_t, _p),
    "ggml_get_data": ctypes.CFUNCTYPE(_p, _p),
}
_OF_HEADS_OR_EXPERTS = frozenset({b"MUL_MAT_ID", b"FLASH_ATTN_EXT"})  # several rows per token

Digests = list[list[int]]
"""Per product, in the order of computation, a hash of what each token came to."""


class Products:
    """Looks on while a context computes. `callback` goes to `llama_context_params.cb_eval`."""

    def __init__(self) -> None:
        addresses = library.function_addresses(tuple(_PROTOTYPES))
        self._calls = {name: make(addresses[name]) for name, make in _PROTOTYPES.items()}
        self.callback = api.ggml_backend_sched_eval_callback(self._look)
        self._n_tokens = self._n_last = 0
        self._digests: Digests = []

    def begin(self, n_tokens: int, n_last: int) -> None:
        """Look at the next decode call, one pass of `n_tokens`; keep the last `n_last` of them."""
        self._n_tokens, self._n_last, self._digests = n_tokens, n_last, []

    def end(self) -> Digests:
        """Look no more, and return what was seen."""
        self._n_tokens = 0
        return self._digests

    def _look(self, tensor: int, ask: bool, _data: object) -> bool:
        if ask:
            return self._n_tokens > 0 and self._is_product(tensor)
        size = self._calls["ggml_nbytes"](tensor)
        seen = ctypes.string_at(self._calls["ggml_get_data"](tensor), size)
        width = size // self._n_tokens
        starts = range((self._n_tokens - self._n_last) * width, size, width)
        self._digests.append([hash(seen[start : start + width]) for start in starts])
        return True  # go on

    def _is_product(self, tensor: int) -> bool:
        """Whether it is a product with a row, or several in a row, for each token."""
        kind, n_rows = self._calls["ggml_op_desc"](tensor), self._calls["ggml_nrows"](tensor)
        if kind in _OF_HEADS_OR_EXPERTS:
            return bool(n_rows % self._n_tokens == 0)
        return bool(kind == b"MUL_MAT" and n_rows == self._n_tokens)
