"""Sequence memory, in C and in Python, on a fake llama.cpp and on real tiny models."""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import os
import random
import stat
import struct
import sys
import threading
import tracemalloc
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seqstate_fakes import FakeLlama, RealContext

from orchestrator import _seqstate
from orchestrator.errors import BackendError, InvalidArgument, PoolFull, StateRefused
from orchestrator.runtime import seqstate_ctypes

IMPLEMENTATIONS = {"c": _seqstate, "python": seqstate_ctypes}
KINDS = ("attention", "hybrid", "recurrent")
PROMPT = list(range(10, 22))
REPLY = [5, 7, 9]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Any:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_fake(implementation: Any) -> Iterator[Callable[..., tuple[FakeLlama, Any]]]:
    """Make a fake and its memory; at the end no call may have been one llama.cpp dies of."""
    fakes: list[FakeLlama] = []

    def make(kind: str, **options: Any) -> tuple[FakeLlama, Any]:
        fake = FakeLlama(kind, **options)
        fakes.append(fake)
        return fake, memory_on(implementation, fake, kind)

    yield make
    assert [fake.violations for fake in fakes if fake.violations] == []


def identity_of(implementation: Any, **changes: Any) -> Any:
    values = {
        "build": "llama.cpp 0c1e57098, ggml 0.25.3",
        "model": bytes(range(32)),
        "n_layer": 3,
        "n_ctx": 512,
        "flash_attn": True,
        "unified": True,
        "type_k": 1,
        "type_v": 1,
    }
    return implementation.Identity(**{**values, **changes})


def memory_on(implementation: Any, fake: Any, kind: str, **changes: Any) -> Any:
    return implementation.SequenceMemory(
        fake.functions,
        fake.context,
        n_sequences=fake.n_sequences,
        memory=kind,
        identity=identity_of(implementation, **changes),
    )


def resealed(blob: bytes) -> bytes:
    """The blob with the checksum that belongs to it, as a forger would write it."""
    head, tail = blob[:68], blob[72:]
    return head + struct.pack("<I", zlib.crc32(tail, zlib.crc32(bytes(4), zlib.crc32(head)))) + tail


def each(*acts: Callable[[], object]) -> tuple[Callable[[], object], ...]:
    """The lambdas themselves; says their type where mypy cannot tell it."""
    return acts


def refused_field(act: Callable[[], object]) -> str:
    with pytest.raises(StateRefused) as caught:
        act()
    return caught.value.field


# --- copies, cuts, clears -------------------------------------------------------------------------


def test_a_whole_copy_continues_like_its_source(open_fake: Any, kind: str) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    memory.copy(0, 3)
    assert memory.positions(3) == memory.positions(0)
    fake.decode(0, REPLY)
    fake.decode(3, REPLY)
    assert fake.logits(3) == fake.logits(0)


def test_a_copy_shares_cells_and_leaves_the_source_alone(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    before = fake.logits(0)
    memory.copy(0, 1)
    assert len(fake.rows) == len(PROMPT)
    fake.decode(1, REPLY)
    assert fake.logits(0) == before


def test_attention_rows_can_be_copied_up_to_a_length(open_fake: Any) -> None:
    fake, memory = open_fake("attention")
    fake.decode(0, PROMPT)
    memory.copy(0, 1, 5)
    assert memory.positions(1) == (0, 4)
    fake.decode(2, PROMPT[:5])
    assert fake.logits(1) == fake.logits(2)


def test_a_shorter_copy_of_a_hybrid_holds_rows_and_never_a_foreign_state(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    memory.copy(0, 1, 5)
    assert memory.positions(1) == (0, -1)
    assert fake.row_positions(1) == list(range(5))
    assert fake.tail[1] is None


def test_rows_beyond_the_state_do_not_come_along_with_a_copy(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    fake._add_row(0, len(PROMPT), 99)
    memory.copy(0, 1)
    assert fake.row_positions(1) == list(range(len(PROMPT)))


def test_a_holder_can_be_copied_whole_and_in_part(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    memory.strip(0)
    memory.copy(0, 1)
    memory.copy(0, 2, 4)
    assert fake.row_positions(1) == list(range(len(PROMPT)))
    assert fake.row_positions(2) == list(range(4))
    assert memory.positions(1) == memory.positions(2) == (0, -1)


def test_a_recurrent_copy_takes_its_own_length_and_no_other(open_fake: Any) -> None:
    fake, memory = open_fake("recurrent")
    fake.decode(0, PROMPT)
    memory.copy(0, 1, len(PROMPT))
    with pytest.raises(InvalidArgument, match="cannot be cut"):
        memory.copy(0, 2, 5)
    assert memory.positions(2) == (-1, -1)


@pytest.mark.parametrize(
    ("source", "target", "length", "reason"),
    [
        (0, 0, None, "both 0"),
        (2, 3, None, "sequence 2 is empty"),
        (0, 1, None, "sequence 1 is not empty"),
        (0, 3, 13, "holds 12"),
    ],
)
def test_a_copy_that_makes_no_sense_changes_nothing(
    open_fake: Any, kind: str, source: int, target: int, length: int | None, reason: str
) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    fake.decode(1, REPLY)
    before = [fake.logits(sequence) for sequence in range(fake.n_sequences)]
    with pytest.raises(InvalidArgument, match=reason):
        memory.copy(source, target, length)
    assert [fake.logits(sequence) for sequence in range(fake.n_sequences)] == before
    assert "llama_memory_seq_cp" not in fake.calls


def test_separate_streams_are_copied_whole_only(implementation: Any) -> None:
    fake = FakeLlama("attention")
    memory = memory_on(implementation, fake, "attention", unified=False)
    fake.decode(0, PROMPT)
    with pytest.raises(InvalidArgument, match="unified"):
        memory.copy(0, 1, 5)
    memory.copy(0, 1)
    assert memory.positions(1) == (0, 11)


def test_rows_of_a_window_can_neither_be_cut_nor_copied_in_part(open_fake: Any) -> None:
    fake, memory = open_fake("attention", window=4)
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    memory.restore(1, blob, PROMPT)
    assert memory.positions(1) == (8, 11)
    with pytest.raises(InvalidArgument, match="sliding window"):
        memory.cut(1, 10)
    with pytest.raises(InvalidArgument, match="sliding window"):
        memory.copy(1, 2, 10)
    memory.copy(1, 2)
    assert memory.positions(2) == (8, 11)


def test_a_cut_keeps_the_rows_below_it(open_fake: Any) -> None:
    fake, memory = open_fake("attention")
    fake.decode(0, PROMPT)
    memory.cut(0, 12)
    memory.cut(0, 2**31 - 1)
    assert memory.positions(0) == (0, 11)
    memory.cut(0, 5)
    assert memory.positions(0) == (0, 4)
    memory.cut(0, 0)
    assert memory.positions(0) == (-1, -1)


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_state_cannot_be_cut_and_is_not_touched(open_fake: Any, kind: str) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    before = fake.logits(0)
    for length in (0, 1, 11):
        with pytest.raises(InvalidArgument, match="a recurrent state cannot be cut"):
            memory.cut(0, length)
    memory.cut(0, 12)
    assert fake.logits(0) == before


def test_a_hybrid_cut_drops_rows_beyond_the_state(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    fake._add_row(0, 12, 99)
    memory.cut(0, 12)
    assert fake.row_positions(0) == list(range(12))


def test_the_rows_of_a_holder_can_be_cut_anywhere(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    memory.strip(0)
    memory.cut(0, 3)
    assert fake.row_positions(0) == [0, 1, 2]
    memory.cut(0, 0)
    assert memory.positions(0) == (-1, -1)


def test_clearing_empties_one_sequence_and_clearing_all_empties_every_one(
    open_fake: Any, kind: str
) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    fake.decode(1, REPLY)
    memory.clear(0)
    assert memory.positions(0) == (-1, -1)
    assert memory.positions(1)[1] == 2
    memory.clear_all()
    assert [memory.positions(sequence) for sequence in range(6)] == [(-1, -1)] * 6
    assert not fake.states.any()


def test_stripping_keeps_the_rows_and_frees_the_cell(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    memory.strip(0)
    assert memory.positions(0) == (0, -1)
    assert fake.row_positions(0) == list(range(12))
    memory.strip(0)
    assert memory.positions(0) == (0, -1)


def test_only_a_hybrid_sequence_that_holds_something_can_be_stripped(open_fake: Any) -> None:
    for kind in ("attention", "recurrent"):
        fake, memory = open_fake(kind)
        fake.decode(0, PROMPT)
        with pytest.raises(InvalidArgument, match=kind):
            memory.strip(0)
    _, memory = open_fake("hybrid")
    with pytest.raises(InvalidArgument, match="empty"):
        memory.strip(0)


# --- scrubbing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_nan_survives_a_clear_but_not_a_scrub(open_fake: Any, kind: str) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    fake.poison(0)
    memory.clear(0)
    assert np.isnan(fake.states).any()
    fake.decode(0, PROMPT)
    memory.scrub(0)
    assert not np.isnan(fake.states).any()
    assert memory.positions(0) == (-1, -1)


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_scrub_reaches_the_cell_wherever_it_is_and_leaves_the_others_as_they_were(
    open_fake: Any, kind: str
) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        fake, memory = open_fake(kind)
        for sequence in chance.sample(range(6), 5):
            fake.decode(sequence, PROMPT[: chance.randrange(1, 12)])
        lanes = chance.sample(range(6), 6)
        for sequence in lanes[:2]:
            memory.clear(sequence)
        if memory.positions(lanes[2]) != (-1, -1):
            memory.copy(lanes[2], lanes[0])
        if kind == "hybrid" and memory.positions(lanes[3]) != (-1, -1):
            memory.strip(lanes[3])
        fake.head = chance.randrange(6)
        fake.decode(lanes[5], [1])
        fake.poison(lanes[5])
        before = [fake.logits(sequence) for sequence in lanes[:5]]
        memory.scrub(lanes[5])
        assert not np.isnan(fake.states).any()
        assert memory.positions(lanes[5]) == (-1, -1)
        assert [fake.logits(sequence) for sequence in lanes[:5]] == before


def test_scrubbing_attention_is_clearing(open_fake: Any) -> None:
    fake, memory = open_fake("attention")
    fake.decode(0, PROMPT)
    memory.scrub(0)
    assert memory.positions(0) == (-1, -1)


# --- saving and restoring -------------------------------------------------------------------------


def test_a_restored_sequence_continues_as_if_nothing_had_been(open_fake: Any, kind: str) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    fake.decode(0, REPLY)
    expected = fake.logits(0)
    memory.clear(0)
    assert memory.restore(4, blob, PROMPT) == 12
    fake.decode(4, REPLY)
    assert fake.logits(4) == expected


def test_a_snapshot_goes_back_under_the_rows_a_lane_has_gone_on_from(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    snapshot = memory.save(0, PROMPT, rows=False)
    fake.decode(0, REPLY)
    expected = fake.logits(0)
    fake.decode(0, [1, 2, 3])
    assert memory.restore(0, snapshot, PROMPT) == 12
    assert fake.row_positions(0) == list(range(12))
    fake.decode(0, REPLY)
    assert fake.logits(0) == expected


def test_a_snapshot_seeds_a_branch_of_a_holder(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT[:7])
    snapshot = memory.save(0, PROMPT[:7], rows=False)
    fake.decode(0, PROMPT[7:])
    memory.strip(0)
    memory.copy(0, 1, 7)
    memory.restore(1, snapshot, PROMPT[:7])
    fake.decode(2, PROMPT[:7])
    assert fake.logits(1) == fake.logits(2)


def test_every_way_to_save_writes_the_same_bytes(open_fake: Any, kind: str, tmp_path: Path) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    assert len(blob) == memory.state_size(0)
    buffer = bytearray(len(blob) + 10)
    assert memory.save_into(0, PROMPT, buffer) == len(blob)
    assert buffer == blob + bytes(10)
    path = tmp_path / "state"
    assert memory.save_file(0, PROMPT, path) == len(blob)
    assert path.read_bytes() == blob


def test_both_implementations_write_the_same_bytes_and_say_the_same_of_them() -> None:
    modules: list[Any] = list(IMPLEMENTATIONS.values())
    for kind in KINDS:
        for rows in (True,) if kind == "recurrent" else (True, False):
            blobs = []
            for module in modules:
                fake = FakeLlama(kind)
                memory = memory_on(module, fake, kind)
                fake.decode(2, PROMPT)
                blobs.append(memory.save(2, PROMPT, rows=rows))
            assert blobs[0] == blobs[1]
            described = [module.describe(blobs[0]) for module in modules]
            assert described[0] == described[1]


def test_what_one_implementation_saves_the_other_restores() -> None:
    modules = list(IMPLEMENTATIONS.values())
    for writer, reader in (modules, modules[::-1]):
        fake = FakeLlama("hybrid")
        fake_memory = memory_on(writer, fake, "hybrid")
        fake.decode(0, PROMPT)
        blob = fake_memory.save(0, PROMPT)
        memory_on(reader, fake, "hybrid").restore(1, blob, PROMPT)
        assert fake.logits(0) == fake.logits(1)


def test_a_saved_state_describes_itself(open_fake: Any, implementation: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT, rows=False)
    header = implementation.describe(blob)
    assert header.identity == identity_of(implementation)
    assert (header.version, header.form, header.memory) == (1, "state", "hybrid")
    assert (header.start, header.n_tokens) == (0, 12)
    assert header.tokens == array.array("i", PROMPT).tobytes()
    assert 256 + 4 * 12 + header.payload_length == len(blob)
    assert resealed(blob) == blob


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        deque,
        lambda ids: array.array("i", ids),
        lambda ids: array.array("i", ids).tobytes(),
        lambda ids: np.array(ids, np.int32),
        lambda ids: list(np.array(ids, np.int64)),
        lambda ids: (ctypes.c_int32 * len(ids))(*ids),
        lambda ids: memoryview(array.array("i", ids)),
    ],
)
def test_tokens_may_come_in_any_form_of_int32(open_fake: Any, form: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    if form is deque:
        with pytest.raises(TypeError, match="tokens must be a sequence"):
            memory.save(0, {1, 2})
    blob = memory.save(0, form(PROMPT))
    assert blob == memory.save(0, PROMPT)
    assert memory.restore(1, blob, form(PROMPT)) == 12


@pytest.mark.parametrize(
    "form",
    [
        bytearray,
        memoryview,
        lambda blob: np.frombuffer(blob, np.uint8),
        lambda blob: (ctypes.c_ubyte * len(blob)).from_buffer_copy(blob),
    ],
)
def test_a_state_may_come_in_any_buffer_of_bytes(open_fake: Any, form: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    assert memory.restore(1, form(blob), PROMPT) == 12
    assert fake.logits(1) == fake.logits(0)


def test_what_is_saved_must_be_what_the_sequence_holds(open_fake: Any, kind: str) -> None:
    fake, memory = open_fake(kind)
    with pytest.raises(InvalidArgument, match="sequence 0 is empty"):
        memory.save(0, PROMPT)
    with pytest.raises(InvalidArgument, match="sequence 0 is empty"):
        memory.state_size(0)
    fake.decode(0, PROMPT)
    with pytest.raises(InvalidArgument, match="11 tokens were given, sequence 0 holds 12"):
        memory.save(0, PROMPT[:11])
    with pytest.raises(InvalidArgument, match="tokens is empty"):
        memory.save(0, [])


def test_rows_without_a_state_are_no_checkpoint(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    memory.strip(0)
    for rows in (True, False):
        with pytest.raises(InvalidArgument, match="without a recurrent state"):
            memory.save(0, PROMPT, rows=rows)


def test_a_state_without_rows_is_for_memory_that_has_rows(open_fake: Any) -> None:
    fake, memory = open_fake("recurrent")
    fake.decode(0, PROMPT)
    with pytest.raises(InvalidArgument, match="this is recurrent"):
        memory.save(0, PROMPT, rows=False)


def test_of_attention_a_state_without_rows_is_empty_and_only_checks(open_fake: Any) -> None:
    fake, memory = open_fake("attention")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT, rows=False)
    assert len(blob) == memory.state_size(0, rows=False) == 256 + 4 * 12
    before = fake.logits(0)
    assert memory.restore(0, blob, PROMPT) == 12
    assert fake.logits(0) == before
    assert refused_field(lambda: memory.restore(0, blob, [*PROMPT[:-1], 99])) == "tokens"
    fake.decode(1, PROMPT[:11])
    assert refused_field(lambda: memory.restore(1, blob, PROMPT)) == "rows"
    assert memory.positions(1) == (-1, -1)
    fake.decode(2, [*PROMPT, 1])
    assert refused_field(lambda: memory.restore(2, blob, PROMPT)) == "positions"


def test_a_state_of_another_form_than_asked_for_is_refused(open_fake: Any) -> None:
    for kind in ("attention", "hybrid"):
        fake, memory = open_fake(kind)
        fake.decode(0, PROMPT)
        whole, state = memory.save(0, PROMPT), memory.save(0, PROMPT, rows=False)
        rows = memory.save_rows(0, 0, 12, PROMPT, scratch=5)
        for blob, wanted in ((whole, False), (state, True), (rows, True), (rows, None)):
            act = partial(memory.restore, 1, blob, PROMPT, rows=wanted)
            assert refused_field(act) == "form"
        assert memory.restore(1, whole, PROMPT, rows=True) == 12
        assert memory.restore(1, state, PROMPT, rows=False) == 12


def test_a_state_with_rows_wants_an_empty_sequence_and_one_without_wants_rows(
    open_fake: Any,
) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    whole, snapshot = memory.save(0, PROMPT), memory.save(0, PROMPT, rows=False)
    before = fake.logits(0)
    with pytest.raises(InvalidArgument, match="not empty"):
        memory.restore(0, whole, PROMPT)
    assert fake.logits(0) == before
    with pytest.raises(InvalidArgument, match="is empty, the state needs its rows"):
        memory.restore(1, snapshot, PROMPT)


def test_a_snapshot_over_too_few_rows_is_refused_and_the_sequence_left_clean(
    open_fake: Any,
) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    snapshot = memory.save(0, PROMPT, rows=False)
    memory.copy(0, 1, 11)
    assert refused_field(lambda: memory.restore(1, snapshot, PROMPT)) == "rows"
    assert memory.positions(1) == (-1, -1)


def test_a_full_pool_says_so_and_leaves_the_sequence_clean(open_fake: Any) -> None:
    for kind in ("attention", "hybrid"):
        fake, memory = open_fake(kind, n_cells=30)
        fake.decode(0, PROMPT)
        blob = memory.save(0, PROMPT)
        fake.decode(1, PROMPT[:10])
        before = fake.logits(1)
        with pytest.raises(PoolFull, match="12 free cells"):
            memory.restore(2, blob, PROMPT)
        assert memory.positions(2) == (-1, -1)
        assert fake.logits(1) == before


def test_rows_that_do_not_reach_as_far_as_the_tokens_are_refused(open_fake: Any) -> None:
    fake, memory = open_fake("attention")
    fake.decode(0, PROMPT)
    fake.decode(1, PROMPT[:11])
    shorter = memory.save(1, PROMPT[:11])[256 + 4 * 11 :]
    forged = bytearray(memory.save(0, PROMPT)[: 256 + 4 * 12]) + shorter
    struct.pack_into("<Q", forged, 48, len(shorter))
    state = resealed(bytes(forged))
    assert refused_field(lambda: memory.restore(2, state, PROMPT)) == "positions"
    assert memory.positions(2) == (-1, -1)


def test_a_refusal_leaves_even_a_sequence_that_held_rows_clean(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    snapshot = bytearray(memory.save(0, PROMPT, rows=False))
    snapshot[-1] ^= 1
    fake.decode(0, REPLY)
    assert refused_field(lambda: memory.restore(0, snapshot, PROMPT)) == "checksum"
    assert memory.positions(0) == (-1, -1)


def test_half_an_import_is_cleared(open_fake: Any, kind: str) -> None:
    fake, memory = open_fake(kind)
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    fake.refuse_imports = 1
    with pytest.raises((PoolFull, StateRefused)):
        memory.restore(1, blob, PROMPT)
    assert memory.positions(1) == (-1, -1)


def test_a_refused_snapshot_leaves_the_sequence_clean(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    snapshot = memory.save(0, PROMPT, rows=False)
    fake.refuse_imports = 1
    assert refused_field(lambda: memory.restore(0, snapshot, PROMPT)) == "payload"
    assert memory.positions(0) == (-1, -1)


def test_a_short_write_by_llama_cpp_is_an_error(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    fake.short_exports = 1
    with pytest.raises(BackendError, match="wrote"):
        memory.save(0, PROMPT)


def test_a_state_that_is_not_finite_is_neither_saved_nor_restored(open_fake: Any) -> None:
    for kind in ("hybrid", "recurrent"):
        fake, memory = open_fake(kind)
        fake.decode(0, PROMPT)
        blob = memory.save(0, PROMPT)
        fake.poison(0)
        assert refused_field(partial(memory.save, 0, PROMPT)) == "finite"
        for value in (np.nan, np.inf, -np.inf):
            bad = resealed(blob[:-4] + struct.pack("<f", value))
            assert refused_field(partial(memory.restore, 1, bad, PROMPT)) == "finite"
            assert memory.positions(1) == (-1, -1)


# --- in slices ------------------------------------------------------------------------------------

SLICED = (("attention", 0), ("attention", 5), ("hybrid", 0))  # with the window
SCRATCH = 5


@pytest.fixture(params=SLICED, ids=("attention", "window", "hybrid"))
def sliced(request: pytest.FixtureRequest, open_fake: Any) -> tuple[FakeLlama, Any]:
    """A memory with rows whose sequence 0 holds the prompt; 5 serves as scratch sequence."""
    kind, window = request.param
    fake, memory = open_fake(kind, window=window)
    fake.decode(0, PROMPT)
    return fake, memory


def taken(memory: Any, sequence: int, cuts: list[int], tokens: list[int] = PROMPT) -> list[bytes]:
    """The rows in slices from cut to cut, and the state."""
    blobs = [
        memory.save_rows(sequence, start, end, tokens, scratch=SCRATCH)
        for start, end in itertools.pairwise(cuts)
    ]
    return [*blobs, memory.save(sequence, tokens, rows=False)]


def put(memory: Any, sequence: int, cuts: list[int], blobs: list[bytes]) -> None:
    """Bring back what `taken` gave."""
    for (start, end), blob in zip(itertools.pairwise(cuts), blobs[:-1], strict=True):
        assert memory.restore_rows(sequence, start, blob, PROMPT, scratch=SCRATCH) == end
    assert memory.restore(sequence, blobs[-1], PROMPT, rows=False) == len(PROMPT)


def everything(fake: FakeLlama) -> tuple[list[str], list[int]]:
    """What all sequences hold, and how many cells that takes."""
    held = [fake.logits(sequence) for sequence in range(fake.n_sequences)]
    return held, [len(cache.rows) for cache in fake.caches]


@pytest.mark.parametrize("cuts", [[0, 12], [0, 1, 12], [0, 11, 12], [0, 3, 4, 9, 12], [*range(13)]])
def test_slices_of_any_sizes_make_up_the_whole(
    sliced: tuple[FakeLlama, Any], cuts: list[int]
) -> None:
    fake, memory = sliced
    fake.decode(2, REPLY)
    before = everything(fake)
    blobs = taken(memory, 0, cuts)
    assert everything(fake) == before
    fake.decode(0, REPLY)
    expected = fake.logits(0)
    memory.clear(0)
    put(memory, 3, cuts, blobs)
    assert memory.positions(SCRATCH) == (-1, -1)
    fake.decode(3, REPLY)
    assert fake.logits(3) == expected
    assert fake.row_positions(3) == list(range(15))
    assert fake.logits(2) == before[0][2]


def test_a_sequence_that_was_restored_can_be_sliced_otherwise_and_again(
    sliced: tuple[FakeLlama, Any],
) -> None:
    fake, memory = sliced
    expected = fake.logits(0)
    memory.restore(1, memory.save(0, PROMPT), PROMPT)
    for cuts in ([0, 2, 7, 12], [0, 6, 12], [0, 1, 2, 12]):
        put(memory, 2, cuts, taken(memory, 1, cuts))
        assert fake.logits(2) == expected
        memory.clear(1)
        memory.copy(2, 1)
        memory.clear(2)


def test_other_lanes_go_on_between_two_slices(sliced: tuple[FakeLlama, Any]) -> None:
    fake, memory = sliced
    cuts = [0, 4, 8, 12]
    blobs = taken(memory, 0, cuts)
    expected = fake.logits(0)
    memory.clear(0)
    for (start, _), blob in zip(itertools.pairwise(cuts), blobs[:-1], strict=True):
        fake.decode(2, [start])
        memory.restore_rows(0, start, blob, PROMPT, scratch=SCRATCH)
    fake.decode(2, [8])
    memory.restore(0, blobs[-1], PROMPT)
    fake.decode(3, [0, 4, 8, 8])
    assert fake.logits(0) == expected
    assert fake.logits(2) == fake.logits(3)


def test_a_slice_is_tied_to_every_token_before_it(sliced: tuple[FakeLlama, Any]) -> None:
    _, memory = sliced
    first, second = taken(memory, 0, [0, 4, 8])[:2]
    other = [99, *PROMPT[1:]]
    for tokens in (other, [*PROMPT[:5], 99], [*PROMPT[:6], 99, *PROMPT[7:]], PROMPT[:7]):
        memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
        act = partial(memory.restore_rows, 1, 4, second, tokens, scratch=SCRATCH)
        assert refused_field(act) == "tokens"
        assert memory.positions(1) == (-1, -1)


def test_a_slice_serves_every_sequence_that_begins_with_its_tokens(
    sliced: tuple[FakeLlama, Any],
) -> None:
    fake, memory = sliced
    head = memory.save_rows(0, 0, 8, PROMPT, scratch=SCRATCH)
    longer = [*PROMPT[:8], *REPLY]
    fake.decode(1, longer)
    rest = memory.save_rows(1, 8, 11, longer, scratch=SCRATCH)
    state = memory.save(1, longer, rows=False)
    memory.restore_rows(2, 0, head, longer, scratch=SCRATCH)
    memory.restore_rows(2, 8, rest, longer, scratch=SCRATCH)
    memory.restore(2, state, longer)
    assert fake.logits(2) == fake.logits(1)


def test_a_slice_describes_itself(open_fake: Any, implementation: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save_rows(0, 3, 9, PROMPT, scratch=SCRATCH)
    header = implementation.describe(blob)
    assert (header.form, header.start, header.n_tokens) == ("rows", 3, 9)
    assert header.tokens == array.array("i", PROMPT[3:9]).tobytes()
    fed = array.array("i", PROMPT[:9]).tobytes()
    assert header.token_hash == zlib.crc32(fed) | zlib.crc32(fed[::-1]) << 32
    assert 256 + 4 * 6 + header.payload_length == len(blob)


def test_both_implementations_write_the_same_slices() -> None:
    for kind, window in SLICED:
        written = []
        for module in IMPLEMENTATIONS.values():
            fake = FakeLlama(kind, window=window)
            fake_memory = memory_on(module, fake, kind)
            fake.decode(2, PROMPT)
            written.append(taken(fake_memory, 2, [0, 5, 12]))
        assert written[0] == written[1]


def test_rows_without_their_state_can_be_added_to_and_cleared_but_are_not_saved_whole(
    open_fake: Any,
) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    first, second, state = taken(memory, 0, [0, 4, 12])
    memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
    assert memory.positions(1) == (0, -1)
    for rows in (True, False):
        with pytest.raises(InvalidArgument, match="without a recurrent state"):
            memory.save(1, PROMPT[:4], rows=rows)
    memory.clear(1)
    assert memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH) == 4
    memory.restore_rows(1, 4, second, PROMPT, scratch=SCRATCH)
    memory.restore(1, state, PROMPT)
    assert fake.logits(1) == fake.logits(0)


def test_the_rows_of_a_holder_are_saved_in_slices_as_those_of_a_lane(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    *wanted, state = taken(memory, 0, [0, 4, 12])
    memory.copy(0, 1)
    memory.strip(1)
    before = everything(fake)
    blobs = [
        memory.save_rows(1, start, end, PROMPT, scratch=SCRATCH) for start, end in ((0, 4), (4, 12))
    ]
    assert blobs == wanted
    assert everything(fake) == before
    memory.clear(1)
    put(memory, 1, [0, 4, 12], [*blobs, state])
    assert fake.logits(1) == fake.logits(0)


@pytest.mark.parametrize(("start", "end"), [(0, 12), (3, 5), (4, 6), (11, 12)])
def test_a_slice_of_a_holder_that_lacks_its_rows_is_given_up(
    open_fake: Any, start: int, end: int
) -> None:
    """How many rows a holder has does not show before they are looked at."""
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    memory.strip(0)
    memory.cut(0, 4)
    before = everything(fake)
    with pytest.raises(BackendError):
        memory.save_rows(0, start, end, PROMPT, scratch=SCRATCH)
    assert everything(fake) == before
    for first, last in ((4, 4), (0, 13)):
        with pytest.raises(InvalidArgument, match="are none of sequence 0, which holds 12"):
            memory.save_rows(0, first, last, PROMPT, scratch=SCRATCH)


def test_a_state_over_too_few_of_its_slices_is_refused(sliced: tuple[FakeLlama, Any]) -> None:
    _, memory = sliced
    first, _, state = taken(memory, 0, [0, 7, 12])
    memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
    assert refused_field(lambda: memory.restore(1, state, PROMPT)) == "rows"
    assert memory.positions(1) == (-1, -1)


def test_slices_come_in_their_order_and_once(sliced: tuple[FakeLlama, Any]) -> None:
    fake, memory = sliced
    first, second = taken(memory, 0, [0, 6, 12])[:2]
    for start, blob in ((0, second), (6, first)):
        if start:
            memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
        act = partial(memory.restore_rows, 1, start, blob, PROMPT, scratch=SCRATCH)
        assert refused_field(act) == "start"
        assert memory.positions(1) == (-1, -1)
    memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
    before = everything(fake)
    with pytest.raises(InvalidArgument, match="not empty"):
        memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
    with pytest.raises(InvalidArgument):
        memory.restore_rows(0, 0, first, PROMPT, scratch=SCRATCH)
    with pytest.raises(InvalidArgument):
        memory.restore_rows(0, 6, second, PROMPT, scratch=SCRATCH)
    assert everything(fake) == before


def test_a_slice_for_which_there_are_no_cells_leaves_the_whole_sequence_empty(
    open_fake: Any,
) -> None:
    for kind, window in SLICED:
        fake, memory = open_fake(kind, n_cells=30, window=window)
        fake.decode(0, PROMPT)
        first, second = taken(memory, 0, [0, 7, 12])[:2]
        fake.decode(2, PROMPT[:7])
        before = everything(fake)
        memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
        with pytest.raises(PoolFull, match="5 free cells"):
            memory.restore_rows(1, 7, second, PROMPT, scratch=SCRATCH)
        assert everything(fake) == before
        assert memory.positions(SCRATCH) == memory.positions(1) == (-1, -1)


def test_half_an_import_of_a_slice_is_cleared_and_a_short_export_too(
    sliced: tuple[FakeLlama, Any],
) -> None:
    fake, memory = sliced
    first, second = taken(memory, 0, [0, 7, 12])[:2]
    before = everything(fake)
    memory.restore_rows(1, 0, first, PROMPT, scratch=SCRATCH)
    fake.refuse_imports = 1
    with pytest.raises(PoolFull):
        memory.restore_rows(1, 7, second, PROMPT, scratch=SCRATCH)
    assert everything(fake) == before
    fake.short_exports = 1
    with pytest.raises(BackendError, match="wrote"):
        memory.save_rows(0, 0, 7, PROMPT, scratch=SCRATCH)
    assert everything(fake) == before


def test_a_slice_that_llama_cpp_would_not_strip_of_its_state_is_given_up(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    before = everything(fake)
    fake.refuse_imports = 1
    with pytest.raises(BackendError, match="strip"):
        memory.save_rows(0, 0, 7, PROMPT, scratch=SCRATCH)
    assert everything(fake) == before


@pytest.mark.parametrize(
    ("sequence", "start", "end", "tokens", "scratch", "reason"),
    [
        (1, 0, 4, PROMPT, 5, "sequence 1 is empty"),
        (0, 0, 4, PROMPT[:4], 5, "4 tokens were given, sequence 0 holds 12"),
        (0, 4, 4, PROMPT, 5, "rows 4 to 4 are none"),
        (0, 6, 4, PROMPT, 5, "rows 6 to 4 are none"),
        (0, 0, 0, PROMPT, 5, "rows 0 to 0 are none"),
        (0, 4, 13, PROMPT, 5, "which holds 12"),
        (0, 12, 2**31 - 1, PROMPT, 5, "which holds 12"),
        (0, 0, 4, PROMPT, 0, "both 0"),
        (0, 0, 4, PROMPT, 2, "scratch sequence 2 is not empty"),
        (0, -1, 4, PROMPT, 5, "start is -1"),
        (0, 0, -1, PROMPT, 5, "end is -1"),
        (0, 2**31, 4, PROMPT, 5, "start is 2147483648"),
        (0, 0, 4, PROMPT, 6, "scratch is 6, allowed are 0 to 5"),
        (0, 0, 4, PROMPT, -1, "scratch is -1"),
        (6, 0, 4, PROMPT, 5, "sequence is 6"),
    ],
)
def test_a_slice_that_makes_no_sense_is_not_saved(
    sliced: tuple[FakeLlama, Any],
    sequence: int,
    start: int,
    end: int,
    tokens: list[int],
    scratch: int,
    reason: str,
) -> None:
    fake, memory = sliced
    fake.decode(2, REPLY)
    before = everything(fake)
    with pytest.raises(InvalidArgument, match=reason):
        memory.save_rows(sequence, start, end, tokens, scratch=scratch)
    assert everything(fake) == before
    assert "llama_memory_seq_cp" not in fake.calls


@pytest.mark.parametrize(
    ("sequence", "start", "scratch"),
    [(1, 0, 1), (1, 0, 0), (1, 0, 6), (1, 0, -1), (6, 0, 5), (1, -1, 5), (1, 2**31, 5), (0, 0, 5)],
)
def test_a_slice_that_makes_no_sense_is_not_restored(
    sliced: tuple[FakeLlama, Any], sequence: int, start: int, scratch: int
) -> None:
    fake, memory = sliced
    blob = memory.save_rows(0, 0, 4, PROMPT, scratch=SCRATCH)
    before = everything(fake)
    fake.calls.clear()
    with pytest.raises(InvalidArgument):
        memory.restore_rows(sequence, start, blob, PROMPT, scratch=scratch)
    assert everything(fake) == before
    assert "llama_state_seq_set_data_ext" not in fake.calls


def test_a_hybrid_takes_a_later_slice_only_after_the_rows_before_it(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    second = memory.save_rows(0, 4, 12, PROMPT, scratch=SCRATCH)
    with pytest.raises(InvalidArgument, match="lacks the rows before 4"):
        memory.restore_rows(1, 4, second, PROMPT, scratch=SCRATCH)


def test_a_recurrent_memory_and_separate_streams_have_no_slices(implementation: Any) -> None:
    for kind, unified, reason in (("recurrent", True, "recurrent"), ("hybrid", False, "unified")):
        fake = FakeLlama(kind)
        memory = memory_on(implementation, fake, kind, unified=unified)
        fake.decode(0, PROMPT)
        for act in each(
            partial(memory.save_rows, 0, 0, 4, PROMPT, scratch=SCRATCH),
            partial(memory.restore_rows, 1, 0, b"", PROMPT, scratch=SCRATCH),
        ):
            with pytest.raises(InvalidArgument, match=reason):
                act()
        assert fake.violations == []


def test_no_flipped_bit_of_a_slice_and_no_truncation_goes_unnoticed(
    sliced: tuple[FakeLlama, Any],
) -> None:
    fake, memory = sliced
    blob = memory.save_rows(0, 0, 5, PROMPT, scratch=SCRATCH)
    fake.calls.clear()
    forms = [blob[:length] for length in range(len(blob))]
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << at % 8
        forms.append(bytes(damaged))
    for form in forms:
        with pytest.raises(StateRefused):
            memory.restore_rows(1, 0, form, PROMPT, scratch=SCRATCH)
    assert "llama_state_seq_set_data_ext" not in fake.calls


def test_a_forged_slice_is_refused_for_what_it_holds(sliced: tuple[FakeLlama, Any]) -> None:
    """Of two streams, of more rows or of none, or of the rows of another place."""
    fake, memory = sliced
    blob, shifted = taken(memory, 0, [0, 4, 8])[:2]
    at = 256 + 4 * 4
    for place, value in ((at + 8, 2), (at + 12, 5), (at + 12, 0)):
        forged = bytearray(blob)
        struct.pack_into("<I", forged, place, value)
        act = partial(memory.restore_rows, 1, 0, resealed(bytes(forged)), PROMPT, scratch=SCRATCH)
        assert refused_field(act) == "payload"
    before = everything(fake)
    moved = resealed(blob[:at] + shifted[at:])
    with pytest.raises(BackendError):
        memory.restore_rows(1, 0, moved, PROMPT, scratch=SCRATCH)
    assert everything(fake) == before


def test_a_slice_that_would_bring_a_state_along_is_refused(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    forged = bytearray(memory.save(0, PROMPT))
    struct.pack_into("<I", forged, 16, 2)
    blob = resealed(bytes(forged))
    act = partial(memory.restore_rows, 1, 0, blob, PROMPT, scratch=SCRATCH)
    assert refused_field(act) == "payload"
    assert memory.positions(1) == (-1, -1)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(SLICED),
    length=st.integers(1, 25),
    inner=st.lists(st.integers(1, 24), max_size=8),
    again=st.lists(st.integers(1, 24), max_size=4),
)
def test_any_slicing_of_any_slicing_is_the_same_sequence(
    kind: tuple[str, int], length: int, inner: list[int], again: list[int]
) -> None:
    tokens = [(7 * i) % 50 for i in range(length)]
    for module in IMPLEMENTATIONS.values():
        fake = FakeLlama(kind[0], n_cells=80, window=kind[1])
        memory = memory_on(module, fake, kind[0])
        fake.decode(0, tokens)
        expected = fake.logits(0)
        for source, cuts in enumerate((inner, again)):
            places = sorted({0, length, *(cut for cut in cuts if cut < length)})
            blobs = taken(memory, source, places, tokens)
            for start, blob in zip(places, blobs[:-1], strict=False):
                memory.restore_rows(source + 1, start, blob, tokens, scratch=SCRATCH)
            memory.restore(source + 1, blobs[-1], tokens, rows=False)
            assert fake.logits(source + 1) == expected
        assert len(fake.rows) == 3 * length
        assert fake.violations == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("build", "llama.cpp of another day"),
        ("model", bytes(32)),
        ("n_layer", 4),
        ("n_ctx", 1024),
        ("flash_attn", False),
        ("unified", False),
        ("type_k", 8),
        ("type_v", 8),
    ],
)
def test_a_state_of_another_context_is_refused_with_the_field_and_both_values(
    implementation: Any, field: str, other: Any
) -> None:
    fake = FakeLlama("hybrid")
    here = memory_on(implementation, fake, "hybrid")
    there = memory_on(implementation, fake, "hybrid", **{field: other})
    fake.decode(0, PROMPT)
    blob = there.save(0, PROMPT)
    fake.calls.clear()
    with pytest.raises(StateRefused) as caught:
        here.restore(1, blob, PROMPT)
    assert caught.value.field == field
    for value in (other, getattr(identity_of(implementation), field)):
        shown = value.hex()[:16] if isinstance(value, bytes) else str(value)
        assert shown in str(caught.value)
    assert "llama_state_seq_set_data_ext" not in fake.calls
    assert here.positions(1) == (-1, -1)


def test_a_state_of_another_kind_of_memory_is_refused(open_fake: Any) -> None:
    for kind, other in itertools.permutations(KINDS, 2):
        fake, memory = open_fake(kind)
        fake.decode(0, PROMPT)
        blob = memory.save(0, PROMPT)
        _, foreign = open_fake(other)
        with pytest.raises(StateRefused, match=f"memory {kind}, this context has {other}"):
            foreign.restore(0, blob, PROMPT)


@pytest.mark.parametrize("tokens", [PROMPT[:-1], [*PROMPT, 1], [*PROMPT[:5], 99, *PROMPT[6:]]])
def test_a_state_of_other_tokens_is_refused(open_fake: Any, tokens: list[int]) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    assert refused_field(lambda: memory.restore(1, blob, tokens)) == "tokens"


def test_no_flipped_bit_anywhere_goes_unnoticed(open_fake: Any, implementation: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    fake.calls.clear()
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(StateRefused):
            implementation.describe(damaged)
        with pytest.raises(StateRefused):
            memory.restore(1, damaged, PROMPT)
    assert "llama_state_seq_set_data_ext" not in fake.calls
    assert memory.positions(1) == (-1, -1)


def test_no_truncation_and_no_extension_goes_unnoticed(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    for length in range(len(blob)):
        with pytest.raises(StateRefused):
            memory.restore(1, blob[:length], PROMPT)
    assert refused_field(lambda: memory.restore(1, blob + b"\0", PROMPT)) == "length"
    assert memory.positions(1) == (-1, -1)


@pytest.mark.parametrize(
    ("at", "form", "value", "field"),
    [
        (0, "<8s", b"GGUF\3\0\0\0", "magic"),
        (8, "<I", 2, "version"),
        (12, "<I", 128, "header"),
        (16, "<I", 2, "form"),
        (16, "<I", 3, "header"),
        (232, "<I", 1, "length"),
        (232, "<I", 2**32 - 1, "length"),
        (20, "<I", 0, "header"),
        (20, "<I", 9, "header"),
        (32, "<I", 7, "header"),
        (48, "<Q", 2**64 - 1, "length"),
        (48, "<Q", 0, "length"),
        (56, "<Q", 1, "token_hash"),
        (64, "<I", 2**32 - 1, "length"),
        (64, "<I", 0, "length"),
        (250, "<B", 1, "header"),
        (231, "<B", 1, "header"),
    ],
)
def test_a_forged_header_with_a_right_checksum_is_refused_for_what_it_says(
    open_fake: Any, at: int, form: str, value: Any, field: str
) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    forged = bytearray(memory.save(0, PROMPT))
    struct.pack_into(form, forged, at, value)
    assert refused_field(lambda: memory.restore(1, resealed(bytes(forged)), PROMPT)) == field


def test_a_forged_state_section_is_refused_before_llama_cpp_sees_it(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    section = len(blob) - (20 + 2 * 12 + 4 * 52)
    fake.calls.clear()
    for at in (section, section + 4, section + 8, section + 12, section + 16, section + 20):
        forged = bytearray(blob)
        forged[at] ^= 4
        state = resealed(bytes(forged))
        assert refused_field(partial(memory.restore, 1, state, PROMPT)) == "payload"
    assert "llama_state_seq_set_data_ext" not in fake.calls


def test_both_implementations_refuse_in_the_same_words() -> None:
    chance = random.Random(3)
    fake = FakeLlama("hybrid")
    memories = [memory_on(module, fake, "hybrid") for module in IMPLEMENTATIONS.values()]
    fake.decode(0, PROMPT)
    blob = memories[0].save(0, PROMPT)
    for trial in range(600):
        forged = bytearray(blob)
        for _ in range(chance.randrange(1, 4)):
            forged[chance.randrange(260)] = chance.randrange(256)
        state = resealed(bytes(forged)) if trial % 3 else bytes(forged)
        told = []
        for memory in memories:
            try:
                told.append((memory.restore(1, state, PROMPT), "", ""))
                memory.clear(1)
            except (StateRefused, PoolFull) as refusal:
                told.append((0, getattr(refusal, "field", ""), str(refusal)))
        assert told[0] == told[1]


# --- arguments ------------------------------------------------------------------------------------

NOT_INTS: list[Any] = [None, True, False, 1.0, "1", b"1", [], (), {}, object(), 1j]
NO_SEQUENCES: list[Any] = [
    -1,
    6,
    255,
    256,
    2**31,
    2**32,
    -(2**31),
    2**63,
    2**64,
    -(2**70),
    10**5000,
]


@pytest.mark.parametrize(
    "call",
    [
        lambda memory, id: memory.positions(id),
        lambda memory, id: memory.clear(id),
        lambda memory, id: memory.strip(id),
        lambda memory, id: memory.scrub(id),
        lambda memory, id: memory.cut(id, 3),
        lambda memory, id: memory.copy(id, 3),
        lambda memory, id: memory.copy(0, id),
        lambda memory, id: memory.state_size(id),
        lambda memory, id: memory.save(id, PROMPT),
        lambda memory, id: memory.save_into(id, PROMPT, bytearray(4000)),
        lambda memory, id: memory.save_file(id, PROMPT, "nowhere"),
        lambda memory, id: memory.restore(id, b"", PROMPT),
        lambda memory, id: memory.restore_file(id, "nowhere", PROMPT),
        lambda memory, id: memory.save_rows(id, 0, 4, PROMPT, scratch=5),
        lambda memory, id: memory.save_rows(0, 0, 4, PROMPT, scratch=id),
        lambda memory, id: memory.restore_rows(id, 0, b"", PROMPT, scratch=5),
        lambda memory, id: memory.restore_rows(1, 0, b"", PROMPT, scratch=id),
    ],
)
def test_no_sequence_id_but_a_right_one_reaches_llama_cpp(open_fake: Any, call: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    fake.calls.clear()
    for value in NOT_INTS:
        with pytest.raises(TypeError, match=type(value).__name__):
            call(memory, value)
    for value in NO_SEQUENCES:
        with pytest.raises(InvalidArgument, match="0 to 5"):
            call(memory, value)
    assert fake.calls == []


@pytest.mark.parametrize("call", ["copy", "cut", "start", "end", "restored start"])
def test_no_length_but_a_right_one_is_taken(open_fake: Any, call: str) -> None:
    fake, memory = open_fake("attention")
    fake.decode(0, PROMPT)
    acts: dict[str, Callable[[Any], object]] = {
        "copy": partial(memory.copy, 0, 1),
        "cut": partial(memory.cut, 0),
        "start": lambda value: memory.save_rows(0, value, 12, PROMPT, scratch=5),
        "end": lambda value: memory.save_rows(0, 0, value, PROMPT, scratch=5),
        "restored start": lambda value: memory.restore_rows(1, value, b"", PROMPT, scratch=5),
    }
    act = acts[call]
    for value in NOT_INTS:
        if value is None and call == "copy":
            continue
        with pytest.raises(TypeError):
            act(value)
    for value in (-1, 2**31, 2**64, -(2**64)):
        with pytest.raises(InvalidArgument):
            act(value)
    assert memory.positions(0) == (0, 11)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (None, TypeError),
        (5, TypeError),
        ("abc", TypeError),
        ({1: 2}, TypeError),
        (iter([1]), TypeError),
        ([1, "2"], TypeError),
        ([1, True], TypeError),
        ([1, 2.0], TypeError),
        ([1, None], TypeError),
        ([-1], InvalidArgument),
        ([2**31], InvalidArgument),
        ([2**80], InvalidArgument),
        (b"12345", InvalidArgument),
        (b"", InvalidArgument),
        (b"\xff\xff\xff\xff", InvalidArgument),
        (array.array("I", [1]), InvalidArgument),
        (array.array("q", [1]), InvalidArgument),
        (array.array("f", [1]), InvalidArgument),
        (array.array("h", [1, 2]), InvalidArgument),
        (array.array("i", [1, -2]), InvalidArgument),
        (np.zeros((2, 2), np.int32), InvalidArgument),
        (np.array(7, np.int32), InvalidArgument),
        (np.zeros(8, np.int32)[::2], InvalidArgument),
        (np.zeros(2, ">i4"), InvalidArgument),
        (np.zeros(2, bool), InvalidArgument),
    ],
)
def test_no_tokens_but_int32_are_taken(open_fake: Any, tokens: Any, error: type) -> None:
    _, memory = open_fake("hybrid")
    with pytest.raises(error) as caught:
        memory.save(0, tokens)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("blob", "error"),
    [
        (None, TypeError),
        ("text", TypeError),
        ([1, 2], TypeError),
        (array.array("i", [0] * 100), InvalidArgument),
        (np.zeros((20, 20), np.uint8), InvalidArgument),
        (np.zeros(800, np.uint8)[::2], InvalidArgument),
        (memoryview(bytes(800))[::-1], InvalidArgument),
        (b"", StateRefused),
        (bytes(255), StateRefused),
        (bytes(256), StateRefused),
    ],
)
def test_no_blob_but_bytes_is_taken(
    open_fake: Any, implementation: Any, blob: Any, error: type
) -> None:
    _, memory = open_fake("hybrid")
    for act in each(
        lambda: memory.restore(0, blob, PROMPT),
        lambda: memory.restore_rows(0, 0, blob, PROMPT, scratch=5),
        lambda: implementation.describe(blob),
    ):
        with pytest.raises(error) as caught:
            act()
        assert type(caught.value) is error


def test_a_buffer_must_be_writable_flat_and_large_enough(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    size = memory.state_size(0)
    wrong: list[tuple[Any, str]] = [
        (bytes(size), "read-only"),
        (memoryview(bytearray(size)).toreadonly(), "read-only"),
        (bytearray(size - 1), f"{size - 1} bytes, the state needs {size}"),
        (bytearray(), f"0 bytes, the state needs {size}"),
        (array.array("i", bytes(4 * size)), "items of 4 bytes"),
        (memoryview(bytearray(2 * size))[::2], "contiguous"),
        (np.zeros((size, 2), np.uint8), "one-dimensional"),
    ]
    for buffer, reason in wrong:
        with pytest.raises(InvalidArgument, match=reason):
            memory.save_into(0, PROMPT, buffer)
    with pytest.raises(TypeError):
        memory.save_into(0, PROMPT, None)
    assert memory.save_into(0, PROMPT, np.zeros(size, np.uint8)) == size


def test_a_buffer_is_free_again_after_a_refused_call(open_fake: Any) -> None:
    _, memory = open_fake("hybrid")
    buffer, tokens = bytearray(300), bytearray(8)
    for act in each(
        lambda: memory.restore(0, buffer, tokens),
        lambda: memory.save_into(0, tokens, buffer),
        lambda: memory.save(0, tokens, rows=3),
        lambda: memory.restore(0, buffer, tokens, rows=3),
        lambda: memory.save_rows(0, 0, 2, tokens, scratch=9),
        lambda: memory.restore_rows(0, 0, buffer, tokens, scratch=9),
        lambda: memory.restore_rows(0, 0, buffer, tokens, scratch=5),
    ):
        with pytest.raises((TypeError, InvalidArgument, StateRefused)):
            act()
        buffer.append(0)
        tokens.extend(bytes(4))


def test_rows_must_be_a_bool(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    for value in (0, 1, None, "yes"):
        with pytest.raises(TypeError, match="rows must be a bool"):
            memory.save(0, PROMPT, rows=value)
        with pytest.raises(TypeError, match="rows must be a bool"):
            memory.state_size(0, rows=value)
        if value is not None:
            with pytest.raises(TypeError, match="rows must be a bool"):
                memory.restore(0, b"", PROMPT, rows=value)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"memory": "iswa"}, InvalidArgument, "memory must be"),
        ({"memory": 3}, TypeError, "memory must be a str"),
        ({"n_sequences": 0}, InvalidArgument, "1 to 256"),
        ({"n_sequences": 257}, InvalidArgument, "1 to 256"),
        ({"n_sequences": True}, TypeError, "n_sequences"),
        ({"context": 0}, InvalidArgument, "context is not an address"),
        ({"context": -1}, InvalidArgument, "context is not an address"),
        ({"context": 2**64}, InvalidArgument, "context is not an address"),
        ({"context": None}, TypeError, "context"),
        ({"functions": 3}, TypeError, "functions must be a mapping"),
        ({"functions": {}}, InvalidArgument, "lacks llama_get_memory"),
        ({"identity": None}, AttributeError, "build"),
    ],
)
def test_a_memory_is_not_made_of_wrong_parts(
    implementation: Any, changes: dict[str, Any], error: type, reason: str
) -> None:
    fake = FakeLlama("hybrid")
    parts = {
        "functions": fake.functions,
        "context": fake.context,
        "n_sequences": 6,
        "memory": "hybrid",
        "identity": identity_of(implementation),
    }
    with pytest.raises(error, match=reason):
        implementation.SequenceMemory(**{**parts, **changes})
    assert fake.calls == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"build": ""}, InvalidArgument),
        ({"build": "x" * 129}, InvalidArgument),
        ({"build": "a\0b"}, InvalidArgument),
        ({"build": "\ud800"}, InvalidArgument),
        ({"build": b"x"}, TypeError),
        ({"model": bytes(31)}, InvalidArgument),
        ({"model": "x" * 32}, TypeError),
        ({"n_layer": 0}, InvalidArgument),
        ({"n_ctx": 2**31}, InvalidArgument),
        ({"n_ctx": 1.5}, TypeError),
        ({"flash_attn": 1}, TypeError),
        ({"unified": None}, TypeError),
        ({"type_k": -1}, InvalidArgument),
        ({"type_v": 2**40}, InvalidArgument),
    ],
)
def test_an_identity_is_checked_field_by_field(
    implementation: Any, changes: dict[str, Any], error: type
) -> None:
    with pytest.raises(error, match=next(iter(changes))):
        memory_on(implementation, FakeLlama("hybrid"), "hybrid", **changes)


def test_a_missing_or_zero_function_is_named(implementation: Any) -> None:
    fake = FakeLlama("hybrid")
    for name in seqstate_ctypes.FUNCTIONS:
        rest = {key: value for key, value in fake.functions.items() if key != name}
        for functions in (rest, {**rest, name: 0}, {**rest, name: -1}):
            fake.functions = functions
            with pytest.raises(InvalidArgument, match=name):
                memory_on(implementation, fake, "hybrid")
        fake.functions = {**rest, name: _address(fake, name)}


def _address(fake: FakeLlama, name: str) -> int:
    return ctypes.cast(fake._pointers[name], ctypes.c_void_p).value or 0


def test_a_context_without_an_empty_sequence_is_told_so(implementation: Any) -> None:
    fake = FakeLlama("hybrid", n_sequences=2)
    fake.decode(0, PROMPT)
    fake.decode(1, PROMPT)
    with pytest.raises(InvalidArgument, match="no sequence is empty"):
        memory_on(implementation, fake, "hybrid")


class Meddler:
    """An index that runs code of its own while it is asked for its value."""

    def __init__(self, act: Callable[[], object], value: int = 0) -> None:
        self.act, self.value = act, value

    def __index__(self) -> int:
        self.act()
        return self.value


def test_an_index_that_meddles_while_it_is_converted_does_no_harm(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    tokens: list[Any] = [*PROMPT]
    tokens[2] = Meddler(tokens.clear, PROMPT[2])
    assert memory.save(0, tokens) == memory.save(0, PROMPT)
    memory.clear(Meddler(lambda: memory.clear(0), 0))
    with pytest.raises(BackendError, match="closed"):
        memory.clear(Meddler(memory.close, 0))
    with pytest.raises(ZeroDivisionError):
        memory.clear(Meddler(lambda: 1 // 0))


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 20),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=40),
    st.lists(st.integers(-2, 2**33), max_size=14),
    st.just(PROMPT),
    st.builds(bytearray, st.integers(0, 900)),
    st.builds(lambda ids: array.array("i", ids), st.lists(st.integers(0, 99), max_size=14)),
)
methods = st.sampled_from(
    [
        ("positions", 1),
        ("clear", 1),
        ("strip", 1),
        ("scrub", 1),
        ("cut", 2),
        ("copy", 3),
        ("state_size", 1),
        ("save", 2),
        ("save_into", 3),
        ("restore", 3),
        ("restore_file", 3),
        ("save_rows", 5),
        ("restore_rows", 5),
    ]
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    calls=st.lists(st.tuples(methods, st.lists(anything, min_size=5, max_size=5)), max_size=12),
)
def test_no_arguments_whatever_harm_the_process_and_both_implementations_agree(
    kind: str, calls: list[tuple[tuple[str, int], list[Any]]]
) -> None:
    told = []
    for module in IMPLEMENTATIONS.values():
        fake = FakeLlama(kind)
        memory = memory_on(module, fake, kind)
        fake.decode(0, PROMPT)
        fake.decode(1, REPLY)
        told.append([outcome_of(memory, name, arguments[:n]) for (name, n), arguments in calls])
        told[-1] += [fake.logits(sequence) for sequence in range(6)]
        assert fake.violations == []
    assert told[0] == told[1]


def outcome_of(memory: Any, name: str, arguments: list[Any]) -> Any:
    """What a call gives or raises. The last of five arguments is the scratch sequence."""
    copied = [bytearray(a) if isinstance(a, bytearray) else a for a in arguments]
    scratch = {"scratch": copied[4]} if len(copied) == 5 else {}
    try:
        return getattr(memory, name)(*copied[:4], **scratch), copied
    except (InvalidArgument, TypeError, BackendError, StateRefused) as error:
        return type(error), str(error)
    except (OSError, ValueError) as error:
        return type(error)


# --- files ----------------------------------------------------------------------------------------


def test_a_saved_file_is_private_whole_and_alone(open_fake: Any, tmp_path: Path) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    path = tmp_path / "a state"
    path.write_bytes(b"older")
    memory.save_file(0, PROMPT, str(path))
    assert os.listdir(tmp_path) == ["a state"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert memory.restore_file(1, os.fsencode(path), PROMPT) == 12
    assert fake.logits(1) == fake.logits(0)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    open_fake: Any, tmp_path: Path
) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    with pytest.raises(FileNotFoundError):
        memory.save_file(0, PROMPT, tmp_path / "no" / "folder")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        memory.save_file(0, PROMPT, tmp_path / "taken")
    assert os.listdir(tmp_path) == ["taken"]


def test_a_file_that_cannot_be_read_leaves_the_sequence_as_it_was(
    open_fake: Any, tmp_path: Path
) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    before = fake.logits(0)
    with pytest.raises(FileNotFoundError, match="missing"):
        memory.restore_file(0, tmp_path / "missing", PROMPT)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidArgument, match="not a regular file"):
            memory.restore_file(0, path, PROMPT)
    with pytest.raises(ValueError, match="null"):
        memory.restore_file(0, "a\0b", PROMPT)
    for wrong in (None, 3, 1.5):
        with pytest.raises(TypeError):
            memory.restore_file(0, wrong, PROMPT)
    assert fake.logits(0) == before


def test_a_damaged_file_is_refused_before_it_is_read_whole(open_fake: Any, tmp_path: Path) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    path = tmp_path / "state"
    memory.save_file(0, PROMPT, path)
    blob = path.read_bytes()
    for damaged, field in (
        (b"", "length"),
        (blob[:100], "length"),
        (blob[:-1], "length"),
        (blob + b"x", "length"),
        (b"GGUF" + blob[4:], "magic"),
        (blob[:-1] + bytes([blob[-1] ^ 1]), "checksum"),
    ):
        path.write_bytes(damaged)
        assert refused_field(lambda: memory.restore_file(1, path, PROMPT)) == field
        assert memory.positions(1) == (-1, -1)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert refused_field(lambda: memory.restore_file(1, path, PROMPT)) == "length"


# --- one thread at a time, and the end ------------------------------------------------------------


def test_a_call_from_within_llama_cpp_is_refused(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    told: list[str] = []

    def call_back(name: str) -> None:
        for act in each(lambda: memory.clear(0), lambda: memory.save(0, PROMPT), memory.close):
            with pytest.raises(BackendError, match="one thread owns") as caught:
                act()
            told.append(str(caught.value))

    for act in each(
        lambda: memory.copy(0, 1),
        lambda: memory.positions(0),
        lambda: memory.save(0, PROMPT),
        lambda: memory.save_rows(0, 0, 4, PROMPT, scratch=5),
    ):
        fake.on_call = call_back
        act()
        fake.on_call = None
    assert told
    assert memory.positions(0) == (11, 11)


def test_a_second_thread_is_refused_while_a_call_runs_and_other_threads_go_on(
    open_fake: Any,
) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    inside, go_on = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name == "llama_state_seq_get_data_ext":
            inside.set()
            assert go_on.wait(10)

    fake.on_call = wait
    saved: list[bytes] = []
    thread = threading.Thread(target=lambda: saved.append(memory.save(0, PROMPT)))
    thread.start()
    assert inside.wait(10)  # that this thread runs shows that the lock was given up
    with pytest.raises(BackendError, match="one thread owns"):
        memory.clear(0)
    go_on.set()
    thread.join()
    fake.on_call = None
    assert memory.restore(1, saved[0], PROMPT) == 12


def test_a_buffer_cannot_be_resized_while_llama_cpp_writes_into_it(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    buffer = bytearray(memory.state_size(0))
    seen: list[str] = []

    def resize(name: str) -> None:
        with pytest.raises(BufferError):
            buffer.clear()
        seen.append(name)

    fake.on_call = resize
    memory.save_into(0, PROMPT, buffer)
    fake.on_call = None
    assert "llama_state_seq_get_data_ext" in seen
    buffer.clear()


def test_after_close_every_call_says_so(open_fake: Any) -> None:
    fake, memory = open_fake("hybrid")
    fake.decode(0, PROMPT)
    blob = memory.save(0, PROMPT)
    memory.close()
    memory.close()
    fake.calls.clear()
    for act in each(
        lambda: memory.positions(0),
        lambda: memory.copy(0, 1),
        lambda: memory.clear(0),
        memory.clear_all,
        lambda: memory.cut(0, 20),
        lambda: memory.strip(0),
        lambda: memory.scrub(0),
        lambda: memory.state_size(0),
        lambda: memory.save(0, PROMPT),
        lambda: memory.save_into(0, PROMPT, bytearray(4000)),
        lambda: memory.save_file(0, PROMPT, "nowhere"),
        lambda: memory.restore(1, blob, PROMPT),
        lambda: memory.restore_file(1, "nowhere", PROMPT),
        lambda: memory.save_rows(0, 0, 4, PROMPT, scratch=5),
        lambda: memory.restore_rows(1, 0, blob, PROMPT, scratch=5),
    ):
        with pytest.raises(BackendError, match="closed"):
            act()
    assert fake.calls == []


# --- the extension as an object -------------------------------------------------------------------


def test_the_c_type_cannot_be_altered_or_subclassed() -> None:
    with pytest.raises(TypeError):
        type("Sub", (_seqstate.SequenceMemory,), {})
    with pytest.raises(TypeError):
        _seqstate.SequenceMemory.clear = None  # type: ignore[method-assign, assignment]


def test_the_c_module_can_be_loaded_twice_and_let_go() -> None:
    import importlib.util

    spec = importlib.util.find_spec("orchestrator._seqstate")
    assert spec is not None
    assert spec.loader is not None
    second: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    assert second is not _seqstate
    assert second.SequenceMemory is not _seqstate.SequenceMemory
    fake = FakeLlama("hybrid")
    memory = memory_on(second, fake, "hybrid")
    del second
    gc.collect()
    with pytest.raises(InvalidArgument):
        memory.clear(99)
    del memory
    gc.collect()


def test_both_implementations_have_the_same_names_and_fields() -> None:
    for name in ("Identity", "Header"):
        assert getattr(_seqstate, name)._fields == getattr(seqstate_ctypes, name)._fields
    public = {name for name in dir(seqstate_ctypes.SequenceMemory) if not name.startswith("_")}
    assert public == {name for name in dir(_seqstate.SequenceMemory) if not name.startswith("_")}
    assert seqstate_ctypes.HEADER_LENGTH == _seqstate.HEADER_LENGTH


def test_thousands_of_calls_leak_neither_memory_nor_references(tmp_path: Path) -> None:
    fake = FakeLlama("hybrid")
    identity = identity_of(_seqstate)
    tokens = array.array("i", PROMPT)
    path = tmp_path / "state"

    def make() -> Any:
        return _seqstate.SequenceMemory(
            fake.functions, fake.context, n_sequences=6, memory="hybrid", identity=identity
        )

    memory = make()
    fake.decode(0, PROMPT)
    blob = memory.save(0, tokens)
    buffer = bytearray(blob)
    wrong = blob[:-1] + bytes([blob[-1] ^ 1])

    def round_trip() -> None:
        make()
        memory.save(0, PROMPT)
        memory.save_into(0, tokens, buffer)
        memory.restore(1, buffer, tokens)
        memory.clear(1)
        memory.save_file(0, tokens, path)
        memory.restore_file(1, path, PROMPT)
        memory.copy(1, 2, 4)
        memory.clear(1)
        memory.scrub(2)
        rows = memory.save_rows(0, 0, 5, PROMPT, scratch=5)
        memory.restore_rows(1, 0, rows, tokens, scratch=5)
        memory.clear(1)
        _seqstate.describe(blob)
        _seqstate.describe(rows)
        for act in each(
            lambda: memory.restore(1, wrong, tokens),
            lambda: memory.save(0, [*PROMPT, "x"]),
            lambda: memory.save_into(0, tokens, bytearray(9)),
            lambda: memory.clear(77),
            lambda: memory.restore_file(1, tmp_path, tokens),
            lambda: memory.save_rows(0, 0, 99, tokens, scratch=5),
            lambda: memory.restore_rows(1, 0, blob, tokens, scratch=5),
            lambda: memory.restore_rows(1, 0, wrong, [*PROMPT, "x"], scratch=5),
        ):
            with pytest.raises((InvalidArgument, StateRefused, TypeError)):
                act()
        fake.calls.clear()

    for _ in range(20):
        round_trip()
    gc.collect()
    counted = (tokens, PROMPT, identity, blob, _seqstate.SequenceMemory, StateRefused)
    references = [sys.getrefcount(thing) for thing in counted]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    resident = _resident()
    for _ in range(150):
        round_trip()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [sys.getrefcount(thing) for thing in counted] == references
    assert after - before < 60_000
    if "ASAN_OPTIONS" not in os.environ:  # there, freed memory is held back to catch its use
        assert _resident() - resident < 16 << 20


def test_large_states_do_not_grow_the_process(tmp_path: Path) -> None:
    """The C form's own buffers do not show in tracemalloc: here each would be a megabyte."""
    fake = FakeLlama("recurrent", n_sequences=2, state_rows=(1 << 18,))
    memory = memory_on(_seqstate, fake, "recurrent")
    fake.decode(0, PROMPT)
    path = tmp_path / "state"
    resident = 0
    for trial in range(60):
        if trial == 10:
            resident = _resident()
        memory.save_file(0, PROMPT, path)
        memory.restore_file(1, path, PROMPT)
        memory.scrub(1)
        with pytest.raises(FileNotFoundError):
            memory.save_file(0, PROMPT, tmp_path / "no" / "folder")
        with pytest.raises(StateRefused):
            memory.restore_file(1, path, PROMPT[1:])
    if "ASAN_OPTIONS" not in os.environ:
        assert _resident() - resident < 20 << 20


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- on real models -------------------------------------------------------------------------------

HYBRIDS = ("qwen35", "lfm2", "granitehybrid", "falcon-h1", "nemotron_h", "jamba")
RECURRENT = ("mamba2", "rwkv7")
ATTENTION = ("llama", "gemma3")
LONG = [(37 * i) % 250 for i in range(100)]
GO_ON = [[3, 1, 4, 1], [5], [9, 2, 6]]


@pytest.fixture(scope="module")
def real_context(request: pytest.FixtureRequest) -> Iterator[RealContext]:
    from tiny_models import build

    context = RealContext(build(request.param))
    yield context
    context.close()


@pytest.fixture
def real(real_context: RealContext, implementation: Any) -> Iterator[tuple[RealContext, Any]]:
    memory = memory_on(implementation, real_context, real_context.memory)
    yield real_context, memory
    memory.clear_all()
    real_context.lengths = [0] * real_context.n_sequences
    memory.close()


def prefill(context: RealContext, sequence: int, tokens: list[int]) -> None:
    for start in range(0, len(tokens), 50):
        context.decode(sequence, tokens[start : start + 50])


def go_on(context: RealContext, sequence: int) -> list[bytes]:
    return [context.decode(sequence, chunk).tobytes() for chunk in GO_ON]


def every(*architectures: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("real_context", architectures, indirect=True)


@pytest.mark.models
@every(*ATTENTION, *HYBRIDS, *RECURRENT)
def test_a_real_state_restored_goes_on_bit_for_bit(real: tuple[RealContext, Any]) -> None:
    context, memory = real
    prefill(context, 0, LONG)
    blob = memory.save(0, LONG)
    expected = go_on(context, 0)
    for target in (0, 5):
        memory.clear(0)
        memory.restore(target, blob, LONG)
        context.lengths[target] = len(LONG)
        assert go_on(context, target) == expected
        memory.clear(target)


@pytest.mark.models
@every(*ATTENTION, *HYBRIDS, *RECURRENT)
def test_a_real_copy_goes_on_bit_for_bit(real: tuple[RealContext, Any]) -> None:
    context, memory = real
    prefill(context, 0, LONG)
    memory.copy(0, 3)
    expected = go_on(context, 0)
    context.lengths[3] = len(LONG)
    assert go_on(context, 3) == expected


@pytest.mark.models
@every(*ATTENTION, *HYBRIDS)
def test_real_slices_go_on_bit_for_bit_as_the_whole_does(real: tuple[RealContext, Any]) -> None:
    """A window of 64 too, with slices that are shorter and longer than it."""
    context, memory = real
    prefill(context, 0, LONG)
    prefill(context, 2, LONG[:30])
    lane = go_on(context, 2)
    memory.clear(2)
    state = memory.save(0, LONG, rows=False)
    slicings = [
        [
            (start, memory.save_rows(0, start, end, LONG, scratch=7))
            for start, end in itertools.pairwise(cuts)
        ]
        for cuts in ([0, 100], [0, 10, 90, 100], [0, 1, 2, 99, 100], [*range(0, 101, 20)])
    ]
    expected = go_on(context, 0)
    memory.clear(0)
    for slices in slicings:
        context.lengths[2] = 0
        prefill(context, 2, LONG[:30])
        told: list[bytes] = []
        for start, blob in slices:
            memory.restore_rows(4, start, blob, LONG, scratch=7)
            if len(told) < len(GO_ON):
                told.append(context.decode(2, GO_ON[len(told)]).tobytes())
        memory.restore(4, state, LONG, rows=False)
        context.lengths[4] = len(LONG)
        assert go_on(context, 4) == expected
        assert told == lane[: len(told)]
        memory.clear(2)
        memory.clear(4)


@pytest.mark.models
@every("llama", "granitehybrid", "qwen35")
def test_a_real_slice_for_which_there_are_no_cells_leaves_the_sequence_empty(
    real: tuple[RealContext, Any],
) -> None:
    context, memory = real
    prefill(context, 0, LONG)
    blob = memory.save(0, LONG)
    for target in (1, 2, 3):
        memory.restore(target, blob, LONG)
    slices = [memory.save_rows(0, start, start + 50, LONG, scratch=7) for start in (0, 50)]
    for sequence in (4, 5):
        if sequence == 5:
            context.decode(6, LONG[:30])
        memory.restore_rows(sequence, 0, slices[0], LONG, scratch=7)
        if sequence == 5:
            with pytest.raises(PoolFull, match="50 free cells"):
                memory.restore_rows(sequence, 50, slices[1], LONG, scratch=7)
            assert memory.positions(5) == memory.positions(7) == (-1, -1)
        memory.clear(sequence)


@pytest.mark.models
@every(*HYBRIDS)
def test_a_real_snapshot_rewinds_a_lane_and_seeds_a_branch(real: tuple[RealContext, Any]) -> None:
    context, memory = real
    prefill(context, 0, LONG[:50])
    snapshot = memory.save(0, LONG[:50], rows=False)
    assert len(snapshot) == 256 + 200 + context.api.llama_state_seq_get_size_ext(
        context.handle, 0, 1
    )
    expected = go_on(context, 0)
    context.decode(0, LONG[50:])
    memory.restore(0, snapshot, LONG[:50])
    assert memory.positions(0) == (49, 49)
    context.lengths[0] = 50
    assert go_on(context, 0) == expected
    memory.strip(0)
    assert memory.positions(0) == (0, -1)
    memory.copy(0, 4, 50)
    memory.restore(4, snapshot, LONG[:50])
    context.lengths[4] = 50
    assert go_on(context, 4) == expected


@pytest.mark.models
@every(*HYBRIDS)
def test_a_real_snapshot_over_too_few_rows_is_refused(real: tuple[RealContext, Any]) -> None:
    context, memory = real
    prefill(context, 0, LONG)
    snapshot = memory.save(0, LONG, rows=False)
    memory.copy(0, 1, 99)
    assert memory.positions(1) == (0, -1)
    assert refused_field(lambda: memory.restore(1, snapshot, LONG)) == "rows"
    assert memory.positions(1) == (-1, -1)


@pytest.mark.models
@every(*HYBRIDS, *RECURRENT)
def test_a_real_nan_is_not_saved_and_a_scrub_frees_its_cell_of_it(
    real: tuple[RealContext, Any],
) -> None:
    context, memory = real
    prefill(context, 5, LONG)
    prefill(context, 2, LONG[:30])
    memory.copy(2, 6)
    expected = go_on(context, 5)
    memory.clear(5)
    context.lengths[5] = 0
    prefill(context, 0, LONG)
    _poison(context, memory, 0)
    assert np.isnan(context.decode(0, [1])).any()
    tokens = [*LONG, 1]
    assert refused_field(lambda: memory.save(0, tokens)) == "finite"
    before = memory.save(2, LONG[:30])
    memory.scrub(0)
    assert memory.positions(0) == (-1, -1)
    assert memory.save(2, LONG[:30]) == before
    for sequence in (0, 1, 3, 4, 5, 7):
        context.lengths[sequence] = 0
        prefill(context, sequence, LONG[:20])
    for sequence in (0, 1, 3, 4, 5, 7):
        memory.clear(sequence)
    context.lengths[5] = 0
    prefill(context, 5, LONG)
    assert go_on(context, 5) == expected


def _poison(context: RealContext, memory: Any, sequence: int) -> None:
    """Import a state with a NaN by llama.cpp's own function, past every check of ours."""
    flags = 1 if context.memory == "hybrid" else 0
    size = context.api.llama_state_seq_get_size_ext(context.handle, sequence, flags)
    state = (ctypes.c_uint8 * size)()
    context.api.llama_state_seq_get_data_ext(context.handle, state, size, sequence, flags)
    floats = 8 + 20 + 12  # the last bytes may be no float: lfm2 has tensors of no size
    state[floats : floats + 4] = list(struct.pack("<f", float("nan")))
    assert size == context.api.llama_state_seq_set_data_ext(
        context.handle, state, size, sequence, flags
    )


@pytest.mark.models
@every("llama", "granitehybrid", "qwen35")
def test_a_real_full_pool_says_so_and_leaves_the_sequence_clean(
    real: tuple[RealContext, Any],
) -> None:
    context, memory = real
    prefill(context, 0, LONG)
    blob = memory.save(0, LONG)
    for target in range(1, 5):
        memory.restore(target, blob, LONG)
    with pytest.raises(PoolFull, match="100 free cells"):
        memory.restore(5, blob, LONG)
    assert memory.positions(5) == (-1, -1)
    memory.clear(1)
    assert memory.restore(5, blob, LONG) == 100


@pytest.mark.models
@every("granitehybrid")
def test_a_real_state_of_another_model_is_refused_by_llama_cpp_too(
    real: tuple[RealContext, Any], implementation: Any
) -> None:
    from tiny_models import build

    context, memory = real
    prefill(context, 0, LONG)
    blob = memory.save(0, LONG)
    other = RealContext(build("falcon-h1"))
    try:
        foreign = memory_on(implementation, other, other.memory, model=bytes(32))
        assert refused_field(lambda: foreign.restore(0, blob, LONG)) == "model"
        same_name = memory_on(implementation, other, other.memory)
        assert refused_field(lambda: same_name.restore(0, blob, LONG)) == "payload"
        assert same_name.positions(0) == (-1, -1)
    finally:
        other.close()


@pytest.mark.models
@every(*HYBRIDS, *RECURRENT)
def test_a_real_state_is_of_the_form_that_is_checked(real: tuple[RealContext, Any]) -> None:
    """Were llama.cpp to change its layout, states would not be looked into: this fails first."""
    context, memory = real
    prefill(context, 0, LONG[:10])
    blob = bytearray(memory.save(0, LONG[:10], rows=context.memory == "recurrent"))
    struct.pack_into("<f", blob, 256 + 4 * 10 + 8 + 20 + 12, float("inf"))
    assert refused_field(lambda: memory.restore(0, resealed(bytes(blob)), LONG[:10])) == "finite"


@pytest.mark.models
@every("llama", "gemma3")
def test_real_attention_rows_can_be_cut_and_copied_in_part(real: tuple[RealContext, Any]) -> None:
    context, memory = real
    prefill(context, 0, LONG[:50])
    expected = go_on(context, 0)
    context.decode(0, LONG[50:])
    memory.copy(0, 1, 50)
    memory.cut(0, 50)
    for sequence in (0, 1):
        assert memory.positions(sequence) == (0, 49)
        context.lengths[sequence] = 50
        assert go_on(context, sequence) == expected


@pytest.mark.models
@every("gemma3")
def test_a_real_window_that_was_restored_cannot_be_cut(real: tuple[RealContext, Any]) -> None:
    """A save leaves out what lies beyond the window, so a cut would leave a gap below it."""
    context, memory = real
    prefill(context, 0, LONG)
    assert memory.positions(0) == (0, 99)
    memory.restore(1, memory.save(0, LONG), LONG)
    assert memory.positions(1)[0] > 0
    for act in each(lambda: memory.cut(1, 90), lambda: memory.copy(1, 2, 90)):
        with pytest.raises(InvalidArgument, match="sliding window"):
            act()
