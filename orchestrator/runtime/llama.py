"""The runtime that is llama.cpp: one model, one context, one shared pool of cells.

Opening goes in three steps: the model is loaded; a small context measures how many bytes a
recurrent state really takes and tries whether sequences may share a decode call and rows be moved
in slices; the context proper is made with as many sequences as the memory budget allows. Every
argument is checked here or in `_seqstate`, because a wrong one is an assertion in C that ends the
process.

Where rows move in slices the context has one sequence more than `Limits.n_sequences`, through which
they pass.

Used from one thread only, except for the vocabulary.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator._seqstate import Identity
from orchestrator.errors import (
    BackendError,
    ConfigError,
    DecodeFailed,
    InvalidArgument,
    PoolFull,
)
from orchestrator.runtime import joint, library
from orchestrator.runtime.batch import BatchBuffer
from orchestrator.runtime.checks import (
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
from orchestrator.runtime.exact import (
    N_PASS_MOST,
    N_TRIED,
    SINGLE,
    ExactEvaluation,
    Passes,
    Rows,
    find_passes,
    pass_size,
)
from orchestrator.runtime.library import api
from orchestrator.runtime.llama_grammar import grammar_of
from orchestrator.runtime.llama_sampler import LlamaSampler
from orchestrator.runtime.products import Products
from orchestrator.runtime.protocol import Chunk, Limits, MemoryKind, Model, Sampling
from orchestrator.runtime.sampling import check_bias
from orchestrator.runtime.sequences import N_SEQUENCES_MOST, moves_slices, sequence_memory
from orchestrator.runtime.vocabulary import Vocabulary

_WHOLE = 0  # llama_state_seq_flags
_STATE_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED
_N_BATCH_MOST, _N_BATCH_STEP = 512, 64
_N_BATCH_SINGLE = 16  # where every token has a pass of its own
_RATE_PER_THREAD = 2e10  # operations per second of one core on quantised weights, roughly
_SPLIT_TYPES = (0, 1)  # F32, F16: one token's attention to these is split by thread
_CELL_STEP = 256  # llama.cpp rounds the pool up to a multiple of this


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is opened. None lets the runtime choose.

    `n_context` tokens per request; `n_cells` in the pool, None for one request's; `n_sequences`
    fixed, or as many as `state_budget` bytes of recurrent state allow, within
    `n_sequences_least` and `_most`; `n_batch` tokens per decode call, None for about a second's
    worth; `n_ubatch` per pass over the weights; `type_k` and `type_v` are ggml type numbers;
    `repack` lays weights out anew for faster kernels. `exact`: see `runtime.exact`; every sequence
    then has `n_context` cells of its own. `tiles` False: see `library.switch_tiles_off`.
    """

    n_context: int = 4096
    n_cells: int | None = None
    n_sequences: int | None = None
    n_sequences_least: int = 4
    n_sequences_most: int = 32
    state_budget: int = 1 << 30
    threads: int | None = None
    gpu_layers: int | None = None
    n_batch: int | None = None
    n_ubatch: int = 512
    type_k: int = 1
    type_v: int = 1
    repack: bool = True
    exact: bool = False
    tiles: bool = True


def open_llama(path: Path, settings: Settings) -> LlamaRuntime:
    """Load `path` and return its runtime; raises `BackendError` when llama.cpp refuses.

    The file has been inspected before (`models.inspect`), so what fails here is memory, or a
    model that names a supported architecture and does not follow it.
    """
    library.prepare()
    if not settings.tiles:
        library.switch_tiles_off()
    if settings.exact:
        settings = _exactly(settings)
    model = _load_model(path, settings)
    try:
        memory = _memory_kind(model)
        measures = _measure(model, settings, memory)
        n_sequences = settings.n_sequences or _fit_sequences(measures, settings)
        if n_sequences >= N_SEQUENCES_MOST:
            measures = replace(measures, sliced=False)
        n_sequences += measures.sliced
        if measures.passes is not None:
            n_sequences = max(n_sequences, measures.passes.least)  # a lone lane needs a neighbour
        if measures.passes == SINGLE:
            settings = replace(
                settings, n_batch=min(settings.n_batch or N_PASS_MOST, _N_BATCH_SINGLE)
            )
        n_cells = settings.n_cells or settings.n_context
        context = _new_context(model, settings, n_cells, n_sequences)
    except BaseException:
        api.llama_model_free(model)
        raise
    return LlamaRuntime(path, settings, model, context, memory, measures)


def _exactly(settings: Settings) -> Settings:
    """Return settings under which passes can be exact; raises `ConfigError` where none are."""
    if library.can_offload() and settings.gpu_layers != 0:
        raise ConfigError(
            "exact replies are promised on the CPU alone, and this llama.cpp would compute on a "
            "GPU; open with gpu_layers = 0 (--gpu-layers 0), or without exact"
        )
    wanted = settings.n_sequences or settings.n_sequences_least
    if wanted > N_PASS_MOST:
        raise ConfigError(
            f"{wanted} sequences are too many for exact replies: one token of each must fit a pass "
            f"of {N_PASS_MOST}; open fewer lanes, or without exact"
        )
    return replace(
        settings,
        n_sequences_most=min(settings.n_sequences_most, N_PASS_MOST),
        n_cells=None,
        n_batch=min(settings.n_batch or N_PASS_MOST, N_PASS_MOST),
        repack=False,
    )


def fingerprint(path: Path) -> bytes:
    """Return 32 bytes that tell model files apart: size, first MiB, and 256 samples.

    Hashing all of a 50 GB file would take longer than loading it. The head holds metadata and
    tensor table, and two trainings of one model differ everywhere.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for sample in range(256):
            file.seek(size * sample // 256)
            digest.update(file.read(4096))
    return digest.digest()


def _load_model(path: Path, settings: Settings) -> Any:
    parameters = api.llama_model_default_params()
    parameters.use_extra_bufts = settings.repack and library.may_repack()
    if library.can_offload():
        parameters.n_gpu_layers = 999 if settings.gpu_layers is None else settings.gpu_layers
    elif settings.gpu_layers and settings.gpu_layers > 0:
        raise BackendError(
            f"{settings.gpu_layers} layers were to go to a GPU, but the installed llama.cpp was "
            "built without one; leave out --gpu-layers, or reinstall llama-cpp-python for your GPU"
        )
    model = api.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise BackendError(f'llama.cpp could not load "{path}": {library.last_complaint()}')
    return model


def _memory_kind(model: Any) -> MemoryKind:
    if api.llama_model_is_hybrid(model):
        return "hybrid"
    if api.llama_model_is_recurrent(model):
        return "recurrent"
    return "windowed" if api.llama_model_n_swa(model) > 0 else "attention"


def _new_context(
    model: Any,
    settings: Settings,
    n_context: int,
    n_sequences: int,
    products: Products | None = None,
) -> Any:
    """Return a new context, at which `products` look on as long as they live."""
    threads = settings.threads or n_cores()
    n_batch = settings.n_batch or _fit_batch(model, settings, threads)
    parameters = api.llama_context_default_params()
    own = -(-(n_context + 1) // _CELL_STEP) * _CELL_STEP  # with room for a pad
    parameters.n_ctx = n_sequences * own if settings.exact else n_context
    parameters.n_batch = max(n_batch, n_sequences)
    parameters.n_ubatch = min(settings.n_ubatch, parameters.n_batch)
    if settings.exact:  # a call is a pass
        parameters.n_batch = parameters.n_ubatch = pass_size(n_batch, n_sequences)
    parameters.n_seq_max = n_sequences
    parameters.n_outputs_max = max(n_sequences, 2)
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.flash_attn_type = _FLASH_ATTENTION
    parameters.type_k, parameters.type_v = settings.type_k, settings.type_v
    parameters.kv_unified = not settings.exact
    parameters.op_offload = not settings.exact
    parameters.swa_full = True
    if products is not None:
        parameters.cb_eval = products.callback
        parameters.n_outputs_max = parameters.n_batch
    context = api.llama_init_from_model(model, parameters)
    if not context:
        raise BackendError(
            f"llama.cpp could not open a context of {n_context:,} tokens and {n_sequences} "
            f"sequences: {library.last_complaint()}; lower ctx (--ctx) or lanes"
        )
    return context


def _fit_batch(model: Any, settings: Settings, threads: int) -> int:
    """Return how many tokens a CPU reads in about a second, in steps of 64, 64 to 512.

    A decode call is never broken off, so this is how long Ctrl-C or a cancelled request may have
    to wait. It is computed from the size of the model, two operations per parameter and token,
    and not measured, because where a prompt is cut can show in a reply's last bits.
    """
    if library.can_offload() and settings.gpu_layers != 0:
        return _N_BATCH_MOST
    rate = _RATE_PER_THREAD * threads / (2 * max(1, api.llama_model_n_params(model)))
    return int(min(max(rate // _N_BATCH_STEP, 1) * _N_BATCH_STEP, _N_BATCH_MOST))


def n_cores() -> int:
    """Return the cores this process may use; more threads than that is catastrophically slow."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Measures:
    """Bytes of one recurrent state and of the attention rows of one token; sequences per call.

    `sliced`: rows can be moved in slices, for which the context needs one sequence more. `passes`:
    what exact evaluation needs, None without it.
    """

    state: int
    cell: int
    n_joint: int
    sliced: bool
    passes: Passes | None


def _measure(model: Any, settings: Settings, memory: MemoryKind) -> _Measures:
    """Evaluate two tokens and ask llama.cpp what a sequence takes after each; try what it can."""
    alone = settings.n_sequences == 1 and not settings.exact
    context = _new_context(model, settings, _CELL_STEP, 1 if alone else joint.N_SEQUENCES)
    buffer = BatchBuffer(1)
    sizes = []
    try:
        for position in range(2):
            batch, _ = buffer.fill([Chunk(0, position, (0,), wants_logits=False)])
            if api.llama_decode(context, batch):
                raise BackendError(f"the model cannot evaluate a token: {library.last_complaint()}")
            sizes.append(int(api.llama_state_seq_get_size_ext(context, 0, _WHOLE)))
        state = int(api.llama_state_seq_get_size_ext(context, 0, _STATE_ONLY))
        n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        n_joint = 1 if alone or not joint.evaluates_jointly(context, n_vocab) else 0
        sliced = moves_slices(context, memory)
    finally:
        api.llama_free(context)
    held = state if memory in ("hybrid", "recurrent") else 0
    passes = None
    if settings.exact:
        passes = SINGLE if n_joint == 1 else _try_passes(model, settings, memory, n_vocab)
    if passes == SINGLE:
        n_joint = 1  # see `ExactEvaluation`
    return _Measures(held, sizes[1] - sizes[0], n_joint, sliced, passes)


def _try_passes(model: Any, settings: Settings, memory: MemoryKind, n_vocab: int) -> Passes:
    """Return the passes that exact evaluation needs, found out in a context of its own."""
    products = Products()
    wide = replace(settings, n_batch=N_PASS_MOST)
    context = _new_context(model, wide, N_TRIED, joint.N_SEQUENCES, products)
    split = settings.type_k == settings.type_v and settings.type_k in _SPLIT_TYPES
    may_be_alone = memory == "recurrent" or not split
    try:
        return find_passes(context, products, n_vocab, may_be_alone=may_be_alone)
    finally:
        api.llama_free(context)


def _fit_sequences(measures: _Measures, settings: Settings) -> int:
    fitting = settings.state_budget // max(1, measures.state) - measures.sliced
    return max(settings.n_sequences_least, min(fitting, settings.n_sequences_most))


class LlamaRuntime:
    """See the module's head and `Runtime`. Made by `open_llama`."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        model: Any,
        context: Any,
        memory: MemoryKind,
        measures: _Measures,
    ) -> None:
        self._model, self._context = model, context
        self.tokenizer = Vocabulary(model)
        self.model = _describe(path, model, memory, self.tokenizer.n_vocab)
        self.limits = Limits(
            n_sequences=api.llama_n_seq_max(context) - measures.sliced,
            n_cells=api.llama_n_ctx(context),
            n_context=settings.n_context,
            n_batch=api.llama_n_batch(context),
            state_bytes=measures.state,
            cell_bytes=measures.cell,
            n_joint=measures.n_joint,
            sliced=measures.sliced,
            copies=not settings.exact,
            mixes=not settings.exact,
            snapshots=memory == "hybrid" and measures.sliced and not settings.exact,
        )
        if self.limits.n_cells < settings.n_context:
            raise BackendError(
                f"llama.cpp made a pool of {self.limits.n_cells:,} cells where "
                f"{settings.n_context:,} were asked for; lower --ctx"
            )
        self._contents = Contents(self.limits.n_sequences)
        self._scratch = self.limits.n_sequences
        self._batch = BatchBuffer(self.limits.n_batch)
        self._outputs: frozenset[int] = frozenset()
        passes = measures.passes
        self._exact = None if passes is None else ExactEvaluation(context, passes, memory)
        self._memory = sequence_memory(context, memory, self._identity(settings))

    def _identity(self, settings: Settings) -> Identity:
        return Identity(
            build=library.build() + (f"/exact-{self._exact.passes.least}" if self._exact else ""),
            model=self.model.fingerprint,
            n_layer=api.llama_model_n_layer(self._model),
            n_ctx=self.limits.n_cells,
            flash_attn=True,
            unified=not settings.exact,
            type_k=settings.type_k,
            type_v=settings.type_v,
        )

    @property
    def passes(self) -> Passes | None:
        """What a pass over the weights may hold in exact mode, None outside it."""
        return self._exact.passes if self._exact else None

    # ---- evaluation ---------------------------------------------------------------------------

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """See `Runtime.decode`."""
        check_batch(chunks, self.limits, self.model.n_vocab, self._contents)
        if self._exact is None:
            found = self._evaluate(chunks)
        else:
            found = self._exact.evaluate(chunks, self._contents.lengths(), self._evaluate)
        for chunk in chunks:
            self._contents.extend(chunk.sequence, chunk.tokens)
        rows = [found[chunk.sequence] if chunk.wants_logits else None for chunk in chunks]
        self._outputs = frozenset(row for row in rows if row is not None)
        return rows

    def _evaluate(self, chunks: Sequence[Chunk], n_last: int = 1) -> Rows:
        """Return the row of each chunk's sequence; see `BatchBuffer.fill`."""
        batch, outputs = self._batch.fill(chunks, n_last)
        self._outputs = frozenset()
        code = api.llama_decode(self._context, batch)
        if code == 1:
            raise PoolFull(f"llama.cpp found no room for {batch.n_tokens} tokens; evict first")
        if code == -1:
            raise InvalidArgument(f"llama.cpp refused a batch: {library.last_complaint()}")
        if code:
            raise DecodeFailed(
                f"llama_decode failed with {code}: {library.last_complaint()}; "
                "every state is dropped and prompts are read again"
            )
        return {chunk.sequence: row for chunk, row in zip(chunks, outputs, strict=True)}

    def _index_of(self, row: int) -> int:
        if row not in self._outputs:
            raise InvalidArgument(f"row {row} is no output of the latest decode call")
        return row

    def _row(self, row: int) -> NDArray[np.float32]:
        pointer = api.llama_get_logits_ith(self._context, self._index_of(row))
        return np.ctypeslib.as_array(pointer, (self.model.n_vocab,))

    def logits(self, row: int) -> NDArray[np.float32]:
        """See `Runtime.logits`."""
        return self._row(row).copy()

    def check_sampling(self, sampling: Sampling) -> None:
        """See `Runtime.check_sampling`; touches neither model nor context."""
        check_bias(sampling.logit_bias, self.model.n_vocab)
        grammar_of(sampling)

    def sampler(self, sampling: Sampling, history: Sequence[int]) -> LlamaSampler:
        """See `Runtime.sampler`."""
        self.check_sampling(sampling)
        return LlamaSampler(
            self._context,
            api.llama_model_get_vocab(self._model),
            self.tokenizer,
            sampling,
            history,
            row_of=self._row,
        )

    # ---- sequences ----------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """See `Runtime.length`."""
        return self._contents.length(sequence)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """See `Runtime.copy`."""
        memory, held = self.model.memory, self._contents
        taken = check_copy(source, target, length, memory, self.limits, held)
        self._memory.copy(source, target, None if taken == held.length(source) else taken)
        held.copy(source, target, taken)
        self._verify(target)

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """See `Runtime.copy_rows`."""
        check_copy_rows(source, target, length, self.limits, self._contents)
        self._memory.copy(source, target, length)
        if self._memory.positions(target)[1] >= 0:  # all of a complete source: its state came along
            self._memory.strip(target)
        self._contents.copy(source, target, length, is_incomplete=True)
        self._verify(target)

    def strip(self, sequence: int) -> None:
        """See `Runtime.strip`."""
        check_strip(sequence, self.limits, self._contents)
        with self._emptied_on_failure(sequence):
            self._memory.strip(sequence)
        self._contents.strip(sequence)
        self._verify(sequence)

    def cut(self, sequence: int, length: int) -> None:
        """See `Runtime.cut`."""
        held = check_cut(sequence, length, self.model.memory, self._contents)
        if length == 0:
            self.clear(sequence)
        elif length < held:
            self._memory.cut(sequence, length)
            self._contents.cut(sequence, length)
            self._verify(sequence)

    def clear(self, sequence: int) -> None:
        """See `Runtime.clear`."""
        if self.length(sequence):
            self._memory.clear(sequence)
        self._contents.clear(sequence)

    def scrub(self, sequence: int) -> None:
        """See `Runtime.scrub`."""
        if self.length(sequence):
            self._memory.scrub(sequence)
        self._contents.clear(sequence)

    def reset(self) -> None:
        """See `Runtime.reset`."""
        self._memory.clear_all()
        self._contents.reset()

    def _verify(self, sequence: int) -> None:
        """Compare what a sequence holds with llama.cpp's own last position.

        Of a hybrid that is -1 while the state is missing; how far the rows reach does not show.
        """
        last = self._memory.positions(sequence)[1]
        bare = self._contents.is_incomplete(sequence) and self.model.memory == "hybrid"
        expected = -1 if bare else self._contents.length(sequence) - 1
        if last != expected:
            raise DecodeFailed(
                f"sequence {sequence} ends at position {last} where {expected} was expected; its "
                "state cannot be trusted"
            )

    # ---- states -------------------------------------------------------------------------------

    def save(self, sequence: int, tokens: Sequence[int]) -> bytes:
        """See `Runtime.save`."""
        fed = packed(tokens)
        check_save(sequence, fed, self._contents)
        return self._memory.save(sequence, fed)

    def restore(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """See `Runtime.restore`."""
        fed = packed(tokens)
        check_restore(sequence, self._contents)
        self._memory.restore(sequence, blob, fed, rows=True)
        self._contents.put(sequence, fed)
        self._verify(sequence)

    def save_rows(self, sequence: int, start: int, end: int, tokens: Sequence[int]) -> bytes:
        """See `Runtime.save_rows`."""
        fed = packed(tokens)
        check_save_rows(sequence, (start, end), fed, self.limits, self._contents)
        return self._memory.save_rows(sequence, start, end, fed, scratch=self._scratch)

    def save_state(self, sequence: int, tokens: Sequence[int]) -> bytes:
        """See `Runtime.save_state`."""
        fed = packed(tokens)
        check_save_state(sequence, fed, self.model.memory, self.limits, self._contents)
        return self._memory.save(sequence, fed, rows=self.model.memory == "recurrent")

    def restore_rows(self, sequence: int, start: int, blob: bytes, tokens: Sequence[int]) -> None:
        """See `Runtime.restore_rows`."""
        fed = packed(tokens)
        check_restore_rows(sequence, start, self.limits, self._contents)
        with self._emptied_on_failure(sequence):
            check_rows(sequence, fed, self._contents)
            end = self._memory.restore_rows(sequence, start, blob, fed, scratch=self._scratch)
        self._contents.put(sequence, fed, end, is_incomplete=True)

    def restore_state(self, sequence: int, blob: bytes, tokens: Sequence[int]) -> None:
        """See `Runtime.restore_state`."""
        fed = packed(tokens)
        check_restore_state(sequence, fed, self.model.memory, self.limits, self._contents)
        with self._emptied_on_failure(sequence):
            check_rows(sequence, fed, self._contents)
            self._memory.restore(sequence, blob, fed, rows=self.model.memory == "recurrent")
        self._contents.put(sequence, fed)
        self._verify(sequence)

    @contextmanager
    def _emptied_on_failure(self, sequence: int) -> Iterator[None]:
        """Empty a sequence that was not restored or stripped, here as `_seqstate` does there."""
        try:
            yield
        except (BackendError, MemoryError):
            self.clear(sequence)
            raise

    def close(self) -> None:
        """See `Runtime.close`."""
        if self._context is not None:
            self.tokenizer.close()
            self._memory.close()
            api.llama_free(self._context)
            api.llama_model_free(self._model)
            self._context = self._model = None
            self._outputs = frozenset()  # nothing is left to sample from


def _describe(path: Path, model: Any, memory: MemoryKind, n_vocab: int) -> Model:
    template = api.llama_model_chat_template(model, None)
    return Model(
        name=path.stem,
        architecture=_metadata(model, "general.architecture"),
        memory=memory,
        n_vocab=n_vocab,
        n_context_train=api.llama_model_n_ctx_train(model),
        fingerprint=fingerprint(path),
        chat_template=template.decode("utf-8", "replace") if template else None,
    )


def _metadata(model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(256)
    count = api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if count >= 0 else ""
