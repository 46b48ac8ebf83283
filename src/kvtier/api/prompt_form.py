"""What an answer says of its prompt."""

from __future__ import annotations

import msgspec


class PromptForm(msgspec.Struct, frozen=True):
    """As a request decides it, and a process that reads large bodies hands it on.

    If it `echoes`, the prompt's text comes before the answer's, and if logprobs are asked for, those of its tokens.
    `num_logprobs` are the alternatives of each of the prompt's tokens in vLLM's `prompt_logprobs`, None without.
    `has_token_texts` if a list of a prompt's tokens has their texts beside it.
    """

    echoes: bool = False
    num_logprobs: int | None = None
    has_token_texts: bool = False


SILENT = PromptForm()
