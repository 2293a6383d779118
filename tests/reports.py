"""What field reports ask of an engine, on whatever runtime: requests, and what they may cost.

A `Meter` asks one request at a time, compares every reply with a cold one, and what usage reports
with what the decode call was handed. A scenario is a function of a meter and of sizes; it leaves
the figures in the meter, and the test that called it holds them against the report's ceiling.
Prompts are made of ids below 128, which every vocabulary has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from scenarios import OPENER, Answer, Front, words
from traces import Message, Session, Trie, asking, fed

from orchestrator.engine.request import Request
from orchestrator.pool.index import common_length, pack

BOUNDARY = 8
"""C2: tokens evaluated beyond what is new, where a state is kept at every boundary."""
INTERVAL = 256
"""C1: the same where a prompt parts from an earlier one at no boundary: a batch."""

TEMPLATES = {"plain": (False, False), "replayed": (True, False), "dropped": (True, True)}
"""Whether the generation prompt opens a reasoning block, and whether history drops it."""


class Meter:
    """Asks, compares every reply with the cold one, and knows what had been evaluated before.

    It knows that from the tokens alone: one of a prompt is new where no prompt or reply before
    had the same at its place, after the same. `taken` returns how many tokens the decode call was
    handed since it was asked last. Of the replies every so many are compared, the first among them.
    """

    def __init__(self, front: Front, taken: Callable[[], int], compare_every: int = 1) -> None:
        self.front = front
        self.new: list[int] = []
        self.spent: list[int] = []  # what was evaluated beyond that, for each request
        self._taken = taken
        self._compare_every = compare_every
        self._trie = Trie()

    def ask(self, asked: Request) -> Answer:
        """Run a request to its end."""
        (answer,) = self.ask_all([asked])
        return answer

    def ask_all(self, asked: Sequence[Request]) -> list[Answer]:
        """Run requests to their end that come at once."""
        self._taken()
        answers = [self.front.submit(each) for each in asked]
        self.front.run()
        paths = [fed(answer.request, answer.outcome) for answer in answers]
        evaluated, counted = self._taken(), 0
        for answer, path in zip(answers, paths, strict=True):
            usage, fed_back = answer.outcome.usage, len(path) - len(answer.request.tokens)
            counted += usage.prefilled_tokens + usage.replayed_tokens + fed_back
            self._note(answer, [other for other in paths if other is not path])
        assert evaluated == counted, "usage does not tell what the decode call was handed"
        for path in paths:
            self._trie.grow(path)
        return answers

    def _note(self, answer: Answer, beside: Sequence[tuple[int, ...]]) -> None:
        usage, tokens = answer.outcome.usage, answer.request.tokens
        shared = [common_length(pack(tokens), pack(path)) for path in beside]
        before = min(max(self._trie.common(tokens), *shared, 0), len(tokens) - 1)
        assert usage.cached_tokens + usage.prefilled_tokens == len(tokens)
        assert usage.cached_tokens <= before, "more was reused than was ever evaluated"
        if len(self.new) % self._compare_every == 0:
            self.front.compare(answer)
        self.new.append(len(tokens) - before)
        self.spent.append(usage.prefilled_tokens - self.new[-1])

    def say(self, chat: Session, role: str, length: int, max_tokens: int = 10) -> Answer:
        """Add a message to a chat, ask for a reply and add that too."""
        chat.messages.append(Message(role, text(f"message {len(self.new)}", length)))
        answer = self.ask(chat.request(max_tokens))
        said = answer.outcome.tokens
        chat.messages.append(Message("a", said, len(said) // 2 if chat.thinks else 0))
        return answer


def text(name: str, length: int) -> tuple[int, ...]:
    """Return the tokens of a message; no two begin alike."""
    return tuple(words(name, 40 + length)[40:])


def chat_under(length: int, template: str = "plain", name: str = "system") -> Session:
    """Return a chat under a system text of some length."""
    return Session(text(name, length), *TEMPLATES[template])


# ---- R01 to R08: the conversation is read again -------------------------------------------------


def two_lines(meter: Meter, template: str) -> None:
    """R01: a chat of two turns that is shorter than any interval."""
    chat = chat_under(20, template)
    for _ in range(2):
        meter.say(chat, "u", 8)


def appending(meter: Meter, n_turns: int, head: int, message: int, reply: int) -> int:
    """R02: turns that only append. Returns the length of the last prompt."""
    chat = chat_under(head, "replayed")
    for _ in range(n_turns):
        answer = meter.say(chat, "u", message, max_tokens=reply)
    return len(answer.request.tokens)


def tool_rounds(meter: Meter, template: str, head: int, message: int, reply: int) -> None:
    """R03, R04: questions, and tool rounds between them."""
    chat = chat_under(head, template)
    for role in ("u", "t", "u", "t", "t", "u", "t"):
        meter.say(chat, role, message, max_tokens=reply)


def an_empty_reasoning_block(meter: Meter, message: int) -> None:
    """R05: the generation prompt ends with one, and history leaves it out."""
    chat = chat_under(50, "dropped")
    meter.say(chat, "u", message, max_tokens=2)
    chat.messages[-1] = replace(chat.messages[-1], reasoning=0)
    meter.say(chat, "u", 30)


def a_trimmed_reply(meter: Meter, template: str, reply: int) -> None:
    """R07: the reply comes back without its last tokens."""
    chat = chat_under(100, template)
    meter.say(chat, "u", 50, max_tokens=reply)
    chat.messages[-1] = replace(chat.messages[-1], text=chat.messages[-1].text[:-3])
    meter.say(chat, "u", 30)


# ---- R09 to R11: what others read before --------------------------------------------------------


def strangers_under_one_head(meter: Meter, n_requests: int, head: int) -> int:
    """R09: chats of one turn under one system text. Returns how many started past it."""
    answers = [meter.say(chat_under(head), "u", 20) for _ in range(n_requests)]
    return sum(answer.cached >= head for answer in answers)


def chats_and_edited_chats(meter: Meter, head: int, message: int) -> None:
    """R10: three chats of three turns, then each asked otherwise from some turn on."""
    chats = [chat_under(head, name=f"{number} system") for number in range(3)]
    for chat in chats:
        for _ in range(3):
            meter.say(chat, "u", message)
    for number, chat in enumerate(chats):
        edited = replace(chat, messages=chat.messages[: 2 * number])
        meter.say(edited, "u", message)


def a_fork_in_the_middle(meter: Meter) -> list[int]:
    """R11: kept at 100, 200, 300 and 400; one that parts at 250; the 400 again; the fork again.

    Returns from where each of these three started.
    """
    path = text("path", 400)
    for length in (100, 200, 300, 400):
        meter.ask(asking([*path[:length], *OPENER], turn=length, max_tokens=10))
    fork = asking([*path[:250], *words("other", 100), *OPENER], turn=350, max_tokens=10)
    again = asking([*path, *OPENER], turn=400, max_tokens=10)
    return [meter.ask(asked).cached for asked in (fork, again, fork)]


def random_forks(meter: Meter, rng: random.Random, n_requests: int, longest: int) -> int:
    """R11: paths that part from earlier ones anywhere. Returns how many tokens were asked."""
    paths = [text("path", longest)]
    for number in range(n_requests):
        path = rng.choice(paths)
        path = (*path[: rng.randrange(1, len(path))], *words(f"{number}", rng.randrange(1, 60)))
        paths.append(path)
        meter.ask(asking(path, turn=rng.randrange(len(path)), max_tokens=rng.choice([1, 9])))
    return sum(len(path) for path in paths[1:])


# ---- R12, R15, R16, R17, R19: the client changes what was said ----------------------------------


def stamped(minute: int, chat: Session, at: int) -> Session:
    """Return a chat with a clock in its system text, `at` so many tokens."""
    head = (*chat.head[:at], *b"now 10:%02d" % minute, *chat.head[at:])
    return replace(chat, head=head)


def a_clock(meter: Meter, chat: Session, n_turns: int, at: int) -> None:
    """R12: a chat whose system text tells the minute."""
    for minute in range(n_turns):
        meter.say(stamped(minute, chat, at), "u", 40)


def a_title_under_the_chat_s_name(meter: Meter, head: int) -> None:
    """R15: a client that names the chat in every request names it in a side request as well."""
    chat, aside = chat_under(head), chat_under(60, name="title")
    chat.name = aside.name = "chat"
    meter.say(chat, "u", 40)
    meter.say(aside, "u", 340)
    meter.say(chat, "u", 40)


def a_blanked_output(meter: Meter, n_rounds: int, output: int) -> None:
    """R16: of so many tool rounds the output of the third is blanked in the end."""
    chat = chat_under(200)
    meter.say(chat, "u", 50)
    for _ in range(n_rounds):
        meter.say(chat, "t", output)
    third = 2 + 2 * 2
    assert chat.messages[third].role == "t"
    chat.messages[third] = replace(chat.messages[third], text=text("blank", 6))
    meter.say(chat, "t", output)


def a_note_above_the_end(meter: Meter, n_turns: int, message: int, reply: int) -> None:
    """R17: a note that stays four messages above the end."""
    chat, note = chat_under(200), Message("s", text("the note", 20))
    for number in range(n_turns):
        chat.messages.append(Message("u", text(f"message {number}", message)))
        shown = [*chat.messages[:-4], note, *chat.messages[-4:]]
        answer = meter.ask(replace(chat, messages=shown).request(reply))
        chat.messages.append(Message("a", answer.outcome.tokens))


def a_reply_cut_by_the_template(meter: Meter, end: slice, head: int, reply: int) -> int:
    """R19: a reply comes back cut. Returns what was evaluated past the end of the prompt before.

    That is what must be evaluated in any case, save for the reply.
    """
    chat = chat_under(head)
    answer = meter.say(chat, "u", 100, max_tokens=reply)
    chat.messages[-1] = replace(chat.messages[-1], text=chat.messages[-1].text[end])
    following = meter.say(chat, "u", 40)
    rest = len(following.request.tokens) - len(answer.request.tokens)
    return following.outcome.usage.prefilled_tokens - rest


# ---- R25 to R28: wrong answers after reuse ------------------------------------------------------


def the_same_again(meter: Meter, n_times: int, start: int) -> int:
    """R25: the same after the same start, with others in between that take the rows beyond it.

    Returns how many different replies there were.
    """
    head, rest = text("start", start), text("rest", 120)
    rng, said = random.Random(1), set[tuple[int, ...]]()
    for number in range(n_times):
        answer = meter.ask(asking([*head, *rest[:40]], turn=start, max_tokens=20))
        said.add(answer.outcome.tokens)
        assert answer.cached >= start or not number
        other = [*head, *rest[: rng.choice([5, 39, 80, 120])]]
        meter.ask(asking(other, turn=start, max_tokens=9))
        if number % 3 == 0:
            filler = words(f"{number} filler", start)
            meter.ask(asking(filler, turn=start - 10, max_tokens=5))
    return len(said)


def a_table_to_copy(meter: Meter, n_tokens: int, reply: int) -> list[Answer]:
    """R26: numbers to be copied. Returns the answers cold, warm, and after three detours."""
    rng = random.Random(26)
    table = "".join(f"{rng.randrange(10_000)};" for _ in range(n_tokens // 4)).encode()[:n_tokens]
    turn = n_tokens + len(b"Copy that.")
    asked = asking([*table, *b"Copy that.", *OPENER], turn=turn, max_tokens=reply)
    said = [meter.ask(asked), meter.ask(asked)]
    for number in range(3):
        cut = rng.randrange(n_tokens // 4, n_tokens)
        meter.ask(asking([*table[:cut], *words(f"{number}", 50)], max_tokens=20))
    return [*said, meter.ask(asked)]


def edit_scripts(
    meter: Meter, rng: random.Random, n_scripts: int, n_steps: int, n_lanes: int = 1
) -> int:
    """R26: scripts that append, fork, shrink or regenerate, two more of them under way than lanes.

    Their steps take turns at random, `n_lanes` at once. Returns the tokens of all prompts.
    """
    waiting = [Script(number, rng) for number in range(n_scripts)]
    asked = 0
    under_way: list[Script] = []
    while waiting or under_way:
        while waiting and len(under_way) < n_lanes + 2:
            under_way.append(waiting.pop())
        stepping = rng.sample(under_way, min(n_lanes, len(under_way)))
        answers = meter.ask_all([script.step(rng) for script in stepping])
        for script, answer in zip(stepping, answers, strict=True):
            script.history += answer.outcome.tokens
            asked += len(answer.request.tokens)
        under_way = [script for script in under_way if script.n_steps < n_steps]
    return asked


class Script:
    """A history that is edited again and again; every fifth begins alike."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.history = text(f"{number % 5} script", rng.randrange(20, 80))
        self.n_steps = 0
        self._number = number

    def step(self, rng: random.Random) -> Request:
        """Edit the history and return the request for what comes next, or for the same again."""
        self.history = edited(self.history, rng, f"{self._number} {self.n_steps}")
        self.n_steps += 1
        turn = max(1, len(self.history) - rng.randrange(20))
        return asking(self.history, turn=turn if turn < len(self.history) else 0, max_tokens=8)


def edited(history: tuple[int, ...], rng: random.Random, name: str) -> tuple[int, ...]:
    """Return a history after some change."""
    cut = rng.randrange(1, len(history))
    more = tuple(words(name, rng.randrange(1, 50)))
    changes = [history + more, history[:cut] + more, history[:cut], history[:-8] or history]
    return rng.choices(changes, [4, 2, 1, 1])[0]


def beyond_what_was_fed(meter: Meter, head: int, reply: int) -> list[tuple[int, int]]:
    """R27: two turns. Returns, after each, the longest state that is kept and what was fed."""
    chat, found = chat_under(head), []
    for _ in range(2):
        answer = meter.say(chat, "u", 40, max_tokens=reply)
        kept = [each.length for each in meter.front.core._keeper.pool.checkpoints]
        found.append((max(kept), len(fed(answer.request, answer.outcome))))
    return found
