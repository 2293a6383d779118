"""What do lanes cost and gain on a real model, beside a plain llama.cpp loop?

    .venv/bin/python tests/bench_lanes.py [model] [section …]

Sections: decode (1 to 8 lanes against a plain loop with the same batches), cold (a cold prefill
with checkpoints on and off), cells (decoding beside resident cells), joint (one decode call for
several prompts against one for each, and mixed with decoding). The two sides of every ratio take
turns within one run; the median is told. Not a test.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

from plain_llama import Plain, opened
from real import DEMO, open_runtime, path_of

from orchestrator.engine.core import Core, Options
from orchestrator.engine.exactness import steadied
from orchestrator.engine.request import GREEDY, Request
from orchestrator.models.inspect import inspect
from orchestrator.runtime.llama import LlamaRuntime, Settings
from orchestrator.runtime.protocol import Chunk

ROUNDS = 7
STEPS = 16
LANES = (1, 2, 4, 8)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Return token ids that any vocabulary has, and no two seeds share a beginning."""
    return tuple(32 + (number * 7 + seed * 13 + number * seed) % 90 for number in range(count))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds something takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def steady(model: str, **sizes: int) -> dict[str, object]:
    """Return settings as a user's engine has them."""
    settings = steadied(inspect(path_of(model)), Settings()).settings
    return {"type_v": settings.type_v, "repack": settings.repack, **sizes}


def speaking(runtime: LlamaRuntime, n_lanes: int, n_prompt: int = 64) -> Core:
    """Return a core in which all lanes have read their prompts and speak without end."""
    core = Core(runtime, time.perf_counter, Options(n_lanes=n_lanes))
    bans = {end: -100.0 for end in range(runtime.model.n_vocab) if runtime.tokenizer.is_end(end)}
    sampling = GREEDY if not bans else type(GREEDY)(temperature=0.0, logit_bias=bans)
    for lane in range(n_lanes):
        core.submit(Request(tokens(n_prompt, lane), sampling=sampling), lambda event: None)
    while core.counters.sampled < 2 * n_lanes or not all(
        view.doing == "speaks" for view in core.occupancy().running
    ):
        core.step()
    return core


def decode(model: str) -> None:
    """Compare decoding on the engine with a plain loop."""
    print("lanes  engine tok/s  plain tok/s  ratio")
    for n_lanes in LANES:
        sizes = steady(model, n_context=4096, n_sequences=n_lanes + 4)
        type_v = int(str(sizes["type_v"]))
        with (
            open_runtime(model, **sizes) as runtime,
            opened(path_of(model), 4096, n_seq=n_lanes, type_v=type_v) as plain,
        ):
            ours, theirs = both(speaking(runtime, n_lanes), plain, n_lanes)
        ratio = statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
        said = n_lanes * STEPS
        print(
            f"{n_lanes:5}  {said / statistics.median(ours):12.1f}"
            f"  {said / statistics.median(theirs):11.1f}  {ratio:5.3f}"
        )


def both(core: Core, plain: Plain, n_lanes: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round of steps, the engine's and the plain loop's, in turns."""
    latest = {lane: int(plain.feed(tokens(64, lane), lane).argmax()) for lane in range(n_lanes)}

    def engine() -> None:
        for _ in range(STEPS):
            core.step()

    def loop() -> None:
        for _ in range(STEPS):
            latest.update(plain.step(latest))

    rounds = [(timed(engine), timed(loop)) for _ in range(ROUNDS)]
    return [ours for ours, _ in rounds], [theirs for _, theirs in rounds]


def cold(model: str) -> None:
    """Compare a cold prefill with checkpoints on and off."""
    print("prompt  on s   off s  on / off")
    with open_runtime(model, **steady(model, n_context=2048, n_sequences=8)) as runtime:
        for n_prompt in (100, 500):
            taken: dict[bool, list[float]] = {True: [], False: []}
            for round_ in range(ROUNDS):
                for kept in (True, False):
                    core = Core(runtime, time.perf_counter, Options(checkpoints=kept))
                    prompt = tokens(n_prompt, 2 * round_ + kept)
                    asked = Request(prompt, turn=n_prompt - 5, sampling=GREEDY, max_tokens=1)
                    core.submit(asked, lambda event: None)
                    taken[kept].append(timed(lambda core=core: _rest(core)))  # type: ignore[misc]
                    runtime.reset()
            on, off = statistics.median(taken[True]), statistics.median(taken[False])
            ratios = [a / b for a, b in zip(taken[True], taken[False], strict=True)]
            print(f"{n_prompt:6}  {on:5.2f}  {off:5.2f}  {statistics.median(ratios):5.3f}")


def _rest(core: Core) -> None:
    while not core.is_idle:
        core.step()


def cells(model: str) -> None:
    """Measure decoding beside cells that checkpoints of others hold."""
    print("resident cells  ms/token")
    with open_runtime(model, **steady(model, n_context=8192, n_sequences=12)) as runtime:
        for held in (0, 1024, 4096):
            runtime.reset()
            for sequence, start in enumerate(range(0, held, 1024), start=1):
                read(runtime, sequence, tokens(min(1024, held - start), sequence))
            read(runtime, 0, tokens(64, 99))
            taken = []
            for step in range(4 * STEPS):
                chunk = Chunk(0, 64 + step, (40,), wants_logits=True)
                taken.append(timed(lambda chunk=chunk: runtime.decode([chunk])))  # type: ignore[misc]
            print(f"{held:14,}  {1e3 * statistics.median(taken):8.2f}")


def read(runtime: LlamaRuntime, sequence: int, prompt: Sequence[int]) -> None:
    """Evaluate a prompt."""
    for start in range(0, len(prompt), runtime.limits.n_batch):
        part = tuple(prompt[start : start + runtime.limits.n_batch])
        runtime.decode([Chunk(sequence, start, part, wants_logits=False)])


def joint(model: str) -> None:
    """Compare one call for all with a call for each."""
    print("what                               one call ms  separate ms  one / separate")
    with open_runtime(
        model, **steady(model, n_context=4096, n_sequences=8, n_batch=512)
    ) as runtime:
        for name, lengths in (
            ("4 prompts of 8 tokens", (8, 8, 8, 8)),
            ("4 prompts of 32 tokens", (32, 32, 32, 32)),
            ("prompts of 128, 64, 32 and 16 tokens", (128, 64, 32, 16)),
            ("3 lanes decoding, 1 reading 32", (1, 1, 1, 32)),
            ("3 lanes decoding, 1 reading 128", (1, 1, 1, 128)),
        ):
            together, apart = [], []
            for round_ in range(ROUNDS):
                together.append(timed(lambda: _call(runtime, lengths, 2 * round_)))  # noqa: B023
                apart.append(timed(lambda: _calls(runtime, lengths, 2 * round_ + 1)))  # noqa: B023
            ratio = statistics.median(a / b for a, b in zip(together, apart, strict=True))
            one, many = 1e3 * statistics.median(together), 1e3 * statistics.median(apart)
            print(f"{name:36} {one:9.1f}  {many:11.1f}  {ratio:14.2f}")


def _call(runtime: LlamaRuntime, lengths: Sequence[int], seed: int) -> None:
    runtime.decode([_chunk(runtime, lane, n, seed) for lane, n in enumerate(lengths)])


def _calls(runtime: LlamaRuntime, lengths: Sequence[int], seed: int) -> None:
    """Lanes that decode share a call, each prompt has its own."""
    ones = [_chunk(runtime, lane, n, seed) for lane, n in enumerate(lengths) if n == 1]
    if ones:
        runtime.decode(ones)
    for lane, n in enumerate(lengths):
        if n > 1:
            runtime.decode([_chunk(runtime, lane, n, seed)])


def _chunk(runtime: LlamaRuntime, lane: int, count: int, seed: int) -> Chunk:
    if runtime.length(lane) + count > 900:
        runtime.clear(lane)
    return Chunk(lane, runtime.length(lane), tokens(count, seed), wants_logits=True)


SECTIONS = {"decode": decode, "cold": cold, "cells": cells, "joint": joint}

if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else DEMO
    for section in sys.argv[2:] or SECTIONS:
        SECTIONS[section](wanted)
