"""The scenarios of many users again, on real tiny models behind the same core.

One file per kind of memory by default; the gate (`test_gate.py`) goes over every architecture.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import scenarios
from real import open_runtime, path_of
from scenarios import Answer, Front, Talk, converse, words
from simulation import check_budgets, check_chats, check_holders, request

from orchestrator.engine.core import Core, Options
from orchestrator.engine.exactness import steadied
from orchestrator.engine.request import Finished, Outcome, Priority, Request
from orchestrator.errors import OrchestratorError
from orchestrator.models.inspect import inspect
from orchestrator.pool.index import common_length, pack
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.llama import LlamaRuntime, Settings
from orchestrator.runtime.protocol import Chunk

pytestmark = pytest.mark.models

MODELS = ("lfm2", "qwen35", "falcon-h1", "mamba2", "llama", "gemma3", "plamo2")
every_model = pytest.mark.parametrize("model", MODELS)


@dataclass
class Cold:
    """Answers requests alone and uncached, on a runtime of its own, and remembers what it said."""

    runtime: LlamaRuntime
    said: dict[tuple[object, ...], Outcome] = field(default_factory=dict)

    def __call__(self, asked: Request) -> Outcome:
        """Return what an uncached engine answers."""
        key = (asked.tokens, asked.max_tokens, repr(asked.sampling))
        if key not in self.said:
            core = Core(self.runtime, time.perf_counter, Options(checkpoints=False))
            events: list[object] = []
            bare = replace(asked, deadline=None, priority="default", use_cache=False)
            core.submit(bare, events.append)
            while not core.is_idle:
                core.step()
            last = events[-1]
            assert isinstance(last, Finished)
            self.said[key] = last.outcome
        return self.said[key]

    def gap(
        self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], shared: int
    ) -> float:
        """Return how many logits lie between two replies where they part, an end included."""
        path = (*prompt, *one[:shared])
        self.runtime.reset()
        for start in range(0, len(path), self.runtime.limits.n_batch):
            part = path[start : start + self.runtime.limits.n_batch]
            rows = self.runtime.decode([Chunk(0, start, part, wants_logits=True)])
        logits = self.runtime.logits(rows[0] or 0)
        self.runtime.reset()
        ends = [t for t in range(len(logits)) if self.runtime.tokenizer.is_end(t)]
        best = [
            float(logits[reply[shared]]) if shared < len(reply) else float(logits[ends].max())
            for reply in (one, other)
        ]
        return abs(best[0] - best[1])


NEAR_TIE = 0.02
"""Logits that two tokens of an F32 model may be apart where a reply parts (see `exactness`)."""


@dataclass
class RealFront(Front):
    """A front that forgives a parting where the model itself can hardly choose."""

    def compare(self, answer: Answer) -> None:
        """Assert that a reply is the cold one, or leaves it at a near tie."""
        assert isinstance(self.cold, Cold)
        wanted, said = self.cold(answer.request).tokens, answer.outcome.tokens
        if said != wanted:
            shared = common_length(pack(said), pack(wanted))
            assert self.cold.gap(answer.request.tokens, wanted, said, shared) < NEAR_TIE


@contextmanager
def real(model: str, options: Options, **sizes: int) -> Iterator[Front]:
    """Return a front over a tiny model, and close it in the end."""
    settings = steadied(inspect(path_of(model)), Settings()).settings
    common = {"type_v": settings.type_v, "repack": settings.repack, "threads": 1}
    n_context = sizes.get("n_context", 4096)
    with (
        open_runtime(model, **{"n_context": n_context, **sizes, **common}) as runtime,
        open_runtime(model, n_context=n_context, n_sequences=1, **common) as alone,
    ):
        core = Core(runtime, time.perf_counter, options, random.Random(1))
        yield RealFront(core, runtime.model.memory, Cold(alone), lambda: check(core, runtime))
        assert core.counters.recoveries == 0


def check(core: Core, runtime: LlamaRuntime) -> None:
    """Assert that pool, ledger and llama.cpp's own positions say the same."""
    keeper = core._keeper
    check_holders(core)
    held = {c.sequence: c.holder.length for c in keeper.pool.book.resident()}
    held |= {lane.sequence: lane.fed for lane in core._seats.lanes if lane.is_ready}
    filling = {lane.sequence for lane in core._seats.lanes if not lane.is_ready}
    for sequence in set(range(runtime.limits.n_sequences)) - filling:
        length = held.get(sequence, 0)
        assert runtime.length(sequence) == keeper.memory.ledger.length(sequence) == length
        if length:
            runtime._verify(sequence)
    check_budgets(core)
    check_chats(core)


def lanes(n_lanes: int, **budgets: int) -> Options:
    """Return options with so many lanes and budgets."""
    return Options(n_lanes=n_lanes, budgets=Budgets(**budgets))


@every_model
def test_of_five_requests_at_once_that_share_a_prefix_one_reads_it(model: str) -> None:
    with real(model, lanes(5), n_sequences=16, n_cells=16384) as front:
        scenarios.a_burst_that_shares_a_prefix(front, 5, 2048)


@every_model
def test_a_resent_prompt_starts_one_token_short_of_its_end(model: str) -> None:
    with real(model, lanes(2), n_sequences=6) as front:
        scenarios.a_prompt_again(front, 600)


@every_model
def test_two_chats_that_share_a_beginning_read_it_once_and_go_on_apart(model: str) -> None:
    with real(model, lanes(2), n_sequences=12, n_cells=8192) as front:
        scenarios.two_that_share_a_beginning(front, 1500)


@pytest.mark.parametrize("model", ["lfm2", "qwen35", "mamba2"])
def test_the_first_branch_of_a_long_chat_is_cold_and_others_start_where_it_left(
    model: str,
) -> None:
    with real(model, lanes(1), n_sequences=12) as front:
        reused = scenarios.branches(front, 4)
    assert reused[1][0] == 0
    assert reused[1][1] <= reused[3][0] < reused[3][1]
    assert reused[4][0] == reused[4][1] > 0


@every_model
def test_a_turn_point_kept_first_serves_the_request_queued_behind_it(model: str) -> None:
    with real(model, lanes(2), n_sequences=8, n_cells=8192) as front:
        if front.memory == "attention":
            pytest.skip("rows that can be cut need no turn points")
        scenarios.one_waits_for_another_s_turn_point(front)


@every_model
def test_thirty_turns_stay_warm_within_every_budget(model: str) -> None:
    budgets = {"resident_cells": 4096, "exported_tokens": 8000, "exported_bytes": 1 << 26}
    with real(model, lanes(2, **budgets), n_sequences=31, n_cells=8192) as front:
        converse(front, [Talk(words("head", 200))], 30, size=60, compare_every=10)


@every_model
def test_chats_come_back_from_host_memory_when_sequences_are_few(model: str) -> None:
    options = lanes(2, exported_bytes=1 << 26)
    with real(model, options, n_sequences=5, n_context=1024, n_cells=2048) as front:
        scenarios.round_robin(front, 6, 3)
        assert front.core.counters.imported_checkpoints >= 6


@every_model
def test_a_random_walk_on_a_real_model_says_nothing_wrong(model: str) -> None:
    options = lanes(3, exported_bytes=1 << 22, resident_cells=700)
    with real(model, options, n_sequences=7, n_context=512, n_cells=1024, n_batch=64) as front:
        walk(front, random.Random(7), 600)


def walk(front: Front, rng: random.Random, n_operations: int) -> None:
    """Submit, cancel and step at random; whatever ends well said what it says cold."""
    histories, gone = [words("system", 80), b""], set[Answer]()
    answers: list[Answer] = []
    priorities: list[Priority] = ["interactive", "default", "background"]

    def submit() -> None:
        if sum(not answer.is_over for answer in answers) > 8:
            return
        history = rng.choice(histories)[:300] + b"<u>" + rng.choice([b"x", b"y", b"z"]) * 20
        histories.append(history)
        asked = request(
            [*history, *scenarios.OPENER],
            turn=len(history),
            max_tokens=rng.choice([1, 6, 20]),
            priority=rng.choice(priorities),
        )
        answers.append(front.submit(asked))

    def cancel() -> None:
        if answers:
            answer = rng.choice(answers[-6:])
            gone.add(answer)
            answer.cancel()

    actions: list[tuple[Callable[[], None], int]] = [(front.step, 60), (submit, 12), (cancel, 3)]
    for _ in range(n_operations):
        rng.choices([act for act, _ in actions], [weight for _, weight in actions])[0]()
    front.run()
    assert sum(answer.cached for answer in answers) > 0
    for answer in answers:
        last = answer.events[-1]
        assert not isinstance(last, OrchestratorError)
        if answer not in gone:
            front.compare(answer)
