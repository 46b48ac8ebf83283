"""How much of a load comes together, by the memory that it passes through. Loads themselves: test_tier_traffic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.blocks.layout import KvLayout
from kvtier.engine.bringing import Bringing, _Unit
from kvtier.engine.copier import Copier
from kvtier.errors import TierUnavailable
from kvtier.memory.lease import BlockLease, Lease
from kvtier.memory.mapped import MappedArena
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.remote import RemoteTier, SharedMemoryTier

_LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float16")


def _bringing(num_host_blocks: int | None) -> Bringing:
    host = None if num_host_blocks is None else SimpleNamespace(num_blocks=num_host_blocks)
    return Bringing(cast(Hierarchy, SimpleNamespace(host=host)), cast(Copier, None), lambda: None)


class _Client:
    layout = _LAYOUT

    def __init__(self, num_slots: int | None) -> None:
        self._num_slots = num_slots

    @property
    def arena(self) -> object:
        if self._num_slots is None:
            raise TierUnavailable("it is away")
        return SimpleNamespace(nbytes=self._num_slots * _LAYOUT.slot_bytes)


def _client(num_slots: int | None) -> Any:
    return _Client(num_slots)


@pytest.mark.parametrize(
    ("num_slots", "expected"), [(10_000, 70), (70 * 48, 70), (480, 10), (48, 1), (5, 1), (None, 70)]
)
def test_units_are_a_small_part_of_a_servers_memory(num_slots: int | None, expected: int) -> None:
    assert _bringing(None)._unit_blocks(70, SharedMemoryTier(_client(num_slots))) == expected


@pytest.mark.parametrize(("num_blocks", "expected"), [(None, 70), (10_000, 70), (240, 10), (5, 1)])
def test_units_from_elsewhere_are_a_small_part_of_the_hosts_tier(num_blocks: int | None, expected: int) -> None:
    assert _bringing(num_blocks)._unit_blocks(70, RemoteTier(_client(None))) == expected


def test_units_fit_into_the_smaller_memory() -> None:
    assert _bringing(240)._unit_blocks(70, SharedMemoryTier(_client(960))) == 10
    assert _bringing(480)._unit_blocks(70, SharedMemoryTier(_client(480))) == 10


@pytest.mark.parametrize(
    ("num_loads", "arena_bytes", "expected"),
    [(1, 16 << 30, 4), (2, 16 << 30, 2), (3, 16 << 30, 1), (4, 16 << 30, 1), (40, 16 << 30, 1), (1, 512 << 20, 2)],
)
def test_loads_share_what_is_read_ahead(num_loads: int, arena_bytes: int, expected: int) -> None:
    bringing = _bringing(None)
    for _ in range(num_loads):
        bringing._count_bringing(1)
    assert bringing._num_ahead(_unit(_DiskLease(arena_bytes)), 64 << 20) == expected


def test_how_much_comes_from_elsewhere_is_not_counted_by_bytes() -> None:
    bringing = _bringing(None)
    bringing._count_bringing(1)
    assert not bringing._num_ahead(_unit(_DiskLease(None)), 64 << 20)
    assert not bringing._num_ahead(_unit(None), 64 << 20)


class _DiskLease(BlockLease):
    """Blocks that lie in an arena of this host, or in none."""

    def __init__(self, arena_bytes: int | None) -> None:
        self._arena_bytes = arena_bytes

    @property
    def arena(self) -> MappedArena | None:
        return None if self._arena_bytes is None else cast(MappedArena, SimpleNamespace(nbytes=self._arena_bytes))


def _unit(own_lease: BlockLease | None) -> _Unit:
    return _Unit(0, [], cast(Lease, own_lease), 0, own_lease=own_lease)
