"""A lazy match says what is on a server's disk and reads none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.waiting import CALL_S

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_tokens=4)
NUM_BLOCKS = 12


def connect(server: ServerProcess, *, tcp: bool = False) -> CacheClient:
    return kvtier.connect(
        server.tcp if tcp else server.unix,
        token=server.token,
        layout=LAYOUT,
        namespace=NamespaceFields(layout=LAYOUT, weights="lazy"),
        timeout_s=CALL_S,
    )


def payloads(count: int) -> list[bytes]:
    return [bytes([number + 1]) * LAYOUT.block_bytes for number in range(count)]


@pytest.mark.parametrize("tcp", [False, True])
def test_what_is_on_disk_is_counted_and_not_read(tmp_path: Path, tcp: bool) -> None:
    options = ("--folder", str(tmp_path / "disk"), "--disk", "64MiB", "--disk-only")
    with cache_server(*options, tcp=tcp) as server, connect(server, tcp=tcp) as client:
        hashes = client.hashes(range(4 * NUM_BLOCKS))
        assert client.set(hashes[:8], payloads(8)) == 8
        client.flush()

        with client.match_lazily(hashes) as lease:
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (0, 8, MatchEnd.NEVER_STORED)
        with client.match_lazily(hashes[:8]) as lease:
            assert (lease.num_stored, lease.ended) == (8, MatchEnd.ALL)
        assert client.stats()["free_bytes"] == client.stats()["memory_bytes"]

        into = [bytearray(LAYOUT.block_bytes) for _ in range(3)]
        with client.match(hashes[3:6]) as lease:  # a run from the middle
            assert lease.num_blocks == 3
            assert lease.fetch(into) == 3
        assert [bytes(block) for block in into] == payloads(8)[3:6]


def test_what_is_in_memory_is_leased_up_to_what_is_not(tmp_path: Path) -> None:
    options = ("--folder", str(tmp_path / "disk"), "--disk", "64MiB")
    with cache_server(*options) as server, connect(server) as client:
        hashes = client.hashes(range(4 * NUM_BLOCKS))
        client.set(hashes[:10], payloads(10))
        client.flush()
    with cache_server(*options) as server, connect(server) as client:
        with client.match(hashes[:4]) as lease:
            assert lease.wait() == 4  # these are in memory now
        with client.match_lazily(hashes) as lease:
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (4, 6, MatchEnd.NEVER_STORED)
            assert [bytes(view) for view in lease.views()] == payloads(4)


def test_a_server_without_a_disk_answers_as_always() -> None:
    with cache_server() as server, connect(server) as client:
        hashes = client.hashes(range(4 * NUM_BLOCKS))
        client.set(hashes[:3], payloads(3))
        with client.match_lazily(hashes) as lease:
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (3, 0, MatchEnd.NEVER_STORED)


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("num_others", [0, 2])
def test_a_prompt_that_a_client_may_never_hold_whole_is_found_whole(tmp_path: Path, tcp: bool, num_others: int) -> None:
    """It leases half of what it may hold now, and matches the rest piece by piece. What is not on disk yet might go."""
    options = ("--folder", str(tmp_path / "disk"), "--disk", "64MiB")
    memory = str(16 * LAYOUT.slot_bytes)
    with cache_server(*options, memory=memory, tcp=tcp) as server, connect(server, tcp=tcp) as client:
        hashes, others = client.hashes(range(4 * NUM_BLOCKS)), client.hashes(range(1000, 1008))
        client.set(others, payloads(2))
        for first in (0, 6):
            assert client.set(hashes[first : first + 6], payloads(NUM_BLOCKS)[first : first + 6]) == 6
        client.flush()

        with client.match(others[:num_others]), client.match_lazily(hashes) as lease:
            num_leased = (8 - num_others) // 2
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (num_leased, 12 - num_leased, MatchEnd.ALL)
            for first in range(num_leased, NUM_BLOCKS, 3):
                wanted = hashes[first : first + 3]
                into = [bytearray(LAYOUT.block_bytes) for _ in wanted]
                with client.match(wanted) as rest:
                    assert (rest.num_blocks, rest.fetch(into)) == (len(wanted), len(wanted))
                assert [bytes(block) for block in into] == payloads(NUM_BLOCKS)[first : first + 3]


def test_what_is_counted_can_be_matched_however_much_is_leased(tmp_path: Path) -> None:
    """The prompt's part in memory would be all that the client may hold: nothing of the rest could be read."""
    options = ("--folder", str(tmp_path / "disk"), "--disk", "64MiB")
    memory = str(16 * LAYOUT.slot_bytes)
    with cache_server(*options, memory=memory) as server, connect(server) as client:
        hashes = client.hashes(range(4 * NUM_BLOCKS))
        for first in (0, 6):
            client.set(hashes[first : first + 6], payloads(NUM_BLOCKS)[first : first + 6])
        client.flush()
    with cache_server(*options, memory=memory) as server, connect(server) as client:
        with client.match(hashes[:8]) as lease:
            assert lease.wait() == 8  # these are in memory now

        with client.match_lazily(hashes) as lease:
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (4, 8, MatchEnd.ALL)
            with client.match(hashes[8:]) as rest:
                assert [bytes(view) for view in rest.views()] == payloads(NUM_BLOCKS)[8:]


def test_of_a_prompt_in_memory_alone_as_much_is_found_as_may_be_leased() -> None:
    with cache_server(memory=str(16 * LAYOUT.slot_bytes)) as server, connect(server) as client:
        hashes = client.hashes(range(4 * NUM_BLOCKS))
        for first in (0, 6):
            client.set(hashes[first : first + 6], payloads(NUM_BLOCKS)[first : first + 6])
        with client.match_lazily(hashes) as lease:
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (8, 0, MatchEnd.LIMIT)


@pytest.mark.parametrize(
    ("tcp", "options", "most"), [(False, (), 14), (True, (), None), (False, ("--disk", "8MiB"), None)]
)
def test_a_server_that_keeps_only_what_its_memory_holds_bounds_what_is_worth_storing_of_a_prompt(
    tmp_path: Path, tcp: bool, options: tuple[str, ...], most: int | None
) -> None:
    """Over TCP, a client does not know the memory."""
    folder = ("--folder", str(tmp_path / "disk")) if options else ()
    with (
        cache_server(*options, *folder, memory=str(16 * LAYOUT.slot_bytes), tcp=tcp) as server,
        connect(server, tcp=tcp) as client,
    ):
        client.ping()
        assert client.most_prompt_blocks == most
