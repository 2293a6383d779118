"""Every file that is no model is refused in words, before native code sees it."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import ModelFileError
from orchestrator.models import architectures
from orchestrator.models.header import TENSOR_TYPES, Cut, Malformed, read_header
from orchestrator.models.inspect import ModelFile, inspect

U32, I32, F32, STRING, ARRAY = 4, 5, 6, 8, 9


@dataclass(frozen=True)
class Strings:
    """An array of `count` strings, each of the same text."""

    count: int
    text: str = "a"


Value = str | int | float | Strings
Table = Sequence[tuple[str, tuple[int, ...], int]]

KEYS: dict[str, Value] = {
    "general.architecture": "llama",
    "general.name": "small",
    "llama.context_length": 2048,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": Strings(5),
    "tokenizer.chat_template": "{{ messages }}",
}
TENSORS: Table = (("token_embd.weight", (32, 5), 8), ("output_norm.weight", (32,), 0))


def packed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + packed(value)
    if isinstance(value, Strings):
        head = struct.pack("<IIQ", ARRAY, STRING, value.count)
        return head + packed(value.text) * value.count
    code, kind = ("f", F32) if isinstance(value, float) else ("I", U32)
    return struct.pack(f"<I{code}", kind, value)


def tensor_table(tensors: Table, alignment: int = 32) -> tuple[bytes, int]:
    """Return the table and the padded length of the data."""
    rows, end = b"", 0
    for name, shape, kind in tensors:
        _, block, size = TENSOR_TYPES[kind]
        count = 1
        for extent in shape:
            count *= extent
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        rows += packed(name) + dims + struct.pack("<IQ", kind, end)
        end += -(-count // block * size // alignment) * alignment
    return rows, end


def gguf_bytes(
    keys: Mapping[str, Value] = KEYS,
    tensors: Table = TENSORS,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF file of at most a megabyte; `counts` lies about the numbers of tensors and keys."""
    n_tensor, n_key = counts or (len(tensors), len(keys))
    body = b"GGUF" + struct.pack("<IQQ", version, n_tensor, n_key)
    body += b"".join(packed(key) + value_bytes(value) for key, value in keys.items())
    table, data_length = tensor_table(tensors)
    body += table
    return body + b"\0" * (-len(body) % 32) + b"\0" * min(data_length, 1 << 20)


def written(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path: Path, opener: Callable[[Path], BinaryIO] | None = None) -> str:
    """The message with which a file is refused; it must name the file and a remedy."""
    with pytest.raises(ModelFileError) as caught:
        inspect(path) if opener is None else inspect(path, opener)
    message = str(caught.value)
    assert str(path) in message
    assert ";" in message
    return message


# --- a model ------------------------------------------------------------------------------------


def test_a_model_file_is_described(tmp_path: Path) -> None:
    content = gguf_bytes()
    path = written(tmp_path, content)
    file = inspect(path)
    assert file == ModelFile(
        path=path,
        architecture="llama",
        name="small",
        size_bytes=len(content),
        n_ctx_train=2048,
        n_vocab=5,
        chat_template="{{ messages }}",
        tensor_types={"Q8_0": 1},
        metadata={key: value for key, value in KEYS.items() if not isinstance(value, Strings)},
        memory="attention",
    )


def test_a_model_without_a_template_or_a_name_is_described_too(tmp_path: Path) -> None:
    keys = {k: v for k, v in KEYS.items() if k not in ("general.name", "tokenizer.chat_template")}
    file = inspect(written(tmp_path, gguf_bytes(keys), "nameless.gguf"))
    assert (file.name, file.chat_template) == ("nameless", None)


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_the_memory_of_a_model_follows_from_its_architecture(architecture: str) -> None:
    expected = (
        "hybrid"
        if architecture in tiny_models.HYBRID
        else "recurrent"
        if architecture in tiny_models.RECURRENT
        else "attention"
    )
    file = inspect(tiny_models.build(architecture))
    assert (file.memory, set(file.tensor_types)) == (expected, {"F32"})


def test_convolutions_and_norms_do_not_count_as_matrices() -> None:
    path = tiny_models.build("granitehybrid", quantised="Q8_0")
    assert set(inspect(path).tensor_types) == {"Q8_0"}


def test_a_file_of_fifty_gigabytes_is_described_in_under_two_seconds(tmp_path: Path) -> None:
    keys = {
        **KEYS,
        "tokenizer.ggml.tokens": Strings(260_000, "token"),
        "tokenizer.ggml.merges": Strings(500_000, "to ken"),
    }
    table, data_length = tensor_table([("token_embd.weight", (1 << 18, 350_000), 3)])
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys))
    head += b"".join(packed(key) + value_bytes(value) for key, value in keys.items()) + table
    path = written(tmp_path, head)
    os.truncate(path, len(head) + 32 + data_length)  # sparse: takes no room
    start = time.perf_counter()
    assert inspect(path).size_bytes > 50e9
    assert time.perf_counter() - start < 2.0


# --- no file ------------------------------------------------------------------------------------


def test_a_missing_file_is_answered_with_near_names(tmp_path: Path) -> None:
    written(tmp_path, gguf_bytes(), "qwen-4b.gguf")
    message = refusal(tmp_path / "qwen-4.gguf")
    assert "does not exist" in message
    assert '"qwen-4b.gguf"' in message


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f'the folder "{tmp_path / "none"}" does not exist' in refusal(tmp_path / "none" / "m")


def test_a_folder_is_answered_with_the_models_in_it(tmp_path: Path) -> None:
    written(tmp_path, gguf_bytes())
    assert 'is a folder, not a model file; name a file in it: "model.gguf"' in refusal(tmp_path)


def test_a_device_is_no_model(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    assert "is not a regular file" in refusal(fifo)


def test_a_path_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path / ("n" * 300))


def test_a_file_that_may_not_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    def deny(path: Path) -> BinaryIO:
        raise PermissionError(13, "Permission denied", str(path))

    message = refusal(written(tmp_path, gguf_bytes()), deny)
    assert "may not be read by this user" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file; the opener covers it")
def test_the_file_system_s_own_refusal_is_understood(tmp_path: Path) -> None:
    path = written(tmp_path, gguf_bytes())
    path.chmod(0)
    assert "may not be read by this user" in refusal(path)


def test_a_disk_that_fails_is_not_the_file_s_fault(tmp_path: Path) -> None:
    def fail(path: Path) -> BinaryIO:
        raise OSError(5, "Input/output error", str(path))

    assert "Input/output error; check the disk" in refusal(written(tmp_path, b"GGUF"), fail)


# --- not a GGUF file ----------------------------------------------------------------------------


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    assert "is empty" in refusal(written(tmp_path, b""))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<!DOCTYPE html><html>Sign in</html>", "an HTML page"),
        (b"\n <html lang='en'>", "an HTML page"),
        (struct.pack("<Q", 20) + b'{"a":{"dtype":"F16"}}', "a safetensors file"),
        (b"PK\x03\x04" + b"\0" * 60, "a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (b"\x1f\x8b" + b"\0" * 20, "a gzip archive"),
        (b"lmgg" + b"\0" * 20, "a GGML format from before GGUF"),
        (b'{"error": "not found"}', "a JSON file"),
        (b"\0" * 4096, "zero bytes"),
        (b"\x01\x02", "something that begins with 01 02"),
    ],
)
def test_a_file_of_another_kind_is_recognised(tmp_path: Path, content: bytes, kind: str) -> None:
    message = refusal(written(tmp_path, content))
    assert f"is not a GGUF file but {kind}" in message or f"but a file in {kind}" in message


def test_every_cut_of_a_file_is_found_and_a_cut_in_the_data_is_counted(tmp_path: Path) -> None:
    whole = gguf_bytes()
    needed = read_header(memoryview(whole)).expected_size
    for length in range(4, len(whole)):
        path = written(tmp_path, whole[:length])
        if length < needed:
            assert "incomplete" in refusal(path)
        else:  # the padding behind the last tensor may be missing
            inspect(path)
    message = refusal(written(tmp_path, whole[: needed - 1]))
    assert f"is incomplete: {needed - 1:,} bytes, its header tells of {needed:,}" in message


def test_an_unknown_version_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, gguf_bytes(version=7)))
    assert "its GGUF version is 7, known are 2 and 3" in message


def test_a_big_endian_file_is_recognised(tmp_path: Path) -> None:
    assert "big-endian" in refusal(written(tmp_path, gguf_bytes(version=3 << 24)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gguf_bytes(counts=(1 << 40, 6)), "claims 1,099,511,627,776 tensors"),
        (gguf_bytes(counts=(2, (1 << 64) - 1)), "claims -1 keys"),
        (gguf_bytes({**KEYS, "": 1}), "a key is empty or appears twice"),
        (gguf_bytes({**KEYS, "general.alignment": 24}), "alignment is not a power of two"),
        (gguf_bytes({**KEYS, "general.alignment": "32"}), "alignment is not a power of two"),
        (gguf_bytes(tensors=(*TENSORS, TENSORS[0])), "a tensor appears twice"),
        (gguf_bytes(tensors=[("t" * 64, (32,), 0)]), "at most 63"),
        (gguf_bytes(tensors=[("t", (1, 1, 1, 1, 1), 0)]), "claims 5 dimensions"),
        (gguf_bytes(tensors=[("t", (1 << 40, 1 << 40), 0)]), "shape of a tensor is impossible"),
        (gguf_bytes(tensors=[("t", (33,), 8)]), "rows of a Q8_0 tensor are not multiples of 32"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused_by_that_rule(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    message = refusal(written(tmp_path, content))
    assert "has a GGUF header that cannot be used" in message
    assert reason in message


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (struct.pack("<I", 99), "unknown type 99"),
        (struct.pack("<IIQ", ARRAY, ARRAY, 1) * 1000, "elements of the unknown type 9"),
        (struct.pack("<IIQ", ARRAY, STRING, 1 << 50), "strings in an array"),
        (struct.pack("<IIQ", ARRAY, U32, 1 << 62), "ends after"),
        (struct.pack("<IQ", STRING, 1 << 40), "at most"),
    ],
)
def test_a_value_that_cannot_be_is_refused_without_being_allocated(
    tmp_path: Path, value: bytes, reason: str
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + packed("k")
    assert reason in refusal(written(tmp_path, head + value + b"\0" * 64))


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    content = bytearray(gguf_bytes())
    row = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    content[row : row + 8] = struct.pack("<Q", 0)
    assert "do not lie one behind the other" in refusal(written(tmp_path, bytes(content)))


# --- a GGUF file that is not a model that can chat ----------------------------------------------


def renamed(architecture: str, **more: Value) -> bytes:
    keys = {**KEYS, "general.architecture": architecture, f"{architecture}.context_length": 64}
    return gguf_bytes({**keys, **{key.replace("__", "."): value for key, value in more.items()}})


def test_an_unknown_architecture_is_answered_with_near_names(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, renamed("qwen36")))
    assert '"qwen36", which this llama.cpp does not know (near names: ' in message
    assert "qwen3" in message


@pytest.mark.parametrize("architecture", sorted(architectures.UNSUPPORTED))
def test_a_memory_that_cannot_be_kept_is_said_to_be_unsupported(
    tmp_path: Path, architecture: str
) -> None:
    message = refusal(written(tmp_path, renamed(architecture)))
    assert f'"{architecture}", which cannot be used here: its memory has parts' in message


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("bert", "embeddings"), ("dream", "diffusion"), ("t5", "encoder"), ("eagle3", "drafts")],
)
def test_an_architecture_that_cannot_chat_is_refused_with_the_reason(
    tmp_path: Path, architecture: str, reason: str
) -> None:
    assert reason in refusal(written(tmp_path, renamed(architecture)))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gguf_bytes(tensors=[]), "holds a vocabulary and no weights"),
        (renamed("clip"), "multimodal projector"),
        (renamed("llama", general__type="mmproj"), "multimodal projector"),
        (renamed("llama", general__type="adapter"), "LoRA adapter"),
        (gguf_bytes({"general.type": "imatrix", "imatrix.chunk_count": 3}), "importance matrix"),
        (gguf_bytes({"general.name": "x"}), "names no architecture"),
        (gguf_bytes({**KEYS, "general.architecture": 7}), "names no architecture"),
        (gguf_bytes({"general.architecture": "llama"}), 'lacks the key "llama.context_length"'),
        (
            gguf_bytes({"general.architecture": "llama", "llama.context_length": 64}),
            "holds no tokenizer",
        ),
    ],
)
def test_a_gguf_file_that_is_no_model_is_told_apart(
    tmp_path: Path, content: bytes, what: str
) -> None:
    assert what in refusal(written(tmp_path, content))


def test_what_a_file_says_about_itself_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, renamed("\x1b[2Jllama" + "x" * 5000)))
    assert "\x1b" not in message
    assert len(message) < 500


# --- a model in several files -------------------------------------------------------------------


def shard(folder: Path, number: int, count: int = 3, name: str | None = None) -> Path:
    keys = {"split.no": number - 1, "split.count": count}
    own: Mapping[str, Value] = {**KEYS, **keys} if number == 1 else keys
    tensors = TENSORS if number == 1 else [(f"blk.{number}.attn_q.weight", (32, 32), 3)]
    path = name or f"big-{number:05}-of-{count:05}.gguf"
    return written(folder, gguf_bytes(own, tensors), path)


def test_a_model_in_several_files_is_described_as_one(tmp_path: Path) -> None:
    first, *others = (shard(tmp_path, number) for number in (1, 2, 3))
    file = inspect(first)
    assert file.tensor_types == {"Q8_0": 1, "Q4_1": 2}
    assert file.size_bytes == sum(path.stat().st_size for path in (first, *others))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    shard(tmp_path, 2)
    message = refusal(shard(tmp_path, 1))
    assert "the first of 3 files, 1 of which are missing" in message
    assert '"big-00003-of-00003.gguf"' in message


def test_a_later_part_is_answered_with_the_name_of_the_first(tmp_path: Path) -> None:
    shard(tmp_path, 1)
    message = refusal(shard(tmp_path, 2))
    assert 'is part 2 of 3 of a model; name the first part, "big-00001-of-00003.gguf"' in message


def test_a_first_part_that_was_renamed_is_told_its_old_name(tmp_path: Path) -> None:
    message = refusal(shard(tmp_path, 1, name="big.gguf"))
    assert "was renamed" in message
    assert "-00001-of-00003.gguf" in message


def test_a_later_part_that_is_incomplete_is_named(tmp_path: Path) -> None:
    first = shard(tmp_path, 1)
    second, _ = shard(tmp_path, 2), shard(tmp_path, 3)
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"big-00002-of-00003\.gguf.*is incomplete"):
        inspect(first)


# --- anything at all ----------------------------------------------------------------------------

WHOLE = gguf_bytes({**KEYS, "split.no": 0, "split.count": 1, "general.alignment": 32})


def judged(content: bytes) -> None:
    """Parse; the two refusals are the only exceptions allowed."""
    with suppress(Malformed, Cut):
        read_header(memoryview(content))


@settings(max_examples=500, deadline=500)
@given(st.lists(st.tuples(st.integers(4, len(WHOLE) - 1), st.integers(0, 255)), max_size=8))
def test_a_header_with_changed_bytes_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for place, byte in changes:
        content[place] = byte
    judged(bytes(content))


@settings(max_examples=300, deadline=500)
@given(st.integers(4, len(WHOLE) - 8), st.integers(0, (1 << 64) - 1))
def test_a_header_with_any_length_in_it_is_read_or_refused(place: int, length: int) -> None:
    judged(WHOLE[:place] + struct.pack("<Q", length) + WHOLE[place + 8 :])


@settings(max_examples=300, deadline=500)
@given(st.binary(max_size=200))
def test_noise_behind_the_magic_is_read_or_refused(noise: bytes) -> None:
    judged(b"GGUF" + struct.pack("<I", 3) + noise)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(8, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_file_is_described_or_refused(tmp_path: Path, place: int, byte: int) -> None:
    with suppress(ModelFileError):
        inspect(written(tmp_path, WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]))


# --- the tables ---------------------------------------------------------------------------------


def test_the_tensor_types_are_those_of_the_gguf_package() -> None:
    theirs = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES
    }
    # The package on the index still has the size that Q8_1 had before it was made smaller.
    theirs.pop(9)
    assert {number: TENSOR_TYPES[number] for number in theirs} == theirs


def test_no_architecture_is_in_two_lists() -> None:
    lists = (
        architectures.ATTENTION,
        architectures.HYBRID,
        architectures.RECURRENT,
        architectures.NO_CHAT,
        architectures.UNSUPPORTED,
    )
    assert sum(map(len, lists)) == len(set().union(*lists))
