"""The hashes of token sequences, remembered: appending token by token hashes only the new tokens."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError

_MAX_SEQUENCES = 16


class TokenChain:
    """One hash per token, each naming the token and everything before it. Thread-safe."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        self._recent: list[tuple[bytes, list[BlockHash]]] = []  # the most recently used first

    def hashes(self, *parts: Sequence[int]) -> list[BlockHash]:
        """The hashes of the tokens of `parts`, in order. Raises `ConfigError` for invalid token ids."""
        ids = array("I")
        for part in parts:
            try:
                # From bytes, an array would make machine words.
                ids.extend(array("I", list(part) if isinstance(part, bytes | bytearray) else part))
            except (OverflowError, TypeError) as error:
                raise ConfigError(f"token ids must be whole numbers from 0 to 2**32-1: {error}") from error
        data = ids.tobytes()
        known = self._known(data)
        if len(known) < len(ids):
            parent = known[-1] if known else None
            known = known + block_hashes(self._namespace, ids[len(known) :], 1, parent=parent)
        self._remember(data, known)
        return known[: len(ids)]

    def _known(self, data: bytes) -> list[BlockHash]:
        """The hashes of the longest remembered sequence that `data` begins with, or that begins with `data`."""
        with self._lock:
            found: list[BlockHash] = []
            for text, hashes in self._recent:
                if text.startswith(data):
                    return hashes
                if len(hashes) > len(found) and data.startswith(text):
                    found = hashes
            return found

    def _remember(self, data: bytes, hashes: list[BlockHash]) -> None:
        """Replaces the sequences that are its prefixes."""
        with self._lock:
            if any(len(text) > len(data) and text.startswith(data) for text, _ in self._recent):
                return
            others = [each for each in self._recent if not data.startswith(each[0])]
            self._recent = [(data, hashes), *others][:_MAX_SEQUENCES]
