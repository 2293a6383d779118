"""Which grammars are taken, what is refused of them, and do replies stay within them?"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tiny_models
from grammar_walks import END, Walks, open_walks
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument
from orchestrator.runtime.grammar import check_gbnf
from orchestrator.runtime.library import api
from orchestrator.runtime.llama_grammar import grammar_of
from orchestrator.runtime.sampling import GrammarFailed, Sampling

ARITHMETIC = """\
root  ::= (expression "=" space number "\\n")+   # a comment
expression ::= number ([-+*/] space number)*
number ::= [0-9]+ space | "(" space expression ")" space
space ::= [ \\t]{0,2}
"""
TREE = 'root ::= "(" root* ")" | [a-z]'
MANY_BEGINNINGS = "\n".join(
    ["root ::= a0", *(f"a{n} ::= a{n + 1} a{n + 1}" for n in range(20)), 'a20 ::= "x"?']
)


@pytest.fixture(scope="module")
def walks() -> Iterator[Walks]:
    with open_walks() as opened:
        yield opened


@pytest.mark.parametrize(
    ("grammar", "text", "fits"),
    [
        (ARITHMETIC, "1+2= 3\n", True),
        (ARITHMETIC, "(1+2)*3= 9\n4= 4\n", True),
        (ARITHMETIC, "1+= 3\n", False),
        (ARITHMETIC, "1+2= 3", False),
        (TREE, "(a(b)((c)))", True),
        (TREE, "(a(b)", False),
        ('root ::= "a"{2,3}', "aa", True),
        ('root ::= "a"{2,3}', "aaaa", False),
        ('root ::= "a"{2,}', "aaaaaa", True),
        ('root ::= "a"{2}', "a", False),
        ('root ::= ("a" | "b" |\n "c"\n)+\n', "abc", True),
        ("root ::= [^a-c\\n]", "d", True),
        ("root ::= [^a-c\\n]", "b", False),
        ("root ::= [é-ü\\U0001F600-]{3}", "é-😀", True),
        ('root ::= "\\x41\\u00e9\\"\\\\" .', 'Aé"\\ß', True),
        ('root ::= ""', "", True),
        ('root ::= "" | "x"', "x", True),
        ("root ::= [\\]a-]+", "]a-", True),
        ('root ::= d root | "q"\nd ::= b c\nb ::= "" | ""\nc ::= "z"', "zzq", True),
    ],
)  # fmt: skip
@pytest.mark.models
def test_a_grammar_means_what_llama_cpp_says(
    walks: Walks, grammar: str, text: str, fits: bool
) -> None:
    check_gbnf(grammar)
    assert walks.accepts(grammar, text) is fits


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("", "no rule"),
        ('first ::= "a"', 'no rule "root"'),
        ("root ::= b", 'uses a rule "b"'),
        ('root ::= "a"\nroot ::= "b"', "line 2.*defined twice"),
        ('root ::= "a', "line 1.*ends inside quotes"),
        ("root ::= [a", "ends inside quotes"),
        ("root ::= []", "empty class"),
        ("root ::= [z-a]", "turn it round"),
        ('root ::= "\\q"', "no escape"),
        ('root ::= "\\', "no escape"),
        ('root ::= "\\u12"', "4 hexadecimal"),
        ('root ::= "\\U00110000"', "beyond Unicode"),
        ('root = "a"', "'::=' is expected"),
        ('root ::= "a" )', "line's end"),
        ('root ::= "a"\n  | "b"', "line 2.*name of a rule"),
        ('root ::= ("a"', r"'\)' is expected"),
        ("root ::= *", "nothing before it"),
        ('root ::= "a"{', "a number is expected"),
        ('root ::= "a"{2', "'}' is expected"),
        ('root ::= "a"{5,3}', "bounds round"),
        ('root ::= "a"{2001}', "at most 2,000"),
        ('root ::= "a"{0,99999999999999999999}', "at most 2,000"),
        ('root ::= ("a" | "b"?){100}{100}', "more than 2,000 times"),
        (f'root ::= "{"a" * 500}"{{2000}}', "200,000 elements"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ('root ::= "<" <[7]>', "references to tokens"),
        ("root ::= !<|im_end|>", "references to tokens"),
        ('root ::= "a" root', "never end"),
        ('root ::= a root "x" | "y"\na ::= b\nb ::= "z"?', "without a character"),
        ('root ::= ("a"*)*', "may be empty"),
        ('root ::= g root | "x"\ng ::= ""', "without a character"),
        (MANY_BEGINNINGS, "too many ways"),
        ("\n".join(f'a{n} ::= a{n + 1} "x" | a{n + 1} "y"' for n in range(40))
         + '\na40 ::= "z"\nroot ::= a0', "too many ways"),
    ],
    ids=lambda value: repr(value[:30]),
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_refused_at_once(
    grammar: str, complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = time.thread_time()
    with pytest.raises(InvalidArgument, match=complaint):
        check_gbnf(grammar)
    assert time.thread_time() - begun < 1
    assert capfd.readouterr().err == ""


NAMES = ("root", "a", "b", "c")
LITERALS = st.sampled_from(['"x"', '"yz"', '"é"', '""', "[a-c]", "[^x]", ".", "[é-ü]", '"\\n"'])
REPEATED = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{0}"])


def _rule(name: str) -> st.SearchStrategy[str]:
    later = NAMES[NAMES.index(name) + 1 :]
    item = LITERALS if not later else LITERALS | st.sampled_from([*later, "root"])
    for _ in range(2):
        repeated = st.tuples(item, REPEATED).map("".join)
        alternatives = st.lists(st.lists(repeated, min_size=1, max_size=3).map(" ".join),
                                min_size=1, max_size=3).map(" | ".join)  # fmt: skip
        item = repeated | alternatives.map("({})".format)
    return alternatives.map(f"{name} ::= {{}}".format)


GRAMMARS = st.tuples(*map(_rule, NAMES)).map("\n".join)
MARKS = st.sampled_from(list('"[](){}|*?\\^-<!:= \n#'))


@pytest.mark.models
@given(grammar=GRAMMARS, rng=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_grammar_is_refused_or_followed_to_its_end(
    walks: Walks, grammar: str, rng: random.Random
) -> None:
    try:
        check_gbnf(grammar)
    except InvalidArgument:
        return
    try:
        grammar_of(Sampling(grammar=grammar))
        text = walks.text(grammar, rng, n_most=60)
    except GrammarFailed:  # too ambiguous, and given up in time
        return
    assert text is None or walks.accepts(grammar, text)


@given(grammar=GRAMMARS, place=st.floats(0, 1), mark=MARKS, length=st.integers(0, 1))
@settings(max_examples=300, deadline=None)
def test_what_we_take_llama_cpp_takes(grammar: str, place: float, mark: str, length: int) -> None:
    at = int(place * len(grammar))
    spoiled = grammar[:at] + mark + grammar[at + length :]
    try:
        check_gbnf(spoiled)
    except InvalidArgument:
        return
    parsed = api.llama_sampler_init_grammar(None, spoiled.encode(), b"root")
    assert parsed
    api.llama_sampler_free(parsed)


@pytest.mark.models
def test_a_finished_grammar_allows_only_the_end(walks: Walks) -> None:
    every = np.arange(tiny_models.N_VOCAB, dtype=np.int32)
    with walks.begun('root ::= "a"') as lane:
        assert not lane.takes(END)
        assert lane.takes(ord("a"))
        assert all(walks.tokenizer.is_end(int(token)) for token in lane.allowed(every))
        assert not any(map(lane.takes, range(256)))
        assert lane.takes(END)


@pytest.mark.models
def test_a_control_token_does_not_pass_for_its_name(walks: Walks) -> None:
    opener = tiny_models.TOKEN["<|im_start|>"]
    with walks.begun('root ::= "<|im_start|>"') as lane:
        assert not lane.takes(opener)
        assert all(map(lane.takes, b"<|im_start|>"))


@pytest.mark.models
def test_a_text_holds_whole_characters_only(walks: Walks) -> None:
    grammar = "root ::= [^x]*"
    begun = bytes.fromhex
    for fits in (begun("c3a9"), begun("ed9fbf"), begun("f09f9880"), begun("efbfbf")):
        with walks.begun(grammar) as lane:
            assert all(map(lane.takes, fits[:-1]))
            assert not lane.takes(END), "a reply would end inside a character"
            assert lane.takes(fits[-1])
            assert lane.takes(END)
    for wrong in ("80", "c080", "c3c3", "e080", "e09fbf", "eda0", "f08f", "f490", "f5", "ff"):
        with walks.begun(grammar) as lane:
            assert not all(map(lane.takes, begun(wrong)))


@pytest.mark.models
def test_a_grammar_that_doubles_its_work_with_every_character_is_given_up(walks: Walks) -> None:
    grammar = 'root ::= "a" root "b" | "a" root "c" | "a" root "d" | "a" root "e" | "a"'
    begun = time.thread_time()
    with walks.begun(grammar) as lane, pytest.raises(GrammarFailed, match="too many ways"):
        all(lane.takes(ord("a")) for _ in range(100))
    assert time.thread_time() - begun < 30


def test_what_would_end_the_process_is_refused_and_it_lives_on() -> None:
    """Each of these kills or hangs a process that hands it to llama.cpp unread."""
    script = """
from orchestrator.errors import InvalidArgument
from orchestrator.runtime.llama_grammar import grammar_of
from orchestrator.runtime.sampling import Sampling
for grammar in ('root ::= "<" <[257]>', 'root ::= "x"{5,3}', 'root ::= g root\\ng ::= ""',
                'root ::= a root "x" | "y"\\na ::= b\\nb ::= "z"?', "root ::= " + "(" * 200_000):
    try:
        grammar_of(Sampling(grammar=grammar))
    except InvalidArgument:
        continue
    raise SystemExit(f"taken: {grammar[:40]}")
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("alive\n", "", 0)
