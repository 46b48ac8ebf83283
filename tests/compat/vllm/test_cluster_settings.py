"""The plug-in's settings for the cluster below the server that it starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.plugins.embedded_server import EmbeddedServer
from kvtier.plugins.vllm.settings import ClusterSettings

NODES = ("tcp://127.0.0.1:7000",)


def address_of(**settings: object) -> str:
    """The address of the server that an engine with these settings would share."""
    cluster = ClusterSettings(valkey=NODES, **settings).embedded()  # type: ignore[arg-type]
    with contextlib.closing(EmbeddedServer(8 << 20, cluster=cluster)) as server:
        return server.address


@pytest.mark.parametrize(
    "more",
    [
        {"segment": 64},
        {"ttl": 3600.0},
        {"compute_once": False},
        {"user": "kvtier", "password_file": "password"},
        {"timeout_s": 0.3},
        {"store_on": "worth"},
        {"write_rate": "100MiB"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_engines_that_say_different_things_of_a_cluster_share_no_server(more: dict[str, object]) -> None:
    assert address_of() == address_of()
    assert address_of(**more) == address_of(**more)
    assert address_of(**more) != address_of()


def test_engines_with_the_same_settings_share_the_server_of_a_folder(tmp_path: Path) -> None:
    """The server describes all of them as they were given."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    settings = ClusterSettings(
        valkey=("tcp://127.0.0.1:1",),  # no node answers
        user="kvtier",
        password_file=str(password),
        ttl=3600,
        segment=64,
        compute_once=False,
        plaintext=True,
        timeout_s=0.3,
        store_on="worth",
        write_rate="1MiB",
    )
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            server = EmbeddedServer(8 << 20, tmp_path / "data", 64 << 20, cluster=settings.embedded(), unused_s=1.0)
            stack.callback(server.close)
            server.ensure()


def test_how_blocks_are_written_is_told_to_the_server() -> None:
    options = ClusterSettings(valkey=NODES, timeout_s=0.3, store_on="reuse", write_rate="1KiB").embedded().options

    joined = " ".join(options)
    assert "--cluster-timeout 0.3 --cluster-store-on reuse --cluster-write-rate 1024" in joined


@pytest.mark.parametrize("wrong", [{"write_rate": "fast"}, {"write_rate": 0}, {"timeout_s": -1.0}], ids=str)
def test_a_wrong_value_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ClusterSettings(valkey=NODES, **wrong)  # type: ignore[arg-type]
