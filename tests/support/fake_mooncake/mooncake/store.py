"""A stand-in for Mooncake's store: the calls that kvtier makes, answered by `tests.support.mooncake.StandInMaster`.

Codes, silence and what is written where are those of Mooncake 0.3.13: bytes land at the address of a key whenever the
master has answered, whether anybody still waits for them or not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from typing import Any

import msgspec

_NO_ANSWER = -900
_LENGTH_BYTES = 4


class MooncakeDistributedStore:
    def __init__(self) -> None:
        self._master: tuple[str, int] | None = None
        self._registered: list[tuple[int, int]] = []

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        host, _, port = master_server_addr.rpartition(":")
        self._master = (host, int(port))
        given = [local_hostname, metadata_server, str(global_segment_size), protocol, rdma_devices]
        return self._ask("setup", given)["codes"][0]

    def register_buffer(self, address: int, size: int) -> int:
        self._registered.append((address, size))
        return self._ask("register", [str(len(self._registered))])["codes"][0]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return self._ask("exist", keys)["codes"]

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._check(addresses, sizes)
        payloads = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return self._ask("put", keys, payloads)["codes"]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._check(addresses, sizes)
        answer = self._ask("get", keys)
        codes = answer["codes"]
        for number, payload in enumerate(answer["payloads"]):
            if len(payload) > sizes[number]:
                codes[number] = -600
            elif codes[number] >= 0:
                ctypes.memmove(addresses[number], payload, len(payload))
        return codes

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        assert force
        return self._ask("remove", keys)["codes"]

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        assert force
        return self._ask("remove_all", [pattern])["codes"][0]

    def close(self) -> int:
        return self._ask("close", [""])["codes"][0]

    def _check(self, addresses: list[int], sizes: list[int]) -> None:
        """All memory is registered. Mooncake over TCP would not mind; over RDMA it does."""
        for address, size in zip(addresses, sizes, strict=True):
            assert any(start <= address and address + size <= start + length for start, length in self._registered)

    def _ask(self, act: str, keys: list[str], payloads: list[bytes] | None = None) -> dict[str, Any]:
        assert self._master is not None
        none = {"codes": [_NO_ANSWER] * len(keys), "payloads": []}
        try:
            with socket.create_connection(self._master) as stream, stream.makefile("rb") as incoming:
                body = msgspec.msgpack.encode({"act": act, "keys": keys, "payloads": payloads or []})
                stream.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
                header = incoming.read(_LENGTH_BYTES)
                if len(header) < _LENGTH_BYTES:
                    return none
                answer: dict[str, Any] = msgspec.msgpack.decode(incoming.read(int.from_bytes(header, "little")))
        except OSError:
            return none
        if answer.get("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        return answer
