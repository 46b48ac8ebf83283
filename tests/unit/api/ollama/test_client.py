"""The official `ollama` clients, with an engine that follows a script: their usual programs, and their errors."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from kvtier.api.config import ApiKey
from kvtier.engine.process.messages import ChatMessage, ChatPrompt
from tests.support.fake_engine import (
    ALIAS,
    DIE,
    HELLO,
    MAX_MODEL_LEN,
    MODEL,
    FakeEngine,
    Running,
    config_of,
    fake_engine,
    running,
    words_then,
)
from tests.support.waiting import LIMIT_S

USER = {"role": "user", "content": "one two three"}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="kv") as name, fake_engine(Path(name)) as found:
        yield found


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with running("ollama", config_of(engine)) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=LIMIT_S) as found:
        yield found


def test_chat(client: ollama.Client) -> None:
    reply = client.chat(MODEL, messages=[USER])

    assert (reply.message.role, reply.message.content) == ("assistant", "one two three")
    assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "stop")
    assert (reply.prompt_eval_count, reply.eval_count) == (3, 3)


def test_streaming_chat(client: ollama.Client) -> None:
    parts = list(client.chat(MODEL, messages=[USER], stream=True))

    assert "".join(part.message.content or "" for part in parts) == "one two three"
    assert [part.done for part in parts] == [False, False, False, True]


def test_a_conversation_goes_on_with_the_answer_as_it_came(client: ollama.Client, engine: FakeEngine) -> None:
    reply = client.chat(MODEL, messages=[USER])

    client.chat(MODEL, messages=[USER, reply.message, {"role": "user", "content": "and?"}])

    prompt = engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == ChatMessage("assistant", "one two three")


def test_generate(client: ollama.Client) -> None:
    reply = client.generate(MODEL, "one two three", options={"num_predict": 2, "temperature": 0}, keep_alive="5m")

    assert (reply.response, reply.done_reason) == ("one two", "length")
    assert all(isinstance(one, int) for one in (reply.total_duration, reply.eval_duration, reply.prompt_eval_duration))


def test_streaming_generate_with_typed_options(client: ollama.Client, engine: FakeEngine) -> None:
    options = ollama.Options(seed=7, top_k=3, stop=["end"], num_ctx=512, num_thread=8)

    parts = list(client.generate(MODEL, "one two", stream=True, options=options))

    assert "".join(part.response or "" for part in parts) == "one two"
    assert (engine.last.params.seed, engine.last.params.top_k) == (7, 3)


def test_logprobs(client: ollama.Client) -> None:
    reply = client.generate(MODEL, "one", logprobs=True, top_logprobs=2)

    assert reply.logprobs is not None
    assert (reply.logprobs[0].token, reply.logprobs[0].logprob) == ("one", -0.5)
    assert [other.token for other in reply.logprobs[0].top_logprobs or []] == ["one", "one1"]


def test_loading_and_unloading(client: ollama.Client) -> None:
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, keep_alive=0).done_reason == "unload"


def test_list_show_and_ps(client: ollama.Client) -> None:
    listed = client.list().models
    assert [model.model for model in listed] == [MODEL, ALIAS]
    assert listed[0].size == HELLO.weights_bytes
    assert listed[0].modified_at is not None
    shown = client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == MAX_MODEL_LEN
    assert (shown.template, shown.capabilities) == (HELLO.chat_template, ["completion"])
    (process,) = client.ps().models
    assert (process.model, process.size_vram, process.context_length) == (MODEL, 0, MAX_MODEL_LEN)
    assert process.expires_at is not None


def test_errors_are_response_errors_with_their_status(client: ollama.Client) -> None:
    for stream in (True, False):
        with pytest.raises(ollama.ResponseError, match="model 'big' not found") as caught:
            list(client.chat("big", messages=[USER], stream=stream))
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="tools are not supported by tiny") as caught:
        client.chat(MODEL, messages=[USER], tools=[ollama.Tool(function=ollama.Tool.Function(name="f"))])
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="think is not supported by tiny") as caught:
        client.generate(MODEL, "hi", think=True)
    assert caught.value.status_code == 400
    with pytest.raises(
        ollama.ResponseError, match="embeddings are supported by models that run on vLLM only"
    ) as caught:
        client.embed(MODEL, "hi")
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="cannot be pulled") as caught:
        list(client.pull("llama3", stream=True))
    assert caught.value.status_code == 501


def test_an_engine_that_dies_in_a_stream_is_a_response_error(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = words_then(["a"], then=DIE)
    parts = client.generate(MODEL, "hi", stream=True)

    assert next(parts).response == "a"
    with pytest.raises(ollama.ResponseError, match="stopped before the answer was complete"):
        next(parts)


def test_a_key_is_a_bearers(engine: FakeEngine) -> None:
    with running("ollama", config_of(engine, keys=(ApiKey(name="a", key="secret"),))) as server:
        with ollama.Client(host=server.url) as stranger, pytest.raises(ollama.ResponseError) as caught:
            stranger.list()
        with ollama.Client(host=server.url, headers={"Authorization": "Bearer secret"}) as holder:
            assert holder.chat(MODEL, messages=[USER]).message.content == "one two three"

    assert caught.value.status_code == 401


def test_the_async_client_with_many_streams_at_once(server: Running) -> None:
    async def ask(client: ollama.AsyncClient, number: int) -> str:
        parts = await client.chat(MODEL, messages=[{"role": "user", "content": f"say {number}"}], stream=True)
        return "".join([part.message.content or "" async for part in parts])

    async def ask_all() -> list[str]:
        async with ollama.AsyncClient(host=server.url, timeout=LIMIT_S) as client:
            whole = await client.generate(MODEL, "one two")
            assert whole.response == "one two"
            assert [model.model for model in (await client.list()).models] == [MODEL, ALIAS]
            with pytest.raises(ollama.ResponseError):
                await client.show("big")
            return await asyncio.gather(*(ask(client, number) for number in range(32)))

    assert asyncio.run(ask_all()) == [f"say {number}" for number in range(32)]
