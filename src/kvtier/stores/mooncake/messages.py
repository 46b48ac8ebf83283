"""The messages between an engine and its Mooncake process, over a pair of sockets: a length, then msgpack."""

from __future__ import annotations

import socket
import struct
from typing import Literal, TypeAlias

import msgspec

from kvtier.errors import RemoteProtocolError

Act: TypeAlias = Literal["exist", "get", "put", "remove", "remove_all"]

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message to the process: where the pool is, and what this host adds to it.

    `buffer_bytes` is the size of the memory that both processes have mapped. `device` names RDMA devices.
    """

    host: str
    port: int
    metadata: str
    protocol: str
    device: str
    memory_bytes: int
    local_host: str
    buffer_bytes: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A call to Mooncake. `offsets` are places in the shared memory, one for each key, of `nbytes` each."""

    number: int
    act: Act
    keys: list[str]
    offsets: list[int]
    nbytes: int


class CallResult(msgspec.Struct, frozen=True, tag="answer"):
    """The result of a call: one number for each key. The call no longer touches the shared memory."""

    number: int
    codes: list[int]


class PoolStatus(msgspec.Struct, frozen=True, tag="news"):
    """Whether calls can be made now, and if not, why."""

    is_ready: bool
    sentence: str = ""
    is_final: bool = False
    """The library cannot be loaded: retrying is useless."""


Message: TypeAlias = Setup | Ask | CallResult | PoolStatus

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def send(stream: socket.socket, message: Message) -> None:
    """Not thread-safe. Raises `OSError`."""
    body = _encoder.encode(message)
    stream.sendall(_LENGTH.pack(len(body)) + body)


def receive(stream: socket.socket) -> Message | None:
    """The next message; None at the end. Raises `OSError`, and `RemoteProtocolError` if it is invalid."""
    header = _read(stream, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > _MAX_BYTES:
        raise RemoteProtocolError(f"a message of {length} bytes is too long")
    body = _read(stream, length)
    if body is None:
        return None
    try:
        message: Message = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"not a message: {error}") from error
    return message


def _read(stream: socket.socket, nbytes: int) -> bytearray | None:
    read = bytearray(nbytes)
    with memoryview(read) as view:
        position = 0
        while position < nbytes:
            count = stream.recv_into(view[position:])
            if not count:
                return None
            position += count
    return read
