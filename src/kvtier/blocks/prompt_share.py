"""How much of a memory one prompt may fill."""

from __future__ import annotations


def prompt_share(memory: int) -> int:
    """The most blocks, or bytes, of one prompt to store in a memory with nothing below it: seven eighths.

    The end of a prompt that fills all of it would evict the beginning, and nothing of the prompt would be found again.
    """
    return max(1, 7 * memory // 8)
