"""What a reply looks like on a terminal, while it comes and when it is whole."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console

from orchestrator.cli.inline import SPAN_LIMIT, InlineStream, inline
from orchestrator.cli.markdown import MarkdownStream
from orchestrator.cli.render import Bytes, Dim, Styled, Waiting, clean, terminal_view
from orchestrator.engine.request import Prefilling

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"\x1b\[\??[0-9;]*[A-Za-z]")

SAMPLE = """\
# A `heading`

A paragraph with **bold words**, *emphasis*, `code` and [a link](https://example.org/x).
Second line: 2 * 3 * 4, snake_case_name, 2**10, *open and `open.

- an item that is long enough to be wrapped at least once
  - nested **item**
10. ten

> quoted

```python
def f(x):

    return x  # twice
```

| name | value |
|------|------:|
| pi | **3.14** |

| not a table

---
这是**重点**一个很长的句子没有空格所以必须在任何地方断开
"""


def screen(width: int = 60) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        color_system="standard",
        width=width,
        highlight=False,
        _environ={"TERM": "xterm"},
    )
    return console, file


def rendered(text: str, width: int = 60, pieces: int = 10**9, seed: int = 0) -> str:
    """Return what stands on the screen, with its styles, after `text` came in pieces."""
    console, file = screen(width)
    markdown = MarkdownStream(console)
    rng = random.Random(seed)
    while text:
        length = rng.randint(1, pieces)
        markdown.feed(text[:length])
        text = text[length:]
    markdown.finish()
    return file.getvalue()


def shown(text: str, width: int = 60) -> str:
    """Return what can be read on the screen, without styles and ends of lines."""
    lines = _STYLES.sub("", rendered(text, width)).split("\n")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def test_the_blocks_of_a_reply_are_laid_out() -> None:
    assert (
        shown(SAMPLE, width=44)
        == """\
A heading

A paragraph with bold words, emphasis, code
and a link (https://example.org/x).
Second line: 2 * 3 * 4, snake_case_name,
2**10, *open and `open.

• an item that is long enough to be wrapped
  at least once
  • nested item
10. ten

│ quoted

```python
def f(x):

    return x  # twice
```

name   value
────────────
pi      3.14

| not a table

────────────────────────────────────────
这是重点一个很长的句子没有空格所以必须在任何
地方断开"""
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_screen_is_the_same_however_the_text_was_cut(seed: int) -> None:
    whole = rendered(SAMPLE)
    assert rendered(SAMPLE, pieces=1 + seed % 7, seed=seed) == whole


@pytest.mark.parametrize("width", [1, 5, 12, 20, 30])
def test_a_narrow_terminal_shows_every_word(width: int) -> None:
    words = re.findall(r"\w+", shown(SAMPLE, width=200))
    narrow = re.sub(r"\s", "", shown(SAMPLE, width))
    assert [word for word in words if word not in narrow and width >= 12] == []


def test_nothing_that_was_written_is_painted_over() -> None:
    output = _STYLES.sub("", rendered(SAMPLE, pieces=3))
    assert "\x1b" not in output
    assert "\r" not in output


def test_a_word_appears_as_soon_as_it_has_ended() -> None:
    console, file = screen()
    markdown = MarkdownStream(console)
    markdown.feed("Once upon a ti")
    assert file.getvalue() == "Once upon a"
    markdown.feed("me ")
    assert file.getvalue() == "Once upon a time"


def test_code_appears_line_by_line() -> None:
    console, file = screen()
    markdown = MarkdownStream(console)
    markdown.feed("```\nfirst\nsec")
    assert "first" in file.getvalue()
    assert "sec" not in file.getvalue()


def test_a_fence_that_is_never_closed_loses_nothing() -> None:
    assert shown("```python\nx = 1\ny = 2") == "```python\nx = 1\ny = 2"


def test_markup_inside_code_is_left_alone() -> None:
    assert shown("```\n# **no** | table |\n- x\n```\n`**as it is**`").splitlines()[1:] == [
        "# **no** | table |",
        "- x",
        "```",
        "**as it is**",
    ]


def test_a_fence_in_a_list_loses_the_indent_of_its_list() -> None:
    assert shown("- item\n\n  ```\n  a\n    b\n  ```").splitlines()[3:5] == ["a", "  b"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("**bold** and __bold__", "bold and bold"),
        ("***both***", "both"),
        ("*a*, _b_ and ~~c~~", "a, b and c"),
        ("``a ` b``", "a ` b"),
        (r"\*not\* this", "*not* this"),
        ("[x] done, [text] (no)", "[x] done, [text] (no)"),
        ("[here](http://a.b)", "here (http://a.b)"),
        ("2 * 3, 2**8, a_b_c, ~5", "2 * 3, 2**8, a_b_c, ~5"),
        ("**never closed", "**never closed"),
        ("** spaced **", "** spaced **"),
        ("**", "**"),
    ],
)
def test_spans_are_styled_and_all_else_is_literal(text: str, read: str) -> None:
    assert "".join(piece for piece, _ in inline(text)) == read


def test_a_span_is_held_until_it_closes() -> None:
    stream = InlineStream()
    assert stream.feed("so **bo") == [("so ", inline("x")[0][1])]
    text, style = stream.feed("ld** it")[0]
    assert text == "bold"
    assert style.bold


def test_a_span_that_stays_open_is_held_no_longer_than_its_limit() -> None:
    stream = InlineStream()
    assert stream.feed("*" + "a" * (SPAN_LIMIT - 1)) == []
    assert stream.feed("bc") != []


def test_many_openers_in_one_line_take_no_long_time() -> None:
    text = "*a __b ~~c [d " * 5_000
    assert "".join(piece for piece, _ in inline(text)) == text


def test_controls_of_a_model_never_reach_the_terminal() -> None:
    console, file = screen()
    styled = Styled(console)
    styled.feed("a\x1b[2Jb\x07c\x9b31md\re\x00f\tg\x1b]0;title\x07\n")
    styled.finish()
    assert _STYLES.sub("", file.getvalue()) == "a[2Jbc31mdef    g]0;title\n"


def test_clean_keeps_tab_and_newline_and_all_that_can_be_seen() -> None:
    every = "".join(map(chr, range(0x100)))
    kept = clean(every)
    assert kept == "\t\n" + "".join(map(chr, [*range(0x20, 0x7F), *range(0xA0, 0x100)]))


def test_without_a_terminal_the_answer_is_the_same_bytes() -> None:
    file = io.BytesIO()
    sink = Bytes(file)
    for piece in ("a\x1b[1m ", "**b**\r\n", "é"):
        sink.feed(piece)
    sink.finish()
    assert file.getvalue() == "a\x1b[1m **b**\r\né".encode()


def test_reasoning_is_dim_and_set_apart_from_the_answer() -> None:
    out, out_file = screen()
    err, err_file = screen()
    view = terminal_view(out, err)
    view.reading(Prefilling(done=5, total=10, cached=2))
    view.show("reasoning", "let me\nsee")
    view.show("content", "So.")
    view.end()
    assert out_file.getvalue() == "So.\n"
    assert "\x1b[2mlet\x1b[0m" in err_file.getvalue()
    assert _CONTROLS.sub("", err_file.getvalue()).endswith("let me\nsee\n\n")


def test_lines_of_reasoning_keep_their_ends() -> None:
    console, file = screen()
    dim = Dim(console)
    for piece in ("one", "\n\ntw", "o\n", "three"):
        dim.feed(piece)
    dim.finish()
    assert _STYLES.sub("", file.getvalue()) == "one\n\ntwo\nthree\n\n"


@pytest.mark.parametrize("pieces", [1, 3, 10**9])
def test_a_word_longer_than_a_line_is_parted_where_the_line_is_full(pieces: int) -> None:
    url = "https://example.org/" + "x" * 150
    lines = _STYLES.sub("", rendered(f"see {url} there", pieces=pieces)).strip().splitlines()
    assert "".join(lines).replace(" ", "") == f"see{url}there"
    assert [len(line) for line in lines[1:3]] == [60, 60]
    assert all(len(line) <= 60 for line in lines)


def test_a_long_wait_without_a_terminal_says_how_far_it_is_now_and_then() -> None:
    file, now = io.StringIO(), [0.0]
    waiting = Waiting(Console(file=file), clock=lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        waiting.update(f"reading {second} of 12 tokens")
    waiting.stop()
    assert file.getvalue().splitlines() == ["reading 5 of 12 tokens", "reading 10 of 12 tokens"]
