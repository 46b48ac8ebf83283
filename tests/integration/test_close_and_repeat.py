"""Cases that once gave wrong bytes: closing a client during a copy, repeated hashes, storing a block twice."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.connecting import connect
from kvtier.errors import CapacityError, ConfigError, LeaseError, TierUnavailable
from kvtier.stores.files import Files
from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, empty_buffers, payload, payloads
from kvtier.transport.address import UnixAddress


def test_a_lease_of_a_closed_client_refuses_to_copy() -> None:
    hashes = chain(1, 4)
    with cache_server() as server:
        client = connect(server.unix, layout=LAYOUT, namespace=NAMESPACE)
        client.set(hashes, payloads(hashes))
        lease = client.match(hashes)
        reservation = client.reserve(chain(2, 2))
        client.close()

        with pytest.raises(LeaseError):
            lease.fetch(empty_buffers(4))
        with pytest.raises(LeaseError):
            lease.views()
        with pytest.raises(LeaseError):
            reservation.fill(payloads(chain(2, 2)))
        lease.release()
        reservation.close()


def test_closing_a_client_under_a_get_gives_right_bytes_or_an_error() -> None:
    hashes = chain(1, 16)
    with cache_server() as server:
        for _ in range(10):
            client = connect(server.unix, layout=LAYOUT, namespace=NAMESPACE)
            client.set(hashes, payloads(hashes))
            wrong: list[int] = []

            def read(client: object = client, wrong: list[int] = wrong) -> None:
                into = empty_buffers(16)
                try:
                    while (arrived := client.get(hashes, into)) == 16:  # type: ignore[attr-defined]
                        if [bytes(buffer) for buffer in into] != payloads(hashes):
                            wrong.append(arrived)
                except LeaseError:
                    pass

            thread = threading.Thread(target=read)
            thread.start()
            time.sleep(0.02)
            client.close()
            thread.join()
            assert wrong == []


def test_a_closed_client_answers_with_nothing_at_once() -> None:
    hashes = chain(1, 2)
    with cache_server(tcp=True) as server:
        client = connect(server.tcp, token=server.token, layout=LAYOUT, namespace=NAMESPACE)
        client.set(hashes, payloads(hashes))
        client.close()

        assert client.get(hashes, empty_buffers(2)) == 0
        assert client.match(hashes).num_blocks == 0
        with pytest.raises(TierUnavailable):
            client.flush()


def test_a_hash_that_repeats_in_a_match_from_disk_spoils_nothing(tmp_path: Path) -> None:
    hashes = chain(1, 2)
    options = ("--folder", str(tmp_path / "cache"), "--disk", "4MiB")
    with cache_server(*options) as server, connect(server.unix, layout=LAYOUT, namespace=NAMESPACE) as client:
        client.set(hashes, payloads(hashes))
        client.flush()
    with cache_server(*options) as server, connect(server.unix, layout=LAYOUT, namespace=NAMESPACE) as client:
        with client.match([hashes[0], hashes[0], hashes[1]]) as lease:
            expected = [payload(hashes[0]), payload(hashes[0]), payload(hashes[1])]
            assert [bytes(view) for view in lease.views()] == expected[: lease.num_blocks]
        into = empty_buffers(2)
        assert client.get(hashes, into) == 2
        assert [bytes(buffer) for buffer in into] == payloads(hashes)


class _SlowFiles(Files):
    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        if len(data) > 4096:
            time.sleep(0.005)
        super().write(fd, data, offset)


def test_blocks_used_while_they_are_written_are_stored_once_and_keep_their_room(tmp_path: Path) -> None:
    """Small memory, slow disk, storing on reuse: a slot given back twice would be two blocks' slot."""
    num_blocks = 48
    config = CacheServerConfig(
        memory_bytes=num_blocks * LAYOUT.slot_bytes,
        unix=UnixAddress(str(tmp_path / "s")),
        folder=tmp_path / "cache",
        file_bytes=8 << 20,
        stores_on="reuse",
    )
    server = CacheServer(config, files=_SlowFiles())
    wrong: list[int] = []

    def work(number: int) -> None:
        with connect(f"unix:{tmp_path}/s", layout=LAYOUT, namespace=NAMESPACE) as client:
            for turn in range(60):
                hashes = chain((number + turn) % 14, 8)
                try:
                    client.set(hashes, payloads(hashes))
                except CapacityError:
                    pass
                into = empty_buffers(8)
                for _ in range(2):
                    arrived = client.get(hashes, into)
                    if [bytes(buffer) for buffer in into[:arrived]] != payloads(hashes)[:arrived]:
                        wrong.append(number)

    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        levels = server.catalog.inventory.levels()
        assert wrong == []
        assert levels["blocks"] * LAYOUT.slot_bytes == levels["used_bytes"] <= levels["memory_bytes"]
        assert levels["held_bytes"] == 0
    finally:
        server.close()


@pytest.mark.parametrize("hashes", [[b"short"], ["a" * 32], [b"a" * 16, b"b" * 48], [7]], ids=repr)
def test_what_is_no_hash_is_refused_with_a_sentence(hashes: list[object]) -> None:
    with cache_server() as server, connect(server.unix, layout=LAYOUT, namespace=NAMESPACE) as client:
        with pytest.raises(ConfigError, match="length 32"):
            client.match(hashes)  # type: ignore[arg-type]
        assert client.contains(chain(1, 1)) == [False]


def test_reserving_nothing_is_nothing() -> None:
    with cache_server() as server, connect(server.unix, layout=LAYOUT, namespace=NAMESPACE) as client:
        with client.reserve([]) as reservation:
            assert reservation.num_blocks == 0
        assert client.is_up
