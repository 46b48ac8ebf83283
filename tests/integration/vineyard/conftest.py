"""A cache server for each module, with an empty tree for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.vineyard_tensors import open_cache


@pytest.fixture(scope="module")
def running_server() -> Iterator[ServerProcess]:
    with cache_server(memory="4MiB") as running:
        yield running


@pytest.fixture
def server(running_server: ServerProcess) -> ServerProcess:
    """One with an empty tree."""
    with open_cache(running_server.unix) as cache:
        cache._writer.drop()
    return running_server
