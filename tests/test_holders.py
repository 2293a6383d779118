"""Rows, states and cells stay in step through anything that may be done with them.

Random walks over everything a runtime offers, refused calls included. The oracle is a list of
tokens per sequence, and a fresh sequence that reads them: whatever stands, stands for its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from real import open_runtime

from orchestrator.engine.memory import Memory
from orchestrator.errors import InvalidArgument, PoolFull, StateRefused
from orchestrator.runtime.protocol import Chunk, Limits, MemoryKind, Runtime
from orchestrator.runtime.simulated import SimulatedRuntime

N_SEQUENCES, N_CELLS, SPARE = 6, 256, 5


@dataclass(slots=True)
class Held:
    """What a sequence ought to hold."""

    tokens: list[int] = field(default_factory=list)
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A state, or rows from `start` on, and the tokens they are of."""

    blob: bytes
    tokens: list[int]
    start: int | None = None


class Walk:
    """Does anything to the first sequences of a runtime; the last one is kept to read cold."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.runtime, self.memory = runtime, Memory(runtime)
        self.kind, self.rng = runtime.model.memory, random.Random(seed)
        self.held = [Held() for _ in range(SPARE)]
        self.saved: list[Saved] = []
        self.done: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    def run(self, n_steps: int) -> None:
        operations: list[Callable[[], None]] = [
            self.feed,
            self.feed,
            self.copy,
            self.copy_rows,
            self.strip,
            self.cut,
            self.clear,
            self.save_state,
            self.save_rows,
            self.save_whole,
            self.restore_state,
            self.restore_state,
            self.restore_rows,
            self.restore_rows,
        ]
        for _ in range(n_steps):
            operation = self.rng.choice(operations)
            operation()
            self.check()

    # ---- what is done, and whether it may be -------------------------------------------------

    def any(self) -> tuple[int, Held]:
        sequence = self.rng.randrange(SPARE)
        return sequence, self.held[sequence]

    def attempt(self, name: str, is_allowed: bool, call: Callable[[], object]) -> bool:
        """Make a call that must be refused unless it is allowed; cells may always be missing."""
        try:
            call()
        except InvalidArgument:
            assert not is_allowed, f"{name} was refused"
            self.refused[name] = self.refused.get(name, 0) + 1
            return False
        except PoolFull:
            return False
        assert is_allowed, f"{name} was not refused"
        self.done[name] = self.done.get(name, 0) + 1
        return True

    def feed(self) -> None:
        sequence, held = self.any()
        tokens = tuple(self.rng.choices((40, 41), k=self.rng.choice((1, 1, 2, 9, 30))))
        chunk = Chunk(sequence, len(held.tokens), tokens, wants_logits=True)
        fits = not held.is_bare and chunk.end <= N_CELLS
        if self.attempt("feed", fits, lambda: self.memory.decode([chunk])):
            held.tokens += tokens

    def copy(self) -> None:
        (source, held), (target, there) = self.any(), self.any_but_full()
        length = self.rng.choice((len(held.tokens), self.rng.randrange(len(held.tokens) + 2)))
        fits = 0 < length <= len(held.tokens) and not there.tokens and not held.is_bare
        whole = length == len(held.tokens) or self.kind == "attention"
        if self.attempt("copy", fits and whole, lambda: self.memory.copy(source, target, length)):
            there.tokens = held.tokens[:length]

    def copy_rows(self) -> None:
        (source, held), (target, there) = self.any(), self.any_but_full()
        length = self.rng.randrange(len(held.tokens) + 2)
        fits = 0 < length <= len(held.tokens) and not there.tokens and self.kind == "hybrid"
        if self.attempt("copy_rows", fits, lambda: self.memory.copy_rows(source, target, length)):
            self.held[target] = Held(held.tokens[:length], is_bare=True)

    def strip(self) -> None:
        sequence, held = self.any()
        fits = bool(held.tokens) and not held.is_bare and self.kind == "hybrid"
        if self.attempt("strip", fits, lambda: self.memory.strip(sequence)):
            held.is_bare = True

    def cut(self) -> None:
        sequence, held = self.any()
        length = self.rng.randrange(len(held.tokens) + 2)
        rows_alone = held.is_bare and (self.kind == "hybrid" or length == 0)
        part = rows_alone or self.kind == "attention"
        fits = length == len(held.tokens) or (length < len(held.tokens) and part)
        if self.attempt("cut", fits, lambda: self.memory.cut(sequence, length)):
            self.held[sequence] = Held(held.tokens[:length], held.is_bare and length > 0)

    def clear(self) -> None:
        sequence, held = self.any()
        if len(held.tokens) < self.rng.randrange(120):
            return
        self.rng.choice((self.memory.clear, self.memory.scrub))(sequence)
        self.held[sequence] = Held()

    def save_state(self) -> None:
        sequence, held = self.any()
        fits = bool(held.tokens) and not held.is_bare
        tokens, fits = self.named(held, fits)
        found: list[bytes] = []
        save = self.runtime.save_state
        if self.attempt("save_state", fits, lambda: found.append(save(sequence, tokens))):
            self.saved.append(Saved(found[0], tokens))

    def save_rows(self) -> None:
        sequence, held = self.any()
        start, end = sorted(self.rng.choices(range(len(held.tokens) + 1), k=2))
        start = self.rng.choice((0, start))
        tokens, fits = self.named(held, self.kind != "recurrent" and start < end)
        found: list[bytes] = []
        save = self.runtime.save_rows
        if self.attempt(
            "save_rows", fits, lambda: found.append(save(sequence, start, end, tokens))
        ):
            self.saved.append(Saved(found[0], tokens[:end], start))

    def named(self, held: Held, fits: bool) -> tuple[list[int], bool]:
        """Return the tokens a sequence holds, now and then with one that is another."""
        tokens = list(held.tokens)
        if tokens and self.rng.random() < 0.3:
            tokens[self.rng.randrange(len(tokens))] ^= 1
            return tokens, False
        return tokens, fits

    def save_whole(self) -> None:
        """Save what `restore` in slices takes, so that its parts are there for one another."""
        sequence, held = self.any()
        tokens, n = list(held.tokens), len(held.tokens)
        if not tokens or held.is_bare:
            return
        if self.kind != "recurrent":
            for start, end in {(0, (n + 1) // 2), ((n + 1) // 2, n)} - {(1, 1)}:
                blob = self.runtime.save_rows(sequence, start, end, tokens)
                self.saved.append(Saved(blob, tokens[:end], start))
        self.saved.append(Saved(self.runtime.save_state(sequence, tokens), tokens))

    def restore_state(self) -> None:
        states = [saved for saved in self.saved if saved.start is None]
        sequence, held = self.any_but_whole()
        if not states:
            return
        saved = self.rng.choice(self.likely(states, held))
        fits, is_own = held.is_bare, held.tokens == saved.tokens
        if self.kind == "recurrent":
            fits, is_own = not held.tokens, True
        else:
            fits = fits and len(held.tokens) == len(saved.tokens)
        self.restored(
            "restore_state",
            sequence,
            (fits, is_own),
            lambda: self.memory.restore_state(sequence, saved.blob, saved.tokens),
            Held(list(saved.tokens)),
        )

    def restore_rows(self) -> None:
        rows = [saved for saved in self.saved if saved.start is not None]
        sequence, held = self.any_but_whole()
        if not rows:
            return
        saved = self.rng.choice(self.likely(rows, held))
        start = saved.start or 0
        fits = start == len(held.tokens) and (held.is_bare or not held.tokens)
        self.restored(
            "restore_rows",
            sequence,
            (fits, held.tokens == saved.tokens[:start]),
            lambda: self.memory.restore_rows(sequence, start, saved.blob, saved.tokens),
            Held(list(saved.tokens), is_bare=True),
        )

    def any_but_full(self) -> tuple[int, Held]:
        """Return any sequence, more often an empty one."""
        candidates = [self.any() for _ in range(3)]
        return next((each for each in candidates if not each[1].tokens), candidates[0])

    def any_but_whole(self) -> tuple[int, Held]:
        """Return any sequence, more often one that something can be restored to."""
        candidates = [self.any() for _ in range(4)]
        return next((each for each in candidates if each[1].is_bare), candidates[0])

    def likely(self, saved: list[Saved], held: Held) -> list[Saved]:
        """Prefer what fits by its length, with the right tokens or not: that is the question."""
        n = len(held.tokens)
        by_length = [s for s in saved if (len(s.tokens) if s.start is None else s.start) == n]
        own = [s for s in by_length if s.tokens[:n] == held.tokens]
        return self.rng.choice((own or by_length or saved, by_length or saved, saved))

    def restored(
        self,
        name: str,
        sequence: int,
        what: tuple[bool, bool],
        call: Callable[[], None],
        then: Held,
    ) -> None:
        fits, is_own = what
        refused = None
        try:
            if self.attempt(name, fits and is_own, call):
                self.held[sequence] = then
            elif fits:  # no cells were left for it
                self.held[sequence] = Held()
        except StateRefused as refusal:
            refused = refusal.field
            self.refused["rows"] = self.refused.get("rows", 0) + 1
            self.held[sequence] = Held()
        assert refused == ("rows" if fits and not is_own else None)

    # ---- what stands -------------------------------------------------------------------------

    def check(self) -> None:
        lengths = [len(held.tokens) for held in self.held]
        assert [self.runtime.length(s) for s in range(SPARE)] == lengths
        assert [self.memory.ledger.length(s) for s in range(SPARE)] == lengths
        if isinstance(self.runtime, SimulatedRuntime):
            assert self.memory.ledger.used == self.runtime.used_cells

    def finish(self) -> int:
        """Let every whole sequence go on beside one that read its tokens; return how many did."""
        n_whole = 0
        for sequence, held in sorted(enumerate(self.held), key=lambda each: not each[1].is_bare):
            free = self.memory.ledger.free
            fits = free is None or len(held.tokens) + 2 <= free
            if held.tokens and not held.is_bare and fits and len(held.tokens) < N_CELLS:
                n_whole += 1
                self.read(SPARE, tuple(held.tokens))
                assert np.allclose(self.read(SPARE, (65,)), self.read(sequence, (65,)), atol=0.2)
                self.memory.clear(SPARE)
            self.memory.clear(sequence)
        assert self.memory.ledger.used == 0
        return n_whole

    def read(self, sequence: int, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        for at in range(0, len(tokens), 32):
            chunk = Chunk(sequence, self.runtime.length(sequence), tokens[at : at + 32], True)
            (row,) = self.memory.decode([chunk])
        assert row is not None
        return self.runtime.logits(row)


def walk(runtime: Runtime, seeds: range, n_steps: int) -> list[Walk]:
    """Walk from an empty runtime, once per seed; at least some sequences must end whole."""
    walks = []
    n_whole = 0
    for seed in seeds:
        runtime.reset()
        walks.append(Walk(runtime, seed))
        walks[-1].run(n_steps)
        n_whole += walks[-1].finish()
    assert n_whole >= len(seeds)
    return walks


def total(walks: list[Walk], name: str, part: str = "done") -> int:
    return sum(getattr(each, part).get(name, 0) for each in walks)


@pytest.mark.parametrize("memory", get_args(MemoryKind))
def test_whatever_was_done_a_sequence_stands_for_its_tokens(memory: MemoryKind) -> None:
    limits = Limits(N_SEQUENCES, N_CELLS, N_CELLS, 32, 1000, 10)
    walks = walk(SimulatedRuntime(limits, memory=memory), range(150), n_steps=150)
    used = {"feed", "copy", "cut", "save_state", "restore_state"}
    refused = used | {"copy_rows", "strip", "save_rows"}
    used |= {"copy_rows", "strip"} if memory == "hybrid" else set()
    used |= {"save_rows", "restore_rows"} if memory != "recurrent" else set()
    refused |= {"restore_rows", "rows"} if memory != "recurrent" else set()
    refused -= {"feed"} if memory == "recurrent" else set()
    assert {name for name in used if total(walks, name) < 5} == set()
    assert {name for name in refused if total(walks, name, "refused") < 5} == set()


@pytest.mark.models
@pytest.mark.parametrize(
    "model", ["lfm2", "qwen35", "falcon-h1", "granitehybrid", "jamba", "llama", "mamba2"]
)
def test_on_a_real_model_too_a_sequence_stands_for_its_tokens(model: str) -> None:
    with open_runtime(model, n_context=N_CELLS, n_batch=32, n_ubatch=32, threads=1) as runtime:
        walks = walk(runtime, range(20), n_steps=120)
        assert (total(walks, "copy_rows") > 5) == runtime.limits.snapshots
        assert (total(walks, "rows", "refused") > 0) == runtime.limits.sliced
