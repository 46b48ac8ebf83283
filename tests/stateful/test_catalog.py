"""The server's catalog against a plain model: clients near and far, their leases and reservations, a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvtier.blocks.block import Block, Presence
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.namespaces import MemorySpace
from kvtier.cacheserver.served_client import Filling, ServedClient
from kvtier.errors import TierRefused
from kvtier.wire.messages import match_end_of
from tests.support.examples import examples

NUM_UNITS = 14
LEASED_UNITS = 10
PINNED_UNITS = 6
LEASE_TIMEOUT_S = 10.0
BLOCK_BYTES = {Namespace(bytes([number]) * 32): size for number, size in enumerate((1000, 9000))}
NAMES = [BlockHash(bytes([number]) * 32) for number in range(5)]

prefixes = st.integers(1, len(NAMES)).map(lambda count: NAMES[:count])
prompts = prefixes | st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
namespaces = st.sampled_from(sorted(BLOCK_BYTES))
numbers = st.integers(1, 20)


@dataclass(eq=False)
class Hold:
    """One lease or reservation, as the model knows it."""

    blocks: list[Block]
    touched_at: float


@dataclass(eq=False)
class Client:
    """One holder, as the model knows it."""

    holder: ServedClient
    is_local: bool
    num_connections: int = 1
    is_gone: bool = False
    leases: dict[int, Hold] = field(default_factory=dict)
    reservations: dict[int, Hold] = field(default_factory=dict)
    filling: list[Hold] = field(default_factory=list)
    """A reservation for each frame whose bytes are arriving; it may have ended."""
    ended: set[int] = field(default_factory=set)

    def uses(self, number: int) -> bool:
        return number in self.leases or number in self.reservations

    @property
    def holds(self) -> list[Hold]:
        return [*self.leases.values(), *self.reservations.values()]

    @property
    def held_units(self) -> int:
        return sum(block.size for hold in {*self.holds, *self.filling} for block in hold.blocks)


class CatalogAgainstModel(RuleBasedStateMachine):
    """`loans` are references beside the holds: blocks being sent (`borrow`) or received into (`fill`).

    `evicted` are hashes that left without being dropped, with their namespaces.
    """

    clients = Bundle("clients")
    borrowed = Bundle("borrowed")
    filling = Bundle("filling")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.catalog = Catalog(
            NUM_UNITS * SLOT_ALIGN_BYTES + 100,
            leased_bytes_per_client=LEASED_UNITS * SLOT_ALIGN_BYTES,
            pinned_bytes=PINNED_UNITS * SLOT_ALIGN_BYTES,
            lease_timeout_s=LEASE_TIMEOUT_S,
            clock=lambda: self.now_s,
        )
        self.everyone: list[Client] = []
        self.opened: dict[Namespace, tuple[MemorySpace, int]] = {}
        self.loans: Counter[Block] = Counter()
        self.ready: set[tuple[Namespace, BlockHash]] = set()
        self.evicted: set[tuple[Namespace, BlockHash]] = set()

    # --- clients and namespaces ------------------------------------------------------------------------------------

    @initialize(target=clients)
    def begin(self) -> object:
        for namespace in BLOCK_BYTES:
            self._open(namespace)
        return multiple(self._join(is_local=True), self._join(is_local=False))

    @rule(target=clients, is_local=st.booleans())
    def join(self, is_local: bool) -> Client:
        return self._join(is_local)

    def _join(self, is_local: bool) -> Client:
        number = len(self.everyone)
        holder = self.catalog.join(number.to_bytes(16, "little"), 1000 + number if is_local else None)
        client = Client(holder, is_local)
        self.everyone.append(client)
        return client

    @rule(client=clients)
    def join_again(self, client: Client) -> None:
        holder = self.catalog.join(client.holder.id, client.holder.pid)
        if client.is_gone:
            assert holder is not client.holder
            self.catalog.end(holder)
        else:
            assert holder is client.holder
            client.num_connections += 1

    @rule(client=clients)
    def leave(self, client: Client) -> None:
        if not client.num_connections:
            return
        self.catalog.leave(client.holder)
        client.num_connections -= 1
        if not client.num_connections and (not client.is_local or not (client.leases or client.reservations)):
            self._gone(client)

    @precondition(lambda self: sum(not client.is_gone for client in self.everyone) > 1)
    @rule(client=consumes(clients))
    def end(self, client: Client) -> None:
        self.catalog.end(client.holder)
        self._gone(client)

    @rule(namespace=namespaces)
    def open(self, namespace: Namespace) -> None:
        self._open(namespace)

    def _open(self, namespace: Namespace) -> None:
        space = self.catalog.open(namespace, "name", BLOCK_BYTES[namespace], 16)
        known, num_users = self.opened.get(namespace, (space, 0))
        assert known is space
        self.opened[namespace] = (space, num_users + 1)

    @rule(namespace=namespaces)
    def close(self, namespace: Namespace) -> None:
        if namespace not in self.opened:
            return
        space, num_users = self.opened.pop(namespace)
        if num_users > 1:
            self.opened[namespace] = (space, num_users - 1)
        self.catalog.close(space)
        if num_users == 1:
            assert (namespace.hex() in self._listed()) == bool(len(space.index))

    # --- reading ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.opened)
    @rule(client=clients, number=numbers, hashes=prompts, data=st.data())
    def lease(self, client: Client, number: int, hashes: list[BlockHash], data: st.DataObject) -> None:
        space = self._space(data)
        if client.is_gone or client.uses(number):
            with pytest.raises(TierRefused):
                self.catalog.lease(client.holder, number, space, hashes)
            return
        num_ready = self._leading(space, hashes)
        room = (LEASED_UNITS - client.held_units) // space.index.block_units

        outcome = self.catalog.lease(client.holder, number, space, hashes)

        assert [block.hash for block in outcome.blocks] == hashes[: min(num_ready, room)]
        if num_ready == len(hashes):
            assert outcome.ended == (MatchEnd.ALL if len(outcome.blocks) == len(hashes) else MatchEnd.LIMIT)
        elif num_ready <= room:
            ender = hashes[num_ready]
            is_pending = space.index.presence(ender) is Presence.PENDING
            assert outcome.ended == (
                MatchEnd.PENDING
                if is_pending
                else MatchEnd.EVICTED
                if (space.namespace, ender) in self.evicted
                else MatchEnd.NEVER_STORED
            )
            flags = self.catalog.presence(space.namespace, [ender])[0]
            assert match_end_of(flags) == outcome.ended
        self._granted(client, client.leases, number, outcome.blocks)

    @rule(client=clients, data=st.data())
    def release(self, client: Client, data: st.DataObject) -> None:
        number = self._number(data, client.leases)
        self.catalog.release(client.holder, number)
        self._ended(client, client.leases, number)

    @precondition(lambda self: self.opened)
    @rule(target=borrowed, hashes=prompts, data=st.data())
    def borrow(self, hashes: list[BlockHash], data: st.DataObject) -> list[Block]:
        space = self._space(data)
        expected = hashes[: self._leading(space, hashes)]
        blocks, is_all = self.catalog.borrow(space, hashes)
        assert is_all
        assert [block.hash for block in blocks] == expected
        self.loans.update(blocks)
        return blocks

    @rule(blocks=consumes(borrowed))
    def give_back(self, blocks: list[Block]) -> None:
        self.catalog.return_borrowed(blocks)
        self.loans.subtract(blocks)

    # --- writing ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.opened)
    @rule(client=clients, number=numbers, hashes=prompts, data=st.data())
    def reserve(self, client: Client, number: int, hashes: list[BlockHash], data: st.DataObject) -> None:
        space = self._space(data)
        if client.is_gone or client.uses(number):
            with pytest.raises(TierRefused):
                self.catalog.reserve(client.holder, number, space, hashes)
            return
        num_absent = sum(space.index.presence(name) is Presence.MISS for name in hashes)
        room = (LEASED_UNITS - client.held_units) // space.index.block_units

        grant, reason = self.catalog.reserve(client.holder, number, space, hashes)

        assert len(grant.blocks) + grant.num_refused == num_absent
        assert len(grant.blocks) <= room
        assert bool(reason) == bool(grant.num_refused)
        if reason:
            assert ("may hold at most" in reason) == (len(grant.blocks) == room)
        self._granted(client, client.reservations, number, grant.blocks)

    @precondition(lambda self: self.opened)
    @rule(hashes=prompts, data=st.data())
    def store(self, hashes: list[BlockHash], data: st.DataObject) -> None:
        """All of it by a client that comes and goes."""
        space = self._space(data)
        writer = self.catalog.join(b"writer".ljust(16), 9)
        grant, _ = self.catalog.reserve(writer, 1, space, hashes)
        if grant.blocks:
            assert self.catalog.commit(writer, 1, 0, len(grant.blocks)) == len(grant.blocks)
        self.catalog.end(writer)
        assert all(space.index.presence(block.hash) is Presence.READY for block in grant.blocks)

    @rule(client=clients, first=st.integers(0, 2), count=st.integers(0, 3), data=st.data())
    def commit(self, client: Client, first: int, count: int, data: st.DataObject) -> None:
        number = self._number(data, client.reservations)
        hold = client.reservations.get(number)
        if hold is None:
            assert self.catalog.commit(client.holder, number, first, count) is None
        elif first + count > len(hold.blocks):
            with pytest.raises(TierRefused, match="outside the reservation"):
                self.catalog.commit(client.holder, number, first, count)
        else:
            committed = self.catalog.commit(client.holder, number, first, count)
            assert committed is not None
            assert committed <= count

    @rule(target=filling, client=clients, first=st.integers(0, 2), count=st.integers(1, 3), data=st.data())
    def fill(self, client: Client, first: int, count: int, data: st.DataObject) -> object:
        number = self._number(data, client.reservations)
        hold = client.reservations.get(number)
        if hold is None:
            assert self.catalog.fill(client.holder, number, first, count) is None
            return multiple()
        if first + count > len(hold.blocks):
            with pytest.raises(TierRefused, match="outside the reservation"):
                self.catalog.fill(client.holder, number, first, count)
            return multiple()
        filled = self.catalog.fill(client.holder, number, first, count)
        if any(block.is_ready for block in hold.blocks[first : first + count]):
            assert filled is None
            return multiple()
        assert filled is not None
        assert filled.blocks == hold.blocks[first : first + count]
        hold.touched_at = self.now_s
        client.filling.append(hold)
        self.loans.update(filled.blocks)
        return client, hold, filled

    @rule(fill=consumes(filling), has_arrived=st.booleans())
    def end_filling(self, fill: tuple[Client, Hold, Filling], has_arrived: bool) -> None:
        client, hold, filled = fill
        num_committed = self.catalog.end_filling(filled, has_arrived=has_arrived)
        assert num_committed <= len(filled.blocks) * has_arrived
        hold.touched_at = self.now_s
        client.filling.remove(hold)
        self.loans.subtract(filled.blocks)

    @rule(client=clients, data=st.data())
    def close_reservation(self, client: Client, data: st.DataObject) -> None:
        number = self._number(data, client.reservations)
        self.catalog.close_reservation(client.holder, number)
        self._ended(client, client.reservations, number)

    # --- keeping and forgetting ------------------------------------------------------------------------------------

    @precondition(lambda self: self.opened)
    @rule(hashes=prompts, data=st.data())
    def pin(self, hashes: list[BlockHash], data: st.DataObject) -> None:
        space = self._space(data)
        num_ready = sum(self.catalog.contains(space, hashes))
        pinned = {name for name in hashes if name in space.index.blocks and space.index.blocks[name].is_pinned}
        new_units = (num_ready - len(pinned)) * space.index.block_units
        if (
            self.catalog.inventory.levels()["pinned_bytes"] + new_units * SLOT_ALIGN_BYTES
            > PINNED_UNITS * SLOT_ALIGN_BYTES
        ):
            with pytest.raises(TierRefused, match=f"of {num_ready} blocks"):
                self.catalog.pin(space, hashes)
        else:
            assert self.catalog.pin(space, hashes) == num_ready

    @precondition(lambda self: self.opened)
    @rule(hashes=prompts, data=st.data())
    def unpin(self, hashes: list[BlockHash], data: st.DataObject) -> None:
        space = self._space(data)
        self.catalog.unpin(space, hashes)
        assert not any(space.index.blocks[name].is_pinned for name in hashes if name in space.index.blocks)

    @precondition(lambda self: self.opened)
    @rule(hashes=st.just([]) | prompts, data=st.data())
    def drop(self, hashes: list[BlockHash], data: st.DataObject) -> None:
        space = self._space(data)
        known = [name for name in hashes or NAMES if name in space.index.blocks]
        assert self.catalog.drop(space, hashes) == len(known)
        assert not any(name in space.index.blocks for name in known)
        self.ready -= {(space.namespace, name) for name in known}
        self.evicted -= {(space.namespace, name) for name in (*hashes, *known)}

    @rule(seconds=st.sampled_from([0.5, 5.0, LEASE_TIMEOUT_S, LEASE_TIMEOUT_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        num_late = 0
        for client in self.everyone:
            for holds in (client.leases, client.reservations):
                for number, hold in list(holds.items()):
                    is_late = hold.touched_at < self.now_s - LEASE_TIMEOUT_S and hold not in client.filling
                    if not client.is_local and is_late:
                        del holds[number]
                        num_late += 1

        assert self.catalog.expire() == num_late

        for space in self.catalog._namespaces:
            assert space.num_users or len(space.index), "a namespace that is empty and unused is still listed"

    @invariant()
    def what_was_ready_and_was_not_dropped_was_evicted(self) -> None:
        """Keeps the model; the law is checked by `lease`."""
        before = self.ready
        self.ready = {
            (space.namespace, block.hash)
            for space in self.catalog._namespaces
            for block in space.index.blocks.values()
            if block.is_ready
        }
        self.evicted |= before - self.ready

    # --- laws ------------------------------------------------------------------------------------------------------

    @invariant()
    def each_client_holds_what_it_was_granted_and_no_more_than_it_may(self) -> None:
        for client in self.everyone:
            holder = client.holder
            assert {number: hold.blocks for number, hold in holder.leases.items()} == {
                number: hold.blocks for number, hold in client.leases.items()
            }
            assert {number: hold.blocks for number, hold in holder.reservations.items()} == {
                number: hold.blocks for number, hold in client.reservations.items()
            }
            assert holder.held_units == client.held_units <= LEASED_UNITS
            assert holder.is_gone == client.is_gone

    @invariant()
    def references_are_those_of_holds_and_loans(self) -> None:
        expected = Counter(self.loans)
        for client in self.everyone:
            for hold in client.holds:
                expected.update(hold.blocks)
        blocks = [region for region in self.catalog._pool._space.regions() if isinstance(region, Block)]

        assert {block: block.num_refs for block in blocks if block.num_refs} == +expected

    @invariant()
    def levels_add_up(self) -> None:
        levels = self.catalog.inventory.levels()
        present = [client for client in self.everyone if not client.is_gone]
        indexed = [block for space in self.catalog._namespaces for block in space.index.blocks.values()]

        assert levels["used_bytes"] + levels["free_bytes"] == levels["memory_bytes"] == NUM_UNITS * SLOT_ALIGN_BYTES
        assert levels["pinned_bytes"] == sum(block.size for block in indexed if block.is_pinned) * SLOT_ALIGN_BYTES
        assert levels["pinned_bytes"] <= PINNED_UNITS * SLOT_ALIGN_BYTES
        assert levels["clients"] == len(present)
        assert levels["leases"] == sum(len(client.leases) for client in present)
        assert levels["reservations"] == sum(len(client.reservations) for client in present)
        assert levels["blocks"] == len(indexed)

    @invariant()
    def a_namespace_that_is_used_or_filled_is_listed(self) -> None:
        listed = self._listed()
        for namespace, (space, num_users) in self.opened.items():
            assert listed[namespace.hex()] == num_users == space.num_users
            assert self.catalog._namespaces.get(namespace) is space
        cached = {
            region.index
            for region in self.catalog._pool._space.regions()
            if isinstance(region, Block) and region.index.blocks.get(region.hash) is region
        }
        assert cached <= {space.index for space in self.catalog._namespaces}

    # --- the model -------------------------------------------------------------------------------------------------

    def _space(self, data: st.DataObject) -> MemorySpace:
        return self.opened[data.draw(st.sampled_from(sorted(self.opened)))][0]

    def _number(self, data: st.DataObject, holds: dict[int, Hold]) -> int:
        """Mostly one that is in use."""
        return data.draw(st.sampled_from([*holds, *holds, *holds, data.draw(numbers)]))

    def _listed(self) -> dict[object, object]:
        return {entry["namespace"]: entry["connections"] for entry in self.catalog.inventory.spaces()}

    def _leading(self, space: MemorySpace, hashes: list[BlockHash]) -> int:
        return (self.catalog.contains(space, hashes) + b"\0").index(0)

    def _granted(self, client: Client, holds: dict[int, Hold], number: int, blocks: list[Block]) -> None:
        if not blocks:
            return
        if number in client.ended:  # its end came first: nothing may stay held
            client.ended.remove(number)
        else:
            holds[number] = Hold(blocks, self.now_s)

    def _ended(self, client: Client, holds: dict[int, Hold], number: int) -> None:
        if holds.pop(number, None) is None:
            client.ended.add(number)

    def _gone(self, client: Client) -> None:
        client.leases.clear()
        client.reservations.clear()
        client.is_gone = True


TestCatalogAgainstModel = CatalogAgainstModel.TestCase
TestCatalogAgainstModel.settings = settings(max_examples=examples(200), stateful_step_count=60, deadline=None)
