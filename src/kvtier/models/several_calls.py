"""Whether a chat template takes an assistant's message with more than one call: some refuse it, as Llama 3.2's does.

Only the template itself knows, which is a program: it is run once, as it would be for the next turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.errors import InvalidParameter
from kvtier.models.tokenizer import Tokenizer

_NAME = "look"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_CALL_IDS = ("a1b2c3d4e", "f5g6h7i8j")
"""Some templates insist on nine characters."""


def takes_several_calls(tokenizer: Tokenizer | None) -> bool:
    """Only a template that takes one call and refuses two does not."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return True
    return _takes(tokenizer, _CALL_IDS) or not _takes(tokenizer, _CALL_IDS[:1])


def _takes(tokenizer: Tokenizer, call_ids: tuple[str, ...]) -> bool:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": {"place": "here"}}}
        for call_id in call_ids
    ]
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": "a lake", "name": _NAME, "tool_call_id": call_id} for call_id in call_ids),
    ]
    try:
        tokenizer.render_chat(messages, tools=[_TOOL])
    except InvalidParameter:
        return False
    return True
