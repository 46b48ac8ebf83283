"""A tokenizer with a word for every token of a vocabulary, so that every token that a random model samples is text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    vocabulary = {f"w{number:x}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
