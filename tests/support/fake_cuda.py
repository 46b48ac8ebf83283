"""torch's CUDA as far as copiers use it, on the host: what is handed to a stream happens at once.

Events are past while `may_pass` is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from typing import Any

import pytest
import torch

from kvtier.memory.cuda import Cudart
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers import cuda_copier
from kvtier.transfer.copiers.cuda_copier import CudaCopier, Way
from kvtier.transfer.copiers.geometry import Geometry
from tests.support.fake_cudart import FakeLibrary
from tests.support.paged_kv import PagedKv
from tests.support.pages import NUM_PAGES, Case, places_in, random_tensors
from tests.support.waiting import LIMIT_S

WAIT_S = LIMIT_S


class FakeStream:
    """`waited` are the events that it waits for, in order, each with the number of copies begun before."""

    cuda_stream = 1

    def __init__(self, cuda: FakeCuda, priority: int = 0) -> None:
        self._cuda = cuda
        self.priority = priority
        self.waited: list[tuple[object, int]] = []

    def wait_event(self, event: object) -> None:
        self.waited.append((event, len(self._cuda.library.batches)))

    def synchronize(self) -> None:
        assert self._cuda.may_pass.wait(WAIT_S)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return self._cuda.may_pass.is_set()

    def synchronize(self) -> None:
        assert self._cuda.may_pass.wait(WAIT_S)


class FakeCuda:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.library = FakeLibrary()
        self.may_pass = threading.Event()
        self.may_pass.set()
        self.current = FakeStream(self)
        fakes: dict[str, Any] = {
            "Event": lambda **options: FakeEvent(self),
            "Stream": lambda device, priority=0: FakeStream(self, priority),
            "current_stream": lambda device: self.current,
            "device": lambda device: contextlib.nullcontext(),
            "stream": lambda stream: contextlib.nullcontext(),
            "set_device": lambda device: None,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(cuda_copier, "load_cudart", lambda majors: Cudart(self.library))


def check_against_twin(case: Case, num_heads: int, first_head: int, way: Way, *, is_registered: bool) -> None:
    """A store and a load of some blocks change what `PagedKv` changes, and nothing else. With CUDA faked."""
    layout, dice = case.layout, random.Random(7)
    num_pages = 2 if case.page_tokens > 32 else NUM_PAGES - 1
    pages = dice.sample(range(NUM_PAGES), num_pages)
    all_blocks = range(num_pages * case.page_tokens // layout.block_tokens)
    blocks = dice.sample(all_blocks, min(5, len(all_blocks)))
    offsets = [slot * layout.slot_bytes for slot in dice.sample(range(8), len(blocks))]
    places = places_in(case, pages, blocks)
    tensors, twins = (random_tensors(case, num_heads, 1) for _ in range(2))
    twin = PagedKv(twins, layout, case.order, first_head=first_head)
    with contextlib.closing(MappedArena.create(8 * layout.slot_bytes)) as arena:
        with arena.view(0, arena.nbytes) as view:
            view[:] = dice.randbytes(arena.nbytes)
        expected = bytearray(ctypes.string_at(arena.address, arena.nbytes))
        copier = CudaCopier(
            Geometry(tensors, layout, first_head=first_head),
            2,
            way=way,
            chunk_bytes=2 * layout.block_bytes,
            min_grouped_bytes=0,
            switch_interval_s=None,
        )
        with contextlib.closing(copier):
            if is_registered:
                copier.adopt(arena)
                registration = copier.registration(arena)
                assert registration is not None
                assert registration.wait(WAIT_S)

            copier.store(places, arena, offsets, copier.mark()).wait()
            for block, offset in zip(blocks, offsets, strict=True):
                slot = memoryview(expected)[offset : offset + layout.block_bytes]
                twin.read(pages, block * layout.block_tokens, [slot])
            assert ctypes.string_at(arena.address, arena.nbytes) == expected

            dice.shuffle(offsets)
            copier.load(arena, offsets, places, copier.mark()).wait()
            for block, offset in zip(blocks, offsets, strict=True):
                twin.write(pages, block * layout.block_tokens, [expected[offset : offset + layout.block_bytes]])
            assert ctypes.string_at(arena.address, arena.nbytes) == expected
    for tensor, other in zip(tensors, twins, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
