"""These tests need vLLM, which has an environment of its own (`make test-vllm`); without it they are not collected.

With its own settings such a run knows no other `conftest.py`: what it leaves running is looked for here, too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.guardian import guard_this_process
from tests.support.left_processes import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 - hooks

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []


def pytest_configure() -> None:
    guard_this_process()


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A cache server in memory."""
    with cache_server() as process:
        yield process
