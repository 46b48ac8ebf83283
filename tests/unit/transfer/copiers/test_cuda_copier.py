"""What a CUDA copier does without a GPU: groups of layers, and what it hands over to a device that is faked."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers import cuda_copier
from kvtier.transfer.copiers.cuda_copier import CudaCopier, Way, layer_groups
from kvtier.transfer.copiers.geometry import Geometry, PageOrder
from tests.support.fake_cuda import FakeCuda, check_against_twin
from tests.support.pages import STRIDES, Case, empty_tensors

PART_BYTES = 128 << 10


@given(st.integers(1, 80), st.integers(1, 8), st.integers(1, 9))
def test_groups_are_all_layers_in_order_and_whole(layers: int, kv_heads: int, num_groups: int) -> None:
    layout = KvLayout(layers=layers, kv_heads=kv_heads, head_dim=128)
    groups = layer_groups(layout, num_groups)

    next_layer = next_byte = 0
    for group in groups:
        assert (group.first_layer, group.first_byte) == (next_layer, next_byte)
        assert group.nbytes == group.num_layers * layout.block_bytes // layers > 0
        next_layer += group.num_layers
        next_byte += group.nbytes
    assert (next_layer, next_byte) == (layers, layout.block_bytes)
    assert len(groups) <= num_groups
    assert max(g.num_layers for g in groups) - min(g.num_layers for g in groups) <= 1


@pytest.mark.parametrize(
    ("layers", "kv_heads", "asked", "expected"),
    [(28, 4, 4, [7, 7, 7, 7]), (36, 2, 4, [9, 9, 9, 9]), (31, 4, 2, [15, 16]), (7, 1, 4, [7]), (1, 8, 4, [1])],
)
def test_groups_are_even_and_not_small(layers: int, kv_heads: int, asked: int, expected: list[int]) -> None:
    groups = layer_groups(KvLayout(layers=layers, kv_heads=kv_heads, head_dim=128), asked)

    assert [group.num_layers for group in groups] == expected
    assert len(groups) == 1 or min(group.nbytes for group in groups) >= PART_BYTES


# --- a faked device ---------------------------------------------------------------------------------------------------

SMALL = KvLayout(layers=4, kv_heads=2, head_dim=4, dtype="float16")


class Stand:
    """An arena of the device, one of the host, registered, and the copier between them."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.blocks = torch.randn(num_blocks, *SMALL.shape).half()
        self.arena = MappedArena.create(num_blocks * SMALL.slot_bytes)
        self.places = random.Random(1).sample(range(num_blocks), num_blocks)
        self.offsets = [slot * SMALL.slot_bytes for slot in random.Random(2).sample(range(num_blocks), num_blocks)]
        geometry = Geometry([self.blocks[:, layer] for layer in range(SMALL.layers)], SMALL)
        self.copier = CudaCopier(geometry, num_groups, min_grouped_bytes=0, switch_interval_s=None)
        self.copier.adopt(self.arena)
        registration = self.copier.registration(self.arena)
        assert registration is not None
        assert registration.wait(10)


@contextlib.contextmanager
def stand(patch: pytest.MonkeyPatch, num_blocks: int = 20, num_groups: int = 1) -> Iterator[tuple[Stand, FakeCuda]]:
    patch.setattr(cuda_copier, "_MIN_PART_BYTES", 1)
    cuda = FakeCuda(patch)
    here = Stand(num_blocks, num_groups)
    with contextlib.closing(here.arena), contextlib.closing(here.copier):
        yield here, cuda


@pytest.mark.parametrize("num_groups", [1, 4])
def test_an_arena_goes_directly_and_comes_back(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand(monkeypatch, num_groups=num_groups) as (here, cuda):
        before = here.blocks.clone()
        here.copier.store(here.places, here.arena, here.offsets, here.copier.mark()).wait()
        here.blocks.zero_()

        here.copier.load(here.arena, here.offsets, here.places, here.copier.mark()).wait()

        assert torch.equal(here.blocks, before)
        assert here.copier.way is Way.DIRECT
        assert cuda.library.batches == [20] * (1 + num_groups)


@pytest.mark.parametrize(("num_groups", "sizes"), [(1, [64, 128, 256, 52]), (2, [64, 128, 256, 52, 500])])
def test_the_first_call_hands_few_blocks_over_and_each_twice_as_many(
    num_groups: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand(monkeypatch, 500, num_groups) as (here, cuda):
        here.copier.load(here.arena, here.offsets, here.places, here.copier.mark()).wait()

        assert cuda.library.batches == sizes


def test_copies_run_on_beside_their_caller_and_keep_their_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand(monkeypatch, num_groups=4) as (here, cuda):
        mark = here.copier.mark()
        cuda.may_pass.clear()

        copies = here.copier.load(here.arena, here.offsets, here.places, mark)

        assert here.copier._loads.stream.waited == [(mark, 0)], "before the first copy"
        assert (copies.is_done, copies.num_bytes_left) == (False, 20 * SMALL.block_bytes)
        assert not here.arena.stop_use(0)
        copies.precede(2)
        assert [event for event, _ in cuda.current.waited] == [copies._arrivals[2]]  # type: ignore[attr-defined]
        cuda.may_pass.set()
        copies.wait()
        assert (copies.is_done, copies.num_bytes_left) == (True, 0)
        assert here.arena.stop_use(0)


def test_a_copy_that_fails_lets_its_arena_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand(monkeypatch) as (here, cuda):
        cuda.library.statuses = {"cudaMemcpyBatchAsync": 700, "cudaMemcpyAsync": 700}

        with pytest.raises(TierUnavailable, match="out of luck"):
            here.copier.store(here.places, here.arena, here.offsets, here.copier.mark())

        assert here.arena.stop_use(0)


def test_a_closed_copier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand(monkeypatch) as (here, _):
        here.copier.close()

        with pytest.raises(TierUnavailable, match="this copier is closed"):
            here.copier.store(here.places, here.arena, here.offsets, here.copier.mark())


@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "pageable"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "first_head"), [(2, 0), (1, 1)])
def test_pages_go_directly_by_their_runs(
    strides: str,
    page_tokens: int,
    num_heads: int,
    first_head: int,
    is_registered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_copier, "_MIN_PART_BYTES", 1)
    FakeCuda(monkeypatch)

    case = Case(SMALL, page_tokens, PageOrder.ROWS, strides)
    check_against_twin(case, num_heads, first_head, Way.DIRECT, is_registered=is_registered)


def test_only_blocks_that_are_brought_together_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    for name in ("staging", "page_kernels"):
        monkeypatch.delitem(sys.modules, f"kvtier.transfer.copiers.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    arena, pages = (
        Geometry(empty_tensors(Case(SMALL, 16, PageOrder.ROWS, strides), 2), SMALL) for strides in ("BLHNC", "LBNHC")
    )

    CudaCopier(arena, switch_interval_s=None).close()
    with pytest.raises(ConfigError, match="pages on a GPU need triton: pip install triton"):
        CudaCopier(pages, switch_interval_s=None)


def test_layers_of_different_strides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    layout = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float16")
    tensors = [torch.zeros(3, 2, 16, 8).half(), torch.zeros(3, 16, 2, 8).half().transpose(1, 2)]

    with pytest.raises(ConfigError, match="the KV tensors of layers have different strides"):
        CudaCopier(Geometry(tensors, layout))
