"""How much is evaluated again when budgets are tight, beside an LRU and beside an oracle?

    .venv/bin/python tests/bench_reuse.py [seed …]

Plays traces of 200 requests on the simulated runtime, hybrid, with 1 and 4 lanes, and prints the
recompute ratio (1.00 is the limit): the engine's, those of least recent use with states where
input and reply end and with states at every message too, and that of an oracle that knows the
trace (`baselines`). A budget is a part of the working set: all rows and states that anything later
in the trace starts from, so that with 100 % the oracle is at 1.00. Every reply is compared with
the cold one on the way. Not a test.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from statistics import mean

from baselines import Map, lru, oracle
from traces import Stage, Trace, cramped, drawn, play, stage

SEEDS = (1, 2)
SHARES = (0.10, 0.25, 0.50, 1.00)
LANES = (1, 4)


def main(seeds: tuple[int, ...] = SEEDS) -> None:
    """Print a line for each budget of each seed, then the means."""
    begun = time.perf_counter()
    names = [f"{n} lane{'s' * (n > 1)}" for n in LANES] + ["lru", "lru, messages", "oracle"]
    print(f"{'':17}{''.join(f'{name:>15}' for name in names)}")
    tables = [_table(drawn(seed)) for seed in seeds]
    for rows in zip(*tables, strict=True):
        label = rows[0][0]
        _print("mean", label, [mean(column) for column in zip(*(r for _, r in rows), strict=True)])
    print(f"{time.perf_counter() - begun:.0f} s")


def _table(trace: Trace) -> list[tuple[str, list[float]]]:
    places = Map(trace)
    working_set = oracle(places)
    rows = []
    for share in SHARES:
        capacity = int(share * working_set.n_bytes)
        cells, states = int(share * working_set.n_rows), int(share * working_set.n_states)
        engines = [cramped(trace.memory, n_lanes, cells, states) for n_lanes in LANES]
        rows.append((f"{share:.0%}", _ratios(trace, engines, places, capacity)))
        _print(f"seed {trace.seed}", *rows[-1])
    engines = [stage(trace.memory, n_lanes) for n_lanes in LANES]
    rows.append(("no limit", _ratios(trace, engines, places, None)))
    _print(f"seed {trace.seed}", *rows[-1])
    return rows


def _ratios(
    trace: Trace, engines: Iterable[Stage], places: Map, capacity: int | None
) -> list[float]:
    others = (
        lru(places, capacity),
        lru(places, capacity, messages=True),
        oracle(places, capacity),
    )
    ideal = trace.ideal().total
    return [
        *(play(trace, engine).ratio for engine in engines),
        *(other.prefilled / ideal for other in others),
    ]


def _print(name: str, label: str, ratios: list[float]) -> None:
    print(f"{name:8}{label:>9}{''.join(f'{ratio:15.3f}' for ratio in ratios)}", flush=True)


if __name__ == "__main__":
    main(tuple(int(seed) for seed in sys.argv[1:]) or SEEDS)
