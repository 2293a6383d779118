"""How do states travel between sequences and host memory without holding up the lanes?

A slice at a time: the rows of a few hundred tokens, then the next, at last the recurrent state.
The loop asks for one slice per step while anybody speaks. Where llama.cpp cannot export a part
(sliding windows) a state moves in one piece. The mover decides nothing; it owns the bytes: rows
by the holder that keeps them, recurrent states by the checkpoint they belong to.

Invariant: rows and states are whole or they are not there. What is interrupted leaves nothing
behind: half-saved rows are dropped, a half-filled sequence is cleared.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from orchestrator.engine.memory import Memory
from orchestrator.errors import InvalidArgument, PoolFull, StateRefused
from orchestrator.pool.checkpoint import Checkpoint, Holder

log = logging.getLogger("orchestrator.engine")

SLICE_BYTES = 8 << 20
"""What one slice copies, about two milliseconds of a lane's time."""

SLICE_LEAST, SLICE_MOST = 64, 4096

_REFUSALS = (StateRefused, PoolFull, InvalidArgument, MemoryError)
"""What costs a checkpoint and nothing else; `DecodeFailed` costs all of them and goes through."""


Slices = tuple[tuple[int, bytes], ...]
"""Rows as bytes, in order, each slice with the position where it starts."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a sequence held: its rows in `slices`, and its recurrent `state`.

    Where rows cannot be sliced, `state` is everything; where none was to be saved it is empty.
    """

    slices: Slices
    state: bytes

    @property
    def row_bytes(self) -> int:
        """Host memory its rows take."""
        return _size(self.slices)


Saving = Generator[None, None, Parcel]
Arrived = Callable[[Parcel | None], None]
Seated = Callable[[bool], None]


@dataclass(slots=True, eq=False)
class _Move:
    """What is under way: `advance` does a slice and returns whether it is done."""

    what: Checkpoint | Holder
    sequence: int
    advance: Callable[[], bool]
    is_import: bool


class Mover:
    """The bytes of all that is in host memory, and what is on its way."""

    def __init__(self, memory: Memory) -> None:
        runtime = memory.runtime
        self._memory = memory
        self._kind = runtime.model.memory
        self._is_sliced = runtime.limits.sliced and runtime.limits.copies
        cell = max(1, runtime.limits.cell_bytes)
        self._slice = min(max(SLICE_BYTES // cell, SLICE_LEAST), SLICE_MOST)
        self._rows: dict[Holder, Slices] = {}
        self._states: dict[Checkpoint, bytes] = {}
        self._moves: list[_Move] = []

    @property
    def slice(self) -> int:
        """How many tokens' rows are moved together, 0: all of them."""
        return self._slice if self._is_sliced and self._kind != "recurrent" else 0

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._moves)

    @property
    def n_bytes(self) -> int:
        """Host memory of all rows and states."""
        return sum(map(_size, self._rows.values())) + sum(map(len, self._states.values()))

    def is_moving(self, what: Checkpoint | Holder) -> bool:
        """Whether a holder, or the state of a lane, is on its way out."""
        return any(move.what is what and not move.is_import for move in self._moves)

    # ---- out ----------------------------------------------------------------------------------

    def take(self, checkpoint: Checkpoint, sequence: int) -> int | None:
        """Save the recurrent state that `sequence` ends with; return its bytes, None if refused."""
        try:
            state = self._memory.runtime.save_state(sequence, _unpacked(checkpoint.path))
        except _REFUSALS as refusal:
            log.warning("a checkpoint could not be saved: %s", refusal)
            return None
        self._states[checkpoint] = state
        return len(state)

    def save(self, checkpoint: Checkpoint, sequence: int) -> Parcel | None:
        """Save all that `sequence` holds in one go, None when it could not be saved."""
        saved: list[Parcel | None] = []
        self.begin_saving(checkpoint, sequence, saved.append)
        self.finish(checkpoint)
        return saved[0]

    def begin_saving(self, checkpoint: Checkpoint, sequence: int, arrived: Arrived) -> None:
        """Save all that `sequence` holds slice by slice, for a checkpoint and its own holder.

        `arrived` is told when all is there, with None when it could not be saved.
        """

        def stored(parcel: Parcel | None) -> None:
            if parcel is not None:
                self._rows[checkpoint.holder] = parcel.slices
                self._states[checkpoint] = parcel.state
            arrived(parcel)

        saving = self._saving(sequence, checkpoint.path, takes_state=True)
        self._begin_out(checkpoint, sequence, saving, stored)

    def begin_export(self, holder: Holder, sequence: int, arrived: Arrived) -> None:
        """Save a holder's rows slice by slice, and the state its sequence ends with.

        `arrived` as in `begin_saving`.
        """
        last = max(holder.checkpoints, key=lambda checkpoint: checkpoint.length)

        def stored(parcel: Parcel | None) -> None:
            if parcel is not None:
                self._rows[holder] = parcel.slices
                if last.is_live:
                    self._states[last] = parcel.state
            arrived(parcel)

        saving = self._saving(sequence, last.path, takes_state=last.is_live)
        self._begin_out(holder, sequence, saving, stored)

    def _begin_out(
        self, what: Checkpoint | Holder, sequence: int, saving: Saving, arrived: Arrived
    ) -> None:
        def advance() -> bool:
            try:
                next(saving)
            except StopIteration as end:
                arrived(end.value)
                return True
            except _REFUSALS as refusal:
                log.warning("a checkpoint could not be moved to host memory: %s", refusal)
                arrived(None)
                return True
            return False

        self._moves.append(_Move(what, sequence, advance, is_import=False))

    def _saving(self, sequence: int, path: bytes, *, takes_state: bool) -> Saving:
        runtime, tokens = self._memory.runtime, _unpacked(path)
        if not self._is_sliced:
            return Parcel((), runtime.save(sequence, tokens))
        slices = []
        for start in range(0, 0 if self._kind == "recurrent" else len(tokens), self._slice):
            end = min(start + self._slice, len(tokens))
            slices.append((start, runtime.save_rows(sequence, start, end, tokens)))
            yield
        state = runtime.save_state(sequence, tokens) if takes_state else b""
        return Parcel(tuple(slices), state)

    # ---- in -----------------------------------------------------------------------------------

    def put(self, checkpoint: Checkpoint, sequence: int) -> None:
        """Complete a sequence that holds exactly a snapshot's rows.

        Raises `StateRefused`; the sequence is empty then.
        """
        state, tokens = self._states[checkpoint], _unpacked(checkpoint.path)
        self._memory.restore_state(sequence, state, tokens)

    def begin_import(self, checkpoint: Checkpoint, sequence: int, seated: Seated) -> None:
        """Fill an empty sequence with an exported checkpoint, slice by slice.

        `seated` is told True when it stands, False when it was refused and the sequence is empty.
        """
        loading = self._loading(checkpoint, sequence)

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

    def _loading(self, checkpoint: Checkpoint, sequence: int) -> Generator[None, None, None]:
        """Return what fills a sequence, its bytes in hand: others may drop them meanwhile."""
        state, tokens = self._states[checkpoint], _unpacked(checkpoint.path)
        if not self._is_sliced:
            return self._whole(sequence, state, tokens)
        holder = checkpoint.holder
        slices, held = self._rows.get(holder, ()), _unpacked(holder.path)
        return self._in_slices(sequence, slices, held, state, tokens)

    def _whole(
        self, sequence: int, state: bytes, tokens: array[int]
    ) -> Generator[None, None, None]:
        self._memory.restore(sequence, state, tokens)
        yield from ()

    def _in_slices(
        self, sequence: int, slices: Slices, held: array[int], state: bytes, tokens: array[int]
    ) -> Generator[None, None, None]:
        for start, blob in slices:
            if start >= len(tokens):
                break
            self._memory.restore_rows(sequence, start, blob, held)
            yield
        if slices:
            self._memory.cut(sequence, len(tokens))  # the last slice may go beyond it
        self._memory.restore_state(sequence, state, tokens)

    # ---- on the way ---------------------------------------------------------------------------

    def advance(self) -> None:
        """Move one slice of what began first."""
        if self._moves:
            self._advance(self._moves[0])

    def finish(self, what: Checkpoint | Holder) -> None:
        """Move the rest of what is on its way out."""
        for move in [m for m in self._moves if m.what is what and not m.is_import]:
            while move in self._moves:
                self._advance(move)

    def _advance(self, move: _Move) -> None:
        self._moves.remove(move)  # a move that raises is not tried again
        if not move.advance():
            self._moves.insert(0, move)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint's state and, if it was to bring its own rows, stop moving it out."""
        self._states.pop(checkpoint, None)
        self._stop(checkpoint)

    def trim(self, holder: Holder, length: int) -> int:
        """Drop the rows that `length` tokens do not need; return the bytes of those that stay.

        The slice that goes beyond them stays whole.
        """
        slices = self._rows.pop(holder, ())
        kept = tuple((start, blob) for start, blob in slices if start < length)
        if kept:
            self._rows[holder] = kept
        return _size(kept)

    def retain(self, checkpoints: Collection[Checkpoint]) -> None:
        """Drop what belongs to none of these, also what arrived and was never told of."""
        holders = {c.holder for c in checkpoints if c.sequence is None}
        self._rows = {h: slices for h, slices in self._rows.items() if h in holders}
        self._states = {c: state for c, state in self._states.items() if c in checkpoints}

    def stop(self, holder: Holder) -> None:
        """Move a holder out no further."""
        self._stop(holder)

    def _stop(self, what: Checkpoint | Holder) -> None:
        self._moves = [m for m in self._moves if m.what is not what or m.is_import]

    def abandon(self, sequence: int) -> None:
        """Stop filling a sequence; what it holds so far is the caller's to clear."""
        self._moves = [m for m in self._moves if m.sequence != sequence or not m.is_import]

    def reset(self) -> None:
        """Stop every move; what is whole stays."""
        self._moves.clear()


def _size(slices: Slices) -> int:
    return sum(len(blob) for _, blob in slices)


def _unpacked(path: bytes) -> array[int]:
    tokens = array("i")
    tokens.frombytes(path)
    return tokens
