"""The OpenAI-compatible server: who is answered, what happens when either side goes away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvtier.api.config import ApiKey
from kvtier.engine.process.messages import FAILED, INVALID, STOPPED, TOO_LONG, Submit, TextPrompt
from tests.support.fake_engine import (
    ALIAS,
    DIE,
    MAX_MODEL_LEN,
    FakeEngine,
    Running,
    Script,
    Step,
    config_of,
    echo,
    fake_engine,
    held,
    held_once_accepted,
    http_client,
    refusing,
    running,
    wait_until,
    words_then,
)
from tests.support.openai_asking import (
    CHAT,
    COMPLETIONS,
    body_for,
    chat_body,
    completion_body,
    documents_of,
    error_of,
    events_of,
    raw_post,
    receive_until,
)
from tests.support.waiting import LIMIT_S

_KEYS = (ApiKey(name="ann", key="key-a", salt="salt-a"), ApiKey(name="bob", key="key-b", salt="salt-b"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path) as one:
        yield one


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(engine)) as one:
        yield one


# --- routes -----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_found_by_any_of_their_names(server: Running) -> None:
    with http_client(server) as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        model, alias = listed["data"]
        assert model == {
            "id": "tiny",
            "object": "model",
            "created": int(server.service.started_at),
            "owned_by": "kvtier",
            "max_model_len": MAX_MODEL_LEN,
            "type": "model",
            "display_name": "tiny",
            "created_at": model["created_at"],
            "max_input_tokens": MAX_MODEL_LEN,
        }
        assert alias == {**model, "id": ALIAS, "display_name": ALIAS}
        assert client.get("/v1/models/tiny").json() == model
        assert client.get(f"/v1/models/{ALIAS}").json() == alias
        assert client.get("/v1/models/kvtier%2Ftiny:latest").json() == alias


def test_an_unknown_model_is_404(server: Running) -> None:
    with http_client(server) as client:
        for response in (client.get("/v1/models/other"), client.post(CHAT, json=chat_body(model="other"))):
            assert response.status_code == 404
            error = error_of(response)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "tiny" in error["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/images", "/v1/completions/", "/v1/chat/completions/x", "/api/tags"])
def test_an_unknown_path_is_404_in_openais_shape(server: Running, path: str) -> None:
    with http_client(server) as client:
        response = client.post(path, json=chat_body())
        assert response.status_code == 404
        assert error_of(response)["type"] == "invalid_request_error"


def test_a_wrong_method_is_405_in_openais_shape(server: Running) -> None:
    with http_client(server) as client:
        for response in (client.get(CHAT), client.delete(COMPLETIONS), client.post("/v1/models")):
            assert response.status_code == 405
            assert response.headers["allow"]
            assert error_of(response)["code"] == "method_not_allowed"


def test_operations_are_served_here_too(server: Running) -> None:
    with http_client(server) as client:
        client.post(CHAT, json=chat_body("a b", n=2))
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json()["status"] == "ready"
        metrics = client.get("/metrics").text
    assert 'kvtier_api_output_tokens_total{model="tiny"} 4.0' in metrics
    assert 'kvtier_api_ttft_seconds_count{model="tiny"} 2.0' in metrics
    assert 'kvtier_api_tpot_seconds_count{model="tiny"} 2.0' in metrics
    assert 'kvtier_api_requests_total{api="openai",path="/v1/chat/completions",status="200"} 1.0' in metrics


def test_an_answer_of_one_token_has_no_time_per_output_token(server: Running) -> None:
    with http_client(server) as client:
        client.post(CHAT, json=chat_body("a"))
        metrics = client.get("/metrics").text
    assert 'kvtier_api_ttft_seconds_count{model="tiny"} 1.0' in metrics
    assert 'kvtier_api_tpot_seconds_count{model="tiny"}' not in metrics


# --- who may ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "key-c", "key-a2"])
def test_without_a_known_key_nothing_is_served(engine: FakeEngine, key: str | None) -> None:
    with running("openai", config_of(engine, keys=_KEYS)) as server, http_client(server, key=key) as client:
        for response in (client.get("/v1/models"), client.get("/v1/models/tiny"), client.post(CHAT, json=chat_body())):
            assert response.status_code == 401
            error = error_of(response)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert client.get("/health").status_code == 200
    assert not engine.submits


def test_each_key_and_each_cache_salt_has_blocks_of_its_own(engine: FakeEngine) -> None:
    with running("openai", config_of(engine, keys=_KEYS)) as server:
        for key in ("key-a", "key-b"):
            with http_client(server, key=key) as client:
                for fields in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}, {}):
                    assert client.post(CHAT, json=chat_body(**fields)).status_code == 200
    salts = [submit.salt for submit in engine.submits]
    assert len(set(salts)) == 6
    assert (salts[0], salts[4]) == (salts[3], salts[7])


def test_without_keys_only_the_cache_salt_counts(server: Running, engine: FakeEngine) -> None:
    with http_client(server) as client:
        for fields in ({}, {"cache_salt": "x"}):
            client.post(COMPLETIONS, json=completion_body(**fields))
    assert engine.submits[0].salt == ""
    assert "x" in engine.submits[1].salt


# --- refusals by the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (TOO_LONG, 400, "context_length_exceeded"),
        (INVALID, 400, "invalid_value"),
        (STOPPED, 503, "unavailable"),
        (FAILED, 500, "internal_error"),
    ],
)
def test_what_the_engine_refuses_is_a_plain_answer(
    server: Running, engine: FakeEngine, stream: bool, reason: str, status: int, code: str
) -> None:
    engine.script = refusing(reason, "prompt must be shorter")

    with http_client(server) as client:
        response = client.post(CHAT, json=chat_body(stream=stream))

    assert response.status_code == status
    error = error_of(response)
    assert (error["message"], error["code"]) == ("prompt must be shorter", code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert not engine.aborts


def test_if_one_of_several_prompts_is_refused_the_others_are_given_up(server: Running, engine: FakeEngine) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        chosen = refusing(TOO_LONG, "too long") if submit.prompt == TextPrompt("long") else held_once_accepted(never)
        yield from chosen(submit)

    never = threading.Event()
    engine.script = script

    with http_client(server) as client:
        assert client.post(COMPLETIONS, json=completion_body(["a", "long", "b"])).status_code == 400

    wait_until(lambda: len(engine.submits) == 3)  # the refusal may overtake the last of them
    kept = [submit.number for submit in engine.submits if submit.prompt != TextPrompt("long")]
    wait_until(lambda: sorted(engine.aborts) == kept)
    wait_until(lambda: server.service.num_requests == 0)


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("accepts", [False, True])
def test_a_client_that_leaves_before_the_first_token_aborts(
    server: Running, engine: FakeEngine, path: str, stream: bool, accepts: bool
) -> None:
    never = threading.Event()
    engine.script = held_once_accepted(never) if accepts else held(never)

    with raw_post(server, path, body_for(path, stream=stream, n=2)) as connection:
        wait_until(lambda: engine.submits)
        if stream and accepts:
            assert b"200 OK" in receive_until(connection, b"\r\n\r\n")

    _assert_aborted(server, engine)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_the_answer_aborts(
    server: Running, engine: FakeEngine, path: str, stream: bool
) -> None:
    has_spoken = threading.Event()
    engine.script = _telling(words_then(["one", " two"], then=threading.Event()), has_spoken)

    with raw_post(server, path, body_for(path, stream=stream)) as connection:
        if stream:
            receive_until(connection, b" two")
        assert has_spoken.wait(LIMIT_S)

    _assert_aborted(server, engine)


def test_a_client_that_leaves_a_stream_of_several_prompts_aborts_them_all(server: Running, engine: FakeEngine) -> None:
    engine.script = words_then(["one", " two"], then=threading.Event())

    with raw_post(server, COMPLETIONS, completion_body(["a", "b", "c"], stream=True)) as connection:
        receive_until(connection, b" two")

    _assert_aborted(server, engine)


def test_a_client_that_stops_reading_and_then_leaves_aborts(server: Running, engine: FakeEngine) -> None:
    engine.script = words_then(["x" * 10_000] * 2000, then=threading.Event())

    with raw_post(server, CHAT, chat_body(stream=True)) as connection:
        receive_until(connection, b"xxx")

    _assert_aborted(server, engine)


def test_a_client_that_leaves_after_the_answer_aborts_nothing(server: Running, engine: FakeEngine) -> None:
    for stream in (False, True):
        with raw_post(server, CHAT, chat_body(stream=stream)) as connection:
            receive_until(connection, b"[DONE]" if stream else b"one two three")
    wait_until(lambda: server.service.num_requests == 0)

    with http_client(server) as client:
        assert client.post(CHAT, json=chat_body()).status_code == 200
    assert not engine.aborts


def test_a_client_that_leaves_within_its_body_is_not_missed(
    server: Running, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_post(server, CHAT, chat_body(), num_sent=10):
        pass

    with http_client(server) as client:
        wait_until(lambda: 'status="499"} 1.0' in client.get("/metrics").text)
        assert client.post(CHAT, json=chat_body()).status_code == 200
    assert len(engine.submits) == 1
    assert not caplog.records


def _assert_aborted(server: Running, engine: FakeEngine) -> None:
    """All that was asked is aborted, no place is taken any more, and the server goes on."""
    wait_until(lambda: sorted(engine.aborts) == [submit.number for submit in engine.submits])
    wait_until(lambda: server.service.num_requests == 0)
    engine.script = echo
    with http_client(server) as client:
        assert client.post(CHAT, json=chat_body()).status_code == 200


def _telling(script: Script, at_its_end: threading.Event) -> Script:
    def telling(submit: Submit) -> Iterator[Step]:
        for step in script(submit):
            if isinstance(step, threading.Event):
                at_its_end.set()
            yield step

    return telling


# --- engines that die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_whose_engine_dies_ends_with_an_error(server: Running, engine: FakeEngine, path: str) -> None:
    engine.script = words_then(["one", " two"], then=DIE)

    with http_client(server) as client:
        response = client.post(path, json=body_for(path, stream=True))

    events = events_of(response.text)
    assert response.status_code == 200
    assert " two" in events[-2]
    error = msgspec.json.decode(events[-1])["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "unavailable", None)
    wait_until(lambda: server.service.num_requests == 0)


@pytest.mark.parametrize("words", [[], ["one"]])
def test_an_answer_whose_engine_dies_is_503(server: Running, engine: FakeEngine, words: list[str]) -> None:
    engine.script = words_then(words, then=DIE)

    with http_client(server) as client:
        response = client.post(CHAT, json=chat_body())

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert error_of(response)["type"] == "server_error"


def test_a_stream_whose_engine_dies_before_the_first_token_is_an_error_event(
    server: Running, engine: FakeEngine
) -> None:
    engine.script = words_then([], then=DIE)

    with http_client(server) as client:
        (event,) = events_of(client.post(CHAT, json=chat_body(stream=True)).text)

    assert msgspec.json.decode(event)["error"]["code"] == "unavailable"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_whose_engine_dies_before_it_is_accepted_is_503(
    server: Running, engine: FakeEngine, stream: bool
) -> None:
    engine.script = lambda submit: iter([DIE])

    with http_client(server) as client:
        response = client.post(CHAT, json=chat_body(stream=stream))

    assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")


def test_a_stream_of_several_prompts_whose_engine_dies_ends_with_one_error(server: Running, engine: FakeEngine) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        then: Step = DIE if submit.prompt == TextPrompt("b") else threading.Event()
        yield from words_then(["one"], then=then)(submit)

    engine.script = script

    with http_client(server) as client:
        events = events_of(client.post(COMPLETIONS, json=completion_body(["a", "b"], stream=True)).text)

    assert ["error" in msgspec.json.decode(event) for event in events].count(True) == 1
    assert "error" in msgspec.json.decode(events[-1])
    wait_until(lambda: server.service.num_requests == 0)


def test_while_the_engine_is_away_requests_are_503_and_then_served_again(server: Running, engine: FakeEngine) -> None:
    with http_client(server) as client:
        engine.stop()
        wait_until(lambda: server.service.engines.models[0].hello is None)
        for path in (CHAT, COMPLETIONS):
            response = client.post(path, json=body_for(path, stream=True))
            assert response.status_code == 503
            assert response.headers["retry-after"] == "2"
            assert error_of(response)["code"] == "unavailable"
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert client.get("/ready").status_code == 503

        engine.start()
        wait_until(lambda: server.service.engines.is_ready)
        assert client.post(CHAT, json=chat_body()).status_code == 200


# --- limits and the end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_more_requests_than_the_limit_are_429_until_one_ends(engine: FakeEngine, stream: bool) -> None:
    until = threading.Event()
    engine.script = held_once_accepted(until)
    config = config_of(engine, max_requests=1)
    with running("openai", config) as server, http_client(server) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, CHAT, json=chat_body(stream=stream))
        wait_until(lambda: engine.submits)

        second = client.post(CHAT, json=chat_body(stream=stream))
        until.set()

        assert second.status_code == 429
        assert second.headers["retry-after"]
        assert (error_of(second)["type"], error_of(second)["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert first.result().status_code == 200
        wait_until(lambda: server.service.num_requests == 0)
        assert client.post(CHAT, json=chat_body()).status_code == 200


def test_while_draining_nothing_new_is_taken_and_streams_end_as_they_should(
    server: Running, engine: FakeEngine
) -> None:
    until = threading.Event()
    engine.script = held_once_accepted(until)
    with http_client(server) as client, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(client.post, CHAT, json=chat_body(stream=True))
        wait_until(lambda: engine.submits)
        server.service.is_draining = True

        refused = client.post(CHAT, json=chat_body())
        until.set()

        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert documents_of(under_way.result().text)[-1]["choices"][0]["finish_reason"] == "stop"


def test_many_streams_at_once_get_their_own_answers(server: Running) -> None:
    def ask(number: int) -> str:
        text = f"request {number} says {'very ' * number}much"
        documents = documents_of(client.post(CHAT, json=chat_body(text, stream=True)).text)
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in documents) == text
        return text

    with http_client(server) as client, ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(ask, range(64)))) == 64


def test_a_mistake_of_ours_is_a_logged_500_and_the_server_goes_on(
    server: Running, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    observed = server.service.metrics.ttft_seconds
    server.service.metrics.ttft_seconds = None  # type: ignore[assignment]
    with http_client(server) as client:
        response = client.post(CHAT, json=chat_body())
        server.service.metrics.ttft_seconds = observed

        assert response.status_code == 500
        error = error_of(response)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert response.headers["x-request-id"] in error["message"]
        assert client.post(CHAT, json=chat_body()).status_code == 200
    assert response.headers["x-request-id"] in caplog.text
    assert "Traceback" in caplog.text
    wait_until(lambda: server.service.num_requests == 0)
