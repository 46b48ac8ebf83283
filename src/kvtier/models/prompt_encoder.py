"""Text and chats as prompts of token ids, by the tokenizer and the chat template of a model. Any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from kvtier.errors import InvalidParameter, PromptTooLong
from kvtier.models.tokenizer import TextStream, Tokenizer

_MIN_BEGINNING = 4096


class PromptEncoder:
    """For a model that takes fewer than `max_model_len` tokens of a vocabulary of `vocab_size`.

    `tokenizer` is None for a model without files.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._token_ids = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `InvalidParameter` when the model has no tokenizer, and for half characters.

        And `PromptTooLong` for text that is far too long to be encoded.
        """
        if self._tokenizer is None:
            raise InvalidParameter("this model has no tokenizer: pass token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(f"the prompt is no valid text: {error.reason} at character {error.start}") from None
        self._refuse_endless(text, self._tokenizer)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check(self, prompt: Sequence[int]) -> list[int]:
        """A prompt's token ids. Without a loop over those of a list of ints: there may be a million."""
        given: object = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray)):
            raise InvalidParameter(f"a prompt is text or a list of token ids, not {prompt!r}")
        try:
            return msgspec.convert(given, self._token_ids)
        except msgspec.ValidationError:
            pass  # numbers of another kind may do; of others, say which
        tokens = [token_id.item() if hasattr(token_id, "item") else token_id for token_id in given]
        for token_id in tokens:
            if type(token_id) is not int:
                raise InvalidParameter(f"a prompt is text or a list of token ids, and {token_id!r} is no token id")
        for token_id in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(f"the token id {token_id} is not in the vocabulary of {self._vocab_size}")
        return tokens

    def text_stream(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> TextStream | None:
        """An answer's token ids back to text as they come; None for a model without a tokenizer."""
        if self._tokenizer is None or self._tokenizer.is_absent:
            return None
        return TextStream(self._tokenizer, skip_special_tokens=skip_special_tokens, prompt=prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, object]], template_values: Mapping[str, object]) -> list[int]:
        """A conversation, as the model's chat template writes it. Raises as `encode` and `Tokenizer.render_chat` do."""
        if self._tokenizer is None or self._tokenizer.is_absent:
            raise InvalidParameter("the model has no tokenizer: give a prompt of token ids")
        text = self._tokenizer.render_chat(messages, template_values=template_values)
        return self.encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Of one token; none for a model without a tokenizer."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _refuse_endless(self, text: str, tokenizer: Tokenizer) -> None:
        """Text whose beginning alone is too long is not encoded to its end: that could take minutes and gigabytes."""
        num_characters = max(_MIN_BEGINNING, 8 * self._max_model_len)
        while len(text) > num_characters:
            count = len(tokenizer.encode(text[:num_characters], add_special_tokens=False))
            if count > self._max_model_len:
                raise PromptTooLong(
                    f"the prompt has more than {count} tokens, "
                    f"but at most {self._max_model_len - 1} leave room for an answer"
                )
            num_characters *= 8
