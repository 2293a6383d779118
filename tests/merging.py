"""Vocabularies that join what a model says byte by byte, so that no reply encodes to itself.

`PairTokenizer` serves without a model; `build` gives a tiny model such a vocabulary of llama.cpp's
own (byte-pair merges, or SentencePiece with a space before every text).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import tiny_models

from orchestrator.paths import cache_dir
from orchestrator.text.bytes import ByteTokenizer

VERSION = 1
"""Raise this when a vocabulary changes: the files are cached by it."""

_PRINTABLE = range(33, 127)
_N_PAIRS = 95 * 94


class PairTokenizer(ByteTokenizer):
    """Bytes, special tokens, and a token for every pair of printable characters.

    The second of a pair is no space, as in real vocabularies. Encoding joins pairs from the left;
    with `spaced` it puts a space before every fragment of text.
    """

    def __init__(self, *control: str, spaced: bool = False, **options: Any) -> None:
        super().__init__(control, **options)
        self._first_pair = super().n_vocab
        self._spaced = spaced

    @classmethod
    def for_chat(cls, *, spaced: bool = False) -> PairTokenizer:
        """One with the special tokens of `ByteTokenizer.for_chat`."""
        return cls(
            *("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
            spaced=spaced,
            markers=("<think>", "</think>", "<tool_call>", "</tool_call>"),
            bos="<s>",
            eos="</s>",
            ends=("<|im_end|>",),
        )

    @property
    def n_vocab(self) -> int:
        """Bytes, special tokens and pairs."""
        return self._first_pair + _N_PAIRS

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Join pairs, greedily from the left."""
        tokens: list[int] = []
        for token in super().encode(text, special=special):
            if self._spaced and token < 256 and (not tokens or self._is_special(tokens[-1])):
                tokens.append(32)
            if token in _PRINTABLE and tokens and tokens[-1] in range(32, 127):
                token = self.pair(tokens.pop(), token)
            tokens.append(token)
        return tokens

    def _is_special(self, token: int) -> bool:
        return 256 <= token < self._first_pair

    def pair(self, first: int, second: int) -> int:
        """The token of two characters."""
        return self._first_pair + (first - 32) * 94 + second - 33

    def piece(self, token: int) -> bytes:
        """As in `ByteTokenizer`, and both characters of a pair."""
        if token < self._first_pair:
            return super().piece(token)
        first, second = divmod(token - self._first_pair, 94)
        return bytes((first + 32, second + 33))

    def token_text(self, token: int) -> str:
        """As in `ByteTokenizer`, and both characters of a pair."""
        return super().token_text(token) if token < self._first_pair else self.piece(token).decode()


# --- tiny models ---------------------------------------------------------------------------------

LETTERS = "abcd \n"
"""What a model is to be made to say: the merges are of these."""

_JOINED = ("ab", "ba", "aa", "bb", "ac", "ca", "cc", " a", " b", "bd", "db", "dd", "\n\n")
_NEVER_SAID = (0xC0, 0xC1, *range(0xF5, 0x100))  # no bytes of UTF-8: their ids serve the merges


def _write_merges(writer: gguf.GGUFWriter) -> None:
    characters = tiny_models.byte_characters()
    joined = [tuple(characters[byte] for byte in pair.encode()) for pair in _JOINED]
    tokens = list(characters)
    for token, pair in zip(_NEVER_SAID, joined, strict=True):
        tokens[token] = "".join(pair)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *tiny_models.SPECIALS])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + _special_types())
    writer.add_token_merges([" ".join(pair) for pair in joined])
    _write_ends(writer)


def _special_types() -> list[int]:
    control, marker = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    return [control if text.startswith("<|") else marker for text in tiny_models.SPECIALS]


def _write_sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Bytes, the three special tokens that ChatML needs, and five pieces."""
    pieces = ("▁", "▁a", "ab", "ba", "▁b")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        [*(f"<0x{byte:02X}>" for byte in range(256)), *tiny_models.SPECIALS[:3], *pieces]
    )
    writer.add_token_scores([*[-100.0] * 259, *(-float(rank) for rank in range(5))])
    writer.add_token_types(
        [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 5
    )
    writer.add_add_space_prefix(True)
    _write_ends(writer)


def _write_ends(writer: gguf.GGUFWriter) -> None:
    end = tiny_models.TOKEN["<|im_end|>"]
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    writer.add_pad_token_id(tiny_models.TOKEN["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_models.CHAT_TEMPLATE)


_WRITERS: dict[str, Callable[[gguf.GGUFWriter], None]] = {
    "merges": _write_merges,
    "sentencepiece": _write_sentencepiece,
}


def build(architecture: str, vocabulary: str) -> Path:
    """Return the path of a tiny model with another vocabulary, building it if need be."""
    folder = cache_dir() / f"tiny-v{tiny_models.VERSION}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{architecture}-{vocabulary}-{VERSION}.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            draft = Path(scratch) / path.name
            with mock.patch.object(tiny_models, "write_vocabulary", _WRITERS[vocabulary]):
                tiny_models.write(draft, architecture, None)
            os.replace(draft, path)
    return path
