"""Makes tokens of a prompt as it comes in a message: of text, or of a conversation by the model's template.

Called from the threads for prompts. A tokenizer or a template is a program: it may raise anything.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import msgspec

from kvtier.engine.parting.message_place import ChatInput
from kvtier.engine.parting.partings import AskedPrompt
from kvtier.engine.process.messages import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    Submit,
    TextPrompt,
)
from kvtier.models.prompt_encoder import EncodedChat, PromptEncoder
from kvtier.tiers.retention import RetentionAsk

logger = logging.getLogger(__name__)


def retained_parts(
    prompt: Prompt, asks: Sequence[RetentionAsk], tokens: Sequence[int], prompts: PromptEncoder
) -> list[tuple[RetentionAsk, int]]:
    """Each ask with its number of tokens: all, or those that its messages alone have in common with the prompt."""
    return [(ask, _num_common(prompt, ask.num_messages, tokens, prompts)) for ask in asks]


def _num_common(prompt: Prompt, num_messages: int | None, tokens: Sequence[int], prompts: PromptEncoder) -> int:
    """A template is a program: if it writes the first messages differently on their own, all tokens are meant."""
    if num_messages is None or not isinstance(prompt, ChatPrompt) or not 0 < num_messages < len(prompt.messages):
        return len(tokens)
    messages = prompt.messages[:num_messages]
    part = msgspec.structs.replace(prompt, messages=messages, adds_generation_prompt=False)
    try:
        found = encoded_chat(prompts, part).token_ids
    except Exception as error:  # raised by a template
        logger.debug("a part of a conversation could not be rendered alone: %s", str(error))
        return len(tokens)
    return next((place for place, (one, two) in enumerate(zip(found, tokens, strict=False)) if one != two), len(found))


def tokens_of(prompts: PromptEncoder, prompt: Prompt) -> list[int]:
    if isinstance(prompt, TextPrompt) and prompt.suffix:
        return prompts.encode_infill(prompt.text, prompt.suffix).token_ids
    if isinstance(prompt, TextPrompt):
        return prompts.encode(prompt.text, add_special_tokens=prompt.adds_special_tokens)
    if isinstance(prompt, ChatPrompt):
        return encoded_chat(prompts, prompt).token_ids
    return prompt.token_ids


def encoded_chat(prompts: PromptEncoder, prompt: ChatPrompt) -> EncodedChat:
    messages = [template_message(one) for one in prompt.messages]
    return prompts.encode_chat(
        messages, prompt.template_values, prompt.tools or None, add_generation_prompt=prompt.adds_generation_prompt
    )


def asked_prompt(request: Submit, tokens: Sequence[int]) -> AskedPrompt:
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt):
        return AskedPrompt(request.request_id, tokens, request.salt, request.session)
    chat = functools.partial(_chat_input, prompt)
    return AskedPrompt(request.request_id, tokens, request.salt, request.session, prompt.tools, chat)


def _chat_input(prompt: ChatPrompt) -> ChatInput:
    return ChatInput([template_message(one) for one in prompt.messages], prompt.template_values, prompt.tools)


def template_message(message: ChatMessage) -> dict[str, object]:
    """The message as templates expect it: a key is present only if it has a value."""
    found: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.call_id is not None:
        found["tool_call_id"] = message.call_id
    return found
