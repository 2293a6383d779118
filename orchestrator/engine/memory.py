"""The engine's hands: every change of the runtime's sequences, with the ledger kept in step.

After each change the ledger and the runtime are compared; if they ever disagree the fault is
ours, and going on would answer fluently and wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import DecodeFailed
from orchestrator.pool.ledger import Ledger
from orchestrator.runtime.protocol import Chunk, Runtime


class Memory:
    """A runtime and the ledger of its cells, changed together."""

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

    def reset(self) -> None:
        """Empty everything."""
        self.runtime.reset()
        self.ledger.reset()

    def _check(self, sequence: int) -> None:
        held, counted = self.runtime.length(sequence), self.ledger.length(sequence)
        if held != counted:
            raise DecodeFailed(
                f"sequence {sequence} holds {held} tokens where {counted} were put; "
                "its state cannot be trusted, every checkpoint is dropped"
            )
