"""Records the requests to a running cache server as a trace: hashes only, under a key that is not kept."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec

from kvtier.errors import TierUnavailable
from kvtier.planning.trace_file import TraceFile
from kvtier.simulate.trace import TracedRequest

_POLL_S = 1.0
_KEY_BYTES = 8
_HASH_BITS = (1 << 63) - 1
_MAX_PROMPTS = 1 << 20
_MAX_NAMESPACES = 1 << 10
_Number = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class PromptSource(Protocol):
    """The recorder's view of a server."""

    def asked_prompts(self, first: int) -> dict[str, object]: ...


class _Prompt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    asked_at: float
    namespace: Annotated[str, msgspec.Meta(max_length=64)]
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    keys: str


class _Page(msgspec.Struct, frozen=True):
    first: _Number
    prompts: Annotated[list[_Prompt], msgspec.Meta(max_length=_MAX_PROMPTS)]


@dataclass
class Recorded:
    """The state of a recording. `num_lost` prompts came faster than they could be fetched."""

    namespace: str = ""
    num_lost: int = 0
    others: Counter[str] = field(default_factory=Counter)
    """The number of prompts in each namespace that is not recorded."""


class Recorder:
    """Writes the prompts of one namespace: the first one seen whose digest begins with `namespace`.

    Blocks are numbered by a keyed hash. The key is random and never stored, so a trace cannot reveal whether a known
    text was requested.
    """

    def __init__(self, source: PromptSource, namespace: str = "") -> None:
        """Make the server log prompts from now on; prompts logged earlier for other recorders are skipped.

        Raises `TierError` for a server that refuses or cannot log prompts.
        """
        self._source = source
        self._wanted = namespace.lower()
        self._key = secrets.token_bytes(32)
        self._next = 1
        self._began_at: float | None = None
        self.recorded = Recorded()
        while self._page().prompts:
            pass
        self.recorded.num_lost = 0

    def run(self, trace: TraceFile, stop: threading.Event, tell: Callable[[int], None]) -> None:
        """Fetch once a second until `stop` is set or the file is full; call `tell` with its number of requests."""
        while not stop.wait(_POLL_S) and not trace.is_full:
            self._fetch(trace)
            tell(trace.num_requests)
        self._fetch(trace)

    def _fetch(self, trace: TraceFile) -> None:
        """Fetch all logged prompts, page by page."""
        while not trace.is_full and (page := self._page()).prompts:
            for prompt in page.prompts:
                self._add(trace, prompt)

    def _page(self) -> _Page:
        try:
            page = msgspec.convert(self._source.asked_prompts(self._next), _Page)
        except msgspec.ValidationError as error:
            raise TierUnavailable(f"the server's log of prompts is not understood: {error}") from error
        if page.first < self._next:
            raise TierUnavailable("the server's log of prompts is not understood: it repeats prompts")
        self.recorded.num_lost += page.first - self._next
        self._next = page.first + len(page.prompts)
        return page

    def _add(self, trace: TraceFile, prompt: _Prompt) -> None:
        recorded = self.recorded
        if not recorded.namespace and prompt.namespace.startswith(self._wanted):
            recorded.namespace = prompt.namespace
        if prompt.namespace != recorded.namespace:
            if len(recorded.others) < _MAX_NAMESPACES:
                recorded.others[prompt.namespace] += 1
            return
        if self._began_at is None:
            self._began_at = prompt.asked_at
        hashes = self._numbers(prompt.keys)
        arrived_s = max(0.0, prompt.asked_at - self._began_at)
        trace.add(TracedRequest(arrived_s, len(hashes) * prompt.block_tokens, 0, hashes))

    def _numbers(self, encoded: str) -> tuple[int, ...]:
        try:
            keys = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise TierUnavailable("the server's log of prompts is not understood: a key is not base64") from error
        return tuple(
            int.from_bytes(
                hashlib.blake2b(keys[first : first + _KEY_BYTES], digest_size=8, key=self._key).digest(), "little"
            )
            & _HASH_BITS
            for first in range(0, len(keys), _KEY_BYTES)
        )
