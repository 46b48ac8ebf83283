"""A server with a disk, killed at random instants: what was flushed is there, and no wrong byte ever comes back."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

import kvtier
from kvtier import BlockHash, KvLayout, Namespace
from kvtier.client.client import CacheClient
from kvtier.errors import KvtierError, TierFull, TierRefused
from kvtier.testing.servers import start_cache_server
from tests.support.actors import NOTHING_HELD, held, payload
from tests.support.waiting import CALL_S, wait_until

_LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=128, dtype="float16", block_tokens=16)
_BLOCK_BYTES = _LAYOUT.block_bytes  # 16 KiB
_NAMESPACE = Namespace(bytes(range(32)))
_DISK_BYTES = 16 << 20
_CAPACITY_BLOCKS = (_DISK_BYTES - (1 << 20)) // _BLOCK_BYTES
_NUM_WRITERS = 2


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_several_kills_lose_nothing_that_was_flushed(tmp_path: Path, num_kills: int) -> None:
    _kill_again_and_again(tmp_path, num_kills, seed=3)


@pytest.mark.soak
def test_two_hundred_kills_lose_nothing_that_was_flushed(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, num_kills=200, seed=int(time.time()))


def _kill_again_and_again(folder: Path, num_kills: int, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    data = folder / "blocks"
    options = ("--folder", str(data), "--disk", str(_DISK_BYTES))
    history = _History()
    num_checked = num_flushes = 0
    with _Watcher(data) as watcher:
        for turn in range(num_kills + 1):
            server = start_cache_server(folder, *options, memory="48MiB", tcp=False)
            try:
                with kvtier.connect(server.unix, layout=_LAYOUT, namespace=_NAMESPACE, timeout_s=CALL_S) as client:
                    num_checked += _check(client, history, rng, is_last=turn == num_kills)
                    writers = [_Writer(client, history, rng.randrange(1 << 30)) for _ in range(_NUM_WRITERS)]
                    begun = history.num_touches
                    for writer in writers:
                        writer.start()
                    enough = begun + rng.randrange(100, 500)
                    wait_until(lambda enough=enough: history.num_touches >= enough)  # type: ignore[misc]
                    server.kill()
                    for writer in writers:
                        writer.join()
                        num_flushes += writer.num_flushes
                        assert writer.wrong == []
            finally:
                server.kill()
                assert server.process.stdout is not None
                server.process.stdout.close()
    assert watcher.num_samples > 10 * num_kills
    assert watcher.largest <= _DISK_BYTES
    assert watcher.largest > _DISK_BYTES // 2, "the bound was hardly tried"
    assert num_checked > 20 * num_kills, "hardly anything had to be there"
    assert num_flushes > num_kills


class _History:
    """The written blocks in order, and those that a returned flush covered. Shared by the writers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_touches = 0
        self.set_at: dict[BlockHash, int] = {}
        self.covered: set[BlockHash] = set()

    def must_be_there(self) -> list[BlockHash]:
        """Covered by a flush, and written too recently for an LRU of this size to have evicted it.

        Whatever else was written or read since made at most `num_touches` blocks younger.
        """
        since = self.num_touches - _CAPACITY_BLOCKS * 3 // 4
        return [block_hash for block_hash in self.covered if self.set_at[block_hash] > since]


class _Writer(threading.Thread):
    """Sets, gets, drops and flushes until the server is gone."""

    def __init__(self, client: CacheClient, history: _History, seed: int) -> None:
        super().__init__()
        self._client = client
        self._history = history
        self._rng = random.Random(seed)
        self._unflushed: list[BlockHash] = []
        self._mine: list[BlockHash] = []
        self.num_flushes = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while self._client.is_up:
            try:
                self._step()
            except KvtierError as error:
                if isinstance(error, TierFull):
                    self.wrong.append(str(error))
                return

    def _step(self) -> None:
        history = self._history
        match self._rng.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                hashes = [BlockHash(self._rng.randbytes(32)) for _ in range(self._rng.randrange(1, 9))]
                with history.lock:
                    for block_hash in hashes:
                        history.num_touches += 1
                        history.set_at[block_hash] = history.num_touches
                stored = self._client.store(hashes, [payload(block_hash, _BLOCK_BYTES) for block_hash in hashes])
                self._unflushed += [hashes[position] for position in stored]
                self._mine += hashes
            case 5 | 6:
                with history.lock:
                    block_hash = self._rng.choice(list(history.set_at) or [BlockHash(bytes(32))])
                    history.num_touches += 1
                _get(self._client, block_hash, self.wrong)
            case 7:
                if self._mine:
                    block_hash = self._rng.choice(self._mine)
                    with history.lock:
                        history.covered.discard(block_hash)
                    if block_hash in self._unflushed:
                        self._unflushed.remove(block_hash)
                    self._client.drop([block_hash])
            case _:
                try:
                    self._client.flush()
                    self.num_flushes += 1
                    with history.lock:
                        history.covered.update(self._unflushed)
                except TierRefused:
                    pass  # on a busy machine the disk does not keep up; the flush says so
                self._unflushed.clear()


def _check(client: CacheClient, history: _History, rng: random.Random, *, is_last: bool) -> int:
    """After a restart. Returns how many blocks had to be there."""
    wait_until(lambda: held(client) == NOTHING_HELD)
    needed = history.must_be_there()
    missing = [block_hash for block_hash, is_there in zip(needed, client.contains(needed), strict=True) if not is_there]
    assert missing == [], f"{len(missing)} of {len(needed)} flushed blocks are gone"
    wrong: list[str] = []
    for block_hash in needed:
        assert _get(client, block_hash, wrong), "a flushed block did not arrive"
    written = list(history.set_at)
    for block_hash in written if is_last else rng.sample(written, min(300, len(written))):
        with history.lock:
            history.num_touches += 1
        _get(client, block_hash, wrong)
    assert wrong == []
    stats = client.stats()
    assert stats["disk_losses"] == {}, "a kill tears nothing: every write was whole or not begun"
    assert stats["disk_up"] == 1
    wait_until(lambda: held(client) == NOTHING_HELD)
    return len(needed)


def _get(client: CacheClient, block_hash: BlockHash, wrong: list[str]) -> bool:
    into = bytearray(_BLOCK_BYTES)
    if not client.get([block_hash], [into]):
        return False
    if into != payload(block_hash, _BLOCK_BYTES):
        wrong.append(block_hash.hex())
    return True


class _Watcher(threading.Thread):
    """The size of everything in a folder, again and again."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._is_over = threading.Event()
        self.num_samples = 0
        self.largest = 0

    def __enter__(self) -> _Watcher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.wait(0.002):
            total = 0
            for path in self._folder.rglob("*"):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                total += max(status.st_size, status.st_blocks * 512)
            self.num_samples += 1
            self.largest = max(self.largest, total)
