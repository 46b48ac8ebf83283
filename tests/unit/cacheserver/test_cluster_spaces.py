"""What a server remembers of where blocks stand, of several namespaces."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver import cluster_spaces
from kvtier.cacheserver.cluster_spaces import ClusterSpaces
from kvtier.cacheserver.namespaces import MemorySpace
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.testing.tier_contract import chain

MAX_PLACES = 100


def test_of_namespaces_that_are_used_by_turns_none_forgets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_spaces, "_MAX_PLACES", MAX_PLACES)
    spaces_used = [
        cast(MemorySpace, SimpleNamespace(namespace=Namespace(bytes([number]) * 32), block_bytes=4096))
        for number in range(2)
    ]
    with contextlib.closing(ClusterSpaces(ClusterConfig(valkey=("tcp://127.0.0.1:1",)))) as spaces:
        for seed in range(20):
            for number, space in enumerate(spaces_used):
                spaces.of(space).places.learn(chain(100 * number + seed, 10))
            places = [spaces.of(space).places for space in spaces_used]
            assert sum(map(len, places)) <= MAX_PLACES
            for number, known in enumerate(places):
                assert all(known.get(block_hash) for block_hash in chain(100 * number + seed, 10))
