"""Every operation of a client against a real server, over shared memory and over TCP."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest

import kvtier
from kvtier import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.client.client import CacheClient
from kvtier.errors import LeaseError
from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.actors import (
    BLOCK_BYTES,
    LAYOUT,
    NAMESPACE,
    NOTHING_HELD,
    OTHER_NAMESPACE,
    chain,
    empty_buffers,
    held,
    open_client,
    payloads,
    read_all,
)
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

_BLOCKS = 64
_MEMORY = str(_BLOCKS * LAYOUT.slot_bytes)
_HASHES = chain(1, 16)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with cache_server("--eviction", "lru", memory=_MEMORY, tcp=True) as process:
        yield process


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[CacheClient]:
    with open_client(getattr(server, request.param), server.token) as opened:
        yield opened


@pytest.fixture
def other(client: CacheClient, server: ServerProcess) -> Iterator[CacheClient]:
    """A client of the other transport."""
    with open_client(server.tcp if client.is_local else server.unix, server.token) as opened:
        yield opened


def _flood(client: CacheClient) -> None:
    """Store four times what the arena holds."""
    for seed in range(1000, 1000 + 4 * _BLOCKS // 16):
        client.set(chain(seed, 16), payloads(chain(seed, 16)))


def test_what_one_client_sets_another_gets_over_the_other_transport(client: CacheClient, other: CacheClient) -> None:
    assert client.set(_HASHES, payloads(_HASHES)) == 16
    assert read_all(other, _HASHES) == payloads(_HASHES)
    assert client.set(_HASHES, payloads(_HASHES)) == 0, "nothing is written twice"
    assert other.contains([*_HASHES, *chain(2, 1)]) == [True] * 16 + [False]


def test_a_match_ends_where_the_prefix_does(client: CacheClient) -> None:
    client.set(_HASHES[:5], payloads(_HASHES[:5]))
    client.set(_HASHES[6:], payloads(_HASHES[6:]))
    with client.match(_HASHES) as lease:
        assert (lease.num_blocks, lease.ended) == (5, MatchEnd.NEVER_STORED)
    with client.match(_HASHES[:5]) as lease:
        assert (lease.num_blocks, lease.ended) == (5, MatchEnd.ALL)
    assert client.get(_HASHES, empty_buffers(16)) == 5


def test_a_block_being_written_is_pending_for_others(server: ServerProcess, client: CacheClient) -> None:
    with open_client(server.unix) as writer, writer.reserve(_HASHES[:4]) as reservation:
        reservation.fill([memoryview(block) for block in payloads(_HASHES[:4])])
        assert (client.match(_HASHES).num_blocks, client.match(_HASHES).ended) == (0, MatchEnd.PENDING)
        assert client.contains(_HASHES) == [False] * 16
        assert reservation.commit(0, 2) == 2
        assert read_all(client, _HASHES) == payloads(_HASHES[:2])
    assert client.contains(_HASHES[:4]) == [True, True, False, False]


def test_stream_get_gives_each_block_in_order(client: CacheClient) -> None:
    client.set(_HASHES, payloads(_HASHES))
    asked = [*_HASHES, *chain(2, 2)]
    assert [(position, bytes(view)) for position, view in client.stream_get(asked)] == list(
        enumerate(payloads(_HASHES))
    )
    into = empty_buffers(16)
    assert [position for position, _ in client.stream_get(asked, into)] == list(range(16))
    assert [bytes(buffer) for buffer in into] == payloads(_HASHES)


def test_a_stream_left_in_the_middle_holds_nothing_and_spoils_nothing(client: CacheClient, other: CacheClient) -> None:
    client.set(_HASHES, payloads(_HASHES))
    stream = client.stream_get(_HASHES)
    assert next(stream)[0] == 0
    del stream
    wait_until(lambda: held(other) == NOTHING_HELD)
    assert read_all(client, _HASHES) == payloads(_HASHES)


def test_a_deferred_set_is_there_after_a_flush_and_its_buffers_are_free_at_once(
    client: CacheClient, other: CacheClient
) -> None:
    buffers = [bytearray(block) for block in payloads(_HASHES)]
    assert client.set(_HASHES, buffers, deferred=True) == 16
    for buffer in buffers:
        buffer[:] = b"\xff" * BLOCK_BYTES
    client.flush()
    assert read_all(other, _HASHES) == payloads(_HASHES)
    wait_until(lambda: held(other) == NOTHING_HELD)


def test_a_deferred_set_is_not_lost_when_the_client_is_closed(server: ServerProcess) -> None:
    """Over TCP the bytes have arrived by then; over shared memory only the commit is put off."""
    with open_client(server.unix) as watcher:
        for seed in range(8):
            with open_client(server.unix) as client:
                assert client.set(chain(seed, 4), payloads(chain(seed, 4)), deferred=True) == 4
            assert read_all(watcher, chain(seed, 4)) == payloads(chain(seed, 4))


def test_pinned_blocks_survive_a_flood_and_unpinned_ones_do_not(client: CacheClient) -> None:
    kept, lost = chain(1, 8), chain(2, 8)
    client.set(kept, payloads(kept))
    client.set(lost, payloads(lost))
    assert client.pin(kept) == 8
    assert client.stats()["pinned_bytes"] == 8 * LAYOUT.slot_bytes

    _flood(client)

    assert read_all(client, kept) == payloads(kept)
    assert not any(client.contains(lost))
    assert client.unpin(kept) == 8
    _flood(client)
    assert not any(client.contains(kept))
    assert client.stats()["pinned_bytes"] == 0


def test_drop_forgets_what_is_named_or_everything_of_this_namespace(server: ServerProcess, client: CacheClient) -> None:
    with kvtier.connect(server.unix, layout=LAYOUT, namespace=OTHER_NAMESPACE, timeout_s=CALL_S) as neighbour:
        neighbour.set(_HASHES, payloads(_HASHES))
        client.set(_HASHES, payloads(_HASHES))
        assert client.drop(_HASHES[12:]) == 4
        assert client.contains(_HASHES) == [True] * 12 + [False] * 4
        assert client.drop([]) == 0
        assert client.drop() == 12
        assert not any(client.contains(_HASHES))
        assert read_all(neighbour, _HASHES) == payloads(_HASHES)


def test_a_dropped_block_stays_readable_for_who_leases_it(server: ServerProcess, client: CacheClient) -> None:
    with open_client(server.unix) as reader:
        reader.set(_HASHES, payloads(_HASHES))
        with reader.match(_HASHES) as lease:
            assert client.drop() == 16
            _flood(client)
            assert [bytes(view) for view in lease.views()] == payloads(_HASHES)
        wait_until(lambda: held(client) == NOTHING_HELD)


def test_a_flood_evicts_the_blocks_that_were_not_used_longest(client: CacheClient) -> None:
    old, used = chain(1, 8), chain(2, 8)
    client.set(old, payloads(old))
    client.set(used, payloads(used))
    for seed in range(10, 16):
        assert read_all(client, used) == payloads(used)
        client.set(chain(seed, 8), payloads(chain(seed, 8)))
    client.set(chain(16, 8), payloads(chain(16, 8)))

    assert read_all(client, used) == payloads(used)
    assert not any(client.contains(old))


def test_views_in_use_keep_their_lease() -> None:
    with cache_server(memory=_MEMORY) as server, open_client(server.unix) as client:
        client.set(_HASHES, payloads(_HASHES))
        lease = client.match(_HASHES)
        part = lease.views()[3][100:200]
        with pytest.raises(LeaseError, match="still in use"):
            lease.release()
        assert held(client)[0] == 1
        part.release()
        del part
        lease.release()
        wait_until(lambda: held(client) == NOTHING_HELD)


def test_info_and_stats_tell_who_and_how_much(server: ServerProcess, client: CacheClient) -> None:
    client.set(_HASHES, payloads(_HASHES))
    read_all(client, _HASHES)
    client.match(chain(9, 2))

    info = client.info()
    assert info["server"] == "kvtier"
    assert info["memory_bytes"] == int(_MEMORY)
    assert info["unix"] is not None
    assert info["tcp"] == server.tcp
    (space,) = info["namespaces"]  # type: ignore[misc]
    assert (space["namespace"], space["block_bytes"], space["blocks"]) == (NAMESPACE.hex(), BLOCK_BYTES, 16)

    stats = client.stats()
    assert (stats["blocks"], stats["stored_blocks"], stats["hit_blocks"]) == (16, 16, 16)
    assert stats["missed_blocks"] == 2
    assert stats["used_bytes"] == 16 * LAYOUT.slot_bytes
    assert stats["used_bytes"] + stats["free_bytes"] == stats["memory_bytes"]  # type: ignore[operator]
    assert stats["clients"] == 1


def test_a_namespace_that_nobody_uses_and_that_is_empty_is_forgotten(server: ServerProcess) -> None:
    with open_client(server.unix) as watcher:
        with kvtier.connect(server.unix, layout=LAYOUT, namespace=OTHER_NAMESPACE, timeout_s=CALL_S) as passing:
            passing.set(_HASHES, payloads(_HASHES))
        assert len(watcher.stats()["namespaces"]) == 2  # type: ignore[arg-type]
        _flood(watcher)
        wait_until(lambda: len(watcher.stats()["namespaces"]) == 1)  # type: ignore[arg-type]


def _num_matches(server: ServerProcess) -> int:
    with urllib.request.urlopen(server.metrics, timeout=LIMIT_S) as reply:
        (count,) = re.findall(r'^kvtier_server_requests_total\{operation="match"\} (\S+)$', reply.read().decode(), re.M)
    return int(float(count))


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_prompt_of_100_000_tokens_is_matched_by_one_request(transport: str) -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=64)
    with (
        cache_server(
            "--metrics", "127.0.0.1:0", "--max-leased", "32MiB", memory=str(6250 * layout.slot_bytes), tcp=True
        ) as server,
        kvtier.connect(server.unix, layout=layout, namespace=NAMESPACE, timeout_s=CALL_S) as writer,
        kvtier.connect(
            getattr(server, transport), token=server.token, layout=layout, namespace=NAMESPACE, timeout_s=CALL_S
        ) as client,
    ):
        hashes = client.hashes(range(100_000))
        with writer.reserve(hashes) as reservation:
            assert reservation.commit() == 6250
        for _ in range(7):
            with client.match(hashes) as lease:
                assert lease.num_blocks == 6250
        assert _num_matches(server) == 7
