"""How many blocks are in flight on a connection to a node: a bound for the host, divided among connections in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

_IN_FLIGHT_BYTES = 64 << 20
_MAX_IN_FLIGHT = 16


def paced(count: int, block_bytes: int, num_busy: Callable[[], int]) -> Iterator[int]:
    """For each of `count` replies, how many more commands to send before it is read.

    As many are in flight as the connections that are `num_busy` now may share, and at most 16: more are sent when half
    of them are done.
    """
    num_sent = 0
    for num_read in range(count):
        most = max(1, min(_MAX_IN_FLIGHT, _IN_FLIGHT_BYTES // (block_bytes * max(1, num_busy()))))
        num_more = 0
        if num_sent - num_read <= most // 2:
            num_more = min(count, num_read + most) - num_sent
            num_sent += num_more
        yield num_more
