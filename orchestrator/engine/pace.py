"""How much of a prompt may be read in a step while others speak?

A stream's gaps are the steps, and a step lasts as long as its decode call and the chunk that is
read after it. Both are measured as they happen, and the chunk is cut so that the step stays
within twice the decode call, or a tenth of a second where that is longer: at ten tokens a second
nobody waits for the text.
"""

from __future__ import annotations

_NEW = 0.2  # weight of the latest measurement
STEP_SECONDS = 0.1
CHUNK_LEAST = 16
"""Tokens that are read in any case: fewer cost nearly as much, the weights are read once."""

CHUNK_UNKNOWN = 64
"""Tokens that are read before anything was measured."""


class Pace:
    """Measured rates, and what they allow. Seconds on the engine's clock."""

    def __init__(self, n_batch: int, step_seconds: float = STEP_SECONDS) -> None:
        self._n_batch = n_batch
        self._step_seconds = step_seconds
        self._decode: float | None = None  # seconds of a decode call
        self._token: float | None = None  # seconds to read one prompt token

    def decoded(self, seconds: float) -> None:
        """Note how long a decode call of all speaking lanes took."""
        self._decode = _mean(self._decode, seconds)

    def read(self, n_tokens: int, seconds: float) -> None:
        """Note how long reading a chunk took; short ones tell little of the rate."""
        if n_tokens >= CHUNK_LEAST or self._token is None:
            self._token = _mean(self._token, seconds / n_tokens)

    def budget(self, n_speaking: int) -> int:
        """Return how many prompt tokens this step may read beside `n_speaking` lanes."""
        if not n_speaking:
            return self._n_batch
        if self._token is None:
            return min(CHUNK_UNKNOWN, self._n_batch)
        decode = self._decode or 0.0
        spare = max(decode, self._step_seconds - decode)
        fitting = self._n_batch if self._token <= 0 else int(spare / self._token)
        return max(1, min(max(fitting, CHUNK_LEAST), self._n_batch))

    def seconds(self, n_read: int, n_said: int) -> float:
        """Return about how long reading and then saying so many tokens takes; 0 if unknown."""
        return n_read * (self._token or 0.0) + n_said * (self._decode or 0.0)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEW) * old + _NEW * new
