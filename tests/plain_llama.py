"""What does llama.cpp say when nothing of ours is in between?

The simplest loop over its C interface: one context, whole prompts, greedy. A reference for tests,
so it shares no code with `orchestrator.runtime`.

Flash attention is on and weights are not repacked: with micro-batches below 64 tokens the logits
then do not depend on how a prompt was cut (and ggml's AMX kernels, which some virtual machines
announce and do not run, stay out of it).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np
import numpy.typing as npt

N_BATCH = 48
RECURRENT_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
END = 2  # after the magic number and the sequence id, both of 4 bytes

Logits = npt.NDArray[np.float32]


@api.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: object) -> None:
    """llama.cpp keeps the pointer, so this must live as long as the module."""


class Plain:
    """A model with its context; positions are counted per sequence. Use `opened`."""

    def __init__(self, model: Any, context: Any, n_batch: int) -> None:
        self.model, self.context, self.n_batch = model, context, n_batch
        self.vocabulary = api.llama_model_get_vocab(model)
        self.n_vocab: int = api.llama_vocab_n_tokens(self.vocabulary)
        self.lengths: dict[int, int] = {}

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        self.lengths.clear()

    def feed(self, tokens: Sequence[int], sequence: int = 0) -> Logits:
        """Evaluate `tokens` behind what `sequence` holds; return the last logits."""
        for start in range(0, len(tokens), self.n_batch):
            self._decode(tokens[start : start + self.n_batch], sequence)
        row = api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(row, (self.n_vocab,)).copy()

    def _decode(self, tokens: Sequence[int], sequence: int) -> None:
        position = self.lengths.get(sequence, 0)
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = place == len(tokens) - 1
        code = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        assert code == 0
        self.lengths[sequence] = position + len(tokens)

    def step(self, latest: Mapping[int, int]) -> dict[int, int]:
        """Evaluate the latest token of each sequence in one call; return the likeliest next."""
        batch = api.llama_batch_init(len(latest), 0, 1)
        batch.n_tokens = len(latest)
        for place, (sequence, token) in enumerate(latest.items()):
            batch.token[place], batch.pos[place] = token, self.lengths[sequence]
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = True
            self.lengths[sequence] += 1
        code = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        assert code == 0
        rows = (api.llama_get_logits_ith(self.context, place) for place in range(len(latest)))
        best = (int(np.ctypeslib.as_array(row, (self.n_vocab,)).argmax()) for row in rows)
        return dict(zip(latest, best, strict=True))

    def reply(self, logits: Logits, n_token: int, sequence: int = 0) -> list[int]:
        """Continue greedily from `logits` until the end of the turn or `n_token` tokens."""
        tokens: list[int] = []
        while len(tokens) < n_token:
            tokens.append(int(logits.argmax()))
            if api.llama_vocab_is_eog(self.vocabulary, tokens[-1]):
                break
            logits = self.feed(tokens[-1:], sequence)
        return tokens

    def tokens(self, text: str) -> list[int]:
        raw = text.encode()
        buffer = (ctypes.c_int32 * (len(raw) + 8))()
        size = len(buffer)
        n = api.llama_tokenize(self.vocabulary, raw, len(raw), buffer, size, False, True)
        return buffer[:n]

    def text(self, tokens: Sequence[int]) -> str:
        buffer = ctypes.create_string_buffer(256)
        pieces = []
        for token in tokens:
            n = api.llama_token_to_piece(self.vocabulary, token, buffer, 256, 0, True)
            pieces.append(buffer.raw[:n])
        return b"".join(pieces).decode("utf-8", "replace")

    def save_recurrent(self, sequence: int = 0) -> bytes:
        size = api.llama_state_seq_get_size_ext(self.context, sequence, RECURRENT_ONLY)
        buffer = (ctypes.c_uint8 * size)()
        api.llama_state_seq_get_data_ext(self.context, buffer, size, sequence, RECURRENT_ONLY)
        return bytes(buffer)

    def load_recurrent(self, state: bytes, sequence: int = 0) -> None:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        flags = RECURRENT_ONLY
        assert api.llama_state_seq_set_data_ext(self.context, buffer, len(state), sequence, flags)


def zeroed(state: bytes) -> bytes:
    """A recurrent state of the same shape and position in which every number is 0.

    magic u32, sequence i32 │ cells u32, position i32, u32 │ u32, layers u32 │ type i32,
    row bytes u64, row │ type, row bytes, row │ …
    """
    blank = bytearray(state)
    at = 28
    while at < len(blank):
        length = int.from_bytes(blank[at + 4 : at + 12], "little")
        at += 12
        blank[at : at + length] = bytes(length)
        at += length
    assert at == len(blank)
    return bytes(blank)


@contextmanager
def opened(
    path: Path,
    n_context: int = 2048,
    n_thread: int = 2,
    *,
    n_batch: int = N_BATCH,
    n_seq: int = 2,
    type_v: int = 1,
) -> Iterator[Plain]:
    """Load a model; `type_v` is a ggml type number, 1 for F16.

    One thread suits the tiny ones: two would wait for each other on every node.
    """
    api.llama_log_set(_quiet, ctypes.c_void_p(0))
    settings = api.llama_model_default_params()
    settings.use_extra_bufts = False
    settings.n_gpu_layers = 0
    model = api.llama_model_load_from_file(str(path).encode(), settings)
    assert model, path
    shape = api.llama_context_default_params()
    shape.n_ctx, shape.n_batch, shape.n_ubatch, shape.n_seq_max = n_context, n_batch, n_batch, n_seq
    shape.type_v = type_v
    shape.n_threads = shape.n_threads_batch = n_thread
    shape.kv_unified, shape.flash_attn_type = True, 1
    context = api.llama_init_from_model(model, shape)
    assert context, path
    try:
        yield Plain(model, context, n_batch)
    finally:
        api.llama_free(context)
        api.llama_model_free(model)
