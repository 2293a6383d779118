"""The runtime and the ledger of its cells, kept in step.

Every change goes through here: first the runtime, which checks and may refuse, then the ledger,
and then the lengths of both are compared. A difference means that nothing can be trusted any
more and raises `DecodeFailed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from orchestrator.errors import BackendError, DecodeFailed
from orchestrator.pool.ledger import Ledger
from orchestrator.runtime.protocol import Chunk, Runtime


class Memory:
    """What the sequences of a runtime hold. Raises what the runtime raises."""

    def __init__(self, runtime: Runtime) -> None:
        limits = runtime.limits
        self.runtime = runtime
        self.ledger = Ledger(None if runtime.model.memory == "recurrent" else limits.n_cells)

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Evaluate chunks; see `Runtime.decode`."""
        rows = self.runtime.decode(chunks)
        for chunk in chunks:
            self.ledger.extend(chunk.sequence, len(chunk.tokens))
            self._check(chunk.sequence)
        return rows

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Let the empty `target` share the cells of `source`, all or the first `length`."""
        self.runtime.copy(source, target, length)
        self.ledger.copy(source, target, length)
        self._check(target)

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """Let the empty `target` share the first `length` rows; see `Runtime.copy_rows`."""
        self.runtime.copy_rows(source, target, length)
        self.ledger.copy(source, target, length)
        self._check(target)

    def strip(self, sequence: int) -> None:
        """Take the state of a sequence away and keep its rows; see `Runtime.strip`."""
        with self._emptied_alike(sequence):
            self.runtime.strip(sequence)
        self._check(sequence)

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        self.runtime.cut(sequence, length)
        self.ledger.cut(sequence, length)
        self._check(sequence)

    def clear(self, sequence: int) -> None:
        """Empty a sequence."""
        self.runtime.clear(sequence)
        self.ledger.clear(sequence)
        self._check(sequence)

    def scrub(self, sequence: int) -> None:
        """Empty a sequence whose state may not be finite."""
        self.runtime.scrub(sequence)
        self.ledger.clear(sequence)
        self._check(sequence)

    def restore(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """Fill the empty `sequence`; see `Runtime.restore`."""
        self.runtime.restore(sequence, blob, tokens)
        self.ledger.extend(sequence, len(tokens))
        self._check(sequence)

    def restore_rows(self, sequence: int, start: int, blob: bytes, tokens: Sequence[int]) -> None:
        """Append a slice of rows; see `Runtime.restore_rows`."""
        with self._emptied_alike(sequence):
            self.runtime.restore_rows(sequence, start, blob, tokens)
        self.ledger.extend(sequence, self.runtime.length(sequence) - start)
        self._check(sequence)

    def restore_state(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """Complete a sequence; see `Runtime.restore_state`."""
        with self._emptied_alike(sequence):
            self.runtime.restore_state(sequence, blob, tokens)
        missing = len(tokens) - self.ledger.length(sequence)
        if missing:  # pure recurrent memory had no rows to bring
            self.ledger.extend(sequence, missing)
        self._check(sequence)

    def reset(self) -> None:
        """Empty everything."""
        self.runtime.reset()
        self.ledger.reset()

    @contextmanager
    def _emptied_alike(self, sequence: int) -> Iterator[None]:
        """Count a sequence as empty that a call left so which failed."""
        try:
            yield
        except (BackendError, MemoryError):
            if not self.runtime.length(sequence):
                self.ledger.clear(sequence)
            raise

    def _check(self, sequence: int) -> None:
        held, counted = self.runtime.length(sequence), self.ledger.length(sequence)
        if held != counted:
            raise DecodeFailed(
                f"sequence {sequence} holds {held} tokens where {counted} were put; "
                "its state cannot be trusted, every checkpoint is dropped"
            )
