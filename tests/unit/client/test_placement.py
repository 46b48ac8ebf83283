"""Where blocks of several servers go: balance, replicas, and little moved when servers come and go."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.client.placement import Placement

ADDRESSES = [f"tcp://cache-{number}:7070" for number in range(5)]
HASHES = [
    BlockHash(bytes([bucket >> 4, (bucket & 15) << 4]) + hashlib.sha256(str(bucket).encode()).digest()[2:])
    for bucket in range(4096)
]
"""One block in every bucket of the placement."""

PLACEMENT_DIGEST = "c21cc414179cb9f6f959fc47aa97cf176d4a3e8559da4a3430765e4410b0d54c"


def homes(addresses: list[str], replicas: int = 1, down: str | None = None) -> list[list[str]]:
    """The addresses that should hold each of `HASHES`, first choice first."""
    return homes_in(Placement(addresses, replicas), addresses, down)


def homes_in(placement: Placement, addresses: list[str], down: str | None = None) -> list[list[str]]:
    is_up = [address != down for address in addresses]
    return [[addresses[server] for server in placement.homes(block_hash, is_up)] for block_hash in HASHES]


@pytest.mark.parametrize("num_servers", [2, 3, 5])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_server_holds_its_share_within_a_few_percent(num_servers: int, replicas: int) -> None:
    counts = Counter(address for chosen in homes(ADDRESSES[:num_servers], replicas) for address in chosen)

    fair_share = len(HASHES) * replicas / num_servers
    assert set(counts) == set(ADDRESSES[:num_servers])
    assert all(abs(count - fair_share) < 0.08 * fair_share for count in counts.values())


def test_replicas_of_a_block_are_on_different_servers() -> None:
    chosen = homes(ADDRESSES, replicas=3)

    assert all(len(set(addresses)) == 3 for addresses in chosen)


def test_clients_that_name_the_servers_in_another_order_agree() -> None:
    assert homes(ADDRESSES, 2) == homes(ADDRESSES[::-1], 2)


def test_placement_is_the_same_on_every_machine_and_version() -> None:
    digest = hashlib.sha256(repr(homes(ADDRESSES, 2)).encode()).hexdigest()

    assert digest == PLACEMENT_DIGEST


def test_a_new_server_takes_its_share_and_nothing_else_moves() -> None:
    before = homes(ADDRESSES[:4])
    after = homes(ADDRESSES)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]

    assert all(new == [ADDRESSES[4]] for new in moved)
    assert len(moved) == pytest.approx(len(HASHES) / 5, rel=0.08)


def test_a_server_that_is_down_moves_only_its_own_blocks() -> None:
    placement = Placement(ADDRESSES, replicas=2)
    before = homes_in(placement, ADDRESSES)
    after = homes_in(placement, ADDRESSES, down=ADDRESSES[2])

    for old, new in zip(before, after, strict=True):
        assert ADDRESSES[2] not in new
        assert len(new) == 2
        assert new[: len(old) - (ADDRESSES[2] in old)] == [address for address in old if address != ADDRESSES[2]]


def test_the_blocks_of_a_server_that_is_down_are_spread_over_all_others() -> None:
    placement = Placement(ADDRESSES, replicas=1)
    before = homes_in(placement, ADDRESSES)
    after = homes_in(placement, ADDRESSES, down=ADDRESSES[0])
    heirs = Counter(new[0] for old, new in zip(before, after, strict=True) if old == [ADDRESSES[0]])

    assert set(heirs) == set(ADDRESSES[1:])
    assert max(heirs.values()) < 1.3 * min(heirs.values())


def test_a_server_that_comes_back_has_its_blocks_again() -> None:
    placement = Placement(ADDRESSES, replicas=2)
    before = homes_in(placement, ADDRESSES)
    homes_in(placement, ADDRESSES, down=ADDRESSES[1])

    assert homes_in(placement, ADDRESSES) == before


def test_without_a_word_on_who_is_up_all_servers_are() -> None:
    placement = Placement(ADDRESSES, replicas=2)

    assert [list(placement.homes(block_hash)) for block_hash in HASHES] == [
        placement.homes(block_hash, [True] * 5) for block_hash in HASHES
    ]
