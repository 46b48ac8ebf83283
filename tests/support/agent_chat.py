"""A model that thinks and calls tools, for tests of what agents do: what it writes, and how its template asks."""

from __future__ import annotations

from typing import Final

import msgspec

from tests.support.chat_templates import THINKING
from tests.support.scripted_chat import hello_with

AGENT: Final = msgspec.structs.replace(hello_with(THINKING), max_model_len=100_000)

CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
ARGUMENTS: Final = {"b": 2, "a": 1}
THOUGHT: Final = "<think>\nOne and two.\n</think>\n\n"

SCHEMA: Final = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
    "required": ["b", "a"],
}
