"""Finds the message of a chat in which a token lies, by rendering its first messages. Any thread; slow.

A template is a program: its output for the first messages need not be a prefix of its output for all. If it is not,
there is no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvtier.errors import InvalidParameter
from kvtier.models.tokenizer import Tokenizer

_MAX_RENDERINGS = 48


class ChatInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The input of a chat template: messages and tools as templates expect them."""

    messages: list[dict[str, object]]
    template_values: dict[str, object] = {}
    tools: list[dict[str, object]] = []


def message_of(tokenizer: Tokenizer, chat: ChatInput, token_ids: Sequence[int], position: int) -> int | None:
    """The number, from 0, of the message in which the token at `position` lies; `token_ids` are all of the prompt.

    None if unknown: the template writes another prompt now, or its output for fewer messages is no prefix.
    """
    try:
        text = _rendered(tokenizer, chat, len(chat.messages), adds_prompt=True)
    except InvalidParameter:
        return None
    found = tokenizer.encode_with_starts(text)
    if found is None or found[0] != list(token_ids):
        return None
    starts = found[1]
    place = starts[position] if position < len(starts) else len(text)
    return _message_at(_Boundaries(tokenizer, chat, text), place, len(chat.messages))


class _Boundaries:
    """Where the first messages end in the text of all. At most `_MAX_RENDERINGS` beginnings are rendered, each once."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatInput, text: str) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._text = text
        self._num_left = _MAX_RENDERINGS

    def of(self, num_messages: int) -> int | None:
        """None if the text of these messages is not a prefix of the whole."""
        if self._num_left == 0:
            return None
        self._num_left -= 1
        try:
            text = _rendered(self._tokenizer, self._chat, num_messages, adds_prompt=False)
        except InvalidParameter:
            return None
        return len(text) if self._text.startswith(text) else None


def _message_at(boundaries: _Boundaries, place: int, num_messages: int) -> int | None:
    """Bisect: `low` messages end at or before the place, `high` behind it."""
    end = boundaries.of(num_messages)
    if end is None or place >= end:  # behind the last message is only the generation prompt
        return None
    low, high = 0, num_messages
    while high - low > 1:
        for middle in _from_the_middle(low, high):
            boundary = boundaries.of(middle)
            if boundary is not None:
                low, high = (middle, high) if boundary <= place else (low, middle)
                break
        else:
            return None
    return low


def _from_the_middle(low: int, high: int) -> Iterator[int]:
    """All numbers between, the middle first: next to one that cannot be rendered alone is one that can."""
    middle = (low + high) // 2
    return iter(sorted(range(low + 1, high), key=lambda number: abs(number - middle)))


def _rendered(tokenizer: Tokenizer, chat: ChatInput, num_messages: int, *, adds_prompt: bool) -> str:
    return tokenizer.render_chat(
        chat.messages[:num_messages],
        tools=chat.tools or None,
        add_generation_prompt=adds_prompt,
        template_values=chat.template_values,
    )
