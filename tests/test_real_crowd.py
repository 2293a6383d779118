"""Crowds on real tiny models: many threads that come and go, budgets that are watched, memory."""

from __future__ import annotations

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from real import open_runtime, path_of
from scenarios import Talk, converse, words
from simulation import request
from test_real_lanes import NEAR_TIE, Cold, lanes, real

from orchestrator.engine.engine import Engine
from orchestrator.engine.exactness import steadied
from orchestrator.engine.occupancy import Occupancy
from orchestrator.engine.request import GREEDY, Outcome, Request
from orchestrator.models.inspect import inspect
from orchestrator.pool.index import common_length, pack
from orchestrator.runtime.llama import Settings

pytestmark = pytest.mark.models

N_CLIENTS, N_REQUESTS, CANCELLED = 16, 20, 0.3
N_CONTEXT = 512
KIB = 1024


def prompts() -> list[Request]:
    """Return requests of which several begin alike."""
    heads = [words(f"head {number}", 90) for number in range(4)]
    return [
        request(heads[number % 4] + words(f"own {number}", 20), turn=105, max_tokens=6)
        for number in range(16)
    ]


def client(engine: Engine, asked: list[Request], seed: int) -> list[tuple[Request, Outcome]]:
    """Ask at random and give some up at random; return what came of each."""
    rng = random.Random(seed)
    heard = []
    for _ in range(N_REQUESTS):
        wanted = rng.choice(asked)
        stream = engine.generate(wanted)
        if rng.random() < CANCELLED:
            time.sleep(rng.random() * 0.01)
            stream.cancel()
        heard.append((wanted, stream.outcome()))
    return heard


@pytest.mark.parametrize("model", ["lfm2", "mamba2", "llama"])
def test_sixteen_threads_that_come_and_go_get_nothing_wrong_and_leave_nothing(model: str) -> None:
    asked = prompts()
    with Engine.open(path_of(model), ctx=N_CONTEXT, lanes=4, threads=1) as engine:
        with ThreadPoolExecutor(N_CLIENTS) as threads:
            heard = list(threads.map(lambda n: client(engine, asked, n), range(N_CLIENTS)))
        after = engine.generate(asked[0]).outcome()
        stats = engine.stats()
    assert after.usage.cached_tokens > 0
    assert (stats.occupancy.lanes, stats.occupancy.queued) == (0, 0)
    assert stats.counters.recoveries == 0
    outcomes = [each for one in heard for each in one]
    assert sum(outcome.usage.cached_tokens for _, outcome in outcomes) > 0
    judge(model, outcomes)


def judge(model: str, outcomes: list[tuple[Request, Outcome]]) -> None:
    """Assert that what was said is how the cold reply begins, or leaves it at a near tie."""
    settings = steadied(inspect(path_of(model)), Settings()).settings
    kernels = {"type_v": settings.type_v, "repack": settings.repack, "threads": 1}
    with open_runtime(model, n_context=N_CONTEXT, n_sequences=1, **kernels) as alone:
        cold = Cold(alone)
        for wanted, outcome in outcomes:
            said, right = outcome.tokens, cold(wanted).tokens
            if outcome.finish_reason == "cancelled":
                right = right[: len(said)]
            if said != right:
                shared = common_length(pack(said), pack(right))
                assert cold.gap(wanted.tokens, right, said, shared) < NEAR_TIE


def test_budgets_hold_whenever_somebody_looks() -> None:
    seen: list[Occupancy] = []
    over = threading.Event()
    budget, cells = 256 * KIB, 700
    with Engine.open(
        path_of("lfm2"),
        ctx=N_CONTEXT,
        lanes=2,
        threads=1,
        checkpoints=6,
        exported_bytes=budget,
        resident_cells=cells,
    ) as engine:

        def look() -> None:
            while not over.wait(0.05):
                seen.append(engine.stats().occupancy)

        watcher = threading.Thread(target=look)
        watcher.start()
        for number in range(40):
            asked = request(words(f"chat {number % 12}", 300), turn=290, max_tokens=4)
            assert engine.generate(asked).outcome().finish_reason in ("stop", "length")
        over.set()
        watcher.join()
    assert len(seen) > 2
    assert max(now.exported_bytes for now in seen) <= budget
    assert max(now.exported_bytes for now in seen) > 0
    assert max(now.cells_used for now in seen) <= cells


def test_a_hundred_sessions_made_and_closed_leave_the_process_as_it_was() -> None:
    sizes = []
    with Engine.open(path_of("lfm2"), ctx=N_CONTEXT, threads=1) as engine:
        for number in range(120):
            session = engine.create_session(sampling=GREEDY)
            session.append(tuple(words(f"session {number}", 200)))
            assert session.generate(max_tokens=2).outcome().tokens
            session.close()
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4 * KIB)
        assert not engine.stats().checkpoints
    slope = float(np.polyfit(range(100), sizes[20:], 1)[0])
    assert slope < 50 * KIB


@pytest.mark.parametrize("model", ["lfm2", "mamba2", "qwen35"])
def test_of_several_parked_chats_the_longest_match_wins_and_none_is_none(model: str) -> None:
    with real(model, lanes(1), n_sequences=12, n_context=1024) as front:
        path = words("path", 300)
        for length in (100, 200, 260):
            front.ask_all([request(path[:length] + words(f"at {length}", 20), turn=length)])
        (answer,) = front.ask_all([request(path[:280] + words("new", 20))])
        assert answer.cached == 260
        (answer,) = front.ask_all([request(words("stranger", 80))])
        assert answer.cached == 0


@pytest.mark.parametrize("model", ["lfm2", "mamba2", "llama"])
def test_r15_side_requests_between_turns_leave_a_chat_warm_and_keep_nothing(model: str) -> None:
    with real(model, lanes(1), n_sequences=4, n_context=1024) as front:
        talk = Talk(words("head", 400))
        converse(front, [talk], 1)
        held = front.core.occupancy().checkpoints
        for name in ("title", "tags"):
            side = request(words(name, 120), turn=100, max_tokens=6, one_off=True)
            front.ask_all([side])
        assert front.core.occupancy().checkpoints == held
        converse(front, [talk], 1)


@pytest.mark.parametrize("model", ["lfm2", "mamba2", "llama"])
@pytest.mark.parametrize("n_lanes", [1, 2])
def test_r21_a_second_request_lets_the_first_stream_go_on(model: str, n_lanes: int) -> None:
    with real(model, lanes(n_lanes), n_sequences=6, n_context=1024, n_cells=2048) as front:
        first = front.submit(request(words("first", 60), max_tokens=60))
        front.step_until(lambda: front.core.counters.sampled >= 10)
        second = front.submit(request(words("second", 90), max_tokens=20))
        front.run()
        for answer in (first, second):
            front.compare(answer)


@pytest.mark.parametrize("model", ["lfm2", "mamba2", "llama"])
def test_r23_whenever_a_client_goes_the_next_request_is_right(model: str) -> None:
    with real(model, lanes(1), n_sequences=6, n_context=1024, n_batch=64) as front:
        for steps in (0, 1, 2, 4, 7, 11, 14):
            gone = front.submit(request(words(f"gone {steps}", 200), turn=190, max_tokens=12))
            front.step(steps)
            gone.cancel()
            front.ask_all([request(words(f"next {steps}", 40))])


@pytest.mark.parametrize("model", ["lfm2", "mamba2", "rwkv7", "llama"])
@pytest.mark.parametrize("n_batch", [8, 32, 512])
@pytest.mark.parametrize("n_ubatch", [8, 32, 512])
def test_r38_prompts_around_the_batch_are_right_thrice(
    model: str, n_batch: int, n_ubatch: int
) -> None:
    sizes = {"n_sequences": 4, "n_context": 1024, "n_batch": n_batch, "n_ubatch": n_ubatch}
    with real(model, lanes(1), **sizes) as front:
        for length in {1, n_batch - 1, n_batch, n_batch + 1, min(3 * n_batch + 1, 900)}:
            asked = request(words(f"{length}", length), max_tokens=4)
            for _ in range(3):
                front.ask_all([asked])
