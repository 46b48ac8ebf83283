"""Our threads in an engine's process use its cores, and do not share their work with threads of torch's."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kvtier.transfer.copiers.own_threads import cores, own_threads
from tests.support.waiting import LIMIT_S


def test_threads_are_not_bound_where_the_thread_that_made_them_is() -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("there is one core")
    found: list[set[int]] = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(usable)})
        with own_threads(1, "test") as threads:
            found.append(threads.submit(os.sched_getaffinity, 0).result(LIMIT_S))

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()

    assert found == [usable]
    assert cores() == usable


def test_torch_computes_with_one_thread_there_and_with_as_many_as_before_elsewhere() -> None:
    before = torch.get_num_threads()

    with own_threads(1, "test") as threads:
        inside = threads.submit(torch.get_num_threads).result(LIMIT_S)

    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == 1
    assert (torch.get_num_threads(), later) == (before, [before])
