"""A made-up tokenizer as large as those of real models: byte-level BPE with random merges."""

from __future__ import annotations

import random
import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|end|>"
_LETTERS = "eeeeettttaaaooonnniiisssrrrhhllddccuummppffggwwyybbvvkjxqz"
_OTHERS = string.ascii_uppercase + string.digits + '"{}[],:_-./\\\n'
_LONGEST = 12


def make_tokenizer(num_tokens: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """`num_tokens` in all: bytes, words and pieces of JSON, and the end of text. The same arguments make the same."""
    dice = random.Random(seed)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(characters)}
    written = {chr(byte): pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(byte))[0][0]
               for byte in range(128)}  # fmt: skip
    letters = [written[letter] for letter in _LETTERS]
    pieces = [*letters, *(written[one] for one in f" {_OTHERS}")]
    merges = []
    while len(vocabulary) < num_tokens - 1:
        left, right = dice.choice(pieces), dice.choice(pieces if dice.random() < 0.3 else letters)
        merged = left + right
        if merged in vocabulary or len(merged) > _LONGEST:
            continue
        vocabulary[merged] = len(vocabulary)
        merges.append((left, right))
        pieces.append(merged)
    vocabulary[END_OF_TEXT] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
