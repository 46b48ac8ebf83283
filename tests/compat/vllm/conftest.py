"""These tests need vLLM, which has an environment of its own (`make test-vllm`); without it they are not collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from kvtier.testing.servers import ServerProcess, cache_server

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A cache server in memory."""
    with cache_server() as process:
        yield process
