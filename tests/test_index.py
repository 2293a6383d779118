"""The radix tree finds what comparing with every path would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.pool.index import PrefixIndex, common_length, pack

paths = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def lcp(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the common prefix, the slow way."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@settings(max_examples=300, deadline=None)
@given(st.lists(paths, max_size=40), st.data())
def test_any_look_up_agrees_with_comparing_all_paths(
    entries: list[tuple[int, ...]], data: st.DataObject
) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    kept = dict(enumerate(entries))
    for value, path in kept.items():
        index.add(pack(path), value)
    gone = data.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else set()
    for value in gone:
        index.remove(pack(kept.pop(value)), value)
    query = data.draw(paths)
    found = sorted(index.prefixes(pack(query)))
    assert found == sorted((len(p), v) for v, p in kept.items() if query[: len(p)] == p)
    best = max((lcp(p, query) for p in kept.values()), default=0)
    length, values = index.nearest(pack(query))
    assert length == best
    assert sorted(values) == sorted(v for v, p in kept.items() if lcp(p, query) == best)


@given(paths, paths)
def test_the_common_length_is_counted_in_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> None:
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
