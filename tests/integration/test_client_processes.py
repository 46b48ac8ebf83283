"""Clients that die, stop, fork or lose their connection: what they hold is theirs until they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest

from kvtier.errors import TierFull
from kvtier.testing.servers import cache_server
from tests.support.actors import (
    BLOCK_BYTES,
    LAYOUT,
    NOTHING_HELD,
    actor,
    chain,
    held,
    hung,
    open_client,
    payload,
    payloads,
    read_all,
    stays,
)
from tests.support.waiting import wait_until

_MEMORY = 128 * LAYOUT.slot_bytes


def test_all_that_a_killed_client_held_is_back() -> None:
    with cache_server(memory=str(_MEMORY)) as server, open_client(server.unix) as client:
        client.set(chain(1, 16), payloads(chain(1, 16)))
        with actor("hold", address=server.unix, leased_seed=1, reserved_seed=2, num_blocks=16) as holder:
            assert holder.hear() == {"leased": 16, "reserved": 16}
            wait_until(lambda: held(client) == (1, 1, 32 * LAYOUT.slot_bytes))

            holder.send_signal(signal.SIGKILL)
            wait_until(lambda: held(client) == NOTHING_HELD)

        assert client.contains(chain(2, 16)) == [True] + [False] * 15, "a half-written block became visible"
        with client.reserve(chain(3, 64)) as all_of_it:
            assert all_of_it.num_blocks == 64


def test_a_killed_client_takes_nothing_from_the_others() -> None:
    hashes = chain(1, 16)
    with cache_server(memory=str(_MEMORY)) as server, open_client(server.unix) as client:
        client.set(hashes, payloads(hashes))
        with client.match(hashes) as lease:
            with actor("hold", address=server.unix, leased_seed=1, reserved_seed=2, num_blocks=16) as holder:
                holder.hear()
                holder.send_signal(signal.SIGKILL)
                wait_until(lambda: held(client)[0] == 1)

            wait_until(lambda: held(client) == (1, 0, 16 * LAYOUT.slot_bytes))
            assert [bytes(view) for view in lease.views()] == payloads(hashes)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_client_stopped_in_a_copy_keeps_its_slots_while_others_flood_the_arena(transport: str) -> None:
    """The stopped ones are local; the flood comes from a local and from a remote client."""
    read, written = chain(1, 16), chain(2, 16)
    with (
        cache_server("--lease-timeout", "0.5", memory=str(_MEMORY), tcp=True) as server,
        open_client(getattr(server, transport), server.token) as client,
    ):
        client.set(read, payloads(read))
        with (
            actor("read_again_and_again", address=server.unix, seed=1, num_blocks=16) as reader,
            actor("write_again_and_again", address=server.unix, seed=2, num_blocks=16) as writer,
        ):
            assert reader.hear() == {"leased": 16}
            assert writer.hear() == {"reserved": 16}
            for stopped in (reader, writer):
                stopped.stop()

            stored = 0
            for seed in range(100, 164):  # eight times what the arena holds
                stored += client.set(chain(seed, 16), payloads(chain(seed, 16)))
            assert stored == 64 * 16
            assert stays(lambda: held(client)[:2] == (1, 1), for_s=2.5), "a clock took what a stopped client held"
            kept = [seed for seed in range(100, 164) if all(client.contains(chain(seed, 16)))]
            assert len(kept) >= 5

            for stopped in (reader, writer):
                stopped.send_signal(signal.SIGCONT)
                stopped.go_on()
            heard = reader.hear()
            assert heard["wrong"] == 0
            assert heard["rounds"] > 1, "one before the stop, one after it"  # type: ignore[operator]
            assert writer.hear()["committed"] == 16
            assert (reader.wait(), writer.wait()) == (0, 0)

        assert read_all(client, written) == payloads(written)
        for seed in kept:
            assert read_all(client, chain(seed, 16)) == payloads(chain(seed, 16)), "a block of others was written to"
        wait_until(lambda: held(client) == NOTHING_HELD)


def test_a_lease_outlives_its_lost_connection_and_is_released_over_a_new_one() -> None:
    hashes = chain(1, 16)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(cache_server(memory=str(_MEMORY)))
        watcher = stack.enter_context(open_client(server.unix))
        watchers = _connections_to(server.unix)
        client = stack.enter_context(open_client(server.unix))
        client.set(hashes, payloads(hashes))
        lease = client.match(hashes)
        reservation = client.reserve(chain(2, 4))
        _cut(_connections_to(server.unix) - watchers)
        wait_until(lambda: watcher.stats()["connections"] == 1)

        assert stays(lambda: held(watcher)[:2] == (1, 1), for_s=2.0)
        for seed in range(100, 132):
            watcher.set(chain(seed, 16), payloads(chain(seed, 16)))
        assert [bytes(view) for view in lease.views()] == payloads(hashes)

        lease.release()
        reservation.fill([memoryview(payload(block_hash)) for block_hash in chain(2, 4)])
        assert reservation.commit() == 4
        reservation.close()
        wait_until(lambda: held(watcher) == NOTHING_HELD)
        assert read_all(watcher, chain(2, 4)) == payloads(chain(2, 4))


def test_a_remote_client_without_connections_holds_nothing() -> None:
    hashes = chain(1, 16)
    with (
        cache_server(memory=str(_MEMORY), tcp=True) as server,
        open_client(server.unix) as watcher,
        open_client(server.tcp, server.token) as client,
    ):
        watcher.set(hashes, payloads(hashes))
        lease = client.match(hashes)
        assert held(watcher)[0] == 1

        _cut(_connections_to(server.tcp))

        wait_until(lambda: held(watcher) == NOTHING_HELD)
        into = [bytearray(BLOCK_BYTES) for _ in hashes]
        assert lease.fetch(into) == 16, "what is still cached is found again over a new connection"
        lease.release()


def test_a_clock_ends_a_remote_lease_and_no_local_one() -> None:
    hashes = chain(1, 8)
    with (
        cache_server("--lease-timeout", "0.3", memory=str(_MEMORY), tcp=True) as server,
        open_client(server.unix) as local,
        open_client(server.tcp, server.token) as remote,
    ):
        local.set(hashes, payloads(hashes))
        with local.match(hashes) as kept, remote.match(hashes) as ended:
            assert (kept.num_blocks, ended.num_blocks) == (8, 8)
            wait_until(lambda: held(local)[0] == 1)
            assert stays(lambda: held(local)[0] == 1, for_s=1.5)
            assert [bytes(view) for view in kept.views()] == payloads(hashes)


def test_a_client_closed_after_a_time_out_leaves_nothing_leased() -> None:
    """The time-out cost it the connection over which it would have said good-bye."""
    hashes = chain(1, 8)
    with cache_server(memory=str(_MEMORY)) as server, open_client(server.unix) as watcher:
        client = open_client(server.unix, timeout_s=0.3)
        client.set(hashes, payloads(hashes))
        lease = client.match(hashes)
        with hung(server):
            assert client.contains(hashes) == [False] * 8

        lease.release()
        client.close()

        wait_until(lambda: held(watcher) == NOTHING_HELD)
        wait_until(lambda: watcher.stats()["clients"] == 1)


@pytest.mark.parametrize(
    "transport",
    [
        "unix",
        pytest.param(
            "tcp",
        ),
    ],
)
def test_a_forked_child_is_a_client_of_its_own(transport: str) -> None:
    with cache_server(memory=str(_MEMORY), tcp=True) as server, open_client(server.unix) as watcher:
        token = server.token if transport == "tcp" else None
        with actor("fork", address=getattr(server, transport), token=token, num_blocks=8) as parent:
            assert parent.hear() == {"child_is_right": True, "child_leased": 8}
            assert watcher.stats()["clients"] == 3, "the watcher, the parent, the child"
            assert held(watcher)[0] == 2
            parent.go_on()
            assert parent.hear() == {"child_status": 0, "parent_is_right": True, "parent_leased": 8}
            assert stays(lambda: held(watcher)[0] == 1, for_s=1.0), "the child's end took the parent's lease"
            parent.go_on()
            assert parent.hear() == {"ended": True}
        wait_until(lambda: held(watcher) == NOTHING_HELD)


def test_a_child_forked_while_other_threads_use_the_client_can_use_it() -> None:
    with cache_server(memory=str(_MEMORY)) as server:
        with actor("fork_under_load", address=server.unix, num_forks=40) as parent:
            assert parent.hear() == {"failed": 0}


def test_closing_a_client_that_has_lost_its_connections_gives_its_leases_back() -> None:
    hashes = chain(1, 8)
    with cache_server(memory=str(_MEMORY)) as server, open_client(server.unix) as watcher:
        watchers = _connections_to(server.unix)
        client = open_client(server.unix)
        client.set(hashes, payloads(hashes))
        lease = client.match(hashes)
        _cut(_connections_to(server.unix) - watchers)

        client.close()
        lease.release()

        wait_until(lambda: held(watcher) == NOTHING_HELD)


def test_what_is_leased_by_one_client_is_no_room_for_another() -> None:
    with (
        cache_server("--max-leased", str(_MEMORY), memory=str(_MEMORY)) as server,
        open_client(server.unix) as holder,
        open_client(server.unix) as other,
    ):
        everything = chain(1, 128)
        holder.set(everything, payloads(everything))
        with holder.match(everything) as lease:
            assert lease.num_blocks == 128
            with pytest.raises(TierFull, match="leased, pinned or being written"):
                other.set(chain(2, 1), payloads(chain(2, 1)))
            assert [bytes(view) for view in lease.views()] == payloads(everything)
        assert other.set(chain(2, 1), payloads(chain(2, 1))) == 1


def _connections_to(address: str) -> set[int]:
    """Descriptors of this process's sockets that are connected to `address`."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                peer = sock.getpeername()
            if address == (f"unix:{peer}" if isinstance(peer, str) else f"tcp://{peer[0]}:{peer[1]}"):
                found.add(fd)
    return found


def _cut(connections: set[int]) -> None:
    """Break connections under their owner's feet."""
    assert connections
    for fd in connections:
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
