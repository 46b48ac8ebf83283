"""How much of a memory one prompt may fill."""

from __future__ import annotations


def prompt_share(memory_blocks: int) -> int:
    """The most leading blocks of one prompt to store in a memory with nothing below it.

    The end of a prompt that fills all of it would evict the beginning, and nothing of the prompt would be found again.
    """
    return max(1, 3 * memory_blocks // 4)
