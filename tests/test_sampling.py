"""What a lane's next token is: filters, penalties, biases, seeds, logprobs, grammars."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tiny_models
from json_oracle import is_valid
from numpy.typing import NDArray
from real import DEMO, open_runtime

from orchestrator.errors import BackendError, InvalidArgument
from orchestrator.runtime.library import api
from orchestrator.runtime.llama import LlamaRuntime
from orchestrator.runtime.llama_grammar import LaneGrammar
from orchestrator.runtime.protocol import GREEDY, Chunk, Limits, Runtime, Sampling
from orchestrator.runtime.sampling import GrammarFailed, LogitBias, TokenLogprob
from orchestrator.runtime.simulated import SimulatedRuntime

PROMPT = [32 + number * 7 % 90 for number in range(20)]
OPEN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
"""Every filter off."""

END = tiny_models.TOKEN["<|im_end|>"]
CONTROL = tiny_models.TOKEN["<|im_start|>"]


@pytest.fixture(
    params=[
        pytest.param("lfm2", marks=pytest.mark.models),
        pytest.param(DEMO, marks=pytest.mark.demo),
    ],
    scope="module",
)
def real(request: pytest.FixtureRequest) -> Iterator[LlamaRuntime]:
    with open_runtime(request.param, threads=1) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tiny() -> Iterator[LlamaRuntime]:
    with open_runtime("lfm2", threads=1) as runtime:
        yield runtime


@pytest.fixture
def simulated() -> SimulatedRuntime:
    return SimulatedRuntime(Limits(4, 512, 512, 64, 1000, 10))


def row_after(runtime: Runtime, tokens: Sequence[int] = PROMPT) -> int:
    """Evaluate `tokens` in an empty sequence and return the row behind them."""
    runtime.clear(0)
    (row,) = runtime.decode([Chunk(0, 0, tuple(tokens), wants_logits=True)])
    assert row is not None
    return row


def draws(
    runtime: Runtime, row: int, sampling: Sampling, count: int, history: Sequence[int] = ()
) -> list[int]:
    """Sample `count` times from one and the same row."""
    sampler = runtime.sampler(sampling, history)
    try:
        return [sampler.sample(row) for _ in range(count)]
    finally:
        sampler.close()


def first(runtime: Runtime, row: int, history: Sequence[int] = (), **fields: Any) -> int:
    """Return the first greedy choice."""
    return draws(runtime, row, Sampling(temperature=0, **fields), 1, history)[0]


def reply(
    runtime: Runtime, sampling: Sampling, n_most: int = 120, prompt: Sequence[int] = PROMPT
) -> tuple[bytes, bool]:
    """Return a reply's bytes, and whether it ended by itself."""
    sampler = runtime.sampler(sampling, prompt)
    data = b""
    try:
        row = row_after(runtime, prompt)
        for _ in range(n_most):
            token = sampler.sample(row)
            if runtime.tokenizer.is_end(token):
                return data, True
            data += runtime.tokenizer.piece(token)
            (row,) = runtime.decode([Chunk(0, runtime.length(0), (token,), True)])  # type: ignore[assignment]
    finally:
        sampler.close()
    return data, False


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    exact = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(exact / exact.sum())


# ---- the value -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 101, float("nan"), "1", True, 10**400]),
        ("top_k", [-1, 2.0, True]),
        ("top_p", [-0.1, 1.1, float("inf")]),
        ("min_p", [-0.1, 1.1, None]),
        ("typical_p", [-0.1, 1.1, "x"]),
        ("repeat_penalty", [0, 101]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("presence_penalty", [-2.1, 2.1, True]),
        ("repeat_last", [-1, 1.5]),
        ("seed", [-1, 2**32, 1.5]),
        ("logprobs", [-1, 21, True, 1.0]),
        ("logit_bias", [{-1: 1}, {1.5: 1}, {"1": 1}, {1: -101}, {1: 101}, {1: "x"}, [(1, 1)], 3]),
        ("grammar", ["", "  ", 3, b"x", "a\0", "\ud800", "a" * (1 << 21)]),
        ("json_schema", ["", "{", "[]", "1", [], 3, '{"a": 1, "a": 2}', '{"a": NaN}',
                         '{"a": "\\ud800"}', {"a": float("inf")}, {"a": {1, 2}}, {"a": b""}]),
    ],
)  # fmt: skip
def test_a_value_outside_its_range_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgument, match=field):
            Sampling(**{field: value})


def test_a_grammar_and_a_schema_exclude_each_other() -> None:
    with pytest.raises(InvalidArgument, match="both grammar and json_schema"):
        Sampling(grammar='root ::= "a"', json_schema={})


def test_a_sampling_is_a_value_whatever_it_was_made_from() -> None:
    bias, schema = {3: -100, 4: 1.5}, {"type": "object", "properties": {"b": {}, "a": {}}}
    made = Sampling(logit_bias=bias, json_schema=schema, logprobs=3)
    same = Sampling(logit_bias=LogitBias(bias), json_schema=json.dumps(schema), logprobs=3)
    bias[5], schema["type"] = 1, "string"
    assert made == same
    assert hash(made) == hash(same)
    assert pickle.loads(pickle.dumps(made)) == made
    assert dict(made.logit_bias) == {3: -100, 4: 1.5}
    assert made != Sampling(logit_bias={3: -100}, json_schema=made.json_schema, logprobs=3)


def test_the_order_of_properties_makes_another_schema() -> None:
    one: dict[str, object] = {"properties": {"a": {}, "b": {}}}
    other: dict[str, object] = {"properties": {"b": {}, "a": {}}}
    assert Sampling(json_schema=one) != Sampling(json_schema=other)


# ---- what the model can do -----------------------------------------------------------------------


def refusals(n_vocab: int) -> list[tuple[Sampling, str]]:
    return [
        (Sampling(logit_bias={n_vocab: 1}), f"token {n_vocab}, the model's ids are 0 to"),
        (Sampling(logit_bias=dict.fromkeys(range(n_vocab), -100)), "bans all"),
        (Sampling(grammar="root ::= (("), "grammar"),
        (Sampling(json_schema={"not": {}}), '"not" at #'),
    ]


@pytest.mark.models
def test_what_the_model_cannot_do_is_refused_and_it_lives_on(tiny: LlamaRuntime) -> None:
    for sampling, complaint in refusals(tiny.model.n_vocab):
        for refuse in (tiny.check_sampling, lambda sampling: tiny.sampler(sampling, [])):
            with pytest.raises(InvalidArgument, match=complaint):
                refuse(sampling)
    tiny.check_sampling(Sampling(grammar='root ::= "a"', logit_bias={0: 1}))
    assert reply(tiny, GREEDY, 5)[0]


def test_the_simulated_runtime_says_that_it_follows_no_grammar(
    simulated: SimulatedRuntime,
) -> None:
    for sampling, _ in refusals(simulated.model.n_vocab):
        with pytest.raises(InvalidArgument):
            simulated.check_sampling(sampling)
        with pytest.raises(InvalidArgument):
            simulated.sampler(sampling, [])
    with pytest.raises(InvalidArgument, match="simulated runtime takes no grammar"):
        simulated.check_sampling(Sampling(grammar='root ::= "a"'))
    simulated.check_sampling(Sampling(logit_bias={0: 1}, logprobs=3, typical_p=0.5))


@pytest.mark.models
def test_samplings_are_checked_beside_the_engines_thread(tiny: LlamaRuntime) -> None:
    faults: list[BaseException] = []

    def check() -> None:
        try:
            for number in range(60):
                schema = {"type": "array", "minItems": number, "items": {"type": "integer"}}
                tiny.check_sampling(Sampling(json_schema=schema, logit_bias={number: 1}))
                with pytest.raises(InvalidArgument):
                    tiny.check_sampling(Sampling(grammar=f'root ::= "{number}" ('))
        except BaseException as fault:
            faults.append(fault)

    wanted = reply(tiny, GREEDY, 60)
    thread = threading.Thread(target=check)
    thread.start()
    try:
        while thread.is_alive():
            assert reply(tiny, GREEDY, 60) == wanted
    finally:
        thread.join()
    assert faults == []


# ---- filters -------------------------------------------------------------------------------------


Mask = NDArray[np.bool_]
Kept = Callable[[NDArray[np.float64], float], tuple[Mask, Mask]]
"""Which tokens of a distribution a filter surely leaves at a value, and which perhaps: llama.cpp
sums in single precision, and what lies right at the edge may fall to either side."""


def every(p: NDArray[np.float64], value: float) -> tuple[Mask, Mask]:
    return p >= 0, p >= 0


def top_k(p: NDArray[np.float64], k: float) -> tuple[Mask, Mask]:
    least = np.sort(p)[-int(k)]
    return p >= least, p >= least


def top_p(p: NDArray[np.float64], value: float) -> tuple[Mask, Mask]:
    falling = np.sort(p)[::-1]
    high, low = (
        falling[np.searchsorted(np.cumsum(falling), value + edge)] for edge in (-0.005, 0.005)
    )
    return p >= high, p >= low


def min_p(p: NDArray[np.float64], value: float) -> tuple[Mask, Mask]:
    least = value * p.max()
    return p >= least * 1.0001, p >= least * 0.9999


def typical(p: NDArray[np.float64], value: float) -> tuple[Mask, Mask]:
    information = -np.log(np.maximum(p, 1e-300))
    distance = np.abs(information - (p * information).sum())
    order = np.argsort(distance)
    cut = distance[order[np.searchsorted(np.cumsum(p[order]), value, side="right")]]
    return distance < cut - 0.005, distance < cut + 0.005


BANS = {40: -100.0, 50: -100.0}


@pytest.mark.parametrize(
    ("name", "value", "kept", "bias"),
    [
        ("top_k", 0, every, {}),
        ("top_k", 4, top_k, {}),
        ("top_k", 4, top_k, {41: 0.5, **BANS}),
        ("top_p", 0.8, top_p, {}),
        ("min_p", 0.2, min_p, {}),
        ("typical_p", 0.5, typical, {}),
        ("typical_p", 0.5, typical, BANS),
    ],
)
def test_a_filter_leaves_what_it_says_as_likely_as_it_was(
    real: LlamaRuntime, name: str, value: float, kept: Kept, bias: dict[int, float]
) -> None:
    row = row_after(real)
    logits = real.logits(row)
    for token, added in bias.items():
        logits[token] += -np.inf if added == -100 else added
    p = softmax(logits)
    surely, perhaps = kept(p, value)
    temperature, n = 1.5, 300 if name == "typical_p" and logits.size > 1000 else 2000
    wanted = softmax(np.where(perhaps, logits, -np.inf) / temperature)
    fields = {**OPEN, "temperature": temperature, name: value}
    drawn = draws(real, row, Sampling(**fields, logit_bias=bias), n)
    counts = np.bincount(drawn, minlength=logits.size)
    assert not counts[~perhaps].any()
    unsure = n * wanted[perhaps & ~surely].sum()
    off = np.abs(counts - n * wanted) - 6 * np.sqrt(n * wanted * (1 - wanted)) - unsure
    assert off[surely].max(initial=0) <= 3


def test_greedy_takes_the_best_token_whatever_the_filters(real: LlamaRuntime) -> None:
    row = row_after(real)
    best = int(real.logits(row).argmax())
    for fields in ({}, {"top_k": 1}, {"typical_p": 0.1}, {"min_p": 1.0}, {"top_p": 0.0}):
        assert first(real, row, **fields) == best


@pytest.mark.models
@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e-7, 1e-5])
def test_however_cold_it_is_the_best_token_wins(tiny: LlamaRuntime, temperature: float) -> None:
    row = row_after(tiny)
    best = int(tiny.logits(row).argmax())
    assert set(draws(tiny, row, Sampling(temperature=temperature, seed=1), 20)) == {best}


def test_without_the_new_options_the_tokens_are_llama_cpps_own(real: LlamaRuntime) -> None:
    row = row_after(real)
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for part in (
        api.llama_sampler_init_penalties(real.model.n_vocab, 64, 1.1, 0.0, 0.0),
        api.llama_sampler_init_top_k(40),
        api.llama_sampler_init_top_p(0.95, 1),
        api.llama_sampler_init_min_p(0.05, 1),
        api.llama_sampler_init_temp(0.7),
        api.llama_sampler_init_dist(7),
    ):
        api.llama_sampler_chain_add(chain, part)
    for token in PROMPT:
        api.llama_sampler_accept(chain, token)
    context = real._context
    plain = [api.llama_sampler_sample(chain, context, row) for _ in range(40)]
    api.llama_sampler_free(chain)
    assert draws(real, row, Sampling(repeat_penalty=1.1, seed=7), 40, PROMPT) == plain


@pytest.mark.models
@pytest.mark.parametrize("special", [{}, {"logit_bias": {40: 1.0}}, {"grammar": "root ::= .*"}])
def test_a_seed_repeats_itself_and_another_differs(
    tiny: LlamaRuntime, special: dict[str, Any]
) -> None:
    row = row_after(tiny)
    for seed in (0, 7, 2**32 - 1):
        sampling = Sampling(**{**OPEN, "temperature": 5.0, "seed": seed}, **special)
        other = Sampling(**{**OPEN, "temperature": 5.0, "seed": seed ^ 1 << 20}, **special)
        drawn = draws(tiny, row, sampling, 30)
        assert drawn == draws(tiny, row, sampling, 30) != draws(tiny, row, other, 30)


# ---- penalties and biases ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repeat", "frequency", "presence", "last"),
    [(1.3, 0, 0, 64), (1, 0.5, 0, 64), (1, 0, 1.5, 64), (1.2, 0.3, -1, 64), (1.3, 1, 1, 4),
     (1.3, 1, 1, 0), (1, -2, 2, 7)],
)  # fmt: skip
def test_penalties_count_what_was_said_and_the_end_of_the_prompt(
    real: LlamaRuntime, repeat: float, frequency: float, presence: float, last: int
) -> None:
    row = row_after(real)
    fields = {
        "repeat_penalty": repeat,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "repeat_last": last,
    }
    seen = [int(token) for token in np.argsort(-real.logits(row))[:8]] * 2 + PROMPT[:3]
    said = draws(real, row, Sampling(temperature=0, **fields), 12, seen)  # type: ignore[arg-type]
    for token in said:
        logits = real.logits(row).astype(np.float64)
        for known in set(seen[-last:] if last else []):
            count = seen[-last:].count(known)
            logits[known] *= repeat if logits[known] <= 0 else 1 / repeat
            logits[known] -= count * frequency + presence
        assert logits[token] == pytest.approx(logits.max(), abs=1e-4)
        seen.append(token)


RUNTIMES = pytest.mark.parametrize(
    "kind", ["simulated", pytest.param("tiny", marks=pytest.mark.models)]
)


@RUNTIMES
def test_a_bias_bans_forces_and_tips_the_balance(kind: str, request: pytest.FixtureRequest) -> None:
    runtime: Runtime = request.getfixturevalue(kind)
    row = row_after(runtime)
    order = [int(token) for token in np.argsort(-runtime.logits(row), kind="stable")]
    best, second, last = order[0], order[1], order[-1]
    gap = float(runtime.logits(row)[best] - runtime.logits(row)[second])
    assert first(runtime, row, logit_bias={best: -100}) == second
    assert first(runtime, row, logit_bias={last: 100}) == last
    assert first(runtime, row, logit_bias={second: gap + 0.01}) == second
    assert first(runtime, row, logit_bias={second: gap - 0.01}) == best
    all_but_one = {token: -100.0 for token in order if token != last}
    assert first(runtime, row, logit_bias=all_but_one) == last
    hot = Sampling(**{**OPEN, "temperature": 50}, logit_bias=dict.fromkeys(order[:200], -100))
    assert not {*draws(runtime, row, hot, 300)} & {*order[:200]}


# ---- logprobs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "simulated",
        pytest.param("tiny", marks=pytest.mark.models),
        pytest.param(DEMO, marks=pytest.mark.demo),
    ],
)
def test_logprobs_are_those_of_the_model_itself(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == DEMO:
        with open_runtime(DEMO, threads=1) as demo:
            check_logprobs(demo)
    else:
        check_logprobs(request.getfixturevalue(kind))


def check_logprobs(runtime: Runtime) -> None:
    row = row_after(runtime)
    expected = np.log(softmax(runtime.logits(row)))
    best = int(expected.argmax())
    sampling = Sampling(
        temperature=1.7, top_k=5, repeat_penalty=1.5, seed=1, logit_bias={best: -100}, logprobs=7
    )
    sampler = runtime.sampler(sampling, [best])
    assert sampler.last_logprob is None
    for _ in range(5):
        token = sampler.sample(row)
        told = sampler.last_logprob
        assert told is not None
        assert token == told.token != best
        assert told.logprob == pytest.approx(expected[token], abs=1e-5)
        values = [value for _, value in told.top]
        assert len(told.top) == 7
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(np.sort(expected)[:-8:-1].tolist(), abs=1e-5)
        assert all(value == pytest.approx(expected[t], abs=1e-5) for t, value in told.top)
        assert told.top[0][0] == best
    sampler.close()


@RUNTIMES
def test_logprobs_are_told_only_where_asked_for(kind: str, request: pytest.FixtureRequest) -> None:
    runtime: Runtime = request.getfixturevalue(kind)
    row = row_after(runtime)
    silent = runtime.sampler(GREEDY, [])
    silent.sample(row)
    assert silent.last_logprob is None
    bare = runtime.sampler(Sampling(temperature=0, logprobs=0), [])
    token = bare.sample(row)
    assert isinstance(bare.last_logprob, TokenLogprob)
    assert (bare.last_logprob.token, bare.last_logprob.top) == (token, ())
    silent.close()
    bare.close()


# ---- grammars ------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog\n", "é\\"]}, "maxItems": 3},
        "kind": {"anyOf": [{"const": None}, {"type": "string", "pattern": "^[a-f]{2,4}$"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOT: dict[str, Any] = {**OPEN, "temperature": 100.0}
"""So hot that any token may come."""


@pytest.mark.models
@pytest.mark.parametrize("fields", [HOT, OPEN, {"temperature": 0.7}, {"temperature": 0}], ids=str)
def test_a_reply_under_a_schema_satisfies_it(tiny: LlamaRuntime, fields: dict[str, Any]) -> None:
    for seed in range(12 if fields["temperature"] else 1):
        sampling = Sampling(**{**fields, "seed": seed}, json_schema=PERSON)
        data, ended = reply(tiny, sampling, 400)
        assert ended
        assert is_valid(json.loads(data.decode()), PERSON), data


@pytest.mark.demo
def test_the_demo_follows_a_schema() -> None:
    with open_runtime(DEMO, threads=1) as runtime:
        prompt = runtime.tokenizer.encode("A person as JSON: ", special=False)
        for fields in ({"temperature": 0}, {**HOT, "seed": 1}, {"temperature": 1, "seed": 2}):
            sampling = Sampling(**fields, json_schema=PERSON, logprobs=1)
            data, ended = reply(runtime, sampling, 120, prompt)
            assert ended
            assert is_valid(json.loads(data.decode()), PERSON), data


@pytest.mark.demo
@pytest.mark.parametrize("grammar", ["root ::= [0-9]{9}", 'root ::= " q" [a-z]', "root ::= [^ ]*"])
def test_among_many_tokens_the_best_that_fit_are_found(grammar: str) -> None:
    """More tokens than a grammar is asked about at first."""
    with open_runtime(DEMO, threads=1) as runtime:
        tokens = np.arange(runtime.model.n_vocab, dtype=np.int32)
        lane = LaneGrammar(grammar, api.llama_model_get_vocab(runtime._model), runtime.tokenizer)
        allowed = [token for token in lane.allowed(tokens) if runtime.tokenizer.piece(int(token))]
        lane.close()
        for text in ("The year was", "xx", "1 2 3 4"):
            row = row_after(runtime, runtime.tokenizer.encode(text, special=False))
            best = [
                int(token) for token in sorted(allowed, key=lambda t: -runtime.logits(row)[t])[:3]
            ]
            assert first(runtime, row, grammar=grammar) == best[0]
            for seed in range(10):
                narrow = Sampling(**{**HOT, "top_k": 3, "seed": seed}, grammar=grammar)
                assert draws(runtime, row, narrow, 1)[0] in best


@pytest.mark.models
def test_a_reply_ends_with_its_grammar_and_never_before(tiny: LlamaRuntime) -> None:
    for seed in range(10):
        eager = Sampling(
            **{**HOT, "seed": seed}, grammar="root ::= [a-z]{5}", logit_bias={END: 100}
        )
        data, ended = reply(tiny, eager, 50)
        assert ended
        assert len(data) == 5
        assert data.isalpha()


@pytest.mark.models
def test_a_reply_under_a_grammar_is_whole_unicode_text(tiny: LlamaRuntime) -> None:
    ends = {token: -100.0 for token in range(256, 264) if token != END}
    for seed in range(20):
        hot = Sampling(**{**HOT, "seed": seed}, grammar="root ::= [^a]{6}", logit_bias=ends)
        data, ended = reply(tiny, hot, 50)
        assert ended
        assert len(data.decode()) == 6


@pytest.mark.models
def test_a_favoured_control_token_is_no_part_of_a_reply(tiny: LlamaRuntime) -> None:
    wanted = Sampling(temperature=0, grammar='root ::= "<|im_start|>"', logit_bias={CONTROL: 100})
    assert reply(tiny, wanted, 50) == (b"<|im_start|>", True)


@pytest.mark.models
def test_greedy_under_a_grammar_takes_the_best_token_that_fits(tiny: LlamaRuntime) -> None:
    vowels = sorted(b"aeiou")
    sampler = tiny.sampler(Sampling(temperature=0, grammar="root ::= [aeiou]{30}"), [])
    row = row_after(tiny)
    for _ in range(30):
        token = sampler.sample(row)
        assert token == max(vowels, key=lambda vowel: tiny.logits(row)[vowel])
        (row,) = tiny.decode([Chunk(0, tiny.length(0), (token,), True)])  # type: ignore[assignment]
    assert tiny.tokenizer.is_end(sampler.sample(row))
    sampler.close()


@pytest.mark.models
def test_penalties_and_filters_act_among_the_tokens_that_fit(tiny: LlamaRuntime) -> None:
    row = row_after(tiny)
    vowels = {vowel: float(tiny.logits(row)[vowel]) for vowel in b"aeiou"}
    best = max(vowels, key=vowels.__getitem__)
    harsh = Sampling(temperature=0, grammar="root ::= [aeiou]{2}", repeat_penalty=100.0)
    vowels[best] *= 0.01 if vowels[best] > 0 else 100
    assert draws(tiny, row, harsh, 2) == [best, max(vowels, key=vowels.__getitem__)]
    narrow = Sampling(**{**HOT, "top_k": 1}, grammar="root ::= [aeiou]{20}")
    assert draws(tiny, row, narrow, 20) == [best] * 20


@pytest.mark.models
def test_a_lane_in_a_dead_end_fails_alone(tiny: LlamaRuntime) -> None:
    row = row_after(tiny)
    stuck = tiny.sampler(Sampling(grammar='root ::= "a" "b"', logit_bias={ord("b"): -100}), [])
    assert stuck.sample(row) == ord("a")
    for _ in range(2):
        with pytest.raises(GrammarFailed, match="allows no token"):
            stuck.sample(row)
    stuck.close()
    assert first(tiny, row) == int(tiny.logits(row).argmax())


@pytest.mark.models
def test_a_lane_with_a_grammar_does_not_disturb_the_one_beside_it(tiny: LlamaRuntime) -> None:
    def together(sampling: Sampling) -> tuple[list[int], list[int]]:
        tiny.reset()
        chunks = [Chunk(lane, 0, (*PROMPT, 40 + lane), True) for lane in range(2)]
        samplers = [tiny.sampler(GREEDY, []), tiny.sampler(sampling, [])]
        said: tuple[list[int], list[int]] = ([], [])
        for _ in range(40):
            rows = tiny.decode(chunks)
            for lane, sampler in enumerate(samplers):
                row = rows[lane]
                assert row is not None
                said[lane].append(sampler.sample(row))
            chunks = [Chunk(n, tiny.length(n), (said[n][-1],), True) for n in range(2)]
        for sampler in samplers:
            sampler.close()
        return said

    free, other = together(GREEDY)
    beside, constrained = together(Sampling(temperature=0, grammar="root ::= [a-z ]{100}"))
    assert beside == free
    assert bytes(constrained).replace(b" ", b"a").isalpha()
    assert constrained != other


@pytest.mark.models
def test_a_closed_sampler_and_a_closed_runtime_refuse(tiny: LlamaRuntime) -> None:
    row = row_after(tiny)
    sampler = tiny.sampler(Sampling(grammar='root ::= "a"'), [])
    sampler.close()
    sampler.close()
    with pytest.raises(BackendError, match="closed"):
        sampler.sample(row)
    with open_runtime("llama", threads=1) as runtime:
        row = row_after(runtime)
        late = runtime.sampler(GREEDY, [])
    with pytest.raises(InvalidArgument):
        late.sample(row)
    late.close()
