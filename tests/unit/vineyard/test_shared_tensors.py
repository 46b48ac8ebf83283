"""KVTensor as a buffer, and what becomes of it when its hold ends."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
from collections import deque

import numpy as np
import pytest

from kvtier.errors import ConfigError, LeaseError
from kvtier.vineyard import KVTensor
from kvtier.vineyard.held_tokens import FoundTokens, HeldTokens
from kvtier.vineyard.kv_tensor import check_shape, check_tensors, held_addresses, point_tensors

_REFUSED = (BufferError, SystemError, TypeError)


class _Lease:
    """Counts its releases."""

    num_released = 0

    def release(self) -> None:
        self.num_released += 1


@pytest.fixture
def memory() -> np.ndarray:
    return np.arange(64, dtype=np.uint8)


def _addresses_of(kv, nbytes):
    with held_addresses(kv, nbytes) as addresses:
        return addresses


def _held(
    memory: np.ndarray, lease: _Lease | None = None, forgotten: deque | None = None
) -> tuple[KVTensor, HeldTokens]:
    hold = HeldTokens([] if lease is None else [lease], memory, deque() if forgotten is None else forgotten)
    tensor = KVTensor(0, 0)
    point_tensors([[(tensor, KVTensor(0, 0))]], [memory.ctypes.data], (0, 32), 32, hold)
    return tensor, hold


def test_numpy_and_memoryview_read_a_callers_tensor_in_place(memory):
    tensor = KVTensor(memory.ctypes.data + 8, 16)

    assert np.array_equal(np.frombuffer(tensor, dtype=np.uint8), memory[8:24])
    assert memoryview(tensor).nbytes == 16
    assert memoryview(tensor).format == "B"


def test_a_callers_tensor_can_be_written_through(memory):
    tensor = KVTensor(memory.ctypes.data, 4)

    assert io.BytesIO(b"abcd").readinto(tensor) == 4
    memoryview(tensor)[0] = 7

    assert bytes(memory[:4]) == b"\x07bcd"


def test_an_empty_tensor_is_an_empty_buffer():
    assert bytes(memoryview(KVTensor(0, 0))) == b""


def test_vineyards_names_say_the_same(memory):
    tensor = KVTensor(memory.ctypes.data, 16)

    assert (tensor.data, tensor.length) == (tensor.address, tensor.nbytes) == (memory.ctypes.data, 16)


def test_numbers_of_numpy_make_a_tensor(memory):
    tensor = KVTensor(np.uint64(memory.ctypes.data), np.int64(16))

    assert bytes(memoryview(tensor)) == memory.tobytes()[:16]
    assert type(tensor.address) is type(tensor.nbytes) is int


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [
        (-1, 4),
        (4, -1),
        (0, 4),
        ("a", 4),
        (4, None),
        (1 << 70, 1000),
        ((1 << 64) - 4096, 1000),  # the kernel's
        ((1 << 56) - 999, 1000),
        (4096, 1 << 60),
        (True, 1),
        (4096, True),
        (np.float64(4096), 4),
    ],
)
def test_what_is_no_memory_is_refused(address, nbytes):
    with pytest.raises(ConfigError):
        KVTensor(address, nbytes)


def test_a_cached_tensor_is_read_only(memory):
    tensor, _ = _held(memory)

    assert memoryview(tensor).readonly
    assert not np.frombuffer(tensor, dtype=np.uint8).flags.writeable
    with pytest.raises(_REFUSED):
        io.BytesIO(b"abcd").readinto(tensor)
    assert memory[0] == 0


def test_a_released_tensor_gives_up_neither_bytes_nor_address(memory):
    tensor, hold = _held(memory)
    hold.end()

    with pytest.raises(LeaseError):
        _ = tensor.address
    for read in (memoryview, bytes, lambda each: np.frombuffer(each, dtype=np.uint8)):
        with pytest.raises(_REFUSED):
            read(tensor)
    assert "released" in repr(tensor)


def test_a_hold_does_not_end_while_an_array_is_in_use(memory):
    lease = _Lease()
    tensor, hold = _held(memory, lease)
    array = np.frombuffer(tensor, dtype=np.uint8)
    part = memoryview(array)[3:5]
    del array

    with pytest.raises(LeaseError):
        hold.end()
    assert bytes(part) == b"\x03\x04"
    assert lease.num_released == 0
    del part
    hold.end()
    hold.end()

    assert lease.num_released == 1


def test_an_array_outlives_its_tensor_being_pointed_elsewhere(memory):
    forgotten: deque = deque()
    lease = _Lease()
    tensor, hold = _held(memory, lease, forgotten)
    array = np.frombuffer(tensor, dtype=np.uint8)
    other = np.full(32, 9, dtype=np.uint8)
    point_tensors([[(tensor, KVTensor(0, 0))]], [other.ctypes.data], (0, 16), 16, HeldTokens([], other, deque()))
    del hold
    gc.collect()

    assert not forgotten
    assert array[5] == 5
    assert bytes(memoryview(tensor)) == bytes(other[:16])
    del array
    gc.collect()

    assert list(forgotten) == [lease]


def test_the_last_tensor_gives_the_lease_back(memory):
    forgotten: deque = deque()
    lease = _Lease()
    tensor, hold = _held(memory, lease, forgotten)
    del hold
    assert not forgotten
    del tensor
    gc.collect()

    assert list(forgotten) == [lease]


def test_many_reads_leave_nothing_behind(memory):
    lease = _Lease()
    tensor, hold = _held(memory, lease)
    for _ in range(1000):
        assert np.frombuffer(tensor, dtype=np.uint8)[1] == 1
    hold.end()

    assert lease.num_released == 1


def test_found_tokens_say_where_everything_is(memory):
    lease = _Lease()
    with FoundTokens([memory.ctypes.data], (0, 32), 32, HeldTokens([lease], memory, deque())) as tokens:
        assert tokens.num_tokens == 1
        assert ctypes.string_at(tokens.addresses[0] + tokens.offsets[1], 4) == bytes(memory[32:36])
        ((key, value),) = tokens.tensors(0)
        assert bytes(memoryview(key)) + bytes(memoryview(value)) == bytes(memory)
    with pytest.raises(LeaseError):
        _ = tokens.addresses
    with pytest.raises(LeaseError):
        tokens.tensors(0)

    assert lease.num_released == 1


def test_kv_of_another_shape_is_refused(memory):
    pair = (KVTensor(memory.ctypes.data, 16), KVTensor(memory.ctypes.data, 16))
    with pytest.raises(ConfigError, match="2 tokens"):
        check_shape([[pair]], 2, 1)
    with pytest.raises(ConfigError, match="1 layers"):
        check_shape([[pair]], 1, 2)
    for kv in ([[(pair[0],)]], [[pair[0]]], [[(pair[0], memory)]], [[None]], [[(*pair, pair[0])]]):
        with pytest.raises(ConfigError):
            _addresses_of(kv, 16)
        with pytest.raises(ConfigError):
            check_tensors(kv)
    check_tensors([[pair]])
    with pytest.raises(ConfigError, match="not a tensor of 8"):
        _addresses_of([[pair]], 8)
    with pytest.raises(ConfigError):
        _addresses_of([[(KVTensor(0, 0), KVTensor(0, 0))]], 16)


def test_a_released_tensor_is_no_source(memory):
    tensor, hold = _held(memory)
    hold.end()

    with pytest.raises(ConfigError, match="released"):
        _addresses_of([[(tensor, tensor)]], 32)


def test_a_hold_does_not_end_while_its_tensors_are_copied_from(memory):
    lease = _Lease()
    tensor, hold = _held(memory, lease)
    with held_addresses([[(tensor, tensor)]] * 2, 32) as addresses:
        assert addresses == [memory.ctypes.data] * 4
        with pytest.raises(LeaseError):
            hold.end()
        assert lease.num_released == 0
    hold.end()

    assert lease.num_released == 1


def test_nothing_stays_held_when_a_later_tensor_is_refused(memory):
    tensor, hold = _held(memory)
    with pytest.raises(ConfigError), held_addresses([[(tensor, tensor)], [(tensor, KVTensor(0, 0))]], 32):
        raise AssertionError("unreachable")
    hold.end()

    assert hold.is_over


class _PointsElsewhere:
    """A hold during whose `enter` another thread points the tensor at other memory."""

    is_over = False
    num_entered = 0

    def __init__(self, tensor: KVTensor, memory: np.ndarray) -> None:
        self._tensor = tensor
        self._memory = memory

    def enter(self) -> bool:
        self.num_entered += 1
        hold = HeldTokens([], self._memory, deque())
        point_tensors([[(self._tensor, KVTensor(0, 0))]], [self._memory.ctypes.data], (0, 32), 32, hold)
        return True

    def leave(self) -> None:
        self.num_entered -= 1


@pytest.mark.parametrize("use", [memoryview, lambda tensor: _addresses_of([[(tensor, tensor)]], 32)])
def test_a_tensor_that_is_pointed_elsewhere_meanwhile_is_not_read(memory, use):
    tensor = KVTensor(0, 0)
    hold = _PointsElsewhere(tensor, memory)
    point_tensors([[(tensor, KVTensor(0, 0))]], [memory.ctypes.data], (0, 32), 32, hold)

    with pytest.raises((*_REFUSED, ConfigError)):
        use(tensor)
    gc.collect()
    assert hold.num_entered == 0


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_address_does_not_leave_its_process(memory, act):
    for tensor in (KVTensor(memory.ctypes.data, 4), _held(memory)[0]):
        with pytest.raises(TypeError, match="address"):
            act(tensor)


def test_tokens_that_were_not_found_have_no_tensors():
    with FoundTokens([], (0, 32), 32, None) as tokens, pytest.raises(IndexError):
        tokens.tensors(0)
