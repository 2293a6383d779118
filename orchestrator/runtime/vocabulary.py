"""How does a model's own vocabulary turn text into tokens and back?

llama.cpp's tokenizer, which is safe in any thread. Every id is checked before it is handed over:
one out of range ends the process.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from orchestrator.errors import BackendError, EngineClosed, InvalidArgument
from orchestrator.runtime.library import api

_SPECIAL = 1 << 3 | 1 << 4  # LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED


class Vocabulary:
    """The `Tokenizer` of a loaded model; valid as long as the model is."""

    def __init__(self, model: Any) -> None:
        self._vocab = api.llama_model_get_vocab(model)
        self.n_vocab: int = api.llama_vocab_n_tokens(self._vocab)
        self.adds_bos: bool = api.llama_vocab_get_add_bos(self._vocab)
        self.bos = self._token_or_none(api.llama_vocab_bos(self._vocab))
        self.eos = self._token_or_none(api.llama_vocab_eos(self._vocab))
        self._pieces: dict[int, bytes] = {}

    def _token_or_none(self, token: int) -> int | None:
        return token if 0 <= token < self.n_vocab else None

    def close(self) -> None:
        """Note that the model is gone; what was read of it until now stays known."""
        self._vocab = None

    def _open(self) -> Any:
        if self._vocab is None:
            raise EngineClosed("the model was closed; open it again")
        return self._vocab

    def encode(self, text: str, *, special: bool) -> list[int]:
        """See `Tokenizer.encode`. Text that is not valid Unicode is encoded with ``?``."""
        vocab = self._open()
        if not text:
            return []
        data = text.encode("utf-8", "replace")
        n_most = len(data) + 8
        tokens = (api.llama_token * n_most)()
        count = api.llama_tokenize(vocab, data, len(data), tokens, n_most, False, special)
        if count < 0:
            raise BackendError(f"llama.cpp could not tokenize {len(data):,} bytes of text")
        return list(tokens[:count])

    def piece(self, token: int) -> bytes:
        """See `Tokenizer.piece`."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._read_piece(token, special=False)
        return known

    def token_text(self, token: int) -> str:
        """See `Tokenizer.token_text`."""
        return self._read_piece(token, special=True).decode("utf-8", "replace")

    @functools.cached_property
    def _special_texts(self) -> tuple[str, ...]:
        special = (
            token
            for token in range(self.n_vocab)
            if api.llama_vocab_get_attr(self._open(), token) & _SPECIAL
        )
        return tuple(filter(None, map(self.token_text, special)))

    def special_texts(self) -> tuple[str, ...]:
        """See `Tokenizer.special_texts`."""
        return self._special_texts

    def is_end(self, token: int) -> bool:
        """See `Tokenizer.is_end`."""
        self._check(token)
        return bool(api.llama_vocab_is_eog(self._open(), token))

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise InvalidArgument(f"token {token} is not in 0 to {self.n_vocab - 1}")

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        self._check(token)
        n_most = 64
        while True:
            buffer = ctypes.create_string_buffer(n_most)
            count = api.llama_token_to_piece(self._open(), token, buffer, n_most, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            n_most = -count
