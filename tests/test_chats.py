"""Real chats on real models: warm from turn to turn, and the same words as without a cache."""

from __future__ import annotations

import contextlib
import threading
from contextlib import ExitStack

import pytest
import tiny_models
from real import DEMO, DecodeCount, open_engine

from orchestrator.engine.engine import Engine
from orchestrator.engine.request import GREEDY, Outcome, Request
from orchestrator.errors import EngineClosed, InvalidArgument

N_TURNS = 10
REUSE_SLACK = 8
"""Tokens beyond the new text that a turn may evaluate, and all that asking again may."""

QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which one is larger?",
    "Name a river there.",
    "What colour is the sky?",
    "Why?",
    "Say it in one short sentence.",
    "Count to five.",
    "What was my first question?",
    "Goodbye!",
)

Message = dict[str, object]


class Pair:
    """The same chat on a cached engine and on one without a cache."""

    def __init__(self, warm: Engine, cold: Engine, count: DecodeCount) -> None:
        self.warm, self.cold, self.count = warm, cold, count
        self.messages: list[Message] = []
        self.input_end = 0

    def turn(self, question: str, max_tokens: int) -> None:
        """Ask, ask again, compare with the uncached engine, and note the reply in the history."""
        self.messages.append({"role": "user", "content": question})
        asked = self.ask(self.warm, max_tokens)
        again = self.ask(self.warm, max_tokens)
        uncached = self.ask(self.cold, max_tokens)
        assert uncached.usage.cached_tokens == 0
        assert asked.tokens == uncached.tokens, f"the warm reply parts at {question!r}"
        assert again.tokens == uncached.tokens, f"asked again, the reply parts at {question!r}"
        self.check_reuse(asked, again)
        self.input_end = self.warm.encode(self.messages).turn
        self.messages.append({"role": "assistant", "content": uncached.text})

    def ask(self, engine: Engine, max_tokens: int) -> Outcome:
        """Return the reply, having compared what it reports with the decode call."""
        self.count.taken()
        outcome = engine.chat(self.messages, sampling=GREEDY, max_tokens=max_tokens).outcome()
        usage = outcome.usage
        ended = outcome.finish_reason == "stop"  # an end token was sampled and is not in `tokens`
        fed_back = len(outcome.tokens) - (0 if ended else 1)
        assert self.count.taken() == usage.prefilled_tokens + fed_back
        assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
        return outcome

    def check_reuse(self, asked: Outcome, again: Outcome) -> None:
        """Assert that only what is new was evaluated."""
        if self.input_end:
            new = asked.usage.prompt_tokens - self.input_end
            assert asked.usage.prefilled_tokens <= new + REUSE_SLACK
            assert asked.usage.seeded_from is not None
        assert again.usage.prefilled_tokens <= REUSE_SLACK


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> DecodeCount:
    """Count what every engine of the test hands to llama.cpp."""
    return DecodeCount(monkeypatch)


def chat(model: str, template: str, count: DecodeCount, max_tokens: int) -> None:
    """Hold a ten-turn chat warm and cold, one model process at a time."""
    with ExitStack() as stack:
        warm = stack.enter_context(open_engine(model, template))
        cold = stack.enter_context(open_engine(model, template, cached=False))
        pair = Pair(warm, cold, count)
        for question in QUESTIONS:
            pair.turn(question, max_tokens)
        assert warm.stats().counters.recoveries == 0


@pytest.mark.models
@pytest.mark.parametrize("template", ["chatml", "thinking", "empty_think"])
@pytest.mark.parametrize("model", tiny_models.ARCHITECTURES)
def test_ten_turns_on_a_tiny_model_are_warm_and_as_uncached(
    model: str, template: str, count: DecodeCount
) -> None:
    chat(model, template, count, max_tokens=24)


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.parametrize("template", ["chatml", "thinking", "empty_think"])
def test_ten_turns_on_the_demo_model_are_warm_and_as_uncached(
    template: str, count: DecodeCount
) -> None:
    chat(DEMO, template, count, max_tokens=24)


@pytest.mark.models
@pytest.mark.parametrize("model", ["lfm2", "qwen35", "mamba2", "llama"])
def test_thirty_turns_never_run_out_of_sequences_or_cells(model: str) -> None:
    with open_engine(model, "thinking", n_context=4096) as engine:
        messages: list[Message] = []
        input_end = 0
        for turn in range(30):
            messages.append({"role": "user", "content": f"question {turn}?"})
            outcome = engine.chat(messages, sampling=GREEDY, max_tokens=16).outcome()
            assert outcome.usage.cached_tokens >= input_end
            input_end = engine.encode(messages).turn
            messages.append({"role": "assistant", "content": outcome.text})
        stats = engine.stats()
        assert stats.counters.recoveries == 0
        assert stats.occupancy.sequences_used <= stats.occupancy.sequences_total


@pytest.mark.models
@pytest.mark.parametrize("model", ["lfm2", "mamba2", "rwkv7", "llama"])
def test_a_full_context_ends_the_reply_and_the_next_one_is_right(model: str) -> None:
    question: list[Message] = [{"role": "user", "content": "go on " * 20}]
    with open_engine(model, n_context=256) as engine:
        n_prompt = len(engine.encode(question).tokens)
        for _ in range(2):
            outcome = engine.chat(question, sampling=GREEDY).outcome()
            if outcome.finish_reason == "length":
                assert len(outcome.tokens) == 256 - n_prompt + 1
        with open_engine(model, n_context=256, cached=False) as cold:
            wanted = cold.chat(question, sampling=GREEDY).outcome()
        assert (outcome.tokens, outcome.finish_reason) == (wanted.tokens, wanted.finish_reason)


@pytest.mark.models
@pytest.mark.parametrize("model", ["lfm2", "mamba2", "llama"])
def test_a_reply_fills_the_context_to_the_last_cell(model: str) -> None:
    with open_engine(model, n_context=256) as engine:
        outcomes = [
            engine.complete(f"{seed}" + "and so " * 35, sampling=GREEDY).outcome()
            for seed in range(4)
        ]
    full = [outcome for outcome in outcomes if outcome.finish_reason == "length"]
    assert full, "no reply ran to the end of the context"
    for outcome in full:
        assert len(outcome.tokens) + outcome.usage.prompt_tokens == 256 + 1


@pytest.mark.models
def test_a_closed_engine_refuses_text_instead_of_reading_a_vocabulary_that_is_gone() -> None:
    with open_engine("lfm2") as engine:
        engine.complete("x", max_tokens=1).outcome()
    for ask in (engine.complete, lambda text: engine.encode([{"role": "user", "content": text}])):
        with pytest.raises(EngineClosed):
            ask("anything at all")


@pytest.mark.models
def test_engines_closed_while_others_encode_end_without_harm() -> None:
    for _ in range(5):
        with open_engine("lfm2") as engine:
            engine.complete("x", max_tokens=1).outcome()
            threads = [threading.Thread(target=_encode_until_closed, args=[engine]) for _ in "ab"]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def _encode_until_closed(engine: Engine) -> None:
    with contextlib.suppress(EngineClosed):
        while True:
            engine.encode([{"role": "user", "content": "hello " * 200}])


@pytest.mark.models
def test_an_edit_behind_a_sliding_window_is_answered_as_cold() -> None:
    def tokens(count: int, seed: int) -> tuple[int, ...]:
        return tuple((number * 7 + seed * 31) % 90 + 32 for number in range(count))

    path = tiny_models.build("gemma3")
    prompts = [tokens(60, 0), tokens(100, 1), tokens(100, 2), tokens(100, 1)[:30] + tokens(20, 9)]
    with Engine.open(path, ctx=256) as warm, Engine.open(path, ctx=256, checkpoints=0) as cold:
        for prompt in [*prompts, *prompts]:
            asked = Request(prompt, sampling=GREEDY, max_tokens=4)
            assert warm.generate(asked).outcome().tokens == cold.generate(asked).outcome().tokens
        assert warm.stats().counters.recoveries == 0


@pytest.mark.models
def test_a_context_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ctx"):
        Engine.open(tiny_models.build("lfm2"), ctx=2**32 + 512)
