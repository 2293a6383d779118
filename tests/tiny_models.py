"""Which small models show every kind of memory llama.cpp has?

Random GGUFs with seeded F32 weights, one per architecture, built in a tenth of a second each and
cached outside the checkout. They speak printable ASCII noise, but it means something: the greedy
reply differs from prompt to prompt, and a lost or foreign state changes the logits.

What the weights are shaped for:

- *variety*: the output matrix is not tied to the embedding (a tied random model repeats its last
  token for ever), and the blocks add more to the residual stream than the embedding does;
- *clear winners*: logits with a standard deviation of about 5, so that near ties are rare;
- *long memory*: decay rates are log-uniform, so some heads forget in a few tokens and some
  remember hundreds;
- *one byte, one token*: the vocabulary is the 256 bytes and eight special tokens; of these, only
  the end of a turn is ever generated.

Shapes are written in ggml's order (``ne0``, the input width, first) and reversed on writing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tiny_blocks import (
    D_STATE,
    DT_RANK,
    L_CACHE,
    LORA,
    N_EMBD,
    N_FF,
    N_HEAD_KV,
    N_VALUE_HEAD,
    SIGMOID_GATE,
    WKV_HEAD,
    Block,
    Tensor,
    Value,
    affine_norm,
    attention,
    attention_keys,
    delta_attention,
    delta_net,
    delta_net_gates,
    delta_net_keys,
    expert_bias,
    expert_keys,
    experts,
    ffn,
    head_norms,
    kimi_keys,
    latent_attention,
    layer_norms,
    lightning_attention,
    mamba1,
    mamba1_keys,
    mamba2,
    mamba2_keys,
    matrix,
    norm,
    plamo_attention,
    plamo_mamba,
    rwkv6_channel_mix,
    rwkv6_time_mix,
    rwkv7_channel_mix,
    rwkv7_time_mix,
    shared_expert,
    shared_expert_gate,
    short_conv,
    size_keys,
    vector,
)

from orchestrator.paths import cache_dir

VERSION = 2
"""Raise this when a recipe changes: the files are cached by it."""

SEED = 1

WINDOW = 64
"""The sliding window of the tiny gemma3, in tokens."""

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|spare|>",
)
N_VOCAB = 256 + len(SPECIALS)
TOKEN = {text: 256 + place for place, text in enumerate(SPECIALS)}
"""Token ids of the special tokens; the id of a byte is its value."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- "<|im_start|>system\\n" }}
{%- if messages[0].role == "system" %}{{- messages[0].content + "\\n\\n" }}{%- endif %}
{{- "Tools:" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}
{{- "<|im_start|>system\\n" + messages[0].content + "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role != "system" or not loop.first %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{{- "<tool_call>" }}{{- call.function | tojson }}{{- "</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking %}{{- "<think>\\n" }}{%- endif %}
{%- endif %}"""
"""ChatML. With ``enable_thinking`` the generation prompt opens a ``<think>`` block that a later
rendering of the history does not repeat, as the templates of reasoning models do."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One architecture: metadata keys without their prefix, and all tensors."""

    keys: dict[str, Value]
    tensors: list[Tensor]


# --- whole models -------------------------------------------------------------------------------


def output_scale() -> npt.NDArray[np.float32]:
    """How loudly each token speaks: printable bytes and the end of a turn, nothing else."""
    scale = np.zeros(N_VOCAB, np.float32)
    scale[[*range(0x20, 0x7F), 0x0A]] = 1.0
    scale[TOKEN["<|im_end|>"]] = 0.9
    return scale


def output_matrix() -> Tensor:
    std = 5.0 / np.sqrt(N_EMBD)
    return Tensor(
        "output.weight",
        (N_EMBD, N_VOCAB),
        lambda rng, s: rng.normal(0.0, std, s) * output_scale()[:, None],
        matrix=True,
    )


def frame(*layers: Iterable[Tensor], norm_name: str = "output_norm.weight") -> list[Tensor]:
    """What every model has around its layers."""
    embedding = Tensor(
        "token_embd.weight", (N_EMBD, N_VOCAB), lambda rng, s: rng.normal(0, 0.5, s), matrix=True
    )
    body = [tensor for layer in layers for tensor in layer]
    return [embedding, *body, norm(norm_name, N_EMBD), output_matrix()]


def layer_kinds(pattern: str) -> list[int]:
    """Key/value heads per layer of a pattern in which ``A`` is attention."""
    return [N_HEAD_KV if kind == "A" else 0 for kind in pattern]


def llama() -> Blueprint:
    layers = [layer_norms(i, "attn_norm", "ffn_norm") + attention(i) + ffn(i) for i in range(4)]
    return Blueprint({**size_keys(4), **attention_keys()}, frame(*layers))


POST_NORMS = ("attention_norm", "ffw_norm")


def gemma3() -> Blueprint:
    """Five of six layers see `WINDOW` tokens.

    It multiplies the embedding by sqrt(width); the norms behind the blocks are as loud, or the
    blocks would not be heard.
    """
    layers = [
        layer_norms(i, "attn_norm", "ffn_norm")
        + [norm(f"blk.{i}.post_{name}.weight", N_EMBD, scale=3.0) for name in POST_NORMS]
        + attention(i)
        + head_norms(i)
        + ffn(i)
        for i in range(6)
    ]
    keys = {**size_keys(6), **attention_keys(), "attention.sliding_window": WINDOW}
    return Blueprint(keys, frame(*layers))


M_ROPE: dict[str, Value] = {"rope.dimension_sections": [8, 4, 4, 0]}


def delta_net_layers(gates: Block, feed_forward: Block) -> list[Tensor]:
    """Three delta nets, then attention, as in every Qwen hybrid."""
    tensors = []
    for i in range(4):
        recurrent = (i + 1) % 4 != 0
        tensors += layer_norms(i, "attn_norm", "post_attention_norm") + feed_forward(i)
        tensors += (
            delta_net(i) + gates(i) if recurrent else attention(i, query_width=2) + head_norms(i)
        )
    return tensors


def delta_net_experts(i: int) -> list[Tensor]:
    return [*experts(i), *shared_expert(i), shared_expert_gate(i)]


def qwen35() -> Blueprint:
    keys = {**size_keys(4), **attention_keys(), **delta_net_keys(), **M_ROPE}
    return Blueprint(keys, frame(delta_net_layers(delta_net_gates, ffn)))


def qwen35moe() -> Blueprint:
    keys = {**size_keys(4), **attention_keys(), **delta_net_keys(), **M_ROPE, **expert_keys()}
    return Blueprint(keys, frame(delta_net_layers(delta_net_gates, delta_net_experts)))


def qwen3next() -> Blueprint:
    def gates(i: int) -> list[Tensor]:
        return [matrix(f"blk.{i}.ssm_ba", N_EMBD, 2 * N_VALUE_HEAD)]

    keys = {**size_keys(4), **attention_keys(), **delta_net_keys(), **expert_keys()}
    return Blueprint(keys, frame(delta_net_layers(gates, delta_net_experts)))


def lfm2_layers(pattern: str, feed_forward: Block) -> list[Tensor]:
    tensors = []
    for i, kind in enumerate(pattern):
        tensors += layer_norms(i, "attn_norm", "ffn_norm") + feed_forward(i)
        tensors += attention(i) + head_norms(i) if kind == "A" else short_conv(i)
    return tensors


LFM2_PATTERN = "CCACAC"


def lfm2_keys() -> dict[str, Value]:
    heads = attention_keys(layer_kinds(LFM2_PATTERN))
    return {**size_keys(len(LFM2_PATTERN)), **heads, "shortconv.l_cache": L_CACHE}


def lfm2() -> Blueprint:
    layers = lfm2_layers(LFM2_PATTERN, ffn)
    return Blueprint(lfm2_keys(), frame(layers, norm_name="token_embd_norm.weight"))


def lfm2moe() -> Blueprint:
    """The first layer is dense."""

    def feed_forward(i: int) -> list[Tensor]:
        return ffn(i) if i == 0 else [*experts(i), expert_bias(i)]

    layers = lfm2_layers(LFM2_PATTERN, feed_forward)
    keys = {**lfm2_keys(), **expert_keys(SIGMOID_GATE), "leading_dense_block_count": 1}
    return Blueprint(keys, frame(layers, norm_name="token_embd_norm.weight"))


def granitehybrid() -> Blueprint:
    pattern = "MMAM"
    layers = [
        layer_norms(i, "attn_norm", "ffn_norm")
        + (attention(i) if kind == "A" else mamba2(i))
        + ffn(i)
        for i, kind in enumerate(pattern)
    ]
    keys = {**size_keys(4), **attention_keys(layer_kinds(pattern)), **mamba2_keys()}
    return Blueprint({**keys, "rope.scaling.finetuned": False}, frame(*layers))


def falcon_h1() -> Blueprint:
    """Every layer has both halves. The name of its second norm really has no suffix."""
    layers = [
        [
            *layer_norms(i, "attn_norm"),
            norm(f"blk.{i}.ffn_norm", N_EMBD),
            *attention(i),
            *mamba2(i),
            *ffn(i),
        ]
        for i in range(3)
    ]
    return Blueprint({**size_keys(3), **attention_keys(), **mamba2_keys()}, frame(*layers))


def nemotron_h() -> Blueprint:
    """A layer is one thing only: a Mamba-2 block, attention, or a feed-forward block."""
    pattern = "MFAMFMF"
    block: dict[str, Block] = {
        "M": mamba2,
        "A": attention,
        "F": lambda i: ffn(i, gate=False),
    }
    layers = [layer_norms(i, "attn_norm") + block[kind](i) for i, kind in enumerate(pattern)]
    keys = {**size_keys(len(pattern)), **attention_keys(layer_kinds(pattern)), **mamba2_keys()}
    keys["feed_forward_length"] = [N_FF if kind == "F" else 0 for kind in pattern]
    return Blueprint({**keys, "attention.layer_norm_epsilon": 1e-5}, frame(*layers))


def jamba() -> Blueprint:
    pattern = "MMAM"
    layers = []
    for i, kind in enumerate(pattern):
        inner_norms = [
            norm(f"blk.{i}.ssm_dt_norm.weight", DT_RANK),
            norm(f"blk.{i}.ssm_b_norm.weight", D_STATE),
            norm(f"blk.{i}.ssm_c_norm.weight", D_STATE),
        ]
        mixer = attention(i) if kind == "A" else mamba1(i) + inner_norms
        layers.append(layer_norms(i, "attn_norm", "ffn_norm") + mixer + ffn(i))
    keys = {**size_keys(4), **attention_keys(layer_kinds(pattern)), **mamba1_keys()}
    return Blueprint(keys, frame(*layers))


def plamo2() -> Blueprint:
    """Several of its norms have no suffix, and gate and up projection are one matrix."""
    pattern = "MMAM"
    layers = [
        [
            *layer_norms(i, "attn_norm", "ffn_norm"),
            *(norm(f"blk.{i}.post_{name}", N_EMBD) for name in POST_NORMS),
            *(plamo_attention(i) if kind == "A" else plamo_mamba(i)),
            matrix(f"blk.{i}.ffn_up", N_EMBD, 2 * N_FF, gain=1.4),
            matrix(f"blk.{i}.ffn_down", N_FF, N_EMBD, gain=1.4),
        ]
        for i, kind in enumerate(pattern)
    ]
    keys = {**size_keys(4), **attention_keys(layer_kinds(pattern)), **mamba2_keys()}
    return Blueprint({**keys, "ssm.group_count": 0}, frame(*layers))


def kimi_linear() -> Blueprint:
    """Its latent attention counts as one key/value head."""
    pattern = "DDAD"
    layers = [
        [
            *layer_norms(i, "attn_norm", "ffn_norm"),
            *(latent_attention(i) if kind == "A" else delta_attention(i)),
            *(ffn(i) if i == 0 else [*experts(i), *shared_expert(i), expert_bias(i)]),
        ]
        for i, kind in enumerate(pattern)
    ]
    keys: dict[str, Value] = {
        **size_keys(4),
        **attention_keys([1 if kind == "A" else 0 for kind in pattern]),
        **expert_keys(SIGMOID_GATE),
        **kimi_keys(),
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
    }
    return Blueprint(keys, frame(*layers))


def minimax_01() -> Blueprint:
    layers = [
        layer_norms(i, "attn_norm", "ffn_norm")
        + (lightning_attention(i) if (i + 1) % 4 else attention(i))
        + experts(i, width=N_FF)
        for i in range(4)
    ]
    keys = {**size_keys(4), **attention_keys(), **expert_keys(), "residual_scale": 1.0}
    return Blueprint({**keys, "full_attention_interval": 4}, frame(*layers))


def mamba_model() -> Blueprint:
    layers = [layer_norms(i, "attn_norm") + mamba1(i) for i in range(4)]
    return Blueprint({**size_keys(4), **mamba1_keys()}, frame(*layers))


def mamba2_model() -> Blueprint:
    layers = [layer_norms(i, "attn_norm") + mamba2(i) for i in range(4)]
    return Blueprint({**size_keys(4), **mamba2_keys()}, frame(*layers))


def rwkv(time_mix: Block, channel_mix: Block, own_keys: dict[str, Value]) -> Blueprint:
    layers = [
        affine_norm(f"blk.{i}.attn_norm")
        + affine_norm(f"blk.{i}.attn_norm_2")
        + time_mix(i)
        + channel_mix(i)
        for i in range(4)
    ]
    keys: dict[str, Value] = {
        **size_keys(4),
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": WKV_HEAD,
        **own_keys,
    }
    edges = [*affine_norm("token_embd_norm"), vector("output_norm.bias", N_EMBD)]
    return Blueprint(keys, frame(*layers, edges))


def rwkv6() -> Blueprint:
    keys: dict[str, Value] = {"time_mix_extra_dim": LORA, "time_decay_extra_dim": LORA}
    return rwkv(rwkv6_time_mix, rwkv6_channel_mix, keys)


def rwkv7() -> Blueprint:
    ranks = ("decay", "iclr", "value_residual_mix", "gate")
    keys: dict[str, Value] = {f"attention.{rank}_lora_rank": LORA for rank in ranks}
    return rwkv(rwkv7_time_mix, rwkv7_channel_mix, keys)


_ATTENTION: dict[str, Callable[[], Blueprint]] = {"llama": llama, "gemma3": gemma3}
_HYBRID: dict[str, Callable[[], Blueprint]] = {
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "qwen3next": qwen3next,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "granitehybrid": granitehybrid,
    "falcon-h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "jamba": jamba,
    "plamo2": plamo2,
    "kimi-linear": kimi_linear,
    "minimax-01": minimax_01,
}
_RECURRENT: dict[str, Callable[[], Blueprint]] = {
    "mamba": mamba_model,
    "mamba2": mamba2_model,
    "rwkv6": rwkv6,
    "rwkv7": rwkv7,
}
_BLUEPRINTS = {**_ATTENTION, **_HYBRID, **_RECURRENT}

ATTENTION, HYBRID, RECURRENT = tuple(_ATTENTION), tuple(_HYBRID), tuple(_RECURRENT)
ARCHITECTURES = (*ATTENTION, *HYBRID, *RECURRENT)


# --- writing ------------------------------------------------------------------------------------


def byte_characters() -> list[str]:
    """The character GPT-2 writes for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    plain = [gguf.TokenType.NORMAL] * 256
    special = [
        gguf.TokenType.CONTROL if text.startswith("<|") else gguf.TokenType.USER_DEFINED
        for text in SPECIALS
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_characters(), *SPECIALS])
    writer.add_token_types([*plain, *special])
    # The loader demands a list of merges. These two bytes never meet in UTF-8.
    writer.add_token_merges([f"{byte_characters()[0xFE]} {byte_characters()[0xFF]}"])
    writer.add_eos_token_id(TOKEN["<|im_end|>"])
    writer.add_eot_token_id(TOKEN["<|im_end|>"])
    writer.add_pad_token_id(TOKEN["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_key(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_tensor(writer: gguf.GGUFWriter, tensor: Tensor, quantised: str | None) -> None:
    rng = np.random.default_rng([SEED, zlib.crc32(tensor.name.encode())])
    data = tensor.draw(rng, tensor.shape[::-1]).astype(np.float32)
    if quantised is None or not tensor.matrix or tensor.shape[0] % 32:
        writer.add_tensor(tensor.name, data)
        return
    kind = gguf.GGMLQuantizationType[quantised]
    writer.add_tensor(tensor.name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def write(path: Path, architecture: str, quantised: str | None) -> None:
    blueprint = _BLUEPRINTS[architecture]()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    for key, value in blueprint.keys.items():
        write_key(writer, f"{architecture}.{key}", value)
    write_vocabulary(writer)
    for tensor in blueprint.tensors:
        write_tensor(writer, tensor, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(architecture: str, quantised: str | None = None) -> Path:
    """Return the path of the tiny model, building it if the cache does not have it.

    `quantised` names a ggml type such as ``"Q4_1"`` or ``"Q8_0"`` for the matrices. Safe in two
    processes at once: the file appears whole.
    """
    folder = cache_dir() / f"tiny-v{VERSION}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{architecture}{f'-{quantised}' if quantised else ''}.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            draft = Path(scratch) / path.name
            write(draft, architecture, quantised)
            os.replace(draft, path)
    return path


def build_all(architectures: Sequence[str] = ARCHITECTURES) -> list[Path]:
    return [build(architecture) for architecture in architectures]


def main(names: list[str]) -> int:
    """Build what is named, or everything, and print where it lies."""
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(ARCHITECTURES)}", file=sys.stderr)
        return 2
    for name in names or ARCHITECTURES:
        print(build(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
