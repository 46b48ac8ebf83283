"""`KVTensor`: one tensor of one token and layer, as an address and a length, with the buffer protocol.

A tensor is either the caller's own memory, which the caller keeps alive, or memory of a cache, which a *hold* keeps. On
Python 3.11, a class written in Python cannot offer its bytes, so there its buffer slots are set by address; from 3.12
on, it has `__buffer__`. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias

from kvtier.errors import ConfigError, LeaseError
from kvtier.vineyard.whole_numbers import whole_number

_MAX_ADDRESS = 1 << 56
"""Upper bound of a process's addresses on any 64-bit processor: x86-64 with five levels of pages."""


class Hold(Protocol):
    """Keeps memory that tensors point at. A reader calls `enter`, and `leave` afterwards."""

    @property
    def is_over(self) -> bool: ...

    def enter(self) -> bool:
        """Begin to read; False if the hold is over."""
        ...

    def leave(self) -> None: ...


class KVTensor:
    """`nbytes` bytes at `address`; `numpy.frombuffer`, `memoryview` and the like read them.

    A tensor made by a caller reads and writes the memory at its address, which the caller must keep. A tensor that a
    query has pointed into a cache is read-only, and keeps its bytes from being evicted; so does every array or view
    made of it. Once the cache has released it, its address raises `LeaseError` and it has no buffer: `BufferError`
    from Python 3.12 on; on 3.11 it depends on the caller, mostly `SystemError`.
    """

    __slots__ = ("__weakref__", "_address", "_hold", "_nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = whole_number("a tensor's address", address, least=0, most=_MAX_ADDRESS)
        self._nbytes = whole_number("a tensor's number of bytes", nbytes, least=0, most=_MAX_ADDRESS - self._address)
        if self._nbytes and not self._address:
            raise ConfigError(f"{nbytes} bytes at no address")
        self._hold: Hold | None = None

    @property
    def address(self) -> int:
        """The address of its first byte. For a tensor of a cache, valid while this object lives and is not released."""
        if self._hold is not None and self._hold.is_over:
            raise LeaseError("the cache has released this tensor")
        return self._address

    @property
    def nbytes(self) -> int:
        return self._nbytes

    data = address
    length = nbytes

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KVTensor is an address in this process: it cannot be pickled or copied")

    def __repr__(self) -> str:
        if self._hold is not None and self._hold.is_over:
            return f"<KVTensor of {self._nbytes} bytes, released>"
        return f"KVTensor({self._address:#x}, {self._nbytes})"

    def _open(self) -> memoryview:
        """A view of the bytes. Raises `BufferError` once they are released."""
        hold = self._hold
        if hold is not None and not hold.enter():
            raise BufferError("the cache has released this tensor")
        window = _window_type(self._nbytes).from_address(self._address)
        if hold is None:
            return memoryview(window).cast("B")
        window.hold = hold
        if self._hold is not hold:
            raise BufferError("another thread is pointing this tensor elsewhere")
        return memoryview(window).cast("B").toreadonly()

    if TYPE_CHECKING or sys.version_info >= (3, 12):

        def __buffer__(self, flags: int, /) -> memoryview:
            return self._open()

        def __release_buffer__(self, view: memoryview, /) -> None:
            """Makes numpy keep the view, not only the tensor, by its presence."""


class _Moving:
    """The hold of a tensor that is being pointed elsewhere: it must not be read now."""

    is_over = True

    def enter(self) -> bool:
        return False

    def leave(self) -> None:
        pass


_MOVING = _Moving()


TokenTensors: TypeAlias = Sequence[tuple[KVTensor, KVTensor]]
"""A token's K and V, layer by layer."""


_nbytes_of = operator.attrgetter("_nbytes")
_hold_of = operator.attrgetter("_hold")
_NO_PAIRS = "KV is a pair of KVTensors for every token and layer"


def check_shape(kv: Sequence[TokenTensors], num_tokens: int, layers: int) -> None:
    """Raises `ConfigError` unless there are tensors of every layer for every token."""
    try:
        if len(kv) != num_tokens:
            raise ConfigError(f"{num_tokens} tokens, but KV of {len(kv)}")
        for position, of_token in enumerate(kv):
            if len(of_token) != layers:
                raise ConfigError(f"token {position} has KV of {len(of_token)} layers, not {layers}")
    except TypeError as error:
        raise ConfigError(f"{_NO_PAIRS}: {error}") from error


def check_tensors(kv: Sequence[TokenTensors]) -> None:
    """Raises `ConfigError` unless `kv`, whose shape has been checked, consists of pairs of `KVTensor`."""
    from_iterable = itertools.chain.from_iterable  # no Python code runs for each tensor, since there are many
    try:
        if set(map(len, from_iterable(kv))) - {2}:
            raise ConfigError(_NO_PAIRS)
        for kind in set(map(type, from_iterable(from_iterable(kv)))):
            if not issubclass(kind, KVTensor):
                raise ConfigError(f"{_NO_PAIRS}, not of {kind.__name__}")
    except TypeError as error:
        raise ConfigError(f"{_NO_PAIRS}: {error}") from error


def check_memory(kv: Sequence[TokenTensors], nbytes: int) -> None:
    """Raises `ConfigError` for a tensor that is not `nbytes` of memory, or is released. All must be `KVTensor`."""
    from_iterable = itertools.chain.from_iterable
    sizes = set(map(_nbytes_of, from_iterable(from_iterable(kv))))
    holds = set(map(_hold_of, from_iterable(from_iterable(kv))))
    if sizes <= {nbytes} and not any(hold is not None and hold.is_over for hold in holds):
        return
    for tensor in from_iterable(from_iterable(kv)):
        if tensor._nbytes != nbytes or (tensor._hold is not None and tensor._hold.is_over):
            raise ConfigError(f"{tensor!r} is not a tensor of {nbytes} bytes")


@contextlib.contextmanager
def held_addresses(kv: Sequence[TokenTensors], nbytes: int) -> Iterator[list[int]]:
    """The tensors' addresses, by token, layer, K and V. Within the scope, those of a cache cannot be released.

    Raises `ConfigError` for one that is not `nbytes` of memory, or is released.
    """
    with contextlib.ExitStack() as entered:
        yield _addresses(kv, nbytes, entered)


def _addresses(kv: Sequence[TokenTensors], nbytes: int, entered: contextlib.ExitStack) -> list[int]:
    found: list[int] = []
    add = found.append
    holds: set[Hold | None] = {None}
    try:
        for of_token in kv:
            for pair in of_token:
                for tensor in pair:
                    hold = tensor._hold
                    if hold not in holds and hold is not None and hold.enter():
                        entered.callback(hold.leave)
                        holds.add(hold)
                    add(tensor._address)
                    # In this order: a tensor that another thread redirects meanwhile has another hold now.
                    if tensor._nbytes != nbytes or hold not in holds or tensor._hold is not hold:
                        raise ConfigError(f"{tensor!r} is not a tensor of {nbytes} bytes")
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"{_NO_PAIRS}: {error}") from error
    if len(found) != 2 * sum(map(len, kv)):
        raise ConfigError(_NO_PAIRS)
    return found


def target_addresses(kv: Sequence[TokenTensors], nbytes: int) -> list[int]:
    """Like `held_addresses`, for memory to be filled: also raises `ConfigError` for a tensor of a cache."""
    with held_addresses(kv, nbytes) as found:
        if any(key._hold is not None or value._hold is not None for of_token in kv for key, value in of_token):
            raise ConfigError("a tensor that points into a cache cannot be filled; make KVTensors of your own memory")
    return found


def point_tensors(
    kv: Sequence[TokenTensors], addresses: Sequence[int], offsets: Sequence[int], nbytes: int, hold: Hold
) -> None:
    """Point the tensors of the leading tokens at `addresses[token] + offsets[2 * layer + is_value]`."""
    pairs = list(zip(offsets[::2], offsets[1::2], strict=True))
    try:
        for of_token, address in zip(kv, addresses, strict=False):
            for (key, value), (key_offset, value_offset) in zip(of_token, pairs, strict=True):
                key._hold = _MOVING
                key._address = address + key_offset
                key._nbytes = nbytes
                key._hold = hold
                value._hold = _MOVING
                value._address = address + value_offset
                value._nbytes = nbytes
                value._hold = hold
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{_NO_PAIRS}: {error}") from error


class _Window(ctypes.Array[ctypes.c_ubyte]):
    """Bytes that are being read. Views keep the window alive; its end notifies the hold."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    hold: Hold | None

    def __del__(self) -> None:
        hold = getattr(self, "hold", None)
        if hold is not None:
            hold.leave()


@functools.lru_cache(maxsize=64)
def _window_type(nbytes: int) -> type[_Window]:
    return type("_Window", (_Window,), {"_length_": nbytes})


# --- Python 3.11 ----------------------------------------------------------------------------------------------------

_TP_AS_BUFFER = 160
"""Offset of the address of the buffer slots in a type object of CPython 3.11, on 64 bits."""

_GetBuffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_ReleaseBuffer = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_void_p)
_get_buffer = _GetBuffer(("PyObject_GetBuffer", ctypes.pythonapi))


class _PyBufferHead(ctypes.Structure):
    _fields_ = (("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p))


def _lend(tensor: KVTensor, view: int, flags: int) -> int:
    """The view that it fills in refers to the window, not to the tensor, and so keeps its hold in any case."""
    try:
        return int(_get_buffer(tensor._open(), view, flags))
    except BaseException:  # no exception can be set from here, and without a result it would count as success
        _PyBufferHead.from_address(view).obj = None
        return -1


def _take_back(tensor: KVTensor, view: int) -> None:
    """Never called, as no view refers to a tensor. Its presence makes numpy keep the view, not only the tensor."""


_SLOTS = (_GetBuffer(_lend), _ReleaseBuffer(_take_back))
"""Kept forever: the type refers to them."""


def _offer_buffers() -> None:
    slots = ctypes.c_void_p.from_address(id(KVTensor) + _TP_AS_BUFFER).value
    if slots is None or not 0 < slots - id(KVTensor) < type.__basicsize__:  # type: ignore[operator]
        raise ImportError("this Python lays out its types in an unknown way; kvtier.vineyard needs Python 3.12 here")
    procs = (ctypes.c_void_p * 2).from_address(slots)
    for place, slot in enumerate(_SLOTS):
        procs[place] = ctypes.cast(slot, ctypes.c_void_p).value


if sys.version_info < (3, 12):
    _offer_buffers()
