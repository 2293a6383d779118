"""What people report of other engines, with the behaviour they should have met.

Each test names its report in `field-reports.md` by its number.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import reports
from reports import BOUNDARY, INTERVAL, Meter, chat_under
from scenarios import OPENER, Alone, Answer, Simulated, Talk, converse, simulated, words
from simulation import KINDS, check, request
from test_fed_tokens import counting
from traces import every_kind as every_kind_but
from traces import stage

from orchestrator.engine.core import Core, Options
from orchestrator.engine.engine import Engine
from orchestrator.engine.records import N_RECORDS
from orchestrator.engine.request import PRIORITIES, Outcome, Request, Sampling, Text
from orchestrator.engine.scheduler import Patience
from orchestrator.engine.stream import Stream
from orchestrator.errors import Busy
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import Chunk, Limits, MemoryKind
from orchestrator.runtime.simulated import Cost, ManualClock, SimulatedRuntime

every_kind = pytest.mark.parametrize("memory", KINDS)
every_kind_with_cells = pytest.mark.parametrize("memory", ["hybrid", "attention", "windowed"])

ROOM = 1 << 40
WAIT = 20.0  # seconds that nothing here ever takes


def front(memory: MemoryKind = "hybrid", n_lanes: int = 1, **more: Any) -> Simulated:
    """Return a front; `more` are its budgets and the sizes of its runtime."""
    budgets = {name: more.pop(name) for name in list(more) if name in Budgets.__slots__}
    return simulated(memory, Options(n_lanes=n_lanes, budgets=Budgets(**budgets)), **more)


# ---- R01 to R08: the conversation is read again -------------------------------------------------

INSIDE = "states inside a reply, where a state is all rows there are"

every_template = pytest.mark.parametrize("template", reports.TEMPLATES)


def meter(memory: MemoryKind, n_lanes: int = 1, **sizes: Any) -> Meter:
    """Return a meter on an engine with 32 sequences and room for everything."""
    on = stage(memory, n_lanes, **{"n_context": 8192, "end_every": 0, **sizes})
    return Meter(on, counting(on.runtime))


@every_template
@every_kind
def test_r01_a_chat_of_two_lines_goes_on_where_it_was(memory: MemoryKind, template: str) -> None:
    """All of it is shorter than any interval. R08 asks the same of pure recurrent models."""
    metered = meter(memory)
    reports.two_lines(metered, template)
    assert max(metered.spent) <= BOUNDARY


@every_kind
def test_r02_thirty_turns_that_only_append_read_what_is_new(memory: MemoryKind) -> None:
    metered = meter(memory)
    n_prompt = reports.appending(metered, 30, head=200, message=30, reply=20)
    assert max(metered.spent) <= BOUNDARY
    assert sum(metered.new) <= n_prompt


@pytest.mark.parametrize("template", ["replayed", "dropped"])
@every_kind
def test_r03_r04_a_tool_round_goes_on_from_the_reply_and_a_question_from_the_last_one(
    memory: MemoryKind, template: str
) -> None:
    """With reasoning sent back and shown both go on from the reply, else as R03 has it."""
    metered = meter(memory)
    reports.tool_rounds(metered, template, head=200, message=60, reply=40)
    assert max(metered.spent) <= BOUNDARY


@every_kind
def test_r05_an_empty_reasoning_block_that_history_leaves_out_costs_the_reply_alone(
    memory: MemoryKind,
) -> None:
    metered = meter(memory)
    reports.an_empty_reasoning_block(metered, message=2000)
    assert max(metered.spent) <= BOUNDARY
    assert metered.new[1] < 60


@pytest.mark.parametrize("template", ["plain", "replayed"])
@every_kind_but(INSIDE, on=["windowed"])
def test_r07_a_reply_that_comes_back_trimmed_is_not_read_again_from_its_start(
    memory: MemoryKind, template: str
) -> None:
    metered = meter(memory)
    reports.a_trimmed_reply(metered, template, reply=2000)
    assert metered.spent[1] <= INTERVAL


# ---- R09 to R11: what others read before --------------------------------------------------------


@every_kind
def test_r09_a_short_system_text_is_read_once_for_fifty_requests(memory: MemoryKind) -> None:
    metered = meter(memory)
    assert reports.strangers_under_one_head(metered, 50, head=100) >= 49
    assert max(metered.spent) <= BOUNDARY


@every_kind
def test_r10_chats_and_edited_chats_back_to_back_go_on_where_they_part(memory: MemoryKind) -> None:
    metered = meter(memory)
    reports.chats_and_edited_chats(metered, head=80, message=300)
    assert max(metered.spent) <= INTERVAL


def test_r11_a_fork_in_the_middle_leaves_what_lies_beyond_it() -> None:
    """Kept at 100, 200, 300 and 400; then one that parts at 250; then the 400 again."""
    fork, whole, fork_again = reports.a_fork_in_the_middle(meter("hybrid"))
    assert fork >= 200
    assert whole >= 400
    assert fork_again >= 350


@pytest.mark.parametrize("seed", range(4))
@every_kind
def test_r11_nothing_is_reused_that_was_not_evaluated_exactly_so(
    memory: MemoryKind, seed: int
) -> None:
    """Each start is a path that was fed, token by token; `Meter` compares."""
    metered = meter(memory, n_sequences=6)
    n_asked = reports.random_forks(metered, random.Random(seed), 40, longest=300)
    assert sum(metered.new) < n_asked


# ---- R12, R16, R17, R19: the client changes what was said ---------------------------------------


@every_kind
def test_r12_a_clock_late_in_the_system_text_costs_what_comes_after_it(memory: MemoryKind) -> None:
    """From the second turn on; the third and all after it know where the clock is."""
    metered = meter(memory)
    reports.a_clock(metered, chat_under(3500), 6, at=3000)
    assert max(metered.spent[1:]) <= INTERVAL
    assert max(metered.spent[2:]) <= 16


@every_kind
def test_r12_a_clock_that_comes_first_does_not_push_others_out(memory: MemoryKind) -> None:
    """Nothing that such a chat keeps ever serves it again."""
    metered = meter(memory, n_sequences=6)
    other = chat_under(3000, name="other")
    metered.say(other, "u", 40)
    reports.a_clock(metered, chat_under(3000), 20, at=0)
    answer = metered.say(other, "u", 40)
    assert answer.cached >= 3000


@every_kind
def test_r16_a_tool_s_output_that_is_blanked_later_costs_the_rounds_after_it(
    memory: MemoryKind,
) -> None:
    """Of 20 rounds the third is blanked; one round more than those after it may be read."""
    metered = meter(memory, n_context=16_384)
    reports.a_blanked_output(metered, 20, output=300)
    assert 17 * 300 < metered.new[-1] < 18 * 330
    assert metered.spent[-1] <= 300 + BOUNDARY


@every_kind
def test_r17_a_note_that_stays_four_messages_above_the_end_costs_those_and_no_more(
    memory: MemoryKind,
) -> None:
    metered = meter(memory)
    reports.a_note_above_the_end(metered, 50, message=40, reply=20)
    assert max(metered.new[3:]) < 7 * 50
    assert max(metered.spent) <= INTERVAL


@pytest.mark.parametrize("end", [slice(1, None), slice(None, -1)])
@every_kind
def test_r19_a_reply_that_the_template_trims_costs_itself_at_most(
    memory: MemoryKind, end: slice
) -> None:
    """From the end of the prompt, whatever became of the reply."""
    beyond = reports.a_reply_cut_by_the_template(meter(memory), end, head=500, reply=80)
    assert beyond <= BOUNDARY


# ---- R15: title and tag requests between turns --------------------------------------------------


@every_kind
@pytest.mark.parametrize("one_off", [True, False])
def test_r15_side_requests_do_not_push_a_chat_out(memory: MemoryKind, one_off: bool) -> None:
    simulated = front(memory, n_sequences=5, n_context=8192)
    chat = Talk(words("chat", 3000))
    converse(simulated, [chat], 1)
    for name in ("title", "tags", "follow-ups"):
        side = [*words(name, 60), *words("chat", 340)]
        simulated.ask_all([request([*side, *OPENER], turn=400, one_off=one_off)])
    converse(simulated, [chat], 1)  # asserts that it starts where its last input ended


@every_kind
def test_r15_side_requests_that_go_by_the_chat_s_name_do_not_push_it_out(
    memory: MemoryKind,
) -> None:
    """A client that names the chat in every request names it in these as well."""
    metered = meter(memory, budgets=Budgets(exported_bytes=ROOM))
    reports.a_title_under_the_chat_s_name(metered, head=3000)
    assert max(metered.spent) <= BOUNDARY


@every_kind
def test_r15_nothing_is_held_for_a_side_request_that_has_ended(memory: MemoryKind) -> None:
    simulated = front(memory, exported_bytes=ROOM)
    converse(simulated, [Talk(words("chat", 300))], 1)
    before = simulated.core.occupancy()
    simulated.ask_all([request(words("title", 400), turn=380, one_off=True)])
    after = simulated.core.occupancy()
    assert (after.resident_bytes, after.exported_bytes) == (
        before.resident_bytes,
        before.exported_bytes,
    )


# ---- R20: more working sets than places ---------------------------------------------------------


def agents() -> list[Talk]:
    """Return four agents with a thousand tokens each, and one with eleven thousand."""
    small = [Talk(words(f"{n} agent", 1000), f"agent {n}") for n in range(4)]
    return [*small[:2], Talk(words("big agent", 11_000), "big"), *small[2:]]


@every_kind
def test_r20_five_agents_in_turn_stay_warm_where_the_budget_holds_all(memory: MemoryKind) -> None:
    """There are fewer sequences than agents keep checkpoints, and host memory for the rest."""
    simulated = front(
        memory, n_sequences=3, n_context=16_384, exported_bytes=ROOM, exported_tokens=40_000
    )
    crowd = agents()
    for _ in range(3):
        for agent in crowd:
            converse(simulated, [agent], 1)


@every_kind_with_cells
def test_r20_where_the_budget_holds_three_the_dearest_always_stays(
    memory: MemoryKind,
) -> None:
    simulated = front(memory, n_sequences=16, n_context=16_384, resident_cells=13_600)
    crowd = agents()
    for turn in range(3):
        for agent in crowd:
            end = agent.input_end
            (answer,) = simulated.ask_all([agent.turn(b"go on")])
            agent.hear(answer)
            if turn and agent.conversation == "big":
                simulated.check_reused(answer, end)
    usage = simulated.core.counters
    assert usage.reused > 0.7 * 2 * 15_000  # of what the second and third round could reuse


# ---- R21: a second request while the first streams ----------------------------------------------


@every_kind
@pytest.mark.parametrize("n_lanes", [1, 2])
def test_r21_a_second_request_lets_the_first_stream_go_on(memory: MemoryKind, n_lanes: int) -> None:
    simulated = front(memory, n_lanes)
    first = simulated.submit(request(words("first", 50), max_tokens=400))
    simulated.step_until(lambda: sum(isinstance(e, Text) for e in first.events) >= 50)
    second = simulated.submit(request(words("second", 200), max_tokens=50))
    simulated.run()
    for answer in (first, second):
        simulated.compare(answer)
        assert answer.outcome.finish_reason == "length"


# ---- R22, R23, R41: many threads, cancelling at any moment --------------------------------------


class Gated(SimulatedRuntime):
    """A runtime that waits for a permit before each decode call after the first `free` ones."""

    def __init__(self, free: int, n_batch: int = 64) -> None:
        super().__init__(Limits(8, 4096, 4096, n_batch, 1000, 10))
        self.calls: list[int] = []
        self._permits = threading.Semaphore(free)
        self.has_stopped = threading.Event()

    def decode(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Wait for a permit, then decode."""
        if not self._permits.acquire(blocking=False):
            self.has_stopped.set()
            assert self._permits.acquire(timeout=WAIT)
        self.calls.append(sum(len(chunk.tokens) for chunk in chunks))
        return super().decode(chunks)

    def go_on(self) -> None:
        """Let everything run."""
        self._permits.release(1_000_000)


@contextmanager
def crowded(memory: MemoryKind, **options: Any) -> Iterator[Engine]:
    """Open an engine that many may use at once, with little room; check it in the end."""
    limits = Limits(6, 1500, 1024, 32, 1000, 10)
    budgets = Budgets(resident_cells=1200, exported_bytes=40_000, exported_tokens=1500)
    with Engine.over(
        lambda: SimulatedRuntime(limits, memory=memory, end_every=40),
        options=Options(n_lanes=4, budgets=budgets, **options),
    ) as engine:
        yield engine
        engine._worker.call(check_idle)


def check_core(core: Core) -> None:
    """Assert between two steps what must hold there."""
    assert isinstance(core._runtime, SimulatedRuntime)
    check(core, core._runtime)


def check_idle(core: Core) -> None:
    """Assert that nothing is left of requests that have ended."""
    check_core(core)
    occupancy = core.occupancy()
    assert (occupancy.lanes, occupancy.queued, occupancy.paused) == (0, 0, 0)
    assert core.is_idle
    assert not any(checkpoint.leases for checkpoint in core._keeper.pool.checkpoints)


class Client:
    """One of many: asks, now and then goes away, and judges what it hears."""

    def __init__(self, number: int, engine: Engine, alone: Callable[[Request], Outcome]) -> None:
        self.rng = random.Random(number)
        self.name = f"client {number % 5}"
        self.engine = engine
        self.alone = alone
        self.n_ended = self.n_cancelled = self.reused = 0

    def run(self, n_requests: int) -> None:
        """Ask so many times."""
        for number in range(n_requests):
            asked = self._request()
            stream = self.engine.generate(asked)
            if self.rng.random() < 0.3:
                self._leave(stream)
            self._judge(asked, stream.outcome())
            if number % 4 == 0:
                self.engine._worker.call(check_core)

    def _request(self) -> Request:
        head = words(f"head {self.rng.randrange(4)}", 120)
        turn = self.rng.randrange(20, 90)
        return request(
            [*head[: self.rng.choice([70, 120])], *words("body", turn), *OPENER],
            turn=self.rng.choice([0, 100]) if turn > 40 else 0,
            max_tokens=self.rng.choice([1, 5, 25]),
            priority=self.rng.choice(PRIORITIES),
            client=self.name,
        )

    def _leave(self, stream: Stream) -> None:
        for _ in range(self.rng.randrange(4)):
            next(stream, None)
        stream.cancel()

    def _judge(self, asked: Request, outcome: Outcome) -> None:
        wanted = self.alone(asked).tokens
        if outcome.finish_reason == "cancelled":
            self.n_cancelled += 1
            assert outcome.tokens == wanted[: len(outcome.tokens)]
        else:
            self.n_ended += 1
            assert outcome.tokens == wanted
        self.reused += outcome.usage.cached_tokens


class LockedAlone(Alone):
    """The oracle, for several threads."""

    def __init__(self, memory: MemoryKind) -> None:
        super().__init__(memory, n_context=1024, end_every=40)
        self._lock = threading.Lock()

    def __call__(self, asked: Request) -> Outcome:
        """Return what an uncached engine answers."""
        with self._lock:
            return super().__call__(replace(asked, client=None))


@every_kind
def test_r22_sixteen_clients_that_come_and_go_get_nothing_wrong_and_leave_nothing(
    memory: MemoryKind,
) -> None:
    alone = LockedAlone(memory)
    with crowded(memory) as engine:
        clients = [Client(number, engine, alone) for number in range(16)]
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(client.run, 20) for client in clients]
            for future in futures:
                future.result(timeout=120)
        assert engine.stats().counters.recoveries == 0
    assert sum(client.n_ended + client.n_cancelled for client in clients) == 16 * 20
    assert sum(client.n_ended for client in clients) >= 16 * 20 * 0.6
    assert sum(client.n_cancelled for client in clients) > 10
    assert sum(client.reused for client in clients) > 0


def test_r21_whoever_finds_the_queue_full_is_told_when_to_come_again_and_then_served() -> None:
    alone = LockedAlone("hybrid")
    refusals: list[float] = []

    def insist(engine: Engine, number: int) -> None:
        asked = request(words(f"{number} insists", 60))
        while True:
            try:
                outcome = engine.generate(asked).outcome()
            except Busy as busy:
                refusals.append(busy.retry_after)
                time.sleep(0.002)
                continue
            assert outcome.tokens == alone(asked).tokens
            return

    with crowded("hybrid", patience=Patience(n_waiting=2)) as engine:
        with ThreadPoolExecutor(16) as pool:
            for future in [pool.submit(insist, engine, number) for number in range(40)]:
                future.result(timeout=WAIT)
        assert engine.stats().counters.busy == len(refusals) > 0
    assert all(seconds >= 1 for seconds in refusals)


def leave_before_the_first_event(stream: Stream) -> None:
    """Go away at once."""
    stream.cancel()


def leave_while_the_prompt_is_read(stream: Stream) -> None:
    """Go away after the first progress."""
    next(stream)
    stream.cancel()


def leave_at_the_last_event(stream: Stream) -> None:
    """Go away when all has been said."""
    n_text = 0
    for event in stream:
        n_text += isinstance(event, Text)
        if n_text == 4:
            stream.cancel()
            return


def leave_by_forgetting_the_stream(stream: Stream) -> None:
    """Go away without a word."""
    next(stream)
    stream.canceller()


@pytest.mark.parametrize(
    "leave",
    [
        leave_before_the_first_event,
        leave_while_the_prompt_is_read,
        leave_at_the_last_event,
        leave_by_forgetting_the_stream,
    ],
)
def test_r23_whenever_a_client_goes_the_next_request_is_served_at_once(
    leave: Callable[[Stream], None],
) -> None:
    alone = LockedAlone("hybrid")
    following = request(words("following", 60), max_tokens=4)
    with crowded("hybrid") as engine:
        for number in range(200):
            leave(engine.generate(request(words(f"{number} leaves", 200), max_tokens=4)))
            begun = time.monotonic()
            assert engine.generate(following).outcome().tokens == alone(following).tokens
            assert time.monotonic() - begun < 1.0


def test_r41_a_client_that_goes_while_its_prompt_is_read_stops_the_next_batch() -> None:
    runtime = Gated(free=3, n_batch=64)
    asked = request(words("long", 20 * 64), max_tokens=5)
    with Engine.over(lambda: runtime) as engine:
        stream = engine.generate(asked)
        assert runtime.has_stopped.wait(WAIT)  # in the fourth of twenty batches
        stream.cancel()
        runtime.go_on()
        outcome = stream.outcome()
        assert outcome.finish_reason == "cancelled"
        assert runtime.calls == [64] * 4
        again = engine.generate(asked).outcome()
        assert again.usage.cached_tokens == 4 * 64
        assert again.tokens == Alone("hybrid", 4096, 0)(asked).tokens


def test_r41_a_client_that_goes_while_its_reply_is_written_stops_the_next_token() -> None:
    runtime = Gated(free=12)
    asked = request(words("short", 30), max_tokens=400)
    with Engine.over(lambda: runtime) as engine:
        stream = engine.generate(asked)
        assert runtime.has_stopped.wait(WAIT)
        stream.cancel()
        runtime.go_on()
        said = stream.outcome().tokens
        assert len(runtime.calls) == 13
        wanted = Alone("hybrid", 4096, 0)(asked).tokens
        assert said == wanted[: len(said)]
        engine.generate(request(words("other", 30))).outcome()
        assert engine.generate(asked).outcome().tokens == wanted


# ---- R24: answers that leak into others under load ----------------------------------------------


@every_kind
@pytest.mark.parametrize("n_lanes", [4, 16])
def test_r24_sixteen_chats_at_once_that_look_alike_each_get_their_own(
    memory: MemoryKind, n_lanes: int
) -> None:
    simulated = front(memory, n_lanes, n_sequences=40, n_cells=16_384)
    chats = [
        Talk(words("the same for all", 200) + f"the code word is {n:02}".encode())
        for n in range(16)
    ]
    converse(simulated, chats, 3)
    said = {tuple(chat.history[-12:]) for chat in chats}
    assert len(said) == 16


# ---- R25 to R29: wrong answers after reuse ------------------------------------------------------


@every_kind
@pytest.mark.parametrize("n_lanes", [1, 2])
def test_r25_the_same_after_the_same_start_is_the_same_fifty_times(
    memory: MemoryKind, n_lanes: int
) -> None:
    """In between others, shorter and longer ones too, take the rows that lay beyond it."""
    metered = meter(memory, n_lanes, n_sequences=n_lanes + 4, n_context=1024)
    assert reports.the_same_again(metered, 50, start=300) == 1


@every_kind
def test_r26_a_long_history_is_answered_the_same_cold_warm_and_after_detours(
    memory: MemoryKind,
) -> None:
    """19,000 tokens of numbers to be copied."""
    metered = meter(memory, n_context=20_480)
    said = reports.a_table_to_copy(metered, 19_000, reply=100)
    assert [answer.cached > 0 for answer in said] == [False, True, True]
    assert len({answer.outcome.tokens for answer in said}) == 1


@pytest.mark.parametrize("n_scripts", [25])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("memory", ["hybrid", "windowed"])
def test_r26_whatever_is_edited_in_whatever_order_is_answered_as_cold(
    memory: MemoryKind, seed: int, n_scripts: int
) -> None:
    """200 scripts in all: append, fork, shrink, regenerate and other chats in between."""
    rng = random.Random(seed)
    metered = meter(memory, n_sequences=rng.randrange(2, 9), n_context=1024)
    n_asked = reports.edit_scripts(metered, rng, n_scripts, 6)
    assert sum(metered.spent) < sum(metered.new) < n_asked


@every_kind
def test_r27_no_state_is_ever_kept_beyond_what_was_fed(memory: MemoryKind) -> None:
    """Between any two steps every sequence holds what it is said to; `Front.step` checks."""
    for longest, n_fed in reports.beyond_what_was_fed(meter(memory), 2000, reply=60):
        assert 2000 <= longest <= n_fed


@every_kind
def test_r29_wherever_a_prompt_is_cut_and_whatever_is_kept_the_reply_is_one(
    memory: MemoryKind,
) -> None:
    """On real models `test_exact` and `test_gate` show the same."""
    said = set()
    asked = request(words("prompt", 1500), turn=1480, base=700, max_tokens=40)
    for n_batch in (32, 64, 512):
        for checkpoints in (True, False):
            options = Options(checkpoints=checkpoints)
            front = simulated(memory, options, n_batch=n_batch)
            said |= {front.ask(asked).tokens, front.ask(asked).tokens}
    assert len(said) == 1


# ---- R28: the identical prompt again ------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("turn", [0, 580])
def test_r28_a_prompt_sent_again_evaluates_next_to_nothing(memory: MemoryKind, turn: int) -> None:
    simulated = front(memory)
    asked = request(words("again", 600), turn=turn, max_tokens=30)
    drawn = replace(asked, sampling=Sampling(temperature=1.0, seed=2))
    for each in (asked, drawn, replace(asked, max_tokens=0), replace(asked, max_tokens=1), asked):
        (answer,) = simulated.ask_all([each])
        assert answer.outcome.usage.prefilled_tokens == (1 if answer.cached else 600)
    assert answer.cached == 599
    assert simulated.core.counters.prefilled == 600 + 4


# ---- R33, R34: memory ---------------------------------------------------------------------------


class Weighed(bytes):
    """A saved state that counts while it lives."""

    total = most = 0

    def __new__(cls, blob: bytes) -> Weighed:
        """Count it in."""
        Weighed.total += len(blob)
        Weighed.most = max(Weighed.most, Weighed.total)
        return super().__new__(cls, blob)

    def __del__(self) -> None:
        Weighed.total -= len(self)


def weigh(simulated: Simulated) -> None:
    """Have every state that the runtime saves counted from now on."""
    gc.collect()
    Weighed.total = Weighed.most = 0
    for name in ("save", "save_rows", "save_state"):
        method = getattr(simulated.simulation.runtime, name)

        def saving(*arguments: Any, method: Callable[..., bytes] = method) -> bytes:
            return Weighed(method(*arguments))

        setattr(simulated.simulation.runtime, name, saving)


@every_kind
@pytest.mark.parametrize("copies", [True, False])
def test_r33_states_in_host_memory_never_take_more_than_their_budget(
    memory: MemoryKind, copies: bool
) -> None:
    """Counted where they are made, so that what is on its way counts as well."""
    n_bytes = 64_000
    simulated = front(
        memory, 2, n_sequences=4, n_context=8192, exported_bytes=n_bytes, copies=copies
    )
    weigh(simulated)
    chats = [Talk(words(f"{n} session", 500), f"session {n}") for n in range(10)]
    for _ in range(2):
        for first in range(0, 10, 2):
            pair = chats[first : first + 2]
            answers = simulated.ask_all([chat.turn(b"go on") for chat in pair])
            for chat, answer in zip(pair, answers, strict=True):
                chat.hear(answer)
    assert simulated.core.counters.exported_checkpoints > 5
    assert 0 < Weighed.most <= n_bytes
    for chat in chats:
        assert chat.conversation is not None
        simulated.core.forget(chat.conversation)
    gc.collect()
    assert Weighed.total == 0


@every_kind
@pytest.mark.parametrize("exported_bytes", [0, 200_000])
def test_r34_a_hundred_sessions_made_and_deleted_leave_nothing(
    memory: MemoryKind, exported_bytes: int
) -> None:
    simulated = front(memory, 2, n_sequences=3, exported_bytes=exported_bytes)
    held: list[int] = []
    tracemalloc.start()
    try:
        for number in range(N_RECORDS + 41):
            session(simulated, number)
            assert sum(simulated.core.occupancy().checkpoints.values()) == 0
            if number % 20 == 0 and number >= N_RECORDS:  # so many are remembered, and no more
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    occupancy = simulated.core.occupancy()
    assert (occupancy.sequences_used, occupancy.cells_used, occupancy.exported_bytes) == (0, 0, 0)
    assert simulated.simulation.runtime.used_cells == 0
    assert held[-1] - held[0] < 80 * 100  # bytes; a session's tokens alone take thousands


def session(simulated: Simulated, number: int) -> None:
    """Hold two turns of a session and delete it, now and then in the middle of a third."""
    name = f"session {number}"
    chat = Talk(words(name, 200), name, max_tokens=4)
    for end in (0, 200 + len(b"<user>go on")):
        answer = simulated.submit(chat.turn(b"go on"))
        simulated.run()
        simulated.check_reused(answer, end)
        chat.hear(answer)
    if number % 25 == 0:  # by an oracle that remembers nothing either
        alone = Alone(simulated.memory, n_context=4096, end_every=0)
        assert answer.outcome.tokens == alone(answer.request).tokens
    if number % 3 == 0:
        answer = simulated.submit(chat.turn(b"go on"))
        simulated.step(number % 4)
        answer.cancel()
    simulated.core.forget(name)
    simulated.run()


# ---- R36, R38, R39: full contexts and odd sizes -------------------------------------------------


@every_kind
def test_r36_a_reply_ends_where_the_context_is_full_and_the_next_is_right(
    memory: MemoryKind,
) -> None:
    simulated = front(memory, 2, n_context=256, n_cells=1024)
    full = [request(words(name, 250), max_tokens=60) for name in ("one", "two")]
    for answer in simulated.ask_all(full):
        assert answer.outcome.finish_reason == "length"
        assert len(answer.outcome.tokens) == 256 - 250 + 1
    simulated.ask_all([request(words("next", 100))])
    again = simulated.ask_all(full)
    assert [answer.cached for answer in again] == [249, 249]


@every_kind_with_cells
def test_r36_two_that_fill_the_pool_between_them_both_end_well(memory: MemoryKind) -> None:
    simulated = front(memory, 2, n_context=256, n_cells=256, exported_bytes=ROOM)
    simulated.ask_all(
        request(words(name, 100), max_tokens=120, priority=priority)
        for name, priority in (("one", "default"), ("two", "background"))
    )


@every_kind
@pytest.mark.parametrize("n_batch", [1, 7, 32, 512])
def test_r38_prompts_of_any_length_in_batches_of_any_size_are_right_thrice(
    memory: MemoryKind, n_batch: int
) -> None:
    simulated = front(memory, 2, n_sequences=24, n_batch=n_batch)
    lengths = sorted({1, n_batch - 1, n_batch, n_batch + 1, 3 * n_batch + 1} - {0})
    for _ in range(3):
        answers: list[Answer] = []
        for length in lengths:
            asked = request(words(f"{length} long", length), turn=length // 2, max_tokens=3)
            answers += simulated.ask_all([asked])
    for answer in answers:
        assert answer.cached >= len(answer.request.tokens) - 7


@every_kind
@pytest.mark.parametrize("short_by", [1, 5, 40])
def test_r39_without_checkpoints_big_prompts_are_read_cold_and_right(
    memory: MemoryKind, short_by: int
) -> None:
    simulated_ = simulated(
        memory, Options(checkpoints=False), n_sequences=1, n_context=300, n_batch=64
    )
    for _ in range(2):
        (answer,) = simulated_.ask_all([request(words("big", 300 - short_by), max_tokens=100)])
        assert answer.cached == 0
        assert len(answer.outcome.tokens) == short_by + 1
    assert simulated_.core.occupancy().sequences_used == 0


def test_r41_time_spent_for_a_client_that_has_gone_is_a_chunk_at_most() -> None:
    clock_cost = Cost(call=0.05, token=0.001)
    simulated = front(n_lanes=1, n_batch=64, cost=clock_cost)
    assert isinstance(simulated.simulation.clock, ManualClock)
    answer = simulated.submit(request(words("long", 2000)))
    simulated.step(3)
    answer.cancel()
    gone = simulated.simulation.clock()
    following = simulated.submit(request(words("next", 20), max_tokens=1))
    simulated.step_until(lambda: following.is_over)
    simulated.compare(following)
    waited = simulated.simulation.clock() - gone
    assert waited <= 2 * (0.05 + 20 * 0.001)  # its own two chunks, nothing of the other's
