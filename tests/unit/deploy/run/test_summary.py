"""What people read when a deployment is ready."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvtier.api.config import ApiConfig, ApiKey, PageConfig
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.deploy.plan.parts import CachePart, DeploymentPlan, EnginePart, HttpPart, Listener
from kvtier.deploy.run.summary import summary
from kvtier.engine.config import EngineConfig
from kvtier.transport.address import UnixAddress

_MIB = 1 << 20
_FACTS = {
    "architecture": "Qwen2ForCausalLM",
    "dtype": "bfloat16",
    "quantization": "fp8",
    "device": "NVIDIA H200",
    "weights_bytes": 100 * _MIB,
    "max_model_len": 32768,
    "block_tokens": 16,
    "num_blocks": 64,
    "kv_bytes": 64 * _MIB,
    "slot_bytes": _MIB,
}
_UNIX = UnixAddress("/run/kvtier-1/cache.sock")


def _plan(
    *listeners: Listener,
    keys: tuple[ApiKey, ...] = (),
    swap_bytes: int = 0,
    has_cache: bool = True,
    page: PageConfig | None = None,
    **server: object,
) -> DeploymentPlan:
    settings = {"memory_bytes": 256 * _MIB, "unix": _UNIX, **server}
    cache = CachePart(name="cache", server=CacheServerConfig(**settings))  # type: ignore[arg-type]
    engine = EngineConfig(model="m", swap_space=swap_bytes, cache_server=str(_UNIX) if has_cache else "")
    return DeploymentPlan(
        caches=(cache,) if has_cache else "",
        engines=(EnginePart(name="engine-0", served_as="glm", engine=engine, socket="/run/e.sock"),),
        http=HttpPart(name="http", api=ApiConfig(models=(), keys=keys, page=page), listeners=listeners),
    )


def _text(plan: DeploymentPlan, *ports: int) -> str:
    return summary(plan, ports, {"engine-0": _FACTS}, 12.345)


def test_addresses_are_those_that_a_client_on_this_host_can_use() -> None:
    text = _text(_plan(Listener("openai", "0.0.0.0", 0), Listener("ollama", "::1", 0)), 18080, 11434)

    assert "ready after 12.3 s" in text
    assert "OpenAI API   http://127.0.0.1:18080/v1\n" in text
    assert "Ollama API   http://[::1]:11434\n" in text


def test_the_page_has_a_line_where_there_is_one() -> None:
    openai, ollama = Listener("openai", "127.0.0.1", 0), Listener("ollama", "127.0.0.1", 0)

    assert "page         http://127.0.0.1:18080/\n" in _text(_plan(openai, page=PageConfig()), 18080)
    assert "page " not in _text(_plan(openai), 18080)
    assert "page " not in _text(_plan(ollama, page=PageConfig()), 11434)


def test_an_engine_is_described_with_its_blocks_in_each_tier() -> None:
    plan = _plan(
        Listener("openai", "127.0.0.1", 1),
        swap_bytes=128 * _MIB,
        folder=Path("/var/cache/kv"),
        file_bytes=1024 * _MIB,
    )
    text = _text(plan, 1)

    assert (
        "engine-0: glm, Qwen2ForCausalLM bfloat16+fp8 on NVIDIA H200, weights 100MiB, prompts up to 32768 tokens"
        in text
    )
    assert (
        "KV blocks of 16 tokens: device 64 (64MiB), host 128 (128MiB), cache 256 (256MiB), disk 1024 (1GiB)\n" in text
    )
    assert "cache: 256MiB of memory, 1GiB of disk in /var/cache/kv\n" in text
    assert f"kvtier explain --server unix:{_UNIX.path} REQUEST_ID" in text


def test_a_cache_that_keeps_nothing_in_memory_counts_as_disk_alone() -> None:
    plan = _plan(Listener("openai", "127.0.0.1", 1), folder=Path("/kv"), file_bytes=512 * _MIB, keeps_memory=False)

    assert "device 64 (64MiB), disk 512 (512MiB)\n" in _text(plan, 1)


def test_without_a_cache_there_is_none_in_it() -> None:
    text = _text(_plan(Listener("openai", "127.0.0.1", 1), has_cache=False), 1)

    assert "KV blocks of 16 tokens: device 64 (64MiB)\n" in text
    assert "kvtier explain --server" not in text


@pytest.mark.parametrize(
    ("listener", "path"),
    [
        (Listener("openai", "127.0.0.1", 0), "/v1/chat/completions"),
        (Listener("ollama", "127.0.0.1", 0), "/api/chat"),
    ],
)
def test_the_example_is_a_command_for_an_api_that_is_served(listener: Listener, path: str) -> None:
    words = _example(_text(_plan(listener), 18080))

    assert words[:2] == ["curl", f"http://127.0.0.1:18080{path}"]
    assert json.loads(words[-1])["model"] == "glm"
    assert not any("Authorization" in word for word in words)


def test_with_api_keys_the_example_has_a_place_for_one_and_not_the_key() -> None:
    keys = (ApiKey(name="me", key="a-secret"),)
    text = _text(_plan(Listener("openai", "127.0.0.1", 0), keys=keys), 18080)

    assert "Authorization: Bearer YOUR_KEY" in _example(text)
    assert "a-secret" not in text


def test_a_part_that_reported_nothing_is_shown_with_zeros() -> None:
    assert "device 0 (0B)" in summary(_plan(Listener("openai", "127.0.0.1", 1)), [1], {}, 1.0)


def _example(text: str) -> list[str]:
    return shlex.split(text.partition("try it\n")[2].partition("  Ctrl-C")[0].replace("\\\n", " "))


def test_an_engine_without_a_cache_server_is_asked_itself_where_a_prompt_parted() -> None:
    asking = "kvtier explain --engine unix:/run/e.sock REQUEST_ID"

    assert asking in _text(_plan(Listener("openai", "127.0.0.1", 1), has_cache=False), 1)
    assert asking not in _text(_plan(Listener("openai", "127.0.0.1", 1)), 1)
