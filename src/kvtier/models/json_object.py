"""Typed reads from a JSON object, with one sentence for each error.

Covers the type of single fields; combinations of fields are up to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.models.foreign_files import refuse_lfs_pointer
from kvtier.observe.printable import printable

_MAX_FILE_BYTES = 64 << 20
_MAX_COUNT = (1 << 31) - 1
_LARGEST = 1e30
_MAX_TOKEN_IDS = 1024


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the file at `path`. Raises `ConfigError` if it cannot be read or is not an object."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than 64MiB, which such a file never is")
        value = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        refuse_lfs_pointer(path)
        raise ConfigError(f"{path} is not valid JSON: {printable(str(error))}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {_kind_of(value)}")
    return value


class JsonObject:
    """One JSON object and where it came from. A field that is absent or null takes its default, if it has one."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def count(self, name: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
        """A positive whole number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(name, "a positive whole number", value)
        if value > most:
            raise self.wrong(name, f"a whole number up to {most}", value)
        return value

    def index(self, name: str, default: int) -> int:
        """A whole number from 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
            raise self.wrong(name, "a whole number from 0", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
            raise self.wrong(name, "a positive number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a text", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name, None)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of texts", value)
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list | tuple) else [value]
        if len(ids) > _MAX_TOKEN_IDS:
            raise ConfigError(f"{self.where}: {name} must be at most {_MAX_TOKEN_IDS} token ids, not {len(ids)}")
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _MAX_COUNT for item in ids):
            raise self.wrong(name, "a token id or a list of token ids", value)
        return tuple(ids)

    def inner(self, name: str) -> JsonObject:
        """The object in the field `name`, empty if absent."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "a JSON object", value)
        return JsonObject(value, f"{self.where}: {name}")

    def wrong(self, name: str, expected: str, value: object) -> ConfigError:
        return ConfigError(f"{self.where}: {name} must be {expected}, not {printable(repr(value))}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default


def _kind_of(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number or a truth value")
