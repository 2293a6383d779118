"""How does every token get the same bits alone or in company, and however its prompt was cut?

On a CPU ggml chooses kernels by the number of tokens that share a *pass* over the weights. What
changes them, and what is done about it when a model is opened `exact`:

    attention   64 tokens and more go by tiles, and one token over 512 cells and more is split by
                thread, where keys and values are of one type: values of another type (BF16 beside
                F16 keys, summed in F32), or passes of 2 to 63 tokens
    weights     one token takes another kernel than two, with some types; from 8 tokens on K-quants
                go by tiles, from 32 on a BLAS takes over where there is one: passes of at least
                two tokens, tiles switched off for the process
    repacking   rows in groups of four take a kernel of their own: nothing is repacked
    the pool    sums follow the order of the cells: each sequence has cells of its own, in order

Which passes a model needs follows from its architecture, its weights and the machine, so it is
tried when it is opened (`find_passes`): a text is read in one piece and in several ways, and every
matrix product, the logits and every byte of the state must be the same. Three things come out:

    1 to 63   any pass will do: most quantised models
    2 to 63   a token must not be alone in its pass: F32 and F16 weights, also among quantised ones
              (the routers of experts, RWKV).
              Where one would be, a *pad* is evaluated beside it in a neighbouring sequence and
              taken away again
    1 to 1    nothing else agrees: every token has its pass and every sequence its call, so prompts
              are read as slowly as replies are said. Where a recurrent layer multiplies the
              tokens of each sequence apart and the weights are F32 or F16 (Qwen 3.5, LFM2, Mamba,
              Jamba), or where llama.cpp errs with several sequences (PLaMo-2) or sums by chunk
              (MiniMax-01)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BackendError, DecodeFailed, InvalidArgument, PoolFull
from orchestrator.runtime import library
from orchestrator.runtime.batch import BatchBuffer
from orchestrator.runtime.library import api
from orchestrator.runtime.products import Digests, Products
from orchestrator.runtime.protocol import Chunk, MemoryKind

N_PASS_MOST = 63
"""Tokens in one pass at most: from 64 on attention goes by tiles."""

_WHOLE, _STATE_ONLY = 0, 1  # llama_state_seq_flags
_STATE_FLAGS: dict[MemoryKind, int] = {"hybrid": _STATE_ONLY, "recurrent": _WHOLE}


@dataclass(frozen=True, slots=True)
class Passes:
    """How many tokens a pass over the weights may hold, at least and at most."""

    least: int
    most: int


Rows = dict[int, int | None]
"""Which output of a decode call belongs to which sequence."""

Evaluate = Callable[[Sequence[Chunk], int], Rows]
"""Makes one decode call of chunks, of whose last tokens so many are outputs."""

ANY = Passes(1, N_PASS_MOST)
PAIRED = Passes(2, N_PASS_MOST)
SINGLE = Passes(1, 1)


def pass_size(n_batch: int, n_sequences: int) -> int:
    """Return how many tokens a pass may hold, `n_batch` or fewer.

    A multiple of `n_sequences`: with other numbers llama.cpp ends the process over latent
    attention (Kimi-Linear) when each sequence has cells of its own.
    """
    return max(n_batch // n_sequences, 1) * n_sequences


# ---- which passes a model needs ------------------------------------------------------------------

N_TRIED = 34
"""Tokens of the text, more than any number below 64 at which kernels are known to change."""

_CUTS = (2, 1, 1, N_TRIED - 5, 1)
_BUSY, _PAD, _HELD = 0, 1, 2  # sequences; the first keeps the first cell busy


def find_passes(context: Any, products: Products, n_vocab: int, *, may_be_alone: bool) -> Passes:
    """Return the passes under which a model gives the same bits; empties the context before.

    The context holds three sequences of `N_TRIED` tokens each, takes so many in a pass and as
    outputs, and lets `products` look on. `may_be_alone` False: a token alone in its pass is known
    to be computed in another way.
    """
    reader = _Reader(context, products, n_vocab)
    reader.read(_BUSY, (2,), PAIRED)
    whole = reader.read(_HELD, (N_TRIED,), PAIRED)
    for passes in (ANY, PAIRED) if may_be_alone else (PAIRED,):
        if reader.read(_HELD, _CUTS, passes) == whole:
            return passes
    return SINGLE


@dataclass(frozen=True, slots=True)
class _Reading:
    """What came of a text: each product for each token, the last logits, the state."""

    products: dict[int, list[int]]
    logits: bytes
    state: bytes


class _Reader:
    """Reads one text in any cutting and tells what came of it."""

    def __init__(self, context: Any, products: Products, n_vocab: int) -> None:
        self._context = context
        self._products = products
        self._n_vocab = n_vocab
        self._buffer = BatchBuffer(N_TRIED)
        self._text = tuple((place * 7919 + 31) % n_vocab for place in range(N_TRIED))
        api.llama_memory_clear(api.llama_get_memory(context), True)

    def read(self, sequence: int, cuts: Sequence[int], passes: Passes) -> _Reading:
        """Read the text anew. A lone token has a pad beside it: always, or every other time where
        it may be alone.
        """
        for emptied in (_PAD, sequence):
            _remove(self._context, emptied, 0)
        products: dict[int, list[int]] = {}
        start = pads = lone = 0
        for count in cuts:
            part = self._text[start : start + count]
            chunks = [Chunk(sequence, start, part, wants_logits=True)]
            lone += count == 1
            if count == 1 and (passes.least > 1 or lone % 2 == 0):
                chunks.insert(0, Chunk(_PAD, pads, self._text[:1], wants_logits=True))
                pads += 1
            digests, logits = self._evaluate(chunks)
            for place, tokens in enumerate(digests):
                products.setdefault(place, []).extend(tokens)
            start += count
        state = _saved(self._context, sequence, _WHOLE)
        return _Reading(products, logits, state.tobytes())

    def _evaluate(self, chunks: list[Chunk]) -> tuple[Digests, bytes]:
        """Return what came of the last chunk; all its tokens are outputs, to be compared."""
        n_own = len(chunks[-1].tokens)
        batch, outputs = self._buffer.fill(chunks, n_own)
        self._products.begin(batch.n_tokens, n_own)
        code = api.llama_decode(self._context, batch)
        digests = self._products.end()
        if code:
            raise BackendError(f"the model cannot evaluate a text: {library.last_complaint()}")
        row = api.llama_get_logits_ith(self._context, outputs[-1])
        return digests, np.ctypeslib.as_array(row, (self._n_vocab,)).tobytes()


# ---- pads ----------------------------------------------------------------------------------------


def companions(speaking: Collection[int], busy: Collection[int], n_sequences: int) -> list[int]:
    """Return the sequences that get a pad, so that each one that speaks has a neighbour.

    `speaking` bring one token each, `busy` hold something. llama.cpp puts sequences of consecutive
    ids into one pass. Empty neighbours come first, since taking a pad away from a busy one means
    to restore its state; of two, the one that joins two passes.
    """
    joined = set(speaking)

    def cost(neighbour: int, own: int) -> tuple[bool, bool]:
        return neighbour in busy, 2 * neighbour - own not in joined

    for own in sorted(speaking):
        around = [other for other in (own - 1, own + 1) if 0 <= other < n_sequences]
        if not joined.intersection(around):
            joined.add(min(around, key=lambda other: cost(other, own)))
    return sorted(joined.difference(speaking))


class ExactEvaluation:
    """Evaluates chunks in passes that give the same bits, with pads where a token would be alone.

    Between two calls no sequence holds a pad.
    """

    def __init__(self, context: Any, passes: Passes, memory: MemoryKind) -> None:
        self._context = context
        self._memory: MemoryKind = memory
        self._n_sequences = int(api.llama_n_seq_max(context))
        self.passes = passes

    def evaluate(
        self, chunks: Sequence[Chunk], lengths: Mapping[int, int], evaluate: Evaluate
    ) -> Rows:
        """Evaluate chunks that hold one token each, or one chunk, by calls of `evaluate`.

        `lengths` are those of all sequences that hold something. Rows are of the last call. What
        raises leaves pads behind only where every state is lost anyway.
        """
        if self.passes == SINGLE:
            return self._one_by_one(chunks, evaluate)
        pads = self._pads(chunks, lengths)
        kept = {pad.sequence: self._kept(pad.sequence) for pad in pads if pad.start}
        # where one row is wanted all are: a single one would be alone in the last layers
        wanted = any(chunk.wants_logits for chunk in chunks)
        batch = [replace(chunk, wants_logits=wanted) for chunk in (*chunks, *pads)]
        batch.sort(key=lambda chunk: chunk.sequence)  # neighbours share a pass only in this order
        rows = evaluate(batch, self.passes.least)
        for pad in pads:
            self._take_away(pad, kept.get(pad.sequence))
        return rows

    def _one_by_one(self, chunks: Sequence[Chunk], evaluate: Evaluate) -> Rows:
        """Give every token a call: of two sequences llama.cpp would make one pass."""
        (chunk,) = chunks
        last = chunk.end - 1
        rows: Rows = {}
        for position, token in enumerate(chunk.tokens, chunk.start):
            wanted = chunk.wants_logits and position == last
            try:
                rows = evaluate([Chunk(chunk.sequence, position, (token,), wanted)], 1)
            except (PoolFull, InvalidArgument) as refusal:
                raise DecodeFailed(f"a chunk was evaluated in part: {refusal}") from refusal
        return rows

    def _pads(self, chunks: Sequence[Chunk], lengths: Mapping[int, int]) -> list[Chunk]:
        if self.passes.least == 1 or any(len(chunk.tokens) > 1 for chunk in chunks):
            return []
        speaking = {chunk.sequence for chunk in chunks}
        return [
            Chunk(sequence, lengths.get(sequence, 0), (0,), wants_logits=True)
            for sequence in companions(speaking, lengths, self._n_sequences)
        ]

    def _kept(self, sequence: int) -> NDArray[np.uint8] | None:
        """Return the state that a pad would change; rows are only added to."""
        flags = _STATE_FLAGS.get(self._memory)
        return None if flags is None else _saved(self._context, sequence, flags)

    def _take_away(self, pad: Chunk, kept: NDArray[np.uint8] | None) -> None:
        if kept is not None:
            _restore(self._context, pad.sequence, kept, _STATE_FLAGS[self._memory])
        if kept is None or self._memory == "hybrid":
            _remove(self._context, pad.sequence, pad.start)


# ---- llama.cpp -----------------------------------------------------------------------------------


def _remove(context: Any, sequence: int, start: int) -> None:
    """Empty a sequence from a position on, behind its recurrent state if it has one."""
    if not api.llama_memory_seq_rm(api.llama_get_memory(context), sequence, start or -1, -1):
        raise DecodeFailed(f"llama.cpp would not empty sequence {sequence} from {start} on")


def _saved(context: Any, sequence: int, flags: int) -> NDArray[np.uint8]:
    size = int(api.llama_state_seq_get_size_ext(context, sequence, flags))
    room = np.empty(size, np.uint8)
    if api.llama_state_seq_get_data_ext(context, _bytes(room), size, sequence, flags) != size:
        raise BackendError(f"llama.cpp would not export the state of sequence {sequence}")
    return room


def _restore(context: Any, sequence: int, state: NDArray[np.uint8], flags: int) -> None:
    size = state.nbytes
    if api.llama_state_seq_set_data_ext(context, _bytes(state), size, sequence, flags) != size:
        raise DecodeFailed(f"llama.cpp would not take back the state of sequence {sequence}")


def _bytes(array: NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
