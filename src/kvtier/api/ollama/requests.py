"""The bodies of Ollama's API, read into what the engine is asked.

A field of Ollama's that cannot be followed is refused. What Ollama does not know it passes over, and so does this.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from kvtier.api.engines import KnownModel, ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.limits import MAX_MESSAGES
from kvtier.api.ollama.options import sampling_params
from kvtier.api.prompt_length import check_length
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, Hello, Prompt, TextPrompt
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import EngineAway, UnknownModel

LATEST = ":latest"
_THINKING = "enable_thinking"
"""What templates of models that think look at."""

_SHOWN_CHARACTERS = 60
_ROLES = ("system", "user", "assistant")
MAX_DURATION_CHARACTERS = 64
_UNITS = "(?:ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(
    rf"[+-]?(?:(?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++){_UNITS})++|[0-9]++(?:\.[0-9]++)?)"
)  # possessive throughout: no part of it is ever read twice

_REFUSED = {
    "suffix": "is not supported here: an answer follows its prompt",
    "template": "is not supported here: the model's own is used, or none with raw",
    "context": "is not supported here: send the conversation to /api/chat",
    "images": "is not supported here: the models read text",
    "format": "is not supported here: answers are free text",
    "tools": "is not supported here",
    "think": "is not supported here: only false is",
    "truncate": "is not supported here: a prompt that is too long is refused",
    "shift": "is not supported here: an answer ends where the model's context does",
    "tool_calls": "is not supported here",
    "tool_name": "is not supported here",
    "thinking": "is not supported here",
}


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Nothing to answer: Ollama would load or unload the model, which here is there as long as the deployment."""

    name: str
    done_reason: str


def find_model(engines: ModelCatalog, name: str) -> KnownModel:
    """The model of that name, with or without Ollama's ":latest". Raises a `HttpError` with the names there are."""
    for one in (name, name.removesuffix(LATEST), name + LATEST):
        with contextlib.suppress(UnknownModel):
            return engines.find(one)
    shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
    raise HttpError(404, f"model '{shown}' not found; there is {engines.known}", "model_not_found", "model")


def hello_of(model: KnownModel) -> Hello:
    """Raises `EngineAway` while none of the model's engines is there."""
    hello = model.hello
    if hello is None:
        raise EngineAway(f"the model {model.name} is starting")
    return hello


def read_generate(body: JsonBody, engines: ModelCatalog) -> GenerationRequest | LoadModel:
    """Raises a `HttpError` for a body that cannot be served as asked, `EngineAway` while the model is away."""
    text = body.text("prompt") or ""
    system = body.text("system") or ""
    is_raw = body.flag("raw") or False
    if is_raw and system:
        raise body.refuse("raw", "does not go with system")
    _refuse(body, "suffix", "template", "context", "images")
    rest = _read_rest(body, engines)
    if not text:
        return rest.load()
    hello = hello_of(rest.model)
    if is_raw or not hello.chat_template:
        return rest.ask(TextPrompt(f"{system}\n\n{text}" if system else text))
    messages = [ChatMessage("system", system)] if system else []
    return rest.ask(ChatPrompt([*messages, ChatMessage("user", text)], rest.template_values(hello)))


def read_chat(body: JsonBody, engines: ModelCatalog) -> GenerationRequest | LoadModel:
    """As `read_generate`."""
    given = body.items("messages", MAX_MESSAGES) or []
    messages = [_read_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    _refuse(body, "tools")
    rest = _read_rest(body, engines)
    if not messages:
        return rest.load()
    if messages[-1].role == "assistant":
        raise HttpError(400, "messages must not end with the assistant's: it is not continued here", "invalid_value")
    return rest.ask(ChatPrompt(messages, rest.template_values(hello_of(rest.model))))


@dataclass(frozen=True, slots=True)
class _Rest:
    """What both endpoints take."""

    name: str
    model: KnownModel
    options: JsonBody
    logprobs: int | None
    is_streamed: bool
    is_unload: bool
    is_thinking_off: bool

    def load(self) -> LoadModel:
        if self.is_unload:
            return LoadModel(self.name, "unload")
        hello_of(self.model)
        self._params()  # whoever loads a model with options asks with them later
        return LoadModel(self.name, "load")

    def ask(self, prompt: Prompt) -> GenerationRequest:
        check_length(prompt, self.model.hello)
        return GenerationRequest(self.name, self.model, [prompt], self._params(), self.is_streamed)

    def template_values(self, hello: Hello) -> dict[str, object]:
        """Only names that the model's template knows."""
        return {_THINKING: False} if self.is_thinking_off and _THINKING in hello.chat_template else {}

    def _params(self) -> SamplingParams:
        return sampling_params(self.options, self.model.options, logprobs=self.logprobs)


def _read_rest(body: JsonBody, engines: ModelCatalog) -> _Rest:
    name = body.needed_text("model")
    model = find_model(engines, name)
    _refuse(body, "format", "think", "truncate", "shift")
    return _Rest(
        name=name,
        model=model,
        options=body.inner("options") or JsonBody({}),
        logprobs=read_logprobs(body),
        is_streamed=body.flag("stream") is not False,
        is_unload=is_zero_duration(body, "keep_alive"),
        is_thinking_off=body.value("think") is False,
    )


def _refuse(body: JsonBody, *names: str) -> None:
    """What is empty, false or zero asks for nothing: clients send such fields with every request."""
    for name in names:
        if body.value(name):
            raise body.refuse(name, _REFUSED[name])


def _read_message(given: object, path: str) -> ChatMessage:
    if not isinstance(given, dict):
        raise HttpError(400, f"{path} must be an object with role and content", "invalid_type", path)
    body = JsonBody(given, f"{path}.")
    role = body.needed_text("role").lower()
    if role not in _ROLES:
        raise body.wrong("role", "system, user or assistant")
    content = body.text("content") or ""
    _refuse(body, "images", "tool_calls", "tool_name", "thinking")
    body.refuse_rest()
    return ChatMessage(role, content)


def read_logprobs(body: JsonBody) -> int | None:
    num_top = body.whole("top_logprobs") or 0
    if body.flag("logprobs"):
        return num_top
    if num_top:
        raise body.refuse("top_logprobs", "needs logprobs")
    return None


def is_zero_duration(body: JsonBody, name: str) -> bool:
    value = body.value(name)
    if isinstance(value, str):
        if len(value) > MAX_DURATION_CHARACTERS or not _DURATION.fullmatch(value):
            raise body.wrong(name, 'seconds, or a duration such as "5m" or "1h30m"')
        return not any(digit in value for digit in "123456789")
    return body.number(name) == 0
