"""What the page's JSON says of requests, engines and warnings, and its stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvtier.api.config import PageConfig
from kvtier.engine.answer import PrefixEnd
from kvtier.observe.recent_warnings import LoggedWarning
from tests.support.fake_engine import (
    MODEL,
    FakeEngine,
    Running,
    accepted,
    config_of,
    ending,
    fake_engine,
    pieces,
    running,
    said,
)
from tests.support.waiting import wait_until

_SCRIPT = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    engine = FakeEngine(tmp_path_factory.mktemp("page") / "e.sock")
    yield engine
    engine.close()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(engine, page=PageConfig(gpu_hour_price=3.6))) as server:
        yield server


def complete(server: Running, prompt: str = "a b c d") -> str:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": prompt})
    assert response.status_code == 200
    request_id: str = response.headers["x-request-id"]
    return request_id


def get(server: Running, path: str) -> dict[str, object]:
    response = httpx.get(f"{server.url}/kvtier/v1/{path}")
    assert response.status_code == 200, response.text
    found: dict[str, object] = response.json()
    return found


def test_a_request_is_shown_with_what_was_cached_and_why_no_more(server: Running, engine: FakeEngine) -> None:
    end = ending("stop", 1, cached={"device": 0, "server": 3})
    object.__setattr__(end, "prefix_end", PrefixEnd(3, "never stored", "server", "detail"))

    def script(submit):  # type: ignore[no-untyped-def]
        yield accepted(submit)
        yield said(submit, "x", completion=end)

    engine.script = script
    request_id = complete(server)

    [found] = get(server, "requests")["requests"]  # type: ignore[misc]
    assert found["request_id"] == request_id
    assert found["model"] == MODEL
    assert found["prompt_tokens"] == 4
    assert found["cached_tokens"] == {"server": 3}
    assert (found["reason"], found["ended_at_tokens"], found["tier"]) == ("never stored", 3, "server")
    assert get(server, f"requests/{request_id}")["request"] == found


def test_after_a_restart_the_numbers_of_requests_are_of_another_run(engine: FakeEngine) -> None:
    runs = []
    for _ in range(2):
        with running("openai", config_of(engine, page=PageConfig())) as server:
            complete(server)
            found = get(server, "requests")
            runs.append(found["run"])
            assert [one["number"] for one in found["requests"]] == [1]  # type: ignore[attr-defined]
    assert len(set(runs)) == 2


def test_shares_are_of_the_tokens_of_all_prompts(server: Running, engine: FakeEngine) -> None:
    engine.script = lambda submit: iter([accepted(submit), *pieces(submit, ["x"], cached={"server": 2})])
    complete(server)
    complete(server)

    tokens = get(server, "state")["tokens"]["5m"]  # type: ignore[index]
    assert (tokens["requests"], tokens["prompt"], tokens["cached"]) == (2, 8, {"server": 4})
    steps = get(server, "history?span=hour")["steps"]
    assert sum(step["prompt"] for step in steps) == 8  # type: ignore[attr-defined]


def test_the_state_has_the_engines_and_their_levels(server: Running) -> None:
    state = get(server, "state")

    [engine] = state["engines"]  # type: ignore[misc]
    assert (engine["name"], engine["status"], engine["kind"]) == ("engine-0", "ready", "kvtier")
    [tier] = state["tiers"]  # type: ignore[misc]
    assert (tier["name"], tier["owner"], tier["room_bytes"]) == ("device", "engine-0", 1 << 22)
    assert state["saved"]["currency"] == "$"  # type: ignore[index]


def test_a_device_has_what_its_engine_keeps_and_what_requests_use_is_leased(
    server: Running, engine: FakeEngine
) -> None:
    engine.levels = {"blocks": 64, "used_blocks": 16, "held_blocks": 48}

    def level() -> tuple[object, ...]:
        [device] = get(server, "state")["tiers"]  # type: ignore[misc]
        return device["used_bytes"], device["leased_bytes"], device["blocks"]

    wait_until(lambda: level() == (3 << 20, 1 << 20, 48))


def test_an_engine_says_what_its_canary_has_found(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine, running("openai", config_of(engine, page=PageConfig())) as server:
        engine.canary_checks = {"sound": 3, "wrong": 1}
        engine.loading_off = "the canary found wrong KV"
        wait_until(lambda: get(server, "state")["engines"][0]["loading_off"] == "the canary found wrong KV")  # type: ignore[index]
        assert get(server, "state")["engines"][0]["canary_checks"] == {"sound": 3, "wrong": 1}  # type: ignore[index]

        engine.loading_off = ""
        wait_until(lambda: get(server, "state")["engines"][0]["loading_off"] == "")  # type: ignore[index]


def test_a_device_gets_what_its_engine_loads(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine, running("openai", config_of(engine, page=PageConfig())) as server:

        def rates() -> tuple[object, object]:
            engine.loaded_bytes += 1 << 20
            engine.stored_bytes += 1 << 18
            [device] = [tier for tier in get(server, "state")["tiers"] if tier["name"] == "device"]  # type: ignore[attr-defined]
            return device["in_bytes_per_s"], device["out_bytes_per_s"]

        wait_until(lambda: all(rates()))


def test_an_engine_that_is_gone_is_shown_as_starting(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine, running("openai", config_of(engine, page=PageConfig())) as server:
        engine.stop()
        wait_until(lambda: get(server, "state")["engines"][0]["status"] == "starting")  # type: ignore[index]


def test_warnings_are_those_of_the_server_and_its_engines(server: Running, engine: FakeEngine) -> None:
    engine.warnings = [LoggedWarning(1.0, "error", f"of the engine {_SCRIPT}")]
    with server.service.warnings.listening():
        logging.getLogger("kvtier.test").warning("of the server %s", _SCRIPT)

    found = get(server, "warnings")["warnings"]
    assert [(one["source"], one["level"]) for one in found] == [("http", "warning"), ("engine-0", "error")]  # type: ignore[attr-defined]
    assert _SCRIPT in found[0]["text"]  # type: ignore[index]


def test_the_stream_tells_the_state_and_each_request_once(server: Running) -> None:
    first = complete(server)
    with httpx.stream("GET", f"{server.url}/kvtier/v1/events", timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = _events(response)
        _, state = next(events)
        name, told = next(events)
        assert state["kind"] == "deployment"
        assert (name, [one["request_id"] for one in told["requests"]]) == ("requests", [first])
        assert told["run"] == get(server, "requests")["run"]
        second = complete(server)
        name, told = next(one for one in events if one[0] == "requests")
        assert [one["request_id"] for one in told["requests"]] == [second]


def test_nothing_is_looked_at_while_nobody_looks(server: Running, engine: FakeEngine) -> None:
    complete(server)
    page = server.service.at_end[0].__self__  # type: ignore[attr-defined]
    assert page.board.num_readings == 0

    with httpx.stream("GET", f"{server.url}/kvtier/v1/events", timeout=30) as response:
        events = _events(response)
        next(events)
        assert page.hub.num_readers == 1
    wait_until(lambda: page.hub.num_readers == 0)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=-1", "limit=99999999999", "limit=1001", "limit=%C2%B2"])
def test_odd_limits_are_refused(server: Running, query: str) -> None:
    assert httpx.get(f"{server.url}/kvtier/v1/requests?{query}").status_code == 400


def test_unknown_requests_and_spans_are_refused_with_a_sentence(server: Running) -> None:
    for path, status in (("requests/none", 404), (f"requests/{'x' * 2000}", 404), ("history?span=year", 400)):
        response = httpx.get(f"{server.url}/kvtier/v1/{path}")
        assert response.status_code == status
        assert response.json()["error"]["message"]


def _events(response: httpx.Response) -> Iterator[tuple[str, dict[str, object]]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
