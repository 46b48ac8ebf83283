"""Blocks of one namespace in a Mooncake pool, under ``kvt1:<namespace>:<hash>``. Thread-safe.

A value is the payload, a magic number and an XXH3 over key and payload. In both directions, every value passes through
a slot of memory that Mooncake has registered: a late call may still write to a slot, so the slot stays taken until the
call is over, and no caller's buffer is ever within Mooncake's reach.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import LeaseError, TierError, TierTimeout, TierUnavailable
from kvtier.memory.checksum import checksum_of
from kvtier.memory.copying import address_of, copy_blocks
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.mooncake.client import Call, MooncakeClient
from kvtier.stores.mooncake.failed_keys import FailedKeys
from kvtier.stores.mooncake.slots import Slots

logger = logging.getLogger(__name__)

OnLoss: TypeAlias = Callable[[str, int], None]
_PlainAct: TypeAlias = Literal["exist", "remove", "remove_all"]
_TransferAct: TypeAlias = Literal["get", "put"]

_MAGIC = b"kvtmoon1"
_TRAILER = struct.Struct("<8sQ")
_LOOK_KEYS = 1024
_BATCH_BYTES = 64 << 20
_BATCHES = 4
"""A batch takes at most this part of the slots, so that several calls find room."""
_AHEAD = 2
_CLOSE_S = 10.0

_NOT_FOUND = -704
_TOO_SMALL = -600
"""The value under the key is longer than one of ours."""
_FULL = -200


def value_bytes(block_bytes: int) -> int:
    return block_bytes + _TRAILER.size


@dataclass(frozen=True, slots=True)
class _Batch:
    """The requested blocks from `first` on, and the slots that they pass through."""

    first: int
    hashes: Sequence[BlockHash]
    offsets: list[int]
    call: Call


class MooncakeBlocks:
    """Owns `client` and `arena`. `on_loss` is called with the kind of each loss and its number of blocks."""

    def __init__(
        self,
        client: MooncakeClient,
        arena: MappedArena,
        namespace: Namespace,
        block_bytes: int,
        *,
        on_loss: OnLoss = lambda kind, count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self._arena = arena
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._value_bytes = value_bytes(block_bytes)
        self._slots = Slots(arena.nbytes, self._value_bytes)
        self._batch_blocks = max(1, min(self._slots.count // _BATCHES, _BATCH_BYTES // self._value_bytes))
        self._failed = FailedKeys(clock)
        self._on_loss = on_loss
        self._log = LogLimit(logger)

    @property
    def num_busy_slots(self) -> int:
        """Slots of transfers in flight, and of late ones that are not over yet."""
        return self._slots.count - self._slots.num_free

    def key_of(self, block_hash: BlockHash) -> str:
        return f"kvt1:{self._namespace.hex()}:{block_hash.hex()}"

    def has_failed(self, block_hash: BlockHash) -> bool:
        """Whether the pool failed for this block a moment ago, so it is not asked again."""
        return self._failed.has(block_hash)

    def find(self, hashes: Sequence[BlockHash], deadline: float, *, prefix_only: bool = False) -> list[bool]:
        """Which blocks are present; those that failed a moment ago count as absent. Raises a `TierError`.

        With `prefix_only`, all blocks behind the first absent one may be reported as absent.
        """
        found = [False] * len(hashes)
        for first in range(0, len(hashes), _LOOK_KEYS):
            part = range(first, min(first + _LOOK_KEYS, len(hashes)))
            asked = [position for position in part if not self._failed.has(hashes[position])]
            if asked:
                codes = self._call("exist", [self.key_of(hashes[position]) for position in asked], deadline)
                for position, code in zip(asked, codes, strict=True):
                    if code < 0:
                        raise TierUnavailable(f"Mooncake could not look for blocks (code {code})")
                    found[position] = code == 1
            if prefix_only and not all(found[first : part.stop]):
                break
        return found

    def get(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], deadline: float) -> list[bool]:
        """Which blocks arrived whole. Stops soon after the first that did not."""
        arrived = [False] * len(hashes)

        def begin(first: int, offsets: list[int]) -> Call:
            return self._begin("get", hashes[first : first + len(offsets)], offsets)

        def finish(batch: _Batch, codes: list[int]) -> bool:
            damaged: list[BlockHash] = []
            for number, code in enumerate(codes):
                block_hash, offset = batch.hashes[number], batch.offsets[number]
                if code == self._value_bytes and self._copy_out(block_hash, offset, into[batch.first + number]):
                    arrived[batch.first + number] = True
                elif code > 0 or code == _TOO_SMALL:
                    damaged.append(block_hash)
                elif code != _NOT_FOUND:
                    self._fail("failed", [block_hash], f"it could not be read (code {code})")
            if damaged:
                self._discard_damaged(damaged, deadline)
            return all(arrived[batch.first : batch.first + len(batch.hashes)])

        self._transfer(hashes, begin, finish, deadline)
        return arrived

    def put(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], deadline: float) -> list[bool]:
        """Which blocks were written. Those that failed a moment ago are not tried."""
        wanted = [position for position, block_hash in enumerate(hashes) if not self._failed.has(block_hash)]
        names = [hashes[position] for position in wanted]
        written = [False] * len(hashes)

        def begin(first: int, offsets: list[int]) -> Call:
            for position, offset in enumerate(offsets, first):
                self._copy_in(names[position], blocks[wanted[position]], offset)
            return self._begin("put", names[first : first + len(offsets)], offsets)

        def finish(batch: _Batch, codes: list[int]) -> bool:
            for number, code in enumerate(codes):
                written[wanted[batch.first + number]] = code == 0
            for code in set(codes) - {0}:
                lost = [block_hash for block_hash, one in zip(batch.hashes, codes, strict=True) if one == code]
                self._fail("full" if code == _FULL else "failed", lost, f"it was not written (code {code})")
            return not any(codes)

        self._transfer(names, begin, finish, deadline)
        return written

    def drop(self, hashes: Sequence[BlockHash] | None, deadline: float) -> int:
        """Remove these, or all of the namespace. Returns how many existed. Raises a `TierError`."""
        self._failed.discard(hashes)
        if hashes is None:
            (count,) = self._call("remove_all", [f"^kvt1:{self._namespace.hex()}:"], deadline)
            if count < 0:
                raise TierUnavailable(f"Mooncake could not remove blocks (code {count})")
            return count
        return self._call("remove", [self.key_of(block_hash) for block_hash in hashes], deadline).count(0)

    def close(self) -> None:
        """Ends calls in flight, and with them everything that waits for them."""
        self.client.close()
        self._arena.stop_use(_CLOSE_S)
        self._arena.close()

    # --- private ---------------------------------------------------------------------------------------------------

    def _call(self, act: _PlainAct, keys: Sequence[str], deadline: float) -> list[int]:
        if not keys:
            return []
        codes = self.client.begin(act, keys).wait(deadline)
        if len(codes) != len(keys):
            raise TierUnavailable(f"Mooncake gave {len(codes)} answers for {len(keys)} blocks")
        return codes

    def _begin(self, act: _TransferAct, hashes: Sequence[BlockHash], offsets: list[int]) -> Call:
        return self.client.begin(act, [self.key_of(block_hash) for block_hash in hashes], offsets, self._value_bytes)

    def _transfer(
        self,
        hashes: Sequence[BlockHash],
        begin: Callable[[int, list[int]], Call],
        finish: Callable[[_Batch, list[int]], bool],
        deadline: float,
    ) -> None:
        """Run batches in order, beginning the next before finishing the last. Ends early after an incomplete batch.

        A batch's slots are given back when its call is over, however late.
        """
        under_way: list[_Batch] = []
        first = 0
        try:
            while first < len(hashes) or under_way:
                while first < len(hashes) and len(under_way) < _AHEAD:
                    # Only the first batch waits for slots: threads that hold some must not wait for each other.
                    offsets = self._taken(len(hashes) - first, deadline, may_wait=not under_way)
                    if not offsets:
                        break
                    with self._given_back_unless_begun(offsets):
                        call = begin(first, offsets)
                    under_way.append(_Batch(first, hashes[first : first + len(offsets)], offsets, call))
                    first += len(offsets)
                batch = under_way[0]
                codes = batch.call.wait(deadline)
                if len(codes) != len(batch.hashes):
                    raise TierUnavailable(f"Mooncake gave {len(codes)} answers for {len(batch.hashes)} blocks")
                is_whole = finish(batch, codes)
                self._give_back(under_way.pop(0))
                if not is_whole:
                    return
        except TierError as error:
            lost = [block_hash for batch in under_way for block_hash in batch.hashes]
            self._fail(error.kind, lost or hashes[first : first + 1], str(error))
        finally:
            for batch in under_way:
                self._give_back(batch)

    def _taken(self, num_wanted: int, deadline: float, *, may_wait: bool) -> list[int]:
        offsets = self._slots.take(min(num_wanted, self._batch_blocks), deadline if may_wait else 0.0)
        if may_wait and not offsets:
            raise TierTimeout("all memory for blocks on their way to and from Mooncake is in use")
        return offsets

    @contextlib.contextmanager
    def _given_back_unless_begun(self, offsets: list[int]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._slots.give_back(offsets)
            raise

    def _give_back(self, batch: _Batch) -> None:
        slots, offsets = self._slots, batch.offsets
        batch.call.when_over(lambda: slots.give_back(offsets))

    def _fail(self, kind: str, hashes: Sequence[BlockHash], why: str) -> None:
        self._failed.add(hashes)
        self._on_loss(kind, len(hashes))
        self._log.warning(kind, "mooncake: %d blocks: %s", len(hashes), why)

    def _discard_damaged(self, hashes: Sequence[BlockHash], deadline: float) -> None:
        """Remove them, so that they can be written again."""
        self._fail("corrupt", hashes, "they are damaged, and are removed")
        try:
            self._call("remove", [self.key_of(block_hash) for block_hash in hashes], deadline)
        except TierError as error:
            self._log.warning(error.kind, "mooncake: damaged blocks stay: %s", str(error))

    def _copy_in(self, block_hash: BlockHash, payload: memoryview, offset: int) -> None:
        with self._slot(offset) as slot, slot[: self._block_bytes] as copied:
            copy_blocks([self._arena.address + offset], [address_of(payload)], self._block_bytes)
            checksum = checksum_of(self._namespace, block_hash, copied)
            _TRAILER.pack_into(slot, self._block_bytes, _MAGIC, checksum)

    def _copy_out(self, block_hash: BlockHash, offset: int, into: memoryview) -> bool:
        """False if the value is not intact. The comparison uses the copy, which is out of Mooncake's reach."""
        with self._slot(offset) as slot:
            magic, checksum = _TRAILER.unpack_from(slot, self._block_bytes)
            copy_blocks([address_of(into)], [self._arena.address + offset], self._block_bytes)
        return bool(magic == _MAGIC) and checksum_of(self._namespace, block_hash, into) == checksum

    @contextlib.contextmanager
    def _slot(self, offset: int) -> Iterator[memoryview]:
        """Raises `TierUnavailable` once this is closed."""
        try:
            with self._arena.in_use(), self._arena.view(offset, self._value_bytes) as slot:
                yield slot
        except LeaseError:
            raise TierUnavailable("the Mooncake tier is closed") from None
