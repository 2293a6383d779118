"""How is a sequence of llama.cpp copied, cut, saved and restored without killing the process?

This is the specification, written with ctypes; `orchestrator._seqstate` is the same in C: the same
names, checks, messages and bytes. The test suite runs over both. What a saved state looks like is
drawn in `seqstate_format`, what may be passed stands in `seqstate_arguments`.

It knows sequence ids, positions and opaque state bytes. It does not know models, decoding, which
tokens a sequence ought to hold, or what is worth keeping.

Invariants:
- llama.cpp never sees an argument that was not checked: a wrong id is a C assertion there.
- After `StateRefused` or `PoolFull` from a restore the sequence is empty; after `InvalidArgument`
  and `TypeError` nothing was changed.
- A recurrent state never stands over rows that are not its own: what would not match is dropped.
- A scratch sequence is empty before and after the call that was lent it, whatever happens.
- One call at a time: a second thread or a re-entrant call is refused, not queued.

Slices. llama.cpp exports whole sequences only. But a copy of positions [start, end) shares cells
with its source and costs no data, so the slice of a sequence is the export of such a copy, made in
a scratch sequence and stripped of the recurrent state that comes along with every copy. On the way
back the slice goes into the scratch sequence, whose cells are then shared with the target: their
union is the target's rows and the slice's, as long as the positions are disjoint. Measured bit for
bit on every tiny architecture, a sliding window included: a slice keeps of the window what is
within reach of its own end, so all that the last position sees is in one slice or another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.errors import BackendError, InvalidArgument, PoolFull, StateRefused
from orchestrator.runtime.seqstate_arguments import (
    as_address,
    as_bytes,
    as_identity,
    as_number,
    as_tokens,
    as_truth,
    as_view,
    pointer,
)
from orchestrator.runtime.seqstate_files import replace_file, whole_state
from orchestrator.runtime.seqstate_format import (
    FORMAT_VERSION,
    HEADER_LENGTH,
    INT32_MAX,
    KINDS,
    Header,
    Identity,
    Layout,
    blob_start,
    check_belongs,
    check_form,
    check_slice,
    check_tokens,
    parse,
    refuse,
    seal,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, StrOrBytesPath, WriteableBuffer

__all__ = [
    "FORMAT_VERSION",
    "FUNCTIONS",
    "HEADER_LENGTH",
    "Header",
    "Identity",
    "SequenceMemory",
    "describe",
]

_MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
_WHOLE = 0  # llama_state_seq_flags
_STATE_ONLY = 1
_EMPTY = (-1, -1)

_p, _i32, _u64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_PROTOTYPES: dict[str, Any] = {
    "llama_get_memory": ctypes.CFUNCTYPE(_p, _p),
    "llama_memory_seq_cp": ctypes.CFUNCTYPE(None, _p, _i32, _i32, _i32, _i32),
    "llama_memory_seq_rm": ctypes.CFUNCTYPE(ctypes.c_bool, _p, _i32, _i32, _i32),
    "llama_memory_seq_pos_min": ctypes.CFUNCTYPE(_i32, _p, _i32),
    "llama_memory_seq_pos_max": ctypes.CFUNCTYPE(_i32, _p, _i32),
    "llama_memory_clear": ctypes.CFUNCTYPE(None, _p, ctypes.c_bool),
    "llama_state_seq_get_size_ext": ctypes.CFUNCTYPE(_u64, _p, _i32, ctypes.c_uint32),
    "llama_state_seq_get_data_ext": ctypes.CFUNCTYPE(_u64, _p, _p, _u64, _i32, ctypes.c_uint32),
    "llama_state_seq_set_data_ext": ctypes.CFUNCTYPE(_u64, _p, _p, _u64, _i32, ctypes.c_uint32),
}
FUNCTIONS = tuple(_PROTOTYPES)


def describe(blob: ReadableBuffer) -> Header:
    """What a saved state says of itself, after every byte was verified.

    Raises `StateRefused` as a restore does, for what can be told without a context.
    """
    return parse(as_bytes("blob", as_view("blob", blob)))


class SequenceMemory:
    """The sequences of one llama.cpp context.

    `functions` gives the addresses of `FUNCTIONS` in the library that is already loaded, `context`
    the address of the `llama_context`; both must outlive this object (see `close`). `n_sequences`
    is the context's `n_seq_max`. `memory` is ``"attention"``, ``"hybrid"`` or ``"recurrent"``. A
    context with recurrent states must have an empty sequence when this is made.

    Every method raises `InvalidArgument` or `TypeError` before anything is changed, and
    `BackendError` when llama.cpp does not do what it was asked.
    """

    def __init__(
        self,
        functions: Mapping[str, int],
        context: int,
        *,
        n_sequences: int,
        memory: str,
        identity: Identity,
    ) -> None:
        if not isinstance(memory, str):
            raise TypeError(f"memory must be a str, not {type(memory).__name__}")
        if memory not in KINDS:
            raise InvalidArgument('memory must be "attention", "hybrid" or "recurrent"')
        self._kind = memory
        self._n_sequences = as_number("n_sequences", n_sequences, 1, _MOST_SEQUENCES)
        self._identity = as_identity(identity)
        self._context = as_address("context", context)
        self._calls = _resolved(functions)
        self._lock = threading.Lock()
        self._closed = False
        self._memory = self._calls["llama_get_memory"](self._context)
        if not self._memory:
            raise InvalidArgument("the context has no memory; its model keeps no sequences")
        self._state_flags = _STATE_ONLY if memory == "hybrid" else _WHOLE
        self._empty = b"" if memory == "attention" else self._empty_state()
        self._layout = Layout.of_empty(self._empty)

    # -- what it is asked --

    def close(self) -> None:
        """Forget the context; every later call raises `BackendError`. Nothing is cleared."""
        if self._closed:
            return
        with self._owned():
            self._closed = True

    def positions(self, sequence: int) -> tuple[int, int]:
        """First and last position held, -1 when empty.

        Rows without a recurrent state show as ``(0, -1)``, a hybrid sequence as its last position
        twice; how far its rows reach beyond the state is not visible.
        """
        sequence = self._id("sequence", sequence)
        with self._owned():
            return self._positions(sequence)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Let the empty `target` share what `source` holds, or its rows [0, length) only.

        No data is copied. On a hybrid a length below the state's drops the state from the target,
        which then holds rows only; rows beyond the state never come along.
        """
        source = self._id("source", source)
        target = self._id("target", target)
        if length is not None:
            length = as_number("length", length, 1, INT32_MAX)
        with self._owned():
            self._copy(source, target, length)

    def clear(self, sequence: int) -> None:
        """Empty one sequence."""
        sequence = self._id("sequence", sequence)
        with self._owned():
            self._clear(sequence)

    def clear_all(self) -> None:
        """Empty every sequence and overwrite the memory with zeros."""
        with self._owned():
            self._calls["llama_memory_clear"](self._memory, True)
            for sequence in range(self._n_sequences):
                self._demand_empty(sequence)

    def cut(self, sequence: int, length: int) -> None:
        """Keep the rows [0, length) and drop those above.

        Where there is a recurrent state it must lie below `length`: it cannot be cut. Rows of a
        sliding window that no longer begin at 0 cannot be cut either.
        """
        sequence = self._id("sequence", sequence)
        length = as_number("length", length, 0, INT32_MAX)
        with self._owned():
            self._cut(sequence, length)

    def strip(self, sequence: int) -> None:
        """Drop the recurrent state of a hybrid sequence and keep its rows."""
        sequence = self._id("sequence", sequence)
        if self._kind != "hybrid":
            raise InvalidArgument(f"only hybrid memory can be stripped, this is {self._kind}")
        with self._owned():
            if self._positions(sequence) == _EMPTY:
                raise InvalidArgument(f"sequence {sequence} is empty")
            self._strip(sequence)

    def scrub(self, sequence: int) -> None:
        """Empty a sequence whose state holds NaN, so that its cell poisons nobody.

        Zeroing a new state multiplies by 0, which keeps a NaN, and llama.cpp picks the cell of an
        import itself. So every sequence is given a cell of its own: those with a state import what
        they hold, all others zeros. Then no cell is left unwritten. The others end as they were;
        the cost is one import per sequence, for an event that should not happen.
        """
        sequence = self._id("sequence", sequence)
        with self._owned():
            if self._kind != "attention":
                self._overwrite_cells(sequence)
            self._clear(sequence)

    def state_size(self, sequence: int, *, rows: bool = True) -> int:
        """Bytes that `save` would give now, header and token ids included."""
        sequence = self._id("sequence", sequence)
        rows = as_truth("rows", rows)
        with self._owned():
            held = self._held(sequence, rows)
            return HEADER_LENGTH + 4 * held + self._payload_size(sequence, rows)

    def save(
        self, sequence: int, tokens: Sequence[int] | ReadableBuffer, *, rows: bool = True
    ) -> bytes:
        """The sequence as bytes that a restore can verify. `tokens` are the ids it was fed.

        ``rows=False`` leaves the rows out, where there are any: a snapshot, to be restored over
        rows of the same tokens. Of attention memory it holds nothing and only checks them. Raises
        `StateRefused` with field ``"finite"`` rather than keep a NaN.
        """
        sequence, fed, rows = self._save_arguments(sequence, tokens, rows)
        with self._owned():
            blob = bytearray(self._save_size(sequence, fed, rows))
            self._fill(memoryview(blob), sequence, fed, rows)
            return bytes(blob)

    def save_into(
        self,
        sequence: int,
        tokens: Sequence[int] | ReadableBuffer,
        buffer: WriteableBuffer,
        *,
        rows: bool = True,
    ) -> int:
        """As `save`, into a writable buffer; the number of bytes written."""
        sequence, fed, rows = self._save_arguments(sequence, tokens, rows)
        view = as_view("buffer", buffer)
        room = as_bytes("buffer", view)
        if view.readonly:
            raise InvalidArgument("buffer is read-only, needed is a writable one")
        with self._owned():
            size = self._save_size(sequence, fed, rows)
            if len(room) < size:
                raise InvalidArgument(f"buffer has {len(room)} bytes, the state needs {size}")
            self._fill(room[:size], sequence, fed, rows)
            return size

    def save_file(
        self,
        sequence: int,
        tokens: Sequence[int] | ReadableBuffer,
        path: StrOrBytesPath,
        *,
        rows: bool = True,
    ) -> int:
        """As `save`, into a file that is replaced whole or not at all; its size in bytes."""
        sequence, fed, rows = self._save_arguments(sequence, tokens, rows)
        target = os.fsencode(path)
        with self._owned():
            blob = bytearray(self._save_size(sequence, fed, rows))
            self._fill(memoryview(blob), sequence, fed, rows)
            replace_file(target, blob)
            return len(blob)

    def save_rows(
        self,
        sequence: int,
        start: int,
        end: int,
        tokens: Sequence[int] | ReadableBuffer,
        *,
        scratch: int,
    ) -> bytes:
        """The rows of positions [start, end) as bytes that `restore_rows` can verify.

        `tokens` are all ids the sequence was fed; the slice is tied to those before `end`. Of a
        hybrid that was stripped it is the caller's word that there are so many rows; a slice that
        lacks some is given up, with a `BackendError`. `scratch` names an empty sequence that is
        used meanwhile.
        """
        sequence = self._id("sequence", sequence)
        start = as_number("start", start, 0, INT32_MAX)
        end = as_number("end", end, 0, INT32_MAX)
        fed = as_tokens(tokens)
        scratch = self._id("scratch", scratch)
        with self._owned():
            self._check_scratch(sequence, scratch)
            self._check_span(sequence, start, end, fed)
            try:
                return self._slice(sequence, scratch, (start, end), fed[: 4 * end])
            finally:
                self._clear(scratch)

    def restore(
        self,
        sequence: int,
        blob: ReadableBuffer,
        tokens: Sequence[int] | ReadableBuffer,
        *,
        rows: bool | None = None,
    ) -> int:
        """Bring a saved state back; the number of tokens the sequence then holds.

        The sequence must be empty for a state saved with rows, and must hold the rows of `tokens`
        for one saved without; rows beyond them are cut. Raises `StateRefused` for anything that
        does not fit (its `field` says what) and `PoolFull` when the rows find no cells; the
        sequence is empty after either. ``rows`` refuses states that were not saved with the same.
        The buffer must not be written to meanwhile.
        """
        sequence = self._id("sequence", sequence)
        fed = as_tokens(tokens)
        flat = as_bytes("blob", as_view("blob", blob))
        wanted = None if rows is None else _form(as_truth("rows", rows))
        with self._owned():
            return self._restore(sequence, flat, fed, wanted)

    def restore_rows(
        self,
        sequence: int,
        start: int,
        blob: ReadableBuffer,
        tokens: Sequence[int] | ReadableBuffer,
        *,
        scratch: int,
    ) -> int:
        """Append a slice to a sequence of `start` rows; the number of rows it then holds.

        That it holds exactly those of [0, start), put there by earlier slices, is the caller's
        word where it cannot be seen: the rows of a hybrid are not counted without a state. Of
        `tokens` those before the slice's end must be the ones it was saved with. Raises
        `StateRefused` or `PoolFull`; the whole sequence is empty after either.
        """
        sequence = self._id("sequence", sequence)
        start = as_number("start", start, 0, INT32_MAX)
        fed = as_tokens(tokens)
        flat = as_bytes("blob", as_view("blob", blob))
        scratch = self._id("scratch", scratch)
        with self._owned():
            self._check_scratch(sequence, scratch)
            self._check_target(sequence, start)
            try:
                header, payload = self._checked_slice(start, flat, fed)
                self._append(sequence, scratch, header, payload)
            except (BackendError, MemoryError):
                self._clear(scratch)
                self._clear(sequence)
                raise
            return header.n_tokens

    def restore_file(
        self, sequence: int, path: StrOrBytesPath, tokens: Sequence[int] | ReadableBuffer
    ) -> int:
        """As `restore`, from a file. An `OSError` leaves the sequence as it was."""
        sequence = self._id("sequence", sequence)
        fed = as_tokens(tokens)
        target = os.fsencode(path)
        with self._owned():
            try:
                blob = whole_state(target)
            except StateRefused:
                self._clear(sequence)
                raise
            return self._restore(sequence, memoryview(blob), fed, None)

    # -- how it is done --

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise BackendError("another call is running; one thread owns llama.cpp at a time")
        try:
            if self._closed:
                raise BackendError("this memory is closed; its context is gone")
            yield
        finally:
            self._lock.release()

    def _id(self, name: str, value: object) -> int:
        return as_number(name, value, 0, self._n_sequences - 1)

    def _positions(self, sequence: int) -> tuple[int, int]:
        return (
            self._calls["llama_memory_seq_pos_min"](self._memory, sequence),
            self._calls["llama_memory_seq_pos_max"](self._memory, sequence),
        )

    def _demand_empty(self, sequence: int) -> None:
        low, high = self._positions(sequence)
        if (low, high) != _EMPTY:
            raise BackendError(f"sequence {sequence} still holds ({low}, {high}) after a clear")

    def _clear(self, sequence: int) -> None:
        self._calls["llama_memory_seq_rm"](self._memory, sequence, -1, -1)
        self._demand_empty(sequence)

    def _trim(self, sequence: int, length: int) -> None:
        if not self._calls["llama_memory_seq_rm"](self._memory, sequence, length, -1):
            raise BackendError(f"llama.cpp would not cut sequence {sequence} at {length}")

    def _empty_state(self) -> bytes:
        """What llama.cpp writes for the recurrent half of an empty sequence."""
        for sequence in range(self._n_sequences):
            if self._positions(sequence) == _EMPTY:
                return bytes(self._exported(sequence))
        raise InvalidArgument("no sequence is empty; make this before anything is decoded")

    def _exported(self, sequence: int) -> bytearray:
        """The recurrent half of a sequence in llama.cpp's form."""
        flags = self._state_flags
        size = self._calls["llama_state_seq_get_size_ext"](self._context, sequence, flags)
        state = bytearray(size)
        self._get(memoryview(state), sequence, flags)
        return state

    def _get(self, room: memoryview, sequence: int, flags: int) -> None:
        size = len(room)
        written = (
            self._calls["llama_state_seq_get_data_ext"](
                self._context, pointer(room), size, sequence, flags
            )
            if size
            else 0
        )
        if not size or written != size:
            raise BackendError(
                f"llama.cpp wrote {written} of {size} state bytes of sequence {sequence}"
            )

    def _set(self, sequence: int, payload: memoryview | bytes | bytearray, flags: int) -> bool:
        """Hand bytes to llama.cpp; False when it did not take them all (half may be in)."""
        view = memoryview(payload)
        if not len(view):
            return False
        taken = self._calls["llama_state_seq_set_data_ext"](
            self._context, pointer(view), len(view), sequence, flags
        )
        return bool(taken == len(view))

    def _copy(self, source: int, target: int, length: int | None) -> None:
        if source == target:
            raise InvalidArgument(f"source and target are both {source}")
        low, high = self._positions(source)
        if (low, high) == _EMPTY:
            raise InvalidArgument(f"sequence {source} is empty")
        if self._positions(target) != _EMPTY:
            raise InvalidArgument(f"sequence {target} is not empty; clear it first")
        held = self._extent(source, low, high)
        end = self._copy_end(source, low, held, length)
        self._calls["llama_memory_seq_cp"](self._memory, source, target, -1, end)
        try:
            if self._kind == "hybrid" and high >= 0:
                if end < 0:
                    self._trim(target, held)
                else:
                    self._strip(target)
            self._check_copy(target, (low, high), end)
        except BackendError:
            self._clear(target)
            raise

    def _extent(self, sequence: int, low: int, high: int) -> int:
        """How many tokens a sequence holds; 0 for rows whose number is not visible."""
        if self._kind != "attention" and low != high and high >= 0:
            raise BackendError(
                f"sequence {sequence} has its state at {low} and rows to {high}; clear it"
            )
        return high + 1

    def _copy_end(self, source: int, low: int, held: int, length: int | None) -> int:
        """Where the copied rows end, -1 for all of them."""
        if length is None or length == held:
            return -1
        if held and length > held:
            raise InvalidArgument(f"length is {length}, sequence {source} holds {held}")
        if self._kind == "recurrent":
            raise InvalidArgument(
                f"length is {length}, sequence {source} holds {held}; "
                "a recurrent state cannot be cut"
            )
        if not self._identity.unified:
            raise InvalidArgument("rows can be copied in part only when the cells are unified")
        if self._kind == "attention" and low > 0:
            raise InvalidArgument(
                f"sequence {source} holds rows from {low} on (a sliding window); copy it whole"
            )
        return length

    def _check_copy(self, target: int, held: tuple[int, int], end: int) -> None:
        low, high = self._positions(target)
        if self._kind == "hybrid" and (end >= 0 or held[1] < 0):
            sound = low >= 0 and high == -1
        elif end >= 0:
            sound = (low, high) == (held[0], end - 1)
        else:
            sound = (low, high) == held
        if not sound:
            raise BackendError(f"the copy in sequence {target} holds ({low}, {high})")

    def _cut(self, sequence: int, length: int) -> None:
        low, high = self._positions(sequence)
        if self._kind == "attention":
            if length > high:
                return
            if low > 0 and length:
                raise InvalidArgument(
                    f"sequence {sequence} holds rows from {low} on (a sliding window); "
                    "it cannot be cut"
                )
        elif high >= 0 and length <= low:
            raise InvalidArgument(
                f"length is {length}, the state of sequence {sequence} is at {low}; "
                "a recurrent state cannot be cut"
            )
        if length == 0:
            self._clear(sequence)
        else:
            self._trim(sequence, length)

    def _strip(self, sequence: int) -> None:
        if not self._set(sequence, self._empty, _STATE_ONLY):
            self._clear(sequence)
            raise BackendError(f"llama.cpp would not strip sequence {sequence}; it was cleared")
        low, high = self._positions(sequence)
        if low < 0 or high != -1:
            self._clear(sequence)
            raise BackendError(f"sequence {sequence} held ({low}, {high}) stripped; it was cleared")

    def _overwrite_cells(self, scrubbed: int) -> None:
        if self._layout is None:
            raise BackendError("the layout of this state is not known; use clear_all instead")
        before = [self._positions(sequence) for sequence in range(self._n_sequences)]
        bare = [sequence for sequence, (_, high) in enumerate(before) if high < 0]
        for sequence in range(self._n_sequences):
            if sequence != scrubbed and sequence not in bare:
                self._overwrite_cell(sequence, self._exported(sequence))
        zeros = self._layout.zeros()
        for sequence in sorted({*bare, scrubbed}):
            self._overwrite_cell(sequence, zeros)
        for sequence in bare:
            if before[sequence] == _EMPTY:
                self._clear(sequence)
            else:
                self._strip(sequence)

    def _overwrite_cell(self, sequence: int, state: bytes | bytearray) -> None:
        if not self._set(sequence, state, self._state_flags):
            self._clear(sequence)
            raise BackendError(f"llama.cpp would not take a state for sequence {sequence}")

    # -- saving --

    def _save_arguments(self, sequence: int, tokens: object, rows: bool) -> tuple[int, bytes, bool]:
        return self._id("sequence", sequence), as_tokens(tokens), as_truth("rows", rows)

    def _held(self, sequence: int, rows: bool) -> int:
        """The number of tokens of a sequence that can be saved like this."""
        if not rows and self._kind == "recurrent":
            raise InvalidArgument("rows=False is for memory that has rows, this is recurrent")
        low, high = self._positions(sequence)
        if (low, high) == _EMPTY:
            raise InvalidArgument(f"sequence {sequence} is empty")
        if high < 0:
            raise InvalidArgument(f"sequence {sequence} holds rows without a recurrent state")
        return self._extent(sequence, low, high)

    def _payload_size(self, sequence: int, rows: bool) -> int:
        if not rows and self._kind == "attention":
            return 0
        flags = _WHOLE if rows else _STATE_ONLY
        size = int(self._calls["llama_state_seq_get_size_ext"](self._context, sequence, flags))
        if not size:
            raise BackendError(f"llama.cpp gives no state size for sequence {sequence}")
        return size

    def _save_size(self, sequence: int, fed: bytes, rows: bool) -> int:
        self._demand_held(self._held(sequence, rows), sequence, fed)
        return HEADER_LENGTH + len(fed) + self._payload_size(sequence, rows)

    def _demand_held(self, held: int, sequence: int, fed: bytes) -> None:
        if held != len(fed) // 4:
            raise InvalidArgument(
                f"{len(fed) // 4} tokens were given, sequence {sequence} holds {held}"
            )

    def _fill(self, room: memoryview, sequence: int, fed: bytes, rows: bool) -> None:
        n_tokens = len(fed) // 4
        payload = room[blob_start(0, n_tokens) :]
        if rows or self._kind != "attention":
            self._get(payload, sequence, _WHOLE if rows else _STATE_ONLY)
        if self._layout is not None:
            self._layout.check(payload, n_tokens)
        seal(room, _form(rows), self._kind, self._identity, (0, n_tokens), fed)

    # -- saving in slices --

    def _check_scratch(self, sequence: int, scratch: int) -> None:
        if self._kind == "recurrent":
            raise InvalidArgument("rows can be moved where there are any, this memory is recurrent")
        if not self._identity.unified:
            raise InvalidArgument("rows can be moved in part only when the cells are unified")
        if sequence == scratch:
            raise InvalidArgument(f"sequence and scratch are both {sequence}")
        if self._positions(scratch) != _EMPTY:
            raise InvalidArgument(f"scratch sequence {scratch} is not empty; clear it first")

    def _check_span(self, sequence: int, start: int, end: int, fed: bytes) -> None:
        bare = self._kind == "hybrid" and self._is_bare(sequence)
        held = len(fed) // 4 if bare else self._held(sequence, True)
        self._demand_held(held, sequence, fed)
        if not start < end <= held:
            raise InvalidArgument(
                f"rows {start} to {end} are none of sequence {sequence}, which holds {held}"
            )

    def _is_bare(self, sequence: int) -> bool:
        low, high = self._positions(sequence)
        return low >= 0 and high == -1

    def _slice(self, sequence: int, scratch: int, span: tuple[int, int], fed: bytes) -> bytes:
        start, end = span
        self._calls["llama_memory_seq_cp"](self._memory, sequence, scratch, start, end)
        if self._kind == "hybrid":
            self._strip(scratch)
        at = blob_start(start, end)
        blob = bytearray(at + self._payload_size(scratch, True))
        room = memoryview(blob)
        self._get(room[at:], scratch, _WHOLE)
        check_slice(room[at:], end - start, self._empty)
        seal(room, "rows", self._kind, self._identity, span, fed)
        return bytes(blob)

    # -- restoring --

    def _restore(self, sequence: int, blob: memoryview, fed: bytes, wanted: str | None) -> int:
        try:
            header = parse(blob)
            if wanted is not None or header.form == "rows":
                check_form(header, wanted or "whole")
            payload = blob[blob_start(0, header.n_tokens) :]
            self._check_fit(header, payload, fed)
        except StateRefused:
            self._clear(sequence)
            raise
        low, high = self._positions(sequence)
        if header.form == "whole" and (low, high) != _EMPTY:
            raise InvalidArgument(f"sequence {sequence} is not empty; clear it first")
        if header.form == "state" and (low, high) == _EMPTY:
            raise InvalidArgument(f"sequence {sequence} is empty, the state needs its rows there")
        try:
            self._import(sequence, header, payload)
        except (BackendError, MemoryError):
            self._clear(sequence)
            raise
        return header.n_tokens

    def _check_fit(self, header: Header, payload: memoryview, fed: bytes) -> None:
        """Refuse a sound state that belongs to another context or to other tokens."""
        check_belongs(header, self._kind, self._identity)
        check_tokens(header, fed)
        if self._layout is not None:
            self._layout.check(payload, header.n_tokens)

    def _import(self, sequence: int, header: Header, payload: memoryview) -> None:
        whole = header.form == "whole"
        if (whole or self._kind != "attention") and not self._set(
            sequence, payload, _WHOLE if whole else _STATE_ONLY
        ):
            if whole and self._kind != "recurrent":
                raise PoolFull(
                    f"the pool has no {header.n_tokens} free cells for the saved state; "
                    "clear a sequence and try again"
                )
            refuse("payload", "llama.cpp refused the saved state; read the prompt again instead")
        self._check_restored(sequence, header)

    def _check_restored(self, sequence: int, header: Header) -> None:
        n_tokens = header.n_tokens
        if header.form == "state" and self._positions(sequence)[1] < n_tokens - 1:
            refuse(
                "rows",
                f"sequence {sequence} holds fewer rows than the {n_tokens} the state needs; "
                "read the prompt again instead",
            )
        if self._kind == "hybrid":
            self._trim(sequence, n_tokens)
        low, high = self._positions(sequence)
        if high != n_tokens - 1 or (self._kind != "attention" and low != high):
            refuse(
                "positions",
                f"the restored sequence holds ({low}, {high}), {n_tokens} tokens were saved; "
                "read the prompt again instead",
            )

    # -- restoring in slices --

    def _check_target(self, sequence: int, start: int) -> None:
        """Refuse a sequence of which it can be seen that it does not hold the rows [0, start)."""
        low, high = self._positions(sequence)
        if start == 0 and (low, high) != _EMPTY:
            raise InvalidArgument(f"sequence {sequence} is not empty; clear it first")
        if self._kind == "hybrid" and high >= 0:
            raise InvalidArgument(f"sequence {sequence} has its state at {low}; clear it first")
        if self._kind == "hybrid" and start > 0 and low < 0:
            raise InvalidArgument(f"sequence {sequence} is empty, it lacks the rows before {start}")
        if high >= start:
            raise InvalidArgument(
                f"sequence {sequence} holds rows to {high}, a slice from {start} on overlaps them"
            )

    def _checked_slice(self, start: int, blob: memoryview, fed: bytes) -> tuple[Header, memoryview]:
        """A slice that belongs to this context, these tokens and this place, and its payload."""
        header = parse(blob)
        check_form(header, "rows")
        check_belongs(header, self._kind, self._identity)
        if header.start != start:
            refuse(
                "start", f"the saved rows begin at {header.start}, needed are those from {start}"
            )
        check_tokens(header, fed)
        payload = blob[blob_start(start, header.n_tokens) :]
        check_slice(payload, header.n_tokens - start, self._empty)
        return header, payload

    def _append(self, sequence: int, scratch: int, header: Header, payload: memoryview) -> None:
        start, end = header.start, header.n_tokens
        if not self._set(scratch, payload, _WHOLE):
            raise PoolFull(
                f"the pool has no {end - start} free cells for the saved rows; "
                "clear a sequence and try again"
            )
        low, high = self._positions(scratch)
        self._check_slice_positions(low, high, header)
        self._calls["llama_memory_seq_cp"](self._memory, scratch, sequence, start, end)
        self._clear(scratch)
        there = self._positions(sequence)
        joined = there[0] >= 0 if self._kind == "hybrid" else there[1] == high or high < 0
        if not joined:
            raise BackendError(f"sequence {sequence} holds {there} after rows were added to it")

    def _check_slice_positions(self, low: int, high: int, header: Header) -> None:
        """Refuse rows of another place. A slice left behind by its window shows none at all."""
        if self._kind == "hybrid":
            sound = low >= header.start and high == -1
        else:
            sound = high < header.n_tokens and (high == -1 or low >= header.start)
        if not sound:
            refuse(
                "positions",
                f"the saved rows lie at ({low}, {high}), needed are {header.start} to "
                f"{header.n_tokens}; read the prompt again instead",
            )


def _form(rows: bool) -> str:
    return "whole" if rows else "state"


def _resolved(functions: Mapping[str, int]) -> dict[str, Any]:
    if not isinstance(functions, Mapping):
        raise TypeError(f"functions must be a mapping, not {type(functions).__name__}")
    calls: dict[str, Any] = {}
    for name, prototype in _PROTOTYPES.items():
        if name not in functions:
            raise InvalidArgument(f"functions lacks {name}; this llama.cpp is not supported")
        calls[name] = prototype(as_address(name, functions[name]))
    return calls
