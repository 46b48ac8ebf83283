"""A transfer over several connections of which one fails: the caller's buffers are its own again when the call returns,
and nobody finds other bytes under a hash than were set."""

from __future__ import annotations

import logging
import threading

import pytest

import kvtier
from kvtier.testing.servers import cache_server
from tests.support.actors import (
    BLOCK_BYTES,
    LAYOUT,
    NAMESPACE,
    chain,
    empty_buffers,
    open_client,
    payloads,
    stays,
)
from tests.support.lying_proxy import LyingProxy
from tests.support.waiting import CALL_S


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="kvtier")


def test_buffers_are_free_when_a_set_returns_although_one_of_its_connections_failed() -> None:
    hashes = chain(1, 3000)
    right = payloads(hashes)
    buffers = [bytearray(block) for block in right]
    with cache_server(tcp=True) as server, LyingProxy(server.tcp) as proxy:
        with kvtier.connect(
            proxy.address,
            token=server.token,
            layout=LAYOUT,
            namespace=NAMESPACE,
            timeout_s=CALL_S,
            transfer_connections=2,
        ) as client:
            proxy.bytes_per_s = 20e6
            timer = threading.Timer(0.2, proxy.cut_busiest)
            timer.start()
            client.set(hashes, buffers)
            for buffer in buffers:  # they are the caller's again
                buffer[:] = b"\xff" * BLOCK_BYTES
            timer.join()
            assert stays(lambda: True, 2.0)
        with open_client(server.unix) as other:
            there = [number for number, is_there in enumerate(other.contains(hashes)) if is_there]
            into = empty_buffers(1)
            wrong = [
                number
                for number in there
                if other.get(hashes[number : number + 1], into) and bytes(into[0]) != right[number]
            ]
            assert wrong == [], f"{len(wrong)} of {len(there)} blocks hold other bytes than were set under their hash"
