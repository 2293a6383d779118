"""What do people and agents ask of one engine within an hour, and what must it cost at least?

A trace is drawn by a seed and is a value: requests as a server would make them, when each comes,
and which replies it had to wait for. The replies in it are those of an uncached engine, so whoever
plays it compares every one, and one trace can be played with any budget and any number of lanes.

    head │ user │ assistant │ tool │ assistant │ user … │ generation prompt     a session
           ▲ branch from turn k        ▲ edit in the middle of a message

The ideal is counted on a trie of all that was fed, which is this module's own: a prompt token
costs 1 where it is evaluated for the first time, 0 anywhere else. A prompt that was wholly
evaluated before costs one token all the same (there are no logits without it); such prompts are
counted apart, so that 1.00 can be reached and is the physical limit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import pytest
from scenarios import Alone, Answer, Front
from simulation import KINDS, check

from orchestrator.engine.core import Core, Options
from orchestrator.engine.request import GREEDY, Outcome, Request, Sampling
from orchestrator.pool.plans import Budgets
from orchestrator.runtime.protocol import Limits, MemoryKind
from orchestrator.runtime.simulated import Cost, ManualClock, SimulatedRuntime
from orchestrator.text.bytes import ByteTokenizer

WHOLE: tuple[MemoryKind, ...] = ("hybrid", "recurrent", "windowed")
"""Memory whose states cannot be cut: what they start from was kept exactly there."""

N_CONTEXT = 4096
N_SEQUENCES = 32
MEAN_REPLY = 60  # tokens after which the model ends on average
STATE_BYTES, CELL_BYTES = 4_000_000, 40_000  # a state weighs as much as a hundred tokens
PACE = Cost(call=0.001, token=0.0005)  # a pass is worth two tokens, as on the demo model
MEAN_GAP = 0.15  # seconds between two requests: about what they take, so that some overlap

START, END, NEWLINE, THINK = 1, 2, 10, 3  # control bytes, which every vocabulary has
CLOSE = (END, NEWLINE)


# ---- what an engine cannot do yet ---------------------------------------------------------------


def every_kind(lacks: str = "", on: Sequence[MemoryKind] = WHOLE) -> pytest.MarkDecorator:
    """Parametrize over memory kinds; a test fails `on` some of them for what the engine lacks."""
    return pytest.mark.parametrize("memory", [kind(each, lacks, on) for each in KINDS])


def kind(memory: MemoryKind, lacks: str = "", on: Sequence[MemoryKind] = WHOLE) -> Any:
    """Return one memory kind as a parameter; see `every_kind`."""
    return pytest.param(memory, marks=lacking(lacks) if lacks and memory in on else ())


def lacking(what: str) -> pytest.MarkDecorator:
    """Mark a test that fails because the engine lacks something; to be removed once it does not."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=what)


# ---- requests -----------------------------------------------------------------------------------


def asking(tokens: Sequence[int], **more: Any) -> Request:
    """Return a greedy request."""
    return Request(tuple(tokens), **{"sampling": GREEDY, **more})


@dataclass(frozen=True, slots=True)
class Message:
    """One message; the first `reasoning` tokens of a reply are dropped by some templates."""

    role: str
    text: tuple[int, ...]
    reasoning: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A chat, a branch of one, or a sub-agent's; `after` are the steps that it goes on from.

    `thinks`: the generation prompt opens a reasoning block. `drops`: replies before the last
    user message are shown without their reasoning, as thinking templates do.
    """

    head: tuple[int, ...]
    thinks: bool = False
    drops: bool = False
    name: str | None = None
    messages: list[Message] = field(default_factory=list)
    after: tuple[int, ...] = ()
    asked: Request | None = None
    n_left: int | None = None  # turns of a sub-agent
    parent: Session | None = None
    n_children: int = 0

    @property
    def opener(self) -> tuple[int, ...]:
        """The generation prompt."""
        return (*_mark("a"), *((THINK, NEWLINE) if self.thinks else ()))

    def rendered(self) -> tuple[list[int], list[int]]:
        """Return what was said so far, and where messages begin that are not replies."""
        tokens, starts = list(self.head), []
        last_user = max((n for n, m in enumerate(self.messages) if m.role == "u"), default=0)
        for number, message in enumerate(self.messages):
            if message.role != "a":
                starts.append(len(tokens))
            tokens += self._shown(message, old=number < last_user)
        return tokens, starts

    def request(self, max_tokens: int, **more: Any) -> Request:
        """Return the request for what comes next."""
        tokens, starts = self.rendered()
        return asking(
            [*tokens, *self.opener],
            turn=len(tokens),
            base=len(self.head),
            starts=tuple(starts),
            max_tokens=max_tokens,
            conversation=self.name,
            **more,
        )

    def _shown(self, message: Message, *, old: bool) -> tuple[int, ...]:
        if message.role != "a":
            return (*_mark(message.role), *message.text, *CLOSE)
        if self.drops and old:
            return (*_mark("a"), *message.text[message.reasoning :], *CLOSE)
        return (*self.opener, *message.text, *CLOSE)


def _mark(role: str) -> tuple[int, ...]:
    return START, ord(role), NEWLINE


# ---- traces -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """A request of a trace and what an uncached engine says to it.

    It comes at `at` seconds, not before the steps `after` are over. `fed` is all that is
    evaluated for it: the prompt and the reply without a last token that was sampled only.
    """

    name: str
    request: Request
    wanted: Outcome
    at: float
    after: tuple[int, ...]

    @property
    def fed(self) -> tuple[int, ...]:
        """See the class."""
        return fed(self.request, self.wanted)


def fed(asked: Request, outcome: Outcome) -> tuple[int, ...]:
    """Return all that was evaluated of a prompt and its reply."""
    said = outcome.tokens
    return asked.tokens + (said if outcome.finish_reason == "stop" else said[:-1])


@dataclass(frozen=True, slots=True)
class Ideal:
    """Prompt tokens that had never been evaluated at their place, and prompts that wholly had."""

    new: int
    again: int

    @property
    def total(self) -> int:
        """The fewest tokens that any engine can prefill."""
        return self.new + self.again


@dataclass(frozen=True, slots=True)
class Trace:
    """What is asked, in order."""

    seed: int
    memory: MemoryKind
    steps: tuple[Step, ...]

    def ideal(self) -> Ideal:
        """Return what it costs at least."""
        trie, new, again = Trie(), 0, 0
        for step in self.steps:
            n_prompt = len(step.request.tokens)
            missing = n_prompt - trie.common(step.request.tokens)
            new, again = new + missing, again + (not missing)
            if not step.request.one_off:  # nobody is to find what such a request evaluated
                trie.grow(step.fed)
        return Ideal(new, again)


class Trie:
    """Every token at every place that it was fed, each a node by number; 0 is the root."""

    def __init__(self) -> None:
        self._edges: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._edges)

    def common(self, path: Sequence[int]) -> int:
        """Return how many tokens of a path stand in it."""
        return sum(1 for _ in self._along(path))

    def grow(self, path: Sequence[int]) -> list[int]:
        """Enter a path; return its nodes, one for each token."""
        node, nodes = 0, []
        for token in path:
            node = self._edges.setdefault((node, token), len(self._edges) + 1)
            nodes.append(node)
        return nodes

    def _along(self, path: Sequence[int]) -> Iterator[int]:
        node = 0
        for token in path:
            found = self._edges.get((node, token))
            if found is None:
                return
            node = found
            yield node


# ---- drawing one --------------------------------------------------------------------------------


@cache
def drawn(seed: int, memory: MemoryKind = "hybrid", n_steps: int = 200) -> Trace:
    """Return the trace of a seed for a simulated model of some kind."""
    return Author(seed, Alone(memory, N_CONTEXT, MEAN_REPLY)).write(n_steps, memory)


class Author:
    """Draws a trace; `answer` is the uncached engine that speaks in it."""

    def __init__(self, seed: int, answer: Callable[[Request], Outcome]) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._answer = answer
        self._steps: list[Step] = []
        self._sessions: list[Session] = []
        self._now = 0.0
        self._n_names = 0
        self._heads = [self._text(600, 900), self._text(150, 400), self._text(1200, 1800)]
        self._side_heads = [self._text(60, 200), self._text(40, 80)]

    def write(self, n_steps: int, memory: MemoryKind) -> Trace:
        """Return so many steps."""
        operations: list[tuple[Callable[[Session], None], int]] = [
            (self._append, 46),
            (self._begin, 12),
            (self._regenerate, 9),
            (self._branch, 9),
            (self._edit, 5),
            (self._ask_aside, 11),
            (self._delegate, 8),
        ]
        actions, weights = zip(*operations, strict=True)
        while len(self._steps) < n_steps:
            idle = [each for each in self._sessions if not each.n_children]
            if idle:
                self._rng.choices(actions, weights)[0](self._pick(idle))
            else:
                self._begin(None)
        return Trace(self._seed, memory, tuple(self._steps[:n_steps]))

    def _pick(self, sessions: list[Session]) -> Session:
        """Return a session, mostly one of those begun last; sub-agents do not wait long."""
        busy = [each for each in sessions if each.n_left is not None]
        if busy and self._rng.random() < 0.7:
            return self._rng.choice(busy)
        recent = sessions[-4:] if self._rng.random() < 0.7 else sessions
        return self._rng.choice(recent)

    # ---- what is done -------------------------------------------------------------------------

    def _begin(self, _: Session | None) -> None:
        """Begin a chat, under a head that others have or one of its own, with tools or without."""
        rng = self._rng
        head = rng.choice(self._heads) if rng.random() < 0.75 else self._text(30, 700)
        thinks = rng.random() < 0.6
        session = Session((*_mark("s"), *head, *CLOSE), thinks, thinks and rng.random() < 0.7)
        session.name = self._name()
        self._sessions.append(session)
        self._append(session)

    def _append(self, session: Session) -> None:
        """Go on with a user's message, or a tool's where the last one was no tool's for long."""
        rng, told = self._rng, len(session.messages) > 0
        if told and rng.random() < 0.4:
            session.messages.append(Message("t", self._long_tailed(70, 900)))
        else:
            session.messages.append(Message("u", self._long_tailed(35, 600)))
        self._ask("append", session)

    def _regenerate(self, session: Session) -> None:
        """Ask the same again, now and then with another seed, and keep the new reply."""
        if session.asked is None:
            return self._append(session)
        sampling = session.asked.sampling
        if self._rng.random() < 0.5:
            sampling = Sampling(temperature=1.0, seed=self._rng.randrange(1000))
        session.messages.pop()
        again = replace(session.asked, sampling=sampling)
        return self._hear("regenerate", session, again)

    def _branch(self, session: Session) -> None:
        """Ask otherwise at some turn; both branches may go on."""
        turns = [n for n, message in enumerate(session.messages) if message.role == "u"]
        at = self._rng.choice(turns)
        other = replace(session, messages=session.messages[:at], asked=None)
        other.n_left, other.parent = None, None
        if self._rng.random() < 0.5:
            other.name = self._name()
        other.messages.append(Message("u", self._long_tailed(35, 600)))
        self._sessions.append(other)
        self._ask("branch", other)

    def _edit(self, session: Session) -> None:
        """Change the second half of an earlier message, and go on as if nothing were."""
        rng = self._rng
        theirs = [n for n, message in enumerate(session.messages) if message.role != "a"]
        at = rng.choice(theirs)
        message = session.messages[at]
        half = len(message.text) // 2
        text = message.text[:half] + self._text(1, 2 + half)
        session.messages[at] = replace(message, text=text)
        session.messages.append(Message("u", self._long_tailed(35, 600)))
        self._ask("edit", session)

    def _ask_aside(self, session: Session) -> None:
        """Ask for a title or for tags of what was said; nothing of it comes back."""
        head = self._rng.choice(self._side_heads)
        first = [m for m in session.messages if m.role != "t"][:2]
        shown = [token for message in first for token in message.text]
        aside = Session((*_mark("s"), *head, *CLOSE), after=session.after)
        aside.messages.append(Message("u", tuple(shown[:400])))
        self._ask("aside", aside, max_tokens=6, one_off=self._rng.random() < 0.5)

    def _delegate(self, session: Session) -> None:
        """Give one to three sub-agents under the same head a task each; the chat waits for them."""
        if session.n_left is not None:
            return self._append(session)
        for _ in range(self._rng.randrange(1, 4)):
            child = Session(session.head, session.thinks, session.drops, self._name())
            child.after, child.parent = session.after, session
            child.n_left = self._rng.randrange(1, 4)
            child.messages.append(Message("u", self._long_tailed(60, 400)))
            session.n_children += 1
            self._sessions.append(child)
            self._ask("sub-agent", child)
        return None

    # ---- how ----------------------------------------------------------------------------------

    def _ask(self, name: str, session: Session, max_tokens: int = 0, **more: Any) -> None:
        most = max_tokens or min(150, 5 + len(self._long_tailed(35, 140)))
        asked = session.request(most, **more)
        if len(asked.tokens) + most <= N_CONTEXT:
            return self._hear(name, session, asked)
        if session in self._sessions:  # it has outgrown the context
            self._sessions.remove(session)
            self._report(session)
        return None

    def _hear(self, name: str, session: Session, asked: Request) -> None:
        wanted = self._answer(asked)
        self._now += self._rng.expovariate(1 / MEAN_GAP)
        self._steps.append(Step(name, asked, wanted, self._now, session.after))
        session.after = (len(self._steps) - 1,)
        session.asked = asked
        reasoning = self._rng.randrange(len(wanted.tokens) + 1) if session.thinks else 0
        session.messages.append(Message("a", wanted.tokens, reasoning))
        if session.n_left is not None:
            session.n_left -= 1
            if session.n_left == 0:
                self._sessions.remove(session)
                self._report(session)

    def _report(self, child: Session) -> None:
        """Hand what a sub-agent said last to the chat that waits for it."""
        parent = child.parent
        if parent is None:
            return
        said = child.messages[-1].text
        parent.messages.append(Message("t", said))
        parent.asked = None
        parent.after += child.after
        parent.n_children -= 1

    def _name(self) -> str | None:
        self._n_names += 1
        return f"chat {self._n_names}" if self._rng.random() < 0.5 else None

    def _long_tailed(self, median: int, most: int) -> tuple[int, ...]:
        length = int(self._rng.lognormvariate(0, 1) * median)
        return self._text(max(3, min(length, most)))

    def _text(self, least: int, below: int | None = None) -> tuple[int, ...]:
        length = least if below is None else self._rng.randrange(least, below)
        return tuple(self._rng.choices(range(32, 127), k=length))


# ---- playing one --------------------------------------------------------------------------------


@dataclass
class Stage(Front):
    """A front whose runtime weighs what a real one does, on a clock that its work moves."""

    runtime: SimulatedRuntime
    clock: ManualClock


def stage(
    memory: MemoryKind,
    n_lanes: int = 1,
    budgets: Budgets | None = None,
    *,
    n_sequences: int = N_SEQUENCES,
    n_context: int = N_CONTEXT,
    end_every: int = MEAN_REPLY,
) -> Stage:
    """Return a front with cells for all that its budgets allow, and for the lanes besides."""
    limits = Limits(
        n_sequences=n_sequences,
        n_cells=1 << 20,
        n_context=n_context,
        n_batch=256,
        state_bytes=STATE_BYTES,
        cell_bytes=CELL_BYTES,
    )
    clock = ManualClock()
    runtime = SimulatedRuntime(
        limits,
        memory=memory,
        tokenizer=ByteTokenizer.for_chat(),
        clock=clock,
        cost=PACE,
        end_every=end_every,
    )
    options = Options(n_lanes=n_lanes, budgets=budgets or holding())
    core = Core(runtime, clock, options)
    alone = Alone(memory, n_context, end_every)
    return Stage(core, memory, alone, partial(check, core, runtime), runtime, clock)


def holding(cells: int | None = None, states: int | None = None) -> Budgets:
    """Return budgets for so many cells, lanes included, and states in host memory; None: any."""
    if states is None:
        return _budgets(resident_cells=cells, exported_bytes=1 << 50, history=1 << 20)
    n_bytes = states * (STATE_BYTES + CELL_BYTES)  # what frames a state is less than a cell
    return _budgets(resident_cells=cells, exported_bytes=n_bytes, history=1 << 20)


def cramped(memory: MemoryKind, n_lanes: int, cells: int, states: int) -> Stage:
    """Return a front with room for so many cells, lanes included, and states, and no more.

    A sequence beyond the lanes' is a state that is allocated whether it is used or not, so half
    of the states, as far as there are sequences, are those and the rest is host memory.
    """
    n_spare = min(N_SEQUENCES - n_lanes, max(1, states // 2))
    budgets = holding(cells, max(0, states - n_spare))
    return stage(memory, n_lanes, budgets, n_sequences=n_lanes + n_spare)


def _budgets(**wanted: int | None) -> Budgets:
    """Return budgets, without those that there are not."""
    known = {each.name for each in fields(Budgets)}
    told: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    return Budgets(**told)


@dataclass(frozen=True, slots=True)
class Bill:
    """What playing a trace cost: tokens, and the least it can be."""

    prefilled: int
    replayed: int
    reused: int
    ideal: Ideal

    @property
    def evaluated(self) -> int:
        """All that was evaluated and had not just been sampled."""
        return self.prefilled + self.replayed

    @property
    def ratio(self) -> float:
        """The recompute ratio."""
        return self.evaluated / self.ideal.total


def play(trace: Trace, on: Stage) -> Bill:
    """Play a trace; every reply must be the uncached one, and usage what the decode call saw.

    What must hold between steps is checked whenever a request comes.
    """
    answers: list[Answer] = []
    for step in trace.steps:
        while not _may_come(step, answers, on):
            if on.core.is_idle:
                on.clock.advance(step.at - on.clock())
            else:
                on.core.step()
        on.check()
        answers.append(on.submit(step.request))
    on.run()
    for step, answer in zip(trace.steps, answers, strict=True):
        outcome = answer.outcome
        assert outcome.tokens == step.wanted.tokens, f"a {step.name} is not answered as cold"
        assert outcome.finish_reason == step.wanted.finish_reason
    return _billed(trace, answers, on)


def _may_come(step: Step, answers: Sequence[Answer], on: Stage) -> bool:
    return on.clock() >= step.at and all(answers[number].is_over for number in step.after)


def _billed(trace: Trace, answers: Sequence[Answer], on: Stage) -> Bill:
    usages = [answer.outcome.usage for answer in answers]
    for usage in usages:
        assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
    prefilled = sum(usage.prefilled_tokens for usage in usages)
    replayed = sum(usage.replayed_tokens for usage in usages)
    fed_back = sum(len(step.fed) - len(step.request.tokens) for step in trace.steps)
    assert on.runtime.decoded_tokens == prefilled + replayed + fed_back
    reused = sum(usage.cached_tokens for usage in usages)
    return Bill(prefilled, replayed, reused, trace.ideal())
