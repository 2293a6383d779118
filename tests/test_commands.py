"""The real command line on real tiny models, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import tiny_models


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep what these processes record out of the user's own state directory."""
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path / "state"))


COMMAND = [sys.executable, "-m", "orchestrator.cli.main"]


def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `orchestrator` with arguments and something piped in."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"ORCHESTRATOR_TRACE": ""},
    )


def _metadata_only(path: Path, architecture: str, **keys: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_string(key.replace("_", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _truncated(path: Path) -> Path:
    whole = tiny_models.build("lfm2").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


FAULTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "exist"),
    "directory": (lambda path: path.parent, "is a folder"),
    "empty": (lambda path: _written(path, b""), "is empty"),
    "truncated": (_truncated, "bytes"),
    "page": (lambda path: _written(path, b"<!DOCTYPE html><html></html>"), "HTML page"),
    "architecture": (lambda path: _metadata_only(path, "mambo9"), "mambo9"),
    "vocabulary": (lambda path: _metadata_only(path, "llama"), "vocabulary"),
    "projector": (lambda path: _metadata_only(path, "clip", general_type="mmproj"), "projector"),
}


@pytest.mark.models
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(fault: str, tmp_path: Path) -> None:
    make, told = FAULTS[fault]
    ended = run("chat", "hello", "-m", make(tmp_path / "model.gguf"))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert told in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.models
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    model = tiny_models.build("lfm2")
    ended = run("chat", "word " * 200, "-m", model, "--ctx", "256")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "the context holds 256;" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.models
def test_a_reply_is_json_with_usage_and_timings() -> None:
    model = tiny_models.build("mamba2")
    ended = run(
        "chat", "-m", model, "--json", "--temperature", "0", "--max-tokens", "9", stdin="hi"
    )
    assert ended.returncode == 0, ended.stderr
    reply = json.loads(ended.stdout)
    usage = reply["usage"]
    assert usage["cached_tokens"] + usage["prefilled_tokens"] == usage["prompt_tokens"]
    assert usage["completion_tokens"] == len(reply["tokens"])
    assert reply["finish_reason"] in ("stop", "length")


@pytest.mark.models
def test_the_cache_makes_no_difference_to_what_is_said() -> None:
    model = tiny_models.build("qwen35")
    said = [
        run("chat", "hello", "-m", model, "--temperature", "0", "--max-tokens", "20", *more).stdout
        for more in ([], ["--no-cache"])
    ]
    assert said[0] == said[1] != ""


@pytest.mark.models
def test_an_argument_that_the_template_never_reads_is_pointed_out() -> None:
    model = tiny_models.build("lfm2")
    ended = run(
        "chat", "hi", "-m", model, "--max-tokens", "2", "--template-arg", "enable_thinkin=1"
    )
    assert ended.returncode == 0
    assert "--template-arg enable_thinkin: the chat template never reads it" in ended.stderr
