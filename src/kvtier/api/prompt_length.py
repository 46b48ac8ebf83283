"""Refuses prompts that are certainly too long before they reach an engine."""

from __future__ import annotations

from kvtier.api.limits import CHARACTERS_PER_TOKEN
from kvtier.engine.process.messages import ChatPrompt, EncodedPrompt, EngineHello, Prompt, TextPrompt, TokenPrompt
from kvtier.errors import PromptTooLong

_BYTES_OF_TOKEN = 3
"""The encoded size of most token ids in a message."""


def check_length(prompt: Prompt, hello: EngineHello | None) -> None:
    """Raises `PromptTooLong`. While the model's engines are away, its context length is unknown: any prompt passes."""
    if hello is None:
        return
    limit = hello.max_model_len
    if isinstance(prompt, TokenPrompt):
        count = len(prompt.token_ids)
        if count >= limit:
            raise PromptTooLong(f"the prompt has {count} tokens, but at most {limit - 1} leave room for an answer")
        return
    count = _num_characters(prompt)
    if count > CHARACTERS_PER_TOKEN * limit:
        raise PromptTooLong(f"the prompt has {count} characters, which is too long for {limit - 1} tokens")


def prompt_bytes(prompt: Prompt | EncodedPrompt) -> int:
    """The approximate size of a prompt in a message to an engine."""
    if isinstance(prompt, EncodedPrompt):
        return len(prompt.encoded)
    if isinstance(prompt, TokenPrompt):
        return _BYTES_OF_TOKEN * len(prompt.token_ids)
    return _num_characters(prompt)


def _num_characters(prompt: TextPrompt | ChatPrompt) -> int:
    return prompt.num_characters
