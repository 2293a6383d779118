"""What may be asked of a runtime? The same answer for every runtime, before it acts.

llama.cpp answers a wrong argument by ending the process, so nothing reaches it unchecked; the
simulated runtime refuses the same calls in the same words. `length_of` tells how many tokens a
sequence holds; all functions raise `InvalidArgument` and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    source: int, target: int, length: int | None, memory: MemoryKind, length_of: LengthOf
) -> int:
    """Return how many tokens a copy takes along."""
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
