"""The settings in `kv_connector_extra_config` and in an entry of `secondary_tiers`, checked when the engine starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from kvtier.blocks.full_identity import IdentityKind
from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.plugins.embedded_server import EmbeddedCluster, EmbeddedServer
from kvtier.sizes import format_size, parse_size
from kvtier.stores.valkey.config import (
    DEFAULT_BELOW_SERVER_TIMEOUT_S,
    DEFAULT_SEGMENT,
    DEFAULT_TTL_S,
    ClusterConfig,
    ClusterUse,
    StoreOn,
)
from kvtier.transport.address import UnixAddress, parse_address, parse_host_port

_DEFAULT_MEMORY = "4GiB"
_LEAST_BLOCKS = 16
_MAX_TIMEOUT_S = 3600.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_Settings = TypeVar("_Settings", bound="ServerSettings")


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Valkey cluster that hosts share: some of its nodes as `valkey`, and the credentials. See docs/cluster.md."""

    valkey: tuple[str, ...]
    user: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    ttl: float = DEFAULT_TTL_S
    segment: int = DEFAULT_SEGMENT
    compute_once: bool = True
    plaintext: bool = False
    timeout_s: float | None = None
    store_on: StoreOn = "commit"
    write_rate: str | int | None = None

    def __post_init__(self) -> None:
        self._use()

    def embedded(self) -> EmbeddedCluster:
        options = ["--cluster", ",".join(self.valkey), "--cluster-ttl", str(self.ttl)]
        options += ["--cluster-segment", str(self.segment)]
        if self.user is not None:
            options += ["--cluster-user", self.user]
        for name, file in (("--cluster-password-file", self.password_file), ("--cluster-ca-file", self.ca_file)):
            if file is not None:
                options += [name, str(Path(file).expanduser().resolve())]
        if not self.compute_once:
            options.append("--no-cluster-compute-once")
        if self.plaintext:
            options.append("--cluster-plaintext")
        if self.timeout_s is not None:
            options += ["--cluster-timeout", str(self.timeout_s)]
        if self.store_on != "commit":
            options += ["--cluster-store-on", self.store_on]
        if self.write_rate is not None:
            options += ["--cluster-write-rate", str(parse_size(self.write_rate))]
        return EmbeddedCluster(tuple(options), self._use())

    def _use(self) -> ClusterUse:
        """Raises `ConfigError`."""
        config = ClusterConfig(
            valkey=self.valkey,
            user=self.user,
            password=None if self.password_file is None else "it is read by the server",
            ca_file=None if self.ca_file is None else str(Path(self.ca_file).expanduser().resolve()),
            ttl_s=self.ttl,
            segment=self.segment,
            timeout_s=DEFAULT_BELOW_SERVER_TIMEOUT_S if self.timeout_s is None else self.timeout_s,
            plaintext=self.plaintext,
            compute_once=self.compute_once,
        )
        return ClusterUse.of(config, self.store_on, None if self.write_rate is None else parse_size(self.write_rate))


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`server` is the address of a running cache server. Over TCP, it authenticates the engine by `token_file`, or by
    `certificate` and `key`; `ca_file` turns on TLS, and `secret_file` encrypts without TLS.

    Without `server`, one is started on demand and shared by all engines of this user with the same settings. It has
    `memory` for blocks (default: 4GiB), and keeps them across restarts in `folder`, which takes at most `disk`. Sizes
    are bytes, or text such as 8GiB. A `cluster`, if given, is its next tier. It shows a page about itself on `page`,
    a `host:port` of this host's loopback.

    Engines with different `salt` share no blocks. `identity` "full" identifies weights by all of their bytes, which
    are read once, instead of by samples.
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
    cluster: ClusterSettings | None = None
    page: str | None = None
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
        """The server to start on demand; None if `server` names one."""
        if self.server is not None:
            return None
        memory = parse_size(_DEFAULT_MEMORY if self.memory is None else self.memory)
        folder = None if self.folder is None else Path(self.folder)
        disk = None if self.disk is None else parse_size(self.disk)
        cluster = None if self.cluster is None else self.cluster.embedded()
        return EmbeddedServer(memory, folder, disk, cluster=cluster, page=self.page)

    def check_room_for(self, layout: KvLayout) -> None:
        """Raises `ConfigError` if the memory of the server to be started holds too few of a model's blocks."""
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
        if given := self._given("memory", "folder", "disk", "cluster", "page"):
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
        if self.page is not None:
            with _named("page"):
                if parse_host_port(self.page).host not in _LOOPBACK:
                    raise ConfigError(f"a page is shown on 127.0.0.1:PORT, and not on {self.page}")
        if self.folder == "":
            raise ConfigError("folder must name a folder")

    def _given(self, *names: str) -> str | None:
        return next((name for name in names if getattr(self, name) is not None), None)

    def _check_seconds(self, name: str, seconds: float) -> None:
        if not 0 < seconds < _MAX_TIMEOUT_S:
            raise ConfigError(f"{name} must be a number of seconds, not {seconds}")


class ConnectorSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`store`: prompts and answers ("all"), or prompts only. A scheduler waits at most `match_timeout_s` for a prompt's
    match, and then computes it. With `always_load`, cached blocks are loaded even if computing them looks faster. With
    `whole_prompts`, a prompt of full pages is loaded with its last page, which vLLM's own cache would compute again.
    On `prompt_events`, a Unix socket's address, routers are told which prompts vLLM's own cache has.
    """

    match_timeout_s: float = 0.25
    store: Literal["all", "prompt"] = "all"
    always_load: bool = False
    whole_prompts: bool = False
    prompt_events: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_events is not None:
            with _named("prompt_events"):
                if not isinstance(parse_address(self.prompt_events), UnixAddress):
                    raise ConfigError(f"it must be unix:/path, not {self.prompt_events}")
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
    """As `read_settings`, for the settings of a secondary tier beside its `type` and `module_path`."""
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
