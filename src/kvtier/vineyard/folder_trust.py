"""Whether a folder is this user's: no other user made it, can write into it, or can replace it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtier.errors import ConfigError

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT_UID = 0


def check_folder(folder: Path, own_uid: int) -> None:
    """Raises `ConfigError` if users other than this one and root control what is in `folder` or above it."""
    own = (folder.resolve(), folder.parent.resolve())
    # Links too: the owner of a link decides where it leads.
    for path in {*own, *folder.parents, *folder.resolve().parents}:
        status = _status(path)
        if status.st_uid not in ((own_uid,) if path in own else (own_uid, os.geteuid(), _ROOT_UID)):
            raise _untrusted(path, "belongs to another user")
        # In a sticky folder such as /tmp, others can add files, which are not hits, but not touch ours.
        is_open = status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
        if is_open and not stat.S_ISLNK(status.st_mode):
            raise _untrusted(path, "can be written to by other users")


def _status(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError as error:
        raise ConfigError(f"the chunk folder {path} cannot be used: {error.strerror}") from error


def _untrusted(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} {why}, who could give us wrong KV: use a folder of your own, "
        "or is_shared=True if all who can write there are trusted"
    )
