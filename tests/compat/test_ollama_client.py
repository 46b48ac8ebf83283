"""The official `ollama` clients against a deployment that runs: their usual programs, unchanged.

`serving` is that deployment. Its model is small and may have random weights: what it says has no meaning, but greedy
answers to the same prompt are the same.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Protocol

import jsonschema
import ollama
import pytest

from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow  # a deployment, with engines

USER = {"role": "user", "content": "Why is the sky blue?"}
GREEDY = {"temperature": 0, "num_predict": 8}
NUM_STREAMS = 64


class Serving(Protocol):
    @property
    def ollama_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...


@pytest.fixture
def client(serving: Serving) -> Iterator[ollama.Client]:
    with ollama.Client(host=serving.ollama_url, timeout=LIMIT_S) as found:
        yield found


def test_answers_follow_a_schema(client: ollama.Client, serving: Serving) -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 3}
    options = {"num_predict": 200}
    chatted = client.chat(serving.model, messages=[USER], format=schema, options=options).message.content
    generated = client.generate(serving.model, prompt="numbers", format=schema, options=options).response

    for text in (chatted, generated):
        jsonschema.validate(json.loads(text or ""), schema)
    with pytest.raises(ollama.ResponseError, match="the grammar cannot be compiled"):
        client.chat(serving.model, messages=[USER], format={"type": "object", "not": {}})


def test_chat_and_streaming_chat_say_the_same(client: ollama.Client, serving: Serving) -> None:
    whole = client.chat(serving.model, messages=[USER], options=GREEDY)
    parts = list(client.chat(serving.model, messages=[USER], options=GREEDY, stream=True))

    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts[:-1]] == [False] * (len(parts) - 1)
    for last in (whole, parts[-1]):
        assert last.done
        assert last.done_reason in ("stop", "length")
        assert last.prompt_eval_count is not None
        assert last.prompt_eval_count > 0
        assert last.eval_count is not None
        assert 0 < last.eval_count <= GREEDY["num_predict"]
        assert last.total_duration is not None
        assert last.total_duration > 0


def test_a_conversation_goes_on_with_the_answer_as_it_came(client: ollama.Client, serving: Serving) -> None:
    first = client.chat(serving.model, messages=[USER], options=GREEDY)

    second = client.chat(serving.model, messages=[USER, first.message, USER], options=GREEDY)

    assert (second.prompt_eval_count or 0) > (first.prompt_eval_count or 0)


def test_generate_and_streaming_generate_say_the_same(client: ollama.Client, serving: Serving) -> None:
    whole = client.generate(serving.model, "Once upon a time", system="Tell a story.", options=GREEDY)
    parts = list(
        client.generate(serving.model, "Once upon a time", system="Tell a story.", options=GREEDY, stream=True)
    )

    assert "".join(part.response or "" for part in parts) == whole.response


def test_a_raw_prompt_is_shorter_than_one_in_the_chat_template(client: ollama.Client, serving: Serving) -> None:
    raw = client.generate(serving.model, "Once upon a time", raw=True, options=GREEDY)
    templated = client.generate(serving.model, "Once upon a time", options=GREEDY)

    assert 0 < (raw.prompt_eval_count or 0) < (templated.prompt_eval_count or 0)


def test_a_seed_gives_the_same_answer_again(client: ollama.Client, serving: Serving) -> None:
    options = {"seed": 7, "temperature": 1.0, "num_predict": 12}

    first, again = (client.generate(serving.model, "Once upon", raw=True, options=options) for _ in range(2))

    assert first.response == again.response


def test_logprobs_come_with_every_token(client: ollama.Client, serving: Serving) -> None:
    reply = client.generate(serving.model, "Once upon", options=GREEDY, logprobs=True, top_logprobs=2)

    assert reply.logprobs is not None
    assert all(len(one.top_logprobs or []) == 2 and one.logprob <= 0 for one in reply.logprobs)


def test_the_model_is_listed_shown_loaded_and_running(client: ollama.Client, serving: Serving) -> None:
    assert serving.model in [model.model for model in client.list().models]
    shown = client.show(serving.model)
    assert shown.modelinfo is not None
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == serving.max_model_len
    running = {model.model: model for model in client.ps().models}
    assert running[serving.model].context_length == serving.max_model_len
    assert client.generate(serving.model, keep_alive="5m").done_reason == "load"


def test_errors_have_their_status_and_the_server_goes_on(client: ollama.Client, serving: Serving) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.chat("no-such-model", messages=[USER])
    assert caught.value.status_code == 404
    too_long = "word " * (2 * serving.max_model_len)
    for stream in (True, False):
        with pytest.raises(ollama.ResponseError) as caught:
            list(client.generate(serving.model, too_long, raw=True, stream=stream))
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="options") as caught:
        client.generate(serving.model, "hi", options={"temperature": "hot"})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError) as caught:
        client.embed(serving.model, "hi")
    assert caught.value.status_code == 400
    assert client.generate(serving.model, "hi", options=GREEDY).done


def test_many_streams_at_once_with_the_async_client(serving: Serving) -> None:
    async def ask(client: ollama.AsyncClient, number: int) -> bool:
        messages = [{"role": "user", "content": f"Say {number}."}]
        parts = [part async for part in await client.chat(serving.model, messages, options=GREEDY, stream=True)]
        return bool(parts[-1].done)

    async def ask_all() -> list[bool]:
        async with ollama.AsyncClient(host=serving.ollama_url, timeout=LIMIT_S) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(NUM_STREAMS)))

    assert asyncio.run(ask_all()) == [True] * NUM_STREAMS


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_examples_of_ollamas_documentation_work_with_curl(serving: Serving) -> None:
    body = json.dumps({"model": serving.model, "messages": [USER], "options": GREEDY})
    command = ["curl", "--silent", "--no-buffer", f"{serving.ollama_url}/api/chat", "-d", body]

    done = subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S)

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert sum(lines[-1]["cached_tokens"].values()) <= lines[-1]["prompt_eval_count"]
