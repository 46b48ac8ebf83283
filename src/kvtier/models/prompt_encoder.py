"""Text and chats as prompts of token ids, with the tokenizer and the chat template of a model. Any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvtier.errors import InvalidParameter, PromptTooLong
from kvtier.models.infilling import Infill, infill_form
from kvtier.models.tokenizer import TextStream, Tokenizer

_MIN_BEGINNING = 4096


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as written by the model's chat template."""

    text: str
    token_ids: list[int]


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
        """Raises `InvalidParameter` if the model has no tokenizer, and for half characters.

        Also raises `PromptTooLong` for text that is far too long to be encoded.
        """
        if self._tokenizer is None:
            raise InvalidParameter("this model has no tokenizer: pass token ids")
        self._check_text(text, self._tokenizer)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check(self, prompt: Sequence[int]) -> list[int]:
        """A prompt's token ids. Avoids a loop over a list of ints: there may be a million."""
        given: object = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray)):
            raise InvalidParameter(f"a prompt is text or a list of token ids, not {prompt!r}")
        try:
            return msgspec.convert(given, self._token_ids)
        except msgspec.ValidationError:
            pass  # numbers of another kind may do; if not, name the first wrong one
        tokens = [token_id.item() if hasattr(token_id, "item") else token_id for token_id in given]
        for token_id in tokens:
            if type(token_id) is not int:
                raise InvalidParameter(f"a prompt is text or a list of token ids, but {token_id!r} is not one")
        for token_id in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(f"the token id {token_id} is not in the vocabulary of {self._vocab_size}")
        return tokens

    def text_stream(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, kept: Sequence[str] = ()
    ) -> TextStream | None:
        """An answer's token ids back to text as they arrive; None for a model without a tokenizer."""
        if self._tokenizer is None or self._tokenizer.is_absent:
            return None
        return TextStream(self._tokenizer, skip_special_tokens=skip_special_tokens, prompt=prompt, kept=kept)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        template_values: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> EncodedChat:
        """Raises as `encode` and `Tokenizer.render_chat` do."""
        if self._tokenizer is None or self._tokenizer.is_absent:
            raise InvalidParameter("the model has no tokenizer: give a prompt of token ids")
        text = self._tokenizer.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_values=template_values
        )
        return EncodedChat(text, self.encode(text, add_special_tokens=False))

    def encode_infill(self, prefix: str, suffix: str) -> Infill:
        """A prompt for the text between the two. Raises as `encode` does, and for a model without such prompts."""
        if self._tokenizer is None or self._tokenizer.is_absent:
            raise InvalidParameter("suffix needs a model with a tokenizer, and this one has none")
        form = infill_form(self._tokenizer)
        if form is None:
            raise InvalidParameter("suffix needs a model with fill-in tokens, and this one has none")
        prefix_ids = self.encode(prefix, add_special_tokens=False)
        return form.infill(self._tokenizer, prefix_ids, self._encode_behind(suffix, self._tokenizer))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens. Raises `InvalidParameter` for invalid ids, or without a tokenizer."""
        tokens = self.check(token_ids)
        if self._tokenizer is None or self._tokenizer.is_absent:
            raise InvalidParameter("the model has no tokenizer: its tokens have no text")
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as in the vocabulary."""
        return [] if self._tokenizer is None else self._tokenizer.vocabulary_texts(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for a model without a tokenizer."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _encode_behind(self, text: str, tokenizer: Tokenizer) -> list[int]:
        self._check_text(text, tokenizer)
        return tokenizer.encode_behind(text)

    def _check_text(self, text: str, tokenizer: Tokenizer) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(f"the prompt is not valid text: {error.reason} at character {error.start}") from None
        self._refuse_endless(text, tokenizer)

    def _refuse_endless(self, text: str, tokenizer: Tokenizer) -> None:
        """Refuse text whose beginning alone is too long: encoding it all could take minutes and gigabytes."""
        num_characters = max(_MIN_BEGINNING, 8 * self._max_model_len)
        while len(text) > num_characters:
            count = len(tokenizer.encode(text[:num_characters], add_special_tokens=False))
            if count > self._max_model_len:
                raise PromptTooLong(
                    f"the prompt has more than {count} tokens, "
                    f"but at most {self._max_model_len - 1} leave room for an answer"
                )
            num_characters *= 8
