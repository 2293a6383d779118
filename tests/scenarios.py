"""What several users do to one engine at once, and what must come of it, on any runtime.

A scenario is a function of a `Front`: a core that is stepped by hand, what must hold of it after
each step, and an oracle that answers every request cold and alone. Prompts are made of ids below
128, which every vocabulary has. Whatever is reused is asserted, and every reply is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulation import Simulation, request

from orchestrator.engine.core import Core, Options
from orchestrator.engine.request import Event, Finished, Outcome, Request, Text
from orchestrator.engine.ticket import Ticket
from orchestrator.errors import OrchestratorError
from orchestrator.runtime.protocol import MemoryKind
from orchestrator.runtime.simulated import Cost
from orchestrator.text.codec import ChatCodec

N_STEPS = 100_000
OPENER = b"<assistant>[think]\n"  # the generation prompt; the history drops what it opens
REPLY = b"<assistant>"


@dataclass(eq=False)
class Answer:
    """A request on its way, and what has been heard of it."""

    request: Request
    ticket: Ticket | None = None
    events: list[Event | OrchestratorError] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether its last event has come."""
        return bool(self.events) and isinstance(self.events[-1], Finished | OrchestratorError)

    @property
    def outcome(self) -> Outcome:
        """Its outcome; raises the error it ended with."""
        assert self.is_over, "the request has not ended"
        assert sum(isinstance(event, Finished | OrchestratorError) for event in self.events) == 1
        last = self.events[-1]
        if isinstance(last, OrchestratorError):
            raise last
        assert isinstance(last, Finished)
        assert last.outcome.text == "".join(e.text for e in self.events if isinstance(e, Text))
        return last.outcome

    @property
    def cached(self) -> int:
        """Tokens that were not evaluated."""
        return self.outcome.usage.cached_tokens

    def cancel(self) -> None:
        """Ask for its end."""
        assert self.ticket is not None
        self.ticket.cancel()


@dataclass
class Front:
    """A core to be asked, `check` for what must hold between steps, `cold` for the right reply."""

    core: Core
    memory: MemoryKind
    cold: Callable[[Request], Outcome]
    check: Callable[[], None]

    def submit(self, asked: Request) -> Answer:
        """Queue a request."""
        answer = Answer(asked)
        answer.ticket = self.core.submit(asked, answer.events.append)
        return answer

    def step(self, times: int = 1) -> None:
        """Take steps, checking after each."""
        for _ in range(times):
            self.core.step()
            self.check()

    def step_until(self, reached: Callable[[], bool]) -> None:
        """Step until something is so."""
        for _ in range(N_STEPS):
            if reached():
                return
            self.step()
        raise AssertionError("it never came to that")

    def run(self) -> None:
        """Step until nothing is left."""
        self.step_until(lambda: self.core.is_idle)

    def ask(self, asked: Request) -> Outcome:
        """Run one request to its end."""
        answer = self.submit(asked)
        self.run()
        return answer.outcome

    def ask_all(self, asked: Iterable[Request]) -> list[Answer]:
        """Submit requests at once and run them to their end; each reply must be the cold one."""
        answers = [self.submit(each) for each in asked]
        self.run()
        for answer in answers:
            self.compare(answer)
        return answers

    def compare(self, answer: Answer) -> None:
        """Assert that a request that ended well said what it says cold and alone."""
        wanted = self.cold(answer.request)
        assert answer.outcome.tokens == wanted.tokens
        assert answer.outcome.text == wanted.text

    def check_reused(self, answer: Answer, length: int) -> None:
        """Assert that a request started at `length`, or later where rows can be cut anywhere."""
        if self.memory == "attention":
            assert answer.cached >= length
        else:
            assert answer.cached == length


@dataclass
class Simulated(Front):
    """A front over the simulated runtime."""

    simulation: Simulation


def simulated(
    memory: MemoryKind = "hybrid",
    options: Options | None = None,
    *,
    cost: Cost | None = None,
    end_every: int = 0,
    **sizes: Any,
) -> Simulated:
    """Return a front over a simulated runtime of its own."""
    simulation = Simulation(memory, options=options, cost=cost, end_every=end_every, **sizes)
    alone = Alone(memory, simulation.runtime.limits.n_context, end_every)
    return Simulated(simulation.core, memory, alone, simulation.check, simulation)


class Alone:
    """Answers requests cold, each on an engine of its own, and remembers what it said."""

    def __init__(self, memory: MemoryKind, n_context: int, end_every: int) -> None:
        self._memory = memory
        self._n_context = n_context
        self._end_every = end_every
        self._said: dict[object, Outcome] = {}

    def __call__(self, asked: Request) -> Outcome:
        """Return what an uncached engine answers."""
        key = (asked.tokens, asked.max_tokens, asked.stop, repr(asked.sampling))
        if key not in self._said:
            simulation = Simulation(
                self._memory,
                n_context=self._n_context,
                end_every=self._end_every,
                options=Options(checkpoints=False),
            )
            bare = replace(asked, deadline=None, priority="default", use_cache=False)
            self._said[key] = simulation.ask(bare)
        return self._said[key]


# ---- prompts ------------------------------------------------------------------------------------


def words(name: str, length: int) -> bytes:
    """Return `length` tokens that no other name's begin with."""
    rng = random.Random(name)
    lead = f"{name}: ".encode()[:length]
    return lead + bytes(rng.randrange(32, 127) for _ in range(length - len(lead)))


class Talk:
    """A chat in tokens. Its history renders differently from its generation prompt."""

    def __init__(self, head: bytes, conversation: str | None = None, **asking: Any) -> None:
        self.history: list[int] = [*head]
        self.conversation = conversation
        self.input_end = 0  # where the input of the latest turn ended
        self._asking = {"max_tokens": 12, **asking}

    def turn(self, text: bytes) -> Request:
        """Return the request of the next turn."""
        self.history += b"<user>" + text
        self.input_end = len(self.history)
        return request(
            [*self.history, *OPENER],
            turn=self.input_end,
            conversation=self.conversation,
            **self._asking,
        )

    def hear(self, answer: Answer) -> None:
        """Append the reply as history shows it."""
        self.history += [*REPLY, *answer.outcome.tokens]


def converse(
    front: Front, talks: Sequence[Talk], n_turns: int, size: int = 40, compare_every: int = 1
) -> None:
    """Hold chats turn by turn, all at once: each starts where its last input ended.

    The replies of every so many turns are compared, and always those of the last.
    """
    for number in range(n_turns):
        ends = [talk.input_end for talk in talks]
        asked = [talk.turn(words(f"turn {number}", size)) for talk in talks]
        answers = [front.submit(each) for each in asked]
        front.run()
        if (n_turns - 1 - number) % compare_every == 0:
            for answer in answers:
                front.compare(answer)
        for talk, answer, end in zip(talks, answers, ends, strict=True):
            if end:
                front.check_reused(answer, end)
            talk.hear(answer)


# ---- what must be shown -------------------------------------------------------------------------


def a_burst_that_shares_a_prefix(front: Front, n_requests: int, n_shared: int) -> None:
    """Requests at once with one prefix: one reads it, the others start at its end."""
    shared = words("shared", n_shared)
    asked = [request(shared + words(f"{n} own", 25)) for n in range(n_requests)]
    answers = front.ask_all(asked)
    assert sorted(answer.cached for answer in answers) == [0] + [n_shared] * (n_requests - 1)


def a_prompt_again(front: Front, n_prompt: int) -> None:
    """A prompt that is sent again evaluates its last token."""
    asked = request(words("again", n_prompt))
    for answer in [*front.ask_all([asked]), *front.ask_all([asked])]:
        front.compare(answer)
    usage = answer.outcome.usage
    assert (usage.cached_tokens, usage.prefilled_tokens) == (n_prompt - 1, 1)


def turns_of_a_codec(front: Front, codec: ChatCodec, n_turns: int) -> None:
    """A chat as a client sends it, in messages: turn n+1 starts where the input of turn n ended.

    Where the template shows the reply as it was said, it starts where the reply ended.
    """
    messages: list[dict[str, object]] = []
    end, said = 0, tuple[int, ...]()
    for number in range(n_turns):
        messages.append({"role": "user", "content": f"What about number {number}?"})
        prompt = codec.encode(messages)
        assert 0 < prompt.turn < len(prompt.tokens)
        (answer,) = front.ask_all([request(prompt.tokens, turn=prompt.turn)])
        if end:
            verbatim = prompt.tokens[: len(said)] == said
            front.check_reused(answer, len(said) - 1 if verbatim else end)
        end, said = prompt.turn, (*prompt.tokens, *answer.outcome.tokens)
        messages.append({"role": "assistant", "content": answer.outcome.text})


def branches(front: Front, n_turns: int) -> dict[int, tuple[int, int]]:
    """Hold a chat, then ask otherwise after each turn's input, the oldest first.

    Returns, for each turn, what its branch reused and where that turn's input ended.
    """
    talk, forks = Talk(words("head", 60)), []
    for number in range(n_turns):
        (answer,) = front.ask_all([talk.turn(words(f"turn {number}", 30))])
        forks.append((talk.input_end, [*talk.history]))
        talk.hear(answer)
    reused = {}
    for number, (end, history) in enumerate(forks, start=1):
        other = [*history, *REPLY, *words(f"other {number}", 20)]
        (answer,) = front.ask_all([request([*other, *OPENER], turn=len(other))])
        reused[number] = (answer.cached, end)
    return reused


def two_that_share_a_beginning(front: Front, n_shared: int) -> None:
    """Two chats at once: the second starts past what they share, both go on where they were."""
    shared = words("shared", n_shared)
    talks = [Talk(shared + words(name, 30)) for name in ("one", "two")]
    answers = front.ask_all([talk.turn(b"hello") for talk in talks])
    assert sorted(answer.cached for answer in answers) == [0, n_shared]
    for talk, answer in zip(talks, answers, strict=True):
        talk.hear(answer)
    converse(front, talks, 2)


def one_waits_for_another_s_turn_point(front: Front) -> None:
    """A turn point that comes a few tokens before two requests part serves both."""
    history = words("history", 300)
    first = request([*history, *OPENER, *b"first"], turn=300)
    second = request([*history, *OPENER[:3], *words("second", 40)], turn=330)
    answers = front.ask_all([first, second])
    assert [answer.cached for answer in answers] == [0, 300]
    assert answers[1].outcome.usage.seeded_from == "turn"
    assert "shared" not in front.core.occupancy().checkpoints


def round_robin(front: Front, n_talks: int, n_rounds: int) -> None:
    """Chats that take turns, more than there are lanes: every return is warm."""
    talks = [Talk(words(f"talk {number}", 50), f"talk {number}") for number in range(n_talks)]
    converse(front, talks, n_rounds)
