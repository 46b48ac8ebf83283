"""A tokenizer for models with random weights: a token for every ASCII character, so that any answer is readable."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_END, _ROLE, _NEW_LINE = "<|end|>", "<|role|>", "Ċ"
_CHARACTERS = ["Ġ", *map(chr, range(ord("!"), ord("~") + 1)), _NEW_LINE]
VOCAB_SIZE = len(_CHARACTERS) + 2

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|role|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


def make_ascii_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """Other characters become question marks, one for each of their bytes."""
    vocabulary = {character: number for number, character in enumerate([*_CHARACTERS, _END, _ROLE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=_END,
        additional_special_tokens=[_ROLE],
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_tokens,
    )
