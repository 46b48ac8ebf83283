"""Requests about many blocks: a few at a time, and the same outcome as at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.blocks.hashing import HASH_BYTES, BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Grant
from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.client_requests import ClientRequests
from kvtier.cacheserver.connection_context import ConnectionContext
from kvtier.cacheserver.persistence import NO_DISK, NoDisk
from kvtier.cacheserver.pieces import FEW_HASHES, PIECE_HASHES, in_pieces
from kvtier.transport.stream import Stream
from kvtier.wire import messages as wire
from kvtier.wire.messages import Reply, Request

NUM_BLOCKS = 5000
HASHES = [BlockHash(number.to_bytes(HASH_BYTES, "little")) for number in range(1, NUM_BLOCKS + 1)]
JOINED = b"".join(HASHES)


class Outbox:
    """The stream of a connection that only answers."""

    def __init__(self) -> None:
        self.sent: list[Reply] = []

    def send(self, number: int, reply: Reply) -> None:
        self.sent.append(reply)


class VerifyingDisk(NoDisk):
    def __init__(self) -> None:
        self.verified: list[int] = []

    def verify(self, space: object, hashes: Any) -> list[bool]:
        self.verified.append(len(hashes))
        return [block_hash != HASHES[4000] for block_hash in hashes]


class CountingLock:
    """How many hashes the catalog's blocks and pool were asked about under one hold of the lock."""

    def __init__(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.num_calls = 0
        for owner, name in (
            (catalog.blocks, "drop"),
            (catalog.blocks, "reserve"),
            (catalog.blocks, "store_again"),
            (catalog.blocks.pool, "pin"),
            (catalog.blocks.pool, "unpin"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, act: Callable[..., object]) -> Callable[..., object]:
        def counted(space: object, hashes: list[BlockHash], *args: object, **settings: object) -> object:
            self.most = max(self.most, len(hashes))
            self.num_calls += 1
            return act(space, hashes, *args, **settings)

        return counted


class Server:
    """One client of a catalog with room for 6,000 blocks, of which 4,500 may be pinned."""

    def __init__(self, disk: NoDisk = NO_DISK) -> None:
        self.catalog = Catalog(
            6000 * SLOT_ALIGN_BYTES,
            leased_bytes_per_client=6000 * SLOT_ALIGN_BYTES,
            pinned_bytes=4500 * SLOT_ALIGN_BYTES,
            lease_timeout_s=60.0,
        )
        context = SimpleNamespace(
            catalog=self.catalog, disk=disk, bulk=threading.Lock(), metrics=_Anything(), traffic=_Anything()
        )
        self.client = self.catalog.join(bytes(16), None)
        self.outbox = Outbox()
        self.requests = ClientRequests(cast(ConnectionContext, context), self.client, cast(Stream, self.outbox))
        opened = self.catalog.open(Namespace(bytes(32)), "", SLOT_ALIGN_BYTES, 16)
        self.requests._spaces[opened.number] = opened
        self.number = opened.number
        self.opened = opened

    def ask(self, request: Request) -> Reply:
        self.requests.answer(1, request)
        return self.outbox.sent.pop()

    def store(self) -> wire.Reserved:
        reply = self.ask(wire.ReserveRequest(self.number, JOINED, 7))
        assert isinstance(reply, wire.Reserved)
        self.catalog.commit(self.client, 7, 0, len(reply.offsets) // 8)
        self.catalog.close_reservation(self.client, 7)
        return reply


class _Anything:
    """Counts nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self


@pytest.fixture
def server() -> Server:
    return Server()


def test_few_are_asked_about_at_once_and_many_in_turns() -> None:
    turn = threading.Lock()
    taken = []

    def count(hashes: list[BlockHash]) -> int:
        taken.append(turn.locked())
        return len(hashes)

    assert in_pieces(turn, count, JOINED[: FEW_HASHES * HASH_BYTES]) == [FEW_HASHES]
    pieces = in_pieces(turn, count, JOINED)
    assert (sum(pieces), max(pieces)) == (NUM_BLOCKS, PIECE_HASHES)
    assert taken == [False] + [True] * len(pieces)
    assert not turn.locked()


def test_a_large_reservation_is_one_made_in_steps(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = CountingLock(server.catalog, monkeypatch)

    reply = server.store()

    assert lock.most <= 1024
    assert lock.num_calls == 5
    assert len(set(wire.unpack_numbers(reply.offsets))) == NUM_BLOCKS
    assert list(wire.unpack_numbers(reply.positions)) == list(range(NUM_BLOCKS))
    assert server.catalog.contains(server.opened, HASHES) == b"\1" * NUM_BLOCKS
    assert server.client.held_units == 0


def test_a_large_reservation_without_room_for_all_says_why_and_holds_what_it_got(server: Server) -> None:
    server.client.max_held_units = 4200

    reply = server.ask(wire.ReserveRequest(server.number, JOINED, 7))

    assert isinstance(reply, wire.Reserved)
    assert (len(reply.offsets) // 8, reply.num_refused) == (4200, 800)
    assert "may hold at most" in reply.reason
    assert server.client.held_units == len(server.client.reservations[7].blocks) == 4200
    server.catalog.end(server.client)
    assert server.catalog.inventory.levels()["held_bytes"] == 0


def test_a_large_reservation_that_ends_meanwhile_holds_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    act, num_calls = server.catalog.reserve, []

    def reserve(*args: Any, **kwargs: Any) -> object:
        num_calls.append(1)
        if len(num_calls) == 3:
            server.catalog.close_reservation(server.client, 7)  # by another connection of the client
        return act(*args, **kwargs)

    monkeypatch.setattr(server.catalog, "reserve", reserve)
    server.ask(wire.ReserveRequest(server.number, JOINED, 7))

    assert len(num_calls) == 5
    assert server.client.held_units == 0
    assert server.catalog.inventory.levels()["held_bytes"] == 0


def test_the_beginning_of_a_large_prompt_stays_warmer_than_its_end(server: Server) -> None:
    server.store()
    server.ask(wire.ReserveRequest(server.number, JOINED, 8))  # all are there

    others = b"".join(BlockHash(bytes(28) + number.to_bytes(4, "big")) for number in range(1, 1501))
    server.ask(wire.ReserveRequest(server.number, others, 9))

    there = server.catalog.contains(server.opened, HASHES)
    assert there == b"\1" * 4500 + b"\0" * 500


def test_many_are_pinned_unpinned_and_dropped_a_few_at_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.store()
    lock = CountingLock(server.catalog, monkeypatch)

    refused = server.ask(wire.PinRequest(server.number, JOINED, True))
    assert isinstance(refused, wire.Failure)
    assert "after 4352 others, pinned 148 of 256 blocks" in refused.sentence
    assert server.ask(wire.PinRequest(server.number, JOINED, False)) == wire.Counted(4500)
    assert server.ask(wire.DropRequest(server.number, JOINED[: 2000 * HASH_BYTES])) == wire.Counted(2000)
    assert lock.most == PIECE_HASHES


def test_all_of_a_namespace_is_dropped_a_few_at_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.store()
    lock = CountingLock(server.catalog, monkeypatch)

    assert server.ask(wire.DropRequest(server.number, b"")) == wire.Counted(NUM_BLOCKS)
    assert lock.most == PIECE_HASHES
    assert server.catalog.inventory.levels()["blocks"] == 0


def test_many_are_verified_a_few_at_a_time() -> None:
    disk = VerifyingDisk()
    reply = Server(disk).ask(wire.VerifyRequest(1, JOINED))

    assert isinstance(reply, wire.Contained)
    assert [position for position, is_whole in enumerate(reply.flags) if not is_whole] == [4000]
    assert (sum(disk.verified), max(disk.verified)) == (NUM_BLOCKS, PIECE_HASHES)


@pytest.mark.parametrize("takes_declines", [True, False])
def test_only_a_client_that_takes_declines_may_be_declined(
    takes_declines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    server.requests = ClientRequests(
        server.requests._context, server.client, server.requests._stream, takes_declines=takes_declines
    )
    server.requests._spaces[server.number] = server.opened
    pool = server.catalog.blocks.pool
    reserve, seen = pool.reserve, list[object]()

    def spied(*args: Any, **settings: Any) -> Grant:
        seen.append(settings["may_decline"])
        return reserve(*args, **settings)

    monkeypatch.setattr(pool, "reserve", spied)
    server.store()

    assert set(seen) == {takes_declines}
