"""How many cells are in use, and how many would come free?

llama.cpp does not say. A copy shares cells, so the lengths of the sequences do not add up; the
ledger keeps a tree of spans, each span a run of cells owned by all sequences below it:

    a = [0, 100)            span 0..60 ── span 60..100   (a)
    b = copy of a's 60,               └── span 60..75    (b)      used = 60 + 40 + 15
        then 15 more

It knows lengths only, no tokens, and no runtime. Invariant: `used` is the sum of all live spans,
which equals the number of distinct cells the runtime holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from orchestrator.errors import InvalidArgument, PoolFull


class _Span:
    """A run of cells. `references` counts the spans and sequences right below it."""

    __slots__ = ("length", "parent", "references")

    def __init__(self, parent: _Span | None, length: int) -> None:
        self.parent = parent
        self.length = length
        self.references = 0


def _chain(span: _Span | None) -> Iterator[_Span]:
    """Walk from a span up to the first cells of its path.

    What was split for a copy that is gone is one span again first: else a path that lives long,
    and is copied at many lengths, would fall to pieces.
    """
    while span is not None:
        while (parent := span.parent) is not None and parent.references == 1:
            span.parent, span.length = parent.parent, parent.length + span.length
        yield span
        span = span.parent


class Ledger:
    """Counts the cells of sequences that share them.

    `n_cells` is the pool's capacity, None where tokens take no cell (pure recurrent models).
    All sizes are in cells, one per token of a distinct path.
    """

    def __init__(self, n_cells: int | None) -> None:
        self._n_cells = n_cells
        self._used = 0
        self._lengths: dict[int, int] = {}
        self._tails: dict[int, _Span | None] = {}

    @property
    def used(self) -> int:
        """Cells that at least one sequence holds; 0 where tokens take no cell."""
        return 0 if self._n_cells is None else self._used

    @property
    def free(self) -> int | None:
        """Cells left, None where tokens take no cell."""
        return None if self._n_cells is None else self._n_cells - self._used

    def length(self, sequence: int) -> int:
        """Return how many tokens the sequence holds."""
        return self._lengths.get(sequence, 0)

    def fits(self, cells: int) -> bool:
        """Return whether `cells` more can be taken now."""
        return self._n_cells is None or self._used + cells <= self._n_cells

    def extend(self, sequence: int, count: int) -> None:
        """Append `count` tokens to a sequence; raises `PoolFull` and changes nothing."""
        if count <= 0:
            raise InvalidArgument(f"cannot extend by {count} tokens; give at least 1")
        if not self.fits(count):
            raise PoolFull(
                f"{count} cells are wanted and {self.free} of {self._n_cells} are free; evict first"
            )
        tail = self._tails.get(sequence)
        if tail is None or tail.references > 1:  # somebody shares the tail: branch off
            span = _Span(tail, count)
            if tail is not None:
                tail.references += 1
            self._attach(sequence, span)
        else:
            tail.length += count
        self._used += count
        self._lengths[sequence] = self.length(sequence) + count

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Let an empty `target` share the first `length` cells of `source` (None: all)."""
        held = self.length(source)
        length = held if length is None else length
        if self.length(target):
            raise InvalidArgument(f"sequence {target} is not empty; clear it before copying to it")
        if not 0 < length <= held:
            raise InvalidArgument(f"cannot copy {length} of the {held} tokens of sequence {source}")
        self._lengths[target] = length
        span = self._split(source, length)
        span.references += 1
        self._tails[target] = span

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first `length` cells of a sequence."""
        self._refuse_cut(sequence, length)
        if length == self.length(sequence):
            return
        if length == 0:
            self.clear(sequence)
            return
        span = self._split(sequence, length)
        old = self._tails[sequence]
        self._attach(sequence, span)
        self._release(old)
        self._lengths[sequence] = length

    def clear(self, sequence: int) -> None:
        """Empty a sequence; cells nobody else holds come free."""
        self._release(self._tails.pop(sequence, None))
        self._lengths.pop(sequence, None)

    def reset(self) -> None:
        """Empty every sequence."""
        self._used = 0
        self._lengths.clear()
        self._tails.clear()

    def freed_by(self, sequences: Iterable[int]) -> int:
        """Return the cells that clearing all of `sequences` would free."""
        return self.freed_by_cutting(dict.fromkeys(sequences, 0))

    def freed_by_cutting(self, lengths: Mapping[int, int]) -> int:
        """Return the cells that cutting each sequence to its length would free, all together.

        A length of 0 is a clearing; raises `InvalidArgument` for one beyond what is held.
        """
        for sequence, length in lengths.items():
            self._refuse_cut(sequence, length)
        if self._n_cells is None:
            return 0
        asked: dict[int, int] = {}  # span -> how many of its references have given way
        kept: dict[int, int] = {}  # span -> the greatest length that any of those keeps
        freed = 0
        for sequence, length in lengths.items():
            end, keep = self.length(sequence), length
            for span in _chain(self._tails.get(sequence)):
                asked[id(span)] = asked.get(id(span), 0) + 1
                keep = kept[id(span)] = max(keep, kept.get(id(span), 0))
                if asked[id(span)] < span.references:
                    break
                start = end - span.length
                freed += min(end - keep, span.length)
                if keep > start:
                    break
                end = start
        return freed

    def _refuse_cut(self, sequence: int, length: int) -> None:
        held = self.length(sequence)
        if not 0 <= length <= held:
            raise InvalidArgument(f"cannot cut sequence {sequence} of {held} tokens to {length}")

    def _attach(self, sequence: int, span: _Span) -> None:
        """Make `span` the tail, taking over the reference the sequence had on its old one."""
        old = self._tails.get(sequence)
        if old is not None and span.parent is old:
            old.references -= 1
        span.references += 1
        self._tails[sequence] = span

    def _split(self, sequence: int, length: int) -> _Span:
        """Return the span that ends at `length` on the sequence's path, cutting one if needed."""
        end = self.length(sequence)
        for span in _chain(self._tails.get(sequence)):
            start = end - span.length
            if length == end:
                return span
            if start < length:
                upper = _Span(span.parent, length - start)
                upper.references = 1
                span.parent, span.length = upper, end - length
                return upper
            end = start
        raise InvalidArgument(f"sequence {sequence} holds no cell at {length}")

    def _release(self, span: _Span | None) -> None:
        while span is not None:
            span.references -= 1
            if span.references:
                return
            self._used -= span.length
            span = span.parent
