"""The rules of the checkpoint pool, on numbers alone."""

from __future__ import annotations

import random

import pytest

from orchestrator.errors import InvalidArgument
from orchestrator.pool.book import Book
from orchestrator.pool.checkpoint import Checkpoint, Holder, Kind
from orchestrator.pool.index import pack
from orchestrator.pool.ledger import Ledger
from orchestrator.pool.plans import Admission, Budgets, Claim
from orchestrator.pool.pool import Forms, Pool


class Hands:
    """Carries a pool's plans out on a ledger, as the engine does on a runtime."""

    def __init__(
        self,
        n_sequences: int = 6,
        n_cells: int = 1000,
        *,
        divisible: bool = False,
        history: int = 0,
    ) -> None:
        self.ledger = Ledger(n_cells)
        budgets = Budgets(history=history)
        forms = Forms(divisible=divisible)
        self.pool = Pool(n_sequences, self.ledger, forms=forms, budgets=budgets)

    def admit(self, prompt: str, turn: int = 0, conversation: str | None = None) -> Admission:
        """Give a prompt a lane; it must be possible."""
        path = pack(prompt.encode())
        claim = Claim(path, turn=turn, conversation=conversation)
        admission = self.pool.plan_admission(claim)
        assert admission is not None
        self.evict(admission.evicted)
        seed = admission.seed
        if seed and admission.takes_over:
            self.ledger.cut(admission.sequence, seed.length)
        elif seed:
            assert seed.checkpoint.sequence is not None
            self.ledger.copy(seed.checkpoint.sequence, admission.sequence, seed.length)
        self.pool.admitted(admission)
        return admission

    def fill(self, admission: Admission, length: int) -> None:
        """Evaluate up to `length` tokens, making room."""
        more = length - self.ledger.length(admission.sequence)
        leaving = self.pool.plan_room(more)
        assert leaving is not None
        self.evict(leaving)
        self.ledger.extend(admission.sequence, more)

    def keep(self, admission: Admission, path: str, kind: Kind) -> Checkpoint | None:
        """Keep a state where the lane stands."""
        keep = self.pool.plan_keep(admission, pack(path.encode()), kind)
        if keep is None:
            return None
        self.evict((*keep.evicted, *keep.dropped))
        assert keep.checkpoint.sequence is not None
        self.ledger.copy(admission.sequence, keep.checkpoint.sequence)
        self.pool.kept(keep)
        return keep.checkpoint

    def release(self, admission: Admission, path: str, kind: Kind | None) -> None:
        """End a lane."""
        release = self.pool.plan_release(admission, pack(path.encode()), kind)
        self.evict(release.evicted)
        if release.checkpoint is None:
            self.ledger.clear(release.sequence)
        self.pool.released(release)

    def evict(self, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Clear what leaves."""
        for checkpoint in checkpoints:
            assert checkpoint.sequence is not None
            sequence = checkpoint.sequence
            self.pool.drop(checkpoint)
            self.ledger.clear(sequence)

    def turn(
        self, text: str, opener: str = "[thinking]", conversation: str | None = None
    ) -> Admission:
        """Run a whole turn whose input is `text`; the reply is the one letter R."""
        prompt = text + opener
        admission = self.admit(prompt, turn=len(text), conversation=conversation)
        for stop in admission.stops:
            self.fill(admission, stop.length)
            self.keep(admission, prompt[: stop.length], stop.kind)
        self.fill(admission, len(prompt) + 1)
        self.release(admission, prompt + "R", "reply")
        return admission

    def kept(self) -> set[tuple[Kind, int]]:
        """Return kind and length of all checkpoints."""
        return {(c.kind, c.length) for c in self.pool.checkpoints}


def seed_of(admission: Admission) -> tuple[Kind, int] | None:
    """Return kind and length of what a lane starts from."""
    seed = admission.seed
    return (seed.checkpoint.kind, seed.length) if seed else None


# ---- strict prefix, longest wins ----------------------------------------------------------------


def test_only_a_strict_prefix_serves() -> None:
    hands = Hands()
    hands.turn("hello")  # turn at 5, resend at 14, reply at 16
    assert seed_of(hands.admit("help")) is None
    assert seed_of(hands.admit("hello")) is None
    assert seed_of(hands.admit("hello!")) == ("turn", 5)


def test_the_longest_prefix_wins() -> None:
    hands = Hands()
    hands.turn("hello", opener="[think]abc")
    assert seed_of(hands.admit("hello[think]abc")) == ("resend", 14)
    assert seed_of(hands.admit("hello[think]abcR!")) == ("reply", 16)


def test_where_rows_can_be_cut_any_common_prefix_serves() -> None:
    hands = Hands(divisible=True)
    hands.turn("hello")
    assert seed_of(hands.admit("help")) == ("reply", 3)
    assert seed_of(hands.admit("hello[thinking]R")) == ("reply", 15)
    assert seed_of(hands.admit("jello")) is None


# ---- superseding and history --------------------------------------------------------------------


def test_a_turn_that_keeps_its_own_checkpoint_supersedes_the_last_one_s() -> None:
    hands = Hands()
    hands.turn("U1")
    hands.turn("U1R[end]U2")
    assert hands.kept() == {("turn", 10), ("resend", 19), ("reply", 21)}


def test_a_named_conversation_supersedes_its_own_checkpoints_only() -> None:
    hands = Hands(n_sequences=12)
    hands.turn("head A", conversation="a")
    hands.turn("head B", conversation="b")
    hands.turn("head A more", conversation="a")
    turns = {(c.conversation, c.length) for c in hands.pool.checkpoints if c.kind == "turn"}
    assert turns == {("a", 11), ("b", 6)}


def test_history_keeps_the_newest_of_what_was_superseded() -> None:
    hands = Hands(n_sequences=12, history=2)
    for turn in range(1, 5):
        hands.turn("long chat so far "[: 4 * turn])
    lengths = sorted(c.length for c in hands.pool.checkpoints if c.kind == "turn")
    assert lengths == [12, 16]  # this turn's, and the last one's with its reply
    assert len(hands.pool.checkpoints) == 5


def test_superseded_checkpoints_leave_before_all_others() -> None:
    hands = Hands(n_sequences=6, history=5)
    hands.turn("U1")
    hands.turn("U1R[end]U2")
    hands.admit("another")
    hands.admit("a third")
    assert {("turn", 10), ("resend", 19), ("reply", 21)} <= hands.kept()
    assert ("turn", 2) not in hands.kept()  # two tokens are sooner read again than eleven


# ---- eviction -----------------------------------------------------------------------------------


def test_the_latest_turn_of_a_chat_leaves_last() -> None:
    hands = Hands(n_sequences=4)
    hands.turn("the first chat")
    for number in range(5):
        admission = hands.admit(f"one-off {number}")
        hands.fill(admission, 9)
        hands.release(admission, f"one-off {number}", "reply")
    assert ("turn", 14) in hands.kept()


def test_a_use_keeps_a_checkpoint_and_the_least_recently_used_leaves() -> None:
    hands = Hands(n_sequences=3)
    for name in ("aa", "bb"):
        admission = hands.admit(name)
        hands.fill(admission, 2)
        hands.release(admission, name, "reply")
    used = hands.admit("aa!")
    assert seed_of(used) == ("reply", 2)
    hands.release(used, "aa", None)
    hands.admit("cc")
    hands.admit("dd")
    assert {c.path for c in hands.pool.checkpoints} == {pack(b"aa")}


def test_cells_are_freed_by_what_really_holds_them() -> None:
    hands = Hands(n_sequences=8, n_cells=100)
    hands.turn("x" * 60)  # three checkpoints that share all but a few cells
    admission = hands.admit("y" * 90)
    assert hands.ledger.free == 100
    hands.fill(admission, 90)


def test_what_frees_nothing_is_spared() -> None:
    hands = Hands(n_sequences=8, n_cells=100)
    hands.turn("x" * 40)
    loner = hands.admit("z" * 30)
    hands.fill(loner, 30)
    hands.release(loner, "z" * 30, "reply")
    room = hands.pool.plan_room(45)
    assert room is not None
    assert {c.path[:1] for c in room} == {b"z"}


def test_a_request_that_cannot_get_cells_is_not_admitted_and_nothing_changes() -> None:
    hands = Hands(n_cells=100)
    running = hands.admit("x" * 80)
    hands.fill(running, 80)
    assert hands.pool.plan_admission(Claim(pack(b"y" * 50))) is None
    assert hands.pool.free_sequences == 5


def test_with_one_sequence_a_lane_takes_the_checkpoint_over() -> None:
    hands = Hands(n_sequences=1)
    first = hands.admit("abc")
    hands.fill(first, 3)
    hands.release(first, "abc", "reply")
    second = hands.admit("abcd")
    assert second.takes_over
    assert hands.ledger.length(0) == 3
    assert hands.kept() == set()


def test_a_resend_point_is_not_kept_at_the_price_of_a_chat_s_next_turn() -> None:
    hands = Hands(n_sequences=2)
    text = "hello there"
    admission = hands.admit(text + "[think]", turn=len(text))
    hands.fill(admission, len(text))
    assert hands.keep(admission, text, "turn") is not None
    hands.fill(admission, len(text) + 6)
    assert hands.keep(admission, text + "[think", "resend") is None
    assert hands.kept() == {("turn", 11)}


def test_a_use_that_took_little_of_a_checkpoint_does_not_keep_it() -> None:
    hands = Hands(n_sequences=3, divisible=True)
    for name in ("aaaaaaaaaa", "bbbbbbbbbb"):
        admission = hands.admit(name)
        hands.fill(admission, 10)
        hands.release(admission, name, "reply")
    glance = hands.admit("aax")
    assert seed_of(glance) == ("reply", 2)
    hands.release(glance, "aa", None)
    hands.admit("cc")
    hands.admit("dd")
    assert {c.path for c in hands.pool.checkpoints} == {pack(b"bbbbbbbbbb")}


def test_a_lane_that_takes_over_may_use_the_cells_it_cuts_off() -> None:
    hands = Hands(n_sequences=1, n_cells=100, divisible=True)
    first = hands.admit("x" * 90)
    hands.fill(first, 90)
    hands.release(first, "x" * 90, "reply")
    second = hands.admit("x" * 10 + "y" * 90)
    assert second.takes_over
    hands.fill(second, 100)


def test_what_a_point_kept_before_already_serves_is_not_kept_again() -> None:
    hands = Hands()
    cancelled = hands.admit("hello there")
    hands.fill(cancelled, 5)
    hands.release(cancelled, "hello", "partial")
    admission = hands.admit("hellx", turn=4)
    hands.fill(admission, 4)
    assert hands.keep(admission, "hell", "turn") is not None
    other = hands.admit("help", turn=3)
    hands.fill(other, 3)
    hands.release(other, "hel", "partial")
    again = hands.pool.plan_keep(admission, pack(b"hello"), "turn")
    assert again is None


def test_history_is_one_budget_for_all_chats() -> None:
    hands = Hands(n_sequences=14, history=2)
    for round_ in range(1, 4):
        for name in "ab":
            hands.turn(f"chat {name} " + "more " * round_, conversation=name)
    superseded = [c for c in hands.pool.checkpoints if not _is_of_last_turn(c)]
    assert len(superseded) == 2


def _is_of_last_turn(checkpoint: Checkpoint) -> bool:
    return checkpoint.serial >= 4  # six turns, the last of each chat have serials 4 and 5


def test_a_dropped_checkpoint_is_nobody_s_next_turn() -> None:
    hands = Hands()
    hands.turn("hello")
    (turn,) = [c for c in hands.pool.checkpoints if c.kind == "turn"]
    assert hands.pool.book.is_latest_turn(turn)
    hands.evict((turn,))
    assert not hands.pool.book.is_latest_turn(turn)


def test_a_conversation_s_name_never_meets_a_number_of_the_pool_s_own() -> None:
    hands = Hands(n_sequences=12)
    hands.turn("unnamed chat")
    hands.turn("another beginning", conversation="0")
    assert ("turn", 12) in hands.kept()


# ---- ending -------------------------------------------------------------------------------------


def test_the_lane_s_own_sequence_becomes_the_reply_checkpoint() -> None:
    hands = Hands()
    admission = hands.admit("abc")
    hands.fill(admission, 5)
    hands.release(admission, "abcRR", "reply")
    (kept,) = hands.pool.checkpoints
    assert kept.sequence == admission.sequence


def test_what_is_already_kept_is_not_kept_twice() -> None:
    hands = Hands()
    for _ in range(2):
        admission = hands.admit("abc")
        hands.fill(admission, 3)
        hands.release(admission, "abc", "reply")
    assert len(hands.pool.checkpoints) == 1
    assert hands.pool.free_sequences == 5


def test_where_rows_can_be_cut_a_longer_reply_makes_its_beginnings_pointless() -> None:
    hands = Hands(divisible=True)
    hands.turn("U1")
    hands.turn("U1[thinking]R[end]U2")
    assert len(hands.pool.checkpoints) == 1


@pytest.mark.parametrize(("n_sequences", "history"), [(0, 0), (4, -1)])
def test_an_impossible_pool_is_refused(n_sequences: int, history: int) -> None:
    with pytest.raises(InvalidArgument):
        Pool(n_sequences, Ledger(10), forms=Forms(), budgets=Budgets(history=history))


@pytest.mark.parametrize("seed", range(4))
def test_what_would_be_read_again_is_the_same_looked_up_or_surveyed(seed: int) -> None:
    rng, book = random.Random(seed), Book(divisible=False)
    paths = [bytes(rng.choices(b"ab", k=rng.randrange(1, 12))) for _ in range(40)]
    for number, path in enumerate(paths):
        packed = pack(path)
        holder = Holder(number, packed, length=len(path))
        kept = Checkpoint(packed, len(path), "shared", number, number, holder)
        book.add(kept)
        kept.is_superseded = rng.random() < 0.3
    book.version += 1  # superseding moves it
    looked_up = {c: book.standing(c).replay for c in book.checkpoints}
    assert looked_up == {c: span.before for c, span in book.spans().items()}
