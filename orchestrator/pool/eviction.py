"""What leaves first when room is needed?

Superseded checkpoints, then everything else by least recent use, and last of all the latest turn
checkpoint of a chat. Use is counted on a logical tick, not on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.pool.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Standing:
    """How a checkpoint stands among the others; the lowest leaves first."""

    is_latest_turn: bool
    is_current: bool
    tick: int

    def rank(self) -> tuple[bool, bool, int]:
        """Return the sort key: superseded < other < latest turn, then oldest first."""
        return self.is_latest_turn, self.is_current, self.tick


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
