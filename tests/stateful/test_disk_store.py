"""The disk store against a dict: what is read is what was written, within the bound, over any restarts and crashes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier import BlockHash, Namespace
from kvtier.stores.disk import DiskStore, Written
from kvtier.stores.folder import MIN_FILE_BYTES
from kvtier.stores.stored_block import StoreSpace
from tests.support.examples import examples

_NAMESPACES = [Namespace(bytes([number]) * 32) for number in range(2)]
_SIZES = [3000, 3 * 4096]
_numbers = st.integers(0, 39)
_which = st.integers(0, 1)


def _hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


class DiskStoreMachine(RuleBasedStateMachine):
    """`written` are all that may be there; `pinned` must be."""

    def __init__(self) -> None:
        super().__init__()
        self._root = Path(tempfile.mkdtemp(prefix="kvtier-"))
        self._num_folders = 0
        self._generation = 0
        self.written: dict[tuple[int, int], bytes] = {}
        self.pinned: set[tuple[int, int]] = set()

    @initialize()
    def begin(self) -> None:
        self._folder = self._root / "0"
        self._space = MIN_FILE_BYTES + 24 * 4096
        self._open()

    def _open(self) -> None:
        self._store = DiskStore(self._folder, self._space)
        self._spaces: list[StoreSpace] = [
            self._store.open(namespace, "", size, 16) for namespace, size in zip(_NAMESPACES, _SIZES, strict=True)
        ]
        assert self._store.losses.keys() <= {"over the budget"}

    @rule(which=_which, number=_numbers)
    def write(self, which: int, number: int) -> None:
        self._generation += 1
        payload = (self._generation.to_bytes(8, "little") * 4096)[: _SIZES[which]]
        (outcome,) = self._store.write(self._spaces[which], [_hash(number)], [memoryview(payload)])
        if outcome is Written.NEW:
            self.written[which, number] = payload
        elif outcome is Written.NO_ROOM:
            assert self.pinned, "only pins can keep room from a block"

    @rule(which=_which, number=_numbers)
    def read(self, which: int, number: int) -> None:
        blocks = self._store.match(self._spaces[which], [_hash(number)])
        if (which, number) in self.pinned:
            assert blocks
        if blocks:
            into = bytearray(_SIZES[which])
            assert self._store.read(blocks, [memoryview(into)]) == [None]
            self._store.free(blocks)
            assert into == self.written[which, number]

    @rule(which=_which, number=_numbers)
    def read_what_was_just_written(self, which: int, number: int) -> None:
        self.write(which, number)
        if self._store.contains(self._spaces[which], [_hash(number)])[0]:
            self.read(which, number)
        else:
            assert self.pinned

    @rule(which=_which, numbers=st.lists(_numbers, max_size=4))
    def drop(self, which: int, numbers: list[int]) -> None:
        self._store.drop(self._spaces[which], [_hash(number) for number in numbers])
        for number in numbers:
            self.written.pop((which, number), None)
            self.pinned.discard((which, number))

    @rule(which=_which, number=_numbers)
    def pin(self, which: int, number: int) -> None:
        if self._store.pin(self._spaces[which], [_hash(number)]):
            self.pinned.add((which, number))

    @rule(which=_which, number=_numbers)
    def unpin(self, which: int, number: int) -> None:
        was_pinned = (which, number) in self.pinned
        assert self._store.unpin(self._spaces[which], [_hash(number)]) == was_pinned
        self.pinned.discard((which, number))

    @rule()
    def close_and_open_again(self) -> None:
        before = self._present()
        self._store.close()
        self._open()
        assert self._present() == before

    @rule()
    def crash(self) -> None:
        """The process ends now: pins that were not saved are lost, nothing else is."""
        before = self._present()
        saved = self._root / str(self._num_folders + 1)
        self._num_folders += 1
        saved.mkdir()
        for name in ("records.kvtier", "blocks.kvtier"):
            shutil.copy(self._folder / name, saved / name)
        self._store.close()
        shutil.rmtree(self._folder)
        self._folder = saved
        self._open()
        assert self._present() == before
        self.pinned = {
            (which, number)
            for which, space in enumerate(self._spaces)
            for block_hash, is_pinned in self._store.blocks(space)
            for number in [int.from_bytes(block_hash, "little")]
            if is_pinned
        }

    @rule()
    def save(self) -> None:
        self._store.flush(fsync=False)

    @invariant()
    def stays_within_its_bound(self) -> None:
        if hasattr(self, "_store"):
            files = [path.stat() for path in self._folder.iterdir()]
            assert sum(max(status.st_size, status.st_blocks * 512) for status in files) <= self._space
            assert self._present() <= self.written.keys()

    def _present(self) -> set[tuple[int, int]]:
        return {
            (which, int.from_bytes(block_hash, "little"))
            for which, space in enumerate(self._spaces)
            for block_hash, _ in self._store.blocks(space)
        }

    def teardown(self) -> None:
        if hasattr(self, "_store"):
            for which, number in self._present():
                self.read(which, number)
            assert self._store.losses.keys() <= {"over the budget"}
            self._store.close()
        shutil.rmtree(self._root)


TestDiskStore = DiskStoreMachine.TestCase
TestDiskStore.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
