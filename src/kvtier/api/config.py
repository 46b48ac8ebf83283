"""The HTTP server's settings, checked once."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import ConfigError


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may ask; `name` is for logs and metrics.

    A key shares blocks with keys of the same `salt`. Without a salt it shares with none, or, with `share`, with all
    keys that have it too. With `metrics` it reads what the server counts, of all keys.
    """

    name: str
    key: str
    salt: str = ""
    share: bool = False
    metrics: bool = False

    def __post_init__(self) -> None:
        if self.salt and self.share:
            raise ConfigError(f"the API key {self.name!r} has a salt, which says whom it shares with: leave share out")
        if "\0" in self.salt:
            raise ConfigError(f"the salt of the API key {self.name!r} must be printable")
        if not self.key.strip() or not self.key.isascii() or not self.key.isprintable():
            raise ConfigError(f"the API key of {self.name or 'a tenant'} must be printable ASCII, and not empty")


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's process, and the Unix socket that it listens on."""

    name: str
    socket: str


class ServedModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model by the names that clients call it; `default_options` are fields of `SamplingParams`.

    Lists of models show those of its names in `listed`, or all. With `is_vllm` its engines are servers of vLLM, which
    speak HTTP.
    """

    names: tuple[str, ...]
    listed: tuple[str, ...] = ()
    engines: tuple[EngineAddress, ...]
    is_vllm: bool = False
    default_options: dict[str, object] = {}

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("a model needs a name")
        try:
            msgspec.convert(self.default_options, SamplingParams)
        except msgspec.ValidationError as error:
            raise ConfigError(f"default_options of {self.names[0]}: {error}") from error


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without `keys` everybody who reaches the port may ask.

    `hosts` are those that it listens on; `allow_hosts` and `allow_origins` are for `api/web_guard`. `max_requests` is
    how many may be served or wait at once, `drain_s` how long those under way have at the end.
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

    def __post_init__(self) -> None:
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
                raise ConfigError(f"two models are called {name!r}: give one of them another name")
        keys = [key.key for key in self.keys]
        if len(set(keys)) < len(keys):
            raise ConfigError("two API keys are equal")
