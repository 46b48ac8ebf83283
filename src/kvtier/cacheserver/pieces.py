"""Carries out requests about many blocks a few blocks at a time, so that other requests are served in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from kvtier.blocks.hashing import HASH_BYTES, BlockHash, split_hashes

FEW_HASHES = 1024
PIECE_HASHES = 256
_PAUSE_S = 0.0003

_Answer = TypeVar("_Answer")


def in_pieces(
    turn: AbstractContextManager[Any],
    act: Callable[[list[BlockHash]], _Answer],
    joined: bytes,
    *,
    few: int = FEW_HASHES,
    step: int = PIECE_HASHES,
) -> list[_Answer]:
    """Call `act` on the hashes and return its answers in order: one call for up to `few`, else one per `step` hashes.

    Each piece holds `turn`, with a pause. If `act` raises, the pieces before it stay done.
    """
    if len(joined) <= few * HASH_BYTES:
        return [act(split_hashes(joined))]
    answers = []
    for first in range(0, len(joined), step * HASH_BYTES):
        with turn:
            answers.append(act(split_hashes(joined[first : first + step * HASH_BYTES])))
            time.sleep(_PAUSE_S)  # while `turn` is held, so that no other large request starts a piece in the pause
    return answers
