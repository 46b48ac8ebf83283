"""The client that committed a block is told that the disk did not take it, whichever client was told before."""

from __future__ import annotations

from kvtier.blocks.block import Block, PrefixIndex
from kvtier.blocks.hashing import BlockHash
from kvtier.cacheserver.refusals import Refusals
from kvtier.cacheserver.served_client import ServedClient
from kvtier.cacheserver.tenants import Tenant

OWNER, ALICE, BOB = Tenant("", sees_all=True), Tenant("alice"), Tenant("bob")


def _client(refusals: Refusals, tenant: Tenant) -> ServedClient:
    client = ServedClient(b"", tenant, None, 0)
    refusals.start_reporting(client)
    return client


def _block(tenant: Tenant) -> Block:
    block = Block(0, 1)
    block.hash, block.index = BlockHash(bytes(32)), PrefixIndex(1, tenant.memory)
    return block


def test_a_tenant_hears_of_its_own_blocks_and_not_of_anothers() -> None:
    refusals = Refusals()
    alice, bob = _client(refusals, ALICE), _client(refusals, BOB)
    refusals.note(_block(ALICE), "no room", 3)
    refusals.note(_block(ALICE), "no room", 2)

    assert refusals.report(bob) == ""
    assert refusals.report(alice) == "5 blocks are not on disk: no room"
    assert refusals.report(alice) == ""


def test_each_client_of_a_tenant_hears_of_what_came_since_it_last_asked() -> None:
    refusals = Refusals()
    first, second = _client(refusals, ALICE), _client(refusals, ALICE)
    refusals.note(_block(ALICE), "no room")
    assert refusals.report(first)
    refusals.note(_block(ALICE), "too slow")
    assert refusals.report(first) == "1 blocks are not on disk: too slow"
    assert refusals.report(second) == "1 blocks are not on disk: no room; 1 blocks are not on disk: too slow"


def test_a_new_client_hears_of_what_nobody_was_told_of() -> None:
    refusals = Refusals()
    first = _client(refusals, ALICE)
    refusals.note(_block(ALICE), "no room")
    assert refusals.report(_client(refusals, ALICE))
    assert not refusals.report(_client(refusals, ALICE)), "somebody of the tenant knows"
    assert refusals.report(first)


def test_a_second_connection_does_not_make_a_client_forget() -> None:
    refusals = Refusals()
    client = _client(refusals, ALICE)
    refusals.note(_block(ALICE), "no room")
    assert refusals.report(_client(refusals, ALICE))
    refusals.start_reporting(client)
    assert refusals.report(client)


def test_the_owner_hears_of_everybodys() -> None:
    refusals = Refusals()
    owner = _client(refusals, OWNER)
    refusals.note(_block(ALICE), "no room")
    refusals.note(_block(BOB), "no room")
    assert refusals.report(owner) == "2 blocks are not on disk: no room"
