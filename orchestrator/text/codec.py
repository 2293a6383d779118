r"""What are the tokens of a chat, and where in them does its input end?

The next turn renders the whole history again, and rarely as this turn left it: the generation
prompt opened a reasoning block that history drops, white space is trimmed, a tool loop loses its
reasoning. What will surely come again cannot be read off a template, but it can be tried out.
The chat is rendered

    A   as the prompt, with the generation prompt
    C   without the generation prompt
    B   with a reply and a next message appended, without the generation prompt

and the input ends where the tokens of A stop being those of the others:

    A   <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n
    C   <|im_start|>user\nhi<|im_end|>\n
    B   <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\n…
        |<------------ turn ------------>|

A rendering that the template refuses, or that says no more than A, is left out.

The part that other chats begin with as well, the system text and the tools, ends where A stops
being what two other questions make of the same head:

    A    <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n …
    D,E  <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n …
         |<----------------------- base ----------------------->|

D and E ask differently from their first character on, so a chat that asks what one of them asks
is still told from the other; and E begins with line breaks, which many vocabularies join to one
that the template writes.

A reply that was generated here and comes back in the chat, byte for byte as it was given out, is
the very tokens that were sampled (`hear`, `fed.py`).

Invariants: ``0 <= base <= floor <= turn < len(tokens)``; the tokens are those of the marked text
encoded at once, but for such replies (`encoder.py`); a special token typed into a message is never
a special id (`guard.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import Any

from orchestrator.errors import InvalidArgument, TemplateError
from orchestrator.text.encoder import NOTHING, Encoder, Encoding, common_length
from orchestrator.text.guard import MARK, Guard, scrubbed, unmarked
from orchestrator.text.messages import Message
from orchestrator.text.seams import Seams
from orchestrator.text.template import ChatTemplate
from orchestrator.text.tokenizer import Tokenizer

_CALL = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": {}}}
_NEXT_QUESTION: list[Message] = [
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "y"},
]
_NEXT_RESULT: list[Message] = [
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": "y"},
]
_OTHER_QUESTIONS = ("x", "\n\ny")
_N_LATEST = 2  # messages whose starts are worth a few renderings each


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of one reply. All positions count tokens.

    `turn`: where the input ends, before the generation prompt; 0 if there is no such place.
    `floor`: the part of it that also survives the next message of the *user*; less than `turn`
    only inside a tool loop that the template will then render anew. `base`: the part that any
    other chat under the same system text and tools begins with, 0 if there are neither. `text` is
    what the tokens spell, without a BOS that the tokenizer added, and with JSON objects of earlier
    replies as the template writes them. `opener` is the part of it that the generation prompt made.
    `n_said`: how many of the tokens are replies as they were sampled; `encoding` is for `hear`.

    `starts`: where messages of the user start, those that could have been another message; of a
    chat whose template does not show that at once the latest two. `ends`: where each message ends,
    empty for such a chat (`ChatCodec.ends` finds out).
    """

    tokens: tuple[int, ...]
    turn: int
    floor: int
    text: str
    opener: str
    base: int = 0
    n_said: int = 0
    encoding: Encoding = field(default=NOTHING, compare=False, repr=False)
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class ChatCodec:
    """Turns chats into prompts for one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._guard = Guard(tokenizer.special_texts())
        self._encoder = Encoder(tokenizer, self._guard)
        self._seams = Seams(template, self._guard)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a chat; `tools` and `arguments` as in `ChatTemplate.render`.

        Raises InvalidArgument and TemplateError as `ChatTemplate.render` does, and InvalidArgument
        for a chat that renders to nothing.
        """
        try:
            chat = _Chat(self.template, self._guard, messages, tools, arguments)
        except RecursionError as error:
            raise InvalidArgument(
                "messages or tools are nested too deeply; flatten them"
            ) from error
        prompt = self._encoder.encode(chat.rendered(chat.messages, generation=True))
        if not prompt.tokens:
            raise InvalidArgument("the chat template makes an empty prompt of these messages")
        bare = chat.attempted(chat.messages)
        next_ = chat.with_next_result() if chat.in_tool_loop else chat.with_next_question()
        turn = self._common(prompt, bare, next_)
        floor = self._common(prompt, chat.with_next_question()) if chat.in_tool_loop else turn
        base = self._common(prompt, *chat.with_other_questions())
        self._encoder.remember(prompt)
        made = Prompt(
            tokens=tuple(prompt.tokens),
            turn=turn,
            floor=min(floor, turn),
            text=unmarked(prompt.text),
            opener=_opener(prompt.text, bare, next_),
            base=min(base, floor, turn),
            n_said=prompt.n_said,
            encoding=prompt,
        )
        bounds = self._bounds(chat, prompt, bare)
        if bounds is None:
            return replace(made, starts=self._latest_starts(messages, made, tools, arguments))
        roles = [each["role"] for each in chat.messages]
        asked = (at for at, role in zip(bounds, roles, strict=False) if role == "user")
        n_joined = len(messages) - len(roles)  # system messages that are one with the next
        joined = (self._end(messages, at, made, tools, arguments) for at in range(n_joined))
        return replace(
            made,
            starts=_ascending(asked, made.floor),
            ends=tuple(accumulate((*joined, *bounds[1:]), max)),
        )

    def _bounds(self, chat: _Chat, prompt: Encoding, bare: str | None) -> tuple[int, ...] | None:
        """Where in a prompt's tokens each message starts, and the last one ends; see `seams.py`."""
        if bare is None or not prompt.text.startswith(bare):
            return None
        starts = self._seams.starts(bare, chat.messages)
        return None if starts is None else self._encoder.counts(prompt, (*starts, len(bare)))

    def _latest_starts(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
    ) -> tuple[int, ...]:
        """Where the latest messages of the user start, found by rendering the chat up to them."""
        asked = [at for at, each in enumerate(messages) if at and each.get("role") == "user"]
        starts = (
            self._end(messages, at - 1, prompt, tools, arguments) for at in asked[-_N_LATEST:]
        )
        return _ascending(starts, prompt.floor)

    def complete(self, text: str, *, special: bool = True) -> Prompt:
        """The prompt of raw text, without a template.

        `special` False leaves special tokens in `text` as plain text. Raises InvalidArgument if
        there is nothing to evaluate.
        """
        prompt = self._raw(text, special=special)
        self._encoder.remember(prompt)
        return Prompt(
            tokens=tuple(prompt.tokens),
            turn=0,
            floor=0,
            text=unmarked(prompt.text),
            opener="",
            n_said=prompt.n_said,
            encoding=prompt,
        )

    def before(self, prompt: Prompt, n_characters: int) -> int:
        """How many tokens of a raw prompt stand for its first characters, and reach no further."""
        return self._shared(prompt, prompt.encoding.text[:n_characters])

    def raw(self, text: str, *, special: bool = True, continues: bool = False) -> tuple[int, ...]:
        """The tokens of raw text by itself; without a BOS where it `continues` others."""
        tokens = tuple(self._raw(text, special=special, known=NOTHING).tokens)
        bos = self.tokenizer.bos
        if not continues or bos is None or not self.tokenizer.adds_bos:
            return tokens
        written = special and text.startswith(self.tokenizer.token_text(bos))
        return tokens if written else tokens[1:]

    def _raw(self, text: str, *, special: bool, known: Encoding | None = None) -> Encoding:
        text = scrubbed(text.replace(MARK, "\ufffd"))
        encoding = self._encoder.encode(text if special else self._guard.text(text), known)
        if not encoding.tokens:
            raise InvalidArgument("the prompt is empty; give at least one character")
        return encoding

    def hear(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        """Note that `tokens` were sampled after `prompt`, in case that they come back as text.

        To be called in any thread; it waits for nothing.
        """
        if prompt.encoding is not NOTHING and tokens:
            self._encoder.hear(prompt.encoding, tokens)

    def ends(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        known: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Where in `prompt`, made of `messages`, each of them ends; `known`: the first ends.

        A message ends where what the template closes it with does (`Prompt.ends`). Where that does
        not show, it ends where the chat up to it does. Where that is rendered otherwise once more
        follows, or not at all, it ends where the words of the next message begin; and where the
        template shows neither, where the one before it does. That takes up to three renderings for
        each message, so give the `known` ones.
        """
        if len(prompt.ends) == len(messages):
            return prompt.ends
        found = list(known)
        for at in range(len(found), len(messages)):
            end = self._end(messages, at, prompt, tools, arguments)
            found.append(min(max(end, *found[-1:], 0), len(prompt.tokens)))
        return tuple(found)

    def _end(
        self,
        messages: Sequence[Mapping[str, Any]],
        at: int,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
    ) -> int:
        def attempted(*more: Mapping[str, Any]) -> str | None:
            told = [*messages[: at + 1], *more]
            chat = _Chat(self.template, self._guard, told, tools, arguments)
            return chat.attempted(chat.messages)

        until = attempted()
        if until is not None and prompt.text.startswith(unmarked(until)):
            return self._shared(prompt, until)
        if at + 1 == len(messages):
            return prompt.turn
        others = [attempted({**_bare(messages[at + 1]), "content": p}) for p in _OTHER_QUESTIONS]
        ends = [self._shared(prompt, other) for other in others if other is not None]
        return min(ends, default=0)

    def _shared(self, prompt: Prompt, text: str) -> int:
        """How many tokens of `prompt` marked `text` begins with."""
        encoding = self._encoder.encode(text, prompt.encoding)
        return common_length(prompt.encoding.tokens, encoding.tokens)

    def _common(self, prompt: Encoding, *texts: str | None) -> int:
        """The length of the prefix of `prompt` that all other `texts` share, 0 without any.

        The last token is left out even if they share it: what follows may join it.
        """
        others = [text for text in texts if text is not None and text != prompt.text]
        ends = [
            common_length(prompt.tokens, self._encoder.encode(text, prompt).tokens)
            for text in others
        ]
        return min(*ends, len(prompt.tokens) - 1) if ends else 0


class _Chat:
    """One chat, prepared and marked, and what might follow it."""

    def __init__(
        self,
        template: ChatTemplate,
        guard: Guard,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
    ) -> None:
        self._template = template
        self._guard = guard
        self.messages = [guard.message(message) for message in template.prepared(messages)]
        self._tools = guard.value(tools)
        self._arguments = guard.value(arguments)

    @property
    def in_tool_loop(self) -> bool:
        return bool(self.messages[-1]["role"] == "tool")

    def rendered(self, messages: Sequence[Message], *, generation: bool = False) -> str:
        """The text of `messages` under the tools and arguments of this chat."""
        try:
            text = self._template.fill(
                messages,
                tools=self._tools,
                add_generation_prompt=generation,
                arguments=self._arguments,
                guard=self._guard.value,
            )
        except TemplateError as error:
            raise TemplateError(scrubbed(unmarked(str(error)))) from error
        return scrubbed(text)

    def attempted(self, messages: Sequence[Message], *, generation: bool = False) -> str | None:
        """As `rendered`, None where the template refuses."""
        try:
            return self.rendered(messages, generation=generation)
        except TemplateError:
            return None

    def with_next_question(self) -> str | None:
        """The chat with a reply, unless it ends in one, and a next message of the user."""
        replied = self.messages[-1]["role"] == "assistant"
        probe = _NEXT_QUESTION[1:] if replied else _NEXT_QUESTION
        return self.attempted([*self.messages, *self._template.prepared(probe)])

    def with_next_result(self) -> str | None:
        """The chat with one more call of a tool and its result."""
        return self.attempted([*self.messages, *self._template.prepared(_NEXT_RESULT)])

    def with_other_questions(self) -> list[str | None]:
        """Other chats under the same system text and tools; none if there are neither."""
        head = list(takewhile(lambda message: message["role"] == "system", self.messages))
        if not (head or self._tools):
            return []
        asked = ([{"role": "user", "content": probe}] for probe in _OTHER_QUESTIONS)
        others = ([*head, *self._template.prepared(each)] for each in asked)
        return [self.attempted(other, generation=True) for other in others]


def _ascending(places: Iterable[int], most: int) -> tuple[int, ...]:
    """The places in ``(0, most]``, each once."""
    return tuple(sorted({place for place in places if 0 < place <= most}))


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    """`message` without what it says."""
    return {key: message[key] for key in ("role", "name", "tool_call_id") if key in message}


def _opener(prompt: str, *others: str | None) -> str:
    """The end of `prompt` that is not in the first of the other renderings that there is."""
    other = next((text for text in others if text is not None), prompt)
    return unmarked(prompt[common_length(prompt, other) :])
