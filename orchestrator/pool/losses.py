"""Would a checkpoint have served this prompt that is no longer there?

Of states that had to leave, or that could not be put back, the place and the reason are
remembered: no state, a path each, and as paths share what they have in common, seldom more than
the paths that were seen anyway. What a chat outgrew is no loss and is not noted.

Invariant: at most `n_tokens_most` tokens of paths; the losses noted longest ago are forgotten
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from orchestrator.pool.seen import Seen

_WIDTH = 4  # bytes of one packed token

LossCause = Literal["evicted", "refused"]
"""evicted: it had to make room; refused: it was there and could not be put back."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A checkpoint of the first `length` tokens is gone."""

    length: int
    cause: LossCause


class Losses:
    """See the module's head. `n_tokens_most` bounds what their paths hold together.

    `divisible` says that rows can be cut anywhere, so that any part of a checkpoint would serve.
    """

    def __init__(self, n_tokens_most: int, *, divisible: bool = False) -> None:
        self._places = Seen(n_tokens_most)
        self._divisible = divisible

    def __len__(self) -> int:
        """Return how many places are remembered."""
        return len(self._places)

    def note(self, path: bytes, length: int, cause: LossCause) -> None:
        """Remember that the checkpoint of the first `length` tokens of a packed path is gone."""
        if 0 < length <= self._places.n_tokens_most:  # a shortened path would name another place
            self._places.add(path[: length * _WIDTH], cause)

    def regained(self, path: bytes, length: int) -> None:
        """Forget a loss: a checkpoint stands there again."""
        self._places.remove(path[: length * _WIDTH])

    def forget(self, path: bytes) -> None:
        """Forget every loss along a packed path."""
        for length, _ in list(self._places.ends(path)):
            self.regained(path, length)

    def longest(self, prompt: bytes, at_most: int) -> Loss | None:
        """Return the longest loss that would have served the first `at_most` tokens of a prompt.

        It costs the branches on the prompt's own path.
        """
        within = prompt[: at_most * _WIDTH]
        if self._divisible:
            part = self._places.nearest(within, 0)
            return Loss(part.length, cast("LossCause", part.note)) if part.length else None
        found = None
        for length, cause in self._places.ends(within):
            found = Loss(length, cast("LossCause", cause))
        return found
