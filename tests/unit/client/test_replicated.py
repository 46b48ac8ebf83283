"""Where blocks of several servers go: balance, replicas, and little moved when servers come and go."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.client.client import ClientOptions, SingleClient
from kvtier.client.replicated import ReplicatedClient
from kvtier.errors import ConfigError
from kvtier.observe.metrics import TierMetrics
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE
from kvtier.transport.address import parse_address

ADDRESSES = [f"tcp://cache-{number}:7070" for number in range(5)]
HASHES = [
    BlockHash(bytes([bucket >> 4, (bucket & 15) << 4]) + hashlib.sha256(str(bucket).encode()).digest()[2:])
    for bucket in range(4096)
]
"""One block in every bucket of the placement."""

PLACEMENT_DIGEST = "c21cc414179cb9f6f959fc47aa97cf176d4a3e8559da4a3430765e4410b0d54c"

MakeClient = Callable[..., ReplicatedClient]


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """Makes clients of servers by address. They connect with their first call only, and none is made here."""
    with contextlib.ExitStack() as stack:

        def make(addresses: list[str], replicas: int = 1) -> ReplicatedClient:
            metrics = TierMetrics()
            clients = [
                stack.enter_context(
                    contextlib.closing(
                        SingleClient(
                            parse_address(address),
                            layout=LAYOUT,
                            namespace=NAMESPACE,
                            name="",
                            options=ClientOptions(token=b"a long token"),
                            metrics=metrics,
                        )
                    )
                )
                for address in addresses
            ]
            return stack.enter_context(contextlib.closing(ReplicatedClient(clients, replicas, metrics)))

        yield make


def homes(client: ReplicatedClient, down: str | None = None) -> list[list[str]]:
    """The addresses that should hold each of `HASHES`, first choice first."""
    names = [str(single.address) for single in client.clients]
    is_up = [name != down for name in names]
    return [[names[server] for server in client._homes(block_hash, is_up)] for block_hash in HASHES]


@pytest.mark.parametrize("num_servers", [2, 3, 5])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_server_holds_its_share_within_a_few_percent(
    make_client: MakeClient, num_servers: int, replicas: int
) -> None:
    counts = Counter(address for chosen in homes(make_client(ADDRESSES[:num_servers], replicas)) for address in chosen)

    fair_share = len(HASHES) * replicas / num_servers
    assert set(counts) == set(ADDRESSES[:num_servers])
    assert all(abs(count - fair_share) < 0.08 * fair_share for count in counts.values())


def test_replicas_of_a_block_are_on_different_servers(make_client: MakeClient) -> None:
    chosen = homes(make_client(ADDRESSES, replicas=3))

    assert all(len(set(addresses)) == 3 for addresses in chosen)


def test_clients_that_name_the_servers_in_another_order_agree(make_client: MakeClient) -> None:
    assert homes(make_client(ADDRESSES, 2)) == homes(make_client(ADDRESSES[::-1], 2))


def test_placement_is_the_same_on_every_machine_and_version(make_client: MakeClient) -> None:
    digest = hashlib.sha256(repr(homes(make_client(ADDRESSES, 2))).encode()).hexdigest()

    assert digest == PLACEMENT_DIGEST


def test_a_new_server_takes_its_share_and_nothing_else_moves(make_client: MakeClient) -> None:
    before = homes(make_client(ADDRESSES[:4]))
    after = homes(make_client(ADDRESSES))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]

    assert all(new == [ADDRESSES[4]] for new in moved)
    assert len(moved) == pytest.approx(len(HASHES) / 5, rel=0.08)


def test_a_server_that_is_down_moves_only_its_own_blocks(make_client: MakeClient) -> None:
    client = make_client(ADDRESSES, replicas=2)
    before = homes(client)
    after = homes(client, down=ADDRESSES[2])

    for old, new in zip(before, after, strict=True):
        assert ADDRESSES[2] not in new
        assert len(new) == 2
        assert new[: len(old) - (ADDRESSES[2] in old)] == [address for address in old if address != ADDRESSES[2]]


def test_the_blocks_of_a_server_that_is_down_are_spread_over_all_others(make_client: MakeClient) -> None:
    client = make_client(ADDRESSES)
    before = homes(client)
    after = homes(client, down=ADDRESSES[0])
    heirs = Counter(new[0] for old, new in zip(before, after, strict=True) if old == [ADDRESSES[0]])

    assert set(heirs) == set(ADDRESSES[1:])
    assert max(heirs.values()) < 1.3 * min(heirs.values())


def test_a_server_that_comes_back_has_its_blocks_again(make_client: MakeClient) -> None:
    client = make_client(ADDRESSES, replicas=2)
    before = homes(client)
    homes(client, down=ADDRESSES[1])

    assert homes(client) == before


@pytest.mark.parametrize("replicas", [0, -1, 4])
def test_more_replicas_than_servers_or_none_are_refused(make_client: MakeClient, replicas: int) -> None:
    with pytest.raises(ConfigError, match="replicas must be from 1 to the number of servers, 3"):
        make_client(ADDRESSES[:3], replicas)


def test_a_server_named_twice_is_refused(make_client: MakeClient) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        make_client([ADDRESSES[0], ADDRESSES[1], ADDRESSES[0]])


def test_hashes_are_those_of_the_namespace(make_client: MakeClient) -> None:
    client = make_client(ADDRESSES[:2])

    assert client.hashes([1] * 40) == client.clients[1].hashes([1] * 40)
    assert client.layout == LAYOUT


def test_a_match_of_no_hashes_is_a_match_of_all_of_them(make_client: MakeClient) -> None:
    with make_client(ADDRESSES[:2]).match([]) as lease:
        assert (lease.num_blocks, lease.ended) == (0, MatchEnd.ALL)
