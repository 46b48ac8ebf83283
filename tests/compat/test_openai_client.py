"""The official `openai` client's usual programs against a deployment with a real engine.

They need a fixture `serving`: a deployment that runs, with `.openai_url` (such as http://127.0.0.1:8080, without
/v1), `.ollama_url`, `.model` (a name it is served by, of a model with a chat template), `.max_model_len`, and no keys.
The model may be a random one: nothing here depends on what it says.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

_QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the cache in five words."}]
_NUM_STREAMS = 64


@pytest.fixture
def client(serving: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.openai_url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_models_are_listed(client: openai.OpenAI, serving: Any) -> None:
    assert client.models.list().data
    assert client.models.retrieve(serving.model).id == serving.model


def test_a_chat_is_answered(client: openai.OpenAI, serving: Any) -> None:
    answer = client.chat.completions.create(model=serving.model, messages=_QUESTION, max_tokens=8)

    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8


_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
    "additionalProperties": False,
}


def test_answers_follow_a_schema(client: openai.OpenAI, serving: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": _SCHEMA, "strict": True}}
    asked: dict[str, Any] = {"model": serving.model, "messages": _QUESTION, "response_format": form, "n": 3}

    whole = client.chat.completions.create(**asked, logprobs=True)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    for text in (*texts, *(choice.message.content or "" for choice in whole.choices)):
        jsonschema.validate(json.loads(text), _SCHEMA)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}


def test_answers_follow_vllms_guides(client: openai.OpenAI, serving: Any) -> None:
    chosen = client.completions.create(
        model=serving.model, prompt=[1, 2, 3], extra_body={"guided_choice": ["red", "green"]}
    )
    matched = client.completions.create(
        model=serving.model, prompt="Count: ", extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}
    )

    assert chosen.choices[0].text in ("red", "green")
    assert re.fullmatch("[0-9]{3}", matched.choices[0].text)


def test_a_schema_that_cannot_be_followed_is_the_clients_mistake(client: openai.OpenAI, serving: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}

    with pytest.raises(openai.BadRequestError, match="the grammar cannot be compiled"):
        client.chat.completions.create(model=serving.model, messages=_QUESTION, response_format=form)
    with pytest.raises(openai.BadRequestError, match="the grammar cannot be compiled"):
        list(client.chat.completions.create(model=serving.model, messages=_QUESTION, response_format=form, stream=True))


def test_a_greedy_chat_streams_what_it_answers_whole(client: openai.OpenAI, serving: Any) -> None:
    asked: dict[str, Any] = {"model": serving.model, "messages": _QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_is_answered(client: openai.OpenAI, serving: Any) -> None:
    answer = client.completions.create(model=serving.model, prompt=["Once upon", "a time"], max_tokens=4, n=2)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_prompt_of_token_ids_is_answered(client: openai.OpenAI, serving: Any) -> None:
    answer = client.completions.create(model=serving.model, prompt=[5, 6, 7, 8], max_tokens=4)

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI, serving: Any) -> None:
    answers = [
        client.chat.completions.create(model=serving.model, messages=_QUESTION, max_tokens=8, seed=7, temperature=1.0)
        for _ in range(2)
    ]

    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_logprobs_come_with_every_token(client: openai.OpenAI, serving: Any) -> None:
    answer = client.chat.completions.create(
        model=serving.model, messages=_QUESTION, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in logprobs.content)


def test_a_prompt_that_comes_again_is_cached(client: openai.OpenAI, serving: Any) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    asked: dict[str, Any] = {"model": serving.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**asked)

    again = client.completions.create(**asked)
    salted = client.completions.create(**asked, extra_body={"cache_salt": "somebody else"})

    assert again.choices[0].text == first.choices[0].text == salted.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_many_streams_at_once(serving: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> list[Any]:
        stream = await client.chat.completions.create(
            model=serving.model,
            messages=[{"role": "user", "content": f"Question {number}: what comes next?"}],
            max_tokens=8,
            stream=True,
        )
        return [chunk async for chunk in stream]

    async def ask_all() -> list[list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{serving.openai_url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(_NUM_STREAMS)))

    for chunks in asyncio.run(ask_all()):
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_stream_that_is_left_early_does_not_keep_the_engine(client: openai.OpenAI, serving: Any) -> None:
    for _ in range(4):
        stream = client.chat.completions.create(model=serving.model, messages=_QUESTION, stream=True)
        next(iter(stream))
        stream.close()

    assert client.chat.completions.create(model=serving.model, messages=_QUESTION, max_tokens=1).choices


def test_mistakes_are_the_clients_exceptions(client: openai.OpenAI, serving: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=_QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=serving.model, messages=_QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=serving.model, prompt=[5] * (serving.max_model_len + 1), stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=serving.model, messages=_QUESTION, response_format={"type": "xml"})
    assert caught.value.param == "response_format.type"

    assert client.chat.completions.create(model=serving.model, messages=_QUESTION, max_tokens=1).choices
