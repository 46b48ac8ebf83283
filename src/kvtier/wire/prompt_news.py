"""What an engine of another project tells about prompts in its own cache: lines of JSON over a Unix socket, one way.

The first line of a connection has all prompts that the engine knows of, each further line those that have changed. So
a listener that has missed something connects again, and never has to guess what it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvtier.errors import RemoteProtocolError

MAX_PROMPTS = 16_384
"""Prompts that an engine knows of, the newest ones."""

MAX_LINE_BYTES = 2 << 20
_MAX_TOKENS = 1 << 40

Id = Annotated[str, msgspec.Meta(pattern="^(?:[0-9a-f]{24}|[0-9a-f]{32})$")]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]

_ID_IN_NAME = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{24}|[0-9a-f]{32})(?![0-9a-f])")


class CachedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_cached` of `num_tokens` tokens are in the engine's cache: whole pages only, in both."""

    prompt_id: Id
    num_cached: Tokens
    num_tokens: Tokens


class PromptNews(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With `is_all`, the engine knows of no other prompt."""

    prompts: Annotated[list[CachedPrompt], msgspec.Meta(max_length=MAX_PROMPTS)]
    is_all: bool = False


_decoder = msgspec.json.Decoder(PromptNews)


def prompt_id_in(request_id: str) -> str | None:
    """The id of a prompt in an engine's longer name for its request; None if its sender gave it none."""
    found = _ID_IN_NAME.search(request_id)
    return None if found is None else found[0]


def encode_news(prompts: Sequence[CachedPrompt], *, is_all: bool = False) -> bytes:
    return msgspec.json.encode(PromptNews(list(prompts), is_all)) + b"\n"


def decode_news(line: bytes) -> PromptNews:
    """Raises `RemoteProtocolError`."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"news of prompts cannot be read: {error}") from error
