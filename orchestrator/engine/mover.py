"""How do states travel between sequences and host memory without holding up the lanes?

A slice at a time: the rows of a few hundred tokens, then the next, at last the recurrent state.
The loop asks for one slice per step while anybody speaks. Where llama.cpp cannot export a part
(sliding windows) a state moves in one piece. The mover decides nothing; it owns the bytes.

Invariant: a parcel is whole or it is not there. What is interrupted leaves nothing behind: a
half-saved parcel is dropped, a half-filled sequence is cleared.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass

from orchestrator.engine.memory import Memory
from orchestrator.errors import InvalidArgument, PoolFull, StateRefused
from orchestrator.pool.checkpoint import Checkpoint

log = logging.getLogger("orchestrator.engine")

SLICE_BYTES = 8 << 20
"""What one slice copies, about two milliseconds of a lane's time."""

SLICE_LEAST, SLICE_MOST = 64, 4096

_REFUSALS = (StateRefused, PoolFull, InvalidArgument, MemoryError)
"""What costs a checkpoint and nothing else; `DecodeFailed` costs all of them and goes through."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A state as bytes: `slices` of rows with where they start, and what makes it whole.

    `is_sliced` False: `state` is everything.
    """

    slices: tuple[tuple[int, bytes], ...]
    state: bytes
    is_sliced: bool

    @property
    def n_bytes(self) -> int:
        """Host memory it takes."""
        return len(self.state) + sum(len(blob) for _, blob in self.slices)


Saving = Generator[None, None, Parcel]
Arrived = Callable[[Parcel | None], None]
Seated = Callable[[bool], None]


@dataclass(slots=True, eq=False)
class _Move:
    """One checkpoint under way: `advance` does a slice and returns whether it is done."""

    checkpoint: Checkpoint
    sequence: int
    advance: Callable[[], bool]
    is_import: bool


class Mover:
    """The bytes of all exported checkpoints, and what is on its way."""

    def __init__(self, memory: Memory) -> None:
        runtime = memory.runtime
        self._memory = memory
        self._kind = runtime.model.memory
        self._is_sliced = runtime.limits.sliced and runtime.limits.copies
        cell = max(1, runtime.limits.cell_bytes)
        self._slice = min(max(SLICE_BYTES // cell, SLICE_LEAST), SLICE_MOST)
        self._parcels: dict[Checkpoint, Parcel] = {}
        self._moves: list[_Move] = []

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._moves)

    @property
    def n_bytes(self) -> int:
        """Host memory of all parcels."""
        return sum(parcel.n_bytes for parcel in self._parcels.values())

    def is_moving(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is on its way out."""
        return any(move.checkpoint is checkpoint and not move.is_import for move in self._moves)

    # ---- out ----------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, sequence: int) -> Parcel | None:
        """Save what `sequence` holds in one go, None when it could not be saved."""
        saved: list[Parcel | None] = []
        self.begin_export(checkpoint, sequence, saved.append)
        self.finish(checkpoint)
        return saved[0]

    def begin_export(self, checkpoint: Checkpoint, sequence: int, arrived: Arrived) -> None:
        """Save what `sequence` holds slice by slice.

        `arrived` is told when all is there, with None when it could not be saved.
        """
        saving = self._saving(sequence, checkpoint.path)

        def advance() -> bool:
            try:
                next(saving)
            except StopIteration as end:
                self._parcels[checkpoint] = end.value
                arrived(end.value)
                return True
            except _REFUSALS as refusal:
                log.warning("a checkpoint could not be moved to host memory: %s", refusal)
                arrived(None)
                return True
            return False

        self._moves.append(_Move(checkpoint, sequence, advance, is_import=False))

    def _saving(self, sequence: int, path: bytes) -> Saving:
        runtime, tokens = self._memory.runtime, _unpacked(path)
        if not self._is_sliced:
            return Parcel((), runtime.save(sequence, tokens), is_sliced=False)
        slices = []
        for start in range(0, self._rows(tokens), self._slice):
            end = min(start + self._slice, len(tokens))
            slices.append((start, runtime.save_rows(sequence, start, end, tokens)))
            yield
        return Parcel(tuple(slices), runtime.save_state(sequence, tokens), is_sliced=True)

    def _rows(self, tokens: array[int]) -> int:
        return 0 if self._kind == "recurrent" else len(tokens)

    # ---- in -----------------------------------------------------------------------------------

    def begin_import(self, checkpoint: Checkpoint, sequence: int, seated: Seated) -> None:
        """Fill an empty sequence from the checkpoint's parcel, slice by slice.

        `seated` is told True when it stands, False when it was refused and the sequence is empty.
        """
        loading = self._loading(self._parcels[checkpoint], sequence, checkpoint.path)

        def advance() -> bool:
            try:
                next(loading)
            except StopIteration:
                seated(True)
                return True
            except _REFUSALS as refusal:
                log.warning("a checkpoint is dropped, its prompt is read again: %s", refusal)
                self._memory.clear(sequence)
                seated(False)
                return True
            return False

        self._moves.append(_Move(checkpoint, sequence, advance, is_import=True))

    def _loading(self, parcel: Parcel, sequence: int, path: bytes) -> Generator[None, None, None]:
        tokens = _unpacked(path)
        if not parcel.is_sliced:
            self._memory.restore(sequence, parcel.state, tokens)
            return
        for start, blob in parcel.slices:
            self._memory.restore_rows(sequence, start, blob, tokens)
            yield
        self._memory.restore_state(sequence, parcel.state, tokens)

    # ---- on the way ---------------------------------------------------------------------------

    def advance(self) -> None:
        """Move one slice of what began first."""
        if self._moves:
            self._advance(self._moves[0])

    def finish(self, checkpoint: Checkpoint) -> None:
        """Move the rest of a checkpoint that is on its way out."""
        for move in [m for m in self._moves if m.checkpoint is checkpoint and not m.is_import]:
            while move in self._moves:
                self._advance(move)

    def _advance(self, move: _Move) -> None:
        self._moves.remove(move)  # a move that raises is not tried again
        if not move.advance():
            self._moves.insert(0, move)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint's parcel and stop moving it out."""
        self._parcels.pop(checkpoint, None)
        self._moves = [m for m in self._moves if m.checkpoint is not checkpoint or m.is_import]

    def abandon(self, sequence: int) -> None:
        """Stop filling a sequence; what it holds so far is the caller's to clear."""
        self._moves = [m for m in self._moves if m.sequence != sequence or not m.is_import]

    def reset(self) -> None:
        """Stop every move; parcels that are whole stay."""
        self._moves.clear()


def _unpacked(path: bytes) -> array[int]:
    tokens = array("i")
    tokens.frombytes(path)
    return tokens
