"""What was lost is found where it would have served, and nowhere else."""

from __future__ import annotations

from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.pool.index import pack
from orchestrator.pool.losses import Loss, Losses

Cause = Literal["evicted", "refused"]
Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), max_size=8).map(tuple)
causes: st.SearchStrategy[Cause] = st.sampled_from(["evicted", "refused"])
notes = st.tuples(paths, st.integers(0, 8), st.one_of(causes, st.just("regained")))


@settings(max_examples=300, deadline=None)
@given(st.lists(notes, max_size=30), paths, st.integers(0, 9))
def test_the_longest_loss_is_the_one_a_scan_finds(
    walk: list[tuple[Path, int, Cause | Literal["regained"]]], prompt: Path, at_most: int
) -> None:
    losses, lost = Losses(1000), dict[Path, Cause]()
    for path, length, cause in walk:
        place = path[:length]
        if cause == "regained":
            losses.regained(pack(path), length)
            lost.pop(place, None)
        else:
            losses.note(pack(path), len(place), cause)
            if place:
                lost[place] = cause
    assert len(losses) == len(lost)
    would_serve = [p for p in lost if prompt[: len(p)] == p and len(p) <= at_most]
    best = max(would_serve, key=len, default=None)
    wanted = None if best is None else Loss(len(best), lost[best])
    assert losses.longest(pack(prompt), at_most) == wanted


def test_a_checkpoint_as_long_as_the_prompt_would_not_have_served() -> None:
    losses = Losses(100)
    losses.note(pack([1, 2]), 2, "evicted")
    losses.note(pack([1, 2, 3]), 3, "refused")
    assert losses.longest(pack([1, 2, 3]), 2) == Loss(2, "evicted")
    assert losses.longest(pack([1, 2, 3, 4]), 3) == Loss(3, "refused")


def test_losses_of_long_ago_are_forgotten_first() -> None:
    losses = Losses(6)
    losses.note(pack([1, 1, 1]), 3, "evicted")
    losses.note(pack([2, 2, 2]), 3, "evicted")
    losses.note(pack([3, 3, 3]), 3, "evicted")
    assert losses.longest(pack([1, 1, 1, 1]), 3) is None
    assert losses.longest(pack([3, 3, 3, 3]), 3) == Loss(3, "evicted")


def test_a_place_too_long_to_remember_is_not_taken_for_a_shorter_one() -> None:
    losses = Losses(2)
    losses.note(pack([1, 2, 3]), 3, "evicted")
    assert losses.longest(pack([1, 2, 9]), 2) is None


def test_where_rows_can_be_cut_a_part_of_a_loss_would_have_served() -> None:
    losses = Losses(100, divisible=True)
    losses.note(pack([1, 2, 3, 4]), 4, "evicted")
    assert losses.longest(pack([1, 2, 9, 9]), 3) == Loss(2, "evicted")
    assert losses.longest(pack([1, 2, 3, 4]), 3) == Loss(3, "evicted")
    assert losses.longest(pack([9, 9]), 1) is None
