"""What encoding a response and keeping its history need from the body, in addition to the prompt."""

from __future__ import annotations

import msgspec


class ResponseRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """`shown` has the request's fields that its response repeats, `items` the input items. Both are JSON.

    The prompt's first `num_instructions` messages go before the history. With `refers`, some of the others are
    placeholders for items of earlier responses. `unnamed` has the indices of tool results with calls in the history.
    `namespaces` has, by a tool's name in the prompt, its namespace and its own name.
    """

    shown: dict[str, msgspec.Raw]
    items: list[msgspec.Raw]
    is_stored: bool = True
    previous: str = ""
    num_instructions: int = 0
    refers: bool = False
    unnamed: list[int] = []
    seals_reasoning: bool = False
    namespaces: dict[str, tuple[str, str]] = {}


_decoder = msgspec.json.Decoder(ResponseRecord)


def encode_record(record: ResponseRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(encoded: bytes) -> ResponseRecord:
    return _decoder.decode(encoded)
