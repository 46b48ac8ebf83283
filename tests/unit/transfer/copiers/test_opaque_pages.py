"""Pages whose inside is not known: every byte of a page comes back, in whatever order an engine lays out its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier.blocks.layout import OpaqueLayout
from kvtier.errors import ConfigError
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers.opaque_pages import OpaquePages, PageRun, merged_runs, page_runs
from kvtier.transfer.copiers.page_copier import opaque_copier

_PAGES, _LAYERS, _HEADS, _TOKENS, _DIM = 6, 3, 2, 4, 8
_LAYER_BYTES = _HEADS * _TOKENS * _DIM * 2


def _by_layer() -> list[torch.Tensor]:
    memory = torch.zeros(_LAYERS, _PAGES, _HEADS, _TOKENS, _DIM, dtype=torch.float16)
    return list(memory)


def _by_page() -> list[torch.Tensor]:
    memory = torch.zeros(_PAGES, _LAYERS, _HEADS, _TOKENS, _DIM, dtype=torch.float16)
    return [memory[:, layer] for layer in range(_LAYERS)]


def _by_head() -> list[torch.Tensor]:
    memory = torch.zeros(_LAYERS, _HEADS, _PAGES, _TOKENS, _DIM, dtype=torch.float16)
    return [layer.transpose(0, 1) for layer in memory]


def _in_halves() -> list[torch.Tensor]:
    """Kernels count half pages."""
    memory = torch.zeros(_LAYERS, 2 * _PAGES, _HEADS, _TOKENS // 2, _DIM, dtype=torch.float16)
    return list(memory)


def _shared_by_groups() -> list[torch.Tensor]:
    """Layers of attention, and states of another size over the same memory."""
    attention = _by_layer()
    raw = attention[0].untyped_storage()
    states = torch.empty(0, dtype=torch.uint8).set_(raw)  # type: ignore[call-overload]
    return [*attention, states.as_strided((_PAGES, _LAYER_BYTES - 10), (_LAYER_BYTES, 1))]


_ORDERS = [_by_layer, _by_page, _by_head, _in_halves, _shared_by_groups]


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    with contextlib.closing(MappedArena.create(1 << 20)) as arena:
        yield arena


@pytest.mark.parametrize("order", _ORDERS)
def test_pages_that_are_stored_and_loaded_elsewhere_are_the_same(
    order: Callable[[], list[torch.Tensor]], arena: MappedArena
) -> None:
    tensors = order()
    layout = OpaqueLayout(nbytes=_LAYERS * _LAYER_BYTES, block_tokens=_TOKENS)
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors[:_LAYERS]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = [tensor.clone() for tensor in tensors[:_LAYERS]]
    parts = tensors[0].shape[0] // _PAGES

    with contextlib.closing(opaque_copier(OpaquePages(tensors, _PAGES, layout))) as copier:
        copier.store([1, 4], arena, [0, layout.slot_bytes], copier.mark()).wait()
        copier.load(arena, [0, layout.slot_bytes], [5, 2], copier.mark()).wait()

    for tensor, old in zip(tensors, before, strict=False):
        for page, source in enumerate([0, 1, 4, 3, 4, 1]):
            there, here = slice(page * parts, (page + 1) * parts), slice(source * parts, (source + 1) * parts)
            assert torch.equal(tensor[there], old[here])


def test_ranks_write_their_parts_of_one_block(arena: MappedArena) -> None:
    layout = OpaqueLayout(nbytes=2 * _LAYERS * _LAYER_BYTES, block_tokens=_TOKENS)
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            tensors = _by_page()
            for tensor in tensors:
                tensor.fill_(rank + 1)
            pages = OpaquePages(tensors, _PAGES, layout, part=rank, num_parts=2)
            assert not pages.is_whole
            copier = stack.enter_context(contextlib.closing(opaque_copier(pages)))
            copier.store([3], arena, [0], copier.mark()).wait()
    (view,) = arena.exports([0], layout.block_bytes)
    written = torch.frombuffer(bytearray(view), dtype=torch.float16)

    half = len(written) // 2
    assert bool((written[:half] == 1).all())
    assert bool((written[half:] == 2).all())
    del view


def test_layers_side_by_side_are_one_run() -> None:
    assert len(page_runs(_by_page(), _PAGES)) == 1
    assert len(page_runs(_by_layer(), _PAGES)) == _LAYERS
    assert len(page_runs(_by_head(), _PAGES)) == _LAYERS * _HEADS


def test_pages_that_lie_across_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="across"):
        merged_runs([PageRun(100, 0, 80), PageRun(100, 60, 80)])


@pytest.mark.parametrize("num_pages", [4, 12])
def test_tensors_of_another_number_of_pages_are_refused(num_pages: int) -> None:
    with pytest.raises(ConfigError, match="pages"):
        page_runs(_by_layer(), num_pages)


def test_pages_of_another_size_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        OpaquePages(_by_layer(), _PAGES, OpaqueLayout(nbytes=100, block_tokens=_TOKENS))


def test_pages_in_very_many_pieces_are_refused() -> None:
    memory = torch.zeros(_PAGES, 70, 70, 2, dtype=torch.uint8)

    with pytest.raises(ConfigError, match="pieces"):
        page_runs([memory[..., 0]], _PAGES)
