"""The ledger counts what a set of cell numbers would."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

    def used(self, cut: Mapping[int, int] | None = None) -> int:
        ends = dict(cut or {})
        return len({c for s, cells in self.held.items() for c in cells[: ends.get(s)]})

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
            assert ledger.freed_by(gone) == cells.used() - cells.used(dict.fromkeys(gone, 0))


steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "copy", "copy", "cut"]),
        st.sampled_from(SEQUENCES),
        st.sampled_from(SEQUENCES),
        st.integers(1, 30),
        st.lists(st.tuples(st.sampled_from(SEQUENCES), st.integers(0, 30)), max_size=5),
    ),
    max_size=50,
)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_what_cuts_would_free_is_what_they_free_after_any_operations(
    walk: list[tuple[str, int, int, int, list[tuple[int, int]]]],
) -> None:
    """Paths that branch and are cut at many lengths, asked for many cuts at once."""
    ledger, cells = Ledger(10**9), Cells()
    for name, sequence, other, count, asked in walk:
        held = len(cells.held[sequence])
        if name == "extend":
            ledger.extend(sequence, count)
            cells.extend(sequence, count)
        elif name == "copy" and held and sequence != other:
            ledger.clear(other)
            ledger.copy(sequence, other, 1 + count % held)
            cells.held[other] = cells.held[sequence][: 1 + count % held]
        elif name == "cut":
            ledger.cut(sequence, count % (held + 1))
            cells.held[sequence] = cells.held[sequence][: count % (held + 1)]
        lengths = {s: length % (len(cells.held[s]) + 1) for s, length in asked}
        assert ledger.freed_by_cutting(lengths) == cells.used() - cells.used(lengths)
    before = ledger.used
    wanted = ledger.freed_by_cutting(lengths := {s: len(cells.held[s]) // 2 for s in SEQUENCES})
    for sequence, length in lengths.items():
        ledger.cut(sequence, length)
    assert before - ledger.used == wanted


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


def test_a_cut_frees_what_no_other_sequence_reaches_into() -> None:
    ledger = Ledger(100)
    ledger.extend(0, 60)
    ledger.copy(0, 1, 40)
    ledger.copy(0, 2, 20)
    assert ledger.freed_by_cutting({0: 10}) == 20
    assert ledger.freed_by_cutting({0: 10, 1: 30}) == 30
    assert ledger.freed_by_cutting({0: 10, 1: 0, 2: 5}) == 50
    assert ledger.freed_by_cutting({0: 60, 1: 0, 2: 0}) == 0


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
    assert ledger.freed_by([0]) == ledger.freed_by_cutting({0: 10}) == 0


def test_impossible_calls_are_refused() -> None:
    ledger = Ledger(10)
    ledger.extend(0, 4)
    ledger.extend(1, 1)
    impossible: list[Callable[[], object]] = [
        lambda: ledger.extend(0, 0),
        lambda: ledger.copy(0, 1),
        lambda: ledger.copy(0, 2, 5),
        lambda: ledger.copy(3, 2),
        lambda: ledger.cut(0, 5),
        lambda: ledger.cut(0, -1),
        lambda: ledger.freed_by_cutting({0: 5}),
        lambda: ledger.freed_by_cutting({0: -1}),
        lambda: ledger.freed_by_cutting({3: 1}),
    ]
    for call in impossible:
        with pytest.raises(InvalidArgument):
            call()
    assert ledger.used == 5
