"""How do chunks become a `llama_batch`, without a Python loop per token?

The arrays are allocated once for `n_batch` tokens and filled through numpy; llama.cpp reads them
in place. Outputs are the last tokens of the chunks that want logits, in batch order; more than one
of a chunk may be asked for, where a single row would be computed in another way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.runtime.library import api
from orchestrator.runtime.protocol import Chunk


class BatchBuffer:
    """Room for one decode call of at most `n_batch` tokens, filled anew for each."""

    def __init__(self, n_batch: int) -> None:
        self._tokens = np.zeros(n_batch, np.int32)
        self._positions = np.zeros(n_batch, np.int32)
        self._sequences = np.zeros(n_batch, np.int32)
        self._outputs = np.zeros(n_batch, np.int8)
        self._ones = np.ones(n_batch, np.int32)
        # every token names its one sequence through a pointer to its own element
        step = self._sequences.itemsize
        first = self._sequences.ctypes.data
        self._pointers = np.arange(n_batch, dtype=np.uintp) * step + first
        self._batch = self._describe()

    def _describe(self) -> Any:
        batch = api.llama_batch()
        batch.embd = None
        for field, values, kind in (
            ("token", self._tokens, api.llama_token),
            ("pos", self._positions, api.llama_pos),
            ("n_seq_id", self._ones, ctypes.c_int32),
            ("seq_id", self._pointers, ctypes.POINTER(api.llama_seq_id)),
            ("logits", self._outputs, ctypes.c_int8),
        ):
            setattr(batch, field, ctypes.cast(values.ctypes.data, ctypes.POINTER(kind)))
        return batch

    def fill(self, chunks: Sequence[Chunk], n_last: int = 1) -> tuple[Any, list[int | None]]:
        """Return the batch, and for each chunk the index of its last token's output in it.

        The chunks hold 1 to `n_batch` tokens in all; the caller has checked them. The last
        `n_last` tokens of a chunk that wants logits are outputs.
        """
        outputs: list[int | None] = []
        start = 0
        for chunk in chunks:
            end = start + len(chunk.tokens)
            self._tokens[start:end] = chunk.tokens
            self._positions[start:end] = range(chunk.start, chunk.end)
            self._sequences[start:end] = chunk.sequence
            self._outputs[start:end] = 0
            self._outputs[max(start, end - n_last) : end] = chunk.wants_logits
            outputs.append(end - 1 if chunk.wants_logits else None)
            start = end
        self._batch.n_tokens = start
        return self._batch, outputs
