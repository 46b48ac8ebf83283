"""What a chat template tells about its model: the format of its tool calls, whether it reasons, its variables."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.api.chat.tool_formats import format_in
from kvtier.engine.thinking_marks import THOUGHT_BEGIN, THOUGHT_END

_WORD = re.compile(r"\w+")
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class TemplateMarks:
    """`tool_format` is empty if the format of calls is unknown. `words` are all words of the template."""

    tool_format: str
    has_tools: bool
    has_thoughts: bool
    words: frozenset[str]

    def thinking_values(self, thinks: bool | None, effort: str | None) -> dict[str, object]:
        """Values for the template's variables for thinking and effort."""
        values: dict[str, object] = {}
        if thinks is not None:
            values |= {name: thinks for name in _THINKING_SWITCHES if name in self.words}
        if effort is not None and _EFFORT in self.words:
            values[_EFFORT] = effort
        return values

    def is_thinking_off(self, values: Mapping[str, object]) -> bool:
        """Whether one of these values is a switch of the template and turns thinking off."""
        return any(values.get(name) is False for name in _THINKING_SWITCHES if name in self.words)


@functools.lru_cache(maxsize=64)
def marks_of(template: str) -> TemplateMarks:
    words = frozenset(_WORD.findall(template))
    has_thoughts = THOUGHT_BEGIN in template or THOUGHT_END in template
    return TemplateMarks(format_in(template), "tools" in words, has_thoughts, words)
