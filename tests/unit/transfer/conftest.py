"""Builders for the tests of `transfer`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.traffic_bench import Open, benches


@pytest.fixture
def open_bench() -> Iterator[Open]:
    with benches() as make:
        yield make
