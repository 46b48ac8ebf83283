"""What a model's chat template tells of the model: how it calls tools, whether it thinks, which values it looks at."""

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
    """`tool_format` is empty where the way in which calls are written is not known. `words` are all in the template."""

    tool_format: str
    has_tools: bool
    has_thoughts: bool
    words: frozenset[str]

    def thinking_values(self, thinks: bool | None, effort: str | None) -> dict[str, object]:
        """Values for the names that the template has for them."""
        values: dict[str, object] = {}
        if thinks is not None:
            values |= {name: thinks for name in _THINKING_SWITCHES if name in self.words}
        if effort is not None and _EFFORT in self.words:
            values[_EFFORT] = effort
        return values

    def is_thinking_off(self, values: Mapping[str, object]) -> bool:
        """Whether these values, of which one is a switch that the template has, turn thinking off."""
        return any(values.get(name) is False for name in _THINKING_SWITCHES if name in self.words)


@functools.lru_cache(maxsize=64)
def marks_of(template: str) -> TemplateMarks:
    words = frozenset(_WORD.findall(template))
    has_thoughts = THOUGHT_BEGIN in template or THOUGHT_END in template
    return TemplateMarks(format_in(template), "tools" in words, has_thoughts, words)
