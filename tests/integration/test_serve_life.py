"""`kvtier serve` from its start to its end: in order, with a summary, drained, and nothing left behind."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.deployments import DeploymentProcess, starting_deployment
from tests.support.serving import MODEL, TEXT, Answer, ask, body_of, client_of, save_model, streaming
from tests.support.waiting import LIMIT_S, wait_until

_DOCUMENT = "It is a truth universally acknowledged, that a long prompt must be in want of a cache. " * 6
_QUESTION = "Tell me everything."
_LONG = 1500
"""Tokens of an answer that takes a few seconds."""
_NOT_SO_LONG = 500
"""Tokens of an answer that begins before a signal comes, and ends within an engine's patience on a busy machine."""
_BROKEN_OFF = "the server stopped before the answer was complete"
_ENDLESS = 4000
_ENDLESS_FOR_OLLAMA = {
    "model": MODEL,
    "prompt": _QUESTION,
    "raw": True,
    "options": {"num_predict": _ENDLESS, "temperature": 0},
}


@dataclass(frozen=True, slots=True)
class _Start:
    """A deployment that is ready, and what it answered while its engine was loading."""

    deployment: DeploymentProcess
    before: dict[str, httpx.Response]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("life")
    save_model(folder / MODEL)
    return folder


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[_Start]:
    with starting_deployment(folder, TEXT, http={"drain_s": LIMIT_S}) as deployment:
        engine = deployment.wait_for_part(MODEL)
        engine.send_signal(signal.SIGSTOP)  # it loads for as long as we like
        deployment.wait_for_log(r"http +\| ready")
        with client_of(deployment) as client:
            before = {path: client.get(path) for path in ("/health", "/ready", "/v1/models")}
            before["completion"] = client.post("/v1/completions", json=body_of("Hello", 4))
            before["stream"] = client.post("/v1/completions", json=body_of("Hello", 4, stream=True))
            url = f"{deployment.ollama_url}/api/generate"
            before["ollama"] = client.post(url, json={"model": MODEL, "prompt": "Hello"})
        engine.send_signal(signal.SIGCONT)
        deployment.wait_until_ready()
        yield _Start(deployment, before)


def test_it_says_503_until_its_engine_is_there_and_when_to_ask_again(start: _Start) -> None:
    before = start.before

    assert before["/health"].status_code == before["/v1/models"].status_code == 200
    assert before["/ready"].json()["status"] == "starting"
    for name in ("/ready", "completion", "stream", "ollama"):
        assert before[name].status_code == 503, name
        assert int(before[name].headers["retry-after"]) > 0, name
    for name in ("completion", "stream"):
        assert before[name].json()["error"]["type"] == "server_error"
    assert isinstance(before["ollama"].json()["error"], str)
    assert start.deployment.get("/ready")[0] == 200


def test_the_cache_is_ready_before_an_engine_starts(start: _Start) -> None:
    log = start.deployment.log()

    assert log.index("starting, process") < re.search(r"cache +\| ready", log).start()
    assert re.search(r"cache +\| ready", log).start() < re.search(rf"{MODEL} +\| starting, process", log).start()


def test_the_summary_has_addresses_models_blocks_and_an_example_that_works(start: _Start) -> None:
    deployment = start.deployment
    summary = deployment.wait_for_log(r"^ready after [\d.]+ s\n(.*\n)+?  Ctrl-C stops it$")[0]

    assert f"OpenAI API   {deployment.openai_url}/v1\n" in summary
    assert f"Ollama API   {deployment.ollama_url}\n" in summary
    assert f"engine       {MODEL}: {MODEL}, LlamaForCausalLM float32 on cpu" in summary
    assert "KV blocks of 16 tokens: device 4096 (32MiB), cache 8192 (64MiB), disk 8192 (64MiB)" in summary
    command = summary.partition("try it\n")[2].partition("  Ctrl-C")[0].replace("\\\n", " ")
    curl, url, _, header, _, data = shlex.split(command)
    name, value = header.split(": ")
    response = httpx.post(url, headers={name: value}, content=data, timeout=LIMIT_S, trust_env=False)
    assert curl == "curl"
    assert response.json()["choices"][0]["message"]["role"] == "assistant"


def test_explain_finds_the_cache_server_by_itself(start: _Start) -> None:
    deployment = start.deployment
    with client_of(deployment) as client:
        response = client.post("/v1/completions", json=body_of(_DOCUMENT, 4))
    command = [sys.executable, "-m", "kvtier", "explain", response.headers["x-request-id"]]

    done = subprocess.run(
        command, env=deployment.user_environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert done.returncode == 0, done.stderr
    assert f"request    {response.headers['x-request-id']}" in done.stdout


@dataclass(frozen=True, slots=True)
class _Stop:
    """A deployment that was asked about a document and then stopped with SIGTERM."""

    deployment: DeploymentProcess
    answer: Answer
    status: int
    left: list[str]


@pytest.fixture(scope="module")
def stop(start: _Start) -> _Stop:
    deployment = start.deployment
    answer = ask(deployment, _DOCUMENT)
    assert len(deployment.process_ids()) == 4
    return _Stop(deployment, answer, deployment.stop(), deployment.left_behind())


def test_sigterm_stops_everything_in_order_and_leaves_nothing(stop: _Stop) -> None:
    assert stop.status == 0
    assert stop.left == []
    assert not list(stop.deployment.folder.rglob("*.sock*"))
    assert re.findall(r"(\w+) +\| stopped", stop.deployment.log())[:3] == ["http", MODEL, "cache"]
    assert "leaked" not in stop.deployment.log()


@pytest.fixture(scope="module")
def again(stop: _Stop) -> DeploymentProcess:
    """The same on the same ports, started as soon as it was stopped."""
    stop.deployment.start()
    stop.deployment.wait_until_ready()
    return stop.deployment


def test_started_again_at_once_it_has_its_blocks_from_disk(stop: _Stop, again: DeploymentProcess) -> None:
    answer = ask(again, _DOCUMENT)

    assert answer.cached["disk"] >= answer.prompt_tokens - 32
    assert answer.text == stop.answer.text
    num_recovered = [int(count) for count in re.findall(r"recover (\d+) blocks\. info:", again.log())]
    assert num_recovered[0] == 0
    assert num_recovered[1] >= answer.cached["disk"] // 16


def test_ctrl_c_lets_a_stream_end_and_takes_nothing_new(again: DeploymentProcess) -> None:
    with streaming(again, _QUESTION, _NOT_SO_LONG) as texts:
        right = "".join(texts)
    with streaming(again, _QUESTION, _NOT_SO_LONG) as texts:
        again.send_signal(signal.SIGINT)
        again.wait_for_log(r"stopping; 1 requests are in flight")
        assert _status_of_a_new_request(again) in (503, None)
        assert "".join(texts) == right

    assert again.wait_until_ended() == 0
    assert again.left_behind() == []


@pytest.mark.slow
def test_a_stop_past_the_drain_time_ends_each_request_with_an_error_of_its_api(folder: Path) -> None:
    with DeploymentProcess(folder, TEXT, http={"drain_s": 0.2}) as deployment, client_of(deployment) as client:
        openai = client.stream("POST", "/v1/completions", json=_endless(stream=True))
        ollama = client.stream("POST", f"{deployment.ollama_url}/api/generate", json=_ENDLESS_FOR_OLLAMA)
        with ThreadPoolExecutor(1) as pool, openai as events, ollama as lines:
            whole = pool.submit(client.post, "/v1/completions", json=_endless())
            of_openai, of_ollama = events.iter_lines(), lines.iter_lines()
            assert next(of_openai)
            assert next(of_ollama)
            wait_until(lambda: _num_requests(deployment) == 3, "three requests under way")
            deployment.send_signal(signal.SIGTERM)
            last_event = [line for line in of_openai if line][-1]
            last_line = [line for line in of_ollama if line][-1]
            response = whole.result(LIMIT_S)
        status = deployment.wait_until_ended()
        log = deployment.log()

    assert json.loads(last_event.removeprefix("data: "))["error"]["message"] == _BROKEN_OFF
    assert json.loads(last_line) == {"error": _BROKEN_OFF}
    assert response.status_code == 503
    assert response.json()["error"]["message"] == _BROKEN_OFF
    assert status == 0
    assert len(re.findall("the time to drain is over: 3 requests are cut off", log)) == 1
    assert "Traceback" not in log
    assert "Error" not in log


@pytest.mark.slow
def test_a_second_ctrl_c_cuts_a_stream_short(folder: Path) -> None:
    with DeploymentProcess(folder, TEXT) as deployment:
        with streaming(deployment, _QUESTION, 2 * _LONG) as texts:
            deployment.send_signal(signal.SIGINT)
            deployment.wait_for_log(r"stopping; 1 requests are in flight")
            deployment.send_signal(signal.SIGINT)
            with pytest.raises(AssertionError, match=_BROKEN_OFF):
                list(texts)
            status = deployment.wait_until_ended()

        assert status == 0
        assert "Traceback" not in deployment.log()
        assert deployment.left_behind() == []


@pytest.mark.parametrize("is_stuck", [False, True], ids=["importing", "stuck"])
def test_ctrl_c_while_the_engine_loads_stops_at_once(tmp_path: Path, is_stuck: bool) -> None:
    save_model(tmp_path / MODEL)
    with starting_deployment(tmp_path, TEXT) as deployment:
        engine = deployment.wait_for_part(MODEL)
        if is_stuck:
            engine.send_signal(signal.SIGSTOP)
        deployment.send_signal(signal.SIGINT)
        status = deployment.wait_until_ended()

        assert status == 0
        assert deployment.left_behind() == []


def _endless(**fields: object) -> dict[str, object]:
    return body_of(_QUESTION, _ENDLESS, ignore_eos=True, **fields)


def _num_requests(deployment: DeploymentProcess) -> int:
    """That the engine has."""
    with client_of(deployment) as client:
        found = re.search(r"^kvtier_engine_running_requests\{.*\} (\d+)", client.get("/metrics").text, re.MULTILINE)
    return 0 if found is None else int(found[1])


def _status_of_a_new_request(deployment: DeploymentProcess) -> int | None:
    """None if nothing listens any more."""
    try:
        with client_of(deployment) as client:
            return client.post("/v1/completions", json=body_of("Hello", 4)).status_code
    except httpx.TransportError:
        return None
