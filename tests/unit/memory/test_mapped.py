"""Mapped arenas: shared, sealed, closed only when nobody looks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, LeaseError, RemoteProtocolError
from kvtier.memory.mapped import MappedArena

ARENA_BYTES = 5 << 20
MAP_ENTRY_BYTES = 8
IS_PRESENT = 1 << 63


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    with contextlib.closing(MappedArena.create(ARENA_BYTES)) as made:
        yield made


def memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("not-an-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def num_present_pages(arena: MappedArena, offset: int, nbytes: int) -> int:
    """Pages of the range that are mapped in this process now."""
    page_bytes = os.sysconf("SC_PAGESIZE")
    first = (arena.address + offset) // page_bytes
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(first * MAP_ENTRY_BYTES)
        entries = file.read(nbytes // page_bytes * MAP_ENTRY_BYTES)
    return sum(bool(entry & IS_PRESENT) for entry in memoryview(entries).cast("Q"))


def test_a_new_arena_is_all_zeros_and_none_of_it_is_resident(arena: MappedArena) -> None:
    assert num_present_pages(arena, 0, ARENA_BYTES) == 0
    with arena.view(0, ARENA_BYTES) as view:
        assert not any(view)


@pytest.mark.parametrize("nbytes", [0, ARENA_BYTES - 4096, ARENA_BYTES + 4096])
def test_nobody_can_change_an_arenas_size(arena: MappedArena, nbytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, nbytes)


def test_two_mappings_of_one_arena_are_the_same_bytes(arena: MappedArena) -> None:
    with contextlib.closing(MappedArena.attach(os.dup(arena.fd), ARENA_BYTES)) as other:
        with arena.view(4096, 5) as here:
            here[:] = b"hello"
        with other.view(4096, 5) as there:
            assert bytes(there) == b"hello"


@pytest.mark.parametrize("nbytes", [-5, 1 << 62])
def test_an_arena_that_cannot_be_mapped_is_a_wrong_setting(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="cannot map an arena"):
        MappedArena.create(nbytes)


@pytest.mark.parametrize(
    "make_fd",
    [
        lambda: memfd(4096),
        lambda: memfd(8192, seals=0),
        lambda: memfd(8192, seals=fcntl.F_SEAL_GROW),
        lambda: memfd(8192, seals=fcntl.F_SEAL_SHRINK),
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open("/dev/null", os.O_RDWR),
    ],
    ids=["another size", "no seals", "may shrink", "may grow", "device", "null"],
)
def test_a_descriptor_that_is_no_sealed_arena_is_the_peers_fault_and_is_closed(make_fd: object) -> None:
    fd = make_fd()  # type: ignore[operator]

    with pytest.raises(RemoteProtocolError):
        MappedArena.attach(fd, 8192)

    assert not is_open(fd)


def test_an_arena_that_may_not_be_written_is_the_peers_fault() -> None:
    fd = memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)

    with pytest.raises(RemoteProtocolError, match="cannot be mapped"):
        MappedArena.attach(fd, 8192)

    assert not is_open(fd)


def test_an_arena_of_nothing_is_the_peers_fault() -> None:
    fd = memfd(0)
    try:
        with pytest.raises(RemoteProtocolError):
            MappedArena.attach(fd, 0)
        assert not is_open(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, -1), (0, ARENA_BYTES + 1), (ARENA_BYTES, 1)])
def test_a_view_outside_the_arena_is_refused(arena: MappedArena, offset: int, nbytes: int) -> None:
    with pytest.raises(LeaseError, match="outside the arena"):
        arena.view(offset, nbytes)


def test_an_export_outside_the_arena_is_refused(arena: MappedArena) -> None:
    with pytest.raises(ValueError, match="too small"):
        arena.exports([ARENA_BYTES - 4], 8)


def test_an_arena_lies_at_its_address(arena: MappedArena) -> None:
    with arena.view(100, 3) as view:
        view[:] = b"abc"

    assert ctypes.string_at(arena.address + 100, 3) == b"abc"


@pytest.mark.parametrize("look", [MappedArena.view, lambda arena, offset, nbytes: arena.exports([offset], nbytes)[0]])
def test_an_arena_in_use_stays_mapped_until_it_is_not(look: object) -> None:
    arena = MappedArena.create(8192)
    seen = look(arena, 0, 16)  # type: ignore[operator]
    try:
        with pytest.raises(LeaseError, match="still in use"):
            arena.close()
        ctypes.memset(arena.address, 7, 16)
        assert bytes(seen) == b"\7" * 16
    finally:
        del seen
        arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.exports([0], 16)


def test_closing_twice_does_nothing_more() -> None:
    arena = MappedArena.create(8192)
    fd = arena.fd
    arena.close()
    arena.close()

    assert not is_open(fd)


def test_populated_pages_are_present_before_they_are_touched(arena: MappedArena) -> None:
    arena.populate(2 << 20, 4096)

    assert num_present_pages(arena, 2 << 20, 2 << 20) == (2 << 20) // os.sysconf("SC_PAGESIZE")
    assert num_present_pages(arena, 0, 2 << 20) == 0


def test_populating_keeps_what_was_written(arena: MappedArena) -> None:
    with arena.view(10, 5) as view:
        view[:] = b"hello"
    for _ in range(2):
        arena.populate(0, ARENA_BYTES)

    assert num_present_pages(arena, 0, ARENA_BYTES) == ARENA_BYTES // os.sysconf("SC_PAGESIZE")
    with arena.view(10, 5) as view:
        assert bytes(view) == b"hello"


def test_seals_cannot_be_changed_and_no_dump_has_the_bytes() -> None:
    arena = MappedArena.create(4 << 20)
    try:
        seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SEAL
        with pytest.raises(PermissionError):
            fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert _dump_flags("memfd:kvtier-arena") == {True}
    finally:
        arena.close()


def _dump_flags(name: str) -> set[bool]:
    """Whether mappings of this name are kept out of core dumps."""
    flags = set()
    is_of_name = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_of_name = name in line
        elif is_of_name and line.startswith("VmFlags:"):
            flags.add("dd" in line.split())
    return flags
