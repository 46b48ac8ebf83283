"""How long prompts are: those that are too long by any count are refused before an engine has to look at them."""

from __future__ import annotations

from kvtier.api.limits import CHARACTERS_PER_TOKEN
from kvtier.engine.process.messages import ChatPrompt, EncodedPrompt, Hello, Prompt, TextPrompt, TokenPrompt
from kvtier.errors import PromptTooLong

_BYTES_OF_TOKEN = 3
"""As most token ids have in a message."""


def check_length(prompt: Prompt, hello: Hello | None) -> None:
    """Raises `PromptTooLong`. While the model's engines are away, nothing is known of its context."""
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
        raise PromptTooLong(f"the prompt has {count} characters, which is more than {limit - 1} tokens can be")


def prompt_bytes(prompt: Prompt | EncodedPrompt) -> int:
    """About as many as it has on its way to an engine."""
    if isinstance(prompt, EncodedPrompt):
        return len(prompt.encoded)
    if isinstance(prompt, TokenPrompt):
        return _BYTES_OF_TOKEN * len(prompt.token_ids)
    return _num_characters(prompt)


def _num_characters(prompt: TextPrompt | ChatPrompt) -> int:
    return prompt.num_characters
