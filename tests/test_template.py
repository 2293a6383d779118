"""Chat templates: what they may use, what they see, and how they fail."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError, InvalidArgument, TemplateError
from orchestrator.text.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
CHAT = [{"role": "user", "content": "hi"}]
TOOL_TURN: list[dict[str, Any]] = [
    *CHAT,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
        ],
    },
]
CALLS = "{% for m in messages %}{% for call in m.tool_calls %}<BODY>{% endfor %}{% endfor %}"


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_text="<s>", eos_text="</s>", **options)


def rendered(source: str, *, chat: Any = CHAT, **arguments: Any) -> str:
    return template(source).render(chat, add_generation_prompt=True, arguments=arguments)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "hi"),
        ("{% generation %}a{{ messages[0].role }}{% endgeneration %}b", "auserb"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'a': 'é'} | tojson(ensure_ascii=true) }}", '{"a": "\\u00e9"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ {'a': 1} | tojson(separators=(',', ':')) }}", '{"a":1}'),
        ("{{ [1, 2] | map('string') | tojson }}", '["1", "2"]'),
        ("{{ ('{\"a\": 1}' | from_json).a }}", "1"),
        ("{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ '<' + ('a' | safe) }}", "<a"),
        ("{{ missing }}{{ missing is defined }}", "False"),
        ("{% set l = [] %}{% set _ = l.append('a') %}{{ l[0] }}", "a"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
    ],
)
def test_what_published_templates_use_is_there(source: str, text: str) -> None:
    assert rendered(source) == text


def test_the_clock_is_the_callers() -> None:
    clocked = template("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2026, 7, 26))
    assert clocked.render(CHAT, add_generation_prompt=False) == "26 Jul 2026"


def test_arguments_reach_the_template_and_its_variables_are_known() -> None:
    source = "{{ 'thinks' if enable_thinking else 'answers' }}"
    assert rendered(source, enable_thinking=True) == "thinks"
    assert rendered(source, enable_thinking=False) == "answers"
    assert template(source).variables == {"enable_thinking"}


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_an_argument_may_not_replace_what_the_chat_sets(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        rendered("a", **{name: []})


def test_a_refusal_speaks_in_the_templates_own_words() -> None:
    with pytest.raises(TemplateError, match="roles must alternate!"):
        rendered("{{ raise_exception('roles must alternate!') }}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a\n{% if %}", "line 2: .*--chat-template"),
        ("a\n\n{{ missing.name }}", "line 3: 'missing' is undefined.*--chat-template"),
        ("a\n{{ 1 + 'b' }}", "line 2: .*--chat-template"),
        ("{{ 1 // 0 }}", "line 1: "),
        ("{{ messages[5].role }}", "line 1: "),
        ("{{ ''.__class__.__mro__ }}", "line 1: .*unsafe"),
        ("{% include 'other' %}", "line 1: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_broken_template_is_named_with_its_line_and_a_remedy(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 1000 ** 1000 }}",
        "{% set a = 'a' * 999999 %}{% for i in range(100) %}{{ a }}{% endfor %}",
    ],
)
def test_a_template_that_runs_wild_is_stopped(source: str) -> None:
    with pytest.raises(TemplateError, match=r"more than|grows over"):
        rendered(source)


def test_ranges_are_counted_for_each_rendering_alone() -> None:
    counting = template("{{ range(150000) | length }}")
    for _ in range(3):
        assert counting.render(CHAT, add_generation_prompt=True) == "150000"


def test_arguments_of_tool_calls_come_as_objects_though_clients_send_text() -> None:
    source = CALLS.replace(
        "<BODY>", "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    )
    assert rendered(source, chat=TOOL_TURN) == "n=1"


def test_a_template_that_joins_arguments_as_text_gets_text() -> None:
    source = CALLS.replace("<BODY>", "{{ 'args: ' + call.function.arguments }}")
    assert rendered(source, chat=TOOL_TURN) == 'args: {"n": 1}'


def test_a_template_that_knows_tool_calls_by_null_content_gets_null() -> None:
    source = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert '"name": "f"' in rendered(source, chat=TOOL_TURN)


def test_a_template_that_joins_content_as_text_never_sees_null() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + ';' }}{% endfor %}"
    assert rendered(source, chat=TOOL_TURN) == "user: hi;assistant: ;"


def test_a_template_that_reads_content_in_parts_gets_parts() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert rendered(source) == "hi"


def test_a_template_that_always_iterates_over_tools_gets_an_empty_list() -> None:
    assert rendered("{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}") == "hi"


def test_a_rendering_changes_nothing_for_the_next_one() -> None:
    popping = template("{% set m = messages.pop() %}{{ m.content }}")
    chat = [dict(CHAT[0])]
    assert [popping.render(chat, add_generation_prompt=True) for _ in range(2)] == ["hi", "hi"]
    assert chat == CHAT


def test_a_model_without_a_template_gets_chatml_and_is_told_so() -> None:
    fallback = ChatTemplate.fallback()
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert fallback.is_fallback
    assert fallback.render(chat, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_can_come_from_a_file() -> None:
    chatml = ChatTemplate.from_file(TEMPLATES / "chatml.jinja", bos_text="", eos_text="")
    assert not chatml.is_fallback
    assert chatml.render(CHAT, add_generation_prompt=True) == ChatTemplate.fallback().render(
        CHAT, add_generation_prompt=True
    )


def test_a_file_that_cannot_be_a_template_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "huge").write_bytes(b"a" * (2**21 + 1))
    for name in ("missing", "binary", "huge", "."):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            ChatTemplate.from_file(tmp_path / name, bos_text="", eos_text="")
