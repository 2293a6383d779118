"""``orchestrator chat`` from a script: what goes where, and how it ends."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest
from fake_engine import FakeEngine, FakeStream

from orchestrator.cli.main import main
from orchestrator.cli.opening import Opening, Progress
from orchestrator.config import DEMO, ModelSpec
from orchestrator.engine.request import Sampling, TokenLogprob
from orchestrator.errors import ModelFileError, PromptTooLong

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    out: bytes
    err: str
    engine: FakeEngine


class Cli:
    """Runs command lines in this process, with `stdin` piped in and a fake engine behind them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        self._monkeypatch = monkeypatch
        self._captured = capfdbinary

    def __call__(
        self, *arguments: str, stdin: bytes = b"", engine: FakeEngine | None = None
    ) -> Ended:
        engine = engine or FakeEngine()
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = main(["chat", *arguments], open_engine=engine.open)
        out, err = self._captured.readouterr()
        return Ended(status, out, err.decode(), engine)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for forced in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(forced, raising=False)
    return Cli(monkeypatch, capfdbinary)


def says(*words: str, opens_reasoning: bool = False) -> FakeEngine:
    return FakeEngine(streams=[FakeStream(words, opens_reasoning=opens_reasoning)])


def test_the_answer_alone_is_on_standard_output_byte_for_byte(cli: Cli) -> None:
    ended = cli("hi", engine=says("**b** \x1b[1m", "é\r\n", "end"))
    assert ended.status == 0
    assert ended.out == "**b** \x1b[1mé\r\nend".encode()
    assert "prompt 30 · reused 10 (turn) · prefilled 20" in ended.err
    assert ended.engine.closed


def test_what_is_piped_in_is_the_prompt(cli: Cli) -> None:
    asked = cli(stdin="from a pipe, é\n".encode()).engine.asked[0]
    assert asked.messages == [{"role": "user", "content": "from a pipe, é"}]


def test_a_prompt_stands_before_what_is_piped_in(cli: Cli) -> None:
    asked = cli("Sum up:", "--system", "Be brief.", stdin=b"a\nb\n").engine.asked[0]
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sum up:\n\na\nb"},
    ]


def test_nothing_to_answer_is_an_error_of_usage(cli: Cli) -> None:
    ended = cli(stdin=b" \n")
    assert ended.status == 2
    assert "nothing to answer" in ended.err
    assert ended.engine.openings == []


def test_a_pipe_that_is_not_text_is_refused_with_the_place(cli: Cli) -> None:
    ended = cli(stdin=b"abc\xff")
    assert ended.status == 2
    assert "not UTF-8 text: byte 0xff at offset 3" in ended.err


def test_reasoning_goes_to_standard_error(cli: Cli) -> None:
    ended = cli("hi", engine=says("let me see</think>\n\nSo.", opens_reasoning=True))
    assert ended.out == b"So."
    assert "let me see\n" in ended.err


def test_json_is_one_object_with_everything_in_it(cli: Cli) -> None:
    ended = cli("hi", "--json", engine=says("<think>hm</think>", "So."))
    assert ended.out.endswith(b"}\n")
    assert json.loads(ended.out) == {
        "model": "fake",
        "text": "So.",
        "reasoning": "hm",
        "tokens": [0, 1],
        "usage": {
            "prompt_tokens": 30,
            "completion_tokens": 2,
            "cached_tokens": 10,
            "prefilled_tokens": 20,
            "seen_tokens": 0,
            "seeded_from": "turn",
            "seeded_tier": None,
        },
        "miss": None,
        "timings": {
            "queued": 0.0,
            "time_to_first_token": 0.25,
            "prefill": 0.2,
            "decode": 0.5,
            "total": 0.75,
        },
        "finish_reason": "stop",
    }


def test_every_option_reaches_the_engine(cli: Cli) -> None:
    Path("t.jinja").touch()
    Path("g.gbnf").write_text('root ::= "é"\n', encoding="utf-8")
    line = (
        "hi -m x/y.gguf --ctx 512 --threads 2 --gpu-layers 0 --chat-template t.jinja "
        "--no-cache --exact "
        "--temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --repeat-penalty 1.1 --seed 7 "
        "--typical-p 0.6 --frequency-penalty 0.1 --presence-penalty -0.2 --logprobs 2 --json "
        "--grammar g.gbnf "
        '--max-tokens 9 --stop A --stop B --template-arg think=false --template-arg n={"a":[1]}'
    )
    engine = cli(*line.split()).engine
    assert engine.openings == [
        Opening(ModelSpec("y", path=Path("x/y.gguf")), 512, 2, 0, Path("t.jinja"), 0, exact=True)
    ]
    asked = engine.asked[0]
    assert asked.sampling == Sampling(
        *(0, 3, 0.5, 0.1, 1.1),
        seed=7,
        typical_p=0.6,
        frequency_penalty=0.1,
        presence_penalty=-0.2,
        logprobs=2,
        grammar='root ::= "é"\n',
    )
    assert (asked.max_tokens, asked.stop, asked.use_cache) == (9, ("A", "B"), False)
    assert asked.template_arguments == {"think": False, "n": {"a": [1]}}


def test_without_options_the_choices_are_left_to_the_engine(cli: Cli) -> None:
    engine = cli("hi").engine
    assert engine.openings == [Opening(DEMO)]
    assert engine.asked[0].sampling == Sampling(temperature=0.2, repeat_penalty=1.1)  # the demo's
    assert engine.asked[0].use_cache
    assert engine.asked[0].priority == "interactive"


def test_a_model_of_the_file_is_opened_as_the_file_says_unless_told_otherwise(cli: Cli) -> None:
    Path("models.toml").write_text(
        'version = 1\n[models.big]\npath = "big.gguf"\nctx = 100\nthreads = 3\n'
        "sampling = { temperature = 0.5, top_k = 9 }\n"
    )
    engine = cli("hi", "-m", "big", "--ctx", "50", "--temperature", "0").engine
    sampling = {"temperature": 0.5, "top_k": 9}
    big = ModelSpec("big", path=Path("big.gguf").absolute(), ctx=100, threads=3, sampling=sampling)
    assert engine.openings == [Opening(big, ctx=50)]
    assert engine.asked[0].sampling == Sampling(temperature=0, top_k=9)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ctx", "0"], "--ctx"),
        (["--threads", "x"], "--threads"),
        (["--template-arg", "x"], "is not KEY=JSON"),
        (["--template-arg", "x=yes"], "a text needs quotes of its own: 'x=\"yes\"'"),
        (["--stop", ""], "cannot be empty"),
        (["--chat-template", "none.jinja"], "does not exist"),
        (["--grammar", "none.gbnf"], "does not exist"),
        (["--logprobs", "3"], "--logprobs needs --json"),
        (["--sytem", "x"], "--system"),
        (["--system", "\udcff"], "not valid UTF-8"),
    ],
)
def test_a_wrong_option_is_an_error_of_usage(cli: Cli, arguments: list[str], told: str) -> None:
    ended = cli("hi", *arguments)
    assert ended.status == 2
    assert told in ended.err
    assert ended.engine.openings == []


def test_sampling_out_of_range_is_told_before_a_model_is_opened(cli: Cli) -> None:
    ended = cli("hi", "--top-p", "2")
    assert ended.status == 1
    assert ended.err == "error: top_p is 2.0, must lie in 0 to 1; 1 switches it off\n"
    assert ended.engine.openings == []


def test_a_schema_of_a_file_reaches_the_engine(cli: Cli) -> None:
    Path("s.json").write_text('{"type": "object"}')
    sampling = cli("hi", "--json-schema", "s.json").engine.asked[0].sampling
    assert sampling is not None
    assert sampling.json_schema == '{"type": "object"}'


def test_a_file_that_is_no_grammar_or_schema_is_told_in_one_line(cli: Cli) -> None:
    Path("latin.gbnf").write_bytes(b'root ::= "\xe9"')
    Path("s.json").write_text('{"type": ')
    for arguments, told in (
        (["--grammar", "latin.gbnf"], '"latin.gbnf" is not UTF-8 text: offset 10'),
        (["--json-schema", "s.json"], "json_schema is not JSON"),
        (["--json-schema", "s.json", "--grammar", "s.json"], "both grammar and json_schema"),
    ):
        ended = cli("hi", *arguments)
        assert ended.status == 1
        assert ended.err.count("\n") == 1
        assert told in ended.err
        assert ended.engine.openings == []


def test_logprobs_are_in_the_object(cli: Cli) -> None:
    engine = says("a", "b")
    engine.streams[0].logprobs = (
        TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.5))),
        TokenLogprob(8, -2.5, ()),
    )
    ended = cli("hi", "--json", "--logprobs", "2", engine=engine)
    assert json.loads(ended.out)["logprobs"] == [
        {
            "token": 7,
            "logprob": -0.5,
            "top": [{"token": 7, "logprob": -0.5}, {"token": 9, "logprob": -1.5}],
        },
        {"token": 8, "logprob": -2.5, "top": []},
    ]


def test_an_unknown_model_is_told_in_one_line(cli: Cli) -> None:
    ended = cli("hi", "-m", "dema")
    assert ended.status == 1
    assert ended.err.startswith('error: no model is named "dema"')
    assert ended.err.count("\n") == 1


def test_a_model_that_cannot_be_opened_is_told_in_one_line(cli: Cli) -> None:
    class Broken(FakeEngine):
        def open(self, opening: Opening, on_progress: Progress) -> FakeEngine:
            raise ModelFileError('"x.gguf" is no GGUF')

    ended = cli("hi", engine=Broken())
    assert (ended.status, ended.out, ended.err) == (1, b"", 'error: "x.gguf" is no GGUF\n')


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_request_that_fails_leaves_standard_output_empty(cli: Cli, arguments: list[str]) -> None:
    failing = FakeEngine(streams=[FakeStream([], error=PromptTooLong(9001, 8192))])
    ended = cli("hi", *arguments, engine=failing)
    assert (ended.status, ended.out) == (1, b"")
    assert "error: the prompt has 9,001 tokens, the context holds 8,192" in ended.err
    assert ended.engine.closed


def test_a_defect_is_told_without_a_traceback_unless_one_is_asked_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = cli("hi", engine=FakeEngine(streams=[FakeStream([], error=KeyError("x"))]))
    assert ended.status == 1
    assert "error: KeyError: 'x'\nThis is a defect of orchestrator" in ended.err
    assert "Traceback" not in ended.err
    monkeypatch.setenv("ORCHESTRATOR_TRACE", "1")
    ended = cli("hi", engine=FakeEngine(streams=[FakeStream([], error=KeyError("x"))]))
    assert "Traceback" in ended.err


def test_what_the_engine_logs_comes_without_its_traceback(cli: Cli) -> None:
    def fail(place: int) -> None:
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("orchestrator.engine").exception("a step failed")

    ended = cli("hi", engine=FakeEngine(streams=[FakeStream(["So."], before_word=fail)]))
    assert ended.out == b"So."
    assert ended.err.splitlines()[1] == "ERROR: a step failed"
    assert "Traceback" not in ended.err


def test_verbose_says_more_on_standard_error_alone(cli: Cli) -> None:
    ended = cli("hi", "--verbose")
    assert ended.out == b"echo hi "
    assert "granitehybrid" in ended.err
    assert "queued 0.000 s · prefill 0.200 s at 100 tok/s" in ended.err


# ---- as a process of its own --------------------------------------------------------------------


def process(
    *arguments: str, stdout: int | BinaryIO = subprocess.PIPE, **environment: str
) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    return subprocess.Popen(
        [sys.executable, str(HERE / "fake_engine.py"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def test_ctrl_c_prints_what_was_said_and_exits_as_interrupted() -> None:
    running = process("chat", "hi", FAKE_REPLY="word " * 1000, FAKE_PACE="0.02")
    assert running.stdout is not None
    assert running.stdout.read(4) == b"word"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert running.returncode == 130
    assert len(out) < 4000
    assert b"stopped" in err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_is_no_reason_for_a_traceback() -> None:
    running = process("chat", "hi", FAKE_REPLY="word " * 1000, FAKE_PACE="0.001")
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.read(4)
    running.stdout.close()
    err = running.stderr.read()
    assert running.wait(timeout=20) == 1
    assert b"Traceback" not in err
    assert b"Exception" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is full")
def test_a_disk_that_is_full_is_told_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        running = process("chat", "hi", stdout=full)
        err = running.communicate(timeout=20)[1]
    assert running.returncode == 1
    assert err.endswith(b"error: No space left on device\n")


def test_text_appears_while_the_reply_is_still_being_made() -> None:
    running = process("chat", "hi", FAKE_REPLY="word " * 500, FAKE_PACE="0.05")
    assert running.stdout is not None
    begun = time.monotonic()
    assert running.stdout.read(4) == b"word"
    assert time.monotonic() - begun < 10
    running.kill()
    running.communicate()


def test_the_version_and_the_help_are_told() -> None:
    assert b"Chat with hybrid GGUF models" in process("--help").communicate(timeout=20)[0]
    assert b"--template-arg KEY=JSON" in process("chat", "--help").communicate(timeout=20)[0]
