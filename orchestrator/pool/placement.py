"""Where along a prompt is a state worth keeping?

    0 ───────────┐system ──────── input ─────────────┐turn  generation prompt   ┌resend
    [ system and tools | user | … ┊shared … | last user ]│<|im_start|>assistant …   │t]  reply …

The turn point serves the next turn, which renders the history anew and may open the assistant's
turn differently. The resend point serves the same prompt again, the system point every chat that
begins like this one, a shared point the requests that wait behind this one. Every stop costs one
more pass over the weights, so a point that another one nearly serves is left out.

A model that only has attention needs no stops of its own: its rows can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.pool.checkpoint import Stop

RESEND_GAP = 6
"""A point must save more tokens than this over the point before it.

Evaluating this many tokens in one pass costs about what evaluating one does (the weights are
read once either way), while the stop itself costs one more pass on every cold prefill.
"""

BLOCK_LEAST = 64
"""Tokens of a system and tools block that are worth a stop, and of a prefix worth waiting for.

Below it a cold prefill would pay a good part of what a later chat saves.
"""


def place(
    n_prompt: int, turn: int, seeded: int, *, base: int = 0, divisible: bool
) -> tuple[Stop, ...]:
    """Return the stops of a prefill from `seeded` to `n_prompt` tokens, in order.

    `turn` is the length where the input ends and `base` where the system and tools block does
    (0: none); `divisible` says that kept rows can be cut to any length. A point at or before
    `seeded` is served by what the lane started from.
    """
    if divisible:
        return ()
    stops = []
    reached = seeded
    if base - seeded >= BLOCK_LEAST and turn - base > RESEND_GAP:
        stops.append(Stop(base, "system"))
        reached = base
    if reached < turn < n_prompt:
        stops.append(Stop(turn, "turn"))
        reached = turn
    resend = n_prompt - 1
    if resend - reached > RESEND_GAP:
        stops.append(Stop(resend, "resend"))
    return tuple(stops)


def serving(stops: Sequence[Stop], length: int) -> Stop | None:
    """Return the stop that gives back (nearly) all of the first `length` tokens, if one does."""
    near = [stop for stop in stops if 0 <= length - stop.length <= RESEND_GAP]
    return max(near, key=lambda stop: stop.length, default=None)
