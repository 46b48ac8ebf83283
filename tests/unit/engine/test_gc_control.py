"""Python's collector is called early, for little, and not at all by those who turned it off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvtier.engine.gc_control import collect_young, keeping_all


class _Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def _empty() -> Iterator[None]:
    """Nothing is young, and Python itself collects nothing."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(100_000, 10, 10)
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("_empty")
def test_young_garbage_is_collected_before_python_would() -> None:
    gone = weakref.ref(_Knot())
    collect_young()
    assert gone() is not None, "it is not worth it yet"
    kept = [_Knot() for _ in range(30_000)]
    collect_young()

    assert gone() is None
    assert gc.get_count()[0] < 10_000
    assert gc.get_count()[1] == 0, "what stays is old"
    assert len(kept) == 30_000


@pytest.mark.usefixtures("_empty")
def test_nothing_is_collected_where_the_collector_is_off() -> None:
    gone = weakref.ref(_Knot())
    kept = [_Knot() for _ in range(30_000)]
    gc.disable()
    collect_young()
    assert gone() is not None
    gc.enable()
    gc.set_threshold(0)
    collect_young()

    assert gone() is not None
    assert len(kept) == 30_000


def test_what_is_kept_is_not_looked_at_until_the_end() -> None:
    before = gc.get_freeze_count()
    gone = weakref.ref(_Knot())
    kept = _Knot()
    with keeping_all():
        assert gone() is None, "garbage is not kept"
        assert gc.get_freeze_count() > before
        kept_ref = weakref.ref(kept)
        del kept
        gc.collect()
        assert kept_ref() is not None

    assert gc.get_freeze_count() == 0
    gc.collect()
    assert kept_ref() is None
