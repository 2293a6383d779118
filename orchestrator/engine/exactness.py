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

`exacted` is for those who ask for more: the same bits warm or cold, alone or among others, on every
model and a CPU (`runtime.exact` tells how). Each sequence then has cells of its own, states move
through host memory only, and a pass over the weights holds at most 63 tokens. Values are BF16
beside F16 keys, so that one token's attention is not split by thread and a token may be alone in
its pass; where keys and values are one (latent attention) both stay F16 and it may not.

It costs the demo model nothing. One thread of a busy machine, the better of two rounds:

                            as llama.cpp    steady    exact    exact, were pads needed
    reading 240 tokens          95            93        88         83 tokens/s
    reading on to 1,500         74            45        55         50 tokens/s
    decoding, one lane          29            23        22         35 ms
    decoding, four lanes        73            60        57         61 ms
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
_BF16 = 30


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


def exacted(file: ModelFile, settings: Settings) -> Settings:
    """Return `settings`, made exact. Switches tiles off for the whole process where it must."""
    exact = replace(settings, exact=True, tiles=not any(map(_is_tiled, file.tensor_types)))
    return exact if _is_latent(file) else replace(exact, type_v=_BF16)


def _is_tiled(type_name: str) -> bool:
    """Return whether a type is multiplied by tiles from 8 tokens on and by rows below."""
    return type_name.endswith("_K") or type_name.startswith("IQ")


def _is_latent(file: ModelFile) -> bool:
    """Return whether one compressed row serves as key and value."""
    return f"{file.architecture}.attention.key_length_mla" in file.metadata


def _takes_blocks(file: ModelFile) -> bool:
    """Return whether value rows may be Q8_0 beside F16 keys: whole blocks, rows of their own."""
    if _is_latent(file):
        return False
    width = file.metadata.get(f"{file.architecture}.attention.value_length")
    if width is None:
        n_embd = file.metadata.get(f"{file.architecture}.embedding_length")
        n_head = file.metadata.get(f"{file.architecture}.attention.head_count")
        if not (isinstance(n_embd, int) and isinstance(n_head, int) and n_head):
            return False
        width = n_embd // n_head
    return isinstance(width, int) and width % _BLOCK == 0
