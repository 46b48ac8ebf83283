"""Log-probabilities of sampled tokens, in the form that OpenAI's chats and Ollama's answers share.

For an answer that is not streamed they are encoded piece by piece: encoding a million objects at its end would block
the event loop, and until then they would slow down the garbage collector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvtier.engine.answer import StreamPiece

LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token: JSON has no infinity."""


EncodedLogprobs = tuple[bytes, ...]
"""The log-probabilities of a piece: one or more JSON lists, without their brackets."""

_encode = msgspec.json.Encoder().encode


class LikelyToken(msgspec.Struct):
    """`bytes` is needed since a token may be part of a character. The first token of a prompt has no `logprob`."""

    token: str
    logprob: float | None
    bytes: list[int]


class SampledToken(LikelyToken):
    """The sampled token, and the requested number of likeliest tokens."""

    top_logprobs: list[LikelyToken]


def sampled_tokens(piece: StreamPiece, token_bytes: Mapping[int, bytes], num_top: int) -> list[SampledToken]:
    """The tokens of a piece with log-probabilities; `token_bytes` must have all tokens in them."""

    def fields(token_id: int, logprob: float | None) -> tuple[str, float | None, list[int]]:
        raw = token_bytes[token_id]
        return raw.decode(errors="replace"), None if logprob is None else max(logprob, LEAST_LOGPROB), list(raw)

    sampled = []
    for token_id, found in zip(piece.token_ids, piece.logprobs or (), strict=False):
        likeliest = sorted(found.items(), key=lambda item: -item[1])[:num_top]
        sampled.append(
            SampledToken(*fields(token_id, found.get(token_id)), [LikelyToken(*fields(*one)) for one in likeliest])
        )
    return sampled


def encode_items(values: Sequence[object]) -> bytes:
    """A JSON list without its brackets."""
    return _encode(values)[1:-1]


def joined(pieces: Sequence[EncodedLogprobs], number: int = 0) -> msgspec.Raw:
    """The complete list with index `number`, joined from all pieces."""
    return msgspec.Raw(b"[" + b",".join([piece[number] for piece in pieces]) + b"]")
