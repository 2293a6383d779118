"""What people report of other engines, on real models: R01 to R29 with their ceilings.

The scenarios are those of `test_field_reports.py` (module `reports`), at sizes that llama.cpp reads
in seconds. What was evaluated is counted where `llama_decode` is handed its batch, and every reply
is compared with that of a cold engine of its own: on tiny models token by token, on the demo model
but for places where the model itself can hardly choose.

The engine's clock goes by the tokens that are evaluated, as fast as on the demo model, so that what
is worth keeping does not depend on how busy this machine is. Tiny models on their own clock are in
`test_real_lanes.py`, the demo model in `test_chats.py`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import reports
from real import DEMO, DecodeCount, open_runtime, path_of
from reports import BOUNDARY, INTERVAL, Meter, chat_under
from scenarios import Alone, Front, Talk, converse, words
from simulation import Simulation, request
from test_fed_tokens import Chatting, real_engines
from test_real_lanes import Cold, RealFront, check, lanes, real
from traces import PACE

from orchestrator.engine.core import Core, Options
from orchestrator.engine.exactness import steadied
from orchestrator.engine.request import Outcome, Request, Sampling
from orchestrator.models.inspect import inspect
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.contents import Contents
from orchestrator.runtime.llama import LlamaRuntime, Settings
from orchestrator.runtime.protocol import Chunk, Runtime
from orchestrator.runtime.simulated import ManualClock, SimulatedRuntime

pytestmark = pytest.mark.models

MODELS = ("lfm2", "qwen35", "mamba2")  # two hybrids, and a model that is all state
every_model = pytest.mark.parametrize("model", MODELS)
N_LANES = {"lfm2": 2, "qwen35": 1, "mamba2": 2, DEMO: 1}
"""With one lane states are whole sequences first, with more they are snapshots on rows of others.

Either way the requests of a meter come one at a time.
"""
ROOMY = Budgets(exported_bytes=1 << 30, history=64)


def with_demo(name: str, values: Sequence[object], of_demo: object) -> pytest.MarkDecorator:
    """Parametrize over models and values of `name`, and add the demo model with one of these."""
    every = [(model, value) for model in MODELS for value in values]
    demo = pytest.param(DEMO, of_demo, marks=[pytest.mark.demo, pytest.mark.slow])
    return pytest.mark.parametrize(("model", name), [*every, demo])


@contextmanager
def metered(
    model: str,
    n_lanes: int | None = None,
    *,
    options: Options | None = None,
    compare_every: int = 1,
    **sizes: Any,
) -> Iterator[Meter]:
    """Return a meter on a model with 32 sequences and room for everything."""
    with opened(model, **sizes) as (runtime, alone), pytest.MonkeyPatch.context() as patch:
        clock = timed(runtime, patch)
        core = Core(
            runtime,
            clock,
            options or Options(n_lanes or N_LANES[model], budgets=ROOMY),
            random.Random(1),
        )
        kind = RealFront if model == DEMO else Front
        front = kind(core, runtime.model.memory, Cold(alone), lambda: check(core, runtime))
        yield Meter(front, DecodeCount(patch).taken, compare_every)
        assert core.counters.recoveries == core.counters.refused_checkpoints == 0


@contextmanager
def opened(model: str, **sizes: Any) -> Iterator[tuple[LlamaRuntime, LlamaRuntime]]:
    """Return a model's runtime, and one for cold replies, with the kernels an engine takes."""
    settings = steadied(inspect(path_of(model)), Settings()).settings
    kernels = {"type_v": settings.type_v, "repack": settings.repack, "threads": 1}
    sizes = {"n_context": 1024, "n_cells": 4096, "n_sequences": 32, "n_batch": 256, **sizes}
    with (
        open_runtime(model, **sizes, **kernels) as runtime,
        open_runtime(model, n_context=sizes["n_context"], n_sequences=1, **kernels) as alone,
    ):
        yield runtime, alone


def timed(runtime: LlamaRuntime, patch: pytest.MonkeyPatch) -> ManualClock:
    """Return a clock that a runtime's decode calls move."""
    clock, decode = ManualClock(), runtime.decode

    def decoding(chunks: Sequence[Chunk]) -> list[int | None]:
        clock.advance(PACE.call + PACE.token * sum(len(chunk.tokens) for chunk in chunks))
        return decode(chunks)

    patch.setattr(runtime, "decode", decoding)
    return clock


# ---- R01 to R08: the conversation is read again -------------------------------------------------


@with_demo("template", [*reports.TEMPLATES], "dropped")
def test_r01_r08_a_chat_of_two_lines_goes_on_where_it_was(model: str, template: str) -> None:
    with metered(model) as meter:
        reports.two_lines(meter, template)
    assert max(meter.spent) <= BOUNDARY


@every_model
def test_r02_r08_thirty_turns_that_only_append_read_what_is_new(model: str) -> None:
    with metered(model, compare_every=5) as meter:
        n_prompt = reports.appending(meter, 30, head=40, message=8, reply=8)
    assert max(meter.spent) <= BOUNDARY
    assert sum(meter.new) <= n_prompt


@with_demo("template", ["replayed", "dropped"], "dropped")
def test_r03_r04_r08_a_tool_round_goes_on_from_the_reply_and_a_question_from_the_last_one(
    model: str, template: str
) -> None:
    head, message, reply = (20, 8, 4) if model == DEMO else (200, 60, 30)
    with metered(model, compare_every=3 if model == DEMO else 1) as meter:
        reports.tool_rounds(meter, template, head, message, reply)
    assert max(meter.spent) <= BOUNDARY


@every_model
def test_r05_an_empty_reasoning_block_that_history_leaves_out_costs_the_reply_alone(
    model: str,
) -> None:
    with metered(model, n_context=1536) as meter:
        reports.an_empty_reasoning_block(meter, message=1200)
    assert max(meter.spent) <= BOUNDARY
    assert meter.new[1] < 60


@pytest.mark.parametrize("template", ["plain", "replayed"])
@every_model
def test_r07_a_reply_that_comes_back_trimmed_is_not_read_again_from_its_start(
    model: str, template: str
) -> None:
    """A reply of more than an interval, so that the ceiling is less than reading it again."""
    with metered(model) as meter:
        reports.a_trimmed_reply(meter, template, reply=400)
    assert meter.spent[1] <= INTERVAL


# ---- R09 to R11: what others read before --------------------------------------------------------


@every_model
def test_r09_a_short_system_text_is_read_once_for_fifty_requests(model: str) -> None:
    with metered(model, compare_every=7) as meter:
        assert reports.strangers_under_one_head(meter, 50, head=100) >= 49
    assert max(meter.spent) <= BOUNDARY


@every_model
def test_r10_chats_and_edited_chats_back_to_back_go_on_where_they_part(model: str) -> None:
    with metered(model) as meter:
        reports.chats_and_edited_chats(meter, head=80, message=120)
    assert max(meter.spent) <= INTERVAL


@every_model
def test_r11_a_fork_in_the_middle_leaves_what_lies_beyond_it(model: str) -> None:
    with metered(model) as meter:
        fork, whole, fork_again = reports.a_fork_in_the_middle(meter)
    assert fork >= 200
    assert whole >= 400
    assert fork_again >= 350


@pytest.mark.parametrize("seed", range(2))
@every_model
def test_r11_nothing_is_reused_that_was_not_evaluated_exactly_so(model: str, seed: int) -> None:
    with metered(model, n_sequences=6) as meter:
        n_asked = reports.random_forks(meter, random.Random(seed), 25, longest=200)
    assert sum(meter.new) < n_asked


# ---- R12, R15, R16, R17, R19: the client changes what was said ----------------------------------


@every_model
def test_r12_a_clock_late_in_the_system_text_costs_what_comes_after_it(model: str) -> None:
    with metered(model) as meter:
        reports.a_clock(meter, chat_under(700), 4, at=550)
    assert max(meter.spent[1:]) <= INTERVAL
    assert max(meter.spent[2:]) <= 2 * BOUNDARY


@every_model
def test_r12_a_clock_that_comes_first_does_not_push_others_out(model: str) -> None:
    with metered(model, n_sequences=6, compare_every=6) as meter:
        other = chat_under(400, name="other")
        meter.say(other, "u", 40)
        reports.a_clock(meter, chat_under(100), 10, at=0)
        assert meter.say(other, "u", 40).cached >= 400


@every_model
def test_r15_a_title_that_is_asked_for_by_the_chat_s_name_does_not_push_it_out(model: str) -> None:
    with metered(model, n_sequences=4) as meter:
        reports.a_title_under_the_chat_s_name(meter, head=400)
    assert max(meter.spent) <= BOUNDARY


@every_model
def test_r16_a_tool_s_output_that_is_blanked_later_costs_the_rounds_after_it(model: str) -> None:
    """Of 20 rounds the third is blanked; one round more than those after it may be read."""
    with metered(model, n_context=1536, compare_every=11) as meter:
        reports.a_blanked_output(meter, 20, output=40)
    assert 17 * 40 < meter.new[-1] < 18 * 70
    assert meter.spent[-1] <= 40 + BOUNDARY


@every_model
def test_r17_a_note_that_stays_four_messages_above_the_end_costs_those_and_no_more(
    model: str,
) -> None:
    with metered(model, n_context=1536, compare_every=7) as meter:
        reports.a_note_above_the_end(meter, 25, message=15, reply=8)
    assert max(meter.new[3:]) < 7 * 25
    assert max(meter.spent) <= INTERVAL


@pytest.mark.parametrize("end", [slice(1, None), slice(None, -1)])
@every_model
def test_r19_a_reply_that_the_template_trims_costs_itself_at_most(model: str, end: slice) -> None:
    with metered(model) as meter:
        assert reports.a_reply_cut_by_the_template(meter, end, head=300, reply=60) <= BOUNDARY


@pytest.mark.parametrize("vocabulary", ["merges", "sentencepiece"])
def test_r18_a_recurrent_chat_goes_on_from_what_was_sampled(
    vocabulary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hybrids are in `test_fed_tokens.py`, and so are replies that must not be taken for it."""
    count = DecodeCount(monkeypatch)
    chatty = Sampling(temperature=0, logit_bias=dict.fromkeys(range(97, 123), 50.0))
    with real_engines("mamba2", vocabulary) as (warm, cold):
        talk = Chatting(warm, cold, count.taken)
        for turn in range(4):
            outcome = talk.turn(f"What about {turn}, a cab?", chatty)
            assert outcome.usage.cached_tokens > 0 or not turn


# ---- R20, R24: several chats --------------------------------------------------------------------


def agents() -> list[Talk]:
    """Return four agents with 100 tokens each, and one with 1,100, in the proportion of R20."""
    small = [Talk(words(f"{n} agent", 100), f"agent {n}") for n in range(4)]
    return [*small[:2], Talk(words("big agent", 1100), "big"), *small[2:]]


def in_turn(meter: Meter, n_rounds: int, warm: Sequence[str]) -> None:
    """Let agents take turns; those named in `warm` start where their last input ended."""
    crowd = agents()
    for number in range(n_rounds):
        for agent in crowd:
            end = agent.input_end
            answer = meter.ask(agent.turn(b"go on"))
            agent.hear(answer)
            if number and agent.conversation in warm:
                meter.front.check_reused(answer, end)


@every_model
def test_r20_five_agents_in_turn_stay_warm_where_the_budget_holds_all(model: str) -> None:
    options = Options(budgets=Budgets(exported_bytes=1 << 28, exported_tokens=8000))
    sizes: dict[str, Any] = {"n_sequences": 3, "n_context": 1536, "n_cells": 2304}
    with metered(model, options=options, compare_every=4, **sizes) as meter:
        in_turn(meter, 3, [agent.conversation or "" for agent in agents()])


@pytest.mark.parametrize("model", ["lfm2", "qwen35"])
def test_r20_where_the_budget_holds_three_the_dearest_always_stays(model: str) -> None:
    options = Options(budgets=Budgets(resident_cells=1500))
    sizes: dict[str, Any] = {"n_sequences": 16, "n_context": 1536, "n_cells": 2304}
    with metered(model, options=options, compare_every=4, **sizes) as meter:
        in_turn(meter, 3, ["big"])


@every_model
def test_r24_sixteen_chats_at_once_that_look_alike_each_get_their_own(model: str) -> None:
    with real(model, lanes(16), n_sequences=40, n_context=512, n_cells=8192) as front:
        chats = [
            Talk(words("the same for all", 100) + f"the code word is {n:02}".encode())
            for n in range(16)
        ]
        converse(front, chats, 2)
    assert len({tuple(chat.history[-12:]) for chat in chats}) > 1


# ---- R25 to R29: wrong answers after reuse ------------------------------------------------------


@with_demo("n_lanes", [1, 2], 2)
def test_r25_the_same_after_the_same_start_is_the_same_fifty_times(
    model: str, n_lanes: int
) -> None:
    n_times, start = (3, 30) if model == DEMO else (50, 150)
    with metered(model, n_lanes, n_sequences=n_lanes + 4, n_cells=1024) as meter:
        assert reports.the_same_again(meter, n_times, start) == 1


@every_model
def test_r26_a_long_history_is_answered_the_same_cold_warm_and_after_detours(model: str) -> None:
    with metered(model, n_context=1536) as meter:
        said = reports.a_table_to_copy(meter, 1200, reply=40)
    assert [answer.cached > 0 for answer in said] == [False, True, True]
    assert len({answer.outcome.tokens for answer in said}) == 1


@pytest.mark.parametrize("n_lanes", [1, 3])
@pytest.mark.parametrize("model", ["lfm2", "qwen35"])
def test_r25_r26_whatever_is_edited_in_whatever_order_is_answered_as_cold(
    model: str, n_lanes: int
) -> None:
    """40 scripts with snapshots on rows that are given up and used again in between."""
    rng = random.Random(n_lanes)
    sizes: dict[str, Any] = {"n_sequences": n_lanes + 3, "n_context": 512, "n_cells": 768}
    with metered(model, n_lanes, n_batch=64, **sizes) as meter:
        n_asked = reports.edit_scripts(meter, rng, 40, 3, n_lanes)
        counters = meter.front.core.counters
    assert counters.reused > n_asked / 3
    assert counters.snapshot_bytes > 0


@every_model
def test_r27_no_state_is_ever_kept_beyond_what_was_fed(model: str) -> None:
    with metered(model, n_context=1536) as meter:
        for longest, n_fed in reports.beyond_what_was_fed(meter, 1200, reply=40):
            assert 1200 <= longest <= n_fed


@with_demo("turn", [0, 580], 0)
def test_r28_a_prompt_sent_again_evaluates_next_to_nothing(model: str, turn: int) -> None:
    length = 60 if model == DEMO else 600
    asked = request(words("again", length), turn=min(turn, length - 9), max_tokens=12)
    drawn = replace(asked, sampling=Sampling(temperature=1.0, seed=2))
    with metered(model) as meter:
        meter.ask(asked)
        for each in (drawn, replace(asked, max_tokens=0), replace(asked, max_tokens=1), asked):
            answer = meter.ask(each)
            assert answer.outcome.usage.prefilled_tokens == 1


@every_model
def test_r29_wherever_a_prompt_is_cut_and_whatever_is_kept_the_reply_is_one(model: str) -> None:
    said = set()
    asked = request(words("prompt", 400), turn=380, base=200, max_tokens=20)
    for n_batch in (32, 64, 512):
        for checkpoints in (True, False):
            options = Options(checkpoints=checkpoints)
            with metered(model, options=options, n_batch=n_batch, n_sequences=4) as meter:
                said |= {meter.ask(asked).outcome.tokens, meter.ask(asked).outcome.tokens}
    assert len(said) == 1


# ---- mutants: a state over rows of other tokens must be noticed ---------------------------------


class Misplacing:
    """A runtime that gives whoever wants rows those of another sequence, and says so if asked."""

    def __init__(self, runtime: LlamaRuntime | SimulatedRuntime) -> None:
        self._runtime = runtime
        self.n_misplaced = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """Share as many rows of another sequence that has them, if there is one."""
        others = [
            sequence
            for sequence in range(self._runtime.limits.n_sequences)
            if sequence != source and self._runtime.length(sequence) >= length
        ]
        self.n_misplaced += bool(others)
        self._runtime.copy_rows(others[0] if others else source, target, length)


class Untied(Contents):
    """Contents that never tell that tokens are others than those held."""

    def differs_at(self, sequence: int, tokens: array[int]) -> int | None:
        """Return that they are the same."""
        return None


def back_to_a_snapshot(runtime: LlamaRuntime | SimulatedRuntime) -> tuple[Outcome, Request, Core]:
    """Ask two things, then otherwise from the turn point of the first on, whose rows are mistaken.

    Returns what was said to that, what was asked, and the core.
    """
    misplacing = Misplacing(runtime)
    core = Core(cast(Runtime, misplacing), ManualClock(), Options(n_lanes=2, budgets=ROOMY))
    front = Front(core, "hybrid", lambda asked: pytest.fail("not compared"), lambda: None)
    for name in ("one", "other"):
        front.ask(request(words(name, 120), turn=80, max_tokens=20))
    asked = request([*words("one", 80), *words("once more", 30)], max_tokens=20)
    said = front.ask(asked)
    assert misplacing.n_misplaced
    return said, asked, core


@contextmanager
def tied_or_not(model: str, *, tied: bool) -> Iterator[tuple[Any, Any]]:
    """Return a runtime, whose contents tell what they hold or not, and what answers cold."""
    if model == "simulated":
        simulation = Simulation(n_sequences=8)
        runtimes: Any = nullcontext((simulation.runtime, None))
    else:
        runtimes = opened(model, n_sequences=8)
    with runtimes as (runtime, alone):
        if not tied:
            runtime._contents = Untied(runtime.limits.n_sequences)
        yield runtime, Alone("hybrid", 4096, 0) if alone is None else Cold(alone)


every_hybrid = pytest.mark.parametrize("model", ["simulated", "lfm2", "qwen35"])


@every_hybrid
def test_a_state_over_rows_of_other_tokens_is_refused_and_the_prompt_read(model: str) -> None:
    with tied_or_not(model, tied=True) as (runtime, cold):
        said, asked, core = back_to_a_snapshot(runtime)
        assert core.counters.refused_checkpoints > 0
        assert said.usage.cached_tokens == 0
        assert said.tokens == cold(asked).tokens


@every_hybrid
def test_without_the_tie_between_rows_and_tokens_a_comparison_with_cold_would_fail(
    model: str,
) -> None:
    with tied_or_not(model, tied=False) as (runtime, cold):
        said, asked, core = back_to_a_snapshot(runtime)
        assert core.counters.refused_checkpoints == 0
        assert said.usage.cached_tokens == 80
        assert said.tokens != cold(asked).tokens
