"""Drops that wait for the disk are bounded, and none is forgotten."""

from __future__ import annotations

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver import later_drops
from kvtier.cacheserver.later_drops import LaterDrops
from kvtier.cacheserver.namespaces import MemorySpace
from kvtier.cacheserver.tenants import Tenant


def space_of(number: int) -> MemorySpace:
    namespace = Namespace(bytes([number]) * 32)
    return MemorySpace(number, Tenant("", sees_all=True), namespace, namespace, "model", SLOT_ALIGN_BYTES, 16)


def hashes_of(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "big")) for number in numbers]


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> LaterDrops:
    """For five blocks."""
    monkeypatch.setattr(later_drops, "MAX_HASHES", 5)
    return LaterDrops()


def test_what_was_added_is_taken_once(drops: LaterDrops) -> None:
    one, other = space_of(1), space_of(2)
    drops.add(one, hashes_of(1, 2))
    drops.add(other, hashes_of(1))
    drops.add(one, hashes_of(2, 3))

    assert drops.take() == [(one, hashes_of(1, 2, 3)), (other, hashes_of(1))]
    assert drops.take() == []


def test_a_namespace_with_too_many_is_dropped_whole_and_leaves_room_for_others(drops: LaterDrops) -> None:
    one, other = space_of(1), space_of(2)
    drops.add(one, hashes_of(1, 2, 3))
    drops.add(one, hashes_of(4, 5, 6))
    drops.add(other, hashes_of(1, 2, 3, 4))
    drops.add(one, hashes_of(7))

    assert drops.take() == [(one, None), (other, hashes_of(1, 2, 3, 4))]


def test_a_namespace_that_is_dropped_whole_stays_so(drops: LaterDrops) -> None:
    one = space_of(1)
    drops.add(one, hashes_of(1))
    drops.add(one, None)
    drops.add(one, hashes_of(2))

    assert drops.take() == [(one, None)]
