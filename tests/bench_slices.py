"""How long are the lanes held up while a long checkpoint moves to host memory and back?

    .venv/bin/python tests/bench_slices.py [model] [tokens]

The checkpoint is saved and restored whole and in slices, in turns; of the calls of each way the
best total and the median of the longest single one are told, since a lane waits for one call at a
time. Not a test.
"""

from __future__ import annotations

import array
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from real import DEMO, open_runtime

from orchestrator.runtime.protocol import Chunk, Runtime

ROUNDS = 7
WAYS = (0, 256, 512)  # rows per slice, 0: whole
Tokens = Sequence[int]
T = TypeVar("T")


def main(model: str = DEMO, n_tokens: str = "2000") -> None:
    """Print a line per way and direction."""
    count = int(n_tokens)
    tokens = array.array("i", [32 + number * 7 % 90 for number in range(count)])
    sizes = {"n_context": 2 * count + 64, "n_sequences": 4, "n_batch": 512, "threads": 1}
    with open_runtime(model, **sizes) as runtime:
        fill(runtime, tokens)
        whole = len(runtime.save(0, tokens)) / 2**20
        print(f"{model}, {count} tokens, {whole:.1f} MiB; milliseconds: all, longest call")
        taken: dict[tuple[int, str], list[list[float]]] = {}
        for _ in range(ROUNDS):
            for rows in WAYS:
                saved, restored = measure(runtime, tokens, rows)
                taken.setdefault((rows, "save"), []).append(saved)
                taken.setdefault((rows, "restore"), []).append(restored)
        for (rows, direction), rounds in taken.items():
            way = f"slices of {rows}" if rows else "whole"
            total = min(sum(calls) for calls in rounds)
            longest = statistics.median(max(calls) for calls in rounds)
            print(f"{way:14} {direction:8} {total:8.2f} {longest:8.2f}")


def fill(runtime: Runtime, tokens: Tokens) -> None:
    """Read the text into sequence 0."""
    n_batch = runtime.limits.n_batch
    for start in range(0, len(tokens), n_batch):
        part = tuple(tokens[start : start + n_batch])
        runtime.decode([Chunk(0, start, part, wants_logits=False)])


def measure(runtime: Runtime, tokens: Tokens, rows: int) -> tuple[list[float], list[float]]:
    """Save sequence 0 and restore it as sequence 1; the milliseconds of every call."""
    saved: list[float] = []
    restored: list[float] = []
    if rows:
        spans = [(start, min(start + rows, len(tokens))) for start in range(0, len(tokens), rows)]
        slices = [timed(saved, runtime.save_rows, 0, *span, tokens) for span in spans]
        state = timed(saved, runtime.save_state, 0, tokens)
        for (start, _), blob in zip(spans, slices, strict=True):
            timed(restored, runtime.restore_rows, 1, start, blob, tokens)
        timed(restored, runtime.restore_state, 1, state, tokens)
    else:
        blob = timed(saved, runtime.save, 0, tokens)
        timed(restored, runtime.restore, 1, blob, tokens)
    runtime.clear(1)
    return saved, restored


def timed(times: list[float], call: Callable[..., T], *arguments: Any) -> T:
    """Call, and note how many milliseconds it took."""
    begun = time.perf_counter()
    result = call(*arguments)
    times.append(1000 * (time.perf_counter() - begun))
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
