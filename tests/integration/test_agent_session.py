"""An agent's session with tools against a real deployment: every turn finds all of the turn before in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvtier.testing.tiny_models import save_tiny_model
from tests.support.chat_templates import TEMPLATES
from tests.support.deployments import DeploymentProcess
from tests.support.scripted_chat import TOOL
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow

_NUM_TURNS = 30
_BLOCK_TOKENS = 16
_LEAST_HIT = 0.99
_TEXT = """\
models:
  - model: tiny
    kv_cache_space: 64MiB
"""


@dataclass(frozen=True, slots=True)
class _Turn:
    message: dict[str, Any]
    prompt_tokens: int
    cached_tokens: int


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("agent")
    save_tiny_model(folder / "tiny", "llama", max_position_embeddings=16384)
    (folder / "tiny" / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    with DeploymentProcess(folder, _TEXT) as one:
        yield one


def _ask_openai(client: httpx.Client, url: str, messages: list[dict[str, Any]]) -> _Turn:
    body = {"model": "tiny", "messages": messages, "tools": [TOOL], "max_tokens": 4, "temperature": 0}
    document = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
    usage = document["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return _Turn(document["choices"][0]["message"], usage["prompt_tokens"], cached)


def _ask_ollama(client: httpx.Client, url: str, messages: list[dict[str, Any]]) -> _Turn:
    options = {"num_predict": 4, "temperature": 0}
    body = {"model": "tiny", "messages": messages, "tools": [TOOL], "options": options, "stream": False}
    document = client.post(f"{url}/api/chat", json=body).raise_for_status().json()
    cached = sum(document["cached_tokens"].values())
    return _Turn(document["message"], document["prompt_eval_count"], cached)


def _with_call(message: dict[str, Any], number: int, *, is_ollama: bool) -> list[dict[str, Any]]:
    """The answer as if it had called a tool, which a model of random weights does not, and the tool's answer."""
    town = {"town": f"Town {number}"}
    if is_ollama:
        call: dict[str, Any] = {"function": {"name": "weather", "arguments": town}}
        answer = {"role": "tool", "tool_name": "weather", "content": f"rain, {number} degrees"}
    else:
        call = {"id": f"call_{number}", "type": "function"}
        call["function"] = {"name": "weather", "arguments": f'{{"town": "Town {number}"}}'}
        answer = {"role": "tool", "tool_call_id": f"call_{number}", "content": f"rain, {number} degrees"}
    return [{**message, "tool_calls": [call]}, answer]


@pytest.mark.parametrize("api", ["openai", "ollama"])
def test_every_turn_of_a_session_with_tools_hits_the_turn_before(deployment: DeploymentProcess, api: str) -> None:
    is_ollama = api == "ollama"
    url = deployment.ollama_url if is_ollama else deployment.openai_url
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are an agent of {api}. Ask for the weather of every town."},
        {"role": "user", "content": "Begin."},
    ]
    turns: list[_Turn] = []
    with httpx.Client(timeout=LIMIT_S, trust_env=False) as client:
        for number in range(_NUM_TURNS):
            turn = (_ask_ollama if is_ollama else _ask_openai)(client, url, messages)
            turns.append(turn)
            messages += _with_call(turn.message, number, is_ollama=is_ollama)

    for before, turn in itertools.pairwise(turns):
        full_tokens = before.prompt_tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
        assert turn.prompt_tokens > before.prompt_tokens
        assert turn.cached_tokens >= _LEAST_HIT * full_tokens
