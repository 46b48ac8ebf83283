"""Servers over engines that pretend to be vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.api.config import ApiConfig
from kvtier.api.engine_connection import ProbeTimes
from tests.support.fake_engine import Running, running
from tests.support.vllm_serving import FakeVllm, config_of_vllm, fake_vllms

PATIENCE = ProbeTimes(ask_every_s=0.1, hung_after_s=120.0)
"""Engines of a busy machine say nothing for seconds."""
IMPATIENCE = ProbeTimes(ask_every_s=0.1, hung_after_s=3.0)
"""For tests of engines that hang."""
Serve = Callable[..., Running]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[FakeVllm]]:
    with fake_vllms(tmp_path, 2) as found:
        yield found


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server of an API over a configuration."""
    with ExitStack() as stack:

        def start(api: str, config: ApiConfig, patience: ProbeTimes = PATIENCE) -> Running:
            return stack.enter_context(running(api, config, patience))

        yield start


@pytest.fixture
def server(engines: list[FakeVllm], serve: Serve) -> Running:
    return serve("openai", config_of_vllm(*engines))
