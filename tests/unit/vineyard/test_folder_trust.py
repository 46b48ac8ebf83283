"""A chunk folder that somebody else made, or can write into, gives no hits unless it is declared shared."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.vineyard import FileCacheConfig
from tests.support.vineyard_files import CHUNK, chunk_paths, found, open_files, store

_SOMEBODY = 12345
_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
_TOKENS = list(range(3 * CHUNK))


@_needs_root
@pytest.mark.parametrize("below", ["", "between/folders"])
def test_a_folder_that_another_user_made_is_refused(tmp_path: Path, below: str) -> None:
    made = tmp_path / "made"
    made.mkdir()
    os.chown(made, _SOMEBODY, -1)
    with pytest.raises(ConfigError, match=r"made belongs to another user, who could give us wrong KV"):
        open_files(made / below)
    open_files(made / below, is_shared=True).close()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o770)
    with pytest.raises(ConfigError, match=r"root can be written to by other users"):
        open_files(root)
    open_files(root, is_shared=True).close()
    root.chmod(0o755)
    open_files(root).close()


def test_a_folder_below_one_that_others_may_write_to_is_refused_but_not_below_one_like_tmp(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(ConfigError, match=r"above can be written to by other users"):
        open_files(above / "root")
    above.chmod(0o1777)
    open_files(above / "root").close()


@_needs_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    open_files(link).close()
    os.chown(link, _SOMEBODY, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match="link belongs to another user"):
        open_files(link)


@_needs_root
@pytest.mark.parametrize("spoil", ["owner", "mode"])
def test_files_of_another_user_are_misses_and_are_stored_anew(tmp_path: Path, spoil: str) -> None:
    with contextlib.closing(open_files(tmp_path)) as cache:
        assert store(cache, _TOKENS) == 3 * CHUNK
        path = chunk_paths(tmp_path)[1]
        if spoil == "owner":
            os.chown(path, _SOMEBODY, -1)
        else:
            path.chmod(0o666)
        assert found(cache, _TOKENS) == CHUNK
        assert cache.stats()["other_owner_files"] == 1
        with contextlib.closing(open_files(tmp_path, is_shared=True)) as shared:
            assert found(shared, _TOKENS) == 3 * CHUNK
        assert store(cache, _TOKENS) == 3 * CHUNK
        assert found(cache, _TOKENS) == 3 * CHUNK
    status = path.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o600)


def test_is_shared_is_a_truth_value() -> None:
    with pytest.raises(ConfigError, match="is_shared must be True or False"):
        FileCacheConfig(is_shared=1)  # type: ignore[arg-type]
