"""Mooncake Store over TCP: a master, a process that lends its memory, and a client in this process.

The client contributes no memory of its own, so every block crosses a loopback TCP connection into the
other process, by the batched calls on registered buffers (no staging copy in this process).

Mooncake's transfer engine listens on every interface, without authentication, and has no setting against
it. So the adapter runs only where loopback is the only interface, or where it is told not to mind.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import (
    ChildServerPeer,
    Peer,
    PeerError,
    PeerUnavailable,
    address_of,
    can_connect,
    free_port,
)

_HOST = "127.0.0.1"
_ANY_INTERFACE = "KVTIER_BENCH_MOONCAKE_ANY_INTERFACE"
_LOCAL_BUFFER = 16 << 20
_NOT_FOUND = -704
_ALIGN = 16 << 20
_QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR", "MC_YLT_LOG_LEVEL": "error"}


def _connect(master: str, segment_bytes: int) -> Any:
    """A store client; segment_bytes of its memory join the pool."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(_HOST, "P2PHANDSHAKE", segment_bytes, _LOCAL_BUFFER, "tcp", "", master)
    if code:
        raise PeerUnavailable(f"Mooncake's client could not be set up (code {code}).")
    return store


class MooncakeTCP(ChildServerPeer):
    """batch_put_from and batch_get_into against another process' segment."""

    name = "mooncake store"
    transport = "tcp"

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = None
        self._stored: set[bytes] = set()
        self._registered: list[tuple[int, int]] = []

    def _start(self, block_bytes: int, num_blocks: int) -> None:
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        import mooncake
        import mooncake.store

        if {name for _, name in socket.if_nameindex()} != {"lo"} and os.environ.get(_ANY_INTERFACE) != "1":
            raise PeerUnavailable(
                f"Mooncake listens on all interfaces: run under `unshare -rn` with lo up (or set {_ANY_INTERFACE}=1)."
            )
        port, metrics = free_port(), free_port()
        master = f"{_HOST}:{port}"
        program = str(Path(next(iter(mooncake.__path__))) / "mooncake_master")
        rpc = [f"-rpc_address={_HOST}", f"-rpc_port={port}"]
        self.spawn([program, *rpc, f"-metrics_host={_HOST}", f"-metrics_port={metrics}"])
        self.wait_until(lambda: can_connect(port))
        # Twice the blocks: the master starts to evict well before a segment is full.
        segment = -(-2 * block_bytes * num_blocks // _ALIGN) * _ALIGN + (256 << 20)
        self.spawn_module("benchmarks.peers.mooncake", master, str(segment))
        self.wait_until(lambda: self.log_contains(b"segment ready"))
        self._store = _connect(master, 0)
        self.on_close(self._leave)

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        self.drop([key for key in keys if key in self._stored])  # a put on a stored key would be ignored
        addresses = self._addresses(blocks)
        codes = self._store.batch_put_from([k.hex() for k in keys], addresses, [b.nbytes for b in blocks])
        if any(codes):
            raise PeerError(f"Mooncake did not store every block (codes {sorted(set(codes))}).")
        self._stored.update(keys)

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        sizes = [target.nbytes for target in into]
        got = self._store.batch_get_into([key.hex() for key in keys], self._addresses(into), sizes)
        if got != sizes:
            raise PeerError(f"Mooncake did not return every block (codes {sorted(set(got) - set(sizes))}).")

    def drop(self, keys: list[bytes]) -> None:
        names = [key.hex() for key in keys if key in self._stored]
        codes = self._store.batch_remove(names, True) if names else []
        if set(codes) - {0, _NOT_FOUND}:
            raise PeerError(f"Mooncake did not remove every block (codes {sorted(set(codes))}).")
        self._stored.difference_update(keys)

    def _addresses(self, blocks: list[memoryview]) -> list[int]:
        """Addresses of the blocks, their memory registered with the transfer engine on first sight."""
        addresses = [address_of(block) for block in blocks]
        known = self._registered
        needed = [
            (address, address + block.nbytes)
            for address, block in zip(addresses, blocks, strict=True)
            if not any(low <= address and address + block.nbytes <= high for low, high in known)
        ]
        if needed:
            # The engine refuses overlaps, which a reused address may bring: join those with the old range.
            joined: list[tuple[int, int]] = []
            for low, high in sorted(known + needed):
                if joined and low <= joined[-1][1]:
                    joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
                else:
                    joined.append((low, high))
            for low, _ in set(known) - set(joined):
                self._store.unregister_buffer(low)
            for low, high in set(joined) - set(known):
                if self._store.register_buffer(low, high - low):
                    raise PeerError("Mooncake did not register the caller's buffers.")
            self._registered = joined
        return addresses

    def _leave(self) -> None:
        for low, _ in self._registered:
            self._store.unregister_buffer(low)
        self._store.close()
        self._stored.clear()
        self._registered.clear()


def peers() -> list[Peer]:
    """One: without RDMA hardware, TCP is the transport Mooncake has between processes."""
    return [MooncakeTCP()]


if __name__ == "__main__":
    os.environ.update(_QUIET)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _lender = _connect(sys.argv[1], int(sys.argv[2]))
    print("segment ready", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        _lender.close()
