"""How to talk to cache servers: settings that cannot work are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.client.client import ClientOptions
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    "changes",
    [
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"max_connections": 0},
        {"transfer_connections": 0},
        {"max_connections": 2, "transfer_connections": 3},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ClientOptions(**changes)  # type: ignore[arg-type]


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")

    with pytest.raises(ConfigError, match="cannot use the certificates"):
        ClientOptions(ca_file=tmp_path / "ca.pem").tls()


def test_without_certificates_there_is_no_tls() -> None:
    assert ClientOptions().tls() is None
