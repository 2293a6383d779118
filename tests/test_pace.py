"""What is learnt from the time that calls and moves took."""

from __future__ import annotations

import pytest

from orchestrator.engine.pace import (
    CHUNK_LEAST,
    CHUNK_UNKNOWN,
    MOVE_LEAST,
    PASS_UNKNOWN,
    TOKEN_UNKNOWN,
    Pace,
)

STATE = 6 << 20
CALL, TOKEN = 0.030, 0.005


def measured(n_lanes: int = 1, n_calls: int = 1, chunk: int = 512) -> Pace:
    """Return a pace that has seen a machine of `CALL` a pass and `TOKEN` a token."""
    pace = Pace(512)
    for _ in range(5):
        pace.read(chunk, CALL + chunk * TOKEN)
        pace.decoded(n_calls * CALL + n_lanes * TOKEN, n_lanes, n_calls)
    return pace


def test_before_anything_was_measured_costs_are_those_of_a_small_machine() -> None:
    costs = Pace(512).costs(STATE, 8)
    assert costs.token_seconds == TOKEN_UNKNOWN
    assert costs.pass_seconds == pytest.approx(PASS_UNKNOWN * TOKEN_UNKNOWN)
    assert costs.state_seconds == pytest.approx(0.001, rel=0.2)
    assert (costs.state_bytes, costs.n_states) == (STATE, 8)
    assert costs.stop_least == 6


@pytest.mark.parametrize(("n_lanes", "n_calls"), [(1, 1), (4, 1), (6, 3)])
def test_a_pass_is_what_a_decode_call_takes_beyond_its_tokens(n_lanes: int, n_calls: int) -> None:
    costs = measured(n_lanes, n_calls).costs(STATE, 8)
    assert costs.token_seconds == pytest.approx(TOKEN, rel=0.02)
    assert costs.pass_seconds == pytest.approx(CALL, rel=0.02)


def test_a_chunk_that_is_mostly_the_pass_tells_no_rate() -> None:
    pace = Pace(512)
    pace.read(1, CALL + TOKEN)
    pace.decoded(CALL + TOKEN)
    rough = pace.costs(STATE, 8)
    assert rough.token_seconds == pytest.approx((CALL + TOKEN) / (1 + PASS_UNKNOWN))
    assert rough.pass_seconds == pytest.approx(PASS_UNKNOWN * rough.token_seconds)
    pace.read(512, CALL + 512 * TOKEN)
    assert pace.costs(STATE, 8).token_seconds == pytest.approx(TOKEN, rel=0.02)
    pace.read(CHUNK_LEAST - 1, 1.0)
    assert pace.costs(STATE, 8).token_seconds == pytest.approx(TOKEN, rel=0.02)


def test_a_clock_that_stands_still_leaves_costs_as_they_are_assumed() -> None:
    pace = Pace(512)
    pace.read(512, 0.0)
    pace.decoded(0.0, 2)
    pace.moved(STATE, 0.0)
    costs = pace.costs(STATE, 8)
    assert costs.token_seconds == TOKEN_UNKNOWN
    assert costs.pass_seconds == pytest.approx(PASS_UNKNOWN * TOKEN_UNKNOWN)
    assert costs.state_seconds == MOVE_LEAST


def test_what_moving_a_state_takes_is_learnt_by_the_byte() -> None:
    pace = Pace(512)
    for _ in range(40):
        pace.moved(2 * STATE, MOVE_LEAST + 0.04)
    assert pace.costs(STATE, 8).state_seconds == pytest.approx(MOVE_LEAST + 0.02)
    pace.moved(0, 100.0)
    assert pace.costs(STATE, 8).state_seconds == pytest.approx(MOVE_LEAST + 0.02)


def test_a_step_beside_lanes_that_speak_reads_what_fits_it() -> None:
    assert Pace(512).budget(0) == 512
    assert Pace(512).budget(1) == CHUNK_UNKNOWN
    assert measured().budget(0) == 512
    assert measured().budget(1) == CHUNK_LEAST
    assert Pace(512, step_seconds=1.0).budget(2) == CHUNK_UNKNOWN


def test_the_rest_of_a_reply_is_counted_in_decode_calls() -> None:
    assert Pace(512).seconds(100, 100) == 0.0
    assert measured().seconds(0, 10) == pytest.approx(10 * (CALL + TOKEN))
