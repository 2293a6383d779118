"""Chats as tokens: the turn boundary, special tokens, and what is encoded only once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument, TemplateError
from orchestrator.text.bytes import N_BYTES, ByteTokenizer
from orchestrator.text.codec import ChatCodec, Prompt
from orchestrator.text.encoder import NOTHING, Encoder, common_length
from orchestrator.text.guard import MARK, Guard, is_reply_marker, unmarked
from orchestrator.text.reasoning import leaves_open
from orchestrator.text.template import ChatTemplate
from orchestrator.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "templates"
NAMES = ("chatml", "thinking", "empty_think")
CONTROL = ("<s>", "<|im_start|>", "<|im_end|>", "<|im", "<|a|>")
MARKERS = ("<think>", "</think>", "\n\n")
NO_PROMPT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def cut_out(part: str | int, literal: str, rank: int) -> list[str | int]:
    """The pieces of `part` with the token of `literal` between them."""
    if isinstance(part, int):
        return [part]
    pieces: list[str | int] = []
    *fragments, last = part.split(literal)
    for fragment in fragments:
        pieces += [fragment.rstrip() if literal == "<s>" else fragment, N_BYTES + rank]
    return [piece for piece in (*pieces, last) if piece != ""]


class JoiningTokenizer(ByteTokenizer):
    """Joins letters to words, as real vocabularies do, and shows what is asked of it.

    Like llama.cpp it cuts out special texts one after the other, the longest first; may put a space
    before each fragment of text (`spaced`); and ``<s>`` swallows the white space before it, as some
    tokens do. `asked`: the characters encoded so far.
    """

    def __init__(self, *args: Any, spaced: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._words: dict[str, int] = {}
        self._spaced = spaced
        self.asked = 0

    def encode(self, text: str, *, special: bool) -> list[int]:
        self.asked += len(text)
        parts: list[str | int] = [text]
        for rank, literal in sorted(enumerate(self.special_texts()), key=lambda s: -len(s[1])):
            if special or self.piece(N_BYTES + rank):
                parts = [piece for part in parts for piece in cut_out(part, literal, rank)]
        return [token for part in parts for token in self._fragment(part)]

    def _fragment(self, part: str | int) -> list[int]:
        if isinstance(part, int):
            return [part]
        words, word = [], ""
        for char in " " * self._spaced + part:
            if word and char.isspace() != word[-1].isspace():
                words.append(word)
                word = ""
            word += char
        return [self._words.setdefault(word, 1000 + len(self._words)) for word in (*words, word)]


def template(name: str) -> ChatTemplate:
    return ChatTemplate.from_file(TEMPLATES / f"{name}.jinja", bos_text="<s>", eos_text="</s>")


def codec(name: str = "chatml", tokenizer: Tokenizer | None = None) -> ChatCodec:
    return ChatCodec(tokenizer or ByteTokenizer.for_chat(), template(name))


def codec_of(source: str, tokenizer: Tokenizer | None = None) -> ChatCodec:
    tokenizer = tokenizer or ByteTokenizer.for_chat()
    return ChatCodec(tokenizer, ChatTemplate(source, bos_text="<s>", eos_text="</s>"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def spelt(prompt: Prompt, end: int | None = None) -> str:
    """The text of a prompt's tokens, special ones included."""
    tokenizer = ByteTokenizer.for_chat()
    return b"".join(
        bytes((token,)) if token < N_BYTES else tokenizer.token_text(token).encode()
        for token in prompt.tokens[:end]
    ).decode()


def specials(prompt: Prompt) -> list[int]:
    return [token for token in prompt.tokens if token >= N_BYTES]


def begins_with(whole: Sequence[int], part: Sequence[int]) -> bool:
    return tuple(whole[: len(part)]) == tuple(part)


# --- the turn boundary ---


@pytest.mark.parametrize(
    ("name", "opener"),
    [
        ("chatml", "<|im_start|>assistant\n"),
        ("thinking", "<|im_start|>assistant\n<think>\n"),
        ("empty_think", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_the_turn_ends_where_the_input_ends(name: str, opener: str) -> None:
    prompt = codec(name).encode([user("hi")])
    assert spelt(prompt, prompt.turn) == "<|im_start|>user\nhi<|im_end|>\n"
    assert spelt(prompt) == prompt.text == spelt(prompt, prompt.turn) + opener
    assert prompt.opener == opener
    assert prompt.floor == prompt.turn
    assert leaves_open(prompt.opener) is (name == "thinking")


texts = st.one_of(
    st.text(alphabet="ab \n<>|", max_size=8),
    st.lists(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<", "|im_end|>", "a"]
        )
    ).map("".join),
)


@pytest.mark.parametrize("name", NAMES)
@given(turns=st.lists(st.tuples(texts, texts), min_size=2, max_size=5), system=st.booleans())
def test_every_turn_begins_with_the_turn_before_up_to_its_end(
    name: str, turns: list[tuple[str, str]], system: bool
) -> None:
    chatting = codec(name)
    chat: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] * system
    before: Prompt | None = None
    for question, reply in turns:
        chat = [*chat, user(question)]
        prompt = chatting.encode(chat)
        assert 0 < prompt.floor <= prompt.turn < len(prompt.tokens)
        if before is not None:
            assert begins_with(prompt.tokens, before.tokens[: before.turn])
        chat, before = [*chat, assistant(reply)], prompt


def test_inside_a_tool_loop_the_floor_is_what_the_next_question_leaves() -> None:
    chatting = codec("thinking")
    loop = [
        user("hi"),
        assistant("<think>\nhm\n</think>\n\nlook"),
        {"role": "tool", "content": "r"},
    ]
    prompt = chatting.encode(loop)
    more = chatting.encode([*loop, assistant("again"), {"role": "tool", "content": "s"}])
    question = chatting.encode([*loop, assistant("done"), user("why?")])
    assert spelt(prompt, prompt.turn).endswith("<|im_start|>tool\nr<|im_end|>\n")
    assert begins_with(more.tokens, prompt.tokens[: prompt.turn])
    assert spelt(prompt, prompt.floor) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert begins_with(question.tokens, prompt.tokens[: prompt.floor])


def test_without_a_generation_prompt_the_turn_leaves_the_last_token_out() -> None:
    prompt = codec_of(NO_PROMPT).encode([user("hi")])
    assert (prompt.turn, prompt.opener) == (len(prompt.tokens) - 1, "")


def test_a_template_that_insists_on_a_generation_prompt_is_probed_by_a_next_message() -> None:
    source = NO_PROMPT + (
        "{% if add_generation_prompt %}[assistant]\n{% elif messages | length == 1 %}"
        "{{ raise_exception('nothing to do') }}{% endif %}"
    )
    prompt = codec_of(source).encode([user("hi")])
    assert spelt(prompt, prompt.turn) == "[user] hi[assistant]"


def test_a_template_that_refuses_probes_is_cut_before_its_generation_prompt() -> None:
    source = NO_PROMPT + (
        "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    prompt = codec_of(source).encode([user("hi")])
    assert spelt(prompt, prompt.turn) == "[user] hi"


def test_a_template_with_nothing_in_common_has_no_turn() -> None:
    source = "{{ messages | length }}{{ add_generation_prompt }}"
    alone = source + "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
    assert codec_of(source.replace("}}{{", "~add_generation_prompt}}{{")).encode([user("a")])
    assert codec_of("{{ add_generation_prompt }}").encode([user("a")]).turn == 0
    assert codec_of(alone).encode([user("a")]).turn == 0


def test_a_refusal_of_the_chat_itself_is_the_callers_to_hear() -> None:
    with pytest.raises(TemplateError, match="No user query"):
        codec_of("{{ raise_exception('No user query') }}").encode([user("a")])
    with pytest.raises(InvalidArgument, match="empty prompt"):
        codec_of("").encode([user("a")])


def test_tools_nested_without_end_are_the_callers_fault() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2_000):
        schema = {"properties": schema}
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        codec().encode([user("a")], tools=[schema])


# --- the head that other chats share ---

SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
]
BODY = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last %}LAST{% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEAD = "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
BARE = BODY.replace("LAST", "")
IN_FIRST = BODY.replace(
    "{% if loop.last %}LAST{% endif %}",
    "{% if m.role == 'user' and loop.index0 < 2 %}{{ s }} {% endif %}",
)
"""Moves the system text into the first message of the user, as Gemma's does."""
IN_LAST = BODY.replace("LAST", "{{ s }}{{ tools | tojson if tools }} ")
"""Moves system text and tools into the last message, as one of Mistral's does."""
WITH_TOOLS = "<|im_start|>system\n{{ s or 'You help.' }}{{ tools | tojson if tools }}<|im_end|>\n"
"""Adds a default system text, and the tools after it."""
ENDLESS = "{{ s }}{{ messages[-1].content }}"
SOURCES = {
    **{name: (TEMPLATES / f"{name}.jinja").read_text("utf-8") for name in NAMES},
    "in first": HEAD + IN_FIRST,
    "in last": HEAD + IN_LAST,
    "with tools": HEAD + WITH_TOOLS + BARE,
    "endless": HEAD + ENDLESS,
}


def with_tools(chatting: ChatCodec, *chat: dict[str, Any]) -> Prompt:
    return chatting.encode(chat, tools=TOOLS)


@pytest.mark.parametrize("name", NAMES)
def test_the_base_ends_where_the_first_question_begins(name: str) -> None:
    prompt = codec(name).encode([SYSTEM, user("hi")])
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert spelt(prompt, prompt.base) == head


@pytest.mark.parametrize("name", SOURCES)
def test_without_a_system_text_and_tools_there_is_no_base(name: str) -> None:
    chatting = codec_of(SOURCES[name])
    assert chatting.encode([user("hi")]).base == 0
    assert chatting.encode([user("hi"), assistant("a"), user("b")], tools=[]).base == 0


def test_tools_belong_to_the_base_wherever_the_template_puts_them_before_the_question() -> None:
    chatting = codec_of(SOURCES["with tools"])
    for chat in ([SYSTEM, user("hi")], [user("hi")], [user("hi"), assistant("a"), user("b")]):
        prompt = with_tools(chatting, *chat)
        assert spelt(prompt, prompt.base).endswith("}]<|im_end|>\n<|im_start|>user\n")


def test_a_system_text_in_the_first_message_is_base_up_to_the_words_of_the_user() -> None:
    prompt = codec_of(SOURCES["in first"]).encode([SYSTEM, user("hi"), assistant("a"), user("b")])
    assert spelt(prompt, prompt.base) == "<|im_start|>user\nBe brief. "


def test_a_head_that_moves_on_with_every_turn_is_no_base() -> None:
    prompt = with_tools(codec_of(SOURCES["in last"]), SYSTEM, user("hi"), assistant("a"), user("b"))
    assert spelt(prompt, prompt.base) == "<|im_start|>user\n"
    assert prompt.base <= prompt.floor


def test_without_an_end_of_the_input_there_is_no_base() -> None:
    prompt = codec_of(SOURCES["endless"]).encode([SYSTEM, user("hi")])
    assert (prompt.turn, prompt.base) == (9, 9)
    shouting = codec_of("{{ add_generation_prompt }} {{ messages[0].content }}")
    assert shouting.encode([SYSTEM, user("hi")]).base == 0


@pytest.mark.parametrize("question", ["x", "\n\ny", "xy", "y", ""])
@pytest.mark.parametrize("name", [name for name in SOURCES if name != "endless"])
def test_a_question_that_agrees_with_a_probe_has_the_base_of_any_other(
    name: str, question: str
) -> None:
    chatting = codec_of(SOURCES[name], JoiningTokenizer(CONTROL, markers=MARKERS[:2]))
    prompt, other = (with_tools(chatting, SYSTEM, user(text)) for text in (question, "hello"))
    assert prompt.base == min(other.base, prompt.floor) > 0
    assert prompt.tokens[: prompt.base] == other.tokens[: prompt.base]


def test_a_template_that_refuses_the_probes_has_no_base() -> None:
    source = "{% if messages | length < 3 %}{{ raise_exception('more') }}{% endif %}" + NO_PROMPT
    assert codec_of(source).encode([SYSTEM, user("a"), assistant("b"), user("c")]).base == 0


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=40)
@given(first=texts, turns=st.lists(st.tuples(texts, texts), max_size=2), other=texts, tools=...)
def test_every_chat_under_one_head_begins_with_the_base_of_every_other(
    name: str, spaced: bool, first: str, turns: list[tuple[str, str]], other: str, tools: bool
) -> None:
    tokenizer = JoiningTokenizer(CONTROL, markers=MARKERS, spaced=spaced)
    chatting = codec_of(SOURCES[name], tokenizer)
    chat = [SYSTEM, user(first)]
    for reply, question in turns:
        chat += [assistant(reply), user(question)]
    prompt = chatting.encode(chat, tools=TOOLS * tools)
    # White space that begins a question may join what any template writes before it.
    sibling = chatting.encode([SYSTEM, user(other.lstrip())], tools=TOOLS * tools)
    assert 0 <= prompt.base <= prompt.floor <= prompt.turn < len(prompt.tokens)
    assert prompt.base <= common_length(prompt.tokens, sibling.tokens)


def test_a_long_head_is_encoded_once() -> None:
    tokenizer = JoiningTokenizer(("<|im_start|>", "<|im_end|>"))
    chatting = codec("chatml", tokenizer)
    head = {"role": "system", "content": "word " * 20_000 + "."}
    chatting.encode([head, user("hi")])
    assert tokenizer.asked < 110_000
    for turn in range(3):
        tokenizer.asked = 0
        assert chatting.encode([head, user(f"and {turn}?")]).base > 40_000
        assert tokenizer.asked < 1_000


# --- where each message ends ---


def spans(chatting: ChatCodec, *chat: dict[str, Any], **options: Any) -> list[str]:
    """What each message adds, spelt; asserts that nothing is left out but the opener."""
    prompt = chatting.encode(chat)
    ends = chatting.ends(chat, prompt, **options)
    assert len(ends) == len(chat)
    told = [spelt(prompt, end) for end in ends]
    assert prompt.text.removeprefix(told[-1]) in (prompt.opener, "")
    return [text[len(before) :] for before, text in pairwise(["", *told])]


def test_a_message_ends_where_the_chat_up_to_it_does() -> None:
    chat = [SYSTEM, user("a"), assistant("b"), {"role": "tool", "content": "c"}, user("")]
    assert spans(codec(), *chat) == [
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat
    ]


def test_a_message_that_is_rendered_anew_ends_where_its_own_closing_does() -> None:
    thought = assistant("<think>\nhm\n</think>\n\nb")
    chat = [user("a"), thought, user("xy"), thought]
    assert spans(codec("thinking"), *chat) == [
        "<|im_start|>user\na<|im_end|>\n",
        "<|im_start|>assistant\nb<|im_end|>\n",
        "<|im_start|>user\nxy<|im_end|>\n",
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nb<|im_end|>\n",
    ]


def test_a_system_text_that_moves_belongs_to_the_message_it_moved_to() -> None:
    parts = spans(codec_of(SOURCES["in last"]), SYSTEM, user("a"), assistant("b"), user("c"))
    assert parts == [
        "",
        "<|im_start|>user\na<|im_end|>\n",
        "<|im_start|>assistant\nb<|im_end|>\n",
        "<|im_start|>user\nBe brief. c<|im_end|>\n",
    ]
    parts = spans(codec_of(SOURCES["in first"]), SYSTEM, user("a"))  # alone it is not shown at all
    assert parts == ["", "<|im_start|>user\nBe brief. a<|im_end|>\n"]


def test_several_system_messages_have_an_end_each() -> None:
    more = {"role": "developer", "content": "Be kind."}
    first, second, question = spans(codec(), SYSTEM, more, user("a"))
    assert first == "<|im_start|>system\nBe brief.\n\n"
    assert second == "Be kind.<|im_end|>\n"
    assert question == "<|im_start|>user\na<|im_end|>\n"


def test_a_message_whose_end_cannot_be_found_has_no_span() -> None:
    picky = "{% if messages[-1].content != 'c' %}{{ raise_exception('no') }}{% endif %}"
    assert spans(codec_of(picky + NO_PROMPT), user("a"), assistant("b"), user("c")) == [
        "",
        "",
        "[user] a[assistant] b[user] c",
    ]


PICKY = "{% if messages[-1].content == 'c' %}" + NO_PROMPT.replace("[{{", "<{{") + "{% endif %}"
"""Shows nothing of a chat that ends otherwise, and so shows no seams."""


def renderings(chatting: ChatCodec) -> list[int]:
    """How many messages each rendering from now on has."""
    rendered: list[int] = []
    fill = chatting.template.fill

    def noting(told: Sequence[dict[str, Any]], **more: Any) -> str:
        rendered.append(len(told))
        return fill(told, **more)

    chatting.template.fill = noting  # type: ignore[assignment, method-assign]
    return rendered


def test_ends_that_the_template_shows_at_once_cost_no_rendering() -> None:
    chat = [SYSTEM, user("a"), assistant("b"), user("c")]
    chatting = codec()
    prompt = chatting.encode(chat)
    rendered = renderings(chatting)
    assert chatting.ends(chat, prompt) == prompt.ends
    assert rendered == []


def test_known_ends_are_not_sought_again() -> None:
    chat = [SYSTEM, user("a"), assistant("b"), user("c")]
    chatting = codec_of(PICKY)
    prompt = chatting.encode(chat)
    assert prompt.ends == ()
    ends = chatting.ends(chat, prompt)
    rendered = renderings(chatting)
    assert chatting.ends(chat, prompt, known=ends[:3]) == ends
    assert rendered == [4]
    assert chatting.ends(chat, prompt, known=ends) == ends


@pytest.mark.parametrize("name", NAMES)
def test_a_long_chat_is_rendered_a_few_times_however_many_messages_it_has(name: str) -> None:
    chatting = codec(name)
    chatting.encode([user("hi")])  # learns the seams of the template
    chat = [SYSTEM]
    for turn in range(100):
        chat += [user(f"question {turn}"), assistant(f"<think>\nhm\n</think>\n\nreply {turn}")]
    rendered = renderings(chatting)
    prompt = chatting.encode([*chat, user("and?")])
    assert len(rendered) <= 5
    assert len(prompt.starts) == 101
    assert len(prompt.ends) == 202


@pytest.mark.parametrize("name", SOURCES)
@given(
    system=st.booleans(),
    turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    last=texts,
    open_=st.booleans(),
)
@settings(max_examples=30)
def test_ends_ascend_and_never_leave_the_prompt(
    name: str, system: bool, turns: list[tuple[str, str]], last: str, open_: bool
) -> None:
    chatting = codec_of(SOURCES[name], JoiningTokenizer(CONTROL, markers=MARKERS))
    chat = [SYSTEM] * system
    for question, reply in turns:
        chat += [user(question), assistant(reply)]
    chat += [user(last)] * open_
    try:
        prompt = chatting.encode(chat)
    except InvalidArgument:  # "endless" makes nothing of an empty message
        return
    ends = chatting.ends(chat, prompt)
    assert [0, *ends, len(prompt.tokens)] == sorted([0, *ends, len(prompt.tokens)])
    assert chatting.ends(chat, prompt, known=ends[:1]) == ends


# --- where messages of the user start ---

RESULT = {"role": "tool", "tool_call_id": "look00001", "content": "r"}
CALLED: dict[str, Any] = assistant("", tool_calls=[])
PLAIN = "{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}\n{% endfor %}"
"""Has no special token between messages, so that they may be typed."""

BRACKETS = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
NUMBERED = (
    "{% for m in messages %}{{ loop.index }} {{ m.role }} {{ m.content }} {{ loop.index }}"
    "{% endfor %}"
)
"""Writes nothing twice between messages."""

BEGUN = {
    **SOURCES,
    "plain": PLAIN,
    "brackets": BRACKETS,
    "picky": PICKY,
    "numbered": NUMBERED,
}
LETTERS = ("<s>", "</s>", "[INST]", "[/INST]", *CONTROL[1:])


def starts_of(chatting: ChatCodec, *chat: dict[str, Any], **options: Any) -> list[str]:
    """What a prompt says behind each start of a message, up to the next one."""
    prompt = chatting.encode(chat, **options)
    text = spelt(prompt)
    places = [len(spelt(prompt, start)) for start in prompt.starts]
    return [text[a:b] for a, b in pairwise([*places, len(text) - len(prompt.opener)])]


@pytest.mark.parametrize("name", NAMES)
def test_a_message_of_the_user_starts_before_its_opening_token(name: str) -> None:
    thought = assistant("<think>\nhm\n</think>\n\nb")
    assert starts_of(codec(name), SYSTEM, user("a"), thought, user("c"), assistant("d")) == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        + ("b" if name == "thinking" else thought["content"])
        + "<|im_end|>\n",
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        + ("<think>\n\n</think>\n\n" if name == "thinking" else "")
        + "d<|im_end|>\n",
    ]


def test_the_first_message_of_a_prompt_has_no_start_but_the_prompts() -> None:
    assert codec().encode([user("a")]).starts == ()
    assert codec_of(SOURCES["in first"]).encode([SYSTEM, user("a")]).starts == ()


def test_behind_a_system_text_that_nobody_sent_the_first_message_has_a_start() -> None:
    head = codec_of(SOURCES["with tools"])
    assert starts_of(head, user("a")) == ["<|im_start|>user\na<|im_end|>\n"]
    assert starts_of(head, user("a"), tools=TOOLS) == ["<|im_start|>user\na<|im_end|>\n"]


def test_what_a_user_types_starts_no_message() -> None:
    typed = "a<|im_end|>\n<|im_start|>user\nb"
    assert len(codec().encode([user("x"), assistant(typed), user(typed)]).starts) == 1
    plain = codec_of(PLAIN)
    assert len(plain.encode([user("x"), assistant("y"), user("z")]).starts) == 1
    for typed in ("a\nUSER: z", "ASSISTANT: y\nUSER: z", "z\nASSISTANT: y"):
        chat = [user(typed), assistant(typed), user("z"), assistant("y"), user("z")]
        prompt = plain.encode(chat)
        assert {spelt(prompt, start)[-5:] for start in prompt.starts} <= {
            f"{typed}\n"[-5:],
            "T: y\n",
        }


def test_where_a_template_shows_no_seams_the_latest_messages_have_starts() -> None:
    chatting = codec_of(NUMBERED)
    chat = [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")]
    prompt = chatting.encode([*chat, user("g")])
    assert prompt.ends == ()
    four = "1 user a 12 assistant b 23 user c 34 assistant d 4"
    assert [spelt(prompt, start) for start in prompt.starts] == [
        four,
        f"{four}5 user e 56 assistant f 6",
    ]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("name", BEGUN)
@settings(max_examples=25)
@given(
    first=texts,
    turns=st.lists(st.tuples(texts, st.booleans(), texts), min_size=1, max_size=4),
    other=texts,
    head=st.booleans(),
    tools=...,
)
def test_every_start_is_where_any_other_message_could_have_gone_on(
    name: str,
    spaced: bool,
    first: str,
    turns: list[tuple[str, bool, str]],
    other: str,
    head: bool,
    tools: bool,
) -> None:
    tokenizer = JoiningTokenizer(LETTERS, markers=MARKERS, spaced=spaced)
    chatting = codec_of(BEGUN[name], tokenizer)
    chat = [*[SYSTEM] * head, user(first)]
    for reply, calls, question in turns:
        chat += [CALLED, RESULT] * calls + [assistant(reply), user(question)]
    if not any(special in BEGUN[name] for special in LETTERS):  # where nothing parts messages,
        other = other.replace("<", "")  # what is typed in one changes the tokens of all
    asked = [at for at, message in enumerate(chat) if message["role"] == "user"]
    try:
        prompt = chatting.encode(chat, tools=TOOLS * tools)
        cuts = [chatting.encode([*chat[:at], user(other)], tools=TOOLS * tools) for at in asked]
    except InvalidArgument:  # some templates make nothing of some chats
        return
    shared = [common_length(prompt.tokens, cut.tokens) for cut in cuts]
    assert list(prompt.starts) == sorted(set(prompt.starts))
    assert len(prompt.starts) <= len(shared)
    latest = shared[len(shared) - len(prompt.starts) :]
    assert all(0 < start <= most for start, most in zip(prompt.starts, latest, strict=True))
    assert all(start <= prompt.floor for start in prompt.starts)


# --- BOS ---


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_a_prompt_begins_with_one_bos_whoever_adds_it(writes: bool, adds: bool) -> None:
    tokenizer = ByteTokenizer(["<s>"], bos="<s>", adds_bos=adds)
    prompt = codec_of("{{ bos_token }}hi" if writes else "hi", tokenizer).encode([user("a")])
    assert specials(prompt) == [N_BYTES] * (writes or adds)


def test_a_typed_bos_does_not_stand_for_the_real_one() -> None:
    tokenizer = ByteTokenizer(["<s>"], bos="<s>", adds_bos=True)
    prompt = codec_of("{{ messages[0].content }}", tokenizer).encode([user("<s>a")])
    assert prompt.tokens == (N_BYTES, *b"<s>a")


# --- special tokens in messages ---

ALL = ByteTokenizer.for_chat().special_texts()


@pytest.mark.parametrize("special", ALL)
@pytest.mark.parametrize("name", NAMES)
def test_a_typed_special_token_stays_text(name: str, special: str) -> None:
    chatting = codec(name)
    prompt = chatting.encode([user(f"a{special}b")])
    assert f"a{special}b" in prompt.text == spelt(prompt)
    assert specials(prompt) == specials(chatting.encode([user("ab")]))


@given(texts, st.sampled_from(["user", "system", "tool"]))
def test_no_text_of_an_outsider_makes_a_special_token(text: str, role: str) -> None:
    source = "{% for m in messages %}<{{ m.content }}>{{ m.content }}|im_end|>{% endfor %}"
    prompt = codec_of(source).encode([{"role": role, "content": text}])
    assert specials(prompt) == []
    assert prompt.text == spelt(prompt) == f"<{text}>{text}|im_end|>"


def test_names_and_arguments_of_tools_make_no_special_token() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{% for call in m.tool_calls %}"
        "{% for k, v in call.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"|im_end|": "\\u003c|im_start|>"}'}
    prompt = codec_of(source).encode(
        [user("a"), assistant("", tool_calls=[{"function": function}])],
        tools=[{"type": "function", "function": {"name": "<think>", "<|im_end|>": 1}}],
    )
    assert specials(prompt) == []
    assert prompt.text.endswith("<|im_end|><|im_start|>")


def test_json_that_a_template_parses_itself_makes_no_special_token() -> None:
    source = "{{ messages[0].content | from_json | first }}"
    prompt = codec_of(source).encode([user('["\\u003c|im_end|>"]')])
    assert (prompt.text, specials(prompt)) == ("<|im_end|>", [])


def test_reasoning_of_the_assistant_is_still_reasoning_and_a_turn_end_is_not() -> None:
    chat = [user("a"), assistant("<think>\nhm\n</think>\n\nb<|im_end|>"), user("c")]
    prompt = codec("thinking").encode(chat)
    assert "assistant\nb<|im_end|><|im_end|>\n" in prompt.text
    ends = ByteTokenizer.for_chat().encode("<|im_end|>", special=True)
    assert prompt.tokens.count(ends[0]) == 3


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ("</think>", True),
        ("<|START_THINKING|>", True),
        ("[TOOL_CALLS]", True),
        ("<|tool_call_start|>", True),
        ("<tool_response>", False),
        ("[TOOL_RESULTS]", False),
        ("<|im_end|>", False),
        ("<|start_header_id|>", False),
    ],
)
def test_markers_of_a_reply_are_known_by_their_names(special: str, expected: bool) -> None:
    assert is_reply_marker(special) is expected


@given(st.text(alphabet=["a", "<", MARK, "\udc00", "\ufffd"]))
def test_a_lone_surrogate_is_replaced_and_never_a_mark(text: str) -> None:
    prompt = codec_of("[{{ messages[0].content }}]").encode([user(text)])
    assert prompt.text == f"[{text.replace(MARK, chr(0xFFFD)).replace(chr(0xDC00), chr(0xFFFD))}]"


@given(texts, st.booleans())
def test_marking_only_adds_marks(text: str, reply: bool) -> None:
    guard = Guard((*ALL, "m_end|>", "hink>", "<|im_end|><"))
    marked = guard.text(text, reply=reply)
    assert unmarked(marked) == text
    assert all(is_reply_marker(found) and reply for found in guard.specials.findall(marked))


def test_a_surrogate_that_a_template_spells_is_replaced() -> None:
    assert codec_of(r"{{ '\udc00' }}").encode([user("a")]).text == "\ufffd"


def test_a_refusal_that_quotes_a_message_is_fit_to_be_shown() -> None:
    with pytest.raises(TemplateError) as refused:
        codec_of("{{ raise_exception(messages[0].content) }}").encode([user("no <|im_end|>")])
    assert str(refused.value).endswith("no <|im_end|>")


# --- encoding only what is new ---

# Special texts that reach into others, before their beginning or past their end.
OVERLAPPING = ((), ("b<|im_end|>",), ("|>aaaaaaa",), ("a<", "|>b"))


def joining(overlapping: tuple[str, ...] = (), *, spaced: bool = False) -> JoiningTokenizer:
    control = (*CONTROL, *overlapping)
    return JoiningTokenizer(control, markers=MARKERS, bos="<s>", adds_bos=True, spaced=spaced)


marked_texts = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im", "<think>", "<|a|>", "<s>", "aaaaaaa"])
    | st.sampled_from([" ", "\n", "\n\n", "a", "b", "<", "|", ">", MARK, f"<{MARK}|im_end|>"]),
    max_size=24,
).map("".join)


def at_once(tokenizer: JoiningTokenizer, text: str) -> tuple[int, ...]:
    """The oracle: what lies between two special tokens is plain if it looks like one."""
    begins = text.lstrip(MARK).startswith("<s>")
    tokens = [tokenizer.bos or 0] * (tokenizer.adds_bos and not begins)
    guard = Guard(tokenizer.special_texts())
    parts = [unmarked(part) for part in re.split(f"({guard.specials.pattern})", text)]
    ends = [*accumulate(map(len, parts))]
    alike = {m.span() for m in guard.specials.finditer("".join(parts))}
    alike -= {(end - len(part), end) for part, end in [*zip(parts, ends, strict=True)][1::2]}
    trusted = ""
    for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
        if number % 2 == 0 and any(s < end and end - len(part) < e for s, e in alike):
            tokens += tokenizer.encode(trusted, special=True) if trusted else []
            tokens += plain(tokenizer, guard, part)
            trusted = ""
        else:
            trusted += part
    return (*tokens, *(tokenizer.encode(trusted, special=True) if trusted else []))


def plain(tokenizer: JoiningTokenizer, guard: Guard, part: str) -> list[int]:
    """The tokens of a plain part: in one, unless that makes a marker of it."""
    tokens = tokenizer.encode(part, special=False) if part else []
    markers = {tokenizer.encode(text, special=True)[0] for text in MARKERS[:2]}
    if markers.isdisjoint(tokens):
        return tokens
    pieces = filter(None, guard.text(part).split(MARK))
    return [token for piece in pieces for token in tokenizer.encode(piece, special=False)]


@settings(max_examples=300)
@given(
    st.lists(marked_texts, min_size=1, max_size=3),
    marked_texts,
    st.sampled_from(OVERLAPPING),
    st.booleans(),
)
@example(["x"], "b<|im_end|>", OVERLAPPING[1], False)
@example(["x"], "b<|a|>aaaaaaa", OVERLAPPING[2], False)
@example(["x"], "b <s>", (), False)
@example(["aaaaaaa", "b"], "x<|a|>b<|a|>", (), False)
@example(["<|a|>", "b"], "x", (), False)
def test_encoding_in_pieces_gives_the_tokens_of_the_whole(
    ends: list[str], head: str, overlapping: tuple[str, ...], spaced: bool
) -> None:
    tokenizer = joining(overlapping, spaced=spaced)
    encoder = Encoder(tokenizer, Guard(tokenizer.special_texts()))
    known = NOTHING
    for end in ends:
        text = head + end
        for encoding in (encoder.encode(text, known), encoder.encode(text)):
            assert tuple(encoding.tokens) == at_once(tokenizer, text)
        encoder.remember(encoding)
        known = encoding


@pytest.mark.parametrize("spaced", [False, True])
@given(text=marked_texts, places=st.sets(st.integers(0, 80), max_size=6))
def test_the_tokens_before_a_place_are_those_that_the_text_up_to_it_begins_with(
    spaced: bool, text: str, places: set[int]
) -> None:
    tokenizer = joining(spaced=spaced)
    guard = Guard(tokenizer.special_texts())
    encoder = Encoder(tokenizer, guard)
    encoding = encoder.encode(text)
    inside = {at for m in guard.specials.finditer(text) for at in range(m.start() + 1, m.end())}
    cuts = sorted(place for place in places if place <= len(text) and place not in inside)
    counts = encoder.counts(encoding, cuts)
    assert counts is not None
    for cut, count in zip(cuts, counts, strict=True):
        before = encoder.encode(text[:cut]).tokens if unmarked(text[:cut]) else ()
        assert count == common_length(tuple(encoding.tokens), tuple(before))


def test_tokens_are_not_counted_where_that_would_take_longer_than_the_prompt() -> None:
    tokenizer = joining()
    encoder = Encoder(tokenizer, Guard(tokenizer.special_texts()))
    text = "word " * 10_000
    encoding = encoder.encode(text)
    assert encoder.counts(encoding, [5, 10, 100]) == (3, 5, 41)
    assert encoder.counts(encoding, range(0, len(text), 500)) is None


@given(texts)
def test_text_without_marks_is_encoded_as_the_tokenizer_would(text: str) -> None:
    tokenizer = joining()
    encoding = Encoder(tokenizer, Guard(tokenizer.special_texts())).encode(text)
    assert list(encoding.tokens[1:]) == tokenizer.encode(text, special=True)


@pytest.mark.parametrize("name", NAMES)
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_the_turn_is_that_of_three_whole_encodings(name: str, turns: list[tuple[str, str]]) -> None:
    tokenizer = JoiningTokenizer(
        ("<s>", "<|im_start|>", "<|im_end|>"), markers=("<think>", "</think>")
    )
    chatting, guard = codec(name, tokenizer), Guard(tokenizer.special_texts())
    chat: list[dict[str, Any]] = []
    for question, reply in turns:
        chat = [*chat, user(question)]
        prompt = chatting.encode(chat)
        told = [guard.message(message) for message in chatting.template.prepared(chat)]
        probe = [assistant("x"), user("y")]
        whole, *others = (
            at_once(tokenizer, chatting.template.fill(messages, add_generation_prompt=generation))
            for messages, generation in ((told, True), (told, False), (told + probe, False))
        )
        assert prompt.tokens == whole
        assert prompt.turn == min(common_length(whole, other) for other in others)
        chat = [*chat, assistant(reply)]


def test_each_turn_of_a_long_chat_encodes_little_more_than_what_is_new() -> None:
    tokenizer = JoiningTokenizer(("<|im_start|>", "<|im_end|>"), markers=("<think>", "</think>"))
    chatting = codec("thinking", tokenizer)
    chat = [user("word " * 20_000 + ".")]
    chatting.encode(chat)
    for turn in range(5):
        chat = [*chat, assistant(f"<think>\nhm\n</think>\n\nreply {turn}."), user(f"so {turn}?")]
        tokenizer.asked = 0
        chatting.encode(chat)
        assert tokenizer.asked < 1_000


def test_chats_side_by_side_do_not_forget_each_other() -> None:
    tokenizer = JoiningTokenizer(("<|im_start|>", "<|im_end|>"))
    chatting = codec("chatml", tokenizer)
    chats = [[user(f"{name} " * 5_000 + ".")] for name in "abcdefgh"]
    for chat in chats:
        chatting.encode(chat)
    tokenizer.asked = 0
    for chat in chats:
        chatting.encode([*chat, assistant("x"), user("y")])
    assert tokenizer.asked < 8 * 1_000


# --- raw text ---


def test_raw_text_has_no_turn_and_may_hold_special_tokens() -> None:
    raw = codec()
    assert raw.complete("a<|im_end|>") == Prompt((97, 259), 0, 0, "a<|im_end|>", "")
    plain = raw.complete("a<|im_end|><think>", special=False)
    assert plain.tokens == tuple(b"a<|im_end|><think>")
    assert raw.complete("a\ud800\udc00").text == "a\ufffd\ufffd"
    with pytest.raises(InvalidArgument, match="empty"):
        raw.complete("")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_raw_text_that_follows_other_tokens_gets_no_bos_of_its_own(
    adds: bool, special: bool
) -> None:
    raw = codec_of("", ByteTokenizer(["<s>"], bos="<s>", adds_bos=adds))
    for text in ("ab", "<s>ab", "a<s>"):
        written = raw.tokenizer.encode(text, special=special)
        assert raw.raw(text, special=special, continues=True) == tuple(written)
        begins = special and text.startswith("<s>")
        bos = [N_BYTES] * (adds and not begins)
        assert raw.raw(text, special=special) == (*bos, *written)


def test_a_prompt_survives_json_and_hashing() -> None:
    prompt = codec().encode([user("hi")])
    assert json.loads(json.dumps(prompt.tokens)) == list(prompt.tokens)
    assert hash(prompt) == hash(codec().encode([user("hi")]))
