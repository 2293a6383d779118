"""What does the header of a GGUF file say, and how long must the file be?

    ┌──────┬───────┬───────────┬────────┬───────────────┬──────────────┬───┬─────────────┐
    │ GGUF │ v u32 │ tensors   │ keys   │ keys, values  │ tensor table │pad│ tensor data │
    │ 4 B  │       │ u64       │ u64    │               │              │   │             │
    └──────┴───────┴───────────┴────────┴───────────────┴──────────────┴───┴─────────────┘
                                                        data_start, aligned ┘

Only the header is read, through a memory map, so a 50 GB file costs as much as a small one. Arrays
are measured and skipped. Nothing that the file says is trusted: every length is checked against
what is left before it is used, and no loop runs longer than a limit below.
The rules are those of ggml's own reader, which stops the process on some of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"GGUF"
VERSIONS = (2, 3)

N_KEY = 1 << 16
N_TENSOR = 1 << 20
N_STRING = 1 << 22  # in one array; the largest vocabularies have 2**18
KEY_LENGTH = (1 << 16) - 1  # bytes; the format's own limit
VALUE_LENGTH = 1 << 24  # bytes; the longest chat templates have 2**15
NAME_LENGTH = 63  # bytes of a tensor's name, GGML_MAX_NAME - 1
N_DIMENSION = 4
N_ELEMENT = (1 << 63) - 1

Scalar = bool | int | float | str

_STRING, _ARRAY = 8, 9
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64, _I64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<q")

TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""ggml's tensor types: name, elements per block, bytes per block."""


class Malformed(Exception):
    """The header breaks a rule of the format; the message says which, as half a sentence."""


class Cut(Exception):
    """The header goes on past the end of the file."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table; `shape` in ggml's order, `nbytes` of its data."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header that kept every rule.

    `scalars` and `lengths` hold the metadata: values of scalar keys, element counts of arrays.
    `expected_size` is the least the file must have, in bytes.
    """

    version: int
    scalars: dict[str, Scalar]
    lengths: dict[str, int]
    tensors: tuple[TensorInfo, ...]
    expected_size: int


class _Cursor:
    """Reads little-endian values from a buffer and never looks past its end."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def number(self, kind: struct.Struct) -> int | float | bool:
        if kind.size > self.left:
            raise Cut
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return value  # type: ignore[no-any-return]  # the format decides

    def count(self, kind: struct.Struct = _U64) -> int:
        return int(self.number(kind))

    def skip(self, length: int) -> None:
        if length > self.left:
            raise Cut
        self.at += length

    def string(self, limit: int, what: str) -> str:
        length = self.count()
        if length > limit:
            raise Malformed(f"{what} is {length:,} bytes long, at most {limit:,} are allowed")
        start = self.at
        self.skip(length)
        return bytes(self.data[start : self.at]).decode("utf-8", "replace")

    def skip_strings(self, n_string: int) -> None:
        # The one hot loop: a vocabulary and its merges are half a million strings.
        data, at, last, unpack = self.data, self.at, len(self.data) - 8, _U64.unpack_from
        for _ in range(n_string):
            if at > last:
                raise Cut
            at += 8 + unpack(data, at)[0]
        self.at = at
        self.skip(0)


def read_header(data: memoryview) -> Header:
    """Parse the header at the start of `data`, which is the whole file.

    Raises `Malformed` or `Cut`. The magic must have been checked.
    """
    cursor = _Cursor(data, len(MAGIC))
    version = cursor.count(_U32)
    _check_version(version)
    n_tensor, n_key = cursor.count(_I64), cursor.count(_I64)
    _check_count("tensors", n_tensor, N_TENSOR)
    _check_count("keys", n_key, N_KEY)
    scalars, lengths = _read_metadata(cursor, n_key)
    alignment = _alignment(scalars)
    tensors, data_length = _read_tensors(cursor, n_tensor, alignment)
    data_start = _padded(cursor.at, alignment) if tensors else cursor.at
    return Header(version, scalars, lengths, tensors, data_start + data_length)


def _check_version(version: int) -> None:
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise Malformed("it was written for big-endian machines, this one needs little-endian")
    known = " and ".join(map(str, VERSIONS))
    raise Malformed(f"its GGUF version is {version}, known are {known}")


def _check_count(what: str, count: int, limit: int) -> None:
    if not 0 <= count <= limit:
        raise Malformed(f"it claims {count:,} {what}, at most {limit:,} make sense")


def _read_metadata(cursor: _Cursor, n_key: int) -> tuple[dict[str, Scalar], dict[str, int]]:
    scalars: dict[str, Scalar] = {}
    lengths: dict[str, int] = {}
    for _ in range(n_key):
        key = cursor.string(KEY_LENGTH, "a key")
        if not key or key in scalars or key in lengths:
            raise Malformed("a key is empty or appears twice")
        kind = cursor.count(_U32)
        if kind == _ARRAY:
            lengths[key] = _skip_array(cursor, key)
        elif kind == _STRING:
            scalars[key] = cursor.string(VALUE_LENGTH, "a value")
        elif kind in _SCALARS:
            scalars[key] = cursor.number(_SCALARS[kind])
        else:
            raise Malformed(f"a value has the unknown type {kind}")
    return scalars, lengths


def _skip_array(cursor: _Cursor, key: str) -> int:
    kind, length = cursor.count(_U32), cursor.count()
    if kind == _STRING:
        _check_count("strings in an array", length, N_STRING)
        cursor.skip_strings(length)
    elif kind in _SCALARS:
        cursor.skip(length * _SCALARS[kind].size)
    else:
        raise Malformed(f"an array has elements of the unknown type {kind}")
    return length


def _alignment(scalars: dict[str, Scalar]) -> int:
    value = scalars.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise Malformed("its alignment is not a power of two")
    return value


def _padded(length: int, alignment: int) -> int:
    return (length + alignment - 1) & -alignment


def _read_tensors(
    cursor: _Cursor, n_tensor: int, alignment: int
) -> tuple[tuple[TensorInfo, ...], int]:
    """Return the table and the length of the data up to the last byte of the last tensor."""
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for _ in range(n_tensor):
        tensor = _read_tensor(cursor)
        offset = cursor.count()
        if tensor.name in tensors:
            raise Malformed("a tensor appears twice")
        if offset != _padded(end, alignment):
            raise Malformed("its tensors do not lie one behind the other")
        tensors[tensor.name] = tensor
        end = offset + tensor.nbytes
    return tuple(tensors.values()), end


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.string(NAME_LENGTH, "the name of a tensor")
    n_dimension = cursor.count(_U32)
    _check_count("dimensions of a tensor", n_dimension, N_DIMENSION)
    shape = tuple(cursor.count(_I64) for _ in range(n_dimension))
    kind = cursor.count(_U32)
    if kind not in TENSOR_TYPES:
        raise Malformed(f"a tensor has the type {kind}, which this llama.cpp does not know")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    n_element = 1
    for extent in shape:
        if extent < 0 or (n_element := n_element * extent) > N_ELEMENT:
            raise Malformed("the shape of a tensor is impossible")
    if (shape[0] if shape else 1) % block:
        raise Malformed(f"the rows of a {type_name} tensor are not multiples of {block}")
    return TensorInfo(name, shape, type_name, n_element // block * block_bytes)
