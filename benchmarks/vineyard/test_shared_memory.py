"""Vineyard's KVCache in shared memory: how fast a query hands out pointers, and an update beside a memcpy.

    python -m benchmarks.vineyard.test_shared_memory [--quick] [--json FILE]

Queries are for 4,096 tokens of 32 layers, all cached: 262,144 tensors, the caller's objects, made before. Once they are
pointed at the cache one by one (`query`), once their addresses come as one array (`query_addresses`); by a cache object
that knows nothing of the sequence yet, so all of its hashes are computed.

Updates are of 64 KiB tensors that lie in the caller's memory in no order. Beside them, taking turns: a memcpy of the
same tensors in the same order, by one thread and by as many as an update uses, and one single memcpy of as many bytes,
which is up to twice as fast (it stores past the cache) and which scattered tensors cannot reach. All write to shared
memory that is resident, and before each of them the same memory is written over. `shm_update_of_memcpy` is against the
faster of the first two, `shm_update_of_one_memcpy` against the single one. Vineyard's blobs are a peer if its
package is installed: a blob for each token, whose tensors lie side by side for it and are copied at once; no figure
depends on them. Bytes are compared. Ends with status 1 when a figure misses its bar.

Appends are of one token behind 1,024 and behind 16,384, as in decoding: `shm_append_ms` is the latter.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.harness import (
    BlockMemory,
    Contender,
    Result,
    console,
    expect_same,
    finish,
    make_parser,
    print_table,
    race,
    read_options,
)
from benchmarks.peers import PeerError, PeerUnavailable
from benchmarks.peers.vineyard_blobs import VineyardBlobs
from kvtier.memory.copying import address_of, copy_blocks
from kvtier.sizes import format_size
from kvtier.testing.servers import cache_server
from kvtier.vineyard import KVTensor, VineyardCacheConfig
from kvtier.vineyard.kv_tensor import TokenTensors
from kvtier.vineyard.shared_cache import COPY_THREADS, SharedCache
from kvtier.workers import Workers

BARS = {
    "shm_query_ms": "<= 150",
    "shm_batch_query_ms": "<= 20",
    "shm_update_of_memcpy": ">= 0.6",
    "shm_append_ms": "<= 10",
}
LAYERS = 32
QUERY_TOKENS = 4096
QUERY_TENSOR_BYTES = 2048
UPDATE_TENSOR_BYTES = 64 << 10
UPDATE_TOKENS = 64
UPDATE_ROUNDS = 3
QUICK_UPDATE_TOKENS = 32
UNBOUNDED = 1 << 30
APPEND_TOKENS = 200
APPEND_BEHIND = (1024, 16384)


def main() -> int:
    options, _ = read_options(make_parser(__doc__ or ""), ())
    num_tokens = QUICK_UPDATE_TOKENS if options.quick else UPDATE_TOKENS
    result = Result(
        "vineyard.test_shared_memory",
        {
            "layers": LAYERS,
            "query_tokens": QUERY_TOKENS,
            "query_tensor_bytes": QUERY_TENSOR_BYTES,
            "update_tokens": num_tokens,
            "update_tensor_bytes": UPDATE_TENSOR_BYTES,
            "copy_threads": COPY_THREADS,
            "repeats": options.repeats,
            "quick": options.quick,
        },
    )
    measure_queries(options.repeats, result)
    measure_updates(num_tokens, options.repeats, result)
    measure_appends(result)
    return finish(result, BARS, options.json)


def measure_queries(repeats: int, result: Result) -> None:
    console.print(f"queries of {QUERY_TOKENS} tokens, {LAYERS} layers, {2 * LAYERS * QUERY_TOKENS} tensors")
    source = BlockMemory(1, 2 * LAYERS * QUERY_TENSOR_BYTES, seed=3)
    stored = [tensors_at(address_of(source.view), QUERY_TENSOR_BYTES)] * QUERY_TOKENS
    memory_bytes = 3 * QUERY_TOKENS * source.nbytes
    seconds: dict[str, list[float]] = {}
    with cache_server(memory=str(memory_bytes)) as server:
        for bound, capacity in (("", UNBOUNDED), (", bounded", QUERY_TOKENS)):
            for _ in range(repeats + 1):
                with open_cache(server.unix, QUERY_TENSOR_BYTES, capacity) as cache:
                    tokens = list(range(QUERY_TOKENS))
                    if cache.update(None, tokens, stored) != QUERY_TOKENS:
                        raise AssertionError("not all tokens were stored")
                kv: list[TokenTensors] = [
                    [(KVTensor(0, 0), KVTensor(0, 0)) for _ in range(LAYERS)] for _ in range(QUERY_TOKENS)
                ]
                gc.collect()
                for name, ask in (("query", query), ("query_addresses", query_addresses)):
                    with open_cache(server.unix, QUERY_TENSOR_BYTES, capacity) as cache:
                        cache.query(tokens[:1], kv[:1])  # connects
                        started_at = time.perf_counter()
                        check = ask(cache, tokens, kv)
                        seconds.setdefault(name + bound, []).append(time.perf_counter() - started_at)
                        check(source)
                        del check
                        cache.release()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    rows = [{"what": name, "ms": f"{1000 * value:.1f}"} for name, value in medians.items()]
    print_table(f"{QUERY_TOKENS} tokens found, medians", rows)
    result.rows += [dict(row) for row in rows]
    result.figures["shm_query_ms"] = 1000 * max(medians["query"], medians["query, bounded"])
    result.figures["shm_batch_query_ms"] = 1000 * max(medians["query_addresses"], medians["query_addresses, bounded"])


def query(cache: SharedCache, tokens: list[int], kv: list[TokenTensors]) -> Callable[[BlockMemory], None]:
    num_found = cache.query(tokens, kv)

    def check(source: BlockMemory) -> None:
        if num_found != len(tokens):
            raise AssertionError(f"{num_found} of {len(tokens)} tokens found")
        for of_token in kv[:: len(kv) // 16]:
            expect_tensors(of_token, source.view)

    return check


def query_addresses(cache: SharedCache, tokens: list[int], kv: list[TokenTensors]) -> Callable[[BlockMemory], None]:
    found = cache.query_addresses(tokens)

    def check(source: BlockMemory) -> None:
        if found.num_tokens != len(tokens):
            raise AssertionError(f"{found.num_tokens} of {len(tokens)} tokens found")
        for token in range(0, found.num_tokens, found.num_tokens // 16):
            expect_tensors(found.tensors(token), source.view)
        found.release()

    return check


def measure_updates(num_tokens: int, repeats: int, result: Result) -> None:
    num_tensors = 2 * LAYERS * num_tokens
    source = BlockMemory(num_tensors, UPDATE_TENSOR_BYTES, seed=4)
    target = BlockMemory(num_tensors, UPDATE_TENSOR_BYTES)
    console.print(f"updates of {num_tokens} tokens, {format_size(source.nbytes)} in tensors of 64 KiB")
    addresses = [address_of(block) for block in source.blocks]
    random.Random(5).shuffle(addresses)
    kv = tensors_in_turn(addresses)
    starts = itertools.count(0, num_tokens)
    with cache_server("--touch-memory", memory=str(3 * source.nbytes)) as server:
        with open_cache(server.unix, UPDATE_TENSOR_BYTES, UNBOUNDED) as cache:
            last: list[range] = []

            def update() -> None:
                start = next(starts)
                last[:] = [range(start, start + num_tokens)]
                if cache.update(None, last[0], kv) != num_tokens:
                    raise AssertionError("not all tokens were stored")

            def check() -> None:
                with cache.query_addresses(last[0]) as found:
                    if found.num_tokens != num_tokens:
                        raise AssertionError(f"{found.num_tokens} of {num_tokens} tokens found")
                    places = [address + offset for address in found.addresses for offset in found.offsets]
                    expect_copies(addresses, places)

            for _ in range(4):
                update()  # every page of the server's memory is mapped here
            places = [address_of(block) for block in target.blocks]
            threads = Workers(COPY_THREADS, "memcpy")

            def check_copies() -> None:
                expect_copies(addresses, places)

            seconds = race(
                [
                    Contender(
                        "one memcpy",
                        lambda: ctypes.memmove(places[0], min(addresses), source.nbytes),
                        prepare=target.poison,
                    ),
                    Contender(
                        "memcpy of each tensor",
                        lambda: copy_blocks(places, addresses, UPDATE_TENSOR_BYTES),
                        prepare=target.poison,
                        check=check_copies,
                    ),
                    Contender(
                        f"memcpy of each tensor, {COPY_THREADS} threads",
                        lambda: copy_by_threads(threads, places, addresses),
                        prepare=target.poison,
                        check=check_copies,
                    ),
                    Contender("update", update, prepare=target.poison, check=check),
                ],
                UPDATE_ROUNDS * repeats,
            )
            threads.close()
    fastest = min(value for name, value in seconds.items() if name.startswith("memcpy of each"))
    seconds.update(measure_blobs(source, num_tokens, repeats))
    rows = [
        {"what": name, "ms": f"{1000 * value:.1f}", "GB/s": f"{source.nbytes / value / 1e9:.2f}"}
        for name, value in seconds.items()
    ]
    print_table(f"{num_tokens} tokens, {format_size(source.nbytes)}, medians", rows)
    result.rows += [dict(row) for row in rows]
    result.figures["shm_update_of_memcpy"] = fastest / seconds["update"]
    result.figures["shm_update_of_one_memcpy"] = seconds["one memcpy"] / seconds["update"]


def measure_blobs(source: BlockMemory, num_tokens: int, repeats: int) -> dict[str, float]:
    """Vineyard's blobs, one for each token: created, filled in one copy and sealed."""
    token_bytes = source.nbytes // num_tokens
    peer = VineyardBlobs()
    try:
        peer.open(token_bytes, 2 * num_tokens)
    except (PeerUnavailable, PeerError) as error:
        console.print(f"no Vineyard: {error}")
        return {}
    keys = [str(token).encode() for token in range(num_tokens)]
    blocks = [source.view[start : start + token_bytes] for start in range(0, source.nbytes, token_bytes)]
    target = BlockMemory(num_tokens, token_bytes)
    try:
        seconds = race(
            [Contender("vineyard blobs", lambda: peer.set(keys, blocks), prepare=lambda: peer.drop(keys))], repeats
        )
        peer.get(keys, target.blocks)
        target.expect(source)
    finally:
        peer.close()
    return seconds


def measure_appends(result: Result) -> None:
    rows: list[dict[str, str]] = []
    source = BlockMemory(1, 2 * LAYERS * QUERY_TENSOR_BYTES, seed=6)
    of_token = tensors_at(address_of(source.view), QUERY_TENSOR_BYTES)
    memory_bytes = 3 * (APPEND_BEHIND[-1] + APPEND_TOKENS) * source.nbytes
    for num_before in APPEND_BEHIND:
        with cache_server(memory=str(memory_bytes)) as server:
            with open_cache(server.unix, QUERY_TENSOR_BYTES, num_before + 2 * APPEND_TOKENS) as cache:
                tokens = list(range(num_before))
                if cache.update(None, tokens, [of_token] * num_before) != num_before:
                    raise AssertionError("not all tokens were stored")
                seconds = []
                for token in range(num_before, num_before + APPEND_TOKENS):
                    started_at = time.perf_counter()
                    num_stored = cache.update(tokens, [token], [of_token])
                    seconds.append(time.perf_counter() - started_at)
                    if num_stored != 1:
                        raise AssertionError("a token was not stored")
                    tokens.append(token)
                with cache.query_addresses(tokens) as found:
                    if found.num_tokens != len(tokens):
                        raise AssertionError(f"{found.num_tokens} of {len(tokens)} tokens found")
                    expect_tensors(found.tensors(len(tokens) - 1), source.view)
        mean_ms = 1000 * statistics.fmean(seconds)
        rows.append(
            {
                "behind": str(num_before),
                "mean ms": f"{mean_ms:.2f}",
                "median ms": f"{1000 * statistics.median(seconds):.2f}",
                "worst ms": f"{1000 * max(seconds):.1f}",
            }
        )
    print_table(f"{APPEND_TOKENS} tokens appended one by one", rows)
    result.rows += [dict(row) for row in rows]
    result.figures["shm_append_ms"] = mean_ms


def copy_by_threads(threads: Workers, targets: list[int], sources: list[int]) -> None:
    """Copy in as many runs of tensors as an update makes."""
    bounds = [len(targets) * part // COPY_THREADS for part in range(COPY_THREADS + 1)]
    threads.map(
        lambda part: copy_blocks(targets[part], sources[part], UPDATE_TENSOR_BYTES),
        [slice(start, end) for start, end in itertools.pairwise(bounds)],
    )


def open_cache(address: str, tensor_bytes: int, capacity: int) -> SharedCache:
    config = VineyardCacheConfig(socket=address, timeout_s=10)
    return SharedCache(config, tensor_bytes=tensor_bytes, cache_capacity=capacity, layer=LAYERS)


def tensors_at(address: int, tensor_bytes: int) -> TokenTensors:
    """A token's tensors, side by side."""
    places = itertools.count(address, tensor_bytes)
    return [(KVTensor(next(places), tensor_bytes), KVTensor(next(places), tensor_bytes)) for _ in range(LAYERS)]


def tensors_in_turn(addresses: list[int]) -> list[TokenTensors]:
    places: Iterator[int] = iter(addresses)
    return [
        [
            (KVTensor(next(places), UPDATE_TENSOR_BYTES), KVTensor(next(places), UPDATE_TENSOR_BYTES))
            for _ in range(LAYERS)
        ]
        for _ in range(len(addresses) // (2 * LAYERS))
    ]


def expect_tensors(of_token: TokenTensors, expected: memoryview) -> None:
    start = 0
    for pair in of_token:
        for tensor in pair:
            view = memoryview(tensor)
            expect_same(view, expected[start : start + len(view)])
            start += len(view)


def expect_copies(sources: list[int], copies: list[int]) -> None:
    for source, copy in zip(sources, copies, strict=True):
        if ctypes.string_at(source, UPDATE_TENSOR_BYTES) != ctypes.string_at(copy, UPDATE_TENSOR_BYTES):
            raise AssertionError("the bytes that came back are not those that were stored")


if __name__ == "__main__":
    sys.exit(main())
