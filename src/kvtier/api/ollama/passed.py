"""Translates bodies of Ollama's API to vLLM's, for models that vLLM runs. Fields that would be ignored are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.api.body_messages import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    BodyLoads,
    BodyPasses,
    ModelSnapshot,
)
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, decode_body
from kvtier.api.limits import MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS
from kvtier.api.ollama.options import given_options
from kvtier.api.ollama.requests import LATEST, is_zero_duration, read_logprobs
from kvtier.api.vllm.bodies import ReadForVllm, SaltOf, find_vllm, pass_on, read_fields

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
EMBEDDINGS_PATH = "/v1/embeddings"

_ROLES = ("system", "user", "assistant", "tool")
_EFFORTS = ("low", "medium", "high")
_IMAGE_KINDS = {"/9j/": "jpeg", "iVBOR": "png", "R0lG": "gif", "UklG": "webp"}
"""Image types by the beginning of their base64."""

_REFUSED = {
    "suffix": "is not supported here for models that run on vLLM",
    "template": "is not supported here: the model's own template is used, or none with raw",
    "context": "is not supported here: send the conversation to /api/chat",
    "shift": "is not supported here: an answer ends at the model's context length",
}

_Document = dict[str, object]
_Read = Callable[[JsonBody], tuple[str, _Document] | None]
"""The path at vLLM and the body for it; None if the request only loads the model."""


def _read_chat(body: JsonBody) -> tuple[str, _Document] | None:
    given = body.items("messages", MAX_MESSAGES) or []
    pending: list[str] = []
    messages = [_message(one, f"messages[{index}]", pending) for index, one in enumerate(given)]
    document = _common(body)
    tools = body.items("tools", MAX_PARTS)
    if tools:
        document["tools"] = tools
    return (CHAT_PATH, {"messages": messages, **document}) if messages else None


def _read_generate(body: JsonBody) -> tuple[str, _Document] | None:
    text, system, is_raw = body.text("prompt") or "", body.text("system") or "", body.flag("raw") or False
    images = body.items("images", MAX_PARTS) or []
    for name in ("suffix", "template", "context"):
        if body.value(name):
            raise body.refuse(name, _REFUSED[name])
    if is_raw and (system or images):
        raise body.refuse("raw", "cannot be combined with system or images")
    document = _common(body)
    if not text and not images:
        return None
    if is_raw:
        if "top_logprobs" in document or "logprobs" in document:
            document["logprobs"] = document.pop("top_logprobs", 0)
        document.pop("chat_template_kwargs", None)
        return COMPLETION_PATH, {"prompt": text, **document}
    messages: list[_Document] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": _content(text, images, "images")})
    return CHAT_PATH, {"messages": messages, **document}


def _read_embed(body: JsonBody) -> tuple[str, _Document] | None:
    given = body.value("input")
    if isinstance(given, list):
        texts = body.items("input", MAX_PROMPTS) or []
        if not all(isinstance(one, str) for one in texts):
            raise body.wrong("input", "a text or a list of texts")
    elif not isinstance(given, str):
        raise body.wrong("input", "a text or a list of texts")
    document: _Document = {"input": given, "encoding_format": "float"}
    dimensions = body.whole("dimensions")
    if dimensions:
        document["dimensions"] = dimensions
    if body.flag("truncate") is not False:
        document["truncate_prompt_tokens"] = -1
    _check_without_effect(body)
    return EMBEDDINGS_PATH, document


def _read_embeddings(body: JsonBody) -> tuple[str, _Document] | None:
    document = {"input": body.needed_text("prompt"), "encoding_format": "float", "truncate_prompt_tokens": -1}
    _check_without_effect(body)
    return EMBEDDINGS_PATH, document


def _check_without_effect(body: JsonBody) -> None:
    is_zero_duration(body, "keep_alive")
    given_options(body.inner("options") or JsonBody({}))


def _common(body: JsonBody) -> _Document:
    """The fields that chats and prompts have in common."""
    if body.value("shift"):
        raise body.refuse("shift", _REFUSED["shift"])
    body.flag("truncate")
    document: _Document = given_options(body.inner("options") or JsonBody({}))
    logprobs = read_logprobs(body)
    if logprobs is not None:
        document |= {"logprobs": True, **({"top_logprobs": logprobs} if logprobs else {})}
    answer_format = body.value("format")
    if answer_format == "json":
        document["response_format"] = {"type": "json_object"}
    elif isinstance(answer_format, dict) and answer_format:
        schema = {"name": "answer", "schema": answer_format}
        document["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif answer_format:
        raise body.wrong("format", '"json" or a schema')
    think = body.value("think")
    if isinstance(think, bool):
        document["chat_template_kwargs"] = {"enable_thinking": think}
    elif think in _EFFORTS:
        document["reasoning_effort"] = think
    elif think is not None:
        raise body.wrong("think", "true, false, low, medium or high")
    if body.flag("stream") is not False:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    return document


def _message(given: object, path: str, pending: list[str]) -> _Document:
    """`pending` has the ids of tool calls without a result so far: in Ollama's API results need not have ids."""
    if not isinstance(given, dict):
        raise HttpError(400, f"{path} must be an object with role and content", "invalid_type", path)
    body = JsonBody(given, f"{path}.")
    role = body.needed_text("role").lower()
    if role not in _ROLES:
        raise body.wrong("role", "system, user, assistant or tool")
    images = body.items("images", MAX_PARTS) or []
    message: _Document = {"role": role, "content": _content(body.text("content") or "", images, f"{path}.images")}
    thinking = body.text("thinking")
    if thinking:
        message["reasoning"] = thinking
    name = body.text("tool_name") or body.text("name")
    if role == "tool":
        given_id = body.text("tool_call_id")
        message["tool_call_id"] = given_id or (pending.pop(0) if pending else "call_0")
        if name:
            message["name"] = name
    calls = body.items("tool_calls", MAX_PARTS)
    if calls:
        message["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{index}]", pending) for index, call in enumerate(calls)
        ]
    return message


def _tool_call(given: object, path: str, pending: list[str]) -> _Document:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise HttpError(400, f"{path} must be an object with a function that has a name", "invalid_type", path)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    number = given.get("id") if isinstance(given.get("id"), str) else f"call_{path}"
    pending.append(str(number))
    return {"id": number, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _content(text: str, images: Sequence[object], path: str) -> object:
    if not images:
        return text
    parts: list[object] = [{"type": "text", "text": text}] if text else []
    for index, image in enumerate(images):
        if not isinstance(image, str):
            raise HttpError(400, f"{path}[{index}] must be an image in base64", "invalid_type", path)
        kind = next((kind for begin, kind in _IMAGE_KINDS.items() if image.startswith(begin)), "jpeg")
        url = image if image.startswith("data:") else f"data:image/{kind};base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def _reader(read: _Read) -> ReadForVllm:
    def read_body(raw: bytes, models: Sequence[ModelSnapshot], salt_of: SaltOf | None) -> BodyPasses | BodyLoads | None:
        body = decode_body(raw)
        name = body.needed_text("model")
        names = (name, name.removesuffix(LATEST), name + LATEST)
        model = next((found for one in names if (found := find_vllm(models, one))), None)
        if model is None:
            return None
        is_unload = is_zero_duration(body, "keep_alive")
        asked = read(body)
        body.flag("stream")
        body.refuse_rest()
        if asked is None:
            return BodyLoads(name, "unload" if is_unload else "load")
        path, document = asked
        fields = read_fields(msgspec.json.encode({"model": model, **document}))
        return msgspec.structs.replace(
            pass_on(fields, model, path, salt_of, body=msgspec.json.encode(fields)), name=name
        )

    return read_body


OLLAMA_KINDS: Mapping[str, ReadForVllm] = {
    OLLAMA_CHAT: _reader(_read_chat),
    OLLAMA_GENERATE: _reader(_read_generate),
    OLLAMA_EMBED: _reader(_read_embed),
    OLLAMA_EMBEDDINGS: _reader(_read_embeddings),
}
