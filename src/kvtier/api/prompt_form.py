"""What an answer contains about its prompt, and what of a body is no part of it."""

from __future__ import annotations

import msgspec

BILLING = "x-anthropic-billing-header:"
"""The beginning of a line, not for the model, that Claude Code puts before its system prompt."""


class PromptForm(msgspec.Struct, frozen=True):
    """Decided when a request is read, possibly in the process for large bodies.

    If it `echoes`, the prompt's text precedes the answer's, with its tokens' log-probabilities if these are requested.
    `num_logprobs` is the number of alternatives for each prompt token in vLLM's `prompt_logprobs`; None without that.
    `has_token_texts` if the prompt's token ids are listed with their texts.
    """

    echoes: bool = False
    num_logprobs: int | None = None
    has_token_texts: bool = False


SILENT = PromptForm()
