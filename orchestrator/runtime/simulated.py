"""A model without weights, under the same restrictions as llama.cpp's memory.

Its next token is a hash of everything its memory holds: the rows *and* the recurrent state. So a
state restored over foreign rows, or rows kept without their state, changes the reply, as it
would on a real model, and every rule of the pool can be tested in milliseconds.

    row value of token i    v(i) = mix(token, i, all rows before, state before)
    recurrent state         s(i) = mix(s(i-1), v(i))
    next token                     mix(sum of v over the rows, s)

Each row is a cell that copies share; a cell is free when no sequence holds it. Where the state is
missing it counts as 0. Time passes on a manual clock by a stated cost per call, token, attended row
and row moved to host memory or back.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BackendError, DecodeFailed, InvalidArgument, PoolFull, StateRefused
from orchestrator.runtime.checks import (
    can_slice,
    check_batch,
    check_copy,
    check_copy_rows,
    check_cut,
    check_restore,
    check_restore_rows,
    check_restore_state,
    check_rows,
    check_save,
    check_save_rows,
    check_save_state,
    check_strip,
)
from orchestrator.runtime.contents import Contents, packed
from orchestrator.runtime.protocol import Chunk, Limits, MemoryKind, Model, Sampling
from orchestrator.runtime.sampling import BAN, TokenLogprob, check_bias, token_logprob
from orchestrator.text.bytes import ByteTokenizer

_MASK = (1 << 64) - 1
_HEAD = struct.Struct("<5s3x32s32sQQ")  # form, model, tokens up to the end, start, end
_BODY = _HEAD.size + 32  # a SHA-256 of all else stands between


def _mix(*values: int) -> int:
    """Return a well spread 64-bit hash of integers (splitmix64's finalizer, chained)."""
    z = 0x9E3779B97F4A7C15
    for value in values:
        z = (z ^ value) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ (z >> 30)) * 0x94D049BB133111EB & _MASK
        z ^= z >> 31
    return z


class ManualClock:
    """A clock that moves only when told to; seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per decode call, per token, per row that a token attends to, per row moved."""

    call: float = 0.0
    token: float = 0.0
    row: float = 0.0
    moved: float = 0.0


@dataclass(slots=True)
class _Held:
    """What one sequence holds: cell numbers, their hash, and the recurrent state, 0 for none."""

    cells: list[int]
    rows: int = 0
    state: int = 0


class SimulatedSampler:
    """Greedy takes the hash's token; with a temperature the seed and a count are mixed in.

    A bias is added as it would be on a real model; filters and penalties change nothing.
    """

    def __init__(self, runtime: SimulatedRuntime, sampling: Sampling) -> None:
        self._runtime = runtime
        self._salt = None if sampling.temperature == 0 else (sampling.seed or 0)
        self._bias = sampling.logit_bias
        self._n_top = sampling.logprobs
        self._count = 0
        self.last_logprob: TokenLogprob | None = None

    def sample(self, row: int) -> int:
        """Return the next token from a row of the latest decode call."""
        value = self._runtime.row(row)
        if self._salt is not None:
            self._count += 1
            value = _mix(value, self._salt, self._count)
        token = self._biased(value) if self._bias else self._runtime.token_of(value)
        if self._n_top is not None:
            self.last_logprob = token_logprob(self._runtime.logits(row), token, self._n_top)
        return token

    def _biased(self, value: int) -> int:
        logits = self._runtime.logits_of(value)
        for token, bias in self._bias.items():
            logits[token] += -np.inf if bias == BAN else bias
        return int(logits.argmax())

    def close(self) -> None:
        """Nothing is held."""


class SimulatedRuntime:
    """See the module's head. `end_every` is the mean length of a reply in tokens, 0: endless."""

    def __init__(
        self,
        limits: Limits,
        *,
        memory: MemoryKind = "hybrid",
        tokenizer: ByteTokenizer | None = None,
        chat_template: str | None = None,
        clock: ManualClock | None = None,
        cost: Cost | None = None,
        end_every: int = 0,
        seed: int = 0,
    ) -> None:
        sliced = limits.sliced and can_slice(memory)
        snapshots = limits.snapshots and sliced and limits.copies and memory == "hybrid"
        self.limits = replace(limits, sliced=sliced, snapshots=snapshots)
        self.tokenizer = tokenizer or ByteTokenizer.for_chat()
        self.clock = clock or ManualClock()
        self.decoded_tokens = 0
        self._cost = cost or Cost()
        self._seed = seed
        self._end_every = end_every
        self._held = [_Held([]) for _ in range(limits.n_sequences)]
        self._contents = Contents(limits.n_sequences)
        self._owners: dict[int, int] = {}  # cell -> how many sequences hold it
        self._values: dict[int, int] = {}  # cell -> its row's value
        self._next_cell = 0
        self._rows: list[int] = []
        self.model = Model(
            name="simulated",
            architecture="simulated",
            memory=memory,
            n_vocab=self.tokenizer.n_vocab,
            n_context_train=limits.n_context,
            fingerprint=hashlib.sha256(struct.pack("<q", seed) + memory.encode()).digest(),
            chat_template=chat_template,
        )

    @property
    def used_cells(self) -> int:
        """Distinct cells held; a pure recurrent model holds none."""
        return 0 if self.model.memory == "recurrent" else len(self._owners)

    # ---- evaluation ---------------------------------------------------------------------------

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """See `Runtime.decode`."""
        total = check_batch(chunks, self.limits, self.model.n_vocab, self._contents)
        if self.model.memory != "recurrent" and self.used_cells + total > self.limits.n_cells:
            raise PoolFull(
                f"{total} cells are wanted, {self.limits.n_cells - self.used_cells} free"
            )
        self.decoded_tokens += total
        self._rows = []
        rows: list[int | None] = []
        seconds = self._cost.call
        for chunk in chunks:
            held = self._held[chunk.sequence]
            for token in chunk.tokens:
                seconds += self._cost.token + self._cost.row * len(held.cells)
                self._append(held, token)
            self._contents.extend(chunk.sequence, chunk.tokens)
            rows.append(len(self._rows) if chunk.wants_logits else None)
            if chunk.wants_logits:
                self._rows.append(self._digest(held))
        self.clock.advance(seconds)
        return rows

    def _append(self, held: _Held, token: int) -> None:
        value = _mix(token, len(held.cells), held.rows, held.state, self._seed)
        cell = self._next_cell
        self._next_cell += 1
        self._owners[cell], self._values[cell] = 1, value
        held.cells.append(cell)
        if self.model.memory != "recurrent":
            held.rows = (held.rows + value) & _MASK
        if self.model.memory in ("hybrid", "recurrent"):
            held.state = _mix(held.state, value)

    def _digest(self, held: _Held) -> int:
        return _mix(held.rows, held.state, self._seed)

    def row(self, row: int) -> int:
        """Return the digest a row of logits stands for."""
        if not 0 <= row < len(self._rows):
            raise InvalidArgument(f"row {row} of {len(self._rows)} rows of the latest decode call")
        return self._rows[row]

    def token_of(self, digest: int) -> int:
        """Return the token a digest chooses: printable ASCII, now and then the end."""
        end = self.tokenizer.eos
        if self._end_every and end is not None and digest >> 32 & 0xFFFF < 65536 // self._end_every:
            return end
        return 32 + digest % 95

    def logits(self, row: int) -> NDArray[np.float32]:
        """See `Runtime.logits`."""
        return self.logits_of(self.row(row))

    def logits_of(self, digest: int) -> NDArray[np.float32]:
        """Return the logits of a digest: noise, well below the token it chooses."""
        noise = np.random.default_rng(digest).standard_normal(self.model.n_vocab)
        noise[self.token_of(digest)] = 10.0
        return noise.astype(np.float32)

    def check_sampling(self, sampling: Sampling) -> None:
        """See `Runtime.check_sampling`."""
        check_bias(sampling.logit_bias, self.model.n_vocab)
        if sampling.grammar is not None or sampling.json_schema is not None:
            raise InvalidArgument(
                "the simulated runtime takes no grammar and no json_schema, its replies are "
                "noise; leave them out, or open a real model"
            )

    def sampler(self, sampling: Sampling, history: Sequence[int]) -> SimulatedSampler:
        """See `Runtime.sampler`."""
        self.check_sampling(sampling)
        return SimulatedSampler(self, sampling)

    # ---- sequences ----------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """See `Runtime.length`."""
        return self._contents.length(sequence)

    def is_incomplete(self, sequence: int) -> bool:
        """Whether a sequence has rows and not their state."""
        return self._contents.is_incomplete(sequence)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """See `Runtime.copy`."""
        memory = self.model.memory
        taken = check_copy(source, target, length, memory, self.limits, self._contents)
        self._share(source, target, taken, self._held[source].state)
        self._contents.copy(source, target, taken)

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """See `Runtime.copy_rows`."""
        check_copy_rows(source, target, length, self.limits, self._contents)
        self._share(source, target, length, state=0)
        self._contents.copy(source, target, length, is_incomplete=True)

    def _share(self, source: int, target: int, length: int, state: int) -> None:
        cells = self._held[source].cells[:length]
        for cell in cells:
            self._owners[cell] += 1
        self._held[target] = self._view(cells, state)

    def strip(self, sequence: int) -> None:
        """See `Runtime.strip`."""
        check_strip(sequence, self.limits, self._contents)
        self._held[sequence].state = 0
        self._contents.strip(sequence)

    def cut(self, sequence: int, length: int) -> None:
        """See `Runtime.cut`."""
        check_cut(sequence, length, self.model.memory, self._contents)
        held = self._held[sequence]
        self._release(held.cells[length:])
        self._held[sequence] = self._view(held.cells[:length], held.state)
        self._contents.cut(sequence, length)

    def _view(self, cells: list[int], state: int) -> _Held:
        """Return holdings whose row hash is computed from the cells they really name."""
        rows = sum(self._values[cell] for cell in cells) & _MASK
        return _Held(cells, 0 if self.model.memory == "recurrent" else rows, state)

    def _release(self, cells: list[int]) -> None:
        for cell in cells:
            self._owners[cell] -= 1
            if not self._owners[cell]:
                del self._owners[cell], self._values[cell]

    def clear(self, sequence: int) -> None:
        """See `Runtime.clear`."""
        if self.length(sequence):
            self._release(self._held[sequence].cells)
        self._held[sequence] = _Held([])
        self._contents.clear(sequence)

    def scrub(self, sequence: int) -> None:
        """See `Runtime.scrub`; nothing here is ever not finite."""
        self.clear(sequence)

    def reset(self) -> None:
        """See `Runtime.reset`."""
        for sequence in range(self.limits.n_sequences):
            self.clear(sequence)

    # ---- states -------------------------------------------------------------------------------

    def save(self, sequence: int, tokens: Sequence[int]) -> bytes:
        """See `Runtime.save`."""
        fed = packed(tokens)
        check_save(sequence, fed, self._contents)
        held = self._held[sequence]
        return self._seal(b"whole", 0, fed, [*self._rows_of(held.cells), held.state])

    def restore(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """See `Runtime.restore`."""
        fed = packed(tokens)
        check_restore(sequence, self._contents)
        *rows, state = self._open(sequence, b"whole", 0, blob, fed)
        self._held[sequence] = self._view(self._filled(sequence, rows), state)
        self._contents.put(sequence, fed)

    def save_rows(self, sequence: int, start: int, end: int, tokens: Sequence[int]) -> bytes:
        """See `Runtime.save_rows`."""
        fed = packed(tokens)
        check_save_rows(sequence, (start, end), fed, self.limits, self._contents)
        rows = self._rows_of(self._held[sequence].cells[start:end])
        return self._seal(b"rows", start, fed[:end], rows)

    def save_state(self, sequence: int, tokens: Sequence[int]) -> bytes:
        """See `Runtime.save_state`."""
        fed = packed(tokens)
        check_save_state(sequence, fed, self.model.memory, self.limits, self._contents)
        return self._seal(b"state", len(fed), fed, [self._held[sequence].state])

    def restore_rows(self, sequence: int, start: int, blob: bytes, tokens: Sequence[int]) -> None:
        """See `Runtime.restore_rows`."""
        fed = packed(tokens)
        check_restore_rows(sequence, start, self.limits, self._contents)
        with self._emptied_on_refusal(sequence):
            check_rows(sequence, fed, self._contents)
        rows = self._open(sequence, b"rows", start, blob, fed)
        cells = self._held[sequence].cells + self._filled(sequence, rows)
        self._held[sequence] = self._view(cells, 0)
        self._contents.put(sequence, fed, len(cells), is_incomplete=True)

    def restore_state(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """See `Runtime.restore_state`."""
        fed = packed(tokens)
        check_restore_state(sequence, fed, self.model.memory, self.limits, self._contents)
        with self._emptied_on_refusal(sequence):
            check_rows(sequence, fed, self._contents)
        (state,) = self._open(sequence, b"state", len(fed), blob, fed)
        if self.model.memory == "recurrent":
            self._held[sequence].cells = self._filled(sequence, [0] * len(fed))
        self._held[sequence].state = state
        self._contents.put(sequence, fed)

    @contextmanager
    def _emptied_on_refusal(self, sequence: int) -> Iterator[None]:
        try:
            yield
        except StateRefused:
            self.clear(sequence)
            raise

    def _rows_of(self, cells: list[int]) -> list[int]:
        self.clock.advance(self._cost.moved * len(cells))
        return [self._values[cell] for cell in cells]

    def _filled(self, sequence: int, rows: Sequence[int]) -> list[int]:
        """Return new cells that hold `rows`; the sequence is emptied when there are none left."""
        count = len(rows)
        if self.model.memory != "recurrent" and self.used_cells + count > self.limits.n_cells:
            self.clear(sequence)
            raise PoolFull(f"{count} cells are wanted to restore a state; evict first")
        self.clock.advance(self._cost.moved * count)
        cells = list(range(self._next_cell, self._next_cell + count))
        self._next_cell += count
        self._owners.update(dict.fromkeys(cells, 1))
        self._values.update(zip(cells, rows, strict=True))
        return cells

    def _seal(self, form: bytes, start: int, tokens: array[int], values: list[int]) -> bytes:
        known, fed = self.model.fingerprint, _token_hash(tokens)
        head = _HEAD.pack(form, known, fed, start, len(tokens))
        body = struct.pack(f"<{len(values)}Q", *values)
        return head + hashlib.sha256(head + body).digest() + body

    def _open(
        self, sequence: int, form: bytes, start: int, blob: bytes, tokens: array[int]
    ) -> tuple[int, ...]:
        """Return the values of a blob that belongs here, else empty the sequence and refuse."""
        with self._emptied_on_refusal(sequence):
            self._refuse_foreign(form, start, blob, tokens)
        return struct.unpack(f"<{(len(blob) - _BODY) // 8}Q", blob[_BODY:])

    def _refuse_foreign(self, form: bytes, start: int, blob: bytes, tokens: array[int]) -> None:
        if len(blob) < _BODY:
            raise StateRefused("length", f"a state of {len(blob)} bytes is truncated")
        was_form, known, fed, was_start, end = _HEAD.unpack_from(blob)
        head, digest, body = blob[: _HEAD.size], blob[_HEAD.size : _BODY], blob[_BODY:]
        if digest != hashlib.sha256(head + body).digest():
            raise StateRefused("checksum", "the state is damaged; prefill instead")
        if known != self.model.fingerprint:
            raise StateRefused("model", "the state was saved by another model; prefill instead")
        if was_form.rstrip(b"\0") != form:
            raise StateRefused("form", f"{was_form!r} was saved, {form!r} is wanted")
        if was_start != start:
            raise StateRefused("start", f"rows from {was_start} on were saved, not from {start}")
        count = end if form == b"rows" else len(tokens)
        if end != count or fed != _token_hash(tokens[:end]) or end > len(tokens):
            raise StateRefused("tokens", "the state was saved for other tokens; prefill instead")

    def close(self) -> None:
        """See `Runtime.close`."""


def _token_hash(tokens: array[int]) -> bytes:
    return hashlib.sha256(tokens).digest()


class FailingRuntime(SimulatedRuntime):
    """A simulated runtime whose next calls can be told to fail, for tests of recovery."""

    fails_next: BackendError | None = None
    fails_next_copy: BackendError | None = None
    fails_next_restore: BackendError | None = None
    fails_next_save: BackendError | None = None
    scrubbed: tuple[int, ...] = ()

    def scrub(self, sequence: int) -> None:
        """Scrub, and remember that it was no plain clearing."""
        self.scrubbed += (sequence,)
        super().scrub(sequence)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Fail once if told to, else copy."""
        failure, self.fails_next_copy = self.fails_next_copy, None
        if failure is not None:
            raise failure
        super().copy(source, target, length)

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """Fail once if told to, else copy."""
        failure, self.fails_next_copy = self.fails_next_copy, None
        if failure is not None:
            raise failure
        super().copy_rows(source, target, length)

    def save_rows(self, sequence: int, start: int, end: int, tokens: Sequence[int]) -> bytes:
        """Fail once if told to, else save."""
        failure, self.fails_next_save = self.fails_next_save, None
        if failure is not None:
            raise failure
        return super().save_rows(sequence, start, end, tokens)

    def _open(
        self, sequence: int, form: bytes, start: int, blob: bytes, tokens: array[int]
    ) -> tuple[int, ...]:
        """Fail once if told to, with the sequence empty as after any failed restore."""
        failure, self.fails_next_restore = self.fails_next_restore, None
        if failure is not None:
            self.clear(sequence)
            raise failure
        return super()._open(sequence, form, start, blob, tokens)

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Fail once if told to, leaving states behind that must not be trusted; else decode."""
        failure, self.fails_next = self.fails_next, None
        if failure is None:
            return super().decode(chunks)
        if isinstance(failure, DecodeFailed):
            for held in self._held:
                held.state = _mix(held.state, 1)
        raise failure
