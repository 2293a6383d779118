"""Shapes that prompts come in, and how little of each may be evaluated again.

Forks of a long path, agents that share a head, heads whose length nobody tells, a flood of cheap
requests. Ceilings are those of the project's aims; every reply is the cold one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from scenarios import OPENER, Answer, Front, Talk, simulated, words
from traces import CELL_BYTES, STATE_BYTES, asking, every_kind, holding, stage

from orchestrator.engine.core import Options
from orchestrator.engine.request import Request
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import MemoryKind

ROOM = 1 << 40


def prefilled(answer: Answer) -> int:
    """Return the tokens that were evaluated of a prompt."""
    return answer.outcome.usage.prefilled_tokens


def turn_of(prompt: Sequence[int], **more: Any) -> Request:
    """Return the request of a chat whose input is `prompt`."""
    return asking([*prompt, *OPENER], turn=len(prompt), **{"max_tokens": 6, **more})


# ---- A, B, A ------------------------------------------------------------------------------------


class Detours:
    """Asks something, something else that begins alike, and the first again, with much between."""

    def __init__(self, memory: MemoryKind, seed: int) -> None:
        self.rng = random.Random(seed)
        self.budgets = Budgets(
            resident_cells=self.rng.choice([None, 600, 1200]),
            exported_bytes=self.rng.choice([0, 60_000, ROOM]),
        )
        n_lanes = self.rng.randrange(1, 4)
        self.front = simulated(
            memory,
            Options(n_lanes=n_lanes, budgets=self.budgets),
            n_sequences=n_lanes + self.rng.randrange(1, 7),
            n_context=1024,
            n_cells=self.rng.choice([1100, 2048, 4096]),
            n_batch=self.rng.choice([16, 64, 256]),
        )
        self.heads = [words(f"head {n}", self.rng.randrange(40, 700)) for n in range(3)]
        self.n_warm = 0

    def there_and_back(self) -> None:
        """Ask A, B, whatever else, and A; the third answer is the first one's, warm or cold."""
        head = self.rng.choice(self.heads)
        there, other = self._beginning_with(head), self._beginning_with(head)
        (first,) = self.front.ask_all([there])
        self.front.ask_all([other])
        for _ in range(self.rng.randrange(5)):
            self.rng.choice([self._fill, self._fork, self._shrink, self._forget])()
        (third,) = self.front.ask_all([there])
        assert third.outcome.tokens == first.outcome.tokens
        self.n_warm += third.cached > 0

    def _beginning_with(self, head: bytes) -> Request:
        own = words(f"own {self.rng.random()}", self.rng.randrange(20, 120))
        return turn_of(
            head + own,
            base=self.rng.choice([0, len(head)]),
            conversation=self.rng.choice([None, "one", "two"]),
            max_tokens=self.rng.choice([1, 8, 30]),
        )

    def _fill(self) -> None:
        """Have so much read that rows are freed and used again."""
        fillers = [words(f"{self.rng.random()}", self.rng.randrange(300)) for _ in range(3)]
        self.front.ask_all(turn_of(filler, max_tokens=2) for filler in fillers)

    def _fork(self) -> None:
        """Leave a head at some place that nobody marked."""
        head = self.rng.choice(self.heads)
        self.front.ask_all([self._beginning_with(head[: self.rng.randrange(1, len(head))])])

    def _shrink(self) -> None:
        """Take the budgets away for a moment."""
        self.front.core.resize(Budgets(resident_cells=100))
        self.front.check()
        self.front.core.resize(self.budgets)

    def _forget(self) -> None:
        self.front.core.forget("one")
        self.front.check()


@pytest.mark.parametrize("seed", range(8))
@every_kind()
def test_a_prompt_after_detours_is_answered_as_at_first_or_cold(
    memory: MemoryKind, seed: int
) -> None:
    detours = Detours(memory, seed)
    for _ in range(15):
        detours.there_and_back()
    assert detours.n_warm > 0


# ---- forks of one long path ---------------------------------------------------------------------

PATH, N_KEPT = 6400, 8
SPACING = PATH // N_KEPT


def forked(memory: MemoryKind, seed: int) -> tuple[list[int], Answer]:
    """Read a long path, leave it at 40 places, ask for it again.

    Returns what each fork evaluated of the path, and the last answer. There is room for eight
    states, be they sequences or in host memory, and for no second copy of the rows.
    """
    front = stage(
        memory,
        1,
        holding(PATH + 2000, N_KEPT),
        n_sequences=1 + N_KEPT,
        n_context=8192,
    )
    assert N_KEPT * (STATE_BYTES + CELL_BYTES) < PATH * CELL_BYTES
    rng, path = random.Random(seed), words(f"path {seed}", PATH)
    front.ask_all([turn_of(path)])
    spent = []
    for number in range(40):
        depth = rng.randrange(1, PATH)
        own = words(f"{number} own", 30)
        (answer,) = front.ask_all([turn_of(path[:depth] + own)])
        spent.append(prefilled(answer) - len(own) - len(OPENER))
    return spent, front.ask_all([turn_of(path)])[0]


FORKED = [*((memory, seed) for memory in ("hybrid", "attention") for seed in (1, 2))]


@pytest.mark.parametrize(("memory", "seed"), [*FORKED, ("recurrent", 1), ("windowed", 1)])
def test_no_fork_of_a_long_path_costs_more_than_twice_the_even_spacing(
    memory: MemoryKind, seed: int
) -> None:
    spent, again = forked(memory, seed)
    assert max(spent) <= 2 * SPACING
    assert prefilled(again) <= 2 * SPACING


# ---- a main agent and its sub-agents ------------------------------------------------------------

HEAD, MAIN = 6000, 30_000
NAMES: dict[str, Sequence[str | None]] = {
    "nobody": [None] * 4,
    "each": ["main", "one", "two", "three"],
    "all alike": ["main"] * 4,
}


def agents(named: str) -> list[Talk]:
    """Return a main agent of 30,000 tokens and three sub-agents under the same head."""
    head = words("head", HEAD)
    done = words("what was done so far", MAIN - HEAD)
    bodies = (done, b"", b"", b"")
    return [Talk(head + body, n, base=HEAD) for n, body in zip(NAMES[named], bodies, strict=True)]


def tell(front: Front, talks: Sequence[Talk], *, at_once: bool, text: str) -> list[Answer]:
    """Take a turn of each, one after the other or at once."""
    asked = [talk.turn(words(f"{text} {n}", 300)) for n, talk in enumerate(talks)]
    groups = [asked] if at_once else [[each] for each in asked]
    answers = [answer for group in groups for answer in front.ask_all(group)]
    for talk, answer in zip(talks, answers, strict=True):
        talk.hear(answer)
    return answers


@pytest.mark.parametrize(("named", "at_once"), [("nobody", True), ("each", False)])
@every_kind()
def test_sub_agents_start_from_the_shared_head_and_the_main_agent_where_it_was(
    memory: MemoryKind, named: str, at_once: bool
) -> None:
    delegate(memory, named, at_once=at_once)


@every_kind()
def test_sub_agents_that_go_by_the_main_agent_s_name_do_not_push_it_out(memory: MemoryKind) -> None:
    delegate(memory, "all alike", at_once=False)


def delegate(memory: MemoryKind, named: str, *, at_once: bool) -> None:
    """Hold a long conversation, give three sub-agents two turns each, and go on with it."""
    front = simulated(
        memory,
        Options(n_lanes=4 if at_once else 1, budgets=Budgets(exported_bytes=ROOM)),
        n_sequences=12,
        n_context=32_768,
        n_cells=1 << 17,
    )
    main, *children = agents(named)
    tell(front, [main], at_once=at_once, text="begin")
    for answer in tell(front, children, at_once=at_once, text="task"):
        assert answer.cached >= HEAD
    ends = [child.input_end for child in children]
    for answer, end in zip(tell(front, children, at_once=at_once, text="go on"), ends, strict=True):
        assert answer.cached >= end
    end = main.input_end
    (answer,) = tell(front, [main], at_once=at_once, text="results")
    assert answer.cached >= end > MAIN


# ---- heads that nobody marks --------------------------------------------------------------------

LENGTHS = (20, 40, 63, 64, 65, 100, 369, 1000, 3000)


@pytest.mark.parametrize("length", LENGTHS)
@every_kind()
def test_of_requests_that_share_a_head_the_third_and_all_after_it_read_their_tails(
    memory: MemoryKind, length: int
) -> None:
    come_one_by_one(memory, length, Budgets(exported_bytes=ROOM))


@every_kind()
def test_a_shared_head_stays_also_where_there_is_no_host_memory(memory: MemoryKind) -> None:
    come_one_by_one(memory, 369, Budgets())


def come_one_by_one(memory: MemoryKind, length: int, budgets: Budgets) -> None:
    """Have 64 requests share a head that nobody marked; each has a tail of its own."""
    front = simulated(memory, Options(budgets=budgets), n_sequences=12, n_cells=16_384)
    rng, head = random.Random(length), words("head", length)
    for number in range(64):
        tail = rng.choices(range(32, 127), k=rng.randrange(5, 60))
        asked = turn_of([*head, *tail])
        answer = front.submit(asked)
        front.run()
        if number < 4 or number % 16 == 15:
            front.compare(answer)
        if number >= 2:
            assert prefilled(answer) <= len(tail) + len(OPENER) + 16
            assert answer.cached > 0


# ---- what is dear and what is cheap -------------------------------------------------------------


every_flood = pytest.mark.parametrize("n_cheap", [40, 400])


@every_flood
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("memory", ["hybrid", "windowed", "attention"])
def test_the_conversation_that_is_dearest_to_read_again_survives_a_flood_of_cheap_ones(
    memory: MemoryKind, named: bool, n_cheap: int
) -> None:
    """There are cells for it and for six of the cheap ones."""
    budgets = Budgets(resident_cells=5000 + 800)
    front = simulated(memory, Options(budgets=budgets), n_sequences=12, n_context=8192)
    outlive(front, n_cheap, named=named)


@every_flood
@pytest.mark.parametrize("named", [False, True])
@every_kind()
def test_the_dearest_conversation_survives_a_flood_also_where_sequences_are_few(
    memory: MemoryKind, named: bool, n_cheap: int
) -> None:
    front = simulated(memory, n_sequences=6, n_context=8192, n_cells=16_384)
    outlive(front, n_cheap, named=named)


def outlive(front: Front, n_cheap: int, *, named: bool) -> None:
    """Hold a long conversation, let short ones come, and go on with it."""
    talk = Talk(words("dear", 5000), "dear" if named else None)
    (answer,) = front.ask_all([talk.turn(b"hello")])
    talk.hear(answer)
    end = talk.input_end
    for number in range(n_cheap):
        name = f"cheap {number}" if named else None
        answer = front.submit(turn_of(words(f"{number} cheap", 80), conversation=name))
        while not front.core.is_idle:
            front.core.step()
        if number % 20 == 0:
            front.compare(answer)
            front.check()
    (answer,) = front.ask_all([talk.turn(b"and then?")])
    assert answer.cached >= end > 5000
