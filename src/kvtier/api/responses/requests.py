"""Reads bodies of the Responses API into requests for the engine. Fields that change answers are applied or refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.api.chat.conversation import Conversation, ask
from kvtier.api.chat.effort import EFFORTS, THINKS
from kvtier.api.chat.tool_reading import check_tools
from kvtier.api.chat.turns import joined_turns, named_results
from kvtier.api.engines import ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_CONTEXT_EDITS,
    MAX_ID_CHARACTERS,
    MAX_INPUT_ITEMS,
    MAX_OPENAI_TEMPERATURE,
)
from kvtier.api.neutral_fields import Neutral, invalid, refuse_others
from kvtier.api.output_format import read_named_schema
from kvtier.api.prompt_length import check_length
from kvtier.api.request_rules import (
    check_cache_options,
    check_texts,
    read_metadata,
    read_prefix,
    read_verbosity,
    sampling_params,
)
from kvtier.api.responses.items import REFERENCE, read_item
from kvtier.api.responses.record import ResponseRecord, encode_record
from kvtier.api.responses.tools import OfferedTools, read_tool_choice, read_tools
from kvtier.api.retention_fields import read_retention
from kvtier.engine.grammar import JSON_OBJECT, Grammar
from kvtier.engine.process.messages import ChatMessage
from kvtier.engine.sampling_params import MAX_LOGPROBS, SamplingParams

_LOGPROBS, _SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDABLE = (
    *(_LOGPROBS, _SEALED_REASONING, "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
_TEXTS = ("user", "prompt_cache_key", "safety_identifier", "prompt_cache_retention")
_COMPACTION = "compaction"
_NEUTRAL: Neutral = {
    "background": (False,),
    "conversation": (),
    "moderation": (),
    "prompt": (),
}
_NEUTRAL_IN_REASONING: Neutral = {"context": ("auto",), "mode": ("standard",)}
_SUMMARIES = ("auto", "concise", "detailed")


def read_response(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Raises an `HttpError` that names the field, or `UnknownModel`."""
    name = body.needed_text("model")
    model = engines.find(name)
    given = _Given(*_input(body), body.text("instructions"), read_tools(body), _include(body))
    conversation = _conversation(body, given)
    asked = ask(conversation, model)
    values = {**_sampling_values(body, given.include), **asked.sampling, "grammar": asked.grammar}
    names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
    params = sampling_params({"max_tokens": None, **model.options, **values, "n": 1}, names)
    check_length(asked.prompt, model.hello)
    is_streamed = body.flag("stream") or False
    _check_rest(body, is_streamed=is_streamed)
    cache_salt = body.short_text("cache_salt", MAX_CACHE_SALT_CHARACTERS)
    explains = body.flag("explain") or False
    prefix = read_prefix(body)
    retention = read_retention(body)
    record = _record(body, given, params)
    body.refuse_rest()
    return GenerationRequest(
        name=name,
        model=model,
        prompts=[asked.prompt],
        params=params,
        is_streamed=is_streamed,
        cache_salt=cache_salt or "",
        form=asked.form,
        record=encode_record(record),
        session=body.text("prompt_cache_key") or "",
        explains=explains,
        prefix=prefix,
        retention=retention,
        grammar_field="tools" if conversation.output is None else "text.format",
    )


class _Given:
    """The fields of a body that several parts of the request depend on."""

    def __init__(
        self,
        items: Sequence[object],
        fragments: Sequence[ChatMessage],
        instructions: str | None,
        offered: OfferedTools,
        include: Sequence[object],
    ) -> None:
        self.items = items
        self.instructions = instructions
        self.offered = offered
        self.include = include
        self.refers = any(one.role == REFERENCE for one in fragments)
        self.leading = [] if instructions is None else [ChatMessage("system", instructions)]
        self.messages = fragments if self.refers else named_results(joined_turns(fragments))


def _conversation(body: JsonBody, given: _Given) -> Conversation:
    choice, effort = read_tool_choice(body), _effort(body)
    check_tools(given.offered.tools, choice)
    return Conversation(
        messages=[*given.leading, *given.messages],
        tools=given.offered.tools,
        tool_choice=choice,
        allows_several_calls=body.flag("parallel_tool_calls") is not False,
        output=_output(body),
        thinks=THINKS.get(effort),
        effort=None if effort == "none" else effort,
        template_values=read_verbosity(body.inner("text") or JsonBody({})),
    )


def _record(body: JsonBody, given: _Given, params: SamplingParams) -> ResponseRecord:
    previous = body.short_text("previous_response_id", MAX_ID_CHARACTERS) or ""
    results = [(number, one) for number, one in enumerate(given.messages) if one.role == "tool"]
    return ResponseRecord(
        shown={name: _raw(value) for name, value in _shown_fields(body, given, params).items()},
        items=[_raw(item) for item in given.items],
        is_stored=body.flag("store") is not False,
        previous=previous,
        num_instructions=len(given.leading),
        refers=given.refers,
        unnamed=[number for number, one in results if previous and one.name is None],
        seals_reasoning=_SEALED_REASONING in given.include,
        namespaces=given.offered.namespaces,
    )


def _shown_fields(body: JsonBody, given: _Given, params: SamplingParams) -> dict[str, object]:
    """The fields that the response repeats from the request."""
    reasoning, text = body.value("reasoning"), body.value("text")
    return {
        "instructions": given.instructions,
        "max_output_tokens": body.whole("max_output_tokens"),
        "metadata": read_metadata(body),
        "parallel_tool_calls": body.flag("parallel_tool_calls") is not False,
        "previous_response_id": body.value("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort") if isinstance(reasoning, dict) else None, "summary": None},
        "service_tier": "default",
        "store": body.flag("store") is not False,
        "temperature": params.temperature,
        "text": {"format": (text.get("format") if isinstance(text, dict) else None) or {"type": "text"}},
        "tool_choice": body.value("tool_choice") or "auto",
        "tools": given.offered.shown,
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        **{field: body.value(field) for field in _TEXTS},
    }


def _raw(value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (OverflowError, RecursionError) as error:
        raise HttpError(
            400, "the body has a number that is too large, or is nested too deeply", "invalid_value"
        ) from error


def _input(body: JsonBody) -> tuple[list[object], list[ChatMessage]]:
    """The input items, and the same as messages or parts of messages."""
    given = body.value("input")
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "role": "user", "content": content}], [ChatMessage("user", given)]
    if given is None:
        raise HttpError(400, "input is missing", "missing_field", "input")
    if not isinstance(given, list):
        raise body.wrong("input", "text, or a list of items")
    items = body.items("input", MAX_INPUT_ITEMS) or []
    found = [read_item(item, f"input[{index}]") for index, item in enumerate(items)]
    fragments = [one for one in found if one is not None]
    if not fragments:
        raise body.wrong("input", "text, or a list with at least one message")
    return items, fragments


# --- reasoning, output and sampling -----------------------------------------------------------------------------------


def _effort(body: JsonBody) -> str | None:
    reasoning = body.inner("reasoning")
    if reasoning is None:
        return None
    effort = reasoning.text("effort")
    if effort is not None and effort not in EFFORTS:
        raise reasoning.wrong("effort", f"one of {', '.join(EFFORTS)}")
    for name in ("summary", "generate_summary"):
        if (reasoning.text(name) or "auto") not in _SUMMARIES:
            raise reasoning.wrong(name, f"one of {', '.join(_SUMMARIES)}")
    refuse_others(reasoning, _NEUTRAL_IN_REASONING)
    reasoning.refuse_rest()
    return effort


def _output(body: JsonBody) -> Grammar | None:
    text = body.inner("text")
    if text is None:
        return None
    read_verbosity(text)
    form = text.inner("format")
    text.refuse_rest()
    if form is None:
        return None
    kind = form.needed_text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind != "json_schema":
        raise form.wrong("type", "text, json_object or json_schema")
    grammar = read_named_schema(form)
    form.refuse_rest()
    return grammar


def _include(body: JsonBody) -> list[object]:
    include = body.items("include", len(_INCLUDABLE)) or []
    for one in include:
        if one not in _INCLUDABLE:
            raise body.wrong("include", f"a list of {', '.join(_INCLUDABLE)}")
    return include


def _sampling_values(body: JsonBody, include: Sequence[object]) -> dict[str, object]:
    """The sampling values in the body, by the names of `SamplingParams`."""
    temperature = body.number("temperature")
    if (temperature or 0.0) > MAX_OPENAI_TEMPERATURE:
        given = shown(body.value("temperature"))
        raise invalid("temperature", f"temperature must be from 0 to {MAX_OPENAI_TEMPERATURE:g}, not {given}")
    top_logprobs = body.whole("top_logprobs")
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_LOGPROBS:
        raise body.wrong("top_logprobs", f"a whole number from 0 to {MAX_LOGPROBS}")
    values = {
        "temperature": temperature,
        "top_p": body.number("top_p"),
        "max_tokens": body.whole("max_output_tokens"),
        "ignore_eos": body.flag("ignore_eos"),
        "logprobs": (top_logprobs or 0) if top_logprobs or _LOGPROBS in include else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _check_context_management(body: JsonBody) -> None:
    """Compaction applies to long prompts only, and none is applied here: a prompt that is too long is refused."""
    for index, edit in enumerate(body.items("context_management", MAX_CONTEXT_EDITS) or ()):
        path = f"context_management[{index}]"
        if not isinstance(edit, dict) or edit.get("type") != _COMPACTION:
            raise invalid(path, f"{path} must be an object of the type {_COMPACTION}, not {shown(edit)}")


def _check_rest(body: JsonBody, *, is_streamed: bool) -> None:
    """Check the fields that have no effect here with the values that are accepted."""
    check_texts(body, *_TEXTS)
    body.whole("max_tool_calls")  # limits tools that the server runs: there are none
    check_cache_options(body)
    check_texts(body, "service_tier")
    body.inner("image")  # options for the images of a prompt: there are none
    body.inner("access_programs")
    body.inner("client_metadata")  # Codex's ids of its session
    _check_context_management(body)
    if (body.text("truncation") or "auto") not in ("auto", "disabled"):
        raise body.wrong("truncation", "auto or disabled")
    options = body.inner("stream_options")
    if options is not None:
        if not is_streamed:
            raise invalid("stream_options", "stream_options needs stream to be true")
        options.flag("include_obfuscation")  # padding
        options.refuse_rest()
    refuse_others(body, _NEUTRAL)
