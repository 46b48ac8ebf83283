"""The formats in which models write tool calls, by name and by chat template."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.api.chat.tool_formats.glm import Glm4Format, GlmFormat
from kvtier.api.chat.tool_formats.hermes import HermesFormat
from kvtier.api.chat.tool_formats.llama import LlamaFormat
from kvtier.api.chat.tool_formats.mistral import MistralArgsFormat, MistralFormat
from kvtier.api.chat.tool_formats.pythonic import PythonicFormat
from kvtier.api.chat.tool_formats.qwen_coder import QwenCoderFormat
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

_FORMATS: tuple[ToolFormat, ...] = (
    GlmFormat(),
    QwenCoderFormat(),
    HermesFormat(),
    MistralArgsFormat(),
    MistralFormat(),
    Glm4Format(),
    PythonicFormat(),
    LlamaFormat(),
)
"""A format whose markers include those of another one is listed before it."""

TOOL_FORMATS: Mapping[str, ToolFormat] = {one.name: one for one in _FORMATS}


def format_in(template: str) -> str:
    """The name of the format in which a chat template writes calls; empty if unknown."""
    return next((one.name for one in _FORMATS if one.is_in(template)), "")
