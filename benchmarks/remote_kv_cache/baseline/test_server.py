"""The cache server against one memcpy, a bare socket loop and other systems: 512 blocks, server in its own process.

    python -m benchmarks.remote_kv_cache.baseline.test_server [--quick] [--json FILE]

Every number comes with its baseline from the same run; benchmarks/README.md says how to read them.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import random
import statistics
import time
import tracemalloc
from array import array

import kvtier
from benchmarks.harness import (
    BlockMemory,
    Contender,
    Options,
    Result,
    console,
    expect_same,
    parse_options,
    print_figures,
    print_table,
    race,
)
from benchmarks.peers import Peer, PeerError, PeerUnavailable, all_peers
from benchmarks.raw_socket import RawPeer
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import SLOT_ALIGN_BYTES, KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.cacheserver.catalog import Catalog
from kvtier.client.client import CacheClient
from kvtier.memory.copying import address_of
from kvtier.sizes import format_size
from kvtier.testing.servers import cache_server

BARS = {
    "shm_views_x": "<= 0.1",
    "shm_get_x": "<= 1.15",
    "shm_set_x": "<= 1.2",
    "tcp_get_of_raw": ">= 0.9",
    "tcp_stream_get_of_raw": ">= 0.9",
    "tcp_set_of_raw": ">= 0.9",
    "tcp_over_best_peer": ">= 1",
    "hash_x": "<= 2.5",
    "match_ms": "<= 10",
    "server_rss_mib": "<= 100",
    "heap_bytes_per_block": "<= 500",
}
PROMPT_TOKENS = 100_000
HEAP_BLOCKS = 100_000
PAGE_LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16", block_tokens=16)
"""4 KiB a block: the most blocks a server of a given size can hold."""


def main() -> None:
    options = parse_options(__doc__ or "", tuple(SHAPES))
    result = Result(
        "remote_kv_cache.baseline.test_server",
        {"blocks": NUM_BLOCKS, "repeats": options.repeats, "shapes": options.shapes, "quick": options.quick},
    )
    worst: dict[str, float] = {}
    for shape in options.shapes:
        for name, value in measure_shape(shape, options, result).items():
            pick = max if BARS[name].startswith("<=") else min
            worst[name] = value if name not in worst else pick(worst[name], value)
    result.figures.update(worst)
    console.print("hashing, matching a long prompt, memory of the server")
    result.figures.update(measure_hashing(options.repeats))
    result.figures.update(measure_match(options.repeats))
    result.figures.update(measure_memory())
    print_figures(result.figures, BARS)
    result.write(options.json)


def measure_shape(shape: str, options: Options, result: Result) -> dict[str, float]:
    """One table. Its figures are for the shape; `main` keeps the worst of the shapes."""
    layout = SHAPES[shape]
    source = BlockMemory(NUM_BLOCKS, layout.block_bytes, seed=2)
    target = BlockMemory(NUM_BLOCKS, layout.block_bytes)
    console.print(f"{shape}: {NUM_BLOCKS} blocks of {format_size(layout.block_bytes)}, {options.repeats} repeats")
    seconds = measure_kvtier(layout, source, target, options.repeats)
    memcpy_s = min(seconds["memcpy, one"], seconds["memcpy, by block"])
    peers = measure_peers(layout, source, target, options.repeats)
    rows = [_row(name, value, memcpy_s, source.nbytes) for name, value in seconds.items()]
    rows += [_row(name, value, memcpy_s, source.nbytes) for name, value in peers.items()]
    print_table(f"{shape}: {NUM_BLOCKS} blocks, {format_size(source.nbytes)}, medians", rows)
    result.rows += [{"shape": shape, **row} for row in rows]
    figures = {
        "shm_views_x": seconds["shm match + lease + views"] / memcpy_s,
        "shm_get_x": seconds["shm get"] / memcpy_s,
        "shm_set_x": seconds["shm set"] / memcpy_s,
        "tcp_get_of_raw": seconds["raw tcp get"] / seconds["tcp get"],
        "tcp_stream_get_of_raw": seconds["raw tcp get"] / seconds["tcp stream_get"],
        "tcp_set_of_raw": seconds["raw tcp set"] / seconds["tcp set"],
    }
    ratios = [
        value / seconds[f"tcp {operation}"]
        for name, value in peers.items()
        for operation in ("get", "set")
        if "(tcp)" in name and name.endswith(f" {operation}")
    ]
    if ratios:
        figures["tcp_over_best_peer"] = min(ratios)
    return figures


def measure_kvtier(layout: KvLayout, source: BlockMemory, target: BlockMemory, repeats: int) -> dict[str, float]:
    namespace = NamespaceFields(layout=layout, weights="benchmark")
    memory = str(3 * NUM_BLOCKS * layout.slot_bytes)
    raw = RawPeer(NUM_BLOCKS, layout.block_bytes, 1)
    raw_two = RawPeer(NUM_BLOCKS, layout.block_bytes, 2)
    with cache_server("--max-leased", memory, memory=memory, tcp=True) as server:
        shm = kvtier.connect(server.unix, layout=layout, namespace=namespace, timeout_s=30)
        tcp = kvtier.connect(server.tcp, token=server.token, layout=layout, namespace=namespace, timeout_s=30)
        one = kvtier.connect(
            server.tcp, token=server.token, layout=layout, namespace=namespace, timeout_s=30, transfer_connections=1
        )
        hashes = shm.hashes(range(NUM_BLOCKS * layout.block_tokens))
        raw.set(source.blocks)
        raw_two.set(source.blocks)
        first_touch_s = _first_set(shm, hashes, source)
        contenders = [
            Contender("memcpy, one", lambda: _move(target.blocks[0], source.blocks[0], source.nbytes)),
            Contender("memcpy, by block", lambda: _move_blocks(target, source)),
            Contender("shm match + lease + views", lambda: _view_all(shm, hashes)),
            Contender(
                "shm get", lambda: _all(shm.get(hashes, target.blocks)), target.poison, lambda: target.expect(source)
            ),
            Contender(
                "shm stream_get",
                lambda: _all(sum(1 for _ in shm.stream_get(hashes, target.blocks))),
                target.poison,
                lambda: target.expect(source),
            ),
            Contender(
                "shm set", lambda: _all(shm.set(hashes, source.blocks)), shm.drop, lambda: _verify(shm, hashes, source)
            ),
            Contender(
                "shm set, deferred",
                lambda: _all(shm.set(hashes, source.blocks, deferred=True)),
                shm.drop,
                lambda: _verify_flushed(shm, hashes, source),
            ),
            Contender("raw tcp get", lambda: raw.get(target.blocks), target.poison, lambda: target.expect(source)),
            Contender("raw tcp get, 2 connections", lambda: raw_two.get(target.blocks), target.poison),
            Contender("tcp get, checksums not known yet", lambda: _all(tcp.get(hashes, target.blocks)), target.poison),
            Contender(
                "tcp get", lambda: _all(tcp.get(hashes, target.blocks)), target.poison, lambda: target.expect(source)
            ),
            Contender(
                "tcp get, 1 connection",
                lambda: _all(one.get(hashes, target.blocks)),
                target.poison,
                lambda: target.expect(source),
            ),
            Contender(
                "tcp stream_get",
                lambda: _all(sum(1 for _ in tcp.stream_get(hashes, target.blocks))),
                target.poison,
                lambda: target.expect(source),
            ),
            Contender("raw tcp set", lambda: raw.set(source.blocks)),
            Contender("raw tcp set, 2 connections", lambda: raw_two.set(source.blocks)),
            Contender(
                "tcp set", lambda: _all(tcp.set(hashes, source.blocks)), shm.drop, lambda: _verify(shm, hashes, source)
            ),
            Contender(
                "tcp set, 1 connection",
                lambda: _all(one.set(hashes, source.blocks)),
                shm.drop,
                lambda: _verify(shm, hashes, source),
            ),
            Contender(
                "tcp set, deferred",
                lambda: _all(tcp.set(hashes, source.blocks, deferred=True)),
                shm.drop,
                lambda: _verify_flushed(tcp, hashes, source, shm),
            ),
        ]
        seconds = race(contenders, repeats)
        for client in (shm, tcp, one):
            client.close()
    raw.close()
    raw_two.close()
    return {**seconds, "shm set, memory never touched": first_touch_s}


def measure_peers(layout: KvLayout, source: BlockMemory, target: BlockMemory, repeats: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    keys = [f"block-{number:06d}".encode() for number in range(NUM_BLOCKS)]
    for peer in all_peers():
        label = f"{peer.name} ({peer.transport})"
        try:
            peer.open(layout.block_bytes, NUM_BLOCKS)
            seconds.update(_race_peer(label, peer, keys, source, target, repeats))
        except PeerUnavailable as reason:
            console.print(f"  not measured: {label}: {reason}")
        except (PeerError, AssertionError) as error:
            console.print(f"  failed: {label}: {error}")
        finally:
            peer.close()
    return seconds


def _race_peer(
    label: str, peer: Peer, keys: list[bytes], source: BlockMemory, target: BlockMemory, repeats: int
) -> dict[str, float]:
    return race(
        [
            Contender(f"{label} set", lambda: peer.set(keys, source.blocks), lambda: peer.drop(keys)),
            Contender(
                f"{label} get",
                lambda: peer.get(keys, target.blocks),
                target.poison,
                lambda: target.expect(source),
            ),
        ],
        repeats,
    )


def measure_hashing(repeats: int) -> dict[str, float]:
    """Keys of a long new prompt, from a list of ints, against a bare chain over existing bytes."""
    dice = random.Random(3)
    tokens = [dice.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    data = array("I", tokens).tobytes()
    namespace = Namespace(bytes(32))

    def bare() -> bytes:
        last = bytes(32)
        for start in range(0, len(data), 64):
            last = hashlib.sha256(last + data[start : start + 64]).digest()
        return last

    def renew() -> None:
        tokens[0] = dice.randrange(150_000)  # so that no hash is known

    assert block_hashes(namespace, tokens, 16)[-1] == bare()
    seconds = race(
        [Contender("bare", bare), Contender("ours", lambda: block_hashes(namespace, tokens, 16), renew)], 3 * repeats
    )
    return {"hash_x": seconds["ours"] / seconds["bare"]}


def measure_match(repeats: int) -> dict[str, float]:
    """A 100,000-token prompt against a server that is full: the time of one match over the Unix socket."""
    namespace = NamespaceFields(layout=PAGE_LAYOUT, weights="benchmark")
    memory_blocks = 131_072
    memory = str(memory_blocks * PAGE_LAYOUT.slot_bytes)
    with cache_server("--max-leased", memory, memory=memory) as server:
        with kvtier.connect(server.unix, layout=PAGE_LAYOUT, namespace=namespace, timeout_s=30) as client:
            prompt = client.hashes([7] * PROMPT_TOKENS)
            others = [BlockHash(os.urandom(32)) for _ in range(memory_blocks - len(prompt))]
            for hashes in (others, prompt):
                for first in range(0, len(hashes), 8192):
                    with client.reserve(hashes[first : first + 8192]) as slots:
                        slots.commit()
            used = int(str(client.stats()["free_bytes"]))
            assert used == 0, "the server is not full"
            times = []
            for _ in range(3 * repeats):
                started_at = time.perf_counter()
                lease = client.match(prompt)
                times.append(time.perf_counter() - started_at)
                assert lease.num_blocks == len(prompt)
                lease.release()
    return {"match_ms": statistics.median(times) * 1000}


def measure_memory() -> dict[str, float]:
    with cache_server(memory="8GiB") as server:
        with kvtier.connect(server.unix) as client:
            client.stats()
        rss_mib = server.resident_bytes() / (1 << 20)
    catalog = Catalog(
        HEAP_BLOCKS * SLOT_ALIGN_BYTES,
        leased_bytes_per_client=HEAP_BLOCKS * SLOT_ALIGN_BYTES,
        pinned_bytes=0,
        lease_timeout_s=60,
    )
    holder = catalog.join(bytes(16), 1)
    space = catalog.open(Namespace(bytes(32)), "", SLOT_ALIGN_BYTES, 16)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(HEAP_BLOCKS // 500):
        grant, _ = catalog.reserve(holder, number, space, [BlockHash(os.urandom(32)) for _ in range(500)])
        catalog.commit(holder, number, 0, len(grant.blocks))
        catalog.close_reservation(holder, number)
        del grant
    gc.collect()
    heap_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert catalog.inventory.levels()["blocks"] == HEAP_BLOCKS
    return {"server_rss_mib": rss_mib, "heap_bytes_per_block": heap_bytes / HEAP_BLOCKS}


def _row(name: str, seconds: float, memcpy_s: float, nbytes: int) -> dict[str, object]:
    copies = "" if "views" in name else f"{nbytes / seconds / 1e9:.2f}"
    return {"what": name, "ms": f"{seconds * 1000:.2f}", "GB/s": copies, "x memcpy": f"{seconds / memcpy_s:.3f}"}


def _first_set(client: CacheClient, hashes: list[BlockHash], source: BlockMemory) -> float:
    started_at = time.perf_counter()
    _all(client.set(hashes, source.blocks))
    return time.perf_counter() - started_at


def _all(count: int) -> None:
    if count != NUM_BLOCKS:
        raise AssertionError(f"{count} of {NUM_BLOCKS} blocks")


def _view_all(client: CacheClient, hashes: list[BlockHash]) -> None:
    with client.match(hashes) as lease:
        _all(len(lease.views()))


def _verify(client: CacheClient, hashes: list[BlockHash], source: BlockMemory) -> None:
    """Check in place that the arena contains the blocks that were set."""
    with client.match(hashes) as lease:
        _all(lease.num_blocks)
        for view, block in zip(lease.views(), source.blocks, strict=True):
            expect_same(view, block)


def _verify_flushed(
    client: CacheClient, hashes: list[BlockHash], source: BlockMemory, reader: CacheClient | None = None
) -> None:
    client.flush(timeout_s=30)
    _verify(reader or client, hashes, source)


def _move(target: memoryview, source: memoryview, nbytes: int) -> None:
    ctypes.memmove(address_of(target), address_of(source), nbytes)


def _move_blocks(target: BlockMemory, source: BlockMemory) -> None:
    for to, block in zip(target.blocks, source.blocks, strict=True):
        _move(to, block, len(block))


if __name__ == "__main__":
    main()
