"""Translates answers of vLLM to Ollama's API: one line of JSON per event of a stream, or one object."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvtier.api.access import ApiTenant
from kvtier.api.http_error import HttpError
from kvtier.api.limits import MAX_TRANSLATED_BYTES
from kvtier.api.ollama.passed import EMBEDDINGS_PATH
from kvtier.api.ollama.responses import Line, Message, error_body, nanoseconds
from kvtier.api.passing import PassedBody, upstream_answer
from kvtier.api.service import Service
from kvtier.api.streaming import StreamedAnswer, while_connected
from kvtier.api.vllm.model import UpstreamAnswer
from kvtier.errors import AnswerFailed, KvtierError

_HEADERS = ((b"content-type", b"application/json"), (b"accept", b"*/*"))
_DONE = b"[DONE]"
_OK = 200
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Translation:
    """One request that vLLM answers. `is_chat` says whether it was sent to `/api/chat`."""

    def __init__(
        self, service: Service, request: Request, tenant: ApiTenant, passed: PassedBody, *, is_chat: bool
    ) -> None:
        self._service = service
        self._request = request
        self._tenant = tenant
        self._passed = passed
        self._lines = _Lines(passed.passes.name, is_chat=is_chat)

    async def response(self) -> Response:
        """Raises `HttpError` or `KvtierError` for a failure before the first byte of the answer."""
        headers = {"x-request-id": self._request.state.id}
        if not self._passed.passes.is_streamed:
            document = await while_connected(self._request, self.document())
            return Response(_encode(self._lines.whole(document)), 200, headers, "application/json")
        chunks = self._chunks()
        try:
            await while_connected(self._request, anext(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        return StreamedAnswer(chunks, media_type="application/x-ndjson", headers=headers)

    async def document(self) -> dict[str, Any]:
        """The whole answer, decoded, in vLLM's form."""
        request_id = self._request.state.id
        async with upstream_answer(self._service, self._tenant, self._passed, request_id, _HEADERS) as answer:
            return await _document(answer)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """First an empty chunk, once the beginning of the answer has arrived, then its lines."""
        request_id = self._request.state.id
        async with upstream_answer(self._service, self._tenant, self._passed, request_id, _HEADERS) as answer:
            if answer.status != _OK:
                await _document(answer)
            yield b""
            try:
                async for event in _events(answer):
                    if line := self._lines.of_event(event):
                        yield line
                yield self._lines.end()
            except KvtierError as error:
                yield error_body(str(error)) + b"\n"


def embedded(document: Mapping[str, Any], name: str, started_ns: int) -> dict[str, object]:
    """`/api/embed`: vectors in the order of the texts."""
    return {
        "model": name,
        "embeddings": vectors(document),
        "total_duration": time.monotonic_ns() - started_ns,
        "load_duration": 0,
        "prompt_eval_count": _count(document.get("usage"), "prompt_tokens"),
    }


def vectors(document: Mapping[str, Any]) -> list[object]:
    try:
        return [one["embedding"] for one in sorted(document["data"], key=lambda one: int(one["index"]))]
    except (LookupError, TypeError, ValueError) as error:
        raise AnswerFailed(f"vLLM's answer at {EMBEDDINGS_PATH} has no embeddings") from error


class _Lines:
    """Makes lines of events. Tool calls arrive in pieces and are sent together, at the end."""

    def __init__(self, name: str, *, is_chat: bool) -> None:
        self._name = name
        self._is_chat = is_chat
        self._started_ns = time.monotonic_ns()
        self._first_ns = 0
        self._reason = "stop"
        self._usage: object = None
        self._calls: dict[int, dict[str, str]] = {}

    def of_event(self, event: Mapping[str, Any]) -> bytes:
        """The line for an event, empty if the event shows nothing. Raises `AnswerFailed` for an error of the engine."""
        if "error" in event:
            raise AnswerFailed(_sentence(event) or "the engine failed on this request")
        self._usage = event.get("usage") or self._usage
        choice = _first_choice(event)
        if choice is None:
            return b""
        self._first_ns = self._first_ns or time.monotonic_ns()
        self._reason = choice.get("finish_reason") or self._reason
        delta = choice.get("delta") or {}
        self._note_calls(delta.get("tool_calls") or ())
        text = choice.get("text") or delta.get("content") or ""
        line = self._line(text, _thinking(delta), choice.get("logprobs"))
        is_empty = not text and line.thinking is msgspec.UNSET and line.logprobs is msgspec.UNSET
        if is_empty and (line.message is msgspec.UNSET or line.message.thinking is msgspec.UNSET):
            return b""
        return bytes(_encode(line)) + b"\n"

    def end(self) -> bytes:
        lines = b""
        if self._calls:
            line = self._line("", "", None)
            assert isinstance(line.message, Message)
            line.message.tool_calls = [_call(call["name"], call["arguments"]) for call in self._calls.values()]
            lines = bytes(_encode(line)) + b"\n"
        return lines + bytes(_encode(self._ended(self._line("", "", None)))) + b"\n"

    def whole(self, document: Mapping[str, Any]) -> Line:
        choice = _first_choice(document)
        if choice is None:
            raise AnswerFailed("vLLM's answer has no choices")
        self._usage = document.get("usage")
        self._reason = choice.get("finish_reason") or self._reason
        message = choice.get("message") or {}
        line = self._line(
            choice.get("text") or message.get("content") or "", _thinking(message), choice.get("logprobs")
        )
        calls = [one.get("function") or {} for one in message.get("tool_calls") or ()]
        if calls and isinstance(line.message, Message):
            line.message.tool_calls = [_call(one.get("name", ""), one.get("arguments", "")) for one in calls]
        return self._ended(line)

    def _note_calls(self, deltas: Any) -> None:
        for delta in deltas:
            call = self._calls.setdefault(int(delta.get("index") or 0), {"name": "", "arguments": ""})
            function = delta.get("function") or {}
            for name in call:
                call[name] += function.get(name) or ""

    def _line(self, text: str, thinking: str, logprobs: Any) -> Line:
        line = Line(model=self._name, created_at=datetime.now(UTC))
        if self._is_chat:
            line.message = Message("assistant", text)
            if thinking:
                line.message.thinking = thinking
        else:
            line.response = text
            if thinking:
                line.thinking = thinking
        if isinstance(logprobs, dict) and logprobs.get("content"):
            line.logprobs = logprobs["content"]
        return line

    def _ended(self, line: Line) -> Line:
        now = time.monotonic_ns()
        first_ns = self._first_ns or now
        line.done = True
        line.done_reason = "length" if self._reason == "length" else "stop"
        line.total_duration = now - self._started_ns
        line.load_duration = 0
        line.prompt_eval_count = _count(self._usage, "prompt_tokens")
        line.prompt_eval_duration = max(1, first_ns - self._started_ns)
        line.eval_count = _count(self._usage, "completion_tokens")
        line.eval_duration = nanoseconds((now - first_ns) / 1e9)
        return line


async def _document(answer: UpstreamAnswer) -> dict[str, Any]:
    """The whole body. Raises `HttpError` with vLLM's own sentence if vLLM refuses the request."""
    pieces = [answer.first]
    while not answer.is_whole and (piece := await answer.read()):
        pieces.append(piece)
        if sum(map(len, pieces)) > MAX_TRANSLATED_BYTES:
            raise AnswerFailed("vLLM's answer is too large")
    try:
        document = _decode(b"".join(pieces))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AnswerFailed("vLLM's answer is not JSON") from error
    if not isinstance(document, dict):
        raise AnswerFailed("vLLM's answer is not a JSON object")
    if answer.status != _OK:
        raise HttpError(answer.status, _sentence(document) or "vLLM refused the request", "upstream")
    return document


async def _events(answer: UpstreamAnswer) -> AsyncIterator[dict[str, Any]]:
    """The data of a stream's events. Raises `AnswerFailed` for a line that is not an event."""
    rest = answer.first
    while True:
        *lines, rest = rest.split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if data == _DONE:
                return
            if line.startswith(b"data:"):
                yield _event(data)
        if len(rest) > MAX_TRANSLATED_BYTES:
            raise AnswerFailed("a line of vLLM's answer is too long")
        piece = await answer.read()
        if not piece:
            return
        rest += piece


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AnswerFailed("a line of vLLM's answer is not JSON") from error
    if not isinstance(event, dict):
        raise AnswerFailed("a line of vLLM's answer is not a JSON object")
    return event


def _first_choice(document: Mapping[str, Any]) -> dict[str, Any] | None:
    choices = document.get("choices")
    found = choices[0] if isinstance(choices, list) and choices else None
    return found if isinstance(found, dict) else None


def _thinking(message: Mapping[str, Any]) -> str:
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _call(name: str, arguments: str) -> dict[str, object]:
    """Ollama's arguments are a decoded object; if the model wrote something else, they are shown as text."""
    try:
        found = _decode(arguments.encode() or b"{}")
    except (msgspec.DecodeError, RecursionError):
        found = arguments
    return {"function": {"name": name, "arguments": found}}


def _sentence(document: Mapping[str, Any]) -> str:
    error = document.get("error", document)
    found = error.get("message") if isinstance(error, dict) else error
    return found if isinstance(found, str) else ""


def _count(usage: object, name: str) -> int:
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if isinstance(found, int) else 0
