"""Do several sequences in one decode call get what each gets alone?

Not with every graph of llama.cpp: that of PLaMo-2 writes the recurrent states of n sequences to n
times the cell they belong to, past the end of the buffer in the worst case, which ends the
process, and mixes up the tokens of sequences that bring more than one. So it is tried on every
model that is opened, and one that fails evaluates one sequence per call.

Two texts that differ at first and end alike are read alone and jointly. Had one got the other's
state, its logits would be off by about the distance between the two texts' logits. Measured in
that distance, the eighteen tiny models and the demo lie within 0.0003 of themselves, PLaMo-2 lies
at 0.9.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BackendError
from orchestrator.runtime import library
from orchestrator.runtime.batch import BatchBuffer
from orchestrator.runtime.library import api
from orchestrator.runtime.protocol import Chunk

N_SEQUENCES = 4
"""What the context must hold: one keeps the first cell busy, so that the pair lies behind it and
a state written to twice its cell still falls into the buffer."""

_PARTS = ((0, 2), (2, 3), (3, 4))  # states are written by a long and by a short chunk, and read
_FAR = 0.1

_Logits = NDArray[np.float64]  # sums of squares of large logits stay finite


def evaluates_jointly(context: Any, n_vocab: int) -> bool:
    """Return whether two sequences may share a decode call; empties the context before."""
    first, second = _texts(n_vocab)
    buffer = BatchBuffer(2 * len(first))
    api.llama_memory_clear(api.llama_get_memory(context), True)
    alone = _evaluate(context, buffer, [Chunk(0, 0, second, True)], n_vocab)
    api.llama_memory_clear(api.llama_get_memory(context), True)
    alone = _evaluate(context, buffer, [Chunk(0, 0, first, True)], n_vocab) + alone
    for start, end in _PARTS:
        pair = [Chunk(1, start, first[start:end], True), Chunk(2, start, second[start:end], True)]
        jointly = _evaluate(context, buffer, pair, n_vocab)
    apart = np.linalg.norm(alone[0] - alone[1])
    strayed = [np.linalg.norm(a - b) for a, b in zip(alone, jointly, strict=True)]
    return bool(max(strayed) <= _FAR * apart)  # False as well where anything is not finite


def _texts(n_vocab: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two texts of four tokens with the same end, spread over the vocabulary."""
    a, b, c, d, e, f = (n_vocab * (2 * place + 1) // 12 for place in range(6))
    return (a, b, c, d), (e, f, c, d)


def _evaluate(
    context: Any, buffer: BatchBuffer, chunks: list[Chunk], n_vocab: int
) -> list[_Logits]:
    """Return the logits of chunks that all want them."""
    batch, outputs = buffer.fill(chunks)
    if api.llama_decode(context, batch):
        raise BackendError(f"the model cannot evaluate a few tokens: {library.last_complaint()}")
    rows = (api.llama_get_logits_ith(context, output) for output in outputs)
    return [np.ctypeslib.as_array(row, (n_vocab,)).astype(np.float64) for row in rows]
