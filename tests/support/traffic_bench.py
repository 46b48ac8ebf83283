"""A device of plain memory over real tiers, with a clock of the test's: what tests of `transfer` run on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.memory.lease import Lease
from kvtier.testing.faults import WrappedTier
from kvtier.testing.tier_contract import LAYOUT, chain, payload
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostTier
from kvtier.tiers.speeds import Speeds
from kvtier.tiers.tier import Tier
from kvtier.transfer.load import Load, LoadPlan, Order
from kvtier.transfer.matching import TierMatch
from kvtier.transfer.traffic import Traffic
from tests.support.host_device import HostDevice
from tests.support.waiting import wait_until as until

CHUNK_TOKENS = 1024


class _FarLease:
    """A lease whose blocks lie elsewhere, and that counts its releases."""

    arena = None
    offsets = ()

    def __init__(self, inner: Lease) -> None:
        self.inner = inner
        self.num_blocks = self.num_ready_at_match = inner.num_blocks
        self.num_stored = inner.num_stored
        self.stored_in = inner.stored_in
        self.ended = inner.ended
        self.has_views = False
        self.num_released = 0

    def wait(self, count: int | None = None) -> int:
        return self.inner.wait(count)

    def views(self, first: int = 0, count: int | None = None) -> list[memoryview]:
        raise AssertionError("these blocks are not in this host's memory")

    def fetch(self, into: Sequence[bytes | bytearray | memoryview], first: int = 0) -> int:
        return self.inner.fetch(into, first)

    def release(self) -> None:
        self.num_released += 1
        self.inner.release()

    def __enter__(self) -> _FarLease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class FarTier(WrappedTier):
    """A tier out of reach of the device."""

    def __init__(self, num_blocks: int = 32) -> None:
        super().__init__(HostTier(LAYOUT, num_blocks * LAYOUT.slot_bytes, "far"))
        self.leases: list[_FarLease] = []

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        lease = _FarLease(super().match(hashes, timeout_s=timeout_s))
        self.leases.append(lease)
        return lease


@dataclass
class Bench:
    device: HostDevice
    host: HostTier
    traffic: Traffic
    speeds: Speeds
    now: list[float] = field(default_factory=lambda: [0.0])

    def match(self, hashes: list[BlockHash], first: int = 0) -> TierMatch:
        fetch = self.traffic.matcher.match(first, hashes[first:])
        until(lambda: not fetch.is_matching)
        return fetch

    def load(self, fetch: TierMatch, hashes: list[BlockHash], order: Order = Order.FRONT) -> Load:
        """All of the first span, into blocks of the device numbered like those of the prompt."""
        span = fetch.spans[0]
        plan = LoadPlan(span, span.first, span.end, order, None, 2)
        ids = list(range(span.first, span.end))
        load = self.traffic.loading.load(fetch, plan, hashes[span.first : span.end], ids, 0)
        return load

    def loaded(self, hashes: list[BlockHash]) -> list[bool]:
        return [self.device.block(position) == payload(hashes[position]) for position in range(len(hashes))]

    def is_free(self) -> bool:
        """No block of the host's tier is leased or staged."""
        spare = chain(99, self.host.num_blocks)
        with self.host.reserve(spare) as reservation:
            return reservation.num_blocks == self.host.num_blocks


Open = Callable[..., Bench]


def computes(speeds: Speeds, block_s: float) -> None:
    """The device takes so long for a block."""
    for num_blocks in (4, 40, 4, 40, 4, 40):
        speeds.note_prefill([(0, num_blocks * LAYOUT.block_tokens)], num_blocks * block_s)


def loads(speeds: Speeds, tier: str, block_s: float) -> None:
    for num_blocks in (4, 40, 4, 40, 4, 40):
        speeds.note_load(tier, num_blocks * LAYOUT.block_bytes, num_blocks * block_s)


@contextlib.contextmanager
def benches() -> Iterator[Open]:
    """Makes any number of them, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(*behind: Tier, num_blocks: int = 48, always_loads: bool = False) -> Bench:
            device = HostDevice()
            host = HostTier(LAYOUT, num_blocks * LAYOUT.slot_bytes)
            now = [0.0]
            speeds = Speeds()
            traffic = Traffic(
                Hierarchy([host, *behind], clock=lambda: now[0]),
                device,
                speeds,
                layout=LAYOUT,
                chunk_tokens=CHUNK_TOKENS,
                always_loads=always_loads,
                clock=lambda: now[0],
            )
            stack.callback(traffic.close)
            stack.callback(device.gate.set)
            return Bench(device, host, traffic, speeds, now)

        yield make
