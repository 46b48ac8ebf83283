"""Spans of a request's way through both processes, as OpenTelemetry's SDK collects them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtier import LLM, SamplingParams
from kvtier.api.tracing import NoTracing, Tracing, make_tracing, phases_of
from kvtier.engine.answer import AnswerTimes
from kvtier.engine.process.messages import Submit
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.fake_engine import (
    FakeEngine,
    Running,
    Step,
    accepted,
    config_of,
    ending,
    fake_engine,
    http_client,
    running,
    said,
)
from tests.support.openai_asking import CHAT, COMPLETIONS, chat_body, completion_body
from tests.support.waiting import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "words of a prompt"


def answer(submit: Submit) -> Iterator[Step]:
    """As an engine that found a part of the prompt in its cache server."""
    yield accepted(submit)
    now = time.monotonic()
    times = AnswerTimes(now, now + 0.1, now + 0.2, now + 0.3, now + 0.4, now + 0.5, now + 0.7, now + 1.0)
    completion = ending("stop", 1, cached={"device": 1, "server": 2})
    yield said(submit, "yes", completion=dataclasses.replace(completion, times=times))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path) as one:
        one.script = answer
        yield one


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def server(engine: FakeEngine, exporter: InMemorySpanExporter) -> Iterator[Running]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running("openai", config_of(engine), tracing=Tracing(provider.get_tracer("kvtier"))) as one:
        yield one


def spans_of(exporter: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    """By name, once there are `count`."""
    wait_until(lambda: len(exporter.get_finished_spans()) >= count)
    found = exporter.get_finished_spans()
    assert len(found) == count
    return {span.name: span for span in found}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_has_a_span_for_each_part_of_its_way(
    server: Running, exporter: InMemorySpanExporter, is_streamed: bool
) -> None:
    with http_client(server) as client:
        response = client.post(CHAT, json=chat_body(SECRET, stream=is_streamed), headers={"traceparent": PARENT})
        assert response.status_code == 200
    spans = spans_of(exporter, 6)

    http = spans[f"POST {CHAT}"]
    assert list(spans) == ["queue", "match", "load", "prefill", "decode", http.name]
    assert http.parent is not None
    assert (f"{http.context.trace_id:032x}", f"{http.parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
    inner = [span for span in spans.values() if span is not http]
    assert {span.parent.span_id for span in inner if span.parent} == {http.context.span_id}
    assert {span.context.trace_id for span in inner} == {http.context.trace_id}
    lengths = [round((span.end_time - span.start_time) / 1e9, 3) for span in inner if span.end_time and span.start_time]
    assert lengths == [0.3, 0.1, 0.1, 0.2, 0.3]
    assert spans["queue"].start_time is not None
    assert abs(spans["queue"].start_time / 1e9 - time.time()) < 600
    assert dict(http.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "kvtier.api": "openai",
        "gen_ai.request.model": "tiny",
        "kvtier.request_id": response.headers["x-request-id"],
        "kvtier.prompt_tokens": 4,
        "kvtier.cached_tokens.device": 1,
        "kvtier.cached_tokens.server": 2,
    }
    assert all(SECRET not in span.to_json() for span in spans.values())


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "x" * 1000, PARENT.replace("b7ad6b7169203331", "0" * 16)])
def test_a_traceparent_that_is_none_is_ignored(server: Running, exporter: InMemorySpanExporter, header: str) -> None:
    with http_client(server) as client:
        assert client.post(CHAT, json=chat_body(), headers={"traceparent": header}).status_code == 200
    assert spans_of(exporter, 6)[f"POST {CHAT}"].parent is None


def test_errors_unknown_paths_and_health_checks(server: Running, exporter: InMemorySpanExporter) -> None:
    with http_client(server) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/v1/made/up/by/a/scanner").status_code == 404
        assert client.post(CHAT, json={"model": "tiny"}).status_code == 400
    spans = spans_of(exporter, 2)
    assert {name: (span.attributes or {})["http.response.status_code"] for name, span in spans.items()} == {
        "GET other": 404,
        f"POST {CHAT}": 400,
    }


def test_a_request_with_many_prompts_has_a_bounded_number_of_spans(
    server: Running, exporter: InMemorySpanExporter
) -> None:
    with http_client(server) as client:
        body = completion_body(["one two"] * 40, n=3)
        assert client.post(COMPLETIONS, json=body).status_code == 200
    wait_until(lambda: any(span.name == f"POST {COMPLETIONS}" for span in exporter.get_finished_spans()))
    assert len(exporter.get_finished_spans()) == 1 + 16 * 5


def test_requests_side_by_side_keep_their_spans_apart(server: Running, exporter: InMemorySpanExporter) -> None:
    with http_client(server) as client, ThreadPoolExecutor(4) as pool:

        def ask(number: int) -> int:
            headers = {"traceparent": f"00-{number:032x}-b7ad6b7169203331-01"}
            return client.post(CHAT, json=chat_body(stream=number % 2 == 0), headers=headers).status_code

        assert list(pool.map(ask, range(1, 5))) == [200] * 4
    wait_until(lambda: len(exporter.get_finished_spans()) == 24)
    by_trace = [span.context.trace_id for span in exporter.get_finished_spans()]
    assert sorted(by_trace) == sorted(6 * [1, 2, 3, 4])


def test_without_a_tracer_provider_nothing_is_traced() -> None:
    tracing = make_tracing()

    assert isinstance(tracing, NoTracing)
    app = object()
    assert tracing.traced(app, "openai", set()) is app  # type: ignore[arg-type,comparison-overlap]


def test_only_what_happened_is_a_phase() -> None:
    missed = phases_of(AnswerTimes(1.0, 1.1, 1.2, 0.0, 0.0, 1.3, 1.5, 2.0))
    refused = phases_of(AnswerTimes(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0))

    assert [phase.name for phase in missed] == ["queue", "match", "prefill", "decode"]
    assert [(phase.name, phase.ended_at) for phase in refused] == [("queue", 2.0)]


def test_an_engine_tells_the_times_of_its_answers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_space": 4 << 20, "always_load": True}
    with LLM(str(tmp_path), swap_space=4 << 20, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        found = []
        for _ in range(2):
            (output,) = llm.generate([list(range(100))], params, progress=False)
            assert output.outputs[0].times is not None
            found.append([phase.name for phase in phases_of(output.outputs[0].times)])
            assert llm.engine.transfer.settle()
            llm.engine._rewind([])  # the second time it comes from the host's memory
    assert found == [["queue", "match", "prefill", "decode"], ["queue", "match", "load", "prefill", "decode"]]
