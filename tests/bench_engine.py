"""What the engine costs beside the model: run with
``scripts/test tests/bench_engine.py --benchmark-enable --benchmark-only -s``.

Everything here runs on the simulated runtime at zero model cost, so the figures are the engine's
own: goals in `design.md` §8 are 150 µs and 30 µs per lane for a step, and 200 µs for a look-up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture
from simulation import request

from orchestrator.engine.core import Core, Options
from orchestrator.pool.index import PrefixIndex, pack
from orchestrator.runtime.protocol import Chunk, Limits
from orchestrator.runtime.simulated import SimulatedRuntime

STEPS = 200


class Weightless(SimulatedRuntime):
    """A runtime that only counts: every token is the letter x."""

    def __init__(self, n_sequences: int) -> None:
        super().__init__(Limits(n_sequences, 100_000, 100_000, 512, 1000, 10))
        self._counts = [0] * n_sequences

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Count tokens."""
        for chunk in chunks:
            self._counts[chunk.sequence] = chunk.end
        self._rows = [0] * len(chunks)
        return [row if chunk.wants_logits else None for row, chunk in enumerate(chunks)]

    def token_of(self, digest: int) -> int:
        """Return an x."""
        return ord("x")

    def length(self, sequence: int) -> int:
        """Return the count."""
        return self._counts[sequence]

    def clear(self, sequence: int) -> None:
        """Forget the count."""
        self._counts[sequence] = 0

    def logits(self, row: int) -> NDArray[np.float32]:
        """Return no preference."""
        return np.zeros(self.model.n_vocab, np.float32)


@pytest.mark.parametrize("n_lanes", [1, 2, 4, 8])
def test_a_step_that_decodes(benchmark: BenchmarkFixture, n_lanes: int) -> None:
    """Time 200 steps in which each lane says one token."""
    runtime = Weightless(32)
    core = Core(runtime, runtime.clock, Options(n_lanes=n_lanes))
    for lane in range(n_lanes):
        core.submit(request(f"lane {lane}", max_tokens=90_000), lambda event: None)
    for _ in range(2 * n_lanes + 2):
        core.step()

    def steps() -> None:
        for _ in range(STEPS):
            core.step()

    benchmark.pedantic(steps, rounds=20, warmup_rounds=2)  # type: ignore[no-untyped-call]


def _path(chat: list[int], shape: str, number: int, rng: random.Random) -> bytes:
    """Return one of 10,000 paths: along its chat, beside it, or each leaving the one before."""
    own = [rng.randrange(50_000) for _ in range(rng.randrange(1, 200))]
    if shape == "zigzag":
        return pack(chat[: number * len(chat) // 10_000] + own)
    beside = shape == "beside" or (shape == "mixed" and number % 3)
    return pack(chat[: rng.randrange(1, 8192)] + (own if beside else []))


def _filled(n_chats: int, shape: str) -> tuple[PrefixIndex[int], bytes]:
    """Return an index of 10,000 paths and a prompt of 8,192 tokens that goes one chat's way."""
    rng = random.Random(1)
    chats = [[rng.randrange(50_000) for _ in range(8192)] for _ in range(n_chats)]
    index: PrefixIndex[int] = PrefixIndex()
    for number in range(10_000):
        index.add(_path(chats[number % n_chats], shape, number, rng), number)
    index.add(pack(chats[0][:8000]), 10_000)
    return index, pack(chats[0])


SHAPES = [(1000, "mixed"), (10, "mixed"), (1, "along"), (1, "beside"), (1, "zigzag")]


@pytest.mark.parametrize(("n_chats", "shape"), SHAPES)
def test_a_look_up_among_ten_thousand(
    benchmark: BenchmarkFixture, n_chats: int, shape: str
) -> None:
    """Time finding the longest of 10,000 paths, of some chats, that 8,192 tokens begin with."""
    index, prompt = _filled(n_chats, shape)
    found = benchmark(lambda: index.deepest(prompt, 8191))
    assert found is not None
    assert found[0] >= 8000


@pytest.mark.parametrize(("n_chats", "shape"), SHAPES)
def test_a_change_among_ten_thousand(benchmark: BenchmarkFixture, n_chats: int, shape: str) -> None:
    """Time adding a path and removing it again."""
    index, prompt = _filled(n_chats, shape)

    def change() -> None:
        index.add(prompt[: 4 * 8100], -1)
        index.remove(prompt[: 4 * 8100], -1)

    benchmark(change)
    assert index.at(prompt[: 4 * 8100]) == []
