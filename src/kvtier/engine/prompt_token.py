"""A token of a prompt, and how likely it was there. No torch: the API uses it too."""

from __future__ import annotations

import msgspec


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """`logprobs` are the log-probabilities of the token itself and of the likeliest ones in its place, by token id.

    The likeliest token has rank 1. The first token of a prompt has nothing before it: it has no log-probabilities, and
    rank 0.
    """

    token_id: int
    rank: int
    logprobs: dict[int, float]
