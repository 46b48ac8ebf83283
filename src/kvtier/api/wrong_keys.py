"""Logs wrong API keys by client address, and answers them more and more slowly. One event loop.

Valid keys are never slowed down, even from the same address. The table of addresses is bounded; the least recently
seen one is dropped first.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.api.http_error import HttpError
from kvtier.api.limits import (
    FIRST_WRONG_KEY_S,
    LONGEST_WRONG_KEY_S,
    MAX_WRONG_KEY_ADDRESSES,
    MAX_WRONG_KEYS_WAITING,
    MAX_WRONG_KEYS_WAITING_OF_ONE,
    WRONG_KEY_MEMORY_S,
)

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
_LINES_PER_MINUTE = 30


@dataclass(slots=True)
class _Address:
    count: int = 0
    num_waiting: int = 0
    last_at: float = 0.0
    logged_at: float = float("-inf")


class WrongKeys:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._num_waiting = 0
        self._minute = 0
        self._num_lines = 0

    @property
    def num_addresses(self) -> int:
        return len(self._addresses)

    async def slow_down(self, host: str, error: HttpError) -> HttpError:
        """Note a wrong key from `host`, and wait to slow down further guesses. Returns the error to send."""
        address = self._note(_network_of(host))
        if address.num_waiting >= MAX_WRONG_KEYS_WAITING_OF_ONE or self._num_waiting >= MAX_WRONG_KEYS_WAITING:
            headers = {"Retry-After": str(round(LONGEST_WRONG_KEY_S))}
            return HttpError(429, "too many wrong API keys from this address", "too_many_wrong_keys", None, headers)
        address.num_waiting += 1
        self._num_waiting += 1
        try:
            await asyncio.sleep(delay_s(address.count))
        finally:
            address.num_waiting -= 1
            self._num_waiting -= 1
        return error

    def _note(self, network: str) -> _Address:
        now = self._clock()
        address = self._addresses.get(network)
        if address is None or (now - address.last_at > WRONG_KEY_MEMORY_S and not address.num_waiting):
            address = self._addresses[network] = _Address()
        self._addresses.move_to_end(network)
        while len(self._addresses) > MAX_WRONG_KEY_ADDRESSES:
            self._addresses.popitem(last=False)
        address.count += 1
        address.last_at = now
        if now - address.logged_at >= _LOG_EVERY_S and self._may_log(now):
            address.logged_at = now
            logger.warning("wrong API key address=%s count=%d", network, address.count)
        return address

    def _may_log(self, now: float) -> bool:
        minute = int(now // 60)
        if minute != self._minute:
            self._minute, self._num_lines = minute, 0
        self._num_lines += 1
        return self._num_lines <= _LINES_PER_MINUTE


def delay_s(count: int) -> float:
    """The delay of the answer to the `count`-th wrong key."""
    return float(min(LONGEST_WRONG_KEY_S, FIRST_WRONG_KEY_S * 2 ** min(count - 1, 16)))


def _network_of(host: str) -> str:
    """The address, or its /64 for IPv6: a client that has one such address has the whole /64."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))
