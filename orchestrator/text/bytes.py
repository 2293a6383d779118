"""Which tokenizer serves when there is no model file?

One id per byte, then the special tokens in the order they were named. The simulated runtime and
the tests use it. It recognises markers even with ``special=False``, as llama.cpp does, so what is
proved on it about typed special tokens holds there too.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import InvalidArgument
from orchestrator.text.literals import literal_pattern

N_BYTES = 256


class ByteTokenizer:
    """A `Tokenizer` of 256 bytes and named special tokens.

    `control` tokens are never shown, `markers` are shown as their text. `bos`, `eos` and `ends`
    name control tokens; `eos` always ends generation. Raises InvalidArgument for an empty or
    repeated name and for a role given to a token that does not exist.
    """

    def __init__(
        self,
        control: Sequence[str] = (),
        *,
        markers: Sequence[str] = (),
        bos: str | None = None,
        eos: str | None = None,
        ends: Sequence[str] = (),
        adds_bos: bool = False,
    ) -> None:
        self._texts = (*control, *markers)
        self._ids = {text: N_BYTES + rank for rank, text in enumerate(self._texts)}
        if len(self._ids) < len(self._texts) or "" in self._ids:
            raise InvalidArgument("special tokens need texts that are not empty and all different")
        self._first_marker = N_BYTES + len(control)
        self._bos = None if bos is None else self._named(bos)
        self._eos = None if eos is None else self._named(eos)
        self._ends = {self._named(text) for text in (*ends, *([] if eos is None else [eos]))}
        self._adds_bos = adds_bos
        self._special = literal_pattern(self._texts)
        self._markers = literal_pattern(markers)

    @classmethod
    def for_chat(cls) -> ByteTokenizer:
        """One with the tokens that ChatML and the usual reasoning templates write."""
        return cls(
            ("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
            markers=("<think>", "</think>", "<tool_call>", "</tool_call>"),
            bos="<s>",
            eos="</s>",
            ends=("<|im_end|>",),
        )

    def _named(self, text: str) -> int:
        if text not in self._ids:
            raise InvalidArgument(f'no special token is named "{text}"; name it in control first')
        return self._ids[text]

    @property
    def n_vocab(self) -> int:
        """256 bytes and the special tokens."""
        return N_BYTES + len(self._texts)

    @property
    def bos(self) -> int | None:
        """The id of the token named by `bos`."""
        return self._bos

    @property
    def eos(self) -> int | None:
        """The id of the token named by `eos`."""
        return self._eos

    @property
    def adds_bos(self) -> bool:
        """As given to the constructor."""
        return self._adds_bos

    def encode(self, text: str, *, special: bool) -> list[int]:
        """One id per UTF-8 byte; a lone surrogate becomes ``?``."""
        tokens: list[int] = []
        start = 0
        for match in (self._special if special else self._markers).finditer(text):
            tokens += text[start : match.start()].encode("utf-8", "replace")
            tokens.append(self._ids[match.group()])
            start = match.end()
        tokens += text[start:].encode("utf-8", "replace")
        return tokens

    def piece(self, token: int) -> bytes:
        """The byte itself, a marker's text, or nothing for a control token."""
        if token < N_BYTES:
            return bytes((token,))
        return self.token_text(token).encode() if token >= self._first_marker else b""

    def special_texts(self) -> tuple[str, ...]:
        """All the names given to the constructor."""
        return self._texts

    def token_text(self, token: int) -> str:
        """The name of a special token; a byte as the character of that number in Latin-1."""
        return chr(token) if token < N_BYTES else self._texts[token - N_BYTES]

    def is_end(self, token: int) -> bool:
        """Whether `token` is `eos` or one of `ends`."""
        return token in self._ends
