"""Shared by the tests of the shared-memory cache on real servers."""

from __future__ import annotations

from pathlib import Path

import kvtier
from kvtier.testing.servers import ServerProcess
from tests.support.waiting import CALL_S

ROOT = Path(__file__).parents[2]


def server_count(server: ServerProcess, name: str) -> int:
    with kvtier.connect(server.unix, timeout_s=CALL_S) as client:
        return int(str(client.stats()[name]))


def tokens_there(server: ServerProcess) -> int:
    with kvtier.connect(server.unix, timeout_s=CALL_S) as client:
        spaces = client.info()["namespaces"]
    assert isinstance(spaces, list)
    return sum(space["blocks"] for space in spaces if space["name"] == "tree")
