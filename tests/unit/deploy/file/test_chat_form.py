"""The form with `chat`, `remote_kv_cache` and `entrypoints`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.cacheserver.config import CacheServerConfig
from kvtier.deploy.file.native import CacheSection, Deployment, HttpSection, ModelSection
from kvtier.deploy.file.size import Size
from kvtier.deploy.plan.deployment import read_deployment
from kvtier.deploy.plan.parts import DeploymentPlan
from kvtier.engine.config import EngineConfig
from kvtier.transport.address import UnixAddress

Deploy = Callable[[str], DeploymentPlan]
Refuse = Callable[[str], list[str]]

SEED = """\
chat:
  models:
    -
      model: "THUDM/glm-4-9b-chat-1m-hf"  # 模型名称
      engine_args:
        gpu_memory_utilization: 0.9    # GPU显存利用率
        quantization: "fp8"            # fp8 推理
        block_size: 16                 # block_size 默认 16
        max_num_requests: 1            # 最大并行请求数
        max_num_batched_tokens: 1024   # Chunked Fill 最大 batched_tokens 数
        max_model_len: 110000          # 最大上下文长度
        swap_space: 20                 # cpu swap_space 内存大小 G
        enable_prefix_caching: True    # 打开 gpu prefix_caching
        remote_kv_cache_server: True   # 打开 remote_kv_cache_server
        trust_remote_code: True        # THUDM/glm-4-9b-chat-1m-hf 需要 trust_remote_code: True
        default_options:
          max_tokens: 1024             # 最大输出大小

remote_kv_cache:
  -
    model: "THUDM/glm-4-9b-chat-1m-hf"    # remote_kv_cache 模型名称， 需要和chat模型对应
    engine_args:
      block_size: 16                   # block_size 默认 16， 需要和chat模型对应
      memory_space: 20                 # kv cache 使用 cpu 内存大小 G
      file_space: 100                  # kv cache 使用 ssd 大小 G
      kv_cache_folder: "/share/test_kv_cache"    # kv cache 保存目录
 
entrypoints: ["ollama_compatible", "openai_compatible"]   # 启动 ollama 和 openai server
"""

CHAT = "chat:\n  models:\n    - model: o/a\n"
CACHE = "remote_kv_cache:\n  - model: o/a\n    engine_args:\n"


def test_the_file_as_people_have_it_says_this(here: Path) -> None:
    Path("deploy.yml").write_text(SEED, encoding="utf-8")

    deployment, _ = read_deployment(Path("deploy.yml"))

    assert deployment == Deployment(
        models=(
            ModelSection(
                model="THUDM/glm-4-9b-chat-1m-hf",
                gpu_memory_utilization=0.9,
                quantization="fp8",
                block_size=16,
                max_num_requests=1,
                max_num_batched_tokens=1024,
                max_model_len=110000,
                swap_space=Size(20 << 30),
                block_manager="prefix_caching",
                cache="cache",
                trust_remote_code=True,
                default_options={"max_tokens": 1024},
            ),
        ),
        cache=(CacheSection(memory=Size(20 << 30), disk=Size(100 << 30), folder=Path("/share/test_kv_cache")),),
        http=HttpSection(),
    )


def test_the_file_as_people_have_it_is_planned_with_a_model_that_exists(deploy: Deploy, here: Path) -> None:
    (here / "glm").mkdir()
    text = SEED.replace("THUDM/glm-4-9b-chat-1m-hf", str(here / "glm"))

    plan = deploy(text.replace("memory_space: 20 ", "memory_space: 0.5 "))  # as much as any machine has

    (cache,) = plan.caches
    assert cache.name == "cache"
    assert cache.server == CacheServerConfig(
        memory_bytes=1 << 29,
        unix=UnixAddress("/run/kvtier/cache.sock"),
        folder=Path("/share/test_kv_cache"),
        file_bytes=100 << 30,
    )
    (engine,) = plan.engines
    assert engine.engine == EngineConfig(
        model=str(here / "glm"),
        quantization="fp8",
        max_num_requests=1,
        max_num_batched_tokens=1024,
        max_model_len=110000,
        swap_space=20 << 30,
        trust_remote_code=True,
        cache_server="unix:/run/kvtier/cache.sock",
    )
    (model,) = plan.http.api.models
    assert model.names == ("glm", str(here / "glm"), "glm:latest")
    assert model.default_options == {"max_tokens": 1024}
    assert [(one.api, one.port) for one in plan.http.listeners] == [("openai", 8080), ("ollama", 11434)]


def test_every_field_of_the_native_form_is_allowed_too(deploy: Deploy) -> None:
    plan = deploy(
        CHAT
        + "      engine_args: {name: a, devices: [cpu, cuda:1], load_format: dummy, kv_cache_space: 512MiB}\n"
        + CACHE
        + "      {memory_space: 1MiB, socket: /tmp/x.sock, max_connections: 3}\n"
        + "http: {host: 0.0.0.0, ollama: 9000, api_keys: [{name: n, key: k}]}\n"
    )

    assert [(part.name, part.engine.device) for part in plan.engines] == [("a-0", "cpu"), ("a-1", "cuda:1")]
    assert plan.engines[0].engine.kv_cache_space == 512 << 20
    assert plan.engines[0].engine.cache_server == "unix:/tmp/x.sock"
    assert plan.caches[0].server.max_connections == 3
    assert [(one.api, one.host, one.port) for one in plan.http.listeners] == [
        ("openai", "0.0.0.0", 8080),
        ("ollama", "0.0.0.0", 9000),
    ]
    assert plan.http.api.keys[0].key == "k"


@pytest.mark.parametrize(
    ("args", "manager"),
    [
        ("", "prefix_caching"),
        ("enable_prefix_caching: True", "prefix_caching"),
        ("enable_prefix_caching: False", "disable_prefix_caching"),
        ("block_manager: yoco", "yoco"),
    ],
)
def test_prefix_caching_is_on_unless_told(deploy: Deploy, args: str, manager: str) -> None:
    assert deploy(CHAT + f"      engine_args: {{{args}}}\n").engines[0].engine.block_manager == manager


@pytest.mark.parametrize(
    ("args", "memory_bytes", "keeps_memory", "file_bytes"),
    [
        ("{memory_space: 0.5}", 1 << 29, True, None),
        ("{memory_space: 0.5, file_space: 0, kv_cache_folder: kv}", 1 << 29, True, None),
        ("{memory_space: 0.5, file_space: 3, kv_cache_folder: kv}", 1 << 29, True, 3 << 30),
        ("{memory_space: 0, file_space: 0.25, kv_cache_folder: kv}", 1 << 28, False, 1 << 28),
        ("{file_space: 0.5GiB, kv_cache_folder: kv}", 1 << 29, False, 1 << 29),
    ],
)
def test_a_cache_is_in_memory_on_disk_or_both(
    deploy: Deploy, here: Path, args: str, memory_bytes: int, keeps_memory: bool, file_bytes: int | None
) -> None:
    server = deploy(CHAT + CACHE + f"      {args}\n").caches[0].server

    assert (server.memory_bytes, server.keeps_memory, server.file_bytes) == (memory_bytes, keeps_memory, file_bytes)
    assert server.folder == (here / "kv" if file_bytes else None)


def test_memory_is_a_small_passage_when_blocks_are_kept_on_disk_alone(here: Path) -> None:
    Path("deploy.yml").write_text(CHAT + CACHE + "      {file_space: 100, kv_cache_folder: kv}\n")

    deployment, _ = read_deployment(Path("deploy.yml"))

    assert deployment.caches[0].memory == 1 << 30


def test_each_model_has_its_own_cache(deploy: Deploy) -> None:
    plan = deploy(
        """
        chat:
          models:
            - {model: o/a, engine_args: {remote_kv_cache_server: True}}
            - {model: o/b}
            - {model: o/c}
            - {model: o/d, engine_args: {remote_kv_cache_server: False}}
        remote_kv_cache:
          - {model: o/d, engine_args: {memory_space: 1MiB}}
          - {model: o/b, engine_args: {memory_space: 1MiB}}
          - {model: o/a, engine_args: {memory_space: 1MiB}}
        """
    )

    assert [part.name for part in plan.caches] == ["cache-0", "cache-1", "cache-2"]
    assert [part.engine.cache_server for part in plan.engines] == [
        "unix:/run/kvtier/cache-2.sock",
        "unix:/run/kvtier/cache-1.sock",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("entrypoints", "listeners"),
    [
        ('["openai_compatible"]', [("openai", "127.0.0.1", 8080)]),
        ('["ollama_compatible"]', [("ollama", "127.0.0.1", 11434)]),
        ("[openai_compatible: {port: 9000}]", [("openai", "127.0.0.1", 9000)]),
        ("[openai_compatible: {host: 0.0.0.0}]", [("openai", "0.0.0.0", 8080)]),
        ("[openai_compatible: {host: '::1', port: 9000}]", [("openai", "::1", 9000)]),
        (
            "\n  - openai_compatible:\n  - ollama_compatible: {port: 1}",
            [("openai", "127.0.0.1", 8080), ("ollama", "127.0.0.1", 1)],
        ),
    ],
)
def test_only_the_listed_apis_are_served(
    deploy: Deploy, entrypoints: str, listeners: list[tuple[str, str, int]]
) -> None:
    plan = deploy(CHAT + f"entrypoints: {entrypoints}\n")

    assert [(one.api, one.host, one.port) for one in plan.http.listeners] == listeners


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            CHAT + "      engine_args:\n        swap_spac: 3\n",
            "5: chat.models[0].engine_args.swap_spac is unknown; did you mean swap_space? allowed: ",
        ),
        (
            CHAT + "      engine_args: {cache: x}\n",
            "4: chat.models[0].engine_args.cache is unknown; did you mean cache_",
        ),
        (CHAT + "      device: cpu\n", "4: chat.models[0].device is unknown; allowed: model, engine_args"),
        (CHAT + "models: []\n", "4: models is unknown; allowed: chat, remote_kv_cache, entrypoints, http"),
        ("entrypoints: []\n", "1: the file lacks chat"),
        ("chat:\n  models: []\n", "2: chat.models is empty: there is nothing to serve"),
        (
            CHAT + "      engine_args:\n        remote_kv_cache_server: True\n",
            "5: remote_kv_cache_server is on, but remote_kv_cache has no entry for o/a",
        ),
        (
            CHAT + "remote_kv_cache:\n  - engine_args: {memory_space: 1}\n    model: o/b\n",
            "6: remote_kv_cache[0] is for o/b, but chat has o/a",
        ),
        (
            CHAT + CACHE + "      memory_space: 1MiB\n  - {model: o/a, engine_args: {memory_space: 1}}\n",
            "8: o/a has two entries in remote_kv_cache",
        ),
        (
            CHAT + "      engine_args: {block_size: 32}\n" + CACHE + "      memory_space: 1MiB\n      block_size: 64\n",
            "9: block_size is 64 here and 32 in the chat model o/a: they must be equal",
        ),
        (
            CHAT + "      engine_args: {block_size: 32}\n" + CACHE + "      memory_space: 1MiB\n",
            "8: block_size is 16 here and 32 in the chat model o/a: they must be equal",
        ),
        (CHAT + CACHE + "      block_size: 16\n", "7: a cache needs memory_space, or file_space and kv_cache_folder"),
        (CHAT + CACHE + "      file_space: 3\n", "7: file_space needs a kv_cache_folder to keep blocks in"),
        (CHAT + CACHE + "      kv_cache_folder: kv\n", "7: kv_cache_folder needs file_space, the most space it may"),
        (CHAT + CACHE + "      memory_space: 1KiB\n", "7: memory must be at least 4KiB, not 1KiB"),
        (CHAT + CACHE + "      memory_space: 1\n      fsync: true\n", "8: fsync is about the disk"),
        (
            CHAT + "      engine_args:\n        block_size: -1\n",
            "5: block_size must be a positive whole number, not -1",
        ),
        (CHAT + "      engine_args:\n        default_options:\n          n: 0\n", "6: n must be at least 1 and at mo"),
        (
            CHAT + "      engine_args:\n        enable_prefix_caching: True\n        block_manager: yoco\n",
            "5: enable_prefix_caching and block_manager say the same: give one of them",
        ),
        ("chat:\n  models:\n    - engine_args: {}\n      model: nowhere\n", "4: there is no model folder 'nowhere'"),
        (CHAT + "entrypoints: []\n", "4: entrypoints is empty: list openai_compatible or ollama_compatible"),
        (
            CHAT + "entrypoints:\n  - openai_compatible\n  - open_compatible\n",
            "6: entrypoints[1]: open_compatible is unknown; did you mean openai_compatible? allowed: openai_compa",
        ),
        (CHAT + "entrypoints:\n  - openai_compatible\n  - openai_compatible\n", "6: openai_compatible is listed twice"),
        (
            CHAT + "entrypoints: [openai_compatible]\nhttp: {openai: false}\n",
            "4: openai_compatible is listed, but http.openai says that it is not served",
        ),
        (
            CHAT + "entrypoints:\n  - openai_compatible: {prot: 1}\n",
            "5: entrypoints[0].openai_compatible.prot is unknown; did you mean port? allowed: host, port",
        ),
        (CHAT + "entrypoints:\n  - openai_compatible: {port: 70000}\n", "5: openai must be a port from 0 to 65535"),
        (
            CHAT + "entrypoints:\n  - ollama_compatible\n  - openai_compatible: {port: 11434}\n",
            "5: the openai API and the ollama API both have port 11434",
        ),
    ],
)
def test_what_cannot_work_is_told_with_its_line(refuse: Refuse, text: str, sentence: str) -> None:
    sentences = refuse(text)

    assert len(sentences) == 1
    assert sentences[0].startswith(f"deploy.yml:{sentence}")


def test_a_file_that_nearly_has_this_form_is_told_what_this_form_allows(refuse: Refuse) -> None:
    assert refuse("chats:\n  models: []\n") == [
        "deploy.yml:1: chats is unknown; did you mean chat? allowed: chat, remote_kv_cache, entrypoints, http",
        "deploy.yml:1: the file lacks chat",
    ]
    assert refuse("cache: {}\nhttp: {}\n") == ["deploy.yml:1: the file lacks models"]


def test_two_models_cannot_keep_their_blocks_in_one_folder(refuse: Refuse) -> None:
    (sentence,) = refuse(
        """\
        chat: {models: [{model: o/a}, {model: o/b}]}
        remote_kv_cache:
          - {model: o/a, engine_args: {memory_space: 1MiB, file_space: 1, kv_cache_folder: /kv}}
          - model: o/b
            engine_args:
              memory_space: 1MiB
              file_space: 1
              kv_cache_folder: /kv
        """
    )

    assert sentence == "deploy.yml:8: /kv is the folder of the cache cache-0 already"
