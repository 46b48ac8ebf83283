"""Threads of ours in the process of an engine, which may have bound its own threads to cores.

A thread inherits the core binding of its creator: all of ours would share a core with the engine's main thread. And if
every call of torch wanted all cores, it would wait until the engine's own threads let go of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

MadeT = TypeVar("MadeT")


def own_threads(count: int, name: str) -> ThreadPoolExecutor:
    """`count` threads, free to use any core of this process; in each, torch computes with that thread alone."""
    return ThreadPoolExecutor(count, name, initializer=_set_apart)


def made_apart(make: Callable[[], MadeT]) -> MadeT:
    """What `make` returns; the threads that it starts are free to use any core of this process."""
    with own_threads(1, "kvtier-start") as threads:
        return threads.submit(make).result()


def cores() -> set[int]:
    """The cores that any thread of this process may use."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            found |= os.sched_getaffinity(int(thread))
    return found


def _set_apart() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, cores())
    torch.get_num_threads()  # sets up this thread, with as many threads as the others have
    for path in _openmp_libraries():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_set_num_threads(1)  # torch's own call would also set it for later threads


@functools.cache
def _openmp_libraries() -> list[str]:
    """The OpenMP libraries in this process: torch's own copy may differ from the one that a plain name would load."""
    with open("/proc/self/maps") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps}
    return sorted(f"/{path}" for path in paths if re.match(r"lib(gomp|i?omp5?)\b", path.rpartition("/")[2]))
