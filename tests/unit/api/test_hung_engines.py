"""Engines whose process stands still: noticed, passed over, and taken up again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.api import engine_connection
from kvtier.api.engine_connection import ProbeTimes
from tests.support.fake_engine import (
    FakeEngine,
    Running,
    config_of,
    fake_engine,
    held_once_accepted,
    http_client,
    running,
    wait_until,
)
from tests.support.openai_asking import CHAT, chat_body, error_of
from tests.support.waiting import FOR_EVER_S

_IMPATIENT = ProbeTimes(ask_every_s=0.05, hung_after_s=1.0)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[FakeEngine]]:
    with fake_engine(tmp_path, name="engine-0") as first, fake_engine(tmp_path, name="engine-1") as second:
        yield [first, second]


@pytest.fixture
def server(engines: list[FakeEngine]) -> Iterator[Running]:
    with running("openai", config_of(*engines), _IMPATIENT) as one:
        yield one


def freeze(server: Running, *engines: FakeEngine) -> None:
    names = {engine.hello.engine for engine in engines}
    for engine in engines:
        engine.freeze()
    wait_until(
        lambda: {connection.name for connection in server.service.engines.connections if connection.is_hung} == names
    )


def test_engines_with_nothing_to_do_are_not_hung(server: Running) -> None:
    time.sleep(3 * (_IMPATIENT.ask_every_s + _IMPATIENT.hung_after_s))

    assert server.service.engines.is_ready


def test_a_hung_engine_is_passed_over(server: Running, engines: list[FakeEngine]) -> None:
    freeze(server, engines[0])

    with http_client(server) as client:
        for number in range(8):
            assert client.post(CHAT, json=chat_body(f"prompt {number}")).status_code == 200
    assert len(engines[1].submits) == 8


def test_if_all_are_hung_a_request_is_503_at_once(server: Running, engines: list[FakeEngine]) -> None:
    freeze(server, *engines)

    with http_client(server) as client:
        response = client.post(CHAT, json=chat_body())

    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert "does not answer" in error_of(response)["message"]


def test_a_hung_engine_is_told_by_ready_until_it_answers_again(
    server: Running, engines: list[FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), http_client(server) as client:
        freeze(server, engines[0])
        hung = client.get("/ready")
        engines[0].thaw()
        wait_until(lambda: server.service.engines.is_ready)

        assert (hung.status_code, hung.json()["status"]) == (503, "hung")
        assert {name: one["status"] for name, one in hung.json()["models"]["tiny"].items()} == {
            "engine-0": "hung",
            "engine-1": "ready",
        }
        assert client.get("/ready").status_code == 200
    assert caplog.text.count("engine-0 is hung") == 1
    assert caplog.text.count("engine-0 answers again") == 1


def test_a_hung_engine_that_dies_is_away_and_not_hung(server: Running, engines: list[FakeEngine]) -> None:
    freeze(server, engines[0])

    engines[0].thaw()
    engines[0].stop()

    connection = server.service.engines.connections[0]
    wait_until(lambda: connection.hello is None and not connection.is_hung)


def test_what_is_under_way_at_a_hung_engine_ends_when_it_answers_again(
    server: Running, engines: list[FakeEngine]
) -> None:
    until = threading.Event()
    for engine in engines:
        engine.script = held_once_accepted(until)
    with http_client(server) as client, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(client.post, CHAT, json=chat_body())
        wait_until(lambda: engines[0].submits or engines[1].submits)
        freeze(server, *engines)
        until.set()
        for engine in engines:
            engine.thaw()

        assert under_way.result().status_code == 200


def test_metrics_do_not_wait_for_hung_engines(
    server: Running, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_connection, "_METRICS_TIMEOUT_S", FOR_EVER_S)
    freeze(server, engines[0])

    with http_client(server) as client:
        text = client.get("/metrics").text

    assert 'kvtier_engine_steps_total{engine="engine-1"}' in text
    assert 'engine="engine-0"' not in text


def test_metrics_wait_for_all_engines_at_once(tmp_path: Path) -> None:
    """Before they count as hung, those that do not answer cost one wait together."""
    with fake_engine(tmp_path, name="engine-0") as first, fake_engine(tmp_path, name="engine-1") as second:
        with running("openai", config_of(first, second)) as server, http_client(server) as client:
            first.freeze()
            second.freeze()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(client.get, "/metrics")
                wait_until(lambda: all(connection._looks for connection in server.service.engines.connections))

            assert asked.result().status_code == 200
