"""In exact mode every token gets the same bits: alone or in company, in any cutting, warm or cold.

All comparisons are of whole rows with `array_equal`: the last bit of one logit fails a test.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from real import DEMO, as_shipped, open_exact, open_runtime, path_of

from orchestrator.engine.exactness import exacted
from orchestrator.errors import ConfigError, InvalidArgument, StateRefused
from orchestrator.models.inspect import inspect
from orchestrator.runtime import library
from orchestrator.runtime.exact import ANY, N_PASS_MOST, PAIRED, SINGLE, companions
from orchestrator.runtime.llama import LlamaRuntime, Settings, open_llama
from orchestrator.runtime.protocol import Chunk, Limits, Runtime
from orchestrator.runtime.simulated import SimulatedRuntime

N_LANES = 8
F16_VALUES = " and F16 values"
SHIPPED = " as shipped"  # with F32 routers, whose last bit 8-bit activations hide mostly
Q8_0_FILE = 7  # llama_ftype
MODELS = [
    *(pytest.param(name, marks=pytest.mark.models) for name in tiny_models.ARCHITECTURES),
    *(
        pytest.param(f"{name} {kind}", marks=pytest.mark.models)
        for name in ("granitehybrid", "qwen35", "rwkv7", "llama", "kimi-linear")
        for kind in ("Q4_1", "Q8_0")
    ),
    *(
        pytest.param(name, marks=pytest.mark.models)
        for name in (
            "gemma3 Q8_0",
            "lfm2 BF16",
            f"llama{F16_VALUES}",
            f"qwen35 Q8_0{F16_VALUES}",
            f"qwen35moe{SHIPPED}",
            f"lfm2moe{SHIPPED}",
        )
    ),
    pytest.param(DEMO, marks=pytest.mark.demo),
]
CUTTINGS = ((63,), (7, 13, 1, 61, 2), (2,), (1, 63), (31, 32, 1), (50, 1, 1, 1))

Logits = NDArray[np.float32]
Said = dict[tuple[int, ...], list[Logits]]
"""Texts, and the logits after each of their tokens, when they are fed one by one and alone."""


def open_named(name: str, **settings: object) -> AbstractContextManager[LlamaRuntime]:
    """Open a model exactly; its name may ask for F16 values, under which no token may be alone."""
    name, f16, _ = name.partition(F16_VALUES)
    architecture, shipped, _ = name.partition(SHIPPED)
    model = as_shipped(architecture, Q8_0_FILE) if shipped else name
    return open_exact(model, **({"type_v": 1} if f16 else {}), **settings)


@pytest.fixture(params=MODELS, scope="module")
def opened(request: pytest.FixtureRequest) -> Iterator[LlamaRuntime]:
    """Open each model once."""
    with open_named(request.param, n_sequences=N_LANES) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def said(opened: LlamaRuntime) -> Said:
    """Say a few texts token by token, with nobody else there."""
    length = 80 if is_large(opened) else 200
    texts = [text_of(opened, seed, length) for seed in range(2)]
    return {text: say(opened, text) for text in texts}


@pytest.fixture
def runtime(opened: LlamaRuntime) -> LlamaRuntime:
    """Return it emptied."""
    opened.reset()
    return opened


def is_large(runtime: Runtime) -> bool:
    """Whether this is the demo, which takes its time."""
    return runtime.model.n_vocab > 1000


def text_of(runtime: Runtime, seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(32, min(runtime.model.n_vocab, 4000) - 150) for _ in range(length))


def say(runtime: Runtime, text: Sequence[int]) -> list[Logits]:
    runtime.reset()
    logits = [feed(runtime, 0, (token,)) for token in text]
    runtime.reset()
    return logits


def feed(runtime: Runtime, lane: int, tokens: Sequence[int]) -> Logits:
    """Append one chunk to a lane and return the logits after it."""
    chunk = Chunk(lane, runtime.length(lane), tuple(tokens), wants_logits=True)
    (row,) = runtime.decode([chunk])
    assert row is not None
    return runtime.logits(row)


def read(runtime: Runtime, lane: int, text: Sequence[int], sizes: Sequence[int]) -> Logits:
    """Append a text in chunks of the given sizes, over and over, and return the last logits."""
    done = 0
    for wanted in cycle(sizes):
        size = min(wanted, runtime.limits.n_batch)
        logits = feed(runtime, lane, text[done : done + size])
        done += size
        if done >= len(text):
            return logits
    raise AssertionError


# ---- on every model ------------------------------------------------------------------------------


def test_a_text_read_in_any_pieces_is_the_text_said_token_by_token(
    runtime: LlamaRuntime, said: Said
) -> None:
    for text, logits in said.items():
        for lane, sizes in enumerate(CUTTINGS):
            assert np.array_equal(read(runtime, lane, text, sizes), logits[-1])
        runtime.reset()


def test_a_state_restored_in_another_lane_goes_on_with_the_same_bits(
    runtime: LlamaRuntime, said: Said
) -> None:
    for text, logits in said.items():
        half = len(text) // 2
        read(runtime, 1, text[:half], (63,))
        blob = runtime.save(1, text[:half])
        runtime.clear(1)
        feed(runtime, 1, text[:9])  # somebody else takes its place
        for lane in (0, 2, 6):
            runtime.restore(lane, blob, text[:half])
        assert np.array_equal(feed(runtime, 2, text[half : half + 1]), logits[half])
        assert np.array_equal(read(runtime, 0, text[half:], (11,)), logits[-1])
        assert np.array_equal(read(runtime, 6, text[half:], (1, 29)), logits[-1])
        runtime.reset()


class Walk:
    """Lanes that come and go, speak together, read between, and move through host memory."""

    def __init__(self, runtime: LlamaRuntime, said: Said, seed: int) -> None:
        self.runtime, self.said = runtime, said
        self.rng = random.Random(seed)
        self.texts: dict[int, tuple[int, ...]] = {}  # of the lanes that run
        self.compared = 0
        self.crowded = 0  # times a lane spoke between two that hold something and did not

    def step(self) -> None:
        kinds = [self.speak] * 8 + [self.seat] * 5 + [self.read] * 4 + [self.move, self.leave]
        self.rng.choice([*kinds, self.cut])()

    def seat(self) -> None:
        free = [lane for lane in range(N_LANES) if lane not in self.texts]
        if free:
            lane = self.rng.choice(free)
            self.texts[lane] = self.rng.choice(list(self.said))
            self.feed([(lane, self.rng.randint(1, self.runtime.limits.n_batch))])

    def read(self) -> None:
        if lanes := self.unfinished():
            self.feed([(self.rng.choice(lanes), self.rng.randint(1, self.runtime.limits.n_batch))])

    def speak(self) -> None:
        lanes = self.unfinished()
        if not lanes:
            return
        count = self.rng.choice((1, 1, self.rng.randint(1, len(lanes))))
        spoke = self.rng.sample(lanes, count)
        idle = set(self.texts).difference(spoke)
        self.crowded += any(idle.issuperset((lane - 1, lane + 1)) for lane in spoke)
        self.feed([(lane, 1) for lane in spoke])

    def move(self) -> None:
        if self.texts:
            lane = self.rng.choice(list(self.texts))
            text = self.texts.pop(lane)
            held = text[: self.runtime.length(lane)]
            blob = self.runtime.save(lane, held)
            self.runtime.clear(lane)
            there = self.rng.choice([lane for lane in range(N_LANES) if lane not in self.texts])
            self.runtime.restore(there, blob, held)
            self.texts[there] = text

    def leave(self) -> None:
        if self.texts:
            lane = self.rng.choice(list(self.texts))
            del self.texts[lane]
            self.rng.choice((self.runtime.clear, self.runtime.scrub))(lane)

    def cut(self) -> None:
        if self.texts and self.runtime.model.memory == "attention":
            lane = self.rng.choice(list(self.texts))
            self.runtime.cut(lane, self.rng.randint(1, self.runtime.length(lane)))

    def unfinished(self) -> list[int]:
        return [lane for lane, text in self.texts.items() if self.runtime.length(lane) < len(text)]

    def feed(self, counts: Sequence[tuple[int, int]]) -> None:
        """Append so many tokens to each lane, in one call if may be, and compare what comes out."""
        chunks = []
        for lane, count in counts:
            held = self.runtime.length(lane)
            tokens = self.texts[lane][held : held + count]
            chunks.append(Chunk(lane, held, tokens, wants_logits=self.rng.random() < 0.8))
        n_joint = self.runtime.limits.n_joint or len(chunks)
        for start in range(0, len(chunks), n_joint):
            self.evaluate(chunks[start : start + n_joint])

    def evaluate(self, chunks: Sequence[Chunk]) -> None:
        rows = self.runtime.decode(chunks)
        for chunk, row in zip(chunks, rows, strict=True):
            assert (row is not None) == chunk.wants_logits
            assert self.runtime.length(chunk.sequence) == chunk.end
            if row is not None:
                wanted = self.said[self.texts[chunk.sequence]][chunk.end - 1]
                assert np.array_equal(self.runtime.logits(row), wanted)
                self.compared += 1


@pytest.mark.parametrize("seed", [1, 2])
def test_lanes_that_come_and_go_do_not_change_a_bit_of_each_other(
    runtime: LlamaRuntime, said: Said, seed: int
) -> None:
    walk = Walk(runtime, said, seed)
    for _ in range(40 if is_large(runtime) else 200):
        walk.step()
    assert walk.compared > 20
    assert walk.crowded > 0 or is_large(runtime)


def test_a_call_is_one_token_each_or_one_longer_chunk(runtime: LlamaRuntime) -> None:
    refuse_mixing(runtime)


def test_a_sequence_is_not_copied(runtime: LlamaRuntime) -> None:
    refuse_copying(runtime)


def refuse_mixing(runtime: Runtime) -> None:
    token, longer = Chunk(0, 0, (40,), True), Chunk(1, 0, (40, 41), True)
    with pytest.raises(InvalidArgument, match="one longer chunk alone"):
        runtime.decode([token, longer])
    assert (runtime.length(0), runtime.length(1)) == (0, 0)
    runtime.decode([token])
    runtime.decode([longer])


def refuse_copying(runtime: Runtime) -> None:
    runtime.decode([Chunk(0, 0, (40, 41), False)])
    with pytest.raises(InvalidArgument, match="save it and restore it"):
        runtime.copy(0, 1)
    assert runtime.length(1) == 0


def test_the_simulated_runtime_keeps_the_same_rules() -> None:
    refuse_mixing(SimulatedRuntime(Limits(4, 100, 100, 64, 1000, 10, mixes=False)))
    refuse_copying(SimulatedRuntime(Limits(4, 100, 100, 64, 1000, 10, copies=False)))


# ---- where it is tight ---------------------------------------------------------------------------

PADDED = ["llama", "gemma3", "granitehybrid", "falcon-h1", "mamba2", "rwkv7 Q4_1"]


@pytest.mark.models
@pytest.mark.parametrize("model", PADDED)
def test_a_full_lane_beside_one_that_speaks_keeps_its_bits(model: str) -> None:
    with open_exact(model, n_sequences=2, n_context=511) as runtime:
        full, other = text_of(runtime, 1, 511), text_of(runtime, 2, 20)
        alone = say(runtime, other)
        read(runtime, 1, full, (63,))
        state = runtime.save(1, full)
        for token, logits in zip(other, alone, strict=True):
            assert np.array_equal(feed(runtime, 0, (token,)), logits)
        assert runtime.length(1) == 511
        assert runtime.save(1, full) == state


@pytest.mark.models
@pytest.mark.parametrize(
    "model",
    ["llama", "llama Q8_0", f"llama Q8_0{F16_VALUES}", "gemma3", "granitehybrid Q8_0"],
)
def test_a_long_text_is_attended_to_in_one_way_only(model: str) -> None:
    """Over 512 cells a token's attention would be split by thread, in passes from 64 on tiled."""
    with open_named(model, n_sequences=3, n_context=1023, threads=2) as runtime:
        text = text_of(runtime, 1, 600)
        read(runtime, 0, text[:570], (63,))
        said = [feed(runtime, 0, (token,)) for token in text[570:]]
        assert np.array_equal(read(runtime, 1, text, (63,)), said[-1])
        assert np.array_equal(read(runtime, 2, text[:590], (50, 1)), said[19])
        assert np.array_equal(read(runtime, 2, text[590:], (1,)), said[-1])


@pytest.mark.models
def test_a_model_that_errs_with_several_sequences_reads_token_by_token() -> None:
    with open_exact("plamo2") as runtime:
        assert runtime.passes == SINGLE
        assert runtime.limits.n_joint == 1


@pytest.mark.models
@pytest.mark.parametrize("architecture", ["qwen35moe", "lfm2moe"])
def test_one_f32_router_among_quantised_weights_is_noticed(architecture: str) -> None:
    with open_exact(architecture) as plain, open_named(f"{architecture}{SHIPPED}") as shipped:
        if plain.passes == ANY:
            pytest.skip("this machine multiplies one F32 row as it does two")
        assert shipped.passes != ANY


@pytest.mark.models
def test_one_lane_gets_a_neighbour_where_it_needs_one() -> None:
    for model in ("llama", "llama Q8_0"):
        with open_exact(model, n_sequences=1) as runtime:
            assert runtime.passes in (ANY, PAIRED, SINGLE)
            assert runtime.limits.n_sequences == (2 if runtime.passes == PAIRED else 1)


@pytest.mark.models
def test_states_of_the_default_mode_are_refused_and_refuse() -> None:
    text = tuple(range(40, 60))
    with open_runtime("llama") as default, open_exact("llama") as exact:
        for source, target in ((default, exact), (exact, default)):
            source.decode([Chunk(0, 0, text, wants_logits=False)])
            with pytest.raises(StateRefused):
                target.restore(1, source.save(0, text), text)


@pytest.mark.models
@pytest.mark.slow
def test_k_quants_go_without_tiles() -> None:
    """In a process of its own: llama.cpp looks once whether tiles are wanted."""
    script = Path(__file__).with_name("exact_k_quants.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- what is refused -----------------------------------------------------------------------------


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "can_offload", lambda: True)
    with pytest.raises(ConfigError, match="CPU"):
        open_llama(Path("never-read.gguf"), Settings(exact=True))


def test_more_lanes_than_a_pass_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="64 sequences"):
        open_llama(Path("never-read.gguf"), Settings(exact=True, n_sequences=N_PASS_MOST + 1))


@pytest.mark.models
def test_values_are_of_another_type_than_keys_unless_they_are_the_keys() -> None:
    for model, type_v in (("llama", 30), ("kimi-linear", 1)):
        settings = exacted(inspect(path_of(model)), Settings())
        assert (settings.exact, settings.type_k, settings.type_v) == (True, 1, type_v)


# ---- who stands beside whom ----------------------------------------------------------------------


@given(st.integers(2, 10), st.data())
def test_everyone_who_speaks_has_a_neighbour(n_sequences: int, data: st.DataObject) -> None:
    ids = st.sets(st.integers(0, n_sequences - 1))
    speaking, busy = data.draw(ids), data.draw(ids)
    pads = companions(speaking, busy | speaking, n_sequences)
    joined = speaking.union(pads)
    assert not speaking.intersection(pads)
    assert joined <= set(range(n_sequences))
    for own in speaking:
        assert joined.intersection((own - 1, own + 1))
    for pad in set(pads) & busy:  # a busy one stands in only where there is no other
        assert any(
            {own - 1, own + 1} & set(range(n_sequences)) <= busy | speaking
            for own in speaking
            if abs(own - pad) == 1
        )


@pytest.mark.parametrize(
    ("speaking", "busy", "pads"),
    [
        ({0}, set(), [1]),
        ({3}, {2}, [2]),
        ({0, 1, 2}, {3}, []),
        ({0, 2}, set(), [1]),
        ({0, 2}, {1, 3}, [1]),
        ({1}, {0}, [2]),
        ({1, 3}, set(), [2]),
    ],
)
def test_neighbours_are_few_and_empty_where_they_can_be(
    speaking: set[int], busy: set[int], pads: list[int]
) -> None:
    assert companions(speaking, busy | speaking, 4) == pads
