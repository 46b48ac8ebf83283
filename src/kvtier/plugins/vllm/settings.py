"""What `kv_connector_extra_config` and an entry of `secondary_tiers` may say, checked when the engine starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from kvtier.blocks.full_identity import IdentityKind
from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.plugins.embedded_server import EmbeddedServer
from kvtier.sizes import format_size, parse_size
from kvtier.transport.address import parse_address

_DEFAULT_MEMORY = "4GiB"
_LEAST_BLOCKS = 16
_MAX_TIMEOUT_S = 3600.0

_Settings = TypeVar("_Settings", bound="ServerSettings")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`server` is where a cache server listens. For one over TCP are `token_file`, or `certificate` and `key`, by which
    it knows the engine, and `ca_file`, which turns TLS on, or `secret_file`, which encrypts without.

    Without `server`, one is started on demand, and shared by all engines of this user that say the same: with `memory`
    for blocks (4GiB unless given), and over restarts in `folder`, at most `disk` of everything in it. Sizes are bytes,
    or text such as 8GiB.

    Prompts of engines with different `salt` share no blocks. `identity` "full" tells weights from others by all of
    their bytes, which are read once, and not by samples.
    """

    server: str | None = None
    token_file: str | None = None
    secret_file: str | None = None
    ca_file: str | None = None
    certificate: str | None = None
    key: str | None = None
    memory: str | int | None = None
    folder: str | None = None
    disk: str | int | None = None
    salt: str = ""
    timeout_s: float = 1.0
    identity: IdentityKind = "sampled"

    def __post_init__(self) -> None:
        if self.server is None:
            self._check_budgets()
        else:
            self._check_server()
        self._check_seconds("timeout_s", self.timeout_s)

    def token(self) -> bytes | None:
        return _secret_in("token", self.token_file)

    def secret(self) -> bytes | None:
        return _secret_in("secret", self.secret_file)

    def embedded_server(self) -> EmbeddedServer | None:
        """The server to be started on demand; None where `server` names one."""
        if self.server is not None:
            return None
        memory = parse_size(_DEFAULT_MEMORY if self.memory is None else self.memory)
        folder = None if self.folder is None else Path(self.folder)
        return EmbeddedServer(memory, folder, None if self.disk is None else parse_size(self.disk))

    def check_room_for(self, layout: KvLayout) -> None:
        """Raises `ConfigError` when the memory of the server to be started holds next to nothing of a model."""
        memory = parse_size(_DEFAULT_MEMORY if self.memory is None else self.memory)
        if self.server is None and memory < _LEAST_BLOCKS * layout.slot_bytes:
            least = format_size(_LEAST_BLOCKS * layout.slot_bytes)
            raise ConfigError(
                f"kvtier: memory of {format_size(memory)} is too little for this model: give {least} or more"
            )

    def _check_server(self) -> None:
        assert self.server is not None
        with _named("server"):
            parse_address(self.server)
        if given := self._given("memory", "folder", "disk"):
            raise ConfigError(f"{given} is for a server that vLLM starts: leave it out, or leave out server")

    def _check_budgets(self) -> None:
        if given := self._given("token_file", "secret_file", "ca_file", "certificate", "key"):
            raise ConfigError(f"{given} is for a server over TCP: give its address as server")
        for name, size in (("memory", self.memory), ("disk", self.disk)):
            if size is not None:
                with _named(name):
                    parse_size(size)
        if self.folder is not None and self.disk is None:
            raise ConfigError("folder needs disk, the most space for everything in it, such as 100GiB")
        if self.folder is None and self.disk is not None:
            raise ConfigError("disk needs folder, where blocks are kept")
        if self.folder == "":
            raise ConfigError("folder must name a folder")

    def _given(self, *names: str) -> str | None:
        return next((name for name in names if getattr(self, name) is not None), None)

    def _check_seconds(self, name: str, seconds: float) -> None:
        if not 0 < seconds < _MAX_TIMEOUT_S:
            raise ConfigError(f"{name} must be a number of seconds, not {seconds}")


class ConnectorSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`store` says whether answers are kept too, or prompts only. A scheduler waits at most `match_timeout_s` for what
    the server has of a prompt, and computes it then. With `always_load`, what is cached is loaded even where computing
    it looks faster.
    """

    match_timeout_s: float = 0.25
    store: Literal["all", "prompt"] = "all"
    always_load: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_seconds("match_timeout_s", self.match_timeout_s)


def _secret_in(what: str, file: str | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} in {file}: {error.strerror}") from error


def read_settings(extra_config: Mapping[str, object]) -> ConnectorSettings:
    """Raises `ConfigError` with one sentence that names the setting."""
    return _read("kv_connector_extra_config", extra_config, ConnectorSettings)


def read_tier_settings(entry: Mapping[str, object]) -> ServerSettings:
    """As `read_settings`, of what a secondary tier is given beside its `type` and `module_path`."""
    return _read("secondary_tiers", entry, ServerSettings)


def _read(where: str, given: Mapping[str, object], settings_type: type[_Settings]) -> _Settings:
    try:
        return msgspec.convert(dict(given), settings_type)
    except msgspec.ValidationError as error:
        sentence = f"{error} (known: {', '.join(settings_type.__struct_fields__)})"
        if isinstance(error.__cause__, ConfigError):  # one of our own sentences
            sentence = str(error.__cause__)
        raise ConfigError(f"kvtier: {where}: {sentence}") from error


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
