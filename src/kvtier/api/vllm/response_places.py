"""Which engine of vLLM has a stored response: vLLM keeps them in each server's memory. Bounded, by tenant.

A tenant finds only the responses of its own requests.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

from kvtier.api.limits import MAX_ID_CHARACTERS, MAX_PLACED_RESPONSES

_LOOKED_AT_BYTES = 8 << 10
_ID = rb'\s*\{\s*"id"\s*:\s*"([\w.:-]{1,%d})"' % MAX_ID_CHARACTERS
_IN_DOCUMENT = re.compile(_ID)
_IN_FIRST_EVENT = re.compile(
    rb'event: response\.\w+\r?\ndata:\s*\{(?:\s*"(?:type|sequence_number)"\s*:[^,{}]{1,64},){0,2}\s*"response"\s*:'
    + _ID
)
"""The id is the first field of a response, so nothing that a client has sent can stand for it."""


@dataclass(frozen=True, slots=True)
class ResponsePlace:
    """`model` is the main name of the model, `engine` one of its engines."""

    model: str
    engine: str


class ResponsePlaces:
    """Places by tenant and response; the least recently used are forgotten. Tenants have equal shares of the bound."""

    def __init__(self, num_tenants: int = 1, most: int = MAX_PLACED_RESPONSES) -> None:
        self._most = max(1, most // max(1, num_tenants))
        self._of_tenants: dict[str, OrderedDict[str, ResponsePlace]] = {}

    def note(self, tenant: str, response_id: str, place: ResponsePlace) -> None:
        places = self._of_tenants.setdefault(tenant, OrderedDict())
        places[response_id] = place
        places.move_to_end(response_id)
        if len(places) > self._most:
            places.popitem(last=False)

    def find(self, tenant: str, response_id: str) -> ResponsePlace | None:
        places = self._of_tenants.get(tenant)
        if places is None or response_id not in places:
            return None
        places.move_to_end(response_id)
        return places[response_id]


class ResponseIdReader:
    """Finds the id of a response in the first bytes of an answer of `/v1/responses`."""

    def __init__(self, *, is_event_stream: bool) -> None:
        self._form = _IN_FIRST_EVENT if is_event_stream else _IN_DOCUMENT
        self._seen = b""
        self._is_over = False

    def feed(self, piece: bytes) -> str | None:
        """The id, once, when it has arrived."""
        if self._is_over:
            return None
        self._seen += piece[: _LOOKED_AT_BYTES - len(self._seen)]
        found = self._form.match(self._seen)
        self._is_over = found is not None or len(self._seen) >= _LOOKED_AT_BYTES
        return None if found is None else found[1].decode("ascii", errors="replace")
