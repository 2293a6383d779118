"""The ledger counts what a set of cell numbers would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument, PoolFull
from orchestrator.pool.ledger import Ledger

N_CELLS = 120
SEQUENCES = range(5)


class Cells:
    """The oracle: every sequence is a list of cell numbers."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {s: [] for s in SEQUENCES}
        self.made = 0

    def used(self, without: tuple[int, ...] = ()) -> int:
        return len({c for s, cells in self.held.items() if s not in without for c in cells})

    def extend(self, sequence: int, count: int) -> None:
        self.held[sequence] += range(self.made, self.made + count)
        self.made += count


operations = st.lists(
    st.tuples(
        st.sampled_from(["extend", "copy", "cut", "clear"]),
        st.sampled_from(SEQUENCES),
        st.sampled_from(SEQUENCES),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_the_ledger_agrees_with_a_set_of_cells_after_any_operations(
    walk: list[tuple[str, int, int, int]],
) -> None:
    ledger, cells = Ledger(N_CELLS), Cells()
    for name, sequence, other, count in walk:
        held = len(cells.held[sequence])
        if name == "extend" and count and cells.used() + count <= N_CELLS:
            ledger.extend(sequence, count)
            cells.extend(sequence, count)
        elif name == "copy" and 0 < count <= held and not cells.held[other]:
            ledger.copy(sequence, other, count)
            cells.held[other] = cells.held[sequence][:count]
        elif name == "cut" and count <= held:
            ledger.cut(sequence, count)
            cells.held[sequence] = cells.held[sequence][:count]
        elif name == "clear":
            ledger.clear(sequence)
            cells.held[sequence] = []
        assert ledger.used == cells.used()
        assert [ledger.length(s) for s in SEQUENCES] == [len(cells.held[s]) for s in SEQUENCES]
        for gone in ((sequence,), (sequence, other), tuple(SEQUENCES)):
            assert ledger.freed_by(gone) == cells.used() - cells.used(gone)


def test_a_copy_takes_no_cell() -> None:
    ledger = Ledger(100)
    ledger.extend(0, 60)
    ledger.copy(0, 1)
    assert (ledger.used, ledger.free) == (60, 40)


def test_cells_that_two_share_come_free_only_when_both_go() -> None:
    ledger = Ledger(100)
    ledger.extend(0, 60)
    ledger.copy(0, 1)
    assert ledger.freed_by([0]) == 0
    assert ledger.freed_by([0, 1]) == ledger.freed_by([0, 1, 0]) == 60


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    ledger = Ledger(10)
    ledger.extend(0, 8)
    with pytest.raises(PoolFull, match="3 cells are wanted and 2 of 10 are free"):
        ledger.extend(0, 3)
    assert (ledger.used, ledger.length(0)) == (8, 8)


def test_where_tokens_take_no_cell_everything_fits() -> None:
    ledger = Ledger(None)
    ledger.extend(0, 1_000_000)
    assert (ledger.used, ledger.free, ledger.length(0)) == (0, None, 1_000_000)
    assert ledger.freed_by([0]) == 0


def test_impossible_calls_are_refused() -> None:
    ledger = Ledger(10)
    ledger.extend(0, 4)
    ledger.extend(1, 1)
    impossible: list[Callable[[], None]] = [
        lambda: ledger.extend(0, 0),
        lambda: ledger.copy(0, 1),
        lambda: ledger.copy(0, 2, 5),
        lambda: ledger.copy(3, 2),
        lambda: ledger.cut(0, 5),
    ]
    for call in impossible:
        with pytest.raises(InvalidArgument):
            call()
    assert ledger.used == 5
