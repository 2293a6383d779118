"""What is a saved state, byte by byte, and when does it belong to a context?

Knows neither llama.cpp nor ctypes: bytes in, refusals out. `native/blob.c` is the same in C.

Three forms: *whole* (rows and recurrent state), *state* (the recurrent state alone) and *rows* (a
slice of the rows, of positions [start, end), without a state). All integers little-endian:

    0    8   magic              48   8  payload length      104  128  llama.cpp build, NUL padded
    8    4   format version     56   8  token hash          232    4  start
    12   4   header length      64   4  end                 236   20  zero
    16   4   form: 0 state,     68   4  checksum            256   4n  token ids, int32
             1 whole, 2 rows    72  32  model fingerprint   ...       payload: llama.cpp's bytes
    20   4   memory kind
    24  24   n_layer n_ctx flash_attn unified type_k type_v

`end` is the number of tokens the sequence had been fed at the end of what is saved, `start` is 0
but for a slice; n = end - start. A slice holds only its own ids, yet it is tied to every token
before it as well, since rows depend on them: the token hash is of all ids up to `end`.

The checksum is the CRC-32 of everything, its own field taken as zero. It guards against damage,
not against malice, and it runs at every save and restore, so its speed counts: on 8 MB here
BLAKE2b ran at 0.7 GB/s, SHA-1 at 1.3, `zlib.crc32` at 3.9 and the C form by carry-less
multiplication at about 10, where llama.cpp itself copies a state at about 6. CRC-32 finds every
damage of up to 32 bits in a row and all but one in 4·10⁹ of the others; a foreign state is told by
the header, not by the checksum. The token hash is 64 bits wide, two CRC-32 (the bytes forwards and
backwards), since it stands for ids that are not at hand; those that are, are compared themselves.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple, NoReturn

import numpy as np

from orchestrator.errors import StateRefused

MAGIC = b"orcstate"
FORMAT_VERSION = 1
HEADER_LENGTH = 256
BUILD_ROOM = 128
MODEL_ROOM = 32
INT32_MAX = 2**31 - 1

FORMS = ("state", "whole", "rows")
"""By their number in the header."""

KINDS = {"attention": 1, "hybrid": 2, "recurrent": 3}
_KIND_NAMES = {number: name for name, number in KINDS.items()}

_HEADER = struct.Struct("<8sIIIIIIIIiiQQII32s128sI20s")
_CHECKSUM_AT = 68
_SEQUENCE_PREFIX = struct.Struct("<IiII")  # magic, sequence id, streams, cells
_STATE_PREFIX = struct.Struct("<IiIII")  # cells, position, sequence ids, transposed, layers
_TENSOR = struct.Struct("<iQ")  # ggml type, bytes per row


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
    """What a saved state says of itself; `tokens` are the ids in it, as int32 bytes.

    `n_tokens` is where it ends, so it has ids of [start, n_tokens).
    """

    version: int
    form: str
    memory: str
    identity: Identity
    start: int
    n_tokens: int
    token_hash: int
    payload_length: int
    checksum: int
    tokens: bytes


def refuse(field: str, message: str) -> NoReturn:
    """Raise the refusal that `field` is the reason for."""
    raise StateRefused(field, message)


def blob_start(start: int, end: int) -> int:
    """Where the payload begins: behind the header and the ids of [start, end)."""
    return HEADER_LENGTH + 4 * (end - start)


# --- writing --------------------------------------------------------------------------------------


def seal(
    blob: memoryview, form: str, kind: str, identity: Identity, span: tuple[int, int], fed: bytes
) -> None:
    """Write header and ids in front of a payload that is in place. `fed` ends where `span` does."""
    start, end = span
    at = blob_start(start, end)
    blob[:HEADER_LENGTH] = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_LENGTH,
        FORMS.index(form),
        KINDS[kind],
        identity.n_layer,
        identity.n_ctx,
        identity.flash_attn,
        identity.unified,
        identity.type_k,
        identity.type_v,
        len(blob) - at,
        _token_hash(fed),
        end,
        0,
        identity.model,
        identity.build.encode(),
        start,
        b"",
    )
    blob[HEADER_LENGTH:at] = fed[4 * start :]
    struct.pack_into("<I", blob, _CHECKSUM_AT, _checksum(blob))


def _token_hash(fed: bytes) -> int:
    return zlib.crc32(fed) | zlib.crc32(fed[::-1]) << 32


def _checksum(blob: memoryview) -> int:
    crc = zlib.crc32(bytes(4), zlib.crc32(blob[:_CHECKSUM_AT]))
    return zlib.crc32(blob[_CHECKSUM_AT + 4 :], crc)


# --- reading --------------------------------------------------------------------------------------


def framed(head: bytes, size: int) -> tuple[Any, ...]:
    """The fields of the header of a blob of `size` bytes whose lengths add up."""
    if size < HEADER_LENGTH:
        refuse(
            "length",
            f"the saved state has {size} bytes, its header alone has {HEADER_LENGTH}; "
            "it is truncated, save it again",
        )
    fields = _HEADER.unpack(head)
    magic, version, header_length = fields[:3]
    payload_length, end, start = fields[11], fields[13], fields[17]
    if magic != MAGIC:
        refuse("magic", f"this is no saved state: it begins with {magic.hex()}, not {MAGIC.hex()}")
    if version != FORMAT_VERSION:
        refuse(
            "version",
            f"the saved state has format version {version}, this build reads {FORMAT_VERSION}; "
            "save it again",
        )
    if header_length != HEADER_LENGTH:
        refuse("header", f"the header has {header_length} bytes, expected are {HEADER_LENGTH}")
    if start > end or size != blob_start(start, end) + payload_length:
        refuse(
            "length",
            f"the saved state of tokens {start} to {end} and {payload_length} payload bytes has "
            f"{size} bytes; it is truncated or was extended, save it again",
        )
    return fields


def parse(blob: memoryview) -> Header:
    """The header of a blob whose every byte was verified."""
    fields = framed(bytes(blob[:HEADER_LENGTH]), len(blob))
    checksum, computed = fields[14], _checksum(blob)
    if computed != checksum:
        refuse(
            "checksum",
            f"the saved state is damaged: its checksum is {computed:08x}, {checksum:08x} was "
            "saved; save it again",
        )
    if _is_odd(fields):
        refuse("header", "the header holds values that no version of this format writes")
    header = _header_of(fields, blob)
    if header.start == 0 and _token_hash(header.tokens) != header.token_hash:
        refuse("token_hash", "the token hash does not belong to the token ids; save it again")
    return header


def _is_odd(fields: tuple[Any, ...]) -> bool:
    """Values that no save writes, told only after the checksum: damage should be called damage."""
    form, kind = fields[3:5]
    flash_attn, unified = fields[7:9]
    payload_length, end, build, start, zero = fields[11], fields[13], *fields[16:]
    return (
        form >= len(FORMS)
        or max(flash_attn, unified) > 1
        or any(zero)
        or b"\0" in build.rstrip(b"\0")
        or kind not in _KIND_NAMES
        or not 0 < end <= INT32_MAX
        or (start == end if FORMS[form] == "rows" else start > 0)
        or (FORMS[form] != "whole" and kind == KINDS["recurrent"])
        or (FORMS[form] == "state" and kind == KINDS["attention"] and payload_length > 0)
    )


def _header_of(fields: tuple[Any, ...], blob: memoryview) -> Header:
    version, _, form, kind, n_layer, n_ctx, flash_attn, unified, type_k, type_v = fields[1:11]
    payload_length, token_hash, end, checksum, model, build, start, _ = fields[11:]
    text = build.rstrip(b"\0").decode(errors="replace")
    return Header(
        version,
        FORMS[form],
        _KIND_NAMES[kind],
        Identity(text, model, n_layer, n_ctx, bool(flash_attn), bool(unified), type_k, type_v),
        start,
        end,
        token_hash,
        payload_length,
        checksum,
        bytes(blob[HEADER_LENGTH : blob_start(start, end)]),
    )


# --- belonging ------------------------------------------------------------------------------------


def check_belongs(header: Header, kind: str, here: Identity) -> None:
    """Refuse a sound state of another kind of memory or another context."""
    if header.memory != kind:
        _differs("memory", header.memory, kind)
    for field in Identity._fields:
        was, needed = getattr(header.identity, field), getattr(here, field)
        if was != needed:
            if field == "model":
                was, needed = was.hex()[:16], needed.hex()[:16]
            _differs(field, was, needed)


def _differs(field: str, saved: object, here: object) -> NoReturn:
    refuse(
        field,
        f"the state was saved with {field} {saved}, this context has {here}; "
        "read the prompt again instead",
    )


def check_form(header: Header, wanted: str) -> None:
    """Refuse a state of another form than the call is for."""
    if header.form != wanted:
        refuse("form", f'the state was saved as "{header.form}", needed is "{wanted}"')


def check_tokens(header: Header, fed: bytes) -> None:
    """Refuse ids that are not those the state was saved after; a slice looks at those up to it."""
    n_fed, start, end = len(fed) // 4, header.start, header.n_tokens
    if n_fed != end and not (header.form == "rows" and n_fed > end):
        refuse(
            "tokens",
            f"the state was saved after {end} tokens, {n_fed} were given; "
            "give the tokens it was saved with",
        )
    if fed[4 * start : 4 * end] != header.tokens:
        was = np.frombuffer(header.tokens, np.int32)
        given = np.frombuffer(fed, np.int32)[start:end]
        at = int(np.argmax(was != given))
        refuse(
            "tokens",
            f"token {start + at} of the saved state is {was[at]}, {given[at]} was given; "
            "give the tokens it was saved with",
        )
    if start and _token_hash(fed[: 4 * end]) != header.token_hash:
        refuse(
            "tokens",
            f"the {start} tokens before the saved rows are not those that were given; "
            "give the tokens they were saved with",
        )


# --- what llama.cpp writes ------------------------------------------------------------------------


def check_slice(payload: memoryview, n_rows: int, empty: bytes) -> None:
    """Refuse a payload that is not so many rows, of one stream, without a recurrent state.

    `empty` is what llama.cpp writes for an empty sequence's recurrent half. Of a sliding window the
    first section holds every row; how many of them are in the window is not looked at.
    """
    streams, cells = -1, -1
    if len(payload) >= _SEQUENCE_PREFIX.size + len(empty):
        _, _, streams, cells = _SEQUENCE_PREFIX.unpack_from(payload)
    if (streams, cells) != (1, n_rows):
        refuse("payload", f"the saved rows are not {n_rows} rows of one stream")
    if len(empty) > 8 and payload[8 - len(empty) :] != empty[8:]:
        refuse("payload", "the saved rows come with a recurrent state, or with none at all")


class Layout(NamedTuple):
    """Where the floats of a recurrent state lie in the bytes llama.cpp writes.

    cells 1, position, 0, 0, n_layer, then per tensor: ggml type, bytes, the floats. The section
    ends the payload of a recurrent or hybrid sequence. Learnt from the bytes of an empty sequence,
    which are the same without the cell and the floats.
    """

    n_layer: int
    rows: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the section."""
        return _STATE_PREFIX.size + sum(_TENSOR.size + row for row in self.rows)

    @classmethod
    def of_empty(cls, empty: bytes) -> Layout | None:
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
            refuse("payload", "the recurrent section is not one state at the saved length")
        at += _STATE_PREFIX.size
        for row in self.rows:
            if _TENSOR.unpack_from(payload, at) != (0, row):
                refuse("payload", "the recurrent section has tensors of another size")
            at += _TENSOR.size
            if row and not np.isfinite(np.frombuffer(payload, "<f4", row // 4, at)).all():
                refuse(
                    "finite",
                    "the recurrent state holds NaN or infinity; scrub its sequence and read the "
                    "prompt again",
                )
            at += row
