"""A running server says what caches of other sizes would hit, and hands out prompts to a recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.errors import TierRefused
from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.waiting import CALL_S, wait_until

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_tokens=4)
PROMPTS = [range(400), range(400, 800), range(400), range(1000, 1400)]


def connect(server: ServerProcess, token: str = "", *, tcp: bool = False) -> CacheClient:
    return kvtier.connect(
        server.tcp if tcp else server.unix,
        token=token or server.token,
        layout=LAYOUT,
        namespace=NamespaceFields(layout=LAYOUT, weights="curve"),
        timeout_s=CALL_S,
    )


def ask(client: CacheClient, tokens: range) -> None:
    hashes = client.hashes(tokens)
    with client.match_lazily(hashes):
        pass
    client.get(hashes, [bytearray(LAYOUT.block_bytes) for _ in hashes])
    client.set(hashes, [bytes(LAYOUT.block_bytes) for _ in hashes])


def noted_curve(client: CacheClient, num_requests: int) -> dict[str, Any]:
    """A request is noted just after its answer."""
    wait_until(lambda: client.miss_curve()["requests"] == num_requests)
    return client.miss_curve()


@pytest.mark.slow
@pytest.mark.parametrize("tcp", [False, True])
def test_each_prompt_is_asked_for_once_and_hits_where_it_would_fit(tcp: bool) -> None:
    with cache_server(tcp=tcp) as server, connect(server, tcp=tcp) as client:
        for tokens in PROMPTS:
            ask(client, tokens)

        curve = noted_curve(client, 4)
        assert curve["asked_tokens"] == 1600
        shares = dict(curve["points"])
        assert shares[64 * LAYOUT.block_bytes] == 0
        assert shares[256 * LAYOUT.block_bytes] == pytest.approx(0.25)


def test_a_prompt_that_waits_for_the_limit_on_leases_is_noted_once() -> None:
    """An engine asks for it again and again, over any connection, until it gets a lease."""
    with cache_server(memory=str(200 * LAYOUT.slot_bytes)) as server, connect(server) as client:
        held, waiting = client.hashes(PROMPTS[0]), client.hashes(PROMPTS[1])
        for hashes in (held, waiting):
            for first in range(0, 60, 30):
                client.set(hashes[first : first + 30], [bytes(LAYOUT.block_bytes)] * 30)
        for _ in range(2):
            with client.match_lazily(held[:60]):
                for _ in range(5):
                    with client.match_lazily(waiting[:60]) as lease:
                        assert (lease.num_blocks, lease.ended) == (40, MatchEnd.LIMIT)
            with client.match_lazily(waiting[:60]) as lease:
                assert lease.num_blocks == 60

        noted_curve(client, 4)


@pytest.mark.slow
def test_prompts_are_handed_to_a_recorder() -> None:
    with cache_server() as server, connect(server) as client:
        assert client.asked_prompts(1) == {"first": 1, "prompts": []}
        ask(client, PROMPTS[0])
        noted_curve(client, 1)

        fetched: dict[str, Any] = client.asked_prompts(1)
        assert [prompt[2] for prompt in fetched["prompts"]] == [4]
        assert client.asked_prompts(2) == {"first": 2, "prompts": []}


@pytest.mark.slow
def test_a_tenant_is_not_told_what_others_ask_for(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[alice]\ntokens = ["alices-token-of-some-length"]\n')
    with (
        cache_server("--tenants", str(file), tcp=True) as server,
        connect(server, "alices-token-of-some-length", tcp=True) as client,
        pytest.raises(TierRefused, match="admins"),
    ):
        client.miss_curve()
