"""Words are copied as they are, and nothing beside them is touched. `test_triton.py` runs this file too."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels.host_copy import copy_words
from tests.unit.kernels.batches import DEVICE

IS_GPU = DEVICE.type == "cuda"


def words_of(count: int, *, on_host: bool = False) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    return words.pin_memory() if on_host and IS_GPU else words if on_host else words.to(DEVICE)


@pytest.mark.parametrize("count", [0, 1, 3, 2048, 2049, 5000])
@pytest.mark.parametrize("from_host", [True, False])
def test_words_arrive_and_nothing_beside_them_changes(count: int, from_host: bool) -> None:
    source = words_of(count, on_host=from_host)
    target = words_of(count + 7, on_host=not from_host)
    beside = target[count:].clone()

    copy_words(source, target)

    if IS_GPU:
        torch.cuda.synchronize()
    assert torch.equal(target[:count].cpu(), source.cpu())
    assert torch.equal(target[count:], beside)


def test_part_of_a_buffer_may_begin_anywhere() -> None:
    source, target = words_of(300, on_host=True), words_of(300)
    before = target.clone()

    copy_words(source[5:105], target[13:113])

    if IS_GPU:
        torch.cuda.synchronize()
    assert torch.equal(target[13:113].cpu(), source[5:105])
    assert torch.equal(target[:13], before[:13])
    assert torch.equal(target[113:], before[113:])


def test_too_little_room_is_refused() -> None:
    with pytest.raises(AssertionError, match="no room"):
        copy_words(words_of(9), words_of(8))
