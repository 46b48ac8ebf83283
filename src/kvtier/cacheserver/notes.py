"""Engines' notes on their latest requests: texts by request id, within bounds. Thread-safe; kept in memory only."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict

_MAX_NOTES = 4096
_MAX_CHARS = 8 << 20


class Notes:
    """The newest notes, at most `max_notes` and `max_chars`. A second note under the same id replaces the first."""

    def __init__(self, max_notes: int = _MAX_NOTES, max_chars: int = _MAX_CHARS) -> None:
        self._max_notes = max_notes
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_chars(self) -> int:
        return self._num_chars

    def put(self, request_id: str, text: str) -> None:
        with self._lock:
            self._num_chars += len(text) - len(self._texts.pop(request_id, ""))
            self._texts[request_id] = text
            while len(self._texts) > self._max_notes or self._num_chars > self._max_chars:
                self._num_chars -= len(self._texts.popitem(last=False)[1])

    def newest(self, count: int) -> list[tuple[str, str]]:
        """Ids and texts, newest first."""
        with self._lock:
            return list(itertools.islice(reversed(self._texts.items()), count))

    def get(self, request_id: str) -> str:
        """The note's text; empty if there is none or it was pushed out."""
        with self._lock:
            return self._texts.get(request_id, "")
