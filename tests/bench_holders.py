"""What does it cost to keep a lane's state in a spare sequence, or as a snapshot over a holder?

    .venv/bin/python tests/bench_holders.py [model] [tokens] [spares]

Four lanes decode together while one of them is kept, or begun again, in each way in turns. Told
are the call itself and the two joint steps after it, each time the lower quartile of the
processor's time, since other work only adds to it: a copy costs nothing, but gives the lane a
recurrent cell far from the others, and llama.cpp then moves what lies between. Last comes what it
costs to remember which tokens a sequence was fed. Not a test.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from timeit import timeit

from real import DEMO, open_runtime

from orchestrator.runtime.contents import Contents
from orchestrator.runtime.protocol import Chunk, Runtime

LANES = (0, 1, 2, 3)
HOLDER = 4
FIRST_SPARE = 5
ROUNDS = 20
USUAL = 2  # steps before each call, after which the lanes lie side by side again


class Bench:
    """Lanes of a length each, one holder of the first lane's rows, and some spare sequences."""

    def __init__(self, runtime: Runtime, n_tokens: int, n_spares: int) -> None:
        self.runtime = runtime
        self.tokens = array("i", [32 + number * 7 % 90 for number in range(n_tokens)])
        self.spares = self._rotated(n_spares)
        self.lines: dict[str, list[tuple[float, ...]]] = {}
        for start in range(0, n_tokens, runtime.limits.n_batch):
            part = tuple(self.tokens[start : start + runtime.limits.n_batch])
            runtime.decode([Chunk(0, start, part, wants_logits=False)])
        self.state = runtime.save_state(0, self.tokens)
        runtime.copy_rows(0, HOLDER, n_tokens)
        for lane in LANES[1:]:
            self.seed(lane)
        for spare in range(FIRST_SPARE, FIRST_SPARE + n_spares):
            runtime.copy(1, spare)
            self.step()

    def _rotated(self, count: int) -> Iterator[int]:
        while True:
            yield from range(FIRST_SPARE, FIRST_SPARE + count)

    def seed(self, lane: int) -> None:
        """Begin a lane where the holder's snapshot stands."""
        self.runtime.copy_rows(HOLDER, lane, len(self.tokens))
        self.runtime.restore_state(lane, self.state, self.tokens)

    def step(self) -> float:
        """Decode one token of each lane; the milliseconds."""
        length = self.runtime.length
        chunks = [Chunk(lane, length(lane), (60,), wants_logits=True) for lane in LANES]
        return timed(lambda: self.runtime.decode(chunks))

    def tokens_of(self, lane: int) -> array[int]:
        """Return what a lane was fed."""
        return self.tokens + array("i", [60]) * (self.runtime.length(lane) - len(self.tokens))

    def note(self, name: str, emptied: int | None, call: Callable[[], object]) -> None:
        """Make a call among usual steps, and keep what it took and the steps after it."""
        for _ in range(USUAL):
            self.step()
        if emptied is not None:
            self.runtime.clear(emptied)
        taken = timed(call)
        self.lines.setdefault(name, []).append((taken, self.step(), self.step()))

    def round(self) -> None:
        """Keep a lane and begin one in every way."""
        runtime, spare, n = self.runtime, next(self.spares), len(self.tokens)
        fed = self.tokens_of
        self.note("nothing", None, lambda: None)
        self.note("keep: copy to a spare sequence", spare, lambda: runtime.copy(1, spare))
        self.note("keep: save_state", None, lambda: runtime.save_state(1, fed(1)))
        self.note("keep: copy_rows to a holder", HOLDER, lambda: runtime.copy_rows(1, HOLDER, n))
        self.note("seed: copy from a spare sequence", 2, lambda: runtime.copy(spare, 2))
        self.note("seed: copy_rows and restore_state", 3, lambda: self.seed(3))


def timed(call: Callable[[], object]) -> float:
    """Call; the milliseconds it took."""
    begun = time.process_time()
    call()
    return 1000 * (time.process_time() - begun)


def main(model: str = DEMO, n_tokens: str = "200", n_spares: str = "16") -> None:
    """Print a line per way."""
    count, spares = int(n_tokens), int(n_spares)
    sizes = {
        "n_context": 2 * count + 1000,
        "n_cells": 6 * count + 8000,
        "n_sequences": FIRST_SPARE + spares,
        "n_batch": 512,
        "threads": 1,
    }
    with open_runtime(model, **sizes) as runtime:
        bench = Bench(runtime, count, spares)
        for _ in range(ROUNDS):
            bench.round()
        limits = runtime.limits
        print(
            f"{model}: {count} tokens, {spares} spare sequences, a state of "
            f"{limits.state_bytes / 1e6:.2f} MB, rows of {limits.cell_bytes} bytes"
        )
        print(f"{'milliseconds':34} {'call':>8} {'step 1':>8} {'step 2':>8}")
        for name, rows in bench.lines.items():
            low = [statistics.quantiles(column)[0] for column in zip(*rows, strict=True)]
            print(f"{name:34} " + " ".join(f"{each:8.2f}" for each in low))
    remember(32_000)


def remember(n_tokens: int) -> None:
    """Print what the tokens fed cost to write down and to compare."""
    contents, fed = Contents(2), array("i", range(n_tokens))
    contents.put(0, fed)
    listed = list(fed)
    for name, call in (
        ("append one token", lambda: contents.extend(1, (60,))),
        (f"compare {n_tokens} packed", lambda: contents.differs_at(0, fed)),
        (f"compare {n_tokens} listed", lambda: contents.differs_at(0, array("i", listed))),
        (f"copy {n_tokens}", lambda: contents.copy(0, 1, n_tokens)),
    ):
        print(f"{name:34} {1e6 * timeit(call, number=500) / 500:8.2f} µs")


if __name__ == "__main__":
    main(*sys.argv[1:])
