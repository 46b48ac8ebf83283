"""Prompts that are too long by any count are refused before an engine has to look at them."""

from __future__ import annotations

from kvtier.api.limits import CHARACTERS_PER_TOKEN
from kvtier.engine.process.messages import Hello, Prompt, TextPrompt, TokenPrompt
from kvtier.errors import PromptTooLong


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
    texts = [prompt.text] if isinstance(prompt, TextPrompt) else [message.content for message in prompt.messages]
    count = sum(map(len, texts))
    if count > CHARACTERS_PER_TOKEN * limit:
        raise PromptTooLong(f"the prompt has {count} characters, which is more than {limit - 1} tokens can be")
