"""Text and chats as prompts of token ids, by the tokenizer and the chat template of a model. Any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.errors import InvalidParameter, PromptTooLong
from kvtier.models.tokenizer import Tokenizer

_MIN_BEGINNING = 4096


class PromptEncoder:
    """For a model that takes fewer than `max_model_len` tokens. `tokenizer` is None for a model without files."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

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
