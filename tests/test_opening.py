"""What is refused before a model is opened, and what is chosen for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from orchestrator.engine.engine import Engine
from orchestrator.engine.exactness import steadied
from orchestrator.engine.opening import Choices, available_memory
from orchestrator.errors import ConfigError, InvalidArgument
from orchestrator.models.inspect import inspect
from orchestrator.runtime.llama import Settings


def test_more_threads_than_cores_are_refused_with_both_numbers() -> None:
    cores = len(os.sched_getaffinity(0))
    Choices(threads=cores)
    with pytest.raises(InvalidArgument, match=rf"threads is 9999.* {cores} cores"):
        Choices(threads=9999)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ctx", 0), ("threads", 0), ("checkpoints", -1), ("history", -1), ("gpu_layers", -2)],
)
def test_a_choice_out_of_range_is_refused_with_its_name(name: str, value: int) -> None:
    choice: dict[str, Any] = {name: value}
    with pytest.raises(InvalidArgument, match=name):
        Choices(**choice)


@pytest.mark.models
def test_more_checkpoints_than_llama_cpp_holds_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="255"):
        Engine.open(tiny_models.build("lfm2"), checkpoints=256)


@pytest.mark.models
def test_a_file_that_is_no_chat_template_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("Dear diary, today I read {{ nothing }}.")
    with pytest.raises(ConfigError, match="never reads the messages"):
        Engine.open(tiny_models.build("lfm2"), chat_template=file)


@pytest.mark.models
def test_a_context_beyond_the_model_s_own_is_noted() -> None:
    path = tiny_models.build("lfm2")
    trained = inspect(path).n_ctx_train
    with Engine.open(path, ctx=trained + 256) as engine:
        assert any(f"{trained:,}" in note for note in engine.notes)
    with Engine.open(path, ctx=256) as engine:
        assert engine.notes == ()


@pytest.mark.models
def test_the_number_of_sequences_follows_from_the_size_of_a_state() -> None:
    with Engine.open(tiny_models.build("lfm2"), ctx=256) as engine:
        assert engine.model.n_sequences == 32
        assert engine.model.state_bytes < 100_000
    with Engine.open(tiny_models.build("lfm2"), ctx=256, checkpoints=5) as engine:
        assert engine.model.n_sequences == 6
    assert available_memory() > 1 << 20


@pytest.mark.models
@pytest.mark.parametrize(
    ("model", "quantised", "type_v", "exact"),
    [
        ("granitehybrid", "Q4_1", 8, True),
        ("granitehybrid", None, 8, False),
        ("granitehybrid", "Q8_0", 1, False),
        ("kimi-linear", None, 1, False),
    ],
)
def test_values_are_kept_apart_from_keys_where_that_makes_replies_steady(
    model: str, quantised: str | None, type_v: int, exact: bool
) -> None:
    kernels = steadied(inspect(tiny_models.build(model, quantised)), Settings())
    assert (kernels.settings.type_v, kernels.exact) == (type_v, exact)
