"""The record of paths answers what comparing with every path would, within its bound."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument
from orchestrator.pool.index import pack
from orchestrator.pool.seen import Seen, Sighting

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), max_size=10).map(tuple)


def lcp(a: Path, b: Path) -> int:
    """Return the length of the common prefix, the slow way."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@dataclass
class Oracle:
    """The same record as a list of paths, least recently used first."""

    most: int
    paths: dict[Path, object] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len({path[:end] for path in self.paths for end in range(1, len(path) + 1)})

    def add(self, path: Path, note: object) -> None:
        path = path[: self.most]
        if path:
            self.paths.pop(path, None)
            self.paths[path] = note
        while self.size > self.most:
            del self.paths[next(iter(self.paths))]

    def nearest(self, query: Path) -> Sighting:
        length = max((lcp(path, query) for path in self.paths), default=0)
        at = [path for path in self.paths if lcp(path, query) == length]
        longer = [path for path in at if len(path) > length]
        if longer:
            return Sighting(length, pack(longer[-1][length:]), self.paths[longer[-1]])
        return Sighting(length, b"", self.paths[at[-1]] if at else None)

    def ends(self, query: Path) -> list[tuple[int, object]]:
        on_it = [path for path in self.paths if query[: len(path)] == path]
        return sorted((len(path), self.paths[path]) for path in on_it)


steps = st.tuples(paths, st.sampled_from(["add", "add", "add", "remove"]))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 25), st.lists(steps, max_size=40), st.lists(paths, max_size=5))
def test_any_walk_agrees_with_a_list_of_paths(
    most: int, walk: list[tuple[Path, str]], queries: list[Path]
) -> None:
    seen, oracle = Seen(most), Oracle(most)
    for note, (path, step) in enumerate(walk):
        if step == "add":
            seen.add(pack(path), note)
            oracle.add(path, note)
        else:
            assert seen.remove(pack(path)) == (oracle.paths.pop(path, None) is not None)
        assert seen.n_tokens == oracle.size <= most
        assert len(seen) == len(oracle.paths)
        for query in (*queries, path, (*path, 1), path[:-1], walk[note // 2][0]):
            assert seen.nearest(pack(query)) == oracle.nearest(query)
            assert seen.common(pack(query)) == oracle.nearest(query).length
            assert list(seen.ends(pack(query))) == oracle.ends(query)


def test_what_was_seen_beyond_is_cut_to_what_was_asked_for() -> None:
    seen = Seen(100)
    seen.add(pack([1, 2, 3]))
    seen.add(pack([1, 2, 3, 4, 5, 6]))
    seen.add(pack([1, 2, 3, 4, 5, 7]))
    assert seen.nearest(pack([1, 9]), 3).beyond == pack([2, 3, 4])
    assert seen.nearest(pack([1, 9]), 0).beyond == b""


def test_a_path_longer_than_the_record_is_recorded_from_its_beginning() -> None:
    seen = Seen(3)
    seen.add(pack([1, 2, 3, 4, 5]), "long")
    assert seen.nearest(pack([1, 2, 3, 4])) == Sighting(3, b"", "long")


def test_extending_a_path_adds_only_what_is_new() -> None:
    seen = Seen(10_000)
    for end in range(1000, 9000, 500):
        seen.add(pack(range(end)))
        assert seen.n_tokens == end


def test_asking_does_not_keep_a_path_from_leaving() -> None:
    seen = Seen(4)
    seen.add(pack([1, 2]))
    seen.add(pack([3, 4]))
    assert seen.common(pack([1, 2])) == 2
    seen.add(pack([5, 6]))
    assert seen.common(pack([1, 2])) == 0


def test_what_left_is_freed_at_once() -> None:
    class Note:
        pass

    seen = Seen(6)
    notes = [Note() for _ in range(5)]
    gone = [weakref.ref(note) for note in notes]
    gc.disable()
    try:
        for at in range(5):
            seen.add(pack([at, 7, 8]), notes[at])
        notes.clear()
        assert [ref() is None for ref in gone] == [True, True, True, False, False]
        seen.clear()
        assert all(ref() is None for ref in gone)
    finally:
        gc.enable()
    assert (len(seen), seen.n_tokens) == (0, 0)


def test_a_record_that_is_full_grows_no_more() -> None:
    seen = Seen(2000)

    def churn(first: int) -> None:
        for at in range(first, first + 1000):
            seen.add(pack([*range(at % 50), at, *range(100)]))

    gc.disable()
    try:
        churn(10_000)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        churn(20_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()
    assert seen.n_tokens <= 2000
    # All 2,000 tokens were replaced, and tracing saw only the new ones come.
    assert grown < 100_000


@pytest.mark.parametrize("most", [-1, 1.5])
def test_a_record_of_no_such_size_is_refused(most: int) -> None:
    with pytest.raises(InvalidArgument, match="whole number of 0 or more"):
        Seen(most)
