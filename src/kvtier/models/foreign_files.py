"""Files of other kinds in place of a checkpoint's: GGUF, and pointers of Git LFS. No torch."""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

_LFS_BEGINNING = b"version https://git-lfs.github.com/spec/v1"
_GGUF_END = ".gguf"


def is_gguf_name(name: str) -> bool:
    return name.lower().endswith(_GGUF_END)


def gguf_error(what: str | Path) -> ConfigError:
    """The error for a GGUF file, or a folder of them."""
    return ConfigError(
        f"{printable(str(what))} is GGUF, which is not read here: give the folder, or the name on the hub, of the same "
        "model in safetensors"
    )


def refuse_gguf_folder(folder: Path) -> None:
    """Raises `ConfigError` for a folder whose weights are only GGUF."""
    if any(is_gguf_name(path.name) for path in folder.iterdir()) and not any(folder.glob("*.safetensors")):
        raise gguf_error(folder)


def refuse_lfs_pointer(path: Path) -> None:
    """Raises `ConfigError` for a file that Git has not fetched yet. A missing file is accepted."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_BEGINNING)) == _LFS_BEGINNING
    except OSError:
        return
    if is_pointer:
        raise ConfigError(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull in {path.parent}")
