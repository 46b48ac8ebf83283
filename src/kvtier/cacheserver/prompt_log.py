"""A log of requested prompts, as hashes, kept in memory only while a recorder fetches it. Thread-safe."""

from __future__ import annotations

import base64
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.blocks.hashing import HASH_BYTES

KEY_BYTES = 8
"""Bytes kept of each block's hash: its beginning."""
_WORDS = HASH_BYTES // KEY_BYTES
_MAX_BYTES = 16 << 20
_MAX_PAGE_BYTES = 4 << 20
_ENTRY_BYTES = 256
_UNREAD_S = 60.0
"""Logging stops when no recorder has fetched for this long."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    asked_at: float
    namespace: str
    block_tokens: int
    keys: bytes

    @property
    def nbytes(self) -> int:
        return len(self.keys) + _ENTRY_BYTES


class PromptLog:
    """The newest prompts since the first fetch, numbered from 1, in at most `max_bytes`."""

    def __init__(self, max_bytes: int = _MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._prompts: deque[_Prompt] = deque()
        self._nbytes = 0
        self._first = 1
        self._ends_at = 0.0
        self.is_wanted = False

    def note(self, namespace: bytes, block_tokens: int, hashes: bytes) -> None:
        """Log a prompt if a recorder is fetching; otherwise this costs nothing."""
        if not self.is_wanted:
            return
        prompt = _Prompt(self._clock(), namespace.hex(), block_tokens, array("Q", hashes)[::_WORDS].tobytes())
        with self._lock:
            if prompt.asked_at > self._ends_at:
                self._forget()
                return
            self._prompts.append(prompt)
            self._nbytes += prompt.nbytes
            while self._nbytes > self._max_bytes:
                self._drop_first()

    def read(self, first: int) -> dict[str, object]:
        """The prompts from number `first` on, as many as fit into a page, and the number of the first one returned.

        Prompts are logged from now on, until no read has come for a minute.
        """
        with self._lock:
            now = self._clock()
            if now > self._ends_at:
                self._forget()
            self._ends_at = now + _UNREAD_S
            self.is_wanted = True
            begin = min(max(first, self._first), self._first + len(self._prompts))
            page: list[list[object]] = []
            nbytes = 0
            for position in range(begin - self._first, len(self._prompts)):
                prompt = self._prompts[position]
                nbytes += prompt.nbytes
                if page and nbytes > _MAX_PAGE_BYTES:
                    break
                keys = base64.b64encode(prompt.keys).decode()
                page.append([prompt.asked_at, prompt.namespace, prompt.block_tokens, keys])
            for _ in range(begin - self._first):  # fetched by earlier reads
                self._drop_first()
            return {"first": begin, "prompts": page}

    def _forget(self) -> None:
        self._first += len(self._prompts)
        self._prompts.clear()
        self._nbytes = 0
        self.is_wanted = False

    def _drop_first(self) -> None:
        self._nbytes -= self._prompts.popleft().nbytes
        self._first += 1
