"""Metrics are served whatever goes wrong with one peer."""

from __future__ import annotations

import errno
import selectors
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kvtier.cacheserver.metrics_server import MetricsServer
from kvtier.transport.address import TcpAddress
from tests.support.waiting import LIMIT_S


def test_a_peer_that_cannot_be_watched_is_closed_and_the_next_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    Gauge("level", "A level.", registry=registry).set(7)
    server = MetricsServer(TcpAddress("127.0.0.1", 0), registry)
    try:
        with monkeypatch.context() as patch:

            def register(*args: object) -> None:
                raise OSError(errno.ENOSPC, "no more can be watched")

            patch.setattr(selectors.DefaultSelector, "register", register)
            with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as sock:
                assert sock.recv(1) == b""
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LIMIT_S) as response:
            assert b"level 7.0" in response.read()
    finally:
        server.close()
