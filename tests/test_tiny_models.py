"""The tiny models are what the other tests take them for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import jinja2
import llama_cpp.llama_cpp as api
import numpy as np
import pytest
import tiny_models
from plain_llama import Plain, opened, zeroed
from tiny_models import ARCHITECTURES, ATTENTION, HYBRID, RECURRENT, SPECIALS, TOKEN, build

pytestmark = pytest.mark.models

ROOT = Path(__file__).resolve().parent.parent
CLOSE = 0.01
"""Two best logits nearer than this count as a near tie."""


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


QUESTIONS = [chat(text) for text in ("Who are you?", "Who am I?", "Name three colours.", "Why?")]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def plain(request: pytest.FixtureRequest) -> Iterator[Plain]:
    with opened(build(request.param), n_thread=1) as model:
        model.architecture = request.param  # type: ignore[attr-defined]
        yield model


def architecture(plain: Plain) -> str:
    return str(plain.architecture)  # type: ignore[attr-defined]


def test_llama_cpp_agrees_on_the_kind_of_memory(plain: Plain) -> None:
    kind = (api.llama_model_is_hybrid(plain.model), api.llama_model_is_recurrent(plain.model))
    expected = {
        **dict.fromkeys(ATTENTION, (False, False)),
        **dict.fromkeys(HYBRID, (True, False)),
        **dict.fromkeys(RECURRENT, (False, True)),
    }
    assert kind == expected[architecture(plain)]
    window = tiny_models.WINDOW if architecture(plain) == "gemma3" else 0
    assert api.llama_model_n_swa(plain.model) == window


def test_replies_vary_with_the_prompt_and_are_long_enough(plain: Plain) -> None:
    replies = []
    for question in QUESTIONS:
        plain.clear()
        replies.append(plain.reply(plain.feed(plain.tokens(question)), 40))
    assert len({tuple(reply) for reply in replies}) == len(QUESTIONS)
    assert all(len(set(reply)) > len(reply) // 3 for reply in replies), "a loop"
    assert max(map(len, replies)) >= 30


def test_logits_are_finite_and_winners_are_clear(plain: Plain) -> None:
    gaps = []
    for question in QUESTIONS:
        plain.clear()
        logits = plain.feed(plain.tokens(question))
        for _ in range(20):
            assert np.isfinite(logits).all()
            second, first = np.sort(logits)[-2:]
            gaps.append(first - second)
            logits = plain.feed([int(logits.argmax())])
    assert np.mean(np.array(gaps) < CLOSE) < 0.05
    assert np.median(gaps) > 50 * CLOSE


def test_only_printable_text_and_the_end_of_a_turn_are_generated(plain: Plain) -> None:
    plain.clear()
    reply = plain.reply(plain.feed(plain.tokens(QUESTIONS[0])), 60)
    text = plain.text(token for token in reply if token != TOKEN["<|im_end|>"])  # type: ignore[arg-type]
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    assert plain.tokens(text) == [token for token in reply if token < 256]


def test_a_lost_or_foreign_state_moves_the_logits(plain: Plain) -> None:
    if architecture(plain) in ATTENTION:
        pytest.skip("no recurrent state")
    mine, other = (plain.tokens(chat(text)) for text in ("Tell me of Rome.", "Bake me bread!!!"))
    logits = {}
    plain.clear()
    plain.feed(other[:20])
    foreign = plain.save_recurrent()
    for name in ("right", "foreign", "lost"):
        plain.clear()
        plain.feed(mine[:20])
        if name != "right":
            state = foreign if name == "foreign" else zeroed(plain.save_recurrent())
            plain.load_recurrent(state)
        logits[name] = plain.feed(mine[20:])
    for name in ("foreign", "lost"):
        assert np.abs(logits[name] - logits["right"]).max() > 0.5, name


def test_a_token_is_a_byte_or_a_special_token(plain: Plain) -> None:
    assert plain.tokens("aé\n") == [*"aé\n".encode()]
    assert plain.tokens("".join(SPECIALS)) == list(TOKEN.values())


@pytest.mark.parametrize("quantised", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen35", "granitehybrid", "rwkv7"])
def test_a_quantised_model_loads_too(name: str, quantised: str) -> None:
    with opened(build(name, quantised), n_thread=1) as plain:
        assert np.isfinite(plain.feed(plain.tokens(QUESTIONS[0]))).all()


def test_two_builds_are_equal(tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "again.gguf", "falcon-h1", None)
    assert (tmp_path / "again.gguf").read_bytes() == build("falcon-h1").read_bytes()


def test_two_processes_may_build_the_same_model_at_once(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "tiny_models.py"), "jamba"]
    environment = {**os.environ, "ORCHESTRATOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    built = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in built] == [build("jamba").read_bytes()]


def test_the_template_drops_the_thinking_opener_from_the_history() -> None:
    field = gguf.GGUFReader(build("llama")).fields["tokenizer.chat_template"]
    template = jinja2.Template(field.contents())
    user = {"role": "user", "content": "Hi"}
    opening = template.render(messages=[user], add_generation_prompt=True, enable_thinking=True)
    later = template.render(messages=[user, {"role": "assistant", "content": "Ho"}])
    assert opening.endswith("<|im_start|>assistant\n<think>\n")
    assert not later.startswith(opening)
    assert later.startswith(template.render(messages=[user]))


def test_the_template_shows_tools_and_calls() -> None:
    template = jinja2.Template(tiny_models.CHAT_TEMPLATE)
    call = {"function": {"name": "now", "arguments": {}}}
    text = template.render(
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "noon"},
        ],
        tools=[{"type": "function"}],
    )
    assert text.startswith(
        '<|im_start|>system\nBe short.\n\nTools:\n{"type": "function"}<|im_end|>'
    )
    called = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
    assert json.loads(called) == call["function"]
    assert text.count("Be short.") == 1


def test_the_script_builds_what_is_named() -> None:
    command = [sys.executable, str(ROOT / "tests" / "tiny_models.py")]
    result = subprocess.run([*command, "llama"], capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()) == build("llama")
    wrong = subprocess.run([*command, "lama"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "unknown: lama" in wrong.stderr) == (2, True)
