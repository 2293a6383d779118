"""What leaves first when room is needed?

    superseded  <  of one turn  <  what may serve several or become a chat  <  a chat's latest turn

and among equals what is worth least: the tokens that would have to be read again, more for what
many start from, divided by the square root of the time since they were last of use, so that a dear
conversation outlives a flood of cheap ones (of 0.75, 0.5 and a logarithm this came out best over
`tests/bench_reuse.py`). Use is counted on a logical tick, not on a clock; of
two that are worth the same the one used longer ago leaves. Nobody knows of a first turn without a
name whether a chat will come of it, so it is no dearer than what many share.

Checkpoints form a tree, and a token is read again only from the nearest one above: so what stands
close below another is worth little, and the last one on a long way all of it. History (states that
only serve who goes back) is thinned by what it costs those who do: who leaves the path anywhere
between a state and the next one reads from it.

    ───●────────●──■──────────────●     ■ spares `before` tokens to everyone who leaves the path
             before   after             within `after`; the product is its worth
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.pool.checkpoint import Checkpoint
from orchestrator.pool.index import Span

SUPERSEDED, OF_ONE_TURN, SHARED, LATEST_TURN = range(4)

Rank = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a checkpoint stands among the others; the lowest leaves first.

    `group` is one of the four above; `replay` the tokens to evaluate again if it were gone,
    from the nearest other checkpoint on its path; `age` in ticks since its last use; `n_users`
    conversations started from it.
    """

    group: int
    replay: int
    age: int
    n_users: int = 1

    def rank(self) -> Rank:
        """Return the sort key."""
        often = 1 + math.log2(max(1, self.n_users))
        return self.group, self.replay * often / faded(self.age), -self.age


def faded(age: int) -> float:
    """Return by how much a worth is to be divided, so many ticks after its last use."""
    return math.sqrt(1 + age)


def leaving_order(
    checkpoints: Iterable[Checkpoint], standing: Callable[[Checkpoint], Standing]
) -> list[Checkpoint]:
    """Return the checkpoints, the first to leave first."""
    return sorted(checkpoints, key=lambda checkpoint: standing(checkpoint).rank())


def worth(span: Span) -> int:
    """Return what a state of history spares those who go back, in tokens squared."""
    return span.before * (span.before if span.after is None else span.after)


def fewest(
    candidates: Sequence[Checkpoint], enough: Callable[[Sequence[Checkpoint]], bool]
) -> tuple[Checkpoint, ...] | None:
    """Return victims from the front of `candidates` that are `enough`, None if all are not.

    Sharing makes this more than a prefix of the list: a checkpoint whose cells others hold frees
    nothing alone, so those that turn out not to matter are spared again, the most valuable first.
    `enough` of some must be `enough` of more.
    """
    if not enough(candidates):
        return None
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(candidates[:middle]) else (middle + 1, high)
    return tuple(_spared(list(candidates[:low]), enough))


def _spared(
    victims: list[Checkpoint], enough: Callable[[Sequence[Checkpoint]], bool]
) -> list[Checkpoint]:
    """Return the victims that matter, the most valuable that do not spared first.

    Runs that can be spared together are found by doubling, so that it takes a few questions for
    each that matters and not one for each that does not.
    """
    needed: list[Checkpoint] = []
    while victims:
        low, step = 0, 1

        def spares(count: int) -> bool:
            return enough([*victims[: len(victims) - count], *needed])

        while low + step <= len(victims) and spares(low + step):
            low, step = low + step, 2 * step
        high = min(low + step - 1, len(victims))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if spares(middle) else (low, middle - 1)
        del victims[len(victims) - low :]
        needed[:0] = victims[-1:]
        del victims[-1:]
    return needed
