"""How is the next token of one lane to be chosen, and how likely was it?

Values only: what may be asked for, checked when it is made, and what is reported back. Whatever
depends on the model (its vocabulary, whether llama.cpp can follow a grammar) is checked by
`Runtime.check_sampling`.

Invariant: a `Sampling` is immutable, hashable and picklable, whatever mappings it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import BackendError, InvalidArgument

N_LOGPROBS_MOST = 20
BAN = -100.0
"""The bias that takes a token out, instead of making it less likely."""

_N_GRAMMAR_MOST = 1 << 20  # characters


class GrammarFailed(BackendError):
    """A lane's grammar cannot be followed further; the lane's states are sound."""


class LogitBias(Mapping[int, float]):
    """What is added to the logits of some tokens; a mapping that cannot be changed."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]) -> None:
        if not isinstance(values, Mapping):
            raise InvalidArgument(
                f"logit_bias is {type(values).__name__}; give a mapping from token ids to numbers"
            )
        for token, bias in values.items():
            _within(
                "a token id in logit_bias", token, 0, 2**31 - 1, "see the vocabulary", whole=True
            )
            _within(f"logit_bias of token {token}", bias, BAN, 100, f"{BAN:g} bans the token")
        self._values = dict(values)

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"LogitBias({self._values})"

    def banned(self) -> list[int]:
        """Return the tokens that are never to be chosen."""
        return [token for token, bias in self._values.items() if bias == BAN]


_UNBIASED = LogitBias({})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy: the best token that is allowed.

    `top_k` 0, `top_p`, `typical_p` and `repeat_penalty` 1, `min_p`, `frequency_penalty` and
    `presence_penalty` 0 each switch their filter off; the penalties look back `repeat_last`
    tokens, into the prompt as well. `seed` None draws a new one for every request. `logit_bias`
    is added to the logits of the tokens it names. A `grammar` (GBNF) or a `json_schema`, as a
    mapping or as JSON text, is what the reply must follow to its end. `logprobs` is how many
    alternatives are reported for every token.
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last: int = 64
    seed: int | None = None
    typical_p: float = field(default=1.0, kw_only=True)
    frequency_penalty: float = field(default=0.0, kw_only=True)
    presence_penalty: float = field(default=0.0, kw_only=True)
    logit_bias: Mapping[int, float] = field(default=_UNBIASED, kw_only=True)
    grammar: str | None = field(default=None, kw_only=True)
    json_schema: Mapping[str, object] | str | None = field(default=None, kw_only=True)
    logprobs: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check every value; a schema is kept as JSON text, a bias as a `LogitBias`."""
        _within("temperature", self.temperature, 0, 100, "0 is greedy, 0.7 is usual")
        _within("top_k", self.top_k, 0, 1_000_000, "0 switches it off", whole=True)
        _within("top_p", self.top_p, 0, 1, "1 switches it off")
        _within("min_p", self.min_p, 0, 1, "0 switches it off")
        _within("typical_p", self.typical_p, 0, 1, "1 switches it off")
        _within("repeat_penalty", self.repeat_penalty, 0.01, 100, "1 switches it off")
        _within("frequency_penalty", self.frequency_penalty, -2, 2, "0 switches it off")
        _within("presence_penalty", self.presence_penalty, -2, 2, "0 switches it off")
        _within("repeat_last", self.repeat_last, 0, 1_000_000, "64 is usual", whole=True)
        if self.seed is not None:
            _within("seed", self.seed, 0, 2**32 - 1, "leave it out for a random one", whole=True)
        if self.logprobs is not None:
            _within(
                "logprobs", self.logprobs, 0, N_LOGPROBS_MOST, "leave it out for none", whole=True
            )
        if not isinstance(self.logit_bias, LogitBias):
            object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))
        if self.grammar is not None or self.json_schema is not None:
            self._check_form()

    def _check_form(self) -> None:
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidArgument("both grammar and json_schema are set; give one of them")
        if self.grammar is not None:
            _check_text("grammar", self.grammar, "give GBNF rules, one of them named root")
        else:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))


def _within(
    name: str, value: float, low: float, high: float, remedy: str, *, whole: bool = False
) -> None:
    kind, word = (int, "a whole number") if whole else (int | float, "a number")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}; give {word}, {remedy}")
    if not low <= value <= high:  # false for what is not a number
        raise InvalidArgument(f"{name} is {value}, must lie in {low:.10g} to {high:.10g}; {remedy}")


def _check_text(name: str, text: object, remedy: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise InvalidArgument(f"{name} is {_short(text)}; {remedy}")
    if len(text) > _N_GRAMMAR_MOST:
        raise InvalidArgument(
            f"{name} has {len(text):,} characters, must have at most {_N_GRAMMAR_MOST:,}"
        )
    if "\0" in text or (not text.isascii() and _has_surrogates(text)):
        raise InvalidArgument(f"{name} holds a NUL or half a character; take it out")


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _schema_text(schema: Mapping[str, object] | str | None) -> str:
    """Return the one JSON text of a schema; the order of properties is kept, it has a meaning."""
    try:
        if isinstance(schema, str):
            _check_text("json_schema", schema, "give a JSON schema")
            schema = json.loads(schema, object_pairs_hook=_without_doubles, parse_constant=_refuse)
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"json_schema is not JSON: {error}") from error
    if not text.startswith("{"):
        raise InvalidArgument(f"json_schema is {_short(schema)}; give an object")
    _check_text("json_schema", text, "give a JSON schema")
    return text


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f'json_schema names "{double}" twice in one object; drop one')
    return table


def _refuse(constant: str) -> object:
    raise InvalidArgument(f"json_schema is not JSON: {constant} is no JSON number")


def _plain(value: object) -> object:
    """Let any mapping, at any depth, be written as an object."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a chosen token was, and the likeliest alternatives, best first.

    Natural logarithms of the probabilities that the model itself gave, before any bias, penalty,
    filter, grammar or temperature. `top` holds pairs of a token and its value; the chosen token
    is among them only if it was that likely.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: NDArray[np.float32], token: int, n_top: int) -> TokenLogprob:
    """Return the place of `token` in the softmax of a row of logits, with `n_top` alternatives."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    n_top = min(n_top, exact.size)
    best = np.sort(np.argpartition(exact, -n_top)[-n_top:]) if n_top else np.array([], np.int64)
    best = best[np.argsort(-exact[best], kind="stable")]
    top = tuple((int(place), float(exact[place])) for place in best)
    return TokenLogprob(token, float(exact[token]), top)


def check_bias(bias: Mapping[int, float], n_vocab: int) -> None:
    """Refuse a bias on tokens that do not exist, or one that bans them all."""
    if not bias:
        return
    if max(bias) >= n_vocab:
        raise InvalidArgument(
            f"logit_bias names token {max(bias)}, the model's ids are 0 to {n_vocab - 1}"
        )
    if sum(value == BAN for value in bias.values()) == n_vocab:
        raise InvalidArgument(f"logit_bias bans all {n_vocab:,} tokens; leave at least one")
