"""Shared memory that is joined to huge pages: its bytes stay, whoever writes them; it counts once, and it goes away."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.memory import huge_pages
from kvtier.memory.huge_pages import HUGE_BYTES, HugePages
from kvtier.memory.mapped import MappedArena
from tests.support.waiting import LIMIT_S

NUM_HUGE = 8
NBYTES = NUM_HUGE * HUGE_BYTES
PAGE_BYTES = mmap.PAGESIZE


class Memory:
    """A memfd, mapped as a user would."""

    def __init__(self, nbytes: int = NBYTES) -> None:
        self.fd = os.memfd_create("kvtier-huge-test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.map = mmap.mmap(self.fd, nbytes)

    def fill(self, seed: int) -> bytes:
        data = random.Random(seed).randbytes(len(self.map))
        self.map[:] = data
        return data

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


class RefusingKernel:
    """Joins nothing, and says `number`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.num_asked = 0
        self.mmap = huge_pages._libc.mmap
        self.munmap = huge_pages._libc.munmap

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        if advice != huge_pages._MADV_COLLAPSE:
            return 0
        self.num_asked += 1
        huge_pages.ctypes.set_errno(self._number)
        return -1


@pytest.fixture
def memory() -> Iterator[Memory]:
    with contextlib.closing(Memory()) as made:
        yield made


def num_mappings(name: str = "kvtier-huge-test") -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def shared_kib(file: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(name))


def test_bytes_stay_what_they_are(memory: Memory) -> None:
    data = memory.fill(1)
    huge = HugePages(memory.fd, NBYTES)
    huge.join(0, NBYTES)
    huge.join(2 * HUGE_BYTES, 3 * HUGE_BYTES)

    assert memory.map[:] == data
    data = memory.fill(2)
    huge.close()
    assert memory.map[:] == data


def test_what_was_not_resident_is_zeros_and_the_rest_stays(memory: Memory) -> None:
    places = range(0, NBYTES, HUGE_BYTES + 5 * PAGE_BYTES)
    for place in places:
        memory.map[place] = 7
    HugePages(memory.fd, NBYTES).join(0, NBYTES)

    assert [place for place in range(NBYTES) if memory.map[place]] == list(places)


def test_each_piece_is_one_page_where_the_kernel_can(memory: Memory) -> None:
    """Scattered before: they became resident in no order."""
    pages = list(range(0, NBYTES, PAGE_BYTES))
    random.Random(3).shuffle(pages)
    for page in pages:
        memory.map[page] = 1
    huge = HugePages(memory.fd, NBYTES)
    before = shared_kib("/proc/meminfo", "ShmemHugePages")
    huge.join(0, NBYTES)
    after = shared_kib("/proc/meminfo", "ShmemHugePages")
    if not huge._can_join:
        pytest.skip("this kernel joins no pages of shared memory")

    assert after - before >= NBYTES // 1024 // 2, "some may be in use, and other programs may free theirs"


def test_memory_counts_once(memory: Memory) -> None:
    huge = HugePages(memory.fd, NBYTES)
    before = shared_kib("/proc/self/status", "RssShmem")
    huge.join(0, NBYTES)
    assert shared_kib("/proc/self/status", "RssShmem") - before < NBYTES // 1024 // 4
    memory.fill(1)
    assert NBYTES // 1024 <= shared_kib("/proc/self/status", "RssShmem") - before < 2 * NBYTES // 1024


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, HUGE_BYTES - PAGE_BYTES, HUGE_BYTES, 3 * HUGE_BYTES + PAGE_BYTES])
def test_what_is_left_over_at_the_end_is_left_alone(nbytes: int) -> None:
    with contextlib.closing(Memory(nbytes)) as memory:
        data = memory.fill(1)
        huge = HugePages(memory.fd, nbytes)
        huge.join(0, nbytes)
        huge.join(nbytes // HUGE_BYTES * HUGE_BYTES, nbytes % HUGE_BYTES)
        huge.join(0, 100 * nbytes)

        assert memory.map[:] == data
        huge.close()


def test_the_mapping_goes_with_the_object_or_when_it_is_closed(memory: Memory) -> None:
    assert num_mappings() == 1
    huge = HugePages(memory.fd, NBYTES)
    assert num_mappings() == 2
    huge.close()
    assert num_mappings() == 1
    huge.join(0, NBYTES)  # does nothing
    huge.close()
    huge = HugePages(memory.fd, NBYTES)
    del huge
    gc.collect()
    assert num_mappings() == 1


def test_another_process_may_write_meanwhile(memory: Memory) -> None:
    """It reads back all that it wrote, while pages are joined under its feet over and over."""
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            for turn in range(1, 40):
                for page in range(0, NBYTES, PAGE_BYTES):
                    memory.map[page + turn] = turn
                if all(memory.map[page + turn] == turn for page in range(0, NBYTES, PAGE_BYTES)):
                    status = 0
                else:
                    status = 2
                    break
        os._exit(status)
    while True:
        huge = HugePages(memory.fd, NBYTES)
        for first in range(0, NBYTES, HUGE_BYTES):
            huge.join(first, HUGE_BYTES)
        huge.close()
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break

    assert os.waitstatus_to_exitcode(status) == 0
    row = bytes(range(40))
    assert all(memory.map[page : page + 40] == row for page in range(0, NBYTES, PAGE_BYTES))


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EBUSY])
def test_nothing_is_joined_for_a_while_where_there_is_no_memory_for_it(
    memory: Memory, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    huge = HugePages(memory.fd, NBYTES, lambda: now[0])
    with monkeypatch.context() as patch:
        kernel = RefusingKernel(number)
        patch.setattr(huge_pages, "_libc", kernel)
        huge.join(0, HUGE_BYTES)
        huge.join(0, HUGE_BYTES)
        assert kernel.num_asked == 1
        now[0] += 60
        huge.join(0, HUGE_BYTES)
    assert kernel.num_asked == 2
    huge.close()


def test_nothing_is_mapped_twice_where_the_address_space_is_limited(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages.resource, "getrlimit", lambda kind: (1 << 40, 1 << 40))
    with pytest.raises(OSError, match="limited"):
        HugePages(memory.fd, NBYTES)
    assert num_mappings() == 1


# --- arenas ----------------------------------------


def test_a_new_arena_that_is_made_resident_lies_in_huge_pages() -> None:
    with contextlib.closing(MappedArena.create(NBYTES)) as arena:
        before = shared_kib("/proc/meminfo", "ShmemHugePages")
        arena.populate(0, NBYTES)
        after = shared_kib("/proc/meminfo", "ShmemHugePages")
        assert arena._huge_pages is not None
        if not arena._huge_pages._can_join:
            pytest.skip("this kernel joins no pages of shared memory")

        assert after - before >= NBYTES // 1024 // 2
        with arena.view(0, NBYTES) as view:
            assert not any(view)


def test_threads_that_make_an_arena_resident_do_not_wait_for_one_that_does_all_of_it() -> None:
    """Each piece once, whoever comes first."""
    with contextlib.closing(MappedArena.create(64 * HUGE_BYTES)) as arena:
        joined: list[int] = []
        huge = arena._huge_pages
        assert huge is not None
        join, has_begun, gate = huge.join, threading.Event(), threading.Event()

        def slow_join(first: int, nbytes: int) -> None:
            joined.append(first)
            if first == 0:
                has_begun.set()
                gate.wait(LIMIT_S)
            join(first, nbytes)

        huge.join = slow_join  # type: ignore[method-assign]
        all_of_it = threading.Thread(target=arena.populate, args=(0, arena.nbytes))
        all_of_it.start()
        assert has_begun.wait(LIMIT_S)
        arena.populate(5 * HUGE_BYTES, 3 * HUGE_BYTES)
        assert joined == [0, 5 * HUGE_BYTES, 6 * HUGE_BYTES, 7 * HUGE_BYTES], "that one is at the first piece still"
        gate.set()
        all_of_it.join()

        assert sorted(joined) == list(range(0, arena.nbytes, HUGE_BYTES))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_an_arena_does_without_what_the_kernel_refuses(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = RefusingKernel(number)
    monkeypatch.setattr(huge_pages, "_libc", kernel)
    with contextlib.closing(MappedArena.create(NBYTES)) as arena:
        arena.populate(0, HUGE_BYTES)
        arena.populate(HUGE_BYTES, HUGE_BYTES)
        with arena.view(0, NBYTES) as view:
            view[:5] = b"hello"
            assert bytes(view[:6]) == b"hello\0"

    assert kernel.num_asked == (2 if number == errno.EAGAIN else 1)


def test_an_arena_does_without_where_there_is_no_room_to_map_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOMEM, "no room in the address space")

    monkeypatch.setattr(huge_pages, "_map", refuse)
    with contextlib.closing(MappedArena.create(NBYTES)) as arena:
        arena.populate(0, NBYTES)
        with arena.view(0, 5) as view:
            view[:] = b"hello"
            assert bytes(view) == b"hello"


def test_a_closed_arena_leaves_no_mapping() -> None:
    before = num_mappings("kvtier-arena")
    arena = MappedArena.create(NBYTES)
    other = MappedArena.attach(os.dup(arena.fd), NBYTES)
    arena.populate(0, NBYTES)
    other.populate(0, NBYTES)
    assert num_mappings("kvtier-arena") == before + 4
    arena.close()
    other.close()
    assert num_mappings("kvtier-arena") == before
