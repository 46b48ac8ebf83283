"""Words arrive where they belong, and nothing beside them is touched. `test_triton.py` runs this file too."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels import reference
from kvtier.kernels.host_copy import copy_words, hand_out, place_words
from tests.support.batches import DEVICE

pytestmark = pytest.mark.sampled

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


@pytest.mark.parametrize(
    ("num_tokens", "num_words", "num_rows", "num_columns"),
    [(1, 0, 1, 1), (3, 20, 3, 5), (2, 4, 16, 130), (700, 4200, 4, 3), (2500, 8, 1, 7)],
)
def test_tokens_words_and_a_table_are_placed_as_by_the_twin(
    num_tokens: int, num_words: int, num_rows: int, num_columns: int
) -> None:
    last_tokens = torch.randint(0, 2**40, (50,)).to(DEVICE)
    token_words = -(-num_tokens // 2) * 4
    num_cells = num_rows * num_columns
    source = words_of(token_words + num_words + -(-num_cells // 4) * 4, on_host=True)
    tokens = torch.randint(-50, 2**40, (num_tokens,))
    tokens[::3] = torch.randint(-50, 0, tokens[::3].shape)
    source[: 2 * num_tokens] = tokens.view(torch.int32)
    found = [words_of(token_words + num_words + 8), words_of((num_rows + 1) * (num_columns + 3))]
    expected = [one.clone() for one in found]

    for (target, table), place in ((found, place_words), (expected, reference.place_words)):
        corner = table.view(num_rows + 1, -1)[:num_rows, :num_columns]
        place(source.to(target.device), num_tokens, target[:-8], corner, last_tokens)

    # What is left of the last 16 bytes of the tokens is nobody's.
    found[0][2 * num_tokens : token_words] = expected[0][2 * num_tokens : token_words]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_words_are_placed_from_pinned_memory() -> None:
    source = words_of(8, on_host=True)
    source[:4] = 0
    target, table = words_of(4), words_of(4)

    place_words(source, 1, target, table.view(2, 2), torch.arange(9, device=DEVICE))

    if IS_GPU:
        torch.cuda.synchronize()
    assert table.tolist() == source[4:].tolist()


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 128, 300])
def test_tokens_are_handed_out_to_their_slots_and_to_the_host(num_tokens: int) -> None:
    tokens = torch.randint(0, 2**40, (num_tokens,), device=DEVICE)
    slots = torch.randperm(400)[:num_tokens].to(DEVICE)
    last_tokens = torch.arange(400, device=DEVICE)
    on_host = words_of(2 * num_tokens + 4, on_host=True).view(torch.int64)
    beside = on_host[num_tokens:].clone()
    expected = last_tokens.clone()
    expected[slots] = tokens

    hand_out(tokens, slots, last_tokens, on_host)

    if IS_GPU:
        torch.cuda.synchronize()
    assert torch.equal(last_tokens, expected)
    assert torch.equal(on_host[:num_tokens], tokens.cpu())
    assert torch.equal(on_host[num_tokens:], beside)
