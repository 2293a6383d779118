"""From which length on does it pay to move a state instead of reading its tokens again?

    .venv/bin/python tests/bench_tiers.py [model]

Copying within the pool, export to and import from host memory (in slices, as the engine moves
them) against reading, for prompts of several lengths; the break-even length is where export and
import together take as long as reading. Not a test.
"""

from __future__ import annotations

import statistics
import sys

from bench_lanes import read, steady, timed, tokens
from real import DEMO, open_runtime

from orchestrator.engine.memory import Memory
from orchestrator.engine.mover import Mover
from orchestrator.pool.checkpoint import Checkpoint, Holder
from orchestrator.pool.index import pack
from orchestrator.runtime.protocol import Chunk

ROUNDS = 3
LENGTHS = (16, 64, 256, 1024)


def main(model: str = DEMO) -> None:
    """Print a line per length, then the break-even length."""
    print("tokens  read ms  copy ms  export ms  import ms      MiB")
    moving, reading = [], []
    with open_runtime(model, **steady(model, n_context=4096, n_sequences=6)) as runtime:
        memory = Memory(runtime)
        mover = Mover(memory)
        for length in LENGTHS:
            taken: list[list[float]] = []
            for round_ in range(ROUNDS):
                prompt = tokens(length, round_ + 1)
                path = pack(prompt)
                holder = Holder(None, path, length=length)
                kept = Checkpoint(path, length, "turn", 0, 0, holder)
                row = [timed(lambda: read(runtime, 0, prompt))]  # noqa: B023
                memory.ledger.extend(0, length)
                row.append(timed(lambda: memory.copy(0, 1)))
                row.append(timed(lambda: mover.save(kept, 0)))  # noqa: B023
                size = mover.n_bytes
                memory.clear(1)
                memory.clear(0)
                mover.begin_import(kept, 2, lambda stands: None)
                row.append(timed(lambda: _all(mover)))
                mover.forget(kept)
                mover.trim(holder, 0)
                memory.decode([Chunk(2, length, (40,), wants_logits=True)])
                memory.clear(2)
                taken.append(row)
            best = [1e3 * statistics.median(column) for column in zip(*taken, strict=True)]
            reading.append(best[0])
            moving.append(best[2] + best[3])
            print(
                f"{length:6}  {best[0]:7.1f}  {best[1]:7.2f}  {best[2]:9.2f}"
                f"  {best[3]:9.2f}  {size / 2**20:7.1f}"
            )
    print(f"break-even at about {break_even(reading, moving)} tokens")


def _all(mover: Mover) -> None:
    while mover.is_busy:
        mover.advance()


def break_even(reading: list[float], moving: list[float]) -> int:
    """Return the length at which reading takes as long as moving, by the measured slopes."""
    span = LENGTHS[-1] - LENGTHS[0]
    per_read = (reading[-1] - reading[0]) / span
    per_move = (moving[-1] - moving[0]) / span
    fixed = moving[0] - per_move * LENGTHS[0] - (reading[0] - per_read * LENGTHS[0])
    return max(0, round(fixed / (per_read - per_move)))


if __name__ == "__main__":
    main(*sys.argv[1:])
