"""What memory costs and what it gives: the budget is usable whatever was in it before, an empty arena costs nothing."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Iterator

import pytest

import kvtier
from kvtier import BlockHash, KvLayout, Namespace, block_hashes
from kvtier.blocks.hashing import join_hashes, split_hashes
from kvtier.cacheserver.catalog import Catalog
from kvtier.client.client import CacheClient
from kvtier.testing.servers import cache_server
from tests.support.waiting import CALL_S

_MODEL_A = KvLayout(layers=28, kv_heads=4, head_dim=128)
_MODEL_B = KvLayout(layers=32, kv_heads=8, head_dim=128)
_NAMESPACE_A = Namespace(b"A" * 32)
_NAMESPACE_B = Namespace(b"B" * 32)
_BUDGET = 512 << 20


def test_the_layouts_are_those_of_the_issue() -> None:
    assert (_MODEL_A.block_bytes, _MODEL_B.block_bytes) == (896 << 10, 2 << 20)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nine_tenths_of_the_budget_are_usable_after_another_model_with_a_twentieth_leased(seed: int) -> None:
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        flags = (
            "--max-leased",
            "512MiB",
            "--eviction",
            "lru",
        )  # room is what counts here, not which blocks are worth it
        server = stack.enter_context(cache_server(*flags, memory="512MiB"))
        a = stack.enter_context(kvtier.connect(server.unix, layout=_MODEL_A, namespace=_NAMESPACE_A, timeout_s=CALL_S))
        b = stack.enter_context(kvtier.connect(server.unix, layout=_MODEL_B, namespace=_NAMESPACE_B, timeout_s=CALL_S))

        _fill(a, seed=1)
        _check_usable(a, leased_bytes=0)
        with _leased(a, rng) as leased_bytes:
            _fill(b, seed=2)
            _check_usable(b, leased_bytes)
        with _leased(b, rng) as leased_bytes:
            _fill(a, seed=3)
            _check_usable(a, leased_bytes)


def _prompt(client: CacheClient, seed: int) -> list[BlockHash]:
    """Blocks for twice the budget."""
    num_blocks = 2 * _BUDGET // client.layout.slot_bytes
    return client.hashes([seed] * (num_blocks * client.layout.block_tokens))


def _fill(client: CacheClient, seed: int) -> None:
    """Commit twice what the arena holds; the bytes do not matter here."""
    hashes = _prompt(client, seed)
    for first in range(0, len(hashes), 16):
        with client.reserve(hashes[first : first + 16]) as reservation:
            reservation.commit()


def _check_usable(client: CacheClient, leased_bytes: int) -> None:
    stats = client.stats()
    assert stats["used_bytes"] >= 0.9 * _BUDGET  # type: ignore[operator]
    spaces = stats["namespaces"]
    assert isinstance(spaces, list)
    own_bytes = next(each["used_bytes"] for each in spaces if each["block_bytes"] == client.layout.block_bytes)
    assert own_bytes + leased_bytes >= 0.9 * _BUDGET, "room that blocks of the other model still take does not count"


@contextlib.contextmanager
def _leased(client: CacheClient, rng: random.Random) -> Iterator[int]:
    """Lease a twentieth of what the client has in the arena, at random places."""
    asked = [block_hash for seed in (1, 2, 3) for block_hash in _prompt(client, seed)]
    cached = [block_hash for block_hash, is_in in zip(asked, client.contains(asked), strict=True) if is_in]
    assert len(cached) * client.layout.slot_bytes >= 0.85 * _BUDGET
    with contextlib.ExitStack() as stack:
        chosen = rng.sample(cached, len(cached) // 20)
        leases = [stack.enter_context(client.match([block_hash])) for block_hash in chosen]
        assert all(lease.num_blocks == 1 for lease in leases)
        yield len(chosen) * client.layout.slot_bytes


def _machine_bytes() -> int:
    with open("/proc/meminfo") as file:
        return int(file.readline().split()[1]) * 1024


@pytest.mark.skipif(_machine_bytes() < 9 << 30, reason="needs a machine with 9 GiB of memory")
def test_an_empty_arena_of_8_gib_costs_less_than_100_mib() -> None:
    with (
        cache_server("--metrics", "127.0.0.1:0", memory="8GiB", tcp=True) as server,
        kvtier.connect(server.unix, layout=_MODEL_A, namespace=_NAMESPACE_A, timeout_s=CALL_S) as client,
    ):
        assert client.stats()["memory_bytes"] == 8 << 30
        assert server.resident_bytes() < 100 << 20


@pytest.mark.slow
def test_a_stored_block_costs_less_than_500_bytes_of_heap() -> None:
    num_blocks = 100_000
    catalog = Catalog(
        num_blocks * 4096, leased_bytes_per_client=num_blocks * 4096, pinned_bytes=0, lease_timeout_s=60.0
    )
    holder = catalog.join(bytes(16), 1)
    space = catalog.open(_NAMESPACE_A, "", 4096, 16)
    joined = join_hashes(block_hashes(_NAMESPACE_A, range(num_blocks), 1))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number, first in enumerate(range(0, num_blocks, 1000)):
            hashes = split_hashes(joined[32 * first : 32 * (first + 1000)])
            grant, _ = catalog.reserve(holder, number, space, hashes)
            assert catalog.commit(holder, number, 0, len(grant.blocks)) == 1000
            catalog.close_reservation(holder, number)
        del hashes, grant
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert catalog.inventory.levels()["blocks"] == num_blocks
    assert (after - before) / num_blocks < 500
