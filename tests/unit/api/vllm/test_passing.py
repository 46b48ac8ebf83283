"""Requests and answers that pass to vLLM and back unchanged."""

from __future__ import annotations

import base64
import contextlib
import json

import httpx
import pytest

from kvtier.api.config import ApiKey, ServedModelConfig
from tests.support.fake_engine import FakeEngine, Running, fake_engine, http_client
from tests.support.vllm_serving import MODEL, FakeVllm, chat, config_of_vllm
from tests.support.waiting import wait_until
from tests.unit.api.vllm.conftest import Serve

CHAT = "/v1/chat/completions"
ALICE = ApiKey(name="alice", key="key-of-alice")
BOB = ApiKey(name="bob", key="key-of-bob")
SHARED = ApiKey(name="shared", key="key-of-all", share=True, metrics=True)


def asked_of(engines: list[FakeVllm]) -> list[tuple[str, bytes]]:
    return [(one.target, one.body) for engine in engines for one in engine.asked()]


@pytest.mark.parametrize(
    "body",
    [
        b'{ "model":"fake",\n "messages":[{"role":"user","content":"caf\\u00e9 \xc3\xa9"}] , "tools":[{"type":'
        b'"function","function":{"name":"f","parameters":{"a":1.50}}}]}',
        b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}],"unknown_field":'
        b'{"x":[1,2,{"y":null}]},"model":"fake"}',
    ],
)
def test_bodies_arrive_byte_for_byte(server: Running, engines: list[FakeVllm], body: bytes) -> None:
    with http_client(server) as client:
        response = client.post(f"{CHAT}?a=b%20c", content=body, headers={"content-type": "application/json"})

    assert response.status_code == 200
    assert asked_of(engines) == [(f"{CHAT}?a=b%20c", body)]


def test_a_stream_comes_as_it_was_sent(server: Running) -> None:
    with http_client(server) as client:
        response = client.post(CHAT, json=chat("a b c", stream=True))

    events = response.text.split("\n\n")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [json.loads(one[6:])["choices"][0]["delta"].get("content") for one in events[:3]] == ["a", " b", " c"]
    assert events[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/whatever/comes/next"])
def test_every_path_below_v1_is_served(server: Running, engines: list[FakeVllm], path: str) -> None:
    with http_client(server) as client:
        response = client.post(path, json={"model": MODEL, "input": "a b"})

    assert response.status_code == 200
    assert [target for target, _ in asked_of(engines)] == [path]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_of_a_model_that_vllm_runs_are_asked_of_vllm(serve: Serve, engines: list[FakeVllm], path: str) -> None:
    server = serve("openai", config_of_vllm(*engines, keys=(ALICE,)))
    with http_client(server, key=ALICE.key) as client:
        response = client.post(path, json={"model": MODEL, "prompt": "a b", "unknown": 1})
    with http_client(server) as client:
        without_key = client.post(path, json={"model": MODEL, "prompt": "a b"})

    assert (response.status_code, without_key.status_code) == (200, 401)
    assert [target for target, _ in asked_of(engines)] == [path]


def test_a_body_without_a_model_is_for_the_only_one(server: Running, engines: list[FakeVllm]) -> None:
    with http_client(server) as client:
        assert client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]}).status_code == 200

    assert len(asked_of(engines)) == 1


def test_a_form_goes_to_the_model_that_it_names(server: Running, engines: list[FakeVllm]) -> None:
    with http_client(server) as client:
        files = {"file": ("a.wav", b"\0\1\2" * 1000)}
        right = client.post("/v1/audio/transcriptions", data={"model": MODEL}, files=files)
        wrong = client.post("/v1/audio/transcriptions", data={"model": "other"}, files=files)

    assert (right.status_code, wrong.status_code) == (200, 404)
    [(_, body)] = asked_of(engines)
    assert b"\0\1\2" * 1000 in body


def test_errors_of_vllm_are_the_clients(server: Running) -> None:
    with http_client(server) as client:
        response = client.post(CHAT, json=chat("x", fake={"status": 422}))

    assert response.status_code == 422
    assert response.json()["error"]["message"] == "refused with 422"


def test_headers_about_a_connection_and_keys_stay_here(serve: Serve, engines: list[FakeVllm]) -> None:
    server = serve("openai", config_of_vllm(*engines, keys=(ALICE,)))
    headers = {"connection": "close, x-secret", "x-secret": "1", "x-kept": "2", "te": "trailers", "cookie": "c=d"}
    with http_client(server, key=ALICE.key) as client:
        response = client.post(CHAT, json=chat("x"), headers=headers)

    [asked] = [one for engine in engines for one in engine.asked()]
    assert asked.headers["x-kept"] == "2"
    assert not {"authorization", "x-secret", "te", "cookie", "origin"} & set(asked.headers)
    assert asked.headers["x-request-id"] in response.headers["x-request-id"]
    assert "server" not in response.headers


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": ["x"]}}, "kv_transfer_params"),
        ({"n": 129}, "n"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"prefix": "handbook"}, "prefix"),
    ],
)
def test_what_is_not_served_is_refused_in_one_sentence(
    server: Running, engines: list[FakeVllm], fields: dict[str, object], parameter: str
) -> None:
    with http_client(server) as client:
        response = client.post(CHAT, json=chat("x", **fields))

    assert response.status_code == 400
    assert response.json()["error"]["param"] == parameter
    assert not asked_of(engines)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"nonsense", b'{"model": "fake"' + b"[" * 100_000])
def test_what_is_no_json_object_is_refused(server: Running, body: bytes) -> None:
    with http_client(server) as client:
        response = client.post(CHAT, content=body)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_adapters_are_not_loaded_by_clients(server: Running, engines: list[FakeVllm]) -> None:
    with http_client(server) as client:
        for path in ("/v1/load_lora_adapter", "/v1/unload%5Flora_adapter"):
            assert client.post(path, json={"model": MODEL}).status_code == 403

    assert not asked_of(engines)


def test_large_bodies_arrive_whole(server: Running, engines: list[FakeVllm]) -> None:
    text = "word " * 300_000
    with http_client(server) as client:
        response = client.post(CHAT, json=chat(text, max_tokens=2))
        too_large = client.post(CHAT, json=chat(text * 6))

    assert response.json()["choices"][0]["message"]["content"] == "word word"
    [(_, body)] = asked_of(engines)
    assert json.loads(body) == chat(text, max_tokens=2)
    assert too_large.status_code == 413


def test_large_answers_come_whole(server: Running) -> None:
    with http_client(server) as client:
        response = client.post(CHAT, json=chat("x", fake={"num_bytes": 20_000_000}))

    assert len(response.json()["text"]) == 20_000_000


def test_salts_keep_keys_apart(serve: Serve, engines: list[FakeVllm]) -> None:
    server = serve("openai", config_of_vllm(*engines, keys=(ALICE, BOB, SHARED)))
    body = chat("the same words", metadata=[{"a": 1.0}])
    for key in (ALICE, BOB, SHARED):
        for fields in ({}, {"cache_salt": "mine"}):
            with http_client(server, key=key.key) as client:
                assert client.post(CHAT, json=body | fields).status_code == 200

    documents = [one.document for engine in engines for one in engine.asked()]
    salts = [document.pop("cache_salt", None) for document in documents]
    assert all(document == body for document in documents)
    assert len(set(salts)) == 6
    assert salts.count(None) == 1
    assert all(len(salt) == 64 for salt in salts if salt is not None)


def test_a_path_without_a_salt_is_for_keys_that_share(serve: Serve, engines: list[FakeVllm]) -> None:
    server = serve("openai", config_of_vllm(*engines, keys=(ALICE, SHARED)))
    statuses = []
    for key in (ALICE, SHARED):
        with http_client(server, key=key.key) as client:
            statuses.append(client.post("/v1/new", json={"model": MODEL}).status_code)
            statuses.append(client.post("/v1/audio/translations", data={"model": MODEL}, files={"f": b""}).status_code)

    assert statuses == [403, 403, 200, 200]


def test_without_a_key_nothing_is_served(serve: Serve, engines: list[FakeVllm]) -> None:
    server = serve("openai", config_of_vllm(*engines, keys=(ALICE, SHARED)))
    with http_client(server) as client:
        assert client.post(CHAT, json=chat("x")).status_code == 401
        assert client.post("/v1/responses", json=chat("x")).status_code == 401
        assert client.get("/metrics/vllm-0").status_code == 401
    with http_client(server, key=SHARED.key) as client:
        assert "vllm:num_requests_running" in client.get("/metrics/vllm-0").text
        assert client.get("/metrics/other").status_code == 404

    assert not asked_of(engines)


def test_pages_of_other_sites_may_not_ask(server: Running) -> None:
    with http_client(server) as client:
        assert client.post(CHAT, json=chat("x"), headers={"origin": "http://evil.example"}).status_code == 403
        assert client.post(CHAT, json=chat("x"), headers={"host": "evil.example"}).status_code == 403


def test_the_name_decides_which_engine_answers(serve: Serve, engines: list[FakeVllm], tmp_path: object) -> None:
    with fake_engine(engines[0].path.parent, name="own") as own:
        server = serve("openai", config_of_vllm(*engines, others=(_own_model(own),)))
        with http_client(server) as client:
            names = [one["id"] for one in client.get("/v1/models").json()["data"]]
            for name in ("own-model", MODEL):
                assert client.post(CHAT, json=chat("hello") | {"model": name}).status_code == 200
            large = chat("word " * 20_000)
            assert client.post(CHAT, json=large | {"model": "own-model", "max_tokens": 2}).status_code == 200
            assert client.post(CHAT, json=large).status_code == 200
            unknown = client.post(CHAT, json=chat("x") | {"model": "third"})
            other_path = client.post("/v1/embeddings", json={"model": "own-model", "input": "x"})
            ready = client.get("/ready").json()

        assert len(own.submits) == 2
    assert sorted(names) == [MODEL, "own-model"]
    assert len(asked_of(engines)) == 2
    assert unknown.status_code == 404
    assert MODEL in unknown.json()["error"]["message"]
    assert other_path.status_code == 404
    assert {name: set(found) for name, found in ready["models"].items()} == {
        "own-model": {"own"},
        MODEL: {"vllm-0", "vllm-1"},
    }


def _own_model(engine: FakeEngine) -> ServedModelConfig:
    return ServedModelConfig(names=("own-model",), engines=(engine.address,))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: Running, engines: list[FakeVllm], stream: bool) -> None:
    body = chat("word " * 1000, stream=stream, fake={"word_s": 0.05} if stream else {"hold": True})
    with http_client(server) as client, contextlib.suppress(httpx.ReadTimeout):
        with client.stream("POST", CHAT, json=body, timeout=1.0) as response:
            assert next(response.iter_bytes())

    wait_until(lambda: [one.ended for engine in engines for one in engine.asked()] == ["aborted"])
    wait_until(lambda: server.service.num_requests == 0)
    assert all(engine.num_requests == 0 for engine in server.service.vllm.engines)


def test_a_client_that_does_not_read_holds_the_engine_back(server: Running, engines: list[FakeVllm]) -> None:
    body = chat("x", stream=True, fake={"endless": "body"})
    with http_client(server) as client, client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_bytes(1 << 16)
        for _ in range(64):
            assert next(lines)

    wait_until(lambda: [one.ended for engine in engines for one in engine.asked()] == ["aborted"])


@pytest.mark.parametrize(
    "fake",
    [
        {"raw": base64.b64encode(b"SSH-2.0-OpenSSH\r\n\r\n").decode()},
        {"raw": base64.b64encode(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc").decode()},
        {"raw": base64.b64encode(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n").decode()},
        {"raw": ""},
        {"endless": "head"},
    ],
)
def test_an_engine_that_answers_nonsense_is_one_clear_error(server: Running, fake: dict[str, object]) -> None:
    with http_client(server) as client:
        response = client.post(CHAT, json=chat("x", fake=fake))
        after = client.post(CHAT, json=chat("x"))

    assert response.status_code in (500, 503)
    assert "engines of fake" in response.json()["error"]["message"]
    assert after.status_code == 200


def test_no_more_requests_than_there_are_places(serve: Serve, engines: list[FakeVllm]) -> None:
    server = serve("openai", config_of_vllm(*engines, max_requests=1))
    with http_client(server) as client:
        with client.stream("POST", CHAT, json=chat("a b " * 100, stream=True, fake={"word_s": 0.05})) as held:
            pieces = held.iter_bytes()
            assert next(pieces)
            assert client.post(CHAT, json=chat("x")).status_code == 429


def test_what_was_asked_is_counted(server: Running) -> None:
    with http_client(server) as client:
        client.post(CHAT, json=chat("x"))
        client.post("/v1/responses", json=chat("x"))
        client.post("/v1/other", json=chat("x"))
        text = client.get("/metrics").text

    for path in (CHAT, "/v1/responses", "other"):
        assert f'kvtier_api_requests_total{{api="openai",path="{path}",status="200"}} 1.0' in text
    assert 'kvtier_api_engine_up{engine="vllm-0"} 1.0' in text
    assert 'kvtier_api_engine_starts_total{engine="vllm-1"} 1.0' in text
