"""Ollama's API over HTTP, with an engine that follows a script."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.api.config import ApiKey
from kvtier.api.limits import INLINE_BODY_BYTES
from kvtier.api.ollama.routes import OLLAMA_VERSION
from kvtier.engine.process.messages import FAILED, INVALID, STOPPED, TOO_LONG, Refused, Submit
from tests.support.examples import examples
from tests.support.fake_engine import (
    ALIAS,
    DIE,
    HELLO,
    MAX_MODEL_LEN,
    MODEL,
    FakeEngine,
    Running,
    Step,
    accepted,
    config_of,
    ending,
    fake_engine,
    held,
    held_once_accepted,
    pieces,
    refusing,
    running,
    said,
    wait_until,
    words_then,
)
from tests.support.waiting import LIMIT_S

USER = {"role": "user", "content": "one two three"}
GENERATE = {"model": MODEL, "prompt": "one two three"}
CHAT = {"model": MODEL, "messages": [USER]}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


@pytest.fixture
def engine(directory: Path) -> Iterator[FakeEngine]:
    with fake_engine(directory) as found:
        yield found


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with running("ollama", config_of(engine)) as found:
        yield found


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        yield client


def lines_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


def error_of(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    document = reply.json()
    assert list(document) == ["error"]
    return str(document["error"])


def is_recent(text: str) -> bool:
    assert text.endswith("Z")
    return abs(datetime.fromisoformat(text) - datetime.now(UTC)) < timedelta(minutes=1)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_generate_streams_a_line_per_piece_and_a_last_one_with_the_figures(
    http: httpx.Client, engine: FakeEngine
) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield from pieces(submit, ["a", "b"], cached={"device": 16, "server": 32})

    engine.script = script

    *growing, last = lines_of(http, "/api/generate", GENERATE)

    assert [(line["response"], line["done"]) for line in growing] == [("a", False), (" b", False)]
    assert all(line["model"] == MODEL and is_recent(line["created_at"]) for line in [*growing, last])
    assert last["total_duration"] > 0
    assert {name: last[name] for name in last if name not in ("created_at", "total_duration")} == {
        "model": MODEL,
        "response": "",
        "done": True,
        "done_reason": "stop",
        "load_duration": 0,
        "prompt_eval_count": 3,
        "prompt_eval_duration": 10_000_000,
        "eval_count": 2,
        "eval_duration": 20_000_000,
        "cached_tokens": {"device": 16, "server": 32},
    }


def test_chat_streams_messages_of_the_assistant(http: httpx.Client) -> None:
    *growing, last = lines_of(http, "/api/chat", CHAT)

    assert [line["message"] for line in growing] == [
        {"role": "assistant", "content": text} for text in ("one", " two", " three")
    ]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")


def test_without_streaming_there_is_one_object(http: httpx.Client) -> None:
    reply = http.post("/api/generate", json={**GENERATE, "stream": False})

    assert reply.headers["content-type"] == "application/json"
    document = reply.json()
    assert (document["response"], document["done"], document["done_reason"]) == ("one two three", True, "stop")
    assert (document["prompt_eval_count"], document["eval_count"]) == (3, 3)
    chat = http.post("/api/chat", json={**CHAT, "stream": False}).json()
    assert chat["message"] == {"role": "assistant", "content": "one two three"}


def test_an_answer_cut_by_num_predict_says_so(http: httpx.Client) -> None:
    last = lines_of(http, "/api/generate", {**GENERATE, "options": {"num_predict": 2}})[-1]

    assert (last["done_reason"], last["eval_count"]) == ("length", 2)


def test_a_piece_without_text_is_no_line(http: httpx.Client, engine: FakeEngine) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield said(submit, "")
        yield said(submit, "é")
        yield said(submit, "", completion=ending("stop", 3, seconds_per_token=0.0))

    engine.script = script

    lines = lines_of(http, "/api/generate", GENERATE)

    assert [line["response"] for line in lines] == ["é", ""]
    assert lines[-1]["eval_duration"] == 1, "clients divide by it"


def test_logprobs_come_with_the_text_they_belong_to(http: httpx.Client) -> None:
    asked = {**GENERATE, "logprobs": True, "top_logprobs": 2}

    first, *_, last = lines_of(http, "/api/generate", asked)

    assert first["logprobs"] == [
        {
            "token": "one",
            "logprob": -0.5,
            "bytes": list(b"one"),
            "top_logprobs": [
                {"token": "one", "logprob": -0.5, "bytes": list(b"one")},
                {"token": "one1", "logprob": -1.5, "bytes": list(b"one1")},
            ],
        }
    ]
    assert "logprobs" not in last
    whole = http.post("/api/generate", json={**asked, "stream": False}).json()
    assert [one["token"] for one in whole["logprobs"]] == ["one", " two", " three"]


def test_a_model_is_called_as_the_client_calls_it(http: httpx.Client) -> None:
    for name in (MODEL, f"{MODEL}:latest", ALIAS, ALIAS.removesuffix(":latest")):
        assert http.post("/api/generate", json={**GENERATE, "model": name, "stream": False}).json()["model"] == name


def test_the_engine_knows_the_request_by_the_id_that_is_given_back(http: httpx.Client, engine: FakeEngine) -> None:
    for is_streamed in (True, False):
        reply = http.post("/api/chat", json={**CHAT, "stream": is_streamed})

        assert reply.headers["x-request-id"] == engine.last.request_id
        assert engine.last.request_id.startswith("ollama-")


def test_without_a_prompt_the_model_is_loaded_or_unloaded_at_once(http: httpx.Client, engine: FakeEngine) -> None:
    reply = http.post("/api/generate", json={"model": MODEL}).json()
    assert is_recent(reply.pop("created_at"))
    assert reply == {"model": MODEL, "response": "", "done": True, "done_reason": "load"}
    reply = http.post("/api/chat", json={"model": MODEL, "keep_alive": 0}).json()
    assert reply["message"] == {"role": "assistant", "content": ""}
    assert (reply["done"], reply["done_reason"]) == (True, "unload")
    assert engine.submits == []


def test_finished_answers_are_counted(http: httpx.Client, server: Running) -> None:
    http.post("/api/generate", json=GENERATE)
    http.post("/api/generate", json={**GENERATE, "stream": False})

    registry = server.service.metrics.registry
    assert registry.get_sample_value("kvtier_api_output_tokens_total", {"model": MODEL}) == 6
    assert registry.get_sample_value("kvtier_api_prompt_tokens_total", {"model": MODEL}) == 6


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_example_of_ollamas_documentation_works_with_curl(server: Running) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Why is the sky blue?"})
    command = ["curl", "--silent", "--no-buffer", f"{server.url}/api/generate", "-d", body]

    done = subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S)

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert "".join(line["response"] for line in lines) == "Why is the sky blue?"
    assert lines[-1]["done"] is True


# --- the models -------------------------------------------------------------------------------------------------------


def test_ollama_is_running(http: httpx.Client) -> None:
    assert http.get("/").text == "Ollama is running"
    assert http.head("/").status_code == 200


def test_the_version_is_that_of_an_ollama_whose_api_this_is(http: httpx.Client) -> None:
    version = http.get("/api/version").json()["version"]

    assert version == OLLAMA_VERSION
    # Editors parse three numbers, and ask for the first version with `capabilities` in /api/show.
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert "completion" in http.post("/api/show", json={"model": MODEL}).json()["capabilities"]


def test_tags_list_every_name_with_what_is_behind_it(http: httpx.Client) -> None:
    models = http.get("/api/tags").json()["models"]

    assert [model["name"] for model in models] == [MODEL, ALIAS]
    assert models[0] == {
        "name": MODEL,
        "model": MODEL,
        "modified_at": "2023-11-14T22:13:20Z",
        "size": HELLO.weights_bytes,
        "digest": HELLO.namespace,
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "262K",
            "quantization_level": "F32",
        },
    }


def test_show_tells_what_the_engine_is(engine: FakeEngine) -> None:
    config = config_of(engine, default_options={"temperature": 0.7, "max_tokens": 64, "stop": ["\n", "end"]})

    with running("ollama", config) as server:
        found = httpx.post(f"{server.url}/api/show", json={"model": MODEL, "verbose": False}).json()
        by_name = httpx.post(f"{server.url}/api/show", json={"name": MODEL}).json()

    assert found == by_name
    assert found["template"] == HELLO.chat_template
    assert found["capabilities"] == ["completion"]
    assert found["details"]["family"] == "llama"
    assert found["model_info"]["general.architecture"] == "llama"
    assert found["model_info"]["llama.context_length"] == MAX_MODEL_LEN
    names_and_values = [line.split(maxsplit=1) for line in found["parameters"].splitlines()]
    assert names_and_values == [["temperature", "0.7"], ["num_predict", "64"], ["stop", '"\\n"'], ["stop", '"end"']]
    assert found["modelfile"].splitlines()[1:3] == ["FROM tiny", 'TEMPLATE """{{ messages }}"""']
    assert "PARAMETER num_predict 64" in found["modelfile"]


@pytest.mark.parametrize(("device", "share"), [("cpu", 0), ("cuda:0", 1)])
def test_ps_adds_up_the_memory_of_a_models_engines(directory: Path, device: str, share: int) -> None:
    hello = msgspec.structs.replace(HELLO, device=device)

    with fake_engine(directory, hello=hello) as one, fake_engine(directory, name="engine-1", hello=hello) as other:
        with running("ollama", config_of(one, other)) as server:
            (model,) = httpx.get(f"{server.url}/api/ps").json()["models"]

    memory_bytes = 2 * (HELLO.weights_bytes + HELLO.kv_bytes)
    assert (model["name"], model["size"], model["size_vram"]) == (MODEL, memory_bytes, share * memory_bytes)
    assert model["context_length"] == MAX_MODEL_LEN
    assert datetime.fromisoformat(model["expires_at"]) > datetime.now(UTC) + timedelta(days=3650)


@pytest.mark.parametrize(
    ("changes", "details"),
    [
        ({"architecture": "Qwen2ForCausalLM", "num_parameters": 7_615_616_512}, ("qwen2", "7.6B", "F32")),
        ({"dtype": "torch.bfloat16", "num_parameters": 494_032_768}, ("llama", "494.03M", "BF16")),
        ({"quantization": "gptq", "dtype": "float16", "num_parameters": 12}, ("llama", "12", "GPTQ")),
        ({"architecture": "Glm4ForCausalLM", "quantization": "fp8"}, ("glm4", "262K", "FP8")),
        ({"dtype": "float16"}, ("llama", "262K", "F16")),
    ],
    ids=str,
)
def test_families_sizes_and_levels_are_written_as_ollama_does(
    directory: Path, changes: dict[str, Any], details: tuple[str, str, str]
) -> None:
    with fake_engine(directory, hello=msgspec.structs.replace(HELLO, **changes)) as engine:
        with running("ollama", config_of(engine)) as server:
            found = httpx.get(f"{server.url}/api/tags").json()["models"][0]["details"]

    assert (found["family"], found["parameter_size"], found["quantization_level"]) == details


def test_while_its_engines_are_away_a_model_is_listed_and_the_rest_is_for_later(
    http: httpx.Client, engine: FakeEngine, server: Running
) -> None:
    engine.stop()
    wait_until(lambda: server.service.engines.models[0].hello is None)

    tag = http.get("/api/tags").json()["models"][0]
    assert (tag["name"], tag["size"], tag["digest"], tag["details"]["family"]) == (MODEL, 0, "", "")
    assert http.get("/api/ps").json() == {"models": []}
    bodies = [("/api/show", {"model": MODEL}), ("/api/generate", GENERATE), ("/api/chat", CHAT)]
    for path, body in [*bodies, ("/api/generate", {"model": MODEL})]:
        reply = http.post(path, json=body)
        assert "tiny is starting" in error_of(reply, 503)
        assert int(reply.headers["retry-after"]) > 0

    engine.start()
    wait_until(lambda: server.service.engines.models[0].hello is not None)
    assert http.post("/api/generate", json=GENERATE).status_code == 200


# --- OpenAI's API on the same port ------------------------------------------------------------------------------------


def test_openais_api_is_served_under_v1_and_counted_as_such(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [USER]}

    answer = http.post("/v1/chat/completions", json=body)

    assert answer.json()["choices"][0]["message"]["content"] == "one two three"
    assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert http.post("/v1/chat/completions", json={**body, "n": 0}).json()["error"]["param"] == "n"
    assert [http.get(path).json()["error"]["code"] for path in ("/v1", "/v1/other")] == ["unknown_url"] * 2
    assert error_of(http.get("/v1x"), 404)
    metrics = http.get("/metrics").text
    assert 'kvtier_api_requests_total{api="openai",path="/v1/chat/completions",status="200"} 1.0' in metrics
    assert 'kvtier_api_requests_total{api="openai",path="other",status="404"} 2.0' in metrics
    assert 'kvtier_api_requests_total{api="ollama",path="other",status="404"} 1.0' in metrics


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_not_found_and_those_there_are_named(http: httpx.Client) -> None:
    for path, rest in (("/api/generate", {"prompt": "hi"}), ("/api/chat", {"messages": [USER]}), ("/api/show", {})):
        sentence = error_of(http.post(path, json={"model": "big", **rest}), 404)
        assert sentence == f"model 'big' not found; available: {MODEL}"


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("reason", "status"), [(TOO_LONG, 400), (INVALID, 400), (STOPPED, 503), (FAILED, 500)])
def test_a_prompt_the_engine_refuses_is_a_plain_error(
    http: httpx.Client, engine: FakeEngine, reason: str, status: int, is_streamed: bool
) -> None:
    engine.script = refusing(reason, "the engine's sentence")

    reply = http.post("/api/chat", json={**CHAT, "stream": is_streamed})

    assert error_of(reply, status) == "the engine's sentence"
    assert reply.headers["x-request-id"] == engine.last.request_id


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/api/pull", "POST"),
        ("/api/push", "POST"),
        ("/api/create", "POST"),
        ("/api/copy", "POST"),
        ("/api/delete", "DELETE"),
        ("/api/blobs/sha256:00", "POST"),
    ],
)
def test_what_ollama_does_besides_is_not_implemented(http: httpx.Client, path: str, method: str) -> None:
    assert "cannot be pulled" in error_of(http.request(method, path, json={"model": MODEL}), 501)


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings", "/v1/embeddings"])
def test_embeddings_are_refused_with_a_sentence(http: httpx.Client, path: str) -> None:
    reply = http.post(path, json={"model": MODEL, "input": "hi"})

    assert reply.status_code == 400
    assert "embeddings are supported by models that run on vLLM only" in reply.text


def test_unknown_paths_and_methods_are_told_in_ollamas_shape(http: httpx.Client) -> None:
    assert error_of(http.get("/api/nothing"), 404) == "the path /api/nothing does not exist"
    reply = http.get("/api/generate")
    assert error_of(reply, 405) == "/api/generate does not support GET"
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"model": "tiny", "prompt": "\\ud800"}', b"[" * 100_000],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_object_is_refused_and_the_server_goes_on(http: httpx.Client, body: bytes) -> None:
    for path in ("/api/generate", "/api/chat", "/api/show"):
        is_too_large = path == "/api/show" and len(body) > INLINE_BODY_BYTES
        assert error_of(http.post(path, content=body), 413 if is_too_large else 400)
    assert http.post("/api/generate", json=GENERATE).status_code == 200


def test_a_body_that_is_too_large_is_refused(http: httpx.Client) -> None:
    assert "larger than" in error_of(http.post("/api/generate", json={**GENERATE, "prompt": "x" * (1 << 21)}), 413)


def test_a_number_that_no_engine_could_be_told_is_refused(http: httpx.Client) -> None:
    for name in ("num_predict", "top_k", "seed", "temperature", "num_thread"):
        body = b'{"model": "tiny", "prompt": "hi", "options": {"%s": %s}}' % (name.encode(), b"9" * 40)
        reply = http.post("/api/generate", content=body)
        assert name in error_of(reply, 400)


def test_a_bug_is_logged_and_told_without_its_details(
    http: httpx.Client, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    server.service.engines.models[0].connections[0].hello = msgspec.structs.replace(HELLO, architecture=None)  # type: ignore[arg-type]

    sentence = error_of(http.post("/api/show", json={"model": MODEL}), 500)

    assert sentence == "internal error: see the server's log"
    wait_until(lambda: any(record.exc_info for record in caplog.records))


def test_a_bug_in_a_stream_is_its_last_line(
    http: httpx.Client, server: Running, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server.service.metrics = None  # type: ignore[assignment]

    lines = lines_of(http, "/api/generate", GENERATE)

    assert lines[-1] == {"error": "internal error: see the server's log"}
    assert any(engine.last.request_id in record.getMessage() for record in caplog.records)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_with_keys_only_their_holders_are_served_and_share_no_blocks(engine: FakeEngine) -> None:
    keys = (ApiKey(name="a", key="key-a", salt="salt-a"), ApiKey(name="b", key="key-b", salt="salt-b"))

    with running("ollama", config_of(engine, keys=keys)) as server, httpx.Client(base_url=server.url) as http:
        for method, path in (("GET", "/api/tags"), ("GET", "/api/ps"), ("GET", "/api/version"), ("POST", "/api/show")):
            assert error_of(http.request(method, path, json={"model": MODEL}), 401)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-a"}):
            reply = http.post("/api/generate", json=GENERATE, headers=headers)
            assert error_of(reply, 401)
            assert reply.headers["www-authenticate"] == "Bearer"
        assert engine.submits == []
        assert http.get("/").status_code == http.get("/health").status_code == http.get("/ready").status_code == 200
        for key in ("key-a", "key-b"):
            reply = http.post("/api/generate", json=GENERATE, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200

    salts = [submit.salt for submit in engine.submits]
    assert len(set(salts)) == 2
    assert all(salts)


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def connect_and_ask(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(server.address)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("phase", ["queued", "accepted", "begun"])
def test_a_client_that_leaves_frees_the_engine(
    server: Running, engine: FakeEngine, phase: str, is_streamed: bool
) -> None:
    never = threading.Event()
    scripts = {"queued": held(never), "accepted": held_once_accepted(never), "begun": words_then(["a"], then=never)}
    engine.script = scripts[phase]
    with connect_and_ask(server, "/api/chat", {**CHAT, "stream": is_streamed}) as connection:
        wait_until(lambda: engine.submits)
        if is_streamed and phase == "begun":
            came = b""
            while b'"content":"a"' not in came:
                came += connection.recv(4096)

    wait_until(lambda: engine.aborts == [engine.last.number])
    wait_until(lambda: server.service.num_requests == 0)


def test_a_client_that_leaves_before_its_body_is_complete_is_forgotten(server: Running, engine: FakeEngine) -> None:
    with socket.create_connection(server.address) as connection:
        connection.sendall(b'POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"model"')

    assert httpx.post(f"{server.url}/api/generate", json=GENERATE).status_code == 200
    assert len(engine.submits) == 1


def test_an_engine_that_dies_ends_the_stream_with_an_error(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = words_then(["a", "b"], then=DIE)

    lines = lines_of(http, "/api/generate", GENERATE)

    assert [line["response"] for line in lines[:-1]] == ["a", "b"]
    assert list(lines[-1]) == ["error"]
    assert "stopped before the answer was complete" in lines[-1]["error"]


def test_an_engine_that_dies_during_a_whole_answer_is_503(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = words_then(["a", "b"], then=DIE)

    reply = http.post("/api/chat", json={**CHAT, "stream": False})

    assert "stopped before the answer was complete" in error_of(reply, 503)
    assert "retry-after" in reply.headers


def test_a_prompt_that_is_refused_later_ends_the_stream_with_an_error(http: httpx.Client, engine: FakeEngine) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield Refused(submit.number, STOPPED, "the engine stops")

    engine.script = script

    assert lines_of(http, "/api/generate", GENERATE) == [{"error": "the engine stops"}]


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("error", "the engine failed on this request"),
        ("abort", "stopped before the answer was complete"),
        ("dead_end", "the grammar allows no answer from here"),
    ],
)
def test_an_answer_the_engine_gave_up_is_no_answer(
    http: httpx.Client, engine: FakeEngine, reason: str, sentence: str
) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield said(submit, "a", completion=ending(reason, 1))

    engine.script = script

    status = {"error": 500, "abort": 503, "dead_end": 400}[reason]
    assert sentence in lines_of(http, "/api/generate", GENERATE)[-1]["error"]
    assert sentence in error_of(http.post("/api/generate", json={**GENERATE, "stream": False}), status)


def test_no_more_requests_are_served_at_once_than_there_are_places(engine: FakeEngine) -> None:
    never = threading.Event()
    engine.script = held_once_accepted(never)

    with running("ollama", config_of(engine, max_requests=1)) as server:
        with connect_and_ask(server, "/api/generate", GENERATE):
            wait_until(lambda: server.service.num_requests == 1)
            for is_streamed in (True, False):
                reply = httpx.post(f"{server.url}/api/generate", json={**GENERATE, "stream": is_streamed})
                assert "which is the limit" in error_of(reply, 429)
        wait_until(lambda: server.service.num_requests == 0)


# --- anything at all --------------------------------------------------------------------------------------------------

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "5m", MODEL, 10**400, -(2**63), 2**64])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_OPTIONS = st.dictionaries(
    st.sampled_from(["num_predict", "temperature", "top_k", "seed", "stop", "num_ctx", "repeat_penalty", "other"]),
    _VALUES,
    max_size=3,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", 3])},
        optional={"content": _VALUES, "images": _VALUES, "tool_calls": _VALUES, "thinking": _VALUES},
    ),
    max_size=3,
)
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just(MODEL) | _VALUES,
        "prompt": st.text(max_size=20) | _VALUES,
        "messages": _MESSAGES | _VALUES,
        "options": _OPTIONS | _VALUES,
        "keep_alive": _VALUES,
        **{
            name: _VALUES
            for name in ("stream", "raw", "system", "think", "format", "logprobs", "top_logprobs", "other")
        },
    },
)


def test_no_json_in_any_field_gives_a_500(server: Running, http: httpx.Client) -> None:
    @settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
    @given(path=st.sampled_from(["/api/generate", "/api/chat", "/api/show"]), body=_BODIES)
    def send(path: str, body: dict[str, Any]) -> None:
        reply = http.post(path, content=json.dumps(body))

        if reply.status_code == 200:
            assert [json.loads(line) for line in reply.text.splitlines()]
        else:
            assert reply.status_code in (400, 404)
            assert error_of(reply, reply.status_code)

    send()
    assert http.post("/api/generate", json=GENERATE).status_code == 200
    assert server.service.num_requests == 0
