"""Where along a prompt is a state worth keeping?

    0 ─────────── input ─────────────┐turn  generation prompt   ┌resend
    [ system | user | … | last user ]│<|im_start|>assistant …   │t]  reply …  ┤reply

The turn point serves the next turn, which renders the history anew and may open the assistant's
turn differently. The resend point serves the same prompt again, but every stop costs a pass over
the weights, so it is left out where the turn point is nearly as good.

A model that only has attention needs no stops: its rows can be cut anywhere.
"""

from __future__ import annotations

from orchestrator.pool.checkpoint import Stop

RESEND_GAP = 6
"""A resend point must save more tokens than this over the turn point before it.

Evaluating this many tokens in one pass costs about what evaluating one does (the weights are
read once either way), while the stop itself costs one more pass on every cold prefill.
"""


def place(n_prompt: int, turn: int, seeded: int, *, divisible: bool) -> tuple[Stop, ...]:
    """Return the stops of a prefill from `seeded` to `n_prompt` tokens, in order.

    `turn` is the length where the input ends (0: none); `divisible` says that kept rows can be
    cut to any length. A point at or before `seeded` is served by what the lane started from.
    """
    if divisible:
        return ()
    stops = []
    reached = seeded
    if seeded < turn < n_prompt:
        stops.append(Stop(turn, "turn"))
        reached = turn
    resend = n_prompt - 1
    if resend - reached > RESEND_GAP:
        stops.append(Stop(resend, "resend"))
    return tuple(stops)
