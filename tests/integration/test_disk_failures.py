"""A disk that fails, fills up, goes away or cannot be used: one clear sentence, memory goes on, and it comes back."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvtier
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, KvtierError, TierRefused
from kvtier.stores.disk import DiskStore
from kvtier.stores.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    BlockRecord,
    Header,
    decode_records,
    encode_block,
    encode_header,
)
from kvtier.testing.servers import cache_server
from kvtier.transport.address import UnixAddress
from tests.support.actors import (
    BLOCK_BYTES,
    LAYOUT,
    NAMESPACE,
    NOTHING_HELD,
    chain,
    held,
    open_client,
    payload,
    payloads,
    read_all,
)
from tests.support.faulty_files import FaultyFiles
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

_DATA_NAME = "blocks.kvtier"
_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


@contextlib.contextmanager
def _served(folder: Path, files: FaultyFiles | None = None, **settings: object) -> Iterator[CacheClient]:
    """A server in this process, whose log can be seen and whose files can be made to fail."""
    values = {"memory_bytes": 8 << 20, "file_bytes": 32 << 20, **settings}
    config = CacheServerConfig(
        unix=UnixAddress(str(folder.parent / "kvtier.sock")),
        folder=folder,
        **values,  # type: ignore[arg-type]
    )
    server = CacheServer(config, files=files)
    try:
        with kvtier.connect(
            f"unix:{folder.parent / 'kvtier.sock'}", layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S
        ) as client:
            yield client
    finally:
        server.close()


@contextlib.contextmanager
def _mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvtier-test", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def _is_up(client: CacheClient) -> bool:
    return client.stats()["disk_up"] == 1


def _set(client: CacheClient, seed: int, num_blocks: int = 8) -> None:
    hashes = chain(seed, num_blocks)
    assert client.set(hashes, payloads(hashes)) == num_blocks


def _assert_served(client: CacheClient, seed: int, num_blocks: int = 8) -> None:
    hashes = chain(seed, num_blocks)
    assert read_all(client, hashes) == payloads(hashes)


def _assert_stored(folder: Path, *seeds: int) -> None:
    """With no server on the folder: all of these prompts are in it."""
    with contextlib.closing(DiskStore(folder, 32 << 20)) as store:
        space = store.open(NAMESPACE, "", BLOCK_BYTES, LAYOUT.block_tokens)
        for seed in seeds:
            assert all(store.contains(space, chain(seed, 8))), f"prompt {seed} is not on disk"
            blocks = store.match(space, chain(seed, 8))
            for block, block_hash in zip(blocks, chain(seed, 8), strict=True):
                into = bytearray(BLOCK_BYTES)
                assert store.read([block], [memoryview(into)]) == [None]
                assert into == payload(block_hash)
            store.free(blocks)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_writes_that_fail_take_the_disk_down_with_a_sentence_and_it_comes_back_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    files = FaultyFiles()
    with _served(tmp_path / "data", files) as client:
        _set(client, 1)
        client.flush()
        files.fail("write", number)
        _set(client, 2)
        wait_until(lambda: not _is_up(client))
        sentence = (
            f"disk store {tmp_path / 'data'} failed: {os.strerror(number)}; going on with memory only, and retrying"
        )
        assert [record.getMessage() for record in caplog.records].count(sentence) == 1
        _set(client, 3)
        for seed in (1, 2, 3):
            _assert_served(client, seed)
        with pytest.raises(KvtierError, match="disk"):
            client.flush()
        assert client.stats()["disk_losses"]["device"] >= 1  # type: ignore[index]

        files.heal()
        wait_until(lambda: _is_up(client))
        _set(client, 4)
        client.flush()
        wait_until(lambda: held(client) == NOTHING_HELD)
    _assert_stored(tmp_path / "data", 1, 2, 3, 4)


def test_reads_that_fail_are_counted_misses_and_the_disk_is_used_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    with _served(tmp_path / "data", files, keeps_memory=False) as client:
        _set(client, 1)
        _set(client, 2)
        client.flush()
        wait_until(lambda: client.stats()["blocks"] == 0)
        files.fail("read_into", errno.EIO)
        assert read_all(client, chain(1, 8)) == []
        assert caplog.text.count("a block on disk cannot be read: Input/output error") == 1
        losses = client.stats()["disk_losses"]
        assert isinstance(losses, dict)
        assert 1 <= losses["unreadable"] <= 8
        files.heal()
        _assert_served(client, 2)
        client.set(chain(1, 8), payloads(chain(1, 8)))
        _assert_served(client, 1)
        assert _is_up(client)
        wait_until(lambda: held(client) == NOTHING_HELD)


def test_a_folder_deleted_while_running_is_made_again_with_what_is_in_memory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with _served(data) as client:
        _set(client, 1)
        client.flush()
        shutil.rmtree(data)
        _assert_served(client, 1)
        wait_until(lambda: (data / _DATA_NAME).exists() and _is_up(client))
        _set(client, 2)
        client.flush()
    _assert_stored(data, 1, 2)


@pytest.mark.parametrize("name", [_DATA_NAME, "records.kvtier", "lock"])
def test_any_file_deleted_while_running_is_made_again_with_what_is_in_memory(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    with _served(data) as client:
        _set(client, 1)
        client.flush()
        (data / name).unlink()
        wait_until(lambda: (data / name).exists() and _is_up(client))
        _set(client, 2)
        client.flush()
    _assert_stored(data, 1, 2)


def test_what_is_dropped_while_the_disk_is_down_does_not_come_back_with_it(tmp_path: Path) -> None:
    files = FaultyFiles()
    with _served(tmp_path / "data", files) as client:
        _set(client, 1)
        _set(client, 2)
        client.flush()
        files.fail("write", errno.EIO)
        _set(client, 3)
        wait_until(lambda: not _is_up(client))
        assert client.drop(chain(1, 8)) == 8
        files.heal()
        wait_until(lambda: _is_up(client))
        client.flush()
        assert not any(client.contains(chain(1, 8)))
        _assert_served(client, 2)
        _assert_served(client, 3)


def test_a_folder_that_cannot_be_made_again_comes_back_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    with _served(data) as client:
        _set(client, 1)
        client.flush()
        shutil.rmtree(data)
        data.write_text("something else is here")
        wait_until(lambda: not _is_up(client))
        assert caplog.text.count("its folder or file has disappeared") == 1
        _assert_served(client, 1)
        _set(client, 2)
        data.unlink()
        wait_until(lambda: _is_up(client))
        client.flush()
    _assert_stored(data, 1, 2)


@_needs_root
def test_a_full_disk_is_said_once_and_holds_what_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _mounted(tmp_path / "small", "size=2m") as mount:
        with _served(mount / "data", memory_bytes=32 << 20) as client:
            for seed in range(60):
                _set(client, seed)
            client.flush()
            for seed in range(60):
                _assert_served(client, seed)
            assert _is_up(client)
            assert caplog.text.count("the disk is full; continuing with") == 1
            assert 0 < client.stats()["disk_blocks"] < 480  # type: ignore[operator]
        _assert_stored(mount / "data", 59)


@_needs_root
def test_a_read_only_folder_is_refused_in_a_sentence_or_waited_for(tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "size=8m,ro") as mount:
        with pytest.raises(ConfigError, match=r"folder .* cannot be used: Read-only file system"), _served(mount):
            pass
        with _served(mount, needs_disk=False) as client:
            assert not _is_up(client)
            _set(client, 1)
            _assert_served(client, 1)
            subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
            wait_until(lambda: _is_up(client))
            client.flush()
        _assert_stored(mount, 1)


def test_a_second_server_on_the_folder_ends_with_one_sentence(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cache_server("--folder", str(data), "--disk", "8MiB"):
        arguments = ["--socket", str(tmp_path / "second.sock"), "--folder", str(data), "--disk", "8MiB"]
        second = subprocess.run(
            [sys.executable, "-m", "kvtier", "cache-server", "--memory", "8MiB", *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert second.returncode != 0
    assert second.stderr.strip() == f"Error: the KV cache folder {data} is in use by another process"
    assert not (tmp_path / "second.sock").exists()


def test_a_second_server_that_can_do_without_takes_the_folder_over_when_it_is_free(tmp_path: Path) -> None:
    data = tmp_path / "data"
    options = ("--folder", str(data), "--disk", "8MiB")
    with cache_server(*options, "--disk-optional") as first, open_client(first.unix) as client:
        _set(client, 1)
        client.flush()
        with cache_server(*options, "--disk-optional") as second, open_client(second.unix) as other:
            assert not _is_up(other)
            _set(other, 2)
            _assert_served(other, 2)
            first.stop()
            wait_until(lambda: _is_up(other))
            _assert_served(other, 1)
            other.flush()
    _assert_stored(data, 1, 2)


def test_a_newer_format_is_refused_in_a_sentence_untouched_and_can_be_done_without(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with _served(data) as client:
        _set(client, 1)
    records = data / "records.kvtier"
    raw = encode_header(Header(9, 256)) + records.read_bytes()[HEADER_BYTES:]
    records.write_bytes(raw)

    with pytest.raises(ConfigError, match="has format version 9, which this kvtier does not know"), _served(data):
        pass
    with _served(data, needs_disk=False) as client:
        assert not _is_up(client)
        _set(client, 2)
        _assert_served(client, 2)
    assert records.read_bytes() == raw


def test_no_error_reaches_clients_while_the_disk_comes_and_goes(tmp_path: Path) -> None:
    files = FaultyFiles()
    failures: list[object] = []
    is_over = threading.Event()
    with _served(tmp_path / "data", files, memory_bytes=2 << 20, file_bytes=4 << 20) as client:

        def work(first_seed: int) -> None:
            seed = first_seed
            while not is_over.is_set():
                hashes = chain(seed % 400, 4)
                try:
                    client.set(hashes, payloads(hashes))
                    read = read_all(client, chain((seed * 7) % 400, 4))
                    if read != payloads(chain((seed * 7) % 400, 4))[: len(read)]:
                        failures.append("wrong bytes")
                except Exception as error:
                    failures.append(error)
                    return
                seed += 2

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            files.fail("write", errno.EIO)
            wait_until(lambda: not _is_up(client))
            files.heal()
            wait_until(lambda: _is_up(client))
        is_over.set()
        for thread in threads:
            thread.join()
        assert failures == []
        with contextlib.suppress(TierRefused):  # what left memory while the disk was away
            client.flush()
        client.flush()
        wait_until(lambda: held(client) == NOTHING_HELD)


class _BrokenFiles(FaultyFiles):
    """Files under a bug: a write of payloads raises what no device raises."""

    is_broken = False

    def write(self, fd: int, parts: Sequence[memoryview | bytes], offset: int) -> None:
        if self.is_broken:
            raise RuntimeError("a bug")
        super().write(fd, parts, offset)


def test_a_writer_that_fails_by_a_bug_is_not_silent_and_is_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = _BrokenFiles()
    with _served(tmp_path / "data", files) as client:
        files.is_broken = True
        _set(client, 1)
        with pytest.raises(TierRefused, match="the disk is down: blocks in memory were not written to it"):
            client.flush()
        assert not _is_up(client)
        assert client.stats()["disk_losses"]["internal error"] >= 1
        assert "RuntimeError: a bug" in caplog.text
        _assert_served(client, 1)
        files.is_broken = False
        wait_until(lambda: _is_up(client))
        client.flush()
    _assert_stored(tmp_path / "data", 1)


def test_a_record_at_the_end_of_all_numbers_stops_no_write(tmp_path: Path) -> None:
    with _served(tmp_path / "data") as client:
        _set(client, 1)
        client.flush()
    records = tmp_path / "data" / "records.kvtier"
    raw = bytearray(records.read_bytes())
    first = next(record for record in decode_records(memoryview(raw)[HEADER_BYTES:]) if record is not None)
    assert isinstance(first, BlockRecord)
    raw[HEADER_BYTES : HEADER_BYTES + RECORD_BYTES] = encode_block(first._replace(sequence=2**64 - 1), 0)
    records.write_bytes(raw)
    with _served(tmp_path / "data") as client:
        assert client.stats()["disk_losses"] == {"damaged record": 1}
        _set(client, 2)
        client.flush()
    _assert_stored(tmp_path / "data", 2)


def test_a_flush_fails_once_for_blocks_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    with _served(tmp_path / "data", file_bytes=2 << 20) as client:
        seed = 0
        while True:  # at most half of the disk can be pinned by a client; a folder can say that all of it is
            _set(client, seed)
            client.flush()
            if client.stats()["disk_evicted_blocks"]:
                break
            seed += 1
    records = tmp_path / "data" / "records.kvtier"
    raw = bytearray(records.read_bytes())
    for number, record in enumerate(decode_records(memoryview(raw)[HEADER_BYTES:])):
        if isinstance(record, BlockRecord):
            start = HEADER_BYTES + number * RECORD_BYTES
            raw[start : start + RECORD_BYTES] = encode_block(record._replace(is_pinned=True), number)
    records.write_bytes(raw)
    with _served(tmp_path / "data", file_bytes=2 << 20) as client:
        _set(client, seed + 1)
        with pytest.raises(TierRefused, match="blocks are not on disk: all of it is in use or pinned"):
            client.flush()
        client.flush()
        _assert_served(client, seed + 1)


def test_a_flush_fails_for_blocks_that_left_memory_before_the_disk_came_to_them(tmp_path: Path) -> None:
    files = FaultyFiles()
    with _served(tmp_path / "data", files, memory_bytes=1 << 20) as client:
        files.delay_s = 0.3
        for seed in range(40):
            _set(client, seed)
        with pytest.raises(TierRefused, match="the disk did not keep up, and they were evicted from memory"):
            client.flush()
