"""The C form of `orchestrator.runtime.seqstate_ctypes`, which documents every name."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from _typeshed import ReadableBuffer, StrOrBytesPath, WriteableBuffer

HEADER_LENGTH: int
FORMAT_VERSION: int

class Identity(NamedTuple):
    build: str
    model: bytes
    n_layer: int
    n_ctx: int
    flash_attn: bool
    unified: bool
    type_k: int
    type_v: int

class Header(NamedTuple):
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

@final
class SequenceMemory:
    def __init__(
        self,
        functions: Mapping[str, int],
        context: int,
        *,
        n_sequences: int,
        memory: str,
        identity: Identity,
    ) -> None: ...
    def close(self) -> None: ...
    def positions(self, sequence: int) -> tuple[int, int]: ...
    def copy(self, source: int, target: int, length: int | None = None) -> None: ...
    def clear(self, sequence: int) -> None: ...
    def clear_all(self) -> None: ...
    def cut(self, sequence: int, length: int) -> None: ...
    def strip(self, sequence: int) -> None: ...
    def scrub(self, sequence: int) -> None: ...
    def state_size(self, sequence: int, *, rows: bool = True) -> int: ...
    def save(
        self, sequence: int, tokens: Sequence[int] | ReadableBuffer, *, rows: bool = True
    ) -> bytes: ...
    def save_into(
        self,
        sequence: int,
        tokens: Sequence[int] | ReadableBuffer,
        buffer: WriteableBuffer,
        *,
        rows: bool = True,
    ) -> int: ...
    def save_file(
        self,
        sequence: int,
        tokens: Sequence[int] | ReadableBuffer,
        path: StrOrBytesPath,
        *,
        rows: bool = True,
    ) -> int: ...
    def save_rows(
        self,
        sequence: int,
        start: int,
        end: int,
        tokens: Sequence[int] | ReadableBuffer,
        *,
        scratch: int,
    ) -> bytes: ...
    def restore(
        self,
        sequence: int,
        blob: ReadableBuffer,
        tokens: Sequence[int] | ReadableBuffer,
        *,
        rows: bool | None = None,
    ) -> int: ...
    def restore_rows(
        self,
        sequence: int,
        start: int,
        blob: ReadableBuffer,
        tokens: Sequence[int] | ReadableBuffer,
        *,
        scratch: int,
    ) -> int: ...
    def restore_file(
        self, sequence: int, path: StrOrBytesPath, tokens: Sequence[int] | ReadableBuffer
    ) -> int: ...

def describe(blob: ReadableBuffer) -> Header: ...
