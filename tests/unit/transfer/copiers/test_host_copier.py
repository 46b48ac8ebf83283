"""A copier of KV in the host's memory moves what a loop over tokens moves, and nothing else, from any thread."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError, LeaseError, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers import host_copier as module
from kvtier.transfer.copiers.geometry import Geometry, PageOrder
from kvtier.transfer.copiers.host_copier import HostCopier, neighbours
from kvtier.transfer.copiers.page_copier import page_copier
from tests.support.examples import examples
from tests.support.pages import NUM_PAGES, STRIDES, Case, places_in, random_tensors, token_of
from tests.support.waiting import LIMIT_S

SLOTS = ("side by side", "every other", "backwards", "scattered")


@dataclass(frozen=True)
class _Move:
    """Some blocks of a sequence, and where they lie on both sides."""

    case: Case
    first_head: int
    num_heads: int
    pages: list[int]
    blocks: list[int]
    slots: list[int]

    @property
    def layout(self) -> KvLayout:
        return self.case.layout

    @property
    def num_slots(self) -> int:
        return max(self.slots) + 2

    @property
    def places(self) -> list[int]:
        return places_in(self.case, self.pages, self.blocks)

    @property
    def offsets(self) -> list[int]:
        return [slot * self.layout.slot_bytes for slot in self.slots]


@st.composite
def _moves(draw: st.DrawFn) -> _Move:
    layout = KvLayout(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([2, 8])),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn"])),
        block_tokens=draw(st.sampled_from([8, 16])),
    )
    page_tokens = draw(st.sampled_from([4, 8, 16, 32, 128]))
    order = draw(st.sampled_from(PageOrder))
    strides = draw(st.sampled_from(STRIDES if order is PageOrder.ROWS else STRIDES[:2]))
    num_heads = draw(st.integers(1, layout.kv_heads))
    dice = random.Random(draw(st.integers(0, 1 << 16)))
    num_pages = draw(st.integers(max(1, layout.block_tokens // page_tokens), 3 if page_tokens > 32 else NUM_PAGES - 1))
    first_page = dice.randrange(NUM_PAGES - num_pages)
    in_order = list(range(first_page, first_page + num_pages))
    pages = draw(st.sampled_from([in_order, in_order[::-1], dice.sample(range(NUM_PAGES), num_pages)]))
    all_blocks = range(num_pages * page_tokens // layout.block_tokens)
    count = draw(st.integers(1, len(all_blocks)))
    first = dice.randrange(len(all_blocks) - count + 1)
    blocks = draw(st.sampled_from([list(all_blocks[first : first + count]), dice.sample(all_blocks, count)]))
    return _Move(
        Case(layout, page_tokens, order, strides),
        draw(st.integers(0, layout.kv_heads - num_heads)),
        num_heads,
        pages,
        blocks,
        _slots(draw(st.sampled_from(SLOTS)), count, dice),
    )


def _slots(how: str, count: int, dice: random.Random) -> list[int]:
    if how == "scattered":
        return dice.sample(range(2 * count), count)
    step = 2 if how == "every other" else 1
    slots = list(range(1, 1 + count * step, step))
    return slots[::-1] if how == "backwards" else slots


def _naive(move: _Move, tensors: Sequence[torch.Tensor], memory: torch.Tensor, *, is_load: bool) -> None:
    """The twin: token by token. `memory` is all of an arena, in bytes."""
    layout, size = move.layout, move.case.page_tokens
    for block, offset in zip(move.blocks, move.offsets, strict=True):
        inside_block = memory[offset : offset + layout.block_bytes].view(tensors[0].dtype).view(layout.shape)
        for layer, tensor in enumerate(tensors):
            for head in range(move.num_heads):
                for token in range(layout.block_tokens):
                    number, inside = divmod(block * layout.block_tokens + token, size)
                    halves = token_of(move.case, tensor, move.pages[number], head, inside)
                    row = inside_block[layer, move.first_head + head, token]
                    for half, other in zip(halves, row.split(layout.head_dim), strict=True):
                        half.copy_(other) if is_load else other.copy_(half)


@contextlib.contextmanager
def _arena(num_slots: int, layout: KvLayout, seed: int = 0) -> Iterator[MappedArena]:
    with contextlib.closing(MappedArena.create(num_slots * layout.slot_bytes)) as arena:
        with arena.view(0, arena.nbytes) as view:
            view[:] = random.Random(seed).randbytes(arena.nbytes)
        yield arena


def _transposed(tensors: Sequence[torch.Tensor], layout: KvLayout) -> HostCopier:
    return HostCopier(Geometry(tensors, layout, PageOrder.TRANSPOSED_K))


def _bytes_of(arena: MappedArena) -> torch.Tensor:
    return torch.frombuffer(bytearray(ctypes.string_at(arena.address, arena.nbytes)), dtype=torch.uint8)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Bit for bit: what is no number equals itself."""
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(some, others, strict=True)
    )


LARGE = _Move(
    Case(KvLayout(layers=3, kv_heads=4, head_dim=8, dtype="float32"), 128, PageOrder.TRANSPOSED_K, "LBHNC"),
    first_head=1,
    num_heads=2,
    pages=[7, 2, 5],
    blocks=list(range(2, 24)),
    slots=list(range(1, 23)),
)


@given(move=_moves(), run_bytes=st.sampled_from([1, 5000, 4 << 20]), seed=st.integers(0, 1000))
@example(move=LARGE, run_bytes=20_000, seed=1)
@settings(max_examples=examples(120), deadline=None)
def test_loads_and_stores_move_what_a_loop_over_tokens_moves(move: _Move, run_bytes: int, seed: int) -> None:
    tensors = random_tensors(move.case, move.num_heads, seed)
    with pytest.MonkeyPatch.context() as patch, _arena(move.num_slots, move.layout, seed) as arena:
        patch.setattr(module, "_RUN_BYTES", run_bytes)
        geometry = Geometry(tensors, move.layout, move.case.order, first_head=move.first_head)
        with contextlib.closing(HostCopier(geometry)) as copier:
            expected = _bytes_of(arena)
            _naive(move, tensors, expected, is_load=False)
            copier.store(move.places, arena, move.offsets, copier.mark()).wait()
            assert torch.equal(_bytes_of(arena), expected)

            expected_tensors = random_tensors(move.case, move.num_heads, seed + 1)
            for tensor, other in zip(tensors, expected_tensors, strict=True):
                tensor.copy_(other)
            _naive(move, expected_tensors, expected, is_load=True)
            copier.load(arena, move.offsets, move.places, copier.mark()).wait()
            assert _same(tensors, expected_tensors)
            assert torch.equal(_bytes_of(arena), expected), "a load changes no block"


@pytest.mark.parametrize("page_tokens", [8, 16, 32, 128])
@pytest.mark.parametrize("order", PageOrder)
def test_what_two_ranks_store_one_loads_and_the_other_way_round(page_tokens: int, order: PageOrder) -> None:
    case = Case(KvLayout(layers=2, kv_heads=4, head_dim=4, dtype="float16"), page_tokens, order, "LBHNC")
    layout, blocks = case.layout, [1, 0, 3, 2]
    pages = random.Random(1).sample(range(NUM_PAGES), max(1, 64 // page_tokens))
    offsets = [slot * layout.slot_bytes for slot in (4, 1, 2, 3)]
    whole = random_tensors(case, 4, 1)
    halves = [[tensor[:, first : first + 2].contiguous() for tensor in whole] for first in (0, 2)]
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(contextlib.closing(HostCopier(Geometry(whole, layout, order))))
        ranks = [
            stack.enter_context(contextlib.closing(HostCopier(Geometry(half, layout, order, first_head=first))))
            for half, first in zip(halves, (0, 2), strict=True)
        ]
        ones, theirs = (stack.enter_context(_arena(5, layout, 3)) for _ in range(2))
        assert one.is_whole
        assert not any(rank.is_whole for rank in ranks)

        places = places_in(case, pages, blocks)
        one.store(places, ones, offsets, one.mark()).wait()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda rank: rank.store(places, theirs, offsets, rank.mark()).wait(), ranks))
        assert torch.equal(_bytes_of(ones), _bytes_of(theirs))

        before = [tensor.clone() for tensor in whole]
        for tensor in (*whole, *halves[0], *halves[1]):
            tensor[pages] = 0
        one.load(theirs, offsets, places, one.mark()).wait()
        for rank in ranks:
            rank.load(ones, offsets, places, rank.mark()).wait()
        num_tokens = 4 * layout.block_tokens
        assert num_tokens == len(pages) * page_tokens or page_tokens == 128
        if page_tokens < 128:
            assert _same(whole, before)
        assert _same([torch.cat(pair, dim=1) for pair in zip(*halves, strict=True)], whole)


def test_threads_move_different_pages_at_once() -> None:
    case = Case(KvLayout(layers=4, kv_heads=2, head_dim=64, dtype="float32"), 32, PageOrder.TRANSPOSED_K, "LBHNC")
    layout, num_threads = case.layout, 5
    tensors = random_tensors(case, 2, 5)
    before = [tensor.clone() for tensor in tensors]
    barrier = threading.Barrier(num_threads)
    with contextlib.closing(_transposed(tensors, layout)) as copier, _arena(4 * num_threads, layout) as arena:

        def work(number: int) -> None:
            pages, blocks = [2 * number, 2 * number + 1], [0, 1, 2, 3]
            offsets = [(4 * number + block) * layout.slot_bytes for block in blocks]
            places = places_in(case, pages, blocks)
            barrier.wait(LIMIT_S)
            for _ in range(10):
                copier.store(places, arena, offsets, copier.mark()).wait()
                for tensor in tensors:
                    tensor[pages] = 0
                copier.load(arena, offsets, places, copier.mark()).wait()

        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(work, range(num_threads)))
    assert _same(tensors, before)


def test_a_copy_of_many_blocks_lets_go_of_the_gil_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    copy_all = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: (calls.append(len(lists[0])), copy_all(*lists)))
    tensors = random_tensors(LARGE.case, 2, 1)
    with contextlib.closing(_transposed(tensors, LARGE.layout)) as copier, _arena(40, LARGE.layout) as arena:
        copier.load(arena, LARGE.offsets, LARGE.places, copier.mark()).wait()

    assert calls == [2 * 3], "K and V of what lies in each of three pages"


def test_no_blocks_are_nothing() -> None:
    tensors = random_tensors(LARGE.case, 2, 1)
    with contextlib.closing(_transposed(tensors, LARGE.layout)) as copier, _arena(1, LARGE.layout) as arena:
        copier.load(arena, [], [], copier.mark()).wait()
        copier.store([], arena, [], copier.mark()).wait()
    assert _same(tensors, random_tensors(LARGE.case, 2, 1))


def test_a_closed_arena_is_refused_and_stays_closed() -> None:
    tensors = random_tensors(LARGE.case, 2, 1)
    with contextlib.closing(_transposed(tensors, LARGE.layout)) as copier:
        with _arena(2, LARGE.layout) as arena:
            copier.store([8], arena, [0], copier.mark())
        with pytest.raises(LeaseError):
            copier.load(arena, [0], [8], copier.mark())


def test_a_closed_copier_is_refused() -> None:
    copier = _transposed(random_tensors(LARGE.case, 2, 1), LARGE.layout)
    copier.close()
    with _arena(2, LARGE.layout) as arena, pytest.raises(TierUnavailable, match="closed"):
        copier.load(arena, [0], [8], copier.mark())


def test_tensors_of_inference_may_be_filled_by_any_thread() -> None:
    with torch.inference_mode():
        tensors = random_tensors(LARGE.case, 2, 1)
    with contextlib.closing(_transposed(tensors, LARGE.layout)) as copier, _arena(40, LARGE.layout) as arena:
        copier.load(arena, LARGE.offsets, LARGE.places, copier.mark()).wait()
    assert not _same(tensors, random_tensors(LARGE.case, 2, 1))


@pytest.mark.parametrize(
    ("pages", "blocks", "offsets", "sentence"),
    [
        ([1], [8], [0], "the pages end"),
        ([NUM_PAGES], [0], [0], "no such page"),
        ([1], [-1], [0], "no such block"),
        ([1], [0], [1 << 30], "outside the arena"),
        ([1], [0], [2], "multiples of their size"),
    ],
)
def test_what_lies_outside_is_not_touched(
    pages: list[int], blocks: list[int], offsets: list[int], sentence: str
) -> None:
    tensors = random_tensors(LARGE.case, 2, 1)
    with contextlib.closing(_transposed(tensors, LARGE.layout)) as copier, _arena(2, LARGE.layout) as arena:
        with pytest.raises(AssertionError, match=sentence):
            copier.store(places_in(LARGE.case, pages, blocks), arena, offsets, copier.mark())


def test_the_copier_of_a_cpu_expects_k_transposed() -> None:
    tensors = random_tensors(LARGE.case, 2, 1)
    with contextlib.closing(page_copier(tensors, LARGE.layout, first_head=1)) as copier:
        assert isinstance(copier, HostCopier)
        assert copier.mark().query()
        with _arena(40, LARGE.layout) as arena:
            expected = _bytes_of(arena)
            _naive(LARGE, tensors, expected, is_load=False)
            copier.adopt(arena)
            copier.store(LARGE.places, arena, LARGE.offsets, copier.mark()).wait()
            assert torch.equal(_bytes_of(arena), expected)
    with pytest.raises(ConfigError, match="layers"):
        page_copier(tensors[:1], LARGE.layout)


def test_whole_blocks_are_moved_by_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KvLayout(layers=3, kv_heads=2, head_dim=8)
    blocks = torch.randn(NUM_PAGES, *layout.shape).bfloat16()
    before = blocks.clone()
    monkeypatch.setattr(module, "own_threads", lambda *arguments: pytest.fail("a thread for a move"))
    copier = HostCopier(Geometry([blocks[:, layer] for layer in range(layout.layers)], layout))
    with _arena(4, layout) as arena:
        offsets = [slot * layout.slot_bytes for slot in (2, 0, 3)]

        copier.store([7, 1, 8], arena, offsets, copier.mark()).wait()
        copier.load(arena, offsets, [1, 7, 4], copier.mark()).wait()

    before[[1, 7, 4]] = before[[7, 1, 8]]
    assert torch.equal(blocks, before)
    assert copier.is_whole
    copier.close()


@given(st.lists(st.integers(0, 30), unique=True))
def test_neighbours_are_all_slots_in_as_few_ranges_as_there_are(slots: list[int]) -> None:
    ranges = list(neighbours([slot * 10 for slot in slots], 10, 305))

    covered = [byte for start, nbytes in ranges for byte in range(start, start + nbytes)]
    assert covered == [byte for slot in sorted(slots) for byte in range(slot * 10, min(slot * 10 + 10, 305))]
    assert all(first + nbytes < second for (first, nbytes), (second, _) in itertools.pairwise(ranges))
