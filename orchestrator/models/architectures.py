"""Which architectures does the pinned llama.cpp know, and what can be done with each?

The names are those of its architecture table; what a model remembers follows from the memory class
that llama.cpp creates for it. To be checked again whenever the pin moves: an architecture that is
missing here is refused before llama.cpp sees it.
"""

from __future__ import annotations

from typing import Literal

Memory = Literal["attention", "hybrid", "recurrent"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ATTENTION = _names(
    """
    afmoe apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon
    chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2
    deepseek2-ocr deepseek32 dots1 dots3note ernie4_5 ernie4_5-moe exaone exaone-moe exaone4
    falcon gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe gpt-oss gpt2 gptneox
    granite granite_swa granitemoe graniteswitch grok grovemoe hrm_text hunyuan-dense
    hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 laguna llama llama4 maincoder
    maple mellum mimo2 minicpm minicpm3 minimax-m2 minimax-m3 mistral3 mistral4 mpt
    muse-glimmer nanbeige nemotron olmo olmo2 olmoe openelm orion paddleocr pangu-embedded
    phi2 phi3 phimoe plamo plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl
    qwen3vlmoe refact seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2
    step35 talkie xverse
    """
)

HYBRID = _names(
    """
    bailingmoe3 falcon-h1 granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe minimax-01
    nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next
    """
)

RECURRENT = _names("arwkv7 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7")

NO_CHAT: dict[str, str] = {
    **dict.fromkeys(
        _names(
            "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 "
            "jina-bert-v3 eurobert gemma-embedding t5encoder llama-embed"
        ),
        "it makes embeddings and cannot generate text",
    ),
    **dict.fromkeys(
        _names("dream llada llada-moe rnd1"),
        "it is a diffusion model and does not write one token after the other",
    ),
    **dict.fromkeys(_names("wavtokenizer-dec qwen3tts pockettts"), "it makes sound, not text"),
    **dict.fromkeys(
        _names("eagle3 dflash gemma4-assistant"),
        "it only drafts for a larger model and cannot work alone",
    ),
    "t5": "it reads with an encoder, which a growing chat would have to run again on every turn",
}
"""Known to llama.cpp, of no use in a chat: the reason."""

UNSUPPORTED: dict[str, str] = dict.fromkeys(
    _names("deepseek4 qwen4exp glm5-next"),
    "its memory has parts that this version cannot keep and restore",
)
"""Known to llama.cpp and able to chat, but with a memory whose states are not handled here."""

CHAT = ATTENTION | HYBRID | RECURRENT


def memory_of(architecture: str) -> Memory:
    """Return the kind of memory of an architecture of `CHAT`."""
    if architecture in HYBRID:
        return "hybrid"
    return "recurrent" if architecture in RECURRENT else "attention"
