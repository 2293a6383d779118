"""A request that evaluates what was evaluated before says why, and where its prompt parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import OPENER, REPLY, Simulated, simulated, words
from simulation import request
from test_seen import lcp

from orchestrator.engine.core import Options
from orchestrator.engine.divergence import RUN_LEAST, Recurrence, recurring, shown, sides, spelled
from orchestrator.engine.engine import Engine
from orchestrator.engine.records import N_RECORDS, Record
from orchestrator.engine.request import GREEDY, Outcome
from orchestrator.engine.why import Earlier, Miss, Start, explain
from orchestrator.errors import InvalidArgument
from orchestrator.pool.index import common_length, pack
from orchestrator.pool.losses import Loss, LossCause
from orchestrator.pool.seen import Sighting
from orchestrator.runtime.protocol import Limits, MemoryKind
from orchestrator.runtime.simulated import SimulatedRuntime
from orchestrator.text.bytes import ByteTokenizer
from orchestrator.text.template import ChatTemplate

BYTES = ByteTokenizer.for_chat()


def ask(
    front: Simulated, *parts: bytes | Sequence[int], turn: bool = True, **asked: Any
) -> Outcome:
    """Ask with a chat of these parts, each a message; its generation prompt follows."""
    chat = [token for part in parts for token in part]
    ends = tuple(sum(map(len, parts[: at + 1])) for at in range(len(parts)))
    tokens = [*chat, *OPENER] if turn else chat
    return front.ask(request(tokens, turn=len(chat) if turn else 0, ends=ends, **asked))


def miss_of(outcome: Outcome) -> Miss:
    assert outcome.miss is not None
    usage = outcome.usage
    assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
    assert outcome.miss.tokens <= usage.prefilled_tokens
    return outcome.miss


SYSTEM = words("system", 200)
HELLO = words("hello", 59) + b"\n"


# ---- what is no miss, and what was never seen ---------------------------------------------------


def test_the_first_prompt_was_never_seen() -> None:
    outcome = ask(simulated(), SYSTEM, HELLO)
    assert outcome.miss == Miss("never seen", 0, message=0)
    assert outcome.usage.seen_tokens == 0


def test_a_prompt_that_shares_no_more_than_a_template_was_never_seen_either() -> None:
    front = simulated()
    ask(front, b"<system>be kind" + words("a", 300))
    miss = miss_of(ask(front, b"<system>be kind" + words("b", 300)))
    assert (miss.cause, miss.position, miss.tokens) == ("never seen", 15, 15)


def test_a_prompt_again_misses_nothing() -> None:
    front = simulated()
    ask(front, SYSTEM, HELLO)
    again = ask(front, SYSTEM, HELLO)
    assert again.miss is None
    assert again.usage.seen_tokens == again.usage.prompt_tokens


def test_a_chat_that_goes_on_verbatim_misses_nothing() -> None:
    front = simulated()
    chat = [*SYSTEM, *HELLO]
    for at in range(4):
        outcome = ask(front, chat, turn=False)
        assert outcome.miss == (None if at else Miss("never seen", 0, message=0))
        assert outcome.usage.seen_tokens == outcome.usage.cached_tokens
        chat += [*outcome.tokens, *words(f"turn {at}", 30)]


def test_a_chat_that_begins_again_under_its_old_name_was_never_seen() -> None:
    front = simulated()
    ask(front, b"<system>" + words("a", 300), conversation="a")
    for lead in (b"<system>", b""):
        miss = miss_of(ask(front, lead + words(f"b{lead!r}", 300), conversation="a"))
        assert (miss.cause, miss.tokens) == ("never seen", len(lead))


def test_another_chat_under_the_same_system_prompt_is_no_edit() -> None:
    front = simulated()
    ask(front, SYSTEM, words("one", 60), base=200)
    outcome = ask(front, SYSTEM, words("two", 60), base=200)
    assert (outcome.usage.cached_tokens, outcome.usage.seen_tokens) == (200, 200)
    assert outcome.miss is None


# ---- forks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["hybrid", "recurrent", "attention", "windowed"])
def test_a_clock_in_the_system_prompt_is_found(memory: MemoryKind) -> None:
    front = simulated(memory)
    head, tail = words("head", 100), b" in Berlin. " + words("tail", 80)
    first = ask(front, head + b" It is 10:01" + tail, HELLO, base=204)
    miss = miss_of(ask(front, head + b" It is 10:02" + tail, HELLO, base=204))
    assert (miss.cause, miss.position, miss.message) == ("edited", 111, 0)
    assert miss.in_system
    assert (miss.before, miss.after) == ("10:01", "10:02")
    reused = 111 if memory == "attention" else 0  # and one token is another
    assert miss.tokens == first.usage.prompt_tokens - len(OPENER) - 1 - reused


def test_a_message_blanked_in_mid_history_is_named() -> None:
    front = simulated()
    rounds = [b"<tool>\n" + words(f"round {at}", 73) for at in range(6)]
    ask(front, SYSTEM, *rounds)
    rounds[2] = b"<tool>\n(output removed)"
    outcome = ask(front, SYSTEM, *rounds, words("more", 40))
    miss = miss_of(outcome)
    assert (miss.cause, miss.message, miss.position) == ("edited", 3, 367)
    assert not miss.in_system
    assert miss.after == "(output removed)"
    assert miss.tokens == outcome.usage.seen_tokens + 3 * 80


def test_an_edit_of_the_last_message_of_a_chat_is_an_edit_however_short() -> None:
    front = simulated()
    ask(front, SYSTEM, words("question", 50) + b" today", conversation="a")
    miss = miss_of(ask(front, SYSTEM, words("question", 50) + b" tomorrow", conversation="a"))
    assert (miss.cause, miss.message) == ("edited", 1)
    assert miss.after == "tomorrow"


def test_a_generation_prompt_that_history_drops_is_the_templates_doing() -> None:
    front = simulated()
    first = ask(front, SYSTEM, HELLO, max_tokens=40)
    outcome = ask(front, SYSTEM, HELLO, [*REPLY, *first.tokens], words("and then", 40))
    miss = miss_of(outcome)
    assert outcome.usage.cached_tokens == 260
    assert (miss.cause, miss.position, miss.message) == ("template", 260 + len(REPLY), 2)
    # The reply as far as it was fed; its last token never was.
    assert miss.tokens == len(REPLY) + 39
    assert miss.before == "<assistant>[think]\\n"


def test_reasoning_that_history_drops_is_the_templates_doing() -> None:
    seen = (
        b"hello<|im_start|>",
        b"<think>why, oh why</think>It is so, and has been for a long time.",
    )
    sent = b"It is so, and has been for a long time.<user>Really?"
    miss = fork(seen, sent, Earlier(5, 6, 6 + 11 + 2 + 39))
    assert (miss.cause, miss.before, miss.after) == ("template", "<think>why, oh why</think>", "")


def test_a_reply_whose_white_space_is_trimmed_is_the_templates_doing() -> None:
    seen = b"hello<assistant>Yes.", b" \n<end><user>and what would you like to say"
    sent = b"<end><user>and what would you like to say next"
    assert fork(seen, sent, Earlier(5, 16, 22)).cause == "template"


def test_a_call_that_is_spaced_otherwise_is_the_templates_doing() -> None:
    seen = b"hello<assistant>call", b'({"a": 1, "b": 2})<end><tool>and what it gave'
    sent = b'({"a":1,"b":2})<end><tool>and what it gave'
    assert fork(seen, sent, Earlier(5, 16, 38)).cause == "template"


def test_a_reply_that_was_rewritten_is_an_edit() -> None:
    seen = b"hello<assistant>I like", b" tea.<end><user>and what would you like to say"
    sent = b" coffee.<end><user>and what would you like to say next"
    miss = fork(seen, sent, Earlier(5, 16, 27))
    assert (miss.cause, miss.before, miss.after) == (
        "edited",
        "tea.<end><user>and",
        "coffee.<end><user>and",
    )


def fork(seen: tuple[bytes, bytes], sent: bytes, earlier: Earlier) -> Miss:
    """Return why a prompt was evaluated anew that leaves what was seen after its first part."""
    shared, beyond, new = (
        pack(BYTES.encode(text.decode(), special=True)) for text in (*seen, sent)
    )
    position = len(shared) // 4
    start = Start(shared + new, Sighting(position, beyond, earlier), [earlier])
    miss = explain(start, 0, position + len(new) // 4, None, BYTES)
    assert miss is not None
    assert miss.position == position
    return miss


class Pieces(ByteTokenizer):
    """Has tokens for some words beside those for bytes."""

    def __init__(self) -> None:
        super().__init__(markers=("good", "bye", "goodbye"))


def test_the_same_text_in_other_tokens_is_told_from_an_edit() -> None:
    tokenizer = Pieces()
    good, bye, goodbye = range(256, 259)
    rest = [*b" my friend, and come back soon"]
    shared, old, new = pack(b"say "), pack([good, bye, *rest]), pack([goodbye, *rest, 33])
    start = Start(shared + new, Sighting(4, old, Earlier(2, 3, 36)), [Earlier(2, 3, 36)])
    miss = explain(start, 0, 40, None, tokenizer)
    assert miss is not None
    assert (miss.cause, miss.tokens) == ("retokenised", 4 + len(rest))


# ---- what is gone, and what never stood ---------------------------------------------------------


@pytest.mark.parametrize("cause", ["evicted", "refused"])
def test_a_checkpoint_that_is_gone_is_the_reason_for_what_it_held(cause: LossCause) -> None:
    start = Start(pack(range(1000)), Sighting(900))
    assert explain(start, 100, 1000, Loss(800, cause), BYTES) == Miss(cause, 900, tokens=700)


def test_a_checkpoint_gone_before_what_was_reused_is_no_reason() -> None:
    start = Start(pack(range(1000)), Sighting(900))
    assert explain(start, 900, 1000, Loss(800, "evicted"), BYTES) is None


@pytest.mark.parametrize("memory", ["hybrid", "recurrent", "attention"])
def test_a_chat_that_had_to_make_room_says_so_when_it_comes_back(memory: MemoryKind) -> None:
    front = simulated(memory, n_sequences=2, n_context=512, n_cells=512)
    for name in "abcdef":
        ask(front, words(name, 300), conversation=name)
    outcome = ask(front, words("a", 300), HELLO, conversation="a")
    miss = miss_of(outcome)
    assert (miss.cause, miss.position) == ("evicted", 300)
    assert outcome.usage.cached_tokens + miss.tokens <= outcome.usage.seen_tokens
    assert miss.tokens >= 250


def test_of_two_reasons_the_dearer_is_told() -> None:
    prompt = words("prompt", 600)
    changed = prompt[:500] + b"!" + prompt[501:]
    start = Start(pack(changed), Sighting(500, pack(prompt[500:])))
    late = explain(start, 0, 600, Loss(480, "evicted"), BYTES)
    early = explain(start, 0, 600, Loss(80, "evicted"), BYTES)
    assert late is not None
    assert early is not None
    assert (late.cause, late.tokens) == ("evicted", 480)
    assert (early.cause, early.tokens) == ("edited", 420 + 99)


def test_what_another_request_was_reading_is_told_from_what_was_not_kept() -> None:
    front = simulated(options=Options(n_lanes=2), n_batch=32)
    prompts = [words("shared", 300) + words(name, 40) for name in ("one", "two")]
    answers = [front.submit(request(each, priority="interactive")) for each in prompts]
    front.run()
    misses = [answer.outcome.miss for answer in answers]
    assert misses[0] == Miss("never seen", 0)
    assert misses[1] is not None
    assert (misses[1].cause, misses[1].position, misses[1].tokens) == ("concurrent", 300, 300)


def test_where_nobody_kept_a_state_it_is_said() -> None:
    front = simulated()
    ask(front, SYSTEM, HELLO, one_off=True)
    miss = miss_of(ask(front, SYSTEM, HELLO, words("more", 30)))
    assert (miss.cause, miss.tokens) == ("short", 260)


def test_a_request_that_was_not_to_reuse_anything_says_so() -> None:
    front = simulated()
    ask(front, SYSTEM, HELLO)
    outcome = ask(front, SYSTEM, HELLO, use_cache=False)
    assert outcome.miss is not None
    assert (outcome.miss.cause, outcome.miss.tokens) == ("off", outcome.usage.prompt_tokens - 1)


def test_a_cancelled_request_is_seen_as_far_as_it_was_evaluated() -> None:
    front = simulated(n_batch=32)
    prompt = words("long", 400)
    answer = front.submit(request(prompt))
    front.step(2)
    answer.cancel()
    front.run()
    read = answer.outcome.usage.prefilled_tokens
    assert 0 < read < 400
    again = front.ask(request(prompt))
    assert (again.usage.seen_tokens, again.usage.cached_tokens) == (read, read)
    assert again.miss is None


def test_a_prompt_that_two_requests_sent_stays_seen_when_one_is_cancelled() -> None:
    front = simulated(n_batch=32)
    prompt = words("long", 400)
    front.ask(request(prompt))
    answer = front.submit(request(prompt, use_cache=False))
    front.step(2)
    answer.cancel()
    front.run()
    assert front.ask(request(prompt)).usage.seen_tokens == 400


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["hybrid", "attention"]))
def test_what_was_seen_is_the_longest_prefix_of_any_earlier_path(
    seed: int, memory: MemoryKind
) -> None:
    rng = random.Random(seed)
    front, paths = simulated(memory), [tuple[int, ...]()]
    for _ in range(12):
        known = rng.choice(paths)
        tokens = (*known[: rng.randrange(len(known) + 1)], *words(str(rng.random()), 30))
        turn = rng.choice([0, len(tokens) - 5])
        outcome = front.ask(request(tokens, turn=turn, max_tokens=rng.randrange(4)))
        usage, seen = outcome.usage, max(lcp(tokens, path) for path in paths)
        assert usage.seen_tokens == seen >= usage.cached_tokens
        assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
        missed = min(seen, len(tokens) - 1) - usage.cached_tokens
        if outcome.miss is None:
            assert missed == 0
        else:
            assert 0 <= outcome.miss.tokens <= usage.prefilled_tokens
        paths.append((*tokens, *outcome.tokens[:-1]))


# ---- records ------------------------------------------------------------------------------------


def test_the_last_requests_are_kept_newest_last() -> None:
    front = simulated()
    for at in range(N_RECORDS + 5):
        front.ask(request(words(str(at), 8), max_tokens=0, conversation=str(at)))
    kept = [record.conversation for record in front.core.requests()]
    assert kept == [str(at) for at in range(5, N_RECORDS + 5)]


def test_a_record_is_handed_on_before_the_request_is_answered() -> None:
    front, told = simulated(), list[Record]()
    front.core.report_to(told.append)
    heard_before = []
    front.core.submit(request("hello"), lambda event: heard_before.append(len(told)))
    front.run()
    assert heard_before[-1] == 1
    assert told == [*front.core.requests()]
    assert told[0].miss == Miss("never seen", 0)


def test_what_takes_records_may_raise_and_ends_nobodys_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    front = simulated()

    def broken(record: Record) -> None:
        raise OSError("disk full")

    front.core.report_to(broken)
    assert front.ask(request("hello")).finish_reason == "length"
    assert "disk full" in caplog.text


@pytest.mark.parametrize("ends", [(3, 2), (1, 6), (-1,), "12", 3, (True,)])
def test_ends_that_cannot_be_are_refused(ends: object) -> None:
    with pytest.raises(InvalidArgument):
        request("hello", ends=ends)


# ---- two texts that part ------------------------------------------------------------------------

few = st.lists(st.integers(0, 1), max_size=80)


@given(few, few)
def test_no_more_recurs_than_the_longest_common_subsequence(old: list[int], new: list[int]) -> None:
    lengths = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i, a in enumerate(old, 1):
        for j, b in enumerate(new, 1):
            same = lengths[i - 1][j - 1] + 1 if a == b else 0
            lengths[i][j] = max(same, lengths[i - 1][j], lengths[i][j - 1])
    found = recurring(pack(old), pack(new))
    assert found.n_tokens <= lengths[-1][-1]
    if found.n_tokens:
        run = pack(old[found.old :]), pack(new[found.new :])
        assert common_length(*run) >= RUN_LEAST


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_what_follows_a_change_recurs_whole(taken_out: int, put_in: int, more: int) -> None:
    rest = RUN_LEAST + taken_out // 2 + more
    tail = range(10_000, 10_000 + rest)
    found = recurring(pack([*range(taken_out), *tail]), pack([*range(500, 500 + put_in), *tail]))
    assert found == Recurrence(rest, taken_out, put_in)


def test_what_follows_each_of_several_changes_recurs() -> None:
    old = [token for at in range(10) for token in (at, *range(100 * at + 50, 100 * at + 90))]
    new = [token for at in range(10) for token in (10 + at, *range(100 * at + 50, 100 * at + 90))]
    assert recurring(pack(old), pack(new)).n_tokens == 400


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("now 10:01 in Berlin.", "now 10:02 in Berlin.", ("10:01", "10:02")),
        ("be brief and kind.", "be brief, and kind.", ("brief", "brief,")),
        ("be brief and very kind", "be brief very kind", ("and", "")),
        ("three hills?", "three hills? in Asia", ("hills?", "hills? in Asia")),
        ("naïve é", "naïve è", ("é", "è")),
        ("done. ", "done.\n", ("done. ", "done.\\n")),
        ("a\x1b[31mb c", "a\x1b[32mb c", ("a\\x1b[31mb c", "a\\x1b[32mb c")),
        ("x " + "y" * 60, "x z", ("y" * 39 + "…", "z")),
    ],
)
def test_a_few_words_of_each_side_are_shown(
    before: str, after: str, wanted: tuple[str, str]
) -> None:
    old, new = (pack(BYTES.encode(text, special=True)) for text in (before, after))
    shared = common_length(old, new) * 4
    assert sides(old[:shared], old[shared:], new[shared:], BYTES) == wanted


def test_special_tokens_are_spelled() -> None:
    ids = BYTES.encode("<|im_start|>user\n", special=True)
    assert len(ids) == 6
    assert spelled(pack(ids), BYTES) == "<|im_start|>user\n"


@given(st.text())
def test_what_is_shown_is_one_line_that_a_terminal_prints_as_it_is(text: str) -> None:
    line = shown(text)
    assert line.isprintable()
    assert len(line) <= 40


# ---- chats as clients send them -----------------------------------------------------------------


Message = dict[str, object]
TEMPLATES = Path(__file__).resolve().parent / "templates"


@contextmanager
def engine_with(template: str) -> Iterator[Engine]:
    """Open an engine over the simulated runtime with a template of the tests."""
    file = TEMPLATES / f"{template}.jinja"
    with Engine.over(
        lambda: SimulatedRuntime(Limits(8, 8192, 8192, 256, 1000, 10)),
        template=ChatTemplate.from_file(file, bos_text="<s>", eos_text="</s>"),
        sampling=GREEDY,
    ) as engine:
        yield engine


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def story(name: str) -> str:
    return " ".join(f"{name} {at} goes on." for at in range(8))


def test_a_clock_in_a_system_message_is_found_in_every_request() -> None:
    with engine_with("chatml") as engine:
        for minute in range(10, 14):
            system = said("system", f"{story('rule')} It is 10:{minute}. {story('tool')}")
            engine.chat([system, said("user", story("question"))], max_tokens=4).outcome()
        misses = [record.miss for record in engine.requests()]
    assert [miss and (miss.cause, miss.message, miss.in_system) for miss in misses] == [
        ("never seen", 0, True),
        *[("edited", 0, True)] * 3,
    ]
    assert [miss and (miss.before, miss.after) for miss in misses[1:]] == [
        ("10:10.", "10:11."),
        ("10:11.", "10:12."),
        ("10:12.", "10:13."),
    ]


def test_reasoning_that_a_template_drops_is_found_at_the_reply() -> None:
    with engine_with("thinking") as engine:
        chat = [said("system", story("rule")), said("user", story("question"))]
        reply = engine.chat(chat, max_tokens=40).outcome()
        chat += [said("assistant", reply.text), said("user", story("more"))]
        outcome = engine.chat(chat, max_tokens=4).outcome()
    miss = miss_of(outcome)
    assert (miss.cause, miss.message) == ("template", 2)
    assert miss.before.startswith("<think>")
    assert outcome.usage.seeded_from == "turn"


def test_a_tool_output_that_a_client_blanks_is_found_by_its_index() -> None:
    with engine_with("chatml") as engine:
        chat = [said("system", story("rule"))]
        for at in range(6):
            chat += [said("user", story(f"call {at}")), said("assistant", story(f"result {at}"))]
        chat.append(said("user", "and now?"))
        engine.chat(chat, max_tokens=4).outcome()
        chat[6] = said("assistant", "(removed)")
        miss = miss_of(engine.chat(chat, max_tokens=4).outcome())
    assert (miss.cause, miss.message) == ("edited", 6)
    assert miss.before.startswith("result 2")
    assert miss.after == "(removed)"


def test_a_session_tells_where_its_messages_end_too() -> None:
    with engine_with("chatml") as engine:
        session = engine.create_session(system=story("rule"), messages=[said("user", "one")])
        first = session.generate(max_tokens=4).outcome()
        assert first.miss == Miss("never seen", 0, 0, in_system=True)
