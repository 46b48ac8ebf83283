"""`kvtier serve` with engines of vLLM, here ones that only pretend: processes, kills, sentences."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.deployments import DeploymentProcess, starting_deployment
from tests.support.vllm_serving import PACKAGE, chat
from tests.support.waiting import LIMIT_S, wait_until

_TWO = """\
models:
  - {model: org/fake, name: fake, engine: vllm, engines: 2, vllm: [--enforce-eager]}
cache: {memory: 64MiB}
"""


@pytest.fixture
def environment() -> dict[str, str]:
    """In it, vLLM is the one that pretends."""
    path = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{PACKAGE}:{path}" if path else str(PACKAGE)}


@pytest.fixture
def deployment(tmp_path: Path, environment: dict[str, str]) -> Iterator[DeploymentProcess]:
    with DeploymentProcess(tmp_path, _TWO, environment=environment) as found:
        yield found


def ask(deployment: DeploymentProcess, text: str = "hello", **fields: object) -> httpx.Response:
    url = f"{deployment.openai_url}/v1/chat/completions"
    return httpx.post(url, json=chat(text, **fields), timeout=LIMIT_S, trust_env=False)


def server_of(deployment: DeploymentProcess, name: str) -> int:
    """The process of vLLM's server: a child of the part."""
    parts = deployment.parts()
    children = Path(f"/proc/{parts[name].pid}/task/{parts[name].pid}/children").read_text().split()
    return int(children[0])


def test_both_apis_answer_and_nothing_is_left(deployment: DeploymentProcess) -> None:
    answer = ask(deployment)
    url = f"{deployment.ollama_url}/api/chat"
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    translated = httpx.post(url, json=body, timeout=LIMIT_S, trust_env=False)

    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert translated.json()["message"]["content"] == "hi"
    # One engine answers before the other is there, and the summary comes after both.
    wait_until(lambda: "fake-0: fake, vLLM 0.32.0 on auto, prompts up to 4096 tokens" in deployment.log())
    wait_until(lambda: "KV is kept in cache" in deployment.log())
    assert "fake vLLM is there" in deployment.log()
    assert deployment.stop() == 0
    assert deployment.left_behind() == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("victim", ["part", "server"])
def test_no_request_fails_when_an_engine_is_killed(deployment: DeploymentProcess, victim: str) -> None:
    is_over = threading.Event()

    def go_on_asking(number: int) -> list[int]:
        statuses = []
        while not is_over.is_set():
            statuses.append(ask(deployment, f"{number} {len(statuses)}", fake={"delay_s": 0.05}).status_code)
        return statuses

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(go_on_asking, number) for number in range(4)]
        try:
            for name in ("fake-0", "fake-1"):
                before = deployment.ready_since()[name]
                old = deployment.part(name)
                os.kill(old.pid if victim == "part" else server_of(deployment, name), signal.SIGKILL)
                deployment.wait_for_part(name, other_than=old.pid)
                wait_until(lambda name=name, before=before: deployment.ready_since().get(name, 0.0) > before)  # type: ignore[misc]
        finally:
            is_over.set()
        statuses = [status for future in asking for status in future.result()]

    assert set(statuses) == {200}
    assert len(statuses) > 8


def test_engines_are_started_again_one_by_one(deployment: DeploymentProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, deployment, "a b c", stream=True, fake={"word_s": 0.5})
        wait_until(lambda: '"fake"' in json.dumps(deployment.get("/ready")[1]))
        deployment.restart_engines()
        answer = long.result()

    assert answer.text.endswith("data: [DONE]\n\n")
    assert "error" not in answer.text


def test_nothing_outlives_a_supervisor_that_was_killed(deployment: DeploymentProcess) -> None:
    deployment.kill()

    deployment.wait_until_nothing_is_left()


def test_a_release_that_has_only_the_command_vllm_serve_is_started_by_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(PACKAGE, newer)
    (newer / "vllm" / "entrypoints" / "cli").mkdir()
    server = newer / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.rename(newer / "vllm" / "entrypoints" / "cli" / "main.py")
    server.write_text("# what other programs import is still here\n")
    environment["PYTHONPATH"] = environment["PYTHONPATH"].replace(str(PACKAGE), str(newer))
    environment["FAKE_VLLM"] = json.dumps({"marks": str(tmp_path)})
    with DeploymentProcess(tmp_path / "serve", _TWO, environment=environment) as deployment:
        assert ask(deployment).status_code == 200

    starts = [json.loads(mark.read_text())["argv"] for mark in tmp_path.iterdir() if mark.is_file()]
    assert [argv[:2] for argv in starts] == [["serve", "org/fake"]] * 2
    assert all("--model" not in argv and "--uds" in argv for argv in starts)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, environment: dict[str, str]) -> None:
    words = "Traceback\nValueError: the model is made of cheese\nRuntimeError: see above"
    environment["FAKE_VLLM"] = json.dumps({"fail": words})
    with starting_deployment(tmp_path, _TWO, environment=environment) as deployment:
        assert deployment.wait_until_ended() == 1

    assert (
        "cannot start: vLLM ended with status 3 before it was ready; its log says: "
        "ValueError: the model is made of cheese / RuntimeError: see above" in deployment.log()
    )


def test_a_python_without_vllm_is_one_sentence(tmp_path: Path) -> None:
    with starting_deployment(tmp_path, _TWO) as deployment:
        assert deployment.wait_until_ended() == 1

    assert "cannot start: vLLM is not installed in " in deployment.log()
    assert "Traceback" not in deployment.log()


def test_what_is_no_python_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho nonsense\n")
    (tmp_path / "python").chmod(0o755)
    text = "models: [{model: org/fake, engine: vllm, vllm_python: python}]"
    with starting_deployment(tmp_path, text) as deployment:
        assert deployment.wait_until_ended() == 1

    assert f"cannot start: vllm_python {tmp_path}/python is not a working Python" in deployment.log()


def test_a_release_that_is_too_old_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "old" / "vllm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "_version.py").write_text("__version__ = version = '0.20.1'\n")
    path = os.environ.get("PYTHONPATH", "")
    environment = {"PYTHONPATH": f"{folder.parent}:{path}"}
    with starting_deployment(tmp_path, _TWO, environment=environment) as deployment:
        assert deployment.wait_until_ended() == 1

    assert "cannot start: vLLM 0.20.1 in " in deployment.log()
    assert "is too old for kvtier's connector" in deployment.log()


def test_an_api_key_for_vllm_in_the_environment_is_one_sentence(tmp_path: Path, environment: dict[str, str]) -> None:
    """vLLM would answer 401 to all requests that the HTTP server passes on."""
    environment["VLLM_API_KEY"] = "secret"
    with starting_deployment(tmp_path, _TWO, environment=environment) as deployment:
        assert deployment.wait_until_ended() == 1

    assert "cannot start: VLLM_API_KEY is set in the environment: unset it" in deployment.log()
    assert "secret" not in deployment.log()
