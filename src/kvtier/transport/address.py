"""Addresses as users write them: `unix:/run/kvtier.sock` and `tcp://host:port`."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


Address = UnixAddress | TcpAddress

_MAX_UNIX_PATH_BYTES = 107


def parse_address(text: str) -> Address:
    """Parse an address. Raises `ConfigError` for anything but the two forms."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ConfigError(f"{text!r} names no socket: write unix:/path/to/socket")
        if len(path.encode()) > _MAX_UNIX_PATH_BYTES:
            raise ConfigError(f"{path!r} is longer than the {_MAX_UNIX_PATH_BYTES} bytes a socket's path may have")
        return UnixAddress(path)
    if text.startswith("tcp://"):
        return parse_host_port(text.removeprefix("tcp://"))
    raise ConfigError(f"{text!r} is not an address: write unix:/path/to/socket or tcp://host:port")


def parse_host_port(text: str) -> TcpAddress:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{text!r} is not host:port")
    return TcpAddress(host, int(port))


def check_is_one(setting: str, given: object) -> None:
    """Raises `ConfigError` for several addresses: a cache too large for one server belongs in a cluster."""
    if isinstance(given, str):
        return
    if isinstance(given, (tuple, list)):
        raise ConfigError(
            f"{setting} takes one address: if one cache server is too small, use a cluster (cluster:, docs/cluster.md)"
        )
    raise ConfigError(f"{setting} must be an address, not {given!r}")
