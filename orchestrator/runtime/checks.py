"""What may be asked of a runtime? The same answer for every runtime, before it acts.

llama.cpp answers a wrong argument by ending the process, and a state over rows that are not its
own by fluent nonsense, so nothing reaches it unchecked; the simulated runtime refuses the same
calls in the same words. `contents` tells which tokens the sequences hold and which are incomplete;
`tokens` are packed (`contents.packed`).

All functions raise `InvalidArgument` and change nothing, but for `check_rows`: what it refuses is
a state or a slice, and its caller empties the sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from orchestrator.errors import InvalidArgument, StateRefused
from orchestrator.runtime.contents import Contents
from orchestrator.runtime.protocol import Chunk, Limits, MemoryKind


def check_batch(chunks: Sequence[Chunk], limits: Limits, n_vocab: int, contents: Contents) -> int:
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
        _check_chunk(chunk, limits, n_vocab, contents.length_complete(chunk.sequence))
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


# ---- copying and cutting -------------------------------------------------------------------------


def check_copy(
    source: int,
    target: int,
    length: int | None,
    memory: MemoryKind,
    limits: Limits,
    contents: Contents,
) -> int:
    """Return how many tokens a copy takes along."""
    if not limits.copies:
        raise InvalidArgument(
            f"sequence {source} cannot be copied: in exact mode each has cells of its own; "
            f"save it and restore it to sequence {target}"
        )
    held = contents.length_complete(source)
    length = held if length is None else length
    _check_span(source, target, length, contents)
    _refuse_part(source, length, held, memory)
    return length


def check_copy_rows(
    source: int, target: int, length: int, limits: Limits, contents: Contents
) -> None:
    """Refuse to copy rows that are not there, or that no state could complete."""
    _refuse_without_snapshots(limits)
    _check_span(source, target, length, contents)


def _check_span(source: int, target: int, length: int, contents: Contents) -> None:
    held, there = contents.length(source), contents.length(target)
    if there or not 0 < length <= held:
        raise InvalidArgument(
            f"cannot copy {length} of {held} tokens of sequence {source} to sequence {target} "
            f"of {there}; the target must be empty"
        )


def check_cut(sequence: int, length: int, memory: MemoryKind, contents: Contents) -> int:
    """Return how many tokens a sequence holds that is to be cut to `length`."""
    held = contents.length(sequence)
    if not 0 <= length <= held:
        raise InvalidArgument(f"cannot cut sequence {sequence} of {held} tokens to {length}")
    bare = contents.is_incomplete(sequence)
    if not (bare and (memory == "hybrid" or length == 0)):
        _refuse_part(sequence, length, held, memory)
    return held


def _refuse_part(sequence: int, length: int, held: int, memory: MemoryKind) -> None:
    if length != held and memory != "attention":
        raise InvalidArgument(
            f"sequence {sequence} ends at {held} and its memory is {memory}: "
            f"it cannot be cut to {length}"
        )


def check_strip(sequence: int, limits: Limits, contents: Contents) -> None:
    """Refuse to take a state where there is none."""
    _refuse_without_snapshots(limits)
    if not contents.length_complete(sequence):
        raise InvalidArgument(f"sequence {sequence} is empty, it has no state to lose")


def _refuse_without_snapshots(limits: Limits) -> None:
    if not limits.snapshots:
        raise InvalidArgument(
            "this memory keeps no states apart from their rows; copy, save and restore whole "
            "sequences"
        )


# ---- saving and restoring ------------------------------------------------------------------------


def check_save(sequence: int, tokens: array[int], contents: Contents) -> None:
    """Refuse to save an incomplete sequence, or to call it what it is not."""
    contents.length_complete(sequence)
    _check_held(sequence, tokens, contents)


def _check_held(sequence: int, tokens: array[int], contents: Contents) -> None:
    held = contents.length(sequence)
    if not held or len(tokens) != held:
        raise InvalidArgument(f"sequence {sequence} holds {held} tokens, {len(tokens)} were given")
    at = contents.differs_at(sequence, tokens)
    if at is not None:
        raise InvalidArgument(
            f"token {at} is {tokens[at]}, sequence {sequence} was fed another there; give the "
            "tokens it was fed"
        )


def check_restore(sequence: int, contents: Contents) -> None:
    """Refuse to restore over something."""
    if contents.length(sequence):
        raise InvalidArgument(f"sequence {sequence} is not empty; clear it before restoring")


def check_rows(sequence: int, tokens: array[int], contents: Contents) -> None:
    """Refuse, with `StateRefused`, what belongs to `tokens` over rows of other ones."""
    at = contents.differs_at(sequence, tokens)
    if at is not None:
        raise StateRefused(
            "rows",
            f"the rows of sequence {sequence} were made from other tokens than were given, from "
            f"position {at} on; read the prompt again instead",
        )


# ---- in slices -----------------------------------------------------------------------------------


def can_slice(memory: MemoryKind) -> bool:
    """Whether a memory of this kind has rows at all, which can then be moved in slices."""
    return memory != "recurrent"


def check_save_rows(
    sequence: int, span: tuple[int, int], tokens: array[int], limits: Limits, contents: Contents
) -> None:
    """Refuse to save rows that a sequence does not hold."""
    _refuse_unsliced(limits)
    _check_held(sequence, tokens, contents)
    start, end = span
    if not 0 <= start < end <= len(tokens):
        raise InvalidArgument(
            f"rows {start} to {end} of sequence {sequence}, which holds {len(tokens)}; "
            "give a span within, of at least one row"
        )


def check_save_state(
    sequence: int, tokens: array[int], memory: MemoryKind, limits: Limits, contents: Contents
) -> None:
    """Refuse to save a state whose rows cannot be saved apart."""
    if memory != "recurrent":
        _refuse_unsliced(limits)
    check_save(sequence, tokens, contents)


def check_restore_rows(sequence: int, start: int, limits: Limits, contents: Contents) -> None:
    """Refuse to put rows elsewhere than at the end of those restored so far."""
    _refuse_unsliced(limits)
    held, bare = contents.length(sequence), contents.is_incomplete(sequence)
    if start != held or (held and not bare):
        what = "incomplete" if bare else "complete" if held else "empty"
        raise InvalidArgument(
            f"rows from {start} on cannot follow in sequence {sequence}, which is {what} and "
            f"holds {held}; begin with an empty one and go on where the last slice ended"
        )


def check_restore_state(
    sequence: int, tokens: array[int], memory: MemoryKind, limits: Limits, contents: Contents
) -> None:
    """Refuse a state where there are more or fewer rows than it has tokens."""
    if memory == "recurrent":
        check_restore(sequence, contents)
        return
    _refuse_unsliced(limits)
    held = contents.length(sequence)
    if held and not contents.is_incomplete(sequence):
        raise InvalidArgument(f"sequence {sequence} is complete; clear it and restore its rows")
    if not held or held != len(tokens):
        raise InvalidArgument(
            f"sequence {sequence} holds {held} rows without a state, the state belongs to "
            f"{len(tokens)} tokens; put exactly their rows there first"
        )


def _refuse_unsliced(limits: Limits) -> None:
    if not limits.sliced:
        raise InvalidArgument(
            "this memory has no rows that can be moved in slices; save and restore it whole"
        )
