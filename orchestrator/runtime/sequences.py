"""The sequence memory of a context, and whether its rows can be moved in slices.

llama.cpp exports whole sequences only; a slice is the export of a copy that holds no more than the
slice (`seqstate_ctypes` tells how). Whether that works depends on the kind of memory that llama.cpp
makes for a model, which it does not tell, so it is tried on every model that is opened: a few rows
are taken out in slices, put back, and must come out as the same bytes. Recurrent memory has no
rows, and that of hybrids with a sliding window does not show them without their state.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

from orchestrator._seqstate import Identity, SequenceMemory
from orchestrator.errors import BackendError
from orchestrator.runtime import library
from orchestrator.runtime.batch import BatchBuffer
from orchestrator.runtime.library import api
from orchestrator.runtime.protocol import Chunk, MemoryKind

N_SEQUENCES_MOST = 256  # LLAMA_MAX_SEQ

_STATE_FUNCTIONS = (
    "llama_get_memory",
    "llama_memory_clear",
    "llama_memory_seq_cp",
    "llama_memory_seq_rm",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_pos_max",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
)
_TEXT = (3, 1, 2)  # ids that every vocabulary has
_CUTS = (0, 1, 3)
_HELD, _SCRATCH = 0, 1


def sequence_memory(context: Any, memory: MemoryKind, identity: Identity) -> SequenceMemory:
    """Return the memory of a context that holds nothing yet."""
    return SequenceMemory(
        library.function_addresses(_STATE_FUNCTIONS),
        ctypes.cast(context, ctypes.c_void_p).value or 0,
        n_sequences=api.llama_n_seq_max(context),
        memory="attention" if memory == "windowed" else memory,
        identity=identity,
    )


def moves_slices(context: Any, memory: MemoryKind) -> bool:
    """Return whether rows can be moved in slices; empties the context before and after.

    Needs a second sequence, and cells that all sequences share: with cells of their own llama.cpp
    ends the process over a copy in part.
    """
    shared = api.llama_n_ctx_seq(context) == api.llama_n_ctx(context)
    if memory == "recurrent" or api.llama_n_seq_max(context) < 2 or not shared:
        return False
    api.llama_memory_clear(api.llama_get_memory(context), True)
    sequences = sequence_memory(context, memory, _nobody(context))
    try:
        batch, _ = BatchBuffer(len(_TEXT)).fill([Chunk(_HELD, 0, _TEXT, wants_logits=False)])
        if api.llama_decode(context, batch):
            raise BackendError(f"the model cannot evaluate a token: {library.last_complaint()}")
        return _survives(sequences)
    finally:
        sequences.clear_all()
        sequences.close()


def _survives(sequences: SequenceMemory) -> bool:
    """Take a sequence out in slices, put it back, and return whether it is the same."""
    try:
        before = _rows(sequences, 0, len(_TEXT))
        slices = [(start, _rows(sequences, start, end)) for start, end in pairwise(_CUTS)]
        state = sequences.save(_HELD, _TEXT, rows=False)
        sequences.clear(_HELD)
        for start, blob in slices:
            sequences.restore_rows(_HELD, start, blob, _TEXT, scratch=_SCRATCH)
        sequences.restore(_HELD, state, _TEXT, rows=False)
        return before == _rows(sequences, 0, len(_TEXT))
    except BackendError:
        return False


def _rows(sequences: SequenceMemory, start: int, end: int) -> bytes:
    return sequences.save_rows(_HELD, start, end, _TEXT, scratch=_SCRATCH)


def _nobody(context: Any) -> Identity:
    """Return the identity of states that nobody will keep."""
    return Identity(
        build=library.build(),
        model=bytes(32),
        n_layer=1,
        n_ctx=api.llama_n_ctx(context),
        flash_attn=True,
        unified=True,
        type_k=0,
        type_v=0,
    )
