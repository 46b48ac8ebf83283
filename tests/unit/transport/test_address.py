"""Addresses as people write them."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError
from kvtier.transport.address import Address, TcpAddress, UnixAddress, parse_address, parse_host_port


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/kvtier.sock", UnixAddress("/run/kvtier.sock")),
        ("unix:///run/kvtier.sock", UnixAddress("/run/kvtier.sock")),
        ("unix:relative.sock", UnixAddress("relative.sock")),
        ("tcp://localhost:7070", TcpAddress("localhost", 7070)),
        ("tcp://10.0.0.1:0", TcpAddress("10.0.0.1", 0)),
        ("tcp://[::1]:65535", TcpAddress("::1", 65535)),
    ],
)
def test_both_forms_are_read(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("address", [UnixAddress("/a b/c"), TcpAddress("host", 1), TcpAddress("fe80::1", 2)], ids=str)
def test_an_address_is_read_back_as_it_is_written(address: Address) -> None:
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "/run/kvtier.sock", "http://host:80", "tcp:host:80", "UNIX:/a", "host:80"])
def test_any_other_form_is_refused_with_the_two_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unix:/path/to/socket or tcp://host:port"):
        parse_address(text)


@pytest.mark.parametrize("text", ["unix:", "unix://"])
def test_a_socket_without_a_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no socket"):
        parse_address(text)


def test_a_path_longer_than_the_system_takes_is_refused() -> None:
    assert parse_address("unix:" + "é" * 53 + "x") == UnixAddress("é" * 53 + "x")
    with pytest.raises(ConfigError, match="107 bytes"):
        parse_address("unix:" + "é" * 54)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "[]:80", "host:65536", "host:-1", "host:http", "host:80 ", "[::1]"]
)
def test_what_is_not_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        parse_host_port(text)


def test_a_digit_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        parse_host_port("host:8²")
