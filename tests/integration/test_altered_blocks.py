"""A process of this host writes into a committed block by mistake: the block is not sent over TCP and not stored.

The arena is shared with every process of the same user, and the kernel has no way to lend a part of it. So a block gets
a checksum right after its commit, and what leaves this host's memory is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.client import CacheClient
from kvtier.testing.servers import cache_server
from kvtier.transport.address import UnixAddress
from kvtier.wire.messages import LISTED_DISK
from tests.support.actors import LAYOUT, NAMESPACE, chain, open_client, payloads, read_all
from tests.support.waiting import wait_until

HASHES = chain(1, 4)


def alter(address: str, position: int) -> None:
    """Write to one of the blocks, as any client of this host can."""
    with open_client(address) as vandal, vandal.match(HASHES) as lease:
        vandal.arena.view(lease.offsets[position], 5)[:] = b"wrong"


def wait_until_sealed(client: CacheClient) -> None:
    wait_until(lambda: client.stats()["unsealed_blocks"] == 0)


def test_what_was_altered_goes_to_nobody_over_tcp_and_is_dropped() -> None:
    with (
        cache_server(tcp=True) as server,
        open_client(server.unix) as local,
        open_client(server.tcp, server.token) as remote,
    ):
        local.set(HASHES, payloads(HASHES))
        wait_until_sealed(local)
        alter(server.unix, 2)

        found = read_all(remote, HASHES)
        assert found == payloads(HASHES)[: len(found)]
        assert len(found) <= 2
        wait_until(lambda: local.stats()["altered_blocks"] == 1)
        assert local.contains(HASHES) == [True, True, False, True]
        assert local.set(HASHES, payloads(HASHES)) == 1
        assert read_all(remote, HASHES) == payloads(HASHES)


def test_what_was_altered_while_the_disk_is_down_goes_to_nobody(tmp_path: Path) -> None:
    """The disk's writers would have made the checksums, and do not come to it."""
    options = ("--folder", str(tmp_path / "cache"), "--disk", "4MiB")
    with (
        cache_server(*options),  # it has the folder
        cache_server(*options, "--disk-optional", tcp=True) as server,
        open_client(server.unix) as local,
        open_client(server.tcp, server.token) as remote,
    ):
        assert local.stats()["disk_up"] == 0
        local.set(HASHES, payloads(HASHES))
        wait_until_sealed(local)
        alter(server.unix, 2)

        assert read_all(remote, HASHES) in (payloads(HASHES)[:count] for count in range(3))
        wait_until(lambda: local.stats()["altered_blocks"] == 1)


def test_what_came_over_tcp_and_was_altered_goes_to_nobody() -> None:
    with cache_server(tcp=True) as server, open_client(server.tcp, server.token) as remote:
        remote.set(HASHES, payloads(HASHES))
        wait_until_sealed(remote)
        alter(server.unix, 1)

        assert [bytes(view) for _, view in remote.stream_get(HASHES)] == payloads(HASHES[:1])
        wait_until(lambda: remote.contains(HASHES) == [True, False, True, True])


def test_what_is_a_tenants_and_was_altered_goes_to_nobody(tmp_path: Path) -> None:
    """Its blocks have a checksum under the name the tenant knows, made when they first leave."""
    file = tmp_path / "tenants.toml"
    file.write_text('[alice]\ntoken = "the secret of alice"\n')
    with (
        cache_server("--tenants", str(file), tcp=True) as server,
        open_client(server.tcp, "the secret of alice") as alice,
        open_client(server.unix) as owner,
    ):
        alice.set(HASHES, payloads(HASHES))
        wait_until_sealed(owner)
        kept = next(known.namespace for known in owner.namespaces() if known.tenant == "alice")
        with (
            kvtier.connect(server.unix, layout=LAYOUT, namespace=kept) as vandal,
            vandal.match(HASHES) as lease,
        ):
            vandal.arena.view(lease.offsets[2], 5)[:] = b"wrong"

        assert read_all(alice, HASHES) in (payloads(HASHES)[:n] for n in range(3))
        wait_until(lambda: owner.stats()["altered_blocks"] == 1)
        assert alice.contains(HASHES) == [True, True, False, True]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    """Blocks are written when they are used again, so that there is time to alter one before."""
    config = CacheServerConfig(
        memory_bytes=1 << 20,
        unix=UnixAddress(str(tmp_path / "socket")),
        folder=tmp_path / "cache",
        file_bytes=4 << 20,
        stores_on="reuse",
    )
    server = CacheServer(config)
    try:
        yield server
    finally:
        server.close()


def test_a_table_that_processes_write_to_all_the_time_is_none_of_these(server: CacheServer, tmp_path: Path) -> None:
    """It has the namespace's own digest for a hash."""
    table = [BlockHash(NAMESPACE)]
    with open_client(f"unix:{tmp_path / 'socket'}") as local:
        local.set(table, payloads(table))
        for word in (b"once", b"more"):
            with local.match(table) as lease:
                local.arena.view(lease.offsets[0], 4)[:] = word
            local.flush()
            (space,) = server.catalog._namespaces
            server.catalog.blocks.store_again(space, table)
        local.flush()

        assert local.stats()["altered_blocks"] == 0
        assert local.contains(table) == [True]


def test_what_was_altered_is_not_stored(server: CacheServer, tmp_path: Path) -> None:
    with open_client(f"unix:{tmp_path / 'socket'}") as local:
        local.set(HASHES, payloads(HASHES))
        wait_until_sealed(local)
        (space,) = server.catalog._namespaces
        offset = space.index.blocks[HASHES[2]].start * SLOT_ALIGN_BYTES
        local.arena.view(offset, 5)[:] = b"wrong"

        with local.match(HASHES):
            pass
        local.flush()

        assert local.stats()["altered_blocks"] == 1
        assert [flags & LISTED_DISK for flags in local.presence(NAMESPACE, HASHES)] == [
            LISTED_DISK,
            LISTED_DISK,
            0,
            LISTED_DISK,
        ]
        assert read_all(local, HASHES) == payloads(HASHES[:2])
