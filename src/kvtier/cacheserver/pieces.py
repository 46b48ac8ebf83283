"""Requests about many blocks, carried out a few blocks at a time, so that others are served in between."""

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
    """What `act` says of the hashes, in order: once of a `few`, else of each `step` of them, with a pause.

    Each piece takes its turn by itself. If `act` fails, what it did before stays done.
    """
    if len(joined) <= few * HASH_BYTES:
        return [act(split_hashes(joined))]
    answers = []
    for first in range(0, len(joined), step * HASH_BYTES):
        with turn:
            answers.append(act(split_hashes(joined[first : first + step * HASH_BYTES])))
            time.sleep(_PAUSE_S)  # within the turn: as long as a piece takes, none is asked for
    return answers
