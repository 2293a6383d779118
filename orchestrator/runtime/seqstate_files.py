"""A saved state as a file: replaced whole or not at all, read after a look at its header.

`native/durable.c` is the same in C.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.seqstate_format import HEADER_LENGTH, framed


def replace_file(target: bytes, blob: bytearray) -> None:
    """Write a file beside the target and move it there once it is safe on the disk."""
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


def whole_state(target: bytes) -> bytes:
    """A file read whole, after a look at its header: nothing else is worth the memory."""
    handle = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not wait
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise InvalidArgument("path is not a regular file")
        head = _read(handle, min(HEADER_LENGTH, about.st_size), target)
        framed(head, about.st_size)
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
