"""Blocks between a GPU and host memory: every byte in its place, in the order that marks give, from any thread."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.engine.device.kv_arena import KvArena
from kvtier.errors import LeaseError, TierUnavailable
from kvtier.memory.cuda import load_cudart
from kvtier.memory.mapped import MappedArena
from kvtier.testing.servers import cache_server
from kvtier.transfer.copiers.cuda_copier import CudaCopier, Way, _CudaCopies
from kvtier.transfer.copiers.geometry import Geometry
from tests.support.call_count import counted_calls
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYOUTS = {
    "7B": KvLayout(layers=28, kv_heads=4, head_dim=128),
    "odd layers": KvLayout(layers=23, kv_heads=3, head_dim=80, dtype="float16"),
    "no whole pages": KvLayout(layers=5, kv_heads=1, head_dim=36, dtype="float8_e4m3fn", block_tokens=8),
}
NUM_BLOCKS = 48
PIECE_BYTES = 2 << 20
SHORT_CYCLES = 300_000_000  # of a kernel that does nothing: a sixth of a second
PATIENCE_S = LIMIT_S


class Stand:
    """A GPU's blocks with random bytes, an arena of the host with others, and a copier between them."""

    def __init__(self, layout: KvLayout, num_blocks: int = NUM_BLOCKS, num_groups: int = 4) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.kv = KvArena(num_blocks, layout, torch.device("cuda"))
        self.bytes = self.kv.blocks.view(torch.uint8).view(num_blocks, layout.block_bytes)
        self.bytes.random_(0, 256)
        self.arena = MappedArena.create(num_blocks * layout.slot_bytes)
        self.slots = slots_of(self.arena, layout)
        self.slots.copy_(torch.empty_like(self.bytes).random_(0, 256))
        self.geometry = Geometry(self.kv.layers, layout)
        self.copier = CudaCopier(self.geometry, num_groups, piece_bytes=PIECE_BYTES, min_grouped_bytes=0)
        assert self.copier.way is Way.DIRECT
        torch.cuda.synchronize()

    def register(self) -> None:
        self.copier.adopt(self.arena)
        registration = self.copier.registration(self.arena)
        assert registration is not None
        assert registration.wait(PATIENCE_S)

    def offsets(self, slots: list[int]) -> list[int]:
        return [slot * self.layout.slot_bytes for slot in slots]

    def close(self) -> None:
        self.copier.close()
        del self.slots
        self.arena.close()


def slots_of(arena: MappedArena, layout: KvLayout) -> torch.Tensor:
    """The arena's memory as rows of a block's bytes each."""
    num_slots = arena.nbytes // layout.slot_bytes
    whole = torch.frombuffer(arena.view(0, num_slots * layout.slot_bytes), dtype=torch.uint8)
    return whole.view(num_slots, layout.slot_bytes)[:, : layout.block_bytes]


def some(count: int, seed: int, out_of: int = NUM_BLOCKS) -> list[int]:
    return random.Random(seed).sample(range(out_of), count)


@contextlib.contextmanager
def stand(layout: KvLayout, **settings: int) -> Iterator[Stand]:
    with contextlib.closing(Stand(layout, **settings)) as made:
        yield made


@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "pageable"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_load_brings_every_byte_and_touches_no_other_block(layout: KvLayout, is_registered: bool) -> None:
    with stand(layout) as here:
        if is_registered:
            here.register()
        blocks, slots = some(30, 1), some(30, 2)
        expected = here.bytes.cpu()
        expected[blocks] = here.slots[slots]

        transfer = here.copier.load(here.arena, here.offsets(slots), blocks, here.copier.mark())
        transfer.wait()

        assert transfer.is_done
        assert torch.equal(here.bytes.cpu(), expected)


@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "pageable"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_store_brings_every_byte_and_touches_no_other_slot(layout: KvLayout, is_registered: bool) -> None:
    with stand(layout) as here:
        if is_registered:
            here.register()
        blocks, slots = some(30, 3), some(30, 4)
        expected = here.slots.clone()
        expected[slots] = here.bytes.cpu()[blocks]

        transfer = here.copier.store(blocks, here.arena, here.offsets(slots), here.copier.mark())
        while not transfer.is_done:
            time.sleep(0)

        assert torch.equal(here.slots, expected)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_blocks_that_straddle_pieces_are_whole(num_groups: int) -> None:
    layout = LAYOUTS["7B"]
    stride_bytes = layout.slot_bytes + 12288
    offsets = [number * stride_bytes for number in range(NUM_BLOCKS)]
    with stand(layout, num_groups=num_groups) as here:
        arena = MappedArena.create(NUM_BLOCKS * stride_bytes)
        here.copier.adopt(arena)
        registration = here.copier.registration(arena)
        assert registration is not None
        assert registration.wait(PATIENCE_S)
        assert sum(len(registration.pieces_of(offset, layout.block_bytes)) > 1 for offset in offsets) > 10
        everything = list(range(NUM_BLOCKS))
        expected = here.bytes.cpu()

        here.copier.store(everything, arena, offsets, here.copier.mark()).wait()
        here.bytes.zero_()
        here.copier.load(arena, offsets, everything, here.copier.mark()).wait()

        assert torch.equal(here.bytes.cpu(), expected)
        for offset, block in zip(offsets, expected, strict=True):
            with arena.view(offset, layout.block_bytes) as view:
                assert view == memoryview(block.numpy())
        here.copier.close()
        arena.close()


def test_copies_are_right_while_their_arena_is_being_registered() -> None:
    with stand(LAYOUTS["7B"], num_blocks=600) as here:
        everything = list(range(600))
        here.copier.adopt(here.arena)
        registration = here.copier.registration(here.arena)
        assert registration is not None
        was_complete = False
        while not was_complete:
            was_complete = registration.is_complete
            here.bytes.add_(1)
            here.copier.store(everything, here.arena, here.offsets(everything), here.copier.mark()).wait()
            assert torch.equal(here.bytes.cpu(), here.slots)
            here.bytes.zero_()
            here.copier.load(here.arena, here.offsets(everything), everything, here.copier.mark()).wait()
            assert torch.equal(here.bytes.cpu(), here.slots)


@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "pageable"])
def test_a_store_begins_after_its_mark(is_registered: bool) -> None:
    with stand(LAYOUTS["7B"]) as here:
        if is_registered:
            here.register()
        blocks, slots = some(20, 5), some(20, 6)
        torch.cuda._sleep(SHORT_CYCLES)
        here.bytes.fill_(7)

        transfer = here.copier.store(blocks, here.arena, here.offsets(slots), here.copier.mark())

        if is_registered:  # else the call waits
            assert not transfer.is_done
        transfer.wait()
        assert (here.slots[slots] == 7).all()


def test_a_load_begins_after_its_mark() -> None:
    with stand(LAYOUTS["7B"]) as here:
        here.register()
        blocks, slots = some(20, 7), some(20, 8)
        before = here.bytes.cpu()
        torch.cuda._sleep(SHORT_CYCLES)
        read = here.bytes.clone()

        transfer = here.copier.load(here.arena, here.offsets(slots), blocks, here.copier.mark())

        assert not transfer.is_done
        transfer.wait()
        assert torch.equal(read.cpu(), before), "the step before it read what was there"
        assert torch.equal(here.bytes[blocks].cpu(), here.slots[slots])


@pytest.mark.parametrize("num_groups", [1, 4])
def test_what_follows_precede_sees_the_layer(num_groups: int) -> None:
    with stand(LAYOUTS["odd layers"], num_groups=num_groups) as here:
        here.register()
        everything = list(range(NUM_BLOCKS))
        read = here.kv.blocks.clone()
        read[:, 0] = here.kv.layers[0]  # the kernel is loaded: that would wait for the device
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SHORT_CYCLES)
            late = here.copier.mark()

        transfer = here.copier.load(here.arena, here.offsets(everything), everything, late)
        for layer in range(here.layout.layers):
            transfer.precede(layer)
            read[:, layer] = here.kv.layers[layer]

        assert not transfer.is_done, "the device waits, not the host"
        torch.cuda.synchronize()
        assert torch.equal(read.view(torch.uint8).view(NUM_BLOCKS, -1).cpu(), here.slots)


@pytest.mark.parametrize(("num_blocks", "num_groups"), [(100, 1), (128, 4)])
def test_what_is_here_in_two_milliseconds_comes_in_one_group(num_blocks: int, num_groups: int) -> None:
    with stand(LAYOUTS["7B"], num_blocks=128) as here:
        here.register()
        blocks = list(range(num_blocks))
        with contextlib.closing(CudaCopier(here.geometry)) as copier:
            transfer = copier.load(here.arena, here.offsets(blocks), blocks, copier.mark())
            assert isinstance(transfer, _CudaCopies)
            assert len(transfer._arrivals) == num_groups
            transfer.wait()
        assert torch.equal(here.bytes[blocks].cpu(), here.slots[blocks])


def test_the_first_layers_run_while_the_last_arrive() -> None:
    with stand(LAYOUTS["7B"], num_blocks=2000) as here:
        here.register()
        everything = list(range(2000))
        here.copier.load(here.arena, here.offsets(everything), everything, here.copier.mark()).wait()

        transfer = here.copier.load(here.arena, here.offsets(everything), everything, here.copier.mark())
        transfer.precede(0)
        reached = torch.cuda.Event()
        reached.record()
        reached.synchronize()

        assert not transfer.is_done
        transfer.wait()


def test_waiting_lets_other_threads_run() -> None:
    with stand(LAYOUTS["7B"]) as here:
        here.register()
        torch.cuda._sleep(SHORT_CYCLES)
        transfer = here.copier.store([0], here.arena, [0], here.copier.mark())
        waiting = threading.Thread(target=transfer.wait)
        waiting.start()
        num_turns = 0
        while waiting.is_alive():
            time.sleep(0.001)
            num_turns += 1
        assert num_turns > 20


def test_many_threads_copy_at_once() -> None:
    num_threads, each = 8, 30
    with stand(LAYOUTS["7B"], num_blocks=num_threads * each) as here:
        here.copier.adopt(here.arena)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            rng = random.Random(number)
            blocks = list(range(number * each, (number + 1) * each))
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for turn in range(12):
                        slots = rng.sample(blocks, each)
                        here.bytes[blocks[0] : blocks[-1] + 1].fill_(rng.randrange(256))
                        expected = here.bytes[blocks[0] : blocks[-1] + 1].cpu()
                        here.copier.store(blocks, here.arena, here.offsets(slots), here.copier.mark()).wait()
                        assert torch.equal(here.slots[slots], expected), turn
                        here.slots[slots[0]].fill_(turn)
                        here.copier.load(here.arena, here.offsets(slots), blocks, here.copier.mark()).wait()
                        assert torch.equal(here.bytes[blocks[0] : blocks[-1] + 1].cpu(), here.slots[slots]), turn
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []


def test_an_arena_stays_in_use_until_its_copies_are_done_though_nobody_waits() -> None:
    with stand(LAYOUTS["7B"]) as here:
        here.register()
        torch.cuda._sleep(20 * SHORT_CYCLES)  # the collector may take its time
        here.bytes.fill_(9)
        here.copier.store([3], here.arena, here.offsets([5]), here.copier.mark())
        gc.collect()

        assert not here.arena.stop_use(0)
        assert here.arena.stop_use(PATIENCE_S), "the copier's thread saw that it was done"
        assert (here.slots[5] == 9).all()


def test_closing_waits_for_copies_and_later_ones_are_refused() -> None:
    with stand(LAYOUTS["7B"]) as here:
        here.register()
        mark = here.copier.mark()
        torch.cuda._sleep(SHORT_CYCLES)
        here.bytes.fill_(11)
        transfer = here.copier.store([1], here.arena, here.offsets([2]), here.copier.mark())

        here.copier.close()

        assert transfer.is_done
        assert (here.slots[2] == 11).all()
        with pytest.raises(TierUnavailable, match="closed"):
            here.copier.store([1], here.arena, here.offsets([2]), mark)


def test_a_closed_arena_is_refused() -> None:
    with stand(LAYOUTS["7B"]) as here:
        arena = MappedArena.create(here.layout.slot_bytes)
        arena.close()
        with pytest.raises(LeaseError):
            here.copier.load(arena, [0], [0], here.copier.mark())


def test_no_blocks_are_done_at_once() -> None:
    with stand(LAYOUTS["7B"]) as here:
        transfer = here.copier.load(here.arena, [], [], here.copier.mark())
        transfer.precede(0)
        transfer.wait()
        assert transfer.is_done


def test_an_error_of_ours_is_not_found_by_torch() -> None:
    cudart = load_cudart()
    with pytest.raises(TierUnavailable, match="cannot unregister memory"):
        cudart.unregister(4096)
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


def test_a_cache_server_restarted_under_a_copier(tmp_path: Path) -> None:
    layout = LAYOUTS["7B"]
    with stand(layout) as here, contextlib.ExitStack() as stack:
        namespace = NamespaceFields(layout=layout, weights="none")
        first = stack.enter_context(contextlib.ExitStack())
        server = first.enter_context(cache_server(memory="128MiB", folder=tmp_path))
        client = stack.enter_context(kvtier.connect(server.unix, layout=layout, namespace=namespace, timeout_s=30))
        hashes = client.hashes(range(40 * layout.block_tokens))
        old = _store_and_load(here, client, hashes)
        old_id = id(client.arena)

        first.close()
        stack.enter_context(cache_server(memory="128MiB", folder=tmp_path))
        deadline = time.monotonic() + PATIENCE_S
        while not client.is_up or id(client.arena) == old_id:
            assert time.monotonic() < deadline
            with contextlib.suppress(TierUnavailable):
                client.match(hashes[:1]).release()
            time.sleep(0.05)
        new = _store_and_load(here, client, hashes)

        assert new is not old
        while here.copier._arenas.has(old):
            assert time.monotonic() < deadline, "the old server's memory is let go"
            time.sleep(0.01)
        assert not old.covers(0, 1)
        here.copier.close()


def _store_and_load(here: Stand, client: object, hashes: list[object]) -> object:
    """Through the server's own memory, before it is registered and after."""
    blocks, others = list(range(20)), list(range(20, 40))
    for part in (hashes[:20], hashes[20:]):
        here.bytes.random_(0, 256)
        expected = here.bytes[:20].cpu()
        with client.reserve(part) as slots:  # type: ignore[attr-defined]
            assert len(slots.offsets) == 20
            here.copier.store(blocks, client.arena, slots.offsets, here.copier.mark()).wait()  # type: ignore[attr-defined]
            assert slots.commit() == 20
        with client.match(part) as lease:  # type: ignore[attr-defined]
            assert lease.num_blocks == 20
            here.copier.load(client.arena, lease.offsets, others, here.copier.mark()).wait()  # type: ignore[attr-defined]
        assert torch.equal(here.bytes[20:40].cpu(), expected)
        here.copier.adopt(client.arena)  # type: ignore[attr-defined]
        registration = here.copier.registration(client.arena)  # type: ignore[attr-defined]
        assert registration is not None
        assert registration.wait(PATIENCE_S)
    return registration


def test_entries_are_built_by_few_calls() -> None:
    """A few calls per block at most: benchmarks measure the time."""
    with stand(LAYOUTS["7B"], num_blocks=512) as here:
        here.register()
        everything = list(range(512))
        offsets = here.offsets(everything)
        mark = here.copier.mark()
        with counted_calls() as calls:
            transfer = here.copier.store(everything, here.arena, offsets, mark)
        transfer.wait()
        print(f"512 blocks handed over by {len(calls)} calls")
        assert len(calls) < 512 * 10
