"""The cache server's settings are checked wherever they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cacheserver.config import CacheServerConfig
from kvtier.errors import ConfigError
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.transport.address import TcpAddress, UnixAddress

UNIX = UnixAddress("/run/kvtier.sock")
TCP = TcpAddress("127.0.0.1", 7070)
TOKEN = b"long enough"


def config(**changes: object) -> CacheServerConfig:
    fields: dict[str, object] = {"memory_bytes": 1 << 20, "unix": UNIX}
    return CacheServerConfig(**(fields | changes))  # type: ignore[arg-type]


def test_a_client_may_hold_half_of_the_memory_unless_told_otherwise() -> None:
    assert config().leased_bytes_per_client == 1 << 19
    assert config(max_leased_bytes=4096).leased_bytes_per_client == 4096


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"memory_bytes": 4095}, "at least 4KiB"),
        ({"memory_bytes": 1 << 60}, "more than the"),
        ({"unix": None}, "needs a Unix socket or a TCP address"),
        ({"tcp": TCP}, "TCP needs a token"),
        ({"tcp": TCP, "token": b""}, "TCP needs a token"),
        ({"token": b"short"}, "too short"),
        ({"tcp": TCP, "token": TOKEN, "tls_key": Path("key")}, "both a certificate and a key"),
        ({"tls_certificate": Path("cert"), "tls_key": Path("key")}, "TLS is for TCP"),
        ({"fsync": True}, "fsync and store-on apply to the disk"),
        ({"stores_on": "reuse"}, "fsync and store-on apply to the disk"),
        (
            {"folder": Path("f"), "file_bytes": 1 << 20, "stores_on": "reuse", "keeps_memory": False},
            "must store them when they are committed",
        ),
        ({"disk_writes_per_day": 1 << 30}, "a budget of disk writes applies to the disk"),
        (
            {"folder": Path("f"), "file_bytes": 1 << 20, "disk_writes_per_day": 0},
            "disk writes must be 1MiB to 1EiB a day",
        ),
        (
            {"folder": Path("f"), "file_bytes": 1 << 20, "disk_writes_per_day": 1 << 30, "keeps_memory": False},
            "must write all of them",
        ),
        ({"shares_on": "reuse"}, "give one \\(--cluster\\) too"),
        ({"cluster": ClusterConfig(valkey=("tcp://127.0.0.1:1",)), "share_bytes_per_s": 0}, "must be positive"),
        ({"max_leased_bytes": 0}, "max_leased_bytes must be positive"),
        ({"max_pinned_share": 1.5}, "between 0 and 1"),
        ({"max_pinned_share": -0.1}, "between 0 and 1"),
        ({"max_connections": 0}, "max_connections must be positive"),
        ({"max_payload_bytes": 0}, "max_payload_bytes must be positive"),
        ({"lease_timeout_s": 0}, "lease_timeout_s must be positive"),
        ({"gone_grace_s": 0}, "gone_grace_s must be positive"),
        ({"stall_timeout_s": -1}, "stall_timeout_s must be positive"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(**changes)


def test_a_server_may_listen_on_tcp_alone() -> None:
    assert config(unix=None, tcp=TCP, token=TOKEN).tcp == TCP
