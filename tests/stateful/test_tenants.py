"""Two tenants and the owner on one server over TCP, doing anything in any order.

Nobody ever sees, drops or alters what is another's, and nobody evicts what is within another's share.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.client import CacheClient
from kvtier.errors import TierFull, TierRefused
from kvtier.transport.address import TcpAddress, UnixAddress
from tests.support.actors import LAYOUT, NAMESPACE, chain, payload
from tests.support.examples import examples
from tests.support.waiting import CALL_S

SLOT_BYTES = 12 << 10
QUOTA_BLOCKS = 16
MEMORY_BLOCKS = 56
NAMES = ("alice", "bob")

names = st.sampled_from(NAMES)
prompts = st.tuples(st.integers(0, 4), st.integers(1, 8)).map(lambda one: chain(one[0], one[1]))


def payload_of(name: str, block_hash: BlockHash) -> bytes:
    """Another for each tenant: bytes of the wrong one show."""
    return bytes(value ^ NAMES.index(name) + 1 for value in payload(block_hash))


class Tenants(RuleBasedStateMachine):
    """Two tenants over TCP; a tenant within its share loses nothing to the others."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-")))
        (folder / "tenants.toml").write_text(
            "\n".join(
                f'[{name}]\ntoken = "the secret of {name}"\nmemory = {QUOTA_BLOCKS * SLOT_BYTES}' for name in NAMES
            )
        )
        config = CacheServerConfig(
            memory_bytes=MEMORY_BLOCKS * SLOT_BYTES,
            unix=UnixAddress(str(folder / "socket")),
            tcp=TcpAddress("127.0.0.1", 0),
            tenants_file=folder / "tenants.toml",
        )
        server = CacheServer(config)
        self._stack.callback(server.close)
        self.server = server
        self.clients: dict[str, CacheClient] = {
            name: self._stack.enter_context(
                kvtier.connect(
                    f"tcp://127.0.0.1:{server.tcp_port}",
                    token=f"the secret of {name}",
                    layout=LAYOUT,
                    namespace=NAMESPACE,
                    timeout_s=CALL_S,
                )
            )
            for name in NAMES
        }
        self.owner = self._stack.enter_context(
            kvtier.connect(f"unix:{folder / 'socket'}", layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S)
        )
        self.stored: dict[str, set[BlockHash]] = {name: set() for name in NAMES}
        self.dropped: dict[str, set[BlockHash]] = {name: set() for name in NAMES}

    def teardown(self) -> None:
        self._stack.close()

    @rule(name=names, hashes=prompts)
    def store(self, name: str, hashes: list[BlockHash]) -> None:
        with contextlib.suppress(TierFull):
            self.clients[name].set(hashes, [payload_of(name, block_hash) for block_hash in hashes])
        self.stored[name] |= set(hashes)

    @rule(hashes=prompts)
    def store_as_owner(self, hashes: list[BlockHash]) -> None:
        with contextlib.suppress(TierFull):
            self.owner.set(hashes, [payload(block_hash) for block_hash in hashes])

    @rule(name=names, hashes=prompts)
    def read(self, name: str, hashes: list[BlockHash]) -> None:
        into = [bytearray(LAYOUT.block_bytes) for _ in hashes]
        count = self.clients[name].get(hashes, into)
        assert set(hashes[:count]) <= self.stored[name]
        for block_hash, block in zip(hashes[:count], into, strict=False):
            assert block == payload_of(name, block_hash)

    @rule(name=names, hashes=prompts)
    def look(self, name: str, hashes: list[BlockHash]) -> None:
        client = self.clients[name]
        cached = {block_hash for block_hash, there in zip(hashes, client.contains(hashes), strict=True) if there}
        seen = {
            block_hash
            for block_hash, flags in zip(hashes, client.presence(NAMESPACE, hashes), strict=True)
            if flags  # evicted, too: of its own it may know that
        }
        assert cached <= seen <= self.stored[name] | self.dropped[name]
        assert {block_hash for block_hash, _ in client.list_blocks()} <= self.stored[name]

    @rule(name=names, hashes=prompts)
    def hold(self, name: str, hashes: list[BlockHash]) -> None:
        with self.clients[name].match(hashes) as lease:
            assert lease.num_blocks * SLOT_BYTES <= QUOTA_BLOCKS * SLOT_BYTES

    @rule(name=names, hashes=prompts)
    def pin(self, name: str, hashes: list[BlockHash]) -> None:
        with contextlib.suppress(TierRefused):
            self.clients[name].pin(hashes)

    @rule(name=names, hashes=prompts)
    def unpin(self, name: str, hashes: list[BlockHash]) -> None:
        self.clients[name].unpin(hashes)

    @rule(name=names, hashes=st.one_of(st.none(), prompts))
    def drop(self, name: str, hashes: list[BlockHash] | None) -> None:
        other = NAMES[1 - NAMES.index(name)]
        before = self._num_blocks(other)
        self.clients[name].drop(hashes)
        gone = self.stored[name] if hashes is None else set(hashes)
        self.dropped[name] |= gone
        self.stored[name] -= gone
        assert self._num_blocks(other) == before

    @rule(name=names)
    def flood(self, name: str) -> None:
        """As much as all of the memory, from one of them: the other keeps what is within its share."""
        other = NAMES[1 - NAMES.index(name)]
        before = self._num_blocks(other)
        for seed in range(1000, 1000 + MEMORY_BLOCKS // 8):
            hashes = chain(seed, 8)
            with contextlib.suppress(TierFull):
                self.clients[name].set(hashes, [payload_of(name, block_hash) for block_hash in hashes])
            self.stored[name] |= set(hashes)
        assert self._num_blocks(other) >= min(before, QUOTA_BLOCKS)

    @invariant()
    def shares_are_counted_rightly(self) -> None:
        for name, client in self.clients.items():
            stats = client.stats()
            assert stats["used_bytes"] == self._num_blocks(name) * SLOT_BYTES
            assert (stats["leases"], stats["reservations"], stats["held_bytes"]) == (0, 0, 0)

    def _num_blocks(self, name: str) -> int:
        return len(self.clients[name].list_blocks())


Tenants.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
TestTenants = Tenants.TestCase
