"""Prompts that stay cached, through a real deployment: asked for over HTTP, kept by the cache server, and explained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

import kvtier
from kvtier.cli.main import main
from tests.support.deployments import DeploymentProcess
from tests.support.openai_asking import CHAT, COMPLETIONS
from tests.support.serving import client_of, save_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_MODEL = "kept"
_ANN, _BOB = "key-of-ann", "key-of-bob"
_TEXT = """\
models:
  - model: kept
    kv_cache_space: 4MiB
    always_load: true
cache:
  memory: 8MiB
  retained_share: 0.5
  max_retention_s: 3600
"""
_KEYS = [{"name": "ann", "key": _ANN}, {"name": "bob", "key": _BOB, "retained": "64KiB"}]
_PROMPT = "A river is a natural stream of fresh water that flows on land. " * 20

Document = dict[str, Any]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("retention")
    save_model(folder / _MODEL)
    with DeploymentProcess(folder, _TEXT, http={"api_keys": _KEYS}) as running:
        yield running


def post(deployment: DeploymentProcess, path: str, *, key: str = _ANN, **fields: object) -> httpx.Response:
    with client_of(deployment, key=key) as client:
        response = client.post(path, json={"model": _MODEL, "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text
    return response


def retention_of(response: httpx.Response) -> list[Document]:
    found: list[Document] = response.json()["usage"]["prompt_tokens_details"]["retention"]
    return found


def server_of(deployment: DeploymentProcess) -> str:
    [path] = deployment.runtime_parent.rglob("cache.sock")
    return f"unix:{path}"


def flood(deployment: DeploymentProcess) -> None:
    """Far more than device and cache have."""
    for number in range(24):
        post(deployment, COMPLETIONS, prompt=f"{number} {number} {number}. {_PROMPT}", key=_BOB)


def test_a_prompt_that_is_retained_is_there_after_a_flood(deployment: DeploymentProcess) -> None:
    response = post(deployment, COMPLETIONS, prompt=_PROMPT, prompt_cache_retention="30m")
    [told] = retention_of(response)
    usage = response.json()["usage"]
    full = usage["prompt_tokens"] - usage["prompt_tokens"] % 16
    assert told["asked"] == {"tokens": full, "ttl_s": 1800.0, "priority": 50}
    assert told["granted"] == {"tokens": full, "ttl_s": 1800.0, "tier": "server"}

    other = "Not retained. " + _PROMPT
    post(deployment, COMPLETIONS, prompt=other)
    with kvtier.connect(server_of(deployment)) as server:
        flood(deployment)
        evicted = server.stats()["evicted_blocks"]
        assert isinstance(evicted, (int, float))
        assert evicted > 0
    again = post(deployment, COMPLETIONS, prompt=_PROMPT).json()["usage"]["prompt_tokens_details"]

    assert again["cached_tokens"] >= full - 16
    lost = post(deployment, COMPLETIONS, prompt=other).json()["usage"]["prompt_tokens_details"]
    assert lost["cached_tokens"] < full // 2
    assert "retention" not in again


def test_a_key_gets_no_more_than_its_budget_and_the_server_no_longer_than_it_may(deployment: DeploymentProcess) -> None:
    [told] = retention_of(post(deployment, COMPLETIONS, prompt=_PROMPT, key=_BOB, prompt_cache_retention="24h"))

    assert 0 < told["granted"]["tokens"] < told["asked"]["tokens"]
    assert told["granted"]["ttl_s"] == 3600.0
    assert "budget" in told["reason"]


def test_a_mark_keeps_the_conversation_up_to_it(deployment: DeploymentProcess) -> None:
    system = {"role": "system", "content": _PROMPT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    response = post(deployment, CHAT, messages=[system, {"role": "user", "content": _PROMPT + "Which one?"}])
    [told] = retention_of(response)
    num_tokens = response.json()["usage"]["prompt_tokens"]

    assert num_tokens // 3 < told["asked"]["tokens"] < num_tokens * 2 // 3
    assert told["granted"]["tokens"] == told["asked"]["tokens"]


def test_explain_says_what_was_asked_and_granted(deployment: DeploymentProcess) -> None:
    response = post(deployment, COMPLETIONS, prompt="Explained. " + _PROMPT, prompt_cache_retention="10m", max_tokens=8)
    [told] = retention_of(response)
    arguments = ["explain", "--server", server_of(deployment), response.headers["x-request-id"]]
    wait_until(lambda: CliRunner().invoke(main, arguments).exit_code == 0)

    shown = CliRunner().invoke(main, arguments).output
    [noted] = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)["retention"]

    assert f"{told['asked']['tokens']} tokens were to be retained for 600 s (priority 50)" in shown
    assert noted["granted_tokens"] == told["granted"]["tokens"]
