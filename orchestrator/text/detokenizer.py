"""How do tokens become text while they arrive, when a character may lie across several of them?

Invariant: all that `feed` and `finish` returned, joined, is the UTF-8 decoding of all the pieces,
joined, with U+FFFD for what is no UTF-8; and no return value ends inside a character.
"""

from __future__ import annotations

import codecs

from orchestrator.text.tokenizer import Tokenizer

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one reply. Single use: after `finish` it begins anew with an empty buffer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decoder = _decoder("replace")

    def feed(self, token: int) -> str:
        """The text that `token` completes; often empty inside a character."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the reply ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
