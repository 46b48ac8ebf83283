"""Blocks between an engine's pages on a GPU and host memory: what `PagedKv` moves on the CPU, byte for byte."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import LeaseError, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers.cuda_copier import CudaCopier, Way
from kvtier.transfer.copiers.geometry import Geometry, PageOrder
from kvtier.transfer.copiers.page_copier import page_copier
from tests.support.paged_kv import PagedKv
from tests.support.pages import NUM_PAGES, STRIDES, Case, moved, places_in, random_tensors
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    torch.ones(1, device="cuda")  # opens what stays open, before a test is watched for what it leaves behind
    importlib.import_module("kvtier.transfer.copiers.staging")

LAYOUT = KvLayout(layers=7, kv_heads=4, head_dim=128)
CHUNK_BYTES = 3 * LAYOUT.block_bytes + 5
PIECE_BYTES = 2 << 20
SHORT_CYCLES = 300_000_000  # of a kernel that does nothing: a sixth of a second
PATIENCE_S = LIMIT_S


class Stand:
    """Pages on a GPU and the same on the CPU, an arena and a copy of its bytes, and a copier that is watched."""

    def __init__(self, case: Case, num_heads: int = 4, first_head: int = 0, way: Way | None = None) -> None:
        layout = case.layout
        self.case, self.layout = case, layout
        self.twins = random_tensors(case, num_heads, 1)
        self.tensors = moved(self.twins, torch.device("cuda"))
        self.twin = PagedKv(self.twins, layout, PageOrder.ROWS, first_head=first_head)
        num_pages = 3 if case.page_tokens > 32 else NUM_PAGES - 1
        self.pages = random.Random(2).sample(range(NUM_PAGES), num_pages)
        blocks = range(num_pages * case.page_tokens // layout.block_tokens)
        self.blocks = random.Random(3).sample(blocks, min(len(blocks), 11))
        self.slots = random.Random(4).sample(range(16), len(self.blocks))
        self.arena = MappedArena.create(16 * layout.slot_bytes)
        with self.arena.view(0, self.arena.nbytes) as view:
            view[:] = random.Random(5).randbytes(self.arena.nbytes)
        self.expected = bytearray(self.host_bytes())
        geometry = Geometry(self.tensors, layout, first_head=first_head)
        self.copier = CudaCopier(geometry, way=way, chunk_bytes=CHUNK_BYTES, piece_bytes=PIECE_BYTES)

    @property
    def places(self) -> list[int]:
        return places_in(self.case, self.pages, self.blocks)

    @property
    def offsets(self) -> list[int]:
        return [slot * self.layout.slot_bytes for slot in self.slots]

    def register(self) -> None:
        self.copier.adopt(self.arena)
        registration = self.copier.registration(self.arena)
        assert registration is not None
        assert registration.wait(PATIENCE_S)

    def host_bytes(self) -> bytes:
        return ctypes.string_at(self.arena.address, self.arena.nbytes)

    def expect_stored(self) -> None:
        """The twin does the same to its copy of the arena."""
        for block, offset in zip(self.blocks, self.offsets, strict=True):
            slot = memoryview(self.expected)[offset : offset + self.layout.block_bytes]
            self.twin.read(self.pages, block * self.layout.block_tokens, [slot])

    def expect_loaded(self) -> None:
        """The twin does the same to its pages."""
        for block, offset in zip(self.blocks, self.offsets, strict=True):
            slot = self.expected[offset : offset + self.layout.block_bytes]
            self.twin.write(self.pages, block * self.layout.block_tokens, [slot])

    def assert_same(self) -> None:
        assert self.host_bytes() == self.expected
        for tensor, twin in zip(self.tensors, self.twins, strict=True):
            found, expected = (one.contiguous().view(torch.uint8) for one in (tensor.cpu(), twin))
            assert torch.equal(found, expected)

    def store(self) -> None:
        self.copier.store(self.places, self.arena, self.offsets, self.copier.mark()).wait()

    def load(self) -> None:
        self.copier.load(self.arena, self.offsets, self.places, self.copier.mark()).wait()

    def close(self) -> None:
        self.copier.close()
        self.arena.close()


@contextlib.contextmanager
def stand(case: Case, num_heads: int = 4, first_head: int = 0, way: Way | None = None) -> Iterator[Stand]:
    with contextlib.closing(Stand(case, num_heads, first_head, way)) as made:
        yield made


def case_of(strides: str, page_tokens: int = 16, layout: KvLayout = LAYOUT) -> Case:
    return Case(layout, page_tokens, PageOrder.ROWS, strides)


@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "pageable"])
@pytest.mark.parametrize("heads", [(4, 0), (2, 0), (2, 2), (1, 3)], ids=["all", "first half", "last half", "last"])
@pytest.mark.parametrize("page_tokens", [8, 16, 32, 128])
@pytest.mark.parametrize("strides", STRIDES)
def test_every_byte_comes_to_its_place_and_no_other_changes(
    strides: str, page_tokens: int, heads: tuple[int, int], is_registered: bool
) -> None:
    with stand(case_of(strides, page_tokens), *heads) as here:
        if is_registered:
            here.register()
        here.assert_same()

        here.expect_stored()
        here.store()
        here.assert_same()

        random.Random(9).shuffle(here.slots)
        here.expect_loaded()
        here.load()
        here.assert_same()


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("way", ["DIRECT", "STAGED"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_both_ways_move_the_same(strides: str, way: str, dtype: str) -> None:
    layout = KvLayout(layers=3, kv_heads=4, head_dim=80, dtype=dtype)
    with stand(case_of(strides, 16, layout), way=Way[way]) as here:
        here.register()
        here.expect_stored()
        here.store()
        random.Random(9).shuffle(here.slots)
        here.expect_loaded()
        here.load()
        here.assert_same()


def test_whole_blocks_go_directly_and_others_by_way_of_staging() -> None:
    layout = KvLayout(layers=28, kv_heads=4, head_dim=128)
    for strides, page_tokens, expected in (
        ("BLHNC", 16, Way.DIRECT),
        ("BLHNC", 32, Way.STAGED),
        ("LBHNC", 16, Way.STAGED),
        ("LBNHC", 16, Way.STAGED),
    ):
        tensors = moved(random_tensors(case_of(strides, page_tokens, layout), 4, 1), torch.device("cuda"))
        with contextlib.closing(page_copier(tensors, layout)) as copier:
            assert isinstance(copier, CudaCopier)
            assert copier.way is expected
            assert copier.is_whole


def test_making_a_copier_changes_no_page() -> None:
    with stand(case_of("LBNHC")) as here:
        here.assert_same()


@pytest.mark.parametrize("strides", ["LBHNC", "BLHNC"])
def test_copies_begin_after_their_mark(strides: str) -> None:
    with stand(case_of(strides)) as here:
        here.register()
        torch.cuda._sleep(SHORT_CYCLES)
        for tensor, twin in zip(here.tensors, here.twins, strict=True):
            tensor.fill_(3)
            twin.fill_(3)
        here.expect_stored()
        here.store()
        here.assert_same()

        here.arena.view(0, here.arena.nbytes)[:] = here.expected = bytearray(
            random.Random(6).randbytes(here.arena.nbytes)
        )
        torch.cuda._sleep(SHORT_CYCLES)
        before = [tensor.clone() for tensor in here.tensors]
        here.load()
        assert all((one == 3).all() for one in before), "the step before it read what was there"
        here.expect_loaded()
        here.assert_same()


@pytest.mark.parametrize("strides", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("num_heads", [4, 2])
def test_threads_load_and_store_at_once_while_the_arena_is_being_registered(strides: str, num_heads: int) -> None:
    layout, num_threads = LAYOUT, 5
    case = case_of(strides)
    twins = random_tensors(case, num_heads, 1)
    tensors = moved(twins, torch.device("cuda"))
    with contextlib.closing(MappedArena.create(400 * layout.slot_bytes)) as arena:
        copier = CudaCopier(Geometry(tensors, layout), chunk_bytes=layout.block_bytes, piece_bytes=PIECE_BYTES)
        with contextlib.closing(copier):
            copier.adopt(arena)

            def work(number: int) -> None:
                dice = random.Random(number)
                pages = [2 * number, 2 * number + 1]
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(25):
                        places = places_in(case, pages, dice.sample([0, 1], 2))
                        offsets = [(number + num_threads * dice.randrange(80)) * layout.slot_bytes, 0]
                        offsets[1] = (offsets[0] + num_threads * layout.slot_bytes) % (400 * layout.slot_bytes)
                        copier.store(places, arena, offsets, copier.mark()).wait()
                        for tensor in tensors:
                            tensor[pages] = 0
                        copier.load(arena, offsets, places, copier.mark()).wait()

            with ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(work, range(num_threads)))
            torch.cuda.synchronize()
            for tensor, twin in zip(tensors, twins, strict=True):
                assert torch.equal(tensor.cpu(), twin)


def test_an_arena_that_nobody_needs_is_unregistered() -> None:
    with stand(case_of("LBHNC")) as here:
        with contextlib.closing(MappedArena.create(8 * LAYOUT.slot_bytes)) as owners:
            arena = MappedArena.attach(os.dup(owners.fd), owners.nbytes)
        here.copier.adopt(arena)
        old = here.copier.registration(arena)
        assert old is not None
        assert old.wait(PATIENCE_S)
        here.copier.load(arena, [0], [0], here.copier.mark()).wait()

        del arena
        gc.collect()

        deadline = time.monotonic() + PATIENCE_S
        while old.covers(0, 1):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_closed_copiers_and_arenas_are_refused() -> None:
    with stand(case_of("LBHNC")) as here:
        arena = MappedArena.create(LAYOUT.slot_bytes)
        arena.close()
        with pytest.raises(LeaseError):
            here.copier.load(arena, [0], [0], here.copier.mark())
        here.copier.close()
        with pytest.raises(TierUnavailable, match="closed"):
            here.store()
