"""What every runtime promises, tried on the simulated one and on every tiny architecture."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import tiny_models
from numpy.typing import NDArray
from real import DEMO, open_exact, open_runtime

from orchestrator.errors import BackendError, InvalidArgument, PoolFull, StateRefused
from orchestrator.pool.ledger import Ledger
from orchestrator.runtime.protocol import GREEDY, Chunk, Limits, MemoryKind, Runtime, Sampling
from orchestrator.runtime.simulated import Cost, FailingRuntime, SimulatedRuntime

N_CONTEXT, N_SEQUENCES = 512, 6
N_BATCH = 48  # below 64 tokens results do not depend on where rows lie in the pool
MEMORY: dict[str, MemoryKind] = {
    "simulated hybrid": "hybrid",
    "simulated recurrent": "recurrent",
    "simulated attention": "attention",
    "simulated windowed": "windowed",
}
MODELS = [
    *MEMORY,
    *(pytest.param(name, marks=pytest.mark.models) for name in tiny_models.ARCHITECTURES),
    *(
        pytest.param(f"{name} {kind}", marks=pytest.mark.models)
        for name in ("granitehybrid", "qwen35", "rwkv7", "llama")
        for kind in ("Q4_1", "Q8_0")
    ),
    pytest.param(DEMO, marks=pytest.mark.demo),
]
TEXT = [32 + number * 7 % 90 for number in range(150)]


@pytest.fixture(params=MODELS, scope="module")
def opened(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Open each runtime once."""
    name: str = request.param
    if name in MEMORY:
        limits = Limits(N_SEQUENCES, N_CONTEXT, N_CONTEXT, N_BATCH, 1000, 10)
        yield SimulatedRuntime(limits, memory=MEMORY[name])
        return
    with open_runtime(
        name,
        n_context=N_CONTEXT,
        n_sequences=N_SEQUENCES,
        n_batch=N_BATCH,
        n_ubatch=N_BATCH,
        threads=None if name == DEMO else 1,
    ) as runtime:
        yield runtime


@pytest.fixture
def runtime(opened: Runtime) -> Runtime:
    """Return it emptied."""
    opened.reset()
    return opened


def feed(runtime: Runtime, sequence: int, tokens: list[int]) -> NDArray[np.float32]:
    """Append tokens, in chunks of at most a batch, and return the last logits."""
    start = runtime.length(sequence)
    for offset in range(0, len(tokens), N_BATCH):
        part = tuple(tokens[offset : offset + N_BATCH])
        (row,) = runtime.decode([Chunk(sequence, start + offset, part, wants_logits=True)])
    assert row is not None
    return runtime.logits(row)


def in_two_parts(runtime: Runtime, cut: int = 100) -> NDArray[np.float32]:
    """Return the logits after all of the text, fed in two parts, and empty the runtime again."""
    feed(runtime, 0, TEXT[:cut])
    logits = feed(runtime, 0, TEXT[cut:])
    runtime.reset()
    return logits


def cuts(runtime: Runtime) -> bool:
    """Whether the rows of this runtime can be cut anywhere."""
    return runtime.model.memory == "attention"


def test_a_sequence_holds_what_was_fed_to_it(runtime: Runtime) -> None:
    feed(runtime, 2, TEXT)
    lengths = [runtime.length(sequence) for sequence in range(N_SEQUENCES)]
    assert lengths == [0, 0, len(TEXT), 0, 0, 0]


def test_logits_come_as_one_finite_row_of_the_vocabulary(runtime: Runtime) -> None:
    logits = feed(runtime, 0, TEXT)
    assert logits.shape == (runtime.model.n_vocab,)
    assert np.isfinite(logits).all()


def test_the_same_tokens_give_the_same_logits(runtime: Runtime) -> None:
    first = feed(runtime, 0, TEXT)
    runtime.reset()
    assert np.array_equal(first, feed(runtime, 0, TEXT))


def test_another_beginning_gives_other_logits(runtime: Runtime) -> None:
    first = feed(runtime, 0, TEXT)
    runtime.reset()
    assert not np.array_equal(first, feed(runtime, 0, [40, *TEXT[1:]]))


def test_a_greedy_sampler_takes_the_best_token(runtime: Runtime) -> None:
    (row,) = runtime.decode([Chunk(0, 0, tuple(TEXT[:20]), wants_logits=True)])
    assert row is not None
    sampler = runtime.sampler(GREEDY, [])
    assert sampler.sample(row) == int(runtime.logits(row).argmax())
    sampler.close()
    sampler.close()


def test_a_seed_repeats_itself_and_another_differs(runtime: Runtime) -> None:
    def draw(seed: int) -> list[int]:
        sampler = runtime.sampler(
            Sampling(temperature=50, top_k=0, top_p=1, min_p=0, seed=seed), []
        )
        (row,) = runtime.decode([Chunk(0, runtime.length(0), (40,), wants_logits=True)])
        assert row is not None
        drawn = [sampler.sample(row) for _ in range(12)]
        sampler.close()
        return drawn

    draws = []
    for seed in (1, 1, 2):
        runtime.reset()
        draws.append(draw(seed))
    assert draws[0] == draws[1] != draws[2]


def test_a_copy_goes_on_as_its_source_would(runtime: Runtime) -> None:
    feed(runtime, 0, TEXT[:100])
    runtime.copy(0, 3)
    assert runtime.length(3) == 100
    there = feed(runtime, 0, TEXT[100:])
    here = feed(runtime, 3, TEXT[100:])
    assert np.array_equal(there, here)


def test_a_copy_outlives_its_source(runtime: Runtime) -> None:
    wanted = in_two_parts(runtime)
    feed(runtime, 0, TEXT[:100])
    runtime.copy(0, 3)
    runtime.clear(0)
    assert np.array_equal(wanted, feed(runtime, 3, TEXT[100:]))


def test_two_branches_do_not_see_each_other(runtime: Runtime) -> None:
    wanted = in_two_parts(runtime)
    feed(runtime, 0, TEXT[:100])
    runtime.copy(0, 1)
    feed(runtime, 1, [70] * 40)
    assert np.array_equal(wanted, feed(runtime, 0, TEXT[100:]))


def test_a_copy_takes_no_cell(runtime: Runtime) -> None:
    feed(runtime, 0, TEXT)
    for target in range(1, N_SEQUENCES):
        runtime.copy(0, target)
    room = N_CONTEXT - len(TEXT)  # what is left can be filled to the last cell
    feed(runtime, 0, [50] * room)
    assert runtime.length(0) == N_CONTEXT


def test_a_full_pool_refuses_and_changes_nothing(runtime: Runtime) -> None:
    n_cells = runtime.limits.n_cells
    if runtime.model.memory == "recurrent":  # its tokens take no cell, so there is no full pool
        for sequence in range(N_SEQUENCES):
            feed(runtime, sequence, [50] * n_cells)
        return
    feed(runtime, 0, [50] * (n_cells - 10))
    with pytest.raises(PoolFull):
        feed(runtime, 1, [50] * 11)
    assert (runtime.length(0), runtime.length(1)) == (n_cells - 10, 0)
    feed(runtime, 1, [50] * 10)
    runtime.clear(0)
    feed(runtime, 2, [50] * 20)


def test_the_ledger_counts_as_the_runtime_does(runtime: Runtime) -> None:
    if runtime.model.memory == "recurrent":
        assert Ledger(None).fits(10 * runtime.limits.n_cells)
        return
    ledger = Ledger(runtime.limits.n_cells)
    for sequence, count in ((0, 100), (1, 60)):
        feed(runtime, sequence, [40 + sequence] * count)
        ledger.extend(sequence, count)
    for source, target in ((0, 2), (1, 3), (0, 4)):
        runtime.copy(source, target)
        ledger.copy(source, target)
    for sequence in (2, 1):
        feed(runtime, sequence, [60] * 30)
        ledger.extend(sequence, 30)
    for sequence in (0, 3):
        runtime.clear(sequence)
        ledger.clear(sequence)
    free = ledger.free
    assert free is not None
    with pytest.raises(PoolFull):
        fill(runtime, 5, free + 1)
    runtime.clear(5)
    fill(runtime, 5, free)


def fill(runtime: Runtime, sequence: int, count: int) -> None:
    """Take `count` cells, the last one in a call of its own."""
    feed(runtime, sequence, [50] * (count - 1))
    feed(runtime, sequence, [50])


def test_a_saved_state_restored_goes_on_bit_for_bit(runtime: Runtime) -> None:
    feed(runtime, 0, TEXT[:100])
    blob = runtime.save(0, TEXT[:100])
    wanted = feed(runtime, 0, TEXT[100:])
    runtime.reset()
    runtime.restore(0, blob, TEXT[:100])
    assert runtime.length(0) == 100
    assert np.array_equal(wanted, feed(runtime, 0, TEXT[100:]))


def test_a_saved_state_fits_any_other_sequence(runtime: Runtime) -> None:
    feed(runtime, 0, TEXT[:100])
    blob = runtime.save(0, TEXT[:100])
    wanted = feed(runtime, 0, TEXT[100:])
    runtime.restore(4, blob, TEXT[:100])
    assert np.array_equal(wanted, feed(runtime, 4, TEXT[100:]))


def test_a_state_is_refused_for_other_tokens_and_when_damaged(runtime: Runtime) -> None:
    feed(runtime, 0, TEXT[:100])
    blob = runtime.save(0, TEXT[:100])
    damaged = blob[:-5] + bytes([blob[-5] ^ 1]) + blob[-4:]
    for state, tokens in ((blob, [*TEXT[:99], 33]), (damaged, TEXT[:100]), (blob[:80], TEXT[:100])):
        with pytest.raises(StateRefused):
            runtime.restore(1, state, tokens)
        assert runtime.length(1) == 0
    feed(runtime, 1, TEXT)


SLICINGS = ([0, 100], [0, 1, 2, 99, 100], [0, 48, 96, 100], [*range(0, 101, 10)])
PROMPT = TEXT[:100]


def save_in_slices(runtime: Runtime, cuts: list[int], sequence: int = 0) -> list[bytes]:
    """Return the rows of a sequence that holds the prompt, from cut to cut; none if it has none."""
    if runtime.model.memory == "recurrent":
        return []
    return [runtime.save_rows(sequence, start, end, PROMPT) for start, end in pairwise(cuts)]


def restore_rows(runtime: Runtime, sequence: int, cuts: list[int], slices: list[bytes]) -> None:
    """Put back what `save_in_slices` gave; the sequence then lacks its state."""
    for start, blob in zip(cuts, slices, strict=False):
        runtime.restore_rows(sequence, start, blob, PROMPT)


def test_whatever_has_rows_moves_them_in_slices(runtime: Runtime) -> None:
    assert runtime.limits.sliced == (runtime.model.memory != "recurrent")


def test_slices_go_on_bit_for_bit_as_the_whole_does(runtime: Runtime) -> None:
    feed(runtime, 0, PROMPT)
    whole, state = runtime.save(0, PROMPT), runtime.save_state(0, PROMPT)
    sliced = [save_in_slices(runtime, cuts) for cuts in SLICINGS]
    untouched = feed(runtime, 0, TEXT[100:])
    runtime.reset()
    runtime.restore(4, whole, PROMPT)
    wanted = feed(runtime, 4, TEXT[100:])
    assert np.array_equal(wanted, untouched)
    for cuts, slices in zip(SLICINGS, sliced, strict=True):
        runtime.reset()
        restore_rows(runtime, 4, cuts, slices)
        runtime.restore_state(4, state, PROMPT)
        assert runtime.length(4) == 100
        assert np.array_equal(wanted, feed(runtime, 4, TEXT[100:]))


def test_what_was_restored_in_slices_is_saved_copied_and_sliced_again(runtime: Runtime) -> None:
    feed(runtime, 0, PROMPT)
    state = runtime.save_state(0, PROMPT)
    slices = save_in_slices(runtime, [0, 30, 100])
    wanted = feed(runtime, 0, TEXT[100:])
    runtime.clear(0)
    restore_rows(runtime, 1, [0, 30], slices)
    runtime.restore_state(1, state, PROMPT)
    whole, state = runtime.save(1, PROMPT), runtime.save_state(1, PROMPT)
    slices = save_in_slices(runtime, [0, 70, 100], sequence=1)
    runtime.copy(1, 2)
    runtime.clear(1)
    assert np.array_equal(wanted, feed(runtime, 2, TEXT[100:]))
    runtime.restore(3, whole, PROMPT)
    restore_rows(runtime, 4, [0, 70], slices)
    runtime.restore_state(4, state, PROMPT)
    for sequence in (3, 4):
        assert np.array_equal(wanted, feed(runtime, sequence, TEXT[100:]))


def test_lanes_go_on_unmoved_between_two_slices(runtime: Runtime) -> None:
    """Nothing is freed meanwhile: where a lane's next row finds room shows in its last bits."""
    cuts = [0, 25, 50, 75, 100]
    spans = list(pairwise(cuts)) if runtime.limits.sliced else []

    def lane() -> NDArray[np.float32]:
        return feed(runtime, 2, [60 + runtime.length(2) % 7])

    feed(runtime, 2, [60] * 30)
    alone = [lane() for _ in range(10)]
    runtime.reset()
    wanted = in_two_parts(runtime)
    feed(runtime, 0, PROMPT)
    feed(runtime, 2, [60] * 30)
    seen, slices = [lane()], []
    for span in spans:
        slices.append(runtime.save_rows(0, *span, PROMPT))
        seen.append(lane())
    state = runtime.save_state(0, PROMPT)
    seen.append(lane())
    for (start, _), blob in zip(spans, slices, strict=True):
        runtime.restore_rows(1, start, blob, PROMPT)
        seen.append(lane())
    runtime.restore_state(1, state, PROMPT)
    assert all(np.array_equal(a, b) for a, b in zip(alone, seen, strict=False))
    assert np.array_equal(wanted, feed(runtime, 1, TEXT[100:]))


def test_slicing_takes_no_cell_and_leaves_the_sequence_as_it_was(runtime: Runtime) -> None:
    wanted = in_two_parts(runtime)
    feed(runtime, 0, PROMPT)
    feed(runtime, 1, [50] * (N_CONTEXT - len(TEXT)))
    save_in_slices(runtime, [0, 48, 96, 100])
    runtime.save_state(0, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 0, TEXT[100:]))


def refuse_and_empty(
    runtime: Runtime, sequence: int, call: Callable[[], None], field: str | None
) -> None:
    """Check that a restore is refused for this field, and that nothing of the sequence is left."""
    with pytest.raises(StateRefused if field else PoolFull) as caught:
        call()
    assert getattr(caught.value, "field", None) == field
    assert runtime.length(sequence) == 0


def fill_the_pool(runtime: Runtime, sequence: int) -> None:
    """Take every cell that the lengths leave free, so that none was lost to what was refused."""
    if runtime.model.memory != "recurrent":
        used = sum(runtime.length(other) for other in range(N_SEQUENCES))
        fill(runtime, sequence, N_CONTEXT - used)


def test_a_slice_or_state_that_does_not_belong_empties_the_whole_sequence(
    runtime: Runtime,
) -> None:
    wanted = in_two_parts(runtime)
    feed(runtime, 0, PROMPT)
    whole, state = runtime.save(0, PROMPT), runtime.save_state(0, PROMPT)
    other = [41, *PROMPT[1:]]
    if runtime.limits.sliced:
        first, second = save_in_slices(runtime, [0, 50, 100])
        damaged = second[:-5] + bytes([second[-5] ^ 1]) + second[-4:]
        for blob, tokens, field in (
            (second, other, "rows"),
            (second, [*PROMPT[:99], 33], "tokens"),
            (second, PROMPT[:99], "tokens"),
            (damaged, PROMPT, "checksum"),
            (second[:80], PROMPT, "length"),
            (first, PROMPT, "start"),
            (state, PROMPT, "form"),
            (whole, PROMPT, "form"),
        ):
            runtime.restore_rows(1, 0, first, PROMPT)
            call = partial(runtime.restore_rows, 1, 50, blob, tokens)
            refuse_and_empty(runtime, 1, call, field)
    bad = state[:-5] + bytes([state[-5] ^ 1]) + state[-4:]
    foreign = "rows" if runtime.limits.sliced else "tokens"
    wrong = [(state, other, foreign), (bad, PROMPT, "checksum"), (state[:80], PROMPT, "length")]
    if runtime.limits.sliced:
        wrong += [(whole, PROMPT, "form"), (first, PROMPT, "form")]
    for blob, tokens, field in wrong:
        if runtime.limits.sliced:
            restore_rows(runtime, 1, [0, 50], [first, second])
        refuse_and_empty(runtime, 1, partial(runtime.restore_state, 1, blob, tokens), field)
    if runtime.limits.sliced:
        for blob in (state, first):
            refuse_and_empty(runtime, 1, partial(runtime.restore, 1, blob, PROMPT), "form")
    assert np.array_equal(wanted, feed(runtime, 0, TEXT[100:]))
    fill_the_pool(runtime, 1)


def test_a_slice_is_refused_after_another_beginning_though_its_own_tokens_are_the_same(
    runtime: Runtime,
) -> None:
    if not runtime.limits.sliced:
        return
    feed(runtime, 0, PROMPT)
    _, second = save_in_slices(runtime, [0, 50, 100])
    other = [41, *PROMPT[1:]]
    feed(runtime, 1, other)
    first = runtime.save_rows(1, 0, 50, other)
    runtime.clear(1)
    runtime.restore_rows(2, 0, first, other)
    refuse_and_empty(runtime, 2, partial(runtime.restore_rows, 2, 50, second, other), "tokens")


def test_a_slice_serves_a_longer_sequence_that_begins_alike(runtime: Runtime) -> None:
    if not runtime.limits.sliced:
        return
    feed(runtime, 0, TEXT[:60])
    head = runtime.save_rows(0, 0, 60, TEXT[:60])
    feed(runtime, 0, TEXT[60:100])
    rest = runtime.save_rows(0, 60, 100, PROMPT)
    state = runtime.save_state(0, PROMPT)
    wanted = feed(runtime, 0, TEXT[100:])
    restore_rows(runtime, 5, [0, 60], [head, rest])
    runtime.restore_state(5, state, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 5, TEXT[100:]))


def test_a_slice_that_finds_no_cells_empties_the_whole_sequence(runtime: Runtime) -> None:
    if not runtime.limits.sliced:
        return
    wanted = in_two_parts(runtime)
    feed(runtime, 0, PROMPT)
    first, second = save_in_slices(runtime, [0, 50, 100])
    fill(runtime, 1, N_CONTEXT - 199)
    runtime.restore_rows(2, 0, first, PROMPT)
    refuse_and_empty(runtime, 2, partial(runtime.restore_rows, 2, 50, second, PROMPT), None)
    fill_the_pool(runtime, 2)
    runtime.clear(1)
    assert np.array_equal(wanted, feed(runtime, 0, TEXT[100:]))


def test_an_incomplete_sequence_is_never_evaluated_nor_copied_or_saved_as_if_it_were_whole(
    runtime: Runtime,
) -> None:
    if not runtime.limits.sliced:
        return
    feed(runtime, 0, PROMPT)
    whole, state = runtime.save(0, PROMPT), runtime.save_state(0, PROMPT)
    first, second = save_in_slices(runtime, [0, 50, 100])
    wanted = feed(runtime, 0, TEXT[100:])
    runtime.restore_rows(1, 0, first, PROMPT)
    calls: list[Callable[[], object]] = [
        lambda: runtime.decode([Chunk(1, 50, (40,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(2, 0, (40,), True), Chunk(1, 50, (40,), True)][::-1]),
        lambda: runtime.copy(1, 2),
        lambda: runtime.copy(0, 1),
        lambda: runtime.strip(1),
        lambda: runtime.copy_rows(1, 2, 51),
        lambda: runtime.cut(1, 51),
        lambda: runtime.cut(1, -1),
        lambda: runtime.save(1, TEXT[:50]),
        lambda: runtime.save_state(1, TEXT[:50]),
        lambda: runtime.restore(1, whole, PROMPT),
        lambda: runtime.restore_rows(1, 0, first, PROMPT),
        lambda: runtime.restore_rows(1, 49, second, PROMPT),
        lambda: runtime.restore_state(1, state, PROMPT),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
        assert (runtime.length(0), runtime.length(1), runtime.length(2)) == (150, 50, 0)
    for empty in (runtime.clear, runtime.scrub):
        empty(1)
        assert runtime.length(1) == 0
        runtime.restore_rows(1, 0, first, PROMPT)
    runtime.restore_rows(1, 50, second, PROMPT)
    runtime.restore_state(1, state, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 1, TEXT[100:]))
    runtime.restore_rows(3, 0, first, PROMPT)
    runtime.reset()
    assert np.array_equal(feed(runtime, 3, PROMPT), feed(runtime, 0, PROMPT))


def test_rows_without_their_state_are_saved_as_those_of_a_whole_sequence(runtime: Runtime) -> None:
    if not runtime.limits.sliced:
        return
    feed(runtime, 0, PROMPT)
    state, slices = runtime.save_state(0, PROMPT), save_in_slices(runtime, [0, 50, 100])
    wanted = feed(runtime, 0, TEXT[100:])
    runtime.reset()
    restore_rows(runtime, 1, [0, 50], slices)
    assert save_in_slices(runtime, [0, 50, 100], sequence=1) == slices
    restore_rows(runtime, 2, [0, 50], slices)
    runtime.restore_state(2, state, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 2, TEXT[100:]))


def test_rows_without_their_state_are_cut_where_no_window_is_in_the_way(runtime: Runtime) -> None:
    if not runtime.limits.sliced:
        return
    feed(runtime, 0, PROMPT)
    state = runtime.save_state(0, PROMPT)
    first, second = save_in_slices(runtime, [0, 50, 100])
    middle = runtime.save_rows(0, 30, 50, PROMPT)
    wanted = feed(runtime, 0, TEXT[100:])
    runtime.reset()
    runtime.restore_rows(1, 0, first, PROMPT)
    if runtime.model.memory == "windowed":
        with pytest.raises(InvalidArgument, match="cannot be cut"):
            runtime.cut(1, 30)
    else:
        runtime.cut(1, 30)
        assert runtime.length(1) == 30
        runtime.restore_rows(1, 30, middle, PROMPT)
    runtime.cut(1, 50)
    runtime.restore_rows(1, 50, second, PROMPT)
    runtime.restore_state(1, state, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 1, TEXT[100:]))
    runtime.restore_rows(2, 0, first, PROMPT)
    runtime.cut(2, 0)
    assert runtime.length(2) == 0
    assert runtime.decode([Chunk(2, 0, (40,), wants_logits=False)]) == [None]


def test_a_scrub_beside_an_incomplete_sequence_leaves_its_rows(runtime: Runtime) -> None:
    if not runtime.limits.sliced:
        return
    feed(runtime, 0, PROMPT)
    state, (first, second) = runtime.save_state(0, PROMPT), save_in_slices(runtime, [0, 50, 100])
    wanted = feed(runtime, 0, TEXT[100:])
    runtime.reset()
    runtime.restore_rows(1, 0, first, PROMPT)
    feed(runtime, 2, [60] * 20)
    runtime.scrub(2)
    runtime.restore_rows(1, 50, second, PROMPT)
    feed(runtime, 2, [60] * 20)
    runtime.scrub(2)
    runtime.restore_state(1, state, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 1, TEXT[100:]))


def test_without_rows_there_are_no_slices_but_the_state_moves_alone(runtime: Runtime) -> None:
    if runtime.limits.sliced:
        return
    feed(runtime, 0, PROMPT)
    state = runtime.save_state(0, PROMPT)
    wanted = feed(runtime, 0, TEXT[100:])
    calls: list[Callable[[], object]] = [
        lambda: runtime.save_rows(0, 0, 50, TEXT),
        lambda: runtime.restore_rows(1, 0, state, PROMPT),
        lambda: runtime.restore_state(0, state, PROMPT),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
        assert (runtime.length(0), runtime.length(1)) == (len(TEXT), 0)
    runtime.restore_state(1, state, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 1, TEXT[100:]))


DEPTHS = (20, 65, 110, 140)
REPLY = [70, 71, 72, 73, 74, 75]


def snapshots_of(runtime: Runtime, sequence: int, depths: tuple[int, ...] = DEPTHS) -> list[bytes]:
    """Feed the text to an empty sequence and return its state at each depth."""
    states, before = [], 0
    for depth in depths:
        feed(runtime, sequence, TEXT[before:depth])
        states.append(runtime.save_state(sequence, TEXT[:depth]))
        before = depth
    feed(runtime, sequence, TEXT[before:])
    return states


def replies(runtime: Runtime, lanes: list[int]) -> list[list[NDArray[np.float32]]]:
    """Return the logits of each lane as all go on together, in calls of as many as may be."""
    seen: dict[int, list[NDArray[np.float32]]] = {lane: [] for lane in lanes}
    size = runtime.limits.n_joint or len(lanes)
    crowds = [lanes[at : at + size] for at in range(0, len(lanes), size)]
    for token, crowd in product(REPLY, crowds):
        chunks = [Chunk(lane, runtime.length(lane), (token,), True) for lane in crowd]
        for lane, row in zip(crowd, runtime.decode(chunks), strict=True):
            assert row is not None
            seen[lane].append(runtime.logits(row))
    return list(seen.values())


def cold_replies(runtime: Runtime, depths: tuple[int, ...]) -> list[list[NDArray[np.float32]]]:
    """Return what `replies` gives where every lane read its tokens itself; empties the runtime.

    The lanes read in the same chunks as `snapshots_of` and lie in the sequences from 1 on, as many
    as are to go on together.
    """
    runtime.reset()
    for lane, depth in enumerate(depths, 1):
        before = 0
        for end in [each for each in DEPTHS if each <= depth]:
            feed(runtime, lane, TEXT[before:end])
            before = end
    seen = replies(runtime, list(range(1, len(depths) + 1)))
    runtime.reset()
    return seen


def seed(runtime: Runtime, holder: int, lane: int, depth: int, state: bytes) -> None:
    """Begin a lane at a depth of a holder's path."""
    runtime.copy_rows(holder, lane, depth)
    runtime.restore_state(lane, state, TEXT[:depth])
    assert runtime.length(lane) == depth


def same(here: list[list[NDArray[np.float32]]], there: list[list[NDArray[np.float32]]]) -> bool:
    """Whether two crowds of lanes saw the same to the last bit."""
    return np.array_equal(np.array(here), np.array(there))


def take_every_cell(runtime: Runtime, used: int) -> None:
    """Fill sequence 5 with what `used` cells leave free, and check that no more is."""
    fill(runtime, 5, runtime.limits.n_cells - used)
    with pytest.raises(PoolFull):
        feed(runtime, 4, [50])


def test_states_are_kept_apart_from_rows_on_hybrid_memory_alone(runtime: Runtime) -> None:
    assert runtime.limits.snapshots == (runtime.model.memory == "hybrid")


def test_without_snapshots_no_rows_are_held_alone(runtime: Runtime) -> None:
    if runtime.limits.snapshots:
        return
    wanted = in_two_parts(runtime)
    feed(runtime, 0, PROMPT)
    calls: list[Callable[[], None]] = [
        lambda: runtime.copy_rows(0, 1, 50),
        lambda: runtime.strip(0),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="apart from their rows"):
            call()
    assert (runtime.length(0), runtime.length(1)) == (100, 0)
    assert np.array_equal(wanted, feed(runtime, 0, TEXT[100:]))


def test_lanes_seeded_along_one_holder_go_on_together_as_cold_ones_do(runtime: Runtime) -> None:
    """Its rows beyond their depths live on and none of them sees these."""
    if not runtime.limits.snapshots:
        return
    wanted = cold_replies(runtime, DEPTHS)
    states = snapshots_of(runtime, 0)
    runtime.strip(0)
    for lane, (depth, state) in enumerate(zip(DEPTHS, states, strict=True), 1):
        seed(runtime, 0, lane, depth, state)
        feed(runtime, 5, [60 + lane] * 3)
    assert same(replies(runtime, [1, 2, 3, 4]), wanted)
    assert runtime.length(0) == len(TEXT)


def test_a_lane_is_seeded_as_before_when_the_cells_of_later_rows_were_used_again(
    runtime: Runtime,
) -> None:
    if not runtime.limits.snapshots:
        return
    depths, wanted = DEPTHS[:2], cold_replies(runtime, DEPTHS[:2])
    states = snapshots_of(runtime, 0)
    runtime.strip(0)
    seed(runtime, 0, 3, DEPTHS[2], states[2])
    runtime.cut(0, DEPTHS[2] - 10)
    runtime.clear(3)
    runtime.cut(0, DEPTHS[1])
    take_every_cell(runtime, used=DEPTHS[1])
    seed(runtime, 0, 1, depths[0], states[0])
    seed(runtime, 0, 2, depths[1], states[1])
    runtime.clear(5)
    feed(runtime, 5, [90] * 20)
    assert same(replies(runtime, [1, 2]), wanted)


def test_rows_are_copied_from_a_whole_sequence_as_from_a_holder(runtime: Runtime) -> None:
    """Of all its rows too, and from a lane that goes on unmoved."""
    if not runtime.limits.snapshots:
        return
    wanted = cold_replies(runtime, DEPTHS[2:])
    states = snapshots_of(runtime, 0)
    runtime.copy_rows(0, 3, len(TEXT))
    with pytest.raises(InvalidArgument, match="incomplete"):
        runtime.decode([Chunk(3, len(TEXT), (40,), wants_logits=True)])
    here = feed(runtime, 0, REPLY)
    runtime.clear(0)
    seed(runtime, 3, 1, DEPTHS[2], states[2])
    runtime.copy_rows(3, 4, DEPTHS[3])
    runtime.clear(3)
    seed(runtime, 4, 2, DEPTHS[3], states[3])
    assert same(replies(runtime, [1, 2]), wanted)
    runtime.reset()
    snapshots_of(runtime, 0)
    assert np.array_equal(here, feed(runtime, 0, REPLY))


def test_rows_alone_take_no_cell_of_their_own(runtime: Runtime) -> None:
    if not runtime.limits.snapshots:
        return
    feed(runtime, 0, PROMPT)
    runtime.copy_rows(0, 1, 60)
    runtime.copy_rows(1, 2, 30)
    runtime.strip(0)
    runtime.cut(0, 50)
    take_every_cell(runtime, used=60)
    runtime.clear(5)
    runtime.clear(1)
    take_every_cell(runtime, used=50)


def test_a_state_over_the_rows_of_other_tokens_is_refused_and_the_sequence_usable(
    runtime: Runtime,
) -> None:
    """llama.cpp would take it and answer fluently and wrong."""
    if not runtime.limits.snapshots:
        return
    wanted = in_two_parts(runtime)
    other = [*PROMPT[:40], 99, *PROMPT[41:]]
    feed(runtime, 0, PROMPT)
    state = runtime.save_state(0, PROMPT)
    feed(runtime, 1, other)
    foreign = runtime.save_state(1, other)
    runtime.strip(1)
    for blob, tokens, field in (
        (state, PROMPT, "rows"),
        (state, other, "tokens"),
        (foreign, PROMPT, "rows"),
    ):
        runtime.copy_rows(1, 2, len(PROMPT))
        refuse_and_empty(runtime, 2, partial(runtime.restore_state, 2, blob, tokens), field)
    feed(runtime, 2, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 2, TEXT[100:]))
    runtime.clear(2)
    refuse_and_empty(runtime, 1, partial(runtime.restore_state, 1, state, PROMPT), "rows")
    take_every_cell(runtime, used=len(PROMPT))
    runtime.clear(5)
    assert np.array_equal(wanted, feed(runtime, 0, TEXT[100:]))


def test_a_holder_goes_to_host_memory_and_back_and_its_snapshots_fit_it_again(
    runtime: Runtime,
) -> None:
    if not runtime.limits.snapshots:
        return
    wanted = cold_replies(runtime, DEPTHS)
    states = snapshots_of(runtime, 0)
    runtime.strip(0)
    cuts = [0, 48, 96, len(TEXT)]
    slices = [runtime.save_rows(0, start, end, TEXT) for start, end in pairwise(cuts)]
    runtime.clear(0)
    feed(runtime, 1, [90] * 200)
    runtime.clear(1)
    for start, blob in zip(cuts, slices, strict=False):
        feed(runtime, 5, [60] * 2)
        runtime.restore_rows(0, start, blob, TEXT)
    for lane, (depth, state) in enumerate(zip(DEPTHS, states, strict=True), 1):
        seed(runtime, 0, lane, depth, state)
    assert same(replies(runtime, [1, 2, 3, 4]), wanted)


def test_a_holder_that_was_cut_grows_again_along_another_path(runtime: Runtime) -> None:
    if not runtime.limits.snapshots:
        return
    other = [*TEXT[:65], *([91] * 35)]
    feed(runtime, 1, other)
    state = runtime.save_state(1, other)
    rest = runtime.save_rows(1, 65, 100, other)
    wanted = feed(runtime, 1, REPLY)
    runtime.clear(1)
    feed(runtime, 0, TEXT)
    runtime.strip(0)
    runtime.cut(0, 65)
    runtime.restore_rows(0, 65, rest, other)
    runtime.restore_state(0, state, other)
    assert np.array_equal(wanted, feed(runtime, 0, REPLY))


def test_what_makes_no_sense_of_a_holder_is_refused_and_changes_nothing(runtime: Runtime) -> None:
    if not runtime.limits.snapshots:
        return
    wanted = in_two_parts(runtime)
    feed(runtime, 0, PROMPT)
    state, rows = runtime.save_state(0, PROMPT), runtime.save_rows(0, 0, 100, PROMPT)
    runtime.copy(0, 1)
    runtime.strip(1)
    calls: list[Callable[[], object]] = [
        lambda: runtime.decode([Chunk(1, 100, (40,), wants_logits=True)]),
        lambda: runtime.copy(1, 2),
        lambda: runtime.strip(1),
        lambda: runtime.strip(2),
        lambda: runtime.strip(-1),
        lambda: runtime.strip(N_SEQUENCES),
        lambda: runtime.copy_rows(1, 2, 0),
        lambda: runtime.copy_rows(1, 2, -1),
        lambda: runtime.copy_rows(1, 2, 101),
        lambda: runtime.copy_rows(1, 1, 50),
        lambda: runtime.copy_rows(1, 0, 50),
        lambda: runtime.copy_rows(0, 1, 50),
        lambda: runtime.copy_rows(2, 3, 1),
        lambda: runtime.copy_rows(-1, 2, 50),
        lambda: runtime.copy_rows(1, -1, 50),
        lambda: runtime.copy_rows(1, N_SEQUENCES, 50),
        lambda: runtime.copy_rows(N_SEQUENCES, 2, 50),
        lambda: runtime.cut(1, 101),
        lambda: runtime.cut(1, -1),
        lambda: runtime.cut(0, 0),
        lambda: runtime.save(1, PROMPT),
        lambda: runtime.save_state(1, PROMPT),
        lambda: runtime.save_rows(1, 0, 101, PROMPT),
        lambda: runtime.save_rows(1, 0, 50, PROMPT[:50]),
        lambda: runtime.restore_rows(1, 0, rows, PROMPT),
        lambda: runtime.restore_state(1, state, PROMPT[:99]),
        lambda: runtime.restore_state(0, state, PROMPT),
        lambda: runtime.restore_state(2, state, PROMPT),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
        assert [runtime.length(sequence) for sequence in range(4)] == [100, 100, 0, 0]
    runtime.restore_state(1, state, PROMPT)
    assert np.array_equal(wanted, feed(runtime, 1, TEXT[100:]))


def test_a_sequence_is_saved_under_the_tokens_it_was_fed_and_under_no_others(
    runtime: Runtime,
) -> None:
    """However it came to hold them: a state under a wrong name would serve a wrong prompt."""
    feed(runtime, 0, PROMPT[:60])
    feed(runtime, 0, PROMPT[60:])
    whole, state = runtime.save(0, PROMPT), runtime.save_state(0, PROMPT)
    runtime.copy(0, 1)
    runtime.restore(2, whole, PROMPT)
    restore_rows(runtime, 3, [0, 50], save_in_slices(runtime, [0, 50, 100]))
    runtime.restore_state(3, state, PROMPT)
    if cuts(runtime):
        feed(runtime, 0, [33])
        runtime.cut(0, 99)
        feed(runtime, 0, PROMPT[99:])
    for sequence in range(4):
        for at in (0, 59, 60, 99):
            wrong = [*PROMPT[:at], 41, *PROMPT[at + 1 :]]
            calls = [partial(runtime.save, sequence, wrong)]
            calls += [partial(runtime.save_state, sequence, wrong)]
            if runtime.limits.sliced:
                calls += [partial(runtime.save_rows, sequence, 0, 10, wrong)]
            for call in calls:
                with pytest.raises(InvalidArgument, match=f"token {at} is 41"):
                    call()
        assert runtime.save(sequence, tuple(PROMPT)) == runtime.save(sequence, array("i", PROMPT))


def test_the_tokens_that_are_given_stay_the_callers_own(runtime: Runtime) -> None:
    feed(runtime, 0, PROMPT)
    whole, given = runtime.save(0, PROMPT), array("i", PROMPT)
    runtime.restore(1, whole, given)
    feed(runtime, 1, REPLY)
    assert given == array("i", PROMPT)
    given[3] = 41
    assert runtime.save(1, [*PROMPT, *REPLY])


def test_tokens_that_are_none_are_refused(runtime: Runtime) -> None:
    feed(runtime, 0, PROMPT)
    for wrong in ([*PROMPT[:99], 2**31], [*PROMPT[:99], None], [*PROMPT[:99], 1.5], "x" * 100):
        calls: list[Callable[[], object]] = [
            lambda: runtime.save(0, wrong),  # type: ignore[arg-type]  # noqa: B023
            lambda: runtime.restore(1, b"", wrong),  # type: ignore[arg-type]  # noqa: B023
        ]
        for call in calls:
            with pytest.raises(InvalidArgument):
                call()
    assert (runtime.length(0), runtime.length(1)) == (100, 0)


@pytest.mark.parametrize(
    "changes", [{"sliced": False}, {"copies": False}, {"snapshots": False}, {}], ids=str
)
def test_of_the_simulated_kind_snapshots_need_slices_and_copies(changes: dict[str, bool]) -> None:
    limits = replace(Limits(N_SEQUENCES, N_CONTEXT, N_CONTEXT, N_BATCH, 1000, 10), **changes)
    assert SimulatedRuntime(limits).limits.snapshots == (not changes)


@pytest.mark.models
def test_where_each_sequence_has_cells_of_its_own_there_are_no_snapshots() -> None:
    with open_exact("lfm2") as exact:
        assert exact.model.memory == "hybrid"
        assert not exact.limits.snapshots


@pytest.mark.models
@pytest.mark.parametrize(
    ("n_sequences", "sliced"), [(1, False), (2, True), (255, True), (256, False)]
)
def test_the_sequence_that_slices_pass_through_is_one_more_where_there_is_room_for_it(
    n_sequences: int, sliced: bool
) -> None:
    """Alone, a sequence has no lane beside it that could be held up; llama.cpp ends at 256."""
    with open_runtime("lfm2", n_sequences=n_sequences, threads=1) as runtime:
        assert (runtime.limits.n_sequences, runtime.limits.sliced) == (n_sequences, sliced)
        feed(runtime, n_sequences - 1, PROMPT[:40])
        with pytest.raises(InvalidArgument):
            runtime.length(n_sequences)


@pytest.mark.models
def test_the_memory_for_states_includes_that_sequence() -> None:
    with open_runtime("lfm2", threads=1) as runtime:
        state = runtime.limits.state_bytes
    with open_runtime("lfm2", n_sequences=None, state_budget=10 * state, threads=1) as runtime:
        assert runtime.limits.n_sequences == 9


@pytest.mark.parametrize("error", [PoolFull("no room"), StateRefused("model", "another model")])
def test_the_next_restore_of_a_failing_runtime_fails_once_and_leaves_nothing(
    error: BackendError,
) -> None:
    runtime = FailingRuntime(Limits(N_SEQUENCES, N_CONTEXT, N_CONTEXT, N_BATCH, 1000, 10))
    feed(runtime, 0, PROMPT)
    whole, state = runtime.save(0, PROMPT), runtime.save_state(0, PROMPT)
    first, second = save_in_slices(runtime, [0, 50, 100])
    steps: list[Callable[[], None]] = [
        lambda: runtime.restore(1, whole, PROMPT),
        lambda: runtime.restore_rows(1, 0, first, PROMPT),
        lambda: runtime.restore_rows(1, 50, second, PROMPT),
        lambda: runtime.restore_state(1, state, PROMPT),
    ]
    for place, step in enumerate(steps):
        for before in steps[1:place]:
            before()
        runtime.fails_next_restore = error
        with pytest.raises(type(error)):
            step()
        assert runtime.length(1) == 0
        assert runtime.used_cells == 100
    for step in steps[1:]:
        step()
    assert runtime.length(1) == 100


@pytest.mark.parametrize("memory", ["attention", "hybrid", "windowed"])
def test_of_the_simulated_kind_wrong_rows_show_in_the_next_token(memory: MemoryKind) -> None:
    """Rows put in by hand, past every check: what the pool must never let happen is seen."""
    limits = Limits(N_SEQUENCES, 2 * N_CONTEXT, N_CONTEXT, N_BATCH, 1000, 10)
    runtime = SimulatedRuntime(limits, memory=memory)
    feed(runtime, 0, PROMPT)
    feed(runtime, 1, [41, *PROMPT[1:]])
    blobs = [runtime.save_rows(0, 0, 50, PROMPT), runtime.save_rows(0, 50, 100, PROMPT)]
    foreign = runtime.save_rows(1, 50, 100, [41, *PROMPT[1:]])
    state = runtime.save_state(0, PROMPT)
    wanted = feed(runtime, 0, TEXT[100:])
    body = len(foreign) - 8 * 50
    head = blobs[1][: body - 32]
    forged = head + hashlib.sha256(head + foreign[body:]).digest() + foreign[body:]
    for sequence, second in ((2, blobs[1]), (3, forged)):
        restore_rows(runtime, sequence, [0, 50], [blobs[0], second])
        runtime.restore_state(sequence, state, PROMPT)
        same = np.array_equal(wanted, feed(runtime, sequence, TEXT[100:]))
        assert same == (sequence == 2)


def test_on_the_simulated_clock_moving_rows_takes_its_time() -> None:
    limits = Limits(N_SEQUENCES, N_CONTEXT, N_CONTEXT, N_BATCH, 1000, 10)
    runtime = SimulatedRuntime(limits, cost=Cost(moved=0.5))
    feed(runtime, 0, PROMPT)
    slices, state = save_in_slices(runtime, [0, 50, 100]), runtime.save_state(0, PROMPT)
    assert runtime.clock() == 50
    restore_rows(runtime, 1, [0, 50], slices)
    runtime.restore_state(1, state, PROMPT)
    assert runtime.clock() == 100


def test_rows_are_cut_where_there_is_no_state_to_cut(runtime: Runtime) -> None:
    wanted = in_two_parts(runtime, cut=80)
    feed(runtime, 0, TEXT[:80])
    feed(runtime, 0, [60] * (len(TEXT) - 80))
    if cuts(runtime):
        runtime.cut(0, 80)
        assert np.array_equal(wanted, feed(runtime, 0, TEXT[80:]))
        runtime.copy(0, 1, 80)
        assert np.array_equal(wanted, feed(runtime, 1, TEXT[80:]))
        return
    calls: list[Callable[[], None]] = [
        lambda: runtime.cut(0, 80),
        lambda: runtime.copy(0, 1, 80),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="cannot be cut"):
            call()
    assert (runtime.length(0), runtime.length(1)) == (len(TEXT), 0)


def test_cutting_to_the_whole_length_changes_nothing(runtime: Runtime) -> None:
    feed(runtime, 0, TEXT)
    runtime.cut(0, len(TEXT))
    assert runtime.length(0) == len(TEXT)


def test_a_scrubbed_sequence_is_empty_and_can_be_used_again(runtime: Runtime) -> None:
    wanted = feed(runtime, 0, TEXT)
    feed(runtime, 1, [60] * 30)
    runtime.scrub(1)
    runtime.scrub(0)
    assert (runtime.length(0), runtime.length(1)) == (0, 0)
    assert np.array_equal(wanted, feed(runtime, 0, TEXT))


def test_wrong_arguments_are_refused_and_change_nothing(runtime: Runtime) -> None:
    feed(runtime, 0, TEXT)
    feed(runtime, 1, [40])
    n_vocab = runtime.model.n_vocab
    calls: list[Callable[[], object]] = [
        lambda: runtime.decode([]),
        lambda: runtime.decode([Chunk(0, len(TEXT), (), wants_logits=True)]),
        lambda: runtime.decode([Chunk(0, 3, (40,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(0, len(TEXT) + 1, (40,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(-1, 0, (40,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(N_SEQUENCES, 0, (40,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(255, 0, (40,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(2, 0, (n_vocab,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(2, 0, (-1,), wants_logits=True)]),
        lambda: runtime.decode([Chunk(2, 0, (40,) * (N_BATCH + 1), wants_logits=True)]),
        lambda: runtime.decode([Chunk(2, 0, (40,), True), Chunk(2, 1, (40,), True)]),
        lambda: runtime.length(N_SEQUENCES),
        lambda: runtime.copy(0, 1),
        lambda: runtime.copy(3, 4),
        lambda: runtime.copy(0, 2, 0),
        lambda: runtime.copy(0, 2, len(TEXT) + 1),
        lambda: runtime.copy(-1, 2),
        lambda: runtime.cut(0, -1),
        lambda: runtime.cut(0, len(TEXT) + 1),
        lambda: runtime.clear(-1),
        lambda: runtime.scrub(N_SEQUENCES),
        lambda: runtime.save(2, []),
        lambda: runtime.save(0, TEXT[:-1]),
        lambda: runtime.restore(0, b"", TEXT),
        lambda: runtime.save_state(0, TEXT[:-1]),
        lambda: runtime.save_state(2, []),
        lambda: runtime.save_rows(0, 0, 10, TEXT[:-1]),
        lambda: runtime.save_rows(0, 0, 10, TEXT[:10]),
        lambda: runtime.save_rows(0, -1, 10, TEXT),
        lambda: runtime.save_rows(0, 10, 10, TEXT),
        lambda: runtime.save_rows(0, 11, 10, TEXT),
        lambda: runtime.save_rows(0, 0, len(TEXT) + 1, TEXT),
        lambda: runtime.save_rows(2, 0, 1, []),
        lambda: runtime.save_rows(N_SEQUENCES, 0, 10, TEXT),
        lambda: runtime.save_state(N_SEQUENCES, TEXT),
        lambda: runtime.restore_rows(0, 0, b"", TEXT),
        lambda: runtime.restore_rows(0, len(TEXT), b"", TEXT),
        lambda: runtime.restore_rows(2, 10, b"", TEXT),
        lambda: runtime.restore_rows(2, -1, b"", TEXT),
        lambda: runtime.restore_rows(N_SEQUENCES, 0, b"", TEXT),
        lambda: runtime.restore_state(0, b"", TEXT),
        lambda: runtime.restore_state(N_SEQUENCES, b"", TEXT),
        lambda: runtime.clear(N_SEQUENCES),
        lambda: runtime.copy(0, N_SEQUENCES),
        lambda: runtime.logits(999),
        lambda: runtime.sampler(GREEDY, []).sample(-1),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
        assert (runtime.length(0), runtime.length(1), runtime.length(2)) == (len(TEXT), 1, 0)


def test_a_row_of_an_older_decode_call_is_refused(runtime: Runtime) -> None:
    (row,) = runtime.decode([Chunk(0, 0, tuple(TEXT[:20]), wants_logits=True)])
    runtime.decode([Chunk(1, 0, (40, 41), wants_logits=False)])
    assert row is not None
    with pytest.raises(InvalidArgument):
        runtime.logits(row)


@pytest.mark.models
def test_a_repeat_penalty_sees_the_prompt_and_what_was_said() -> None:
    with open_runtime("lfm2") as runtime:
        (row,) = runtime.decode([Chunk(0, 0, tuple(TEXT[:20]), wants_logits=True)])
        assert row is not None
        best = int(runtime.logits(row).argmax())
        harsh = Sampling(temperature=0, repeat_penalty=100.0)
        fresh, seen = runtime.sampler(harsh, []), runtime.sampler(harsh, [best])
        assert fresh.sample(row) == best
        assert fresh.sample(row) != best  # it has said it once now
        assert seen.sample(row) != best
        fresh.close()
        seen.close()
