"""From a deployment file to its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from kvtier.api.chat.tool_formats import TOOL_FORMATS
from kvtier.api.config import ApiKey, EngineAddress
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.deploy.file.native import EngineOptions, ToolFormatName
from kvtier.deploy.plan.deployment import load_plan
from kvtier.deploy.plan.parts import CachePart, DeploymentPlan, EnginePart, HttpPart, Listener, decode_part, encode_part
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.stores.mooncake.config import MooncakeConfig
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.transport.address import TcpAddress, UnixAddress

Deploy = Callable[[str], DeploymentPlan]
Refuse = Callable[[str], list[str]]


def test_one_model_is_a_whole_deployment(deploy: Deploy) -> None:
    plan = deploy("models: [{model: owner/model}]")

    assert plan.caches == ()
    (engine,) = plan.engines
    assert (engine.name, engine.served_as, engine.socket) == (
        "owner-model",
        "owner/model",
        "/run/kvtier/owner-model.sock",
    )
    assert engine.engine == EngineConfig(model="owner/model")
    assert plan.http.listeners == (Listener("openai", "127.0.0.1", 8080), Listener("ollama", "127.0.0.1", 11434))
    (model,) = plan.http.api.models
    assert model.names == ("owner/model", "owner/model:latest")
    assert model.listed == ("owner/model",)
    assert model.engines == (EngineAddress("owner-model", "/run/kvtier/owner-model.sock"),)


def test_everything_that_can_be_said_arrives(deploy: Deploy, here: Path) -> None:
    (here / "token").write_text("a long secret\n")
    (here / "alice").write_text("key-of-alice\n")
    for name in ("cert.pem", "key.pem"):
        (here / name).touch()
    plan = deploy(
        """
        models:
          - model: owner/model
            name: [qwen, q]
            devices: [cuda:0, cuda:1]
            gpu_memory_utilization: 0.5
            swap_space: 0.5
            kv_cache_space: 2GiB
            default_options: {max_tokens: 1024, stop: END}
            dtype: float16
            quantization: fp8
            block_manager: yoco
            schedule: sync
            max_model_len: 4096
            cache_dir: hub
        cache:
          name: shared
          memory: 64MiB
          disk: 1
          folder: kv
          socket: /tmp/shared.sock
          tcp: 0.0.0.0:7700
          token_file: token
          tls_cert: cert.pem
          tls_key: key.pem
          metrics: 127.0.0.1:9400
          store_on: reuse
          disk_writes_per_day: 200GiB
          fsync: true
          disk_optional: true
          max_leased: 16MiB
          max_frame: 8MiB
          max_connections: 9
          lease_timeout_s: 5
          touch_memory: true
        http:
          host: 0.0.0.0
          openai: 8000
          ollama: localhost:11400
          api_keys:
            - {name: alice, key_file: alice, salt: tenant-a}
            - {name: bob, key: key-of-bob}
          max_body: 1MiB
          max_requests: 7
          drain_s: 2
        """
    )

    assert plan.caches == (
        CachePart(
            name="shared",
            server=CacheServerConfig(
                memory_bytes=64 << 20,
                unix=UnixAddress("/tmp/shared.sock"),
                tcp=TcpAddress("0.0.0.0", 7700),
                token=b"a long secret",
                tls_certificate=here / "cert.pem",
                tls_key=here / "key.pem",
                metrics=TcpAddress("127.0.0.1", 9400),
                max_connections=9,
                max_payload_bytes=8 << 20,
                max_leased_bytes=16 << 20,
                lease_timeout_s=5.0,
                folder=here / "kv",
                file_bytes=1 << 30,
                fsync=True,
                stores_on="reuse",
                disk_writes_per_day=200 << 30,
                needs_disk=False,
                touches_memory=True,
            ),
        ),
    )
    assert [(part.name, part.engine.device) for part in plan.engines] == [("qwen-0", "cuda:0"), ("qwen-1", "cuda:1")]
    assert plan.engines[0].engine == EngineConfig(
        model="owner/model",
        device="cuda:0",
        gpu_memory_utilization=0.5,
        swap_space=1 << 29,
        kv_cache_space=2 << 30,
        dtype="float16",
        quantization="fp8",
        block_manager="yoco",
        schedule="sync",
        max_model_len=4096,
        cache_dir=str(here / "hub"),
        cache_server="unix:/tmp/shared.sock",
    )
    api = plan.http.api
    assert api.keys == (
        ApiKey(name="alice", key="key-of-alice", salt="tenant-a"),
        ApiKey(name="bob", key="key-of-bob"),
    )
    assert (api.max_body_bytes, api.max_requests, api.drain_s) == (1 << 20, 7, 2.0)
    assert api.models[0].names == ("qwen", "q", "owner/model", "qwen:latest", "q:latest")
    assert api.models[0].listed == ("qwen", "q")
    assert api.models[0].default_options == {"max_tokens": 1024, "stop": "END"}
    assert [address.name for address in api.models[0].engines] == ["qwen-0", "qwen-1"]
    assert plan.http.listeners == (Listener("openai", "0.0.0.0", 8000), Listener("ollama", "localhost", 11400))
    assert not (here / "kv").exists()


def test_parts_reach_their_processes_as_they_are(deploy: Deploy, here: Path) -> None:
    (here / "token").write_text("a long secret")
    plan = deploy(
        """
        models: [{model: owner/model, swap_space: 1}]
        cache: {memory: 1MiB, disk: 1GiB, folder: kv, tcp: "[::1]:7700", token_file: token}
        http: {api_keys: [{name: a, key: b}]}
        """
    )

    assert decode_part(encode_part(plan.caches[0]), CachePart) == plan.caches[0]
    assert decode_part(encode_part(plan.engines[0]), EnginePart) == plan.engines[0]
    assert decode_part(encode_part(plan.http), HttpPart) == plan.http


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", ()),
        ("allow_origins: '*'", ("*",)),
        ("allow_origins: https://a.example", ("https://a.example",)),
        ("allow_origins: ['https://a.example', 'http://localhost:*', 'app://*', 'http://[::1]:80']", None),
    ],
)
def test_pages_that_may_ask_are_none_one_all_or_a_list(
    deploy: Deploy, given: str, found: tuple[str, ...] | None
) -> None:
    plan = deploy(f"models: [{{model: o/a}}]\nhttp: {{{given}}}")

    listed = ("https://a.example", "http://localhost:*", "app://*", "http://[::1]:80")
    assert plan.http.api.allow_origins == (listed if found is None else found)


@pytest.mark.parametrize("origin", ["https://a.example*", "http://localhost*", "a.example", "https://a.example/path"])
def test_a_star_behind_a_part_of_a_name_is_no_origin(refuse: Refuse, origin: str) -> None:
    (sentence,) = refuse(f"models: [{{model: o/a}}]\nhttp: {{allow_origins: ['{origin}']}}")

    assert f"each of allow_origins must be SCHEME://HOST, SCHEME://HOST:PORT or *, not '{origin}'" in sentence


def test_how_a_model_writes_calls_and_thoughts_reaches_the_http_server(deploy: Deploy) -> None:
    plan = deploy("models: [{model: owner/model, tool_format: glm45, reasoning_format: none}, {model: owner/other}]")

    assert [(model.tool_format, model.reasoning_format) for model in plan.http.api.models] == [
        ("glm45", "none"),
        ("auto", "auto"),
    ]
    assert {*get_args(ToolFormatName)} == {"auto", *TOOL_FORMATS}


def test_default_options_reach_the_http_server_as_they_are(deploy: Deploy) -> None:
    plan = deploy("models: [{model: owner/model, default_options: {max_tokens: 9, stop_token_ids: [1, 2]}}]")

    assert decode_part(encode_part(plan.http), HttpPart) == plan.http


def test_the_file_can_set_every_setting_of_an_engine() -> None:
    of_the_plan = {
        "model",
        "cache_server_token",
        "cache_server_secret",
        "mooncake",
        "cluster",
        "objects",
    }  # secrets; sections

    assert set(EngineConfig.__struct_fields__) - of_the_plan <= set(EngineOptions.__struct_fields__)


def test_defaults_are_those_of_the_parts(deploy: Deploy) -> None:
    plan = deploy("models: [{model: owner/model}]\ncache: {memory: 1GiB}")

    assert plan.caches[0].server == CacheServerConfig(memory_bytes=1 << 30, unix=UnixAddress("/run/kvtier/cache.sock"))
    assert plan.engines[0].engine == EngineConfig(model="owner/model", cache_server="unix:/run/kvtier/cache.sock")


class TestModels:
    def test_a_folder_beside_the_file_comes_first_then_one_from_here(
        self, here: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        elsewhere = tmp_path_factory.mktemp("elsewhere")
        (elsewhere / "owner" / "one").mkdir(parents=True)
        (here / "owner" / "one").mkdir(parents=True)
        (here / "owner" / "two").mkdir()
        path = elsewhere / "deploy.yml"
        path.write_text("models: [{model: owner/one}, {model: owner/two}, {model: owner/three}]")

        plan = load_plan(path, Path("/run"))

        assert [part.engine.model for part in plan.engines] == [
            str(elsewhere / "owner" / "one"),
            str(here / "owner" / "two"),
            "owner/three",
        ]

    def test_a_folder_is_called_by_its_last_part_and_as_it_is_given(self, deploy: Deploy, here: Path) -> None:
        (here / "models" / "tiny").mkdir(parents=True)

        plan = deploy("models: [{model: ./models/tiny}]")

        assert plan.http.api.models[0].names == ("tiny", "./models/tiny", "tiny:latest")
        assert plan.http.api.models[0].listed == ("tiny",)
        assert plan.engines[0].served_as == "tiny"

    def test_a_path_goes_up_from_where_a_link_leads_and_ends_as_it_is_called(self, deploy: Deploy, here: Path) -> None:
        (here / "far" / "models" / "0123").mkdir(parents=True)
        (here / "far" / "models" / "nice").symlink_to(here / "far" / "models" / "0123")
        (here / "near").symlink_to(here / "far" / "models")

        (engine,) = deploy("models: [{model: near/../models/nice}]").engines

        assert engine.engine.model == f"{here}/far/models/nice"
        assert engine.served_as == "nice"

    def test_home_is_known(self, deploy: Deploy, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(here))
        (here / "tiny").mkdir()

        assert deploy("models: [{model: ~/tiny}]").engines[0].engine.model == str(here / "tiny")

    @pytest.mark.parametrize("model", ["/nowhere", "./tiny", "tiny", "a/b/c", "''", "~/nothing/here", "'-x/y'"])
    def test_what_is_neither_a_folder_nor_a_name_on_the_hub_is_refused(self, refuse: Refuse, model: str) -> None:
        (sentence,) = refuse(f"models:\n  - name: x\n    model: {model}\n")

        assert sentence.startswith("deploy.yml:3: there is no model folder ")

    def test_two_models_of_one_name_are_refused(self, refuse: Refuse) -> None:
        assert refuse("models:\n  - {model: a/b, name: x}\n  - model: c/d\n    name: [y, x]\n") == [
            "deploy.yml:4: two models are called 'x': give each a name of its own"
        ]
        assert refuse("models:\n  - model: a/b\n  - model: a/b\n") == [
            "deploy.yml:3: two models are called 'a/b': give each a name of its own"
        ]

    def test_one_model_under_two_names_is_not_called_by_what_both_are(self, deploy: Deploy) -> None:
        plan = deploy("models: [{model: a/b, name: x}, {model: a/b, name: y}]")

        assert [model.names for model in plan.http.api.models] == [("x", "x:latest"), ("y", "y:latest")]

    def test_the_name_of_one_model_may_be_the_folder_of_another(self, deploy: Deploy) -> None:
        plan = deploy("models: [{model: a/b, name: c/d}, {model: c/d, name: e}]")

        assert [model.listed for model in plan.http.api.models] == [("c/d",), ("e",)]
        assert [model.names[1] for model in plan.http.api.models] == ["a/b", "e:latest"]

    def test_parts_have_names_that_are_safe_short_and_their_own(self, deploy: Deploy) -> None:
        long = "x" * 80
        plan = deploy(
            f"""
            models:
              - {{model: a/b}}
              - {{model: a/c, name: a-b}}
              - {{model: a/d, name: "../../etc é"}}
              - {{model: a/e, name: http}}
              - {{model: a/f, name: cache}}
              - {{model: a/g, name: 你好}}
              - {{model: a/h, name: {long}, engines: 2}}
            cache: {{memory: 1MiB}}
            """
        )

        assert [part.name for part in plan.engines] == [
            "a-b",
            "a-b-2",
            "etc",
            "http-2",
            "cache-2",
            "part",
            "x" * 32 + "-0",
            "x" * 32 + "-1",
        ]

    def test_a_runtime_folder_that_is_too_long_for_sockets_is_told(self, here: Path) -> None:
        Path("deploy.yml").write_text("models: [{model: a/b}]")

        with pytest.raises(ConfigError, match="longer than the 107 bytes"):
            load_plan(Path("deploy.yml"), Path("/run") / ("x" * 100))


class TestCaches:
    CACHES = "cache:\n  - {name: a, memory: 1MiB}\n  - {name: b, memory: 1MiB}\n"

    def test_a_model_says_which_of_several_it_uses(self, deploy: Deploy) -> None:
        plan = deploy(
            "models:\n  - {model: o/a, cache: a}\n  - {model: o/b, cache: b}\n  - {model: o/c, cache: false}\n"
            + self.CACHES
        )

        assert [part.engine.cache_server for part in plan.engines] == [
            "unix:/run/kvtier/a.sock",
            "unix:/run/kvtier/b.sock",
            "",
        ]

    @pytest.mark.parametrize(
        ("models", "sentence"),
        [
            ("models:\n  - model: o/a\n", "2: there are several caches: say which with cache, one of a, b, or false"),
            (
                "models:\n  - model: o/a\n    cache: true\n",
                "3: there are several caches: say which with cache, one of a, b, or false",
            ),
            ("models:\n  - model: o/a\n    cache: c\n", "3: there is no cache 'c'; there is a, b"),
            (
                "models:\n  - model: o/a\n    cache_server: tcp://h:1\n    cache: a\n",
                "3: cache_server takes the place of cache: give one of them",
            ),
        ],
    )
    def test_a_model_that_does_not_say_which_is_refused(self, refuse: Refuse, models: str, sentence: str) -> None:
        assert refuse(models + self.CACHES) == [f"deploy.yml:{sentence}"]

    def test_a_cache_that_is_not_there_is_refused(self, refuse: Refuse) -> None:
        models = "models:\n  - model: o/a\n    cache: "

        assert refuse(models + "true\n") == ["deploy.yml:3: cache is true, but the file has no cache"]
        assert refuse(models + "b\n") == ["deploy.yml:3: there is no cache 'b'; the file has no cache"]

    def test_several_servers_outside_are_a_cluster(self, refuse: Refuse) -> None:
        servers = "models:\n  - model: o/a\n    cache_server: [tcp://one:7700, tcp://two:7700]\n"

        [sentence] = refuse(servers)
        assert "cache_server takes one address" in sentence
        assert "cluster:" in sentence

    def test_a_server_outside_takes_the_place_of_the_cache(self, deploy: Deploy, here: Path) -> None:
        (here / "token").write_text("a long secret\n")
        (here / "ca.pem").touch()
        plan = deploy(
            """
            models:
              - model: o/a
                cache_server: tcp://one:7700
                cache_server_token_file: token
                cache_server_ca_file: ca.pem
              - model: o/b
            cache: {memory: 1MiB}
            """
        )

        outside, inside = (part.engine for part in plan.engines)
        assert outside.cache_server == "tcp://one:7700"
        assert outside.cache_server_token == "a long secret"
        assert outside.cache_server_ca_file == str(here / "ca.pem")
        assert inside.cache_server == "unix:/run/kvtier/cache.sock"

    @pytest.mark.parametrize(
        ("caches", "sentence"),
        [
            ("  - {memory: 1MiB}\n  - memory: 1MiB\n", "4: two caches are called 'cache': give each a name of its own"),
            (
                "  - {name: a, folder: kv, disk: 1}\n  - name: b\n    disk: 1\n    folder: ./x/../kv\n",
                "6: {here}/kv is the folder of the cache a already",
            ),
            (
                "  - {name: a, socket: a.sock}\n  - name: b\n    socket: ./a.sock\n",
                "5: {here}/a.sock is the socket of the cache a already",
            ),
            (f"  - memory: 1MiB\n    socket: /{'x' * 120}\n", f"4: '/{'x' * 120}' is longer than the 107 bytes"),
        ],
    )
    def test_caches_are_apart(self, refuse: Refuse, here: Path, caches: str, sentence: str) -> None:
        (refused,) = refuse("models: [{model: o/a, cache: false}]\ncache:\n" + caches)

        assert refused.startswith(f"deploy.yml:{sentence}".replace("{here}", str(here)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("http:\n  openai: 9000\n  ollama: 9000\n", "4: the openai API and the ollama API both have port 9000"),
        ("http: {openai: 11434}\n", "2: the openai API and the ollama API both have port 11434"),
        ("cache:\n  metrics: 0.0.0.0:8080\n", "1: metrics of cache and the openai API both have port 8080"),
    ],
)
def test_ports_do_not_collide(refuse: Refuse, text: str, sentence: str) -> None:
    assert refuse("models: [{model: o/a}]\n" + text) == [f"deploy.yml:{sentence}"]


def test_one_port_on_two_hosts_and_free_ports_are_no_collision(deploy: Deploy) -> None:
    plan = deploy("models: [{model: o/a}]\nhttp: {openai: 127.0.0.1:9000, ollama: 127.0.0.2:9000}")
    assert [listener.port for listener in plan.http.listeners] == [9000, 9000]

    plan = deploy("models: [{model: o/a}]\nhttp: {openai: 0, ollama: 0}")
    assert [listener.port for listener in plan.http.listeners] == [0, 0]


def test_an_api_can_be_left_out(deploy: Deploy) -> None:
    assert [one.api for one in deploy("models: [{model: o/a}]\nhttp: {openai: false}").http.listeners] == ["ollama"]
    assert [one.api for one in deploy("models: [{model: o/a}]\nhttp: {ollama: null}").http.listeners] == ["openai"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "http:\n  api_keys:\n    - name: a\n      key_file: nowhere\n",
            "5: key_file {here}/nowhere cannot be read: No such file or directory",
        ),
        (
            "http:\n  api_keys:\n    - name: a\n      key_file: empty\n",
            "4: the API key of a must be printable ASCII, and not empty",
        ),
        (
            "http:\n  api_keys:\n    - name: a\n      key_file: binary\n",
            "5: key_file {here}/binary is not text in UTF-8",
        ),
        (
            "http:\n  api_keys:\n    - {name: a, key: x}\n    - name: a\n      key: y\n",
            "5: two API keys are called 'a': give each a name of its own",
        ),
        (
            "http:\n  api_keys:\n    - {name: a, key: x}\n    - name: b\n      key: x\n",
            "6: the API key 'b' is the same as another one",
        ),
        (
            "cache:\n  tcp: 0.0.0.0:7700\n  token_file: nowhere\n",
            "4: token_file {here}/nowhere cannot be read: No such file or directory",
        ),
        (
            "cache:\n  tcp: 0.0.0.0:7700\n  token_file: short\n",
            "4: the token is too short: use 8 characters or more",
        ),
        (
            "cache:\n  tcp: 0.0.0.0:7700\n  token_file: token\n  tls_cert: nowhere\n",
            "5: tls_cert {here}/nowhere does not exist",
        ),
        (
            "cache:\n  tcp: 0.0.0.0:7700\n  token_file: token\n  tls_cert: token\n",
            "5: TLS needs both a certificate and a key",
        ),
    ],
)
def test_files_that_the_file_names_are_looked_at(refuse: Refuse, here: Path, text: str, sentence: str) -> None:
    (here / "empty").touch()
    (here / "binary").write_bytes(b"\xff")
    (here / "short").write_text("short")
    (here / "token").write_text("a long secret")

    assert refuse("models: [{model: o/a}]\n" + text) == [f"deploy.yml:{sentence}".replace("{here}", str(here))]


def test_models_share_settings_through_anchors(deploy: Deploy) -> None:
    plan = deploy(
        """
        models:
          - &first
            model: o/a
            device: cpu
            swap_space: 1GiB
          - <<: *first
            model: o/b
            swap_space: 2GiB
        """
    )

    assert [(part.engine.model, part.engine.device, part.engine.swap_space) for part in plan.engines] == [
        ("o/a", "cpu", 1 << 30),
        ("o/b", "cpu", 2 << 30),
    ]


class TestCluster:
    MODELS = "models: [{model: owner/model}]\n"

    def test_engines_of_its_cache_use_it(self, deploy: Deploy, here: Path) -> None:
        (here / "password").write_text("a secret\n")
        plan = deploy(
            self.MODELS
            + """
cache:
  cluster: {valkey: ["tls://a:6379"], user: kvtier, password_file: password, ttl: 3600, segment: 64, timeout_s: 0.5,
            store_on: worth, write_rate: 1MiB, compute_once: false}
"""
        )

        expected = ClusterConfig(
            valkey=("tls://a:6379",),
            user="kvtier",
            password="a secret",
            ttl_s=3600.0,
            segment=64,
            timeout_s=0.5,
            compute_once=False,
        )
        (cache,), (engine,) = plan.caches, plan.engines
        assert cache.server.cluster == expected
        assert (cache.server.shares_on, cache.server.share_bytes_per_s) == ("worth", 1 << 20)
        assert cache.cluster is engine.engine.cluster is None
        assert engine.engine.cache_server == str(cache.server.unix)
        assert decode_part(encode_part(cache), CachePart) == cache

    def test_below_engines_it_is_a_tier_of_each_beside_the_server(self, deploy: Deploy) -> None:
        plan = deploy(self.MODELS + 'cache: {cluster: {valkey: ["tls://a:6379"], below: engine}}\n')

        (cache,), (engine,) = plan.caches, plan.engines
        assert cache.cluster == engine.engine.cluster == ClusterConfig(valkey=("tls://a:6379",))
        assert cache.server.cluster is None
        assert engine.engine.cache_server == str(cache.server.unix)
        assert decode_part(encode_part(engine), EnginePart) == engine

    @pytest.mark.parametrize(
        ("cluster", "sentence"),
        [
            ("{}", "3: cluster lacks valkey"),
            ('{valkey: ["tcp://10.0.0.1:1"]}', "3: 10.0.0.1:1 is another host: write tls://10.0.0.1:1, or plaintext"),
            ('{valkey: ["tls://a:1"], ttl: 5}', "3: ttl must be from 60 s to ten years, not 5 s"),
            ('{valkey: ["tls://a:1"], ca_file: nowhere}', "3: ca_file "),
            ('{valkey: ["tls://a:1"], password_file: nowhere}', "3: password_file "),
            ('{valkey: ["tls://a:1"], below: engine, write_rate: 1MiB}', "3: store_on and write_rate are for"),
            ('{valkey: ["tls://a:1"], segmnt: 5}', "3: cluster.segmnt is unknown; did you mean segment?"),
        ],
    )
    def test_what_cannot_work_has_a_line(self, refuse: Refuse, cluster: str, sentence: str) -> None:
        (problem,) = refuse(f"{self.MODELS}cache:\n  cluster: {cluster}\n")

        assert problem.removeprefix("deploy.yml:").replace("cache.", "").startswith(sentence), problem

    def test_vllm_uses_it_below_its_server_alone(self, deploy: Deploy, refuse: Refuse) -> None:
        models = "models:\n  - {model: owner/model, engine: vllm}\n"
        plan = deploy(models + 'cache: {cluster: {valkey: ["tls://a:1"]}}\n')
        assert plan.caches[0].server.cluster is not None

        (problem,) = refuse(models + 'cache: {cluster: {valkey: ["tls://a:1"], below: engine}}\n')
        assert "vLLM cannot use the cluster of cache: give it a cache without, or one below its server" in problem


class TestMooncake:
    MODELS = "models: [{model: owner/model}]\n"

    def test_engines_of_its_cache_use_it(self, deploy: Deploy) -> None:
        plan = deploy(
            self.MODELS
            + """
cache:
  mooncake: {master: "a:50051", memory: 8GiB, protocol: rdma, device: mlx5_0, buffer: 1GiB, trusted_network: true}
"""
        )

        expected = MooncakeConfig(
            master="a:50051", memory=8 << 30, protocol="rdma", device="mlx5_0", buffer=1 << 30, trusted_network=True
        )
        (cache,), (engine,) = plan.caches, plan.engines
        assert cache.mooncake == engine.engine.mooncake == expected
        assert decode_part(encode_part(engine), EnginePart) == engine

    @pytest.mark.parametrize(
        ("mooncake", "sentence"),
        [
            ("{memory: 1GiB}", "3: mooncake lacks master"),
            ("{master: 'a:1'}", "3: mooncake lacks memory"),
            ("{master: 'a:1', memory: 1GiB}", "3: Mooncake has no authentication, so any client that can reach"),
            ("{master: 'a:1', memory: 1GiB, trusted_network: false}", "3: Mooncake has no authentication"),
            ("{master: a, memory: 1GiB, trusted_network: true}", "3: master must be host:port"),
            ("{master: 'a:1', memory: 1GiB, trusted_network: true, device: x}", "3: device is only for RDMA"),
        ],
    )
    def test_what_cannot_work_has_a_line(self, refuse: Refuse, mooncake: str, sentence: str) -> None:
        (problem,) = refuse(f"{self.MODELS}cache:\n  mooncake: {mooncake}\n")

        assert problem.removeprefix("deploy.yml:").replace("cache.", "").startswith(sentence), problem

    def test_vllm_cannot_use_it_yet(self, refuse: Refuse) -> None:
        models = "models:\n  - {model: owner/model, engine: vllm}\n"
        (problem,) = refuse(models + "cache: {mooncake: {master: 'a:1', memory: 1GiB, trusted_network: true}}\n")

        assert "vLLM cannot use the mooncake of cache: give it a cache without" in problem
