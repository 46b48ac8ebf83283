"""A Mooncake pool that fails, over the stand-in of `tests.support.mooncake`: what is lost is a miss, and told."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.deploy.check.mooncake import notes_on_mooncake
from kvtier.errors import ConfigError, TierError, TierTimeout, TierUnavailable
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.mooncake.blocks import MooncakeBlocks, value_bytes
from kvtier.stores.mooncake.config import MooncakeConfig, check_is_installed, open_blocks
from kvtier.stores.mooncake.failed_keys import FailedKeys
from kvtier.stores.mooncake.slots import Slots
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, empty_buffers, fetch_all, payloads
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.mooncake import MooncakeTier, open_mooncake_tier
from tests.support.mooncake import Fault, StandInMaster, free_port, stand_in_master
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

BLOCK_BYTES = LAYOUT.block_bytes
SHORT_S = 0.2
"""A deadline that is meant to be missed."""


@pytest.fixture
def master() -> Iterator[StandInMaster]:
    with stand_in_master() as running:
        yield running


@pytest.fixture
def losses() -> Counter[str]:
    return Counter()


@pytest.fixture
def blocks(master: StandInMaster, losses: Counter[str]) -> Iterator[MooncakeBlocks]:
    with opened(master, losses) as found:
        yield found


@contextlib.contextmanager
def opened(master: StandInMaster, losses: Counter[str], **more: Any) -> Iterator[MooncakeBlocks]:
    def count(kind: str, times: int) -> None:
        losses[kind] += times

    with contextlib.closing(open_blocks(master.config(**more), NAMESPACE, BLOCK_BYTES, count)) as found:
        assert found.client.wait_until_ready(LIMIT_S), found.client.why_not
        yield found


@contextlib.contextmanager
def opened_tier(master: StandInMaster, metrics: TierMetrics, timeout_s: float) -> Iterator[MooncakeTier]:
    with contextlib.closing(open_mooncake_tier(master.config(), LAYOUT, NAMESPACE, metrics)) as opened_first:
        assert opened_first.blocks.client.wait_until_ready(LIMIT_S)
        yield MooncakeTier(opened_first.blocks, LAYOUT, timeout_s=timeout_s)


def soon() -> float:
    return time.monotonic() + CALL_S


def put(blocks: MooncakeBlocks, seed: int, count: int) -> list[bool]:
    hashes = chain(seed, count)
    return blocks.put(hashes, [memoryview(payload) for payload in payloads(hashes)], soon())


def get(blocks: MooncakeBlocks, seed: int, count: int, deadline: float) -> tuple[list[bool], list[bytearray]]:
    into = empty_buffers(count)
    return blocks.get(chain(seed, count), [memoryview(buffer) for buffer in into], deadline), into


# --- memory of a call that is late ---------------------------------------------------------------------------------


def test_a_load_that_comes_too_late_writes_to_no_memory_that_others_have(
    master: StandInMaster, blocks: MooncakeBlocks
) -> None:
    assert all(put(blocks, 1, 4))
    assert all(put(blocks, 2, 4))
    master.fail("hang", "get")
    arrived, into = get(blocks, 1, 4, time.monotonic() + SHORT_S)
    assert arrived == [False] * 4
    wait_until(lambda: master.calls["get"] == 1)
    assert blocks.num_busy_slots == 4, "the call may still write there"
    before = [bytes(buffer) for buffer in into]
    for buffer in into:
        buffer[:] = b"\x11" * BLOCK_BYTES  # somebody else has this memory now
    master.fail(None)
    others = get(blocks, 2, 4, soon())

    master.resume.set()
    wait_until(lambda: blocks.num_busy_slots == 0, "the late call has returned")

    assert before == [b"\xa5" * BLOCK_BYTES] * 4
    assert [bytes(buffer) for buffer in into] == [b"\x11" * BLOCK_BYTES] * 4
    assert others[0] == [True] * 4
    assert [bytes(buffer) for buffer in others[1]] == payloads(chain(2, 4))


def test_slots_of_late_loads_are_given_to_nobody(master: StandInMaster, losses: Counter[str]) -> None:
    """Eight slots: two late loads have two batches of two under way each, and so all of them."""
    with opened(master, losses, buffer=8 * (value_bytes(BLOCK_BYTES) + 64)) as blocks:
        assert all(put(blocks, 1, 6))
        master.fail("hang", "get")
        for seed in (1, 2):
            assert not any(get(blocks, seed, 6, time.monotonic() + SHORT_S)[0])
        assert blocks.num_busy_slots == 8
        hashes = chain(4, 1)
        payload = memoryview(payloads(hashes)[0])
        assert blocks.put(hashes, [payload], time.monotonic() + SHORT_S) == [False]
        assert (blocks.num_busy_slots, master.calls["put"]) == (8, 3), "a store has none of them"
        assert losses["timeout"] == 4 + 4 + 1

        master.fail(None)
        master.resume.set()
        wait_until(lambda: blocks.num_busy_slots == 0)
        assert all(put(blocks, 5, 8))


def test_a_store_that_is_late_still_stores_the_bytes_that_it_was_given(
    master: StandInMaster, blocks: MooncakeBlocks
) -> None:
    hashes = chain(1, 3)
    source = [bytearray(payload) for payload in payloads(hashes)]
    master.fail("hang", "put")
    assert blocks.put(hashes, [memoryview(one) for one in source], time.monotonic() + SHORT_S) == [False] * 3
    for one in source:
        one[:] = bytes(BLOCK_BYTES)  # the caller's memory is the caller's again
    master.fail(None)
    master.resume.set()
    wait_until(lambda: len(master.objects) == 3 and blocks.num_busy_slots == 0)

    assert [value[:BLOCK_BYTES] for value in master.objects.values()] == payloads(hashes)


@pytest.mark.slow
def test_the_end_of_the_process_gives_back_what_its_calls_held(master: StandInMaster, blocks: MooncakeBlocks) -> None:
    assert all(put(blocks, 1, 4))
    master.fail("hang", "get")
    assert not any(get(blocks, 1, 4, time.monotonic() + SHORT_S)[0])
    process_id = blocks.client.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)

    wait_until(lambda: blocks.num_busy_slots == 0)
    master.fail(None)
    wait_until(lambda: blocks.client.process_id not in (None, process_id), "it is started again")
    assert blocks.client.wait_until_ready(LIMIT_S)
    assert blocks.find(chain(1, 1), soon()) == [False], "it failed a moment ago"
    assert all(put(blocks, 2, 2))


def test_a_tier_closes_while_calls_hang(master: StandInMaster, losses: Counter[str]) -> None:
    with opened(master, losses) as blocks:
        assert all(put(blocks, 1, 2))
        master.fail("hang", "get", "put", "exist")
        assert not any(get(blocks, 1, 2, time.monotonic() + SHORT_S)[0])
        with pytest.raises(TierTimeout):
            blocks.find(chain(2, 1), time.monotonic() + SHORT_S)
    with pytest.raises(TierUnavailable):
        blocks.find(chain(3, 1), soon())
    assert not any(put(blocks, 5, 1))


# --- a pool that is slow, gone or wrong ----------------------------------------------------------------------------


def test_calls_that_hang_cost_a_few_deadlines_and_then_nothing(master: StandInMaster, blocks: MooncakeBlocks) -> None:
    master.fail("hang", "exist")
    for _ in range(4):
        with pytest.raises(TierTimeout):
            blocks.find(chain(1, 1), time.monotonic() + SHORT_S)
    with pytest.raises(TierUnavailable, match="has not answered several calls yet"):
        blocks.find(chain(1, 1), time.monotonic() + 1e6)
    master.fail(None)
    master.resume.set()

    def answers() -> bool:
        with contextlib.suppress(TierUnavailable):
            return blocks.find(chain(1, 1), soon()) == [False]
        return False

    wait_until(answers, "it is asked again once it has answered")


def test_a_master_that_is_killed_is_a_miss(master: StandInMaster) -> None:
    metrics = TierMetrics()
    with opened_tier(master, metrics, CALL_S) as tier:
        hashes = chain(1, 3)
        assert tier.offer(hashes, payloads(hashes)) == 3
        lease = tier.match(hashes)
        master.close()

        assert lease.fetch(empty_buffers(3)) == 0
        lease.release()
        assert tier.match(hashes).ended is MatchEnd.TIER_DOWN, "these have failed a moment ago"
        hashes = chain(2, 3)
        with pytest.raises(TierUnavailable):
            tier.match(hashes)
        found = Hierarchy([tier], metrics=metrics).match(hashes)
        assert (found.num_blocks, found.ended) == (0, MatchEnd.TIER_DOWN)


@pytest.mark.parametrize("fault", ["lie", "short", "long"])
def test_damaged_blocks_are_misses_that_are_counted_and_removed(
    master: StandInMaster, blocks: MooncakeBlocks, losses: Counter[str], fault: Fault
) -> None:
    assert all(put(blocks, 1, 3))
    master.fail(fault, "get")

    assert get(blocks, 1, 3, soon())[0] == [False] * 3
    assert losses == {"corrupt": 3}
    assert not master.objects
    master.fail(None)
    assert blocks.find(chain(1, 3), soon()) == [False] * 3


def test_one_damaged_block_leaves_those_before_it(
    master: StandInMaster, blocks: MooncakeBlocks, losses: Counter[str]
) -> None:
    hashes = chain(1, 4)
    assert all(put(blocks, 1, 4))
    key = blocks.key_of(hashes[2])
    master.objects[key] = master.objects[blocks.key_of(hashes[3])]  # the right bytes, under the wrong key

    arrived, into = get(blocks, 1, 4, soon())

    assert arrived == [True, True, False, True]
    assert [bytes(buffer) for buffer in into[:2]] == payloads(hashes)[:2]
    assert losses == {"corrupt": 1}
    assert key not in master.objects


@pytest.mark.parametrize(("fault", "kind"), [("full", "full"), ("fail", "failed"), ("few", "unavailable")])
def test_what_a_pool_does_not_take_is_counted_and_not_tried_again_at_once(
    master: StandInMaster, blocks: MooncakeBlocks, losses: Counter[str], fault: Fault, kind: str
) -> None:
    master.fail(fault, "put")
    assert put(blocks, 1, 3) == [False] * 3
    assert losses == {kind: 3}
    master.fail(None)
    num_calls = master.calls["put"]
    assert put(blocks, 1, 3) == [False] * 3
    assert master.calls["put"] == num_calls
    blocks.drop(chain(1, 3), soon())
    assert put(blocks, 1, 3) == [True] * 3


@pytest.mark.parametrize("fault", ["fail", "few"])
def test_a_look_that_fails_is_no_miss_but_a_failure(
    master: StandInMaster, blocks: MooncakeBlocks, fault: Fault
) -> None:
    master.fail(fault, "exist")
    with pytest.raises(TierUnavailable):
        blocks.find(chain(1, 2), soon())


def test_a_block_that_failed_counts_as_absent_for_a_while(master: StandInMaster, blocks: MooncakeBlocks) -> None:
    assert all(put(blocks, 1, 2))
    master.fail("fail", "get")
    assert not any(get(blocks, 1, 2, soon())[0])
    master.fail(None)
    num_calls = master.calls["exist"]

    assert blocks.find(chain(1, 2), soon()) == [False, False]
    assert master.calls["exist"] == num_calls


def test_failed_keys_are_forgotten_after_fifteen_seconds() -> None:
    now = [100.0]
    failed = FailedKeys(lambda: now[0])
    one, other = chain(1, 2)
    failed.add([one])
    now[0] += 14.9
    assert (failed.has(one), failed.has(other)) == (True, False)
    now[0] += 0.2
    assert not failed.has(one)


def test_a_crash_of_mooncake_costs_its_process_and_not_this_one(
    master: StandInMaster, blocks: MooncakeBlocks, losses: Counter[str]
) -> None:
    assert all(put(blocks, 1, 2))
    crashed = blocks.client.process_id
    master.fail("crash", "get")

    assert not any(get(blocks, 1, 2, soon())[0])
    assert losses == {"unavailable": 2}
    master.fail(None)
    wait_until(lambda: blocks.client.process_id not in (None, crashed), "the process has ended, and another is there")
    wait_until(lambda: blocks.client.why_not == "", "it is ready")
    assert blocks.find(chain(2, 1), soon()) == [False]


def test_a_pool_that_is_not_there_yet_is_used_once_it_is(losses: Counter[str]) -> None:
    with stand_in_master() as master:
        master.fail("fail", "setup")
        config = master.config()
        with contextlib.closing(open_blocks(config, NAMESPACE, BLOCK_BYTES, lambda kind, count: None)) as blocks:
            wait_until(lambda: "could not be set up (code -900)" in blocks.client.why_not)
            with pytest.raises(TierUnavailable, match="could not be set up"):
                blocks.find(chain(1, 1), soon())
            assert not any(put(blocks, 2, 1))
            master.fail(None)
            assert blocks.client.wait_until_ready(LIMIT_S)
            assert all(put(blocks, 1, 1))


def test_memory_is_registered_once(master: StandInMaster, losses: Counter[str]) -> None:
    with opened(master, losses, memory=12345, host="engine.example") as blocks:
        assert all(put(blocks, 1, 40))
        assert all(get(blocks, 1, 40, soon())[0])
    assert master.calls["register"] == 1
    assert master.setups == [["engine.example", "P2PHANDSHAKE", "12345", "tcp", ""]]


def test_namespaces_do_not_see_each_other(master: StandInMaster, blocks: MooncakeBlocks) -> None:
    assert all(put(blocks, 1, 3))
    master.objects["another's"] = b"object"
    opening = open_blocks(master.config(), Namespace(bytes(32)), BLOCK_BYTES, lambda kind, count: None)
    with contextlib.closing(opening) as others:
        assert others.client.wait_until_ready(LIMIT_S)
        assert others.find(chain(1, 3), soon()) == [False] * 3
        assert others.drop(None, soon()) == 0
    assert blocks.drop(None, soon()) == 3
    assert list(master.objects) == ["another's"]


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trusted_network": False}, "Mooncake has no authentication, so .* write trusted_network: true"),
        ({"master": "host"}, "master must be host:port"),
        ({"master": "host:0"}, "master must be host:port"),
        ({"master": "host:999999999"}, "master must be host:port"),
        ({"master": ":1"}, "master must be host:port"),
        ({"master": "a\nb:1"}, "master must be text"),
        ({"metadata": "localhost"}, "metadata must be P2PHANDSHAKE, or begin with"),
        ({"protocol": "udp"}, "protocol must be tcp or rdma"),
        ({"device": "mlx5_0"}, "device is only for RDMA"),
        ({"device": "x" * 2000}, "device must be text of at most 1024"),
        ({"memory": -1}, "memory must be a number of bytes"),
        ({"memory": 1 << 60}, "memory must be a number of bytes"),
        ({"buffer": True}, "buffer must be a number of bytes"),
        ({"timeout_s": 0}, "timeout_s must be more than 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be more than 0"),
    ],
)
def test_what_cannot_work_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    usable: dict[str, Any] = {"master": "host:50051", "memory": 1 << 30, "trusted_network": True}
    MooncakeConfig(**usable)
    with pytest.raises(ConfigError, match=sentence):
        MooncakeConfig(**{**usable, **settings})


def test_a_buffer_that_holds_too_few_blocks_is_refused(master: StandInMaster) -> None:
    config = master.config(buffer=4 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="it must hold 8 of them"):
        open_blocks(config, NAMESPACE, BLOCK_BYTES, lambda kind, count: None)


def test_without_mooncake_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setattr(sys, "path", [])
    config = MooncakeConfig(master="127.0.0.1:1", memory=0, trusted_network=True)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[mooncake\]'"):
        check_is_installed()
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[mooncake\]'"):
        open_mooncake_tier(config, LAYOUT, NAMESPACE, TierMetrics())


def test_a_library_that_cannot_be_loaded_is_a_sentence(
    tmp_path: Path, master: StandInMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    blocks = open_blocks(master.config(), NAMESPACE, BLOCK_BYTES, lambda kind, count: None)
    with contextlib.closing(blocks), pytest.raises(ConfigError, match=r"libibverbs\.so\.1: cannot open"):
        blocks.client.wait_until_ready(LIMIT_S)


def test_a_check_says_whether_the_pool_can_be_used(master: StandInMaster) -> None:
    config = master.config()
    assert list(notes_on_mooncake(config)) == []
    assert not master.objects
    lends_nothing = msgspec.structs.replace(config, memory=0)
    master.fail("full", "put")
    [note] = notes_on_mooncake(lends_nothing)
    assert "no host lends memory to the pool, or it is full" in note
    master.fail("lie", "get")
    [note] = notes_on_mooncake(config)
    assert "does not give back what was written" in note
    nobody = msgspec.structs.replace(config, master=f"127.0.0.1:{free_port()}")
    [note] = notes_on_mooncake(nobody)
    assert "does not answer" in note


def test_slots_are_given_once() -> None:
    slots = Slots(10 * 128, 100)
    assert slots.count == 10
    taken = [slots.take(4, 0.0), slots.take(4, 0.0), slots.take(4, 0.0)]
    assert [len(offsets) for offsets in taken] == [4, 4, 2]
    assert len({offset for offsets in taken for offset in offsets}) == 10
    assert slots.take(1, 0.0) == []
    slots.give_back(taken[1])
    assert sorted(slots.take(9, 0.0)) == sorted(taken[1])


def test_a_whole_tier_never_raises_what_is_not_a_tier_error(master: StandInMaster) -> None:
    hashes = chain(1, 3)
    with opened_tier(master, TierMetrics(), SHORT_S) as tier:
        for fault in ("hang", "fail", "lie", "short", "long", "full", "few"):
            master.fail(fault)  # type: ignore[arg-type]
            for act in (lambda: tier.offer(hashes, payloads(hashes)), lambda: fetch_all(tier, hashes)):
                with contextlib.suppress(TierError):
                    assert act() in (0, 3, [], payloads(hashes))
        master.resume.set()
