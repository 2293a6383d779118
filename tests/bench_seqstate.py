"""What is the C form of sequence memory worth? Both forms on the same work, in one run.

    .venv/bin/python -m pytest tests/bench_seqstate.py --benchmark-enable --benchmark-group-by=func

Not collected by default. `swift` is a llama.cpp that costs one memcpy per state: what remains is
ours. `real` is a tiny hybrid on the true one.
"""

from __future__ import annotations

import array
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from seqstate_fakes import CONTEXT, PROTOTYPES, RealContext

from orchestrator import _seqstate
from orchestrator.errors import InvalidArgument
from orchestrator.runtime import seqstate_ctypes

IMPLEMENTATIONS: dict[str, Any] = {"c": _seqstate, "python": seqstate_ctypes}
N_TOKENS = 8192
IDS = [(7919 * i) % 150_000 for i in range(N_TOKENS)]
PACKED = array.array("i", IDS)

SWIFT = r"""
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define FLOATS 2097152
#define FULL (40 + 4 * (size_t)FLOATS)
static uint8_t *kept;
static int32_t position[4] = {-1, -1, -1, -1};
static void head(uint8_t *p, int32_t at)
{
    uint32_t words[] = {0xAF143CD8u, 0, at >= 0, (uint32_t)at, 0, 0, 1, 0};
    uint64_t row = 4ull * FLOATS;
    if (at < 0) { words[3] = 0; words[4] = 1; words[5] = 0; }
    memcpy(p, words, at < 0 ? 24 : 32);
    memcpy(p + (at < 0 ? 24 : 32), &row, 8);
}
void set_position(int32_t s, int32_t p) { position[s] = p; }
void *llama_get_memory(void *c) { if (!kept) kept = calloc(1, FULL); return c; }
void llama_memory_seq_cp(void *m, int32_t a, int32_t b, int32_t p, int32_t q)
{ (void)m; (void)p; (void)q; position[b] = position[a]; }
bool llama_memory_seq_rm(void *m, int32_t s, int32_t p, int32_t q)
{ (void)m; (void)p; (void)q; position[s] = -1; return true; }
int32_t llama_memory_seq_pos_min(void *m, int32_t s) { (void)m; return position[s]; }
int32_t llama_memory_seq_pos_max(void *m, int32_t s) { (void)m; return position[s]; }
void llama_memory_clear(void *m, bool d)
{ (void)m; (void)d; memset(position, 255, sizeof position); }
size_t llama_state_seq_get_size_ext(void *c, int32_t s, uint32_t f)
{ (void)c; (void)f; return position[s] < 0 ? 32 : FULL; }
size_t llama_state_seq_get_data_ext(void *c, uint8_t *p, size_t n, int32_t s, uint32_t f)
{
    (void)c; (void)f; (void)n;
    head(p, position[s]);
    if (position[s] < 0) return 32;
    memcpy(p + 40, kept + 40, FULL - 40);
    return FULL;
}
size_t llama_state_seq_set_data_ext(void *c, const uint8_t *p, size_t n, int32_t s, uint32_t f)
{ (void)c; (void)f; memcpy(&position[s], p + 12, 4); memcpy(kept, p, n); return n; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("swift")
    (folder / "swift.c").write_text(SWIFT)
    target = folder / "swift.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(folder / "swift.c")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Any:
    return IMPLEMENTATIONS[request.param]


def identity_of(implementation: Any) -> Any:
    return implementation.Identity(
        build="bench",
        model=bytes(32),
        n_layer=1,
        n_ctx=512,
        flash_attn=True,
        unified=True,
        type_k=1,
        type_v=1,
    )


@pytest.fixture
def swift(implementation: Any, library: ctypes.CDLL) -> Any:
    """A memory whose sequence 0 holds an 8 MiB state after 8,192 tokens; the others are empty."""
    for sequence in range(4):
        library.set_position(sequence, -1)
    address = ctypes.c_void_p
    memory = implementation.SequenceMemory(
        {name: ctypes.cast(getattr(library, name), address).value for name in PROTOTYPES},
        CONTEXT,
        n_sequences=4,
        memory="recurrent",
        identity=identity_of(implementation),
    )
    library.set_position(0, N_TOKENS - 1)
    return memory


def test_positions(benchmark: Any, swift: Any) -> None:
    assert benchmark(swift.positions, 0) == (N_TOKENS - 1, N_TOKENS - 1)


def test_copy_and_clear(benchmark: Any, swift: Any) -> None:
    def run() -> None:
        swift.copy(0, 1)
        swift.clear(1)

    benchmark(run)


def test_checksum_of_8_mib(benchmark: Any, swift: Any, implementation: Any) -> None:
    blob = swift.save(0, PACKED)
    assert benchmark(implementation.describe, blob).n_tokens == N_TOKENS


def test_a_list_of_8192_tokens(benchmark: Any, swift: Any) -> None:
    """Refused at once after the ids were taken: the cost of the argument."""

    def run() -> None:
        with pytest.raises(InvalidArgument):
            swift.save(2, IDS)

    benchmark(run)


def test_save_of_8_mib(benchmark: Any, swift: Any) -> None:
    benchmark(swift.save, 0, PACKED)


def test_save_of_8_mib_into_a_kept_buffer(benchmark: Any, swift: Any) -> None:
    buffer = bytearray(swift.state_size(0))
    benchmark(swift.save_into, 0, PACKED, buffer)


def test_restore_of_8_mib(benchmark: Any, swift: Any) -> None:
    blob = swift.save(0, PACKED)

    def run() -> None:
        swift.restore(1, blob, PACKED)
        swift.clear(1)

    benchmark(run)


@pytest.fixture(scope="module")
def real_context() -> Iterator[RealContext]:
    from tiny_models import build

    context = RealContext(build("granitehybrid"))
    yield context
    context.close()


@pytest.fixture
def real(implementation: Any, real_context: RealContext) -> Any:
    memory = implementation.SequenceMemory(
        real_context.functions,
        real_context.context,
        n_sequences=real_context.n_sequences,
        memory="hybrid",
        identity=identity_of(implementation),
    )
    memory.clear_all()
    real_context.lengths = [0] * real_context.n_sequences
    for start in range(0, 200, 50):
        real_context.decode(0, [i % 250 for i in range(start, start + 50)])
    return memory


def test_real_snapshot_and_rewind(benchmark: Any, real: Any) -> None:
    tokens = array.array("i", [i % 250 for i in range(200)])

    def run() -> None:
        real.restore(0, real.save(0, tokens, rows=False), tokens)

    benchmark(run)


def test_real_export_and_import(benchmark: Any, real: Any) -> None:
    tokens = array.array("i", [i % 250 for i in range(200)])

    def run() -> None:
        real.restore(1, real.save(0, tokens), tokens)
        real.clear(1)

    benchmark(run)


def test_real_export_and_import_in_slices(benchmark: Any, real: Any) -> None:
    tokens = array.array("i", [i % 250 for i in range(200)])

    def run() -> None:
        for start in range(0, 200, 50):
            rows = real.save_rows(0, start, start + 50, tokens, scratch=7)
            real.restore_rows(1, start, rows, tokens, scratch=7)
        real.restore(1, real.save(0, tokens, rows=False), tokens, rows=False)
        real.clear(1)

    benchmark(run)


def test_real_holder(benchmark: Any, real: Any) -> None:
    def run() -> None:
        real.copy(0, 1, 100)
        real.clear(1)

    benchmark(run)
