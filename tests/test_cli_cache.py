"""What the last requests took is written down, read back, and told with its causes summed up."""

from __future__ import annotations

import io
import json
import multiprocessing
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.causes import answer, duration, reason, repeated
from orchestrator.cli.main import main
from orchestrator.engine.records import Record
from orchestrator.engine.request import Outcome, Timings, Usage
from orchestrator.engine.why import Miss
from orchestrator.errors import ConfigError
from orchestrator.paths import STATE_VARIABLE, state_dir, state_path
from orchestrator.store.journal import (
    Entry,
    JournalWriter,
    append,
    from_line,
    journal_path,
    read_journal,
    to_line,
)

NOON = 1_790_000_000.0


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a state directory that is not there yet, in place of the user's own.

    Nothing is piped in.
    """
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    folder = tmp_path / "state"
    monkeypatch.setenv(STATE_VARIABLE, str(folder))
    return folder


def entry(miss: Miss | None = None, *, model: str = "demo", **usage: object) -> Entry:
    """Return what a request of 100 tokens a second took."""
    used = replace(Usage(4000, 12, 1000, 3000, "turn", "resident", seen_tokens=3500), **usage)  # type: ignore[arg-type]
    timings = Timings(0.0, 1.0, used.prefilled_tokens / 100, 2.0, 5.0)
    return Entry(model, Record(NOON, used, timings, "stop", miss, "a chat"))


def clock(minute: int, tokens: int = 3000) -> Miss:
    before, after = f"10:{minute:02}", f"10:{minute + 1:02}"
    return Miss("edited", 3000, 0, True, before, after, tokens)


def write(*entries: Entry) -> None:
    state_dir()
    for each in entries:
        append(journal_path(), to_line(each))


def explained(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """Return what `orchestrator cache explain` prints on both streams; lines unwrapped."""
    assert main(["cache", "explain", *options]) == 0
    out, err = capsys.readouterr()
    return re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", err)


# ---- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("miss", [None, clock(1), Miss("never seen", 0)])
def test_an_entry_is_read_back_as_it_was_written(miss: Miss | None) -> None:
    write(entry(miss), entry(miss, seeded_from=None, seeded_tier=None))
    journal = read_journal()
    assert journal.entries[0] == entry(miss)
    assert journal.entries[1].record.usage.seeded_from is None
    assert journal.n_damaged == 0


def test_nothing_is_there_before_the_first_request(state: Path) -> None:
    assert read_journal().entries == ()
    assert not state.exists()


def test_the_file_is_for_its_user_alone(state: Path) -> None:
    with JournalWriter() as writer:
        writer.put(entry())
    assert stat.S_IMODE(journal_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_all_that_was_put_is_written_once_it_is_closed() -> None:
    with JournalWriter() as writer:
        for at in range(50):
            writer.put(entry(clock(1, at)))
    misses = [each.record.miss for each in read_journal().entries]
    assert [miss.tokens for miss in misses if miss] == [*range(50)]


def test_a_torn_line_costs_itself_alone() -> None:
    write(entry())
    with journal_path().open("ab") as file:
        file.write(to_line(entry())[:100])
    write(entry(clock(1)))
    journal = read_journal()
    assert [each.record.miss for each in journal.entries] == [None, clock(1)]
    assert journal.n_damaged == 1


def damaged(**changes: object) -> bytes:
    told = json.loads(to_line(entry(clock(1))))
    for name, value in changes.items():
        outer, _, inner = name.rpartition("__")
        (told[outer] if outer else told)[inner] = value
    return json.dumps(told).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[1]",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        damaged(model=3),
        damaged(at=-1.0),
        damaged(at=1e300),
        damaged(at=float("nan")),
        damaged(usage=None),
        damaged(usage={}),
        damaged(usage__prompt_tokens="many"),
        damaged(usage__prompt_tokens=True),
        damaged(timings__prefill=None),
        damaged(miss=[]),
        damaged(miss__cause=1),
        damaged(miss__message="first"),
    ],
)
def test_a_line_that_is_no_entry_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_line(line)


def test_what_a_later_version_writes_is_read_as_far_as_it_is_known() -> None:
    line = damaged(mood="good", usage__dreams=3, miss__cause="bewitched")
    read = from_line(line)
    assert read.record.miss == replace(clock(1), cause="bewitched")  # type: ignore[arg-type]
    assert reason(read.record.miss) == "bewitched (3,000 read again)"


@given(st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_line(line)


def test_both_files_together_stay_within_the_bound() -> None:
    folder, line = state_dir(), to_line(entry(clock(1)))
    for at in range(100):
        append(journal_path(), to_line(entry(clock(1, at))), 10 * len(line))
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 10 * len(line)
    misses = [each.record.miss for each in read_journal().entries]
    kept = [miss.tokens for miss in misses if miss]
    assert kept == [*range(100 - len(kept), 100)]
    assert len(kept) >= 5


def append_many(path: Path, first: int) -> None:
    for at in range(first, first + 200):
        append(path, to_line(entry(clock(1, at))), 50_000)


def test_processes_that_append_at_once_spoil_no_line() -> None:
    state_dir()
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=append_many, args=(journal_path(), 1000 * at)) for at in range(3)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    journal = read_journal()
    assert journal.n_damaged == 0
    # Of each process the latest are there, in order and without a gap.
    tokens = [each.record.miss.tokens for each in journal.entries if each.record.miss]
    for at in range(3):
        own = [number - 1000 * at for number in tokens if number // 1000 == at]
        assert own == [*range(200 - len(own), 200)] or own == []
    assert len(tokens) > 60


def test_where_nothing_can_be_written_requests_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "file" / "state"))
    with JournalWriter() as writer:
        writer.put(entry())
        writer.put(entry())
    assert len(caplog.records) == 1
    assert f"set {STATE_VARIABLE}" in caplog.text


def test_a_file_that_cannot_be_read_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    state_dir()
    journal_path().mkdir()
    assert main(["cache", "explain"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "cannot be read" in err
    assert len(err.splitlines()) == 1
    with pytest.raises(ConfigError):
        read_journal()


def test_the_state_directory_is_the_users_own_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    assert state_path() == state
    monkeypatch.setenv(STATE_VARIABLE, "")
    assert state_path().name == "orchestrator"


# ---- what is told -------------------------------------------------------------------------------


def test_without_requests_it_is_said_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = explained(capsys)
    assert out == ""
    assert "no request is recorded in" in err
    assert "(orchestrator chat)" in err


def test_each_request_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    write(entry(clock(1)), entry(seeded_from=None, seeded_tier=None), entry(seeded_tier="exported"))
    out, _ = explained(capsys)
    assert "time model prompt reused prefilled from" in out
    assert "demo 4,000 1,000 3,000 turn system prompt" in out
    assert "demo 4,000 1,000 3,000 cold" in out
    assert "demo 4,000 1,000 3,000 turn, host" in out


@pytest.mark.parametrize("columns", [40, 80, 109, 110, 200])
def test_nothing_is_cut_off_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    write(entry(clock(1)), entry(clock(2), model="a-model-with-a-name-of-its-own"))
    out, _ = explained(capsys)
    assert "demo 4,000 1,000 3,000 turn" in out
    assert "a-model-with-a-… 4,000 1,000 3,000 turn" in out
    for told in ("system prompt changes at token 3,000", "`10:02` -> `10:03` (3,000 read again)"):
        assert told in out


def test_only_the_last_ones_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    write(*(entry(model=f"model-{at}") for at in range(30)))
    out, _ = explained(capsys)
    assert re.findall(r"model-\d+", out) == [f"model-{at}" for at in range(10, 30)]
    out, _ = explained(capsys, "--last", "2")
    assert re.findall(r"model-\d+", out) == ["model-28", "model-29"]


def test_a_cause_that_comes_again_is_told_once_with_what_it_cost() -> None:
    (found,) = repeated([entry(clock(minute)) for minute in range(1, 13)])
    assert found.line() == (
        "system prompt changes at token 3,000 in 12 requests: `10:01` -> `10:02`, "
        "`10:02` -> `10:03`, `10:03` -> `10:04`, …; 36,000 tokens read again, about 6 min"
    )


def test_a_cause_that_came_once_is_not_repeated() -> None:
    assert repeated([entry(clock(1)), entry(), entry(Miss("short", 9, tokens=9))]) == []


def test_what_changes_elsewhere_is_another_cause() -> None:
    there = replace(clock(1), position=500)
    models = [entry(clock(1), model=name) for name in ("a", "b")]
    causes = repeated([entry(clock(1)), entry(clock(2)), entry(there), entry(there), *models])
    assert [(each.n_requests, each.positions[0]) for each in causes] == [(2, 3000), (2, 500)]


def test_changes_of_messages_are_one_cause_wherever_they_are() -> None:
    moved = [Miss("edited", 100 * at, at, False, "", "note", 50) for at in (4, 5, 6)]
    (found,) = repeated(map(entry, moved))
    assert found.line() == (
        "a message changes at tokens 400 to 600 in 3 requests: nothing -> `note`; "
        "150 tokens read again, about 2 s"
    )


@pytest.mark.parametrize(
    ("miss", "told"),
    [
        (None, ""),
        (Miss("never seen", 0), "a beginning that was never seen"),
        (clock(1, 41_000), "system prompt changes at token 3,000: `10:01` -> `10:02` (41,000 read"),
        (Miss("template", 90, 3, tokens=5), "messages[3] is rendered anew at token 90 (5 read"),
        (Miss("retokenised", 90, tokens=5), "prompt has the same text in other tokens at token 90"),
        (Miss("evicted", 90, tokens=80), "a kept state had to make room (80 read again)"),
        (Miss("refused", 90, tokens=80), "a kept state could not be put back (80 read again)"),
        (Miss("concurrent", 9, tokens=9), "another request was still reading the same (9 read"),
        (Miss("short", 9, tokens=9), "no state was kept there (9 read again)"),
        (Miss("off", 9, tokens=9), "reuse is switched off"),
    ],
)
def test_a_reason_is_told_in_a_few_words(miss: Miss | None, told: str) -> None:
    assert reason(miss).startswith(told)


def test_json_holds_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    write(entry(clock(1)), entry(clock(2)))
    out, _ = explained(capsys, "--json")
    told = json.loads(out)
    assert [each["miss"]["after"] for each in told["requests"]] == ["10:02", "10:03"]
    assert told["requests"][0]["usage"]["seen_tokens"] == 3500
    (cause,) = told["repeated"]
    assert (cause["cause"], cause["n_requests"], cause["tokens"]) == ("edited", 2, 6000)


def test_json_without_requests_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = explained(capsys, "--json")
    assert json.loads(out) == {"requests": [], "repeated": []}


def test_damaged_lines_are_counted_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    write(entry())
    with journal_path().open("ab") as file:
        file.write(b"nonsense\n{}\n")
    out, err = explained(capsys)
    assert "4,000" in out
    assert "2 damaged lines were skipped in" in err


def test_no_control_character_of_a_file_reaches_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = "\x1b[2J\x07"
    miss = Miss("edited", 1, 0, False, evil, f"a{evil}b", 7)
    write(entry(miss, model=f"m{evil}", seeded_from=f"turn{evil}"), entry(miss))
    out, _ = explained(capsys)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", out)


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_number_of_requests_that_cannot_be_is_a_wrong_command_line(number: str) -> None:
    assert main(["cache", "explain", "--last", number]) == 2


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.2, "less than 1 s"), (12.4, "12 s"), (180, "3 min"), (7200, "2.0 h")],
)
def test_a_length_of_time_is_told_in_the_unit_that_fits(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_what_one_request_reused_is_told_in_a_sentence() -> None:
    record = entry(clock(1)).record
    outcome = Outcome("", (), "stop", record.usage, record.timings, miss=record.miss)
    assert answer(outcome) == (
        "1,000 of 4,000 prompt tokens were reused (turn), 3,500 had been seen before; "
        "system prompt changes at token 3,000: `10:01` -> `10:02` (3,000 read again)"
    )
    assert answer(replace(outcome, miss=None)).endswith("all that was evaluated was new")


# ---- the chat writes it -------------------------------------------------------------------------


class Recording(FakeEngine):
    """Hands a record on when it is asked, as the engine does."""

    def chat(self, *messages: object, **options: object):  # type: ignore[no-untyped-def]
        self.sink(entry(clock(1)).record)
        return super().chat(*messages, **options)  # type: ignore[arg-type]


def test_a_chat_records_its_requests_under_the_name_of_its_model(
    capfd: pytest.CaptureFixture[str],
) -> None:
    opened: Callable[..., FakeEngine] = Recording().open
    assert main(["chat", "hello"], opened) == 0
    assert [each.model for each in read_journal().entries] == ["fake"]
    capfd.readouterr()
    out, _ = explained(capfd)
    assert "fake 4,000 1,000 3,000 turn system prompt" in out


def test_a_chat_goes_on_where_nothing_can_be_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "file" / "state"))
    assert main(["chat", "hello"], Recording().open) == 0
    out, err = capfd.readouterr()
    assert out.strip() == "echo hello"
    assert "Traceback" not in err
