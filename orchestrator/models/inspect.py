"""What is this file, and can it be opened as a model?

Answered before native code sees the file, from its first bytes, its header and its length; the
weights are not read. Whatever is wrong is a `ModelFileError` that says what the file is, what was
wanted, and what to do. It knows nothing of memory sizes and loads nothing.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from orchestrator.errors import ModelFileError
from orchestrator.models import architectures
from orchestrator.models.architectures import Memory
from orchestrator.models.header import (
    MAGIC,
    Cut,
    Header,
    Malformed,
    Scalar,
    TensorInfo,
    read_header,
)

Opener = Callable[[Path], BinaryIO]

_AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that llama.cpp can be expected to open.

    Of a model in several files, `path` is the first and the other values describe all of them.
    `n_ctx_train` and `n_vocab` are in tokens. `tensor_types` counts, per ggml type, the matrices
    that activations are multiplied with: they decide which kernels run. `metadata` holds the
    scalar keys only.
    """

    path: Path
    architecture: str
    name: str
    size_bytes: int
    n_ctx_train: int
    n_vocab: int
    chat_template: str | None
    tensor_types: Mapping[str, int]
    metadata: Mapping[str, Scalar]
    memory: Memory


def inspect(path: str | Path, opener: Opener = lambda path: path.open("rb")) -> ModelFile:
    """Describe a model file, or raise `ModelFileError`. `opener` opens it for binary reading."""
    path = Path(path)
    header = _read(path, opener)
    architecture = _architecture(path, header)
    shards = _shards(path, header, opener)
    tensors = [tensor for shard in (header, *shards.values()) for tensor in shard.tensors]
    if not tensors:
        raise _error(path, "holds a vocabulary and no weights", "take the file of the whole model")
    n_ctx_train, n_vocab = _sizes(path, architecture, header)
    template = header.scalars.get("tokenizer.chat_template")
    return ModelFile(
        path=path,
        architecture=architecture,
        name=_shown(header.scalars.get("general.name") or path.stem),
        size_bytes=sum(file.stat().st_size for file in (path, *shards)),
        n_ctx_train=n_ctx_train,
        n_vocab=n_vocab,
        chat_template=template if isinstance(template, str) else None,
        tensor_types=dict(Counter(tensor.type_name for tensor in tensors if _multiplies(tensor))),
        metadata=header.scalars,
        memory=architectures.memory_of(architecture),
    )


def _error(path: Path, what: str, remedy: str) -> ModelFileError:
    return ModelFileError(f'"{path}" {what}; {remedy}')


def _shown(value: object, limit: int = 60) -> str:
    """What a file says about itself, fit for a terminal: no control characters, not endless."""
    text = "".join(char if char.isprintable() else "?" for char in str(value)[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- is there a file? ---------------------------------------------------------------------------


def _read(path: Path, opener: Opener) -> Header:
    """Return the header of a complete GGUF file."""
    _check_place(path)
    try:
        with opener(path) as file:
            return _read_open(path, file)
    except PermissionError as error:
        remedy = "give this user the right to read it (chmod +r)"
        raise _error(path, "may not be read by this user", remedy) from error
    except OSError as error:
        raise _error(
            path, f"cannot be read: {error.strerror or error}", "check the disk"
        ) from error


def _check_place(path: Path) -> None:
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
        exists = is_folder or is_file or path.exists()
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror or error}", "check it") from error
    if not exists:
        raise _error(path, "does not exist", _suggestion(path))
    if is_folder:
        models = sorted(entry.name for entry in path.glob("*.gguf"))
        inside = f"name a file in it: {_some(models)}" if models else "it holds no .gguf file"
        raise _error(path, "is a folder, not a model file", inside)
    if not is_file:
        raise _error(path, "is not a regular file", "name a .gguf file")


def _some(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f'"{_shown(name)}"' for name in names[:limit]) + more


def _suggestion(path: Path) -> str:
    if not path.parent.is_dir():
        return f'the folder "{path.parent}" does not exist either; check the path'
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return "check the path"
    near = get_close_matches(path.name, names, n=3) or [n for n in names if n.endswith(".gguf")]
    return f"in that folder there is {_some(near)}" if near else "check the path"


# --- is it a complete GGUF file? ----------------------------------------------------------------


def _read_open(path: Path, file: BinaryIO) -> Header:
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise _error(path, "is empty", _AGAIN)
    with closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as pages:
        start = pages[:512]
        if not start.startswith(MAGIC):
            raise _error(path, f"is not a GGUF file but {_kind(start, size)}", "name a .gguf file")
        with memoryview(pages) as data:
            header = _parse(path, data)
    if header.expected_size > size:
        raise _error(
            path,
            f"is incomplete: {size:,} bytes, its header tells of {header.expected_size:,}",
            _AGAIN,
        )
    return header


def _parse(path: Path, data: memoryview) -> Header:
    try:
        return read_header(data)
    except Malformed as error:
        remedy = f"{_AGAIN}, or convert the model with a current llama.cpp"
        raise _error(path, f"has a GGUF header that cannot be used: {error}", remedy) from error
    except Cut as error:
        what = f"is incomplete or damaged: it ends after {len(data):,} bytes, inside its header"
        raise _error(path, what, _AGAIN) from error


_KINDS = (
    (b"version https://git-lfs", "a Git LFS pointer (fetch the real file with git lfs pull)"),
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint"),
    (b"\x80\x02", "a Python pickle, perhaps a PyTorch checkpoint"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"FUGG", "a GGUF file for big-endian machines"),
    *((magic, "a file in a GGML format from before GGUF") for magic in (b"tjgg", b"lmgg", b"fmgg")),
)


def _kind(start: bytes, size: int) -> str:
    """Say what a file that is not GGUF seems to be, from its first 512 bytes."""
    for magic, kind in _KINDS:
        if start.startswith(magic):
            return kind
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < size:
        return "a safetensors file (convert it with llama.cpp's convert_hf_to_gguf.py)"
    if re.match(rb"\s*<(!doctype html|html|head|\?xml)", start, re.IGNORECASE):
        return "an HTML page (a download link that asks for a login gives one)"
    if not start.strip(b"\0"):
        return "zero bytes, as of a download that did not finish"
    if start.lstrip()[:1] in (b"{", b"["):
        return "a JSON file"
    return f"something that begins with {start[:4].hex(' ')}"


# --- is it a model that can chat? ---------------------------------------------------------------

_OTHER_TYPES = {
    "adapter": ("is a LoRA adapter, not a model", "name the file of the base model"),
    "mmproj": ("is a multimodal projector, not a model", "name the language model's own file"),
    "imatrix": ("is an importance matrix, not a model", "name the model that it was made for"),
}


def _architecture(path: Path, header: Header) -> str:
    """Return the architecture, one that can chat here."""
    architecture = header.scalars.get("general.architecture")
    kind = str(header.scalars.get("general.type", ""))
    if architecture == "clip":
        kind = "mmproj"
    elif any(key.startswith("imatrix.") for key in (*header.scalars, *header.lengths)):
        kind = "imatrix"
    if kind in _OTHER_TYPES:
        raise _error(path, *_OTHER_TYPES[kind])
    if not isinstance(architecture, str) or not architecture:
        if "split.no" in header.scalars:
            _check_first(path, header)
        raise _error(path, "names no architecture", f"{_AGAIN}, or convert the model again")
    _check_architecture(path, architecture)
    return architecture


def _check_architecture(path: Path, architecture: str) -> None:
    if architecture in architectures.CHAT:
        return
    reason = architectures.NO_CHAT.get(architecture) or architectures.UNSUPPORTED.get(architecture)
    if reason:
        what = f'has the architecture "{architecture}", which cannot be used here: {reason}'
        raise _error(path, what, "choose another model")
    near = get_close_matches(architecture, architectures.CHAT, n=3)
    hint = f" (near names: {', '.join(sorted(near))})" if near else ""
    what = f'has the architecture "{_shown(architecture)}", which this llama.cpp does not know'
    remedy = "choose another model, or wait for a release with a newer llama.cpp"
    raise _error(path, what + hint, remedy)


def _integer(header: Header, key: str) -> int | None:
    value = header.scalars.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _sizes(path: Path, architecture: str, header: Header) -> tuple[int, int]:
    """Return the trained context and the vocabulary, both in tokens."""
    n_ctx_train = _integer(header, f"{architecture}.context_length")
    if not n_ctx_train or n_ctx_train < 1:
        what = f'lacks the key "{architecture}.context_length"'
        raise _error(path, what, f"{_AGAIN}, or convert the model again")
    n_vocab = header.lengths.get("tokenizer.ggml.tokens", 0)
    if n_vocab < 1 or not isinstance(header.scalars.get("tokenizer.ggml.model"), str):
        raise _error(path, "holds no tokenizer", "convert the model again, with its tokenizer")
    return n_ctx_train, n_vocab


_NOT_MULTIPLIED = re.compile(r"norm|lerp|conv(1d(_[qkv])?)?\.weight$|time_mix_first|token_types")


def _multiplies(tensor: TensorInfo) -> bool:
    """Tell matrices from convolutions, norms and other tensors that are used element by element."""
    wide = len(tensor.shape) > 1 and min(tensor.shape[:2]) > 1
    return wide and tensor.name.endswith(".weight") and not _NOT_MULTIPLIED.search(tensor.name)


# --- is it whole, if it is in several files? ----------------------------------------------------

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def _shard_path(path: Path, number: int, count: int) -> Path | None:
    """Return the path of shard `number`, counted from 1, or None if `path` is not named as one."""
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        return None
    return path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")


def _check_first(path: Path, header: Header) -> None:
    number, count = _integer(header, "split.no"), _integer(header, "split.count") or 0
    if number == 0:
        return
    first = _shard_path(path, 1, count)
    name = f'"{first.name}"' if first else "the one that ends in -00001-of-…"
    place = "?" if number is None else f"{number + 1:,}"
    raise _error(path, f"is part {place} of {count:,} of a model", f"name the first part, {name}")


def _shards(path: Path, header: Header, opener: Opener) -> dict[Path, Header]:
    """Return the other files of a model in several, each of them complete."""
    count = _integer(header, "split.count") or 0
    if count <= 1:
        return {}
    _check_first(path, header)
    others = [_shard_path(path, number, count) for number in range(2, min(count, 99_999) + 1)]
    paths = [other for other in others if other is not None]
    if not paths:
        what = f"is the first of {count:,} files but was renamed, so the others cannot be found"
        raise _error(path, what, f"call it …-00001-of-{count:05}.gguf, as it was")
    missing = [other.name for other in paths if not other.exists()]
    if missing:
        what = f"is the first of {count:,} files, {len(missing):,} of which are missing"
        raise _error(path, what, f"put {_some(missing)} beside it")
    return {other: _read(other, opener) for other in paths}
