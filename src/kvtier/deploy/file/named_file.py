"""Files that a deployment file names: secrets are read, others must exist."""

from __future__ import annotations

from pathlib import Path

from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.yaml_file import Location


def read_secret(origin: Origin, section: Location, name: str, path: Path | None) -> str | None:
    """The contents of the file in the field `name`, without surrounding white space; None without a file."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise origin.wrong(section, f"{name} {path} cannot be read: {error.strerror}", about=name) from error
    except ValueError as error:
        raise origin.wrong(section, f"{name} {path} is not text in UTF-8", about=name) from error


def require_file(origin: Origin, section: Location, name: str, path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise origin.wrong(section, f"{name} {path} does not exist", about=name)
