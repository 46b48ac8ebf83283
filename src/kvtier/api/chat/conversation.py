"""A conversation from the body of any chat API, and its translation to a request for an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import structs

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.call_grammar import AnswerRules
from kvtier.api.chat.template_marks import TemplateMarks, marks_of
from kvtier.api.chat.tool import FUNCTION, properties_of, types_of
from kvtier.api.chat.tool import Tool as Tool
from kvtier.api.chat.tool_formats import TOOL_FORMATS
from kvtier.api.chat.tool_formats.tool_format import ToolFormat
from kvtier.api.config import AUTO, THINK
from kvtier.api.engines import KnownModel
from kvtier.api.http_error import HttpError
from kvtier.engine.grammar import Grammar
from kvtier.engine.process.messages import ChatMessage, ChatPrompt
from kvtier.engine.thinking_marks import THOUGHT_BEGIN, THOUGHT_END
from kvtier.errors import EngineAway


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called: the model decides, never, at least one, or the one of this `name`.

    If only some are `allowed`, all tools stay in the prompt, which does not change, but the others cannot be called.
    """

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, tools and options of a request. `output` is the grammar of the answer's text.

    `thinks` is None if the model decides whether to reason; `effort` is OpenAI's reasoning effort. `template_values`
    are the client's variables for the chat template, which override those derived from the other fields. Without
    `shows_reasoning` the answer contains no reasoning.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    allows_several_calls: bool = True
    output: Grammar | None = None
    thinks: bool | None = None
    effort: str | None = None
    template_values: Mapping[str, object] = field(default_factory=dict)
    shows_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation for an engine: the prompt, the grammar of the answer, and how the answer is read."""

    prompt: ChatPrompt
    grammar: Grammar | None
    form: AnswerForm
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Further values of `SamplingParams` that reading the answer needs, such as special tokens in its text."""


def ask(conversation: Conversation, model: KnownModel) -> ChatRequest:
    """Raises `HttpError` for features that the model lacks, such as tools if its chat template has none."""
    marks = _marks(model, has_tools=bool(conversation.tools))
    special_tokens = {} if model.hello is None else model.hello.special_tokens
    has_tools = bool(conversation.tools) and conversation.tool_choice.kind != "none"
    tool_format = _tool_format(model, marks) if has_tools else None
    values = {**marks.thinking_values(conversation.thinks, conversation.effort), **conversation.template_values}
    splits_reasoning = can_think(model)
    tools_to_call = _callable(conversation)
    allows_several = conversation.allows_several_calls and (model.hello is None or model.hello.takes_several_calls)
    rules = AnswerRules(
        tool_format=tool_format,
        tools=tools_to_call,
        must_call=has_tools and conversation.tool_choice.kind in ("required", "named"),
        allows_several=allows_several and conversation.tool_choice.kind != "named",
        output=conversation.output,
        special_tokens=special_tokens,
        forbids_others=len(tools_to_call) < len(conversation.tools),
    )
    may_think = splits_reasoning and not marks.is_thinking_off(values)
    tools = [tool.document for tool in conversation.tools] if marks.has_tools else []
    prompt = ChatPrompt(
        _with_short_ids(conversation.messages, TOOL_FORMATS.get(_format_name(model, marks))),
        values,
        tools,
        _num_characters(tools),
        rules.grammar_in_thought() if may_think else None,
    )
    form = _form(conversation, tool_format, allows_several=allows_several, splits_reasoning=splits_reasoning)
    kept = [mark for mark in _markers(tool_format, form) if mark in special_tokens]
    sampling = {"kept_special_tokens": tuple(kept)} if kept else {}
    return ChatRequest(prompt, rules.grammar(may_think=may_think), form, sampling)


def can_call(model: KnownModel) -> bool:
    """Whether the model supports tool calls."""
    marks = _marks(model, has_tools=True)
    return marks.has_tools and bool(_format_name(model, marks))


def can_think(model: KnownModel) -> bool:
    """Whether the model writes reasoning before its answer."""
    if model.reasoning_format != AUTO:
        return model.reasoning_format == THINK
    return _marks(model, has_tools=False).has_thoughts


def _marks(model: KnownModel, *, has_tools: bool) -> TemplateMarks:
    """The marks of the template that is used; none while no engine of the model has connected."""
    if model.hello is None:
        return marks_of("")
    return marks_of((has_tools and model.hello.tool_template) or model.hello.chat_template)


def _format_name(model: KnownModel, marks: TemplateMarks) -> str:
    """The name of the model's format for calls; empty if unknown."""
    return marks.tool_format if model.tool_format == AUTO else model.tool_format


def _tool_format(model: KnownModel, marks: TemplateMarks) -> ToolFormat:
    """Raises `HttpError` for a model without tool calls, and `EngineAway` while none of its engines has connected."""
    if model.hello is None:
        raise EngineAway(f"the model {model.name} is starting")
    if not marks.has_tools:
        sentence = f"tools are not supported by {model.name}: its chat template does not use them"
        raise HttpError(400, sentence, "unsupported_parameter", "tools")
    name = _format_name(model, marks)
    if not name:
        sentence = f"tools are not supported by {model.name}: its chat template writes calls in an unknown format"
        raise HttpError(400, f"{sentence}; set tool_format in the deployment", "unsupported_parameter", "tools")
    return TOOL_FORMATS[name]


def _callable(conversation: Conversation) -> Sequence[Tool]:
    choice = conversation.tool_choice
    if choice.kind == "named":
        return [tool for tool in conversation.tools if tool.name == choice.name]
    if choice.allowed:
        return [tool for tool in conversation.tools if tool.name in choice.allowed]
    return conversation.tools


def _form(
    conversation: Conversation, tool_format: ToolFormat | None, *, allows_several: bool, splits_reasoning: bool
) -> AnswerForm:
    if tool_format is None:
        return AnswerForm(splits_reasoning=splits_reasoning, shows_reasoning=conversation.shows_reasoning)
    tools = conversation.tools
    types = {tool.name: _parameter_types(tool) for tool in tools} if tool_format.needs_types else {}
    return AnswerForm(
        tool_format.name,
        tuple(tool.name for tool in tools),
        allows_several,
        splits_reasoning,
        conversation.shows_reasoning,
        types,
        {tool.name: tool.kind for tool in tools if tool.kind != FUNCTION},
    )


def _parameter_types(tool: Tool) -> dict[str, list[str]]:
    return {name: types_of(schema) for name, schema in properties_of(tool.parameters).items()}


def _markers(tool_format: ToolFormat | None, form: AnswerForm) -> tuple[str, ...]:
    marks = () if tool_format is None else tool_format.marks
    return (*marks, THOUGHT_BEGIN, THOUGHT_END) if form.splits_reasoning else marks


def _with_short_ids(messages: Sequence[ChatMessage], tool_format: ToolFormat | None) -> list[ChatMessage]:
    """Shorten the ids of other models' calls, which some templates refuse; an id always gets the same short form."""
    length = 0 if tool_format is None else tool_format.id_characters
    if not length:
        return list(messages)

    def short(call_id: str) -> str:
        is_right = len(call_id) == length and call_id.isascii() and call_id.isalnum()
        return call_id if is_right else hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:length]

    return [
        structs.replace(
            message,
            tool_calls=[structs.replace(call, call_id=short(call.call_id)) for call in message.tool_calls],
            call_id=None if message.call_id is None else short(message.call_id),
        )
        if message.tool_calls or message.call_id is not None
        else message
        for message in messages
    ]


def _num_characters(tools: Sequence[Mapping[str, object]]) -> int:
    return len(msgspec.json.encode(tools)) if tools else 0
