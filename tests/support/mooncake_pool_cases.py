"""The cases of a real Mooncake pool: `tests/contract/test_mooncake_pool.py` runs them where loopback is all there is.

Mooncake listens on every interface and asks nobody who they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mooncake
import pytest

from kvtier.deploy.check.mooncake import notes_on_mooncake
from kvtier.errors import TierError, TierTimeout
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.mooncake.config import MooncakeConfig
from kvtier.testing.signals import send_signal
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, MakeTier, chain, empty_buffers, fetch_all, payloads
from kvtier.tiers.mooncake import MooncakeTier, open_mooncake_tier
from kvtier.tiers.tier import Tier
from tests.contract.test_mooncake_tier import MooncakeTierContract
from tests.support.mooncake import free_port
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

MEMORY_BYTES = 64 << 20
SHORT_S = 0.3


class Master:
    def __init__(self) -> None:
        assert {name for _, name in socket.if_nameindex()} == {"lo"}
        self.port, self._metrics_port = free_port(), free_port()
        self.start()

    def start(self) -> None:
        program = Path(next(iter(mooncake.__path__))) / "mooncake_master"
        addresses = ["-rpc_address=127.0.0.1", f"-rpc_port={self.port}", "-metrics_host=127.0.0.1"]
        self.process = subprocess.Popen(
            [str(program), *addresses, f"-metrics_port={self._metrics_port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, "the master listens")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def config(self, **more: Any) -> MooncakeConfig:
        settings = {"memory": MEMORY_BYTES, "buffer": 1 << 20, "timeout_s": CALL_S, "trusted_network": True, **more}
        return MooncakeConfig(master=f"127.0.0.1:{self.port}", **settings)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    running = Master()
    yield running
    running.kill()


@pytest.fixture
def own_master() -> Iterator[Master]:
    """For a test that kills it."""
    running = Master()
    yield running
    running.kill()


@contextlib.contextmanager
def opened(master: Master, **more: Any) -> Iterator[MooncakeTier]:
    with contextlib.closing(open_mooncake_tier(master.config(**more), LAYOUT, NAMESPACE, TierMetrics())) as tier:
        assert tier.blocks.client.wait_until_ready(LIMIT_S), tier.blocks.client.why_not
        yield tier


class TestMooncakePool(MooncakeTierContract):
    @pytest.fixture
    def make_tier(self, master: Master) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                tier = stack.enter_context(opened(master))
                tier.drop()
                return tier

            yield make


def test_what_one_engine_stores_another_loads(master: Master) -> None:
    hashes = chain(1, 40)
    with opened(master) as one, opened(master, memory=0) as other:
        assert one.offer(hashes, payloads(hashes)) == 40
        assert fetch_all(other, hashes) == payloads(hashes)
        assert other.offer(chain(2, 3), payloads(chain(2, 3))) == 3, "into the memory that the first one lends"
        assert fetch_all(one, chain(2, 3)) == payloads(chain(2, 3))
        assert one.drop() == 43


def test_an_object_of_another_size_is_a_miss(master: Master) -> None:
    hashes = chain(1, 2)
    with opened(master) as tier:
        assert tier.offer(hashes, payloads(hashes)) == 2
        blocks = tier.blocks
        keys = [blocks.key_of(block_hash) for block_hash in hashes]
        for key, nbytes in zip(keys, (100, 1 << 16), strict=True):
            assert blocks.client.begin("remove", [key]).wait(time.monotonic() + CALL_S) == [0]
            assert blocks.client.begin("put", [key], [0], nbytes).wait(time.monotonic() + CALL_S) == [0]
        for block_hash in hashes:
            with tier.match([block_hash]) as lease:
                assert lease.num_blocks == 1
                assert lease.fetch(empty_buffers(1)) == 0
        assert blocks.client.begin("exist", keys).wait(time.monotonic() + CALL_S) == [0, 0]


def test_a_master_that_hangs_costs_a_deadline_and_is_used_again_when_it_answers(master: Master) -> None:
    hashes = chain(1, 4)
    with opened(master) as tier:
        assert tier.offer(hashes, payloads(hashes)) == 4
        hasty = MooncakeTier(tier.blocks, LAYOUT, timeout_s=SHORT_S)
        lease = hasty.match(hashes)
        send_signal(master.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TierTimeout):
                hasty.match(chain(2, 4))
            into = empty_buffers(4)
            assert lease.fetch(into) == 0
            assert tier.blocks.num_busy_slots == 4
        finally:
            master.process.send_signal(signal.SIGCONT)
        lease.release()
        wait_until(lambda: tier.blocks.num_busy_slots == 0, "the late load is over")
        assert into == empty_buffers(4)
        assert tier.offer(chain(3, 4), payloads(chain(3, 4))) == 4
        assert fetch_all(tier, chain(3, 4)) == payloads(chain(3, 4))


def test_a_master_that_is_killed_is_a_miss_and_is_used_when_it_is_back(own_master: Master) -> None:
    master = own_master
    seeds = iter(range(10, 10_000))
    with opened(master) as tier:
        assert tier.offer(chain(1, 4), payloads(chain(1, 4))) == 4
        with tier.match(chain(1, 4)) as lease:
            master.kill()
            lease.fetch(empty_buffers(4))
        with pytest.raises(TierError):
            tier.match(chain(2, 4))
        assert any("does not answer" in note for note in notes_on_mooncake(master.config()))
        master.start()

        def takes() -> bool:
            hashes = chain(next(seeds), 2)
            with contextlib.suppress(TierError):
                return tier.offer(hashes, payloads(hashes)) == 2 and fetch_all(tier, hashes) == payloads(hashes)
            return False

        wait_until(takes, "the pool takes and gives blocks again")
        assert list(notes_on_mooncake(master.config())) == []


def test_a_host_that_dies_costs_its_blocks_and_no_more(own_master: Master) -> None:
    hashes = chain(1, 4)
    with opened(own_master) as one, opened(own_master, memory=0) as other:
        assert one.offer(hashes, payloads(hashes)) == 4
        with other.match(hashes) as lease:
            assert lease.num_blocks == 4
            process_id = one.blocks.client.process_id
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)
            wait_until(lambda: one.blocks.client.why_not != "", "it is gone")
            hasty = MooncakeTier(other.blocks, LAYOUT, timeout_s=SHORT_S)
            with contextlib.suppress(TierError), hasty.match(hashes) as weak:
                assert weak.fetch(empty_buffers(4)) == 0
        assert one.blocks.client.wait_until_ready(LIMIT_S), "its process is started again"
        wait_until(lambda: other.blocks.num_busy_slots == 0, "late loads are over")
        seeds = iter(range(10, 10_000))

        def shares() -> bool:
            new = chain(next(seeds), 2)
            with contextlib.suppress(TierError):
                return one.offer(new, payloads(new)) == 2 and fetch_all(other, new) == payloads(new)
            return False

        wait_until(shares, "what it lends now is used")


def test_an_engine_may_start_before_its_master(own_master: Master) -> None:
    master = own_master
    master.kill()
    config = master.config()
    with contextlib.closing(open_mooncake_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as tier:
        with pytest.raises(TierError, match="does not answer"):
            tier.match(chain(1, 1))
        master.start()
        assert tier.blocks.client.wait_until_ready(LIMIT_S)
        assert tier.offer(chain(1, 2), payloads(chain(1, 2))) == 2
