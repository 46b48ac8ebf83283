"""One call beside its owner's thread: what it raises arrives, and nothing outlives `close`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvtier.engine.constraint.mask_thread import MaskThread


@pytest.fixture
def thread() -> Iterator[MaskThread]:
    made = MaskThread()
    yield made
    made.close()


def test_a_call_runs_beside_its_owner(thread: MaskThread) -> None:
    may_end = threading.Event()
    found: list[str] = []

    def act() -> None:
        may_end.wait()
        found.append(threading.current_thread().name)

    for _ in range(3):
        may_end.clear()
        thread.begin(act)
        may_end.set()
        thread.wait()

    assert found == ["kvtier-masks"] * 3


def test_what_a_call_raises_is_raised_by_waiting_and_the_next_one_runs(thread: MaskThread) -> None:
    def fail() -> None:
        raise ValueError("no such grammar")

    found: list[int] = []
    thread.begin(fail)
    with pytest.raises(ValueError, match="no such grammar"):
        thread.wait()
    thread.begin(lambda: found.append(1))
    thread.wait()

    assert found == [1]


def test_a_call_that_nobody_waited_for_is_over_before_the_next(thread: MaskThread) -> None:
    """Its owner was interrupted."""
    may_end = threading.Event()
    found: list[int] = []

    def act() -> None:
        may_end.wait()
        found.append(1)

    thread.begin(act)
    threading.Timer(0.05, may_end.set).start()
    thread.drain()

    assert found == [1]


def test_closing_waits_for_a_call() -> None:
    thread = MaskThread()
    may_end = threading.Event()
    found: list[int] = []

    def act() -> None:
        may_end.wait()
        found.append(1)

    thread.begin(act)
    threading.Timer(0.05, may_end.set).start()
    thread.close()
    thread.close()

    assert found == [1]
    assert not any(one.name == "kvtier-masks" for one in threading.enumerate())
