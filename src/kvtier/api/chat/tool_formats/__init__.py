"""The ways in which models write calls of tools, by name and by the chat templates that have them."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.api.chat.tool_formats.glm import Glm4Format, GlmFormat
from kvtier.api.chat.tool_formats.hermes import HermesFormat
from kvtier.api.chat.tool_formats.llama import LlamaFormat
from kvtier.api.chat.tool_formats.mistral import MistralArgsFormat, MistralFormat
from kvtier.api.chat.tool_formats.qwen_coder import QwenCoderFormat
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

_FORMATS: tuple[ToolFormat, ...] = (
    GlmFormat(),
    QwenCoderFormat(),
    HermesFormat(),
    MistralArgsFormat(),
    MistralFormat(),
    Glm4Format(),
    LlamaFormat(),
)
"""Those with more marks before those that have some of them."""

TOOL_FORMATS: Mapping[str, ToolFormat] = {one.name: one for one in _FORMATS}


def format_in(template: str) -> str:
    """The name of the format that a chat template writes calls in; empty if none is known."""
    return next((one.name for one in _FORMATS if one.is_in(template)), "")
