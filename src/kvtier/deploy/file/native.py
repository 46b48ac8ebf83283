"""The native form of the deployment file: `models` and, optionally, `cache` and `http`.

The text below each field is its meaning, from which docs/configuration.md is written. Sizes are bytes here; a file
writes them as in `size`. How settings depend on each other is checked where a plan is made.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from kvtier.api.config import DEFAULT_CURRENCY
from kvtier.api.prefixes.record import NAME_IN_WORDS, is_name
from kvtier.blocks.eviction import Eviction
from kvtier.blocks.retention import DEFAULT_PRIORITY
from kvtier.cacheserver.config import DEFAULT_MAX_RETENTION_S
from kvtier.cacheserver.tenants import DEFAULT_RETAINED_SHARE
from kvtier.deploy.file.form import check_name, is_short_path, read_form
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.size import Size
from kvtier.deploy.file.vllm_arguments import check_arguments
from kvtier.deploy.file.yaml_file import YamlFile
from kvtier.durations import parse_duration
from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.errors import ConfigError
from kvtier.stores.mooncake.config import DEFAULT_BUFFER as DEFAULT_MOONCAKE_BUFFER
from kvtier.stores.mooncake.config import P2P, Protocol
from kvtier.stores.objects.config import DEFAULT_BUFFER
from kvtier.stores.valkey.config import DEFAULT_SEGMENT, DEFAULT_TTL_S
from kvtier.transport.address import check_is_one

DEFAULT_OPENAI_PORT = 8080
DEFAULT_OLLAMA_PORT = 11434
DEFAULT_CACHE_BYTES = Size(4 << 30)
_MAX_PORT = 65535
_MAX_ENGINES = 1024
_HOST = re.compile(r"[\w.:%-]+", re.ASCII)
_MAX_NAMES = 256
_MAX_NAME_CHARACTERS = 256
_ALLOWED_HOST = re.compile(r"\*|(?:\*\.)?[\w.:-]++", re.ASCII)
_ALLOWED_ORIGIN = re.compile(
    r"\*|[a-z][a-z0-9+.-]*+://(\*|(\[[0-9a-f:.]++\]|[\w.-]*+)(:(\d{1,5}|\*))?)", re.ASCII | re.IGNORECASE
)
"""A `*` is a whole host or a port: after a part of a name, it would allow other hosts' names."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_DEVICES_OF_VLLM = re.compile(r"auto|cpu|cuda(:\d{1,3}(,\d{1,3}){0,15})?")

ToolFormatName = Literal[
    "auto", "hermes", "qwen3_coder", "llama3_json", "llama4_pythonic", "mistral", "mistral_args", "glm4", "glm45"
]


def check_host(host: str) -> None:
    """Raises `ConfigError` for text that can be neither an address nor a name."""
    if not _HOST.fullmatch(host):
        raise ConfigError(f"host must be an address or a name, and 0.0.0.0 for all, not {host!r}")


def check_model(model: str) -> None:
    """Raises `ConfigError` for text that can be neither a folder nor a name on the hub."""
    if not is_short_path(model) or "\0" in model:
        raise ConfigError("model must be a folder or a name on the hub, with names of at most 255 bytes")


def _check_names(field: str, names: tuple[str, ...], allowed: re.Pattern[str], expected: str) -> None:
    if len(names) > _MAX_NAMES:
        raise ConfigError(f"{field} must not be more than {_MAX_NAMES}, but is {len(names)}")
    for name in names:
        if len(name) > _MAX_NAME_CHARACTERS or not allowed.fullmatch(name):
            raise ConfigError(f"each of {field} must be {expected}, not {name[:_MAX_NAME_CHARACTERS]!r}")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run, in either form of the file."""

    name: str | tuple[str, ...] = ()
    """The model's name for clients, or a list of names; by default `model` as given, or the last part of a folder."""
    engine: Literal["kvtier", "vllm"] = "kvtier"
    """What runs the model: kvtier itself, or vLLM, which has to be installed and runs many more models."""
    vllm: tuple[str | int | float, ...] = ()
    """With `engine: vllm`, more arguments of its command line, such as `[--tensor-parallel-size, 2]`."""
    vllm_python: Path | None = None
    """With `engine: vllm`, the Python that has it (`/opt/vllm/bin/python`); by default kvtier's own."""
    prompt_events: bool = True
    """With `engine: vllm`, several engines and a cache: each reports which prompts its own cache has, for routing."""
    engines: int | None = None
    """How many processes run this model; by default one, or as many as `devices`."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:N` (for vLLM also `cuda:0,1`), or `auto`: a GPU if there is one. All engines use it."""
    devices: tuple[str, ...] = ()
    """One device per engine, instead of `device`."""
    gpu_memory_utilization: float = 0.9
    """The share of the GPU's memory that an engine may use, for weights and KV."""
    kv_cache_space: Size | None = None
    """Limit on the device's memory for KV; by default 1GiB on the CPU."""
    swap_space: Size = Size(0)
    """Memory of this host that each engine has for blocks of its own."""
    default_options: dict[str, object] = {}
    """Sampling parameters for requests without them, such as `max_tokens: 1024`, `logit_bias: {'5': -100}`."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls; `auto` looks for the marks of each format in the chat template."""
    reasoning_format: Literal["auto", "think", "none"] = "auto"
    """Whether the model thinks between `<think>` and `</think>`; `auto` looks for them in the chat template."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes up random weights, to try out a model's shape."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The number type for computing and for KV; `auto` is the checkpoint's own."""
    quantization: Literal["fp8"] | None = None
    """Quantise the weights while loading."""
    trust_remote_code: bool = False
    """Let the tokenizer run code that comes with the model."""
    revision: str | None = None
    """A branch, tag or commit of the model on the hub."""
    cache_dir: Path | None = None
    """Where models of the hub are kept; by default the hub client's own folder."""
    max_model_len: int | None = None
    """Limit on the tokens of a prompt and its answer together; by default the model's maximum."""
    max_num_requests: int = 128
    """Limit on requests computed at once; others wait."""
    max_num_batched_tokens: int = 8192
    """Limit on the tokens in a step: long prompts are computed in chunks of this size."""
    block_size: int = 16
    """Tokens in a block."""
    block_manager: BlockManagerName = "prefix_caching"
    """How the device's blocks are shared between requests; `yoco` also shares blocks that are partly filled."""
    schedule: str = "auto"
    """`sync`, or `async-N`: N steps may be with the device while one is prepared; `auto`: 2 on a GPU, 0 on a CPU."""
    cuda_graphs: bool = True
    """Replay decoding steps as CUDA graphs."""
    salt: str = ""
    """Text that keeps this model's blocks apart from those of other models."""
    always_load: bool = False
    """Load blocks from the tiers even if computing them would be faster."""
    identity: Literal["sampled", "full"] = "sampled"
    """How weights are identified: by samples of every tensor, or by all bytes, which are read once."""
    explain_text: bool = False
    """Explanations of where a prompt diverged show some words of both, including its clients' earlier prompts."""
    eviction: Eviction = "adaptive"
    """Which blocks leave `swap_space`: the least likely to be asked for (`adaptive`), or the least recently used."""
    canary_share: float = 0.001
    """The share of loaded blocks that an idle engine computes again to compare; 0 for none. See design/canary.md."""
    cache_server: str | tuple[str, ...] = ""
    """A cache server outside of this deployment, such as `tcp://host:7700`, instead of `cache`."""
    cache_server_token_file: Path | None = None
    """File with the token for it."""
    cache_server_secret_file: Path | None = None
    """File with the secret with which it encrypts, if it does so without TLS."""
    cache_server_certificate: Path | None = None
    """Certificate (PEM) of the engine, if the server identifies it by that instead of a token. Needs
    `cache_server_key`."""
    cache_server_key: Path | None = None
    """Its private key (PEM)."""
    cache_server_ca_file: Path | None = None
    """Certificate (PEM) of the authority that signed the server's: the connection uses TLS."""
    cache_server_timeout_s: float = 1.0
    """Seconds after which a cache server that does not answer is skipped."""

    def __post_init__(self) -> None:
        check_is_one("cache_server", self.cache_server)
        for name in self.names:
            check_name(name)
        if self.engines is not None and not 1 <= self.engines <= _MAX_ENGINES:
            raise ConfigError(f"engines must be from 1 to {_MAX_ENGINES}, not {self.engines}")
        if self.device is not None and self.devices:
            raise ConfigError("devices takes the place of device: give one of them")
        if self.devices and self.engines not in (None, len(self.devices)):
            raise ConfigError(f"devices must be one per engine: there are {len(self.devices)} for {self.engines}")
        for device in (self.device, *self.devices):
            allowed = _DEVICES_OF_VLLM if self.engine == "vllm" else _DEVICE
            if device is not None and not allowed.fullmatch(device):
                name = "device" if self.device is not None else "devices"
                several = ", cuda:N,M" if self.engine == "vllm" else ""
                raise ConfigError(f"{name} must be auto, cpu, cuda{several} or cuda:N, not {device!r}")
        of_vllm = {
            "vllm": bool(self.vllm),
            "vllm_python": self.vllm_python is not None,
            "prompt_events": not self.prompt_events,
        }
        if self.engine != "vllm" and any(of_vllm.values()):
            name = next(name for name, is_given in of_vllm.items() if is_given)
            raise ConfigError(f"{name} is for a model with engine: vllm")
        check_arguments(self.vllm)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if isinstance(self.name, str) else self.name

    @property
    def device_of_each_engine(self) -> tuple[str, ...]:
        return self.devices or (self.device or "auto",) * (self.engines or 1)


class ModelSection(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, and how it is run."""

    model: str
    """A folder, or the name of a model on the hub, which is downloaded once."""
    cache: bool | str | None = None
    """Whether it uses the deployment's cache, or which one by name; by default it does if there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model)


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a cache server is reached and behaves, in either form of the file."""

    socket: Path | None = None
    """Its Unix socket; by default one in the deployment's runtime folder."""
    tcp: str | None = None
    """Also listen on `host:port`, for engines on other hosts. Needs `token_file` or `tenants`."""
    token_file: Path | None = None
    """File with the secret that TCP clients must know (8 characters or more)."""
    tcp_secret_file: Path | None = None
    """File with a secret (16 characters or more) with which TCP is encrypted, without TLS. Clients need it, too."""
    tenants: Path | None = None
    """File (TOML) with the tenants that TCP serves, and the limits of each. Read again when it changes."""
    tls_cert: Path | None = None
    """Certificate (PEM): TCP uses TLS."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    tls_client_ca: Path | None = None
    """Authority (PEM) that signs the certificates of tenants: such a certificate replaces a token."""
    metrics: str | None = None
    """Serve Prometheus metrics over HTTP on `host:port`."""
    store_on: Literal["commit", "reuse"] = "commit"
    """When a block is written to disk: at once, or when it is first used again, which spares the SSD."""
    disk_writes_per_day: Size | None = None
    """Most that is written to disk in a day, in bursts of an hour's share; blocks used again come first."""
    fsync: bool = False
    """Let flush wait for the device, so that not even a power cut loses anything."""
    key_file: Path | None = None
    """File with a key (32 bytes, or 64 hexadecimal digits): blocks on disk are encrypted."""
    disk_optional: bool = False
    """If the folder cannot be used, start in memory and try it again later."""
    max_leased: Size | None = None
    """Limit on the memory that one client may hold; by default half of the memory."""
    max_frame: Size = Size(256 << 20)
    """Largest payload of one frame over TCP."""
    max_connections: int = 256
    """Limit on clients connected at once."""
    lease_timeout_s: float = 60.0
    """Seconds after which a TCP client's lease ends; leases of local clients never expire."""
    retained_share: float = DEFAULT_RETAINED_SHARE
    """The share of memory and disk that requests may have retained; with `tenants`, of each tenant's own."""
    max_retention_s: float = DEFAULT_MAX_RETENTION_S
    """The longest time for which a prefix is retained; requests for more get this."""
    touch_memory: bool = False
    """Make all of the memory resident in the background, so that first writes are as fast as later ones."""


class MooncakeSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Mooncake pool below a cache: memory that hosts lend each other."""

    master: str
    """`host:port` of its master."""
    memory: Size
    """Memory that each engine lends to the pool, in addition to the cache's; 0 for none."""
    metadata: str = P2P
    """Where hosts find each other's memory, such as `http://host:8080/metadata`; by default they ask each other."""
    protocol: Protocol = "tcp"
    """`tcp` or `rdma`."""
    device: str = ""
    """RDMA devices, such as `mlx5_0,mlx5_1`; by default those that Mooncake finds."""
    host: str | None = None
    """The name of this host for others; by default its address towards the master."""
    buffer: Size = Size(DEFAULT_MOONCAKE_BUFFER)
    """Memory of each engine for blocks on their way to and from the pool."""
    timeout_s: float = 1.0
    """Seconds after which a pool that does not answer is skipped."""
    trusted_network: bool = False
    """Must be true: Mooncake has no authentication; any client that can reach its ports can read and alter blocks."""


class ClusterSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Valkey or Redis Cluster below a cache, which hosts share."""

    valkey: tuple[str, ...]
    """Some of its nodes, `tls://host:port`, or `tcp://host:port` without TLS; they name the others."""
    user: str | None = None
    """Its user for kvtier; by default `default`."""
    password_file: Path | None = None
    """File with the user's password."""
    ca_file: Path | None = None
    """Certificate (PEM) of the authority that signed the nodes'; by default the system's authorities."""
    ttl: float = DEFAULT_TTL_S
    """Seconds that a block lives after its last use; by default a week."""
    segment: int = DEFAULT_SEGMENT
    """Consecutive blocks of a prompt that lie on one node. Must be the same on all hosts."""
    below: Literal["server", "engine"] = "server"
    """What it sits below: the cache server, for all of its clients, or each engine, beside the cache server."""
    store_on: Literal["commit", "reuse", "worth"] = "commit"
    """Below a server, when a block is written there: at once, or when it is used again or about to leave the host, that
    is, its disk (`worth`), or its memory if there is no disk (`worth` and `reuse`)."""
    write_rate: Size | None = None
    """Below a server, limit on the bytes written there per second; by default none."""
    timeout_s: float | None = None
    """Seconds after which a node that does not answer is skipped; by default 0.15 below a server and 1 below
    engines."""
    compute_once: bool = True
    """Announce blocks being computed; hosts that need the same wait for them, but no longer than computing takes."""
    plaintext: bool = False
    """Use no TLS with nodes on other hosts: any host on the network can read and alter blocks."""


class ObjectsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object store below a cache, for documents that come back after days."""

    url: str
    """`s3://bucket/folder`, `gs://`, `az://`, or `file:///folder`. Keys for it are taken from the environment."""
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """Further settings, by the names of `obstore`, such as `endpoint` and `region`."""
    segment: int | None = None
    """Consecutive blocks of a prompt that form one object; by default 32 MiB of them. Must be the same on all hosts."""
    buffer: Size = Size(DEFAULT_BUFFER)
    """Limit on each engine's memory for blocks that wait for the rest of their object, or to be written with it."""
    timeout_s: float = 2.0
    """Seconds after which a store that does not answer is skipped."""
    plaintext: bool = False
    """Allow an `http://` endpoint on another host: any host on the network can read and alter blocks."""


class CacheSection(CacheOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cache server."""

    name: str = "cache"
    """Its name for models, and its prefix in the log."""
    memory: Size = DEFAULT_CACHE_BYTES
    """Limit on memory for blocks."""
    disk: Size | None = None
    """Limit on space for everything in `folder`."""
    folder: Path | None = None
    """Keep blocks on disk, too, across restarts. Created if it does not exist. Needs `disk`."""
    disk_only: bool = False
    """Keep blocks on disk only; `memory` is then just what they pass through."""
    eviction: Eviction = "adaptive"
    """Which blocks are evicted: those least likely to be asked for soon (`adaptive`), or the least recently used."""
    mooncake: MooncakeSection | None = None
    """Also keep blocks in a Mooncake pool, for engines of other hosts: memory over TCP or RDMA."""
    cluster: ClusterSection | None = None
    """Also keep blocks in a Valkey or Redis Cluster, for cache servers and engines of other hosts."""
    objects: ObjectsSection | None = None
    """Also keep long prompts in an object store, for days."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.folder is not None and not self.disk:
            raise ConfigError("folder needs disk, the most space it may take, as in disk: 100GiB")
        if self.folder is None and self.disk:
            raise ConfigError("disk needs a folder to keep blocks in")
        if self.folder is None:
            for name in ("disk_only", "fsync", "disk_writes_per_day", "disk_optional", "key_file"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is about the disk: give a folder and disk too")
        if self.tcp is not None and self.token_file is None and self.tenants is None:
            raise ConfigError("tcp needs a token_file, or tenants, also on loopback")


class ApiKeySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's key."""

    name: str
    """Shown in logs and metrics."""
    key: str | None = None
    """The secret itself; better in a file of its own."""
    key_file: Path | None = None
    """File with the secret, instead of `key`. Read when the deployment starts."""
    salt: str = ""
    """Keys with the same salt share blocks. Without a salt, a key shares blocks with no other key."""
    share: bool = False
    """Share blocks with all keys that also set this: each can tell from timing what the others have asked."""
    metrics: bool = False
    """Allow `/metrics`, which show how much each key asks, for Prometheus, and the page. Other keys cannot read
    them."""
    admin: bool = False
    """Allow changes to the cache: warm, pin, drop and rename prefixes, of all keys. Includes all that `metrics`
    allows."""
    retained: Size | None = None
    """Limit on what this key's requests may have retained in each cache; without it, all keys share the cache's
    limit."""
    retention_s: float | None = None
    """Default retention, in seconds, of this key's prompts; without it, `http.retention_s`."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if (self.key is None) == (self.key_file is None):
            raise ConfigError(f"the API key {self.name!r} needs either key or key_file")


class HttpSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The APIs. A port of 0 is any free port."""

    host: str = "127.0.0.1"
    """Where both APIs listen: `0.0.0.0` is everywhere."""
    openai: int | str | bool | None = True
    """Port of the OpenAI-compatible API, or `host:port`; by default 8080, `false` for none."""
    ollama: int | str | bool | None = True
    """Port of the Ollama-compatible API, or `host:port`; by default 11434, `false` for none."""
    api_keys: tuple[ApiKeySection, ...] = ()
    """The clients' keys; without any, every client that can reach the port is served."""
    allow_hosts: tuple[str, ...] = ()
    """Names besides `localhost` by which clients may call this server, such as `*.example.com`; `*` is any."""
    allow_origins: str | tuple[str, ...] = ()
    """Web pages that may send requests, such as `https://chat.example.com` or `http://localhost:*`; `*` is all."""
    tls_cert: Path | None = None
    """Certificate (PEM): both APIs use HTTPS."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    max_body: Size = Size(64 << 20)
    """Largest request."""
    max_requests: int = 1024
    """Limit on requests served or waiting at once; more are refused."""
    drain_s: float = 30.0
    """Seconds that running requests get when the deployment is stopped."""
    retention_s: float = 0.0
    """Default retention of prompts in the cache, in seconds; 0 for none."""
    retention_priority: int = DEFAULT_PRIORITY
    """Default priority of retained prompts, from 1 to 100."""

    def __post_init__(self) -> None:
        check_host(self.host)
        _check_names("allow_hosts", self.allow_hosts, _ALLOWED_HOST, "a name, *.NAME or *")
        _check_names("allow_origins", self.origins, _ALLOWED_ORIGIN, "SCHEME://HOST, SCHEME://HOST:PORT or *")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both tls_cert and tls_key")
        if not self.is_served(self.openai) and not self.is_served(self.ollama):
            raise ConfigError("neither API is served: give openai or ollama a port")
        for name in ("openai", "ollama"):
            port = getattr(self, name)
            if isinstance(port, int) and not 0 <= port <= _MAX_PORT:
                raise ConfigError(f"{name} must be a port from 0 to {_MAX_PORT}, not {port}")

    @property
    def origins(self) -> tuple[str, ...]:
        """`allow_origins` as a list."""
        return (self.allow_origins,) if isinstance(self.allow_origins, str) else self.allow_origins

    @staticmethod
    def is_served(port: int | str | bool | None) -> bool:
        return port is not None and port is not False


class WarmSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents that are in the cache, under a name, at the end of a start (docs/prefixes.md)."""

    name: str
    """The prefix's name: letters, digits, dots, dashes and underscores."""
    documents: tuple[str, ...] = ()
    """Text files, such as `docs/*.md`, in the order of their names; each chat begins with all of them."""
    system: Path | None = None
    """File with the system message before them."""
    model: str | None = None
    """The model's name for clients; by default the only model."""
    key: str | None = None
    """With `http.api_keys`, the name of the key whose chats begin with them. Required if there are keys."""
    pin: bool = False
    """Keep the blocks from eviction."""
    ttl: str | None = None
    """How long the name, and the pin, last after each start, such as `7d` or `12h`; by default forever."""
    force: bool = False
    """Warm even if blocks left by requests have to be evicted."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ConfigError(f"name must have {NAME_IN_WORDS}, not {self.name[:_MAX_NAME_CHARACTERS]!r}")
        if not self.documents and self.system is None:
            raise ConfigError("documents must be given, or system")
        if self.ttl is not None:
            parse_duration(self.ttl)


class PageSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The page at `/` of the OpenAI port."""

    enabled: bool = True
    """Whether there is a page; with API keys, it requires one with `metrics` or `admin`."""
    gpu_hour_price: float | None = None
    """The price of an hour of GPU: the page then also shows the cache's savings in money."""
    currency: str = DEFAULT_CURRENCY
    """The currency of that price, such as `$` or `EUR`."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    models: tuple[ModelSection, ...]
    """The models to serve."""
    cache: CacheSection | tuple[CacheSection, ...] = ()
    """The cache that the models share, or a list of several with names; without it, there is none."""
    http: HttpSection = HttpSection()
    """The APIs; by default both, on this host and their usual ports."""
    warm: tuple[WarmSection, ...] = ()
    """Documents to put into the cache at a start."""
    page: PageSection = PageSection()
    """The page at `/` of the OpenAI port; by default there is one."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("models is empty: there is nothing to serve")
        if len(self.warm) > _MAX_NAMES:
            raise ConfigError(f"warm must not be more than {_MAX_NAMES}, but is {len(self.warm)}")

    @property
    def caches(self) -> tuple[CacheSection, ...]:
        return (self.cache,) if isinstance(self.cache, CacheSection) else self.cache


def read_native(file: YamlFile) -> tuple[Deployment, Origin]:
    """Raises `ConfigError`, with lines, for anything invalid."""
    deployment = read_form(file, (), Deployment)
    is_list = isinstance(deployment.cache, tuple)
    return deployment, Origin(
        file,
        models=tuple(("models", number) for number in range(len(deployment.models))),
        caches=tuple(("cache", number) for number in range(len(deployment.caches))) if is_list else (("cache",),),
    )
