"""Vineyard: blobs in vineyardd's shared memory, over its Unix IPC socket.

set() creates a blob, copies the block into it and seals it; get() maps the blobs and copies them out. The
bytes never cross the socket. Blobs have no keys: the adapter keeps the key to object id table itself,
which spares Vineyard the naming requests a real cache would pay for.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from benchmarks.peers import ChildServerPeer, Peer, PeerError, address_of

_COPY_THREADS = 1  # more did not help on two cores


class VineyardBlobs(ChildServerPeer):
    """One IPC client of a vineyardd with local metadata and no RPC port."""

    name = "vineyard blobs"
    transport = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._client: Any = None
        self._ids: dict[bytes, Any] = {}

    def _start(self, block_bytes: int, num_blocks: int) -> None:
        import vineyard

        program = Path(vineyard.__file__).parent / "bdist" / "vineyardd"
        path = self.directory() / "vineyard.sock"
        size = 2 * block_bytes * num_blocks + (256 << 20)
        self.spawn([str(program), "-socket", str(path), "-size", str(size), "-meta", "local", "-rpc=false"])
        self.wait_until(path.exists)
        self._client = vineyard.connect(str(path))
        self.on_close(self._client.close)
        self._ids.clear()

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        self.drop([key for key in keys if key in self._ids])
        for key, block in zip(keys, blocks, strict=True):
            blob = self._client.create_blob(block.nbytes)
            blob.copy(0, address_of(block), block.nbytes, _COPY_THREADS)
            self._ids[key] = blob.seal(self._client).id

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        if not self._ids.keys() >= set(keys):
            raise PeerError("Vineyard was not given one of these blocks.")
        blobs = self._client.get_blobs([self._ids[key] for key in keys])
        for blob, target in zip(blobs, into, strict=True):
            if blob.size != target.nbytes:
                raise PeerError("Vineyard returned a blob of another size.")
            ctypes.memmove(address_of(target), blob.address, target.nbytes)

    def drop(self, keys: list[bytes]) -> None:
        ids = [self._ids.pop(key) for key in keys if key in self._ids]
        if ids:
            self._client.delete(ids)


def peers() -> list[Peer]:
    """One: Vineyard's remote protocol over TCP is not what it is used for."""
    return [VineyardBlobs()]
