"""How long do the steps take, and what may be done in the next one?

A stream's gaps are the steps, and a step lasts as long as its decode call and the chunk that is
read after it. Both are measured as they happen, and the chunk is cut so that the step stays
within twice the decode call, or a tenth of a second where that is longer: at ten tokens a second
nobody waits for the text.

From the same figures, and from the moves of states, comes what a state costs and saves
(`pool.placement`). A decode call evaluates a token of every lane in one pass over the weights, so
what it takes beyond those tokens is the pass.
"""

from __future__ import annotations

from orchestrator.pool.placement import Costs

_NEW = 0.2  # weight of the latest measurement
STEP_SECONDS = 0.1
CHUNK_LEAST = 16
"""Tokens that are read in any case: fewer cost nearly as much, the weights are read once."""

CHUNK_UNKNOWN = 64
"""Tokens that are read before anything was measured."""

TOKEN_UNKNOWN = 0.005
"""Seconds to read a token before any was read: a small model on a few cores."""

PASS_UNKNOWN = 6
"""Tokens that take as long to read as a pass over the weights does, before a lane has spoken."""

BYTE_UNKNOWN = 1 / 6e9
"""Seconds to move a byte of a state before any was moved: a millisecond for six million."""

MOVE_LEAST = 5e-5
"""Seconds to move a state of any size."""


class Pace:
    """Measured rates, and what they allow. Seconds on the engine's clock."""

    def __init__(self, n_batch: int, step_seconds: float = STEP_SECONDS) -> None:
        self._n_batch = n_batch
        self._step_seconds = step_seconds
        self._decode: float | None = None  # seconds until all speaking lanes have spoken
        self._call: float | None = None  # seconds of one decode call among them
        self._spoken = 0.0  # tokens in it
        self._token: float | None = None  # seconds to read one prompt token
        self._is_rough = True  # known from chunks alone that were mostly the pass
        self._byte: float | None = None  # seconds to move a byte of a state

    def decoded(self, seconds: float, n_lanes: int = 1, n_calls: int = 1) -> None:
        """Note how long it took until all `n_lanes` had spoken, in `n_calls` decode calls."""
        self._decode = _mean(self._decode, seconds)
        self._spoken = _mean(None if self._call is None else self._spoken, n_lanes / n_calls)
        self._call = _mean(self._call, seconds / n_calls)

    def read(self, n_tokens: int, seconds: float) -> None:
        """Note how long reading a chunk took; short ones tell little of the rate."""
        is_rough = n_tokens < CHUNK_LEAST
        if self._is_rough and not is_rough:
            self._token = None
        if not is_rough or self._is_rough:
            self._token = _mean(self._token, seconds / n_tokens)
            self._is_rough = is_rough

    def moved(self, n_bytes: int, seconds: float) -> None:
        """Note how long taking a state, or putting one back, took."""
        if n_bytes > 0:
            self._byte = _mean(self._byte, max(0.0, seconds - MOVE_LEAST) / n_bytes)

    def costs(self, state_bytes: int, n_states: int) -> Costs:
        """Return what a state of so many bytes costs and saves, where `n_states` may be held."""
        token = self._token_seconds
        call = self._call or token * (1 + PASS_UNKNOWN)  # a clock that stands still tells nothing
        spoken = self._spoken if self._call else 1.0
        byte = BYTE_UNKNOWN if self._byte is None else self._byte
        return Costs(
            state_bytes=state_bytes,
            state_seconds=MOVE_LEAST + byte * state_bytes,
            token_seconds=token,
            pass_seconds=max(0.0, call - spoken * token),
            n_states=n_states,
        )

    @property
    def _token_seconds(self) -> float:
        """Seconds to read a token; where only single ones were evaluated, a share of that."""
        if self._token and not self._is_rough:
            return self._token
        if self._call:
            return self._call / (self._spoken + PASS_UNKNOWN)
        return TOKEN_UNKNOWN

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
