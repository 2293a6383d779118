"""Which requests wait for a prefix that a lane is reading?

A burst of requests with one beginning is to cost one prefill. So a lane is told to keep a state
where its prompt and that of a waiting request part, and the request waits for it, unless it is
interactive: it takes what there is. Waiting is bounded by the request's patience in steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.engine.keeper import Keeper
from orchestrator.engine.lane import Lane
from orchestrator.engine.ticket import Ticket
from orchestrator.pool.index import common_length
from orchestrator.pool.placement import BRANCH_MOST

_LEAST_BYTES = 4 * BRANCH_MOST  # of packed tokens


class Sharing:
    """Decides over waiting requests; `had` are the tokens a request would reuse by now."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def announce(self, ticket: Ticket, lane: Lane, had: int) -> None:
        """Have a lane keep what a request behind it shares, also while no other lane is free.

        Where rows can be cut what the lane leaves behind serves anyway.
        """
        if not self._keeper.divisible:
            self._shared(ticket, lane, had)

    def awaits(self, ticket: Ticket, lanes: Iterable[Lane], had: int) -> bool:
        """Return whether a request had better wait for one of the lanes."""
        awaited = [self._shared(ticket, lane, had) for lane in lanes]
        return any(awaited) and ticket.rank > 0 and ticket.patience > 0

    def _shared(self, ticket: Ticket, lane: Lane, had: int) -> bool:
        """Return whether a lane will keep much more for a request than it has now."""
        if ticket.path[:_LEAST_BYTES] != lane.ticket.path[:_LEAST_BYTES]:
            return False  # as most do: no need to know how much less than the least it is
        length = self._common(ticket, lane)
        if length - had <= BRANCH_MOST or not lane.admission.keeps:
            return False
        if lane.is_ready and lane.fed >= length and self._keeper.divisible:
            self._keeper.keep(lane, "shared", length)  # rows can be cut: no need to wait
            return False
        stop = lane.plant(length)
        return stop is not None and stop.length - had > BRANCH_MOST

    def _common(self, ticket: Ticket, lane: Lane) -> int:
        """Return how many tokens two prompts share, of those that a checkpoint could serve."""
        length = lane.shared.get(ticket.number)
        if length is None:
            length = common_length(ticket.path, lane.ticket.path)
            lane.shared[ticket.number] = length = min(length, len(ticket.request.tokens) - 1)
        return length
