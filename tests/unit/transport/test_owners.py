"""Whose sockets and folders are used: this user's, and nobody else's."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import kvtier
from kvtier.client import server_connection
from kvtier.errors import ConfigError, TierRefused
from kvtier.testing.servers import cache_server
from kvtier.transport.listening import is_own_folder, make_private_folder, peer_user


def test_a_peer_is_known_by_its_user() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_user(one) == peer_user(other) == os.geteuid()


def test_another_users_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_server() as server:
        with kvtier.connect(server.unix) as client:
            client.ping()
        monkeypatch.setattr(server_connection, "peer_user", lambda sock: os.geteuid() + 1)
        with pytest.raises(TierRefused, match="is served by another user"):
            kvtier.connect(server.unix)
        monkeypatch.setattr(server_connection, "peer_user", lambda sock: 0)  # root's is as good as one's own
        with kvtier.connect(server.unix) as client:
            client.ping()


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "new")
    make_private_folder(tmp_path / "new")

    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert is_own_folder(tmp_path / "new")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(ConfigError, match="is not a folder that only this user can open"):
        make_private_folder(tmp_path / "open")


def test_neither_a_link_nor_a_file_is_such_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder that only this user can open"):
        make_private_folder(tmp_path / "link")
    with pytest.raises(ConfigError, match="cannot create"):
        make_private_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to somebody else, as only root can")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(ConfigError, match="is not a folder that only this user can open"):
        make_private_folder(tmp_path / "theirs")
    assert not is_own_folder(tmp_path / "theirs")
