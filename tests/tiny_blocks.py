"""Which tensors make up a block of each kind of model, and how are they drawn?

The parts of `tiny_models`: attention, feed-forward blocks, and every kind of recurrent layer.
A block is a function from the index of its layer to its tensors. Nothing here knows of a
vocabulary. Shapes are written in ggml's order: ``ne0``, the width of the input, comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD = 128, 256, 4, 2, 32
N_CONTEXT = 8192

Draw = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[np.floating]]
Scalar = bool | int | float | str
Value = Scalar | list[int]
Block = Callable[[int], list["Tensor"]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be drawn: `shape` in ggml's order; only a `matrix` may be quantised."""

    name: str
    shape: tuple[int, ...]
    draw: Draw
    matrix: bool = False


# --- kinds of tensors ---------------------------------------------------------------------------


def matrix(name: str, *shape: int, gain: float = 1.0) -> Tensor:
    """A weight that maps unit variance to variance `gain` squared."""
    std = gain / np.sqrt(shape[0])
    return Tensor(f"{name}.weight", shape, lambda rng, s: rng.normal(0.0, std, s), matrix=True)


def norm(name: str, *shape: int, scale: float = 1.0) -> Tensor:
    return Tensor(name, shape, lambda rng, s: scale * rng.normal(1.0, 0.1, s))


def vector(name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> Tensor:
    return Tensor(name, shape, lambda rng, s: rng.normal(mean, std, s))


def between(name: str, *shape: int, low: float, high: float) -> Tensor:
    return Tensor(name, shape, lambda rng, s: rng.uniform(low, high, s))


def decay_rate(name: str, *shape: int, slow: float = 0.004, fast: float = 0.5) -> Tensor:
    """Negative rates, log-uniform: a step keeps ``exp(rate * dt)`` of what was there."""
    low, high = np.log(slow), np.log(fast)
    return Tensor(name, shape, lambda rng, s: -np.exp(rng.uniform(low, high, s)))


# --- blocks -------------------------------------------------------------------------------------


def attention(i: int, n_kv: int = N_HEAD_KV, query_width: int = 1) -> list[Tensor]:
    """Queries and keys are loud, so that attention picks few positions instead of averaging all."""
    width = N_HEAD * HEAD
    return [
        matrix(f"blk.{i}.attn_q", N_EMBD, query_width * width, gain=1.6),
        matrix(f"blk.{i}.attn_k", N_EMBD, n_kv * HEAD, gain=1.6),
        matrix(f"blk.{i}.attn_v", N_EMBD, n_kv * HEAD),
        matrix(f"blk.{i}.attn_output", width, N_EMBD, gain=1.4),
    ]


def head_norms(i: int) -> list[Tensor]:
    return [norm(f"blk.{i}.attn_{half}_norm.weight", HEAD, scale=1.6) for half in "qk"]


def ffn(i: int, gate: bool = True) -> list[Tensor]:
    names = ("ffn_gate", "ffn_up") if gate else ("ffn_up",)
    return [
        *(matrix(f"blk.{i}.{name}", N_EMBD, N_FF, gain=1.4) for name in names),
        matrix(f"blk.{i}.ffn_down", N_FF, N_EMBD, gain=1.4),
    ]


N_EXPERT, N_EXPERT_USED, N_FF_EXPERT = 4, 2, 64
SOFTMAX_GATE, SIGMOID_GATE = 1, 2


def experts(i: int, width: int = N_FF_EXPERT) -> list[Tensor]:
    return [
        matrix(f"blk.{i}.ffn_gate_inp", N_EMBD, N_EXPERT, gain=2.0),
        matrix(f"blk.{i}.ffn_gate_exps", N_EMBD, width, N_EXPERT, gain=1.4),
        matrix(f"blk.{i}.ffn_up_exps", N_EMBD, width, N_EXPERT, gain=1.4),
        matrix(f"blk.{i}.ffn_down_exps", width, N_EMBD, N_EXPERT, gain=1.4),
    ]


def expert_bias(i: int) -> Tensor:
    return vector(f"blk.{i}.exp_probs_b.bias", N_EXPERT)


def shared_expert(i: int) -> list[Tensor]:
    return [
        matrix(f"blk.{i}.ffn_gate_shexp", N_EMBD, N_FF_EXPERT, gain=1.4),
        matrix(f"blk.{i}.ffn_up_shexp", N_EMBD, N_FF_EXPERT, gain=1.4),
        matrix(f"blk.{i}.ffn_down_shexp", N_FF_EXPERT, N_EMBD, gain=1.4),
    ]


def shared_expert_gate(i: int) -> Tensor:
    return vector(f"blk.{i}.ffn_gate_inp_shexp.weight", N_EMBD)


def layer_norms(i: int, *names: str) -> list[Tensor]:
    return [norm(f"blk.{i}.{name}.weight", N_EMBD) for name in names]


D_INNER, D_STATE, D_CONV, N_GROUP, N_SSM_HEAD, DT_RANK = 2 * N_EMBD, 16, 4, 1, 8, 8


def mamba2(i: int) -> list[Tensor]:
    conv = D_INNER + 2 * N_GROUP * D_STATE
    return [
        matrix(f"blk.{i}.ssm_in", N_EMBD, D_INNER + conv + N_SSM_HEAD),
        vector(f"blk.{i}.ssm_conv1d.weight", D_CONV, conv, std=0.6),
        vector(f"blk.{i}.ssm_conv1d.bias", conv),
        vector(f"blk.{i}.ssm_dt.bias", N_SSM_HEAD, std=0.5),
        decay_rate(f"blk.{i}.ssm_a", 1, N_SSM_HEAD),
        vector(f"blk.{i}.ssm_d", 1, N_SSM_HEAD, std=0.3),
        norm(f"blk.{i}.ssm_norm.weight", D_INNER // N_GROUP, N_GROUP),
        matrix(f"blk.{i}.ssm_out", D_INNER, N_EMBD, gain=1.4),
    ]


def mamba1(i: int) -> list[Tensor]:
    return [
        matrix(f"blk.{i}.ssm_in", N_EMBD, 2 * D_INNER),
        vector(f"blk.{i}.ssm_conv1d.weight", D_CONV, D_INNER, std=0.6),
        vector(f"blk.{i}.ssm_conv1d.bias", D_INNER),
        matrix(f"blk.{i}.ssm_x", D_INNER, DT_RANK + 2 * D_STATE, gain=2.0),
        matrix(f"blk.{i}.ssm_dt", DT_RANK, D_INNER),
        vector(f"blk.{i}.ssm_dt.bias", D_INNER, std=0.5),
        decay_rate(f"blk.{i}.ssm_a", D_STATE, D_INNER),
        vector(f"blk.{i}.ssm_d", D_INNER, std=0.3),
        matrix(f"blk.{i}.ssm_out", D_INNER, N_EMBD, gain=1.4),
    ]


D_KEY, N_KEY_HEAD, N_VALUE_HEAD = 32, 2, 4


def delta_net(i: int) -> list[Tensor]:
    keys, values = D_KEY * N_KEY_HEAD, D_KEY * N_VALUE_HEAD
    return [
        matrix(f"blk.{i}.attn_qkv", N_EMBD, 2 * keys + values),
        matrix(f"blk.{i}.attn_gate", N_EMBD, values, gain=1.6),
        vector(f"blk.{i}.ssm_conv1d.weight", D_CONV, 2 * keys + values, std=0.6),
        vector(f"blk.{i}.ssm_dt.bias", N_VALUE_HEAD, std=0.5),
        decay_rate(f"blk.{i}.ssm_a", N_VALUE_HEAD),
        norm(f"blk.{i}.ssm_norm.weight", D_KEY),
        matrix(f"blk.{i}.ssm_out", values, N_EMBD, gain=2.0),
    ]


def delta_net_gates(i: int) -> list[Tensor]:
    return [matrix(f"blk.{i}.ssm_{name}", N_EMBD, N_VALUE_HEAD) for name in ("beta", "alpha")]


L_CACHE = 4


def short_conv(i: int) -> list[Tensor]:
    return [
        vector(f"blk.{i}.shortconv.conv.weight", L_CACHE, N_EMBD, std=0.7),
        matrix(f"blk.{i}.shortconv.in_proj", N_EMBD, 3 * N_EMBD),
        matrix(f"blk.{i}.shortconv.out_proj", N_EMBD, N_EMBD, gain=2.0),
    ]


KDA_INNER = HEAD * N_HEAD


def delta_attention(i: int) -> list[Tensor]:
    """Kimi's delta attention: a decay per channel, a convolution each for q, k and v."""
    conv = (D_CONV, 1, KDA_INNER, 1)
    return [
        *(vector(f"blk.{i}.ssm_conv1d_{name}.weight", *conv, std=0.6) for name in "qkv"),
        *(matrix(f"blk.{i}.attn_{name}", N_EMBD, KDA_INNER) for name in "qkv"),
        *(matrix(f"blk.{i}.ssm_{name}_a", N_EMBD, HEAD) for name in "fg"),
        *(matrix(f"blk.{i}.ssm_{name}_b", HEAD, KDA_INNER) for name in "fg"),
        matrix(f"blk.{i}.ssm_beta", N_EMBD, N_HEAD),
        decay_rate(f"blk.{i}.ssm_a", 1, N_HEAD, 1, 1),
        vector(f"blk.{i}.ssm_dt.bias", KDA_INNER, std=0.5),
        norm(f"blk.{i}.ssm_norm.weight", HEAD),
        matrix(f"blk.{i}.attn_output", KDA_INNER, N_EMBD, gain=2.0),
    ]


LATENT, ROPE_PART = 32, 16
"""Multi-head latent attention: keys and values share `LATENT` numbers, `ROPE_PART` are rotated."""


def latent_attention(i: int) -> list[Tensor]:
    return [
        norm(f"blk.{i}.attn_kv_a_norm.weight", LATENT),
        matrix(f"blk.{i}.attn_q", N_EMBD, N_HEAD * (HEAD + ROPE_PART), gain=1.6),
        matrix(f"blk.{i}.attn_kv_a_mqa", N_EMBD, LATENT + ROPE_PART, gain=1.6),
        matrix(f"blk.{i}.attn_k_b", HEAD, LATENT, N_HEAD, gain=1.6),
        matrix(f"blk.{i}.attn_v_b", LATENT, HEAD, N_HEAD),
        matrix(f"blk.{i}.attn_output", N_HEAD * HEAD, N_EMBD, gain=1.4),
    ]


def lightning_attention(i: int) -> list[Tensor]:
    """MiniMax's linear attention; its decay is fixed by the number of heads."""
    return [
        norm(f"blk.{i}.attn_norm_2.weight", N_HEAD * HEAD),
        matrix(f"blk.{i}.attn_qkv", N_EMBD, 3 * N_HEAD * HEAD),
        matrix(f"blk.{i}.attn_gate", N_EMBD, N_HEAD * HEAD),
        matrix(f"blk.{i}.attn_output", N_HEAD * HEAD, N_EMBD, gain=2.0),
    ]


PLAMO_DT = 64
"""plamo2 computes the width of its time step: an embedding's sixteenth, but at least this."""


def plamo_mamba(i: int) -> list[Tensor]:
    return [
        matrix(f"blk.{i}.ssm_in", N_EMBD, 2 * D_INNER),
        vector(f"blk.{i}.ssm_conv1d.weight", D_CONV, D_INNER, std=0.6),
        matrix(f"blk.{i}.ssm_x", D_INNER, PLAMO_DT + 2 * D_STATE, gain=2.0),
        matrix(f"blk.{i}.ssm_dt", PLAMO_DT, N_SSM_HEAD),
        vector(f"blk.{i}.ssm_dt.bias", N_SSM_HEAD, std=0.5),
        decay_rate(f"blk.{i}.ssm_a", N_SSM_HEAD),
        vector(f"blk.{i}.ssm_d", N_SSM_HEAD, std=0.3),
        matrix(f"blk.{i}.ssm_out", D_INNER, N_EMBD, gain=1.4),
        norm(f"blk.{i}.ssm_dt_norm", PLAMO_DT),
        norm(f"blk.{i}.ssm_b_norm", D_STATE),
        norm(f"blk.{i}.ssm_c_norm", D_STATE),
    ]


def plamo_attention(i: int) -> list[Tensor]:
    return [
        matrix(f"blk.{i}.attn_qkv", N_EMBD, (N_HEAD + 2 * N_HEAD_KV) * HEAD),
        norm(f"blk.{i}.attn_q_norm.weight", HEAD, N_HEAD, scale=1.6),
        norm(f"blk.{i}.attn_k_norm.weight", HEAD, N_HEAD_KV, scale=1.6),
        matrix(f"blk.{i}.attn_output", N_HEAD * HEAD, N_EMBD, gain=1.4),
    ]


LORA = 16
WKV_HEAD = 64
"""Not `HEAD`: the AVX-512 kernel reads 64 floats at a time, past the end of a shorter head."""


def low_rank(i: int, name: str, rank: int, gain: float = 1.0) -> list[Tensor]:
    return [
        matrix(f"blk.{i}.time_mix_{name}1", N_EMBD, rank, gain=gain),
        matrix(f"blk.{i}.time_mix_{name}2", rank, N_EMBD, gain=gain),
    ]


def affine_norm(name: str) -> list[Tensor]:
    return [norm(f"{name}.weight", N_EMBD), vector(f"{name}.bias", N_EMBD)]


def rwkv6_time_mix(i: int) -> list[Tensor]:
    mix = f"blk.{i}.time_mix"
    projections = ("key", "value", "receptance", "gate")
    return [
        matrix(f"{mix}_w1", N_EMBD, 5 * LORA),
        matrix(f"{mix}_w2", LORA, N_EMBD, 5, gain=0.3),
        between(f"{mix}_lerp_x.weight", N_EMBD, 1, 1, low=0.0, high=1.0),
        between(f"{mix}_lerp_fused.weight", N_EMBD, 1, 1, 5, low=0.0, high=1.0),
        vector(f"{mix}_first.weight", WKV_HEAD, N_EMBD // WKV_HEAD, std=0.5),
        between(f"{mix}_decay.weight", N_EMBD, low=-6.0, high=-1.0),
        matrix(f"{mix}_decay_w1", N_EMBD, LORA),
        matrix(f"{mix}_decay_w2", LORA, N_EMBD, gain=0.5),
        *(matrix(f"{mix}_{name}", N_EMBD, N_EMBD) for name in projections),
        matrix(f"{mix}_output", N_EMBD, N_EMBD, gain=2.0),
        *affine_norm(f"{mix}_ln"),
    ]


def rwkv6_channel_mix(i: int) -> list[Tensor]:
    mix = f"blk.{i}.channel_mix"
    return [
        *rwkv7_channel_mix(i),
        between(f"{mix}_lerp_r.weight", N_EMBD, 1, 1, low=0.0, high=1.0),
        matrix(f"{mix}_receptance", N_EMBD, N_EMBD),
    ]


def rwkv7_time_mix(i: int) -> list[Tensor]:
    mix = f"blk.{i}.time_mix"
    return [
        between(f"{mix}_w0.weight", N_EMBD, low=-5.0, high=0.0),
        vector(f"{mix}_a0.weight", N_EMBD),
        vector(f"{mix}_v0.weight", N_EMBD),
        *(tensor for name in "wavg" for tensor in low_rank(i, name, LORA)),
        between(f"{mix}_lerp_fused.weight", N_EMBD, 1, 1, 6, low=0.0, high=1.0),
        norm(f"{mix}_k_k.weight", N_EMBD),
        norm(f"{mix}_k_a.weight", N_EMBD),
        vector(f"{mix}_r_k.weight", N_EMBD),
        *(matrix(f"{mix}_{name}", N_EMBD, N_EMBD) for name in ("key", "value", "receptance")),
        matrix(f"{mix}_output", N_EMBD, N_EMBD, gain=2.0),
        *affine_norm(f"{mix}_ln"),
    ]


def rwkv7_channel_mix(i: int) -> list[Tensor]:
    mix = f"blk.{i}.channel_mix"
    return [
        between(f"{mix}_lerp_k.weight", N_EMBD, 1, 1, low=0.0, high=1.0),
        matrix(f"{mix}_key", N_EMBD, N_FF),
        matrix(f"{mix}_value", N_FF, N_EMBD),
    ]


# --- the metadata that goes with them ------------------------------------------------------------


def size_keys(n_layer: int) -> dict[str, Value]:
    return {
        "context_length": N_CONTEXT,
        "embedding_length": N_EMBD,
        "block_count": n_layer,
        "feed_forward_length": N_FF,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def attention_keys(n_head_kv: int | list[int] = N_HEAD_KV) -> dict[str, Value]:
    """Head counts; in a list of key/value heads, one per layer, 0 marks a recurrent layer."""
    return {
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
    }


def mamba2_keys() -> dict[str, Value]:
    return {
        "ssm.conv_kernel": D_CONV,
        "ssm.inner_size": D_INNER,
        "ssm.state_size": D_STATE,
        "ssm.time_step_rank": N_SSM_HEAD,
        "ssm.group_count": N_GROUP,
    }


def mamba1_keys() -> dict[str, Value]:
    return {**mamba2_keys(), "ssm.time_step_rank": DT_RANK}


def delta_net_keys() -> dict[str, Value]:
    return {
        "ssm.conv_kernel": D_CONV,
        "ssm.inner_size": D_KEY * N_VALUE_HEAD,
        "ssm.state_size": D_KEY,
        "ssm.time_step_rank": N_VALUE_HEAD,
        "ssm.group_count": N_KEY_HEAD,
        "full_attention_interval": 4,
    }


def expert_keys(gate: int = SOFTMAX_GATE) -> dict[str, Value]:
    return {
        "expert_count": N_EXPERT,
        "expert_used_count": N_EXPERT_USED,
        "expert_feed_forward_length": N_FF_EXPERT,
        "expert_shared_feed_forward_length": N_FF_EXPERT,
        "expert_gating_func": gate,
    }


def kimi_keys() -> dict[str, Value]:
    return {
        "attention.kv_lora_rank": LATENT,
        "attention.key_length": LATENT + ROPE_PART,
        "attention.value_length": LATENT,
        "attention.key_length_mla": HEAD + ROPE_PART,
        "attention.value_length_mla": HEAD,
        "rope.dimension_count": ROPE_PART,
        "ssm.conv_kernel": D_CONV,
        "kda.head_dim": HEAD,
    }
