"""The disk behind a server: written in the background, read on demand, flushed when asked, whole after a stop."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvtier
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.cli.cache import cache
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, TierRefused
from kvtier.stores.disk import DiskStore
from kvtier.testing.servers import cache_server
from kvtier.transport.address import UnixAddress
from kvtier.wire.messages import LISTED_DISK, LISTED_MEMORY, LISTED_PINNED
from tests.support.actors import (
    BLOCK_BYTES,
    LAYOUT,
    NAMESPACE,
    NOTHING_HELD,
    chain,
    empty_buffers,
    held,
    open_client,
    payloads,
    read_all,
)
from tests.support.faulty_files import FaultyFiles
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

_DATA_NAME = "blocks.kvtier"
_SLOT_BYTES = LAYOUT.slot_bytes


@contextlib.contextmanager
def _served(folder: Path, files: FaultyFiles | None = None, **settings: object) -> Iterator[CacheClient]:
    values = {"memory_bytes": 8 << 20, "file_bytes": 32 << 20, "max_leased_bytes": 8 << 20, **settings}
    socket = folder.parent / "kvtier.sock"
    config = CacheServerConfig(unix=UnixAddress(str(socket)), folder=folder, **values)  # type: ignore[arg-type]
    server = CacheServer(config, files=files)
    try:
        with kvtier.connect(f"unix:{socket}", layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S) as client:
            yield client
    finally:
        server.close()


def _set(client: CacheClient, *seeds: int, num_blocks: int = 8) -> None:
    for seed in seeds:
        hashes = chain(seed, num_blocks)
        assert client.set(hashes, payloads(hashes)) == num_blocks


def _assert_served(client: CacheClient, *seeds: int, num_blocks: int = 8) -> None:
    for seed in seeds:
        hashes = chain(seed, num_blocks)
        assert read_all(client, hashes) == payloads(hashes), f"prompt {seed}"


def _stored(folder: Path, hashes: list[kvtier.BlockHash]) -> list[bool]:
    with contextlib.closing(DiskStore(folder, 32 << 20)) as store:
        return store.contains(store.open(NAMESPACE, "", BLOCK_BYTES, LAYOUT.block_tokens), hashes)


def _number(client: CacheClient, name: str) -> float:
    value = client.stats()[name]
    assert isinstance(value, int | float)
    return value


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_blocks_come_back_from_disk_after_a_stop_byte_for_byte(tmp_path: Path, transport: str) -> None:
    options = ("--folder", str(tmp_path / "data"), "--disk", "32MiB")
    for turn in range(2):
        with cache_server(*options, tcp=True) as server:
            with open_client(getattr(server, transport), server.token) as client:
                if not turn:
                    _set(client, *range(20))  # and no flush: a graceful stop does it
                else:
                    _assert_served(client, *range(20))
                    assert _number(client, "disk_read_blocks") == 160
                    _assert_served(client, *range(20))
                    assert _number(client, "disk_read_blocks") == 160, "what was read once is in memory"
                    streamed = [bytes(view) for _, view in client.stream_get(chain(3, 8))]
                    assert streamed == payloads(chain(3, 8))
            assert server.stop() == 0


def test_memory_that_is_read_into_becomes_resident_in_whole_pieces(tmp_path: Path) -> None:
    """A page at a time it would lie scattered, and reads into it would be slow for good."""
    options = ("--folder", str(tmp_path / "data"), "--disk", "32MiB")
    with cache_server(*options) as server, open_client(server.unix) as client:
        _set(client, 1)
        client.flush()
    with cache_server(*options) as server, open_client(server.unix) as client:
        read_all(client, chain(2, 1))  # nothing is found, but all that this needs is there now
        before = _arena_bytes(server.pid)
        _assert_served(client, 1)
        assert _number(client, "disk_read_blocks") == 8

        assert _arena_bytes(server.pid) - before >= 2 << 20


def _arena_bytes(pid: int) -> int:
    """How much of the arena is mapped in that process."""
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    heads = [place for place, line in enumerate(lines) if "kvtier-arena" in line]
    sizes = [next(line for line in lines[place:] if line.startswith("Rss:")) for place in heads]
    return 1024 * sum(int(size.split()[1]) for size in sizes)


def test_without_a_folder_nothing_is_kept_and_flush_returns_at_once(tmp_path: Path) -> None:
    with cache_server() as server, open_client(server.unix) as client:
        _set(client, 1)
        client.flush()
        assert "disk_up" not in client.stats()


def test_disk_only_keeps_blocks_on_disk_alone(tmp_path: Path) -> None:
    with _served(tmp_path / "data", keeps_memory=False, memory_bytes=1 << 20) as client:
        _set(client, *range(40))
        client.flush()
        wait_until(lambda: _number(client, "blocks") == 0)
        assert _number(client, "disk_blocks") == 320
        _assert_served(client, *range(40))
        wait_until(lambda: _number(client, "blocks") == 0 and held(client) == NOTHING_HELD)


def test_more_than_memory_holds_is_served_from_disk(tmp_path: Path) -> None:
    with _served(tmp_path / "data", memory_bytes=40 * _SLOT_BYTES) as client:
        for seed in range(30):
            _set(client, seed)
            client.flush()
        assert _number(client, "evicted_blocks") >= 200
        _assert_served(client, *range(30))
        wait_until(lambda: held(client) == NOTHING_HELD)
        assert client.stats()["disk_losses"] == {}


def test_a_slow_disk_slows_no_set_and_no_hit(tmp_path: Path) -> None:
    files = FaultyFiles()
    with _served(tmp_path / "data", files) as client:
        _set(client, 1000)
        client.flush()
        gate = threading.Event()
        files.before_write = lambda *_: gate.wait(LIMIT_S)
        _set(client, *range(20))
        _assert_served(client, *range(20))
        assert _number(client, "disk_queued_blocks") > 100, "the disk has written nothing yet"
        gate.set()
        client.flush()
        assert _number(client, "disk_queued_blocks") == 0
    assert all(_stored(tmp_path / "data", [block for seed in range(20) for block in chain(seed, 8)]))


def test_flush_waits_for_what_was_committed_before_it_and_not_for_what_came_after(tmp_path: Path) -> None:
    files = FaultyFiles()
    gate = threading.Event()
    with _served(tmp_path / "data", files) as client:
        _set(client, 1000)
        client.flush()
        files.before_write = lambda *_: gate.wait(LIMIT_S)
        _set(client, 1)
        flushed = threading.Event()

        def flush() -> None:
            client.flush()
            flushed.set()

        thread = threading.Thread(target=flush)
        thread.start()
        assert not flushed.wait(0.3)
        gate.set()
        thread.join()
        assert flushed.is_set()
        blocks = client.list_blocks()
        assert sum(bool(flags & LISTED_DISK) for _, flags in blocks) == 16


def test_a_listing_that_takes_several_answers_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cacheserver.admin_requests._MAX_LISTED", 3)
    with _served(tmp_path / "data", memory_bytes=16 * _SLOT_BYTES) as client:
        expected = []
        for seed in (1, 2, 3):
            _set(client, seed)
            client.flush()
            expected += chain(seed, 8)  # more than fits into memory
        assert {block_hash for block_hash, _ in client.list_blocks()} == set(expected)
        assert all(flags & LISTED_DISK for _, flags in client.list_blocks())


def test_what_is_safe_on_disk_leaves_memory_first(tmp_path: Path) -> None:
    files = FaultyFiles()
    gate = threading.Event()
    with _served(tmp_path / "data", files, memory_bytes=32 * _SLOT_BYTES) as client:
        oldest = chain(1, 2)

        def stand_still(data: memoryview, offset: int) -> None:
            if bytes(data[:32]) in oldest:
                gate.wait(LIMIT_S)

        files.before_write = stand_still
        _set(client, 1, num_blocks=2)
        for seed in range(2, 10):
            _set(client, seed)
            wait_until(lambda: _number(client, "disk_queued_blocks") == 2)
        listed = dict(client.list_blocks())
        assert [listed.get(block_hash) for block_hash in oldest] == [LISTED_MEMORY] * 2, "evicted before it was written"
        assert _number(client, "evicted_blocks") >= 34
        gate.set()
        client.flush()
        _assert_served(client, 1, num_blocks=2)
        _assert_served(client, *range(2, 10))
        assert client.stats()["disk_losses"] == {}


def test_store_on_reuse_writes_only_what_was_used_again(tmp_path: Path) -> None:
    with _served(tmp_path / "data", stores_on="reuse") as client:
        _set(client, 1, 2)
        client.flush()
        assert _number(client, "disk_blocks") == 0
        _assert_served(client, 2)
        client.flush()
        assert _number(client, "disk_blocks") == 8
    assert not any(_stored(tmp_path / "data", chain(1, 8)))
    assert all(_stored(tmp_path / "data", chain(2, 8)))


def test_over_its_budget_of_writes_only_what_is_used_again_goes_to_disk(tmp_path: Path) -> None:
    an_hour = 28 * _SLOT_BYTES  # three and a half prompts
    with _served(tmp_path / "data", disk_writes_per_day=24 * an_hour) as client:
        for seed in range(1, 8):
            _set(client, seed)
            client.flush()
        assert _number(client, "disk_written_blocks") == 2 * 8
        assert _number(client, "disk_withheld_blocks") == 5 * 8
        for seed in (7, 6, 5):
            _assert_served(client, seed)
            client.flush()
        assert _number(client, "disk_written_blocks") == 4 * 8
        assert _number(client, "disk_budget_left_bytes") == 0
    assert all(all(_stored(tmp_path / "data", chain(seed, 8))) for seed in (1, 2, 7, 6))


def test_a_block_that_is_used_while_it_is_being_written_is_written_once(tmp_path: Path) -> None:
    """And its memory is given back once: anything else would hand it to two others at a time."""
    files = FaultyFiles()
    with _served(tmp_path / "data", files, stores_on="reuse", memory_bytes=24 * _SLOT_BYTES) as client:
        _set(client, 1)
        files.delay_s = 0.05
        for _ in range(20):
            _assert_served(client, 1)
            time.sleep(0.01)
        files.delay_s = 0.0
        client.flush()
        assert _number(client, "disk_written_blocks") == 8
        for seed in range(2, 30):
            _set(client, seed)
            _assert_served(client, seed)
            if seed % 2:
                client.flush()  # a slow disk would have all of the memory being written, and no room for the next
        wait_until(lambda: held(client) == NOTHING_HELD)
        assert _number(client, "used_bytes") + _number(client, "free_bytes") == 24 * _SLOT_BYTES
        for seed in range(30):
            read = read_all(client, chain(seed, 8))
            assert read == payloads(chain(seed, 8))[: len(read)]


def test_dropped_blocks_are_gone_from_memory_and_disk_also_those_being_written(tmp_path: Path) -> None:
    files = FaultyFiles()
    with _served(tmp_path / "data", files) as client:
        _set(client, 1)
        client.flush()
        files.delay_s = 0.1
        _set(client, 2)
        time.sleep(0.05)
        client.drop()
        files.delay_s = 0.0
        client.flush()
        assert not any(client.contains(chain(1, 8) + chain(2, 8)))
    assert not any(_stored(tmp_path / "data", chain(1, 8) + chain(2, 8)))


def test_a_prompt_loses_its_end_on_disk_before_its_beginning(tmp_path: Path) -> None:
    with _served(tmp_path / "data", file_bytes=1 << 20, keeps_memory=False) as client:
        hashes = chain(1, 48)
        _set(client, 1, num_blocks=48)
        client.flush()
        for seed in range(2, 7):
            _set(client, seed)
            client.flush()
        flags = client.contains(hashes)
        assert not all(flags)
        assert flags[0], "without its beginning the rest of it is of no use"


def test_pins_hold_on_disk_over_a_restart(tmp_path: Path) -> None:
    disk_bytes = 1 << 20
    with _served(tmp_path / "data", file_bytes=disk_bytes) as client:
        _set(client, 1)
        client.flush()
        assert client.pin(chain(1, 8)) == 8
    with _served(tmp_path / "data", file_bytes=disk_bytes, memory_bytes=40 * _SLOT_BYTES) as client:
        for seed in range(100, 130):
            _set(client, seed)
            client.flush()
        assert _number(client, "disk_evicted_blocks") > 0
        _assert_served(client, 1)


def test_recovery_says_what_came_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvtier")
    with _served(tmp_path / "data") as client:
        _set(client, 1, 2)
    count, numbers = _recovered(caplog.text)
    assert (count, numbers["block_size"], numbers["num_full_blocks"]) == ("0", "0", "0")
    assert numbers["num_free_blocks"] == numbers["num_blocks"]
    assert 32 << 20 >= int(numbers["num_blocks"]) * 4096 > 30 << 20
    caplog.clear()
    with _served(tmp_path / "data") as client:
        client.drop()
    count, numbers = _recovered(caplog.text)
    assert (count, numbers["block_size"], numbers["num_full_blocks"]) == ("16", "16", "16")
    assert int(numbers["num_free_blocks"]) == int(numbers["num_blocks"]) - 16
    assert 32 << 20 >= int(numbers["num_blocks"]) * _SLOT_BYTES > 30 << 20
    caplog.clear()
    with _served(tmp_path / "data"):
        pass
    count, numbers = _recovered(caplog.text)
    assert (count, numbers["num_full_blocks"]) == ("0", "0")


def _recovered(log: str) -> tuple[str, dict[str, str]]:
    """The number and the fields of a recovery's line, which are those of the documents the project comes from."""
    found = re.search(r"recover (\d+) blocks\. info: (\{.*\})", log)
    assert found is not None
    numbers = dict(re.findall(r"'(\w+)': (\d+)", found[2]))
    assert list(numbers) == ["block_size", "num_blocks", "num_full_blocks", "num_free_blocks"]
    return found[1], numbers


def test_a_corrupt_block_is_a_counted_miss_and_what_comes_before_it_is_served(tmp_path: Path) -> None:
    with _served(tmp_path / "data", keeps_memory=False) as client:
        _set(client, 1)
        client.flush()
        wait_until(lambda: _number(client, "blocks") == 0)
        _damage(tmp_path / "data", payloads(chain(1, 8))[5])
        assert read_all(client, chain(1, 8)) == payloads(chain(1, 8))[:5]
        assert client.stats()["disk_losses"] == {"corrupt": 1}
        with client.match(chain(1, 8)) as lease:
            into = empty_buffers(8)
            assert lease.fetch(into) == 5
        assert client.contains(chain(1, 8)) == [True] * 5 + [False] + [True] * 2
        client.set(chain(1, 8), payloads(chain(1, 8)))
        _assert_served(client, 1)


def test_settings_that_make_no_sense_are_refused_in_a_sentence(tmp_path: Path) -> None:
    unix = UnixAddress(str(tmp_path / "kvtier.sock"))
    with pytest.raises(ConfigError, match="needs both a folder"):
        CacheServerConfig(memory_bytes=1 << 20, unix=unix, folder=tmp_path)
    with pytest.raises(ConfigError, match="a server that keeps no blocks in memory needs a folder"):
        CacheServerConfig(memory_bytes=1 << 20, unix=unix, keeps_memory=False)


def _damage(folder: Path, payload: bytes) -> None:
    """Change one byte of the block on disk that has this payload."""
    raw = (folder / _DATA_NAME).read_bytes()
    with (folder / _DATA_NAME).open("r+b") as file:
        file.seek(raw.index(payload[:2000]) + 1000)
        file.write(b"\xff\x00\xff")


# --- the operator's commands -------------------------------------------------------------------------------------


def _run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(cache, list(arguments))
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture(params=["server", "folder"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """Two prompts on disk: what to say on the command line, and the folder."""
    data = tmp_path / "data"
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(_served(data))
        _set(client, 1, 2)
        client.flush()
        if request.param == "folder":
            stack.close()
            yield ["--folder", str(data)], data
        else:
            yield ["--server", f"unix:{tmp_path / 'kvtier.sock'}"], data


def test_stat_and_ls_say_what_is_there(where: tuple[list[str], Path]) -> None:
    options, _ = where
    line = next(line for line in _run("stat", *options).splitlines() if line.startswith(NAMESPACE.hex()[:12]))
    assert re.search(r" 16 +192KiB$", line), line
    listed = _run("ls", NAMESPACE.hex()[:8], *options).splitlines()
    assert {line.split()[0] for line in listed} == {block.hex() for block in chain(1, 8) + chain(2, 8)}
    assert all("disk" in line for line in listed)


def test_verify_names_a_corrupt_block_once(where: tuple[list[str], Path]) -> None:
    options, data = where
    assert "16 blocks read, 0 corrupt" in _run("verify", *options)
    _damage(data, payloads(chain(1, 8))[3])
    output = _run("verify", *options, status=1)
    assert f"corrupt: {chain(1, 8)[3].hex()}" in output
    assert "16 blocks read, 1 corrupt" in output
    output = _run("verify", *options)
    assert "15 blocks read, 0 corrupt" in output


def test_pin_and_drop_do_what_they_say(where: tuple[list[str], Path]) -> None:
    options, _ = where
    name = NAMESPACE.hex()
    one = chain(1, 8)[0].hex()
    assert "1 blocks pinned" in _run("pin", name, one, *options)
    pinned = [line for line in _run("ls", name, *options).splitlines() if "pinned" in line]
    assert [line.split()[0] for line in pinned] == [one]
    assert "1 blocks no longer pinned" in _run("pin", name, one, "--remove", *options)
    assert "pinned" not in _run("ls", name, *options)
    assert "16 blocks dropped" in _run("drop", name, *options)
    assert "0 blocks read" in _run("verify", *options)


def test_a_namespace_nobody_knows_is_one_sentence(where: tuple[list[str], Path]) -> None:
    options, _ = where
    assert _run("ls", "nobody", *options, status=1).startswith("Error: no namespace is called 'nobody'; there are: ")


def test_a_folder_in_use_and_a_server_that_is_not_there_are_one_sentence(tmp_path: Path) -> None:
    with _served(tmp_path / "data"):
        output = _run("stat", "--folder", str(tmp_path / "data"), status=1)
    assert output == f"Error: the KV cache folder {tmp_path / 'data'} is in use by another process\n"
    output = _run("stat", "--server", f"unix:{tmp_path / 'nobody'}", status=1)
    assert output.startswith("Error: ")
    assert output.count("\n") == 1


def test_a_folder_at_rest_is_not_changed_by_looking_at_it(tmp_path: Path) -> None:
    with _served(tmp_path / "data") as client:
        _set(client, 1)
    size = (tmp_path / "data" / _DATA_NAME).stat().st_size
    _run("stat", "--folder", str(tmp_path / "data"))
    _run("verify", "--folder", str(tmp_path / "data"))
    assert (tmp_path / "data" / _DATA_NAME).stat().st_size == size
    assert all(_stored(tmp_path / "data", chain(1, 8)))


def test_the_command_itself_runs(tmp_path: Path) -> None:
    with _served(tmp_path / "data") as client:
        _set(client, 1)
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "cache", "verify", "--folder", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "8 blocks read, 0 corrupt" in done.stdout


def test_a_pin_made_before_the_disk_has_the_block_holds_there_too(tmp_path: Path) -> None:
    files = FaultyFiles()
    with _served(tmp_path / "data", files) as client:
        files.delay_s = 0.2
        _set(client, 1)
        assert client.pin(chain(1, 8)) == 8
        files.delay_s = 0.0
        client.flush()
    with contextlib.closing(DiskStore(tmp_path / "data", 32 << 20)) as store:
        space = store.open(NAMESPACE, "", BLOCK_BYTES, LAYOUT.block_tokens)
        assert [is_pinned for _, is_pinned in store.blocks(space)] == [True] * 8


def test_presence_tells_of_pins_that_only_the_disk_remembers(tmp_path: Path) -> None:
    with _served(tmp_path / "data") as client:
        _set(client, 1)
        client.flush()
        assert client.pin(chain(1, 8)[:3]) == 3
    with _served(tmp_path / "data") as client:
        on_disk = client.presence(NAMESPACE, chain(1, 8))
        assert list(on_disk) == [LISTED_DISK | LISTED_PINNED] * 3 + [LISTED_DISK] * 5
        client.match(chain(1, 8)).release()
        loaded = client.presence(NAMESPACE, chain(1, 8))
        assert [bool(flags & LISTED_PINNED) for flags in loaded] == [True] * 3 + [False] * 5


def test_a_server_of_disk_alone_forgets_what_its_disk_has_no_room_for(tmp_path: Path) -> None:
    """Rather than keep it in memory for ever."""
    with _served(tmp_path / "data", file_bytes=1 << 20, memory_bytes=4 << 20, keeps_memory=False) as client:
        for seed in range(1, 40):
            _set(client, seed, num_blocks=32)
        with contextlib.suppress(TierRefused):  # some may have found no room
            client.flush()
        wait_until(lambda: client.stats()["used_bytes"] == 0)
