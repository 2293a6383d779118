"""What may be asked of a runtime? The same answer for every runtime, before it acts.

llama.cpp answers a wrong argument by ending the process, so nothing reaches it unchecked; the
simulated runtime refuses the same calls in the same words. `length_of` tells how many tokens a
sequence holds; where only a complete sequence will do, the caller gives one that refuses the
others (`check_complete`). All functions raise `InvalidArgument` and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.protocol import Chunk, Limits, MemoryKind

LengthOf = Callable[[int], int]


def check_sequence(sequence: int, limits: Limits) -> None:
    """Refuse a sequence id that does not exist."""
    if not 0 <= sequence < limits.n_sequences:
        raise InvalidArgument(
            f"sequence {sequence} does not exist; ids are 0 to {limits.n_sequences - 1}"
        )


def check_batch(chunks: Sequence[Chunk], limits: Limits, n_vocab: int, length_of: LengthOf) -> int:
    """Return how many tokens a decode call holds, having checked every chunk of it."""
    total = sum(len(chunk.tokens) for chunk in chunks)
    if not 0 < total <= limits.n_batch:
        raise InvalidArgument(
            f"a decode call of {total} tokens; give 1 to n_batch = {limits.n_batch}"
        )
    if len({chunk.sequence for chunk in chunks}) < len(chunks):
        raise InvalidArgument("two chunks of one decode call name the same sequence; join them")
    if not limits.mixes and 1 < len(chunks) < total:
        raise InvalidArgument(
            f"a decode call of {len(chunks)} chunks and {total} tokens; in exact mode it holds one "
            "token per sequence, or one longer chunk alone"
        )
    if 0 < limits.n_joint < len(chunks):
        raise InvalidArgument(
            f"a decode call of {len(chunks)} sequences; with this model llama.cpp evaluates "
            f"{limits.n_joint} at a time, make more calls"
        )
    for chunk in chunks:
        _check_chunk(chunk, limits, n_vocab, length_of(chunk.sequence))
    return total


def _check_chunk(chunk: Chunk, limits: Limits, n_vocab: int, held: int) -> None:
    if chunk.start != held or not chunk.tokens:
        raise InvalidArgument(
            f"a chunk of {len(chunk.tokens)} tokens at {chunk.start}, but sequence "
            f"{chunk.sequence} holds {held}; start there with at least one token"
        )
    if chunk.end > limits.n_context:
        raise InvalidArgument(f"a chunk to {chunk.end} tokens; a sequence holds {limits.n_context}")
    if min(chunk.tokens) < 0 or max(chunk.tokens) >= n_vocab:
        raise InvalidArgument(f"token ids must lie in 0 to {n_vocab - 1}")


def check_copy(
    source: int,
    target: int,
    length: int | None,
    memory: MemoryKind,
    limits: Limits,
    length_of: LengthOf,
) -> int:
    """Return how many tokens a copy takes along."""
    if not limits.copies:
        raise InvalidArgument(
            f"sequence {source} cannot be copied: in exact mode each has cells of its own; "
            f"save it and restore it to sequence {target}"
        )
    held, there = length_of(source), length_of(target)
    length = held if length is None else length
    if there or not 0 < length <= held:
        raise InvalidArgument(
            f"cannot copy {length} of {held} tokens of sequence {source} to sequence {target} "
            f"of {there}; the target must be empty"
        )
    _refuse_part(source, length, held, memory)
    return length


def check_cut(sequence: int, length: int, memory: MemoryKind, length_of: LengthOf) -> int:
    """Return how many tokens a sequence holds that is to be cut to `length`."""
    held = length_of(sequence)
    if not 0 <= length <= held:
        raise InvalidArgument(f"cannot cut sequence {sequence} of {held} tokens to {length}")
    _refuse_part(sequence, length, held, memory)
    return held


def _refuse_part(sequence: int, length: int, held: int, memory: MemoryKind) -> None:
    if length != held and memory != "attention":
        raise InvalidArgument(
            f"sequence {sequence} ends at {held} and its memory is {memory}: "
            f"it cannot be cut to {length}"
        )


def check_save(sequence: int, tokens: Sequence[int], length_of: LengthOf) -> None:
    """Refuse tokens that cannot be those a sequence holds."""
    held = length_of(sequence)
    if not held or len(tokens) != held:
        raise InvalidArgument(f"sequence {sequence} holds {held} tokens, {len(tokens)} were given")


def check_restore(sequence: int, length_of: LengthOf) -> None:
    """Refuse to restore over something."""
    if length_of(sequence):
        raise InvalidArgument(f"sequence {sequence} is not empty; clear it before restoring")


# ---- in slices -----------------------------------------------------------------------------------


def check_complete(sequence: int, incomplete: Collection[int]) -> None:
    """Refuse a sequence that has rows but not yet its state."""
    if sequence in incomplete:
        raise InvalidArgument(
            f"sequence {sequence} is being restored and incomplete; restore its state or clear it"
        )


def can_slice(memory: MemoryKind) -> bool:
    """Whether a memory of this kind has rows at all, which can then be moved in slices."""
    return memory != "recurrent"


def check_save_rows(
    sequence: int,
    span: tuple[int, int],
    tokens: Sequence[int],
    limits: Limits,
    length_of: LengthOf,
) -> None:
    """Refuse to save rows that a sequence does not hold."""
    _refuse_unsliced(limits)
    check_save(sequence, tokens, length_of)
    start, end = span
    if not 0 <= start < end <= len(tokens):
        raise InvalidArgument(
            f"rows {start} to {end} of sequence {sequence}, which holds {len(tokens)}; "
            "give a span within, of at least one row"
        )


def check_save_state(
    sequence: int, tokens: Sequence[int], memory: MemoryKind, limits: Limits, length_of: LengthOf
) -> None:
    """Refuse to save a state whose rows cannot be saved apart."""
    if memory != "recurrent":
        _refuse_unsliced(limits)
    check_save(sequence, tokens, length_of)


def check_restore_rows(
    sequence: int, start: int, incomplete: Collection[int], limits: Limits, length_of: LengthOf
) -> None:
    """Refuse to put rows elsewhere than at the end of those restored so far."""
    _refuse_unsliced(limits)
    held = length_of(sequence)
    if start != held or (held and sequence not in incomplete):
        what = "incomplete" if sequence in incomplete else "complete" if held else "empty"
        raise InvalidArgument(
            f"rows from {start} on cannot follow in sequence {sequence}, which is {what} and "
            f"holds {held}; begin with an empty one and go on where the last slice ended"
        )


def check_restore_state(
    sequence: int,
    tokens: Sequence[int],
    incomplete: Collection[int],
    memory: MemoryKind,
    limits: Limits,
    length_of: LengthOf,
) -> None:
    """Refuse a state where the rows of its tokens, no more and no fewer, are not in place."""
    if memory == "recurrent":
        check_restore(sequence, length_of)
        return
    _refuse_unsliced(limits)
    held = length_of(sequence)
    if held and sequence not in incomplete:
        raise InvalidArgument(f"sequence {sequence} is complete; clear it and restore its rows")
    if not held or held != len(tokens):
        raise InvalidArgument(
            f"sequence {sequence} holds {held} restored rows, the state belongs to "
            f"{len(tokens)} tokens; restore exactly their rows first"
        )


def _refuse_unsliced(limits: Limits) -> None:
    if not limits.sliced:
        raise InvalidArgument(
            "this memory has no rows that can be moved in slices; save and restore it whole"
        )
