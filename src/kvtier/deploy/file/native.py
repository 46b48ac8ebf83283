"""The deployment file as we recommend it: `models`, and where wanted `cache` and `http`.

Each field has its meaning below it, from which docs/configuration.md is written. Sizes are bytes here; a file writes
them as `size` says. What settings mean together with others is checked where a plan is made.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from kvtier.deploy.file.form import check_name, is_short_path, read_form
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.size import Size
from kvtier.deploy.file.vllm_arguments import check_arguments
from kvtier.deploy.file.yaml_file import YamlFile
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
_ALLOWED_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*+://[\w.:\[\]-]*+\*?", re.ASCII | re.IGNORECASE)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_DEVICES_OF_VLLM = re.compile(r"auto|cpu|cuda(:\d{1,3}(,\d{1,3}){0,15})?")


def check_host(host: str) -> None:
    """Raises `ConfigError` for what can be neither an address nor a name."""
    if not _HOST.fullmatch(host):
        raise ConfigError(f"host must be an address or a name, and 0.0.0.0 for all, not {host!r}")


def check_model(model: str) -> None:
    """Raises `ConfigError` for what can be neither a folder nor a name on the hub."""
    if not is_short_path(model) or "\0" in model:
        raise ConfigError("model must be a folder or a name on the hub, with names of at most 255 bytes")


def _check_names(field: str, names: tuple[str, ...], allowed: re.Pattern[str], expected: str) -> None:
    if len(names) > _MAX_NAMES:
        raise ConfigError(f"{field} must not be more than {_MAX_NAMES}, but is {len(names)}")
    for name in names:
        if len(name) > _MAX_NAME_CHARACTERS or not allowed.fullmatch(name):
            raise ConfigError(f"each of {field} must be {expected}, not {name[:_MAX_NAME_CHARACTERS]!r}")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run, whichever form the file has."""

    name: str | tuple[str, ...] = ()
    """What clients call it, or several such names; `model` as it is given (of a folder the last part) unless told."""
    engine: Literal["kvtier", "vllm"] = "kvtier"
    """What runs the model: kvtier itself, or vLLM, which has to be installed and runs many more models."""
    vllm: tuple[str | int | float, ...] = ()
    """With `engine: vllm`, more arguments of its command line, such as `[--tensor-parallel-size, 2]`."""
    vllm_python: Path | None = None
    """With `engine: vllm`, the Python that has it (`/opt/vllm/bin/python`); kvtier's own unless told."""
    engines: int | None = None
    """How many processes run this model; one, or as many as `devices`."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:N` (for vLLM also `cuda:0,1`), or `auto`: a GPU if there is one. All engines use it."""
    devices: tuple[str, ...] = ()
    """One device per engine, in place of `device`."""
    gpu_memory_utilization: float = 0.9
    """The share of the GPU's memory that an engine may use, for weights and KV."""
    kv_cache_space: Size | None = None
    """At most so much memory of the device for KV; 1GiB on the CPU unless told."""
    swap_space: Size = Size(0)
    """Memory of this host that each engine has for blocks of its own."""
    default_options: dict[str, object] = {}
    """Sampling parameters of requests that do not give them, such as `max_tokens: 1024`."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes up random weights: for trying out a shape."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """What is computed in, and what KV is kept in; `auto` is the checkpoint's own."""
    quantization: Literal["fp8"] | None = None
    """Quantise the weights when they are loaded."""
    trust_remote_code: bool = False
    """Let the tokenizer run code that comes with the model."""
    revision: str | None = None
    """A branch, tag or commit of the model on the hub."""
    cache_dir: Path | None = None
    """Where models of the hub are kept; the hub client's own folder unless told."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its answer together; the model's maximum unless told."""
    max_num_requests: int = 128
    """Most requests that are computed at once; others wait."""
    max_num_batched_tokens: int = 8192
    """Most tokens in a step: long prompts are computed in chunks of it."""
    block_size: int = 16
    """Tokens in a block."""
    block_manager: BlockManagerName = "prefix_caching"
    """How the device's blocks are shared between requests; `yoco` also shares blocks that are partly filled."""
    schedule: str = "async-2"
    """`sync`, or `async-N`: up to N steps are with the device while the next one is prepared."""
    cuda_graphs: bool = True
    """Replay decoding steps as CUDA graphs."""
    salt: str = ""
    """Text that keeps this model's blocks apart from those of others."""
    always_load: bool = False
    """Load what the tiers have even where computing it would be faster."""
    identity: Literal["sampled", "full"] = "sampled"
    """How weights are told from others: by samples of every tensor, or by all bytes, which are read once."""
    cache_server: str | tuple[str, ...] = ""
    """A cache server outside of this deployment, such as `tcp://host:7700`, in place of `cache`."""
    cache_server_token_file: Path | None = None
    """File with the token for it."""
    cache_server_secret_file: Path | None = None
    """File with the secret that it encrypts with, if it does so without TLS."""
    cache_server_certificate: Path | None = None
    """Certificate (PEM) of the engine, if it knows it by that and not by a token. Needs `cache_server_key`."""
    cache_server_key: Path | None = None
    """Its private key (PEM)."""
    cache_server_ca_file: Path | None = None
    """Certificate (PEM) of who signed the server's: it is spoken to in TLS."""
    cache_server_timeout_s: float = 1.0
    """Seconds after which a cache server that does not answer is passed over."""

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
        if self.engine != "vllm" and (self.vllm or self.vllm_python is not None):
            name = "vllm" if self.vllm else "vllm_python"
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
    """Whether it uses the deployment's cache, or which one by name; it does when there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model)


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a cache server is reached and behaves, whichever form the file has."""

    socket: Path | None = None
    """Its Unix socket; one in the deployment's runtime folder unless told."""
    tcp: str | None = None
    """Also listen on `host:port`, for engines of other hosts. Needs `token_file` or `tenants`."""
    token_file: Path | None = None
    """File with the secret that TCP clients must know (8 characters or more)."""
    tcp_secret_file: Path | None = None
    """File with a secret (16 characters or more): TCP is encrypted with it, without TLS. Clients need it, too."""
    tenants: Path | None = None
    """File (TOML) with the tenants that TCP serves, and what each may have. Read again when it changes."""
    tls_cert: Path | None = None
    """Certificate (PEM): TCP speaks TLS."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    tls_client_ca: Path | None = None
    """Who signs the certificates of tenants (PEM): such a one stands for a token."""
    metrics: str | None = None
    """Serve Prometheus metrics over HTTP on `host:port`."""
    store_on: Literal["commit", "reuse"] = "commit"
    """When a block goes to disk: at once, or when it is first used again, which spares the SSD."""
    fsync: bool = False
    """Let flush wait for the device, so that a power cut loses nothing either."""
    key_file: Path | None = None
    """File with a key (32 bytes, or 64 hexadecimal digits): blocks on disk are encrypted."""
    disk_optional: bool = False
    """Start in memory when the folder cannot be used, and try it again."""
    max_leased: Size | None = None
    """Most memory one client may hold; half of the memory unless told."""
    max_frame: Size = Size(256 << 20)
    """Largest payload of one frame over TCP."""
    max_connections: int = 256
    """Most clients at once."""
    lease_timeout_s: float = 60.0
    """Seconds after which a TCP client's lease ends; leases of local clients never end by a clock."""
    touch_memory: bool = False
    """Make all of the memory resident in the background, so that first writes are as fast as later ones."""


class MooncakeSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Mooncake pool below a cache: memory that hosts lend each other."""

    master: str
    """`host:port` of its master."""
    memory: Size
    """Memory that each engine lends to the pool, beside what the cache has; 0 for none."""
    metadata: str = P2P
    """Where hosts find each other's memory, such as `http://host:8080/metadata`; they ask each other unless told."""
    protocol: Protocol = "tcp"
    """`tcp` or `rdma`."""
    device: str = ""
    """RDMA devices, such as `mlx5_0,mlx5_1`; those that Mooncake finds unless told."""
    host: str | None = None
    """What other hosts call this one; its address towards the master unless told."""
    buffer: Size = Size(DEFAULT_MOONCAKE_BUFFER)
    """Memory of each engine for blocks on their way to and from the pool."""
    timeout_s: float = 1.0
    """Seconds after which a pool that does not answer is passed over."""
    trusted_network: bool = False
    """Must be true: Mooncake has no authentication, and whoever reaches its ports can read and alter blocks."""


class ClusterSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Valkey or Redis Cluster below a cache, which hosts share."""

    valkey: tuple[str, ...]
    """Some of its nodes, `tls://host:port`, or `tcp://host:port` without TLS; they name the others."""
    user: str | None = None
    """Its user for kvtier; `default` unless told."""
    password_file: Path | None = None
    """File with the user's password."""
    ca_file: Path | None = None
    """Certificate (PEM) of who signed the nodes'; the system's authorities unless told."""
    ttl: float = DEFAULT_TTL_S
    """Seconds that a block lives after it was last used; a week unless told."""
    segment: int = DEFAULT_SEGMENT
    """Blocks in a row of a prompt that lie on one node. All hosts must agree on it."""
    timeout_s: float = 1.0
    """Seconds after which a node that does not answer is passed over."""
    plaintext: bool = False
    """Speak to nodes on other hosts without TLS: whoever is on the network can read and alter blocks."""


class ObjectsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object store below a cache, for documents that come back after days."""

    url: str
    """`s3://bucket/folder`, `gs://`, `az://`, or `file:///folder`. Keys for it are looked for in the environment."""
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """More about it by the names of `obstore`, such as `endpoint` and `region`."""
    segment: int | None = None
    """Blocks in a row of a prompt that are one object, 32 MiB of them unless told. All hosts must agree on it."""
    buffer: Size = Size(DEFAULT_BUFFER)
    """Most memory of each engine for blocks that wait for the rest of their object, or to be written with it."""
    timeout_s: float = 2.0
    """Seconds after which a store that does not answer is passed over."""
    plaintext: bool = False
    """Speak to an `http://` endpoint on another host: whoever is on the network can read and alter blocks."""


class CacheSection(CacheOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cache server."""

    name: str = "cache"
    """What models call it, and its prefix in the log."""
    memory: Size = DEFAULT_CACHE_BYTES
    """Most memory for blocks."""
    disk: Size | None = None
    """Most space for everything in `folder`."""
    folder: Path | None = None
    """Keep blocks on disk too, over restarts. Made when it is not there. Needs `disk`."""
    disk_only: bool = False
    """Keep blocks on disk alone; `memory` is then only what passes through."""
    mooncake: MooncakeSection | None = None
    """Also keep blocks in a Mooncake pool, for engines of other hosts: memory over TCP or RDMA."""
    cluster: ClusterSection | None = None
    """Also keep blocks in a Valkey or Redis Cluster, for engines of other hosts."""
    objects: ObjectsSection | None = None
    """Also keep long prompts in an object store, for days."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.folder is not None and not self.disk:
            raise ConfigError("folder needs disk, the most space it may take, as in disk: 100GiB")
        if self.folder is None and self.disk:
            raise ConfigError("disk needs a folder to keep blocks in")
        if self.folder is None:
            for name in ("disk_only", "fsync", "disk_optional", "key_file"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is about the disk: give a folder and disk too")
        if self.tcp is not None and self.token_file is None and self.tenants is None:
            raise ConfigError("tcp needs a token_file, or tenants, also on loopback")


class ApiKeySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may ask."""

    name: str
    """For logs and metrics."""
    key: str | None = None
    """The secret itself; better in a file of its own."""
    key_file: Path | None = None
    """File with the secret, in place of `key`. Read when the deployment starts."""
    salt: str = ""
    """Keys with the same salt share blocks. Without a salt, a key shares blocks with no other key."""
    share: bool = False
    """Share blocks with all keys that have this, too: each can tell from timing what the others have asked."""
    metrics: bool = False
    """Read `/metrics`, which tell how much each key asks: for Prometheus. Other keys cannot."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if (self.key is None) == (self.key_file is None):
            raise ConfigError(f"the API key {self.name!r} needs either key or key_file")


class HttpSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The APIs. A port of 0 is any that is free."""

    host: str = "127.0.0.1"
    """Where both APIs listen: `0.0.0.0` is everywhere."""
    openai: int | str | bool | None = True
    """Port of the OpenAI-compatible API, or `host:port`; 8080 unless told, `false` for none."""
    ollama: int | str | bool | None = True
    """Port of the Ollama-compatible API, or `host:port`; 11434 unless told, `false` for none."""
    api_keys: tuple[ApiKeySection, ...] = ()
    """Who may ask; without any, everybody who reaches the port."""
    allow_hosts: tuple[str, ...] = ()
    """Names besides `localhost` that clients may call this server by, such as `*.example.com`; `*` is any."""
    allow_origins: tuple[str, ...] = ()
    """Web pages that may ask, such as `https://chat.example.com` or `http://localhost:*`; `*` is all."""
    tls_cert: Path | None = None
    """Certificate (PEM): both APIs speak HTTPS."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    max_body: Size = Size(64 << 20)
    """Largest request."""
    max_requests: int = 1024
    """Most requests that are served or wait at once; more are refused."""
    drain_s: float = 30.0
    """Seconds that requests under way have when the deployment is stopped."""

    def __post_init__(self) -> None:
        check_host(self.host)
        _check_names("allow_hosts", self.allow_hosts, _ALLOWED_HOST, "a name, *.NAME or *")
        _check_names("allow_origins", self.allow_origins, _ALLOWED_ORIGIN, "SCHEME://HOST, SCHEME://HOST:PORT or *")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both tls_cert and tls_key")
        if not self.is_served(self.openai) and not self.is_served(self.ollama):
            raise ConfigError("neither API is served: give openai or ollama a port")
        for name in ("openai", "ollama"):
            port = getattr(self, name)
            if isinstance(port, int) and not 0 <= port <= _MAX_PORT:
                raise ConfigError(f"{name} must be a port from 0 to {_MAX_PORT}, not {port}")

    @staticmethod
    def is_served(port: int | str | bool | None) -> bool:
        return port is not None and port is not False


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    models: tuple[ModelSection, ...]
    """What is served."""
    cache: CacheSection | tuple[CacheSection, ...] = ()
    """The cache that the models share, or a list of several with names; without, there is none."""
    http: HttpSection = HttpSection()
    """The APIs; without, both on this host, on their usual ports."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("models is empty: there is nothing to serve")

    @property
    def caches(self) -> tuple[CacheSection, ...]:
        return (self.cache,) if isinstance(self.cache, CacheSection) else self.cache


def read_native(file: YamlFile) -> tuple[Deployment, Origin]:
    """Raises `ConfigError`, with lines, for whatever does not fit."""
    deployment = read_form(file, (), Deployment)
    is_list = isinstance(deployment.cache, tuple)
    return deployment, Origin(
        file,
        models=tuple(("models", number) for number in range(len(deployment.models))),
        caches=tuple(("cache", number) for number in range(len(deployment.caches))) if is_list else (("cache",),),
    )
