"""Reads bodies of Anthropic's API into requests for the engine. Fields that change an answer are applied or refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvtier.api.anthropic.blocks import CacheMark, Marks, read_messages, read_system
from kvtier.api.anthropic.context_edits import read_context_edits
from kvtier.api.anthropic.tools import read_tool_choice, read_tools
from kvtier.api.chat.conversation import ChatRequest, Conversation, ask
from kvtier.api.chat.tool_reading import check_tools
from kvtier.api.chat.turns import joined_turns
from kvtier.api.engines import KnownModel, ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.limits import MAX_CACHE_SALT_CHARACTERS
from kvtier.api.neutral_fields import Neutral, invalid, refuse_others
from kvtier.api.output_format import read_schema
from kvtier.api.prompt_length import check_length
from kvtier.api.request_rules import check_texts, read_prefix, sampling_params
from kvtier.api.retention import RetentionWish
from kvtier.api.retention_fields import read_priority
from kvtier.engine.grammar import Grammar
from kvtier.engine.sampling_params import MAX_STOP_STRINGS, MAX_TOKENS, SamplingParams

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_MAX_TEMPERATURE = 1.0
_NEUTRAL: Neutral = {
    "container": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard", "fast"),
}
_IGNORED_IN_COUNTS = (
    "diagnostics",
    "max_tokens",
    "metadata",
    "stop_sequences",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "explain",
)
"""Fields without influence on the prompt: clients count tokens with the body that they are going to send."""
_DISPLAYS = ("summarized", "omitted")
NO_THREADS = "thread_unsupported_request"
"""The code of the refusal of a conversation that the server should keep."""


class MessageRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What encoding an answer needs from the body: the client's stop sequences, and whether thinking is hidden.

    `marks` are the body's cache marks. With `manages_context` the answer lists the applied edits of the prompt.
    """

    stops: tuple[str, ...] = ()
    hides_thinking: bool = False
    marks: list[CacheMark] = []
    manages_context: bool = False


_records = msgspec.msgpack.Decoder(MessageRecord)


def decode_record(encoded: bytes) -> MessageRecord:
    return _records.decode(encoded)


@dataclass(frozen=True, slots=True)
class _Thinking:
    """The body's `thinking` field; `thinks` is None if the model decides."""

    thinks: bool | None = None
    is_hidden: bool = False


def read_message(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Raises an `HttpError` that names the field, or `UnknownModel`."""
    name, model, marks = body.needed_text("model"), engines.find(body.needed_text("model")), Marks()
    max_tokens = body.whole("max_tokens")
    if max_tokens is None:
        raise HttpError(400, "max_tokens is missing", "missing_field", "max_tokens")
    thinking = _thinking(body)
    conversation = _conversation(body, marks, thinking)
    if conversation.messages[-1].role == "assistant":
        raise invalid("messages", "messages must not end with an assistant message: it cannot be continued")
    asked, stops = ask(conversation, model), _stops(body)
    values = {**_sampling_values(body), "max_tokens": max_tokens, "stop": stops, "n": 1, **asked.sampling}
    params = sampling_params({**model.options, **values, "grammar": asked.grammar}, {"stop": "stop_sequences"})
    is_streamed = body.flag("stream") or False
    metadata = body.inner("metadata") or JsonBody({})
    check_texts(metadata, "user_id")
    session, explains = metadata.text("user_id") or "", body.flag("explain") or False
    check_texts(body, "inference_geo", "user_profile_id", "workspace_id")
    check_texts(body.inner("diagnostics") or JsonBody({}), "previous_message_id")
    num_system = len(conversation.messages) - len(joined_turns(marks.fragments))
    retention = RetentionWish(marks.parts(num_system), read_priority(body))
    record = MessageRecord(stops, thinking.is_hidden, marks.found, read_context_edits(body))
    request = _request(body, (name, model), asked, params, is_streamed=is_streamed, record=record)
    return replace(request, session=session, explains=explains, retention=retention)


def read_count(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Read a prompt whose tokens are only counted. Raises as `read_message`."""
    name, model, marks = body.needed_text("model"), engines.find(body.needed_text("model")), Marks()
    asked = ask(_conversation(body, marks, _thinking(body)), model)
    check_texts(body, "user_profile_id", "workspace_id", "inference_geo")
    read_context_edits(body)
    for field in _IGNORED_IN_COUNTS:
        body.value(field)
    return _request(body, (name, model), asked, SamplingParams(), is_streamed=False, record=MessageRecord())


def _request(
    body: JsonBody,
    named: tuple[str, KnownModel],
    asked: ChatRequest,
    params: SamplingParams,
    *,
    is_streamed: bool,
    record: MessageRecord,
) -> GenerationRequest:
    """Read the fields that both bodies have, and check that no field is left unread."""
    name, model = named
    check_length(asked.prompt, model.hello)
    cache_salt = body.short_text("cache_salt", MAX_CACHE_SALT_CHARACTERS)
    if body.value("thread") is not None:
        raise HttpError(400, "thread is not supported here: send the whole conversation", NO_THREADS, "thread")
    prefix = read_prefix(body)
    refuse_others(body, _NEUTRAL)
    body.refuse_rest()
    return GenerationRequest(
        name=name,
        model=model,
        prompts=[asked.prompt],
        params=params,
        is_streamed=is_streamed,
        cache_salt=cache_salt or "",
        form=asked.form,
        record=msgspec.msgpack.encode(record),
        prefix=prefix,
    )


def _conversation(body: JsonBody, marks: Marks, thinking: _Thinking) -> Conversation:
    tools = read_tools(body, marks)
    choice, allows_several = read_tool_choice(body)
    check_tools(tools, choice)
    system, messages = read_system(body, marks), read_messages(body, marks)
    effort, output = _output(body)
    marks.note(body, "all")
    return Conversation(
        messages=[*system, *messages],
        tools=tools,
        tool_choice=choice,
        allows_several_calls=allows_several,
        output=output,
        thinks=thinking.thinks,
        effort=effort,
    )


# --- thinking, output and sampling ------------------------------------------------------------------------------------


def _thinking(body: JsonBody) -> _Thinking:
    given = body.inner("thinking")
    if given is None:
        return _Thinking()
    kind, display = given.needed_text("type"), given.text("display")
    kinds: dict[str, bool | None] = {"enabled": True, "disabled": False, "adaptive": None}
    if kind not in kinds:
        raise given.wrong("type", f"one of {', '.join(kinds)}")
    if display is not None and display not in _DISPLAYS:
        raise given.wrong("display", f"one of {', '.join(_DISPLAYS)}")
    budget = given.whole("budget_tokens")
    if budget is not None and not 1 <= budget <= MAX_TOKENS:
        raise given.wrong("budget_tokens", f"a whole number from 1 to {MAX_TOKENS}")
    given.refuse_rest()
    return _Thinking(kinds[kind], is_hidden=display == "omitted")


def _output(body: JsonBody) -> tuple[str | None, Grammar | None]:
    """The reasoning effort, and the grammar of the answer."""
    config = body.inner("output_config")
    effort, form = None, body.inner("output_format")
    if config is not None:
        effort = config.text("effort")
        if effort is not None and effort not in _EFFORTS:
            raise config.wrong("effort", f"one of {', '.join(_EFFORTS)}")
        form = config.inner("format") or form
        config.refuse_rest()
    if form is None:
        return effort, None
    if form.needed_text("type") != "json_schema":
        raise form.wrong("type", "json_schema")
    grammar = read_schema(form, "schema")
    form.refuse_rest()
    return effort, grammar


def _stops(body: JsonBody) -> tuple[str, ...]:
    strings = body.items("stop_sequences", MAX_STOP_STRINGS) or []
    if not all(isinstance(one, str) and one for one in strings):
        raise body.wrong("stop_sequences", "a list of texts, none of them empty")
    return tuple(one for one in strings if isinstance(one, str))


def _sampling_values(body: JsonBody) -> dict[str, Any]:
    """The sampling values in the body, by the names of `SamplingParams`."""
    temperature = body.number("temperature")
    if temperature is not None and not 0.0 <= temperature <= _MAX_TEMPERATURE:
        raise body.wrong("temperature", f"a number from 0 to {_MAX_TEMPERATURE:g}")
    values = {"temperature": temperature, "top_p": body.number("top_p"), "top_k": body.whole("top_k")}
    return {name: value for name, value in values.items() if value is not None}
