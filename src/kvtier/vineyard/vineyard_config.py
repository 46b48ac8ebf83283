"""The settings of the shared-memory half, by the names that Vineyard's programs use."""

from __future__ import annotations

import numbers
from pathlib import Path

import msgspec

from kvtier.errors import ConfigError
from kvtier.transport.address import check_is_one, parse_address
from kvtier.vineyard.whole_numbers import whole_number

_MAX_TIMEOUT_S = 3600.0


class VineyardCacheConfig(msgspec.Struct, frozen=True):
    """`socket` is the Unix socket of a cache server (`kvtier cache-server`), or an address (`tcp://host:port`, with a
    `token`).

    `llm_cache_object_name` names the tree: caches of the same name, layers and tensor size share it. `block_size`,
    `sync_interval`, `llm_cache_sync_lock` and `llm_ref_cnt_object_name` are accepted and do nothing: tokens are
    kept one by one, and every process sees an update at once, without a lock or a reference count of its own.
    `timeout_s` bounds each call to the server.
    """

    socket: str
    block_size: int = 5
    sync_interval: int = 3
    llm_cache_sync_lock: str = "llmCacheSyncLock"
    llm_cache_object_name: str = "llm_cache_object"
    llm_ref_cnt_object_name: str = "llm_refcnt_object"
    token: str | None = None
    ca_file: str | Path | None = None
    timeout_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("block_size", "sync_interval"):
            msgspec.structs.force_setattr(self, name, whole_number(name, getattr(self, name)))
        for name in ("llm_cache_sync_lock", "llm_cache_object_name", "llm_ref_cnt_object_name"):
            if not _is_text(getattr(self, name)):
                raise ConfigError(f"{name} must be a name, not {getattr(self, name)!r}")
        if not _is_number(self.timeout_s) or not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be from 0 to {_MAX_TIMEOUT_S} seconds, not {self.timeout_s!r}")
        msgspec.structs.force_setattr(self, "timeout_s", float(self.timeout_s))
        if self.token is not None and not _is_text(self.token):
            raise ConfigError("token must be a text that is not empty, or None")
        if self.ca_file is not None and not isinstance(self.ca_file, str | Path):
            raise ConfigError(f"ca_file must be the path of a file, not {self.ca_file!r}")
        check_is_one("socket", self.socket)
        if not _is_text(self.socket):
            raise ConfigError(f"socket must be the path of a cache server's socket, not {self.socket!r}")
        parse_address(self.address)

    @property
    def address(self) -> str:
        """The server's address in kvtier's form."""
        return self.socket if self.socket.startswith(("unix:", "tcp://")) else f"unix:{self.socket}"


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """A text that is not empty and that can be sent: half of a surrogate pair cannot."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
