"""A model's tokens for grammars: the bytes of each, the special ones, and those that end an answer.

Where a grammar forces a text (the name of a property), the library asks for its tokens. It can find those of byte-level
tokenizers itself, without Python: its threads then never wait for Python's lock, which the engine's thread holds
meanwhile. Other tokenizers mark spaces, each in its own way, so the library asks ours.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvtier.engine.constraint.library import llguidance
from kvtier.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{count}}}" for count in (10, 12, 16, 30)), f"{_TEXT}+"]
"""Sets of tokens that are allowed or forbidden together: the library's own, and two more for texts that are nearly as
long as a schema allows. Only the other tokens are tried one by one, which takes a millisecond for 150,000."""

_MAX_KEPT_TEXTS = 2048
MAX_KEPT_CHARACTERS = 128
"""Forced texts are few: names of properties, from each of their characters on. Longer ones are tokenized each time."""
_SAMPLES = (
    *map(chr, range(128)),
    *(f" {chr(code)}x" for code in range(33, 127)),
    '{"name": "',
    '"address":{"street":"',
    ',\n    "is_member": true',
    "don't  stop\r\n\n\tIT'S 12345.678e-90",
    "Stra\u00dfe \u4e16\u754c \U0001f600 \u0645\u0631\u062d\u0628\u0627",
)
"""Texts of which both ways must make the same tokens."""
_NOT_IN_TEXTS = (b"", b"\xff")
"""An id without a token, and the byte that no UTF-8 has."""


class _Tokens:
    """The tokenizer interface of llguidance, which defines the names. Any thread calls it, with Python's lock."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(eos_token_ids, default=None)
        """If None, the library adds a token beyond the vocabulary, which the sampler never sees."""
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = tokenizer.special_token_ids | set(eos_token_ids)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)
        self._kept = functools.lru_cache(_MAX_KEPT_TEXTS)(self._tokenize)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a `text` that a grammar forces. They spell it exactly.

        Threads of the library call it while they make masks, and wait for Python's lock, so the last texts are kept.
        """
        return self._kept(text) if len(text) <= MAX_KEPT_CHARACTERS else self._tokenize(text)

    def _tokenize(self, text: str) -> list[int]:
        """Some tokenizers put a space before every text; then the text is split greedily, longest token first."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        size = len(self.tokens)
        if b"".join(self.tokens[one] if one < size else b"" for one in found) == text.encode():
            return found
        return self._longest_first(text.encode())

    def _longest_first(self, text: bytes) -> list[int]:
        ids, longest = self._ids_by_bytes
        found: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + longest), start, -1)
            end = next((end for end in ends if text[start:end] in ids), None)
            if end is None:
                return found  # no token has this byte: the forced text ends before it
            found.append(ids[text[start:end]])
            start = end
        return found

    @property
    def _ids_by_bytes(self) -> tuple[dict[bytes, int], int]:
        if not hasattr(self, "_by_bytes"):
            special = set(self.special_token_ids)
            self._by_bytes = {
                text: token_id for token_id, text in enumerate(self.tokens) if text and token_id not in special
            }
            self._longest = max(map(len, self._by_bytes), default=0)
        return self._by_bytes, self._longest


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """The vocabulary of a model with `vocab_size` logits. Make it once: 150,000 tokens take seconds.

    Ids unknown to the tokenizer are never allowed, special tokens only where a grammar names them.
    """
    inside = [token_id for token_id in sorted(eos_token_ids) if token_id < vocab_size]
    tokens = _Tokens(tokenizer, vocab_size, inside)
    return without_python(tokenizer, tokens, inside) or _asking_python(tokens, inside)


def _asking_python(tokens: _Tokens, eos_token_ids: list[int]) -> LLTokenizer:
    made: LLTokenizer = llguidance().LLTokenizer(tokens, eos_token=eos_token_ids or None, slices=_SLICES)
    return made


def without_python(tokenizer: Tokenizer, tokens: _Tokens, eos_token_ids: list[int]) -> LLTokenizer | None:
    """The same vocabulary, whose texts the library tokenizes; None if it would be another one."""
    document = tokenizer.byte_level_document
    if document is None or not eos_token_ids:  # without an end of text, the library would choose one
        return None
    size = len(tokens.tokens)
    try:
        made: LLTokenizer = llguidance().LLTokenizer(document, n_vocab=size, eos_token=eos_token_ids, slices=_SLICES)
    except Exception:  # a kind that it does not know; it raises exceptions of any type
        return None
    special = set(tokens.special_token_ids)
    is_same = made.vocab_size == size and all(
        made.decode_bytes([token_id]) == text and made.is_special_token(token_id) == (token_id in special)
        for token_id, text in enumerate(tokens.tokens)
        if text not in _NOT_IN_TEXTS  # special tokens for the library
    )
    return made if is_same and all(made.tokenize_str(text) == tokens(text) for text in _SAMPLES) else None
