"""Real tiny models behind the engine, and a count of what llama.cpp was really given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tiny_models

from orchestrator.engine.engine import Engine
from orchestrator.engine.exactness import exacted
from orchestrator.models.demo import ensure_demo
from orchestrator.models.inspect import inspect
from orchestrator.runtime.llama import LlamaRuntime, Settings, open_llama

TEMPLATES = Path(__file__).parent / "templates"
N_CONTEXT = 2048
DEMO = "demo"


def path_of(model: str) -> Path:
    """Return the file of ``demo`` or a tiny model (``lfm2``, ``lfm2 Q8_0``), built if need be."""
    if model == DEMO:
        return ensure_demo(print)
    architecture, _, quantised = model.partition(" ")
    return tiny_models.build(architecture, quantised or None)


def as_shipped(architecture: str, kind: int) -> Path:
    """Return a tiny model as llama.cpp quantises it (`kind` is a llama_ftype), built if need be.

    Unlike `path_of` it leaves in F32 what models are really shipped with, such as routers.
    """
    plain = tiny_models.build(architecture)
    path = plain.with_name(f"{architecture}-shipped-{kind}.gguf")
    if not path.exists():
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = kind
        draft = path.with_suffix(f".{os.getpid()}")
        if llama_cpp.llama_model_quantize(bytes(plain), bytes(draft), parameters):
            raise RuntimeError(f"llama.cpp did not quantise {plain}")
        draft.replace(path)
    return path


@contextmanager
def open_runtime(model: str, **settings: Any) -> Iterator[LlamaRuntime]:
    """Open a model's runtime with small sizes and close it in the end."""
    sizes = {"n_context": 512, "n_sequences": 6, **settings}
    runtime = open_llama(path_of(model), Settings(**sizes))
    try:
        yield runtime
    finally:
        runtime.close()


@contextmanager
def open_exact(model: str | Path, **settings: Any) -> Iterator[LlamaRuntime]:
    """Open a model's runtime so that replies are exact, as the engine would; one thread."""
    sizes = {"n_context": 512, "n_sequences": 8, "threads": 1, **settings}
    path = model if isinstance(model, Path) else path_of(model)
    runtime = open_llama(path, replace(exacted(inspect(path), Settings(**sizes)), **settings))
    try:
        yield runtime
    finally:
        runtime.close()


@contextmanager
def open_engine(
    model: str, template: str = "chatml", *, n_context: int = N_CONTEXT, cached: bool = True
) -> Iterator[Engine]:
    """Open an engine over a model as a user would; `chatml` is the template they all bring."""
    file = None if template == "chatml" else TEMPLATES / f"{template}.jinja"
    checkpoints = None if cached else 0
    with Engine.open(
        path_of(model), ctx=n_context, chat_template=file, checkpoints=checkpoints
    ) as engine:
        yield engine


class DecodeCount:
    """The tokens handed to `llama_decode`, counted there and nowhere else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        decode = llama_cpp.llama_decode

        def counting(context: Any, batch: Any) -> int:
            self.tokens += batch.n_tokens
            return int(decode(context, batch))

        monkeypatch.setattr(llama_cpp, "llama_decode", counting)

    def taken(self) -> int:
        """Return the count since the last call."""
        tokens, self.tokens = self.tokens, 0
        return tokens
