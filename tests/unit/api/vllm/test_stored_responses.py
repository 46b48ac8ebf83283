"""Stored responses are read, cancelled and continued where they are: at the engine of vLLM that has them."""

from __future__ import annotations

import httpx
import pytest

from kvtier.api.config import ApiKey, ServedModelConfig
from kvtier.api.vllm.response_places import ResponseIdReader, ResponsePlace, ResponsePlaces
from tests.support.fake_engine import Running, fake_engine, http_client
from tests.support.vllm_serving import MODEL, FakeVllm, config_of_vllm
from tests.support.waiting import wait_until
from tests.unit.api.vllm.conftest import Serve

RESPONSES = "/v1/responses"
ALICE = ApiKey(name="alice", key="key-of-alice")
BOB = ApiKey(name="bob", key="key-of-bob")
UNKNOWN = "resp_" + "0" * 32


def create(server: Running, *, key: str | None = None, **fields: object) -> httpx.Response:
    with http_client(server, key=key) as client:
        return client.post(RESPONSES, json={"model": MODEL, "input": "a b", **fields})


def about(
    server: Running, response_id: str, *, method: str = "GET", end: str = "", key: str | None = None
) -> httpx.Response:
    with http_client(server, key=key) as client:
        return client.request(method, f"{RESPONSES}/{response_id}{end}")


def sentence_of(response: httpx.Response) -> str:
    found: str = response.json()["error"]["message"]
    return found


def id_of(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        return response.text.partition('"id": "')[2].partition('"')[0]
    found: str = response.json()["id"]
    return found


def targets(engine: FakeVllm) -> list[str]:
    return [one.target for one in engine.asked()]


@pytest.mark.parametrize("stream", [False, True])
def test_each_is_read_where_it_is(server: Running, engines: list[FakeVllm], stream: bool) -> None:
    created = [create(server, stream=stream, input=f"{number} x") for number in range(6)]
    assert {len(targets(engine)) for engine in engines} == {3}

    for number, response in enumerate(created):
        found = about(server, id_of(response), end="?include=x")
        assert (found.status_code, found.json()["output"]) == (200, [f"{number}", "x"])
        cancelled = about(server, id_of(response), method="POST", end="/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert about(server, id_of(response), method="DELETE").status_code == 405  # vLLM's own answer
    assert f"{RESPONSES}/{id_of(created[0])}?include=x" in [one for engine in engines for one in targets(engine)]


def test_the_next_turn_goes_to_the_engine_that_has_the_one_before(server: Running, engines: list[FakeVllm]) -> None:
    first = create(server)
    [engine] = [one for one in engines if targets(one)]
    for _ in range(4):
        assert create(server, previous_response_id=id_of(first), input="c").status_code == 200

    assert len(targets(engine)) == 5


def test_an_unknown_one_is_one_sentence(server: Running, engines: list[FakeVllm]) -> None:
    sentence = f'the response "{UNKNOWN}" is unknown or no longer kept'
    for response in (
        about(server, UNKNOWN),
        about(server, UNKNOWN, method="DELETE"),
        about(server, UNKNOWN, method="POST", end="/cancel"),
        about(server, UNKNOWN, end="/input_items"),
        create(server, previous_response_id=UNKNOWN),
    ):
        assert (response.status_code, sentence_of(response)) == (404, sentence)
    assert [targets(engine) for engine in engines] == [[], []]


def test_one_whose_engine_has_stopped_is_one_sentence(server: Running, engines: list[FakeVllm]) -> None:
    response_id = id_of(create(server))
    [engine] = [one for one in engines if targets(one)]
    engine.kill()
    wait_until(lambda: not all(one.is_up for one in server.service.vllm.engines))
    for response in (about(server, response_id), create(server, previous_response_id=response_id)):
        assert response.status_code == 404
        assert sentence_of(response) == "the response is gone: the engine that had it has stopped"

    engine.start()
    wait_until(lambda: all(one.is_up for one in server.service.vllm.engines))
    again = about(server, response_id)

    assert (again.status_code, sentence_of(again)) == (404, f"Response with id '{response_id}' not found.")


def test_no_other_key_can_refer_to_it(serve: Serve, engines: list[FakeVllm]) -> None:
    server = serve("openai", config_of_vllm(*engines, keys=(ALICE, BOB)))
    response_id = id_of(create(server, key=ALICE.key))

    assert about(server, response_id, key=ALICE.key).status_code == 200
    assert create(server, key=ALICE.key, previous_response_id=response_id).status_code == 200
    before = sum(len(targets(engine)) for engine in engines)
    for response in (
        about(server, response_id, key=BOB.key),
        about(server, response_id, key=BOB.key, method="POST", end="/cancel"),
        create(server, key=BOB.key, previous_response_id=response_id),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    assert about(server, response_id).status_code == 401
    chosen = create(server, key=BOB.key, request_id=response_id)
    assert (chosen.status_code, sentence_of(chosen)) == (400, "request_id is not supported here: vLLM chooses it")
    assert sum(len(targets(engine)) for engine in engines) == before


def test_the_only_engine_is_asked_even_for_what_this_server_has_not_seen(serve: Serve, engines: list[FakeVllm]) -> None:
    """As after a restart of the HTTP server alone. Not with keys: whose response it is would be unknown."""
    first = serve("openai", config_of_vllm(engines[0]))
    response_id = id_of(create(first))
    second = serve("openai", config_of_vllm(engines[0]))

    assert about(second, response_id).status_code == 200
    assert create(second, previous_response_id=response_id).status_code == 200
    assert sentence_of(about(second, UNKNOWN)) == f"Response with id '{UNKNOWN}' not found."

    third = serve("openai", config_of_vllm(engines[0], keys=(ALICE,)))

    assert about(third, response_id, key=ALICE.key).status_code == 404
    assert create(third, key=ALICE.key, previous_response_id=response_id).status_code == 404


def test_those_of_kvtiers_own_engine_are_found_beside_them(serve: Serve, engines: list[FakeVllm]) -> None:
    with fake_engine(engines[0].path.parent, name="own") as own:
        other = ServedModelConfig(names=("own",), engines=(own.address,))
        server = serve("openai", config_of_vllm(engines[0], others=(other,)))
        with http_client(server) as client:
            response = client.post(RESPONSES, json={"model": "own", "input": "hello"})
        response_id = id_of(response)

        assert about(server, response_id).json()["id"] == response_id
        refused = about(server, response_id, method="POST", end="/cancel")
        assert (refused.status_code, sentence_of(refused)) == (
            400,
            "only responses with background: true can be cancelled",
        )
        assert about(server, response_id, method="DELETE").json()["deleted"]
        assert targets(engines[0]) == []


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("is_event_stream", "answer", "found"),
    [
        (False, b'{"id":"resp_1","output":[]}', "resp_1"),
        (False, b' { "id" : "resp-a.b:c" }', "resp-a.b:c"),
        (False, b'{"object":{"id":"resp_1"}}', None),
        (False, b'{"id":"' + b"x" * 300 + b'"}', None),
        (True, b'event: response.created\ndata: {"response":{"id":"resp_1","input":"x"}}\n\n', "resp_1"),
        (
            True,
            b'event: response.queued\ndata: {"type":"x","sequence_number":0,"response":{"id":"resp_1"}}\n\n',
            "resp_1",
        ),
        (True, b'event: error\ndata: {"message":"\\"response\\":{\\"id\\":\\"resp_1\\"}"}\n\n', None),
        (True, b'data: {"metadata":"event: response.created\\ndata: {","response":{"id":"resp_1"}}\n\n', None),
        (True, b"x" * 100_000, None),
    ],
)
def test_the_id_is_read_from_the_beginning_of_an_answer(
    is_event_stream: bool, answer: bytes, found: str | None, size: int
) -> None:
    reader = ResponseIdReader(is_event_stream=is_event_stream)
    ids = [reader.feed(answer[first : first + size]) for first in range(0, len(answer), size)]

    assert [one for one in ids if one is not None] == ([] if found is None else [found])


def test_places_are_bounded_for_each_tenant() -> None:
    places = ResponsePlaces(num_tenants=2, most=8)
    for number in range(10):
        places.note("a", f"{number}", ResponsePlace("m", "e"))
        places.find("a", "0")
    places.note("b", "0", ResponsePlace("m", "other"))

    assert [number for number in range(10) if places.find("a", f"{number}")] == [0, 7, 8, 9]
    assert places.find("b", "0") == ResponsePlace("m", "other")
    assert places.find("c", "0") is None
