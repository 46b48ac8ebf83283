"""What engines report about prompts: lines that are bounded, whoever sends them."""

from __future__ import annotations

import json

import pytest

from kvtier.errors import RemoteProtocolError
from kvtier.wire.prompt_news import (
    MAX_LINE_BYTES,
    MAX_PROMPTS,
    CachedPrompt,
    PromptNews,
    decode_news,
    encode_news,
    prompt_id_in,
)

_ID = "0123456789abcdef01234567"


def test_a_line_is_what_was_reported() -> None:
    prompts = [CachedPrompt(_ID, 32, 48), CachedPrompt("ab" * 16, 0, 16)]

    assert decode_news(encode_news(prompts)) == PromptNews(prompts)
    assert decode_news(encode_news([], is_all=True)) == PromptNews([], is_all=True)


def test_the_longest_line_is_short_enough() -> None:
    assert len(encode_news([CachedPrompt("ab" * 16, 10_000_000, 10_000_000)] * MAX_PROMPTS)) < MAX_LINE_BYTES


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"prompts": [["not hexadecimal!!!!!!!!!", 1, 1]]}',
        b'{"prompts": [["0123456789abcdef01234567", -1, 1]]}',
        b'{"prompts": [["0123456789abcdef01234567", 1]]}',
        b'{"prompts": [["0123456789abcdef01234567", 1, 99999999999999999999]]}',
        b'{"prompts": [], "more": 1}',
        json.dumps({"prompts": [[_ID, 1, 1]] * (MAX_PROMPTS + 1)}).encode(),
    ],
)
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_news(line)


@pytest.mark.parametrize(
    ("request_id", "found"),
    [
        (f"chatcmpl-{_ID}-9a9b9c9d", _ID),
        (f"0_cmpl-{_ID}-0-9a9b9c9d", _ID),
        (f"resp_{'ab' * 16}-9a9b9c9d", "ab" * 16),
        (f"chatcmpl-{_ID}0-9a9b9c9d", None),
        ("chatcmpl-hello-9a9b9c9d", None),
        ("", None),
    ],
)
def test_a_prompt_s_id_is_found_in_vllm_s_own(request_id: str, found: str | None) -> None:
    assert prompt_id_in(request_id) == found
