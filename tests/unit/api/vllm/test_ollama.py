"""Ollama's API in front of vLLM: what vLLM is asked, and what clients get."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pytest

from kvtier.api.config import ApiKey
from tests.support.fake_engine import Running, http_client
from tests.support.vllm_serving import MODEL, FakeVllm, config_of_vllm
from tests.unit.api.vllm.conftest import Serve

_TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}


@pytest.fixture
def server(engines: list[FakeVllm], serve: Serve) -> Running:
    return serve("ollama", config_of_vllm(*engines))


def post(server: Running, path: str, **fields: Any) -> httpx.Response:
    with http_client(server) as client:
        return client.post(path, json={"model": MODEL, **fields})


def last_asked(engines: list[FakeVllm]) -> tuple[str, dict[str, Any]]:
    [asked] = [one for engine in engines for one in engine.asked()]
    return asked.target, asked.document


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


def test_a_chat_grows_line_by_line(server: Running, engines: list[FakeVllm]) -> None:
    options = {"num_predict": 2, "temperature": 0, "top_k": 5, "repeat_penalty": 1.5, "seed": 3, "stop": ["END"]}
    response = post(server, "/api/chat", messages=[user("a b c")], options=options)

    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["message"]["content"] for line in lines] == ["a", " b", ""]
    assert (lines[-1]["done"], lines[-1]["done_reason"], lines[-1]["eval_count"]) == (True, "stop", 2)
    target, document = last_asked(engines)
    assert target == "/v1/chat/completions"
    assert document == {
        "model": MODEL,
        "messages": [user("a b c")],
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "max_tokens": 2,
        "top_k": 5,
        "seed": 3,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_whole_chat_is_one_object(server: Running) -> None:
    found = post(server, "/api/chat", messages=[user("a b")], stream=False, think=True).json()

    assert found["message"] == {"role": "assistant", "content": "a b", "thinking": "hm"}
    assert (found["done"], found["prompt_eval_count"], found["eval_count"]) == (True, 2, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(server: Running, engines: list[FakeVllm], stream: bool) -> None:
    messages = [
        user("weather?"),
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    response = post(server, "/api/chat", messages=messages, tools=[_TOOL], stream=stream)

    lines = [json.loads(line) for line in response.text.splitlines()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}]
    _, document = last_asked(engines)
    assert document["tools"] == [_TOOL]
    call = document["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "weather", "arguments": '{"a":1}'}
    assert document["messages"][2]["tool_call_id"] == call["id"]


def test_images_and_formats_are_translated(server: Running, engines: list[FakeVllm]) -> None:
    schema = {"type": "object"}
    response = post(server, "/api/generate", prompt="what?", images=["iVBORw0"], format=schema, stream=False)

    assert response.json()["response"] == "what?"
    _, document = last_asked(engines)
    [message] = document["messages"]
    assert message["content"][1]["image_url"]["url"] == "data:image/png;base64,iVBORw0"
    assert document["response_format"]["json_schema"]["schema"] == schema


def test_a_raw_prompt_is_a_completion(server: Running, engines: list[FakeVllm]) -> None:
    response = post(server, "/api/generate", prompt="a b", raw=True)

    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line["response"] for line in lines) == "a b"
    target, document = last_asked(engines)
    assert (target, document["prompt"]) == ("/v1/completions", "a b")


def test_a_system_prompt_comes_first(server: Running, engines: list[FakeVllm]) -> None:
    post(server, "/api/generate", prompt="a", system="be kind")

    assert last_asked(engines)[1]["messages"] == [{"role": "system", "content": "be kind"}, user("a")]


def test_embeddings_are_in_the_order_of_the_texts(server: Running) -> None:
    found = post(server, "/api/embed", input=["a", "abc"]).json()
    one = post(server, "/api/embeddings", prompt="ab").json()

    assert found["embeddings"] == [[1.0], [3.0]]
    assert found["prompt_eval_count"] == 2
    assert one == {"embedding": [2.0]}


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        ("/api/chat", {"messages": [user("x")], "options": {"mirostat": 1}}, "options.mirostat is not supported here"),
        ("/api/chat", {"messages": [user("x")], "surprise": 1}, "surprise is not supported here"),
        ("/api/chat", {"messages": [user("x")], "format": 5}, "format must be"),
        ("/api/chat", {"messages": [{"role": "judge", "content": ""}]}, "messages[0].role must be"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix is not supported here"),
        ("/api/embed", {"input": [1]}, "input must be"),
        ("/api/chat", {"messages": [user("x")], "model": "other"}, "model 'other' not found; available: fake"),
    ],
)
def test_what_would_be_ignored_is_refused(
    server: Running, engines: list[FakeVllm], path: str, fields: dict[str, Any], sentence: str
) -> None:
    response = post(server, path, **fields)

    assert response.status_code in (400, 404)
    assert sentence in response.json()["error"]
    assert not any(engine.asked() for engine in engines)


def test_models_are_listed_shown_and_loaded(server: Running) -> None:
    client = ollama.Client(server.url)
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    assert client.show(f"{MODEL}:latest").modelinfo == {"general.architecture": "vllm", "vllm.context_length": 4096}
    loaded = post(server, "/api/generate").json()
    unloaded = post(server, "/api/chat", keep_alive=0).json()

    assert (loaded["done_reason"], unloaded["done_reason"]) == ("load", "unload")
    client._client.close()


def test_large_bodies_are_translated_elsewhere(server: Running, engines: list[FakeVllm]) -> None:
    text = "word " * 100_000
    found = post(server, "/api/chat", messages=[user(text)], stream=False, options={"num_predict": 1}).json()

    assert found["message"]["content"] == "word"
    assert last_asked(engines)[1]["messages"] == [user(text)]


def test_salts_keep_keys_apart_here_too(serve: Serve, engines: list[FakeVllm]) -> None:
    keys = (ApiKey(name="alice", key="key-of-alice"), ApiKey(name="bob", key="key-of-bob"))
    server = serve("ollama", config_of_vllm(*engines, keys=keys))
    for key in keys:
        with http_client(server, key=key.key) as client:
            for path, fields in (("/api/chat", {"messages": [user("x")]}), ("/api/embed", {"input": "x"})):
                assert client.post(path, json={"model": MODEL, **fields}).status_code == 200

    salts = [one.document["cache_salt"] for engine in engines for one in engine.asked()]
    assert len(salts) == 4
    assert len(set(salts)) == 2


def test_a_stream_that_breaks_off_says_so(server: Running, engines: list[FakeVllm]) -> None:
    """The field that makes a fake engine die is none of Ollama's: the engine is killed from outside."""
    with http_client(server) as client:
        body = {"model": MODEL, "messages": [user("word " * 100_000)]}
        with client.stream("POST", "/api/chat", json=body) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines))["message"]["content"] == "word"
            for engine in engines:
                engine.kill()
            *_, last = lines

    assert "stopped before the answer was complete" in json.loads(last)["error"]
