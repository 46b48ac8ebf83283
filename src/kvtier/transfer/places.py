"""Where the blocks of a sequence lie in pages of any size.

A *part* is what one page has of one block: all of the block, or of the page, if that is smaller. Parts are numbered
through all pages; the number is the part's *place*. Where pages have the size of blocks, places are page numbers.
"""

from __future__ import annotations

from collections.abc import Sequence


def places_of(pages: Sequence[int], blocks: Sequence[int], *, page_tokens: int, block_tokens: int) -> list[int]:
    """The places of all parts of `blocks`, in order. `pages` are those of the blocks' sequence, from its start.

    One of `page_tokens` and `block_tokens` is a multiple of the other.
    """
    if blocks:
        assert min(blocks) >= 0, "no such block"
        assert (max(blocks) + 1) * block_tokens <= len(pages) * page_tokens, "the pages end before the blocks"
    if page_tokens == block_tokens:
        return [pages[block] for block in blocks]
    part_tokens = min(page_tokens, block_tokens)
    parts_per_page = page_tokens // part_tokens
    return [
        pages[token // page_tokens] * parts_per_page + token % page_tokens // part_tokens
        for block in blocks
        for token in range(block * block_tokens, (block + 1) * block_tokens, part_tokens)
    ]
