"""Keeps responses that clients refer to later: in memory, bounded, separate for each tenant.

A response only stores the messages of its own turn, and refers to the response that it continues. One event loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.api.limits import MAX_STORED_BYTES, MAX_STORED_RESPONSES, STORED_S

_OVERHEAD_BYTES = 1024
"""Estimated size of the Python objects around a response's bytes."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """`document` is the response that the client got, `items` its input, both JSON. `messages` are those of its turn,
    encoded for an engine: without instructions, with the answer at the end. `call_names` has the names of called tools
    by call id.
    """

    response_id: str
    document: bytes
    items: Sequence[bytes]
    messages: Sequence[bytes]
    call_names: Mapping[str, str] = field(default_factory=dict)
    previous: StoredResponse | None = None
    used_at: float = 0.0
    num_followers: int = 0
    is_deleted: bool = False

    @property
    def num_bytes(self) -> int:
        own = len(self.document) + sum(map(len, self.items)) + sum(map(len, self.messages))
        return own + _OVERHEAD_BYTES

    def chain(self) -> Iterator[StoredResponse]:
        """This response and those that it continues, newest first."""
        response: StoredResponse | None = self
        while response is not None:
            yield response
            response = response.previous

    def history(self) -> list[bytes]:
        """The messages of the conversation, up to and including this response's answer."""
        turns = [response.messages for response in self.chain()]
        return [message for messages in reversed(turns) for message in messages]

    def name_of_call(self, call_id: str) -> str:
        """The name of the tool of this call; empty if the conversation has no such call."""
        return next((one.call_names[call_id] for one in self.chain() if call_id in one.call_names), "")


class TenantResponses:
    """One tenant's responses, least recently used first. A response is dropped after all those that continue it."""

    def __init__(self, max_responses: int, max_bytes: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def kept(self) -> list[StoredResponse]:
        """All responses, including deleted ones that are still part of a conversation."""
        return list(self._responses.values())

    def add(self, response: StoredResponse) -> None:
        """Add a response and drop the least recently used ones over a limit. A response over the limit is not kept."""
        if response.num_bytes > self._max_bytes:
            return
        previous = response.previous
        if previous is not None and self._responses.get(previous.response_id) is not previous:
            return  # it was dropped during generation: a conversation that continues it would be incomplete
        if previous is not None:
            previous.num_followers += 1
        self._responses[response.response_id] = response
        self.num_bytes += response.num_bytes
        self._use(response)
        while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._responses.values())))

    def find(self, response_id: str) -> StoredResponse | None:
        self._expire()
        found = self._responses.get(response_id)
        if found is None or found.is_deleted:
            return None
        self._use(found)
        return found

    def delete(self, response_id: str) -> bool:
        """Delete a response; those that continue it still work. False if it is unknown."""
        found = self.find(response_id)
        if found is None:
            return False
        found.is_deleted = True
        response: StoredResponse | None = found
        while response is not None and response.is_deleted and not response.num_followers:
            self._remove(response)
            response = response.previous
        return True

    def _use(self, response: StoredResponse) -> None:
        now = self._clock()
        for one in response.chain():
            one.used_at = now
            self._responses.move_to_end(one.response_id)

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age_s
        while self._responses and (first := next(iter(self._responses.values()))).used_at < oldest:
            self._remove(first)

    def _remove(self, response: StoredResponse) -> None:
        del self._responses[response.response_id]
        self.num_bytes -= response.num_bytes
        if response.previous is not None:
            response.previous.num_followers -= 1


class ResponseStore:
    """The responses of all tenants; each has an equal share of the limits."""

    def __init__(
        self,
        num_tenants: int = 1,
        *,
        max_responses: int = MAX_STORED_RESPONSES,
        max_bytes: int = MAX_STORED_BYTES,
        max_age_s: float = STORED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        share = max(1, num_tenants)
        self._limits = (max(1, max_responses // share), max_bytes // share, max_age_s)
        self._clock = clock
        self._tenants: dict[str, TenantResponses] = {}

    def of(self, tenant_name: str) -> TenantResponses:
        """The responses of a tenant. Tenants are the keys of the deployment file, so their number is bounded."""
        found = self._tenants.get(tenant_name)
        if found is None:
            found = self._tenants[tenant_name] = TenantResponses(*self._limits, self._clock)
        return found
