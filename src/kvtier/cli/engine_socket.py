"""The address of an engine's process, as given to commands."""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.transport.address import UnixAddress, parse_address


def engine_socket(address: str) -> str:
    """The path in `unix:PATH`, or in a path alone. Raises `ConfigError` for another address."""
    found = parse_address(address if address.startswith(("unix:", "tcp:")) else f"unix:{address}")
    if not isinstance(found, UnixAddress):
        raise ConfigError(f"an engine has a Unix socket, unix:PATH, not {address}")
    return found.path
