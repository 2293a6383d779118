"""What must text know of a model's vocabulary, and nothing more?

Text knows token ids, the bytes they stand for and which of them steer the model. It does not know
how a vocabulary splits text, nor where the vocabulary lives.

Words: a *control* token steers the model and is never shown (``<|im_end|>``); a *marker* is a
user-defined token that is shown as its text (``<think>`` in most vocabularies). Both are *special*:
their text becomes one id when it is written by a template.
"""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """A vocabulary. Every method is a pure function of its arguments; all are safe in any thread.

    Encoding is *fragmented*: special texts are cut out first, the longest first, and what lies
    between two of them is encoded on its own. So cutting a text where a special text begins and
    encoding both halves gives the tokens of the whole (`encoder.py` relies on it).
    """

    @property
    def n_vocab(self) -> int:
        """The number of token ids: every id is in ``[0, n_vocab)``."""
        ...

    @property
    def bos(self) -> int | None:
        """The id of the beginning-of-text token, if the vocabulary has one."""
        ...

    @property
    def eos(self) -> int | None:
        """The id of the end-of-text token, if the vocabulary has one."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects every prompt to begin with `bos`."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of `text`, without any BOS or EOS of the tokenizer's own.

        `special=True` turns the text of special tokens into their ids. `special=False` leaves
        control tokens' texts as plain text; markers may still be recognised (llama.cpp does).
        """
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a person is shown for `token`: ``b""`` for control tokens.

        May be a part of a character; `Detokenizer` joins them.
        """
        ...

    def special_texts(self) -> tuple[str, ...]:
        """The texts of all control tokens and markers, in no particular order."""
        ...

    def token_text(self, token: int) -> str:
        """The text that stands for `token` in a template, control tokens included."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether generation ends at `token`."""
        ...
