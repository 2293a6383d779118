"""What leaves first when room is needed?

    superseded  <  of one turn  <  shared prefixes  <  a chat's latest turn

and among equals what is worth least: the tokens that would have to be read again, divided by how
long ago they were last of use. Use is counted on a logical tick, not on a clock; of two that are
worth the same the one used longer ago leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.pool.checkpoint import Checkpoint

SUPERSEDED, OF_ONE_TURN, SHARED, LATEST_TURN = range(4)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a checkpoint stands among the others; the lowest leaves first.

    `group` is one of the four above; `replay` the tokens to evaluate again if it were gone,
    from the nearest other checkpoint on its path; `age` in ticks since its last use.
    """

    group: int
    replay: int
    age: int

    def rank(self) -> tuple[int, float, int]:
        """Return the sort key."""
        return self.group, self.replay / (self.age + 1), -self.age


def leaving_order(
    checkpoints: Iterable[Checkpoint], standing: Callable[[Checkpoint], Standing]
) -> list[Checkpoint]:
    """Return the checkpoints, the first to leave first."""
    return sorted(checkpoints, key=lambda checkpoint: standing(checkpoint).rank())


def fewest(
    candidates: Sequence[Checkpoint], enough: Callable[[Sequence[Checkpoint]], bool]
) -> tuple[Checkpoint, ...] | None:
    """Return victims from the front of `candidates` that are `enough`, None if all are not.

    Sharing makes this more than a prefix of the list: a checkpoint whose cells others hold frees
    nothing alone, so those that turn out not to matter are spared again, the most valuable first.
    """
    victims: list[Checkpoint] = []
    for candidate in candidates:
        if enough(victims):
            break
        victims.append(candidate)
    if not enough(victims):
        return None
    for spared in reversed(victims.copy()):
        rest = [victim for victim in victims if victim is not spared]
        if enough(rest):
            victims = rest
    return tuple(victims)
