"""The HTTP server's settings, checked once."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtier.blocks.retention import DEFAULT_PRIORITY, check_priority, check_ttl
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import ConfigError

_TOKEN_ID_DIGITS = 10

AUTO = "auto"
"""The format is taken from the model's chat template."""
THINK = "think"
"""Reasoning between `<think>` and `</think>`."""
DEFAULT_CURRENCY = "$"
_MAX_PRICE = 1e6
_MAX_CURRENCY_CHARACTERS = 8


def check_default_retention(retention_s: float) -> None:
    """Raises `ConfigError` for an invalid duration; 0 means no retention."""
    if retention_s != 0:
        check_ttl("retention_s", retention_s)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's key; `name` is for logs and metrics.

    A key shares blocks with keys of the same `salt`. Without a salt it shares them with no other key, or, with `share`,
    with all keys that also have it. With `metrics` it may read the server's metrics, of all keys. With `admin` it may
    change what is cached: warm, pin, drop and rename prefixes. Prompts without a duration of their own stay cached for
    `retention_s`, at most `retained_bytes` of them at each cache.
    """

    name: str
    key: str
    salt: str = ""
    share: bool = False
    metrics: bool = False
    admin: bool = False
    retention_s: float | None = None
    retained_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.retention_s is not None:
            check_default_retention(self.retention_s)
        if self.retained_bytes is not None and self.retained_bytes < 0:
            raise ConfigError(f"retained of the API key {self.name!r} must not be negative")
        if self.salt and self.share:
            raise ConfigError(f"the API key {self.name!r} has a salt, which decides what it shares: leave share out")
        if "\0" in self.salt:
            raise ConfigError(f"the salt of the API key {self.name!r} must be printable")
        if not self.key.strip() or not self.key.isascii() or not self.key.isprintable():
            raise ConfigError(f"the API key of {self.name or 'a tenant'} must be printable ASCII, and not empty")


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's process, and the Unix socket that it listens on. vLLM's may report prompts in its cache on another,
    `prompts`.
    """

    name: str
    socket: str
    prompts: str = ""


class CacheAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's cache server, and the credentials that it requires."""

    address: str
    token: str | None = None
    secret: str | None = None
    ca_file: str | None = None
    certificate: str | None = None
    key: str | None = None


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents to put into the cache when the server starts, as the prefix `name` of the model `model`.

    `key` is the name of the API key whose chats begin with them. The files are read when their turn comes.
    """

    name: str
    model: str
    documents: tuple[Path, ...]
    system: Path | None = None
    pin: bool = False
    ttl_s: float | None = None
    force: bool = False
    key: str = ""


def _with_token_ids(options: dict[str, object]) -> dict[str, object]:
    """Convert the keys of `logit_bias` to token ids: in files and between processes, keys are text."""
    bias = options.get("logit_bias")
    if not isinstance(bias, dict):
        return options
    return {**options, "logit_bias": {_token_id(key): value for key, value in bias.items()}}


def _token_id(key: object) -> object:
    """An invalid token id is not changed; validation reports it later."""
    is_id = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _TOKEN_ID_DIGITS
    return int(str(key)) if is_id else key


class ServedModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model and the names that clients use for it; `default_options` are fields of `SamplingParams`.

    Lists of models show the names in `listed`, or all names. With `is_vllm` its engines are vLLM servers, which speak
    HTTP. `tool_format` and `reasoning_format` are the formats of its tool calls and its reasoning. `cache` is the cache
    server that its engines use.
    """

    names: tuple[str, ...]
    listed: tuple[str, ...] = ()
    engines: tuple[EngineAddress, ...]
    is_vllm: bool = False
    default_options: dict[str, object] = {}
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    cache: CacheAddress | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("a model needs a name")
        options = _with_token_ids(self.default_options)
        msgspec.structs.force_setattr(self, "default_options", options)
        try:
            msgspec.convert(options, SamplingParams)
        except msgspec.ValidationError as error:
            raise ConfigError(f"default_options of {self.names[0]}: {error}") from error


class ShownCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cache server of the deployment, and its address, such as `unix:PATH`."""

    name: str
    address: str


class PageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the page at `/` needs in addition to the HTTP server's own state.

    With `gpu_hour_price`, the price of an hour of a GPU, it also shows savings in money.
    """

    caches: tuple[ShownCache, ...] = ()
    gpu_hour_price: float | None = None
    currency: str = DEFAULT_CURRENCY

    def __post_init__(self) -> None:
        if self.gpu_hour_price is not None and not 0 < self.gpu_hour_price < _MAX_PRICE:
            raise ConfigError(f"gpu_hour_price must be above 0 and below {_MAX_PRICE:,.0f}, not {self.gpu_hour_price}")
        if not 0 < len(self.currency) <= _MAX_CURRENCY_CHARACTERS or not self.currency.isprintable():
            raise ConfigError(
                f"currency must be 1 to {_MAX_CURRENCY_CHARACTERS} printable characters, such as $ or EUR"
            )


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without `keys`, every client that can reach the port is served.

    The server listens on `hosts`; `allow_hosts` and `allow_origins` are for `api/web_guard`. `max_requests` limits the
    requests served or waiting at a time; `drain_s` is how long requests in flight may take when the server stops. Named
    prefixes are stored in `prefix_folder`, encrypted if there is a `prefix_key_file`; without a folder they are kept in
    memory. `warm` is done at the start. Without `page`, the page at `/` and its paths under `/kvtier/v1` do not exist.
    Prompts without a retention of their own stay cached for `retention_s`, by default with `retention_priority`.
    """

    models: tuple[ServedModelConfig, ...]
    keys: tuple[ApiKey, ...] = ()
    hosts: tuple[str, ...] = ("127.0.0.1",)
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = 64 << 20
    max_requests: int = 1024
    drain_s: float = 30.0
    prefix_folder: Path | None = None
    prefix_key_file: Path | None = None
    warm: tuple[WarmUp, ...] = ()
    page: PageConfig | None = None
    retention_s: float = 0.0
    retention_priority: int = DEFAULT_PRIORITY

    def __post_init__(self) -> None:
        check_default_retention(self.retention_s)
        check_priority("retention_priority", self.retention_priority)
        for name in ("max_body_bytes", "max_requests"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both tls_cert and tls_key")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s must not be negative, but is {self.drain_s}")
        names = [name for model in self.models for name in model.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two models have the name {name!r}: rename one of them")
        keys = [key.key for key in self.keys]
        if len(set(keys)) < len(keys):
            raise ConfigError("two API keys are equal")
