"""Retention over the wire: what a client has retained outlives the others' floods, within budgets, for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, TierRefused
from kvtier.transport.address import TcpAddress, UnixAddress
from kvtier.wire import messages as wire
from kvtier.wire.session import RETENTION, ServerSession
from tests.support.actors import LAYOUT, NAMESPACE, chain, payloads
from tests.support.waiting import CALL_S

BLOCKS = 64
HOUR_S = 3600.0
PREFIX = chain(1, 8)


@contextmanager
def running(place: Path, **settings: object) -> Iterator[tuple[CacheServer, CacheClient]]:
    fields = {"memory_bytes": BLOCKS * LAYOUT.slot_bytes, "unix": UnixAddress(str(place / "socket"))}
    config = msgspec.convert(fields | settings, CacheServerConfig)
    with ExitStack() as stack:
        server = CacheServer(config)
        stack.callback(server.close)
        yield server, stack.enter_context(connected(f"unix:{place / 'socket'}"))


def connected(address: str, token: str | None = None) -> CacheClient:
    return kvtier.connect(address, token=token, layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S)


def store(client: CacheClient, hashes: list[BlockHash]) -> None:
    client.set(hashes, payloads(hashes))


def flood(client: CacheClient) -> None:
    for seed in range(1000, 1000 + 4 * BLOCKS // 16):
        store(client, chain(seed, 16))


def test_a_retained_prefix_outlives_a_flood(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        store(client, PREFIX)
        granted = client.retain(PREFIX, HOUR_S)
        flood(client)

        assert (granted.num_blocks, granted.ttl_s, granted.reason) == (8, HOUR_S, "")
        assert client.contains(PREFIX) == [True] * 8
        assert client.stats()["retained_bytes"] == 8 * LAYOUT.slot_bytes


def test_a_prefix_may_be_retained_before_it_is_stored(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        assert client.retain(PREFIX, HOUR_S).num_blocks == 8
        store(client, PREFIX)
        flood(client)

        assert client.contains(PREFIX) == [True] * 8


def test_a_budget_bounds_all_clients_and_each_account(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        one = client.retain(chain(2, 30), HOUR_S, account="alice", account_bytes=4 * LAYOUT.slot_bytes)
        rest = client.retain(chain(3, 30), HOUR_S, account="bob")

        assert one.num_blocks == 4
        assert one.reason == "retained 4 of 30 blocks: the budget for retained blocks is used up"
        assert rest.num_blocks == BLOCKS // 4 - 4
        assert client.retain(chain(4, 2), HOUR_S, account="bob").num_blocks == 0
        assert client.retain(chain(4, 2), HOUR_S, account="bob", priority=60).num_blocks == 2
        assert client.stats()["retained_bytes"] == BLOCKS // 4 * LAYOUT.slot_bytes


def test_a_retention_ends_when_its_account_says_so(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        store(client, PREFIX)
        client.retain(PREFIX, HOUR_S)

        assert client.retain(PREFIX, 0, account="another").num_blocks == 0
        assert client.retain(PREFIX, 0).num_blocks == 8
        flood(client)
        assert client.contains(PREFIX) == [False] * 8


def test_a_server_grants_no_longer_than_it_may(tmp_path: Path) -> None:
    with running(tmp_path, max_retention_s=60.0) as (_, client):
        granted = client.retain(PREFIX, HOUR_S)

        assert (granted.num_blocks, granted.ttl_s) == (8, 60.0)
        assert granted.reason == "this server retains blocks for at most 60 s"


def test_a_server_without_a_budget_retains_nothing(tmp_path: Path) -> None:
    with running(tmp_path, max_retained_share=0.0) as (_, client):
        assert client.retain(PREFIX, HOUR_S).num_blocks == 0


@pytest.mark.parametrize(
    ("ttl_s", "priority", "account", "account_bytes"),
    [
        (-1.0, 50, "", 0),
        (float("nan"), 50, "", 0),
        (float("inf"), 50, "", 0),
        (1e9, 50, "", 0),
        (60.0, 0, "", 0),
        (60.0, 101, "", 0),
        (60.0, 50, "a" * 129, 0),
        (60.0, 50, "", -1),
    ],
)
def test_what_is_out_of_range_is_refused_by_the_client_itself(
    tmp_path: Path, ttl_s: float, priority: int, account: str, account_bytes: int
) -> None:
    with running(tmp_path) as (_, client):
        with pytest.raises(ConfigError):
            client.retain(PREFIX, ttl_s, priority=priority, account=account, account_bytes=account_bytes)
        client.ping()


def test_tenants_have_budgets_of_their_own(tmp_path: Path) -> None:
    quota = 16 * LAYOUT.slot_bytes
    (tmp_path / "tenants.toml").write_text(
        f'[alice]\ntoken = "the secret of alice"\nread_token = "alice reads"\nmemory = {quota}\n'
        f'[bob]\ntoken = "the secret of bob"\nmemory = {quota}\nretained_share = 0.5\n'
        '[carol]\ntoken = "the secret of carol"\n'
    )
    settings = {"tcp": TcpAddress("127.0.0.1", 0), "tenants_file": tmp_path / "tenants.toml"}
    with running(tmp_path, **settings) as (server, owner), ExitStack() as stack:
        address = f"tcp://127.0.0.1:{server.tcp_port}"
        alice, bob, carol, reader = (
            stack.enter_context(connected(address, token))
            for token in ("the secret of alice", "the secret of bob", "the secret of carol", "alice reads")
        )
        store(alice, PREFIX)

        assert alice.retain(PREFIX, HOUR_S).num_blocks == 4
        assert bob.retain(PREFIX, HOUR_S).num_blocks == 8
        assert carol.retain(PREFIX, HOUR_S).num_blocks == 0
        for client in (alice, bob, carol, owner):
            flood(client)
        assert alice.contains(PREFIX) == [True] * 4 + [False] * 4
        assert alice.stats()["retained_bytes"] == 4 * LAYOUT.slot_bytes
        with pytest.raises(TierRefused, match="may only read"):
            reader.retain(PREFIX, HOUR_S)


def test_what_is_retained_stays_on_disk_until_a_restart(tmp_path: Path) -> None:
    disk = {"folder": tmp_path / "disk", "file_bytes": 8 << 20}
    num_stored = (8 << 20) // LAYOUT.slot_bytes
    with running(tmp_path, **disk) as (_, client):
        store(client, PREFIX)
        client.flush()
        assert client.retain(PREFIX, HOUR_S).num_blocks == 8
        for seed in range(1000, 1000 + 2 * num_stored // 16):
            store(client, chain(seed, 16))
            client.flush()
        client.retain(PREFIX, 0)  # of memory and disk
        assert client.contains(PREFIX) == [True] * 8
    with running(tmp_path, **disk) as (_, client):
        assert client.contains(PREFIX) == [True] * 8
        assert client.stats()["retained_bytes"] == 0


def test_with_a_server_of_before_nothing_is_sent_and_the_sentence_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shake = ServerSession.shake

    def shake_as_before(self: ServerSession, message: wire.Message) -> wire.Handshake:
        if isinstance(message, wire.Hello):
            message = msgspec.structs.replace(message, client=message.client.replace(RETENTION, ""))
        return shake(self, message)

    monkeypatch.setattr(ServerSession, "shake", shake_as_before)
    with running(tmp_path) as (_, client):
        with pytest.raises(TierRefused, match="knows no retention"):
            client.retain(PREFIX, HOUR_S)
        store(client, PREFIX)
        assert client.contains(PREFIX) == [True] * 8
