"""A client of several servers: what it refuses, and what it has of its namespace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from kvtier.blocks.match_end import MatchEnd
from kvtier.client.client import ClientOptions, SingleClient
from kvtier.client.replicated import ReplicatedClient
from kvtier.errors import ConfigError
from kvtier.observe.metrics import TierMetrics
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE
from kvtier.transport.address import parse_address

ADDRESSES = [f"tcp://cache-{number}:7070" for number in range(5)]

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
