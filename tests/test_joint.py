"""Sequences that share a decode call get what each gets alone, or may not share one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tiny_models
from numpy.typing import NDArray
from real import DEMO, open_runtime

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.protocol import Chunk, Limits, Runtime
from orchestrator.runtime.simulated import SimulatedRuntime

N_SEQUENCES = 6
ERRS_WITH_SEVERAL = "plamo2"
MODELS = [
    *(pytest.param(name, marks=pytest.mark.models) for name in tiny_models.ARCHITECTURES),
    *(
        pytest.param(f"{name} {kind}", marks=pytest.mark.models)
        for name in ("granitehybrid", "rwkv7", "llama")
        for kind in ("Q4_1", "Q8_0")
    ),
    pytest.param(DEMO, marks=pytest.mark.demo),
]

Heard = list[tuple[tuple[int, ...], NDArray[np.float32]]]


class Walk:
    """Sequences fed at random, copied and cleared in between, several in a call if allowed."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.runtime = runtime
        self.rng = random.Random(seed)
        self.held: dict[int, tuple[int, ...]] = {}
        self.heard: Heard = []  # all tokens of a sequence, and the logits after them

    def step(self) -> None:
        """Copy, clear, or evaluate one decode call's worth."""
        free = [s for s in range(N_SEQUENCES) if s not in self.held]
        kind = self.rng.random()
        if kind < 0.15 and free and self.held:
            source, target = self.rng.choice(list(self.held)), self.rng.choice(free)
            self.runtime.copy(source, target)
            self.held[target] = self.held[source]
        elif kind < 0.25 and self.held:
            self.clear(self.rng.choice(list(self.held)))
        else:
            self.evaluate()

    def clear(self, sequence: int) -> None:
        self.runtime.clear(sequence)
        del self.held[sequence]

    def evaluate(self) -> None:
        count = self.rng.randint(1, N_SEQUENCES)
        chunks = [self.chunk(s) for s in self.rng.sample(range(N_SEQUENCES), count)]
        n_joint = self.runtime.limits.n_joint or len(chunks)
        for start in range(0, len(chunks), n_joint):
            call = chunks[start : start + n_joint]
            for chunk, row in zip(call, self.runtime.decode(call), strict=True):
                assert row is not None
                text = self.held.get(chunk.sequence, ()) + chunk.tokens
                self.held[chunk.sequence] = text
                self.heard.append((text, self.runtime.logits(row)))

    def chunk(self, sequence: int) -> Chunk:
        """Return a token more, as decoding does, or a few as a prompt does."""
        if len(self.held.get(sequence, ())) > 40:
            self.clear(sequence)
        start = len(self.held.get(sequence, ()))
        count = 1 if start and self.rng.random() < 0.7 else self.rng.randint(1, 12)
        tokens = tuple(self.rng.randrange(32, 127) for _ in range(count))
        return Chunk(sequence, start, tokens, wants_logits=True)


@pytest.mark.parametrize("model", MODELS)
def test_sequences_in_one_call_get_what_each_gets_alone(model: str) -> None:
    threads = None if model == DEMO else 1
    with open_runtime(model, n_sequences=N_SEQUENCES, n_batch=128, threads=threads) as runtime:
        walk = Walk(runtime, seed=1)
        for _ in range(25 if model == DEMO else 60):
            walk.step()
        runtime.reset()
        for text, logits in walk.rng.sample(walk.heard, min(40, len(walk.heard))):
            (row,) = runtime.decode([Chunk(0, 0, text, wants_logits=True)])
            assert row is not None
            alone = runtime.logits(row)
            runtime.clear(0)
            assert np.linalg.norm(logits - alone) < 0.1 * np.linalg.norm(alone - alone.mean())


@pytest.mark.parametrize("model", MODELS)
def test_opening_tells_the_models_that_err_with_several_sequences(model: str) -> None:
    with open_runtime(model, n_sequences=2) as runtime:
        assert runtime.limits.n_joint == (1 if model == ERRS_WITH_SEVERAL else 0)


def refuse(runtime: Runtime, count: int) -> None:
    """Check that a call of so many sequences is refused and changes nothing."""
    chunks = [Chunk(sequence, 0, (40, 41), wants_logits=True) for sequence in range(count)]
    with pytest.raises(InvalidArgument, match="at a time"):
        runtime.decode(chunks)
    assert [runtime.length(chunk.sequence) for chunk in chunks] == [0] * count
    runtime.decode(chunks[:-1])


@pytest.mark.models
def test_a_model_that_errs_with_several_is_given_one_at_a_time() -> None:
    with open_runtime(ERRS_WITH_SEVERAL) as runtime:
        refuse(runtime, 2)


def test_the_simulated_runtime_joins_no_more_than_it_is_told_to() -> None:
    refuse(SimulatedRuntime(Limits(4, 100, 100, 64, 1000, 10, n_joint=2)), 3)
