"""Which tokens does each sequence really hold, and which hold rows alone?

llama.cpp knows positions, not tokens: it takes any state over any rows, and then answers fluently
and wrong. So a runtime writes down here what every sequence was fed, and compares (`checks`) before
it saves a sequence or puts anything over its rows.

It touches no memory and decides nothing: a runtime records a change once it is made. The price is
four bytes per token of a sequence, shared cells or not. A decode call appends its own tokens; only
copies and comparisons go over what is held, as one block of packed ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from orchestrator.errors import InvalidArgument


def packed(tokens: Sequence[int]) -> array[int]:
    """Return token ids as an array of int32, the very object if it is one already."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    try:
        return array("i", tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"tokens must be 32-bit ids: {error}") from error


class Contents:
    """The token ids of every sequence, and whether its recurrent state is missing.

    A sequence with rows and without their state is *incomplete*; of other memory than hybrid that
    is one whose last step of a restore is still to come. `length` and what builds on it raise
    `InvalidArgument` for an id that does not exist; all else expects ids that were checked so.
    """

    def __init__(self, n_sequences: int) -> None:
        self._tokens: list[array[int]] = [array("i") for _ in range(n_sequences)]
        self._incomplete: set[int] = set()

    # ---- asked ----------------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """Return how many tokens a sequence holds."""
        if not 0 <= sequence < len(self._tokens):
            raise InvalidArgument(
                f"sequence {sequence} does not exist; ids are 0 to {len(self._tokens) - 1}"
            )
        return len(self._tokens[sequence])

    def length_complete(self, sequence: int) -> int:
        """Return the same, refusing a sequence that has rows and not their state."""
        if sequence in self._incomplete:
            raise InvalidArgument(
                f"sequence {sequence} is incomplete, it holds rows without their state; restore "
                "the state or clear it"
            )
        return self.length(sequence)

    def is_incomplete(self, sequence: int) -> bool:
        """Whether a sequence has rows and not their state."""
        return sequence in self._incomplete

    def lengths(self) -> dict[int, int]:
        """Return how many tokens each sequence holds that is not empty."""
        return {sequence: len(held) for sequence, held in enumerate(self._tokens) if held}

    def differs_at(self, sequence: int, tokens: array[int]) -> int | None:
        """Return the first position where packed `tokens` are not those held, None for nowhere.

        Looks at as many as the sequence holds; where `tokens` are fewer, they differ at their end.
        """
        held = self._tokens[sequence]
        given = tokens if len(tokens) == len(held) else tokens[: len(held)]
        if given == held:
            return None
        pairs = enumerate(zip(given, held, strict=False))
        return next((at for at, (here, there) in pairs if here != there), len(given))

    # ---- told -----------------------------------------------------------------------------------

    def extend(self, sequence: int, tokens: tuple[int, ...]) -> None:
        """Append what was fed."""
        self._tokens[sequence].extend(tokens)

    def copy(self, source: int, target: int, length: int, *, is_incomplete: bool = False) -> None:
        """Let `target` hold the first `length` tokens of `source`, with or without a state."""
        self.put(target, self._tokens[source], length, is_incomplete=is_incomplete)

    def put(
        self,
        sequence: int,
        tokens: array[int],
        length: int | None = None,
        *,
        is_incomplete: bool = False,
    ) -> None:
        """Let a sequence hold the first `length` of packed `tokens` (None: all)."""
        self._tokens[sequence] = tokens[:length]
        (self._incomplete.add if is_incomplete else self._incomplete.discard)(sequence)

    def strip(self, sequence: int) -> None:
        """Take the state away."""
        self._incomplete.add(sequence)

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens."""
        del self._tokens[sequence][length:]
        if not length:
            self._incomplete.discard(sequence)

    def clear(self, sequence: int) -> None:
        """Let a sequence hold nothing."""
        self.put(sequence, array("i"))

    def reset(self) -> None:
        """Let no sequence hold anything."""
        for sequence in range(len(self._tokens)):
            self.clear(sequence)
