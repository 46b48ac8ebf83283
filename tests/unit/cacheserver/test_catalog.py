"""What the server holds for whom: the cases worth a sentence. Any order of calls is in tests/stateful."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.blocks.block import Block
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.cacheserver.persistence import NO_DISK, Disk, NoDisk
from kvtier.cacheserver.served_client import ServedClient
from kvtier.cacheserver.tenants import HoldGroup, Holds, Tenant
from kvtier.errors import TierRefused
from kvtier.stores.disk import DiskStore
from kvtier.stores.stored_block import StoredBlock
from kvtier.wire.messages import LISTED_EVICTED, LISTED_MEMORY, LISTED_PENDING, LISTED_PINNED
from tests.support.waiting import LIMIT_S

NAMESPACE = Namespace(bytes(range(32)))
LOCAL_PID = 4711


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_catalog(clock: Clock, leased_units: int = 6, disk: Disk = NO_DISK) -> Catalog:
    """Room for eight blocks of one unit, of which two may be pinned."""
    return Catalog(
        8 * SLOT_ALIGN_BYTES,
        leased_bytes_per_client=leased_units * SLOT_ALIGN_BYTES,
        pinned_bytes=2 * SLOT_ALIGN_BYTES,
        lease_timeout_s=60.0,
        disk=disk,
        clock=clock,
    )


@pytest.fixture
def catalog(clock: Clock) -> Catalog:
    return make_catalog(clock)


@pytest.fixture
def space(catalog: Catalog) -> MemorySpace:
    return catalog.open(NAMESPACE, "model", 4096, 16)


@pytest.fixture
def local(catalog: Catalog) -> ServedClient:
    return catalog.join(b"local".ljust(16), LOCAL_PID)


@pytest.fixture
def remote(catalog: Catalog) -> ServedClient:
    return catalog.join(b"remote".ljust(16), None)


def names(*texts: str) -> list[BlockHash]:
    return [BlockHash(text.encode().ljust(32, b"\0")) for text in texts]


def store(catalog: Catalog, space: MemorySpace, *texts: str) -> None:
    writer = catalog.join(b"writer".ljust(16), None)
    grant, reason = catalog.reserve(writer, 1, space, names(*texts))
    assert reason == ""
    assert catalog.commit(writer, 1, 0, len(grant.blocks)) == len(texts)
    catalog.end(writer)


def limit_owner(catalog: Catalog, max_units: int) -> Holds:
    """The owner's holds, limited as they are beside tenants."""
    holds = catalog.tenants.owner.holds
    holds.group, holds.max_units = HoldGroup(), max_units
    return holds


def test_a_client_is_one_holder_whatever_its_connections(catalog: Catalog, local: ServedClient) -> None:
    assert catalog.join(local.id, LOCAL_PID) is local
    assert catalog.inventory.levels()["clients"] == 1


def test_a_forked_child_cannot_use_its_parents_id(catalog: Catalog, local: ServedClient) -> None:
    with pytest.raises(TierRefused, match="connect anew after a fork"):
        catalog.join(local.id, LOCAL_PID + 1)


def test_a_client_of_an_admin_of_before_has_the_rights_of_its_tenant_of_now(catalog: Catalog) -> None:
    """A tenant whose role changes is another tenant of the same name; its old connections may be open yet."""
    admin, demoted = Tenant("ops", sees_all=True), Tenant("ops")
    before = catalog.join(b"a client".ljust(16), None, admin)

    now = catalog.join(before.id, None, demoted)

    assert (before.tenant, now.tenant) == (admin, demoted)
    catalog.leave(now)
    assert (before.is_gone, now.is_gone) == (False, True)
    catalog.leave(before)
    assert catalog.inventory.levels()["clients"] == 0


def test_a_remote_client_is_gone_with_its_last_connection(
    catalog: Catalog, space: MemorySpace, remote: ServedClient
) -> None:
    store(catalog, space, "a")
    catalog.join(remote.id, None)
    catalog.lease(remote, 1, space, names("a"))

    catalog.leave(remote)
    assert catalog.inventory.levels()["leases"] == 1
    catalog.leave(remote)
    assert (catalog.inventory.levels()["clients"], catalog.inventory.levels()["held_bytes"]) == (0, 0)


def test_a_local_client_is_gone_only_with_its_process(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    store(catalog, space, "a")
    catalog.lease(local, 1, space, names("a"))

    catalog.leave(local)
    assert catalog.inventory.levels()["leases"] == 1
    catalog.end(local)
    assert (catalog.inventory.levels()["clients"], catalog.inventory.levels()["held_bytes"]) == (0, 0)


def test_a_prompt_that_fills_all_of_the_memory_is_borrowed_at_once(catalog: Catalog, space: MemorySpace) -> None:
    store(catalog, space, *"abcd")
    store(catalog, space, *"efgh")

    blocks, is_all = catalog.borrow(space, names(*"abcdefghi"))

    assert len(blocks) == 8
    assert is_all
    catalog.return_borrowed(blocks)


def test_a_client_that_said_good_bye_is_refused(catalog: Catalog, space: MemorySpace, local: ServedClient) -> None:
    catalog.end(local)

    with pytest.raises(TierRefused, match="goodbye"):
        catalog.lease(local, 1, space, names("a"))
    with pytest.raises(TierRefused, match="goodbye"):
        catalog.reserve(local, 1, space, names("a"))


def test_a_number_in_use_is_refused(catalog: Catalog, space: MemorySpace, local: ServedClient) -> None:
    store(catalog, space, "a")
    catalog.lease(local, 1, space, names("a"))

    with pytest.raises(TierRefused, match="number 1 is in use"):
        catalog.reserve(local, 1, space, names("b"))


def test_a_lease_whose_end_came_first_is_not_held(catalog: Catalog, space: MemorySpace, local: ServedClient) -> None:
    store(catalog, space, "a")
    catalog.release(local, 7)
    catalog.lease(local, 7, space, names("a"))

    assert (catalog.inventory.levels()["leases"], catalog.inventory.levels()["held_bytes"]) == (0, 0)


def test_a_reservation_whose_end_came_first_is_not_held(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    catalog.close_reservation(local, 7)
    catalog.reserve(local, 7, space, names("a"))

    assert (catalog.inventory.levels()["reservations"], catalog.inventory.levels()["used_bytes"]) == (0, 0)
    assert catalog.contains(space, names("a")) == b"\0"


def test_numbers_that_ended_too_early_are_not_kept_without_bound(catalog: Catalog, local: ServedClient) -> None:
    for number in range(10_000):
        catalog.release(local, number)

    assert len(local.ended_numbers) < 5000
    assert 9_999 in local.ended_numbers


def test_a_client_holds_no_more_than_it_may(catalog: Catalog, space: MemorySpace, local: ServedClient) -> None:
    store(catalog, space, *"abcde")
    catalog.lease(local, 1, space, names(*"abcd"))

    outcome = catalog.lease(local, 2, space, names(*"abcde"))
    grant, reason = catalog.reserve(local, 3, space, names("x"))

    assert (len(outcome.blocks), outcome.ended) == (2, MatchEnd.LIMIT)
    assert (grant.num_refused, reason) == (1, "this client may hold at most 24KiB at once")


def test_a_lazy_lease_counts_nothing_in_memory_that_might_be_evicted(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    """What is on disk, too, is counted (tests/integration/test_lazy_match)."""
    store(catalog, space, *"abcd")
    store(catalog, space, *"efgh")

    whole = catalog.lease(local, 1, space, names(*"abcdefgh"), is_lazy=True)
    catalog.release(local, 1)
    catalog.lease(local, 2, space, names("g", "h"), is_lazy=True)
    cut = catalog.lease(local, 3, space, names(*"abcdef"), is_lazy=True)
    none = catalog.lease(local, 4, space, names(*"abcdefgh"), is_lazy=True)

    assert (len(whole.blocks), whole.num_stored, whole.ended) == (6, 0, MatchEnd.LIMIT)
    assert (len(cut.blocks), cut.num_stored, cut.ended) == (4, 0, MatchEnd.LIMIT)
    assert (len(none.blocks), none.num_stored, none.ended) == (0, 0, MatchEnd.LIMIT)


class FullDisk(NoDisk):
    """Has everything."""

    def contains(self, space: MemorySpace, hashes: Sequence[BlockHash]) -> list[bool]:
        return [True] * len(hashes)


@pytest.mark.parametrize("at_once", [3, 4, 5, 8])
def test_a_prompt_that_is_looked_at_in_pieces_is_counted_whole_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("kvtier.cacheserver.catalog.MAX_AT_ONCE", at_once)
    catalog = make_catalog(clock, disk=FullDisk())
    space, client = catalog.open(NAMESPACE, "model", 4096, 16), catalog.join(b"local".ljust(16), LOCAL_PID)
    store(catalog, space, *"abcd")
    store(catalog, space, *"efgh")

    lease = catalog.lease(client, 1, space, names(*"abcdefgh"), is_lazy=True)

    assert (len(lease.blocks), lease.num_stored, lease.ended) == (3, 5, MatchEnd.ALL)
    assert client.held_units == 3
    catalog.release(client, 1)
    assert catalog.inventory.levels()["held_bytes"] == 0


def test_hits_that_a_client_may_hold_are_leased_however_long_the_prompt(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    store(catalog, space, *"abcde")

    lease = catalog.lease(local, 1, space, names(*"abcdefghijklmnop"), is_lazy=True)

    assert (len(lease.blocks), lease.num_stored, lease.ended) == (5, 0, MatchEnd.NEVER_STORED)


def test_a_server_without_room_says_so(
    catalog: Catalog, space: MemorySpace, local: ServedClient, remote: ServedClient
) -> None:
    catalog.reserve(local, 1, space, names(*"abcdef"))

    grant, reason = catalog.reserve(remote, 1, space, names(*"uvwx"))

    assert (len(grant.blocks), grant.num_refused) == (2, 2)
    assert reason == "all of the server's 32KiB is leased, pinned or being written"


def test_the_clock_ends_remote_holds_and_never_local_ones(
    catalog: Catalog, space: MemorySpace, local: ServedClient, remote: ServedClient, clock: Clock
) -> None:
    store(catalog, space, "a")
    for holder in (local, remote):
        catalog.lease(holder, 1, space, names("a"))
        catalog.reserve(holder, 2, space, names(f"by {holder.pid}"))
    clock.now_s = 60.0
    assert catalog.expire() == 0

    clock.now_s = 60.1
    assert catalog.expire() == 2

    assert (len(local.leases), len(local.reservations)) == (1, 1)
    assert (len(remote.leases), len(remote.reservations)) == (0, 0)


def test_a_reservation_that_is_being_filled_lives_on(
    catalog: Catalog, space: MemorySpace, remote: ServedClient, clock: Clock
) -> None:
    catalog.reserve(remote, 1, space, names("a", "b"))
    clock.now_s = 50.0
    filled = catalog.fill(remote, 1, 0, 1)
    assert filled is not None
    clock.now_s = 200.0

    assert catalog.expire() == 0
    assert catalog.end_filling(filled) == 1
    clock.now_s = 250.0
    assert catalog.expire() == 0
    clock.now_s = 300.0
    assert catalog.expire() == 1


def test_a_block_whose_reservation_ends_while_it_is_filled_still_becomes_ready(
    catalog: Catalog, space: MemorySpace, remote: ServedClient
) -> None:
    catalog.reserve(remote, 1, space, names("a", "b"))
    filled = catalog.fill(remote, 1, 0, 1)
    assert filled is not None
    catalog.end(remote)

    assert catalog.end_filling(filled) == 1
    assert catalog.contains(space, names("a", "b")) == b"\1\0"


@pytest.mark.parametrize("end", ["expire", "close", "end"])
def test_what_is_being_filled_is_held_until_its_bytes_have_come(
    catalog: Catalog, space: MemorySpace, remote: ServedClient, clock: Clock, end: str
) -> None:
    """Else a client that fills slowly holds more than it may, and its tenant what is another's."""
    holds = limit_owner(catalog, 8)
    grant, _ = catalog.reserve(remote, 1, space, names(*"abcdef"))
    assert len(grant.blocks) == 6  # all it may hold
    filled = catalog.fill(remote, 1, 0, 6)
    assert filled is not None

    clock.now_s = 1000.0
    if end == "expire":
        catalog.expire()
    elif end == "close":
        catalog.close_reservation(remote, 1)
    else:
        catalog.end(remote)
    assert holds.held_units == remote.held_units == 6
    if end == "end":
        catalog.end_filling(filled, has_arrived=False)
    else:
        assert not catalog.reserve(remote, 2, space, names("g", "h"))[0].blocks
        assert catalog.end_filling(filled) == 6
        catalog.close_reservation(remote, 1)
        assert len(catalog.reserve(remote, 3, space, names("g", "h"))[0].blocks) == 2
        catalog.end(remote)
    assert holds.held_units == remote.held_units == 0


def test_a_block_that_two_clients_of_a_tenant_hold_counts_once_for_it(
    catalog: Catalog, space: MemorySpace, local: ServedClient, remote: ServedClient
) -> None:
    """A scheduler's lease leaves room for the worker that loads what is leased."""
    store(catalog, space, "a", "b", "c", "d", "e")
    holds = limit_owner(catalog, 4)
    assert len(catalog.lease(local, 1, space, names(*"abcd")).blocks) == 4

    assert len(catalog.lease(remote, 1, space, names(*"abcde")).blocks) == 4
    assert catalog.lease(remote, 2, space, names("e")).ended is MatchEnd.LIMIT
    borrowed, is_all = catalog.borrow(space, names(*"abcd"))
    assert (len(borrowed), is_all) == (4, True)
    assert holds.held_units == 4

    catalog.release(local, 1)
    catalog.return_borrowed(borrowed)
    assert holds.held_units == 4
    catalog.release(remote, 1)
    assert holds.held_units == 0
    assert len(catalog.lease(local, 3, space, names("e")).blocks) == 1


def test_what_is_not_committed_is_given_back_with_its_reservation(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    catalog.reserve(local, 1, space, names(*"abc"))
    catalog.commit(local, 1, 1, 1)

    catalog.close_reservation(local, 1)

    assert catalog.contains(space, names(*"abc")) == b"\0\1\0"
    assert catalog.inventory.levels()["used_bytes"] == SLOT_ALIGN_BYTES


@pytest.mark.parametrize("act", [Catalog.fill, Catalog.commit])
def test_blocks_outside_a_reservation_are_refused(
    catalog: Catalog, space: MemorySpace, local: ServedClient, act: object
) -> None:
    catalog.reserve(local, 1, space, names("a", "b"))

    with pytest.raises(TierRefused, match=r"blocks 1\.\.3 are outside the reservation of 2"):
        act(catalog, local, 1, 1, 2)  # type: ignore[operator]


@pytest.mark.parametrize("act", [Catalog.fill, Catalog.commit])
def test_a_reservation_that_has_ended_takes_nothing(catalog: Catalog, local: ServedClient, act: object) -> None:
    assert act(catalog, local, 1, 0, 1) is None  # type: ignore[operator]


def test_the_share_for_pinned_blocks_is_a_limit(catalog: Catalog, space: MemorySpace) -> None:
    store(catalog, space, *"abc")

    with pytest.raises(TierRefused, match="pinned 2 of 3 blocks: at most 8KiB may be pinned"):
        catalog.pin(space, names(*"abc"))

    assert catalog.inventory.levels()["pinned_bytes"] == 2 * SLOT_ALIGN_BYTES
    assert catalog.unpin(space, names(*"abc")) == 2


def test_dropping_no_hashes_drops_the_namespace(catalog: Catalog, space: MemorySpace) -> None:
    store(catalog, space, *"abc")

    assert catalog.drop(space, names("a")) == 1
    assert catalog.drop(space, []) == 2
    assert catalog.inventory.levels()["used_bytes"] == 0


def test_namespaces_do_not_share_blocks(catalog: Catalog, space: MemorySpace) -> None:
    other = catalog.open(Namespace(bytes(32)), "other", 4096, 16)
    store(catalog, space, "a")

    assert catalog.contains(other, names("a")) == b"\0"


def test_a_namespace_has_one_block_size(catalog: Catalog, space: MemorySpace) -> None:
    with pytest.raises(TierRefused, match="has blocks of 4096 bytes here; this client's have 8192"):
        catalog.open(NAMESPACE, "model", 8192, 16)


def test_a_block_larger_than_the_memory_is_refused(catalog: Catalog) -> None:
    with pytest.raises(TierRefused, match="does not fit into this server's memory of 32KiB"):
        catalog.open(NAMESPACE, "huge", 8 * SLOT_ALIGN_BYTES + 1, 16)

    assert catalog.inventory.spaces() == []


def test_a_namespace_that_is_empty_and_unused_is_forgotten(catalog: Catalog, space: MemorySpace) -> None:
    catalog.close(space)

    assert catalog.inventory.spaces() == []
    assert catalog.open(NAMESPACE, "model", 8192, 16).block_bytes == 8192


def test_a_namespace_with_blocks_outlives_its_users(catalog: Catalog, space: MemorySpace) -> None:
    store(catalog, space, "a")
    catalog.close(space)

    assert catalog.contains(catalog.open(NAMESPACE, "model", 4096, 16), names("a")) == b"\1"


def test_a_namespace_is_forgotten_with_the_last_unfinished_block_in_it(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    catalog.reserve(local, 1, space, names("a"))
    catalog.close(space)
    assert len(catalog.inventory.spaces()) == 1

    catalog.close_reservation(local, 1)

    assert catalog.inventory.spaces() == []


def test_a_namespace_of_which_eviction_left_nothing_is_forgotten_in_time(clock: Clock) -> None:
    catalog = make_catalog(clock, leased_units=8)
    space = catalog.open(NAMESPACE, "model", 4096, 16)
    store(catalog, space, "a")
    catalog.close(space)
    store(catalog, catalog.open(Namespace(bytes(32)), "other", 8 * SLOT_ALIGN_BYTES, 16), "large")

    catalog.expire()

    assert [entry["name"] for entry in catalog.inventory.spaces()] == ["other"]
    assert catalog.inventory.levels()["evicted_blocks"] == 1


def test_a_namespace_is_described_for_people(catalog: Catalog, space: MemorySpace) -> None:
    store(catalog, space, "a", "b")

    assert catalog.inventory.spaces() == [
        {
            "namespace": NAMESPACE.hex(),
            "name": "model",
            "block_bytes": 4096,
            "block_tokens": 16,
            "blocks": 2,
            "used_bytes": 8192,
            "connections": 1,
            "disk_blocks": 0,
        }
    ]


def ended(catalog: Catalog, holder: ServedClient, space: MemorySpace, *texts: str) -> MatchEnd:
    outcome = catalog.lease(holder, 99, space, names(*texts))
    catalog.release(holder, 99)
    return outcome.ended


def test_a_block_that_was_evicted_is_told_from_one_that_was_never_stored(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    store(catalog, space, *"abcdef")
    store(catalog, space, *"ghij")

    assert ended(catalog, local, space, "f") is MatchEnd.EVICTED
    assert ended(catalog, local, space, "z") is MatchEnd.NEVER_STORED
    assert ended(catalog, local, space, "g", "e") is MatchEnd.EVICTED


def test_a_block_that_is_stored_again_is_no_longer_evicted(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    store(catalog, space, *"abcdef")
    store(catalog, space, *"ghij")
    store(catalog, space, "f")
    assert ended(catalog, local, space, "f") is MatchEnd.ALL

    catalog.drop(space, names("f"))
    assert ended(catalog, local, space, "f") is MatchEnd.NEVER_STORED


def test_what_a_user_drops_is_not_evicted(catalog: Catalog, space: MemorySpace, local: ServedClient) -> None:
    store(catalog, space, *"abcdef")
    catalog.drop(space, names("a"))
    assert ended(catalog, local, space, "a") is MatchEnd.NEVER_STORED

    catalog.drop(space, [])
    assert ended(catalog, local, space, "b") is MatchEnd.NEVER_STORED


def test_presence_says_where_a_block_is_and_uses_nothing(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    store(catalog, space, *"abcdef")
    store(catalog, space, *"ghij")
    catalog.pin(space, names("a"))
    catalog.reserve(local, 1, space, names("p"))
    before = catalog.inventory.levels()

    flags = catalog.presence(NAMESPACE, names("a", "g", "p", "f", "z"))

    assert list(flags) == [LISTED_MEMORY | LISTED_PINNED, LISTED_MEMORY, LISTED_PENDING, LISTED_EVICTED, 0]
    assert catalog.inventory.levels() == before


def test_presence_of_a_namespace_that_nobody_has_opened_opens_none(catalog: Catalog) -> None:
    assert catalog.presence(Namespace(bytes(32)), names("a", "b")) == bytes(2)
    assert catalog.inventory.levels()["namespaces"] == 0


def test_an_evicted_block_is_known_after_its_namespace_is_gone(
    catalog: Catalog, space: MemorySpace, local: ServedClient
) -> None:
    other = catalog.open(Namespace(bytes(32)), "other", 4096, 16)
    store(catalog, other, "a")
    catalog.close(other)
    store(catalog, space, *"bcdefg")
    store(catalog, space, *"hi")
    catalog.expire()

    assert catalog.inventory.levels()["namespaces"] == 1
    assert list(catalog.presence(Namespace(bytes(32)), names("a"))) == [LISTED_EVICTED]


def test_what_a_namespace_covers_is_known_as_long_as_the_namespace(catalog: Catalog) -> None:
    space = catalog.open(NAMESPACE, "model", 4096, 16, '{"salt":"a"}')
    assert catalog.open(NAMESPACE, "model", 4096, 16) is space  # another client knows the digest only
    assert [each["fields"] for each in catalog.inventory.spaces_with_fields()] == [{"salt": "a"}]

    catalog.close(space)
    catalog.close(space)
    catalog.expire()
    catalog.open(NAMESPACE, "model", 4096, 16)
    assert [each["fields"] for each in catalog.inventory.spaces_with_fields()] == [None]


def test_what_a_reader_says_of_a_namespace_binds_nobody(catalog: Catalog, local: ServedClient) -> None:
    wrong = catalog.open(NAMESPACE, "a reader's", 1, 1, '{"salt":"forged"}', may_write=False)
    right = catalog.open(NAMESPACE, "a reader's", 4096, 1, '{"salt":"forged"}', may_write=False)
    assert catalog.inventory.spaces() == []

    space = catalog.open(NAMESPACE, "model", 4096, 16)

    assert [(each["name"], each["block_tokens"]) for each in catalog.inventory.spaces()] == [("model", 16)]
    assert [each["fields"] for each in catalog.inventory.spaces_with_fields()] == [None]
    store(catalog, space, "a")
    assert [catalog.contains(each, names("a")) for each in (wrong, right, space)] == [b"\0", b"\1", b"\1"]
    with pytest.raises(TierRefused, match="this client's have 1"):
        catalog.open(NAMESPACE, "a reader's", 1, 1, may_write=False)
    for each in (wrong, right, space):
        catalog.close(each)
    catalog.drop(space, [])
    catalog.expire()
    assert catalog.open(NAMESPACE, "model", 8192, 16).block_bytes == 8192


def test_a_listing_in_parts_is_whole_and_says_when_it_ends(catalog, space, local):
    hashes = [BlockHash(bytes([number]) * 32) for number in range(5)]
    catalog.reserve(local, 1, space, hashes)
    catalog.commit(local, 1, 0, 4)  # the last one is not there yet

    parts = [catalog.inventory.list_blocks(space, first, 2) for first in (0, 2, 4, 1 << 40)]
    assert [listed for listed, _, _ in parts] == [hashes[:2], hashes[2:4], [], []]
    assert [flags for _, flags, _ in parts] == [bytes([LISTED_MEMORY] * 2)] * 2 + [b"", b""]
    assert [is_last for _, _, is_last in parts] == [False, False, True, True]


# --- waiting for the disk ---------------------------------------------------------------------------------------------


class SlowDisk(NoDisk):
    """Has every block, and reads none before the test says so."""

    def __init__(self) -> None:
        self.being_read: list[Block] = []

    def match(
        self, space: MemorySpace, hashes: Sequence[BlockHash], first: int, end: int
    ) -> tuple[DiskStore, list[StoredBlock]]:
        stored = [SimpleNamespace(hash=block_hash) for block_hash in hashes[first:end]]
        return cast(DiskStore, None), cast(list[StoredBlock], stored)

    def load(self, store: DiskStore, stored: Sequence[StoredBlock], blocks: Sequence[Block]) -> None:
        self.being_read += blocks


class Awaiting:
    """A client's lease of blocks that are on disk, and a thread that waits for some of them."""

    def __init__(self, count: int, wanted: int, timeout_s: float = 30.0) -> None:
        self.disk = SlowDisk()
        self.catalog = Catalog(
            8 * SLOT_ALIGN_BYTES,
            leased_bytes_per_client=8 * SLOT_ALIGN_BYTES,
            pinned_bytes=0,
            lease_timeout_s=60.0,
            disk=self.disk,
        )
        space = self.catalog.open(NAMESPACE, "model", 4096, 16)
        holder = self.catalog.join(b"waiting".ljust(16), LOCAL_PID)
        outcome = self.catalog.lease(holder, 1, space, names(*"abcdefgh"[:count]), is_lazy=False)
        assert len(outcome.blocks) == count
        assert outcome.num_ready == 0
        self.num_wakes = 0
        self.found: list[int | None] = []
        wait_for = self.catalog.blocks._wait_for

        def counted(block: Block, deadline: float) -> bool:
            self.num_wakes += 1
            return wait_for(block, deadline)

        self.catalog.blocks._wait_for = counted  # type: ignore[method-assign]
        self._thread = threading.Thread(
            target=lambda: self.found.append(self.catalog.await_lease(holder, 1, wanted, timeout_s))
        )
        self._thread.start()
        while not self.catalog.blocks._awaited and self._thread.is_alive():
            time.sleep(0.001)

    def end(self, position: int, *, arrived: bool = True) -> None:
        block = self.disk.being_read[position]
        assert isinstance(block, MemoryBlock)
        self.catalog.blocks.end_loading([block], [arrived])

    def result(self) -> int | None:
        self._thread.join(LIMIT_S)
        assert not self.catalog.blocks._awaited, "nobody waits any more"
        (found,) = self.found
        return found


def test_who_waits_for_blocks_from_disk_is_woken_by_the_last_of_them() -> None:
    awaiting = Awaiting(count=6, wanted=5)
    for position in (1, 0, 3, 2):
        awaiting.end(position)
    assert not awaiting.found
    awaiting.end(4)
    assert awaiting.result() == 5
    assert awaiting.num_wakes == 1


def test_who_waits_goes_on_waiting_for_those_that_come_after_the_last() -> None:
    awaiting = Awaiting(count=4, wanted=4)
    awaiting.end(3)
    awaiting.end(0)
    awaiting.end(2)
    awaiting.end(1)
    assert awaiting.result() == 4
    assert awaiting.num_wakes <= 3


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_block_that_cannot_be_read_ends_the_wait(lost: int) -> None:
    awaiting = Awaiting(count=4, wanted=4)
    for position in range(4):
        awaiting.end(position, arrived=position != lost)
    assert awaiting.result() == lost


def test_who_waits_too_long_is_told_what_has_come() -> None:
    awaiting = Awaiting(count=4, wanted=4, timeout_s=0.2)
    awaiting.end(0)
    awaiting.end(1)
    assert awaiting.result() == 2
    awaiting.end(2)
    awaiting.end(3)
