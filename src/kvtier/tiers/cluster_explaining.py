"""A cluster, asked why a prompt missed: which of its blocks are there, and what other namespaces cover. Any thread.

Nothing lives longer for being asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.known_namespace import KnownNamespace
from kvtier.stores.valkey.cluster import Cluster
from kvtier.stores.valkey.config import ClusterConfig, blocks_in
from kvtier.stores.valkey.described import DescribedNamespaces
from kvtier.wire.messages import LISTED_CLUSTER, LISTED_DOWN

_FLAGS = {True: LISTED_CLUSTER, False: 0, None: LISTED_DOWN}


class AskedCluster:
    """The cluster is others' to close."""

    def __init__(self, cluster: Cluster, config: ClusterConfig) -> None:
        self._cluster = cluster
        self._config = config
        self._described = DescribedNamespaces(cluster, ttl_s=config.ttl_s)

    def known_namespaces(self) -> list[KnownNamespace]:
        return [
            KnownNamespace(
                digest=each.namespace.hex(),
                name=each.name,
                block_tokens=each.block_tokens,
                fields=dict(each.fields),
                is_elsewhere=True,
            )
            for each in self._described.known(self._config.timeout_s)
        ]

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[int]:
        """LISTED_ flags (see `wire.messages`) of a prompt's blocks, from the first one on."""
        blocks = blocks_in(self._cluster, self._config, namespace, block_bytes=0)
        return [_FLAGS[is_there] for is_there in blocks.contains(hashes, self._config.timeout_s)]
