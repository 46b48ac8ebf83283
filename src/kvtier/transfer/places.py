"""Where the blocks of a sequence lie in pages of any size.

A *part* is what a page and a block have in common: all of the block, or all of the page, whichever is smaller. Parts
are numbered across all pages; the number is the part's *place*. If pages are as large as blocks, places are page
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence


def places_of(pages: Sequence[int], blocks: Sequence[int], *, page_tokens: int, block_tokens: int) -> list[int]:
    """The places of all parts of `blocks`, in order. `pages` are those of the blocks' sequence, from its start.

    Either `page_tokens` or `block_tokens` must be a multiple of the other.
    """
    is_run = isinstance(blocks, range) and blocks.step == 1  # thousands of blocks, on the engine's thread
    if blocks:
        first, last = (blocks[0], blocks[-1]) if is_run else (min(blocks), max(blocks))
        assert first >= 0, "no such block"
        assert (last + 1) * block_tokens <= len(pages) * page_tokens, "the pages end before the blocks"
    if page_tokens == block_tokens:
        return list(pages[blocks[0] : blocks[-1] + 1]) if is_run and blocks else [pages[block] for block in blocks]
    part_tokens = min(page_tokens, block_tokens)
    parts_per_page = page_tokens // part_tokens
    return [
        pages[token // page_tokens] * parts_per_page + token % page_tokens // part_tokens
        for block in blocks
        for token in range(block * block_tokens, (block + 1) * block_tokens, part_tokens)
    ]
