"""A deployment as clients see it: two engines of one model and another model, over one cache server, for tenants."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Iterator

import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvtier.memory.machine_limits import num_cores
from kvtier.observe.metrics import ENGINE_BLOCKS, ENGINE_RUNNING_REQUESTS, ENGINE_USED_BLOCKS
from tests.support.deployments import DeploymentProcess
from tests.support.serving import (
    MODEL,
    Traffic,
    Way,
    ask,
    body_of,
    client_of,
    right_answers,
    save_model,
    streaming,
    wait_until,
)

pytestmark = pytest.mark.slow  # a deployment, with engines

_OTHER = "other"
_ENGINES = ["tiny-0", "tiny-1"]
_KEY, _PARTNER, _STRANGER = "key-of-one", "key-of-another", "key-of-a-third"
_METRICS_KEY = "key-of-prometheus"
_TEXT = """\
models:
  - model: tiny
    devices: [cpu, cpu]
    kv_cache_space: 32MiB
    always_load: true
  - model: other              # has no tokenizer
    kv_cache_space: 16MiB
    always_load: true
cache:
  memory: 64MiB
"""
_API_KEYS = [
    {"name": "one", "key": _KEY, "salt": "of both"},
    {"name": "another", "key": _PARTNER, "salt": "of both"},
    {"name": "a third", "key": _STRANGER, "salt": "of its own"},
    {"name": "prometheus", "key": _METRICS_KEY, "metrics": True},
]
_TOKENS = list(range(10, 110))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("requests")
    save_model(folder / MODEL)
    save_model(folder / _OTHER, seed=1, with_tokenizer=False)
    with DeploymentProcess(folder, _TEXT, http={"api_keys": _API_KEYS}) as running:
        yield running


@pytest.fixture
def deployment(shared: DeploymentProcess) -> DeploymentProcess:
    """Ready, also after a test that started engines again."""
    shared.wait_until_ready()
    return shared


def _metrics(deployment: DeploymentProcess) -> dict[str, Metric]:
    with client_of(deployment, key=_METRICS_KEY) as client:
        text = client.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def _by_engine(deployment: DeploymentProcess, name: str) -> dict[str, float]:
    return {sample.labels["engine"]: sample.value for sample in _metrics(deployment)[name].samples}


def test_each_model_answers_as_itself_and_shares_no_block_with_the_other(deployment: DeploymentProcess) -> None:
    first = {model: ask(deployment, _TOKENS, model=model, key=_KEY) for model in (MODEL, _OTHER)}
    again = {model: ask(deployment, _TOKENS, model=model, key=_KEY) for model in (_OTHER, MODEL)}

    assert [answer.cached_tokens for answer in first.values()] == [0, 0]
    assert all(again[model].text == first[model].text for model in first)
    assert all(answer.cached_tokens >= len(_TOKENS) - 16 for answer in again.values())
    with client_of(deployment, key=_KEY) as client:
        body = body_of(_TOKENS, 8, logprobs=1)
        logprobs = [
            client.post("/v1/completions", json={**body, "model": model}).json()["choices"][0]["logprobs"]
            for model in (MODEL, _OTHER)
        ]
    assert logprobs[0]["token_logprobs"] != logprobs[1]["token_logprobs"]


def test_a_model_that_is_not_there_is_404_and_says_which_are(deployment: DeploymentProcess) -> None:
    with client_of(deployment, key=_KEY) as client:
        response = client.post("/v1/completions", json=body_of("Hello", 4, model="gpt-17"))
        of_ollama = client.post(f"{deployment.ollama_url}/api/generate", json={"model": "gpt-17", "prompt": "Hello"})

    assert response.status_code == of_ollama.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "available: tiny, other" in response.json()["error"]["message"]


def test_a_model_without_a_tokenizer_refuses_a_chat_in_a_sentence(deployment: DeploymentProcess) -> None:
    body = {"model": _OTHER, "messages": [{"role": "user", "content": "Hello"}]}
    with client_of(deployment, key=_KEY) as client:
        response = client.post("/v1/chat/completions", json=body)

    assert response.status_code == 400
    assert "has no tokenizer" in response.json()["error"]["message"]


def test_a_grammar_without_an_end_is_an_error_of_the_request(deployment: DeploymentProcess) -> None:
    """Some are found while they are compiled, others only while answering; a stream has begun by then."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    early, late = {"guided_json": schema}, {"guided_grammar": 'start: /[ab]{3}/ x\nx: x "c"'}
    with client_of(deployment, key=_KEY) as client:
        for fields, sentence in ((early, "the schema allows no answer"), (late, "the grammar allows no answer from")):
            response = client.post("/v1/completions", json={**body_of("Hello", 16), **fields})
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == next(iter(fields))
            assert sentence in error["message"]
        streamed = client.post("/v1/completions", json={**body_of("Hello", 16, stream=True), **late})
        of_ollama = client.post(
            f"{deployment.ollama_url}/api/generate", json={"model": MODEL, "prompt": "Hello", "format": schema}
        )

    assert streamed.status_code == 200
    assert "invalid_request_error" in streamed.text.strip().rpartition("data: ")[2]
    assert of_ollama.status_code == 400
    assert "the schema allows no answer" in of_ollama.json()["error"]


def test_keys_with_one_salt_share_blocks_and_others_do_not(deployment: DeploymentProcess) -> None:
    prompt = "A secret that only some may know of. " * 10
    asked = {name: ask(deployment, prompt, key=key) for name, key in _in_turn(_KEY, _STRANGER, _PARTNER)}

    assert asked["first"].cached_tokens == 0
    assert asked["second"].cached_tokens == 0, "another salt"
    assert asked["third"].cached_tokens > 0, "the same salt as the first"
    assert len({answer.text for answer in asked.values()}) == 1
    with client_of(deployment) as client:
        assert client.post("/v1/completions", json=body_of(prompt, 4)).status_code == 401


def _in_turn(*keys: str) -> Iterator[tuple[str, str]]:
    yield from zip(("first", "second", "third"), keys, strict=True)


@pytest.mark.skipif(num_cores() < 2, reason="needs two cores")
def test_engines_start_side_by_side(shared: DeploymentProcess) -> None:
    log = shared.log()
    started = [re.search(rf"{name} +\| starting, process", log) for name in _ENGINES]
    first_ready = re.search(rf"(?:{'|'.join(_ENGINES)}) +\| ready", log)

    assert first_ready is not None
    assert all(one is not None and one.start() < first_ready.start() for one in started)


def test_two_engines_of_a_model_share_hits_through_the_cache_server(deployment: DeploymentProcess) -> None:
    prompt = "What one engine has computed the other need not. " * 8
    first = ask(deployment, prompt, key=_KEY)
    with contextlib.ExitStack() as stack:
        for _ in range(5):  # prompts that begin alike go to one engine, until it is much busier than the other
            stack.enter_context(streaming(deployment, prompt, 3000, key=_KEY))
        running = _by_engine(deployment, ENGINE_RUNNING_REQUESTS)
        again = ask(deployment, prompt, key=_KEY)

    assert sorted(running[engine] for engine in _ENGINES) == [0, 5]
    assert first.cached == {}
    assert again.cached.get("server", 0) >= again.prompt_tokens - 32
    assert again.text == first.text


def test_a_client_that_leaves_frees_what_its_answer_held(deployment: DeploymentProcess) -> None:
    def total(name: str) -> float:
        return sum(_by_engine(deployment, name).values())

    def is_free() -> bool:
        return total(ENGINE_USED_BLOCKS) == 0

    wait_until(is_free, "nothing is under way")
    with streaming(deployment, "Go on for ever. " * 20, 3000, key=_KEY):
        assert total(ENGINE_RUNNING_REQUESTS) == 1
        assert total(ENGINE_USED_BLOCKS) > 0

    wait_until(lambda: total(ENGINE_RUNNING_REQUESTS) == 0, "no request is running")
    wait_until(is_free, "its blocks are free")


def test_64_streams_at_once_say_what_each_says_alone(deployment: DeploymentProcess) -> None:
    prompts = [f"Stream {number} asks about the number {number * number}." for number in range(64)]
    alone = [ask(deployment, prompt, 16, key=_KEY).text for prompt in prompts]

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_at_once() -> list[str]:
        url = f"{deployment.openai_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=_KEY, max_retries=0) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    assert asyncio.run(all_at_once()) == alone


def test_metrics_are_prometheus_text_with_the_engines_names(deployment: DeploymentProcess) -> None:
    ask(deployment, "Count me.", key=_KEY)
    ask(deployment, _TOKENS[::-1], model=_OTHER, key=_KEY)
    families = _metrics(deployment)

    assert _by_engine(deployment, ENGINE_BLOCKS) == {"tiny-0": 4096, "tiny-1": 4096, "other": 2048}
    stored = [sample for sample in families["kvtier_tier_stored_blocks"].samples if sample.name.endswith("_total")]
    assert {sample.labels["engine"] for sample in stored} <= {*_ENGINES, _OTHER}
    assert sum(sample.value for sample in stored) > 0
    answered = [
        sample.value
        for sample in families["kvtier_api_requests"].samples
        if sample.labels.get("status") == "200" and sample.labels.get("path") == "/v1/completions"
    ]
    assert sum(answered) > 0


@pytest.mark.slow
def test_engines_are_started_again_one_by_one_and_nobody_notices(deployment: DeploymentProcess) -> None:
    """And afterwards, they have from the cache server what they had computed before."""
    prompt = "What was computed before the engines were started again. " * 8
    before = ask(deployment, prompt, key=_KEY)
    asked_at = time.time()
    answers = right_answers(deployment, key=_KEY)
    with Traffic(deployment, answers, num_threads=4, pause_s=0.2, key=_KEY) as traffic:
        deployment.send_signal(signal.SIGHUP)
        wait_until(lambda: _are_new(deployment, asked_at), "both engines are new")
        traffic.wait_for_right_answers(20)

    assert traffic.ways == {Way.RIGHT}, traffic.told()
    again = ask(deployment, prompt, key=_KEY)
    assert again.cached.get("server", 0) >= again.prompt_tokens - 32
    assert again.text == before.text


def _are_new(deployment: DeploymentProcess, asked_at: float) -> bool:
    since = deployment.ready_since()
    return all(since.get(engine, 0.0) > asked_at for engine in _ENGINES)
