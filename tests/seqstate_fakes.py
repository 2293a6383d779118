"""Two things to test sequence memory on: a fake llama.cpp, and a bare context on the real one.

`FakeLlama` offers the nine functions as C function pointers and keeps llama.cpp's rules: cells
shared by copies, one recurrent cell per sequence with copy on write, a state that cannot be cut,
an import that empties its target first and may fail half-way, zeroing by multiplication (a NaN
survives), a sliding window with a second cache of its own, which alone tells positions. Where
llama.cpp would abort the process, it notes the call in `violations`.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = 0xAF143CD8
CONTEXT, MEMORY = 0x1000, 0x2000
N_LAYER = 3
ROW_BYTES = 16  # per attention layer and kind, two layers
STATE_ROWS = (12, 40)  # floats of R and S unless a test asks for others

_p, _i32, _size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
PROTOTYPES: dict[str, Any] = {
    "llama_get_memory": ctypes.CFUNCTYPE(_p, _p),
    "llama_memory_seq_cp": ctypes.CFUNCTYPE(None, _p, _i32, _i32, _i32, _i32),
    "llama_memory_seq_rm": ctypes.CFUNCTYPE(ctypes.c_bool, _p, _i32, _i32, _i32),
    "llama_memory_seq_pos_min": ctypes.CFUNCTYPE(_i32, _p, _i32),
    "llama_memory_seq_pos_max": ctypes.CFUNCTYPE(_i32, _p, _i32),
    "llama_memory_clear": ctypes.CFUNCTYPE(None, _p, ctypes.c_bool),
    "llama_state_seq_get_size_ext": ctypes.CFUNCTYPE(_size, _p, _i32, ctypes.c_uint32),
    "llama_state_seq_get_data_ext": ctypes.CFUNCTYPE(_size, _p, _p, _size, _i32, ctypes.c_uint32),
    "llama_state_seq_set_data_ext": ctypes.CFUNCTYPE(_size, _p, _p, _size, _i32, ctypes.c_uint32),
}


class NoCells(Exception):
    """The fake's attention cells are all taken."""


@dataclass
class Row:
    """One attention cell in use."""

    position: int
    data: bytes
    sequences: set[int] = field(default_factory=set)


@dataclass
class Cache:
    """The attention cells of all layers that look back equally far; `window` 0 is to the start."""

    n_cells: int
    window: int = 0
    rows: list[Row] = field(default_factory=list)

    def held(self, sequence: int) -> list[Row]:
        return [row for row in self.rows if sequence in row.sequences]

    def visible(self, sequence: int) -> list[Row]:
        held = self.held(sequence)
        if not self.window or not held:
            return held
        last = max(row.position for row in held)
        return [row for row in held if last - row.position < self.window]

    def add(self, sequence: int, position: int, data: bytes) -> None:
        if len(self.rows) >= self.n_cells:
            raise NoCells
        self.rows.append(Row(position, data, {sequence}))

    def remove(self, sequence: int, start: int, end: int) -> None:
        for row in self.held(sequence):
            if start <= row.position < end:
                row.sequences.discard(sequence)
        self.rows = [row for row in self.rows if row.sequences]

    def share(self, source: int, target: int, start: int, end: int) -> None:
        for row in self.held(source):
            if start <= row.position < end:
                row.sequences.add(target)

    def bounds(self, sequence: int) -> tuple[int, int]:
        positions = [row.position for row in self.held(sequence)]
        return min(positions, default=-1), max(positions, default=-1)

    def written(self, sequence: int) -> list[bytes]:
        rows = self.visible(sequence)
        parts = [struct.pack("<II", 1, len(rows))]
        parts += [struct.pack("<iIi", row.position, 1, sequence) for row in rows]
        for half in range(2 if rows else 0):
            parts.append(struct.pack("<iQ", 1, ROW_BYTES))
            parts += [row.data[half * ROW_BYTES : (half + 1) * ROW_BYTES] for row in rows]
        return parts

    def read(self, sequence: int, reader: Reader) -> None:
        _, n_rows = reader.take("<II")
        if not n_rows:
            return
        self.remove(sequence, 0, 2**31)
        if len(self.rows) + n_rows > self.n_cells:
            raise NoCells
        positions = [reader.take("<iIi")[0] for _ in range(n_rows)]
        halves = []
        for _ in range(2):
            reader.take("<iQ")
            halves.append([reader.raw(ROW_BYTES) for _ in range(n_rows)])
        for position, key, value in zip(positions, *halves, strict=True):
            self.rows.append(Row(position, key + value, {sequence}))


class FakeLlama:
    """A context of one kind of memory; `functions` and `context` are what SequenceMemory wants."""

    def __init__(
        self,
        memory: str,
        *,
        n_sequences: int = 6,
        n_cells: int = 64,
        window: int = 0,
        state_rows: tuple[int, ...] = STATE_ROWS,
    ) -> None:
        self.has_rows = memory != "recurrent"
        self.has_state = memory != "attention"
        self.n_sequences = n_sequences
        self.caches = [Cache(n_cells)] if self.has_rows else []
        if window:
            self.caches.append(Cache(n_cells, window))
        self.state_rows = state_rows
        self.states = np.zeros((n_sequences, sum(state_rows)), np.float32)
        self.state_position = [-1] * n_sequences
        self.tail: list[int | None] = [None] * n_sequences
        self.head = 0
        self.violations: list[str] = []
        self.calls: list[str] = []
        self.refuse_imports = 0
        self.short_exports = 0
        self.on_call: Callable[[str], None] | None = None
        self.context = CONTEXT
        self._pointers = {
            name: prototype(self._wrapped(name, getattr(self, name.removeprefix("llama_"))))
            for name, prototype in PROTOTYPES.items()
        }
        self.functions = {
            name: ctypes.cast(pointer, _p).value or 0 for name, pointer in self._pointers.items()
        }

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if self.on_call is not None:
                self.on_call(name)
            return method(*arguments)

        return call

    @property
    def rows(self) -> list[Row]:
        return self.caches[0].rows

    # -- what a test does --

    def decode(self, sequence: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            position = self.length(sequence)
            self._add_row(sequence, position, token)
            if self.has_state:
                self._advance(sequence, position, token)

    def length(self, sequence: int) -> int:
        cell = self.tail[sequence]
        if cell is not None:
            return self.state_position[cell] + 1
        return 1 + self.caches[0].bounds(sequence)[1] if self.caches else 0

    def logits(self, sequence: int) -> str:
        """A hash of everything a next token would depend on."""
        digest = hashlib.blake2b()
        for cache in self.caches:
            for row in sorted(cache.visible(sequence), key=lambda row: row.position):
                digest.update(struct.pack("<i", row.position) + row.data)
        cell = self.tail[sequence]
        if cell is not None:
            digest.update(self.states[cell].tobytes())
        return digest.hexdigest()

    def row_positions(self, sequence: int) -> list[int]:
        return sorted(row.position for row in self.caches[0].held(sequence))

    def poison(self, sequence: int) -> None:
        cell = self.tail[sequence]
        assert cell is not None
        self.states[cell, 3] = np.nan

    # -- attention --

    def _add_row(self, sequence: int, position: int, token: int) -> None:
        key = struct.pack("<ii", position, token)
        data = hashlib.blake2b(key, digest_size=2 * ROW_BYTES).digest()
        for cache in self.caches:
            cache.add(sequence, position, data)

    # -- recurrent --

    def _sharers(self, cell: int) -> list[int]:
        return [sequence for sequence, tail in enumerate(self.tail) if tail == cell]

    def _own_cell(self, sequence: int, keep: bool) -> int:
        """Give the sequence a cell of its own; a new one begins as the old content times 0."""
        old = self.tail[sequence]
        if old is not None and self._sharers(old) == [sequence]:
            return old
        order = [(self.head + i) % self.n_sequences for i in range(self.n_sequences)]
        cell = next(cell for cell in order if not self._sharers(cell))
        if old is not None:
            self.states[cell] = self.states[old]
        elif not keep:
            self.states[cell] *= 0
        self.tail[sequence] = cell
        self.head = cell
        return cell

    def _advance(self, sequence: int, position: int, token: int) -> None:
        cell = self._own_cell(sequence, keep=False)
        seed = np.arange(sum(self.state_rows), dtype=np.float32) + token
        self.states[cell] = self.states[cell] * np.float32(0.5) + np.sin(seed)
        self.state_position[cell] = position

    def _drop_state(self, sequence: int) -> None:
        cell = self.tail[sequence]
        self.tail[sequence] = None
        if cell is not None and not self._sharers(cell):
            self.state_position[cell] = -1
            self.head = min(self.head, cell)

    # -- the nine functions --

    def _bad(self, name: str, *sequences: int) -> bool:
        wrong = [sequence for sequence in sequences if not 0 <= sequence < self.n_sequences]
        if wrong:
            self.violations.append(f"{name}{sequences}")
        return bool(wrong)

    def get_memory(self, context: int) -> int:
        if context != CONTEXT:
            self.violations.append(f"get_memory({context})")
        return MEMORY

    def memory_seq_cp(self, _: int, source: int, target: int, p0: int, p1: int) -> None:
        if self._bad("seq_cp", source, target):
            return
        end = p1 if p1 >= 0 else 2**31
        for cache in self.caches:
            cache.share(source, target, max(p0, 0), end)
        if self.has_state:
            self._drop_state(target)
            self.tail[target] = self.tail[source]

    def memory_seq_rm(self, _: int, sequence: int, p0: int, p1: int) -> bool:
        if self._bad("seq_rm", sequence):
            return False
        start, end = max(p0, 0), p1 if p1 >= 0 else 2**31
        cell = self.tail[sequence]
        if cell is not None:
            position = self.state_position[cell]
            if 0 < start <= position < end:
                return False
            if start <= position < end:
                self._drop_state(sequence)
        for cache in self.caches:
            cache.remove(sequence, start, end)
        return True

    def _bounds(self, sequence: int) -> list[tuple[int, int]]:
        bounds = [self.caches[-1].bounds(sequence)] if self.has_rows else []
        if self.has_state:
            cell = self.tail[sequence]
            bounds.append((-1, -1) if cell is None else (self.state_position[cell],) * 2)
        return bounds

    def memory_seq_pos_min(self, _: int, sequence: int) -> int:
        if self._bad("pos_min", sequence):
            return -1
        return max(low for low, _ in self._bounds(sequence))

    def memory_seq_pos_max(self, _: int, sequence: int) -> int:
        if self._bad("pos_max", sequence):
            return -1
        return min(high for _, high in self._bounds(sequence))

    def memory_clear(self, _: int, data: bool) -> None:
        for cache in self.caches:
            cache.rows = []
        self.tail = [None] * self.n_sequences
        self.head = 0
        if data:
            self.states[:] = 0

    def state_seq_get_size_ext(self, _: int, sequence: int, flags: int) -> int:
        if self._bad("get_size", sequence):
            return 0
        return len(self._written(sequence, flags))

    def state_seq_get_data_ext(
        self, _: int, room: int, size: int, sequence: int, flags: int
    ) -> int:
        if self._bad("get_data", sequence):
            return 0
        state = self._written(sequence, flags)
        if self.short_exports:
            self.short_exports -= 1
            return len(state) - 1
        if len(state) > size:
            return 0
        ctypes.memmove(room, state, len(state))
        return len(state)

    def state_seq_set_data_ext(
        self, _: int, bytes_: int, size: int, sequence: int, flags: int
    ) -> int:
        if self._bad("set_data", sequence):
            return 0
        state = ctypes.string_at(bytes_, size)
        try:
            return self._read(sequence, state, flags)
        except (struct.error, ValueError, NoCells):
            return 0

    def _written(self, sequence: int, flags: int) -> bytes:
        parts = [struct.pack("<Ii", MAGIC, sequence)]
        if self.has_rows and not (flags and self.has_state):
            for cache in self.caches:
                parts += cache.written(sequence)
        if self.has_state:
            parts += self._written_state(self.tail[sequence])
        return b"".join(parts)

    def _written_state(self, cell: int | None) -> list[bytes]:
        parts = [struct.pack("<I", 0 if cell is None else 1)]
        if cell is not None:
            parts.append(struct.pack("<iI", self.state_position[cell], 0))
        parts.append(struct.pack("<II", 0, N_LAYER))
        at = 0
        for floats in self.state_rows:
            parts.append(struct.pack("<iQ", 0, 4 * floats))
            if cell is not None:
                parts.append(self.states[cell, at : at + floats].tobytes())
            at += floats
        return parts

    def _read(self, sequence: int, state: bytes, flags: int) -> int:
        reader = Reader(state)
        if reader.take("<Ii")[0] != MAGIC:
            raise ValueError
        if self.has_rows and not (flags and self.has_state):
            for cache in self.caches:
                cache.read(sequence, reader)
        if self.refuse_imports:
            self.refuse_imports -= 1
            return 0
        if self.has_state:
            self._read_state(sequence, reader)
        return reader.at

    def _read_state(self, sequence: int, reader: Reader) -> None:
        (n_cells,) = reader.take("<I")
        self._drop_state(sequence)
        cell = None
        if n_cells:
            (position, _) = reader.take("<iI")
            cell = self._own_cell(sequence, keep=True)
            self.state_position[cell] = position
        reader.take("<II")
        at = 0
        for floats in self.state_rows:
            if reader.take("<iQ") != (0, 4 * floats):
                raise ValueError
            if cell is not None:
                self.states[cell, at : at + floats] = np.frombuffer(reader.raw(4 * floats), "<f4")
            at += floats


class Reader:
    """Bytes taken from the front."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.raw(struct.calcsize(form)))

    def raw(self, size: int) -> bytes:
        piece = self.data[self.at : self.at + size]
        if len(piece) < size:
            raise ValueError("state ended early")
        self.at += size
        return piece


class RealContext:
    """A llama.cpp context with nothing around it: decode tokens, look at logits."""

    def __init__(self, path: Path, *, n_ctx: int = 512, n_sequences: int = 8) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        _quieten(llama_cpp)
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        assert self.model
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = n_ctx
        options.n_batch = options.n_ubatch = 63  # below the tiles of flash attention: exact
        options.n_seq_max = options.n_outputs_max = n_sequences
        options.n_threads = options.n_threads_batch = 2
        options.flash_attn_type = 1
        options.kv_unified = True
        options.swa_full = True
        self.handle = llama_cpp.llama_init_from_model(self.model, options)
        assert self.handle
        self.n_sequences = n_sequences
        self.n_ctx = int(llama_cpp.llama_n_ctx(self.handle))
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.n_layer = int(llama_cpp.llama_model_n_layer(self.model))
        self.batch = llama_cpp.llama_batch_init(63, 0, 1)
        self.lengths = [0] * n_sequences

    @property
    def memory(self) -> str:
        if self.api.llama_model_is_hybrid(self.model):
            return "hybrid"
        return "recurrent" if self.api.llama_model_is_recurrent(self.model) else "attention"

    @property
    def functions(self) -> dict[str, int]:
        library = self.api.llama_cpp._lib
        return {name: ctypes.cast(getattr(library, name), _p).value or 0 for name in PROTOTYPES}

    @property
    def context(self) -> int:
        return int(ctypes.cast(self.handle, _p).value or 0)

    def decode(self, sequence: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Feed tokens from where `lengths` says the sequence ends; the last one's logits."""
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = self.lengths[sequence] + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = i == len(tokens) - 1
        code = self.api.llama_decode(self.handle, self.batch)
        assert code == 0, code
        self.lengths[sequence] += len(tokens)
        row = self.api.llama_get_logits_ith(self.handle, len(tokens) - 1)
        return np.ctypeslib.as_array(row, (self.n_vocab,)).copy()

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.handle)
        self.api.llama_model_free(self.model)


_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_keep_quiet = _LOG_CALLBACK(lambda level, text, data: None)


def _quieten(llama_cpp: Any) -> None:
    llama_cpp.llama_log_set(_keep_quiet, ctypes.c_void_p(0))
