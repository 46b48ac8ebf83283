"""Reads bodies of Ollama's API into requests for the engine.

A field of Ollama's API that is not supported here is refused. Fields that Ollama does not know are ignored, as there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.chat.conversation import Conversation, Tool, ToolChoice, ask, can_think
from kvtier.api.chat.inner_json import read_call, read_wrapped_tool
from kvtier.api.chat.tool_reading import check_tools
from kvtier.api.chat.turns import paired_results
from kvtier.api.engines import KnownModel, ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.limits import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from kvtier.api.ollama.options import sampling_params
from kvtier.api.output_format import read_ollama_format
from kvtier.api.prompt_length import check_length
from kvtier.api.request_rules import read_prefix
from kvtier.api.retention import DECLINED, NO_WISH, RetentionWish
from kvtier.blocks.retention import MAX_TTL_S
from kvtier.engine.grammar import Grammar
from kvtier.engine.process.messages import ChatMessage, EngineHello, Prompt, TextPrompt, ToolCall
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import EngineAway, UnknownModel

LATEST = ":latest"
_SHOWN_CHARACTERS = 60
_ROLES = ("system", "user", "assistant", "tool")
_EFFORTS = ("low", "medium", "high")
MAX_DURATION_CHARACTERS = 64
_UNITS = "(?:ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:(?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++){_UNITS})+|[0-9]++(?:\.[0-9]++)?)")
_PART = re.compile(rf"([0-9]++(?:\.[0-9]*+)?|\.[0-9]++)({_UNITS})?")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_S = 1.0

_REFUSED = {
    "template": "is not supported here: the model's own template is used, or none with raw",
    "context": "is not supported here: send the conversation to /api/chat",
    "images": "is not supported here: the models read text only",
    "truncate": "is not supported here: a prompt that is too long is refused",
    "shift": "is not supported here: an answer ends at the model's context length",
}


@dataclass(frozen=True, slots=True)
class LoadModel:
    """A request without a prompt: Ollama would load or unload the model; here models stay loaded."""

    name: str
    done_reason: str


def find_model(engines: ModelCatalog, name: str) -> KnownModel:
    """The model of that name, with or without Ollama's ":latest". Raises an `HttpError` that lists the models."""
    for one in (name, name.removesuffix(LATEST), name + LATEST):
        with contextlib.suppress(UnknownModel):
            return engines.find(one)
    shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
    raise HttpError(404, f"model '{shown}' not found; available: {engines.known}", "model_not_found", "model")


def hello_of(model: KnownModel) -> EngineHello:
    """Raises `EngineAway` while none of the model's engines has connected."""
    hello = model.hello
    if hello is None:
        raise EngineAway(f"the model {model.name} is starting")
    return hello


def read_generate(body: JsonBody, engines: ModelCatalog) -> GenerationRequest | LoadModel:
    """Raises `HttpError` for a body that cannot be served, and `EngineAway` while the model's engines are away."""
    text = body.text("prompt") or ""
    system = body.text("system") or ""
    is_raw = body.flag("raw") or False
    if is_raw and system:
        raise body.refuse("raw", "cannot be combined with system")
    suffix = body.text("suffix") or ""
    if suffix and system:
        raise body.refuse("suffix", "cannot be combined with system")
    _refuse(body, "template", "context", "images")
    fields = _read_common(body, engines)
    if not text and not suffix:
        return fields.load()
    hello = hello_of(fields.model)
    if suffix:
        return fields.text_request(TextPrompt(text, suffix=suffix))
    if is_raw or not hello.chat_template:
        return fields.text_request(TextPrompt(f"{system}\n\n{text}" if system else text))
    messages = [ChatMessage("system", system)] if system else []
    return fields.chat_request([*messages, ChatMessage("user", text)])


def read_chat(body: JsonBody, engines: ModelCatalog) -> GenerationRequest | LoadModel:
    """Raises as `read_generate`."""
    given = body.items("messages", MAX_MESSAGES) or []
    messages = paired_results([_read_message(message, f"messages[{index}]") for index, message in enumerate(given)])
    tools = _read_tools(body)
    fields = _read_common(body, engines)
    if not messages:
        return fields.load()
    if messages[-1].role == "assistant":
        raise HttpError(400, "messages must not end with an assistant message: it cannot be continued", "invalid_value")
    hello_of(fields.model)
    return fields.chat_request(messages, tools)


@dataclass(frozen=True, slots=True)
class _CommonFields:
    """The fields that both endpoints have."""

    name: str
    model: KnownModel
    options: JsonBody
    logprobs: int | None
    is_streamed: bool
    is_unload: bool
    thinks: bool | None
    effort: str | None
    output: Grammar | None
    retention: RetentionWish
    explains: bool
    prefix: str

    def load(self) -> LoadModel:
        if self.is_unload:
            return LoadModel(self.name, "unload")
        hello_of(self.model)
        self._params({})  # checked now: a client that loads a model with options sends them again later
        return LoadModel(self.name, "load")

    def text_request(self, prompt: TextPrompt) -> GenerationRequest:
        return self._request(prompt, PLAIN, {"grammar": self.output})

    def chat_request(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> GenerationRequest:
        if self.thinks and not can_think(self.model):
            raise HttpError(400, f"think is not supported by {self.model.name}", "unsupported_parameter", "think")
        asked = ask(
            Conversation(
                messages,
                tools,
                output=self.output,
                thinks=self.thinks,
                effort=self.effort,
                shows_reasoning=self.thinks is not False,
            ),
            self.model,
        )
        return self._request(asked.prompt, asked.form, {**asked.sampling, "grammar": asked.grammar})

    def _request(self, prompt: Prompt, form: AnswerForm, sampling: Mapping[str, object]) -> GenerationRequest:
        check_length(prompt, self.model.hello)
        params = self._params(sampling)
        return GenerationRequest(
            self.name,
            self.model,
            [prompt],
            params,
            self.is_streamed,
            form=form,
            explains=self.explains,
            prefix=self.prefix,
            retention=self.retention,
        )

    def _params(self, sampling: Mapping[str, object]) -> SamplingParams:
        return sampling_params(self.options, {**self.model.options, **sampling}, logprobs=self.logprobs)


def _read_common(body: JsonBody, engines: ModelCatalog) -> _CommonFields:
    name = body.needed_text("model")
    model = find_model(engines, name)
    _refuse(body, "truncate", "shift")
    think = _read_think(body)
    return _CommonFields(
        name=name,
        model=model,
        options=body.inner("options") or JsonBody({}),
        logprobs=read_logprobs(body),
        is_streamed=body.flag("stream") is not False,
        is_unload=is_zero_duration(body, "keep_alive"),
        thinks=None if think is None else think is not False,
        effort=think if isinstance(think, str) else None,
        output=read_ollama_format(body),
        retention=_read_keep_alive(body),
        explains=body.flag("explain") or False,
        prefix=read_prefix(body),
    )


def _read_think(body: JsonBody) -> bool | str | None:
    think = body.value("think")
    if think is None or isinstance(think, bool) or think in _EFFORTS:
        return think
    raise body.wrong("think", f"true, false, or one of {', '.join(_EFFORTS)}")


def _read_tools(body: JsonBody) -> list[Tool]:
    tools = []
    for index, given in enumerate(body.items("tools", MAX_TOOLS) or ()):
        if not isinstance(given, dict):
            raise HttpError(400, f"tools[{index}] must be an object", "invalid_type", f"tools[{index}]")
        tools.append(read_wrapped_tool(JsonBody(given, f"tools[{index}]."), given))
    check_tools(tools, ToolChoice())
    return tools


def _refuse(body: JsonBody, *names: str) -> None:
    """Refuse fields with a value. Empty, false and zero ask for nothing: clients send them with every request."""
    for name in names:
        if body.value(name):
            raise body.refuse(name, _REFUSED[name])


def _read_message(given: object, path: str) -> ChatMessage:
    if not isinstance(given, dict):
        raise HttpError(400, f"{path} must be an object with role and content", "invalid_type", path)
    body = JsonBody(given, f"{path}.")
    role = body.needed_text("role").lower()
    if role not in _ROLES:
        raise body.wrong("role", "system, user, assistant or tool")
    content = body.text("content") or ""
    thinking, tool, call_id = body.text("thinking"), body.text("tool_name"), body.text("tool_call_id")
    calls, num_characters = _read_calls(body, path)
    _refuse(body, "images")
    if role == "assistant":
        return ChatMessage(role, content, None, thinking or None, calls, None, num_characters)
    if role == "tool":
        return ChatMessage(role, content, tool or None, call_id=call_id)
    return ChatMessage(role, content)


def _read_calls(body: JsonBody, path: str) -> tuple[list[ToolCall], int]:
    calls, num_characters = [], 0
    for index, given in enumerate(body.items("tool_calls", MAX_CALLS) or ()):
        place = f"{path}.tool_calls[{index}]"
        if not isinstance(given, dict):
            raise HttpError(400, f"{place} must be an object", "invalid_type", place)
        call, count = read_call(JsonBody(given, f"{place}."))
        calls.append(call)
        num_characters += count + len(call.name)
    return calls, num_characters


def read_logprobs(body: JsonBody) -> int | None:
    num_top = body.whole("top_logprobs") or 0
    if body.flag("logprobs"):
        return num_top
    if num_top:
        raise body.refuse("top_logprobs", "needs logprobs")
    return None


def _read_keep_alive(body: JsonBody) -> RetentionWish:
    """Keep the prompt for as long as Ollama would keep the model; a negative duration means the longest possible."""
    if not body.has("keep_alive"):
        return NO_WISH
    if is_zero_duration(body, "keep_alive"):
        return DECLINED
    value = body.value("keep_alive")
    seconds = _seconds(value) if isinstance(value, str) else body.number("keep_alive") or 0.0
    return RetentionWish([(MAX_TTL_S if seconds < 0 else min(max(seconds, _LEAST_S), MAX_TTL_S), None)])


def _seconds(duration: str) -> float:
    """The seconds of a text that matches `_DURATION`."""
    sign = -1.0 if duration.startswith("-") else 1.0
    parts = _PART.findall(duration)
    return sign * sum(float(number) * _UNITS_S[unit or "s"] for number, unit in parts)


def is_zero_duration(body: JsonBody, name: str) -> bool:
    value = body.value(name)
    if isinstance(value, str):
        if len(value) > MAX_DURATION_CHARACTERS or not _DURATION.fullmatch(value):
            raise body.wrong(name, 'seconds, or a duration such as "5m" or "1h30m"')
        return not any(digit in value for digit in "123456789")
    return body.number(name) == 0
