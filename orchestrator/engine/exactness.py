"""Can replies be made independent of how a prompt is cut, and is it worth it on this model?

On a CPU ggml chooses kernels by the number of tokens in a pass, so a reply read again in one piece
does not give the very bits that it gave token by token. Three things do it:

    attention   64 tokens and more go by tiles, one token over 512 cells and more is split by
                thread, and F16 values are summed in F16, which makes any order show
    weights     most types multiply one token by another kernel than two; Q4_1 and Q5_1 have one
    repacking   rows in groups of four take a kernel of their own

The first goes away where values are of another type than keys: Q8_0 beside F16. It is done where
the weights do not spoil it again, and then nothing is repacked. Measured, the same 600 tokens cut
in any way, largest difference of a logit:

                                     F16 values      Q8_0 values
    Q4_1 and Q5_1 (the demo model)   0.9             0.0
    F32 (tiny models)                0.002 to 0.05   0.0001, on Gemma 3 0.02

It costs reading speed in long contexts and gains decoding speed. The demo model on two cores, F16
against Q8_0 values: reading 127 and 125 tokens/s at 200 tokens, 106 and 73 at 1,800; decoding 26
and 18 ms a token at 200, 60 and 32 at 1,800.

One thing is left: rows that lie in the pool in another order than in the text are summed in that
order, which can show in the last bits. Other models run as llama.cpp runs them by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.models.inspect import ModelFile
from orchestrator.runtime.library import can_offload
from orchestrator.runtime.llama import Settings

_ONE_KERNEL = frozenset({"Q4_1", "Q5_1"})
_STEADY = _ONE_KERNEL | {"F32"}
_Q8_0 = 8  # ggml type number
_BLOCK = 32  # values in a block of it


@dataclass(frozen=True, slots=True)
class Kernels:
    """Settings, and whether replies under them do not depend on how prompts are cut."""

    settings: Settings
    exact: bool


def steadied(file: ModelFile, settings: Settings) -> Kernels:
    """Return `settings`, made steady where this model's weights do not spoil it again."""
    on_gpu = can_offload() and settings.gpu_layers != 0
    if on_gpu or not _STEADY.issuperset(file.tensor_types) or not _takes_blocks(file):
        return Kernels(settings, exact=False)
    exact = _ONE_KERNEL.issuperset(file.tensor_types)
    return Kernels(replace(settings, type_v=_Q8_0, repack=False), exact)


def _takes_blocks(file: ModelFile) -> bool:
    """Return whether value rows may be Q8_0 beside F16 keys: whole blocks, rows of their own."""
    if f"{file.architecture}.attention.key_length_mla" in file.metadata:
        return False  # one compressed row serves as both
    width = file.metadata.get(f"{file.architecture}.attention.value_length")
    if width is None:
        n_embd = file.metadata.get(f"{file.architecture}.embedding_length")
        n_head = file.metadata.get(f"{file.architecture}.attention.head_count")
        if not (isinstance(n_embd, int) and isinstance(n_head, int) and n_head):
            return False
        width = n_embd // n_head
    return isinstance(width, int) and width % _BLOCK == 0
