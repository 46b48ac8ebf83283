"""`kvtier serve` over the real vLLM: two engines in one deployment, which take a minute to start on two cores."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compat.vllm.engines import MAX_MODEL_LEN, save_model
from tests.support.deployments import DeploymentProcess
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(4000)]

_START_S = 1500.0
_REQUEST_S = 300.0
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_TEXT = f"""\
models:
  - model: tiny
    engine: vllm
    engines: 2
    dtype: float32
    max_model_len: {MAX_MODEL_LEN}
    always_load: true
    vllm: [--enforce-eager, --block-size, 32, --max-num-seqs, 8]
cache: {{memory: 64MiB}}
"""
_PAGE_TOKENS = 32
_STORY = "The old lighthouse keeper wrote down the weather of every day of his life. " * 5


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("serve")
    save_model(folder / "tiny")
    found = DeploymentProcess(folder, _TEXT, http={"max_body": "8MiB"}, environment=_ENVIRONMENT)
    try:
        found.start()
        found.wait_until_ready(timeout_s=_START_S)
        yield found
    finally:
        found.close()


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """A conversation: the user's messages and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def ask(deployment: DeploymentProcess, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(f"{deployment.openai_url}{path}", json=body, timeout=_REQUEST_S, trust_env=False)


def counts(deployment: DeploymentProcess, name: str, label: str) -> dict[str, float]:
    """One of the HTTP server's counters, by the value of a label."""
    text = httpx.get(f"{deployment.openai_url}/metrics", timeout=_REQUEST_S, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.partition(f'{label}="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def own_hits(deployment: DeploymentProcess) -> float:
    """Tokens that vLLM found in its own prefix cache, of all engines."""
    return vllm_count(deployment, "vllm:prefix_cache_hits_total{")


def vllm_count(deployment: DeploymentProcess, name: str) -> float:
    """One of vLLM's own metrics, of all engines."""
    total = 0.0
    for engine in deployment.ready_since():
        url = f"{deployment.openai_url}/metrics/{engine}"
        for line in httpx.get(url, timeout=_REQUEST_S, trust_env=False).text.splitlines():
            if line.startswith(name):
                total += float(line.rpartition(" ")[2])
    return total


def test_answers_come_through_both_apis(deployment: DeploymentProcess) -> None:
    whole = ask(deployment, chat("hello"))
    stream = ask(deployment, chat("hello", stream=True))
    body = {**chat("hello"), "stream": False, "options": {"num_predict": 8, "temperature": 0}}
    for name in ("max_tokens", "temperature"):
        del body[name]
    url = f"{deployment.ollama_url}/api/chat"
    translated = httpx.post(url, json=body, timeout=_REQUEST_S, trust_env=False)

    assert whole.status_code == 200, whole.text
    assert stream.text.endswith("data: [DONE]\n\n")
    assert translated.status_code == 200, translated.text
    assert translated.json()["message"]["content"] == whole.json()["choices"][0]["message"]["content"]
    assert translated.json()["eval_count"] == whole.json()["usage"]["completion_tokens"]
    refused = ask(deployment, chat("hello", temperature=-5))
    assert refused.status_code == 400
    names = deployment.ready_since()
    metrics = httpx.get(f"{deployment.openai_url}/metrics/{next(iter(names))}", timeout=_REQUEST_S, trust_env=False)
    assert "vllm:num_requests_running" in metrics.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(deployment: DeploymentProcess, stream: bool) -> None:
    num_tokens = MAX_MODEL_LEN - 200
    before = vllm_count(deployment, "vllm:generation_tokens_total{")
    body = chat("hello", max_tokens=num_tokens, ignore_eos=True, stream=stream)
    connection = http.client.HTTPConnection("127.0.0.1", deployment.openai_port, timeout=_REQUEST_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        wait_until(lambda: vllm_count(deployment, "vllm:generation_tokens_total{") > before, limit_s=_REQUEST_S)

    wait_until(lambda: vllm_count(deployment, "vllm:num_requests_running{") == 0, limit_s=_REQUEST_S)
    assert vllm_count(deployment, "vllm:generation_tokens_total{") - before < num_tokens


def test_a_request_over_a_limit_is_refused_in_one_sentence(deployment: DeploymentProcess) -> None:
    too_long = ask(deployment, chat(_STORY * 50))
    too_large = ask(deployment, chat("x" * (9 << 20)))

    assert too_long.status_code == 400
    assert str(MAX_MODEL_LEN) in too_long.json()["error"]["message"]
    assert too_large.status_code == 413
    assert ask(deployment, chat("hello")).status_code == 200


def test_the_second_turn_goes_to_the_engine_that_has_the_first(deployment: DeploymentProcess) -> None:
    """A block in vLLM's own prefix cache is a hit only in the engine that computed it."""
    num_chats = 20
    firsts = {number: ask(deployment, chat(f"{number} {_STORY}")).json() for number in range(num_chats)}
    before = own_hits(deployment)
    for number, first in reversed(firsts.items()):
        answer = first["choices"][0]["message"]["content"]
        assert ask(deployment, chat(f"{number} {_STORY}", answer, "and then?")).status_code == 200
    expected = sum(first["usage"]["prompt_tokens"] // _PAGE_TOKENS * _PAGE_TOKENS for first in firsts.values())

    wait_until(lambda: own_hits(deployment) - before >= 0.95 * expected, "hits in vLLM's own prefix cache")
    assert counts(deployment, "kvtier_api_routed_requests_total", "by")["prefix"] >= 0.95 * num_chats
    assert min(counts(deployment, "kvtier_api_engine_requests_total", "engine").values()) >= num_chats / 2


def test_no_request_fails_when_engines_die_and_nothing_is_left_in_the_end(deployment: DeploymentProcess) -> None:
    """One test, the last: shared memory of engines that start in it is gone when the deployment is stopped."""
    _kill_a_part(deployment)
    _kill_an_inner_process(deployment)

    assert ask(deployment, chat("hello")).status_code == 200
    assert deployment.stop() == 0
    assert deployment.left_behind() == []


def _kill_a_part(deployment: DeploymentProcess) -> None:
    is_over = threading.Event()

    def go_on_asking(number: int) -> list[int]:
        statuses = []
        while not is_over.is_set():
            statuses.append(ask(deployment, chat(f"{number} {len(statuses)} {_STORY}")).status_code)
        return statuses

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(go_on_asking, number) for number in range(2)]
        before = deployment.ready_since()
        name = min(before)
        try:
            os.kill(deployment.part(name).pid, signal.SIGKILL)
            wait_until(
                lambda: deployment.ready_since().get(name, 0.0) > before[name], "the engine is back", limit_s=_START_S
            )
        finally:
            is_over.set()
        statuses = [status for future in asking for status in future.result()]

    assert set(statuses) == {200}
    assert len(statuses) > 8


def _kill_an_inner_process(deployment: DeploymentProcess) -> None:
    """vLLM's server notices that its engine is gone, and ends: so does the part."""
    before = deployment.ready_since()
    name = max(before)
    part = deployment.part(name)
    core = next(pid for pid in sorted(_descendants(part.pid)) if b"EngineCore" in _title(pid))
    os.kill(core, signal.SIGKILL)
    statuses = [ask(deployment, chat(f"{number} {_STORY}")).status_code for number in range(8)]
    wait_until(lambda: deployment.ready_since().get(name, 0.0) > before[name], "the engine is back", limit_s=_START_S)

    assert set(statuses) == {200}


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found |= {child} | _descendants(child)
    return found


def _title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
