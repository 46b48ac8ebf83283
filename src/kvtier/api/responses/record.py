"""What a response's shape and its history have to know of the body, beside the prompt."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """`shown` are the fields of a response that repeat the request's; `items` are those of its input. Both are JSON.

    The prompt's first `num_instructions` messages come before the history. With `refers`, messages among the others
    stand for items of earlier responses. `unnamed` are the numbers of results whose calls are in the history.
    """

    shown: dict[str, msgspec.Raw]
    items: list[msgspec.Raw]
    is_stored: bool = True
    previous: str = ""
    num_instructions: int = 0
    refers: bool = False
    unnamed: list[int] = []
    seals_reasoning: bool = False


_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode_record(encoded: bytes) -> Record:
    return _decoder.decode(encoded)
