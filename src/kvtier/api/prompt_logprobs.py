"""The log-probabilities of a prompt's tokens in vLLM's form: for each position, an object by token id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvtier.api.logprobs import LEAST_LOGPROB, encode_items
from kvtier.engine.prompt_token import PromptToken


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


def encoded_prompt_logprobs(tokens: Sequence[PromptToken], token_bytes: Mapping[int, bytes], num_top: int) -> bytes:
    """A JSON list without its brackets. `token_bytes` must have all tokens in it."""
    return encode_items([_shaped(token, token_bytes, num_top) for token in tokens])


def _shaped(token: PromptToken, token_bytes: Mapping[int, bytes], num_top: int) -> dict[int, _PromptLogprob] | None:
    """The token itself and the likeliest ones; None for the first token of a prompt."""
    if not token.logprobs:
        return None
    likeliest = sorted(token.logprobs.items(), key=lambda item: -item[1])
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(likeliest[:num_top], 1)}
    ranks[token.token_id] = token.rank
    return {
        token_id: _PromptLogprob(
            max(token.logprobs[token_id], LEAST_LOGPROB), rank, token_bytes[token_id].decode(errors="replace")
        )
        for token_id, rank in ranks.items()
    }
