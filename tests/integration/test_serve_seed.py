"""The deployment file that people bring along, in its own form, with a model and sizes that this machine has."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.deployments import DeploymentProcess
from tests.support.serving import ask, save_model
from tests.support.waiting import LIMIT_S

_MODEL = "THUDM/glm-4-9b-chat-1m-hf"
_TEXT = """\
chat:
  models:
    -
      model: "THUDM/glm-4-9b-chat-1m-hf"  # 模型名称
      engine_args:
        gpu_memory_utilization: 0.9    # GPU显存利用率
        block_size: 16                 # block_size 默认 16
        max_num_requests: 1            # 最大并行请求数
        max_num_batched_tokens: 1024   # Chunked Fill 最大 batched_tokens 数
        max_model_len: 3500            # 最大上下文长度
        swap_space: 0.02               # cpu swap_space 内存大小 G
        enable_prefix_caching: True    # 打开 gpu prefix_caching
        remote_kv_cache_server: True   # 打开 remote_kv_cache_server
        trust_remote_code: True        # THUDM/glm-4-9b-chat-1m-hf 需要 trust_remote_code: True
        default_options:
          max_tokens: 24               # 最大输出大小

remote_kv_cache:
  -
    model: "THUDM/glm-4-9b-chat-1m-hf"    # remote_kv_cache 模型名称， 需要和chat模型对应
    engine_args:
      block_size: 16                   # block_size 默认 16， 需要和chat模型对应
      memory_space: 0.02               # kv cache 使用 cpu 内存大小 G
      file_space: 0.1                  # kv cache 使用 ssd 大小 G
      kv_cache_folder: "test_kv_cache"    # kv cache 保存目录

entrypoints: ["ollama_compatible", "openai_compatible"]   # 启动 ollama 和 openai server
"""
"""The file as it is, except for its sizes, its folder, and fp8, which a CPU does not have."""

_MESSAGES = [{"role": "user", "content": "What is a cache?"}]


@pytest.mark.slow
def test_a_file_in_the_other_form_serves_both_apis_with_its_settings(tmp_path: Path) -> None:
    save_model(tmp_path / _MODEL)
    with DeploymentProcess(tmp_path, _TEXT) as deployment, httpx.Client(timeout=LIMIT_S, trust_env=False) as client:
        names = [one["id"] for one in client.get(f"{deployment.openai_url}/v1/models").json()["data"]]
        of_openai = client.post(
            f"{deployment.openai_url}/v1/chat/completions",
            json={"model": _MODEL, "messages": _MESSAGES, "temperature": 0},
        ).json()
        of_ollama = client.post(
            f"{deployment.ollama_url}/api/chat",
            json={"model": _MODEL, "messages": _MESSAGES, "stream": False, "options": {"temperature": 0}},
        ).json()
        cached = ask(deployment, "A prompt that is asked about twice. " * 4, model=_MODEL)
        again = ask(deployment, "A prompt that is asked about twice. " * 4, model=_MODEL)
        status = deployment.stop()

        assert "prompts up to 3500 tokens" in deployment.log()
        assert deployment.left_behind() == []
    assert status == 0
    assert names == ["glm-4-9b-chat-1m-hf"], "of a folder the last part; the whole name is known too"
    assert 0 < of_openai["usage"]["completion_tokens"] <= 24, "max_tokens of default_options"
    assert of_openai["choices"][0]["message"]["content"] == of_ollama["message"]["content"]
    assert (cached.cached_tokens, cached.text) == (0, again.text)
    assert again.cached_tokens > 0
    assert any((tmp_path / "test_kv_cache").iterdir())
