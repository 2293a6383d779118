"""What may be passed to sequence memory? Types and ranges, checked before anything is touched.

The rules of `native/seqstate.c`, in the same words: an integer is anything with `__index__` but a
bool, tokens are int32 in a sequence or a flat buffer, bytes are a flat buffer of single bytes.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence

import numpy as np

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.seqstate_format import BUILD_ROOM, INT32_MAX, MODEL_ROOM, Identity


def as_number(name: str, value: object, low: int, high: int) -> int:
    """An int of [low, high]; the message names what it was given for."""
    number = _index(name, value)
    if not -(2**63) <= number < 2**63:
        raise InvalidArgument(f"{name} is beyond 64 bits, allowed are {low} to {high}")
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}, allowed are {low} to {high}")
    return number


def as_truth(name: str, value: object) -> bool:
    """A bool, and nothing that only behaves like one."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return value


def as_address(name: str, value: object) -> int:
    """An address that is not zero."""
    number = _index(name, value)
    if not 0 < number < 2**64:
        raise InvalidArgument(f"{name} is not an address")
    return number


def _index(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not bool")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None


def as_identity(identity: Identity) -> Identity:
    """The identity, of this module's type, each field of it checked."""
    build, model = identity.build, identity.model
    if not isinstance(build, str):
        raise TypeError(f"build must be a str, not {type(build).__name__}")
    try:
        length = len(build.encode())
    except UnicodeEncodeError:
        raise InvalidArgument("build is not valid text") from None
    if not 0 < length <= BUILD_ROOM or "\0" in build:
        raise InvalidArgument(f"build has {length} bytes, allowed are 1 to {BUILD_ROOM}, no NUL")
    if not isinstance(model, bytes):
        raise TypeError(f"model must be bytes, not {type(model).__name__}")
    if len(model) != MODEL_ROOM:
        raise InvalidArgument(f"model has {len(model)} bytes, a fingerprint has {MODEL_ROOM}")
    return Identity(
        build,
        model,
        as_number("n_layer", identity.n_layer, 1, INT32_MAX),
        as_number("n_ctx", identity.n_ctx, 1, INT32_MAX),
        as_truth("flash_attn", identity.flash_attn),
        as_truth("unified", identity.unified),
        as_number("type_k", identity.type_k, 0, INT32_MAX),
        as_number("type_v", identity.type_v, 0, INT32_MAX),
    )


def as_bytes(name: str, view: memoryview, itemsize: int = 1) -> memoryview:
    """The bytes of a one-dimensional contiguous buffer of items of one size."""
    _demand_flat(name, view)
    if view.itemsize != itemsize:
        raise InvalidArgument(f"{name} has items of {view.itemsize} bytes, needed are {itemsize}")
    # by way of numpy, since memoryview.cast knows native formats only and ctypes gives "<B"
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")


def _demand_flat(name: str, view: memoryview) -> None:
    if view.ndim != 1 or not view.c_contiguous:
        raise InvalidArgument(f"{name} must be one-dimensional and contiguous")


def as_view(name: str, value: object) -> memoryview:
    """The buffer of an object that has one."""
    try:
        return memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a buffer, not {type(value).__name__}") from None


def as_tokens(tokens: object) -> bytes:
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
        raise InvalidArgument(f"token {at} is {ids[at]}, allowed are 0 to {INT32_MAX}")
    return fed


def _listed_tokens(tokens: object) -> bytes:
    if not isinstance(tokens, Sequence):
        name = type(tokens).__name__
        raise TypeError(f"tokens must be a sequence of ints or an int32 buffer, not {name}")
    ids = [as_number(f"token {i}", item, 0, INT32_MAX) for i, item in enumerate(tuple(tokens))]
    return struct.pack(f"<{len(ids)}i", *ids)


def pointer(view: memoryview) -> int:
    """Where the bytes of a buffer lie, for as long as the buffer is held."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
