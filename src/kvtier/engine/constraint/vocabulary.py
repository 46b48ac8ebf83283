"""A model's tokens for grammars: the bytes of each, the special ones, and those that end an answer."""

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
    """The vocabulary of a model with `vocab_size` logits. Make it once: 150,000 tokens take a second.

    Ids unknown to the tokenizer are never allowed, special tokens only where a grammar names them.
    """
    inside = [token_id for token_id in sorted(eos_token_ids) if token_id < vocab_size]
    tokens = _Tokens(tokenizer, vocab_size, inside)
    made: LLTokenizer = llguidance().LLTokenizer(tokens, eos_token=inside or None, slices=_SLICES)
    return made
