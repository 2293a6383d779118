"""How is a sequence of llama.cpp copied, cut, saved and restored without killing the process?

This is the specification, written with ctypes; `orchestrator._seqstate` is the same in C: the same
names, checks, messages and bytes. The test suite runs over both.

It knows sequence ids, positions and opaque state bytes. It does not know models, decoding, which
tokens a sequence ought to hold, or what is worth keeping.

Invariants:
- llama.cpp never sees an argument that was not checked: a wrong id is a C assertion there.
- After `StateRefused` or `PoolFull` from a restore the sequence is empty; after `InvalidArgument`
  and `TypeError` nothing was changed.
- A recurrent state never stands over rows that are not its own: what would not match is dropped.
- One call at a time: a second thread or a re-entrant call is refused, not queued.

A saved state, all integers little-endian:

    0    8   magic              48   8  payload length      104  128  llama.cpp build, NUL padded
    8    4   format version     56   8  token hash          232   24  zero
    12   4   header length      64   4  token count         256   4n  token ids, int32
    16   4   flags, 1 = rows    68   4  checksum            ...       payload: llama.cpp's own bytes
    20   4   memory kind        72  32  model fingerprint
    24  24   n_layer n_ctx flash_attn unified type_k type_v

The checksum is the CRC-32 of everything, its own field taken as zero. It guards against damage,
not against malice, and it runs at every save and restore, so its speed counts: on 8 MB here
BLAKE2b ran at 0.7 GB/s, SHA-1 at 1.3, `zlib.crc32` at 3.9 and the C form by carry-less
multiplication at about 10, where llama.cpp itself copies a state at about 6. CRC-32 finds every
damage of up to 32 bits in a row and all but one in 4·10⁹ of the others; a foreign state is told by
the header, not by the checksum. The token hash is 64 bits wide, two CRC-32 (the bytes forwards and
backwards), since it may serve as a key where the ids are not at hand; a restore compares the ids
themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import operator
import os
import stat
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from orchestrator.errors import BackendError, InvalidArgument, PoolFull, StateRefused

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, StrOrBytesPath, WriteableBuffer

MAGIC = b"orcstate"
FORMAT_VERSION = 1
HEADER_LENGTH = 256

_HEADER = struct.Struct("<8sIIIIIIIIiiQQII32s128s24s")
_CHECKSUM_AT = 68
_BUILD_ROOM = 128
_MODEL_ROOM = 32
_ROWS = 1  # the one flag
_KINDS = {"attention": 1, "hybrid": 2, "recurrent": 3}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}
_MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
_INT32_MAX = 2**31 - 1

_WHOLE = 0  # llama_state_seq_flags
_STATE_ONLY = 1
_STATE_PREFIX = struct.Struct("<IiIII")  # cells, position, sequence ids, transposed, layers
_TENSOR = struct.Struct("<iQ")  # ggml type, bytes per row
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


class Identity(NamedTuple):
    """What a saved state must share with a context to belong there.

    `model` is a 32-byte fingerprint, `type_k` and `type_v` are ggml type numbers.
    """

    build: str
    model: bytes
    n_layer: int
    n_ctx: int
    flash_attn: bool
    unified: bool
    type_k: int
    type_v: int


class Header(NamedTuple):
    """What a saved state says of itself; `tokens` are the ids fed, as int32 bytes."""

    version: int
    rows: bool
    memory: str
    identity: Identity
    n_tokens: int
    token_hash: int
    payload_length: int
    checksum: int
    tokens: bytes


# --- arguments ------------------------------------------------------------------------------------


def _number(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not bool")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if not -(2**63) <= number < 2**63:
        raise InvalidArgument(f"{name} is beyond 64 bits, allowed are {low} to {high}")
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}, allowed are {low} to {high}")
    return number


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return value


def _address(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not bool")
    try:
        address = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if not 0 < address < 2**64:
        raise InvalidArgument(f"{name} is not an address")
    return address


def _checked_identity(identity: Identity) -> Identity:
    build, model = identity.build, identity.model
    if not isinstance(build, str):
        raise TypeError(f"build must be a str, not {type(build).__name__}")
    try:
        length = len(build.encode())
    except UnicodeEncodeError:
        raise InvalidArgument("build is not valid text") from None
    if not 0 < length <= _BUILD_ROOM or "\0" in build:
        raise InvalidArgument(f"build has {length} bytes, allowed are 1 to {_BUILD_ROOM}, no NUL")
    if not isinstance(model, bytes):
        raise TypeError(f"model must be bytes, not {type(model).__name__}")
    if len(model) != _MODEL_ROOM:
        raise InvalidArgument(f"model has {len(model)} bytes, a fingerprint has {_MODEL_ROOM}")
    return Identity(
        build,
        model,
        _number("n_layer", identity.n_layer, 1, _INT32_MAX),
        _number("n_ctx", identity.n_ctx, 1, _INT32_MAX),
        _truth("flash_attn", identity.flash_attn),
        _truth("unified", identity.unified),
        _number("type_k", identity.type_k, 0, _INT32_MAX),
        _number("type_v", identity.type_v, 0, _INT32_MAX),
    )


def _flat_bytes(name: str, view: memoryview, itemsize: int = 1) -> memoryview:
    """The bytes of a one-dimensional contiguous buffer of items of one size."""
    _demand_flat(name, view)
    if view.itemsize != itemsize:
        raise InvalidArgument(f"{name} has items of {view.itemsize} bytes, needed are {itemsize}")
    # by way of numpy, since memoryview.cast knows native formats only and ctypes gives "<B"
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")


def _demand_flat(name: str, view: memoryview) -> None:
    if view.ndim != 1 or not view.c_contiguous:
        raise InvalidArgument(f"{name} must be one-dimensional and contiguous")


def _view(name: str, value: object) -> memoryview:
    try:
        return memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a buffer, not {type(value).__name__}") from None


def _token_bytes(tokens: object) -> bytes:
    """The ids as native int32 bytes; raises on none, on a negative one, on any other item type."""
    if isinstance(tokens, str):
        raise TypeError("tokens must be a sequence of ints or an int32 buffer, not str")
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        fed = _listed_tokens(tokens)
    else:
        fed = _packed_tokens(view)
    if not fed:
        raise InvalidArgument("tokens is empty, needed is at least 1")
    return fed


def _packed_tokens(view: memoryview) -> bytes:
    _demand_flat("tokens", view)
    if view.itemsize == 1 and view.nbytes % 4:
        raise InvalidArgument(f"tokens has {view.nbytes} bytes, needed is a multiple of 4")
    if view.itemsize not in (1, 4):
        raise InvalidArgument(f"tokens has items of {view.itemsize} bytes, needed are 4")
    if view.itemsize == 4 and view.format.lstrip("@=<") not in ("i", "l"):
        raise InvalidArgument("tokens must hold signed 32-bit ints")
    fed = view.tobytes()
    ids = np.frombuffer(fed, np.int32)
    if len(ids) and int(ids.min()) < 0:
        at = int(np.argmax(ids < 0))
        raise InvalidArgument(f"token {at} is {ids[at]}, allowed are 0 to {_INT32_MAX}")
    return fed


def _listed_tokens(tokens: object) -> bytes:
    if not isinstance(tokens, Sequence):
        name = type(tokens).__name__
        raise TypeError(f"tokens must be a sequence of ints or an int32 buffer, not {name}")
    ids = [_number(f"token {i}", item, 0, _INT32_MAX) for i, item in enumerate(tuple(tokens))]
    return struct.pack(f"<{len(ids)}i", *ids)


def _pointer(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


# --- the format -----------------------------------------------------------------------------------


def _token_hash(fed: bytes) -> int:
    return zlib.crc32(fed) | zlib.crc32(fed[::-1]) << 32


def _checksum(blob: memoryview) -> int:
    crc = zlib.crc32(bytes(4), zlib.crc32(blob[:_CHECKSUM_AT]))
    return zlib.crc32(blob[_CHECKSUM_AT + 4 :], crc)


def _refuse(field: str, message: str) -> NoReturn:
    raise StateRefused(field, message)


def _framed(head: bytes, size: int) -> tuple[Any, ...]:
    """The fields of the header of a blob of `size` bytes whose lengths add up."""
    if size < HEADER_LENGTH:
        _refuse(
            "length",
            f"the saved state has {size} bytes, its header alone has {HEADER_LENGTH}; "
            "it is truncated, save it again",
        )
    fields = _HEADER.unpack(head)
    magic, version, header_length = fields[:3]
    payload_length, _, n_tokens = fields[11:14]
    if magic != MAGIC:
        _refuse("magic", f"this is no saved state: it begins with {magic.hex()}, not {MAGIC.hex()}")
    if version != FORMAT_VERSION:
        _refuse(
            "version",
            f"the saved state has format version {version}, this build reads {FORMAT_VERSION}; "
            "save it again",
        )
    if header_length != HEADER_LENGTH:
        _refuse("header", f"the header has {header_length} bytes, expected are {HEADER_LENGTH}")
    if size != HEADER_LENGTH + 4 * n_tokens + payload_length:
        _refuse(
            "length",
            f"the saved state of {n_tokens} tokens and {payload_length} payload bytes has {size} "
            "bytes; it is truncated or was extended, save it again",
        )
    return fields


def _parse(blob: memoryview) -> Header:
    """The header of a blob whose every byte was verified."""
    fields = _framed(bytes(blob[:HEADER_LENGTH]), len(blob))
    checksum, computed = fields[14], _checksum(blob)
    if computed != checksum:
        _refuse(
            "checksum",
            f"the saved state is damaged: its checksum is {computed:08x}, {checksum:08x} was "
            "saved; save it again",
        )
    if _is_odd(fields):
        _refuse("header", "the header holds values that no version of this format writes")
    header = _header_of(fields, blob)
    if _token_hash(header.tokens) != header.token_hash:
        _refuse("token_hash", "the token hash does not belong to the token ids; save it again")
    return header


def _is_odd(fields: tuple[Any, ...]) -> bool:
    """Values that no save writes, told only after the checksum: damage should be called damage."""
    flags, kind = fields[3:5]
    flash_attn, unified = fields[7:9]
    n_tokens, build, zero = fields[13], fields[16], fields[17]
    return (
        max(flags, flash_attn, unified) > 1
        or any(zero)
        or b"\0" in build.rstrip(b"\0")
        or kind not in _KIND_NAMES
        or (not flags and kind != _KINDS["hybrid"])
        or not 0 < n_tokens <= _INT32_MAX
    )


def _header_of(fields: tuple[Any, ...], blob: memoryview) -> Header:
    version, _, flags, kind, n_layer, n_ctx, flash_attn, unified, type_k, type_v = fields[1:11]
    payload_length, token_hash, n_tokens, checksum, model, build, _ = fields[11:]
    text = build.rstrip(b"\0").decode(errors="replace")
    return Header(
        version,
        bool(flags),
        _KIND_NAMES[kind],
        Identity(text, model, n_layer, n_ctx, bool(flash_attn), bool(unified), type_k, type_v),
        n_tokens,
        token_hash,
        payload_length,
        checksum,
        bytes(blob[HEADER_LENGTH : HEADER_LENGTH + 4 * n_tokens]),
    )


def _differs(field: str, saved: object, here: object) -> NoReturn:
    _refuse(
        field,
        f"the state was saved with {field} {saved}, this context has {here}; "
        "read the prompt again instead",
    )


def describe(blob: ReadableBuffer) -> Header:
    """What a saved state says of itself, after every byte was verified.

    Raises `StateRefused` as a restore does, for what can be told without a context.
    """
    return _parse(_flat_bytes("blob", _view("blob", blob)))


# --- the recurrent section ------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Where the floats of a recurrent state lie in the bytes llama.cpp writes.

    cells 1, position, 0, 0, n_layer, then per tensor: ggml type, bytes, the floats. The section
    ends the payload of a recurrent or hybrid sequence. Learnt from the bytes of an empty sequence,
    which are the same without the cell and the floats.
    """

    n_layer: int
    rows: tuple[int, ...]

    @property
    def size(self) -> int:
        return _STATE_PREFIX.size + sum(_TENSOR.size + row for row in self.rows)

    @classmethod
    def of_empty(cls, empty: bytes) -> _Layout | None:
        """None where the bytes are of another form; such states are not looked into."""
        tensors = empty[20:]
        if len(empty) <= 20 or len(tensors) % _TENSOR.size:
            return None
        _, _, cells, transposed, n_layer = struct.unpack_from("<IiIII", empty)
        entries = list(_TENSOR.iter_unpack(tensors))
        if cells or transposed or any(kind or row % 4 or row > 2**40 for kind, row in entries):
            return None
        return cls(n_layer, tuple(row for _, row in entries))

    def zeros(self) -> bytes:
        """A state of position 0 with every float zero, as llama.cpp would write it."""
        parts = [struct.pack("<Ii", 0xAF143CD8, 0), _STATE_PREFIX.pack(1, 0, 0, 0, self.n_layer)]
        for row in self.rows:
            parts += [_TENSOR.pack(0, row), bytes(row)]
        return b"".join(parts)

    def check(self, payload: memoryview, n_tokens: int) -> None:
        """Refuse a payload whose recurrent section is of another shape or holds NaN or infinity."""
        at = len(payload) - self.size
        prefix = (1, n_tokens - 1, 0, 0, self.n_layer)
        if at < 8 or _STATE_PREFIX.unpack_from(payload, at) != prefix:
            _refuse("payload", "the recurrent section is not one state at the saved length")
        at += _STATE_PREFIX.size
        for row in self.rows:
            if _TENSOR.unpack_from(payload, at) != (0, row):
                _refuse("payload", "the recurrent section has tensors of another size")
            at += _TENSOR.size
            if row and not np.isfinite(np.frombuffer(payload, "<f4", row // 4, at)).all():
                _refuse(
                    "finite",
                    "the recurrent state holds NaN or infinity; scrub its sequence and read the "
                    "prompt again",
                )
            at += row


# --- the memory -----------------------------------------------------------------------------------


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
        if memory not in _KINDS:
            raise InvalidArgument('memory must be "attention", "hybrid" or "recurrent"')
        self._kind = memory
        self._n_sequences = _number("n_sequences", n_sequences, 1, _MOST_SEQUENCES)
        self._identity = _checked_identity(identity)
        self._context = _address("context", context)
        self._calls = _resolved(functions)
        self._lock = threading.Lock()
        self._closed = False
        self._memory = self._calls["llama_get_memory"](self._context)
        if not self._memory:
            raise InvalidArgument("the context has no memory; its model keeps no sequences")
        self._state_flags = _STATE_ONLY if memory == "hybrid" else _WHOLE
        self._empty = b"" if memory == "attention" else self._empty_state()
        self._layout = _Layout.of_empty(self._empty)

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
            length = _number("length", length, 1, _INT32_MAX)
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
        length = _number("length", length, 0, _INT32_MAX)
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
        rows = _truth("rows", rows)
        with self._owned():
            held = self._held(sequence, rows)
            return HEADER_LENGTH + 4 * held + self._payload_size(sequence, rows)

    def save(
        self, sequence: int, tokens: Sequence[int] | ReadableBuffer, *, rows: bool = True
    ) -> bytes:
        """The sequence as bytes that a restore can verify. `tokens` are the ids it was fed.

        ``rows=False`` leaves the rows out (hybrid only): a snapshot, to be restored over rows of
        the same tokens. Raises `StateRefused` with field ``"finite"`` rather than keep a NaN.
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
        view = _view("buffer", buffer)
        room = _flat_bytes("buffer", view)
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
            _replace_file(target, blob)
            return len(blob)

    def restore(
        self, sequence: int, blob: ReadableBuffer, tokens: Sequence[int] | ReadableBuffer
    ) -> int:
        """Bring a saved state back; the number of tokens the sequence then holds.

        The sequence must be empty for a state saved with rows, and must hold the rows of `tokens`
        for one saved without; rows beyond them are cut. Raises `StateRefused` for anything that
        does not fit (its `field` says what) and `PoolFull` when the rows find no cells; the
        sequence is empty after either. The buffer must not be written to meanwhile.
        """
        sequence = self._id("sequence", sequence)
        fed = _token_bytes(tokens)
        flat = _flat_bytes("blob", _view("blob", blob))
        with self._owned():
            return self._restore(sequence, flat, fed)

    def restore_file(
        self, sequence: int, path: StrOrBytesPath, tokens: Sequence[int] | ReadableBuffer
    ) -> int:
        """As `restore`, from a file. An `OSError` leaves the sequence as it was."""
        sequence = self._id("sequence", sequence)
        fed = _token_bytes(tokens)
        target = os.fsencode(path)
        with self._owned():
            try:
                blob = _whole_state(target)
            except StateRefused:
                self._clear(sequence)
                raise
            return self._restore(sequence, memoryview(blob), fed)

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
        return _number(name, value, 0, self._n_sequences - 1)

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
                self._context, _pointer(room), size, sequence, flags
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
            self._context, _pointer(view), len(view), sequence, flags
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
        return self._id("sequence", sequence), _token_bytes(tokens), _truth("rows", rows)

    def _held(self, sequence: int, rows: bool) -> int:
        """The number of tokens of a sequence that can be saved like this."""
        if not rows and self._kind != "hybrid":
            raise InvalidArgument(f"rows=False is for hybrid memory, this is {self._kind}")
        low, high = self._positions(sequence)
        if (low, high) == _EMPTY:
            raise InvalidArgument(f"sequence {sequence} is empty")
        if high < 0:
            raise InvalidArgument(f"sequence {sequence} holds rows without a recurrent state")
        return self._extent(sequence, low, high)

    def _payload_size(self, sequence: int, rows: bool) -> int:
        flags = _WHOLE if rows else _STATE_ONLY
        size = int(self._calls["llama_state_seq_get_size_ext"](self._context, sequence, flags))
        if not size:
            raise BackendError(f"llama.cpp gives no state size for sequence {sequence}")
        return size

    def _save_size(self, sequence: int, fed: bytes, rows: bool) -> int:
        held = self._held(sequence, rows)
        if held != len(fed) // 4:
            raise InvalidArgument(
                f"{len(fed) // 4} tokens were given, sequence {sequence} holds {held}"
            )
        return HEADER_LENGTH + len(fed) + self._payload_size(sequence, rows)

    def _fill(self, room: memoryview, sequence: int, fed: bytes, rows: bool) -> None:
        start = HEADER_LENGTH + len(fed)
        self._get(room[start:], sequence, _WHOLE if rows else _STATE_ONLY)
        if self._layout is not None:
            self._layout.check(room[start:], len(fed) // 4)
        room[:HEADER_LENGTH] = self._header(fed, len(room) - start, rows)
        room[HEADER_LENGTH:start] = fed
        struct.pack_into("<I", room, _CHECKSUM_AT, _checksum(room))

    def _header(self, fed: bytes, payload_length: int, rows: bool) -> bytes:
        here = self._identity
        return _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_LENGTH,
            _ROWS if rows else 0,
            _KINDS[self._kind],
            here.n_layer,
            here.n_ctx,
            here.flash_attn,
            here.unified,
            here.type_k,
            here.type_v,
            payload_length,
            _token_hash(fed),
            len(fed) // 4,
            0,
            here.model,
            here.build.encode(),
            b"",
        )

    # -- restoring --

    def _restore(self, sequence: int, blob: memoryview, fed: bytes) -> int:
        try:
            header = _parse(blob)
            payload = blob[HEADER_LENGTH + 4 * header.n_tokens :]
            self._check_fit(header, payload, fed)
        except StateRefused:
            self._clear(sequence)
            raise
        low, high = self._positions(sequence)
        if header.rows and (low, high) != _EMPTY:
            raise InvalidArgument(f"sequence {sequence} is not empty; clear it first")
        if not header.rows and (low, high) == _EMPTY:
            raise InvalidArgument(f"sequence {sequence} is empty, the state needs its rows there")
        try:
            self._import(sequence, header, payload)
        except (BackendError, MemoryError):
            self._clear(sequence)
            raise
        return header.n_tokens

    def _check_fit(self, header: Header, payload: memoryview, fed: bytes) -> None:
        """Refuse a sound state that belongs to another context or to other tokens."""
        if header.memory != self._kind:
            _differs("memory", header.memory, self._kind)
        saved, here = header.identity, self._identity
        for field in Identity._fields:
            was, needed = getattr(saved, field), getattr(here, field)
            if was != needed:
                if field == "model":
                    was, needed = was.hex()[:16], needed.hex()[:16]
                _differs(field, was, needed)
        self._check_tokens(header.tokens, fed)
        if self._layout is not None:
            self._layout.check(payload, header.n_tokens)

    def _check_tokens(self, saved: bytes, fed: bytes) -> None:
        if len(saved) != len(fed):
            _refuse(
                "tokens",
                f"the state was saved after {len(saved) // 4} tokens, {len(fed) // 4} were given; "
                "give the tokens it was saved with",
            )
        if saved != fed:
            was, given = np.frombuffer(saved, np.int32), np.frombuffer(fed, np.int32)
            at = int(np.argmax(was != given))
            _refuse(
                "tokens",
                f"token {at} of the saved state is {was[at]}, {given[at]} was given; "
                "give the tokens it was saved with",
            )

    def _import(self, sequence: int, header: Header, payload: memoryview) -> None:
        n_tokens = header.n_tokens
        if not self._set(sequence, payload, _WHOLE if header.rows else _STATE_ONLY):
            if header.rows and self._kind != "recurrent":
                raise PoolFull(
                    f"the pool has no {n_tokens} free cells for the saved state; "
                    "clear a sequence and try again"
                )
            _refuse("payload", "llama.cpp refused the saved state; read the prompt again instead")
        if not header.rows and self._positions(sequence)[1] < n_tokens - 1:
            _refuse(
                "rows",
                f"sequence {sequence} holds fewer rows than the {n_tokens} the state needs; "
                "read the prompt again instead",
            )
        if self._kind == "hybrid":
            self._trim(sequence, n_tokens)
        low, high = self._positions(sequence)
        if high != n_tokens - 1 or (self._kind != "attention" and low != high):
            _refuse(
                "positions",
                f"the restored sequence holds ({low}, {high}), {n_tokens} tokens were saved; "
                "read the prompt again instead",
            )


# --- llama.cpp and files --------------------------------------------------------------------------


def _resolved(functions: Mapping[str, int]) -> dict[str, Any]:
    if not isinstance(functions, Mapping):
        raise TypeError(f"functions must be a mapping, not {type(functions).__name__}")
    calls: dict[str, Any] = {}
    for name, prototype in _PROTOTYPES.items():
        if name not in functions:
            raise InvalidArgument(f"functions lacks {name}; this llama.cpp is not supported")
        calls[name] = prototype(_address(name, functions[name]))
    return calls


def _replace_file(target: bytes, blob: bytearray) -> None:
    folder, name = os.path.split(target)
    handle, temporary = tempfile.mkstemp(prefix=name + b".", dir=folder or b".")
    try:
        with open(handle, "wb", buffering=0) as file:
            rest = memoryview(blob)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(handle)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(folder or b".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _whole_state(target: bytes) -> bytes:
    """A file read whole, after a look at its header: nothing else is worth the memory."""
    handle = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not wait
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise InvalidArgument("path is not a regular file")
        head = _read(handle, min(HEADER_LENGTH, about.st_size), target)
        _framed(head, about.st_size)
        return head + _read(handle, about.st_size - len(head), target)
    finally:
        os.close(handle)


def _read(handle: int, size: int, target: bytes) -> bytes:
    pieces = []
    while size:
        piece = os.read(handle, size)
        if not piece:
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
