"""OpenTelemetry spans of a request's phases: HTTP, queue, match, load, prefill, decode.

Spans are made only if `opentelemetry` is installed and the process has a tracer provider, as with
`opentelemetry-instrument kvtier serve deploy.yml`. Otherwise this module costs one empty call per answer. An answer's
completion contains the engine's times; both processes run on one host and share the clock. No span contains text of a
prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.engine.answer import AnswerTimes, Completion

try:
    from opentelemetry import propagate, trace
except ImportError:  # optional: pip install 'kvtier[tracing]'
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_NAME = "kvtier"
_UNTRACED = frozenset({"/health", "/ready", "/metrics", "/"})
"""Paths that monitoring requests every few seconds."""
_MAX_TRACED_ANSWERS = 16
"""In a request with many prompts, only the first answers get spans."""
_SERVER_ERROR = 500


class NoTracing:
    """Stands in for `Tracing` without OpenTelemetry."""

    def traced(self, app: ASGIApp, api: str, paths: Set[str]) -> ASGIApp:
        return app

    def note_answer(self, model: str, request_id: str, prompt_tokens: int, completion: Completion) -> None:
        pass


class Tracing:
    """Makes the spans of one HTTP process with `tracer`. Used in the event loop."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def traced(self, app: ASGIApp, api: str, paths: Set[str]) -> ASGIApp:
        """Wrap `app` in a span per request, whose parent is its `traceparent` header. Unknown paths share a name."""
        return _TracedApp(app, self._tracer, api, paths)

    def note_answer(self, model: str, request_id: str, prompt_tokens: int, completion: Completion) -> None:
        """Make the spans of a prompt's phases in the engine, once its first answer is complete."""
        request = _request.get()
        if request is None or completion.index or request.num_answers >= _MAX_TRACED_ANSWERS:
            return
        request.num_answers += 1
        span = request.span
        span.set_attribute("gen_ai.request.model", model)
        span.set_attribute("kvtier.request_id", request_id)
        span.set_attribute("kvtier.prompt_tokens", prompt_tokens)
        for tier, count in completion.cached_tokens.items():
            span.set_attribute(f"kvtier.cached_tokens.{tier}", count)
        if completion.times is None:
            return
        context = trace.set_span_in_context(span)
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for phase in phases_of(completion.times):
            inner = self._tracer.start_span(phase.name, context, start_time=epoch_ns + int(phase.began_at * 1e9))
            if phase.name == "decode":
                inner.set_attribute("kvtier.output_tokens", len(completion.token_ids))
            inner.end(epoch_ns + int(phase.ended_at * 1e9))


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a request, in seconds of `time.monotonic`."""

    name: str
    began_at: float
    ended_at: float


def phases_of(times: AnswerTimes) -> list[Phase]:
    """The phases that took place, in order. Matching overlaps with the time in the queue."""
    return [phase for phase in _phases(times) if 0 < phase.began_at <= phase.ended_at]


def _phases(times: AnswerTimes) -> Iterator[Phase]:
    began = [at for at in (times.load_began_at, times.prefill_at) if at]
    yield Phase("queue", times.arrived_at, min(began, default=times.finished_at))
    yield Phase("match", times.asked_at, times.answered_at)
    yield Phase("load", times.load_began_at, times.load_ended_at)
    yield Phase("prefill", times.prefill_at, times.first_token_at)
    yield Phase("decode", times.first_token_at, times.finished_at)


@dataclass(slots=True)
class _TracedRequest:
    span: Span
    num_answers: int = 0


_request: ContextVar[_TracedRequest | None] = ContextVar("kvtier_traced_request", default=None)


class _TracedApp:
    """A span for each request, except to paths in `_UNTRACED`, until its response is sent."""

    def __init__(self, app: ASGIApp, tracer: Tracer, api: str, paths: Set[str]) -> None:
        self._app = app
        self._tracer = tracer
        self._api = api
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path in _UNTRACED:
            await self._app(scope, receive, send)
            return
        method, route = scope["method"], path if path in self._paths else "other"
        attributes = {"http.request.method": method, "http.route": route, "kvtier.api": self._api}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracer.start_as_current_span(
            f"{method} {route}", propagate.extract(headers), trace.SpanKind.SERVER, attributes, record_exception=False
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note_status(span, message["status"])
                await send(message)

            token = _request.set(_TracedRequest(span) if span.is_recording() else None)
            try:
                await self._app(scope, receive, noting)
            finally:
                _request.reset(token)


def _note_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= _SERVER_ERROR:
        span.set_status(trace.StatusCode.ERROR)


def make_tracing() -> Tracing | NoTracing:
    """Uses the process's tracer provider, if OpenTelemetry is installed and has one."""
    if not IS_INSTALLED:
        return NoTracing()
    provider = trace.get_tracer_provider()
    return NoTracing() if isinstance(provider, trace.ProxyTracerProvider) else Tracing(provider.get_tracer(_NAME))
