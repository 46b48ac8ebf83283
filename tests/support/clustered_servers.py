"""Cache servers above a Valkey cluster that tests start, and clients of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import kvtier
from kvtier.client.client import CacheClient
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE
from tests.support.valkey import ValkeyCluster
from tests.support.waiting import CALL_S

SEGMENT = 4


def cluster_flags(cluster: ValkeyCluster, timeout_s: float = CALL_S) -> tuple[str, ...]:
    nodes = ",".join(f"tcp://{seed}" for seed in cluster.seeds)
    return ("--cluster", nodes, "--cluster-segment", str(SEGMENT), "--cluster-timeout", str(timeout_s))


def connected(server: ServerProcess, *, tcp: bool = False) -> CacheClient:
    return kvtier.connect(
        server.tcp if tcp else server.unix,
        token=server.token if tcp else None,
        layout=LAYOUT,
        namespace=NAMESPACE,
        timeout_s=CALL_S,
    )


@contextlib.contextmanager
def client_above(
    cluster: ValkeyCluster, *options: str, memory: str = "64MiB", tcp: bool = False, timeout_s: float = CALL_S
) -> Iterator[CacheClient]:
    """A client of a server of its own."""
    with cache_server(*cluster_flags(cluster, timeout_s), *options, memory=memory, tcp=tcp) as server:
        with connected(server, tcp=tcp) as client:
            yield client


def num_stored(cluster: ValkeyCluster) -> int:
    """Blocks in the cluster, without what is announced or described there."""
    found = [cluster.call(node, b"KEYS", b"kvt1:*") for node in cluster.primaries]
    names = [name for some in found if isinstance(some, list) for name in some if isinstance(name, bytes)]
    return sum(not name.endswith((b":computing", b":fields", b"{namespaces}")) for name in names)
