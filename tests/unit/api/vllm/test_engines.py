"""Which engine of vLLM gets a request, and what becomes of it when an engine dies."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvtier.api.vllm.engine import VllmEngine
from kvtier.api.vllm.exchange import Exchange
from kvtier.api.vllm.model import UpstreamAnswer
from kvtier.errors import EngineAway
from tests.support.fake_engine import Running, http_client
from tests.support.vllm_serving import FakeVllm, chat, config_of_vllm
from tests.support.waiting import wait_until
from tests.unit.api.vllm.conftest import IMPATIENCE, Serve

CHAT = "/v1/chat/completions"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as found:
        yield found


def ask(server: Running, body: dict[str, object]) -> httpx.Response:
    with http_client(server) as client:
        return client.post(CHAT, json=body)


def engine_of(engines: list[FakeVllm], text: str) -> list[str]:
    """Names of the engines that got the chats whose last message this is."""
    return [
        engine.name for engine in engines for one in engine.asked() if one.document["messages"][-1]["content"] == text
    ]


def wait_until_asked(engines: list[FakeVllm], count: int = 1) -> None:
    wait_until(lambda: sum(len(engine.asked()) for engine in engines if engine.is_running) >= count)


def test_the_second_turn_goes_where_the_first_went(server: Running, engines: list[FakeVllm]) -> None:
    for number in range(20):
        assert ask(server, chat(f"first {number}")).status_code == 200
    for number in reversed(range(20)):
        assert ask(server, chat(f"second {number}", f"first {number}", "an answer")).status_code == 200

    places = [(engine_of(engines, f"first {number}"), engine_of(engines, f"second {number}")) for number in range(20)]
    assert all(first == second for first, second in places)
    assert {first[0] for first, _ in places} == {"vllm-0", "vllm-1"}


def test_a_busy_engine_is_passed_over(server: Running, engines: list[FakeVllm], pool: ThreadPoolExecutor) -> None:
    body = chat("the same again", fake={"delay_s": 1.0})
    answers = [pool.submit(ask, server, body) for _ in range(12)]

    assert all(answer.result().status_code == 200 for answer in answers)
    assert min(len(engine.asked()) for engine in engines) >= 3


@pytest.mark.parametrize("stream", [False, True])
def test_no_request_fails_when_one_of_two_engines_is_killed(
    server: Running, engines: list[FakeVllm], pool: ThreadPoolExecutor, stream: bool
) -> None:
    is_over = threading.Event()

    def go_on_asking(number: int) -> list[httpx.Response]:
        found = []
        while not is_over.is_set():
            found.append(ask(server, chat(f"{number} {len(found)}", stream=stream, fake={"delay_s": 0.05})))
        return found

    asking: list[Future[list[httpx.Response]]] = [pool.submit(go_on_asking, number) for number in range(8)]
    try:
        for engine in [*engines, *engines]:
            wait_until_asked([engine], 10)
            engine.kill()
            wait_until(lambda: not all(one.is_up for one in server.service.vllm.engines))
            engine.start()
            wait_until(lambda: all(one.is_up for one in server.service.vllm.engines))
    finally:
        is_over.set()

    answers = [response for future in asking for response in future.result()]
    assert {response.status_code for response in answers} == {200}
    if stream:
        assert all(response.text.endswith("data: [DONE]\n\n") and "error" not in response.text for response in answers)


def test_a_request_waits_for_an_engine_that_starts(
    server: Running, engines: list[FakeVllm], pool: ThreadPoolExecutor
) -> None:
    for engine in engines:
        engine.kill()
    wait_until(lambda: not any(one.is_up for one in server.service.vllm.engines))
    answer = pool.submit(ask, server, chat("held"))
    wait_until(lambda: server.service.num_requests == 1)
    engines[1].start()

    assert answer.result().status_code == 200


def test_a_request_does_not_wait_for_ever(serve: Serve, engines: list[FakeVllm]) -> None:
    server = serve("openai", config_of_vllm(*engines))
    for model in server.service.vllm.models:
        model.hold_s = 0.2
    for engine in engines:
        engine.kill()
    wait_until(lambda: not any(one.is_up for one in server.service.vllm.engines))
    response = ask(server, chat("held"))

    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["message"] == "the model fake is starting"


def test_a_request_at_which_engines_die_is_given_up(server: Running, engines: list[FakeVllm]) -> None:
    is_over = threading.Event()

    def keep_up() -> None:
        while not is_over.wait(0.02):
            for engine in engines:
                if not engine.is_running:
                    engine.start()

    thread = threading.Thread(target=keep_up)
    thread.start()
    response = ask(server, chat("a", fake={"die_after": 0}))
    is_over.set()
    thread.join()

    assert response.status_code == 500
    assert response.json()["error"]["message"] == "3 engines of fake died while they computed this request"


def test_a_stream_that_has_begun_ends_with_one_error(server: Running) -> None:
    response = ask(server, chat("a b c d", stream=True, fake={"die_after": 2}))

    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["a", " b"]
    assert "stopped before the answer was complete" in events[-1]["error"]["message"]


def test_a_stream_of_messages_ends_with_an_error_in_anthropics_form(server: Running) -> None:
    with http_client(server) as client:
        response = client.post("/v1/messages", json=chat("a b c d", stream=True, fake={"die_after": 2}))

    kind, content = response.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    document = json.loads(content.removeprefix("data: "))
    assert kind == "event: error"
    assert (document["type"], document["error"]["type"]) == ("error", "api_error")
    assert "stopped before the answer was complete" in document["error"]["message"]
    assert document["request_id"].startswith("req")


def test_an_error_of_an_engine_that_dies_is_not_passed_on(server: Running, engines: list[FakeVllm]) -> None:
    """vLLM answers so while its engine's process is gone and its server's is not yet."""
    assert ask(server, chat("first")).status_code == 200
    [name] = engine_of(engines, "first")
    response = ask(server, chat("second", "first", "an answer", fake={"unwell": name}))

    assert response.status_code == 200
    assert engine_of(engines, "second") == [engine.name for engine in engines]
    wait_until(lambda: not next(one for one in server.service.vllm.engines if one.name == name).is_up)
    for number in range(4):
        assert ask(server, chat(f"third {number}")).status_code == 200
        assert engine_of(engines, f"third {number}") != [name]


def test_the_only_engine_may_hang_for_a_while(serve: Serve, engines: list[FakeVllm], pool: ThreadPoolExecutor) -> None:
    server = serve("openai", config_of_vllm(engines[0]), IMPATIENCE)
    answer = pool.submit(ask, server, chat("x", fake={"delay_s": 0.5}))
    wait_until_asked(engines)
    engines[0].freeze()
    try:
        wait_until(lambda: server.service.vllm.engines[0].is_hung)
    finally:
        engines[0].thaw()

    assert answer.result().status_code == 200
    assert len(engines[0].asked()) == 1


def test_a_hung_engine_loses_what_it_has_not_begun(
    serve: Serve, engines: list[FakeVllm], pool: ThreadPoolExecutor
) -> None:
    server = serve("openai", config_of_vllm(*engines), IMPATIENCE)
    body = chat("x", fake={"delay_s": 0.5})
    engines[0].freeze()
    try:
        answers = [pool.submit(ask, server, body) for _ in range(4)]
        assert all(answer.result().status_code == 200 for answer in answers)
        wait_until(lambda: server.service.vllm.engines[0].is_hung)
        with http_client(server) as client:
            ready = client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "hung")
    finally:
        engines[0].thaw()
    wait_until(lambda: all(one.is_up for one in server.service.vllm.engines))


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_that_is_told_to_stop_completes_what_it_has_and_gets_no_more(
    serve: Serve, engines: list[FakeVllm], pool: ThreadPoolExecutor, tmp_path: Path, count: int
) -> None:
    """The part beside it takes its socket's name away, and stops it once its requests are over."""
    server = serve("openai", config_of_vllm(*engines[:count]))
    leaving = server.service.vllm.engines[0]
    first = pool.submit(ask, server, chat("first", fake={"delay_s": 1.0}))
    wait_until_asked(engines[:1])
    engines[0].path.rename(tmp_path / "unnamed")
    second = pool.submit(ask, server, chat("second"))
    wait_until(lambda: leaving.status == "stopping")
    with http_client(server) as client:
        ready = client.get("/ready")

    assert first.result().status_code == 200
    assert (ready.status_code, ready.json()["status"]) == (503, "starting")
    assert ready.json()["models"]["fake"]["vllm-0"]["status"] == "stopping"
    (tmp_path / "unnamed").rename(engines[0].path)  # for the fake to tell what it was asked
    assert [one.ended for one in engines[0].asked()] == ["answered"]
    engines[0].start()
    assert second.result().status_code == 200
    assert engine_of(engines, "second") == [engines[count - 1].name]
    wait_until(lambda: leaving.is_up)


def test_an_answer_that_the_server_breaks_off_says_so(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def read() -> bytes:
        is_over = asyncio.Event()

        async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(head + b"6\r\ndata: \r\n")
            while await reader.read(100):  # until the other side closes it
                pass
            writer.close()
            is_over.set()

        path = str(tmp_path / "vllm.sock")
        async with await asyncio.start_unix_server(begin, path):
            exchange = await Exchange.send(path, "POST", "/", ())
            await exchange.head()
            answer = UpstreamAnswer(VllmEngine("vllm", path), exchange)
            assert await answer.read() == b"data: "
            answer.cut_off("the server stopped")
            try:
                return await answer.read()
            finally:
                await is_over.wait()

    with pytest.raises(EngineAway, match="the server stopped"):
        asyncio.run(read())
