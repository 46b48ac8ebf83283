"""Whether an engine can serve a prompt with these parameters. Pure; `PromptEncoder` has checked the token ids."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.engine.building import EngineParts
from kvtier.engine.sampling_params import MAX_PROMPT_SCORES, SamplingParams
from kvtier.errors import InvalidParameter, PromptTooLong


def check_request(tokens: Sequence[int], params: SamplingParams, parts: EngineParts) -> None:
    """Raises a `RequestError` with one sentence if it cannot be served."""
    if not tokens:
        raise InvalidParameter("the prompt is empty")
    if len(tokens) >= parts.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens, but at most {parts.max_model_len - 1} leave room for an answer"
        )
    if params.stop_strings and (parts.tokenizer is None or parts.tokenizer.is_absent):
        raise InvalidParameter("stop strings need a tokenizer, and this model has none")
    vocab_size = parts.loaded.config.vocab_size
    token_id = max(params.logit_bias, default=0)
    if token_id >= vocab_size:
        raise InvalidParameter(f"logit_bias must only name tokens of the vocabulary of {vocab_size}, not {token_id}")
    if params.prompt_logprobs is not None and len(tokens) * (params.prompt_logprobs + 1) > MAX_PROMPT_SCORES:
        raise InvalidParameter(
            f"prompt_logprobs must not be {params.prompt_logprobs} for a prompt of {len(tokens)} tokens: "
            f"at most {MAX_PROMPT_SCORES} log-probabilities are kept"
        )
