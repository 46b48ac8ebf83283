"""Log-probabilities of sampled tokens, in the shape that OpenAI's chats and Ollama's answers share.

An answer that is not streamed keeps them in JSON, piece by piece: a million objects would hold up the event loop when
they are encoded at its end, and the garbage collector until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvtier.engine.answer import StreamPiece

LEAST_LOGPROB = -9999.0
"""What OpenAI says of a token that cannot come: JSON has no infinity."""


EncodedLogprobs = tuple[bytes, ...]
"""Of a piece of an answer: one or several lists in JSON, without their brackets."""

_encode = msgspec.json.Encoder().encode


class LikelyToken(msgspec.Struct):
    """`bytes` are present because a token may be part of a character. The first token of a prompt has no `logprob`."""

    token: str
    logprob: float | None
    bytes: list[int]


class SampledToken(LikelyToken):
    """The token that was sampled, and the likeliest ones, as many as were asked for."""

    top_logprobs: list[LikelyToken]


def sampled_tokens(piece: StreamPiece, token_bytes: Mapping[int, bytes], num_top: int) -> list[SampledToken]:
    """Those of a piece that has logprobs; `token_bytes` has all tokens in them."""

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
    """A list in JSON, without its brackets."""
    return _encode(values)[1:-1]


def joined(pieces: Sequence[EncodedLogprobs], number: int = 0) -> msgspec.Raw:
    """The whole list of that number."""
    return msgspec.Raw(b"[" + b",".join([piece[number] for piece in pieces]) + b"]")
