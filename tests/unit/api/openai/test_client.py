"""The usual programs of the official `openai` client, over an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvtier.api.config import ApiKey
from kvtier.engine.process.messages import TOO_LONG
from tests.support.fake_engine import (
    ALIAS,
    DIE,
    MODEL,
    FakeEngine,
    Running,
    config_of,
    echo,
    fake_engine,
    http_client,
    refusing,
    running,
    words_then,
)

_KEY = "secret"


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("client")) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(_engine, keys=(ApiKey(name="us", key=_KEY),))) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = echo
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=_KEY, max_retries=0) as one:
        yield one


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}],
        temperature=0,
        max_completion_tokens=10,
    )

    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id == answer.id


def test_a_conversation_goes_on_with_the_message_that_came(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    message = first.choices[0].message

    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}, message, {"role": "user", "content": "and more"}],  # type: ignore[list-item]
    )

    assert [one.role for one in engine.last.prompt.messages] == ["user", "assistant", "user"]  # type: ignore[union-attr]


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "one two three"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two three"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 6


def test_the_clients_own_accumulation_of_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "one two three"}], n=2
    ) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()

    assert [choice.message.content for choice in answer.choices] == ["one two three"] * 2


def test_a_stream_that_is_left_early(client: openai.OpenAI, engine: FakeEngine) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "one two three"}], stream=True
    )
    next(iter(stream))
    stream.close()

    assert client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one two", "three"], max_tokens=1, n=2, logprobs=2)

    assert [choice.text for choice in answer.choices] == ["one", "one", "three", "three"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length", "stop", "stop"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["one"]


def test_streamed_completions(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt=[1, 2, 3], stream=True)

    assert "".join(chunk.choices[0].text for chunk in stream) == "1 2 3"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "one two"}], logprobs=True, top_logprobs=3
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["one", " two"]
    assert len(logprobs.content[0].top_logprobs) == 3


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, ALIAS]
    assert client.models.retrieve(MODEL).owned_by == "kvtier"


def test_extensions_go_in_the_extra_body(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        extra_body={"top_k": 5, "cache_salt": "mine", "chat_template_kwargs": {"enable_thinking": False}},
    )

    assert engine.last.params.top_k == 5
    assert "mine" in engine.last.salt


def test_the_async_client_with_many_streams(server: Running, engine: FakeEngine) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"this is number {number}"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=_KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(32)))

    assert asyncio.run(ask_all()) == [f"this is number {number}" for number in range(32)]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_wrong_field_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=-1)

    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_too_long_a_prompt_is_a_bad_request_also_for_a_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = refusing(TOO_LONG, "the prompt has 2000 tokens: the model takes 1000")

    with pytest.raises(openai.BadRequestError, match="2000 tokens") as caught:
        client.completions.create(model=MODEL, prompt="x", stream=True)

    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"

    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_a_wrong_key_is_an_authentication_error(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()

    assert caught.value.code == "invalid_api_key"


def test_an_engine_that_dies_and_comes_back(tmp_path: Path) -> None:
    with fake_engine(tmp_path, script=words_then(["one"], then=DIE)) as engine:
        with running("openai", config_of(engine)) as server:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                stream = client.completions.create(model=MODEL, prompt="x", stream=True)
                with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
                    list(stream)

                with pytest.raises(openai.APIStatusError) as caught:
                    client.completions.create(model=MODEL, prompt="x")
                assert caught.value.status_code == 503
                assert isinstance(caught.value, openai.InternalServerError)

                engine.script = echo
                engine.start()
                patient = client.with_options(max_retries=5)
                assert patient.completions.create(model=MODEL, prompt="x").choices[0].text == "x"


def test_curl_like_requests_need_no_content_type(server: Running, engine: FakeEngine) -> None:
    with http_client(server, key=_KEY) as client:
        body = b'{"model": "tiny", "prompt": "a b"}'
        response = client.post("/v1/completions", content=body, headers={"Content-Type": "text/plain"})
    assert response.json()["choices"][0]["text"] == "a b"
