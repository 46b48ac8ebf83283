"""Bytes in many places move as if they lay in one."""

from __future__ import annotations

import ctypes
import random

from hypothesis import given
from hypothesis import strategies as st

from kvtier.memory.copying import address_of
from kvtier.memory.scattered import Scattered

_ORDERS = st.permutations(range(8))


class Pieces:
    """Eight pieces in one buffer, in any order."""

    def __init__(self, order: list[int], piece_bytes: int, gap: int = 0) -> None:
        self.memory = bytearray(random.Random(piece_bytes).randbytes(8 * (piece_bytes + gap)))
        self.starts = [position * (piece_bytes + gap) for position in order]
        self._piece_bytes = piece_bytes
        address = address_of(memoryview(self.memory))
        self.scattered = Scattered([address + start for start in self.starts], piece_bytes)

    @property
    def joined(self) -> bytes:
        return b"".join(bytes(self.memory[start : start + self._piece_bytes]) for start in self.starts)


@given(_ORDERS, st.integers(1, 40), st.integers(0, 3), st.data())
def test_any_range_is_copied_out_and_seen_as_one_run(
    order: list[int], piece_bytes: int, gap: int, data: st.DataObject
) -> None:
    pieces = Pieces(order, piece_bytes, gap)
    start = data.draw(st.integers(0, pieces.scattered.nbytes - 1))
    end = data.draw(st.integers(start, pieces.scattered.nbytes))
    into = ctypes.create_string_buffer(end - start + 1)

    pieces.scattered.copy_to(ctypes.addressof(into), start, end)

    assert into.raw == pieces.joined[start:end] + b"\0"
    assert b"".join(pieces.scattered.views(start, end)) == pieces.joined[start:end]


@given(_ORDERS, st.integers(1, 40), st.integers(0, 3), st.data())
def test_any_range_is_filled_and_nothing_beside_it(
    order: list[int], piece_bytes: int, gap: int, data: st.DataObject
) -> None:
    pieces = Pieces(order, piece_bytes, gap)
    start = data.draw(st.integers(0, pieces.scattered.nbytes - 1))
    end = data.draw(st.integers(start, pieces.scattered.nbytes))
    before, source = pieces.joined, ctypes.create_string_buffer(b"\xff" * (end - start), end - start + 1)

    pieces.scattered.copy_from(ctypes.addressof(source), start, end)

    assert pieces.joined == before[:start] + b"\xff" * (end - start) + before[end:]


def test_neighbours_are_one_run() -> None:
    pieces = Pieces([0, 1, 2, 3, 4, 5, 6, 7], 10)

    assert [len(view) for view in pieces.scattered.views(5, 75)] == [70]


def test_only_whole_units_at_whole_units_are_aligned() -> None:
    assert Scattered([4096, 8192, 65536], 4096).has_aligned(0, 12288, 4096, 2)
    assert not Scattered([4096, 8192, 65536], 4096).has_aligned(0, 12288, 4096, 1), "too many runs"
    assert not Scattered([4096, 65536], 4096).has_aligned(0, 8000, 4096, 9), "not whole units"
    assert not Scattered([4096, 65000], 4096).has_aligned(0, 8192, 4096, 9), "not at a unit"
    assert Scattered([4096, 65000], 4096).has_aligned(0, 4096, 4096, 9)
