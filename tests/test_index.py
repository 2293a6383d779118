"""The index finds what comparing with every path would find."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.pool import index as module
from orchestrator.pool.index import PrefixIndex, Span, common_length, pack

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def lcp(a: Path, b: Path) -> int:
    """Return the length of the common prefix, the slow way."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@dataclass
class Oracle:
    """The same index as a list of paths."""

    kept: dict[int, Path] = field(default_factory=dict)  # by value

    def prefixes(self, query: Path) -> list[tuple[int, int]]:
        return sorted((len(p), v) for v, p in self.kept.items() if query[: len(p)] == p)

    def deepest(self, query: Path, n_most: int) -> tuple[int, list[int]] | None:
        found = [(length, v) for length, v in self.prefixes(query) if length <= n_most]
        return (found[-1][0], [v for n, v in found if n == found[-1][0]]) if found else None

    def at(self, query: Path) -> list[int]:
        return [v for v, p in self.kept.items() if p == query]

    def nearest(self, query: Path) -> tuple[int, list[int]]:
        best = max((lcp(p, query) for p in self.kept.values()), default=0)
        return best, sorted(v for v, p in self.kept.items() if lcp(p, query) == best)

    def spans(self, counted: set[int]) -> dict[int, Span]:
        return {value: self._span(value, counted) for value in self.kept}

    def _span(self, value: int, counted: set[int]) -> Span:
        own = self.kept[value]
        others = [self.kept[v] for v in counted & self.kept.keys() - {value}]
        above = [len(p) for p in others if len(p) < len(own) and own[: len(p)] == p]
        below = [len(p) - len(own) for p in others if len(p) > len(own) and p[: len(own)] == own]
        before = 0 if own in others else len(own) - max(above, default=0)
        return Span(before, min(below, default=None))


steps = st.tuples(st.sampled_from(["add", "add", "add", "remove"]), paths, st.integers(0))


@settings(max_examples=500, deadline=None)
@given(st.lists(steps, max_size=60), st.lists(paths, max_size=3), st.sets(st.integers(0, 59)))
def test_any_walk_agrees_with_a_list_of_paths(
    walk: list[tuple[str, Path, int]], queries: list[Path], counted: set[int]
) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    oracle = Oracle()
    for number, (step, path, pick) in enumerate(walk):
        if step == "add":
            index.add(pack(path), number)
            oracle.kept[number] = path
        elif oracle.kept:
            gone = sorted(oracle.kept)[pick % len(oracle.kept)]
            index.remove(pack(oracle.kept.pop(gone)), gone)
        check(index, oracle, [*queries, path, (*path, 1), path[:-1]])
        assert index.spans(counted.__contains__) == oracle.spans(counted)


def check(index: PrefixIndex[int], oracle: Oracle, queries: list[Path]) -> None:
    """Compare all look-ups of some paths."""
    for query in queries:
        packed = pack(query)
        assert sorted(index.prefixes(packed)) == oracle.prefixes(query)
        assert sorted(index.at(packed)) == oracle.at(query)
        length, values = index.nearest(packed)
        assert (length, sorted(values)) == oracle.nearest(query)
        for n_most in range(-1, len(query) + 2):
            deepest = index.deepest(packed, n_most)
            ordered = deepest and (deepest[0], sorted(deepest[1]))
            assert ordered == oracle.deepest(query, n_most)


def test_prefixes_come_short_to_long_and_equals_as_they_were_added() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for path, value in (([1, 2, 3], "c"), ([1], "b"), ([1], "a"), ([1, 2, 4], "d")):
        index.add(pack(path), value)
    assert list(index.prefixes(pack([1, 2, 4]))) == [(1, "b"), (1, "a"), (3, "d")]
    assert index.deepest(pack([1, 2, 4]), 2) == (1, ["b", "a"])


def test_a_value_that_is_not_there_cannot_be_removed_and_nothing_changes() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add(pack([1, 2]), "a")
    index.add(pack([1, 3, 4]), "b")
    for path, value in (([1, 2], "b"), ([1], "a"), ([1, 2, 3], "a"), ([9], "a"), ([1, 3], "b")):
        with pytest.raises(KeyError):
            index.remove(pack(path), value)
    assert index.at(pack([1, 2])) == ["a"]
    assert index.at(pack([1, 3, 4])) == ["b"]


# ---- what a look-up costs ---------------------------------------------------------------------


def zigzag(n: int) -> Iterator[list[int]]:
    """A chat whose every turn leaves what the turn before kept; the last one is the longest."""
    for turn in range(n):
        yield [7] * (3 * turn) + [turn, turn]


def on_one_way(n: int) -> Iterator[list[int]]:
    """A chat that kept a checkpoint at every third token."""
    for turn in range(n):
        yield [7] * (3 * turn)


def at_random(n: int) -> Iterator[list[int]]:
    """Chats that leave one another anywhere."""
    rng = random.Random(3)
    for _ in range(n):
        yield [7] * rng.randrange(3 * n) + [rng.randrange(3) for _ in range(20)]


@pytest.mark.parametrize("shape", [zigzag, on_one_way, at_random])
@pytest.mark.parametrize("order", [1, -1])
def test_a_look_up_among_a_thousand_compares_a_few_times(
    shape: Callable[[int], Iterator[list[int]]], order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    entries = [pack(path) for path in shape(1000)]
    for number, path in list(enumerate(entries))[::order]:
        index.add(path, number)
    calls = 0

    def counting(a: bytes, b: bytes) -> int:
        nonlocal calls
        calls += 1
        return common_length(a, b)

    monkeypatch.setattr(module, "common_length", counting)
    most = 0
    for number, path in enumerate(entries):
        index.at(path)  # which bends what is lopsided
        calls = 0
        assert number in index.at(path)
        most = max(most, calls)
    assert most <= 18  # log 1000 to the base 1.5, and the root


def test_a_path_is_kept_once_whatever_ends_along_it() -> None:
    index: PrefixIndex[int] = PrefixIndex()
    path = pack(range(60_000))
    tracemalloc.start()
    try:
        for turn in range(1, 101):
            index.add(path[: 4 * 600 * turn], turn)
            index.add(path[: 4 * 600 * turn] + pack([9, 9]), -turn)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size < 2 * len(path)


@given(paths, paths)
def test_the_common_length_is_counted_in_tokens(a: Path, b: Path) -> None:
    assert common_length(pack(a), pack(b)) == lcp(a, b)


def test_token_ids_that_share_bytes_are_different_tokens() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add(pack([1]), "one")
    assert list(index.prefixes(pack([257]))) == []
    assert common_length(pack([1, 5]), pack([257, 5])) == 0


def test_several_values_may_end_at_one_path() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add(pack([1, 2]), "a")
    index.add(pack([1, 2]), "b")
    index.remove(pack([1, 2]), "a")
    assert list(index.prefixes(pack([1, 2, 3]))) == [(2, "b")]
